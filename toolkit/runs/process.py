"""Commands in processes of their own: an earlier stage, or one stage in several at a time."""

import errno
import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

import toolkit
from toolkit import processes
from toolkit.checkpoints import STOPS, signals_to
from toolkit.errors import RunInterrupted, ToolkitError
from toolkit.runs.lock import works_for_us

_ANYWHERE = 16  # processes that may be tried out on a machine with fewer cores
GRACE = 20.0
"""Seconds in which the others end by themselves when one of several processes has failed."""
_GRACE_OF_A_STOP = 300.0
"""The same where it was asked to stop: the others save, and what reports to a service may wait for it."""

OUTPUT_CLOSED = 128 + 13  # as a shell has it of SIGPIPE
"""Exit code of an earlier stage whose standard output was closed."""


def this_toolkit(*words: str) -> list[str]:
    """A command of the package that runs here; of a file of the user's in the current folder, as `random.py`, it
    imports nothing, unless that folder is where the package itself is."""
    alone = () if Path(toolkit.__file__).resolve().parents[1] == Path.cwd().resolve() else ("-P",)
    return [sys.executable, *alone, "-m", "toolkit", *words]


def _environment() -> dict[str, str]:
    """Of a process that is started for an earlier stage; a package that is not installed, as a clone that a notebook
    has added to its `sys.path`, is found there, too."""
    given, folder = processes.environment() | works_for_us(), Path(toolkit.__file__).resolve().parents[1]
    if folder in (Path(place).resolve() for place in (*site.getsitepackages(), site.getusersitepackages())):
        return given
    return given | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), given.get("PYTHONPATH"))))}


def run_stage(command: list[str], stage: str, needed_by: str) -> None:
    """Run the command of an earlier stage to its end; each of several processes runs it, and these join one another.

    Raises:
        RunInterrupted: it was asked to stop, and has said what is saved.
        BrokenPipeError: its standard output, which is that of this process, was closed.
        ToolkitError: it failed.
    """
    (code,) = _ended(command, [_environment()])
    # By its exit code, or at its start or its end, where nothing meets them, by the signal itself.
    if (number := code - 128 if code > 0 else -code) in STOPS:
        raise RunInterrupted(f'stage "{stage}", which "{needed_by}" needs, was stopped.', number)
    if code == OUTPUT_CLOSED:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    if code < 0:
        wrong = f'stage "{stage}", which "{needed_by}" needs, was killed by {_signal(code)}.'
        raise ToolkitError(wrong, remedy=_remedy(code, processes.count()))
    if code:
        raise ToolkitError(f'stage "{stage}", which "{needed_by}" needs, failed; its message is above.')


def run_in_processes(command: list[str], number: int) -> int:
    """Run a command in several processes of this machine, which join by torch's variables; its exit code.

    Raises:
        ToolkitError: this machine has no use for so many, or one was killed; the others have been ended.
        RunInterrupted: one of `STOPS` came at their start or their end, where nothing meets it.
    """
    cores = _cores()
    if number > max(_ANYWHERE, cores):
        wrong = f"{number} processes are asked for, and there are {cores} cores here."
        raise ToolkitError(wrong, remedy="Start as many as there are GPUs, or cores.")
    shared = {"OMP_NUM_THREADS": str(max(1, cores // number))}
    if sys.platform == "linux":  # else gloo listens to the network, at the address of the machine's name
        shared[processes.INTERFACE] = "lo"
    shared |= os.environ
    shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of a launcher of this one
    shared |= {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(number)} for rank in range(number))
    codes = _ended(command, [shared | rank for rank in ranks])
    if stop := next((one for one in STOPS if -one in codes), None):
        raise RunInterrupted(f"{number} processes were stopped.", stop)
    killed = [(rank, code) for rank, code in enumerate(codes) if code < 0]
    if killed:
        rank, code = killed[0]
        wrong = f"process {rank} of {number} was killed by {_signal(code)}; the others have been ended."
        raise ToolkitError(wrong, remedy=_remedy(code, number))
    return next((code for code in codes if code), 0)


def _cores() -> int:
    """Those that this process may use: a container or a scheduler may have kept others from it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signal(code: int) -> str:
    name = signal.Signals(-code).name
    return f"{name}, probably since memory ran out" if name == "SIGKILL" else name


def _remedy(code: int, number: int) -> str:
    """What to try where one of so many processes was killed; "" where nothing is known. torch ends a process by SIGABRT
    whose sum on cards takes too long."""
    if number == 1 or -code != signal.SIGABRT:
        return ""
    minutes = processes.ON_CARDS.total_seconds() / 60
    return f"With GPUs perhaps since a sum had not ended after {minutes:.0f} minutes. {processes.BY_MEMORY}"


def _of_a_terminal() -> bool:
    """Whether a terminal's Ctrl-C comes to this process, and to all that it has started: not in its background."""
    if os.name == "nt":  # which sends it to all processes of a console
        return True
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it was closed
        return False
    finally:
        os.close(terminal)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End one at once, since SIGTERM would not reach it in a collective, and an earlier stage that it has started. Such
    a stage of one that was killed itself then ends by its broken connection."""
    with suppress(psutil.NoSuchProcess):
        for started in psutil.Process(child.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                started.kill()
    child.kill()
    child.wait()


def _ended(command: list[str], environments: Sequence[dict[str, str]]) -> list[int]:
    """Start a command in each of these environments; the exit codes, once all have ended. Where one has failed and
    others wait for it, they are ended, too.

    A terminal sends Ctrl-C to all processes: this one waits while the others finish their step and save. Other signals,
    and SIGINT where no terminal sends it, may reach this one alone, and are passed on: as SIGTERM, of which a second
    one does no harm to those that it has reached. (One after Ctrl-C would: who is past the last step, or has not begun,
    has met that already, and would be ended while it puts a run back or reports.)
    """

    children: list[subprocess.Popen[bytes]] = []
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if number != signal.SIGINT or not _of_a_terminal():
            for child in children:
                child.terminate()

    with signals_to(pass_on):
        for environment in environments:
            try:
                children.append(subprocess.Popen(command, env=environment))
            except OSError:  # no room for another process: the others would wait for it
                for child in children:
                    _kill(child)
                raise
            if asked:  # it may have come before this one was there
                children[-1].terminate()
        return _waited_for(children)


def _waited_for(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    codes: dict[int, int] = {}
    first_failed, overdue = 0.0, False
    while len(codes) < len(children):
        for i, child in enumerate(children):
            if i not in codes and (code := child.poll()) is not None:
                codes[i] = code
        if failed := [code for code in codes.values() if code]:
            stopped = all(code - 128 in STOPS for code in failed)  # by the signal itself it has saved nothing
            first_failed = first_failed or time.monotonic()
            overdue = time.monotonic() > first_failed + (_GRACE_OF_A_STOP if stopped else GRACE)
        if overdue:
            for i, child in enumerate(children):
                if i not in codes:
                    _kill(child)
                    codes[i] = 1
        time.sleep(0.05)
    return [codes[i] for i in range(len(children))]
