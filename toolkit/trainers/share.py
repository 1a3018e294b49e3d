"""What each process does of a step, and how the parts become one step again.

All processes have the same batch, the same optimizer and the same shared randomness. Each computes some of the rows,
as their share of the whole batch's loss; the gradients are summed before they are clipped. No wrapper of
`torch.nn.parallel` has a part in it: adapters that are switched, two backward passes a step and calls of submodules do
not go through one.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from toolkit import processes
from toolkit.checkpoints import kept_random_states
from toolkit.data import Rollout


def own_rows(rollout: Rollout, rows: Sequence[int]) -> list[int]:
    """Those of some rows that fall to this process, divided by tokens."""
    return [rows[i] for i in processes.own([len(rollout.prompt_ids[j]) + len(rollout.response_ids[j]) for j in rows])]


@contextmanager
def own_randomness(*where: Any) -> Iterator[None]:
    """Inside, each of several processes draws its own numbers, as for the dropout of adapters; what they share is
    afterwards as it was. `where` tells one place of a run from another."""
    if processes.count() == 1:
        yield
        return
    with kept_random_states():
        told = repr((int(torch.randint(2**62, ())), processes.rank(), where)).encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(told).digest()[:8], "little", signed=True))
        yield


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of all processes; zeros from one that had no row, none where no process has one."""
    if processes.count() == 1:
        return
    parameters = list(parameters)
    reached = set().union(*processes.gather({i for i, p in enumerate(parameters) if p.grad is not None}))
    for i in reached:
        if parameters[i].grad is None:
            parameters[i].grad = torch.zeros_like(parameters[i])
    processes.sum_([gradient for i in sorted(reached) if (gradient := parameters[i].grad) is not None])


@dataclass
class _Step:
    """What this process has done of an optimizer step, and what TRL's metrics were before it."""

    metrics: dict[str, list[float]]
    tokens: int
    loss: Tensor
    parts: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Of each micro-batch the weight of this process's rows, and their metrics."""


class DividedSteps(Trainer):
    """transformers' `Trainer` with the rows of each optimizer step divided among the processes, and an evaluation's
    batches.

    The rows of a step stand in order, and each process takes a run of them: whole micro-batches, where there are as
    many as processes. A subclass says by `rows_of` and `some_rows` how a micro-batch is divided.
    """

    current_gradient_accumulation_steps: float  # set by transformers' Trainer
    _step: _Step | None = None

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

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """A micro-batch forward and backward. Of several processes' the loss of a step is that of its last one."""
        if processes.count() == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        zero, ends = torch.zeros((), device=self.args.device), bool(self.accelerator.sync_gradients)
        if self._step is None:
            before = {name: list(values) for name, values in self._train_metrics.items()}
            self._step = _Step(before, getattr(self, "_total_train_tokens", 0), zero)
        step = self._step
        try:
            with processes.agreed(now=ends), own_randomness(self.state.global_step, len(step.parts)):
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
        sum_gradients(p for p in model.parameters() if p.requires_grad)
        return step.loss

    @property
    def _train_metrics(self) -> dict[str, list[float]]:
        """TRL's, an entry a micro-batch; transformers' own trainer has none."""
        found: dict[str, list[float]] = getattr(self, "_metrics", {"train": {}})["train"]
        return found

    def _own_rows(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any, *, at: int
    ) -> tuple[Tensor, tuple[float, dict[str, float]]]:
        """Forward and backward of this process's rows of the micro-batch `at` of a step: its loss, and what `_Step`
        keeps of it."""
        number, of_step, metrics = self.rows_of(inputs), self.current_gradient_accumulation_steps, self._train_metrics
        rows = [i for i in range(number) if processes.owner(at * number + i, int(of_step) * number) == processes.rank()]
        if not rows:
            return torch.zeros((), device=self.args.device), (0.0, {})
        own, lengths = self.some_rows(inputs, rows), {name: len(values) for name, values in metrics.items()}
        labels = own.get("labels")
        by_token = labels is not None and labels.dim() == 2
        weight = float((own["labels"][:, 1:] != -100).sum()) if by_token else float(len(rows))
        # By this a loss is divided that is a mean over rows; one that is a sum over a count is left alone.
        self.current_gradient_accumulation_steps = of_step * number / len(rows)
        try:
            loss = super().training_step(model, own, num_items_in_batch)
        finally:
            self.current_gradient_accumulation_steps = of_step
        added = {name: values[-1] for name, values in metrics.items() if len(values) > lengths.get(name, 0)}
        return loss.detach().float(), (weight, added)

    def _join_metrics(self, step: _Step) -> None:
        """Put the metrics of all rows in the place of this process's own."""
        metrics, read = self._train_metrics, getattr(self, "_total_train_tokens", 0) - step.tokens
        of_all = processes.gather((step.parts, read))
        self._total_train_tokens = step.tokens + sum(read for _, read in of_all)
        metrics.clear()
        metrics.update(step.metrics)
        for of_micro_batch in zip(*(parts for parts, _ in of_all), strict=True):
            for name in sorted({name for _, added in of_micro_batch for name in added}):
                parts = [(weight, added[name]) for weight, added in of_micro_batch if name in added]
                metrics[name] = [*metrics.get(name, ()), self.metric_of_all(name, parts)]
        if "num_tokens" in metrics:
            metrics["num_tokens"] = [self._total_train_tokens]

    def evaluation_loop(self, dataloader: DataLoader, *arguments: Any, **named: Any) -> EvalLoopOutput:
        """As in `Trainer`, where several processes take the batches in turn."""
        if processes.count() == 1:
            return super().evaluation_loop(dataloader, *arguments, **named)
        own = _OwnBatches(dataloader)
        with processes.agreed():
            output = super().evaluation_loop(cast(DataLoader, own), *arguments, **named)
        size = self.args.eval_batch_size
        rows = sum(min(size, self.num_examples(dataloader) - batch * size) for batch in own.numbers)
        means = {name: value for name, value in output.metrics.items() if name.endswith("_loss")}
        found: dict[str, list[float]] = getattr(self, "_metrics", {"eval": {}})["eval"]
        of_all = processes.gather((rows, means, {name: list(values) for name, values in found.items()}))
        for name in of_all[0][1]:  # the main process has a batch in any case
            total = sum(rows * means[name] for rows, means, _ in of_all if rows)
            output.metrics[name] = total / sum(rows for rows, *_ in of_all)
        for name, values in of_all[0][2].items():
            if name != "num_tokens":  # of training
                lists = zip_longest(*(metrics.get(name, []) for *_, metrics in of_all))
                values = [value for of_round in lists for value in of_round if value is not None]
            found[name] = values
        return output


class _OwnBatches:
    """The batches of a loader that fall to this process: in turn, so that the main one has the first."""

    def __init__(self, loader: DataLoader):
        self.loader, self.dataset = loader, loader.dataset
        self.numbers = range(processes.rank(), len(loader), processes.count())

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        return (batch for number, batch in enumerate(self.loader) if number in self.numbers)
