"""Runs code on tensors without numbers, and counts what it would cost: live bytes, operations, bytes moved.

Floating-point tensors have a shape, a dtype and a device, go through autograd and autocast as real ones do, and take no
memory. Ids, masks and lengths stay real, so that code which asks them something gets an
answer; what is asked of a number that nobody has computed is 0.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

_ASKED = torch.int64, torch.int32, torch.bool  # dtypes of which code may ask the numbers
_LARGE = 2**16  # numbers of a tensor that are not made for nothing
_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default
_ALSO = {_aten.addmm_: _aten.addmm}  # operators whose operations torch counts by another one's name
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST = 2**14  # operators of which the results are remembered


@dataclass(frozen=True)
class Kernel:
    """One operator as a device runs it: floating-point operations of a matmul, and bytes read and written."""

    flops: float
    bytes: float
    dtype: torch.dtype
    packed: tuple[int, int, int] | None = None  # rows, outputs and inputs of a product with 4-bit weights


@dataclass
class Costs:
    """What a phase costs: its operators, and the most bytes that are live at a time, and at its end, by kind."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    peak: int = 0
    of_peak: dict[str, int] = field(default_factory=dict)
    of_end: dict[str, int] = field(default_factory=dict)

    def with_more_layers(self, one_more: "Costs", number: int) -> "Costs":
        """The costs with so many more layers of the kind of which `one_more` has one more. With few layers the most may
        be live at another time than with many, which have all gradients at the end."""
        kernels = Counter(self.kernels)
        for kernel in {*self.kernels, *one_more.kernels}:
            kernels[kernel] += number * (one_more.kernels[kernel] - self.kernels[kernel])

        def more(mine: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
            kinds = {**mine, **theirs}
            return {kind: (1 - number) * mine.get(kind, 0) + number * theirs.get(kind, 0) for kind in kinds}

        of_peak, of_end = more(self.of_peak, one_more.of_peak), more(self.of_end, one_more.of_end)
        most = max(of_peak, of_end, key=lambda of: sum(of.values()))
        return Costs(kernels, sum(most.values()), most, of_end)


class Weightless(Tensor):
    """A tensor on the CPU to whoever asks, autograd and autocast among them, that has no numbers.

    torch's own fake tensors would do the same; they take some ten times as long for an operator.
    """

    form: Tensor  # on the meta device

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, form: Tensor) -> "Weightless":
        place: Any = {"device": "cpu", "strides": form.stride(), "storage_offset": form.storage_offset()}
        made: Any = Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, **place)
        made.form = form
        return made

    @classmethod
    def like(cls, tensor: Tensor) -> "Weightless":
        """One of the form of another tensor."""
        with _disable_current_modes():
            return cls(_form(tensor))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Weightless{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})[0]


def _form(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Weightless):
        return tensor.form
    tensor = tensor.detach()
    return tensor if tensor.is_meta else torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
    )  # fmt: skip


def _run(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor]]:
    """An operator on forms: what it gives, wrapped and bare, and the forms that it was given."""
    given = {
        id(tensor.form): tensor for tensor in _tensors((*args, *kwargs.values())) if isinstance(tensor, Weightless)
    }

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _form(leaf)
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in given:
            return given[id(leaf)]
        asked = leaf.dtype in _ASKED and leaf.numel() < _LARGE
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if asked else Weightless(leaf)

    args, kwargs = _mapped(bare, args), {name: _mapped(bare, value) for name, value in kwargs.items()}
    inputs = _tensors((*args, *kwargs.values()))
    made = _made(_grouped if func is _GROUPED else func, args, kwargs, inputs)
    return _mapped(wrapped, made), made, inputs


_remembered: dict[Any, Any] = {}  # what an operator gives of arguments of such forms: a form, or several in a tuple
_IN_PLACE = object()  # what it gives is its first argument, whose form stays


