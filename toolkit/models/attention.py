"""Attention within rows that stand in lines, and causal attention of bfloat16 on a CPU."""

import inspect
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import product
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from toolkit.models.fused_lora import computed_in

_ROUNDED_UP = 16  # tokens: kernels of odd sizes take up to a third longer, and each new size costs a compiled one
_QUERIES = 128  # that are multiplied with keys together, with none that comes after all of them
_SHORT = 256  # tokens whose attention in bfloat16 would take longer than in float32 (docs/what_was_tried.md)
_TOGETHER = 64  # tokens of short rows that are one block
_AT_ONCE = 2**19  # products of queries and keys of a batch: 2 MB
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
        return _causal(*given, row_lengths or (query.shape[2],), common_length, named.get("scaling")), None
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
    """Whether it is of a card that has no flash attention for its precision, or planned for a card in float32."""
    planned = type(query) is not Tensor and not _planned_for_cpu.get()
    if query.device.type != "cuda" and not planned:
        return False
    return computed_in(query) is torch.float32 or not (planned or _has_flash(query.device))


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


def _causal(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], common: int, scale: float | None
) -> Tensor:
    """(B, L, heads, size) of rows that have these lengths in every line, and such a common beginning."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    batches = _batches(tuple(lengths), common, *query.shape[:2])
    with torch.autocast("cpu", enabled=False):
        found: Tensor = _Causal.apply(query, key, value, batches, scale)
    return found


class _Block(NamedTuple):
    """Queries of a row and its keys up to the last of them; or several short rows, which leave each other out.

    All of them attend to the `common` first keys of the line, too.
    """

    line: int
    queries: slice
    real: int  # of them; others fill up the size: they are of the next row, and no real one attends to them
    keys: slice
    common: int
    rows: tuple[int, ...]  # lengths, together as many as queries


@lru_cache(maxsize=64)
def _batches(lengths: tuple[int, ...], common: int, lines: int, heads: int) -> tuple[tuple[_Block, ...], ...]:
    """What is computed together, of lines that have rows of these lengths: blocks of one size and one mask."""
    batches = list[list[_Block]]()
    alike = dict[Any, list[_Block]]()
    for line, block in product(range(lines), _blocks(lengths, common)):
        keys = block.common + block.keys.stop - block.keys.start
        products = heads * (block.queries.stop - block.queries.start) * keys
        sizes = block.rows, block.common, keys
        if sizes not in alike or (len(alike[sizes]) + 1) * products > _AT_ONCE:
            batches.append([])
            alike[sizes] = batches[-1]
        alike[sizes].append(block._replace(line=line))
    return tuple(map(tuple, batches))


def _blocks(lengths: tuple[int, ...], common: int) -> Iterator[_Block]:
    """Of one line."""
    groups, line, start = list[list[int]](), sum(lengths), 0
    for number, length in enumerate(lengths):
        # The first row holds the beginning as tokens of its own, and goes with no other.
        if number > (common > 0) and sum(groups[-1]) + length <= _TOGETHER:
            groups[-1].append(length)
        else:
            groups.append([length])
    for rows in groups:
        for first in range(start, start + sum(rows), _QUERIES):
            real = min(_QUERIES, start + sum(rows) - first)
            end = min(first + -(-real // _ROUNDED_UP) * _ROUNDED_UP, line)
            of_rows = (*rows[:-1], end - first - sum(rows[:-1]))
            yield _Block(0, slice(first, end), real, slice(start, end), common if start else 0, of_rows)
        start += sum(rows)


def _mask(rows: tuple[int, ...]) -> Tensor:
    """(queries, as many keys), what is added to their products: nothing attends to other rows and later tokens."""
    of_rows = (torch.ones(length, length, dtype=torch.bool, device="cpu").tril() for length in rows)
    allowed = torch.block_diag(*of_rows)
    return torch.zeros_like(allowed, dtype=torch.float32).masked_fill_(~allowed, -torch.inf)


_kept_mask = lru_cache(maxsize=256)(_mask)


class _Causal(torch.autograd.Function):
    """softmax(s q kᵀ) v of each row's tokens and those before them, in float32, of tensors of 16 bits.

    With p the shares and g of the result: pᵀ g for v, and with dₛ = p (g vᵀ - Σ p (g vᵀ)): s dₛ k for q and s dₛᵀ q for
    k. The shares are computed again for the gradient, so that only the three tensors are kept (Dao et al. 2022,
    appendix B.2). Heads that share a key are the queries of one product.
    """

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, batches: Any, scale: float) -> Tensor:
        lines, heads, length, _ = query.shape
        found = query.new_empty(lines, length, *_grouped(query, key).shape[1:3], value.shape[-1])
        q, k, v = _grouped(query, key).float().mul_(scale), key.float(), value.float()
        with _onednn.has_float32():
            for batch in batches:
                shares = _shares(_queries(q, batch), _keys(k, batch), batch)
                _write(found, torch.bmm(shares, _keys(v, batch)), batch)
        return found.view(lines, length, heads, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.batches, ctx.scale = inputs[3:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        q, k, v = _grouped(query, key).float().mul_(ctx.scale), key.float(), value.float()
        g = _grouped(gradient.transpose(1, 2), key).float()
        of_q = query.new_empty(len(q), q.shape[3], *q.shape[1:3], q.shape[-1])
        of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast("cpu", enabled=False), _onednn.has_float32():  # in a caller's autocast, too
            for batch in ctx.batches:
                asked, keys, of_result = _queries(q, batch), _keys(k, batch), _queries(g, batch, real=True)
                shares = _shares(asked, keys, batch)
                _add(of_v, torch.bmm(shares.transpose(1, 2), of_result), batch)
                of_shares = torch.bmm(of_result, _keys(v, batch).transpose(1, 2))
                of_products = torch._softmax_backward_data(of_shares, shares, -1, torch.float32)
                _add(of_k, torch.bmm(of_products.transpose(1, 2), asked), batch)
                _write(of_q, torch.bmm(of_products, keys).mul_(ctx.scale), batch)
        of_q = of_q.flatten(2, 3).transpose(1, 2)
        return of_q, of_k.to(key.dtype), of_v.to(value.dtype), None, None


def _grouped(of_heads: Tensor, key: Tensor) -> Tensor:
    """(B, heads, L, size) as (B, heads of keys, heads that share one, L, size)."""
    return of_heads.unflatten(1, (key.shape[1], -1))


def _queries(of_all: Tensor, batch: Sequence[_Block], *, real: bool = False) -> Tensor:
    """(blocks · heads of keys, queries of all heads that share one, size), of a tensor as `_grouped` has it.

    Args:
        real: whether those that only fill up are 0.
    """
    parts = torch.stack([of_all[block.line, :, :, block.queries] for block in batch])
    for part, block in zip(parts, batch, strict=True) if real else ():
        if block.real < part.shape[2]:
            part[:, :, block.real :] = 0
    return parts.flatten(2, 3).flatten(0, 1)


def _keys(of_all: Tensor, batch: Sequence[_Block]) -> Tensor:
    """(blocks · heads of keys, keys, size) of (B, heads of keys, L, size)."""
    if not batch[0].common:
        return torch.cat([of_all[block.line, :, block.keys] for block in batch])
    parts = ((of_all[block.line, :, : block.common], of_all[block.line, :, block.keys]) for block in batch)
    return torch.cat([torch.cat(part, dim=1) for part in parts])


def _shares(asked: Tensor, keys: Tensor, batch: Sequence[_Block]) -> Tensor:
    """(blocks · heads of keys, queries of all heads that share one, keys)."""
    products = torch.bmm(asked, keys.transpose(1, 2))
    mask = (_kept_mask if type(products) is Tensor else _mask)(batch[0].rows)
    products.unflatten(1, (-1, len(mask)))[..., -len(mask) :].add_(mask)
    return products.softmax(-1)


def _write(line: Tensor, found: Tensor, batch: Sequence[_Block]) -> None:
    """Put what queries found, as `_queries` has them, into (B, L, heads of keys, heads that share one, size)."""
    heads, share = line.shape[2:4]
    for part, block in zip(found.unflatten(1, (share, -1)).unflatten(0, (-1, heads)), batch, strict=True):
        of_queries = slice(block.queries.start, block.queries.start + block.real)
        line[block.line, of_queries] = part[:, :, : block.real].permute(2, 0, 1, 3)


def _add(line: Tensor, found: Tensor, batch: Sequence[_Block]) -> None:
    """Add what keys found, as `_keys` has them; those that queries filled up with found 0."""
    for part, block in zip(found.unflatten(0, (-1, line.shape[1])), batch, strict=True):
        line[block.line, :, : block.common] += part[:, : block.common]
        line[block.line, :, block.keys] += part[:, block.common :]


class _OneDNN:
    """torch's setting of what multiplies batches in float32, which is one for all threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._usual = Lock(), 0, "none"

    @contextmanager
    def has_float32(self) -> Iterator[None]:
        """Inside, oneDNN multiplies, in place of MKL.

        On an AMD processor MKL takes two to three times as long. That torch may round to bfloat16 is the only way to
        ask for oneDNN. On x86 processors without AMX it has no kernel that does; others keep torch's own choice.
        """
        if not _is_x86_without_amx():
            yield
            return
        onednn: Any = torch.backends.mkldnn
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                usual = onednn.matmul.fp32_precision
                # What is only inherited is told like a setting of its own. "none" inherits again.
                self._usual = "none" if usual == onednn.fp32_precision else usual
                onednn.matmul.fp32_precision = "bf16"
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    onednn.matmul.fp32_precision = self._usual


@lru_cache(maxsize=1)
def _is_x86_without_amx() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64") and not torch.cpu._is_amx_tile_supported()


_onednn = _OneDNN()


@contextmanager
def planned_for_cpu() -> Iterator[None]:
    """Inside, tensors without numbers, which else may be of a card, have attention as on a CPU."""
    token = _planned_for_cpu.set(True)
    try:
        yield
    finally:
        _planned_for_cpu.reset(token)
