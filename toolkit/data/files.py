"""Rows of a file, each with the place where a person finds it; what is wrong with one is an error that names it."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from toolkit.errors import DataError

Row = tuple[str, dict[str, Any]]
_DEEPEST = 20  # lists and objects within each other; datasets' own recursion ends soon after


def shown(text: str) -> str:
    """A text as an error shows it: on one line, without control characters, and not for ever."""
    text = text if len(text) <= 200 else f"{text[:150]} … ({len(text)} characters)"
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def listed(names: Iterable[str]) -> str:
    """Names of columns as an error shows them, the first 20 of many."""
    every = [shown(str(name)) for name in names]
    return ", ".join(every if len(every) <= 20 else [*every[:20], f"and {len(every) - 20} more"])


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    kinds = {type(None): "null", bool: "true or false", str: "text", list: "an array", dict: "an object"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}")


def reason(error: Exception) -> str:
    """The first line of an error, or its name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shown(f"no {lines[0]}" if isinstance(error, KeyError) else lines[0])


def numbered(place: str, tables: Iterable[Any]) -> Iterator[Row]:
    """The rows of Arrow tables."""
    rows = (row for table in tables for row in _in_python(place, table))
    return ((f"{place}, row {number}", row) for number, row in enumerate(rows, 1))


def _in_python(place: str, table: Any) -> list[dict[str, Any]]:
    names = table.schema.names
    if len(set(names)) < len(names):
        name, times = Counter(names).most_common(1)[0]
        wrong = f'{place}: column "{shown(name)}" is there {times} times.'
        raise DataError(wrong, remedy="Give every column a name of its own.")
    try:
        rows = table.to_pylist()
        for name in (field.name for field in table.schema if "tool_calls" in str(field.type)):
            for row in rows:
                row[name] = without_added(row[name])
        return decoded(rows, table.schema)
    except Exception:  # whatever a kind of values raises: durations, dates and zones that Python has not
        for column, name in enumerate(names):
            try:
                decoded([{name: value} for value in table.column(column).to_pylist()], [table.schema.field(column)])
            except Exception as error:
                wrong = f'{place}: column "{shown(name)}" holds a value that Python has not ({reason(error)}).'
                raise DataError(wrong, remedy="Write the column as text, or take it out.") from error
        raise


def without_added(value: Any, *, of_calls: bool = False) -> Any:
    """A value whose tool calls are without the null that a table gives a call for each argument of the others: chat
    templates write arguments as they are."""
    if isinstance(value, list):
        return [without_added(one, of_calls=of_calls) for one in value]
    if isinstance(value, dict):
        return {
            key: without_added(one, of_calls=of_calls or key == "tool_calls")
            for key, one in value.items()
            if one is not None or not of_calls
        }
    return value


def decoded(rows: list[dict[str, Any]], fields: Iterable[pa.Field]) -> list[dict[str, Any]]:
    """Rows whose values of JSON, as datasets keeps those of several types, are what they stand for, in place."""
    for name, kind in ((field.name, field.type) for field in fields if "json" in str(field.type)):
        for row in rows:
            row[name] = _of_kind(row[name], kind)
    return rows


def _of_kind(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_of_kind(one, kind.value_type) for one in value]
    if pa.types.is_struct(kind):
        return {field.name: _of_kind(value[field.name], field.type) for field in kind if field.name in value}
    return value


def _text(path: Path) -> str:
    """The file's text, without a byte order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if raw.startswith(b"\x1f\x8b"):
            raise DataError(f"{path}: it is compressed, by gzip.", remedy="Unpack it: gunzip.") from error
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte {error.start}).", remedy="Save it as UTF-8.") from error


def _streamed(path: Path) -> Iterator[str]:
    """The file's lines, of which a few are in memory at a time."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError):
        _text(path)  # says why, and where
        raise


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    # Not of splitlines(), which also cuts at U+2028 and form feeds: JSON allows the one inside a string.
    return enumerate((line.removesuffix("\n") for line in lines), 1)


