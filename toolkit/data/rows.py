"""Rows of a source: their columns under a task's names, those left out, and how splits and stages divide the rest.

Rows that cannot be used are left out, counted by reason, and reported with their place: never dropped in silence.
"""

import json
import os
import random
import reprlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, Json
from datasets.arrow_writer import OptimizedTypedSequence
from datasets.fingerprint import generate_random_fingerprint

from toolkit.data.files import Row, decoded, kind_of, listed, reason, shown
from toolkit.errors import DataError, did_you_mean

PARTS = ("sft", "reward", "ppo")  # stages among which pairs may be divided
SHOWN = {"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int64())}  # of a demonstration
_AT_ONCE = 1000  # rows that are packed into a data set
_MOST_REASONS = 10  # why rows are left out, in messages and reports: one may name what is another in every row


class Unusable(Exception):
    """Why the row in hand is left out; `limit` is the setting that it exceeds, if that is why, and `answered` is
    whether a prompt has its answer already. Reading goes on."""

    def __init__(self, why: str, *, limit: str = "", answered: bool = False):
        super().__init__(shown(why))
        self.limit, self.answered = limit, answered


def as_number(value: Any) -> Any:
    """A number that stands as text, as CSV has it, where an empty cell is none; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.replace("_", "?")) if value.strip() else None  # Python would take 1_000
    except ValueError:
        return value


def in_memory(table: pa.Table, features: Features | None = None) -> Dataset:
    """A table as a data set. Left to itself it would hash its content, in a second copy of all of it, and fail where a
    column is larger than 2 GiB."""
    return Dataset(table, info=DatasetInfo(features=features), fingerprint=generate_random_fingerprint())


def packed(rows: Iterable[dict[str, Any]], columns: Mapping[str, pa.DataType]) -> Dataset:
    """Encoded rows as a data set of these columns, which takes a small part of the memory of a list."""
    schema, left = pa.schema(list(columns.items())), iter(rows)
    parts = iter(lambda: list(islice(left, _AT_ONCE)), [])
    tables = [pa.Table.from_pylist(part, schema=schema) for part in parts]
    return in_memory(pa.concat_tables(tables) if tables else schema.empty_table())


def tables_of(rows: Dataset) -> Iterator[pa.Table]:
    """The rows of a data set, some at a time, each time in one piece: selected ones come in a piece each."""
    for table in rows.with_format("arrow").iter(batch_size=_AT_ONCE):
        yield table.replace_schema_metadata(None).combine_chunks()


def each_of(rows: Dataset) -> Iterator[dict[str, Any]]:
    """The rows of a data set one by one, read some at a time."""
    for table in tables_of(rows):
        yield from decoded(table.to_pylist(), table.schema)


def parts_of(rows: Dataset, column: str) -> Iterator[list[Any]]:
    """The values of a column, some at a time: to ask for one after the other takes ten times as long."""
    for table in tables_of(rows.select_columns(column)):
        yield table.column(column).to_pylist()


def values_of(rows: Dataset, column: str) -> Iterator[Any]:
    """The values of a column one by one."""
    return chain.from_iterable(parts_of(rows, column))


def _from_columns(columns: Mapping[str, Sequence[Any]]) -> Dataset:
    """What `Dataset.from_dict` makes of them, with the same types."""
    typed = {name: _typed(name, values) for name, values in columns.items()}
    table = pa.Table.from_pydict({name: column for name, (column, _) in typed.items()})
    return in_memory(table, Features({name: kind for name, (_, kind) in typed.items()}))


def _typed(name: str, values: Sequence[Any]) -> tuple[pa.Array, Any]:
    """A column and what datasets calls its type: JSON for messages of whose tool calls an argument has several types,
    which no other column can hold."""
    column = OptimizedTypedSequence(values, col=name)
    try:
        return pa.array(column), column.get_inferred_type()
    except Exception:  # of datasets and pyarrow, as the values have it
        if name == "messages" and _with_calls(values):
            with suppress(TypeError, ValueError):  # of what JSON has not, or its reader cannot read
                return _in_json(values), Json()
        raise


def _in_json(values: Sequence[Any]) -> pa.Array:
    # Not by datasets, which would round numbers to ten decimals.
    written = [None if value is None else json.dumps(value, allow_nan=False) for value in values]
    for text in written:
        Json().decode_example(text)  # as will be done for each batch
    return pa.array(written, pa.json_())


def _with_calls(conversations: Sequence[Any]) -> bool:
    messages = chain.from_iterable(talk for talk in conversations if isinstance(talk, list))
    return any(isinstance(message, dict) and message.get("tool_calls") for message in messages)


def as_dataset(
    columns: Mapping[str, Sequence[Any]], *, place: str, field: str, places: Sequence[str] | None = None
) -> Dataset:
    """Columns as a data set.

    Args:
        place: of all rows, for errors.
        field: what named them, for errors.
        places: of each row, for errors; None counts them.

    Raises: DataError, of `field`: a column's values are of several types, or a number has over 64 bits.
    """
    try:
        return _from_columns(columns)
    except Exception:  # of datasets and pyarrow, as the values have it
        for name, values in columns.items():
            if (error := _no_column(name, values)) is None:
                continue
            too_large = isinstance(error, OverflowError)
            what = "holds a number of over 64 bits" if too_large else "does not hold values of one type"
            # The first that does not go with those before it.
            lengths = range(1, len(values) + 1)
            end = bisect_left(lengths, True, key=lambda n: _no_column(name, values[:n]) is not None)
            row = places[end] if places else f"row {end + 1}"
            try:
                seen = shown(reprlib.repr(values[end]))
            except ValueError:  # of a number with more digits than Python writes
                seen = kind_of(values[end])
            wrong = f'{place}: column "{shown(name)}" {what}; in {row} it is {seen}'
            raise DataError(f"{wrong} ({reason(error)}).", field=field, remedy="Mend or remove it.") from error
        raise


def _no_column(name: str, values: Sequence[Any]) -> Exception | None:
    """Why these are no column, if they are none."""
    try:
        _from_columns({name: values})
    except Exception as error:
        return error
    return None


def rows_in_memory(rows: Any, field: str) -> Any:
    """Rows that a caller gives: a data set without its format, anything else as a list.

    Raises: DataError, of `field`: they are a table or a text, which would be gone through by its columns or its
    letters, or none.
    """
    kind, remedy = type(rows).__name__, "Give texts, rows or a datasets.Dataset; a file goes to data.train."
    is_table = hasattr(rows, "columns") or hasattr(rows, "column_names")
    of_rows = isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping, os.PathLike))
    if not isinstance(rows, Dataset) and (is_table or not of_rows):
        raise DataError(f"a {kind} is no list of rows.", field=field, remedy=remedy)
    found = rows.with_format(None) if isinstance(rows, Dataset) else list(rows)  # else ids may come as tensors
    if not len(found):
        raise DataError("it has no rows.", field=field, remedy=remedy)
    return found


def present(row: Mapping[str, Any]) -> str:
    """The columns that a row has, for an error."""
    return f"present: {listed(row) or 'none'}."


def check_columns(columns: Mapping[str, Any] | None, known: Sequence[str]) -> None:
    """Raises DataError unless a mapping names columns that the task has, each with the source's own name."""
    for ours, theirs in (columns or {}).items():
        if ours not in known:
            hint = did_you_mean(ours, known) or f"The names are {', '.join(known)}."
            remedy = f"{hint} The file's own name is the value."
            raise DataError(f'the task has no column "{ours}".', field="columns", remedy=remedy)
        if not isinstance(theirs, str):
            raise DataError(f"the name of a column is needed, got {theirs!r}.", field=f"columns.{ours}")


def renamed(
    place: str, row: dict[str, Any], columns: Mapping[str, str] | None, *, optional: str = ""
) -> dict[str, Any]:
    """A row with the mapped columns under the task's names; raises DataError, with the place, if it lacks one. The
    `optional` one is then None."""
    columns = columns or {}
    for ours, theirs in columns.items():
        if theirs not in row and ours != optional:
            raise DataError(f'{place}: no column "{theirs}"; {present(row)}', field=f"columns.{ours}")
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    return kept | {ours: row.get(theirs) for ours, theirs in columns.items()}


@dataclass(frozen=True)
class Split:
    """Rows of one split, encoded, with the place of each; and place and reason of those left out."""

    rows: Any  # a list or a data set
    places: Sequence[str]
    left_out: Sequence[tuple[str, str]] = ()

    def counts(self) -> Counter[str]:
        """How many rows were left out for which reason, the commonest first; of very many the rare ones together."""
        every = Counter(reason for _, reason in self.left_out)
        counts = dict(every.most_common(None if len(every) <= _MOST_REASONS else _MOST_REASONS - 1))
        if rest := len(every) - len(counts):
            counts[f"one of {rest} other reasons"] = every.total() - sum(counts.values())
        return Counter(counts)

    def report(self, unit: str) -> str:
        """`12 pairs`, and what was left out."""
        left_out = f"; {len(self.left_out)} left out: {self.listed()}" if self.left_out else ""
        return f"{len(self.rows)} {unit}{left_out}"

    def listed(self) -> str:
        """`2 × an empty prompt (first: x.jsonl, line 7)`, the commonest reason first; empty if none was left out."""
        first = {reason: f" (first: {place})" for place, reason in reversed(self.left_out)}
        return ", ".join(f"{count} × {why}{first.get(why, '')}" for why, count in self.counts().items())

    def take(self, numbers: Sequence[int]) -> "Split":
        """Some of the rows of a data set, in the order given."""
        return replace(self, rows=self.rows.select(numbers), places=[self.places[n] for n in numbers])


class Splits(Mapping[str, Split]):
    """Splits by name, each read when it is first asked for: who measures needs no training data."""

    def __init__(self, **read: Callable[[], Split]):
        self._read, self._found = read, dict[str, Split]()

    def __getitem__(self, name: str) -> Split:
        if name not in self._found:
            self._found[name] = self._read[name]()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def with_first(rows: Iterable[Row]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The place and the row of each row of a source, with the first of them."""
    first: dict[str, Any] = {}
    for place, row in rows:
        first = first or row
        yield place, row, first


def usable_rows(
    rows: Iterable[tuple[str, dict[str, Any], dict[str, Any]]],
    encode: Callable[..., dict[str, Any]],
    columns: Mapping[str, pa.DataType] | None = None,
    *,
    split: str,
    source: str,
    limit: int | None = None,
) -> Split:
    """The first `limit` rows that can be used; raises DataError, which names split and source, if there are none.

    `encode` is called with place and row, and with the first row of the source; it raises `Unusable` for a row to leave
    out. Where `columns` are given, encoded rows are `packed`.
    """
    places, left_out, limits = list[str](), list[tuple[str, str]](), set[str]()

    def encoded() -> Iterator[dict[str, Any]]:
        for place, row, first in rows:
            try:
                made = encode(place, row, first)
            except Unusable as reason:
                left_out.append((place, str(reason)))
                limits.add(reason.limit)
            else:
                places.append(place)
                yield made

    usable = islice(encoded(), limit)
    read = Split(list(usable) if columns is None else packed(usable, columns), places, left_out)
    if not places:
        way = f"Raise {' and '.join(sorted(limits))}" if limits and "" not in limits else f"Mend {source}"
        wrong = f"no row can be used ({read.listed() or 'the file is empty'})."
        raise DataError(wrong, field=split, remedy=f"{way}, or name another source.")
    return read


def draw_held_out(prompts: Sequence[Hashable], number: int, *, seed: int, source: str, left_out: str) -> list[int]:
    """Which rows to hold out: so many, a few more if prompts repeat, as `_take` does it, so that no prompt is also
    trained on.

    Raises DataError, which names the source and what was left out of it, if no row would be left to train on.
    """
    held_out, _ = _take(_shuffled_groups(prompts, seed), number)
    if len(held_out) == len(prompts):
        wrong = f"{number} leaves no training rows: {source} has {len(prompts)} that can be used"
        wrong += f", without {left_out}" if left_out else ""
        different = len(set(prompts))
        if different < len(prompts):
            wrong += f"; of {different} different prompt{'s' * (different > 1)}, whose rows stay together"
        remedy = "Name a source of held-out rows as validation."
        if different > 1:
            remedy = f"Lower it, or n{remedy[1:]}"
        elif len(prompts) > 1:
            remedy = f"See that columns.prompt is the column of the prompts. {remedy}"
        wrong += "."
        raise DataError(wrong, field="validation_size", remedy=remedy)
    return sorted(held_out)


def draw_parts(
    prompts: Sequence[Hashable], parts: Mapping[str, int], *, seed: int, left_out: str = ""
) -> dict[str, list[int]]:
    """Which rows each stage gets, in the order of the file: as many as `parts` says, a few more if prompts repeat, as
    `_take` does it.

    Rows with the same prompt go to one stage. A stage that is not named gets the rest. Raises DataError if there are
    too few rows, with what was left out of them.
    """
    groups = _shuffled_groups(prompts, seed)[::-1]
    drawn: dict[str, list[int]] = {}
    for stage, number in parts.items():
        rows, groups = _take(groups, number)
        if len(rows) < number:
            wrong = f"{number} pairs are asked for, and {len(rows)} of the {len(prompts)} usable ones are left"
            wrong += ", since pairs with the same prompt stay together"
            wrong += f", and without {left_out}." if left_out else "."
            raise DataError(wrong, field=f"parts.{stage}", remedy="Lower it.")
        drawn[stage] = sorted(rows)
    rest = sorted(row for group in groups for row in group)
    return {stage: drawn.get(stage, rest) for stage in PARTS}


def _take(groups: Iterable[list[int]], number: int) -> tuple[list[int], list[list[int]]]:
    """So many rows, or a few more, of groups that stay whole, taken in turn; and the groups that are left.

    A group with which they would be more than a tenth too many, and more than one, is passed over. Where no other one
    is left, the smallest of those that were is taken; alone, if it is enough.
    """
    most, rows = number + max(1, number // 10), 0
    taken, passed, left = list[list[int]](), list[list[int]](), list[list[int]]()
    for group in groups:
        if rows >= number:
            left.append(group)
        elif rows + len(group) <= most:
            taken.append(group)
            rows += len(group)
        else:
            passed.append(group)
    if rows < number and passed:
        last = passed.pop(min(range(len(passed)), key=lambda place: len(passed[place])))
        if len(last) >= number:
            taken, left = [], taken + left
        taken.append(last)
    return [row for group in taken for row in group], passed + left


def _shuffled_groups(prompts: Sequence[Hashable], seed: int) -> list[list[int]]:
    """Rows by prompt, in an order drawn at random."""
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    return order
