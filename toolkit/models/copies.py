"""Copies of weights: those that responses are decoded with, unpacked from 4 bits, laid out for a CPU's kernel, and with
the policy's adapter in them; and those that stay unpacked, or laid out, over many passes with gradients.

A pass over a prompt and a response unpacks each weight once, its backward pass again, and decoding would for each
token.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from toolkit import processes
from toolkit.memory import memory
from toolkit.models.fused_lora import Fused, active_adapters, computed_in, in_autocast, is_plain, weight_of

_ALONE: tuple[Any, ...] = ("none", [], "")  # a product to which nothing else is done
_LARGE = 2**17  # numbers of a weight in float32: what is called for one that is laid out takes 15 µs, torch's own 2
_SHARE = 1 / 8  # of the machine's memory, that copies which round in another way may take unasked


def bytes_of(layers: Iterable[Any]) -> int:
    """Of copies of linear layers' weights, of layers with adapters with one in them."""
    return sum(layer.in_features * layer.out_features * _copied_to(layer).itemsize for layer in layers)


def _copied_to(layer: Any) -> torch.dtype:
    """A weight is copied as it is, and one with an adapter in it in the precision of the passes now."""
    if not hasattr(layer, "base_layer"):
        return _dtype(layer)
    weight = layer.base_layer.weight
    return torch.get_autocast_dtype(weight.device.type) if in_autocast(weight) else _dtype(layer.base_layer)


def have_room(layers: Iterable[Any]) -> bool:
    """Whether half of the free memory beside a CPU holds such copies of all processes of this run here, each of which
    looks before the others have theirs."""
    needed = 2 * processes.count_here() * bytes_of(layers)
    return not needed or memory().available >= needed  # asking takes as long as a pass of a tiny model


@contextmanager
def forwards(by_layer: Iterable[tuple[Any, Callable[[], Callable[..., Tensor]]]]) -> Iterator[None]:
    """Layers have other forward passes inside, each made by what stands beside its layer, and their own ones again
    afterwards."""
    own: list[tuple[Any, Any]] = []
    try:
        for layer, made in by_layer:
            forward = made()
            own.append((layer, vars(layer).get("forward")))
            layer.forward = forward
        yield
    finally:
        for layer, forward in own:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


# ---------------------------------------------------------------------- of the base


def unpackable(model: nn.Module, *, besides: Collection[nn.Module], on_cpu: bool) -> list[Any]:
    """Linear layers of a model that are faster with a copy of their weight, but not those `besides`."""
    return [layer for layer in model.modules() if layer not in besides and _gains(layer, on_cpu=on_cpu)]


def _gains(layer: Any, *, on_cpu: bool) -> bool:
    """Whether with a copy of its weight it gives the same faster: a linear layer of 4 bits; on a CPU that lays weights
    of bfloat16 out for its kernel, one of these too."""
    if "forward" in vars(layer):  # another library's
        return False
    if type(layer) is Linear4bit:
        return layer.compute_dtype in (None, _dtype(layer))
    return on_cpu and type(layer) is nn.Linear and _dtype(layer) is torch.bfloat16 and lays_out(torch.bfloat16)


