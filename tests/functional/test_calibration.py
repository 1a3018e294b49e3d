import math

import pytest
import torch

from toolkit.functional import (
    average_ranks,
    calibration_bins,
    expected_calibration_error,
    pearson_correlation,
    spearman_correlation,
)


def test_calibration_by_hand():
    probabilities = torch.tensor([0.05, 0.15, 0.55, 0.95, 1.0, 0.5])
    outcomes = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    bins = calibration_bins(probabilities, outcomes, bins=2)
    assert [(one.low, one.high, one.number) for one in bins] == [
        (0.0, 0.5, 2),
        (0.5, 1.0, 4),
    ]  # 0.5: upper
    assert bins[0].predicted == pytest.approx(0.1) and bins[0].observed == 0.5
    assert bins[1].predicted == pytest.approx(0.75) and bins[1].observed == 0.5
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.4 + 4 * 0.25) / 6)
    assert [one.low for one in calibration_bins(probabilities, outcomes)] == [0.0, 0.1, 0.5, 0.9]


def test_correlations_by_hand():
    # 1 − 6·Σd²/(n(n² − 1)), the ranks being 1 2 3 4 5 and 2 1 3 5 4
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([20.0, 10.0, 30.0, 60.0, 35.0])
    assert spearman_correlation(a, b) == pytest.approx(1 - 6 * (1 + 1 + 0 + 1 + 1) / 120)
    assert pearson_correlation(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 3.0])) == pytest.approx(-1)
    assert pearson_correlation(a, torch.full((5,), 2.0)) == spearman_correlation(torch.zeros(5), a) == 0.0
    assert average_ranks(torch.tensor([3.0, 3.0, 1.0, 3.0])).tolist() == [3, 3, 1, 3]


def test_correlations_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(6, (50,), generator=generator).double()  # with ties
    b = a + torch.randn(50, generator=generator).double()
    assert spearman_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert pearson_correlation(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-12)
    assert math.isfinite(spearman_correlation(a[:1], b[:1]))
