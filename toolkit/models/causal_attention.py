"""Causal attention of bfloat16 within rows that stand in lines, on a CPU: computed in float32, by blocks.

Each token attends to those before it in its row. A row's queries are taken by so many at a time, with no key that comes
after all of them; and blocks of many rows are filled up to one size and multiplied at once, since on short rows calls
take longer than what is computed.
"""

import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROUNDED_UP = 16  # tokens: kernels of odd sizes take up to a third longer, and each new size costs a compiled one
_QUERIES = 128  # that are multiplied with keys together, with none that comes after all of them
_AT_ONCE = 2**20  # products of queries and keys of a batch: 4 MB
_CALLS = 2**16  # products that take as long as the calls of a batch


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], common: int, scale: float | None
) -> Tensor:
    """Causal attention of bfloat16 on a CPU within rows that stand in lines, (B, L, heads, size) of their tokens.

    Args:
        query: (B, heads, L, size), of lines that each have rows of these lengths, L tokens in all.
        key: (B, heads of keys, L, size).
        value: (B, heads of keys, L, size of values).
        common: tokens of the line that begin all its rows; of a single line alone.
        scale: of products; None for one over the root of `size`.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        found: Tensor = _Causal.apply(query, key, value, tuple(lengths), common, scale)
    return found


class _Block(NamedTuple):
    """Queries of a row, from its token number `first` on, and its keys up to the last of them.

    The numbers of a row begin with the tokens that begin all rows, whose queries are those of the first row.
    """

    first: int
    end: int
    before: int  # the place in all lines of a later token, less its number
    is_last: bool  # of its row

    @property
    def queries(self) -> int:
        return self.end - self.first


class _Batch(NamedTuple):
    """Blocks that are computed together, n of them, filled up to Q queries and K keys."""

    number: int
    queries: Tensor  # int64 (n · Q,), their tokens
    keys: Tensor  # int64 (n · K,)
    filling: Tensor  # int64 (F,), which of the queries only fill up
    mask: Tensor  # float32 (n, 1, Q, M), what is added to their products with the last M keys


class _Layout(NamedTuple):
    """Batches of all tokens of all lines; places are those in all batches, one after the other."""

    batches: list[_Batch]
    common: int
    of_queries: Tensor  # int64 (B · L,), the place of each token
    of_keys: Tensor  # int64 (B · L,), that in the last block of its row, which has all keys of it
    earlier: list[tuple[slice, slice]]  # tokens of the blocks before, and their places


def _laid_out(lengths: tuple[int, ...], common: int, lines: int, heads: int) -> _Layout:
    """Of lines that have rows of these lengths."""
    batches, earlier = list[_Batch](), list[tuple[slice, slice]]()
    of_queries, of_keys = (torch.zeros(lines * sum(lengths), dtype=torch.int64, device="cpu") for _ in range(2))
    queries = keys = 0
    for blocks in _together([*_blocks(lengths, common, lines)], heads):
        batch = _filled_up(blocks, common)
        for number, block in enumerate(blocks):
            asked = slice(block.before + block.first, block.before + block.end)
            of_queries[asked] = queries + number * (len(batch.queries) // batch.number) + _numbers(block.queries)
            own, place = max(0, block.end - common), keys + number * (len(batch.keys) // batch.number) + common
            tokens = slice(block.before + common, block.before + common + own)
            if block.is_last:
                of_keys[tokens] = place + _numbers(own)
            else:
                earlier.append((tokens, slice(place, place + own)))
        batches.append(batch)
        queries, keys = queries + len(batch.queries), keys + len(batch.keys)
    return _Layout(batches, common, of_queries, of_keys, earlier)


_kept_layout = lru_cache(maxsize=8)(_laid_out)  # each is asked for in every layer of a pass, forwards and back


def _layout(query: Tensor, lengths: tuple[int, ...], common: int) -> _Layout:
    """None is kept of tensors without numbers, by which a plan is made."""
    return (_kept_layout if type(query) is Tensor else _laid_out)(lengths, common, *query.shape[:2])


def _blocks(lengths: tuple[int, ...], common: int, lines: int) -> Iterator[_Block]:
    start = 0
    for row, length in enumerate(lengths * lines):
        before = start - common if row else 0
        end = start + length - before
        for first in range(start - before, end, _QUERIES):
            yield _Block(first, min(first + _QUERIES, end), before, first + _QUERIES >= end)
        start += length


def _together(blocks: list[_Block], heads: int) -> Iterator[list[_Block]]:
    """Those that are computed together, so that products of what fills up and calls cost least in all."""
    blocks = sorted(blocks, key=lambda block: (block.end, block.queries), reverse=True)
    costs, begins = [0.0], list[int]()
    for last in range(len(blocks)):
        queries, best = 0, (math.inf, last)
        for first in range(last, -1, -1):
            queries = max(queries, blocks[first].queries)
            products = (last + 1 - first) * heads * _rounded_up(queries) * _rounded_up(blocks[first].end)
            if first < last and products > _AT_ONCE:
                break
            best = min(best, (costs[first] + products + _CALLS, first))
        costs.append(best[0])
        begins.append(best[1])
    end = len(blocks)
    while end:
        yield blocks[begins[end - 1] : end]
        end = begins[end - 1]


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _ROUNDED_UP) * _ROUNDED_UP


def _numbers(end: int) -> Tensor:
    return torch.arange(end, device="cpu")


def _filled_up(blocks: list[_Block], common: int) -> _Batch:
    """What fills up is a block's last query, and its last key behind a mask."""
    first, end, before = (torch.tensor(of, device="cpu").unsqueeze(1) for of in list(zip(*blocks, strict=True))[:3])
    number = _rounded_up(max(block.queries for block in blocks))
    keys = _numbers(_rounded_up(max(block.end for block in blocks)))
    queries = (first + _numbers(number)).minimum(end - 1)
    seen_by_all = min(block.first for block in blocks)
    hidden = keys[seen_by_all:] > queries.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, device="cpu").masked_fill_(hidden, -torch.inf).unsqueeze(1)
    asked, known = (torch.where(of < common, of, of + before).flatten() for of in (queries, keys.minimum(end - 1)))
    filling = [n * number + q for n, block in enumerate(blocks) for q in range(block.queries, number)]
    return _Batch(len(blocks), asked, known, torch.tensor(filling, dtype=torch.int64, device="cpu"), mask)


