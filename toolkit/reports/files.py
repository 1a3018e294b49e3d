"""The files of a run: JSON Lines, written so that a kill can cut no line but the last, and `result.json`."""

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from itertools import compress, islice
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from toolkit import __version__
from toolkit.disk import RESULT_FILE, check_regular, read_object, sync, write_whole, writing
from toolkit.errors import ToolkitError

METRICS_FILE, ROLLOUTS_FILE, WARNINGS_FILE = "metrics.jsonl", "rollouts.jsonl", "warnings.jsonl"
SPREADS = {name: f"{name}_se" for name in ("score", "eval_score", "eval_judge")}  # metrics with a standard error
_ANEW = "Run the stage again with $overwrite, or put back the file as it was."
_PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows in place of what is there."""
    write_lines(path.resolve(), [json.dumps(row, ensure_ascii=False) for row in rows])


def append_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to what is there."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        check_regular(path)
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:
        raise ToolkitError(f"{path} cannot be read ({error}).", remedy=_ANEW) from error


def _whole_lines(path: Path) -> Iterator[str]:
    """The lines one by one, less one that a kill cut short at the end."""
    with _reading(path) as file:
        for line in file:
            if line.endswith(b"\n"):  # before decoding: the cut may go through a character
                yield line[:-1].removesuffix(b"\r").decode("utf-8")


def count_lines(path: Path) -> int:
    """How many whole lines there are."""
    with _reading(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 16), b""))


def keep_lines(path: Path, number: int) -> int:
    """Cut off what stands behind so many whole lines; how many there are then. A file may be larger than the memory:
    it is not written anew."""
    kept = end = 0
    with _reading(path) as file:
        for line in islice(file, number):
            if line.endswith(b"\n"):
                kept, end = kept + 1, end + len(line)
    with writing(path):
        if end < path.stat().st_size:
            os.truncate(path, end)
        sync(path)
    return kept


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines in place of what is there: all of them, or none."""
    with writing(path):
        write_whole(path, "".join(f"{line}\n" for line in lines))


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of its whole lines one by one.

    Raises:
        ToolkitError: a line of them is damaged.
    """
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ToolkitError(f"{path}, line {number}: cannot be read ({error}).", remedy=_ANEW) from error
        if not isinstance(row, dict):
            raise ToolkitError(f"{path}, line {number}: is no JSON object.", remedy=_ANEW)
        yield row


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All of the rows that `iter_jsonl` goes through."""
    return list(iter_jsonl(path))


def keep_until(path: Path, step: int) -> None:
    """Drop what a file of rows with `step` says of later ones, and a line that a kill cut short."""
    if path.is_file():
        kept = []
        for row in iter_jsonl(path):
            if not isinstance(row.get("step"), (int, float)):
                raise ToolkitError(f"{path} is damaged: a line has no step.", remedy=_ANEW)
            kept.append(row["step"] <= step)
        if all(kept[: sum(kept)]):  # the later ones stand last
            keep_lines(path, sum(kept))
        else:
            write_lines(path, compress(_whole_lines(path), kept))


class MetricsFile(TrainerCallback, ExportableState):
    """Appends what a trainer logs to a file, one JSON object a line, with `step` first.

    In a run that goes on from a checkpoint, lines that were written after that checkpoint are dropped.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.lines = self._found = self._there = count_lines(path)
        self.earlier = range(0)  # lines of another course, which go once this one has a checkpoint

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {"path": str(self.path)}, "attributes": {"lines": self.lines - len(self.earlier)}}

    def cut(self) -> None:
        """Drop what was written after the checkpoint that its number of lines is from."""
        self.lines = self._there = keep_lines(self.path, self.lines)  # a power cut may have left fewer

    def leave_other_course(self) -> None:
        """In a loop of your own, what lies behind the checkpoint that was read is of another course."""
        if self.lines < self._there:
            self.earlier = range(self.lines, self._there)
        self.lines = self._there

    def begin_anew(self, *, logged_itself: bool) -> None:
        """What there was when this was made, or what it `logged_itself` in training, is of another course."""
        self.earlier = range(self.lines if logged_itself else self._found)

    def forget_earlier(self) -> None:
        """Drop none of another course any more: the checkpoint that was read has its own number of lines."""
        self.earlier = range(0)

    def drop_earlier(self) -> None:
        """Drop the lines of another course."""
        if self.earlier:
            there = [*_whole_lines(self.path)]
            kept = there[: self.earlier.start] + there[self.earlier.stop :]
            write_lines(self.path, kept)
            self.lines = self._there = len(kept)
            self.earlier, self._found = range(0), 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.cut()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.leave_other_course()
        # JSON has no name for what is not finite, as of a step that float16 overflowed in.
        known = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in logs.items()}
        append_jsonl(self.path, [{"step": state.global_step, **known}])
        self.lines, self._there = self.lines + 1, self._there + 1


def write_json(path: Path, value: dict[str, Any]) -> Path:
    """Write a JSON file, whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    with writing(path):  # of a path whose name is not UTF-8, JSON's own escapes
        return write_whole(path, text.encode("utf-8", "backslashreplace").decode() + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote, or None where there is no such file.

    Raises:
        ToolkitError: it is damaged.
    """
    return read_object(path, _ANEW)


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write the file that marks a stage as finished."""
    return write_json(folder / RESULT_FILE, result)


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished stage wrote, or None where it has not finished."""
    return read_json(folder / RESULT_FILE)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run."""
    ours = {"python": platform.python_version(), "ppo-lora-toolkit": __version__}
    return ours | {name: _version(name) for name in _PACKAGES}


_version = cache(version)  # which reads and parses a file each time


def _high_water() -> int | None:
    """Of this process alone, in kibibytes, where Linux says it: what `getrusage` has goes on from its parent's."""
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    return None


def peak_memory_gb() -> dict[str, float]:
    """Peak memory of this process in GB (10⁹ bytes): `resident`, and `gpu` where there is one."""
    if sys.platform == "win32":
        resident = psutil.Process().memory_info().peak_wset
    else:
        import resource  # Unix alone has it

        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
        resident = (_high_water() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    peak = {"resident": resident / 1e9}
    if torch.cuda.is_available():
        peak["gpu"] = torch.cuda.max_memory_allocated() / 1e9
    return {key: round(value, 3) for key, value in peak.items()}


def memory_in_words(peak: Mapping[str, float]) -> str:
    """What `peak_memory_gb` has found, as a person reads it."""
    return ", ".join(f"{key} {value:.2f} GB" for key, value in peak.items())
