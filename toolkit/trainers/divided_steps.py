"""transformers' steps and evaluations in parts: over the processes, and over what the memory of a card holds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from toolkit import processes
from toolkit.portion import Portion
from toolkit.trainers.share import own_randomness, sum_gradients
from toolkit.trainers.trainer_internals import TrainerHooks

_Part = tuple[float, dict[str, float]]
"""Of some rows of a micro-batch their weight in a mean, and TRL's metrics of them."""


@dataclass
class _Step:
    """What this process has done of an optimizer step, and what TRL's metrics were before it."""

    metrics: dict[str, list[float]]
    tokens: int
    loss: Tensor
    parts: list[_Part] = field(default_factory=list)
    """Of each micro-batch this process's rows."""


class DividedSteps(TrainerHooks):
    """transformers' `Trainer` with the rows of each optimizer step divided among the processes, and an evaluation's
    batches; what a process has of a batch it computes in parts where its GPU's memory does not hold all of it.

    The rows of a step stand in order, and each process takes a run of them: whole micro-batches, where there are as
    many as processes. A subclass says by `rows_of` and `some_rows` how a micro-batch is divided. PPO's loop takes
    `micro_batch` alone from here: it inherits the rest since what all trainers have is one line of classes.
    """

    current_gradient_accumulation_steps: float  # set by transformers' Trainer
    share: float = 1.0
    """Of the rows of the micro-batch, those that a loss is being computed of."""
    _step: _Step | None = None
    _evaluated: list[_Part] | None = None
    """Of an evaluation's batches so far their losses, while it is made."""
    _of_step: Sequence[dict[str, Any]] = ()  # the micro-batches of the step; none before a run has drawn any

    def get_batch_samples(self, *arguments: Any) -> tuple[list[dict[str, Any]], Any]:
        micro_batches, items = super().get_batch_samples(*arguments)
        self._of_step = micro_batches
        return micro_batches, items

    def rows_of(self, inputs: dict[str, Any]) -> int:
        """Rows of a micro-batch, each of which has to stay whole."""
        return len(inputs["input_ids"])

    def some_rows(self, inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        """The micro-batch with some of its rows."""
        return {name: value[rows] for name, value in inputs.items()}

    def metric_of_all(self, name: str, parts: list[tuple[float, float]]) -> float:
        """A metric of a micro-batch from those of each process's rows, with their weights."""
        values = [value for _, value in parts]
        if name.startswith(("min_", "max_")):
            return min(values) if name.startswith("min_") else max(values)
        return sum(weight * value for weight, value in parts) / max(sum(weight for weight, _ in parts), 1e-12)

    @cached_property
    def micro_batch(self) -> Portion:
        """Rows of a forward and backward pass at a time."""
        return Portion("per_device_train_batch_size", self.args.per_device_train_batch_size)

    @cached_property
    def eval_batch(self) -> Portion:
        """Rows of an evaluation's forward pass at a time."""
        return Portion("per_device_eval_batch_size", self.args.per_device_eval_batch_size)

    @property
    def _may_run_out(self) -> bool:
        return bool(self.args.device.type == "cuda")

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """A micro-batch forward and backward. Of several processes' the loss of a step is that of its last one."""
        if processes.count() == 1:
            return self._backward(model, inputs, list(range(self.rows_of(inputs))), num_items_in_batch)[0]
        zero, ends = torch.zeros((), device=self.args.device), bool(self.accelerator.sync_gradients)
        if self._step is None:
            before = {name: list(values) for name, values in self.trl_metrics().items()}
            self._step = _Step(before, self.tokens_read, zero)
        step = self._step
        try:
            with processes.agreed(now=ends), own_randomness(self.args.seed, self.state.global_step, len(step.parts)):
                loss, part = self._own_rows(model, inputs, num_items_in_batch, at=len(step.parts))
        except BaseException:
            self._step = None
            raise
        step.loss = step.loss + loss
        step.parts.append(part)
        if not ends:
            return zero
        self._step = None
        self._join_metrics(step)
        processes.sum_([step.loss])
        sum_gradients((p for p in model.parameters() if p.requires_grad), self.accelerator.scaler)
        return step.loss

    def _own_rows(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any, *, at: int
    ) -> tuple[Tensor, _Part]:
        """Forward and backward of this process's rows of the micro-batch `at` of a step."""
        number, of_step = self.rows_of(inputs), int(self.current_gradient_accumulation_steps)
        rows = [i for i in range(number) if processes.owner(at * number + i, of_step * number) == processes.rank()]
        if not rows:
            return torch.zeros((), device=self.args.device), (0.0, {})
        loss, part = self._backward(model, inputs, rows, num_items_in_batch)
        return loss.detach().float(), part

    def _backward(
        self, model: nn.Module, inputs: dict[str, Any], rows: list[int], num_items_in_batch: Any
    ) -> tuple[Tensor, _Part]:
        """Forward and backward of some rows of a micro-batch: their share of the loss of a step."""
        of_step, number = self.current_gradient_accumulation_steps, self.rows_of(inputs)
        rows_of_step = sum(map(self.rows_of, self._of_step)) or of_step * number  # the last one may be smaller
        trained = [p for p in model.parameters() if p.requires_grad] if self._may_run_out else []
        gradients = [_copy(p.grad) for p in trained]

        def compute(some: dict[str, Any], share: float) -> Tensor:
            # By this a loss is divided that is a mean over rows; one that is a sum over a count is left alone.
            self.current_gradient_accumulation_steps, self.share = rows_of_step / (share * number), share
            try:
                return super(DividedSteps, self).training_step(model, some, num_items_in_batch)
            finally:
                self.current_gradient_accumulation_steps, self.share = of_step, 1.0

        def undo() -> None:
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = _copy(gradient)

        losses, weights, added = self._in_parts(self.micro_batch, "train", inputs, rows, compute, undo)
        return sum(losses[1:], losses[0]), (sum(weights), added)

    def _in_parts(
        self,
        portion: Portion,
        mode: str,
        inputs: dict[str, Any],
        rows: list[int],
        compute: Callable[[dict[str, Any], float], Tensor],
        undo: Callable[[], None] = lambda: None,
    ) -> tuple[list[Tensor], list[float], dict[str, float]]:
        """Some rows of a micro-batch, in parts where memory runs out.

        Args:
            compute: given a part, and its share of the micro-batch's rows.
            undo: takes back what an attempt that ran out has left behind.

        Returns:
            What `compute` gave of each part; what the part weighs in a mean; TRL's metrics of all, an entry each.
        """
        metrics, number, tokens = self.trl_metrics(mode), self.rows_of(inputs), self.tokens_read
        before, attempts = {name: list(values) for name, values in metrics.items()}, 0

        def attempt(size: int) -> tuple[list[Tensor], list[_Part]]:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                undo()
                _set(metrics, before)
                self.tokens_read = tokens
            found, parts = [], []
            for part in (rows[i : i + size] for i in range(0, len(rows), size)):
                some = dict(inputs) if len(part) == number else self.some_rows(inputs, part)
                # The whole is never beside another part: tokens are not counted for it.
                weight = float(number) if len(part) == number else _weight(some, len(part))
                lengths = {name: len(of) for name, of in metrics.items()}
                found.append(compute(some, len(part) / number))
                parts.append((weight, _added(metrics, lengths)))
            return found, parts

        found, parts = portion(attempt, most=len(rows))
        if len(parts) > 1:
            _set(metrics, before)
            self._append(metrics, parts)
        added = _added(metrics, {name: len(values) for name, values in before.items()})
        return found, [weight for weight, _ in parts], added

    def _append(self, metrics: dict[str, list[float]], parts: Sequence[_Part]) -> None:
        """Put the entries of a micro-batch into TRL's metrics, from those of its parts."""
        for name in sorted({name for _, added in parts for name in added}):
            of_parts = [(weight, added[name]) for weight, added in parts if name in added]
            metrics[name] = [*metrics.get(name, ()), self.metric_of_all(name, of_parts)]
        if "num_tokens" in metrics:
            metrics["num_tokens"] = [self.tokens_read]

    def _join_metrics(self, step: _Step) -> None:
        """Put the metrics of all rows in the place of this process's own; where one runs out of memory, so do all."""
        metrics, read = self.trl_metrics(), self.tokens_read - step.tokens
        of_all = processes.gather((step.parts, read, self.micro_batch.rows))
        self.tokens_read = step.tokens + sum(read for _, read, _ in of_all)
        self.micro_batch.lower(min(rows for *_, rows in of_all))
        _set(metrics, step.metrics)
        for of_micro_batch in zip(*(parts for parts, *_ in of_all), strict=True):
            self._append(metrics, of_micro_batch)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As in `Trainer`, a loss alone in parts where memory runs out."""
        step, rows = super().prediction_step, self.rows_of(inputs)

        def compute(some: dict[str, Any], share: float) -> Tensor:
            return step(model, some, prediction_loss_only, ignore_keys)[0]

        loss: Any
        others: Sequence[Any] = (None, None)
        if prediction_loss_only:
            losses, weights, _ = self._in_parts(self.eval_batch, "eval", inputs, list(range(rows)), compute)
            loss = losses[0]
            if len(losses) > 1:
                loss = sum(weight * one for weight, one in zip(weights, losses, strict=True)) / max(sum(weights), 1.0)
        else:
            loss, *others = step(model, inputs, prediction_loss_only, ignore_keys)
        if self._evaluated is not None:  # else of a plan, whose tensors have no numbers
            self._evaluated.append((_weight(inputs, rows), {} if loss is None else {"loss": float(loss)}))
        return loss, *others

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in `Trainer`, where several processes take the batches in turn if a loss alone is asked for; else each
        reads all, since accelerate, which believes it is alone, would not join their predictions. The loss and TRL's
        metrics are means over what the loss of a step is a mean of, tokens or rows, however these are batched."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        divided, found = processes.count() > 1 and loss_only, self.trl_metrics("eval")
        own = cast(DataLoader, _OwnBatches(dataloader)) if divided else dataloader
        found.clear()  # of what `predict` has left, which logs nothing
        batches: list[_Part] = []
        self._evaluated = batches
        try:
            with processes.agreed(), self.wrapped():
                arguments = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
                output = super().evaluation_loop(own, *arguments)
        finally:
            self._evaluated = None
        parts: list[_Part] = [
            (weight, loss | {name: of[at] for name, of in found.items() if at < len(of)})
            for at, (weight, loss) in enumerate(batches)
        ]
        ours = parts, self.eval_batch.rows
        of_all = processes.gather(ours) if divided else [ours]
        self.eval_batch.lower(min(rows for _, rows in of_all))
        rounds = zip_longest(*(parts for parts, _ in of_all), fillvalue=(0.0, {}))
        parts = [part for of_round in rounds for part in of_round if part[0]]  # without a token a loss is no number
        found.clear()
        self._append(found, parts)
        if found.pop("loss", None):
            output.metrics[f"{metric_key_prefix}_loss"] = self._loss_of(parts)
        return output

    def _loss_of(self, parts: Sequence[_Part]) -> float:
        """Of an evaluation from its batches', without those that transformers leaves out."""
        losses = [(weight, of["loss"]) for weight, of in parts]
        finite = [one for one in losses if math.isfinite(one[1])] if self.args.logging_nan_inf_filter else []
        return self.metric_of_all("loss", finite or losses)


def _weight(inputs: dict[str, Any], rows: int) -> float:
    """What rows count for in a mean: tokens of the loss where it is one over tokens, else rows."""
    labels = inputs.get("labels")
    return float((labels[:, 1:] != -100).sum()) if labels is not None and labels.dim() == 2 else float(rows)


def _set(metrics: dict[str, list[float]], to: dict[str, list[float]]) -> None:
    metrics.clear()
    metrics.update({name: list(values) for name, values in to.items()})


def _added(metrics: dict[str, list[float]], lengths: dict[str, int]) -> dict[str, float]:
    """The last entry of each metric that has more of them than it had."""
    return {name: values[-1] for name, values in metrics.items() if len(values) > lengths.get(name, 0)}


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


class _OwnBatches:
    """The batches of a loader that fall to this process: in turn, so that the main one has the first."""

    def __init__(self, loader: DataLoader):
        self.loader, self.dataset = loader, loader.dataset
        self.numbers = range(processes.rank(), len(loader), processes.count())

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        return (batch for number, batch in enumerate(self.loader) if number in self.numbers)
