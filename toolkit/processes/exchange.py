"""Which rows are whose, and what processes tell each other. Knows no model.

Every process holds the whole base and takes the same decisions from the same numbers; only forward passes are divided.
Alone, which is without a process group, each function here is what it says of one process, and costs nothing.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.errors import PeerError, RunInterrupted, ToolkitError

T = TypeVar("T")


@dataclass
class _Place:
    """Where this process is: in how many `alone`, and in how many `agreed`."""

    alone: int = 0
    agreed: int = 0


_place = _Place()
of_cards: list[dist.ProcessGroup] = []
"""The group that sums tensors of cards, where there are cards."""


def count() -> int:
    """Processes of this run; 1 in what one does `alone`."""
    together = dist.is_available() and dist.is_initialized() and not _place.alone
    return dist.get_world_size() if together else 1


def count_here() -> int:
    """Those of them that are on this machine, as launchers say; all where none does."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(count(), int(number)) if number.isdecimal() and int(number) else count()


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


def owner(item: int, of: int) -> int:
    """The process to which one of so many equal items falls that stand in order: each has a run of them."""
    return item * count() // of


def gather(value: T) -> list[T]:
    """The value of each process, in order of rank; it is copied through pickle, between processes of one run."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    with _connected():
        dist.all_gather_object(values, value)
    return values


def first(value: T | None) -> T | None:
    """The value of the first process that has one."""
    return next((one for one in gather(value) if one is not None), None)


@contextmanager
def _connected() -> Iterator[None]:
    """Inside is one exchange, which may be of several messages: Ctrl-C is met after the last of them, since who left
    between two would leave the others out of step. While it waits for a message a process does not meet it anyway."""
    held: list[int] = []
    is_met = threading.current_thread() is threading.main_thread()
    usual = signal.signal(signal.SIGINT, lambda number, frame: held.append(number)) if is_met else None
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())  # NCCL's is of several lines
        raise PeerError(f"the connection of process {rank()} of {count()} to another is broken: {why}") from error
    finally:
        if is_met:
            signal.signal(signal.SIGINT, usual)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def agreed(*, now: bool = True) -> Iterator[None]:
    """An error that one process raises inside is raised by all at the end, so that none waits for it for ever.

    Where not `now`, nobody waits for the others: they hear of an error in the `agreed` that they come to next.

    Raises:
        PeerError: another process has failed; its message, and which it was. Of several that raise one `ToolkitError`,
            or run out of a card's memory, all but the first raise this, so that it is told once.
    """
    error: BaseException | None = None
    within = _place.agreed
    _place.agreed += 1
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _place.agreed = within
        heard = error if isinstance(error, PeerError) else None
        # Of a broken connection nobody could be told; and those who have failed further out wait there no more.
        over = heard is not None and (not heard.of or within >= heard.met)
        if count() > 1 and (now or error is not None) and not over:
            told = None if error is None else (type(error).__name__, str(error))
            places, of_all = zip(*gather((within, told)), strict=True)
            met = min(places)
            failed = [i for i, one in enumerate(of_all) if one is not None]
            # Whoever failed says it last, perhaps in other words than where the others heard of it.
            names = [one[0] for one in of_all if one is not None]
            of = next((name for name in names if name != PeerError.__name__), "" if heard is None else heard.of)
            if heard is not None:
                heard.of, heard.met = of, met
            if failed and (error is None or (failed[0] < rank() and _is_told_by(of_all[failed[0]], error))):
                name, text = of_all[failed[0]] or ("", "")
                peer = PeerError(f"process {failed[0]} of {count()}: {name}: {text}")
                peer.of, peer.met = of or name, met
                raise peer from error


def _is_told_by(told: tuple[str, str] | None, error: BaseException) -> bool:
    """Whether what another process has told says all of an error here; where memory ran out, its sizes differ."""
    if isinstance(error, torch.OutOfMemoryError):
        return told is not None and told[0] == type(error).__name__
    mendable = isinstance(error, ToolkitError) and not isinstance(error, RunInterrupted | PeerError)
    return mendable and told == (type(error).__name__, str(error))


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


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process does by itself what all would divide: the others are elsewhere, and would not answer."""
    _place.alone += 1
    try:
        yield
    finally:
        _place.alone -= 1


def sum_(tensors: Iterable[Tensor]) -> None:
    """Add up each tensor over the processes, in place and in one message for each dtype; they are on one device."""
    if count() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        with agreed():  # before anybody waits: the copy may not fit on one of the cards
            flat = torch.cat([tensor.flatten() for tensor in same])
        with _connected():
            dist.all_reduce(flat, group=of_cards[0] if flat.is_cuda and of_cards else None)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
