"""Samples before and after, as a table and as JSON Lines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import Tensor

from toolkit.data import Rollout


@dataclass(frozen=True)
class Answers:
    """Responses to prompts, with their scores, as a report needs them.

    Args:
        prompts: as text.
        responses: as text, one a prompt.
        scores: one a response.
    """

    prompts: list[str]
    responses: list[str]
    scores: list[float]

    @classmethod
    def of(cls, rollout: Rollout, scores: Tensor) -> "Answers":
        """Those of a scored rollout; scores are (B,)."""
        return cls(list(rollout.prompts), list(rollout.responses), [round(score, 4) for score in scores.tolist()])


def sample_rows(before: Answers, after: Answers) -> list[dict[str, Any]]:
    """One row a prompt, with the response and its score before and after training.

    Raises:
        ValueError: the two are not of the same prompts.
    """
    if before.prompts != after.prompts:
        raise ValueError("samples before and after must be of the same prompts")
    return [
        {
            "prompt": prompt,
            "before": before.responses[i],
            "before_score": before.scores[i],
            "after": after.responses[i],
            "after_score": after.scores[i],
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


def append_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def keep_until(path: Path, step: int) -> None:
    """Drop what a file of rows with `step` says of later ones, and a line that a kill cut short."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
