"""A weighted sum of rewards as a reward callback."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.data import Rollout
from toolkit.errors import Problem, RewardError, within
from toolkit.rewards.base import Reward, RewardState, check_reward, check_scores, score_with, state_of
from toolkit.rewards.dense import Scores, total_scores, weighted_scores
from toolkit.rewards.scorer import Scorer, ScorerContext
from toolkit.settings import Range, setting

_PARTS = "by a name of yours, each a scorer with a `weight`: its share in the sum, 1 by default; 0 logs it alone."
_NO_PARTS = "a sum needs at least one part."
_SPREAD = "spread"


def _no_spread(coef: float | None, weights: Mapping[str, float]) -> str:
    """Why the parts of a sum have none that could be taken; "" where they have one, or nobody asks."""
    if coef is None:
        return ""
    if _SPREAD in weights:
        return f'logs the spread of the scores as "{_SPREAD}", which a part is called.'
    return "" if sum(map(bool, weights.values())) > 1 else "would have no effect: a spread is of two parts or more."


class WeightedSum:
    """Scores with Σᵢ weightᵢ · scoreᵢ over its parts, less `spread_coef` standard deviations of these scores.

    A weight that is not given is the part's own, where that is a scorer such as `RemoteReward`, and 1.0 of any other; 0
    logs a part and leaves it out. Where a part with a weight gives scores at
    tokens or spans, so does the sum. After each call `last_parts` holds the scores of every part by name, float32 (B,),
    before the weights: the PPO trainer logs their means as `score/<name>`. What parts have as a state is the sum's.

    The standard deviation is that of an ensemble, without Bessel's correction, over the parts that have a weight: where
    rewards that were trained alike differ, they have met little of the kind (the lower confidence bound of Zhai et al.
    2023, arXiv 2401.00243, section 4; with the variance Coste et al. 2023, arXiv 2310.02743, equation 4). With a
    `spread_coef` it is a part of its own in `last_parts`, "spread", which 0 logs alone. It is given at the last token.

    Raises: RewardError: no parts, a weight for a part that is not there, or a spread of less than two.

    Example:
        >>> both = WeightedSum({"short": lambda r: [-n for n in r.lengths], "ended": lambda r: r.ended}, {"ended": 5.0})
        >>> both(Rollout(["a", "b"], ["", ""], [[1], [1]], [[2], [3, 4]], [True, False])).tolist()
        [4.0, -2.0]
    """

    def __init__(
        self,
        parts: Mapping[str, Reward],
        weights: Mapping[str, float] | None = None,
        *,
        spread_coef: float | None = None,
    ):
        self.parts: dict[str, Any] = dict(parts)
        weights = weights or {}
        if not parts:
            raise RewardError(_NO_PARTS, field="parts")
        if unknown := [name for name in weights if name not in parts]:
            raise RewardError(f"a sum has no part {', '.join(unknown)}; it has {', '.join(parts)}.", field="weights")
        for name, part in parts.items():
            if not isinstance(part, Scorer):
                check_reward(part, f"parts.{name}")
        own = {name: part.weight if isinstance(part, Scorer) else 1.0 for name, part in parts.items()}
        self.weights = {name: float(weights.get(name, own[name])) for name in parts}
        self.spread_coef = spread_coef
        if wrong := _no_spread(spread_coef, self.weights):
            raise RewardError(wrong, field="spread_coef")
        self.last_parts: dict[str, Tensor] = {}

    on_every_process = True

    def __call__(self, rollout: Rollout) -> Scores:
        scores: dict[str, Scores] = {}
        for name, part in self.parts.items():
            with within(f"parts.{name}"):
                scores[name] = score_with(part, rollout)
        self.last_parts, weights = {name: total_scores(part) for name, part in scores.items()}, self.weights
        if self.spread_coef is not None:
            paid = [part for name, part in self.last_parts.items() if weights[name]]
            self.last_parts[_SPREAD] = scores[_SPREAD] = torch.stack(paid).std(dim=0, correction=0)
            weights = {**weights, _SPREAD: -self.spread_coef}
        with within("weights"):
            return check_scores(weighted_scores(list(scores.values()), [*weights.values()]), rollout)

    def state_dict(self) -> dict[str, Any]:
        return {name: state.state_dict() for name, state in self._states().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._states().items():
            if name in state:  # a part that has got one since begins anew
                part.load_state_dict(state[name])

    def _states(self) -> dict[str, RewardState]:
        return {name: state for name, part in self.parts.items() if (state := state_of(part)) is not None}


@dataclass(kw_only=True)
class SumScorer(Scorer):
    """A weighted sum of scorers of the other kinds."""

    kind: ClassVar[str] = "sum"
    parts: dict[str, Any] = field(metadata={"help": _PARTS})
    spread_coef: float | None = setting(
        None,
        "subtracts so many standard deviations of the parts' scores from the sum, over parts with a weight; "
        "0 logs them alone.",
        Range("0 or more and finite", lambda value: 0 <= value < math.inf),
    )

    def conflicts(self) -> Iterator[Problem]:
        if not self.parts:
            yield Problem(_NO_PARTS, "parts")
        elif wrong := _no_spread(self.spread_coef, {name: part.weight for name, part in self.parts.items()}):
            yield Problem(wrong, "spread_coef")
        for name, part in self.parts.items():
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                wrong = f"{name!r} cannot name a part: its mean is logged as score/NAME."
                yield Problem(wrong, "parts", "Use letters, digits, _ . -")
            if isinstance(part, SumScorer):
                yield Problem("is a sum within a sum.", f"parts.{name}", "Give its parts to the outer one.")

    def check(self, context: ScorerContext) -> list[Problem]:
        return [p.within(f"parts.{name}") for name, part in self.parts.items() for p in part.check(context)]

    def outlines(self) -> Iterator[PreTrainedModel]:
        for part in self.parts.values():
            yield from part.outlines()

    def build(self, context: ScorerContext) -> Reward:
        rewards = {}
        for name, part in self.parts.items():
            with within(f"parts.{name}"):
                rewards[name] = part.build(context)
        weights = {name: part.weight for name, part in self.parts.items()}
        return WeightedSum(rewards, weights, spread_coef=self.spread_coef)
