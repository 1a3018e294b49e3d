"""Data sets and collators; knows datasets and a tokenizer.

A task gives the rows of each stage and the metrics of a rollout: `doubling` makes its own, `preferences`
reads pairs in hh-rlhf's form and TRL's, `demonstrations` answers to imitate, `prompts` prompts, `rated` responses with
rewards, from any source that `sources` knows.
"""

from toolkit.data.chat import messages_of_row
from toolkit.data.collators import LabelledCollator, PromptCollator, pad_rows
from toolkit.data.columns import renamed
from toolkit.data.demonstrations import Demonstrations
from toolkit.data.digest import data_digest
from toolkit.data.doubling import Doubling
from toolkit.data.loader import PlacedDataLoader
from toolkit.data.preferences import Preferences
from toolkit.data.prompts import Prompts
from toolkit.data.rated import RatedCollator, RatedResponses, check_rated
from toolkit.data.rollouts import Rollout, concatenate, rollout_of, select
from toolkit.data.sources import read_rows

TASKS: dict[str, type] = {
    "doubling": Doubling,
    "preferences": Preferences,
    "demonstrations": Demonstrations,
    "prompts": Prompts,
    "rated": RatedResponses,
}

__all__ = [
    "TASKS",
    "Demonstrations",
    "Doubling",
    "LabelledCollator",
    "PlacedDataLoader",
    "Preferences",
    "PromptCollator",
    "Prompts",
    "RatedCollator",
    "RatedResponses",
    "Rollout",
    "check_rated",
    "concatenate",
    "data_digest",
    "messages_of_row",
    "pad_rows",
    "read_rows",
    "renamed",
    "rollout_of",
    "select",
]
