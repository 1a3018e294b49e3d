"""Which of the saved checkpoints is the best, for the trainers of every stage."""

import json
import math
import warnings
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback

from toolkit import checkpoints, processes
from toolkit.errors import ConfigError
from toolkit.trainers.not_finite import GuardedSteps
from toolkit.trainers.same_run import trainer_state


def has_stopped(stopper: EarlyStoppingCallback) -> bool:
    """Whether its patience is at an end."""
    return bool(stopper.early_stopping_patience_counter >= stopper.early_stopping_patience)


class BestOfSaved(GuardedSteps):
    """A `Trainer` that knows its best checkpoint: of the best evaluation of those at whose step one was saved."""

    state: Any  # set by transformers' Trainer
    _best_put: tuple[Any, int, int] = (None, 0, 0)  # in which state the best weights came back, its step, and theirs

    def is_best(self, metrics: dict[str, float]) -> bool:
        """As of every trainer; and what decides is noted, for when this step is saved."""
        self.check_best_by(metrics)
        self._note_metric(metrics)
        return super().is_best(metrics)

    def check_best_by(self, measured: Collection[str]) -> None:
        """Raises ConfigError: what is to decide which checkpoint is the best is none of these metrics."""
        if (key := self._best_by) is not None and key not in measured:
            wrong = f"{key.removeprefix('eval_')!r} is nothing that is measured here."
            known = ", ".join(sorted(name.removeprefix("eval_") for name in measured))
            raise ConfigError(wrong, field="metric_for_best_model", remedy=f"Name one of {known}.")

    @property
    def step_of_weights(self) -> int:
        """The step whose weights the trainer holds: that of its state, or an earlier one, if the best came back."""
        (state, at, best), now = self._best_put, int(self.state.global_step)
        # Whatever trains anew or reads a checkpoint has another state by then, and a further update another step.
        return best if state is self.state and at == now else now

    def load_best(self) -> None:
        """Put back the weights of the best checkpoint; whose they are is known from then on."""
        best = Path(self.state.best_model_checkpoint)
        self.load_saved(best)
        self._best_put = self.state, self.state.global_step, checkpoints.step_of(best)

    def load_own(self) -> None:
        """Put back the weights of this step, from its checkpoint."""
        self.load_saved(self._folder_of(self.state.global_step))
        self._best_put = None, 0, 0

    def _note_metric(self, metrics: Mapping[str, float]) -> None:
        """Keep what decides which checkpoint is the best, of an evaluation of the held-out rows as they are now, and of
        this step's own weights."""
        key = self._best_by
        if key is not None and key in metrics and self.step_of_weights == self.state.global_step:
            self._metrics_at[self.state.global_step] = float(metrics[key])

    @cached_property
    def _metrics_at(self) -> dict[int, float]:
        """By step what decides which checkpoint is the best: the log has evaluations of other rows as well."""
        return {}

    @property
    def _best_by(self) -> str | None:
        """The metric that decides which checkpoint is the best."""
        name = self.args.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    def _folder_of(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"{checkpoints.CHECKPOINT}{step}"

    def _best(self) -> Path | None:
        """The best checkpoint, where this run now is."""
        noted = self.state.best_model_checkpoint
        return None if noted is None else Path(self.args.output_dir) / Path(noted).name

    def _note_best(self) -> None:
        """Whether what is saved now is the best so far; what transformers compares with may lie between two saves."""
        state, best = self.state, self._best()
        metric = self._metrics_at.get(state.global_step)
        if metric is None or math.isnan(metric):
            return
        before = None if best is None else self._metrics_at.get(checkpoints.step_of(best))
        if before is None or (metric > before if self.args.greater_is_better else metric < before):
            state.best_model_checkpoint = str(self._folder_of(state.global_step))

    def _find_best(self) -> None:
        """The best checkpoint where this run now is, of one that goes on."""
        best = processes.by_main(self._whole_best)
        self.state.best_model_checkpoint = None if best is None else str(best)

    def _whole_best(self) -> Path | None:
        """The best checkpoint, if nothing of it is damaged and it is this run's."""
        best = self._best()
        if best is None or not best.is_dir():
            return None
        if problem := checkpoints.problem_of(best):
            warnings.warn(f"{best}, the best so far, is skipped: {problem}.", stacklevel=5)
            return None
        # Another course that began before it may have saved one of the same name.
        theirs = trainer_state(type(self.state), best).log_history
        as_text = partial(json.dumps, sort_keys=True)  # NaN is not equal to NaN
        if as_text(theirs) != as_text(self.state.log_history[: len(theirs)]):
            warnings.warn(
                f"{best}, by name the best so far, is skipped: another course of training wrote it.", stacklevel=5
            )
            return None
        return best