def _read_json(path: Path) -> Iterator[Row]:
    """An array of objects; or JSON Lines, which are often named .json."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        lines = io.StringIO(text, newline=None)
        yield from _json_lines(path, lines, "A .json file holds an array of objects, or one object a line.")
        return
    odd = _is_odd(text)
    for number, row in enumerate(_parsed(path, text, 1, "Mend the file."), 1):
        place = f"{path}, row {number}"
        yield place, _json_object(place, row, odd, "Remove it, or make it an object.")


def _json_lines(path: Path, lines: Iterable[str], hint: str) -> Iterator[Row]:
    for number, line in _lines(lines):
        if line.strip():
            place = f"{path}, line {number}"
            row = _parsed(path, line, number, f"Mend or remove the line. {hint}")
            yield place, _json_object(place, row, _is_odd(line), hint)


def _parsed(path: Path, text: str, first_line: int, remedy: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=object_without_repetition)
    except (ValueError, RecursionError) as error:
        line, why = first_line, reason(error)
        if isinstance(error, json.JSONDecodeError):
            line, why = first_line + error.lineno - 1, f"{error.msg}, column {error.colno}"
        raise DataError(f"{path}, line {line}: not valid JSON ({why}).", remedy=remedy) from error


def object_without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys are each there once: Python would take the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'"{name}" is there twice')
    return made


def _is_odd(text: str) -> bool:
    """Whether JSON may hold halves of characters, or nest deep; token ids by the thousand do not."""
    return "\\u" in text or text.count("[") + text.count("{") > _DEEPEST


def _json_object(place: str, row: Any, odd: bool, remedy: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object is needed, this is {kind_of(row)}.", remedy=remedy)
    if not odd:
        return row
    level: list[Any] = [row]  # the lists and objects so deep
    for _ in range(_DEEPEST):
        inside = (x for part in level for x in (part.values() if isinstance(part, dict) else part))
        level = [x for x in inside if isinstance(x, (dict, list))]
    if level:
        raise DataError(f"{place}: nested over {_DEEPEST} deep.", remedy="Mend or remove the row.")
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
            if "field larger" in str(error):
                remedy = "Close its quote, or keep texts of that length in a .jsonl file."
            raise DataError(f"{place}: not valid CSV ({error}).", remedy=remedy) from error
        if fields is None:
            break
        if fields and not header:
            header = _header(place, fields)
        elif fields and len(fields) != len(header):
            wrong = f"{place}: {len(fields)} fields where the header has {len(header)} ({listed(header)})."
            raise DataError(wrong, remedy='Put a field that holds a comma in quotes: "a, b".')
        elif fields:
            yield place, dict(zip(header, fields, strict=True))
    if not header:
        raise DataError(f"{path}: no header.", remedy="The first line of a CSV file names its columns.")


def _header(place: str, fields: list[str]) -> list[str]:
    names: dict[str, None] = {}
    if len(fields) == 1 and (parted := next((sign for sign in (";", "\t") if sign in fields[0]), None)):
        what = "semicolons" if parted == ";" else "tabs"
        wrong = f"{place}: the header has {what} and no comma ({shown(fields[0])})."
        raise DataError(wrong, remedy="Save the file with commas between its fields.")
    for number, name in enumerate((field.strip() for field in fields), 1):
        if not name or name in names:
            wrong = f"{place}: column {number} of the header "
            wrong += f'is "{shown(name)}" again.' if name else "has no name."
            raise DataError(wrong, remedy="Give every column a name of its own.")
        names[name] = None
    return list(names)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            yield from numbered(str(path), file.iter_batches())
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    except Exception as error:  # of pyarrow, as the damage has it
        raise DataError(f"{path}: not a readable parquet file ({reason(error)}).", remedy="Write it anew.") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": lambda path: _json_lines(path, _streamed(path), "An array of objects belongs in a .json file."),
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": lambda path: ((f"{path}, line {n}", {"prompt": line}) for n, line in _lines(_streamed(path))),
}
