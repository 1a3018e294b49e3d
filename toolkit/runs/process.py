"""A stage in a process of its own, whose end by a signal is not taken for a failure."""

import signal
import subprocess
import threading
from types import FrameType

from toolkit.errors import RunInterrupted, ToolkitError


def run_stage(command: list[str], stage: str, needed_by: str) -> None:
    """Run the command of an earlier stage to its end.

    A terminal sends Ctrl-C to both processes: this one waits while the other finishes its step and saves. SIGTERM
    reaches this one alone, and is passed on.

    Raises:
        RunInterrupted: it was asked to stop, and has saved itself.
        ToolkitError: it failed.
    """
    process = subprocess.Popen(command)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            process.terminate()

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code - 128 in (signal.SIGINT, signal.SIGTERM):
        raise RunInterrupted(f'stage "{stage}", which "{needed_by}" needs, was stopped and is saved.', code - 128)
    if code < 0:
        raise ToolkitError(
            f'stage "{stage}", which "{needed_by}" needs, was killed by {signal.Signals(-code).name}. After SIGKILL '
            "the system was probably out of memory."
        )
    if code:
        raise ToolkitError(f'stage "{stage}", which "{needed_by}" needs, failed; its message is above.')
