"""What a trainer shows while it trains: the metrics as JSON Lines, and a progress bar."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from toolkit.reports.files import append_jsonl, whole_lines, write_lines

_SHOWN = {
    "score": "score {:.3f}",
    "kl": "KL {:.3f}",
    "length": "length {:.1f}",
    "samples_per_second": "{:.1f} samples/s",
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "eval_loss": "eval loss {:.4f}",
    "eval_score": "eval score {:.3f}",
    "eval_exact_match": "eval exact match {:.3f}",
    "eval_accuracy": "eval accuracy {:.3f}",
}


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


class ProgressBar(TrainerCallback):
    """On a terminal one bar; elsewhere a line each time the trainer logs.

    Args:
        title: what runs, at the left of the bar.
        console: where to show it; standard error if None, so that standard output stays clean.
    """

    def __init__(self, title: str, console: Console | None = None):
        self.title = title
        self.console = console or Console(file=sys.stderr)
        self.progress: Progress | None = None
        self.task: Any = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.shown = {}
        if not self.console.is_terminal:
            return
        bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*bar, TextColumn("{task.fields[metrics]}"), console=self.console)
        self.task = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step, metrics="")
        self.progress.start()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        fresh = {key: form.format(float(logs[key])) for key, form in _SHOWN.items() if key in logs}
        self.shown.update(fresh)
        if self.progress is not None:
            self.progress.update(self.task, metrics=" · ".join(self.shown.values()))
        elif fresh:
            line = f"{self.title} {state.global_step}/{state.max_steps}  {' · '.join(fresh.values())}"
            self.console.print(line, highlight=False, soft_wrap=True)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
