"""Reward callbacks: called with a rollout, they return one score for each response, or `DenseScores` within it.

`RewardAdapter` reads the reward role on the shared base, `RewardModel` a checkpoint with a base and tokenizer of its
own, `RemoteReward` asks an HTTP server, `KeptRules` checks rules, `WeightedSum` adds others up, and `load_function`
finds a plain Python function, sync or async, by name. Anything callable of the same form will do. What a recipe says of
each is a `Scorer`, in the same module. A new kind is a module with the two, and a name in `SCORERS`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from toolkit.errors import ConfigError, Problem
from toolkit.rewards.adapter import AdapterScorer, RewardAdapter, read_sequences
from toolkit.rewards.base import Reward, ScoreLike, check_reward, check_scores, code_digests, score_with, state_of
from toolkit.rewards.dense import DenseScores, Scores, concatenate_scores, select_scores, total_scores
from toolkit.rewards.function import FunctionScorer, in_no_file, load_function
from toolkit.rewards.model import ModelScorer, RewardModel
from toolkit.rewards.remote import RemoteReward, RemoteScorer
from toolkit.rewards.rules import KeptRules, RulesScorer
from toolkit.rewards.scorer import Prompts, Scorer, ScorerContext
from toolkit.rewards.weighted import LEVELS, SumScorer, WeightedSum

DEFAULT_KIND = AdapterScorer.kind
SCORERS: dict[str, type[Scorer]] = {
    scorer.kind: scorer for scorer in (AdapterScorer, FunctionScorer, ModelScorer, RemoteScorer, RulesScorer, SumScorer)
}


def scorer_of(values: Mapping[str, Any]) -> Scorer:
    """A scorer from the keys of a recipe, `kind` among them; a null is as if it were not there.

    Raises:
        ConfigError: as its kind says, or a key is missing.
    """
    given = {key: value for key, value in values.items() if value is not None}
    scorer = SCORERS[given.pop("kind", DEFAULT_KIND)]
    needed = (field for field in fields(scorer) if field.default is MISSING and field.name not in given)
    missing = [Problem(f"is needed by kind: {scorer.kind} ({f.metadata['help'].rstrip('.')}).", f.name) for f in needed]
    if missing:
        raise ConfigError(scorer.__name__, problems=missing)
    if scorer is SumScorer:
        given["parts"] = {name: scorer_of(part) for name, part in dict(given["parts"]).items()}
    return scorer(**given)
