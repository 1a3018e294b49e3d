"""Rows of any source, each with the place where a person finds it; what is wrong with one is an error that names it.

A source is a file (.jsonl, .json, .csv, .parquet, .txt), a folder that datasets' `save_to_disk` wrote, or
a hub id. Nothing is unpickled and no code of a data set is run.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from toolkit.errors import DataError, within

Row = tuple[str, dict[str, Any]]
HUB_SETTINGS = ("subset", "name")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What datasets says where a configuration is missing or unknown.
_CONFIGURATIONS = re.compile(r"(?:the available configs: |not found\. Available: )\[(.*)\]")
_TABLE_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


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


# ---------------------------------------------------------------------- files


def _reason(error: Exception) -> str:
    """The first line of an error, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _text(path: Path) -> str:
    """The file's text, without a byte order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte {error.start}).", remedy="Save it as UTF-8.") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(), which also cuts at U+2028 and form feeds: JSON allows the one inside a string.
    return enumerate((line.removesuffix("\n") for line in io.StringIO(text, newline=None)), 1)


def _read_jsonl(path: Path) -> Iterator[Row]:
    return _json_lines(path, _text(path), "An array of objects belongs in a .json file.")


def _read_json(path: Path) -> Iterator[Row]:
    """An array of objects; or JSON Lines, which are often named .json."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from _json_lines(path, text, "A .json file holds an array of objects, or one object a line.")
        return
    for number, row in enumerate(_parsed(path, text, 1, "Mend the file."), 1):
        place = f"{path}, row {number}"
        yield place, _json_object(place, row, "Remove it, or make it an object.")


def _json_lines(path: Path, text: str, hint: str) -> Iterator[Row]:
    for number, line in _lines(text):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _json_object(place, _parsed(path, line, number, f"Mend or remove the line. {hint}"), hint)


def _parsed(path: Path, text: str, first_line: int, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line, why = first_line, _reason(error)
        if isinstance(error, json.JSONDecodeError):
            line, why = first_line + error.lineno - 1, f"{error.msg}, column {error.colno}"
        raise DataError(f"{path}, line {line}: not valid JSON ({why}).", remedy=remedy) from error


def _json_object(place: str, row: Any, remedy: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object is needed, this is a {type(row).__name__}.", remedy=remedy)
    try:
        # JSON can spell half of a surrogate pair, which is no text that a tokenizer or Arrow can hold.
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{place}: not valid Unicode ({half} alone).", remedy="Mend or remove the row.") from error
    return row


def _read_csv(path: Path) -> Iterator[Row]:
    """Records of a CSV file with a header; a record that spans lines has the place of its first."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    header: list[str] = []
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            remedy = "Mend the row: a quote in a field is doubled."
            raise DataError(f"{place}: not valid CSV ({error}).", remedy=remedy) from error
        if fields is None:
            break
        if fields and not header:
            header = _header(place, fields)
        elif fields and len(fields) != len(header):
            wrong = f"{place}: {len(fields)} fields where the header has {len(header)} ({', '.join(header)})."
            raise DataError(wrong, remedy='Put a field that holds a comma in quotes: "a, b".')
        elif fields:
            yield place, dict(zip(header, fields, strict=True))
    if not header:
        raise DataError(f"{path}: no header.", remedy="The first line of a CSV file names its columns.")


def _header(place: str, fields: list[str]) -> list[str]:
    names = [name.strip() for name in fields]
    for number, name in enumerate(names, 1):
        if not name or names.index(name) != number - 1:
            wrong = f"{place}: column {number} of the header " + (f'is "{name}" again.' if name else "has no name.")
            raise DataError(wrong, remedy="Give every column a name of its own.")
    return names


def _read_txt(path: Path) -> Iterator[Row]:
    return ((f"{path}, line {number}", {"prompt": line}) for number, line in _lines(_text(path)))


def _numbered(place: str, tables: Iterable[Any]) -> Iterator[Row]:
    rows = (row for table in tables for row in table.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"{place}, row {number}", row


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            yield from _numbered(str(path), file.iter_batches())
    except _TABLE_ERRORS as error:
        raise DataError(f"{path}: not a readable parquet file ({_reason(error)}).", remedy="Write it anew.") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


# ---------------------------------------------------------------------- folders and the hub


def _dataset_rows(place: str, data: Dataset) -> Iterator[Row]:
    # As Arrow, since rows in Python would decode pictures and sound that nobody asked for.
    yield from _numbered(place, data.with_format("arrow").iter(batch_size=1000))


def _read_folder(path: Path, split: str) -> Iterator[Row]:
    try:
        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            name = _split_name(data, split, str(path), f"a split's own folder: {path / next(iter(data))}")
            path, data = path / name, data[name]
        yield from _dataset_rows(str(path), data)
    except DataError:
        raise
    except _TABLE_ERRORS as error:
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in READERS)
        inside = f", or one of its files: {', '.join(files[:5])}" if files else ""
        wrong = f"{path} is no folder that datasets can read ({_reason(error)})."
        raise DataError(wrong, remedy=f"Name one that save_to_disk wrote{inside}.") from error


def _read_hub(source: str, split: str, subset: str | None, name: str | None) -> Iterator[Row]:
    try:
        data = load_dataset(source, name, data_dir=subset)
    except Exception as error:  # of httpx, huggingface_hub, datasets and pyarrow, without a common root
        if available := _CONFIGURATIONS.search(str(error)):
            seen = "none is named" if name is None else f'"{name}" is none of them'
            wrong = f"{source} has the configurations {available.group(1)}, and {seen}."
            raise DataError(wrong, remedy="Give one as name.") from error
        wrong = f'"{source}" is no file, and the hub did not give it ({_reason(error)}).'
        raise DataError(wrong, remedy=f"{_nearest(Path(source))} Name files in its place.".strip()) from error
    part = _split_name(data, split, source, "another source")
    yield from _dataset_rows(f"{source} ({part})", data[part])


def _split_name(data: DatasetDict, split: str, place: str, next_step: str) -> str:
    wanted = ("train",) if split == "train" else ("test", "validation")
    if there := [name for name in wanted if name in data]:
        return there[0]
    wrong = f"{place} has no split {' or '.join(wanted)}; it has {', '.join(data)}."
    raise DataError(wrong, remedy=f"Name {next_step}.")
