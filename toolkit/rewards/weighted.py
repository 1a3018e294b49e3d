"""A weighted sum of rewards as a reward callback."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from toolkit.data import Rollout
from toolkit.errors import RewardError
from toolkit.rewards.base import Reward, score_with
from toolkit.rewards.dense import Scores, total_scores, weighted_scores


class WeightedSum:
    """Scores with Σᵢ weightᵢ · scoreᵢ over its parts.

    Where a part gives scores at tokens or spans, so does the sum. After each call `last_parts` holds the scores of
    every part by name, float32 (B,), before the weights: the PPO trainer logs their means as `score/<name>`. What parts
    have as a state is the sum's.

    Args:
        parts: rewards by name.
        weights: by the same names; 1.0 where there is none. A weight of 0 logs a part and leaves it out of the sum.

    Raises:
        RewardError: no parts, or a weight for a part that is not there.

    Example:
        >>> both = WeightedSum({"short": lambda r: [-n for n in r.lengths], "ended": lambda r: r.ended}, {"ended": 5.0})
        >>> both(Rollout(["a", "b"], ["", ""], [[1], [1]], [[2], [3, 4]], [True, False])).tolist()
        [4.0, -2.0]
    """

    def __init__(self, parts: Mapping[str, Reward], weights: Mapping[str, float] | None = None):
        unknown = [name for name in weights or {} if name not in parts]
        if unknown or not parts:
            raise RewardError(
                f"a sum has no part {', '.join(unknown)}; it has {', '.join(parts)}."
                if parts
                else "a sum needs at least one part."
            )
        self.parts = dict(parts)
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in parts}
        self.last_parts: dict[str, Tensor] = {}

    def __call__(self, rollout: Rollout) -> Scores:
        scores: dict[str, Scores] = {}
        for name, part in self.parts.items():
            try:
                scores[name] = score_with(part, rollout)
            except RewardError as error:
                raise RewardError(f'part "{name}" of the sum: {error}') from error
        self.last_parts = {name: total_scores(part) for name, part in scores.items()}
        return weighted_scores(list(scores.values()), [self.weights[name] for name in scores])

    def _changing(self) -> dict[str, Any]:
        """Parts with a state. The weights of a frozen network are none."""
        return {
            name: part
            for name, part in self.parts.items()
            if hasattr(part, "state_dict") and not isinstance(part, nn.Module)
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._changing().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._changing().items():
            part.load_state_dict(state[name])
