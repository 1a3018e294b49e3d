"""Samples of responses before and after training."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from toolkit import processes
from toolkit.data import Rollout
from toolkit.errors import printable


class Output(Console):
    """Standard output, of several processes that of the main one. Where it is closed, as by `| head`, that is an error
    as others are: rich would exit in silence."""

    def __init__(self, **named: Any) -> None:
        super().__init__(quiet=not processes.is_main(), **named)

    def on_broken_pipe(self) -> None:
        raise

    @property
    def file(self) -> IO[str]:
        """Where it goes. While a panel stands in for standard output, to that, which shows lines above itself: rich
        writes past it, into the panel."""
        if self._file is None and hasattr(sys.stdout, "rich_proxied_file"):
            return sys.stdout
        return super().file

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


@dataclass(frozen=True)
class Responses:
    """Prompts and responses as text, scores, and tokens of a response, one each, as a report needs them."""

    prompts: list[str]
    responses: list[str]
    scores: list[float]
    lengths: list[int]
    judged: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, rollout: Rollout, scores: Tensor, judged: Tensor | None = None) -> "Responses":
        """Those of a rollout of B responses and their scores (B,), those of a judge too."""

        def numbers(of: Tensor | None) -> list[float]:
            return [] if of is None else [float(f"{score:.9g}") for score in of.tolist()]  # all that float32 holds

        texts = list(rollout.prompts), list(rollout.responses)
        return cls(*texts, numbers(scores), rollout.lengths, numbers(judged))


def sample_rows(before: Responses, after: Responses) -> list[dict[str, Any]]:
    """One row a prompt, the same before and after training, with both responses and their scores."""
    columns: dict[str, Sequence[Any]] = {
        "prompt": before.prompts,
        "before": before.responses,
        "before_score": before.scores,
        "after": after.responses,
        "after_score": after.scores,
        "before_length": before.lengths,
        "after_length": after.lengths,
    }
    if before.judged and after.judged:
        columns |= {"before_judge": before.judged, "after_judge": after.judged}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def texts_table(rows: Sequence[dict[str, Any]], names: Sequence[str], *, title: str = "", figures: str = "") -> Table:
    """Texts of rows side by side for the terminal, and a column of figures, named so, where rows have one."""
    table = Table(title=title or None, show_lines=True)
    for name in names:
        table.add_column(name, overflow="fold", ratio=1)
    if figures:
        table.add_column(figures, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(printable(row[name])) for name in names]  # Text: square brackets are no markup
        table.add_row(*cells, *([row[figures]] if figures else ()))
    return table


_ROWS, _CHARACTERS = 5, 300  # that a terminal is shown


def samples_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The first rows, long texts cut."""
    names, shown = ("prompt", "before", "after"), []
    for row in rows[:_ROWS]:
        texts = {name: row[name] for name in names}
        texts = {name: t if len(t) <= _CHARACTERS else t[: _CHARACTERS - 1] + "…" for name, t in texts.items()}
        shown.append({**texts, "score": f"{row['before_score']:.2f} → {row['after_score']:.2f}"})
    return texts_table(shown, names, title="samples before and after", figures="score")