def _made(func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
    """What an operator gives of forms, which torch works out in Python: made anew where it is remembered."""
    if func is _grouped or func.is_view:
        return func(*args, **kwargs)
    try:
        key = func, torch.get_default_dtype(), _described(args), _described((*kwargs, *kwargs.values()))
    except TypeError:  # an argument of another kind
        return func(*args, **kwargs)
    if (known := _remembered.get(key)) is not None:
        if known is _IN_PLACE:
            return args[0]
        return _again(known) if isinstance(known, _Form) else tuple(map(_again, known))
    before = _storages(_tensors(args[:1]))
    made = func(*args, **kwargs)
    parts = made if type(made) is tuple else (made,)
    found: Any = None
    if func._schema.is_mutable:
        if made is args[0] and _described(made) == key[2][0] and _storages([made]) == before:  # neither turned nor set
            found = _IN_PLACE
    elif all(type(part) in (Tensor, *_PLAIN) for part in parts) and _stand_alone(_tensors(parts), inputs):
        known = tuple(_form_of(part) if isinstance(part, Tensor) else part for part in parts)
        found = known if type(made) is tuple else known[0]
    if found is not None:
        if len(_remembered) >= _MOST:
            _remembered.clear()
        _remembered[key] = found
    return made


class _Form(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _again(known: Any) -> Any:
    if not isinstance(known, _Form):
        return known
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")


def _described(value: Any) -> Any:
    """An argument as a key, in which 1, 1.0 and True are three; raises TypeError for one of an unknown kind."""
    if isinstance(value, Tensor):
        return _form_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if type(value) not in _PLAIN:
        raise TypeError
    return type(value), value


def _stand_alone(made: list[Tensor], inputs: list[Tensor]) -> bool:
    """Whether there are such results, each in a storage of its own as large as one made anew of its form."""
    if not made or len(_storages([*made, *inputs])) != len(made) + len(_storages(inputs)):
        return False
    anew = ((tensor, _again(_form_of(tensor))) for tensor in made)
    return all(
        not tensor.storage_offset() and tensor.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        for tensor, other in anew
    )


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """Inside, what is counted on the CPU is what a card does, where it does otherwise: dropout keeps truth values and
    no factors, under autocast the norms of layers are taken in float32, and PEFT, which asks whether a card has
    autocast, is told of the CPU's."""
    # Replaced as functions: a mode of torch's does not reach what checkpointing computes again.
    before = [(place, name, getattr(place, name)) for place, name, _ in _OF_A_CARD]
    for place, name, function in _OF_A_CARD:
        setattr(place, name, function)
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _layer_norm(input: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        input, weight, bias = (None if given is None else given.float() for given in (input, weight, bias))
    return torch.layer_norm(input, shape, weight, bias, eps)


_has_autocast = torch.is_autocast_enabled


def _has_autocast_by_default(device_type: str = "cpu") -> bool:
    return _has_autocast(device_type)


_OF_A_CARD: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (F, "dropout", _dropout),
    (F, "layer_norm", _layer_norm),
    (torch, "is_autocast_enabled", _has_autocast_by_default),
)


class Counted(TorchDispatchMode):
    """Inside it nothing is computed and everything is counted, beginning anew with each `phase`.

    Args:
        vocabulary: the last dimension by which logits are known.
    """

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.costs = Costs()
        self.live: Counter[str] = Counter()
        self.total = 0
        self._known: dict[int, tuple[str, int]] = {}  # kind and size of each live storage

    # ------------------------------------------------------------------ counting

    @contextmanager
    def phase(self, *, leaves: str | None = None) -> Iterator[Costs]:
        """Inside all is counted: what it costs. What it leaves stays live, as another kind where one is given."""
        self.costs = costs = Costs(peak=self.total, of_peak=dict(self.live))
        before = set(self._known)
        with self:
            yield costs
        costs.of_end = dict(self.live)
        if leaves is not None:
            for key in self._known.keys() - before:
                self._count_as(leaves, key)

    def keep(self, tensor: Tensor, kind: str) -> None:
        """Count a live tensor as another kind."""
        self._count_as(kind, _form(tensor).untyped_storage()._cdata)

    def _count_as(self, kind: str, key: int) -> None:
        if key in self._known:
            before, size = self._known[key]
            self.live[before] -= size
            self.live[kind] += size
            self._known[key] = (kind, size)

    def _note(self, made: Any, theirs: set[int]) -> None:
        """Count the storages among an operator's results that are not those of its arguments, `theirs`."""
        for tensor in _tensors((made,)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in theirs or key in self._known or not size:
                continue
            kind = "logits" if tensor.shape[-1:] == (self.vocabulary,) and tensor.dim() > 1 else "activations"
            self._known[key] = (kind, size)
            self.live[kind] += size
            self.total += size
            weakref.finalize(storage, self._freed, key)
            self._at_most(0)

    def _freed(self, key: int) -> None:
        kind, size = self._known.pop(key)
        self.live[kind] -= size
        self.total -= size

    def _at_most(self, more: int, kind: str = "") -> None:
        """A peak, if it is one, with `more` bytes that an operator needs for itself."""
        if self.total + more > self.costs.peak:
            self.costs.peak, self.costs.of_peak = self.total + more, dict(self.live)
            if more:
                self.costs.of_peak[kind] = more

    # ------------------------------------------------------------------ one operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((*args, *kwargs.values()))
        if not any(isinstance(tensor, Weightless) for tensor in given):
            made = func(*args, **kwargs)
            if not given and isinstance(made, Tensor) and made.is_floating_point() and made.numel() >= _LARGE:
                made = Weightless(_form(made))
            bare = _mapped(lambda leaf: leaf.form if isinstance(leaf, Weightless) else leaf, made)
            self._note(bare, _storages(given))
            return made
        if func is _aten._local_scalar_dense.default:
            return 0
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], Weightless):
            return args[0]  # numbers that nobody has computed, put into a real tensor
        if func in _INDEXING:
            args = (args[0], [i for index in args[1] for i in _positions(index)], *args[2:])
        wrapped, made, inputs = _run(func, args, kwargs)
        theirs = _storages(inputs)
        self._note(made, theirs)
        self._count(func, args, kwargs, inputs, made, theirs)
        return wrapped

    def _count(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], made: Any, theirs: set[int]) -> None:
        outputs = _tensors((made,))
        aliases = all(tensor.untyped_storage()._cdata in theirs for tensor in outputs)
        if (aliases and not func._schema.is_mutable) or func in _EMPTY:
            return  # a view, or a place
        read = inputs[1:] + outputs if func is _aten.embedding.default else inputs  # rows of the table, not all of it
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *outputs))
        flops, dtype, packed = 0.0, outputs[0].dtype if outputs else torch.float32, None
        if func is torch.ops.bitsandbytes.gemm_4bit.default:
            rows, (columns, inner) = inputs[0].numel() // inputs[0].shape[-1], args[2]
            flops, packed = 2.0 * rows * columns * inner, (rows, columns, inner)
            self._at_most(columns * inner * inputs[0].element_size(), "unpacked layer")
        elif func in _OPERATIONS:
            flops = _OPERATIONS[func](*args, **kwargs)
        elif (known := _ALSO.get(func._overloadpacket, func._overloadpacket)) in flop_registry:
            flops = float(flop_registry[known](*args, **kwargs, out_val=made))
        self.costs.kernels[Kernel(flops, moved, dtype, packed)] += 1


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments or results, and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An operator's arguments or results, each changed, and those in lists of them; torch's `tree_map` takes several
    times as long."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, item) for item in value)
    return change(value)


