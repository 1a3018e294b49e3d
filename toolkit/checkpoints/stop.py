"""A request to stop, by Ctrl-C, SIGTERM or a terminal that is gone, that training meets at the end of its step."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from toolkit import phases

STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What asks a run to stop. Windows has no SIGHUP, which comes with the end of a terminal or its connection."""
_AT_ONCE = "A second Ctrl-C ends it at once, without this."


@dataclass
class StopRequest:
    """Whether somebody asked to stop."""

    received: signal.Signals | None = None
    """The signal that asked, None as long as none did."""
    met: bool = False
    """Whether training ends for it, with everything saved; one that comes too late for a step is met by the next."""


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, the signals of `STOPS` call a handler; but SIGHUP none where it is ignored, as under `nohup`.

    In a thread other than the main one, where Python lets nobody handle signals, nothing is changed. A process that was
    forked here, as a worker that reads data, ends by SIGTERM as a library has it end, and lets this one decide about
    Ctrl-C and SIGHUP, which a terminal sends to both: a worker that dies would end the step that is to be saved.
    """
    ours = os.getpid()

    def handled(number: int, frame: FrameType | None) -> None:
        if os.getpid() == ours:
            _leave_what_is_gone()
            handler(number, frame)
        elif number == signal.SIGTERM:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)

    numbers = STOPS if threading.current_thread() is threading.main_thread() else ()
    before = {
        number: earlier
        for number in numbers
        if (earlier := signal.getsignal(number)) != signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in before:
        signal.signal(number, handled)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _leave_what_is_gone() -> None:
    """Let go of a terminal that is gone: what is printed to it would be an error, and all is still to be saved."""
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        with suppress(OSError):  # where there was no stream, the number may have become that of a device
            if stream is not None and stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, number)
                os.close(nothing)


@contextmanager
def stop_requests(meets: Callable[[], str]) -> Iterator[StopRequest]:
    """Inside, the first of `STOPS` is noted instead of ending the process; a second Ctrl-C ends it at once.

    That it was noted is said in the moment, with what `meets` says will be done, since that may be long in coming.
    """
    request, interrupted = StopRequest(), False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted:
            raise KeyboardInterrupt
        # After another signal the first Ctrl-C may be the same stop, which a command has passed on to its stage.
        interrupted = interrupted or number == signal.SIGINT
        if request.received is None:
            request.received = signal.Signals(number)
            name = "Ctrl-C" if number == signal.SIGINT else request.received.name
            phases.tell(f"{name}: {meets()} {_AT_ONCE}")

    with signals_to(note):
        yield request
