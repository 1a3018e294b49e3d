"""What passes have freed, on a CPU: kept for those to come, and given back before it piles up."""

import ctypes
import os
from contextlib import suppress
from functools import cache

import psutil
import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_GROWN = 1.25


@cache
def keep_freed_memory() -> ctypes.CDLL | None:
    """Let the C library keep what passes have freed, for those to come.

    glibc gives large tensors back to the system, which clears each page of memory when it is touched again: with
    activations of one micro-batch after another that is a sixth of the time of a stage (docs/what_was_tried.md).
    Whoever has set glibc's thresholds is left alone. On a GPU PyTorch has a cache of its own.

    Returns:
        glibc; None where nothing was changed.
    """
    if torch.cuda.is_available() or os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}:
        return None
    with suppress(OSError, AttributeError, TypeError):  # glibc has them, other C libraries do not
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest that it takes
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        return libc
    return None


class FreedMemory:
    """Gives back what lies free after a step, once the process has grown by a quarter.

    What is kept lies in pieces between what is in use, and activations of other sizes do not fit into them: without
    this a process grows with every step (docs/what_was_tried.md). To give all back after each step would clear its
    pages anew in the next.
    """

    def __init__(self) -> None:
        self._usual: int | None = None  # bytes that are resident after a step that followed on giving back

    def after_step(self) -> None:
        """To be called once after each step."""
        libc = keep_freed_memory()
        if libc is None:
            return
        resident = psutil.Process().memory_info().rss
        if self._usual is None:
            self._usual = resident
        elif resident > _GROWN * self._usual:
            libc.malloc_trim(0)
            self._usual = None
