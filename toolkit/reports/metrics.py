"""Metrics as JSON Lines."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class MetricsFile(TrainerCallback):
    """Appends what a trainer logs to a file, one JSON object a line, with `step` first.

    Args:
        path: the file; it is begun anew.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")

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


def read_jsonl_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
