"""Reward callbacks: called with a rollout, they return one score for each response.

`RewardAdapter` reads the reward role on the shared base; `load_function` finds a plain Python function
by name. Anything callable of the same form will do.
"""

from toolkit.rewards.adapter import RewardAdapter, read_sequences
from toolkit.rewards.base import Reward, check_scores, score_with
from toolkit.rewards.function import load_function

__all__ = ["Reward", "RewardAdapter", "check_scores", "load_function", "read_sequences", "score_with"]
