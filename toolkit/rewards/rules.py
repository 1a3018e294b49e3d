"""Functions for `kind: function` in the shipped recipes; a kind of its own has its own module."""

import re

from toolkit.data import Rollout
from toolkit.rewards.dense import DenseScores

_WORD = re.compile(r"[^\W\d_]+")
_LETTERS = 6


def right_answer(rollout: Rollout) -> list[float]:
    """1 where a response ended and is exactly what the column `answer` says, 0 where it is anything else."""
    rows = zip(rollout.responses, rollout.columns["answer"], rollout.ended, strict=True)
    return [float(ended and text == wanted) for text, wanted, ended in rows]


def plain_words(rollout: Rollout) -> DenseScores:
    """−1 for each word of more than six letters, given at the token with which it is complete."""
    return DenseScores(
        spans=[
            [(*word.span(), -1.0) for word in _WORD.finditer(text) if len(word.group()) > _LETTERS]
            for text in rollout.responses
        ]
    )
