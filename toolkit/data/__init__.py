"""Data sets and collators; knows datasets and a tokenizer.

A task gives the rows of each stage and the metrics of a rollout: `doubling` makes its own, `preferences`
reads pairs in hh-rlhf's form.
"""

from toolkit.data.collators import LabelledCollator, PromptCollator, pad_rows
from toolkit.data.doubling import Doubling
from toolkit.data.preferences import Preferences
from toolkit.data.rollouts import Rollout, concatenate

TASKS: dict[str, type] = {"doubling": Doubling, "preferences": Preferences}

__all__ = [
    "TASKS",
    "Doubling",
    "LabelledCollator",
    "Preferences",
    "PromptCollator",
    "Rollout",
    "concatenate",
    "pad_rows",
]