@contextmanager
def unpacked_weights(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, those of 4 bits hold their weights unpacked as well, for passes and for gradients, where there is room
    for all. The results are the same bits."""
    packed: list[Any] = [layer for layer in layers if _gains(layer, on_cpu=False)]
    if not have_room(packed):
        packed = []
    try:
        for layer in packed:
            layer.unpacked_weight = weight_of(layer)
        with forwards((layer, partial(_Copied, (layer,), layer.unpacked_weight)) for layer in packed):
            yield
    finally:
        for layer in packed:
            vars(layer).pop("unpacked_weight", None)


@contextmanager
def copied(layers: Iterable[Any], groups: Iterable[Fused]) -> Iterator[None]:
    """Inside, such layers multiply with a copy of their weights: the same bits.

    Args:
        groups: layers with adapters that are computed together. Where such copies are laid out, a group gets one of all
            its weights.
    """
    single = {id(layer): layer for layer in layers}
    joined = []
    try:
        for group in groups:
            bases = [layer.base_layer for layer in group.layers]
            if single.keys() >= {*map(id, bases)} and _joinable(bases):
                joined.append(group)
                group.join(_copy, torch.bfloat16)
                for base in bases:
                    del single[id(base)]
        with forwards((layer, partial(_copy, layer)) for layer in single.values()):
            yield
    finally:
        for group in joined:
            group.joint = None


def _copy(*layers: Any, further: Sequence[Tensor] = ()) -> "_Copied":
    """Of layers with one input, and of `further` rows (R, I) below their weights."""
    weights = [weight_of(layer).detach() for layer in layers]
    weights += [rows.detach().to(weights[0].dtype) for rows in further]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return _Copied(layers, _laid_out(weight) if weight.dtype is torch.bfloat16 else weight)


def _joinable(layers: Sequence[Any]) -> bool:
    kinds = {(type(layer), getattr(layer, "compute_dtype", None), _dtype(layer)) for layer in layers}
    return len(kinds) == 1 and _dtype(layers[0]) is torch.bfloat16 and lays_out(torch.bfloat16)


def _dtype(layer: Any) -> torch.dtype:
    """What a linear layer multiplies in."""
    return layer.weight.quant_state.dtype if type(layer) is Linear4bit else layer.weight.dtype


def _laid_out(weight: Tensor) -> Tensor:
    gains = lays_out(weight.dtype) and (weight.dtype is torch.bfloat16 or weight.numel() >= _LARGE)
    if weight.device.type != "cpu" or not gains:
        return weight
    if type(weight) is not Tensor:  # one without numbers, of which the bytes are counted
        return torch.empty_like(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight)


@cache
def lays_out(dtype: torch.dtype) -> bool:
    """Whether torch multiplies here with weights of this precision that were laid out before: in bfloat16 to the same
    bits, in float32 but for rounding."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    with _disable_current_modes():  # a plan asks where tensors have no numbers
        x, weight = torch.linspace(-1, 1, 4096, device="cpu").to(dtype).view(2, 32, 64)
        try:
            laid_out = torch.ops.mkldnn._reorder_linear_weight(weight)
            ready = torch.ops.mkldnn._linear_pointwise(x, laid_out, None, *_ALONE)
        except (AttributeError, NotImplementedError, RuntimeError):  # another build, or a CPU without bfloat16
            return False
        exact = nn.functional.linear(x, weight)
        return torch.equal(ready, exact) if dtype is torch.bfloat16 else torch.allclose(ready, exact)


class _Copied:
    """W x + b of layers with one input, (..., I) to (..., sum of the O), by a copy of their weights. Where that has
    further rows, what these give stands in the last places."""

    def __init__(self, layers: Sequence[Any], weight: Tensor):
        self.layers, self.weight, self.bias = layers, weight, None
        if any(layer.bias is not None for layer in layers):
            self.bias, end = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device), 0
            for layer in layers:
                start, end = end, end + layer.out_features
                if layer.bias is not None:
                    self.bias[start:end] = layer.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        layer, weight, device = self.layers[0], self.weight, x.device.type
        given = getattr(layer, "compute_dtype", None)
        if not weight.is_mkldnn:
            if given is None and x.dtype != weight.dtype:
                return self._by_themselves(x)
            return nn.functional.linear(x.to(weight.dtype), weight, self.bias).to(x.dtype)
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if not (autocast or weight.dtype) == (given or autocast or x.dtype) == weight.dtype:
            return self._by_themselves(x)
        result = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, self.bias, *_ALONE)
        return result.to(x.dtype) if type(layer) is Linear4bit else result

    def _by_themselves(self, x: Tensor) -> Tensor:
        return torch.cat([type(layer).forward(layer, x) for layer in self.layers], dim=-1)


# ---------------------------------------------------------------------- that round in another way


