"""Prompts and responses laid out for a forward pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile

import torch
from torch import Tensor

# Lengths are rounded up to this. Each new shape costs a CPU a compiled kernel, and memory to keep it (measured on
# SmolLM2-135M: resident memory grows by some 20 MB a length); a GPU's matrix units like multiples of 8 too.
LENGTH_MULTIPLE = 8
# What rows share is a multiple of this: each number of tokens that some happen to begin with would be a new shape.
_COMMON_MULTIPLE = 8
_PADDING = 1 / 16  # of a line of packed rows, at the most: lengths are then few


@dataclass(frozen=True)
class Sequences:
    """B prompts with their responses, right-padded to the longest of these B; or packed, one after the other in a line.

    What all packed prompts begin with, such as a chat template's system message, stands in the line once, as part of
    the first row: nothing that comes after it changes what causal attention makes of it.

    Lengths are rounded up to `LENGTH_MULTIPLE`. Every mask comes from the lengths, none from token ids: a checkpoint
    whose pad token is its end-of-sequence token loses nothing.
    """

    input_ids: Tensor  # int64 (B, L), or (1, L) where they are packed: prompt and response without a gap, then padding
    prompt_lengths: Tensor  # int64 (B,), each at least 1
    response_lengths: Tensor  # int64 (B,)
    packed: bool = False
    common_length: int = 0  # of packed rows: tokens of the first that begin all others, fewer than any prompt has

    @classmethod
    def from_ids(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
        *,
        pad_token_id: int,
        device: torch.device | str = "cpu",
        pack: bool = False,
    ) -> "Sequences":
        """Lay out ragged lists of ids; a `ValueError` if they differ in length, or a prompt is empty.

        Args:
            pack: whether to pack them, equally long ones and a single one too: in bfloat16 a padded pass rounds in
                another way, and old and new log-probabilities of a token would differ by that.
        """
        if not all(map(len, prompt_ids)):
            raise ValueError("a prompt needs at least one token")
        rows = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
        common, multiple = 0, LENGTH_MULTIPLE
        if pack:
            common = _common_length(prompt_ids)
            rows = [[*rows[0][:common], *(token for row in rows for token in row[common:])]]
            multiple = max(multiple, 2 ** int(math.log2(max(1, len(rows[0]) * _PADDING))))
        length = -(-max(map(len, rows)) // multiple) * multiple
        return cls(
            torch.tensor([row + [pad_token_id] * (length - len(row)) for row in rows], device=device),
            torch.tensor([len(ids) for ids in prompt_ids], device=device),
            torch.tensor([len(ids) for ids in response_ids], device=device),
            pack,
            common,
        )

    @classmethod
    def from_padded(
        cls, input_ids: Tensor, attention_mask: Tensor, prompt_lengths: Tensor | None = None
    ) -> "Sequences":
        """The real tokens of rows (B, L) that are padded on either side, packed; all prompt, where no lengths (B,) say
        how many are."""
        rows = [ids[real].tolist() for ids, real in zip(input_ids, attention_mask.bool(), strict=True)]
        ends = map(len, rows) if prompt_lengths is None else prompt_lengths.tolist()
        prompts, responses = zip(*((row[:end], row[end:]) for row, end in zip(rows, ends, strict=True)), strict=True)
        return cls.from_ids(prompts, responses, pad_token_id=0, device=input_ids.device, pack=True)

    @cached_property
    def lengths(self) -> Tensor:
        """int64 (B,), tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @cached_property
    def attention_mask(self) -> Tensor:
        """bool (B, L), True everywhere: padding comes last, where causal attention cannot see it.

        A mask that leaves something out would keep a GPU's attention from its fastest kernels; none at all would have
        transformers look for packed rows in the positions.
        """
        return torch.ones_like(self.input_ids, dtype=torch.bool)

    @cached_property
    def lines(self) -> Tensor:
        """int64 (B,), the line of `input_ids` in which each row stands."""
        one = torch.ones_like(self.lengths)
        return one - 1 if self.packed else one.cumsum(0) - 1

    @cached_property
    def starts(self) -> Tensor:
        """int64 (B,), where in its line the first token of each row would stand, were its beginning there: its own
        tokens, those after `common_length`, stand as far from it as in the row."""
        own = self.lengths - self.common_length
        return own.cumsum(0) - own if self.packed else torch.zeros_like(own)

    @cached_property
    def own_starts(self) -> Tensor:
        """int64 (B,), where in its line the first token stands that is of this row alone, or of the first row."""
        starts = self.starts
        return torch.where(starts > 0, starts + self.common_length, starts)

    def places(self, tokens: Tensor) -> Tensor:
        """int64 (B, T), where in its line the tokens of each row stand that are given by their number in it, int64
        (B, T) or (T,)."""
        return torch.where(tokens < self.common_length, tokens, self.starts[:, None] + tokens)

    @cached_property
    def row_lengths(self) -> list[int]:
        """Tokens in the line of each of packed rows, and of the padding after them, which is a row by itself."""
        starts = [*self.own_starts.tolist(), int(self.starts[-1] + self.lengths[-1]), self.input_ids.shape[1]]
        return [end - start for start, end in pairwise(starts) if end > start]

    @cached_property
    def position_ids(self) -> Tensor:
        """int64, as `input_ids`: from 0 in each row; padding stands at the last one of the row before it, since lengths
        are rounded up, and GPT-2's and OPT's positions end."""
        first, last = torch.zeros_like(self.input_ids), torch.zeros_like(self.input_ids)
        begun = self.lines, self.own_starts
        first[begun], last[begun] = self.starts, self.starts + self.lengths - 1
        steps = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return torch.minimum(steps, last.cummax(dim=1).values) - first.cummax(dim=1).values

    @cached_property
    def response_mask(self) -> Tensor:
        """bool (B, T), True at the tokens of the response; T is the longest response of the batch."""
        steps = torch.arange(int(self.response_lengths.max()), device=self.input_ids.device)
        return steps < self.response_lengths[:, None]

    @cached_property
    def response_places(self) -> tuple[Tensor, Tensor]:
        """int64 (N,) twice, the row and the number in its response of each real response token, a row after the other.

        How many there are a card has to be asked: whoever needs this asks before a pass, not behind it.
        """
        rows, steps = self.response_mask.nonzero(as_tuple=True)
        return rows, steps

    @cached_property
    def _response_tokens_at(self) -> tuple[Tensor, Tensor]:
        """int64 (N,) twice, the line of each real response token and its place there."""
        rows, steps = self.response_places  # after the prompt, which is longer than what all begin with
        return self.lines[rows], self.starts[rows] + self.prompt_lengths[rows] + steps

    @property
    def predicting(self) -> tuple[Tensor, Tensor]:
        """int64 (N,) twice, the line and the place of the token from whose state each real response token is
        predicted, a row after the other; to be asked for as `response_places`."""
        lines, places = self._response_tokens_at
        return lines, places - 1

    @cached_property
    def response_tokens(self) -> Tensor:
        """int64 (N,), the real tokens of all responses, a row after the other."""
        return self.input_ids[self._response_tokens_at]

    def of_responses(self, values: Tensor) -> Tensor:
        """Values (N,) of the real response tokens as (B, T), 0 outside `response_mask`; the gradient is a lookup, for
        which a card is asked nothing."""
        whole = torch.zeros(self.response_mask.shape, dtype=values.dtype, device=values.device)
        return whole.index_put(self.response_places, values)


def _common_length(prompt_ids: Sequence[Sequence[int]]) -> int:
    """How many tokens at their beginning several prompts share, but for the last one of each."""
    if len(prompt_ids) == 1:
        return 0
    before_last = zip(*(ids[:-1] for ids in prompt_ids), strict=False)
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, before_last))
    return shared // _COMMON_MULTIPLE * _COMMON_MULTIPLE
