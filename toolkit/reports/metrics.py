"""What a trainer logs, as JSON Lines."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from toolkit.reports.files import append_jsonl, whole_lines, write_lines

METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback, ExportableState):
    """Appends what a trainer logs to a file, one JSON object a line, with `step` first.

    In a run that goes on from a checkpoint, lines that were written after that checkpoint are dropped.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.lines = len(whole_lines(path))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {"path": str(self.path)}, "attributes": {"lines": self.lines}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        write_lines(self.path, whole_lines(self.path)[: self.lines])

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        append_jsonl(self.path, [{"step": state.global_step, **logs}])
        self.lines += 1
