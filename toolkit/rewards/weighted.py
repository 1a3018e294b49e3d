"""A weighted sum of rewards as a reward callback."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.data import Rollout
from toolkit.errors import Problem, RewardError, within
from toolkit.rewards.adapter import AdapterScorer
from toolkit.rewards.base import Reward, RewardState, check_reward, check_scores, score_with, state_of
from toolkit.rewards.dense import Scores, total_scores, weighted_scores
from toolkit.rewards.scorer import ClassScorer, Scorer, ScorerContext
from toolkit.settings import Range, setting

_PARTS = "by a name of yours, each a scorer with a `weight`: its share in the sum, 1 by default; 0 logs it alone."
_NO_PARTS = "a sum needs at least one part."
_SPREAD = "spread"
LEVELS = "mean_score of the parts"
"""Of what the mean scores are known by where rewards are compared."""
_NO_LEVEL = "its mean score is not known, and the spread needs it: rewards trained on pairs have arbitrary offsets."
_LEVEL_REMEDY = "The reward stage of this version writes it to role.json: train it again, or leave spread_coef out."


def _no_spread(parts: Collection[str], members: Collection[str]) -> str:
    """Why the parts of a sum have none that could be taken; "" where they have one."""
    if _SPREAD in parts:
        return f'logs the spread of the scores as "{_SPREAD}", which a part is called.'
    if len(members) < 2:
        return "would have no effect: a spread needs two or more parts with a weight that were trained on pairs."
    return ""


class WeightedSum:
    """Scores with Σᵢ weightᵢ · scoreᵢ over its parts, less `spread_coef` times the spread of an ensemble among them.

    A weight that is not given is the part's own, where that is a scorer such as `RemoteReward`, and 1.0 of any other; 0
    logs a part and leaves it out. Where a part with a weight gives scores at tokens or spans, so does the sum. After
    each call `last_parts` holds the scores of every part by name, float32 (B,), before the weights: the PPO trainer
    logs their means as `score/<name>`. What parts have as a state is the sum's.

    The ensemble are the parts with a weight that have a `mean_score` and score no classes, as rewards trained on pairs:
    it is what each gives held-out responses on average, which pairs say nothing of. Its spread is the standard
    deviation, without Bessel's correction, of what they give beyond that. Where rewards that were trained alike differ,
    they have met little of the kind (Zhai et al. 2023, arXiv 2401.00243, for LoRA adapters on one base; Coste et al.
    2023, arXiv 2310.02743, take the variance). With a `spread_coef` it is a part of its own in `last_parts`, "spread",
    which 0 logs alone. It is given at the last token.

    Raises: RewardError: no parts, a weight for a part that is not there, an ensemble of less than two, or one of whose
    parts the mean score is not known.

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
            check_reward(part, f"parts.{name}")
        own = {name: part.weight if isinstance(part, Scorer) else 1.0 for name, part in parts.items()}
        self.weights = {name: float(weights.get(name, own[name])) for name in parts}
        self.spread_coef = spread_coef
        self._levels = dict[str, float]()  # of the ensemble
        if spread_coef is not None:
            paid = {name: part for name, part in self.parts.items() if self.weights[name]}
            of_classes = {name for name, part in paid.items() if getattr(part, "scores_class", False)}
            members = [name for name in paid if hasattr(paid[name], "mean_score") and name not in of_classes]
            if wrong := _no_spread(self.parts, members):
                raise RewardError(wrong, field="spread_coef")
            for name in members:
                level = self.parts[name].mean_score
                if level is None:
                    raise RewardError(_NO_LEVEL, field=f"parts.{name}", remedy=_LEVEL_REMEDY)
                self._levels[name] = float(level)
        self.last_parts: dict[str, Tensor] = {}

    on_every_process = True

    def __call__(self, rollout: Rollout) -> Scores:
        scores: dict[str, Scores] = {}
        for name, part in self.parts.items():
            with within(f"parts.{name}"):
                scores[name] = score_with(part, rollout)
        self.last_parts, weights = {name: total_scores(part) for name, part in scores.items()}, self.weights
        if self.spread_coef is not None:
            beyond = [self.last_parts[name] - level for name, level in self._levels.items()]
            self.last_parts[_SPREAD] = scores[_SPREAD] = torch.stack(beyond).std(dim=0, correction=0)
            weights = {**weights, _SPREAD: -self.spread_coef}
        with within("weights"):
            return check_scores(weighted_scores(list(scores.values()), [*weights.values()]), rollout)

    def scoring_digests(self) -> dict[str, str]:
        """SHA-256 of the mean scores from which a spread is measured; nothing without one."""
        text = json.dumps(self._levels, sort_keys=True)
        return {LEVELS: hashlib.sha256(text.encode()).hexdigest()} if self._levels else {}

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
        "lowers the sum by this times the standard deviation of an ensemble's scores. The ensemble is the parts that "
        "were trained on pairs, each less its mean score; 0 only logs the deviation.",
        Range("0 or more and finite", lambda value: 0 <= value < math.inf),
    )

    def conflicts(self) -> Iterator[Problem]:
        if not self.parts:
            yield Problem(_NO_PARTS, "parts")
        if self.spread_coef is not None:
            members = self._members()
            if wrong := _no_spread(self.parts, members):
                yield Problem(wrong, "spread_coef")
            for name, part in members.items():
                if getattr(part, "model", None) is not None:
                    yield Problem(_NO_LEVEL, f"parts.{name}", _LEVEL_REMEDY)
        for name, part in self.parts.items():
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                wrong = f"{name!r} cannot name a part: its mean is logged as score/NAME."
                yield Problem(wrong, "parts", "Use letters, digits, _ . -")
            if isinstance(part, SumScorer):
                yield Problem("is a sum within a sum.", f"parts.{name}", "Give its parts to the outer one.")

    def check(self, context: ScorerContext) -> list[Problem]:
        problems = [p.within(f"parts.{name}") for name, part in self.parts.items() for p in part.check(context)]
        roles = context.roles
        if roles is None or self.spread_coef is None:
            return problems
        for name, part in self._members().items():
            role = part.role_in(context) if isinstance(part, AdapterScorer) else None
            if role in {*roles.roles} - {*context.untrained} and roles.head(role).mean_score is None:
                problems.append(Problem(_NO_LEVEL, f"parts.{name}", _LEVEL_REMEDY))
        return problems

    def _members(self) -> dict[str, ClassScorer]:
        """The ensemble: see `WeightedSum`."""
        own = {name: part for name, part in self.parts.items() if part.weight and isinstance(part, ClassScorer)}
        return {name: part for name, part in own.items() if not part.scores_class}

    def outlines(self) -> Iterator[PreTrainedModel]:
        for name, part in self.parts.items():
            with within(f"parts.{name}"):
                yield from part.outlines()

    def build(self, context: ScorerContext) -> Reward:
        rewards = {}
        for name, part in self.parts.items():
            with within(f"parts.{name}"):
                rewards[name] = part.build(context)
        weights = {name: part.weight for name, part in self.parts.items()}
        return WeightedSum(rewards, weights, spread_coef=self.spread_coef)
