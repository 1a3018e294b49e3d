"""LoRA layers that read the same input, in one step: q, k and v of a block, gate and up, or one layer by itself.

PEFT computes each layer from kernels of its own: a copy of the input in the adapter's precision for each, a clone of a
4-bit layer's result, two thin products, a scaling and a sum, all of it kept for the backward pass. Here the thin
products with A are one for all layers of a group, what they add goes into the layers' results in place, and the
backward pass keeps the input once. Responses can be made by one product with all weights of a group (`Fused.join`). The
adapters stay PEFT's, and so do all layers of a kind that is not known here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fuse(layers: Iterable[BaseTunerLayer], read: Callable[[], Any]) -> tuple["Fused", ...]:
    """Give the layers of each group one forward pass, in place; layers of other kinds get PEFT's back. The groups.

    Args:
        layers: of one model, adapters on them.
        read: a forward pass of the model, by which the groups are found: layers called one after the other with the
            same tensor, each of them once.
    """
    layers = list(layers)
    for layer in layers:
        layer.__dict__.pop("forward", None)
    plain = [layer for layer in layers if is_plain(layer)]
    waiting = _Waiting()
    groups = tuple(Fused(members, waiting) for members in _groups(plain, read))
    for group in groups:
        for place, layer in enumerate(group.layers):
            layer.forward = partial(group, place)
    return groups


def is_plain(layer: nn.Module) -> bool:
    """Whether all that a layer computes is W x + b + s · B A x, whichever adapter is active."""
    if not isinstance(layer, LoraLayer):
        return False
    base = layer.base_layer
    return (
        type(base) in (nn.Linear, Linear4bit)
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
        and not hasattr(base, "_hf_hook")  # accelerate's, which may keep the weight elsewhere
        and all(
            type(factor) is nn.Linear for name in layer.lora_A for factor in (layer.lora_A[name], layer.lora_B[name])
        )
    )


def _groups(layers: Sequence[nn.Module], read: Callable[[], Any]) -> Iterator[list[Any]]:
    """Layers by the tensor that they read, those that are not called or called again by themselves."""
    calls: list[tuple[nn.Module, Tensor]] = []

    def called(layer: nn.Module, given: tuple[Any, ...]) -> None:
        calls.append((layer, given[0]))

    hooks = [layer.register_forward_pre_hook(called) for layer in layers]
    try:
        read()
    finally:
        for hook in hooks:
            hook.remove()
    numbers = {id(layer): sum(layer is other for other, _ in calls) for layer in layers}
    once = [(layer, given) for layer, given in calls if numbers[id(layer)] == 1]
    yield from ([layer] for layer in layers if numbers[id(layer)] != 1)
    for _, group in groupby(once, key=lambda call: id(call[1])):  # the list holds them, so that no id is used again
        yield [layer for layer, _ in group]


@dataclass
class _Waiting:
    """Results for the layers that a model calls next, of one group at a time.

    A pass that breaks off, as where memory runs out, leaves some, and with them the graph of all that came before. The
    next pass lets go of them at its first group, before it needs that memory itself.
    """

    group: "Fused | None" = None
    read: tuple[Any, ...] = ()
    results: dict[int, tuple[tuple[str, ...], Tensor]] = field(default_factory=dict)  # with the adapter that is in it

    def take(self, group: "Fused", place: int, x: Tensor) -> Tensor | None:
        """What is there for a layer; None, and nothing is left, where it is another's or of another pass."""
        if not self.results:
            return None
        active, result = self.results.pop(place, (None, None))
        read, with_gradients = self.read
        if (
            self.group is group
            and active == active_adapters(group.layers[place])
            and read is x
            and with_gradients == torch.is_grad_enabled()
        ):
            if not self.results:
                self.put(None)
            return result
        self.put(None)
        return None

    def put(self, group: "Fused | None", *read: Any, results: Any = ()) -> None:
        """These in place of what is there."""
        self.group, self.read, self.results = group, read, dict(results)


