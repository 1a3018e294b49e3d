"""Parts of an update or of a step: what is counted of all layers, forward and back, and with weights unpacked."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.costs.counted import Costs, Counted
from toolkit.costs.devices import Device
from toolkit.costs.outline import alike, truncated
from toolkit.models import SharedBase

TOKEN = 1
"""The id of each token that is counted, on which nothing depends."""
_FEW = 2  # layers from which those of a deep model are told


@dataclass(frozen=True)
class Phase:
    """A part of an update: what it costs once, and how often it is done.

    Args:
        recorded: whether it is played back from a CUDA graph.
        merged: whether weights of 4 bits are taken for such of 16.
    """

    name: str
    costs: Costs
    times: float
    recorded: bool = False
    merged: bool = False

    def seconds(self, device: Device) -> float:
        """Of all times."""
        once = device.recorded(self.costs, merged=self.merged) if self.recorded else device.eager(self.costs)
        return self.times * once


def of_all_layers(roles: SharedBase, count: Callable[[], list[Phase]], args: Any) -> list[Phase]:
    """What is counted of a base. Layers that are all alike are counted two and three at a time: what the third one
    adds, the others do, unless every n-th one is checkpointed, or there is a value model beside them, which would have
    more activations than a few of them."""
    number = alike(roles)
    whole = "every_n_layers" in (args.gradient_checkpointing_kwargs or {}) or roles.value_model is not None
    if number is None or number <= _FEW + 1 or whole:
        return count()
    with truncated(roles, _FEW):
        few = count()
    with truncated(roles, _FEW + 1):
        more = count()
    pairs = zip(few, more, strict=True)
    return [replace(a, costs=a.costs.with_more_layers(b.costs, number - _FEW)) for a, b in pairs]


@contextmanager
def learning(counted: Counted, roles: SharedBase, args: Any, *, further: bool, copied: bool = False) -> Iterator[Costs]:
    """Inside is a micro-batch forward and backward; a `further` one on top of the gradients of an earlier one, of which
    there is a copy where they are `copied`, to come back to if memory runs out."""
    trained, copies = roles.trained_parameters, []
    if further:
        with counted.phase():  # none of those that were counted before
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
                copies += [torch.empty_like(parameter)] if copied else []
                for gradient in (parameter.grad, *copies[-1:]):
                    counted.keep(gradient, "gradients")

    def named(parameter: Any) -> None:
        counted.keep(parameter.grad, "gradients")

    hooks = [parameter.register_post_accumulate_grad_hook(named) for parameter in trained]
    roles.train()
    if args.gradient_checkpointing:
        given = dict(args.gradient_checkpointing_kwargs or {})
        given.pop("offload", None)  # what it moves to the host's memory is counted here, as if it stayed
        every = given.pop("every_n_layers", 1)  # which transformers' trainer takes out, too
        roles.gradient_checkpointing_enable(given, **({} if every == 1 else {"every_n_layers": every}))
    try:
        with counted.phase() as costs:
            yield costs
    finally:
        roles.gradient_checkpointing_disable()
        roles.eval()
        for parameter in trained:  # of layers that are left out, too
            parameter.grad = None
        copies.clear()
        for hook in hooks:
            hook.remove()


@contextmanager
def unpacked(counted: Counted, roles: SharedBase, *, on_cpu: bool) -> Iterator[None]:
    """Inside, weights are unpacked as they are on a CPU for passes with gradients."""
    with ExitStack() as held:
        if on_cpu:
            with counted.phase(leaves="copied weights"):
                held.enter_context(roles.unpacked_for_gradients(on_cpu=True))
        yield
