"""Updates and optimizer steps that are passed over since something in them is not finite."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from toolkit import phases, processes
from toolkit.data import Rollout
from toolkit.disk import as_the_umask_says, writing
from toolkit.errors import SelfCheckError, ToolkitError
from toolkit.reports import write_jsonl
from toolkit.trainers.divided_steps import DividedSteps

BROKEN_ROWS, BROKEN_TENSORS = "not_finite.jsonl", "not_finite.safetensors"
MOST_IN_A_ROW = 3
"""What is not finite so many times in a row, on different rows, does not pass by itself. One overflow does."""


@dataclass
class Skipped:
    """Updates and optimizer steps that were passed over, since something in them was not finite."""

    total: int = 0
    in_a_row: int = 0

    def add(self, *, of_the_same: bool = False) -> bool:
        """Count another one; whether they are too many in a row to go on.

        Args:
            of_the_same: it is of the same rows as the last, which say nothing new.
        """
        self.total += 1
        self.in_a_row += 0 if of_the_same else 1
        return self.in_a_row >= MOST_IN_A_ROW


def loss_scale(accelerator: Any) -> float | None:
    """By what float16's scaler multiplies a loss; None without a scaler.

    It passes over a step that overflows and halves the scale; what overflows at 1 does so by itself.
    """
    return None if accelerator.scaler is None else float(accelerator.scaler.get_scale())


class SkipNotFinite(TrainerCallback):
    """Passes over optimizer steps of transformers' own loop whose gradient is not finite; in float16 its scaler does.

    Args:
        skipped: counts them.
        skip: told why of each; may end the run.
        scale: that of float16's scaler; None without one.
    """

    def __init__(self, skipped: Skipped, skip: Callable[[str], None], scale: Callable[[], float | None]):
        self.skipped, self.skip, self.scale = skipped, skip, scale

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        parameters, scale = [p for p in model.parameters() if p.grad is not None], self.scale()
        if (scale is not None and scale > 1) or not parameters:
            return
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        if math.isfinite(norm):
            self.skipped.in_a_row = 0
            return
        for parameter in parameters if scale is None else ():
            parameter.grad = None  # which an optimizer passes over
        self.skip(f"the gradient's norm is {norm}")


def save_broken(
    folder: Path, *, rollout: Rollout | None = None, tensors: Mapping[str, Tensor | None] | None = None
) -> str:
    """Write a batch in which something is not finite, for a look at it; the names of the files."""
    held = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in (tensors or {}).items()
        if torch.is_tensor(tensor)
    }
    written = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if rollout is not None:
            names = ("prompts", "responses", "prompt_ids", "response_ids", "ended")
            rows = zip(*(getattr(rollout, name) for name in names), strict=True)
            write_jsonl(folder / BROKEN_ROWS, (dict(zip(names, row, strict=True)) for row in rows))
            written.append(BROKEN_ROWS)
        if held:
            save_file(held, folder / BROKEN_TENSORS)
            as_the_umask_says([folder / BROKEN_TENSORS])
            written.append(BROKEN_TENSORS)
    return " and ".join(str(folder / name) for name in written)


def where_broken(folder: Path, **batch: Any) -> str:
    """A sentence on where the main process has written a batch; nothing of one that was not answered. A full disk is
    not what ended the run."""
    try:
        written = processes.by_main(partial(save_broken, folder, **batch))
        return f"The batch is in {written}." if written else ""
    except ToolkitError as full:
        return f"The batch could not be written: {full}"


class GuardedSteps(DividedSteps):
    """A `Trainer` whose steps leave no number in the weights that is not finite."""

    _counted = "optimizer steps"  # what is too many in a row

    @cached_property
    def skipped(self) -> Skipped:
        """Optimizer steps that were passed over, since something in them was not finite."""
        return Skipped()

    def skip(self, why: str) -> None:
        """Count an optimizer step that is not taken; a SelfCheckError if it is one too many in a row."""
        if self.skipped.total == 0:
            phases.tell(
                f"WARNING at step {self.state.global_step + 1}: {why}; such steps are passed over, and counted."
            )
        if self.skipped.add():
            several = len(self._of_step) > 1
            tensors = {
                f"{number}.{name}" if several else name: tensor
                for number, inputs in enumerate(self._of_step)
                for name, tensor in inputs.items()
            }
            self.stop_broken(why, tensors=tensors)

    def stop_broken(self, why: str, **batch: Any) -> None:
        """End a run in which too many in a row are not finite; the last batch is written beside its checkpoints.

        Raises: SelfCheckError.
        """
        saved = where_broken(Path(self.args.output_dir), **batch)
        wrong = f"{why} at step {self.state.global_step + 1}, and {MOST_IN_A_ROW} {self._counted} in a row were not "
        wrong += "finite. None of that has reached the weights."
        remedy = "Begin a new run with a lower learning_rate, or with a base in float32 if that does not"
        with processes.agreed():  # told once
            raise SelfCheckError(wrong, remedy=f"{remedy} help. {saved}")

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """As in `Trainer`, with the number of steps that were passed over, if any were."""
        if self.skipped.total:
            logs["skipped_steps"] = float(self.skipped.total)  # the same object: TRL adds to it what it has measured
        super().log(logs, *arguments, **named)