class _Causal(torch.autograd.Function):
    """softmax(s q kᵀ) v of each row's tokens and those before them, in float32, of tensors in bfloat16.

    With p the shares and g of the result: pᵀ g for v, and with dₛ = p (g vᵀ - Σ p (g vᵀ)): s dₛ k for q and s dₛᵀ q for
    k. The shares are computed again for the gradient, so that only the three tensors are kept (Dao et al. 2022,
    appendix B.2). Heads that share a key are the queries of one product.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], common: int, scale: float
    ) -> Tensor:
        layout = _layout(query, lengths, common)
        q, k, v = (_by_token(of_all, key) for of_all in (query, key, value))
        found = []
        with _onednn.has_float32():
            for batch in layout.batches:
                shares = _shares(_taken(q, batch.queries, batch).mul_(scale), _taken(k, batch.keys, batch), batch)
                result = torch.bmm(shares, _taken(v, batch.keys, batch))
                found.append(_put(result, batch, q, query.dtype))
        of_tokens = torch.cat(found).index_select(0, layout.of_queries)
        return of_tokens.view(len(query), query.shape[2], query.shape[1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.rows, ctx.scale = inputs[3:5], inputs[5]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        layout = _layout(query, *ctx.rows)
        q, k, v, g = (_by_token(of_all, key) for of_all in (query, key, value, gradient.transpose(1, 2)))
        of_q, of_k, of_v = list[Tensor](), list[Tensor](), list[Tensor]()
        with torch.autocast("cpu", enabled=False), _onednn.has_float32():  # in a caller's autocast, too
            for batch in layout.batches:
                asked, keys = _taken(q, batch.queries, batch).mul_(ctx.scale), _taken(k, batch.keys, batch)
                of_result = _taken(g, batch.queries, batch, filling=0)
                shares = _shares(asked, keys, batch)
                of_v.append(_put(torch.bmm(shares.transpose(1, 2), of_result), batch, v))
                of_shares = torch.bmm(of_result, _taken(v, batch.keys, batch).transpose(1, 2))
                of_products = torch._softmax_backward_data(of_shares, shares, -1, torch.float32)
                of_k.append(_put(torch.bmm(of_products.transpose(1, 2), asked), batch, k))
                of_q.append(_put(torch.bmm(of_products, keys).mul_(ctx.scale), batch, q, query.dtype))
        of_tokens = torch.cat(of_q).index_select(0, layout.of_queries), *(_summed(of, layout) for of in (of_k, of_v))
        of_query, of_key, of_value = (
            found.to(given.dtype).view(len(given), given.shape[2], given.shape[1], -1).transpose(1, 2)
            for found, given in zip(of_tokens, (query, key, value), strict=True)
        )
        return of_query, of_key, of_value, None, None, None


def _by_token(of_all: Tensor, key: Tensor) -> Tensor:
    """(B, heads, L, size) as (B · L, heads of keys, heads that share one, size), which a model's own order is."""
    return of_all.transpose(1, 2).flatten(0, 1).unflatten(1, (key.shape[1], -1))


def _taken(of_tokens: Tensor, places: Tensor, batch: _Batch, *, filling: int | None = None) -> Tensor:
    """(n · heads of keys, tokens of all heads that share one, size) in float32, of a tensor as `_by_token` has it.

    Args:
        filling: what stands in the queries that only fill up; None for whatever their token has.
    """
    taken = of_tokens.index_select(0, places)
    if filling is not None:
        taken.index_fill_(0, batch.filling, filling)
    parts = taken.unflatten(0, (batch.number, -1)).permute(0, 2, 3, 1, 4)
    return parts.to(torch.float32, memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1)


def _put(found: Tensor, batch: _Batch, of_tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The way back: (n · tokens, heads of keys, heads that share one, size), of as many heads as `of_tokens` has."""
    parts = found.view(batch.number, *of_tokens.shape[1:3], -1, found.shape[-1]).permute(0, 3, 1, 2, 4)
    return parts.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)


def _shares(asked: Tensor, keys: Tensor, batch: _Batch) -> Tensor:
    """(n · heads of keys, queries of all heads that share one, K)."""
    products = torch.bmm(asked, keys.transpose(1, 2))
    queries, masked = batch.mask.shape[2:]
    products.view(batch.number, -1, queries, products.shape[-1])[..., -masked:].add_(batch.mask)
    return products.softmax(-1)


def _summed(found: list[Tensor], layout: _Layout) -> Tensor:
    """(B · L, heads of keys, 1, size), of what the keys of each batch have found."""
    of_blocks = torch.cat(found)
    of_tokens = of_blocks.index_select(0, layout.of_keys)
    for tokens, places in layout.earlier:
        of_tokens[tokens] += of_blocks[places]
    if layout.common:
        of_tokens[: layout.common] = 0
        for part, batch in zip(found, layout.batches, strict=True):
            of_batch = part.unflatten(0, (batch.number, -1))[:, : layout.common].sum(0)
            of_tokens[: len(of_batch)] += of_batch  # the first row's first blocks need not have all of it
    return of_tokens


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
