"""Whole-run state for the trainers of every stage: saved, restored, and a stop that loses nothing.

One piece of code in place of what transformers' `Trainer` writes for itself (`optimizer.pt`, `scheduler.pt`,
`rng_state.pth`, `training_args.bin`, all of them pickles). What makes a resumed run end with the weights of one that
was never stopped: weights, optimizer, scheduler, float16's scaler, every random state, the place in the data, and
whatever else a trainer or a callback carries from step to step.
"""

import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from toolkit.checkpoints import (
    StopRequest,
    get_random_states,
    kept_random_states,
    newest_whole,
    problem_of,
    read_state,
    rotate,
    set_aside_later,
    set_random_states,
    stop_requests,
    whole_folder,
    write_state,
)
from toolkit.data import data_digest
from toolkit.errors import CheckpointError, RunInterrupted
from toolkit.models import SharedBase, base_digest
from toolkit.reports import versions

# Other versions of these may round differently, or store their state differently.
_EXACT_WITH = ("torch", "transformers", "trl", "peft", "bitsandbytes")


class _StopAtStepEnd(TrainerCallback):
    """Ends training where somebody asked for it, with a checkpoint."""

    def __init__(self, request: StopRequest):
        self.request = request

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.request.received is not None:
            control.should_save = control.should_training_stop = self.request.met = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.request.met:
            return
        if state.global_step >= state.max_steps or float(state.epoch or 0.0).is_integer():
            # The run, or the pass, really is over: no later step would do what is due here.
            control.should_save = control.should_save or control.should_evaluate
        else:
            control.should_log = control.should_evaluate = control.should_save = False


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)


