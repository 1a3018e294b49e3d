"""The floor: the time that the matmuls of the work take at the rate reached on such matmuls.

Counted are the linear layers of the ideal run of the work on one shared base: no padding, no role computed twice, what
prompts begin with in each row, `lm_head` on response positions alone, no weight gradient for frozen weights, the
adapters' own small products included. Left out is all else: attention's scores, norms, sampling, the optimizer, 4-bit
weights' unpacking. One multiply-add is two operations.

The rate is measured on matmuls of the same shapes, with as many rows as the work gives them, over the weights of all
layers one after another, as a forward pass reads them.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.work import PHASES, Work

Shape = tuple[int, int]  # inputs, outputs
_PASSES = 3
_DISTINCT_BYTES = 2**30  # beyond every cache; layers after that read the weights of the first again


@dataclass(frozen=True)
class Matmul:
    """Products of one kind in one phase of an update.

    Args:
        phase: one of `PHASES`.
        name: what it is.
        shapes: of the weights that are read in turn.
        rows: tokens in one product.
        tokens: tokens in all products.
        backward: whether the product is the gradient of the inputs, not the output.
        adapter_operations: operations of the adapters beside these layers.
    """

    phase: str
    name: str
    shapes: tuple[Shape, ...]
    rows: int
    tokens: int
    backward: bool = False
    adapter_operations: int = 0

    @property
    def operations(self) -> int:
        return 2 * self.tokens * sum(i * o for i, o in self.shapes) + self.adapter_operations


def linear_layers(model: PreTrainedModel) -> tuple[tuple[Shape, ...], Shape]:
    """Shapes of the linear layers in the order of a forward pass, and that of `lm_head`; no weight is read."""
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return tuple((m.in_features, m.out_features) for m in layers), (head.in_features, head.out_features)


def matmuls(work: Work, layers: tuple[Shape, ...], head: Shape, *, value: str, rank: int) -> list[Matmul]:
    """All products of one update, with adapters of this rank on all linear layers. A value that is "separate" has a
    forward pass of its own, one that is "shared" the policy's."""
    size = work.size
    prompts, new = sum(map(len, work.prompt_ids)), sum(work.lengths)
    whole, share = prompts + new, size.micro_batch / size.rollouts
    micro, micro_new = max(1, round(whole * share)), max(1, round(new * share))
    adapter = 2 * rank * sum(i + o for i, o in layers)  # operations a token of one adapter's forward pass
    trained = 1 if value == "shared" else 2
    # Policy, reward and a separate value role have an adapter; the reference has none.
    read, adapted = 2 + trained, 1 + trained
    passes = size.epochs * whole
    return [
        Matmul("rollout", "prompts", layers, prompts, prompts, adapter_operations=adapter * prompts),
        # The first token of a response comes from its prompt's pass.
        Matmul(
            "rollout",
            "new tokens",
            layers,
            size.rollouts,
            new - size.rollouts,
            adapter_operations=adapter * (new - size.rollouts),
        ),
        Matmul("rollout", "lm_head", (head,), size.rollouts, new),
        Matmul("score", "forward", layers, micro, read * whole, adapter_operations=adapted * adapter * whole),
        Matmul("score", "lm_head", (head,), micro_new, 2 * new),
        Matmul("update", "forward", layers, micro, trained * passes, adapter_operations=trained * adapter * passes),
        # An adapter's backward pass has the gradients of its inputs and of its weights.
        Matmul(
            "update",
            "backward",
            layers,
            micro,
            trained * passes,
            backward=True,
            adapter_operations=2 * trained * adapter * passes,
        ),
        Matmul("update", "lm_head", (head,), micro_new, size.epochs * new),
        Matmul("update", "lm_head backward", (head,), micro_new, size.epochs * new, backward=True),
    ]


def _weights(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
    """A weight (outputs, inputs) for each shape; the first of its shape again once there are enough distinct ones."""
    made: dict[Shape, list[torch.Tensor]] = {}
    weights, size = [], 0
    for number, shape in enumerate(shapes):
        if size < _DISTINCT_BYTES or shape not in made:
            made.setdefault(shape, []).append(torch.randn(shape[1], shape[0], dtype=dtype, device=device))
            size += made[shape][-1].nbytes
            weights.append(made[shape][-1])
        else:
            weights.append(made[shape][number % len(made[shape])])
    return weights


@torch.no_grad()
def seconds_of_a_pass(
    shapes: Sequence[Shape], rows: int, *, backward: bool, dtype: torch.dtype, device: torch.device | str
) -> float:
    """Median seconds of one product with each weight in turn."""
    weights = _weights(shapes, dtype, device)
    inputs = {n: torch.randn(rows, n, dtype=dtype, device=device) for shape in shapes for n in shape}

    def once() -> float:
        started = time.perf_counter()
        for weight in weights:
            if backward:
                inputs[weight.shape[0]] @ weight
            else:
                nn.functional.linear(inputs[weight.shape[1]], weight)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(_PASSES))


def measure(
    found: Mapping[str, list[Matmul]], *, dtype: torch.dtype, device: torch.device | str
) -> dict[str, dict[str, Any]]:
    """Operations, rate and seconds of the products from `matmuls`, and seconds by phase; all by value role."""
    rates: dict[tuple, float] = {}
    report: dict[str, dict[str, Any]] = {}
    for value, products in found.items():
        parts: list[dict[str, Any]] = []
        for product in products:
            key = (product.shapes, product.rows, product.backward)
            if key not in rates:
                once = 2 * product.rows * sum(i * o for i, o in product.shapes)
                rates[key] = once / seconds_of_a_pass(
                    product.shapes, product.rows, backward=product.backward, dtype=dtype, device=device
                )
            parts.append(
                {
                    "phase": product.phase,
                    "name": product.name,
                    "rows": product.rows,
                    "gigaoperations": product.operations / 1e9,
                    "gigaoperations_per_second": rates[key] / 1e9,
                    "seconds": product.operations / rates[key],
                }
            )
        seconds = {phase: sum(p["seconds"] for p in parts if p["phase"] == phase) for phase in PHASES}
        report[value] = {"seconds": seconds, "parts": parts}
    return report