class Fused:
    """The forward pass of layers with one input: the first that is called computes for all, the others take theirs."""

    def __init__(self, layers: list[Any], waiting: _Waiting):
        self.layers = layers
        self.kept: Kept | None = None
        self.joint: Joint | None = None
        self._waiting = waiting

    def __call__(self, place: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (result := self._waiting.take(self, place, x)) is not None:
            return result
        layers = self.layers if place == 0 else [self.layers[place]]
        of_layers = [active_adapters(layer) for layer in layers]
        if args or kwargs or not self._are_known(place, layers, of_layers, x):
            layer = self.layers[place]
            return type(layer).forward(layer, x, *args, **kwargs)
        first, *further = self._compute(x, layers, [next(iter(its), None) for its in of_layers], place)
        if further:
            results = enumerate(zip(of_layers[1:], further, strict=True), 1)
            self._waiting.put(self, x, torch.is_grad_enabled(), results=results)
        return first

    def _are_known(self, place: int, layers: list[Any], of_layers: list[tuple[str, ...]], x: Tensor) -> bool:
        """Whether a pass over these layers with these adapters is the plain one, without dropout at work."""
        known = (self.kept or Kept()).known
        key = (place, *of_layers, x.dtype, autocast := in_autocast(x))
        if key not in known:
            plain = all(_is_known(layer, its, x, autocast) for layer, its in zip(layers, of_layers, strict=True))
            known[key] = [*_dropouts(layers, of_layers)] if plain else None
        dropouts = known[key]
        return dropouts is not None and not any(dropout.training for dropout in dropouts)

    def _compute(self, x: Tensor, layers: list[Any], names: list[str | None], place: int) -> Sequence[Tensor]:
        """The results of layers that are known, with the adapters of these names, for one input (..., I)."""
        joint = None if place or torch.is_grad_enabled() else self.joint
        if joint is not None and computed_in(x) is joint.dtype:
            return self._jointly(x, joint, names)
        bases = [layer.base_layer for layer in layers]
        if not any(names):
            return [base(x) for base in bases]
        adapters = self._kept_adapters(place, layers, names, computed_in(x))
        factors = [factor for pair in adapters.factors for factor in pair]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *factors)):
            return _Pass.apply(x, bases, adapters, *factors)
        return _forward(x, bases, adapters)[0]

    def _jointly(self, x: Tensor, joint: "Joint", names: list[str | None]) -> Sequence[Tensor]:
        """The same by one product for all layers, and one for what the adapters add."""
        product = joint.product(x)
        rows = product.view(-1, product.shape[-1])
        whole = rows[:, : joint.width]
        if any(names):
            adapters = self._kept_adapters(0, self.layers, names, joint.dtype, as_one=True)
            up = adapters.up[0]
            assert up is not None
            if names == joint.names:
                low = rows[:, joint.width :].to(joint.dtype)
            else:
                low = torch.nn.functional.linear(x.to(joint.dtype), adapters.down).view(len(rows), -1)
            if whole.dtype is joint.dtype:
                whole.addmm_(low, up.t())
            else:
                whole += torch.nn.functional.linear(low, up)
        return whole.view(*x.shape[:-1], -1).split_with_sizes(joint.sizes, dim=-1)

    def _kept_adapters(
        self, place: int, layers: list[Any], names: list[str | None], dtype: torch.dtype, *, as_one: bool = False
    ) -> "_Adapters":
        """Those of layers in the precision of a pass, made once while weights are kept."""
        key = (place, *names, dtype, as_one)
        kept = (self.kept or Kept()).adapters
        if key not in kept:
            of_layers = _Adapters.of(layers, names, dtype)
            kept[key] = of_layers.as_one(layers) if as_one else of_layers
        return kept[key]

    def join(self, copied: Callable[..., Callable[[Tensor], Tensor]], dtype: torch.dtype) -> None:
        """Compute passes in this precision, without gradients, by one product for all layers, of which no weight may
        change until `joint` is None again.

        Args:
            copied: makes the product of all base layers, with `further` rows (R, I) below their weights.
        """
        names = [next(iter(active_adapters(layer)), None) for layer in self.layers]
        down = [layer.lora_A[name].weight for layer, name in zip(self.layers, names, strict=True) if name is not None]
        bases = [layer.base_layer for layer in self.layers]
        sizes = [base.out_features for base in bases]
        self.joint = Joint(copied(*bases, further=down), names, dtype, sizes, sum(sizes))


