"""Metrics as JSON Lines."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class MetricsFile(TrainerCallback, ExportableState):
    """Appends what a trainer logs to a file, one JSON object a line, with `step` first.

    In a run that goes on from a checkpoint, lines that were written after that checkpoint are dropped.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.lines = len(read_jsonl_metrics(path))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {"path": str(self.path)}, "attributes": {"lines": self.lines}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        self.path.write_text("".join(lines[: self.lines]), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
        self.lines += 1


def read_jsonl_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, less one that a kill cut short at its end."""
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]
