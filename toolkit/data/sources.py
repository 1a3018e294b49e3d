"""Rows of any source: a file that `files` reads, a folder that datasets' `save_to_disk` wrote, or a hub id.

Nothing is unpickled and no code of a data set is run.
"""

import json
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from datasets import DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from toolkit import hub
from toolkit.data.files import READERS, Row, listed, numbered, reason, shown
from toolkit.errors import DataError, within

Source = str | list[str]
HUB_SETTINGS = ("subset", "name")
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")  # of save_to_disk
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What datasets says where a configuration is missing or unknown.
_CONFIGURATIONS = re.compile(r"(?:the available configs: |not found\. Available: )\[(.*)\]")


def read_rows(
    source: str, *, field: str, split: str = "train", subset: Source | None = None, name: str | None = None
) -> Iterator[Row]:
    """Every row of a source as `(place, row)`, for example `("data/queries.jsonl, line 3", {"query": …})`.

    Lines and rows are counted from 1. Blank lines of JSON Lines and CSV are not rows; in a text file they are.

    Args:
        source: file, folder or hub id.
        field: what named it, for errors: "train".
        split: of a hub id or a saved `DatasetDict`: "train", or anything else for the held-out one, which is
            `test`, or `validation` where there is no `test`.
        subset: `data_dir` of a hub id; or several, read one after the other.
        name: of a hub id's configuration, where it has several.
    """
    path = _path(source)
    accepted = f"Name a {', '.join(READERS)} file, a folder that save_to_disk wrote, or a hub id."
    with within(field):
        mode = _mode(path) if source.strip() else None
        if mode is not None and S_ISDIR(mode):
            yield from _read_folder(path, split)
        elif path.suffix.lower() in READERS:
            if mode is None:
                wrong = f"{shown(str(path))}: there is no such file."
                looked = "" if path.is_absolute() else f"; it was looked for in {Path.cwd()}"
                raise DataError(wrong, remedy=_nearest(path) or f"Check the path{looked}.")
            _check_regular(path)
            yield from READERS[path.suffix.lower()](path)
        elif mode is not None:
            raise DataError(f'{shown(str(path))} ends in "{path.suffix}", which is not read.', remedy=accepted)
        elif not _HUB_ID.fullmatch(source):
            raise DataError(f'there is no "{shown(source)}".', remedy=f"{_nearest(path)} {accepted}".strip())
        else:
            for part in names_of(subset) if subset is not None else [None]:
                yield from _read_hub(source, split, part, name)


def _path(source: str) -> Path:
    """The path of a source; `~` of nobody stays as it is."""
    return Path(os.path.expanduser(source))


def _mode(path: Path) -> int | None:
    """What kind of file a path is, as `stat` has it; None where there is nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # a name that is too long or has a zero in it, a folder that may not be read
        why = error.strerror if isinstance(error, OSError) else error
        wrong = f"{shown(str(path))}: cannot be opened ({why})."
        raise DataError(wrong, remedy="Check its name and permissions.") from error


def _check_regular(path: Path) -> None:
    """Raises DataError for a pipe or a device, which would be waited for without end."""
    mode = _mode(path)
    if mode is not None and not S_ISREG(mode) and not S_ISDIR(mode):
        raise DataError(f"{path}: neither a file nor a folder, but a pipe or a device.", remedy="Save it as a file.")


def names_of(source: Source | None) -> list[str]:
    """The sources that a setting names."""
    return source if isinstance(source, list) else [] if source is None else [source]


def has_splits(source: Source) -> bool:
    """Whether each source brings a held-out part of its own: a hub id or a saved `DatasetDict`."""
    return all(os.path.lexists(_path(one) / "dataset_dict.json") or is_hub_id(one) for one in names_of(source))


def is_hub_id(source: str) -> bool:
    """Whether the hub is asked for the source: nothing here has that name, and a hub id may have it."""
    path = _path(source)
    return not os.path.exists(path) and path.suffix.lower() not in READERS and bool(_HUB_ID.fullmatch(source))


def check_hub_settings(*sources: str, **settings: Source | None) -> None:
    """Raises DataError if one of `HUB_SETTINGS` is given, and none of a task's sources is a hub id."""
    given = [name for name, value in settings.items() if value is not None]
    if given and not any(map(is_hub_id, sources)):
        why = f"only a hub id has that, and {' and '.join(map(shown, sources))} is none."
        raise DataError(f"{' and '.join(given)} would have no effect: {why}", field=given[0], remedy="Remove it.")


