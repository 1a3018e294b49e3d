"""Rows of token ids to padded batches. Every mask comes from the lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


def pad_rows(
    rows: Sequence[Sequence[int]], *, pad_token_id: int, side: str, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ragged rows to the longest, rounded up to a multiple.

    Returns:
        input_ids int64 (B, L) and attention_mask int64 (B, L), 1 at real tokens whatever their id.
    """
    longest = -(-max(len(row) for row in rows) // multiple) * multiple
    ids, mask = [], []
    for row in rows:
        fill = longest - len(row)
        left, right = (fill, 0) if side == "left" else (0, fill)
        ids.append([pad_token_id] * left + list(row) + [pad_token_id] * right)
        mask.append([0] * left + [1] * len(row) + [0] * right)
    return torch.tensor(ids), torch.tensor(mask)


@dataclass(frozen=True)
class PromptCollator:
    """Left-pads prompts for generation and keeps every other column as a list.

    Returns a dictionary with `input_ids` and `attention_mask` (B, P), `prompt_ids` (B lists without
    padding) and `columns` (the other columns by name).
    """

    pad_token_id: int
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        prompt_ids = [list(row["input_ids"]) for row in rows]
        input_ids, attention_mask = pad_rows(
            prompt_ids, pad_token_id=self.pad_token_id, side="left", multiple=self.multiple
        )
        columns = {key: [row[key] for row in rows] for key in rows[0] if key != "input_ids"}
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "prompt_ids": prompt_ids,
            "columns": columns,
        }


@dataclass(frozen=True)
class LabelledCollator:
    """Right-pads whole sequences with a class label each: `input_ids`, `attention_mask` (B, L), `labels` (B,)."""

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        input_ids, attention_mask = pad_rows(
            [row["input_ids"] for row in rows], pad_token_id=self.pad_token_id, side="right"
        )
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
