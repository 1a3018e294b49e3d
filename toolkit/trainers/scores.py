"""From the scores of a reward to those that are trained on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.errors import RewardError
from toolkit.functional import Moments, update_moments
from toolkit.rewards import Scores
from toolkit.trainers.ppo_config import PPOConfig


class PlacedScores(NamedTuple):
    """Scores of B responses; (B,) each."""

    logged: Tensor
    """As the reward gave them."""
    trained: Tensor
    """Scaled and clipped, then with the penalties."""
    at_end: Tensor
    """The share of `trained` that stands at the last token: all of it, unless the reward is dense."""


class ScoreShaper:
    """Scales, centres and clips scores by what was seen so far, as TRL up to 0.11 did under the same names.

    `use_score_scaling` divides by the running standard deviation, `use_score_norm` takes the running mean away first,
    `score_clip` then cuts at ± its value. The scores of an update are among those that its moments are of.

    Args:
        args: says what is done.
    """

    def __init__(self, args: PPOConfig):
        self.args = args
        self.moments = Moments()

    @property
    def active(self) -> bool:
        """Whether it changes scores at all."""
        return self.args.use_score_scaling or self.args.score_clip is not None

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores to train on, (B,); remembers those that it is given."""
        args = self.args
        if args.use_score_scaling:
            self.moments = update_moments(self.moments, scores)
            centre = self.moments.mean if args.use_score_norm else 0.0
            scores = (scores - centre) / self.moments.std
        return scores if args.score_clip is None else scores.clamp(-args.score_clip, args.score_clip)

    def place(self, scores: Scores, penalize: Callable[[Tensor], Tensor]) -> "PlacedScores":
        """Scores as they are logged, as they are trained on, and where.

        Args:
            scores: of B responses.
            penalize: takes penalties from (B,) scores.

        Raises:
            RewardError: dense scores, with a setting that is for one number a response.
        """
        if isinstance(scores, Tensor):
            shaped = penalize(self(scores))
            return PlacedScores(scores, shaped, shaped)
        if self.active:
            raise RewardError(
                "the reward gives scores within responses (DenseScores), and ppo.use_score_scaling and ppo.score_clip "
                "are for one number a response. Leave them out, and scale in the reward."
            )
        return PlacedScores(scores.total, penalize(scores.total), penalize(torch.as_tensor(scores.scores)))

    def state_dict(self) -> dict[str, Any]:
        return self.moments._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = Moments(**state)
