"""The report of a stage that goes on, or was stopped."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from transformers import TrainerCallback

from toolkit import processes, reports
from toolkit.data import data_digest
from toolkit.reports import APART, Progress
from toolkit.runs.result import figures, of_training
from toolkit.spec.plan import RESPONDING
from toolkit.spec.recipe import Recipe


class ReportAtEvaluations(TrainerCallback):
    """Writes the report of a stage that goes on, as far as it is, at each evaluation and where it is stopped; not more
    often than its page loads itself again once the metrics, which it reads, are many."""

    many = 10_000_000  # bytes

    def __init__(
        self, recipe: Recipe, stage: str, started: float, before: dict[str, Any], trainer: Any, progress: Progress
    ):
        self.recipe, self.stage, self.started, self.before = recipe, stage, started, before
        self.trainer, self.progress = trainer, progress
        self.now: dict[str, Any] | None = None  # what the last evaluation has measured
        self.written = float("-inf")  # when the last report was, by `time.monotonic`
        self.apart = evaluated_apart(recipe, stage, trainer)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.trainer.is_in_train:
            if self.trainer.state.global_step:  # one at the start is what later ones are held against
                self.now = self._of_evaluation(metrics or {})
            metrics_file = self.recipe.stage_folder(self.stage) / reports.METRICS_FILE
            is_recent = time.monotonic() - self.written < reports.RELOADS_AFTER
            if not (is_recent and metrics_file.stat().st_size >= self.many):
                self._write("running")

    def stopped(self) -> None:
        """The stage has been stopped, or has failed: a report that was written, or can be of an evaluation, says so."""
        if self.now is None:  # of a run that goes on, and has not come to its next evaluation
            rows = reports.read_jsonl(self.recipe.stage_folder(self.stage) / reports.METRICS_FILE)
            self.now = next(filter(None, map(self._of_evaluation, reversed(reports.of_steps(rows)))), None)
        if (self.now is not None or self.written > float("-inf")) and self.trainer.state.global_step:
            self._write("stopped")

    def _of_evaluation(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        smoothed = self.stage == "reward" and bool(self.trainer.args.label_smoothing_factor)
        return reports.of_evaluation(metrics, self.before, stage=self.stage, smoothed=smoothed)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Whatever ends the stage inside but its end, the report says that it has stopped."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # what has ended the stage says more
                if processes.is_main():
                    self.stopped()
            raise

    def _write(self, how: str) -> None:
        folder, state = self.recipe.stage_folder(self.stage), self.trainer.state
        started = self.started - getattr(self.trainer, "seconds_before", 0.0)
        metrics = reports.read_jsonl(folder / reports.METRICS_FILE)
        before = self._of_evaluation(reports.at_start(metrics)) if self.apart else self.before
        result = figures(self.recipe, self.stage, started, before, self.now or {})
        result |= of_training(self.trainer, self.progress) | ({APART: True} if self.apart else {})
        result[how] = f"{how.title()}: step {state.global_step} of {state.max_steps} at {result['date']}."
        reports.write_report(folder, result, metrics, [], self.recipe.to_yaml())
        self.written = time.monotonic()


def evaluated_apart(recipe: Recipe, stage: str, trainer: Any) -> bool:
    """Whether evaluations on the way are of other prompts than those before and after: not to be held against them."""
    if stage not in RESPONDING or trainer.eval_dataset is None or recipe.values[stage].get("loop") == "trl":
        return False  # TRL's loop evaluates nothing
    return data_digest(recipe.task.prompts("test")) != data_digest(trainer.eval_dataset)
