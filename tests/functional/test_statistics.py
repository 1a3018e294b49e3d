import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch

from tests.tolerances import EXACT
from toolkit.functional import (
    Moments,
    best_of_kl_bound,
    calibration_bins,
    expected_best,
    expected_calibration_error,
    masked_mean,
    masked_var,
    pearson_correlation,
    scale_to_unit_variance,
    spearman_correlation,
    standard_error,
    update_moments,
    whiten,
    wilson_interval,
)
from toolkit.functional.statistics import average_ranks

VALUES = torch.tensor([[1.0, 2.0, 100.0], [3.0, 6.0, -50.0]])
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_mean_and_variance_by_hand():
    # kept: 1, 2, 3, 6. Mean 12/4 = 3; squared deviations 4 + 1 + 0 + 9 = 14, over 3.
    assert masked_mean(VALUES, MASK).item() == 3.0
    assert masked_var(VALUES, MASK).item() == pytest.approx(14 / 3)


def test_mean_with_a_count_is_a_share_of_a_larger_mean():
    halves = [masked_mean(VALUES[i : i + 1], MASK[i : i + 1], count=4.0) for i in range(2)]
    assert sum(halves).item() == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_masked_cannot_spoil_the_mean(bad):
    values = VALUES.masked_fill(~MASK, bad)
    assert masked_mean(values, MASK).item() == 3.0
    assert torch.isfinite(whiten(values, MASK)).all()


def test_nothing_kept_is_zero_and_not_nan():
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing).item() == 0.0
    assert masked_var(VALUES, nothing).item() == 0.0


def test_whiten_against_numpy():
    kept = VALUES[MASK].numpy().astype(np.float64)
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1))
    torch.testing.assert_close(whiten(VALUES, MASK)[MASK], torch.tensor(expected, dtype=torch.float32), **EXACT)
    assert (whiten(VALUES, MASK)[~MASK] == 0).all()


def test_scaling_keeps_the_mean():
    scaled = scale_to_unit_variance(VALUES, MASK)
    assert masked_mean(scaled, MASK).item() == pytest.approx(3.0, abs=1e-5)
    assert masked_var(scaled, MASK).item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("value", [-37.7, 0.1, 12345.6])
def test_equal_values_are_zero_when_whitened_and_themselves_when_scaled(value):
    """A sum of 1,000 of them in float32 is rounded; what their mean is then off by must not be scaled up."""
    values = torch.full((10, 100), value)
    mask = torch.ones_like(values, dtype=torch.bool)
    assert masked_var(values, mask) == 0 and not whiten(values, mask).any()
    assert torch.equal(scale_to_unit_variance(values, mask), values)
    assert whiten(values, mask).dtype == scale_to_unit_variance(values, mask).dtype == torch.float32


def test_standard_error_by_hand():
    # 1, 2, 3, 4: variance 5/3, over n = 4.
    assert standard_error(torch.tensor([1.0, 2.0, 3.0, 4.0])) == pytest.approx((5 / 3 / 4) ** 0.5)
    assert standard_error(torch.tensor([1.0])) == 0.0


def test_standard_error_of_groups_by_hand():
    # a nine times 0, b once 1: mean 0.1; sums of what they are off it -0.9 and 0.9; √(2 · 2 · 0.81) / 10.
    uneven = {"groups": [*"aaaaabaaaa"]}
    assert standard_error(torch.tensor([0.0] * 5 + [1.0] + [0.0] * 4), **uneven) == pytest.approx(0.18)
    assert standard_error(torch.tensor([0.2] * 5 + [0.0] + [0.2] * 4), **uneven) == pytest.approx(0.036)
    assert standard_error(torch.tensor([1.0, 3.0]), groups=[(1,), (1,)]) == 0.0


def test_standard_error_of_equal_groups_is_that_of_their_means():
    values = torch.tensor([[3.0, 5.0, -1.0], [0.5, 2.0, 2.0], [7.0, -4.0, 1.0], [9.0, 9.0, 2.5]])
    means = values.numpy().mean(axis=1)
    for groups, ordered in (("aaabbbcccddd", values), ("abcdabcdabcd", values.T)):
        found = standard_error(ordered.flatten(), groups=groups)
        assert found == pytest.approx(means.std(ddof=1) / 2, rel=1e-6)


