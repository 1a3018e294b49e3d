"""Samples before and after, as a table and as JSON Lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from toolkit.data import Rollout


def sample_rows(
    before: Rollout, before_scores: Sequence[float], after: Rollout, after_scores: Sequence[float]
) -> list[dict[str, Any]]:
    """One row a prompt, with the response and its score before and after training.

    Raises:
        ValueError: the two rollouts are not of the same prompts.
    """
    if list(before.prompts) != list(after.prompts):
        raise ValueError("samples before and after must be of the same prompts")
    return [
        {
            "prompt": prompt,
            "before": before.responses[i],
            "before_score": round(float(before_scores[i]), 4),
            "after": after.responses[i],
            "after_score": round(float(after_scores[i]), 4),
        }
        for i, prompt in enumerate(before.prompts)
    ]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as JSON Lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _clip(text: str, limit: int = 300) -> Text:
    # Text, not str: square brackets in a response are not markup.
    return Text(text if len(text) <= limit else text[: limit - 1] + "…")


def samples_table(rows: Sequence[dict[str, Any]], *, limit: int = 5) -> Table:
    """The first rows for the terminal."""
    table = Table(title="samples before and after", show_lines=True)
    for name in ("prompt", "before", "after"):
        table.add_column(name, overflow="fold", ratio=1)
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows[:limit]:
        score = f"{row['before_score']:.2f} → {row['after_score']:.2f}"
        table.add_row(_clip(row["prompt"]), _clip(row["before"]), _clip(row["after"]), score)
    return table