def _nearest(path: Path) -> str:
    """`Did you mean data/x.jsonl?`, or nothing."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"Did you mean {path.parent / near[0]}?" if near else ""


def _holds_an_object(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


def _read_folder(path: Path, split: str) -> Iterator[Row]:
    try:
        inside = sorted(path.iterdir())
        for entry in [*inside, *(below for folder in inside if folder.is_dir() for below in folder.iterdir())]:
            _check_regular(entry)
            if entry.name in _SAVED and not _holds_an_object(entry):
                raise DataError(
                    f"{entry}: not a JSON object, which save_to_disk writes.", remedy="Save the data again."
                )
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    try:
        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            name = _split_name(data, split, str(path), f"a split's own folder: {path / next(iter(data))}")
            path, data = path / name, data[name]
        # As Arrow, since rows in Python would decode pictures and sound that nobody asked for.
        yield from numbered(str(path), data.with_format("arrow").iter(batch_size=1000))
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    except Exception as error:  # of datasets and pyarrow, as the damage has it
        files = [entry.name for entry in inside if entry.suffix.lower() in READERS and entry.name not in _SAVED]
        others = f", or one of its files: {listed(files[:5])}" if files else ""
        wrong = f"{path} is no folder that datasets can read ({reason(error)})."
        raise DataError(wrong, remedy=f"Name one that save_to_disk wrote{others}.") from error


def _read_hub(source: str, split: str, subset: str | None, name: str | None) -> Iterator[Row]:
    host = hub.silent_host()
    try:
        data = load_dataset(source, name, data_dir=subset)
    except Exception as error:  # of httpx, huggingface_hub, datasets and pyarrow, without a common root
        if available := _CONFIGURATIONS.search(str(error)):
            seen = "none is named" if name is None else f'"{name}" is none of them'
            wrong = f"{source} has the configurations {available.group(1)}, and {seen}."
            raise DataError(wrong, remedy="Give one as name.") from error
        # datasets says of some no more than that they happened "while generating the dataset".
        why = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        wrong = f'"{source}" is no file, and the hub did not give it ({reason(why)}).'
        if host:
            wrong = f'"{source}" is no file here and not in the cache of the hub, and {host} does not answer.'
        otherwise = f"{_nearest(Path(source))} Name files in its place.".strip()
        remedy = hub.way_to(source, error, otherwise=otherwise, of_data=True)
        if given := " and ".join(key for key, value in (("subset", subset), ("name", name)) if value is not None):
            remedy += f" Set {given} to null, if that is of another data set."
        raise DataError(wrong, remedy=remedy) from error
    part = _split_name(data, split, source, "another source")
    place = source if subset is None else f"{source}/{subset}"
    yield from numbered(f"{place} ({part})", data[part].with_format("arrow").iter(batch_size=1000))


def _split_name(data: DatasetDict, split: str, place: str, next_step: str) -> str:
    wanted = ("train",) if split == "train" else ("test", "validation")
    if there := [name for name in wanted if name in data]:
        return there[0]
    wrong = f"{place} has no split {' or '.join(wanted)}; it has {', '.join(data)}."
    held_out = "" if split == "train" else "Hold some of train out with validation_size, or n"
    raise DataError(wrong, remedy=f"{held_out or 'N'}ame {next_step}.")
