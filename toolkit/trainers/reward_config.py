"""The configuration of the reward stage: TRL's, with what it lacks."""

from dataclasses import dataclass
from typing import Literal

from trl import RewardConfig as TRLRewardConfig

from toolkit.settings import check, setting


@dataclass
class RewardConfig(TRLRewardConfig):
    """TRL's `RewardConfig` and what it lacks."""

    loss: Literal["bradley_terry", "token_level"] = setting(
        "bradley_terry",
        "Of pairs: the difference of the two scores, or that of the two values at every token from the first where "
        "they differ.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)
