"""Data sets and collators; knows datasets and a tokenizer.

A `Task` gives the rows of each stage and the metrics of a rollout: `doubling` and `instructions` make their own;
`preferences` reads pairs in hh-rlhf's form and TRL's, `prompts` prompts and responses to imitate, `labelled` responses
with a class, `rated` responses with rewards, from any source that `sources` knows.
"""

from toolkit.data.batches import (
    LabelledCollator,
    PlacedDataLoader,
    PromptCollator,
    RatedCollator,
    data_digest,
    pad_rows,
)
from toolkit.data.chat_template import with_opening
from toolkit.data.doubling import Doubling
from toolkit.data.encoder import PromptEncoder
from toolkit.data.given import GivenPrompts
from toolkit.data.instructions import PER_RULE, Instructions
from toolkit.data.labelled import Labelled
from toolkit.data.preferences import Preferences
from toolkit.data.prompts import Demonstrations, Prompts
from toolkit.data.rated import RatedResponses, check_rated
from toolkit.data.rollouts import Rollout, concatenate, select
from toolkit.data.rows import parts_of, values_of
from toolkit.data.rules import check_rules, instruction, keeps, share_kept
from toolkit.data.source_kinds import source_digest
from toolkit.data.sources import read_rows
from toolkit.data.task import Kind, Task

TASKS: dict[str, type[Task]] = {
    kind.task: kind for kind in (Doubling, Instructions, Preferences, Demonstrations, Labelled, Prompts, RatedResponses)
}
