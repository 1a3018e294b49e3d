"""Attention within rows that stand one after the other in a line, without padding between them.

transformers can tell such rows by their positions, too, by a mask of all pairs of tokens, most of which it computes to
leave them out. Here each row's part goes through torch's causal attention by itself. A model that hands `row_lengths`
down to its attention needs nothing else; whether it does, `base_checks` tries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attention_by_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: Sequence[int] | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`; with `row_lengths` within the rows of one line, (1, heads, L, size) of
    each of the three."""
    if row_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    parts, start = [], 0
    for length in row_lengths:
        row = slice(start, start := start + length)
        mask = None if attention_mask is None else attention_mask[..., row, row]
        own = query[:, :, row], key[:, :, row], value[:, :, row]
        parts.append(sdpa_attention_forward(module, *own, mask, **named)[0])
    return torch.cat(parts, dim=1), None
