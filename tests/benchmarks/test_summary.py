import pytest

from benchmarks.summary import bar_line, bars, summarise
from tests.benchmarks.examples import one_round


def _summary():
    rounds = [one_round(), one_round(0.9), one_round(1.2)]
    return summarise(rounds, tokens={"rollout": 50, "score": 100, "update": 200}, rollouts=16)


def test_ratios_by_hand():
    summary = _summary()
    assert summary["fastest_stock"] == "stock-full"  # not the views: they are not TRL's own interface
    separate = summary["contenders"]["ours-separate-bf16"]
    assert separate["seconds"] == {"rollout": 5, "score": 5, "update": 10, "total": 20}
    assert separate["samples_per_second"] == 16 / 20
    assert separate["tokens_per_second"] == {"rollout": 10, "score": 20, "update": 20}
    assert separate["speed"] == pytest.approx({"median": 1.0, "min": 0.9, "max": 1.2})  # 20, 18 and 24 over 20
    assert separate["memory"] == pytest.approx({"median": 0.55, "min": 0.55, "max": 0.55})
    assert separate["over_floor"]["median"] == 20 / 5
    shared = summary["contenders"]["ours-shared-bf16"]
    assert shared["speed"]["median"] == pytest.approx(20 / 12)
    assert shared["over_floor"]["median"] == 12 / 3
    assert summary["contenders"]["stock-full"]["speed"]["median"] == 1.0


def test_bars_by_hand():
    verdicts = {(bar["contender"], bar["bar"]): bar["met"] for bar in bars(_summary())}
    assert verdicts == {
        ("ours-separate-bf16", "speed"): True,  # 1.0
        ("ours-separate-bf16", "memory"): True,  # 0.55
        ("ours-shared-bf16", "speed"): True,  # 1.67
        ("ours-shared-bf16", "memory"): True,  # 0.6
        ("ours-separate-nf4", "speed"): False,  # 0.67
        ("ours-separate-nf4", "memory"): True,
        ("ours-shared-nf4", "speed"): False,  # 1.33
        ("ours-shared-nf4", "memory"): False,  # 0.625
    }
    lines = [bar_line(bar) for bar in bars(_summary())]
    assert lines[0] == ("ours, separate value, bf16: at least 1 × the speed of the fastest stock form: 1.000, met")
    assert lines[-1].endswith("at most 0.6 of the memory of the fastest stock form: 0.625, missed by 0.025")
