"""Rows of any source: a file that `files` reads, a folder that datasets' `save_to_disk` wrote, or a hub id.

Nothing is unpickled and no code of a data set is run.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from datasets import DatasetDict, load_dataset, load_from_disk

from toolkit.data.files import READERS, TABLE_ERRORS, Row, numbered, reason
from toolkit.errors import DataError, within

HUB_SETTINGS = ("subset", "name")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What datasets says where a configuration is missing or unknown.
_CONFIGURATIONS = re.compile(r"(?:the available configs: |not found\. Available: )\[(.*)\]")


def read_rows(
    source: str, *, field: str, split: str = "train", subset: str | None = None, name: str | None = None
) -> Iterator[Row]:
    """Every row of a source as `(place, row)`, for example `("data/queries.jsonl, line 3", {"query": …})`.

    Lines and rows are counted from 1. Blank lines of JSON Lines and CSV are not rows; in a text file they are.

    Args:
        source: file, folder or hub id.
        field: what named it, for errors: "train".
        split: of a hub id or a saved `DatasetDict`: "train", or anything else for the held-out one, which is
            `test`, or `validation` where there is no `test`.
        subset: `data_dir` of a hub id.
        name: of a hub id's configuration, where it has several.
    """
    path = Path(source).expanduser()
    accepted = f"Name a {', '.join(READERS)} file, a folder that save_to_disk wrote, or a hub id."
    with within(field):
        if path.is_dir() and source.strip():
            yield from _read_folder(path, split)
        elif path.suffix.lower() in READERS:
            if not path.exists():
                raise DataError(f"{path}: there is no such file.", remedy=_nearest(path) or "Check the path.")
            yield from READERS[path.suffix.lower()](path)
        elif path.exists() and source.strip():
            raise DataError(f'{path} ends in "{path.suffix}", which is not read.', remedy=accepted)
        elif not _HUB_ID.fullmatch(source):
            raise DataError(f'there is no "{source}".', remedy=f"{_nearest(path)} {accepted}".strip())
        else:
            yield from _read_hub(source, split, subset, name)


def has_splits(source: str) -> bool:
    """Whether the source brings a held-out part of its own: a hub id or a saved `DatasetDict`."""
    return (Path(source).expanduser() / "dataset_dict.json").is_file() or is_hub_id(source)


def is_hub_id(source: str) -> bool:
    """Whether the hub is asked for the source: nothing here has that name, and a hub id may have it."""
    path = Path(source).expanduser()
    return not path.exists() and path.suffix.lower() not in READERS and bool(_HUB_ID.fullmatch(source))


def check_hub_settings(*sources: str, **settings: str | None) -> None:
    """Raises DataError if one of `HUB_SETTINGS` is given, and none of a task's sources is a hub id."""
    given = [name for name, value in settings.items() if value is not None]
    if given and not any(map(is_hub_id, sources)):
        why = f"only a hub id has that, and {' and '.join(sources)} is none."
        raise DataError(f"{' and '.join(given)} would have no effect: {why}", field=given[0], remedy="Remove it.")


def _nearest(path: Path) -> str:
    """`Did you mean data/x.jsonl?`, or nothing."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"Did you mean {path.parent / near[0]}?" if near else ""


def _read_folder(path: Path, split: str) -> Iterator[Row]:
    try:
        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            name = _split_name(data, split, str(path), f"a split's own folder: {path / next(iter(data))}")
            path, data = path / name, data[name]
        # As Arrow, since rows in Python would decode pictures and sound that nobody asked for.
        yield from numbered(str(path), data.with_format("arrow").iter(batch_size=1000))
    except DataError:
        raise
    except TABLE_ERRORS as error:
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in READERS)
        inside = f", or one of its files: {', '.join(files[:5])}" if files else ""
        wrong = f"{path} is no folder that datasets can read ({reason(error)})."
        raise DataError(wrong, remedy=f"Name one that save_to_disk wrote{inside}.") from error


def _read_hub(source: str, split: str, subset: str | None, name: str | None) -> Iterator[Row]:
    try:
        data = load_dataset(source, name, data_dir=subset)
    except Exception as error:  # of httpx, huggingface_hub, datasets and pyarrow, without a common root
        if available := _CONFIGURATIONS.search(str(error)):
            seen = "none is named" if name is None else f'"{name}" is none of them'
            wrong = f"{source} has the configurations {available.group(1)}, and {seen}."
            raise DataError(wrong, remedy="Give one as name.") from error
        wrong = f'"{source}" is no file, and the hub did not give it ({reason(error)}).'
        raise DataError(wrong, remedy=f"{_nearest(Path(source))} Name files in its place.".strip()) from error
    part = _split_name(data, split, source, "another source")
    yield from numbered(f"{source} ({part})", data[part].with_format("arrow").iter(batch_size=1000))


def _split_name(data: DatasetDict, split: str, place: str, next_step: str) -> str:
    wanted = ("train",) if split == "train" else ("test", "validation")
    if there := [name for name in wanted if name in data]:
        return there[0]
    wrong = f"{place} has no split {' or '.join(wanted)}; it has {', '.join(data)}."
    raise DataError(wrong, remedy=f"Name {next_step}.")
