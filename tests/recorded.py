"""CUDA graphs where there is no card: operators are noted as they run, and run again into the memory of their results.

What a graph forbids raises: asking for a number, or for as many as a mask says. Nothing that a recording has computed
may be used, as a card computes nothing while it records: results hold NaN until they are played back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
ASKING = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default}
ASKING.add(_aten._grouped_mm.default)  # torch's kernel for all cards but Hopper and B200 (pytorch#169970)


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.played = 0

    def replay(self) -> None:
        self.played += 1
        for func, args, kwargs, results in self.operators:
            made = tree_leaves(func(*args, **kwargs))
            for result, new in zip(results, [x for x in made if isinstance(x, Tensor)] if results else [], strict=True):
                result.copy_(new)


class _Recording(TorchDispatchMode):
    """In place of `torch.cuda.graph`."""

    def __init__(self, graph: Graph, *, stream: None = None, capture_error_mode: str):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        indices = [x for x in args[1] if x is not None] if func is _aten.index.Tensor else []
        if func in ASKING or any(x.dtype is torch.bool for x in indices) or _comes_from_elsewhere(func, args, kwargs):
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **kwargs)
        held = {_storage(tensor) for tensor in given}
        new = [x for x in tree_leaves(made) if isinstance(x, Tensor) and _storage(x) not in held]
        if new or func._schema.is_mutable:
            self.graph.operators.append((func, args, kwargs, new))
        return made

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for *_, results in self.graph.operators:
            for result in results:
                result.fill_(float("nan") if result.is_floating_point() else 0)


def _comes_from_elsewhere(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether numbers are copied from one device to another: from memory that is not pinned a graph forbids that."""
    if func is _aten.copy_.default:
        return bool(args[0].device != args[1].device)
    if func is _aten._to_copy.default:
        return bool(kwargs.get("device") not in (None, args[0].device))
    return func is _aten.index.Tensor and any(x is not None and x.device != args[0].device for x in args[1])


def _storage(tensor: Tensor) -> Any:
    tensor = getattr(tensor, "numbers", tensor)  # of `tests.on_a_card`
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@contextmanager
def graphs_without_a_card() -> Iterator[list[Graph]]:
    """Inside, graphs are made so; all of them."""
    made: list[Graph] = []

    def graph() -> Graph:
        made.append(Graph())
        return made[-1]

    no_stream = dict.fromkeys(("Stream", "current_stream"), lambda device: None)
    fakes = {"CUDAGraph": graph, "graph": _Recording, **no_stream}
    with mock.patch.multiple(torch.cuda, **fakes):
        yield made
