"""Data sets and collators; knows datasets and a tokenizer.

A `Task` gives the rows of each stage and the metrics of a rollout: `doubling` makes its own, `preferences` reads pairs
in hh-rlhf's form and TRL's, `demonstrations` responses to imitate, `prompts` prompts, `rated` responses with rewards,
from any source that `sources` knows.
"""

from toolkit.data.batches import (
    LabelledCollator,
    PlacedDataLoader,
    PromptCollator,
    RatedCollator,
    data_digest,
    pad_rows,
)
from toolkit.data.demonstrations import Demonstrations
from toolkit.data.doubling import Doubling
from toolkit.data.messages import messages_of_row
from toolkit.data.preferences import Preferences
from toolkit.data.prompts import Prompts
from toolkit.data.rated import RatedResponses, check_rated
from toolkit.data.rollouts import Rollout, concatenate, rollout_of, select
from toolkit.data.sources import read_rows
from toolkit.data.task import Kind, Task

TASKS: dict[str, type[Task]] = {
    kind.task: kind for kind in (Doubling, Preferences, Demonstrations, Prompts, RatedResponses)
}

__all__ = [
    "TASKS",
    "Demonstrations",
    "Doubling",
    "Kind",
    "LabelledCollator",
    "PlacedDataLoader",
    "Preferences",
    "PromptCollator",
    "Prompts",
    "RatedCollator",
    "RatedResponses",
    "Rollout",
    "Task",
    "check_rated",
    "concatenate",
    "data_digest",
    "messages_of_row",
    "pad_rows",
    "read_rows",
    "rollout_of",
    "select",
]
