"""What trains a stage, made of its settings and tried on one small layer: what cannot work is known before anything
runs."""

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType

from toolkit.errors import ConfigError
from toolkit.spec.keys import REFUSALS
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import BY_METRIC, PPOConfig
from toolkit.trainers.q_config import QConfig

NO_RE_ENTRY = "use_reentrant: true would have no effect: it cannot compute a role's passes again."
_STEPS = 100  # of a schedule, after its warm-up
_WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


class _Layer(nn.Linear):
    """A layer with the two roles that PPO trains."""

    trained_roles = ("policy", "value")

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if (name == "weight") == (role == "policy")]


@contextmanager
def _refusals(field: str, what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (*REFUSALS, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{what} cannot be made of these settings: {reason}", field=field) from error


def check_training(config: TrainingArguments) -> None:
    """Make the optimizer and the schedule as the stage will, by its trainer's own methods, and take a step.

    Raises:
        ConfigError: they cannot be made, or an argument of theirs would have no effect.
    """
    with torch.random.fork_rng(devices=()):
        layer = _Layer(2, 2)
    ours = isinstance(config, PPOConfig) and config.loop == "toolkit"
    trainer: Any = object.__new__(PPOTrainer if ours else Trainer)
    vars(trainer).update(args=config, model=layer, roles=layer, optimizer_cls_and_kwargs=None)
    vars(trainer).update(optimizer=None, lr_scheduler=None)
    with _refusals("optim", f"the optimizer {config.optim.value}"):
        _check_optim_args(config, layer)
        _check_adam(config, layer)
        optimizer = trainer.create_optimizer()
        if type(optimizer).__module__.startswith("torch."):  # others may need a GPU
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    schedule, arguments = config.lr_scheduler_type, config.lr_scheduler_kwargs
    if arguments and schedule in (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP):
        raise ConfigError(f"would have no effect: {schedule.value} has none.", field="lr_scheduler_kwargs")
    if schedule in _WITHOUT_WARMUP and config.get_warmup_steps(_STEPS):
        remedy = "Set it to 0, or take constant_with_warmup."
        raise ConfigError(f"would have no effect: {schedule.value} has none.", field="warmup_steps", remedy=remedy)
    better, other = (
        ("max", "greater_is_better: false") if config.greater_is_better else ("min", "greater_is_better: true")
    )
    if schedule in BY_METRIC and (arguments or {}).get("mode", "min") != better:
        wrong = f"{schedule.value} would take a worse {config.metric_for_best_model} for a better one."
        raise ConfigError(wrong, field="lr_scheduler_kwargs", remedy=f"Set mode: {better}, or {other}.")
    with _refusals("lr_scheduler_type", f"the schedule {schedule.value} (with lr_scheduler_kwargs {arguments or {}})"):
        steps = config.get_warmup_steps(_STEPS) + _STEPS
        made = trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
        for factor in made.lr_lambdas if isinstance(made, LambdaLR) else ():
            if not all(math.isfinite(factor(step)) for step in (0, 1, steps // 2, steps - 1, steps)):
                raise ValueError("a learning rate of it is not finite.")
    known = inspect.signature(checkpoint).parameters.keys() - {"function", "args", "kwargs"}
    known |= {"preserve_rng_state"}  # which torch takes from kwargs
    if not isinstance(config, PPOConfig):  # of transformers' loop, which takes them before torch sees them
        known |= {"every_n_layers", "offload"}
    given, field = config.gradient_checkpointing_kwargs or {}, "gradient_checkpointing_kwargs"
    for name in given.keys() - known:
        wrong = f"torch.utils.checkpoint has no argument {name!r}."
        raise ConfigError(wrong, field=field, remedy=f"It has {', '.join(sorted(known))}.")
    if given.get("use_reentrant") and isinstance(config, PPOConfig | QConfig):
        raise ConfigError(NO_RE_ENTRY, field=field, remedy="Leave it out.")


def _check_optim_args(config: TrainingArguments, layer: nn.Module) -> None:
    """Most optimizers pass over `optim_args` without a word."""
    if not config.optim_args:
        return
    if not all(part.count("=") == 1 for part in config.optim_args.split(",")):
        raise ConfigError(f"{config.optim_args!r} is not of the form name=value,name=value.", field="optim_args")
    if _is_same_without("optim_args", None, config, layer):
        wrong = f"{config.optim_args!r} would have no effect on {config.optim.value}."
        raise ConfigError(wrong, field="optim_args", remedy="Remove it.")


def _check_adam(config: TrainingArguments, layer: nn.Module) -> None:
    """Optimizers that are none of Adam's kind pass over its settings without a word."""
    for one in fields(TrainingArguments):
        said = one.name.startswith("adam_") and getattr(config, one.name) != one.default
        if said and _is_same_without(one.name, one.default, config, layer):
            wrong = f"{getattr(config, one.name)} would have no effect on {config.optim.value}."
            raise ConfigError(wrong, field=one.name, remedy="Remove it.")


def _is_same_without(name: str, default: Any, config: TrainingArguments, layer: nn.Module) -> bool:
    """Whether the optimizer is made with the same arguments where a setting has its default."""
    without = copy.copy(config)
    setattr(without, name, default)
    given, bare = (Trainer.get_optimizer_cls_and_kwargs(args, layer)[1] for args in (config, without))
    return "params" not in given and given == bare
