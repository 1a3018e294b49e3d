"""Files written whole or not at all, folders that know what is in them, and what a disk refuses as an error."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from toolkit.errors import ToolkitError

MANIFEST = "manifest.json"
RESULT_FILE = "result.json"  # of a finished stage
ASIDE = ".partial"
REPLACED, UNFINISHED = ".replaced", ".unfinished"  # in a run folder: see `toolkit.runs.aside`
_KEPT_SHUT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
_UNFINISHED = re.compile(rf"\.toolkit-[0-9a-f]{{16}}{ASIDE}")
_HALF_SAVED = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # weights that safetensors 0.8 has not given their name yet


@contextmanager
def writing(path: str | Path, remedy: str = "Make room there, or name a place that can be written.") -> Iterator[None]:
    """Inside, a disk that is full or cannot be written is a `ToolkitError` that names the path."""
    try:
        yield
    except Exception as error:
        if not of_a_disk(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ToolkitError(f"{path}: cannot be written ({reason}).", remedy=remedy) from error


def of_a_disk(error: Exception) -> bool:
    """Whether an error is one that a write met; a tokenizer that is saved gives a bare Exception."""
    return isinstance(error, OSError | SafetensorError) or (type(error) is Exception and "(os error " in str(error))


def is_full(error: BaseException | None) -> bool:
    """Whether it is of a disk without room, or a quota that is used up."""
    return _is_of(error, errno.ENOSPC, errno.EDQUOT)


def takes_no_more(error: BaseException | None) -> bool:
    """Whether it is of a disk that is full, has failed, or may only be read since."""
    return is_full(error) or _is_of(error, errno.EIO, errno.EROFS)


def _is_of(error: BaseException | None, *numbers: int) -> bool:
    # Some libraries have it as text alone.
    return getattr(error, "errno", None) in numbers or any(os.strerror(number) in str(error) for number in numbers)


def check_file(path: Path | None) -> None:
    """That a file can be written, which comes at the end of an hour perhaps, or a ToolkitError; None for no file."""
    if path is not None:
        with writing(path):
            there = path.exists()
            if there and not path.is_file():
                raise ToolkitError(f"{path}: is no file.", remedy="Name one.")
            path.open("a", encoding="utf-8").close()
            if not there:
                Path(os.path.realpath(path)).unlink()  # not a link that leads to where nothing is yet


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its rename is journalled
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC or not path.is_dir():  # some file systems, of shared folders, sync no folder
            raise
    finally:
        os.close(handle)


def write_whole(path: Path, text: str, *, keep_mode: bool = False) -> Path:
    """Write a file that is the old one or the new one at any moment: aside first, and on the disk before its name.

    Who may read and write it stays as it was, where `keep_mode` says so and it is there.
    """
    aside = path.with_name(f".toolkit-{secrets.token_hex(8)}{ASIDE}")  # no other file's
    try:
        with aside.open("x", encoding="utf-8") as file:
            if keep_mode and path.exists():
                shutil.copymode(path, aside)
            file.write(text)
        sync(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return path


def write_output(path: Path, text: str) -> None:
    """Write a user's file whole; in place where `check_file` finds that it can be written and the folder lets nothing
    be put beside it or in its place: one that is kept shut, or a file that is a mount of its own.

    Raises:
        ToolkitError: it cannot be written.
    """
    with writing(path):
        target = path.resolve()  # what a link leads to
        try:
            write_whole(target, text, keep_mode=True)
        except OSError as error:
            if error.errno not in _KEPT_SHUT or not target.is_file():
                raise
            target.write_text(text, encoding="utf-8")


def as_the_umask_says(paths: Iterable[Path]) -> None:
    """Let files be read by whom new ones may be: safetensors 0.8 makes its own for their owner alone."""
    umask = os.umask(0o077)  # which cannot be asked for alone
    os.umask(umask)
    for path in paths:
        with suppress(OSError):  # a file system that knows no modes
            if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600:
                path.chmod(0o666 & ~umask)


def copy_contents(source: Path, target: Path, *, leaving: Callable[[Path], bool] = lambda path: False) -> None:
    """Copy the files of a folder and of those within it, but for what a kill has left. Their modes stay: of a folder
    that is kept from writing the copy would be, too."""
    paths = list(source.iterdir())  # before the target, which may be within
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if leaving(path) or is_half_saved(path):
            continue
        if path.is_dir():
            copy_contents(path, target / path.name, leaving=leaving)
        else:
            shutil.copyfile(path, target / path.name)


def is_unfinished(path: Path) -> bool:
    """Whether a kill has left this of a file that `write_whole` wrote."""
    return is_plain(path) and _UNFINISHED.fullmatch(path.name) is not None


def is_half_saved(path: Path) -> bool:
    """Whether a kill has left this of weights that safetensors wrote, by the name."""
    return _HALF_SAVED.fullmatch(path.name) is not None


def unfinished_in(folder: Path) -> list[Path]:
    """What kills have left so in a folder, not within it."""
    return [path for path in sorted(folder.glob(f".toolkit-*{ASIDE}")) if is_unfinished(path)]


def read_text(path: Path) -> str:
    """What is in a file, as text; an OSError for a pipe or a device, which would be read without end."""
    check_regular(path)
    return path.read_text(encoding="utf-8")


def check_regular(path: Path) -> None:
    """An OSError for a pipe or a device."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(path))


