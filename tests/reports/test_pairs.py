import pytest

from tests.reports.examples import PAIRS, pair
from toolkit.reports import pair_evaluation, worst_errors


def test_an_evaluation_by_hand():
    found = pair_evaluation(PAIRS)
    assert found["chosen"]["mean"] == 1.0 and found["chosen"]["median"] == 1.0 and found["rejected"]["max"] == 3.0
    # σ(2) = 0.8808 came true, σ(0.5) = 0.6225 and σ(3) = 0.9526 did not, σ(0) = 0.5 is a tie.
    bins = [(one["low"], one["number"], one["observed"]) for one in found["calibration"]["bins"]]
    assert bins == [(0.5, 1, 0.5), (0.6, 1, 0.0), (0.8, 1, 1.0), (0.9, 1, 0.0)]
    assert found["calibration"]["error"] == pytest.approx((0.0 + 0.6225 + 0.1192 + 0.9526) / 4, abs=1e-4)
    length = found["length"]
    assert length["chosen_longer"]["accuracy"] == 1.0 and length["chosen_longer"]["pairs"] == 1
    assert length["chosen_shorter"]["accuracy"] == 0.0 and length["chosen_shorter"]["pairs"] == 2
    assert length["equal"]["accuracy"] == 0.0
    assert length["spearman_within"] == pytest.approx(1.0)  # margins 2, −0.5, −3, 0 and lengths 5, −4, −6, 0
    assert pair_evaluation(PAIRS[:1])["length"]["chosen_shorter"] == {"pairs": 0, "accuracy": None, "accuracy_ci": None}


def test_a_reward_that_counts_tokens_is_found_out():
    lengths = [(5, 3), (2, 9), (7, 1), (4, 8), (6, 5)]
    found = pair_evaluation([pair(float(a), float(b), a, b) for a, b in lengths])["length"]
    assert found["pearson"] == pytest.approx(1) and found["spearman_within"] == pytest.approx(1)
    assert found["chosen_longer"]["accuracy"] == 1 and found["chosen_shorter"]["accuracy"] == 0


def test_the_worst_errors_come_first():
    errors = worst_errors(PAIRS)
    assert [row["chosen"] for row in errors] == ["chosen c", "chosen <b>"]  # neither the tie nor what is right
    assert errors[0]["margin"] == -3.0
