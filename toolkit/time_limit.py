"""A limit of time and of memory for what others have written: a template that loops or multiplies, a pattern that tries
every way."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def time_limit(seconds: float = 10.0, megabytes: int = 1024) -> Iterator[None]:  # of what takes ms, and kB
    """Inside, Python code ends in a TimeoutError after so many seconds, and in a MemoryError where it takes so many
    megabytes more.

    By a timer and a limit of the system: the time in the main thread alone and not on Windows, the memory on Linux.
    """
    with _memory_limit(megabytes):
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


@contextmanager
def _memory_limit(megabytes: int) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    import resource  # which Windows does not have

    with open("/proc/self/statm", encoding="ascii") as file:  # psutil takes five times as long, at each row of data
        taken = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [taken + megabytes * 2**20, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"it takes more than {megabytes} MB of memory") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
