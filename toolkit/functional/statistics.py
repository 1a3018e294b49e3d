"""Statistics over the tokens that a mask keeps, and of samples: calibration, correlation, the best of several."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """Mean of `values` where `mask`, a bool of the same shape, is True: Σ mask·values / count; 0 where nothing counts.

    Of 16 bits it is taken in float32. `count` is a divisor in place of the number of True entries. The token count of a
    whole mini-batch there makes the means of its micro-batches add up to the mean of the mini-batch.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape")
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is boolean, True where a value counts; got {mask.dtype}")
    if values.is_floating_point() and values.itemsize < 4:  # float16's sum ends at 65,504
        values = values.float()
    divisor = mask.sum().clamp(min=1) if count is None else count
    # where() and not a product: a masked position may hold inf or nan, and 0·inf is nan.
    return torch.where(mask, values, torch.zeros_like(values)).sum() / divisor


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance where `mask` is True, Σ mask·(values − mean)² / (n − 1); 0 where fewer than two values count.

    In float64: the float32 mean of equal values is rounded, and their variance would not be 0.

    Example:
        >>> masked_var(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2., dtype=torch.float64)
    """
    values = values.double()
    centered = values - masked_mean(values, mask)
    return masked_mean(centered.square(), mask, count=(mask.sum() - 1).clamp(min=1))


class Moments(NamedTuple):
    """How many numbers were seen so far, their mean, and the sum of their squared deviations from it."""

    seen: int = 0
    mean: float = 0.0
    deviations: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 as long as fewer than two numbers were seen or all are equal."""
        variance = self.deviations / (self.seen - 1) if self.seen > 1 else 0.0
        return math.sqrt(variance) if variance > 0 else 1.0


def update_moments(moments: Moments, values: Tensor) -> Moments:
    """The moments with more numbers, of any shape and at least one, among them.

    Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    equation 2.1: exact for any split of the numbers into batches.
    """
    values = values.double()
    number, mean = values.numel(), float(values.mean())
    count, shift = moments.seen + number, mean - moments.mean
    deviations = moments.deviations + float((values - mean).square().sum())
    return Moments(count, moments.mean + shift * number / count, deviations + shift**2 * moments.seen * number / count)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the mask: (values − mean) / √(var + 1e-8); (B, T), 0 outside the mask.

    Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO", section 7, on advantages.
    """
    wide = values.double()  # what a float32 mean of equal values is off by would be multiplied by up to 1e4
    # 1e-8 as in TRL's and OpenAI's whitening, so that advantages agree with theirs.
    scaled = (wide - masked_mean(wide, mask)) * torch.rsqrt(masked_var(wide, mask) + 1e-8)
    scaled = torch.where(mask, scaled, torch.zeros_like(scaled))
    return scaled.to(values.dtype if values.is_floating_point() else torch.get_default_dtype())


def scale_to_unit_variance(values: Tensor, mask: Tensor) -> Tensor:
    """As `whiten`, with the mean where it is: of rewards, whose sign carries meaning (section 7, too)."""
    whitened = whiten(values, mask)
    scaled = whitened + masked_mean(values.double(), mask)
    return torch.where(mask, scaled, torch.zeros_like(scaled)).to(whitened.dtype)


def standard_error(values: Tensor, *, groups: Sequence[Hashable] | None = None) -> float:
    """Standard error of the mean m of `values` (N,): s / √N. 0 for fewer than two values.

    With the group of each value, those of one group are no draws of their own: of G groups with n_g values of mean m_g
    it is √(G / (G − 1) · Σ_g (n_g · (m_g − m))²) / N (Liang and Zeger 1986; the factor as in Cameron and Miller 2015),
    which for equal n_g is the standard error of the means m_g. 0 for fewer than two groups.

    Example:
        >>> standard_error(torch.tensor([1.0, 3.0]))
        1.0
        >>> standard_error(torch.tensor([1.0, 1.0, 3.0, 3.0]), groups=["a", "a", "b", "b"])
        1.0
    """
    groups = range(values.numel()) if groups is None else groups
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    if len(places) < 2:
        return 0.0
    place, values = torch.tensor([places[group] for group in groups], device=values.device), values.double()
    sums = values.new_zeros(len(places)).index_add(0, place, values - values.mean())  # n_g · (m_g − m)
    return math.sqrt(len(places) / (len(places) - 1) * float(sums.square().sum())) / values.numel()


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % confidence interval of a proportion (Wilson 1927).

    Unlike mean ± z·se it stays within [0, 1] and is honest near 0 and 1.

    Example:
        >>> tuple(round(x, 3) for x in wilson_interval(8, 10))
        (0.49, 0.943)
    """
    if trials < 1:
        raise ValueError(f"an interval needs at least one trial, got {trials}")
    p, z = successes / trials, 1.96
    denominator = 1 + z * z / trials
    center = (p + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / denominator
    return max(0.0, center - half), min(1.0, center + half)


class CalibrationBin(NamedTuple):
    """Predictions between `low` and `high`: how many, their mean, and how often what they predict came true."""

    low: float
    high: float
    number: int
    predicted: float
    observed: float


def calibration_bins(probabilities: Tensor, outcomes: Tensor, *, bins: int = 10) -> list[CalibrationBin]:
    """Predictions (N,) in bins of equal width, empty ones left out; `outcomes` (N,) are 1 where they came true, else 0.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", arXiv 1706.04599, section 2.

    Example:
        >>> calibration_bins(torch.tensor([0.1, 0.3, 0.9]), torch.tensor([0.0, 1.0, 1.0]), bins=2)[0].observed
        0.5
    """
    probabilities, outcomes = probabilities.double(), outcomes.double()
    numbers = (probabilities * bins).long().clamp(max=bins - 1)
    filled = []
    for number in numbers.unique().tolist():
        inside = numbers == number
        means = float(probabilities[inside].mean()), float(outcomes[inside].mean())
        filled.append(CalibrationBin(number / bins, (number + 1) / bins, int(inside.sum()), *means))
    return filled


def expected_calibration_error(bins: list[CalibrationBin]) -> float:
    """Σ over bins of (share of all predictions) · |observed − predicted|: equation 3 of the same paper."""
    return sum(one.number * abs(one.observed - one.predicted) for one in bins) / sum(one.number for one in bins)


def pearson_correlation(first: Tensor, second: Tensor) -> float:
    """Linear correlation of two quantities (N,). 0 where one of them does not vary.

    Example:
        >>> round(pearson_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])), 4)
        0.5
    """
    if first.shape != second.shape:
        raise ValueError(f"quantities of shapes {tuple(first.shape)} and {tuple(second.shape)} cannot be paired")
    if any(bool((values == values.flatten()[:1]).all()) for values in (first, second)):  # its mean may be rounded
        return 0.0
    a, b = first.double() - first.double().mean(), second.double() - second.double().mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale > 0 else 0.0


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1 of `values` (N,), float64; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]


