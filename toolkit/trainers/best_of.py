"""Several responses to each prompt, and the best of them by the trainer's reward."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from toolkit.data import Rollout, concatenate, select
from toolkit.rewards import total_scores

if TYPE_CHECKING:
    from toolkit.trainers.ppo import PPOTrainer


class BestOf(NamedTuple):
    """The candidates of B prompts and the best of each."""

    candidates: Rollout
    """B·n responses; those of a prompt stand together."""
    scores: Tensor
    """float32 (B, n)."""
    best: Rollout
    """B responses."""


def best_of(trainer: "PPOTrainer", prompts: Dataset | list[dict[str, Any]], n: int) -> BestOf:
    """Sample n responses to each prompt and keep the one that the reward scores highest; of equals the first.

    Args:
        trainer: samples at its temperature, `per_device_eval_batch_size` responses at a time, and scores.
        prompts: rows with `input_ids`, and the columns that the reward needs.
        n: at least 1.

    Raises:
        ValueError: n is less than 1, or there are no prompts.
    """
    if n < 1 or len(prompts) == 0:
        raise ValueError(f"best_of needs at least one prompt and one sample; got {len(prompts)} prompts and n = {n}")
    rows = [prompts[i // n] for i in range(len(prompts) * n)]
    size = trainer.args.per_device_eval_batch_size
    rollouts, scores = [], []
    with torch.no_grad():
        for start in range(0, len(rows), size):
            batch = trainer.data_collator(rows[start : start + size])
            rollouts.append(trainer.generate(batch, do_sample=True))
            scores.append(total_scores(trainer.score(batch, rollouts[-1])))
    candidates, table = concatenate(rollouts), torch.cat(scores).view(len(prompts), n)
    best = table.argmax(dim=1)
    return BestOf(candidates, table, select(candidates, [i * n + int(j) for i, j in enumerate(best)]))
