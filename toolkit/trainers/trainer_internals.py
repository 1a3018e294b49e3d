"""The private parts of transformers' and TRL's trainers, and of accelerate, that we need; no other module names them.

Read from the versions in `READ_FROM`. `tests/trainers/test_trainer_internals.py` holds them against what is installed,
and `pyproject.toml` admits no version beyond those that have been run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import deactivate_neftune

from toolkit import processes
from toolkit.errors import ToolkitError

READ_FROM = {"transformers": "5.24.0", "trl": "1.16.0", "accelerate": "1.15.0"}


def autocast(args: TrainingArguments, device: str, *, cache_enabled: bool | None = True) -> torch.autocast:
    """The region that `bf16` or `fp16` asks for."""
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    return torch.autocast(device, dtype=dtype, enabled=args.bf16 or args.fp16, cache_enabled=cache_enabled)


class StateOfAccelerate:
    """accelerate's state as it is when this is made, with a trainer: there is one for all trainers of a process."""

    def __init__(self) -> None:
        states = (state._shared_state for state in (AcceleratorState, PartialState))
        self._kept = [(state, dict(state)) for state in states]
        self._accumulation = dict(GradientState().plugin_kwargs)

    def _put_back(self) -> None:
        for state, values in self._kept:
            state.clear()
            state.update(values)
        GradientState().plugin_kwargs = dict(self._accumulation)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, it is the state again, after other trainers, and settings that emptied it."""
        found = StateOfAccelerate()
        self._put_back()
        try:
            yield
        finally:
            found._put_back()


def by_own_accelerate(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a trainer, in which accelerate's state is that which the trainer was made with."""

    @wraps(method)
    def inside(self: Any, *arguments: Any, **named: Any) -> Any:
        with self.state_of_accelerate.here():
            return method(self, *arguments, **named)

    return inside


_WRAPPER = ("forward", "_original_forward", "_is_accelerate_prepared")


