"""Rewards by rule, for recipes that need no reward model."""

from toolkit.data import Rollout


def right_answer(rollout: Rollout) -> list[float]:
    """1 where a response ended and is exactly what the column `answer` says, 0 where it is anything else."""
    rows = zip(rollout.responses, rollout.columns["answer"], rollout.ended, strict=True)
    return [float(ended and text == wanted) for text, wanted, ended in rows]


def short_and_whole(rollout: Rollout) -> list[float]:
    """1 where a response has five words or more and ended by itself, 0 where it is shorter or the limit cut it."""
    rows = zip(rollout.responses, rollout.ended, strict=True)
    return [float(ended and len(text.split()) >= 5) for text, ended in rows]
