"""Samples of responses before and after training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import Tensor

from toolkit.data import Rollout
from toolkit.errors import printable


@dataclass(frozen=True)
class Responses:
    """Prompts and responses as text, scores, and tokens of a response, one each, as a report needs them."""

    prompts: list[str]
    responses: list[str]
    scores: list[float]
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rollout: Rollout, scores: Tensor) -> "Responses":
        """Those of a rollout of B responses and their scores (B,)."""
        return cls(
            list(rollout.prompts),
            list(rollout.responses),
            [round(score, 4) for score in scores.tolist()],
            rollout.lengths,
        )


def sample_rows(before: Responses, after: Responses) -> list[dict[str, Any]]:
    """One row a prompt, the same before and after training, with both responses and their scores."""
    if before.prompts != after.prompts:
        raise ValueError("samples before and after must be of the same prompts")
    columns: dict[str, Sequence[Any]] = {
        "prompt": before.prompts,
        "before": before.responses,
        "before_score": before.scores,
        "after": after.responses,
        "after_score": after.scores,
    }
    if before.lengths and after.lengths:  # those of a run that was begun by an earlier version are not known
        columns |= {"before_length": before.lengths, "after_length": after.lengths}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _clip(text: str, limit: int = 300) -> Text:
    # Text, not str: square brackets in a response are not markup.
    return Text(printable(text if len(text) <= limit else text[: limit - 1] + "…"))


def samples_table(rows: Sequence[dict[str, Any]], *, limit: int = 5) -> Table:
    """The first rows for the terminal."""
    table = Table(title="samples before and after", show_lines=True)
    texts = ("prompt", "before", "after")
    for name in texts:
        table.add_column(name, overflow="fold", ratio=1)
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows[:limit]:
        table.add_row(*(_clip(row[name]) for name in texts), f"{row['before_score']:.2f} → {row['after_score']:.2f}")
    return table
