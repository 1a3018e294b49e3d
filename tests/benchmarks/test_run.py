import copy
import io
import subprocess

import pytest
from rich.console import Console

from benchmarks import run as driver
from benchmarks.compare import PARTNER
from benchmarks.contenders import CONTENDERS
from benchmarks.errors import BenchmarkError, KilledError
from benchmarks.summary import FLOOR_BAR
from benchmarks.table import KINDS, section
from benchmarks.work import SIZES
from tests.benchmarks.examples import BY_HAND, one_round
from tests.tiny_runs import REPOSITORY


def test_losses_first_and_then_all_contenders_in_turn_in_each_round(result):
    _, asked, shown = result
    names = list(CONTENDERS)
    one_round = [*(("time", name) for name in names), ("floor", None)]
    assert asked == [("sample", None), *(("compare", name) for name in names), *one_round, *one_round]
    assert "base, round 2/2, stock-peft: rollout 6.2, score 6.2, update 12.5, total 25.0 s an update, 5.00 GB" in shown


def test_contenders_that_compute_something_else_are_not_timed(checkpoint, monkeypatch):
    def step(name, *, model, work, contender=None, **_):
        if name == "sample":
            BY_HAND.write(work)
            return {}
        assert name == "compare"
        value = 2.0 if contender == "stock-views" else 1.0
        return {"score": 0.0, "kl": 0.0, "entropy": 9.0, "policy_loss": 0.0, "value_loss": value,
                "policy_gradient": 1.0, "value_head_gradient": 1.0}  # fmt: skip

    with pytest.raises(BenchmarkError, match="value_loss: 2 in stock-views, 1 in ours-separate$"):
        console = Console(file=io.StringIO())
        driver.run(checkpoint, "cpu", rounds=1, updates=1, console=console, save=pytest.fail, step=step)


def test_growth_leaves_out_whom_memory_does_not_hold_and_goes_on_where_it_was_broken_off(checkpoint):
    figures = {"score": 0.0, "kl": 0.0, "entropy": 9.0, "policy_loss": 0.0, "value_loss": 1.0, "policy_gradient": 1.0,
               "value_head_gradient": 1.0}  # fmt: skip
    sizes, saved, stop_at = [], [], "many"

    def step(name, *, contender=None, size=None, work=None, **_):
        if name == "sample":
            if size == stop_at:
                raise KeyboardInterrupt
            sizes.append(size)
            BY_HAND.write(work)
            return {}
        if contender == "stock-full" and (name, sizes[-1]) in (("time", "longest"), ("compare", "longer")):
            raise KilledError("it was killed")
        one = one_round()
        return {"compare": figures, "floor": one["floor"], "time": one["contenders"].get(contender)}[name]

    def run(before):
        console = Console(file=io.StringIO())
        named = {"save": lambda found: saved.append(copy.deepcopy(found)), "before": lambda result: before}
        return driver.run(checkpoint, "growth", rounds=1, updates=1, console=console, step=step, **named)

    with pytest.raises(KeyboardInterrupt):
        run(None)
    first, sizes[:], stop_at = saved[-1], [], None
    assert set(first["sizes"]) == {"few", "base"}
    found = run(first)
    assert sizes == ["many", "longer", "longest"] and set(found["sizes"]) == set(driver.BENCHMARKS["growth"].sizes)
    assert found["sizes"]["base"] == first["sizes"]["base"]
    text = section("growth", found)
    assert text.splitlines()[-1].endswith("| out of memory |  |") and text.count("out of memory") == 2
    sizes.clear()
    run(found)  # one that is whole is taken anew, as is one of other versions
    assert len(sizes) == 5
    sizes.clear()
    run({**first, "versions": {"torch": "0.1"}})
    assert len(sizes) == 5


def test_what_is_run_can_be_run():
    for kind, benchmark in driver.BENCHMARKS.items():
        assert kind in KINDS and kind in FLOOR_BAR
        assert set(benchmark.sizes) <= set(SIZES) and benchmark.rounds > 0
        # The figures of each are compared with its partner's.
        partners = {PARTNER[CONTENDERS[name].quantised] for name in benchmark.contenders}
        assert partners <= set(benchmark.contenders) <= set(CONTENDERS)
        assert {CONTENDERS[name].kind for name in benchmark.contenders} >= {"ours", "stock"}


def test_make_bench_without_a_model_says_so():
    done = subprocess.run(["make", "-n", "bench"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "make bench needs a checkpoint: add MODEL=/path/to/SmolLM2-135M-Instruct." in done.stderr
