"""Whether predicted probabilities are those that are observed, and whether one quantity goes with another."""

from typing import NamedTuple

from torch import Tensor


class CalibrationBin(NamedTuple):
    """Predictions between `low` and `high`: how many, their mean, and how often what they predict came true."""

    low: float
    high: float
    number: int
    predicted: float
    observed: float


def calibration_bins(probabilities: Tensor, outcomes: Tensor, *, bins: int = 10) -> list[CalibrationBin]:
    """Predictions in bins of equal width; empty bins are left out.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", arXiv 1706.04599, section 2.

    Args:
        probabilities: (N,), within [0, 1].
        outcomes: (N,), 1 where it came true, 0 where not.
        bins: number of bins.

    Example:
        >>> import torch
        >>> calibration_bins(torch.tensor([0.1, 0.3, 0.9]), torch.tensor([0.0, 1.0, 1.0]), bins=2)[0].observed
        0.5
    """
    probabilities, outcomes = probabilities.double(), outcomes.double()
    numbers = (probabilities * bins).long().clamp(max=bins - 1)
    found = []
    for number in range(bins):
        inside = numbers == number
        if inside.any():
            means = float(probabilities[inside].mean()), float(outcomes[inside].mean())
            found.append(CalibrationBin(number / bins, (number + 1) / bins, int(inside.sum()), *means))
    return found


def expected_calibration_error(bins: list[CalibrationBin]) -> float:
    """Σ over bins of (share of all predictions) · |observed − predicted|: equation 3 of the same paper.

    Args:
        bins: from `calibration_bins`.
    """
    total = sum(one.number for one in bins)
    return sum(one.number * abs(one.observed - one.predicted) for one in bins) / total


def pearson_correlation(first: Tensor, second: Tensor) -> float:
    """Linear correlation of two quantities (N,). 0 where one of them does not vary.

    Example:
        >>> import torch
        >>> round(pearson_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])), 4)
        0.5
    """
    a, b = first.double() - first.double().mean(), second.double() - second.double().mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale > 0 else 0.0


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1 of `values` (N,), float64; equal values share the mean of their ranks.

    Example:
        >>> import torch
        >>> average_ranks(torch.tensor([7.0, 1.0, 7.0]))
        tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def spearman_correlation(first: Tensor, second: Tensor) -> float:
    """Correlation of the ranks of two quantities (N,): whether one grows with the other, however unevenly.

    Spearman 1904, with the mean rank at ties. 0 where one of them does not vary.

    Example:
        >>> import torch
        >>> round(spearman_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 8.0, 9.0])), 4)
        1.0
    """
    return pearson_correlation(average_ranks(first), average_ranks(second))
