import pytest

from benchmarks import contenders, worker
from benchmarks.compare import check_equal, differences
from benchmarks.contenders import CONTENDERS
from benchmarks.errors import BenchmarkError
from tests.benchmarks.examples import FIGURES


@pytest.fixture(scope="module")
def compared(checkpoint, work):
    names = ("ours-separate", "ours-shared", "ours-separate-nf4")
    return {name: worker.compare(checkpoint, work, name, dtype="bfloat16") for name in names}


@pytest.mark.parametrize("name", ["stock-full", "stock-peft", "stock-peft-nf4", "stock-views"])
def test_stock_computes_the_same_as_ours(name, checkpoint, work, compared):
    found = {**compared, name: worker.compare(checkpoint, work, name, dtype="bfloat16")}
    check_equal(found)
    assert found[name]["policy_gradient"] > 0 and found[name]["value_head_gradient"] > 0


def test_in_float32_all_compute_the_same_but_for_its_rounding(checkpoint, work):
    ours = worker.compare(checkpoint, work, "ours-separate", dtype="float32")
    for name in ("ours-shared", "stock-full", "stock-peft", "stock-views"):
        theirs = worker.compare(checkpoint, work, name, dtype="float32")
        if name == "ours-shared":  # its gradient holds the value loss too
            theirs["policy_gradient"] = ours["policy_gradient"]
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5), name


def test_in_4_bits_trl_on_three_bases_computes_the_same_but_for_float32_s_rounding(checkpoint, work, monkeypatch):
    # On some CPUs bitsandbytes rounds what a model in eval mode says, here TRL's reward model, to bfloat16.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    names = ("ours-separate-nf4", "stock-peft-nf4", "stock-peft")
    ours, theirs, unquantised = (worker.compare(checkpoint, work, name, dtype="float32") for name in names)
    assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)
    assert unquantised["value_loss"] != pytest.approx(ours["value_loss"], rel=1e-3)


def test_a_contender_that_starts_elsewhere_is_refused(checkpoint, work, compared, monkeypatch):
    seed_head = contenders.seed_head
    monkeypatch.setattr(contenders, "seed_head", lambda weight, role: seed_head(weight, f"another {role}"))
    found = {**compared, "stock-full": worker.compare(checkpoint, work, "stock-full", dtype="bfloat16")}
    with pytest.raises(BenchmarkError, match=r"nothing is timed\. .*value_loss: \S+ in stock-full, \S+ in ours-sep"):
        check_equal(found)


def test_a_contender_that_leaves_an_adapter_out_is_refused(checkpoint, work, monkeypatch):
    seed = contenders.seed_adapter
    monkeypatch.setattr(contenders, "MOVED", 0.1)  # a tiny model says less by its adapters

    def compared(name, left_out=""):
        def seeded(parameters, role, *, moved):
            seed(parameters, role, moved=0.0 if role == left_out else moved)

        monkeypatch.setattr(contenders, "seed_adapter", seeded)
        return worker.compare(checkpoint, work, name, dtype="float32")

    ours = compared("ours-separate")
    assert differences({"ours-separate": ours, "stock-full": compared("stock-full")}) == []
    for role in ("policy", "value", "reward"):
        assert differences({"ours-separate": ours, "stock-full": compared("stock-full", role)}) != []


def test_what_differs_is_named():
    found = {name: FIGURES | {"entropy": 50.0, "value_loss": 0.5} for name in CONTENDERS}
    assert differences(found) == []
    found["stock-peft"]["value_loss"] = 0.53
    found["ours-shared"]["policy_gradient"] = 9.0  # holds the value loss too: not compared
    found["ours-shared-nf4"]["kl"] = float("nan")
    found["stock-full"]["kl"], found["stock-views"]["kl"] = 0.49, 0.51  # of 50
    assert differences(found) == [
        "kl: nan in ours-shared-nf4, 0 in ours-separate-nf4",
        "value_loss: 0.53 in stock-peft, 0.5 in ours-separate",
        "kl: 0.51 in stock-views, 0 in ours-separate",
    ]


def test_where_a_partner_was_left_out_nothing_is_held_to_it():
    found = dict.fromkeys(("stock-full", "ours-separate-nf4"), FIGURES) | {"ours-shared-nf4": FIGURES | {"score": 2.0}}
    assert differences(found) == ["score: 2 in ours-shared-nf4, 0 in ours-separate-nf4"]
