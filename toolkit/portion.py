"""How many rows are computed at a time, halved where the memory of a GPU does not hold them."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from toolkit import phases, processes
from toolkit.errors import PeerError

T = TypeVar("T")


def by_tokens(lengths: Sequence[int], rows: Sequence[int], size: int, *, packed: bool = False) -> list[list[int]]:
    """Rows for one pass after the other, those of similar length together, the longest first.

    A pass has no more tokens than `size` of the longest rows there are: memory grows with tokens, and so many have to
    fit in any case. Where rows are shorter it takes more of them. There are as few passes as that allows, and the
    largest is as small as it can be.

    Args:
        lengths: tokens of every row, of which `rows` are some.
        packed: whether rows stand one after the other in a line; else each is as wide as the longest of its pass.
    """
    order = sorted(rows, key=lambda row: lengths[row], reverse=True)

    def passes(most: int) -> list[list[int]]:
        found: list[list[int]] = []
        width = taken = 0
        for row in order:
            cost = lengths[row] if packed else width
            if not found or taken + cost > most:
                found.append([])
                width = cost = lengths[row]
                taken = 0
            found[-1].append(row)
            taken += cost
        return found

    longest = max(lengths, default=0)
    fewest, limits = len(passes(size * longest)), range(longest, size * longest + 1)
    return passes(limits[bisect_left(limits, True, key=lambda most: len(passes(most)) <= fewest)]) if order else []


_OF_THE_CARD = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # what a kernel or a library takes itself


def ran_out(error: RuntimeError) -> bool:
    """Whether it is memory that ran out: PyTorch's, or what else a card has."""
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in _OF_THE_CARD)


def _can_halve(error: RuntimeError) -> bool:
    """Of the card's own memory several processes tell each other by another name, and end."""
    return isinstance(error, torch.OutOfMemoryError) or (processes.count() == 1 and ran_out(error))


def at_one_row(error: BaseException) -> bool:
    """Whether memory ran out where a `Portion` was down to one row."""
    return getattr(error, "of_one_row", False)


class Portion:
    """Rows that a forward pass takes at a time: a matter of memory alone, since all results are sums over rows.

    Of rows that are not the longest a pass takes more, by `by_tokens`.

    Args:
        setting: what says how many they are.
        rows: so many at first.
    """

    def __init__(self, setting: str, rows: int):
        self.setting, self.rows = setting, rows

    def lower(self, rows: int) -> None:
        """From here on no more than so many, which a person is told."""
        if rows < self.rows:
            self.rows = rows
            same = "the batch, and with it every gradient, stays as it is"
            phases.tell(f"The GPU's memory ran out: from here on {self.setting} is {rows} ({same}).")

    def __call__(self, attempt: Callable[[int], T], *, most: int) -> T:
        """The result of an attempt with so many rows at a time, of which there are `most`; with half as many where
        memory runs out.

        An attempt begins anew each time, in all of several processes, if it ran out in one of them.

        Raises:
            torch.OutOfMemoryError: one row at a time is too many, which `at_one_row` tells from another.
        """
        while True:
            size = max(1, min(self.rows, most))
            try:
                return attempt(size)
            except PeerError as error:
                if size == 1 or error.of != torch.OutOfMemoryError.__name__:
                    raise
            except RuntimeError as error:
                if not _can_halve(error):
                    raise
                if size == 1:
                    ended = torch.OutOfMemoryError(str(error))
                    ended.of_one_row = True  # type: ignore[attr-defined]
                    raise ended from error
            # Out of the handler: its traceback holds the tensors.
            self.lower(size // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
