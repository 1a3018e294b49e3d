"""Give memory back between the phases of a run."""

import ctypes
from functools import cache

import torch

# Lengths are rounded up to this. Each new shape costs a CPU a compiled kernel, and memory to keep it (measured on
# SmolLM2-135M: resident memory grows by some 20 MB a length); a GPU's matrix units like multiples of 8 too.
LENGTH_MULTIPLE = 8


@cache
def _libc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim  # noqa: B018  (glibc has it, other C libraries do not)
    except (OSError, AttributeError, TypeError):
        return None
    return library


def release_memory() -> None:
    """Return freed memory to the system, where the C library would keep it.

    Activations of one micro-batch after another are of all sizes; glibc keeps what they leave, and the peak grows
    over a run. On a GPU PyTorch's own cache serves better, and nothing is done.
    """
    library = None if torch.cuda.is_available() else _libc()
    if library is not None:
        library.malloc_trim(0)
