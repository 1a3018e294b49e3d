import pytest

from tests.reports.test_reports import RESULT
from toolkit.reports import judgement, worst_errors, write_report


def pair(chosen_score, rejected_score, chosen_length, rejected_length, text="x"):
    return {
        "prompt": f"prompt {text}", "chosen": f"chosen {text}", "rejected": f"rejected {text}",
        "chosen_score": chosen_score, "rejected_score": rejected_score, "chosen_length": chosen_length,
        "rejected_length": rejected_length,
    }  # fmt: skip


PAIRS = [pair(2.0, 0.0, 10, 5, "a"), pair(1.0, 1.5, 4, 8, "<b>"), pair(0.0, 3.0, 3, 9, "c"), pair(1.0, 1.0, 6, 6, "d")]


def test_a_judgement_by_hand():
    found = judgement(PAIRS)
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
    assert judgement(PAIRS[:1])["length"]["chosen_shorter"] == {"pairs": 0, "accuracy": None, "accuracy_ci": None}


def test_a_reward_that_counts_tokens_is_found_out():
    lengths = [(5, 3), (2, 9), (7, 1), (4, 8), (6, 5)]
    found = judgement([pair(float(a), float(b), a, b) for a, b in lengths])["length"]
    assert found["pearson"] == pytest.approx(1) and found["spearman_within"] == pytest.approx(1)
    assert found["chosen_longer"]["accuracy"] == 1 and found["chosen_shorter"]["accuracy"] == 0


def test_the_worst_errors_come_first():
    errors = worst_errors(PAIRS)
    assert [row["chosen"] for row in errors] == ["chosen c", "chosen <b>"]  # neither the tie nor what is right
    assert errors[0]["margin"] == -3.0


def test_the_page_shows_it(tmp_path):
    result = {**RESULT, "stage": "reward", "judgement": judgement(PAIRS)}
    page = write_report(tmp_path, result, [], [], "", PAIRS).read_text()
    assert page.count("<svg") == 1 and "Worst errors" in page and "prompt &lt;b&gt;" in page and "<b>" not in page
    assert 'the chosen response is shorter</td><td class="n">2</td><td class="n">0.000' in page
    right = [pair(1.0, 0.0, 2, 2)]
    page = write_report(tmp_path, {**result, "judgement": judgement(right)}, [], [], "", right).read_text()
    assert "Worst errors" not in page and '<td>the chosen response is longer</td><td class="n">0</td>' in page
