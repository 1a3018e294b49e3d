import copy

import pytest

from benchmarks import processes
from benchmarks import run as driver
from benchmarks.compare import partner_of
from benchmarks.contenders import CONTENDERS
from benchmarks.errors import BenchmarkError, KilledError
from benchmarks.processes import python_of
from benchmarks.summary import FLOOR_BAR
from benchmarks.table import KINDS, section
from benchmarks.work import SIZES
from tests.benchmarks.examples import BY_HAND, FIGURES, one_round
from toolkit.models import Precision, on_another_machine, precision


def test_losses_first_and_then_all_contenders_in_turn_in_each_round(result):
    _, asked, shown = result
    names = list(driver.REWARDED)
    one_round = [*(("time", name) for name in names), ("floor", None)]
    assert asked == [("sample", None), *(("compare", name) for name in names), *one_round, *one_round]
    assert "base, round 2/2, stock-peft: rollout 6.2, score 6.2, update 12.5, total 25.0 s an update, 5.00 GB" in shown


def test_contenders_that_compute_something_else_are_not_timed(checkpoint, monkeypatch):
    def step(name, *, model, work, contender=None, **_):
        if name == "sample":
            BY_HAND.write(work)
            return {}
        assert name == "compare"
        return FIGURES | {"value_loss": 2.0 if contender == "stock-views" else 1.0}

    with pytest.raises(BenchmarkError, match="value_loss: 2 in stock-views, 1 in ours-separate$"):
        driver.run(checkpoint, "cpu", rounds=1, updates=1, save=pytest.fail, step=step)


def test_a_cpu_that_is_slow_in_the_kind_s_precision_is_told_at_once(monkeypatch):
    monkeypatch.setattr(precision, "slower_than_float32", lambda dtype: 79.0)
    told = "slice is of bfloat16 alone, and .* takes 79 times as long here as in float32"
    with on_another_machine(Precision("float32", "it is an old one")), pytest.raises(BenchmarkError, match=told):
        driver.run("/nowhere", "slice", rounds=1, updates=1, save=pytest.fail)


def test_growth_leaves_out_whom_memory_does_not_hold_and_goes_on_where_it_was_broken_off(checkpoint):
    sizes, saved, floors, stop_at = [], [], [], ("many", 2)

    def step(name, *, contender=None, size=None, work=None, **_):
        if name == "sample":
            sizes.append(size)
            floors.clear()
            BY_HAND.write(work)
            return {}
        if name == "floor":
            floors.append(sizes[-1])
            if (sizes[-1], len(floors)) == stop_at:
                raise KeyboardInterrupt
        if contender == "stock-full" and (name, sizes[-1]) in (("time", "longest"), ("compare", "longer")):
            raise KilledError("it was killed")
        one = one_round()
        return {"compare": FIGURES, "floor": one["floor"], "time": one["contenders"].get(contender)}[name]

    def run(before, rounds=2):
        named = {"save": lambda found: saved.append(copy.deepcopy(found)), "before": lambda result: before}
        return driver.run(checkpoint, "growth", rounds=rounds, updates=1, step=step, **named)

    with pytest.raises(KeyboardInterrupt):
        run(None)
    first, sizes[:], stop_at = saved[-1], [], None
    assert {name: len(size["rounds"]) for name, size in first["sizes"].items()} == {"few": 2, "base": 2, "many": 1}
    found = run(first)
    assert sizes == ["many", "longer", "longest"] and set(found["sizes"]) == set(driver.BENCHMARKS["growth"].sizes)
    assert {len(size["rounds"]) for size in found["sizes"].values()} == {2}
    assert found["sizes"]["base"] == first["sizes"]["base"]
    assert found["sizes"]["many"]["rounds"][:1] == first["sizes"]["many"]["rounds"]
    text = section("growth", found)
    (longest,) = (line for line in text.splitlines() if line.startswith("| longest"))
    assert longest.endswith("| out of memory |  |") and text.count("out of memory") == 2
    sizes.clear()
    run(found)  # one that is whole is taken anew, as is one of other versions
    assert len(sizes) == 5
    sizes.clear()
    rates = first["cpu"]["gigaoperations_per_second"]
    faster = {**first["cpu"], "gigaoperations_per_second": {dtype: 2 * rate for dtype, rate in rates.items()}}
    arguments = {**first["arguments"], "updates": 2}
    others = {"versions": {"torch": "0.1"}, "arguments": arguments, "cpu": faster, "sources": "of other code"}
    for key, other in others.items():
        run({**first, key: other})
    assert len(sizes) == 20
    sizes.clear()
    run(found, rounds=3)  # more rounds are added to those that there are
    assert sizes == list(driver.BENCHMARKS["growth"].sizes)
    assert {len(size["rounds"]) for size in saved[-1]["sizes"].values()} == {3} and floors == ["longest"]


