"""Statistics over the tokens that a mask keeps."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]

_VARIANCE_FLOOR = 1e-8  # as in TRL's and OpenAI's whitening, so that advantages agree with theirs


def _check_same_shape(values: Tensor, mask: Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape")
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is boolean, True where a value counts; got {mask.dtype}")


def masked_mean(values: Tensor, mask: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """Mean of `values` where `mask` is True: Σ mask·values / count.

    Args:
        values: any shape.
        mask: bool, the shape of `values`; True where a value counts.
        count: divisor in place of the number of True entries. The token count of a whole mini-batch
            here makes the means of its micro-batches add up to the mean of the mini-batch.

    Returns:
        Scalar. 0 where nothing counts.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    _check_same_shape(values, mask)
    divisor = mask.sum().clamp(min=1) if count is None else count
    # where() and not a product: a masked position may hold inf or nan, and 0·inf is nan.
    return torch.where(mask, values, torch.zeros_like(values)).sum() / divisor


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of `values` where `mask` is True: Σ mask·(values − mean)² / (n − 1).

    Args:
        values: any shape.
        mask: bool, the shape of `values`.

    Returns:
        Scalar. 0 where fewer than two values count, since one value has no spread to speak of.

    Example:
        >>> masked_var(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
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
    """The moments with more numbers among them.

    Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    equation 2.1: exact for any split of the numbers into batches.

    Args:
        moments: so far.
        values: any shape, at least one number.

    Example:
        >>> moments = update_moments(update_moments(Moments(), torch.tensor([1.0, 2.0])), torch.tensor([6.0]))
        >>> moments.mean, round(moments.std, 4)
        (3.0, 2.6458)
    """
    values = values.double()
    number, mean = values.numel(), float(values.mean())
    count, shift = moments.seen + number, mean - moments.mean
    deviations = moments.deviations + float((values - mean).square().sum())
    return Moments(count, moments.mean + shift * number / count, deviations + shift**2 * moments.seen * number / count)


def _mean_and_variance(values: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Those of `masked_mean` and `masked_var`, of the values of all processes together."""
    _check_same_shape(values, mask)
    add_up = reduce or (lambda sums: sums)
    kept = torch.where(mask, values, torch.zeros_like(values))
    total, count = add_up(torch.stack([kept.sum(), mask.sum().to(values.dtype)]))
    mean = total / count.clamp(min=1)
    # From the deviations, and not from the sum of squares, which cancels where the mean is large.
    deviations = torch.where(mask, values - mean, torch.zeros_like(values)).square().sum()
    return mean, add_up(deviations) / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the mask: (values − mean) / √(var + 1e-8).

    Used for advantages (Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO", detail
    20). Entries outside the mask become 0.

    Args:
        values: (B, T).
        mask: bool (B, T).
        reduce: adds a tensor up over the processes that hold a part of the values each, all of which call this
            function: mean and variance are then of all parts. None where there is one process.

    Returns:
        (B, T).
    """
    mean, variance = _mean_and_variance(values, mask, reduce)
    scaled = (values - mean) * torch.rsqrt(variance + _VARIANCE_FLOOR)
    return torch.where(mask, scaled, torch.zeros_like(scaled))


def scale_to_unit_variance(values: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Scale to variance 1 over the mask and keep the mean where it is. Used for rewards.

    A reward's sign carries meaning that whitening would remove (the same paper, detail 16, where it
    is whitening "without shifting the mean"). Entries outside the mask become 0.

    Args:
        values: (B, T).
        mask: bool (B, T).
        reduce: as for `whiten`.

    Returns:
        (B, T).
    """
    mean, variance = _mean_and_variance(values, mask, reduce)
    scaled = (values - mean) * torch.rsqrt(variance + _VARIANCE_FLOOR) + mean
    return torch.where(mask, scaled, torch.zeros_like(scaled))


def standard_error(values: Tensor) -> float:
    """Standard error of the mean of `values` (N,): s / √N. 0 for fewer than two values.

    Example:
        >>> round(standard_error(torch.tensor([1.0, 2.0, 3.0, 4.0])), 4)
        0.6455
    """
    if values.numel() < 2:
        return 0.0
    return float(values.double().std(unbiased=True)) / math.sqrt(values.numel())


def wilson_interval(successes: int, trials: int, *, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a proportion (Wilson 1927), 95 % by default.

    Unlike mean ± z·se it stays within [0, 1] and is honest near 0 and 1.

    Example:
        >>> tuple(round(x, 3) for x in wilson_interval(8, 10))
        (0.49, 0.943)
    """
    if trials < 1:
        raise ValueError(f"an interval needs at least one trial, got {trials}")
    p = successes / trials
    denominator = 1 + z * z / trials
    center = (p + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / denominator
    return max(0.0, center - half), min(1.0, center + half)
