"""Rows of any source, each with the place where a person finds it.

A source is a file (.jsonl, .json, .csv, .parquet, .txt), a folder that datasets' `save_to_disk` wrote, or
a hub id. Nothing is unpickled and no code of a data set is run.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from toolkit.data.text_files import Row, nearest, read_csv, read_json, read_jsonl, read_txt, reason
from toolkit.errors import DataError

HUB_SETTINGS = ("subset", "name")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What datasets says where a configuration is missing or unknown.
_CONFIGURATIONS = re.compile(r"(?:the available configs: |not found\. Available: )\[(.*)\]")
_TABLE_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


def read_rows(
    source: str, *, setting: str, split: str = "train", subset: str | None = None, name: str | None = None
) -> Iterator[Row]:
    """Every row of a source as `(place, row)`, for example `("data/queries.jsonl, line 3", {"query": …})`.

    Lines and rows are counted from 1. Blank lines of JSON Lines and CSV are not rows; in a text file they are.

    Args:
        source: file, folder or hub id.
        setting: what named it, for errors: "data.train".
        split: of a hub id or a saved `DatasetDict`: "train", or anything else for the held-out one, which is
            `test`, or `validation` where there is no `test`.
        subset: `data_dir` of a hub id.
        name: of a hub id's configuration, where it has several.

    Raises:
        DataError: the source is missing, damaged or of no known format; with file and line.
    """
    path = Path(source).expanduser()
    if path.is_dir() and source.strip():
        yield from _read_folder(path, setting, split)
    elif path.suffix.lower() in READERS:
        yield from READERS[path.suffix.lower()](path)
    elif path.exists() and source.strip():
        raise DataError(f'{setting}: {path} ends in "{path.suffix}", which is not read. {_accepted()}')
    elif not _HUB_ID.fullmatch(source):
        raise DataError(f'{setting}: there is no "{source}".{nearest(path)} {_accepted()}')
    else:
        yield from _read_hub(source, setting, split, subset, name)


def has_splits(source: str) -> bool:
    """Whether the source brings a held-out part of its own: a hub id or a saved `DatasetDict`."""
    return (Path(source).expanduser() / "dataset_dict.json").is_file() or is_hub_id(source)


def is_hub_id(source: str) -> bool:
    """Whether the hub is asked for the source: nothing here has that name, and a hub id may have it."""
    path = Path(source).expanduser()
    return not path.exists() and path.suffix.lower() not in READERS and bool(_HUB_ID.fullmatch(source))


def check_hub_settings(*sources: str | None, **settings: str | None) -> None:
    """Settings of a hub id are given with one.

    Args:
        sources: of one task. None is none.
        settings: those of `HUB_SETTINGS`, by name.

    Raises:
        DataError: one is given, and no source is a hub id.
    """
    given = [f"data.{name}" for name, value in settings.items() if value is not None]
    named = [source for source in sources if source is not None]
    if given and not any(map(is_hub_id, named)):
        raise DataError(
            f"{' and '.join(given)} would have no effect: only a hub id has that, and {' and '.join(named)} is none. "
            f"Remove it ({given[0]}=null)."
        )


def _accepted() -> str:
    return f"Name a {', '.join(READERS)} file, a folder that save_to_disk wrote, or a hub id."


def _numbered(place: str, tables: Iterable[Any]) -> Iterator[Row]:
    rows = (row for table in tables for row in table.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"{place}, row {number}", row


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            yield from _numbered(str(path), file.iter_batches())
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file.{nearest(path) or ' Check the path.'}") from error
    except _TABLE_ERRORS as error:
        raise DataError(f"{path}: not a readable parquet file ({reason(error)}). Write it anew.") from error


def _dataset_rows(place: str, data: Dataset) -> Iterator[Row]:
    # As Arrow, since rows in Python would decode pictures and sound that nobody asked for.
    yield from _numbered(place, data.with_format("arrow").iter(batch_size=1000))


def _read_folder(path: Path, setting: str, split: str) -> Iterator[Row]:
    try:
        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            name = _split_name(data, split, f"{setting}: {path}", f"a split's own folder: {path / next(iter(data))}")
            path, data = path / name, data[name]
        yield from _dataset_rows(str(path), data)
    except DataError:
        raise
    except _TABLE_ERRORS as error:
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in READERS)
        inside = f", or one of its files: {', '.join(files[:5])}" if files else ""
        raise DataError(
            f"{setting}: {path} is no folder that datasets can read ({reason(error)}). "
            f"Name one that save_to_disk wrote{inside}."
        ) from error


def _read_hub(source: str, setting: str, split: str, subset: str | None, name: str | None) -> Iterator[Row]:
    try:
        data = load_dataset(source, name, data_dir=subset)
    except Exception as error:  # of httpx, huggingface_hub, datasets and pyarrow, without a common root
        available = _CONFIGURATIONS.search(str(error))
        if available:
            seen = "none is named" if name is None else f'"{name}" is none of them'
            raise DataError(
                f"{setting}: {source} has the configurations {available.group(1)}, and {seen}. "
                "Name one with data.name=…."
            ) from error
        raise DataError(
            f'{setting}: "{source}" is no file, and the hub did not give it ({reason(error)}).'
            f"{nearest(Path(source))} Name files with data.train=… and data.validation=…."
        ) from error
    part = _split_name(data, split, f"{setting}: {source}", "another source")
    yield from _dataset_rows(f"{source} ({part})", data[part])


def _split_name(data: DatasetDict, split: str, place: str, next_step: str) -> str:
    wanted = ("train",) if split == "train" else ("test", "validation")
    for name in wanted:
        if name in data:
            return name
    raise DataError(f"{place} has no split {' or '.join(wanted)}; it has {', '.join(data)}. Name {next_step}.")


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": _read_parquet,
    ".txt": read_txt,
}
