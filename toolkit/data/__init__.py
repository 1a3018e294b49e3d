"""Data sets and collators; knows datasets and a tokenizer.

A task gives the rows of each stage and the metrics of a rollout: `doubling` makes its own, `preferences`
reads pairs in hh-rlhf's form, `prompts` reads prompts in any form that `sources` knows, `rated` responses with rewards.
"""

from toolkit.data.chat import messages_of_row
from toolkit.data.collators import LabelledCollator, PromptCollator, pad_rows
from toolkit.data.digest import data_digest
from toolkit.data.doubling import Doubling
from toolkit.data.loader import PlacedDataLoader
from toolkit.data.preferences import Preferences
from toolkit.data.prompts import Prompts
from toolkit.data.rated import RatedCollator, RatedResponses, check_rated
from toolkit.data.rollouts import Rollout, concatenate, select
from toolkit.data.sources import read_rows

TASKS: dict[str, type] = {
    "doubling": Doubling,
    "preferences": Preferences,
    "prompts": Prompts,
    "rated": RatedResponses,
}

__all__ = [
    "TASKS",
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
    "select",
]