def test_what_is_run_can_be_run():
    for kind, benchmark in driver.BENCHMARKS.items():
        assert kind in KINDS and kind in FLOOR_BAR
        assert set(benchmark.sizes) <= set(SIZES)
        # The figures of each are compared with its partner's.
        partners = set(map(partner_of, benchmark.contenders))
        assert partners <= set(benchmark.contenders) <= set(CONTENDERS)
        assert {CONTENDERS[name].kind for name in benchmark.contenders} >= {"ours", "stock"}


def test_agilerl_is_held_to_ours_without_a_reward_role_and_both_loops_with_one_run_beside(checkpoint):
    seen = []

    def step(name, *, contender=None, work=None, **_):
        if name == "sample":
            BY_HAND.write(work)
            return {}
        # Without a score it has other advantages than with one.
        figures = FIGURES | {"policy_gradient": 1.0 if contender and CONTENDERS[contender].rewarded else 2.0}
        seen.append((name, contender))
        one = one_round(agilerl=True)
        return {"compare": figures, "floor": one["floor"], "time": one["contenders"].get(contender)}[name]

    versions = {"agilerl": "2.58.0 (with torch 2.13.0)"}
    with on_another_machine(Precision("bfloat16")):
        found = driver.run(
            checkpoint, "agilerl", rounds=1, updates=1, save=lambda found: None, others=versions, step=step
        )
    summary = found["sizes"]["base"]["summary"]
    assert (summary["fastest_stock"], summary["fastest_agilerl"]) == ("stock-full", "agilerl")
    assert {bar["contender"] for bar in found["sizes"]["base"]["bars"]} == {"ours-separate", "ours-shared"}
    text = section("agilerl", found)
    assert "accelerate" in text and ", agilerl 2.58.0 (with torch 2.13.0). Model:" in text
    without, _, beside = text.partition("With one, in the same rounds; they are held to stock TRL, whole value")
    assert "Without a reward role; speed and memory are held to AgileRL, bf16:" in without
    assert (
        "| ours, separate value, no reward role, bf16 | 4.00 | 4.00 | 8.00 | 16.00 | 0.12 | 2 / 4 / 4 | 2.00 | "
        "2.50 | 0.50 |"
    ) in without
    assert "| AgileRL, NF4 | 20.00 |" in without and "ours, shared value, bf16" not in without
    assert "| ours, shared value, bf16 |" in beside and "| floor, shared value |" in beside and "AgileRL" not in beside


def test_agilerl_runs_by_its_own_python(tmp_path, monkeypatch):
    script = """#!/bin/sh
for word; do case "$before" in --output) echo "{\\"agilerl\\": \\"$*\\", \\"peft\\": \\"1.0\\"}" > "$word";; esac
before="$word"; done
"""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(script, encoding="utf-8")
    python.chmod(0o755)
    for named in (tmp_path, python):
        assert python_of(str(named)) == python
    given = {"model": "model", "work": tmp_path / "work.json", "dtype": "bfloat16", "agilerl": python}
    asked = driver.step_in_process("time", contender="agilerl-nf4", updates=2, **given)["agilerl"]
    assert asked.startswith("-m benchmarks.agile time --model model --work ")
    assert " --updates 2 " in asked and " --base nf4 --output " in asked and "contender" not in asked
    asked = driver.step_in_process("compare", contender="agilerl", **given)["agilerl"]
    assert " --base plain " in asked
    monkeypatch.setattr(processes.sys, "executable", "false")
    with pytest.raises(BenchmarkError, match='the step "compare" of ours-separate failed'):
        driver.step_in_process("compare", contender="ours-separate", **given)
    assert driver.agilerl_versions(python).endswith(" (with peft 1.0)")
    with pytest.raises(BenchmarkError, match="nowhere is no environment: it has no bin/python"):
        python_of(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("words", [["agilerl"], ["cpu", "--agilerl", "folder"]])
def test_an_environment_goes_with_its_kind(words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", *words, "--model", "model"])
    with pytest.raises(SystemExit):
        driver.main()
    assert "the kind agilerl, and no other, needs an environment that has it" in capsys.readouterr().err
