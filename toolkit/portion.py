"""How many rows are computed at a time, halved where the memory of a GPU does not hold them."""

from collections.abc import Callable
from typing import TypeVar

import torch

from toolkit import phases
from toolkit.errors import PeerError

T = TypeVar("T")


class Portion:
    """Rows that a forward pass takes at a time: a matter of memory alone, since all results are sums over rows.

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

    def __call__(self, attempt: Callable[[int], T], *, most: int | None = None) -> T:
        """The result of an attempt with so many rows at a time, of which there are `most`; with half as many where
        memory runs out.

        An attempt begins anew each time, in all of several processes, if it ran out in one of them.

        Raises:
            torch.OutOfMemoryError: one row at a time is too many.
        """
        while True:
            size = self.rows if most is None else max(1, min(self.rows, most))
            try:
                return attempt(size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            except PeerError as error:
                if size == 1 or error.of != torch.OutOfMemoryError.__name__:
                    raise
            # Out of the handler: its traceback holds the tensors.
            self.lower(size // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
