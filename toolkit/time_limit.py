"""A limit of time for what others have written: a template that loops, a pattern that tries every way."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 10.0
"""For what takes milliseconds."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Inside, Python code ends in a TimeoutError after so many seconds.

    By a timer of the system, so that it holds in the main thread alone, and not on Windows.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:.0f} s")

    handler, started = signal.signal(signal.SIGALRM, stop), time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # of somebody else's timer
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3))