class Joint(NamedTuple):
    """All base layers of a group as one."""

    product: Callable[[Tensor], Tensor]  # (..., I) to (..., sum of the O, and R)
    names: list[str | None]  # by layer the adapter whose A is among the weights
    dtype: torch.dtype
    sizes: list[int]  # O of each layer
    width: int  # their sum


@dataclass
class Kept:
    """What a group finds once while no weight changes.

    Args:
        adapters: in the precision of a pass.
        known: by the adapters and the precision of a pass the dropouts that must not be at work in a plain one; None
            where it is none.
    """

    adapters: "dict[Any, _Adapters]" = field(default_factory=dict)
    known: dict[Any, list[nn.Module] | None] = field(default_factory=dict)


def active_adapters(layer: Any) -> tuple[str, ...]:
    """The adapters that add something to a layer's result."""
    if layer._disable_adapters:
        return ()
    held = layer._modules["lora_A"]._modules  # asked at each token of each layer, and far faster than layer.lora_A
    return tuple([name for name in layer._active_adapter if name in held])


def weight_of(base: Any) -> Tensor:
    """The weight (O, I) that a linear layer multiplies with. One of 4 bits is unpacked each time, unless a copy stands
    ready: see `copies.unpacked_weights`."""
    weight: Tensor | None = vars(base).get("unpacked_weight") if type(base) is Linear4bit else base.weight
    return dequantize_4bit(base.weight, base.weight.quant_state) if weight is None else weight


