"""Checkpoint folders that are whole or not there.

A checkpoint is written under another name, its files are synced to the disk, then `manifest.json` with the size and
SHA-256 of each, and only then is it renamed. A process may be killed at any instruction: what carries a manifest that
fits is whole, whatever its name; everything else is left over and is never read.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from toolkit.disk import ASIDE, MANIFEST, damage, delete_written, of_a_disk, seal, sealed_files, sync
from toolkit.errors import CheckpointError, ToolkitError

CHECKPOINT = f"{PREFIX_CHECKPOINT_DIR}-"


def step_of(folder: Path) -> int:
    """The step at which a checkpoint was written, from its name."""
    return int(folder.name.removesuffix(ASIDE).removeprefix(CHECKPOINT))


def checkpoint_folders(output: str | Path, suffix: str = "") -> list[Path]:
    """The checkpoints in a folder, damaged ones too, oldest first; with a suffix those whose names end in it."""
    named = re.compile(rf"{CHECKPOINT}[0-9]+{re.escape(suffix)}")  # and no other digits, which int() or str() may know
    try:
        folders = [path for path in Path(output).glob(f"{CHECKPOINT}*{suffix}") if path.is_dir()]
    except FileNotFoundError:  # a run that begins deletes it just now; before Python 3.13 glob does not bear that
        return []
    return sorted((path for path in folders if named.fullmatch(path.name)), key=step_of)


def checkpoints_in(output: str | Path) -> list[Path]:
    """The same, but for those of which only a user's own files are left."""
    names = (MANIFEST, "trainer_state.json")  # TRAINER_STATE_NAME of transformers.trainer, which is slow to import
    return [path for path in checkpoint_folders(output) if any((path / name).is_file() for name in names)]


@contextmanager
def whole_folder(folder: str | Path, *, goes_on_from: int | None = None) -> Iterator[Path]:
    """Write the checkpoint `…/checkpoint-N`: gives a folder to fill, which afterwards appears under its name, whole.

    A folder of that name is replaced, and stays until then. Where a run goes on from an earlier step, those of later
    ones are of another course: they are set aside once the new one is on the disk.
    Raises: CheckpointError: the disk cannot be written.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + ASIDE)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        seal(aside, [path for path in aside.rglob("*") if path.is_file() and path.name != MANIFEST])
        if goes_on_from is not None:
            _set_aside_later(folder.parent, goes_on_from)
        _give_name(aside)
    except Exception as error:
        if not of_a_disk(error):
            raise
        if not (aside / MANIFEST).is_file():  # what is sealed may be the only one
            shutil.rmtree(aside, ignore_errors=True)  # what it takes may be the room that is lacking
        wrong = f"{folder}: the checkpoint cannot be written ({error}). Earlier ones are untouched."
        raise CheckpointError(wrong, remedy="Make room there.") from error


def _give_name(aside: Path) -> None:
    """From here to the rename only the sealed folder is there, which `newest_whole` knows for what it is.

    What others have put into the folder that it replaces moves along.
    """
    folder = aside.with_name(aside.name.removesuffix(ASIDE))
    if folder.is_symlink():  # what it leads to stays as it is
        folder.unlink()
    delete_written(folder)
    for path in [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]:
        to = aside / path.relative_to(folder)
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    sync(folder.parent)


def problem_of(folder: str | Path) -> str | None:
    """Why a checkpoint is not whole; None where it is. Every byte is read."""
    try:
        if sealed_files(Path(folder)) is None:
            return f"it has no {MANIFEST}, so it was never finished"
    except ToolkitError as error:
        return f"its {MANIFEST} cannot be read ({error.problems[0].wrong})"
    return damage(Path(folder))


def newest_whole(output: str | Path, *, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint in a folder, None where there is none.

    One that was whole when its process was killed, just before it got its name, is given it; what unfinished writes
    left is deleted. `say` is told of each newer one that is skipped, and why.
    """
    for aside in checkpoint_folders(output, ASIDE):
        if problem_of(aside) is None:
            _give_name(aside)
        else:
            shutil.rmtree(aside, ignore_errors=True)
    for folder in reversed(checkpoint_folders(output)):
        if (problem := problem_of(folder)) is None:
            return folder
        say(f"{folder} is skipped: {problem}.")
    return None


def _set_aside_later(output: Path, step: int) -> None:
    """Give checkpoints of later steps another name: they would be taken for the newest of the run that goes on from
    this one, and its own new ones be deleted before them."""
    for folder in checkpoints_in(output):
        if step_of(folder) > step:
            aside, number = folder.with_name(f"abandoned-{folder.name}"), 2
            while aside.exists():
                aside, number = folder.with_name(f"abandoned-{number}-{folder.name}"), number + 1
            folder.rename(aside)


def rotate(output: str | Path, limit: int | None, *, keep: Collection[Path]) -> None:
    """Delete the oldest checkpoints over a limit (None or 0 for none) but those to keep, as the new and the best, which
    count among them.

    A folder keeps what others have put there; one that is damaged is left alone.
    """
    whole = [folder for folder in checkpoint_folders(output) if (folder / MANIFEST).is_file()]
    over = len(whole) - limit if limit and limit > 0 else 0
    for folder in [folder for folder in whole[:-1] if folder not in keep][: max(0, over)]:
        with suppress(OSError):
            delete_written(folder)
