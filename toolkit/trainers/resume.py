"""Whole-run state for the trainers of every stage: saved, restored, and a stop that loses nothing.

It takes the place of the pickles that transformers' `Trainer` writes. A resumed run ends with the weights of one that
was never stopped.
"""

import time
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from toolkit import checkpoints, phases, processes
from toolkit.errors import CheckpointError, RunInterrupted, SelfCheckError
from toolkit.models import FreedMemory, keep_freed_memory, tensors_digest
from toolkit.reports import MetricsFile, Progress
from toolkit.trainers.at_step_end import AtStepEnd
from toolkit.trainers.best import BestOfSaved, has_stopped
from toolkit.trainers.same_run import (
    check_alike,
    check_same_run,
    check_same_settings,
    identity,
    of_this_version,
    settings_of,
)
from toolkit.trainers.self_checks import check_batch
from toolkit.trainers.share import sum_like_gradients
from toolkit.trainers.trainer_internals import forget_unscaled, take_rates_of_schedule


class ResumableTrainer(BestOfSaved):
    """A `Trainer` whose checkpoints hold the whole run. Comes before TRL's class among a trainer's bases.

    A subclass has `load_saved`, and its loop as `_run`, which `TransformersLoop` has for those that leave it to
    transformers. It says by `own_state` and `load_own_state` what else it carries from step to step.
    """

    seconds_before = 0.0
    """Seconds that were spent before the checkpoint from which it went on."""
    started: float | None = None
    """When what a checkpoint's seconds are of began, by `time.perf_counter`; None for the training alone."""
    resumed_at: tuple[int, ...] = ()
    """Steps at which this run was resumed."""

    roles: Any = None  # the shared base, where a role of one is trained
    learnt_roles: tuple[str, ...] = ()  # those that training makes trainable
    _trains_on = False  # whether `train()` called again takes up its own state; transformers' makes a new one
    _request = checkpoints.StopRequest()
    _began: float | None = None
    _summed = False  # whether the first sum of all processes was made
    _goes_on_from: int | None = None  # the step of another course's checkpoint, or 0, until the first one of this
    _saved_at: int | None = None  # the step of what this run has saved, or read, last

    # ------------------------------------------------------------------ train

    def check_alike(self) -> None:
        """Nothing, if several processes begin with the same settings, base, data, adapters and versions, and a sum over
        them, which is made once, is of all, else a SelfCheckError."""
        with processes.agreed():
            check_alike(self._identity, self.roles, trained=self._trained)
        if self._summed:
            return
        with processes.agreed():
            sum_like_gradients(self._trained)
        self._summed = True

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **arguments: Any) -> Any:
        """Train, from the beginning or from a checkpoint, with further arguments as in TRL and transformers.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP are met at the end of the step: it is finished, everything is saved.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint in `args.output_dir`, or a checkpoint folder.
                Later ones beside that are then of another course: they become `abandoned-checkpoint-N`.

        Raises:
            CheckpointError: there is no whole checkpoint, or it is of another run.
            RunInterrupted: a signal asked to stop, and the run was saved.
            SelfCheckError: several processes do not begin with the same settings, base, data or versions.
        """
        keep_freed_memory()  # also for a model of its own, where there is no shared base
        self.take_over()
        with processes.agreed():  # an error of all is told once
            check_batch(self.args, len(self.train_dataset))
        self.check_alike()
        asked = resume_from_checkpoint
        at_work = self._saved_at is not None or self.state.global_step
        if asked in (None, False) and not (self._trains_on and at_work):
            self._begin_anew()
        checkpoint = None if asked in (None, False) else processes.by_main(lambda: self._whole_checkpoint(asked))
        with checkpoints.stop_requests(self._meets) as request:
            self._request = request
            callback = AtStepEnd(request, self.freed_memory)
            self.add_callback(callback)
            self._began = time.perf_counter() if self.started is None else self.started
            try:
                with self.state_of_accelerate.here():
                    result = self._run(checkpoint, arguments)
            except BaseException:
                self.is_in_train = False
                self.remove_noise()
                for one in self.callback_handler.callbacks:
                    if isinstance(one, Progress):
                        one.broke_off()
                forget_unscaled(self.accelerator.scaler)
                raise
            finally:
                self.remove_callback(callback)
        self._check_equal()
        stop = processes.first(request.received)
        step = self.state.global_step
        # One that came after the last step ends nothing that would be lost.
        if stop is not None and (request.met or self._saved_at == step):
            after = f"stopped by {stop.name} after step {step} of {self.state.max_steps}"
            raise RunInterrupted(f"{after}; everything is saved in {self._folder_of(step)}.", stop)
        return result

    def _train_by_library(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        return super().train(resume_from_checkpoint=checkpoint and str(checkpoint), **arguments)

    def take_over(self) -> None:
        """What is learnt is made trainable, alone, where another trainer of the same base was made since."""
        if self.roles is not None and {*self.roles.trained_roles} != {*self.learnt_roles}:
            self.roles.train_roles(*self.learnt_roles)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """As of every trainer; and whatever the strategy "best" says, whoever asked to stop gets a checkpoint."""
        best = super().is_best(metrics)
        return best or self._request.met

    def _meets(self) -> str:
        if 0 < self.state.max_steps <= self.state.global_step:
            return "what is due after the last step is completed and saved, then it stops."
        return f"step {self.state.global_step + 1} of {self.state.max_steps} is finished and saved, then it stops."

    def _check_equal(self) -> None:
        """All of several processes hold the same weights, which they have moved by the same steps."""
        if processes.count() == 1:
            return
        if len(set(processes.gather(tensors_digest(self._trained)))) > 1:
            wrong = f"after step {self.state.global_step} the processes do not hold the same weights any more."
            remedy = "Go on from the last checkpoint. Where it happens again, a callback changes one of them alone."
            with processes.agreed():  # told once
                raise SelfCheckError(wrong, remedy=remedy)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def freed_memory(self) -> FreedMemory:
        return FreedMemory()

    # ------------------------------------------------------------------ saving

    def save_checkpoint(self) -> Path:
        """Write the whole run into `checkpoint-N` of the output folder, whole or not at all, and delete old ones.

        Of several processes the main one writes: what it knows, the others know too.

        Raises:
            CheckpointError: the weights of the best checkpoint have taken the place of this step's.
            SelfCheckError: the processes do not hold the same weights.
        """
        self.take_over()  # for what is noted of adapters that are not trained
        if (step := self.state.global_step) != self.step_of_weights:
            wrong = f"the trainer now holds the best checkpoint's weights, not those of step {step}."
            has = f"{self._folder_of(step).name} has those of step {step}, if it was saved."
            raise CheckpointError(wrong, remedy=f"save_model saves the best ones; {has}")
        if self._goes_on_from is None and self._saved_at is None:  # in a loop of your own that has read no checkpoint
            self._leave_earlier_try("this loop begins anew", "load_checkpoint", logged_itself=False)
        self._check_equal()
        self.store_flos()
        best = self.state.best_model_checkpoint
        self._note_best()
        try:
            with phases.phase("save"):
                folder = processes.by_main(self._write_checkpoint)
        except BaseException:  # a full disk, after which it may go on
            if not self._folder_of(self.state.global_step).is_dir():
                self.state.best_model_checkpoint = best
            raise
        self._goes_on_from, self._saved_at = None, self.state.global_step
        return folder

    def _write_checkpoint(self) -> Path:
        state, folder = self.state, self._folder_of(self.state.global_step)
        for one in self._metrics_files:
            one.leave_other_course()
        stateful = [one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        # Only now is it sure that the run goes another course.
        with checkpoints.whole_folder(folder, goes_on_from=self._goes_on_from) as aside:
            self.save_model(str(aside), _internal_call=True)
            state.save_to_json(str(aside / TRAINER_STATE_NAME))
            checkpoints.write_state(aside, self._whole_state())
        for one in self._metrics_files:
            one.drop_earlier()
        best = self._best()
        keep = {folder, best} if best else {folder}
        checkpoints.rotate(self.args.output_dir, self.args.save_total_limit, keep=keep)
        return folder

    def _whole_state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": checkpoints.get_random_states(),
            "own": self.own_state(),
            **self._identity,
            "processes": processes.count(),
            "stopped_early": any(
                isinstance(callback, EarlyStoppingCallback) and has_stopped(callback)
                for callback in self.callback_handler.callbacks
            ),  # any other reason to stop, as a signal or a callback of the user's, is a pause
            "seconds": self.seconds_before + (0.0 if self._began is None else time.perf_counter() - self._began),
            "resumed_at": self.resumed_at,
            "skipped": vars(self.skipped),
            "metrics_at": self._metrics_at,
        }

    @cached_property
    def _identity(self) -> dict[str, Any]:
        measures = (getattr(self, name, None) for name in ("reward", "judge"))
        return identity(self.train_dataset, self.model, self.roles, *measures) | {"settings": settings_of(self.args)}

    @property
    def _metrics_files(self) -> list[MetricsFile]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, MetricsFile)]

    # ------------------------------------------------------------------ reading

    def _whole_checkpoint(self, asked: str | Path | bool) -> Path:
        if isinstance(asked, bool):
            output = self.args.output_dir
            newest = checkpoints.newest_whole(output, say=lambda sentence: warnings.warn(sentence, stacklevel=5))
            if newest is None:
                raise CheckpointError(f"{output} holds no whole checkpoint to go on from.")
            return newest
        if problem := checkpoints.problem_of(asked):
            raise CheckpointError(f"{asked} is no whole checkpoint: {problem}.")
        return Path(asked)

    def _check_not_past(self, checkpoint: Path, step: int, length: int, *, field: str) -> None:
        if length < step:
            wrong = f"{checkpoint} has {step} steps behind it, and the run is to have {length}."
            remedy = "Take an earlier checkpoint, or make the run longer."
            raise CheckpointError(wrong, field=field, remedy=remedy)

    def load_callbacks(self) -> None:
        """Callbacks as they were; and the best checkpoint where this run now is, in whichever process."""
        self.state.is_world_process_zero = self.is_world_process_zero()  # the checkpoint is the main one's
        self.state.is_local_process_zero = self.is_local_process_zero()
        stored = self.state.stateful_callbacks.items()
        stored = {name: list(states) if isinstance(states, list) else [states] for name, states in stored}
        for callback in self.callback_handler.callbacks:
            if waiting := stored.get(type(callback).__name__):
                for attribute, value in waiting.pop(0).get("attributes", {}).items():
                    setattr(callback, attribute, value)
        for one in self._metrics_files:
            one.forget_earlier()
        self._find_best()

    def check_checkpoint(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Raises CheckpointError: what a checkpoint's state relies on, and does not hold, is that of another run."""
        check_same_run(checkpoint, state, self._identity)
        check_same_settings(checkpoint, state["settings"], self._identity["settings"])

    def restore_optimizer(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Optimizer, schedule and scaler as they were, of a checkpoint that has been checked; a CheckpointError if its
        optimizer does not fit."""
        with of_this_version(checkpoint):
            optimizer = state["optimizer"]
            try:
                self.optimizer.load_state_dict(optimizer)
            except (ValueError, KeyError) as error:
                wrong = f"{checkpoint} is of another run: its optimizer does not fit ({error})."
                raise CheckpointError(wrong) from error
            self.lr_scheduler.load_state_dict(state["scheduler"])
            take_rates_of_schedule(self.lr_scheduler, self.optimizer)
            if state["scaler"] is not None and self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        self._count_resumption(checkpoint, state)

    def _count_resumption(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Count seconds and resumptions on from a checkpoint, and know it for saved."""
        step = self.state.global_step
        with of_this_version(checkpoint):
            self.seconds_before, self.resumed_at = state["seconds"], (*state["resumed_at"], step)
        if checkpoint.resolve() == self._folder_of(step).resolve():  # it may lie elsewhere
            self._saved_at = step

    def restore_progress(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """What `own_state` gave, and then the random states: what comes before may draw random numbers."""
        self._goes_on_from = self.state.global_step
        with of_this_version(checkpoint):
            self.load_own_state(state["own"])
            vars(self.skipped).update(state["skipped"])
            self._metrics_at = state["metrics_at"]
            checkpoints.set_random_states(state["random"])

    # ------------------------------------------------------------------ courses

    def _leave_earlier_try(self, begins: str, goes_on: str, *, logged_itself: bool, told: str = "") -> bool:
        """Checkpoints in this folder are of another course than those to come; whether there are any."""
        output = self.args.output_dir
        if not (earlier := processes.by_main(lambda: [one.name for one in checkpoints.checkpoints_in(output)])):
            return False
        self._goes_on_from = 0
        for one in self._metrics_files:
            one.begin_anew(logged_itself=logged_itself)
        wrong = f"{output} holds {earlier[-1]} of an earlier try, and {begins}: with its first checkpoint, the earlier "
        wrong += f"ones are renamed abandoned-checkpoint-N. To go on from it: {goes_on}."
        warnings.warn(f"{wrong}{told}", stacklevel=4)
        return True

    def _begin_anew(self) -> None:
        self._saved_at, step, way = None, self.state.global_step, "train(resume_from_checkpoint=True)"
        told = f" Only the step count and schedule restart: this trainer has {step} steps behind it, and keeps its "
        told = f"{told}weights and optimizer. A new trainer begins with the initial ones." if step else ""
        if self._leave_earlier_try("training begins anew", way, logged_itself=step > 0, told=told):
            return
        if step:  # of which there is nothing to go back to
            for one in self._metrics_files:
                one.begin_anew(logged_itself=True)
                one.drop_earlier()
            warnings.warn(f"training begins anew.{told}", stacklevel=3)
