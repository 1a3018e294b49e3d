"""What a reward finds in the process and must leave as it is: random states, torch's defaults, the working folder, the
standard streams, how Ctrl-C is met, which warnings are shown."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints import STOPS, get_random_states, set_random_states


def _set_handlers(handlers: list[Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # no other can, or could have changed them
        for one, handler in zip(STOPS, handlers, strict=True):
            signal.signal(one, handler)


def _folder() -> str:
    """The working folder; no name where it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _to_folder(folder: str) -> None:
    if folder:
        os.chdir(folder)


# Where a program sets the precision of products; the first is torch's older way, which reads no setting of the others.
_PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


def _products() -> list[str | None]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the others were set without it, as transformers' `tf32` does
        older = None
    return [older, *(one.fp32_precision for one in _PRODUCTS)]


def _set_products(precisions: list[Any]) -> None:
    older, *others = precisions
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for one, precision in zip(_PRODUCTS, others, strict=True):
        if one.fp32_precision != precision:
            one.fp32_precision = precision


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # one that is set costs each call of torch time


def _set_streams(streams: list[Any]) -> None:
    sys.stdout, sys.stderr = streams


_OF_THE_RUN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the working folder": (_folder, _to_folder),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, _set_device),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's precision of products": (_products, _set_products),
    "torch's choice of algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "standard output or error": (lambda: [sys.stdout, sys.stderr], _set_streams),
    "how Ctrl-C, SIGTERM or SIGHUP is met": (lambda: [signal.getsignal(one) for one in STOPS], _set_handlers),
    "the random state of Python, NumPy or torch": (get_random_states, set_random_states),
}


_DREW = " Its draws may then repeat at each call: give it a generator of its own, such as random.Random(0)."


@contextmanager
def process_kept() -> Iterator[None]:
    """Whatever code of a user's does inside, the run goes on as without it; a warning says what was put back."""
    before = {what: read() for what, (read, _) in _OF_THE_RUN.items()}
    shown = list(warnings.filters)
    try:
        yield
    finally:
        if warnings.filters != shown:  # not told: libraries that are imported set some, too
            warnings.resetwarnings()  # by which Python notices that they change
            warnings.filters = shown
        for what, (read, write) in _OF_THE_RUN.items():
            if not _equal(read(), before[what]):
                write(before[what])
                drew = _DREW if read is get_random_states else ""
                warnings.warn(f"the reward changed {what}, which is the run's: it was put back.{drew}", stacklevel=4)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
