"""The configuration of the reward stage: TRL's, with what it lacks."""

from dataclasses import dataclass, field
from typing import Literal

from trl import RewardConfig as TRLRewardConfig


@dataclass
class RewardConfig(TRLRewardConfig):
    """TRL's `RewardConfig` and what it lacks."""

    loss: Literal["bradley_terry", "token_level"] = field(
        default="bradley_terry",
        metadata={
            "help": "Of pairs: the difference of the two scores, or that of the two values at every token from the "
            "first where they differ."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in ("bradley_terry", "token_level"):
            raise ValueError(f"loss: bradley_terry or token_level is needed, got {self.loss!r}")
