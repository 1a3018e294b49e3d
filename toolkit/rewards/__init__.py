"""Reward callbacks: called with a rollout, they return one score for each response, or `DenseScores` within it.

`RewardAdapter` reads the reward role on the shared base, `RewardModel` a checkpoint with a base and tokenizer of its
own, `RemoteReward` asks an HTTP server, `WeightedSum` adds others up, and `load_function` finds a plain Python
function, sync or async, by name. Anything callable of the same form will do.
"""

from toolkit.rewards.adapter import Judge, RewardAdapter, read_sequences
from toolkit.rewards.base import Reward, check_scores, score_with
from toolkit.rewards.dense import DenseScores, Scores, concatenate_scores, select_scores, total_scores
from toolkit.rewards.function import load_function
from toolkit.rewards.model import RewardModel
from toolkit.rewards.remote import RemoteReward
from toolkit.rewards.section import PartSection, ScorerSection
from toolkit.rewards.weighted import WeightedSum

__all__ = [
    "DenseScores",
    "Judge",
    "PartSection",
    "RemoteReward",
    "Reward",
    "RewardAdapter",
    "RewardModel",
    "ScorerSection",
    "Scores",
    "WeightedSum",
    "check_scores",
    "concatenate_scores",
    "load_function",
    "read_sequences",
    "score_with",
    "select_scores",
    "total_scores",
]