def spearman_correlation(first: Tensor, second: Tensor) -> float:
    """Correlation of the ranks of two quantities (N,), equal values sharing theirs (Spearman 1904); 0 as above.

    Example:
        >>> round(spearman_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 8.0, 9.0])), 4)
        1.0
    """
    return pearson_correlation(average_ranks(first), average_ranks(second))


def expected_best(scores: Tensor) -> Tensor:
    """Mean score of the best of k, for each k from 1 to n, from n samples (B, n) of a prompt: unbiased, float64 (n,).

    The best of k among n sorted samples s_1 ≤ … ≤ s_n is s_i with probability C(i − 1, k − 1) / C(n, k); so that all
    subsets of k are averaged over (the estimator of Chen et al. 2021, arXiv 2107.03374, section 2.1, for scores).

    Example:
        >>> expected_best(torch.tensor([[1.0, 3.0, 2.0]]))
        tensor([2.0000, 2.6667, 3.0000], dtype=torch.float64)
    """
    n = scores.shape[1]
    ranked = scores.double().sort(dim=1).values.mean(dim=0)  # (n,)
    log_factorial = torch.lgamma(torch.arange(n + 1, dtype=torch.float64) + 1)

    def log_chosen(of: Tensor, k: int) -> Tensor:
        return log_factorial[of] - log_factorial[k] - log_factorial[of - k]

    best, below = [], torch.arange(n)  # samples that each is not below
    for k in range(1, n + 1):
        there = below[k - 1 :]
        weights = (log_chosen(there, k - 1) - log_chosen(torch.tensor(n), k)).exp()
        best.append(weights @ ranked.cpu()[k - 1 :])
    return torch.stack(best)


def best_of_kl_bound(n: int) -> float:
    """KL(best-of-n policy, policy) ≤ log n − (n − 1)/n, in nats a response: an upper bound.

    Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy", arXiv 2401.01879.

    Example:
        >>> round(best_of_kl_bound(4), 4)
        0.6363
    """
    return math.log(n) - (n - 1) / n
