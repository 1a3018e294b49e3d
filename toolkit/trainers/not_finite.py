"""Updates and optimizer steps that are passed over since something in them is not finite."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from toolkit.data import Rollout
from toolkit.disk import writing

BROKEN_ROWS, BROKEN_TENSORS = "not_finite.jsonl", "not_finite.safetensors"
MOST_IN_A_ROW = 3
"""What is not finite so many times in a row, on different rows, does not pass by itself. One overflow does."""


@dataclass
class Skipped:
    """Updates and optimizer steps that were passed over, since something in them was not finite."""

    total: int = 0
    in_a_row: int = 0

    def add(self) -> bool:
        """Count another one; whether they are too many in a row to go on."""
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        return self.in_a_row >= MOST_IN_A_ROW

    def passed(self) -> None:
        """One was finite."""
        self.in_a_row = 0


class SkipNotFinite(TrainerCallback):
    """Passes over optimizer steps of transformers' own loop whose gradient is not finite; in float16 its scaler does.

    Args:
        skipped: counts them.
        skip: told why of each; may end the run.
    """

    def __init__(self, skipped: Skipped, skip: Callable[[str], None]):
        self.skipped, self.skip = skipped, skip

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        parameters = [p for p in model.parameters() if p.grad is not None]
        if args.fp16 or not parameters:
            return
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        if math.isfinite(norm):
            self.skipped.passed()
            return
        for parameter in parameters:
            parameter.grad = None  # which an optimizer passes over
        self.skip(f"the gradient's norm is {norm}")


def save_broken(folder: Path, *, rollout: Rollout | None = None, tensors: Mapping[str, Tensor | None]) -> str:
    """Write a batch in which something is not finite, for a look at it; the names of the files."""
    held = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if torch.is_tensor(tensor)
    }
    written = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if rollout is not None:
            names = ("prompts", "responses", "prompt_ids", "response_ids", "ended")
            rows = zip(*(getattr(rollout, name) for name in names), strict=True)
            lines = (json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows)
            (folder / BROKEN_ROWS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            written.append(BROKEN_ROWS)
        if held:
            save_file(held, folder / BROKEN_TENSORS)
            written.append(BROKEN_TENSORS)
    return " and ".join(str(folder / name) for name in written)