def to_lay_out(layers: Iterable[Any]) -> list[Any]:
    """Those of all layers that are faster on a CPU by a copy that is laid out, and not to the same bits: in float32.

    So whether there is room for it is a question of the machine's whole memory, not of what is left at the moment nor
    of how many processes have a copy each, on which a run's numbers shall not depend.
    """
    known = [layer for layer in layers if _gains_in_float32(layer)]
    return known if bytes_of(known) <= _SHARE * memory().total else []


def _gains_in_float32(layer: Any) -> bool:
    """Whether it is a frozen linear layer in float32 throughout, and large enough to be laid out."""
    known = type(layer) is nn.Linear or (type(layer) is Linear4bit and layer.compute_dtype in (None, torch.float32))
    large = known and layer.in_features * layer.out_features >= _LARGE
    free = large and "forward" not in vars(layer) and not layer.weight.requires_grad
    return free and _dtype(layer) is torch.float32 and lays_out(torch.float32)


def laid_out_forward(layer: Any) -> Callable[..., Tensor]:
    """A forward pass of such a layer by that copy; in another precision it is the layer's own."""
    own, weight, bias = layer.forward, _laid_out(weight_of(layer).detach()), layer.bias

    def forward(x: Tensor) -> Tensor:
        if computed_in(x) is not torch.float32:
            result: Tensor = own(x)
            return result
        found: Tensor = _LaidOut.apply(x, weight, bias, layer)
        return found

    return forward


class _LaidOut(torch.autograd.Function):
    """W x + b of a frozen layer by a copy of its weight, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer = layer
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ weight_of(ctx.layer), None, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not weight.is_mkldnn:
        return nn.functional.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *_ALONE)
    return result


def to_merge(layers: Iterable[Any], adapter: str, *, head: Any, asked: bool, on_cpu: bool) -> list[Any]:
    """Those of all layers with adapters whose copies get this one: where `asked`, all that compute W x + b + s · B A x;
    else those in float32 on a CPU, for which there is room as `to_lay_out` has it. There the model's `head`, where it
    has no adapter, is laid out with them.
    """

    def is_known(layer: Any) -> bool:
        own = getattr(layer.base_layer, "compute_dtype", None) in (None, _dtype(layer.base_layer))
        return own and adapter in layer.lora_A and not layer.merged_adapters

    known = [layer for layer in layers if is_plain(layer) and is_known(layer)]
    exact = on_cpu and not torch.is_autocast_enabled("cpu")
    if not asked:
        known = [layer for layer in known if exact and _in_float32(layer, adapter)]
    if known and exact and _gains_in_float32(head):
        known.append(head)
    return known if asked or bytes_of(known) <= _SHARE * memory().total else []


def base_of(layer: Any) -> Any:
    """The layer below the adapters of one that has any, or it itself."""
    return getattr(layer, "base_layer", layer)


def _in_float32(layer: Any, adapter: str) -> bool:
    """Whether such a layer is in float32 throughout: merged, it gives the same but for rounding of a ten-millionth,
    where in 16 bits much of what the adapter adds is lost."""
    return _dtype(layer.base_layer) is layer.lora_A[adapter].weight.dtype is torch.float32


def merged_forward(layer: Any, adapter: str) -> Callable[..., Tensor]:
    """A forward pass of such a layer by W + s · B A, made once in float32 and then rounded to the precision in which
    the base's weight is multiplied now. With another adapter active, or in another precision, it is the layer's own."""
    base, own = base_of(layer), layer.forward
    adapted = base is not layer
    with torch.no_grad():
        dtype = _copied_to(layer)
        whole = weight_of(base).detach().to(torch.float32, copy=adapted)
        if adapted:
            a, b, s = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter]
            whole.addmm_(b.float(), a.float(), alpha=s)  # in place, which autocast leaves alone
        weight = _laid_out(whole.to(dtype))
        bias = None if base.bias is None else base.bias.to(dtype)
    as_given = type(base) is Linear4bit  # whose results are in the precision of what it is given

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or computed_in(x) is not dtype or (adapted and active_adapters(layer) != (adapter,)):
            return own(x, *args, **kwargs)
        result = _product(x.to(dtype), weight, bias)
        return result.to(x.dtype) if as_given else result

    return forward
