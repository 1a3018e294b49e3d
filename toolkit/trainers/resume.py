"""Whole-run state for the trainers of every stage: saved, restored, and a stop that loses nothing.

It takes the place of the pickles that transformers' `Trainer` writes. A resumed run ends with the weights of one that
was never stopped.
"""

import math
import signal
import time
import warnings
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput

from toolkit import checkpoints, phases, processes
from toolkit.errors import CheckpointError, DataError, RunInterrupted, SelfCheckError, ToolkitError
from toolkit.models import FreedMemory, keep_freed_memory, tensors_digest
from toolkit.reports import MetricsFile, Progress
from toolkit.trainers.best import BestOfSaved
from toolkit.trainers.not_finite import SkipNotFinite, loss_scale
from toolkit.trainers.same_run import (
    check_alike,
    check_same_optimizer,
    check_same_run,
    identity,
    of_this_version,
    other_setting,
    settings_of,
    tell_other_settings,
    trainer_state,
)
from toolkit.trainers.share import sum_like_gradients
from toolkit.trainers.trainer_internals import forget_unscaled, take_rates_of_schedule

_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class _AtStepEnd(TrainerCallback):
    """Gives memory back, and ends training where somebody asked for it, with a checkpoint. Comes after all others."""

    def __init__(self, request: checkpoints.StopRequest, freed: FreedMemory):
        self.request, self.freed = request, freed

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.freed.after_step()
        asked = self._join(control)
        if asked is not None:
            self.request.received = asked
            control.should_save = control.should_training_stop = self.request.met = True

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        asked = self._join(control)
        if asked is not None and (state.global_step >= state.max_steps or control.should_training_stop):
            self.request.received = asked  # no later step would meet it
            control.should_save = self.request.met = True
        early = control.should_training_stop and state.global_step < state.max_steps
        if early and args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH):
            control.should_save = True  # weights that may be better than any that are saved, and that it has stopped

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._join(control)
        if self.request.met and (state.global_step >= state.max_steps or float(state.epoch or 0.0).is_integer()):
            # The run, or the pass, really is over: no later step would do what is due here.
            control.should_save = control.should_save or control.should_evaluate or control.should_log
        elif self.request.met:
            control.should_log = control.should_evaluate = control.should_save = False

    def _join(self, control: TrainerControl) -> signal.Signals | None:
        """Whatever one process was asked for, by a signal or by a callback, as one with a clock, all of them do at the
        same step; the signal."""
        of_all = processes.gather((self.request.received, [getattr(control, name) for name in _ASKED]))
        for name, *asked in zip(_ASKED, *(flags for _, flags in of_all), strict=True):
            setattr(control, name, any(asked))
        return next((received for received, _ in of_all if received is not None), None)


def check_undivided(accelerator: Accelerator) -> None:
    """Raises: ToolkitError: accelerate would divide rows among processes, too."""
    if accelerator.num_processes > 1:
        wrong = "the toolkit divides rows among processes by itself, and accelerate would divide them once more."
        raise ToolkitError(wrong, remedy="Call toolkit.processes.join() before anything else.")


def check_batch(args: TrainingArguments, rows: int) -> None:
    """Raises: DataError: a pass would have no batch, and nothing be trained."""
    if args.dataloader_drop_last and rows < args.per_device_train_batch_size:
        wrong = f"true leaves out the only batch: there are {rows} rows, and per_device_train_batch_size is "
        raise DataError(f"{wrong}{args.per_device_train_batch_size}.", field="dataloader_drop_last")


def steps_of_a_pass(args: TrainingArguments, rows: int) -> int:
    """Optimizer steps of transformers' trainers in a pass over so many rows."""
    whole = math.floor if args.dataloader_drop_last else math.ceil
    return max(1, math.ceil(whole(rows / args.train_batch_size) / args.gradient_accumulation_steps))


def has_stopped(stopper: EarlyStoppingCallback) -> bool:
    """Whether its patience is at an end."""
    return bool(stopper.early_stopping_patience_counter >= stopper.early_stopping_patience)


