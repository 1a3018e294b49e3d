"""A base with its roles, built on the meta device, as something whose costs can be counted."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn

from toolkit.costs.counted import Weightless
from toolkit.models import SharedBase, tried

_OF_SCALES = 256  # scales that share a scale of theirs, where quantisation is double
_OF_EACH_LAYER = ("layer_types", "mlp_layer_types")


class Params4bit(Weightless):
    """A packed weight, which PEFT knows by this name."""


def take_shape(roles: SharedBase) -> None:
    """Give all parameters and buffers the form that loading would give them, without numbers: 4-bit layers packed.

    Raises:
        ModelError: the base cannot be read as a decoder, as loading would find.
    """

    def form(tensor: Tensor) -> Tensor:
        return Weightless.like(tensor) if tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=tensor.dtype)

    packed = {module: module.weight for module in roles.modules() if isinstance(module, Linear4bit)}
    roles.replace_tensors(form)
    for module, weight in packed.items():
        module.weight = _packed(module, weight)
    with tried(roles.causal_lm):
        roles.fuse_layers()


def pack(model: nn.Module) -> None:
    """Pack the 4-bit layers of a model on the meta device, as loading would."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.weight = _packed(module, module.weight)


def _packed(module: Linear4bit, weight: Any) -> nn.Parameter:
    def numbers(size: int | tuple[()], dtype: torch.dtype) -> Tensor:
        return Weightless.like(torch.empty(size, dtype=dtype, device="meta"))

    count, nested = module.in_features * module.out_features, weight.compress_statistics
    blocks, second = math.ceil(count / weight.blocksize), None
    if nested:
        scales = numbers(math.ceil(blocks / _OF_SCALES), torch.float32)
        second = QuantState(scales, code=numbers(256, torch.float32), blocksize=_OF_SCALES, dtype=torch.float32)
    made: Any = nn.Parameter(numbers(math.ceil(count / 2), torch.uint8).view(-1, 1), requires_grad=False)
    made.__class__ = Params4bit
    made.quant_state = QuantState(
        numbers(blocks, torch.uint8 if nested else torch.float32),
        shape=torch.Size((module.out_features, module.in_features)),
        code=numbers(16, torch.float32),
        blocksize=weight.blocksize,
        quant_type=weight.quant_type,
        dtype=weight.quant_state.dtype,
        offset=numbers((), torch.float32) if nested else None,
        state2=second,
    )
    return made


def _layers(roles: SharedBase) -> tuple[nn.Module, str] | None:
    """Where a decoder has its layers: the module and the name of its list."""
    number = roles.config.get_text_config().num_hidden_layers
    for module in roles.causal_lm.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == number:
                return module, name
    return None


def alike(roles: SharedBase) -> int | None:
    """How many layers a base has, if they are all of one kind."""
    found, config = _layers(roles), roles.config.get_text_config()
    if found is None or len(set(getattr(config, "layer_types", None) or ["one"])) > 1:
        return None
    layers = getattr(*found)
    forms = [[(name, p.shape, p.dtype) for name, p in layer.named_parameters()] for layer in layers]
    return len(layers) if all(form == forms[0] for form in forms) else None


@contextmanager
def truncated(roles: SharedBase, number: int) -> Iterator[None]:
    """Inside, a base has its first few layers alone."""
    found, config = _layers(roles), roles.config.get_text_config()
    assert found is not None
    (module, name), before = found, config.num_hidden_layers
    layers, told = getattr(module, name), vars(config)
    kinds = {key: told[key] for key in _OF_EACH_LAYER if isinstance(told.get(key), list)}  # by which a cache is made
    setattr(module, name, layers[:number])
    config.num_hidden_layers = number
    told.update({key: of_each[:number] for key, of_each in kinds.items()})
    try:
        yield
    finally:
        setattr(module, name, layers)
        config.num_hidden_layers = before
        told.update(kinds)


def weight_bytes_of(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, and of the constants of 4-bit layers."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for layer in module.modules():
        state = getattr(layer.weight, "quant_state", None) if isinstance(layer, Linear4bit) else None
        for part in (state, None if state is None else state.state2):
            if part is not None:
                tensors |= {id(t): t for t in (part.absmax, part.code, part.offset) if isinstance(t, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
