import json

import pytest

from benchmarks import processes, reward_parity
from benchmarks.errors import BenchmarkError
from benchmarks.reward_arms import Job
from tests.benchmarks.examples import scored_arm


def test_a_run_goes_on_where_it_was(job, tmp_path):
    output, asked = tmp_path / "results" / "x.json", []

    def step(arm, one):
        asked.append((arm, one.seed))
        if len(asked) == 3:
            raise BenchmarkError("stopped")
        return scored_arm(arm, one)

    arms = ("trl-bf16", "ours-nf4")
    with pytest.raises(BenchmarkError, match="stopped"):
        reward_parity.run(job, seeds=[0, 1], arms=arms, output=output, step=step)
    result = reward_parity.run(job, seeds=[0, 1], arms=arms, output=output, step=step)
    assert asked == [("trl-bf16", 0), ("ours-nf4", 0), ("trl-bf16", 1), ("trl-bf16", 1), ("ours-nf4", 1)]
    assert json.loads(output.read_text()) == result
    (found,) = result["comparisons"]
    assert found["seeds"] == [0, 1] and found["margin"] == reward_parity.MARGIN
    # The third pair of seed 0 is a tie for the one and right for the other.
    assert found["accuracy"]["difference"] == pytest.approx(0.5 / 6)
    assert "accuracy 0.667 against 0.583, difference +0.083" in reward_parity.verdict(found)
    text = reward_parity.table(result)
    assert "| trl-bf16 | 0 | 0.500 | 0.000 | 1 | 1.50 |" in text  # right, wrong and a tie
    assert "| ours-nf4 | 0 | 0.667 | 0.100 | 1 | 1.50 |" in text and "McNemar p 1.00, 1.00" in text
    with pytest.raises(
        BenchmarkError, match=r"x\.json differs from this run in settings\. Name another file with --output"
    ):
        reward_parity.run(Job(**{**vars(job), "pairs": 9}), seeds=[0], arms=arms, output=output, step=step)


def test_an_arm_in_a_process_of_its_own_that_fails_says_which(job, monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "false")
    with pytest.raises(BenchmarkError, match="the arm ours-nf4 of seed 0 failed: nothing was said"):
        reward_parity.arm_in_process("ours-nf4", job)