class ResumableTrainer(Trainer):
    """A `Trainer` whose checkpoints hold the whole run. Comes before TRL's class among a trainer's bases.

    A subclass says how its weights are read (`load_saved`), and what it carries from step to step besides what every
    trainer has (`own_state`, `load_own_state`).
    """

    seconds_before = 0.0
    """Seconds that were spent on training before the checkpoint from which it went on."""
    resumed_at: tuple[int, ...] = ()
    """Steps at which this run was resumed."""

    state: Any  # set by transformers' Trainer
    _request = StopRequest()
    _restoring: dict[str, Any]
    _began: float | None = None
    _goes_on_from: Path | None = None
    _digest: str | None = None

    # ------------------------------------------------------------------ what a subclass says

    def load_saved(self, folder: Path) -> None:
        """Put the weights that `save_model` wrote into the roles or the model."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """What else is carried from step to step; for `write_state`."""
        metrics = getattr(self, "_metrics", {"train": {}})["train"]
        return {
            # The sums from which the next line of metrics is made.
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "metrics": {name: [float(value) for value in values] for name, values in metrics.items()},
            "tokens": getattr(self, "_total_train_tokens", 0),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""
        self._tr_loss = torch.tensor(state["loss"], device=self.args.device)
        self._total_loss_scalar = -state["loss"]  # transformers reports the mean loss of this call alone
        self._globalstep_last_logged = state["last_logged"]
        if hasattr(self, "_metrics"):
            for name, values in state["metrics"].items():
                self._metrics["train"][name] = values
            self._total_train_tokens = state["tokens"]

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        """The training loop, from a checkpoint or from the beginning."""
        if checkpoint is not None:
            self._restoring = read_state(checkpoint)
            # The order of the rows is drawn from the seed that torch's generator has when the data loader is made.
            set_random_states(self._restoring["random"])
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            self._check_not_past(checkpoint, state.global_step, self.args.max_steps)
            over = state.global_step >= state.max_steps and not self._asks_for_more(state)
            if over or self._restoring["stopped_early"]:
                return self._take_over(checkpoint, state)
        return super().train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint), **arguments)

    def _check_not_past(self, checkpoint: Path, step: int, max_steps: int) -> None:
        """Nothing, if the run is at least as long as what the checkpoint has behind it; below 1 it says nothing."""
        if 0 < max_steps < step:
            raise CheckpointError(
                f"{checkpoint} has {step} steps behind it, and the run is to have {max_steps}. Take an earlier "
                "checkpoint, or make the run longer."
            )

    def _asks_for_more(self, state: TrainerState) -> bool:
        """Whether the settings are of a longer run than the one that the checkpoint ended."""
        args, rows = self.args, len(self.train_dataset)
        if args.max_steps > 0:
            return bool(args.max_steps > state.global_step)
        whole = math.floor if args.dataloader_drop_last else math.ceil
        steps_of_a_pass = math.ceil(whole(rows / args.train_batch_size) / args.gradient_accumulation_steps)
        return math.ceil(args.num_train_epochs * max(steps_of_a_pass, 1)) > state.global_step

    def _take_over(self, checkpoint: Path, state: TrainerState) -> TrainOutput:
        """A checkpoint of a run that was over, from which transformers would train a step more."""
        self.state = state
        self._check_same_run(str(checkpoint), self._restoring)
        self._load_callback_state()
        best = state.best_model_checkpoint if self.args.load_best_model_at_end else None
        self.load_saved(Path(best) if best else checkpoint)
        self._count_resumption()
        return TrainOutput(state.global_step, 0.0, {})

    # ------------------------------------------------------------------ precision

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """The autocast region that `bf16` or `fp16` asks for. transformers leaves it to accelerate's wrapper around the
        forward pass of the whole model, and the forward passes here are of its parts."""
        return self.accelerator.autocast()

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **arguments: Any) -> Any:
        """Train, from the beginning or from a checkpoint.

        SIGINT (Ctrl-C) and SIGTERM are met at the end of the step: it is finished, everything is saved.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint in `args.output_dir`, or a checkpoint folder.
                Later ones beside that are then of another course: they become `abandoned-checkpoint-N`.
            arguments: as in TRL and transformers.

        Raises:
            CheckpointError: there is no whole checkpoint, or it is of another run.
            RunInterrupted: a signal asked to stop, and the run was saved.
        """
        checkpoint = self._checkpoint_of(resume_from_checkpoint)
        with stop_requests() as request:
            self._request = request
            callback = _StopAtStepEnd(request)
            self.add_callback(callback)
            self._began = time.perf_counter()
            try:
                result = self._run(checkpoint, arguments)
            finally:
                self.remove_callback(callback)
        if request.received is not None and request.met:
            saved = self._folder_of(self.state.global_step)
            raise RunInterrupted(
                f"stopped by {request.received.name} after step {self.state.global_step} of {self.state.max_steps}; "
                f"everything is saved in {saved}.",
                request.received,
            )
        return result

    def _checkpoint_of(self, asked: str | Path | bool | None) -> Path | None:
        if asked is None or asked is False:
            return None
        if asked is True:
            found = newest_whole(self.args.output_dir, say=_warn)
            if found is None:
                raise CheckpointError(f"{self.args.output_dir} holds no whole checkpoint to go on from.")
            return found
        return self._verified(asked)

    def _verified(self, folder: str | Path) -> Path:
        problem = problem_of(folder)
        if problem is not None:
            raise CheckpointError(f"{folder} is no whole checkpoint: {problem}.")
        return Path(folder)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """As in `Trainer`; training draws the same random numbers whether it was called or not."""
        with kept_random_states():
            return super().evaluate(*arguments, **named)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Whether to save under the strategy "best", which overrules the wish to save of whoever asked to stop."""
        return super()._determine_best_metric(metrics, trial) or self._request.met

    # ------------------------------------------------------------------ writing

    def _folder_of(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def save_checkpoint(self) -> Path:
        """Write the whole run into `checkpoint-N` of the output folder, whole or not at all, and delete old ones.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.store_flos()
        state, folder = self.state, self._folder_of(self.state.global_step)
        best = self._folder_of(state.best_global_step) if state.best_global_step else None
        if best == folder or (best is not None and best.is_dir()):
            state.best_model_checkpoint = str(best)
        state.stateful_callbacks = self._callback_states()
        if self._goes_on_from is not None:  # only now is it sure that the run goes another course
            set_aside_later(self.args.output_dir, self._goes_on_from)
            self._goes_on_from = None
        with whole_folder(folder) as aside:
            self.save_model(str(aside), _internal_call=True)
            state.save_to_json(str(aside / TRAINER_STATE_NAME))
            if not self.args.save_only_model:
                write_state(aside, self._whole_state())
        rotate(self.args.output_dir, self.args.save_total_limit, keep={folder} | ({best} if best else set()))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        return folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_checkpoint()

    def _callback_states(self) -> dict[str, Any]:
        """States of the callbacks that have one, by class, as transformers writes them."""
        found: dict[str, Any] = {}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in found.items()}

    def _whole_state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": get_random_states(),
            "own": self.own_state(),
            "data": self._about_data(),
            "base": self._about_base(),
            "stopped_early": self._stopped_early(),
            "seconds": self.seconds_before + (0.0 if self._began is None else time.perf_counter() - self._began),
            "resumed_at": self.resumed_at,
            "versions": versions(),
        }

    def _stopped_early(self) -> bool:
        """Whether the run is over; any other reason to stop, as a signal or a callback of the user's, is a pause."""
        return any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )

    def _about_data(self) -> dict[str, Any]:
        if self._digest is None:
            self._digest = data_digest(self.train_dataset)
        return {"rows": len(self.train_dataset), "sha256": self._digest}

    def _about_base(self) -> str | None:
        """Of the shared base, where the trainer trains a role of one."""
        roles: SharedBase | None = getattr(self, "roles", None)
        return None if roles is None else base_digest(roles)

    # ------------------------------------------------------------------ reading

    # The steps of `Trainer.train` that read a checkpoint, in its order.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_saved(Path(resume_from_checkpoint))

    def _load_callback_state(self) -> None:
        """Callbacks as they were; and the best checkpoint where this run now is."""
        stored = {
            name: list(states) if isinstance(states, list) else [states]
            for name, states in self.state.stateful_callbacks.items()
        }
        for callback in self.callback_handler.callbacks:
            waiting = stored.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and waiting:
                for attribute, value in waiting.pop(0)["attributes"].items():
                    setattr(callback, attribute, value)
        best = self._folder_of(self.state.best_global_step) if self.state.best_global_step else None
        self.state.best_model_checkpoint = str(best) if best is not None and best.is_dir() else None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._restoring
        self._check_same_run(checkpoint, state)
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{checkpoint} is of another run: its optimizer does not fit ({error}).") from error
        self.lr_scheduler.load_state_dict(state["scheduler"])
        self._take_rates_of_this_schedule()
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self._count_resumption()

    def _take_rates_of_this_schedule(self) -> None:
        """Of a run that is made longer the shorter one's last rate, often 0, is not that of its next step."""
        scheduler = self.lr_scheduler
        if isinstance(scheduler, LambdaLR):
            rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            scheduler._last_lr = [base * factor(scheduler.last_epoch) for base, factor in rates]
            for group, rate in zip(self.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate

    def _count_resumption(self) -> None:
        self.seconds_before = self._restoring["seconds"]
        self.resumed_at = (*self._restoring["resumed_at"], self.state.global_step)

    def _check_same_run(self, checkpoint: str, state: dict[str, Any]) -> None:
        then, now = state["data"], self._about_data()
        if then != now:
            raise CheckpointError(
                f"{checkpoint} was written on other training data ({then['rows']} rows; now {now['rows']}), so its "
                "place in them means nothing. Give the data back, or start anew (OVERWRITE=1, --overwrite)."
            )
        if "base" not in state:
            raise CheckpointError(
                f"{checkpoint} was written by an earlier version of the toolkit, and lacks what this one goes on with. "
                "Begin anew (OVERWRITE=1, --overwrite), or go on with that version."
            )
        if state["base"] != self._about_base():
            raise CheckpointError(
                f"{checkpoint} was written on a base with other weights: its adapters mean nothing on this one. Give "
                "the base back (base.model), or start anew (OVERWRITE=1, --overwrite)."
            )
        here = versions()
        changed = [
            f"{name} {state['versions'].get(name)} → {here[name]}"
            for name in _EXACT_WITH
            if state["versions"].get(name) != here[name]
        ]
        if changed:
            _warn(f"{checkpoint} was written with other versions ({', '.join(changed)}): not exact to the last bit.")

    def _load_scaler(self, checkpoint: str | None) -> None:
        """With the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The last thing to be restored: what comes before may draw random numbers."""
        if checkpoint is not None:
            self._goes_on_from = Path(checkpoint)
            self.load_own_state(self._restoring["own"])
            set_random_states(self._restoring["random"])
            self._restoring = {}

    def _load_best_model(self) -> None:
        self.load_saved(Path(self.state.best_model_checkpoint))