def in_autocast(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def computed_in(x: Tensor) -> torch.dtype:
    """The precision in which a tensor is multiplied."""
    return torch.get_autocast_dtype(x.device.type) if in_autocast(x) else x.dtype


def _is_known(layer: Any, active: tuple[str, ...], x: Tensor, autocast: bool) -> bool:
    """Whether a pass over a layer is the plain one but for dropout: one adapter or none, and not merged."""
    if layer.merged_adapters or len(active) > 1 or layer.base_layer.weight.requires_grad:
        return False
    return autocast or all(layer.lora_A[name].weight.dtype == x.dtype for name in active)


def _dropouts(layers: Sequence[Any], of_layers: Sequence[tuple[str, ...]]) -> Iterator[nn.Module]:
    """Those that leave something out where they train."""
    dropouts = (layer.lora_dropout[name] for layer, its in zip(layers, of_layers, strict=True) for name in its)
    return (dropout for dropout in dropouts if getattr(dropout, "p", 0.0) > 0)


class _Adapters(NamedTuple):
    """The active adapters of the layers of a group; None for a layer that has no part in them."""

    factors: list[tuple[nn.Parameter | None, nn.Parameter | None]]  # A (r, I) and B (O, r) as they are trained
    scalings: list[float]  # s
    ranks: list[int]  # r, 0 without an adapter
    down: Tensor  # (R, I), every A in the precision of the pass
    up: list[Tensor | None]  # s · B

    @classmethod
    def of(cls, layers: Sequence[Any], names: Sequence[str | None], dtype: torch.dtype) -> "_Adapters":
        """Those of layers by name, None for none of a layer, in the precision of a pass."""
        factors: list[Any] = [
            (None, None) if name is None else (layer.lora_A[name].weight, layer.lora_B[name].weight)
            for layer, name in zip(layers, names, strict=True)
        ]
        scalings = [0.0 if name is None else layer.scaling[name] for layer, name in zip(layers, names, strict=True)]
        with torch.no_grad():
            down = [a.to(dtype) for a, _ in factors if a is not None]
            up = [None if b is None else (b * s).to(dtype) for (_, b), s in zip(factors, scalings, strict=True)]
            ranks = [0 if a is None else len(a) for a, _ in factors]
            return cls(factors, scalings, ranks, down[0] if len(down) == 1 else torch.cat(down), up)

    def as_one(self, layers: Sequence[Any]) -> "_Adapters":
        """Those of one layer that has the outputs of all."""
        sizes = [layer.base_layer.out_features for layer in layers]
        blocks = [self.down.new_empty(size, 0) if b is None else b for b, size in zip(self.up, sizes, strict=True)]
        return self._replace(ranks=[sum(self.ranks)], up=[torch.block_diag(*blocks)])


def _forward(x: Tensor, bases: Sequence[nn.Module], adapters: _Adapters) -> tuple[list[Tensor], Tensor, Tensor]:
    """Results; the input (..., I) in the precision of the pass, and what every A makes of it, (..., R)."""
    read = x.to(adapters.down.dtype)
    low = torch.nn.functional.linear(read, adapters.down)
    results = []
    for base, up, part in zip(bases, adapters.up, low.split_with_sizes(adapters.ranks, dim=-1), strict=True):
        result = base(x)
        if up is not None and result.dtype == up.dtype:
            result.view(-1, len(up)).addmm_(part.reshape(-1, part.shape[-1]), up.t())
        elif up is not None:
            result = result + torch.nn.functional.linear(part, up).to(result.dtype)
        results.append(result)
    return results, read, low


class _Pass(torch.autograd.Function):
    """The layers of a group with gradients of input and adapters: y = W x + b + s · B A x of each layer.

    With g of y: for x Wᵀ g + Aᵀ (s · Bᵀ g), for B s · g (A x)ᵀ, for A (s · Bᵀ g) xᵀ (Hu et al. 2021, equation 3).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bases: Any, adapters: _Adapters, *factors: Tensor | None) -> tuple[Tensor, ...]:
        results, read, low = _forward(x, bases, adapters)
        ctx.save_for_backward(read, low, adapters.down, *adapters.up)
        ctx.bases, ctx.scalings, ctx.ranks, ctx.dtype = bases, adapters.scalings, adapters.ranks, x.dtype
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        read, low, down, *up = ctx.saved_tensors
        rows, wanted = read.reshape(-1, read.shape[-1]), ctx.needs_input_grad
        lows = low.reshape(-1, low.shape[-1]).split(ctx.ranks, dim=1)
        of_x: Tensor | None = None
        of_lows: list[Tensor] = []
        of_up: list[Tensor | None] = []
        for base, b, part, s, g, wants in zip(ctx.bases, up, lows, ctx.scalings, gradients, wanted[4::2], strict=True):
            g = None if g is None else g.reshape(-1, g.shape[-1]).to(read.dtype)
            if g is not None and wanted[0]:
                weight = weight_of(base).to(g.dtype)  # (O, I)
                of_x = g @ weight if of_x is None else of_x.addmm_(g, weight)
            if b is not None:
                of_lows.append(torch.zeros_like(part) if g is None else g @ b)
            of_up.append((g.t() @ part).float() * s if g is not None and wants else None)
        of_low = of_lows[0] if len(of_lows) == 1 else torch.cat(of_lows, dim=1)
        if wanted[0]:
            of_x = of_low @ down if of_x is None else of_x.addmm_(of_low, down)
            of_x = of_x.view(read.shape).to(ctx.dtype)
        of_down = (of_low.t() @ rows).split(ctx.ranks) if any(wanted[3::2]) else [None] * len(up)
        of_factors = (
            gradient
            for pair in zip(
                (a if wants else None for a, wants in zip(of_down, wanted[3::2], strict=True)), of_up, strict=True
            )
            for gradient in pair
        )
        return of_x, None, None, *of_factors
