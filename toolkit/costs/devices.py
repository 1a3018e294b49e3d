"""Cards by their makers' data sheets, and this CPU by what it does in a second."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.costs.counted import Costs, Kernel
from toolkit.errors import ToolkitError
from toolkit.memory import memory

_GB = 10**9
_TRIED_SECONDS = 0.05  # of each measurement on a CPU
_ROWS, _WIDTH, _WEIGHTS = 16, 1024, 32  # of thin products: 128 MiB of weights, more than most caches hold


@dataclass(frozen=True)
class Device:
    """What bounds a computation.

    Args:
        name: as a person knows it.
        memory: bytes of it.
        bandwidth: bytes a second.
        peak: operations a second of dense matmuls, by dtype.
        operator: seconds that Python, torch and the launch need for an operator, whatever its size.
        context: bytes that the driver and its libraries take, which no allocator counts; and, of those that it does,
            cuBLAS's workspaces (32 MiB for a stream on Hopper).
        reached: shares of peak and bandwidth that large operators reach.
        graphs: whether launches can be recorded and played back.
        products: bytes a second of matmuls of few rows, where they stay below the bandwidth; None where they reach it.
        capability: of CUDA.
        multiprocessors: how many.
    """

    name: str
    memory: int
    bandwidth: float
    peak: dict[torch.dtype, float]
    operator: float
    context: int = 0
    reached: tuple[float, float] = (1.0, 1.0)
    graphs: bool = False
    products: float | None = None
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 1

    def packed_rows(self, outputs: int, inputs: int) -> int:
        """Up to how many rows are multiplied with packed 4-bit weights; of more, these are unpacked before."""
        waves = -(-outputs // 64) / self.multiprocessors
        tall = inputs > 2 * outputs
        return next(
            (
                rows
                for least, rows, of_tall in _PACKED.get(self.capability, ())
                if waves >= least and (tall or not of_tall)
            ),
            _FEW,
        )

    def moved(self, kernel: Kernel, *, merged: bool = False) -> float:
        """The bytes of an operator; `merged` with 16-bit weights for 4-bit ones."""
        if kernel.packed is None:
            return kernel.bytes
        rows, outputs, inputs = kernel.packed
        if merged:
            return 2.0 * (outputs * inputs + rows * (outputs + inputs))
        # In other precisions than those of its matrix units a card does it for the fewest rows alone.
        half = torch.float16 if self.capability == (7, 5) else torch.bfloat16
        most = self.packed_rows(outputs, inputs) if kernel.dtype in (half, torch.float16) else _IN_OTHER_PRECISIONS
        is_unpacked = rows > most  # to be written and read
        return kernel.bytes + is_unpacked * 2.0 * outputs * inputs * kernel.dtype.itemsize

    def seconds(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """The time of an operator by its operations or its bytes, whichever take longer."""
        of_peak, of_bandwidth = self.reached
        peak = self.peak.get(dtype, self.peak[torch.float32])
        bandwidth = self.products if flops and self.products else self.bandwidth
        return max(flops / (of_peak * peak), moved / (of_bandwidth * bandwidth))

    def busy(self, costs: Costs, *, merged: bool = False) -> float:
        """The time of all operators; `merged` with 16-bit weights for 4-bit ones."""
        return sum(n * self.seconds(k.flops, self.moved(k, merged=merged), k.dtype) for k, n in costs.kernels.items())

    def eager(self, costs: Costs) -> float:
        """As Python goes through them: a card computes one while later ones are prepared, a CPU does both itself."""
        preparing, busy = costs.kernels.total() * self.operator, self.busy(costs)
        return max(preparing, busy) if self.graphs else preparing + busy

    def recorded(self, costs: Costs, *, merged: bool = False) -> float:
        """As a CUDA graph plays them back; `merged` with 16-bit weights for 4-bit ones."""
        return self.busy(costs, merged=merged) + costs.kernels.total() * GRAPH_KERNEL


# Seconds an operator of transformers' eager code: bitsandbytes publishes some 25 ms for a token of Llama-3.1-8B in
# bfloat16, on an H100 and on a 4090, which is about 1,200 operators.
EAGER_OPERATOR = 20e-6
# Between two kernels of a CUDA graph.
GRAPH_KERNEL = 1.5e-6
_CONTEXT = 500 * 2**20
_REACHED = (0.7, 0.8)


# Rows up to which bitsandbytes 0.50 multiplies with packed weights, by how many times the blocks of 64 outputs fill a
# card's multiprocessors; some of these for many inputs alone. The main lines of its own rule, which it has from trials.
_PACKED: dict[tuple[int, int], tuple[tuple[float, int, bool], ...]] = {
    (7, 5): ((3, 128, False), (0.5, 64, False), (0, 32, False)),
    (8, 0): ((3, 128, False), (1, 48, False)),
    (8, 6): ((1, 128, False), (0.5, 64, False), (0, 16, False)),
    (8, 9): ((3, 256, False), (0.8, 128, False), (0.5, 64, True)),
    (9, 0): ((3, 64, False), (2, 48, False), (1, 32, False), (0.5, 16, False), (0, 7, False)),
    (12, 0): ((3, 256, False), (2, 128, False), (0.75, 64, False)),
}
_FEW = 8
_IN_OTHER_PRECISIONS = 7


def _card(
    name: str,
    gib: float,
    gb_a_second: float,
    tflops_16: float,
    tflops_32: float,
    multiprocessors: int,
    capability: tuple[int, int],
) -> Device:
    half = torch.bfloat16 if capability >= (8, 0) else torch.float16
    peak = {half: tflops_16 * 1e12, torch.float16: tflops_16 * 1e12, torch.float32: tflops_32 * 1e12}
    limits = int(gib * 2**30), gb_a_second * _GB, peak, EAGER_OPERATOR, _CONTEXT, _REACHED
    return Device(name, *limits, graphs=True, capability=capability, multiprocessors=multiprocessors)


# Memory that torch sees in GiB, bandwidth in GB/s, dense 16-bit and float32 operations in 10¹² a second (NVIDIA's data
# sheets; of GeForce cards with accumulation in float32), multiprocessors and CUDA's compute capability.
CARDS = {
    "T4": _card("T4", 14.6, 320, 65, 8.1, 40, (7, 5)),
    "L4": _card("L4", 22.0, 300, 121, 30.3, 58, (8, 9)),
    "A10": _card("A10", 22.0, 600, 125, 31.2, 72, (8, 6)),
    "RTX3090": _card("RTX 3090", 23.6, 936, 71, 35.6, 82, (8, 6)),
    "RTX4090": _card("RTX 4090", 23.5, 1008, 165, 82.6, 128, (8, 9)),
    "RTX5090": _card("RTX 5090", 31.3, 1792, 209, 104.8, 170, (12, 0)),
    "A100-40GB": _card("A100 40 GB", 39.4, 1555, 312, 19.5, 108, (8, 0)),
    "L40S": _card("L40S", 44.4, 864, 362, 91.6, 142, (8, 9)),
    "RTXA6000": _card("RTX A6000", 47.4, 768, 155, 38.7, 84, (8, 6)),
    "A100-80GB": _card("A100 80 GB", 79.2, 2039, 312, 19.5, 108, (8, 0)),
    "H100": _card("H100 SXM", 79.1, 3350, 989, 66.9, 132, (9, 0)),
    "H100-PCIE": _card("H100 PCIe", 79.1, 2000, 756, 51.2, 114, (9, 0)),
    "H200": _card("H200", 139.8, 4800, 989, 66.9, 132, (9, 0)),
}
_MOST_GB = 1e6
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GIB)", re.IGNORECASE)


def named(text: str) -> Device | int:
    """A card by its name, such as H100, 4090 or A100-80GB; or bytes of memory by a size, such as 24GB.

    Raises:
        ToolkitError: neither.
    """
    size = _SIZE.fullmatch(text.strip())
    if size and 0 < float(size[1]) < _MOST_GB:
        return int(float(size[1]) * (_GB if size[2].upper() == "GB" else 2**30))
    asked = "" if size else _bare(text)
    # A10 is another card than A100.
    found = [card for name, card in CARDS.items() if asked in {*_names_of(name), _bare(card.name)}]
    if not found:
        remedy = f"Name one of {', '.join(CARDS)}, or its memory as 24GB."
        raise ToolkitError(f"{text[:60]!r} is neither a known GPU nor a size of memory.", remedy=remedy)
    return found[0]


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).upper()


def _names_of(card: str) -> set[str]:
    """What a card may be called: A100-80GB also A10080GB, A10080 and A100, RTX4090 also 4090."""
    whole = card.replace("-", "")
    return {whole, whole.removeprefix("RTX"), whole.removesuffix("GB"), card.partition("-")[0]}


# Of a name: what has other limits than the card of that name.
_OTHERS = {"LAPTOP", "MAX", "MOBILE", "MIG", "NVL", "SUPER", "TI", "D"}


def here() -> Device | int:
    """The card of this machine with the memory that it has, or that alone, in bytes, where its limits are not known; or
    this CPU as measured."""
    if not torch.cuda.is_available():
        return this_cpu()
    has = torch.cuda.get_device_properties(0)
    said = set(re.split(r"[\s_-]+", has.name.upper()))
    near = [name for name in CARDS if _names_of(name) & said and not _OTHERS & said]
    if not near:
        return int(has.total_memory)
    # An "H100 PCIe" is nearer to H100-PCIE than to H100; of an A100's two sizes its own is nearer.
    parts = {name: len(set(name.split("-")) & said) for name in near}
    best = min(near, key=lambda name: (-parts[name], abs(CARDS[name].memory - has.total_memory)))
    return replace(CARDS[best], memory=int(has.total_memory))


@cache
def this_cpu() -> Device:
    """This CPU with the threads that torch uses here, measured in under a second."""
    square = {dtype: torch.ones(512, 512, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    peak: dict[torch.dtype, float] = dict.fromkeys(square, 0.0)
    for dtype, ones in (*square.items(), *square.items()):  # twice, apart: threads and clocks may be slow at first
        peak[dtype] = max(peak[dtype], 2 * 512**3 / _seconds(lambda ones=ones: ones @ ones))  # type: ignore[misc]
    one, other = torch.ones(2**24), torch.ones(2**24)  # beyond the caches, into memory that was used before
    bandwidth = 2 * one.nbytes / _seconds(lambda: torch.neg(one, out=other))
    rows, weights = torch.ones(_ROWS, _WIDTH), [torch.ones(_WIDTH, _WIDTH) for _ in range(_WEIGHTS)]
    moved = _WEIGHTS * (weights[0].nbytes + 2 * rows.nbytes)
    thin = moved / _seconds(lambda: [linear(rows, weight) for weight in weights])
    products = thin if thin < bandwidth else None
    name = f"this CPU ({torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()})"
    return Device(name, memory().total, bandwidth, peak, _operator(), products=products)


class _Operators(TorchDispatchMode):
    number = 0  # of those that are no views

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _operator() -> float:
    """Seconds that an operator of a decoder takes whose numbers are next to none."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 4}
    with torch.random.fork_rng(devices=()):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    with _Operators() as operators:
        model(ids)
    return _seconds(lambda: model(ids)) / operators.number


def _seconds(work: Callable[[], Any]) -> float:
    """The shortest of the times that some work takes again and again."""
    work()
    best, until = float("inf"), time.perf_counter() + _TRIED_SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
