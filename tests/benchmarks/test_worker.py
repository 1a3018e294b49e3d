import json

import pytest

from benchmarks import worker
from benchmarks.work import PHASES
from tests.benchmarks.examples import BY_HAND


@pytest.mark.parametrize("name", ["ours-shared-nf4", "stock-full"])
def test_every_phase_of_every_measured_update_is_timed(name, checkpoint, work):
    found = worker.measure(checkpoint, work, name, dtype="float32", updates=2)
    assert [set(update) for update in found["updates"]] == [set(PHASES)] * 2
    assert all(seconds > 0 for update in found["updates"] for seconds in update.values())
    assert found["memory_gb"]["resident"] > 0


def test_rollouts_are_timed_in_turn(checkpoint, work):
    found = worker.measure_rollout(checkpoint, work, "ours-shared-nf4", dtype="float32", rounds=2)
    assert {len(seconds) for seconds in found.values()} == {2} and "transformers' loop" in found
    assert min(map(min, found.values())) > 0


def test_a_step_that_is_given_no_file_prints_its_answer(tmp_path, monkeypatch, capsys):
    answer = {"updates": [{"rollout": 1.0}]}
    monkeypatch.setattr(worker, "measure", lambda *arguments, **named: answer)
    BY_HAND.write(tmp_path / "work.json")
    asked = ["time", "--model", "model", "--work", str(tmp_path / "work.json"), "--contender", "stock-full"]
    monkeypatch.setattr("sys.argv", ["worker", *asked])
    worker.main()
    assert json.loads(capsys.readouterr().out) == answer
