"""Every global generator that a run can draw from: Python's, NumPy's, torch's on the CPU and on each GPU."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


def get_random_states() -> dict[str, Any]:
    """Their states, as `write_state` can write them."""
    name, keys, position, has_gauss, gauss = cast(tuple, np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `get_random_states` gave. GPUs that were not there keep theirs."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Whatever is drawn inside, the generators afterwards are as they were before."""
    states = get_random_states()
    try:
        yield
    finally:
        set_random_states(states)
