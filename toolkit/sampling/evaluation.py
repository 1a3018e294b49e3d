"""What a role says to prompts, and what it is worth: measured, or the best of several kept."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit import processes
from toolkit.checkpoints import kept_random_states
from toolkit.data import Rollout, concatenate, select
from toolkit.errors import DataError
from toolkit.functional import standard_error
from toolkit.rewards import Reward, score_with, state_of, total_scores
from toolkit.sampling.sampler import Rows, Sampler, batches


class Evaluation(NamedTuple):
    """Responses to N prompts, measured."""

    metrics: dict[str, float]
    """`score`, `score_se`, `score/<part>` of a weighted sum, `kl` (mean over responses of log π − log π_ref; an
    estimate of KL(π, π_ref) where responses are sampled), `length`, `eos_share`, and further metrics."""
    rollout: Rollout
    scores: Tensor
    """float32 (N,)."""


@dataclass(frozen=True)
class Evaluator:
    """Responds to prompts, scores and measures.

    Args:
        sampler: responds.
        reward: scores a rollout.
        log_ratios: log π − log π_ref of the responses of a rollout, summed over tokens: (B,).
        batch_size: prompts that a process responds to at a time.
        seed: of sampling.
        metrics: further metrics of a rollout.
    """

    sampler: Sampler
    reward: Reward
    log_ratios: Callable[[Rollout], Tensor]
    batch_size: int
    seed: int
    metrics: Callable[[Rollout], dict[str, float]] | None = None

    def __call__(self, prompts: Rows, *, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Measure the responses to all prompts; `after_batch` is called after each batch.

        The caller's random states are left as they were, and so is a reward that changes as it goes.

        Raises:
            DataError: there are no prompts.
            RewardError: the reward raised, or did not return one finite number a response.
        """
        if len(prompts) == 0:
            remedy = "Hold some rows of the data out: validation_size, test_size."
            raise DataError("there are no held-out prompts to measure.", remedy=remedy)
        rollouts, scores, log_ratios = [], [], []
        parts: dict[str, list[Tensor]] = defaultdict(list)
        with kept_random_states(), _unchanged(self.reward), torch.no_grad():
            torch.manual_seed(self.seed)
            for rows in batches(prompts, self.batch_size * processes.count()):
                rollouts.append(self.sampler(self.sampler.collator(rows)))
                log_ratios.append(self.log_ratios(rollouts[-1]))
                scores.append(total_scores(score_with(self.reward, rollouts[-1])))
                for name, part in getattr(self.reward, "last_parts", {}).items():
                    parts[f"score/{name}"].append(part)
                after_batch()
        rollout, all_scores = concatenate(rollouts), torch.cat(scores)
        metrics = {
            "score": float(all_scores.mean()),
            "score_se": standard_error(all_scores),
            **{name: float(torch.cat(of_part).mean()) for name, of_part in parts.items()},
            "kl": float(torch.cat(log_ratios).mean()),
            "length": sum(rollout.lengths) / len(rollout),
            "eos_share": sum(rollout.ended) / len(rollout),
            **(self.metrics(rollout) if self.metrics else {}),
        }
        return Evaluation(metrics, rollout, all_scores)


@contextmanager
def _unchanged(reward: Reward) -> Iterator[None]:
    """What is measured leaves no trace in what is trained on."""
    changing = state_of(reward)
    if changing is None:
        yield
        return
    state = copy.deepcopy(changing.state_dict())
    try:
        yield
    finally:
        changing.load_state_dict(state)


class BestOf(NamedTuple):
    """n responses to each of B prompts, and the best of each."""

    candidates: Rollout
    """B·n responses; those to a prompt stand together."""
    scores: Tensor
    """float32 (B, n)."""
    best: Rollout
    """B responses."""


@torch.no_grad()
def best_of(prompts: Rows, n: int, *, sampler: Sampler, reward: Reward, batch_size: int) -> BestOf:
    """Sample n responses to each prompt and keep the one that the reward scores highest; of equals the first."""
    if n < 1 or len(prompts) == 0:
        raise ValueError(f"best_of needs at least one prompt and one sample; got {len(prompts)} prompts and n = {n}")
    rollouts, scores = [], []
    for rows in batches([row for row in prompts for _ in range(n)], batch_size * processes.count()):
        rollouts.append(sampler(sampler.collator(rows)))
        scores.append(total_scores(score_with(reward, rollouts[-1])))
    candidates, by_prompt = concatenate(rollouts), torch.cat(scores).view(len(prompts), n)
    best = by_prompt.argmax(dim=1).tolist()
    return BestOf(candidates, by_prompt, select(candidates, [i * n + j for i, j in enumerate(best)]))
