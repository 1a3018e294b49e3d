"""One process at a time in a run folder."""

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from toolkit.disk import missing, read_text, remove_empty, write_whole, writing
from toolkit.errors import RecipeError
from toolkit.runs.owned import refuse_link

LOCK_FILE = ".lock"
_WORKS_FOR = "TOOLKIT_WORKS_FOR"  # in the environment of a stage's process: which process has started it
_held: Counter[Path] = Counter()  # how often this process has acquired each run folder
_made: dict[Path, list[Path]] = {}  # the folders that it made for each, from the inner to the outer


@cache
def _host() -> str:
    """This machine's name, as this process first found it: a laptop that changes its network may change its name."""
    return socket.gethostname()


def _of(process: psutil.Process) -> dict[str, Any]:
    return {"pid": process.pid, "host": _host(), "started": _started(process)}


def _started(process: psutil.Process) -> float:
    """When a process began. Linux counts ticks since the machine's start, of which psutil makes a date by the clock:
    set right meanwhile, that would make another process of the same one."""
    if sys.platform != "linux":
        return process.create_time()
    try:
        about = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    return float(about.rpartition(")")[2].split()[19])  # after a name that may hold anything


def _us() -> dict[str, Any]:
    return _of(psutil.Process())


def works_for_us() -> dict[str, str]:
    """What the environment of a process says that this one starts to do a part of its work: it is let into its run."""
    return {_WORKS_FOR: _named(_us())}


def _named(process: dict[str, Any]) -> str:
    return f"{process['pid']} {process['started']}"


def _text(doing: str) -> str:
    return json.dumps({**_us(), "doing": doing})


def _written(lock: Path) -> dict[str, Any]:
    """What stands in a lock; nothing where a kill came before it was written, or there is none."""
    try:
        found = json.loads(read_text(lock))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and {"pid", "host", "started"} <= found.keys() else {}


def _process_of(written: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key != "doing"}


def _read(lock: Path) -> dict[str, Any]:
    """The process by which a lock was written."""
    return _process_of(_written(lock))


def doing_in(run: Path) -> str:
    """What the process at work in a run folder does there: the name of a stage, or "eval"; "" where it does not say."""
    return str(_written(run / LOCK_FILE).get("doing", ""))


def elsewhere(owner: dict[str, Any]) -> str:
    """Which process of another machine it is, of which nobody here knows whether it has ended; "" of one here."""
    return "" if owner["host"] == _host() else f"process {owner['pid']} on {owner['host']}"


def owner_of(run: Path) -> dict[str, Any] | None:
    """The process at work in a run folder: `pid`, `host` and `started`; None where there is none, or it has ended.

    Of one on another machine it is not known whether it has ended.
    """
    lock = run / LOCK_FILE
    owner = _read(lock)
    if not owner:  # it is being written
        return {"pid": "?", "host": _host(), "started": 0} if _is_new(lock) else None
    if owner.get("host") != _host():
        return owner
    try:
        process = psutil.Process(owner["pid"])
        same = owner == _of(process)  # else its number was given to another one
        return owner if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return None


def acquire(run: Path, doing: str = "") -> bool:
    """Take the lock of a run folder, which is made; False where it belongs to a process that this one works for.

    Args:
        doing: for `doing_in`.

    Raises:
        RecipeError: another process is at work in it.
    """
    refuse_link(run)
    lock = run / LOCK_FILE
    made = missing(run.resolve())
    with writing(run):
        while True:
            run.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                owner = owner_of(run)
                if owner is None:
                    _take_away(run)
                elif owner == _us():
                    if doing:
                        write_whole(lock, _text(doing))
                    break
                elif _is_served(owner):
                    return False
                else:
                    other, of_here = elsewhere(owner), f"process {owner['pid']}"
                    gone = f" If that one has ended, delete {lock}." if other else ""
                    wrong = f"{run} is in use: {other or of_here} is at work in it."
                    remedy = f"Wait until it has ended, or shut its notebook down, or name another run ($run).{gone}"
                    raise RecipeError(wrong, remedy=remedy) from None
            else:
                try:
                    with os.fdopen(handle, "w", encoding="utf-8") as file:
                        file.write(_text(doing))
                except OSError:  # of a full disk
                    lock.unlink(missing_ok=True)
                    raise
                break
    _held[run.resolve()] += 1
    _made.setdefault(run.resolve(), made)
    return True


def _is_served(owner: dict[str, Any]) -> bool:
    """Whether the owner has started this process, or the one that started it, to do a part of its work: a command that
    a notebook starts while it holds a trainer of the run is a second writer."""
    if os.environ.get(_WORKS_FOR) != _named(owner):
        return False
    with suppress(psutil.Error):  # whatever that one calls this machine
        return any(_named(owner) == _named(_of(parent)) for parent in psutil.Process().parents())
    return False


def _take_away(run: Path) -> None:
    """Remove a lock whose owner has ended, and no newer one: of several processes that see it, one at a time."""
    taking = run / f"{LOCK_FILE}.taking"
    try:
        os.close(os.open(taking, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        time.sleep(0.01)
        if not _is_new(taking):  # a kill came just here
            taking.unlink(missing_ok=True)
        return
    if owner_of(run) is None:
        (run / LOCK_FILE).unlink(missing_ok=True)
    taking.unlink()


def _is_new(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < 5  # a clock that was set back leaves files of the future
    except OSError:
        return False


def release(run: Path) -> None:
    """Give back what was acquired, the last time the lock itself; a folder that nothing was written to goes, too, with
    those above it that were made for it."""
    _held[run.resolve()] -= 1
    if _held[run.resolve()] <= 0:
        made = _made.pop(run.resolve(), [])
        with suppress(OSError):
            if _read(run / LOCK_FILE) == _us():
                (run / LOCK_FILE).unlink()
                run.rmdir()
                remove_empty(made)


@contextmanager
def at_work(run: Path, doing: str = "") -> Iterator[bool]:
    """Inside, the run folder is this process's alone; gives False for a stage that is part of another one's work.

    Such a stage has the lock meanwhile: it goes on where the command that started it is killed.

    Args:
        doing: for `doing_in`.
    """
    lock = run / LOCK_FILE
    outer = _written(lock)
    if not (ours := acquire(run, doing)):
        _held[run.resolve()] += 1
        with writing(run):
            write_whole(lock, _text(doing))
    try:
        yield ours
    finally:
        if ours:
            release(run)
        else:
            _held[run.resolve()] -= 1
        goes_on = _held[run.resolve()] > 0 and _process_of(outer) == _us()  # what this process did there before
        if goes_on or not ours:
            with suppress(OSError):  # else it lapses with this process
                write_whole(lock, json.dumps(outer))
