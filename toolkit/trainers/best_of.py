"""Several responses to each prompt, and the best of them by a reward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from toolkit.data import Rollout, concatenate, select


class BestOf(NamedTuple):
    """The candidates of B prompts and the best of each."""

    candidates: Rollout
    """B·n responses; those of a prompt stand together."""
    scores: Tensor
    """float32 (B, n)."""
    best: Rollout
    """B responses."""


def best_of(
    prompts: Dataset | list[dict[str, Any]],
    n: int,
    *,
    sample: Callable[[list[dict[str, Any]]], tuple[Rollout, Tensor]],
    batch_size: int,
) -> BestOf:
    """Sample n responses to each prompt and keep the one that the reward scores highest; of equals the first.

    Args:
        prompts: rows with `input_ids`, and the columns that the reward needs.
        n: at least 1.
        sample: a response to each of B rows, and their scores (B,).
        batch_size: responses sampled at a time.

    Raises:
        ValueError: n is less than 1, or there are no prompts.
    """
    if n < 1 or len(prompts) == 0:
        raise ValueError(f"best_of needs at least one prompt and one sample; got {len(prompts)} prompts and n = {n}")
    rows = [prompts[i // n] for i in range(len(prompts) * n)]
    with torch.no_grad():
        sampled = [sample(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
    candidates = concatenate([rollout for rollout, _ in sampled])
    scores = torch.cat([part for _, part in sampled]).view(len(prompts), n)
    best = scores.argmax(dim=1)
    return BestOf(candidates, scores, select(candidates, [i * n + int(j) for i, j in enumerate(best)]))
