"""Columns of a source under the names that a task has for them."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from toolkit.errors import DataError


def check_columns(columns: Mapping[str, Any] | None, known: Sequence[str]) -> None:
    """Whether a mapping names columns that the task has, each with the source's own name.

    Raises:
        DataError: it does not.
    """
    for ours, theirs in (columns or {}).items():
        if ours not in known:
            near = get_close_matches(ours, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The names are {', '.join(known)}."
            raise DataError(
                f'data.columns: the task has no column "{ours}". {hint} The file\'s own name comes after it.'
            )
        if not isinstance(theirs, str):
            raise DataError(f"data.columns.{ours}: the name of a column is needed, got {theirs!r}.")


def renamed(place: str, row: dict[str, Any], columns: Mapping[str, str] | None) -> dict[str, Any]:
    """A row with the mapped columns under the task's names.

    Raises:
        DataError: the row lacks one; with the place.
    """
    for theirs in (columns or {}).values():
        if theirs not in row:
            raise DataError(
                f'{place}: no column "{theirs}", which data.columns names; present: {", ".join(row) or "none"}.'
            )
    kept = {name: value for name, value in row.items() if name not in (columns or {}).values()}
    return kept | {ours: row[theirs] for ours, theirs in (columns or {}).items()}
