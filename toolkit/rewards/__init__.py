"""Reward callbacks: called with a rollout, they return one score for each response, or `DenseScores` within it.

`RewardAdapter` reads the reward role on the shared base, `RewardModel` a checkpoint with a base and tokenizer of its
own, `RemoteReward` asks an HTTP server, `WeightedSum` adds others up, and `load_function` finds a plain Python
function, sync or async, by name. Anything callable of the same form will do. What a recipe says of each is a `Scorer`,
in the same module. A new kind is a module with the two, and a name in `SCORERS`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from toolkit.rewards.adapter import AdapterScorer, RewardAdapter, read_sequences
from toolkit.rewards.base import Reward, ScoreLike, check_scores, score_with, state_of
from toolkit.rewards.dense import DenseScores, Scores, concatenate_scores, select_scores, total_scores
from toolkit.rewards.function import FunctionScorer, load_function
from toolkit.rewards.model import ModelScorer, RewardModel
from toolkit.rewards.remote import RemoteReward, RemoteScorer
from toolkit.rewards.scorer import Scorer, ScorerContext
from toolkit.rewards.weighted import SumScorer, WeightedSum

DEFAULT_KIND = AdapterScorer.kind
SCORERS: dict[str, type[Scorer]] = {
    scorer.kind: scorer for scorer in (AdapterScorer, FunctionScorer, ModelScorer, RemoteScorer, SumScorer)
}

__all__ = [
    "DEFAULT_KIND",
    "SCORERS",
    "DenseScores",
    "RemoteReward",
    "Reward",
    "RewardAdapter",
    "RewardModel",
    "ScoreLike",
    "Scorer",
    "ScorerContext",
    "Scores",
    "WeightedSum",
    "check_scores",
    "concatenate_scores",
    "load_function",
    "read_sequences",
    "score_with",
    "scorer_of",
    "select_scores",
    "state_of",
    "total_scores",
]


def scorer_of(values: Mapping[str, Any]) -> Scorer:
    """A scorer from the keys of a recipe, `kind` among them; a null is as if it were not there.

    Raises:
        ConfigError: as its kind says.
    """
    given = {key: value for key, value in values.items() if value is not None}
    scorer = SCORERS[given.pop("kind", DEFAULT_KIND)]
    given = {field.name: "" for field in fields(scorer) if field.default is MISSING} | given  # it refuses "" itself
    if scorer is SumScorer:
        given["parts"] = {name: scorer_of(part) for name, part in dict(given["parts"]).items()}
    return scorer(**given)
