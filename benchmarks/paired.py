"""Two ways to judge the same pairs, compared pair by pair: exact McNemar test and bootstrap intervals."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_DRAWS = 10_000


def correctness(margins: Tensor) -> Tensor:
    """1 where the chosen side has the higher score, 0 where the rejected one has, ½ at a tie.

    Args:
        margins: score of the chosen less that of the rejected side, any shape.

    Example:
        >>> correctness(torch.tensor([0.5, -1.0, 0.0]))
        tensor([1.0000, 0.0000, 0.5000], dtype=torch.float64)
    """
    return (torch.sign(margins.double()) + 1) / 2


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value that two judges are right equally often (McNemar 1947, as a binomial test).

    Args:
        only_first: pairs that the first alone judges rightly.
        only_second: pairs that the second alone judges rightly.

    Example:
        >>> mcnemar(1, 4)  # 2 · (C(5,0) + C(5,1)) / 2⁵
        0.375
    """
    number = only_first + only_second
    tail = sum(math.comb(number, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**number)


def bootstrap(differences: Tensor, *, kept: Tensor | None = None) -> tuple[float, float]:
    """95 % percentile interval of the mean of `differences` (S, N), where seeds and pairs are both drawn anew.

    Both are drawn: the question is what such seeds give on such pairs in the mean. Of three seeds that differ by far
    more than a seed's standard error the interval is their range, which holds the mean three times in four only.

    Args:
        differences: one row a seed, one column a pair.
        kept: bool (S, N), which of them count; None for all. A draw in which none does counts for nothing.

    Returns:
        Lower and upper end.
    """
    of_seeds, of_pairs = _drawn(*differences.shape)
    counted = torch.ones_like(differences) if kept is None else kept.to(differences.dtype)
    total, number = (((of_seeds @ (of * counted)) * of_pairs).sum(dim=1) for of in (differences, counted))
    means = total / number
    low, high = means.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@lru_cache(maxsize=4)
def _drawn(seeds: int, pairs: int) -> tuple[Tensor, Tensor]:
    """How often each draw has each seed, and each pair; the same ones for all that a page compares."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        [torch.randint(of, (of,), generator=generator).bincount(minlength=of) for of in (seeds, pairs)]
        for _ in range(_DRAWS)
    ]
    of_seeds, of_pairs = (torch.stack(of_each).double() for of_each in zip(*drawn, strict=True))
    return of_seeds, of_pairs


def log_loss(margins: Tensor) -> Tensor:
    """−log σ(margin) of each pair, in nats."""
    return -torch.nn.functional.logsigmoid(margins.double())


def compare(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], *, margin: float) -> dict[str, Any]:
    """What the first judge does better or worse than the second.

    Args:
        first: margins of each seed (S) on each pair (N).
        second: likewise, same seeds and pairs.
        margin: accuracy, as a share, that the first may lose and still be called as good.

    Returns:
        `accuracy` and `log_loss`, each with `first`, `second`, `difference` and `interval`; `mcnemar`, the p-value of
        each seed, with the discordant pairs; `non_inferior`, whether the interval of the accuracy's difference lies
        above −margin.
    """
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    found: dict[str, Any] = {}
    measures: dict[str, Callable[[Tensor], Tensor]] = {"accuracy": correctness, "log_loss": log_loss}
    for name, measure in measures.items():
        difference = measure(a) - measure(b)
        found[name] = {
            "first": float(measure(a).mean()),
            "second": float(measure(b).mean()),
            "difference": float(difference.mean()),
            "interval": list(bootstrap(difference)),
        }
    found["mcnemar"] = []
    for ours, theirs in zip(correctness(a), correctness(b), strict=True):
        only_first = int(((ours == 1) & (theirs == 0)).sum())
        only_second = int(((ours == 0) & (theirs == 1)).sum())
        p = mcnemar(only_first, only_second)
        found["mcnemar"].append({"only_first": only_first, "only_second": only_second, "p": p})
    found["margin"] = margin
    found["non_inferior"] = found["accuracy"]["interval"][0] > -margin
    return found
