import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu, table
from benchmarks.errors import BenchmarkError
from benchmarks.planned import Planned
from benchmarks.work import PHASES
from tests.recorded import graphs_without_a_card
from tests.tiny_runs import REPOSITORY
from toolkit.costs import Costs, Phase
from toolkit.errors import ConfigError, ModelError, RewardError, SelfCheckError
from toolkit.models import base_checks
from toolkit.trainers import self_checks

ROW = {"value": "separate", "gradient_checkpointing": False, "generation": "eager", "lengths": "even"}


def row_of(**form):
    """A row of the small ones, with a shared value role."""
    given = gpu.settings(small=True)
    work = gpu.random_work(given.llama, given.size, given.prompt_length)
    roles = gpu.add_roles(gpu.SharedBase(gpu.random_llama(given.llama, given.device)), "shared")
    return gpu.measure(given, roles, work, value="shared", **form)


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(["tenacity", "matplotlib", "trl.experimental.ppo"]))  # None: as where there is none
from benchmarks import gpu
from toolkit.rewards import remote
assert not hasattr(remote, "httpx2")  # which the hub's library may have of its own
gpu.here = lambda: 24 * 10**9  # beside a card whose limits are not known
sys.argv = ["gpu", "--small", "--output", sys.argv[1]]
assert gpu.main() == 0
"""


def test_bench_gpu_runs_small_on_a_cpu_and_needs_nothing_that_a_machine_that_is_lent_may_lack(tmp_path):
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    shown = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True).stdout
    (path,) = tmp_path.glob("*_small.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    forms = [(False, "eager", "even"), (True, "eager", "even"), (False, "merged", "even")]
    forms += [(False, "eager", "uneven"), (False, "eager", "uneven, packed")]
    keys = ("gradient_checkpointing", "generation", "lengths")
    assert [(row["value"], *(row[key] for key in keys)) for row in found["rows"]] == [
        (value, *form) for value in ("separate", "shared") for form in forms
    ]
    assert ["planned_gb" in row for row in found["rows"]] == [
        True,
        True,
        True,
        False,
        False,
    ] * 2  # a plan is of even ones
    for row in found["rows"]:
        assert set(row["seconds"]) == set(row["peak_gb"]) == set(PHASES)
        assert row["over_floor"] > 0
    assert "random weights" in shown
    text = table.section("gpu", found)
    assert "different processors" not in text
    found["rows"][0]["processor"] = "another"
    assert "had different processors, one after the other: another, " in table.section("gpu", found)
    assert "| separate | off | merged | even |" in text and "| shared | off | eager | uneven, packed |" in text
    assert "random weights" in text


@pytest.mark.parametrize(("error", "said"), [
    (torch.cuda.OutOfMemoryError("out"), "update"),
    (RewardError("the reward raised"), "update"),
])  # fmt: skip
def test_a_row_that_does_not_fit_loses_no_other(error, said, monkeypatch):
    def runs_out(built, work, clock, updates):
        clock.phase = "update"
        raise error from torch.cuda.OutOfMemoryError("out") if isinstance(error, RewardError) else None

    monkeypatch.setattr(gpu, "run_ours", runs_out)
    row = row_of(gradient_checkpointing=False, generation="eager")
    assert row["out_of_memory"] == said
    monkeypatch.setattr(gpu, "run_ours", lambda *arguments: (_ for _ in ()).throw(RuntimeError("CUDA error: assert")))
    row = row_of(gradient_checkpointing=False, generation="eager")
    assert row["refused"] == "RuntimeError: CUDA error: assert" and row["broken"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("merged needs 16 GB", field="generation"), "generation: merged needs 16 GB"),
        (SelfCheckError("rollouts do not follow"), "rollouts do not follow"),
    ],
)
def test_a_row_without_room_to_merge_or_that_fails_a_check_loses_no_other(error, said, monkeypatch):
    def no_room(base):
        raise error

    monkeypatch.setattr(self_checks, "check_room_to_merge", no_room)
    row = row_of(gradient_checkpointing=False, generation="merged")
    assert row["refused"] == said and not row["broken"]
    assert table._gpu_cells(row | {"lengths": "even"})[4] == row["refused"]


def test_graphs_are_rows_of_a_card(monkeypatch):
    """Here by graphs that are played back without one; what a plan says of them is not what it says of eager ones."""
    monkeypatch.setattr(self_checks, "check_device_records", lambda device: None)
    with graphs_without_a_card() as graphs:
        rows = [row_of(**form) for form in gpu.BY_GRAPHS]
    assert [row["generation"] for row in rows] == ["graphs", "merged_graphs"]
    assert all(set(row["seconds"]) == set(PHASES) for row in rows)
    # An update of six tokens, the checks of the first one of four, and another update.
    assert [graph.played for graph in graphs] == [4, 2, 2, 2, 2, 4] * 2


def test_a_row_that_breaks_off_ends_its_process_and_loses_no_other(monkeypatch):
    """A card that has failed says nothing more that can be trusted: the next process goes on after that row."""
    given = gpu.settings(small=True)
    on_cpu, asked = given.device, []
    fails = [("separate", "merged"), ("shared", "graphs")]

    def measured(given, roles, work, *, value, **form):
        asked.append((value, form["generation"]))
        broken = {"refused": "cannot be made", "broken": True} if asked[-1] in fails else {"out_of_memory": ""}
        return {"value": value, **form, **broken}

    monkeypatch.setattr(gpu, "measure", measured)
    monkeypatch.setattr(gpu, "random_llama", lambda values, device, made=gpu.random_llama: made(values, on_cpu))
    monkeypatch.setattr(gpu.floor, "measure", lambda *given, **named: {})
    found, ends = None, []
    while found is None or "whole" not in found:
        of_card, before = replace(given, device=torch.device("cuda")), found
        found = gpu.run(of_card, lambda result: None, lambda result, before=before: before)
        ends.append(len(asked))
    plain = [(value, how) for value in ("separate", "shared") for how in ("eager", "eager", "merged", "eager", "eager")]
    by_graphs = [
        ("shared", "graphs"),
        ("shared", "merged_graphs"),
        ("separate", "graphs"),
        ("separate", "merged_graphs"),
    ]
    assert asked == plain + by_graphs and ends == [3, 11, 14] and len(found["rows"]) == 14


@pytest.mark.parametrize(
    ("fails", "rows", "said"),
    [
        (lambda: ModelError("the base computes otherwise"), 10, {"refused": "the base computes otherwise"}),
        (lambda: torch.cuda.OutOfMemoryError("out of memory"), 10, {"out_of_memory": "loading"}),
        (lambda: RuntimeError("CUDA error"), 1, {"refused": "RuntimeError: CUDA error", "broken": True}),
    ],
)
def test_a_base_that_cannot_be_made_is_told_of_in_its_rows(monkeypatch, fails, rows, said):
    """And where the card has not failed, the next one is measured."""
    saved, kept = [], gpu.add_roles

    def placed(roles, value):
        if value == "separate":
            raise fails()
        return kept(roles, value)

    monkeypatch.setattr(gpu, "measure", lambda given, roles, work, *, value, **form: {"value": value, **form})
    monkeypatch.setattr(gpu, "_line", str)
    monkeypatch.setattr(gpu, "add_roles", placed)
    monkeypatch.setattr(gpu.floor, "measure", lambda *given, **named: {})
    found = gpu.run(gpu.settings(small=True), lambda result: saved.append(len(result["rows"])))
    of_base = [row for row in found["rows"] if row["value"] == "separate"]
    assert saved == [*range(1, rows + 1)] and all(said.items() <= row.items() for row in of_base)
    assert len({gpu._key(row) for row in found["rows"]}) == rows and len(of_base) == min(rows, 5)
    assert ("whole" in found) == (rows > 1)


def test_a_machine_on_which_no_base_can_be_made_has_a_table_that_says_so(monkeypatch):
    def fails(*given):
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gpu, "random_llama", fails)
    monkeypatch.setattr(gpu.floor, "measure", lambda *given, **named: {})
    found = gpu.run(gpu.settings(small=True), lambda result: None)
    assert table.section("gpu", found).count("out of memory") == len(found["rows"]) == 10


def test_a_run_that_was_cut_short_goes_on_with_its_next_row(monkeypatch):
    given, made, saved, planned = gpu.settings(small=True), [], [], []
    figures = dict.fromkeys(PHASES, 1.0)

    def measured(given, roles, work, *, value, **form):
        made.append((value, form["generation"]))
        if len(made) == 8:
            raise KeyboardInterrupt
        return {"value": value, **form, "seconds": figures, "peak_gb": figures}

    def foreseen(*arguments, **row):
        planned.append(row)
        if len(planned) == 2:
            raise KeyboardInterrupt
        return {"planned_gb": figures}

    def run():
        save = lambda so_far: saved.append(json.loads(json.dumps(so_far)))  # noqa: E731
        return gpu.run(given, save, lambda result: saved[-1] if saved else None)

    monkeypatch.setattr(gpu, "measure", measured)
    monkeypatch.setattr(gpu, "_foreseen", foreseen)
    monkeypatch.setattr(gpu.floor, "measure", lambda *given, **named: {key: {"seconds": figures} for key in given[0]})
    for _ in range(2):  # in a row, and in a plan
        with pytest.raises(KeyboardInterrupt):
            run()
    found = run()
    ways = ["eager", "eager", "merged", "eager", "eager"]
    assert made[:7] + made[8:] == [(value, way) for value in ("separate", "shared") for way in ways]
    assert len(found["rows"]) == 10 and found["model"]["weights_gb"] > 0
    assert len(planned) == 7 and ["planned_gb" in row for row in found["rows"]] == [True, True, True, False, False] * 2
    assert gpu._begun(found, found) == gpu._begun(None, found) == gpu._begun(saved[3] | {"sources": ""}, found) == {}
    another = [{**found["machine"], name: "another"} for name in ("gpu", "processor")]
    rows = [gpu._begun(saved[3] | {"machine": of}, found).get("rows") for of in another]
    assert rows[0] is None and rows[1] == saved[3]["rows"] != []


def test_a_card_whose_limits_are_not_known_has_no_seconds_foreseen(monkeypatch):
    figures = dict.fromkeys(PHASES, 1.0)
    planned = {"planned_seconds": dict.fromkeys(PHASES, 2.0), "planned_gb": dict.fromkeys(PHASES, 3.0)}
    row = {**ROW, "seconds": figures}
    row |= {"peak_gb": figures, "samples_per_second": 1.0, "over_floor": 1.0}
    both, without = map(table._gpu_cells, (row | planned, row | {"planned_gb": planned["planned_gb"]}))
    assert both[4:10] == ["1.00 (2.00)"] * 3 + ["1.00 (3.00)"] * 3
    assert without[4:10] == ["1.00"] * 3 + ["1.00 (3.00)"] * 3
    monkeypatch.setattr(gpu, "here", lambda: 24 * 10**9)
    phases = {"update": [Phase("update", Costs(peak=500_000_000), 1)]}
    monkeypatch.setattr(gpu, "planned", lambda *arguments, **named: Planned(1_000_000_000, phases))
    given = replace(gpu.settings(small=True), device=torch.device("cuda"))
    monkeypatch.setattr(gpu, "_job", lambda *arguments, **named: (None, None))
    assert gpu._foreseen(given, None, value="shared", **gpu.FORMS[0]) == {"planned_gb": {"update": 1.5}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **named: True)
    assert gpu.settings(small=False, updates=1).device.type == "cuda"


def test_a_row_whose_micro_batch_was_halved_says_so():
    figures = dict.fromkeys(PHASES, 1.0)
    row = {**ROW, "lowered": {"update": 2}}
    row |= {"seconds": figures, "planned_seconds": figures, "peak_gb": figures, "planned_gb": figures}
    assert table._gpu_cells({**row, "samples_per_second": 1.0, "over_floor": 1.0})[2] == "eager, update by 2 rows"


def test_rows_that_cannot_be_packed_are_a_row_of_that(monkeypatch):
    given = gpu.settings(small=True)
    base = gpu.random_llama(given.llama, given.device)
    assert gpu._shared(base).can_pack
    monkeypatch.setattr(base_checks, "rows_can_be_packed", lambda *trial: False)
    roles = gpu.add_roles(gpu._shared(base), "shared")
    work = gpu.random_work(given.llama, given.size, given.prompt_length, uneven=True)
    row = gpu.measure(given, roles, work, value="shared", pack=True, **gpu.FORMS[0])
    assert row["refused"] == "rows that are packed say something else here"


def test_a_row_that_ran_out_of_memory_says_where():
    cells = table._gpu_cells({**ROW, "out_of_memory": "update"})
    assert cells[:5] == ["separate", "off", "eager", "even", "out of memory in update"]


def test_uneven_lengths_reach_from_an_eighth_to_the_longest_and_are_not_in_order():
    given = gpu.settings(small=True)
    work = gpu.random_work(given.llama, replace(given.size, rollouts=8, response_length=128), 256, uneven=True)
    assert sorted(work.lengths) == [16, 32, 48, 64, 80, 96, 112, 128] != work.lengths
    assert sorted(map(len, work.prompt_ids)) == [32, 64, 96, 128, 160, 192, 224, 256]
    assert [length // 16 for length in work.lengths] != [len(ids) // 32 for ids in work.prompt_ids]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_gpu_without_a_gpu_says_so():
    with pytest.raises(BenchmarkError, match="bench-gpu needs a CUDA device"):
        gpu.settings(small=False, updates=1)