def test_wilson_interval_against_a_published_example():
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81 of 263 and 0 of 20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    with pytest.raises(ValueError, match="at least one trial"):
        wilson_interval(0, 0)


def test_a_mask_must_be_boolean_and_fit():
    with pytest.raises(TypeError, match="True where a value counts"):
        masked_mean(VALUES, MASK.long())
    with pytest.raises(ValueError, match="differ in shape"):
        masked_mean(VALUES, MASK[:, :2])


@pytest.mark.parametrize("splits", [[12], [1, 11], [5, 4, 3], [1] * 12])
def test_moments_do_not_depend_on_the_batches(splits):
    torch.manual_seed(3)
    values = 1000 + torch.randn(12)
    moments = Moments()
    for part in values.split(splits):
        moments = update_moments(moments, part)
    assert moments.seen == 12
    assert moments.mean == pytest.approx(values.double().mean().item(), rel=1e-12)
    assert moments.std == pytest.approx(values.double().std().item(), rel=1e-9)


def test_moments_of_too_little_or_of_equal_numbers_divide_by_one():
    assert update_moments(Moments(), torch.tensor([5.0])).std == 1.0
    assert update_moments(Moments(), torch.tensor([5.0, 5.0])).std == 1.0


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


def test_correlations_agree_with_pandas():
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(6, (50,), generator=generator).double()  # with ties
    b = a + torch.randn(50, generator=generator).double()
    both = pd.DataFrame({"a": a.numpy(), "b": b.numpy()})
    assert spearman_correlation(a, b) == pytest.approx(both.corr(method="spearman").loc["a", "b"], abs=1e-12)
    assert pearson_correlation(a, b) == pytest.approx(both.corr(method="pearson").loc["a", "b"], abs=1e-12)
    assert math.isfinite(spearman_correlation(a[:1], b[:1]))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_expected_best_is_the_mean_over_all_subsets(n):
    torch.manual_seed(0)
    scores = torch.randn(3, n).double()
    by_hand = [
        sum(max(subset) for row in scores.tolist() for subset in itertools.combinations(row, k)) / (3 * math.comb(n, k))
        for k in range(1, n + 1)
    ]
    torch.testing.assert_close(expected_best(scores), torch.tensor(by_hand, dtype=torch.float64), **EXACT)
    assert expected_best(scores)[0] == pytest.approx(scores.mean().item())


def test_expected_best_of_many_samples():
    """Of 1, …, n the best of k is (n + 1) k / (k + 1) in the mean: the largest of an ordered sample."""
    n = 3000
    found, k = expected_best(torch.arange(1.0, n + 1)[None]), torch.arange(1, n + 1, dtype=torch.float64)
    torch.testing.assert_close(found, (n + 1) * k / (k + 1), rtol=1e-9, atol=0)


def test_the_bound_holds_and_is_nearly_met_where_nothing_ties():
    """Of m equally likely responses with distinct scores, the i-th is chosen with p = (i^n − (i−1)^n) / m^n."""
    m = 2000
    for n in (1, 2, 4, 8):
        chosen = [((i / m) ** n) - ((i - 1) / m) ** n for i in range(1, m + 1)]
        kl = sum(p * math.log(p * m) for p in chosen if p > 0)
        assert kl <= best_of_kl_bound(n) + 1e-12
        assert kl == pytest.approx(best_of_kl_bound(n), abs=0.01)


def test_what_does_not_vary_has_no_correlation():
    varied = torch.arange(7.0, dtype=torch.float64)
    for constant in (torch.full((7,), 0.1, dtype=torch.float64), torch.full((7,), 1 / 3, dtype=torch.float64)):
        assert pearson_correlation(constant, constant) == pearson_correlation(varied, constant) == 0.0
    with pytest.raises(ValueError, match="cannot be paired"):
        pearson_correlation(varied, varied[:1])


def test_sums_beyond_what_16_bits_hold():
    many = torch.ones(100_000, dtype=torch.float16)
    assert masked_mean(many, many > 0) == 1.0
    assert not whiten(many, many > 0).any()
