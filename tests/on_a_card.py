"""A card that is not there: tensors which say that they are on another device, with their numbers on the CPU.

An operator that is given one of them and a CPU tensor raises as CUDA would. torch's fake tensors hold that, too, but
have no numbers, and rollouts ask for them (lengths, ends, finite logits); these have. Nor can they go backward on
`cuda` in a build of torch without it: autograd asks the device for its streams. So the card is `meta`, the one device
besides the CPU that every build has a guard for, and inside `a_card` what is made on it keeps its numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from bitsandbytes.nn import Linear4bit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from toolkit.models import SharedBase

CARD = torch.device("meta")
_aten = torch.ops.aten
# CUDA takes positions on the CPU, and copies between devices.
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor}
_COPYING = {_aten.copy_.default, _aten._to_copy.default}


class OnCard(Tensor):
    """A tensor on the card to whoever asks; `numbers` are on the CPU."""

    numbers: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnCard":
        made = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            device=CARD, requires_grad=False,
        )  # fmt: skip
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses it of subclasses

    def __repr__(self) -> str:
        return f"OnCard({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on the numbers; on one device, but for what CUDA itself takes from the CPU."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_card = [tensor for tensor in given if isinstance(tensor, OnCard)]
    asked = kwargs.get("device")
    if on_card and func not in _COPYING:
        others = [tensor for tensor in given if not isinstance(tensor, OnCard) and tensor.dim() > 0]
        if func in _INDEXING:
            others = [] if isinstance(args[0], OnCard) else [args[0]]
        elif func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], OnCard):
            others = [args[0]]  # in place it cannot move, not even a number
        if others:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} was given {CARD} and cpu, "
                f"{tuple(others[0].shape)}."
            )
    goes = torch.device(asked).type == CARD.type if asked is not None else bool(on_card)
    if func is _aten.copy_.default:
        goes = isinstance(args[0], OnCard)
    bare, named = tree_map(lambda leaf: leaf.numbers if isinstance(leaf, OnCard) else leaf, (args, kwargs))
    if asked is not None:
        named["device"] = torch.device("cpu")
        if func is _aten._to_copy.default and goes != bool(on_card):
            bare = (bare[0].clone(), *bare[1:])  # a copy, also where the numbers would be the same
    named.pop("pin_memory", None)
    made = func(*bare, **named)
    known = {id(tensor.numbers): tensor for tensor in on_card}
    return tree_map(lambda leaf: _placed(leaf, known, goes), made)


def _placed(leaf: Any, known: dict[int, OnCard], goes: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return known.get(id(leaf)) if id(leaf) in known else OnCard(leaf) if goes else leaf


class _Factories(TorchDispatchMode):
    """New tensors whose device is the card are made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def a_card() -> Iterator[None]:
    """Inside, `device=CARD` makes tensors that have numbers."""
    tensor, autocast = torch.tensor, torch.autocast

    def tensor_there(data: Any, *, device: Any = None, **named: Any) -> Tensor:
        on_cpu = tensor(data, **named)
        return on_cpu if device is None else on_cpu.to(device)

    def autocast_there(device_type: str, *rest: Any, **named: Any) -> Any:
        return autocast("cpu" if device_type == CARD.type else device_type, *rest, **named)

    patches = (mock.patch.object(torch, "tensor", tensor_there), mock.patch.object(torch, "autocast", autocast_there))
    with patches[0], patches[1], _Factories():
        yield


def put_on_card(roles: SharedBase) -> None:
    """Parameters, buffers and what unpacks 4-bit weights."""
    states = {module: module.weight.quant_state for module in roles.modules() if isinstance(module, Linear4bit)}
    roles.replace_tensors(OnCard)
    for module, state in states.items():
        for part in (state, state.state2):
            for name, held in vars(part).items():
                if isinstance(held, Tensor):
                    setattr(part, name, OnCard(held))
        module.weight.quant_state = state


@contextmanager
def trains_on_card(trainer: Any) -> Iterator[None]:
    """Inside, its roles are on the card, and its settings and accelerate say so: batches go there."""
    with (
        a_card(),
        mock.patch.object(Accelerator, "device", CARD),
        mock.patch.dict(PartialState._shared_state, {"device": CARD}),
    ):
        trainer.args.__dict__["_setup_devices"] = CARD
        put_on_card(trainer.roles)
        yield
