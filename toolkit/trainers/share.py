"""What each process does of a step, and how the parts become one step again.

All processes have the same batch, the same optimizer and the same shared randomness. Each computes some of the rows,
as their share of the whole batch's loss; the gradients are summed before they are clipped. No wrapper of
`torch.nn.parallel` has a part in it: adapters that are switched, two backward passes a step and calls of submodules do
not go through one.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

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


class DividedSteps(Trainer):
    """transformers' `Trainer` with the rows of each micro-batch divided among the processes.

    A subclass says by `rows_of` and `some_rows` how a batch is divided.
    """

    current_gradient_accumulation_steps: float  # set by transformers' Trainer

    def rows_of(self, inputs: dict[str, Any]) -> int:
        """Rows of a micro-batch, each of which has to stay whole."""
        return len(inputs["input_ids"])

    def some_rows(self, inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        """The micro-batch with some of its rows."""
        return {name: value[rows] for name, value in inputs.items()}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """A micro-batch forward and backward: its loss, summed over the processes."""
        if processes.count() == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        number, steps = self.rows_of(inputs), self.current_gradient_accumulation_steps
        # TRL's, an entry a micro-batch; transformers' own trainer has none.
        metrics, tokens = getattr(self, "_metrics", {"train": {}})["train"], getattr(self, "_total_train_tokens", 0)
        before = {name: list(values) for name, values in metrics.items()}
        loss, weight = torch.zeros((), device=self.args.device), 0.0
        with processes.agreed(), own_randomness(self.state.global_step, int(inputs["input_ids"].sum())):
            if rows := processes.own([1.0] * number):
                own = self.some_rows(inputs, rows)
                labels = own.get("labels", loss)
                weight = float((labels[:, 1:] != -100).sum()) if labels.dim() == 2 else float(len(rows))
                # By this a loss is divided that is a mean over rows; one that is a sum over a count is left alone.
                self.current_gradient_accumulation_steps = steps * number / len(rows)
                try:
                    loss = super().training_step(model, own, num_items_in_batch)
                finally:
                    self.current_gradient_accumulation_steps = steps
        added = {name: values[-1] for name, values in metrics.items() if values != before.get(name)}
        of_all = processes.gather((weight, added, getattr(self, "_total_train_tokens", 0) - tokens))
        self._total_train_tokens = tokens + sum(read for *_, read in of_all)
        for name in sorted({name for _, values, _ in of_all for name in values}):
            parts = [(share, values[name]) for share, values, _ in of_all if name in values]
            metrics[name] = [*before.get(name, ()), _joined(name, parts)]
        if "num_tokens" in metrics:
            metrics["num_tokens"] = [self._total_train_tokens]
        loss = loss.detach().float()
        processes.sum_([loss])
        if self.accelerator.sync_gradients:
            sum_gradients(p for p in model.parameters() if p.requires_grad)
        return loss


def _joined(name: str, parts: list[tuple[float, float]]) -> float:
    """A metric of all rows from those of each process's, with their weights."""
    values = [value for _, value in parts]
    if name.startswith(("min_", "max_")):
        return min(values) if name.startswith("min_") else max(values)
    return sum(weight * value for weight, value in parts) / max(sum(weight for weight, _ in parts), 1e-12)
