"""Rows of text files, each with its line: JSON Lines, JSON, CSV, and one prompt a line."""

import csv
import io
import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from toolkit.errors import DataError

Row = tuple[str, dict[str, Any]]


def nearest(path: Path) -> str:
    """` Did you mean data/x.jsonl?`, or nothing."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _text(path: Path) -> str:
    """The file's text, without a byte order mark."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file.{nearest(path) or ' Check the path.'}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte {error.start}). Save it as UTF-8.") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(), which also cuts at U+2028 and form feeds: JSON allows the one inside a string.
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        yield number, line.removesuffix("\n")


# ---------------------------------------------------------------------- JSON


def read_jsonl(path: Path) -> Iterator[Row]:
    """Rows of a JSON Lines file, each with its place ("file, line 3").

    Raises:
        DataError: the file is missing, not UTF-8, or a line is not a JSON object; with the line's number.
    """
    yield from _json_lines(path, _text(path), "An array of objects belongs in a .json file.")


def read_json(path: Path) -> Iterator[Row]:
    """An array of objects; or JSON Lines, which are often named .json."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from _json_lines(path, text, "A .json file holds an array of objects, or one object a line.")
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise DataError(f"{path}, line {line}: not valid JSON ({_json_reason(error)}). Mend the file.") from error
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        yield place, _json_object(place, row, "Remove it, or make it an object.")


def _json_lines(path: Path, text: str, hint: str) -> Iterator[Row]:
    for number, line in _lines(text):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{place}: not valid JSON ({_json_reason(error)}). Mend or remove the line. {hint}"
            ) from error
        yield place, _json_object(place, row, hint)


def _json_object(place: str, row: Any, hint: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object is needed, this is a {type(row).__name__}. {hint}")
    try:
        # JSON can spell half of a surrogate pair, which is no text that a tokenizer or Arrow can hold.
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{place}: not valid Unicode ({half} alone). Mend or remove the row.") from error
    return row


def _json_reason(error: Exception) -> str:
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else reason(error)


# ---------------------------------------------------------------------- text


def read_csv(path: Path) -> Iterator[Row]:
    """Records of a CSV file with a header; a record that spans lines has the place of its first."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    header: list[str] | None = None
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{place}: not valid CSV ({error}). Mend the row: a quote in a field is doubled."
            ) from error
        if fields is None:
            break
        if not fields:
            continue
        if header is None:
            header = _header(place, fields)
        elif len(fields) != len(header):
            raise DataError(
                f"{place}: {len(fields)} fields where the header has {len(header)} ({', '.join(header)}). "
                'Put a field that holds a comma in quotes: "a, b".'
            )
        else:
            yield place, dict(zip(header, fields, strict=True))
    if header is None:
        raise DataError(f"{path}: no header. The first line of a CSV file names its columns.")


def _header(place: str, fields: list[str]) -> list[str]:
    names = [name.strip() for name in fields]
    for number, name in enumerate(names, 1):
        if not name or names.index(name) != number - 1:
            problem = f'is "{name}" again' if name else "has no name"
            raise DataError(f"{place}: column {number} of the header {problem}. Give every column a name of its own.")
    return names


def read_txt(path: Path) -> Iterator[Row]:
    for number, line in _lines(_text(path)):
        yield f"{path}, line {number}", {"prompt": line}
