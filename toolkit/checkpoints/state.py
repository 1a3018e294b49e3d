"""Nested state without pickle, the structure as JSON, the tensors in safetensors beside it; and every random state.

JSON has no tuples, and only text for keys, and both matter to optimizers. `{"tuple": […]}` and `{"map": [[key,
value], …]}` stand for them, `{"tensor": name}` for a tensor; every dict is a map, so that no key can be mistaken.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.errors import CheckpointError

STATE_FILE = "state.json"
TENSORS_FILE = "state.safetensors"


def _encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()  # a mean of float32 scores is one of NumPy's own numbers
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        name = place if place not in tensors else f"{place} {len(tensors)}"  # "a.b" is "b" in "a", too
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()  # safetensors refuses shared memory
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int | float | None):
                wrong = f"{place} has the key {key!r}, a {type(key).__name__}, which cannot be saved."
                raise CheckpointError(wrong, remedy="Make keys of text or whole numbers.")
        return {"map": [[key, _encode(item, f"{place}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    wrong = f"{place} is a {type(value).__name__}, which cannot be saved without pickle."
    raise CheckpointError(wrong, remedy="Make state of numbers, text, lists, tuples, dicts and tensors.")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    return {key: _decode(item, tensors) for key, item in content}


def check_state(state: dict[str, Any], name: str) -> None:
    """Raises: CheckpointError: `write_state` could not write it; `name` is what it is called in the message."""
    _encode(state, name, {})


def write_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Write nested state into a folder; tensors keep their type, floats every bit.

    It is of dicts (keys: text or whole numbers), lists, tuples, numbers, text, None and tensors, or a CheckpointError.
    NumPy's numbers are read back as Python's.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(state, "state", tensors)
    save_file(tensors, Path(folder) / TENSORS_FILE)
    (Path(folder) / STATE_FILE).write_text(json.dumps(encoded) + "\n", encoding="utf-8")


def read_state(folder: str | Path) -> dict[str, Any]:
    """What `write_state` wrote, tensors on the CPU. Raises: CheckpointError: there is none, or it is damaged."""
    folder = Path(folder)
    if not (folder / STATE_FILE).is_file():
        raise CheckpointError(f"{folder} holds weights alone and no {STATE_FILE}: training cannot go on from it.")
    try:
        tensors = load_file(folder / TENSORS_FILE)
        return _decode(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the saved state cannot be read ({error}).") from error


def get_random_states() -> dict[str, Any]:
    """Every global generator's state: Python's, NumPy's, torch's on the CPU and on each GPU; for `write_state`."""
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
