"""transformers' attention within rows that stand in lines, and by which function it is computed."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from toolkit.models.causal_attention import causal_attention
from toolkit.models.fused_lora import computed_in

_SHORT = 256  # tokens whose attention in bfloat16 would take longer than in float32 (docs/what_was_tried.md)
_planned_for_cpu = ContextVar("planned_for_cpu", default=False)
_TAKEN = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
# What else changes transformers' attention where it is given: a bias by positions, a paged cache.
_NOT_TAKEN = {"softcap", *inspect.signature(sdpa_attention_forward).parameters} - _TAKEN


def without_cudnn_attention() -> None:
    """Leave cuDNN's attention out, which comes first on Hopper and Blackwell from torch 2.11 on.

    It makes a plan for every new length, and each token that is decoded is one; with a mask its gradients can be NaN
    (pytorch#196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def attention_by_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: Sequence[int] | None = None,
    common_length: int = 0,
    **named: Any,
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`; with `row_lengths` within the rows of one line, (1, heads, L, size) of
    each of the three, without padding between them.

    transformers can tell such rows by their positions, too, by a mask of all pairs of tokens, most of which it computes
    to leave them out. Here each row's part goes through causal attention by itself, and that of the first
    `common_length` tokens of the line, which begin all its rows, goes before it. A model that hands both down to its
    attention needs nothing else; whether it does, `base_checks` tries.

    In bfloat16 on a CPU whole rows are computed in float32, which is faster there and nearer to the exact result.

    Raises:
        NotImplementedError: with `row_lengths`, a mask of numbers. A model's own may depend on the whole line: Doge
            keeps so many keys of all that stand there.
    """
    if row_lengths is not None and attention_mask is not None and attention_mask.dtype is not torch.bool:
        raise NotImplementedError("rows in a line are kept apart under a mask of True and False alone")
    given = (query, key, value)
    if named.get("cache") is not None:
        attend = sdpa_attention_forward
    elif query.shape[2] == 1 and row_lengths is None and _is_by_row(attention_mask, named):
        return _of_one_token(*given, attention_mask, **named), None
    elif not _whole_in_bfloat16(query, key):
        attend = _by_torch
    elif attention_mask is None and _is_plain_causal(module, named):
        return causal_attention(*given, row_lengths or (query.shape[2],), common_length, named.get("scaling")), None
    else:
        attend = _in_float32
    if row_lengths is None:
        return attend(module, *given, attention_mask, **named)
    parts, beginnings = list[Tensor](), [of_all[:, :, :common_length] for of_all in given]
    for own in zip(*(of_all.split(list(row_lengths), dim=2) for of_all in given), strict=True):
        before = common_length if parts else 0
        # Queries of the beginning go with the others: keys alone would ask for a mask, with which kernels are slower.
        row = (torch.cat(both, dim=2) for both in zip(beginnings, own, strict=True)) if before else own
        length = before + own[0].shape[2]
        # Of the line's first tokens: a model's mask goes by the distance of tokens, which is that of a row by itself.
        mask = None if attention_mask is None else attention_mask[..., :length, :length]
        parts.append(attend(module, *row, mask, **named)[0][:, before:])
    return torch.cat(parts, dim=1), None


def _by_torch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """As transformers', which lets heads share keys where there is no mask: of a card's kernels flash attention can,
    and where there is none torch takes one that keeps all products, in float32. There each head gets its own."""
    shared = attention_mask is None and key.shape[1] < query.shape[1] and key.shape[-1] == value.shape[-1] <= 256
    if shared and _is_without_flash(query):
        key, value = (repeat_kv(of_heads, query.shape[1] // key.shape[1]) for of_heads in (key, value))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **named)


def _is_by_row(attention_mask: Tensor | None, named: Mapping[str, Any]) -> bool:
    """Whether the heads of a row attend by one mask, and by nothing but their products."""
    shared = attention_mask is None or (attention_mask.ndim == 4 and attention_mask.shape[1] == 1)
    return shared and all(named.get(name) is None for name in _NOT_TAKEN)


def _of_one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """(B, 1, heads, size) of one query a row, for which the heads that share a key are the queries of one product.

    Else torch, asked for shared keys, takes one product for each head (on a CPU five to ten times as long), and
    transformers before 5.23, under a mask, gives each head keys of its own, a copy of the cache at each token.
    """
    heads = query.view(len(query), key.shape[1], -1, query.shape[-1])
    found = nn.functional.scaled_dot_product_attention(
        heads, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return found.flatten(1, 2).unsqueeze(1)


def _is_without_flash(query: Tensor) -> bool:
    """Whether it is of a card that has no flash attention for its precision, or planned for one: a card that computes
    bfloat16 has it, and `auto` is float16 where none does."""
    planned = type(query) is not Tensor and not _planned_for_cpu.get()
    if planned:
        return computed_in(query) is not torch.bfloat16
    return query.device.type == "cuda" and (computed_in(query) is torch.float32 or not _has_flash(query.device))


@lru_cache(maxsize=8)
def _has_flash(card: torch.device) -> bool:
    return torch.cuda.get_device_capability(card) >= (8, 0)


def _whole_in_bfloat16(query: Tensor, key: Tensor) -> bool:
    """Whether all tokens are there, not new ones after a cache, in bfloat16 on a CPU."""
    on_cpu = query.device.type == "cpu" and (type(query) is Tensor or _planned_for_cpu.get())
    return on_cpu and query.dtype is torch.bfloat16 and query.shape[2] == key.shape[2]


def _is_plain_causal(module: nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether each token attends to all before it, by nothing but their products."""
    causal = named.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return causal and not named.get("dropout") and all(named.get(name) is None for name in _NOT_TAKEN)


def _in_float32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """As transformers' in float32 for few tokens, with the gradients of that."""
    if query.shape[2] > _SHORT:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        exact = (tensor.float() for tensor in (query, key, value))
        named = {
            name: x.float() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x for name, x in named.items()
        }
        return sdpa_attention_forward(module, *exact, attention_mask, **named)[0].to(query.dtype), None


@contextmanager
def planned_for_cpu() -> Iterator[None]:
    """Inside, tensors without numbers, which else may be of a card, have attention as on a CPU."""
    token = _planned_for_cpu.set(True)
    try:
        yield
    finally:
        _planned_for_cpu.reset(token)