class ResumableTrainer(BestOfSaved):
    """A `Trainer` whose checkpoints hold the whole run. Comes before TRL's class among a trainer's bases.

    A subclass has `load_saved`, and says by `own_state` and `load_own_state` what else it carries from step to step.
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
    _restoring: dict[str, Any]
    _began: float | None = None
    _goes_on_from: int | None = None  # the step of another course's checkpoint, or 0, until the first one of this
    _saved_at: int | None = None  # the step of what this run has saved, or read, last

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
                self.state = state
                if over:  # the checkpoint's run may have been longer
                    state.max_steps = length
                with processes.agreed(), of_this_version(checkpoint):
                    self.check_run(checkpoint, self._restoring)
                self.load_callbacks()
                for one in self._metrics_files:
                    one.cut()
                if self.args.load_best_model_at_end and state.best_model_checkpoint:
                    self.load_best()
                else:
                    self.load_saved(checkpoint)
                self._count_resumption(checkpoint)
                self.load_progress(checkpoint)
                return TrainOutput(state.global_step, 0.0, {})
        guard = SkipNotFinite(self.skipped, self.skip, lambda: loss_scale(self.accelerator))
        self.add_callback(guard)
        evaluates_first = self.args.eval_on_start
        self.args.eval_on_start = evaluates_first and checkpoint is None  # transformers would at each resumption, too
        try:
            with self.wrapped():
                return super().train(resume_from_checkpoint=checkpoint and str(checkpoint), **arguments)
        finally:
            self.args.eval_on_start = evaluates_first
            self.remove_callback(guard)

    def _check_not_past(self, checkpoint: Path, step: int, length: int, *, field: str) -> None:
        if length < step:
            wrong = f"{checkpoint} has {step} steps behind it, and the run is to have {length}."
            remedy = "Take an earlier checkpoint, or make the run longer."
            raise CheckpointError(wrong, field=field, remedy=remedy)

    def _length(self, state: TrainerState) -> int:
        """Steps of the run: those of the checkpoint's, or of a longer or a shorter one that the settings are of."""
        args, before = self.args, state.num_train_epochs  # rounded up
        if args.max_steps > 0:
            return int(args.max_steps)
        steps = steps_of_a_pass(args, len(self.train_dataset))
        known = steps * (before - 1) < state.max_steps <= steps * before  # not of data loaders of a user's own
        passes = math.ceil(args.num_train_epochs * steps)
        return passes if known or math.ceil(args.num_train_epochs) < before else max(passes, state.max_steps)

    def check_alike(self) -> None:
        """Nothing, if several processes begin with the same settings, base, data, adapters and versions, and a sum over
        them is of all, else a SelfCheckError."""
        with processes.agreed():
            check_alike({**self._identity, "settings": self._settings}, self.roles, trained=self._trained)
        with processes.agreed():
            sum_like_gradients(self._trained)

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
            ToolkitError: accelerate would divide what several processes divide by themselves.
        """
        keep_freed_memory()  # also for a model of its own, where there is no shared base
        self.take_over()
        with processes.agreed(), self.state_of_accelerate.here():  # an error of all is told once
            check_undivided(self.accelerator)
            check_batch(self.args, len(self.train_dataset))
        self.check_alike()
        asked = resume_from_checkpoint
        at_work = self._saved_at is not None or self.state.global_step
        if asked in (None, False) and not (self._trains_on and at_work):
            self._begin_anew()
        checkpoint = None if asked in (None, False) else processes.by_main(lambda: self._whole_checkpoint(asked))
        with checkpoints.stop_requests(self._meets) as request:
            self._request = request
            callback = _AtStepEnd(request, self.freed_memory)
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
                with suppress(RuntimeError):  # of a card that answers nothing any more
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

    def take_over(self) -> None:
        """What is learnt is made trainable, alone, where another trainer of the same base was made since."""
        if self.roles is not None and {*self.roles.trained_roles} != {*self.learnt_roles}:
            self.roles.train_roles(*self.learnt_roles)

    def _meets(self) -> str:
        if 0 < self.state.max_steps <= self.state.global_step:
            return "what is due after the last step is completed and saved, then it stops."
        return f"step {self.state.global_step + 1} of {self.state.max_steps} is finished and saved, then it stops."

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

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """As in `Trainer`; training draws the same random numbers whether it was called or not."""
        with checkpoints.kept_random_states(), phases.phase("evaluation"):
            measured = super().evaluate(*arguments, **named)
        if not arguments and named.get("eval_dataset") is None:
            self._note_metric(measured)
        return measured

    def is_best(self, metrics: dict[str, float]) -> bool:
        """As of every trainer; and whatever the strategy "best" says, whoever asked to stop gets a checkpoint."""
        best = super().is_best(metrics)
        return best or self._request.met

    def save_checkpoint(self) -> Path:
        """Write the whole run into `checkpoint-N` of the output folder, whole or not at all, and delete old ones.

        Of several processes the main one writes: what it knows, the others know too.

        Raises:
            CheckpointError: the weights of the best checkpoint have taken the place of this step's.
            SelfCheckError: the processes do not hold the same weights.
        """
        if (step := self.state.global_step) == self._best_put_at:
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

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _check_equal(self) -> None:
        """All of several processes hold the same weights, which they have moved by the same steps."""
        if processes.count() == 1:
            return
        if len(set(processes.gather(tensors_digest(self._trained)))) > 1:
            wrong = f"after step {self.state.global_step} the processes do not hold the same weights any more."
            remedy = "Go on from the last checkpoint. Where it happens again, a callback changes one of them alone."
            with processes.agreed():  # told once
                raise SelfCheckError(wrong, remedy=remedy)

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
            "optim": str(self.args.optim.value),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": checkpoints.get_random_states(),
            "own": self.own_state(),
            **self._identity,
            "settings": self._settings,
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

    @property
    def _metrics_files(self) -> list[MetricsFile]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, MetricsFile)]

    @cached_property
    def freed_memory(self) -> FreedMemory:
        return FreedMemory()

    @cached_property
    def _identity(self) -> dict[str, Any]:
        measures = (getattr(self, name, None) for name in ("reward", "judge"))
        return identity(self.train_dataset, self.model, self.roles, *measures)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self.args)

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
        self._saved_at = self._best_put_at = None
        step, way = self.state.global_step, "train(resume_from_checkpoint=True)"
        told = self._trained_before()
        if self._leave_earlier_try("training begins anew", way, logged_itself=step > 0, told=told):
            return
        if step:  # of which there is nothing to go back to
            for one in self._metrics_files:
                one.begin_anew(logged_itself=True)
                one.drop_earlier()
            warnings.warn(f"training begins anew.{told}", stacklevel=3)

    def _trained_before(self) -> str:
        """What does not begin anew where a trainer that has trained is told to train."""
        if not (steps := self.state.global_step):
            return ""
        told = f" Only the step count and schedule restart: this trainer has {steps} steps behind it, and keeps its "
        return f"{told}weights and optimizer. A new trainer begins with the initial ones."

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
            one.earlier = range(0)
        self._find_best()

    def check_run(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Raises CheckpointError: what a checkpoint's state relies on, and does not hold, is that of another run."""
        check_same_run(checkpoint, state, self._identity)

    def check_checkpoint(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Raises CheckpointError: the whole state of a checkpoint is that of another run."""
        groups, now = state["optimizer"]["param_groups"], self.optimizer.param_groups
        with processes.agreed():  # an error of all is told once
            self.check_run(checkpoint, state)
            if (before := state["optim"]) != (kind := self.args.optim.value):
                raise other_setting(checkpoint, "setting optim", before, kind)
            if len(groups) != len(now):
                wrong = f"{checkpoint} was written with another weight decay."
                raise CheckpointError(wrong, remedy="Restore that setting, or start anew.")
            check_same_optimizer(checkpoint, groups, now)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Each group keeps the rate that it begins with: a checkpoint is held against it, and "reduce_lr_on_plateau"
        and "greedy" note none."""
        for group in (optimizer or self.optimizer).param_groups:
            group.setdefault("initial_lr", group["lr"])
        return super().create_scheduler(num_training_steps, optimizer)

    def load_optimizer(self, checkpoint: Path) -> None:
        """Optimizer, schedule and scaler as they were; a CheckpointError if those are of another run."""
        self.state.compute_steps(self.args, self.state.max_steps)  # these may be others than the checkpoint's run had
        with of_this_version(checkpoint):
            self.check_checkpoint(checkpoint, self._restoring)
        self.restore_optimizer(checkpoint)

    def restore_optimizer(self, checkpoint: Path) -> None:
        """As `load_optimizer`, of a checkpoint that has been checked; a CheckpointError if it is of other groups."""
        state = self._restoring
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{checkpoint} is of another run: its optimizer does not fit ({error}).") from error
        with of_this_version(checkpoint):
            self.lr_scheduler.load_state_dict(state["scheduler"])
            take_rates_of_schedule(self.lr_scheduler, self.optimizer)
            if state["scaler"] is not None and self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        self._count_resumption(checkpoint)

    def _count_resumption(self, checkpoint: Path) -> None:
        if checkpoint.resolve() == self._folder_of(self.state.global_step).resolve():
            self._saved_at = self.state.global_step
        with of_this_version(checkpoint):
            self.seconds_before = self._restoring["seconds"]
            self.resumed_at = (*self._restoring["resumed_at"], self.state.global_step)
            settings = self._restoring["settings"]
        tell_other_settings(checkpoint, settings, self._settings)

    def load_progress(self, checkpoint: Path) -> None:
        """What `own_state` gave, and then the random states: what comes before may draw random numbers."""
        self._goes_on_from = self.state.global_step
        with of_this_version(checkpoint):
            self.load_own_state(self._restoring["own"])
            vars(self.skipped).update(self._restoring["skipped"])
            self._metrics_at.clear()
            self._metrics_at.update(self._restoring["metrics_at"])
            checkpoints.set_random_states(self._restoring["random"])
        self._restoring = {}
