"""A run whose loop is transformers' own: how it begins, and goes on from a checkpoint."""

import math
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from toolkit import checkpoints, processes
from toolkit.trainers.not_finite import SkipNotFinite, loss_scale
from toolkit.trainers.resume import ResumableTrainer
from toolkit.trainers.same_run import of_this_version, trainer_state


def steps_of_a_pass(args: TrainingArguments, rows: int) -> int:
    """Optimizer steps of transformers' trainers in a pass over so many rows."""
    whole = math.floor if args.dataloader_drop_last else math.ceil
    return max(1, math.ceil(whole(rows / args.train_batch_size) / args.gradient_accumulation_steps))


class TransformersLoop(ResumableTrainer):
    """A trainer that leaves its loop to transformers, which calls the hooks that read a checkpoint on its way."""

    _restoring: dict[str, Any]  # the state of that checkpoint, which the hooks are not given
    _noted_best: str | None = None  # the best one as that checkpoint has it, wherever that was

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        if checkpoint is not None:
            with processes.agreed(), of_this_version(checkpoint):  # an error of all is told once
                self._restoring = checkpoints.read_state(checkpoint)
                # The order of the rows is drawn from the seed that torch's generator has when the data loader is made.
                checkpoints.set_random_states(self._restoring["random"])
                state, stopped = trainer_state(TrainerState, checkpoint), self._restoring["stopped_early"]
            self._noted_best = state.best_model_checkpoint
            length, field = self._length(state), "max_steps" if self.args.max_steps > 0 else "num_train_epochs"
            self._check_not_past(checkpoint, state.global_step, length, field=field)
            over = length <= state.global_step
            if over or stopped:  # transformers would train a step more
                with processes.agreed(), of_this_version(checkpoint):
                    self.check_checkpoint(checkpoint, self._restoring)
                if over:  # the checkpoint's run may have been longer
                    state.max_steps = length
                before, self.state = self.state, state
                self.load_callbacks()
                for one in self._metrics_files:
                    one.cut()
                try:
                    if self.args.load_best_model_at_end and state.best_model_checkpoint:
                        self.load_best()
                    else:
                        self.load_saved(checkpoint)
                except BaseException:
                    self.state = before  # whose weights the trainer has
                    raise
                self._count_resumption(checkpoint, self._restoring)
                self.load_progress(checkpoint)
                return TrainOutput(state.global_step, 0.0, {})
        guard = SkipNotFinite(self.skipped, self.skip, lambda: loss_scale(self.accelerator))
        self.add_callback(guard)
        evaluates_first = self.args.eval_on_start
        self.args.eval_on_start = evaluates_first and checkpoint is None  # transformers would at each resumption, too
        try:
            with self.wrapped():
                return self._train_by_library(checkpoint, arguments)
        finally:
            self.args.eval_on_start = evaluates_first
            self.remove_callback(guard)

    def _length(self, state: TrainerState) -> int:
        """Steps of the run: those of the checkpoint's, or of a longer or a shorter one that the settings are of."""
        args, before = self.args, state.num_train_epochs  # rounded up
        if args.max_steps > 0:
            return int(args.max_steps)
        steps = steps_of_a_pass(args, len(self.train_dataset))
        known = steps * (before - 1) < state.max_steps <= steps * before  # not of data loaders of a user's own
        passes = math.ceil(args.num_train_epochs * steps)
        return passes if known or math.ceil(args.num_train_epochs) < before else max(passes, state.max_steps)

    def load_optimizer(self, checkpoint: Path) -> None:
        """Optimizer, schedule and scaler as they were; a CheckpointError if those are of another run."""
        self.state.compute_steps(self.args, self.state.max_steps)  # these may be others than the checkpoint's run had
        with processes.agreed(), of_this_version(checkpoint):
            self.check_checkpoint(checkpoint, self._restoring)
        self.restore_optimizer(checkpoint, self._restoring)

    def load_progress(self, checkpoint: Path) -> None:
        """All else, as of every trainer."""
        self.restore_progress(checkpoint, self._restoring)
        self._restoring = {}

    def _find_best(self) -> None:
        # transformers forgets one that is not where it was.
        self.state.best_model_checkpoint = self.state.best_model_checkpoint or self._noted_best
        super()._find_best()