def _storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """An index of positions in place of a real one of truth values."""
    if index is None or index.dtype is not torch.bool or isinstance(index, Weightless):
        return [index]
    with _disable_current_modes():
        return list(index.nonzero().unbind(1))


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> float:
    """Of all pairs of query and key, twice a multiplication by the head's size; half of them where it is causal."""
    causal = len(rest) > 1 and rest[1] is True
    rows, heads, length, size = query.shape
    return 4.0 * rows * heads * length * key.shape[2] * size * (0.5 if causal else 1.0)


def _attention_gradients(grad: Tensor, *given: Any, **named: Any) -> float:
    """Its two products again, and three for the gradients of each: of query, key, value, two results and the rest."""
    return 2.5 * _attention(*given[:3], *given[5:])


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, out_dtype: Any = None, **named: Any
) -> Tensor:
    """The form of a product of groups of rows, each with a matrix of its own: torch's has none in float32."""
    shape = {
        (2, 3): (a.shape[0], b.shape[-1]),
        (3, 2): (a.shape[-2], b.shape[-1]),
        (3, 3): (*a.shape[:2], b.shape[-1]),
    }.get((a.dim(), b.dim()))
    return a.new_empty(shape or (0 if offs is None else len(offs), a.shape[0], b.shape[-1]), dtype=out_dtype or a.dtype)


def _grouped_operations(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> float:
    rows = a.numel() // (a.shape[0] if (a.dim(), b.dim()) == (3, 2) else 1)  # each column is of one group
    return 2.0 * rows * b.shape[-1]


_OPERATIONS: dict[Any, Callable[..., float]] = {
    _GROUPED: _grouped_operations,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_gradients,
}