class TrainerHooks(Trainer):
    """transformers' `Trainer`, its private steps of saving and reading a checkpoint as public hooks of a subclass.

    `save_checkpoint` writes the whole run into `checkpoint-N` of the output folder. `Trainer.train` reads one by
    `load_saved`, the weights that `save_model` wrote, then `load_callbacks`, from `self.state`, then `load_optimizer`,
    with schedule and float16's scaler, then `load_progress`, all else, random states last: reading may draw some.
    """

    state_of_accelerate: StateOfAccelerate
    _wrapper: dict[str, Any] | None = None

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Inside, the model's forward pass has what accelerate puts around it for this trainer's precision, and never
        takes off: whoever has the model next would compute in that precision, and not in its own."""
        own = self.model.__dict__
        given = {name: own[name] for name in _WRAPPER if name in own}
        own.update(self._wrapper or {})
        try:
            with self.state_of_accelerate.here():
                yield
        finally:
            self._wrapper = {name: own.pop(name) for name in _WRAPPER if name in own}
            own.update(given)

    def remove_noise(self) -> None:
        """NEFTune's, which a training that was broken off has left in the model."""
        if (handle := getattr(self, "neftune_hook_handle", None)) is not None:
            deactivate_neftune(self.model, handle, self.accelerator)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is the best so far, which is noted; under the strategy "best" it is then saved."""
        return super()._determine_best_metric(metrics, None)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_checkpoint()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_saved(Path(resume_from_checkpoint))

    def _load_callback_state(self) -> None:
        self.load_callbacks()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.load_optimizer(Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """With the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.load_progress(Path(checkpoint))

    def _load_best_model(self) -> None:
        self.load_best()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """As transformers' own, which with a `save_total_limit` of 1 deletes all checkpoints but the best at the end,
        the newest among them, and what else is in their folders."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return self.is_best(metrics)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """The region of these settings. transformers leaves it to accelerate's wrapper around the forward pass of the
        whole model, and the forward passes here are of its parts."""
        return autocast(self.args, self.args.device.type, cache_enabled=cache_enabled)

    def create_accelerator_and_postprocess(self) -> None:
        AcceleratorState._reset_state()  # of an earlier trainer, which may have another precision
        device = PartialState._shared_state.get("device")
        if device is not None and device.type != self.args.device.type:  # and be on another device
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState(cpu=self.args.use_cpu)
        super().create_accelerator_and_postprocess()
        if self.accelerator.num_processes > 1:
            wrong = "the toolkit divides rows among processes by itself, and accelerate would divide them once more."
            raise ToolkitError(wrong, remedy="Call toolkit.processes.join() before anything else.")
        self.state_of_accelerate = StateOfAccelerate()

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that reports and uploads; to the libraries each of several is alone."""
        return processes.is_main()

    is_local_process_zero = is_world_process_zero

    def _send_telemetry(self) -> None:
        """TRL reports architecture and GPU of each run; the toolkit sends nothing anywhere."""

    def take_steps(self) -> None:
        """Optimizers take steps. accelerate passes over them by a switch of the whole process, which a stage that was
        stopped in the middle of its accumulation leaves off."""
        self.accelerator.gradient_state._set_sync_gradients(True)

    def trl_metrics(self, mode: str = "train") -> dict[str, list[float]]:
        """What TRL has measured since the last line of metrics, an entry a micro-batch; transformers nothing."""
        found: dict[str, list[float]] = getattr(self, "_metrics", {mode: {}})[mode]
        return found

    def divide_by_tokens_of_the_loss(self) -> None:
        """Divide the loss of a step by the tokens that it is of, of which a row's first is none. transformers counts so
        for a model whose class names its loss, which GPT-2's does not."""
        self._loss_shifts_labels = True

    @property
    def tokens_read(self) -> int:
        """Tokens of the micro-batches so far, as TRL counts them."""
        return getattr(self, "_total_train_tokens", 0)

    @tokens_read.setter
    def tokens_read(self, number: int) -> None:
        self._total_train_tokens = number

    def own_state(self) -> dict[str, Any]:
        """What is carried from step to step: the sums of the next line of metrics, transformers' and TRL's."""
        return {
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "metrics": {name: [float(value) for value in values] for name, values in self.trl_metrics().items()},
            "tokens": self.tokens_read,
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""
        self._tr_loss = torch.tensor(state["loss"], device=self.args.device)
        self._total_loss_scalar = -state["loss"]  # transformers reports the mean loss of this call alone
        self._globalstep_last_logged = state["last_logged"]
        self.trl_metrics().clear()  # of steps that are made again, where the same trainer goes on
        self.trl_metrics().update(state["metrics"])
        self.tokens_read = state["tokens"]


@contextmanager
def trainers_kept() -> Iterator[None]:
    """Inside, training arguments and trainers may be made, after which those that there were go on.

    accelerate has one state for all trainers of a process, and transformers clears it with each new TrainingArguments:
    a notebook's trainer would end in "Please make sure to properly initialize your accelerator". The arguments set
    `tf32` for the whole process, too, when a recipe is but read.
    """
    products, fresh = torch.backends.fp32_precision, not AcceleratorState._shared_state  # type: ignore[attr-defined]
    try:
        with states_kept():
            yield
    finally:
        torch.backends.fp32_precision = products  # type: ignore[attr-defined]
        if fresh:  # a plan's trainer, on the CPU, would choose the device of the next one
            AcceleratorState._reset_state()


@contextmanager
def states_kept() -> Iterator[None]:
    """Inside, training arguments may be made beside a trainer, whose state in accelerate comes back."""
    with StateOfAccelerate().here() if AcceleratorState._shared_state else nullcontext():
        yield


def forget_unscaled(scaler: torch.amp.GradScaler | None) -> None:
    """After a step that was broken off: float16's scaler takes the gradients for unscaled until it is updated, and
    refuses each later step."""
    if scaler is not None and scaler._scale is not None:
        with suppress(RuntimeError):  # of a card that answers nothing any more: the first error is told
            scaler.update(scaler.get_scale())


def use_one_card(args: TrainingArguments) -> None:
    """Of several cards in sight the first, where transformers would divide each batch among them."""
    args._n_gpu = min(args.n_gpu, 1)


def take_rates_of_schedule(scheduler: Any, optimizer: Any) -> None:
    """Give the optimizer the rates that its schedule has at this step.

    Of a run that is made longer the shorter one's last rate, often 0, is not that of its next step.
    """
    if isinstance(scheduler, LambdaLR):
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [base * factor(scheduler.last_epoch) for base, factor in rates]
        for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate
