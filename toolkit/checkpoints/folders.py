"""Checkpoint folders that are whole or not there.

A checkpoint is written under another name, its files are synced to the disk, then `manifest.json` with the size and
SHA-256 of each, and only then is it renamed. A process may be killed at any instruction: what carries a manifest that
fits is whole, whatever its name; everything else is left over and is never read.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from toolkit.errors import CheckpointError

MANIFEST = "manifest.json"
_ASIDE = ".partial"
_ABANDONED = "abandoned-"


def step_of(folder: Path) -> int:
    """The step at which a checkpoint was written, from its name."""
    return int(folder.name.removesuffix(_ASIDE).removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def _named(output: Path, suffix: str = "") -> list[Path]:
    found = []
    for folder in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*{suffix}"):
        if folder.is_dir() and folder.name.removesuffix(suffix).removeprefix(f"{PREFIX_CHECKPOINT_DIR}-").isdigit():
            found.append(folder)
    return sorted(found, key=step_of)


def checkpoint_folders(output: str | Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too, oldest first."""
    return _named(Path(output))


# ---------------------------------------------------------------------- writing


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its rename is journalled
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _seal(folder: Path) -> None:
    """Sync every file, and say in the manifest what is there; from here on the folder is whole."""
    files = _files(folder)
    for path in files:
        _sync(path)
    for inner in {path.parent for path in files}:
        _sync(inner)
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files
    }
    aside = folder / f"{MANIFEST}{_ASIDE}"
    aside.write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")
    _sync(aside)
    aside.replace(folder / MANIFEST)
    _sync(folder)


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Write a checkpoint: gives a folder to fill, which afterwards appears under its name, whole.

    A folder of that name is replaced. Until the new one is whole the old one stays.

    Args:
        folder: `…/checkpoint-N`.

    Raises:
        CheckpointError: the disk is full, or does not let itself be written.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + _ASIDE)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _seal(aside)
        _give_name(aside)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be written ({error}). Earlier ones are untouched: make room there, "
            "then resume."
        ) from error


def _give_name(aside: Path) -> None:
    """From here to the rename only the sealed folder is there, which `newest_whole` knows for what it is."""
    folder = aside.with_name(aside.name.removesuffix(_ASIDE))
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _sync(folder.parent)


# ---------------------------------------------------------------------- reading


def problem_of(folder: str | Path) -> str | None:
    """Why a checkpoint is not whole; None where it is. Every byte is read."""
    folder = Path(folder)
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, expected in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, and had {expected['bytes']}"
        if _digest(path) != expected["sha256"]:
            return f"{name} is damaged: its SHA-256 is not the one it had"
    return None


def newest_whole(output: str | Path, *, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint in a folder, None where there is none.

    One that was whole when its process was killed, just before it got its name, is given it; what unfinished writes
    left is deleted.

    Args:
        output: the folder that holds checkpoints.
        say: is told of each newer one that is skipped, and why.
    """
    output = Path(output)
    for aside in _named(output, _ASIDE):
        if problem_of(aside) is None:
            _give_name(aside)
        else:
            shutil.rmtree(aside, ignore_errors=True)
    for folder in reversed(checkpoint_folders(output)):
        problem = problem_of(folder)
        if problem is None:
            return folder
        say(f"{folder} is skipped: {problem}.")
    return None


def set_aside_later(output: str | Path, checkpoint: Path) -> None:
    """Give later checkpoints another name, where a run goes on from an earlier one of its folder.

    They would be taken for the newest of that run, and its own new ones be deleted before them.

    Args:
        output: the folder that holds checkpoints.
        checkpoint: the one that the run goes on from; nothing is done where it is of another folder.
    """
    if checkpoint.resolve().parent != Path(output).resolve():
        return
    for folder in checkpoint_folders(output):
        if step_of(folder) > step_of(checkpoint):
            aside = folder.with_name(f"{_ABANDONED}{folder.name}")
            number = 2
            while aside.exists():
                aside, number = folder.with_name(f"{_ABANDONED}{number}-{folder.name}"), number + 1
            folder.rename(aside)


def rotate(output: str | Path, limit: int | None, *, keep: Collection[Path]) -> None:
    """Delete the oldest checkpoints over a limit.

    Args:
        output: the folder that holds checkpoints.
        limit: how many may stay; None or 0 for all.
        keep: those that stay in any case: the one just written, which is whole, and the best.
    """
    if limit is None or limit <= 0:
        return
    for folder in checkpoint_folders(output)[:-limit]:
        if folder not in keep:
            shutil.rmtree(folder, ignore_errors=True)
