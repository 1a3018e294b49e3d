"""What a role says to prompts, and what it is worth: measured, or the best of several kept."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from toolkit import processes
from toolkit.checkpoints import kept_random_states
from toolkit.data import Rollout, concatenate, select
from toolkit.errors import DataError, RewardError, ToolkitError, within
from toolkit.functional import standard_error
from toolkit.rewards import Reward, score_with, state_of, total_scores
from toolkit.sampling.sampler import Rows, Sampler, batches
from toolkit.sampling.signs import SIGNS, signs_of

Metrics: TypeAlias = Callable[[Rollout], dict[str, float]]
"""Further metrics of a rollout, for evaluation."""


class _Measured(NamedTuple):
    metrics: dict[str, float]
    """`score`, `score_se` (rows of one prompt, answered greedily, are no draws of their own), `score/<part>` of a
    weighted sum, the same of a judge as `judge`, `kl` (mean over responses of log π − log π_ref; an estimate of
    KL(π, π_ref) where responses are sampled), `length`, `eos_share`, those of `signs_of`, and further metrics."""
    rollout: Rollout
    scores: Tensor
    """float32 (N,)."""


class Evaluation(_Measured):
    """Responses to N prompts, measured: metrics, rollout and scores, as a tuple."""

    judged: Tensor | None = None
    """The scores of the judge, float32 (N,); no part of the tuple."""


def measured_with(*scored: str) -> list[str]:
    """What an `Evaluator` measures where these, "score" and perhaps "judge", are its scores: but for the parts of sums,
    a reward's `beyond_share`, and further metrics."""
    return [*(name for one in scored for name in (one, f"{one}_se")), "kl", "length", "eos_share", *SIGNS]


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
        judge: a second reward, which scores the same responses.
    """

    sampler: Sampler
    reward: Reward
    log_ratios: Callable[[Rollout], Tensor]
    batch_size: int
    seed: int
    metrics: Metrics | None = None
    judge: Reward | None = None

    def __call__(self, prompts: Rows, *, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Measure the responses to all prompts; `after_batch` is called after each batch.

        The caller's random states are left as they were, and so are a reward and a judge that change as they go: they
        score each batch as they are.

        Raises:
            DataError: there are no prompts.
            RewardError: the reward, the judge or `metrics` raised, or did not return numbers, of a response one that is
                finite.
        """
        if len(prompts) == 0:
            remedy = "Hold some rows of the data out: validation_size, test_size."
            raise DataError("there are no held-out prompts to measure.", remedy=remedy)
        rollouts, log_ratios = [], []
        scores: dict[str, list[Tensor]] = defaultdict(list)
        with kept_random_states(), torch.no_grad():
            torch.manual_seed(self.seed)
            for rows in batches(prompts, self.batch_size * processes.count()):
                rollouts.append(self.sampler(self.sampler.collator(rows)))
                log_ratios.append(self.log_ratios(rollouts[-1]))
                for name, callback in {"score": self.reward, "judge": self.judge}.items():
                    for whole_or_part, given in _scored(name, callback, rollouts[-1]).items():
                        scores[whole_or_part].append(given)
                after_batch()
        rollout, joined = concatenate(rollouts), {name: torch.cat(given) for name, given in scores.items()}
        metrics: dict[str, float] = {}
        asked = list(map(tuple, rollout.prompt_ids))
        for name, given in joined.items():
            metrics[name] = float(given.mean())
            if name in ("score", "judge"):
                metrics[f"{name}_se"] = standard_error(given, groups=asked)
        metrics |= {
            "kl": float(torch.cat(log_ratios).mean()),
            "length": sum(rollout.lengths) / len(rollout),
            "eos_share": sum(rollout.ended) / len(rollout),
            **signs_of(rollout, joined["score"], high=getattr(self.reward, "high_score", None)),
            **processes.by_main(lambda: self._further(rollout)),
        }
        evaluation = Evaluation(metrics, rollout, joined["score"])
        evaluation.judged = joined.get("judge")
        return evaluation

    def _further(self, rollout: Rollout) -> dict[str, float]:
        """What `metrics` gives, as numbers that a checkpoint can keep: of several processes in the main one, by which
        all of them decide alike."""
        if self.metrics is None:
            return {}
        try:
            with kept_random_states(), torch.no_grad(), processes.alone():  # whatever of ours it calls
                given = dict(self.metrics(rollout))
        except (ToolkitError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a user's own, like one of a reward
            raise RewardError(f"metrics raised {type(error).__name__}: {error}") from error
        found = {}
        for name, value in given.items():
            try:
                found[name] = float(value)
            except (TypeError, ValueError) as error:
                raise RewardError(f"metrics gave {value!r} as {name!r}, which is no number.") from error
        return found


def _scored(name: str, reward: Reward | None, rollout: Rollout) -> dict[str, Tensor]:
    """The scores of a rollout, and of a weighted sum those of each part; nothing without a reward."""
    if reward is None:
        return {}
    with within(name) if name == "judge" else nullcontext(), _unchanged(reward):
        total = total_scores(score_with(reward, rollout))
    return {name: total, **{f"{name}/{part}": of for part, of in getattr(reward, "last_parts", {}).items()}}


@contextmanager
def _unchanged(reward: Reward | None) -> Iterator[None]:
    """What is measured leaves no trace in what is trained on, nor in the scores of a later batch: by two states they
    could not be compared."""
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
    """Sample n responses to each prompt and keep the one that the reward scores highest; of equals the first. A reward
    that changes as it goes scores each batch as it is, and is left so."""
    if n < 1 or len(prompts) == 0:
        raise ValueError(f"best_of needs at least one prompt and one sample; got {len(prompts)} prompts and n = {n}")
    rollouts, scores = [], []
    for rows in batches([row for row in prompts for _ in range(n)], batch_size * processes.count()):
        rollouts.append(sampler(sampler.collator(rows)))
        with _unchanged(reward):
            scores.append(total_scores(score_with(reward, rollouts[-1])))
    candidates, by_prompt = concatenate(rollouts), torch.cat(scores).view(len(prompts), n)
    best = by_prompt.argmax(dim=1).tolist()
    return BestOf(candidates, by_prompt, select(candidates, [i * n + j for i, j in enumerate(best)]))
