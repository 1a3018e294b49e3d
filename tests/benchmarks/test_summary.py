import pytest

from benchmarks.summary import bars, bars_in_words, summarise
from tests.benchmarks.examples import one_round


def _summary():
    rounds = [one_round(), one_round(0.9), one_round(1.2)]
    return summarise(rounds, tokens={"rollout": 50, "score": 100, "update": 200}, rollouts=16)


def test_ratios_by_hand():
    summary = _summary()
    assert summary["fastest_stock"] == "stock-full"  # not the views: they are not TRL's own interface
    separate = summary["contenders"]["ours-separate"]
    assert separate["seconds"] == {"rollout": 5, "score": 5, "update": 10, "total": 20}
    assert separate["samples_per_second"] == 16 / 20
    assert separate["tokens_per_second"] == {"rollout": 10, "score": 20, "update": 20}
    assert separate["speed"] == pytest.approx({"median": 1.0, "min": 0.9, "max": 1.2})  # 20, 18 and 24 over 20
    assert separate["memory"] == pytest.approx({"median": 0.55, "min": 0.55, "max": 0.55})
    assert separate["over_floor"]["median"] == 20 / 5
    shared = summary["contenders"]["ours-shared"]
    assert shared["speed"]["median"] == pytest.approx(20 / 12)
    assert shared["over_floor"]["median"] == 12 / 3
    assert summary["contenders"]["stock-full"]["speed"]["median"] == 1.0


def test_bars_by_hand():
    found = bars(_summary(), "cpu")
    met = {(bar["contender"], bar["bar"]) for bar in found if bar["met"]}
    assert len(found) == 4 * 3 and met == set()  # 0.67 to 1.67 times as fast, 0.5 to 0.625 of the memory, 4 to 6 floors
    almost = {"speed": {"median": 2.4}, "memory": {"median": 0.45}, "over_floor": {"median": 2.01}}
    met = [
        bar["met"] for bar in bars({"contenders": dict.fromkeys(("ours-separate-nf4", "stock-full"), almost)}, "cpu")
    ]
    assert met == [True, True, False]
    met = [bar["met"] for bar in bars({"contenders": {"ours-shared-nf4": almost}}, "cpu")]
    assert met == [False, True, False]
    of_a_slice = bars({"contenders": {"ours-shared-nf4": almost}}, "slice")
    assert [bar["needed"] for bar in of_a_slice] == [2.5, 0.45, 1.4]


def test_bars_in_words():
    asked = "Asked of ours: speed of 2 with a separate value and 2.5 with a shared one, memory of 0.45, 2 × floor."
    words = bars_in_words({"base": bars(_summary(), "cpu")}, "cpu", "bfloat16")
    assert words.startswith(f"{asked} Missed by ours, separate value, bf16: speed 1.00, memory 0.55, × floor 4.00; ")
    assert words.endswith("; ours, shared value, NF4: speed 1.33, memory 0.62, × floor 5.00.")
    assert bars_in_words({"base": []}, "cpu", "bfloat16") == f"{asked} All are met."
    missed = {"contender": "ours-separate", "bar": "speed", "needed": 2.0, "reached": 1.961, "met": False}
    met, other = {**missed, "met": True}, {**missed, "contender": "ours-shared", "bar": "over_floor", "reached": 2.1}
    of_sizes = {"8 × 48": [missed, other], "16 × 48": [met], "8 × 256": [other]}
    separate, shared = "ours, separate value, bf16: speed 1.96", "ours, shared value, bf16: × floor 2.10"
    words = f"{asked} Missed at 8 × 48 by {separate}; {shared}; at 8 × 256 by {shared}."
    assert bars_in_words(of_sizes, "growth", "bfloat16") == words
