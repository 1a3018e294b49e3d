"""A run's whole state on disk: written so that no kill can lose it, read so that nothing damaged is trusted.

Knows no trainer. `folders.py` makes a checkpoint folder appear whole or not at all, `state.py` writes nested state
without pickle and gathers every generator that a run draws from, `stop.py` notes a request to stop.
"""

from toolkit.checkpoints.folders import (
    CHECKPOINT,
    checkpoint_folders,
    checkpoints_in,
    newest_whole,
    problem_of,
    rotate,
    step_of,
    whole_folder,
)
from toolkit.checkpoints.state import (
    check_state,
    get_random_states,
    kept_random_states,
    read_state,
    set_random_states,
    write_state,
)
from toolkit.checkpoints.stop import STOPS, StopRequest, signals_to, stop_requests
