"""Rows that cannot be used: left out, counted by reason, and kept on record with their place."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, ClassVar

from toolkit.data.sources import Row
from toolkit.errors import DataError


class Unusable(Exception):
    """The row in hand cannot be used, and the message is why. It is left out; reading goes on."""


class LeftOut:
    """The rows that each split did without: `(place, reason)` in the order of the file; and where the others stood."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[str, str]]] = {}
        self.kept: dict[str, list[str]] = {}

    def usable(
        self,
        split: str,
        rows: Iterable[Row],
        encode: Callable[[str, dict[str, Any]], dict[str, Any]],
        *,
        source: str,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """The rows that can be used, encoded; the others go on record.

        Args:
            split: whose rows these are.
            rows: from `read_rows`.
            encode: called with place and row; raises `Unusable` for a row to leave out.
            source: of the rows, for the error.
            limit: stop after so many usable rows. None reads all.

        Raises:
            DataError: no row can be used.
        """
        self.rows[split], self.kept[split] = [], []
        kept: list[dict[str, Any]] = []
        for place, row in rows:
            try:
                kept.append(encode(place, row))
                self.kept[split].append(place)
            except Unusable as reason:
                self.rows[split].append((place, str(reason)))
            if limit is not None and len(kept) == limit:
                break
        if not kept:
            why = self._listed(split) or "the file is empty"
            limits = [re.fullmatch(r"a (prompt|response) over \d+ tokens", reason) for reason in self.counts()[split]]
            passed = limits[0] if limits and all(limits) else None
            way = f"Raise data.max_{passed.group(1)}_length" if passed else f"Mend {source}"
            raise DataError(f"data.{split}: no row can be used ({why}). {way}, or name another source.")
        return kept

    def counts(self) -> dict[str, Counter[str]]:
        """How many rows were left out for which reason, for each split that was read."""
        return {split: Counter(reason for _, reason in rows) for split, rows in self.rows.items()}

    def as_rows(self) -> list[dict[str, str]]:
        """Every row left out, with the keys `split`, `place` and `reason`."""
        return [
            {"split": split, "place": place, "reason": reason}
            for split, rows in self.rows.items()
            for place, reason in rows
        ]

    def report(self, split: str) -> str:
        """`; 2 left out: 2 × an empty prompt (first: x.jsonl, line 7)`; empty if none was."""
        rows = self.rows[split]
        return f"; {len(rows)} left out: {self._listed(split)}" if rows else ""

    def _listed(self, split: str) -> str:
        first: dict[str, str] = {}
        for place, reason in self.rows[split]:
            first.setdefault(reason, place)
        reasons = self.counts()[split].most_common()
        return ", ".join(f"{count} × {reason} (first: {first[reason]})" for reason, count in reasons)


class ReportsLeftOut:
    """A task that reads its splits from sources, and says how many rows each has and did without."""

    _left_out: LeftOut
    _unit: ClassVar[str]  # what its rows are

    @property
    def _splits(self) -> Mapping[str, Sized]:
        raise NotImplementedError

    @property
    def left_out(self) -> dict[str, Counter[str]]:
        """How many rows were left out for which reason, for each split that was read."""
        return self._left_out.counts()

    def left_out_rows(self) -> list[dict[str, str]]:
        """Every row left out, with the keys `split`, `place` and `reason`."""
        return self._left_out.as_rows()

    def row_places(self, stage: str) -> list[dict[str, str]]:
        """Which rows of the sources are in which split, with the keys `split` and `place`; the same for any stage."""
        return [{"split": split, "place": place} for split in self._splits for place in self._left_out.kept[split]]

    def report(self) -> str:
        """One line on how many rows each split has, and how many were left out for which reason, first where."""
        return " | ".join(
            f"{split}: {len(rows)} {self._unit}{self._left_out.report(split)}" for split, rows in self._splits.items()
        )
