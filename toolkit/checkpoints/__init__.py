"""A run's whole state on disk: written so that no kill can lose it, read so that nothing damaged is trusted.

Knows no trainer. `folders.py` makes a checkpoint folder appear whole or not at all, `state.py` writes nested state
without pickle, `random_states.py` gathers every generator that a run draws from.
"""

from toolkit.checkpoints.folders import (
    MANIFEST,
    checkpoint_folders,
    newest_whole,
    problem_of,
    rotate,
    set_aside_later,
    step_of,
    whole_folder,
)
from toolkit.checkpoints.random_states import get_random_states, kept_random_states, set_random_states
from toolkit.checkpoints.state import STATE_FILE, read_state, write_state
from toolkit.checkpoints.stop import StopRequest, stop_requests

__all__ = [
    "MANIFEST",
    "STATE_FILE",
    "StopRequest",
    "checkpoint_folders",
    "get_random_states",
    "kept_random_states",
    "newest_whole",
    "problem_of",
    "read_state",
    "rotate",
    "set_aside_later",
    "set_random_states",
    "step_of",
    "stop_requests",
    "whole_folder",
    "write_state",
]
