"""Which precision a machine computes fast: asked of the machine, here and nowhere else."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from transformers import BitsAndBytesConfig

Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32"]
AUTO: Dtype = "auto"
_MATMUL = (128, 256, 256)  # of the comparison: under a millisecond in float32, some 20 in the slowest 16 bits
_TRIED_SECONDS = 0.3  # more than other work on the same cores holds it up at a stretch


def in_tf32(device: torch.device) -> bool:
    """Whether products in float32 have TF32's ten bits there, as many as float16's."""
    products: Any = torch.backends  # which torch does not declare
    return device.type == "cuda" and "tf32" in (products.fp32_precision, products.cuda.matmul.fp32_precision)


@dataclass(frozen=True)
class Precision:
    """A dtype by torch's name; and why it is this one, where nobody has said so."""

    dtype: str
    why: str = ""  # where it was not given

    def __str__(self) -> str:
        return f"{self.dtype}, since {self.why}" if self.why else self.dtype


_of_another_machine: ContextVar[Precision | None] = ContextVar("_of_another_machine", default=None)


@contextmanager
def on_another_machine(precision: Precision) -> Iterator[None]:
    """Inside, `auto` comes to what another machine computes fast."""
    token = _of_another_machine.set(precision)
    try:
        yield
    finally:
        _of_another_machine.reset(token)


def default_device() -> torch.device:
    """Where a base is loaded: the GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def finds_no_gpu() -> bool:
    """Whether torch was built for CUDA and finds no GPU that it can use, though none is hidden from it."""
    # CUDA ends the list at what is none: -1, and SLURM's NoDevFiles.
    hidden = not re.match("[0-9]|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip())
    return torch.version.cuda is not None and not hidden and not torch.cuda.is_available()


def fast_precision() -> Precision:
    """What `auto` comes to: bfloat16 where it is computed fast, else float16 on a card and float32 on a CPU."""
    if (elsewhere := _of_another_machine.get()) is not None:
        return elsewhere
    if torch.cuda.is_available():
        card, (major, minor) = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
        has = f"{card} has compute capability {major}.{minor}"
        if major >= 8:
            return Precision("bfloat16", has)
        return Precision("float16", f"{has}, and bfloat16 begins with 8.0")
    if torch.cpu._is_amx_tile_supported():
        return Precision("bfloat16", "this CPU has AMX")
    if not torch.cpu._is_avx512_bf16_supported():
        capability = torch.backends.cpu.get_cpu_capability()
        return Precision("float32", f"this CPU ({capability}) has neither AMX nor AVX512-BF16")
    # Some take two fifths of float32's time with it, others (an Intel Xeon whose AMX is hidden) twice as long.
    if slower_than_float32("bfloat16") < 1:
        return Precision("bfloat16", "this CPU has AVX512-BF16")
    return Precision("float32", "this CPU computes it faster than bfloat16, in spite of AVX512-BF16")


def resolved(dtype: str) -> str:
    """A dtype by torch's name, `auto` as this machine has it."""
    return fast_precision().dtype if dtype == AUTO else dtype


@cache
def slower_than_float32(dtype: str) -> float:
    """How many times the time of a float32 matmul one in `dtype` takes on this CPU: tried now."""
    rows, inner, columns = _MATMUL
    kinds = (getattr(torch, dtype), torch.float32)
    factors = [(torch.ones(rows, inner, dtype=kind), torch.ones(inner, columns, dtype=kind)) for kind in kinds]
    best = [float("inf"), float("inf")]
    until = time.perf_counter() + _TRIED_SECONDS
    while time.perf_counter() < until:  # in turn: where other work holds the cores for a while, it holds up both
        for i, (ours, theirs) in enumerate(factors):
            began = time.perf_counter()
            ours @ theirs
            best[i] = min(best[i], time.perf_counter() - began)
    return best[0] / best[1]


def slow_here(dtype: str) -> str:
    """A sentence where a CPU computes 16 bits slower than float32, with the measured ratio, or a card emulates
    bfloat16; else nothing."""
    if torch.cuda.is_available() and dtype == "bfloat16" != fast_precision().dtype:
        return f"this GPU emulates bfloat16: {fast_precision().why}."
    if default_device().type != "cpu" or dtype in ("float32", fast_precision().dtype):
        return ""
    ratio, why = slower_than_float32(dtype), fast_precision().why
    if ratio < 1.5:
        return ""
    return f"a matmul in {dtype} takes {ratio:.3g} times as long here as in float32: {why}."


def quantization_config(values: Mapping[str, Any], dtype: str) -> BitsAndBytesConfig:
    """Arguments of `BitsAndBytesConfig`; layers compute in `dtype` unless another `bnb_4bit_compute_dtype` is given.

    Its own default, float32, would leave a card's matrix units idle.
    """
    own = values.get("bnb_4bit_compute_dtype")
    return BitsAndBytesConfig(**{**values, "bnb_4bit_compute_dtype": dtype if own in (None, AUTO) else own})