def read_object(path: Path, remedy: str = "") -> dict[str, Any] | None:
    """The object of a JSON file; None where there is no such file.

    Raises:
        ToolkitError: it is cut, changed or of another kind.
    """
    try:
        value = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ToolkitError(f"{path} cannot be read ({error}).", remedy=remedy) from error
    if not isinstance(value, dict):
        raise ToolkitError(f"{path} is damaged: it holds no JSON object.", remedy=remedy)
    return value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, files: Iterable[Path], **about: Any) -> None:
    """Sync files of a folder, and list them in its manifest with their sizes and SHA-256, beside what else is said."""
    listed = sorted(files)
    as_the_umask_says(listed)
    for path in (*listed, *{path.parent for path in listed}):
        sync(path)
    entries = {f.relative_to(folder).as_posix(): {"bytes": f.stat().st_size, "sha256": _digest(f)} for f in listed}
    write_whole(folder / MANIFEST, json.dumps({"files": entries, **about}, indent=1) + "\n")


def sealed_files(folder: Path) -> dict[str, Any] | None:
    """What the manifest of a folder lists; None where it has none.

    Raises:
        ToolkitError: the manifest is damaged.
    """
    remedy = "Move that folder away, or put the file back as it was."
    found = read_object(folder / MANIFEST, remedy)
    if found is None:
        return None
    entries, others = found.get("files"), found.get("others", [])
    whole = isinstance(entries, dict) and all(
        isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in entries.values()
    )
    if not (whole and isinstance(others, list)):
        raise ToolkitError(f"{folder / MANIFEST} is damaged: it lists no files.", remedy=remedy)
    return entries


def files_in(folder: Path) -> Iterator[Path]:
    """Files of a folder and of those within it. Links are none, and are not followed."""
    for place, _, names in os.walk(folder) if not folder.is_symlink() else ():
        yield from (path for path in map(Path(place).joinpath, sorted(names)) if is_plain(path))


def is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def missing(folder: Path) -> list[Path]:
    """The folder and those above it, from the inner to the outer, that are not there, and would be made with it."""
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Delete those of the folders that are there and empty, one after the other."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def prune(folder: Path) -> None:
    """Delete a folder if it is empty, and those in it that are."""
    for place, _, _ in os.walk(folder, topdown=False) if not folder.is_symlink() else ():
        if not os.listdir(place):
            os.rmdir(place)


def written_in(folder: Path) -> list[Path]:
    """The files that a sealed folder lists, and its manifest, last; none where that is missing or damaged, or of a link
    to a folder, which is another's."""
    if folder.is_symlink():
        return []
    try:
        listed = sealed_files(folder)
    except ToolkitError:
        return []
    if listed is None:
        return []
    names = [(path, path.relative_to(folder).as_posix()) for path in files_in(folder)]
    return [path for path, name in names if name in listed and name != MANIFEST] + [folder / MANIFEST]


def delete_written(folder: Path) -> None:
    """Delete what a sealed folder lists. What others have put there stays, and the folder with it."""
    for path in written_in(folder):
        path.unlink(missing_ok=True)
    prune(folder)


def damage(folder: Path) -> str | None:
    """What of a sealed folder is not as it was; None if all is."""
    for name, expected in (sealed_files(folder) or {}).items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, and had {expected['bytes']}"
        if _digest(path) != expected["sha256"]:
            return f"{name} is damaged: its SHA-256 is not the one it had"
    return None
