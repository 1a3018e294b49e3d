"""What attention of packed rows in bfloat16 takes on a CPU, ours and torch's: `python -m benchmarks.attention`.

One layer, forwards and backwards: the rows of a line by themselves through torch's attention, in bfloat16 and cast to
float32, and by `toolkit.models.attention`.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.records import markdown
from toolkit.models import keep_freed_memory
from toolkit.models.attention import attention_by_rows
from toolkit.reports import machine

HEADS = {"SmolLM2-135M": (9, 3, 64), "Llama 3 8B": (32, 8, 128)}  # queries' heads, keys' heads, size
_UNEVEN = random.Random(1).choices(range(50, 151), k=8)
ROWS = {
    "16 rows of 12 tokens": [12] * 16,
    "8 of 64": [64] * 8,
    "8 of 50 to 150": _UNEVEN,
    "4 of 256": [256] * 4,
    "1 of 1,024": [1024],
}
REPEATS = 9

Attention = Callable[[Sequence[Tensor], Sequence[int]], Tensor]


def by_torch(dtype: torch.dtype) -> Attention:
    """Each row through torch's causal attention in a precision, cast once a line; (1, L, heads, size) in bfloat16."""

    def attend(given: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        parts = zip(*(of_all.to(dtype).split(list(lengths), dim=2) for of_all in given), strict=True)
        rows = [scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
        return torch.cat([row.to(torch.bfloat16) for row in rows], dim=2).transpose(1, 2)

    return attend


def ours(given: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The same by what packed rows go through."""
    module = SimpleNamespace(num_key_value_groups=given[0].shape[1] // given[1].shape[1], is_causal=True)
    query, key, value = given
    return attention_by_rows(module, query, key, value, None, row_lengths=lengths)[0]  # type: ignore[arg-type]


FORMS: Mapping[str, Attention] = {
    "torch, bfloat16": by_torch(torch.bfloat16),
    "torch, float32": by_torch(torch.float32),
    "ours": ours,
}


def milliseconds(heads: tuple[int, int, int], lengths: Sequence[int], repeats: int = REPEATS) -> dict[str, float]:
    """Median of a pass forwards and back by each form, in turn."""
    of_query, of_key, size = heads
    shapes = [(1, sum(lengths), number, size) for number in (of_query, of_key, of_key)]
    given = [torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes]
    along = torch.randn(shapes[0], dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(repeats):
        for name, attend in FORMS.items():
            started = time.perf_counter()
            torch.autograd.grad(attend(given, lengths), given, along)
            seconds[name].append(time.perf_counter() - started)
    return {name: 1000 * statistics.median(of_form) for name, of_form in seconds.items()}


def main() -> int:
    keep_freed_memory()  # as every stage does
    rows = [
        [f"{model}, {name}", *(f"{value:.1f}" for value in milliseconds(heads, lengths).values())]
        for model, heads in HEADS.items()
        for name, lengths in ROWS.items()
    ]
    where = machine()
    print(markdown(["ms a layer", *FORMS], rows))
    print(f"{where['processor']}, {where['threads']} threads of {where['cores']} cores")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
