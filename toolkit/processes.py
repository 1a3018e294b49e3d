"""Several processes that do one run: which rows are whose, and what they tell each other. Knows torch alone.

Every process holds the whole base and takes the same decisions from the same numbers; only forward passes are divided.
Libraries see one process: with their own division of rows and wrappers of modules, adapters that are switched would not
work. Alone, which is without a process group, each function here is what it says of one process, and costs nothing.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.errors import PeerError, ToolkitError

T = TypeVar("T")


_LAUNCHED = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}  # as `join` found them
TIMEOUT = timedelta(hours=12)
"""How long a process waits for another: a rollout, or a reward's server, may take long; one that dies ends the others
by its broken connection and by whoever started them."""


def join() -> None:
    """Become one of the processes that torchrun, `accelerate launch` or `toolkit --processes` started, if they did.

    The environment says which, in torch's variables. Each sees the GPU of its local rank alone.

    Raises:
        ToolkitError: there are more processes on this machine than GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return
    local, backend = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), "gloo"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(map(str, range(torch.cuda.device_count()))) if visible is None else [x for x in visible.split(",") if x]
    if torch.version.cuda and gpus:
        if local >= len(gpus):
            wrong = f"process {local} of this machine has no GPU of its own: {len(gpus)} are visible."
            raise ToolkitError(wrong, remedy="Start as many processes as there are GPUs.")
        os.environ["CUDA_VISIBLE_DEVICES"], backend = gpus[local], "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    # transformers' arguments warn of a group that they did not make, at each of their calls.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.msg)
    for name in _LAUNCHED:  # what accelerate would divide by
        _LAUNCHED[name] = os.environ.pop(name, "")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # what is started from here meets elsewhere


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def environment() -> dict[str, str]:
    """What the process that each of several starts is given, so that these join one another."""
    if count() == 1:
        return dict(os.environ)
    port = str(by_main(free_port))
    launched = {name: value for name, value in _LAUNCHED.items() if value}
    return {**os.environ, **launched, "MASTER_PORT": port}


def count() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0, which is the main one: it alone writes files and speaks to the user."""
    return dist.get_rank() if count() > 1 else 0


def is_main() -> bool:
    return rank() == 0


def own(weights: Sequence[float]) -> list[int]:
    """The items that fall to this process, so that the sums of their weights are close: indices in ascending order.

    The heaviest first, each to the process with the least so far (Graham 1969, longest processing time first).
    """
    loads, mine = [0.0] * count(), []
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        least = min(range(len(loads)), key=loads.__getitem__)
        loads[least] += weights[i]
        if least == rank():
            mine.append(i)
    return sorted(mine)


def gather(value: T) -> list[T]:
    """The value of each process, in order of rank; it is copied through pickle, between processes of one run."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    with _connected():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"the connection of process {rank()} of {count()} to another is broken: {error}") from error


@contextmanager
def agreed() -> Iterator[None]:
    """An error that one process raises inside is raised by all at the end, so that none waits for it for ever.

    Raises:
        PeerError: another process has failed; its message, and which it was.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        told = None if error is None else (type(error).__name__, str(error))
        failed = [(i, *told) for i, told in enumerate(gather(told)) if told is not None]
        if error is None and failed:
            at, name, text = failed[0]
            peer = PeerError(f"process {at} of {count()}: {name}: {text}")
            peer.of = name
            raise peer


def by_main(call: Callable[[], T]) -> T:
    """What the main process gets by a call that it alone makes; an error of it is raised by all."""
    result: list[Any] = [None]
    with agreed():
        if is_main():
            result[0] = call()
    if count() > 1:
        with _connected():
            dist.broadcast_object_list(result, src=0)
    return result[0]


def sum_(tensors: Iterable[Tensor]) -> None:
    """Add up each tensor over the processes, in place and in one message for each dtype; they are on one device."""
    if count() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in same])
        with _connected():
            dist.all_reduce(flat)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
