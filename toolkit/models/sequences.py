"""Prompts and responses laid out for a forward pass, and the memory that passes of all sizes leave."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

# Lengths are rounded up to this. Each new shape costs a CPU a compiled kernel, and memory to keep it (measured on
# SmolLM2-135M: resident memory grows by some 20 MB a length); a GPU's matrix units like multiples of 8 too.
LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class Sequences:
    """B prompts with their responses, right-padded to the longest of these B, rounded up to `LENGTH_MULTIPLE`.

    Every mask comes from the lengths, none from token ids: a checkpoint whose pad token is its end-of-sequence token
    loses nothing.
    """

    input_ids: Tensor  # int64 (B, L), prompt and response without a gap, then padding
    prompt_lengths: Tensor  # int64 (B,), each at least 1
    response_lengths: Tensor  # int64 (B,)

    @classmethod
    def from_ids(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
        *,
        pad_token_id: int,
        device: torch.device | str = "cpu",
    ) -> "Sequences":
        """Lay out ragged lists of ids; a `ValueError` if they differ in length, or a prompt is empty."""
        if not all(map(len, prompt_ids)):
            raise ValueError("a prompt needs at least one token")
        rows = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
        longest = -(-max(map(len, rows)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        return cls(
            torch.tensor([row + [pad_token_id] * (longest - len(row)) for row in rows], device=device),
            torch.tensor([len(ids) for ids in prompt_ids], device=device),
            torch.tensor([len(ids) for ids in response_ids], device=device),
        )

    @property
    def lengths(self) -> Tensor:
        """int64 (B,), tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def attention_mask(self) -> Tensor:
        """bool (B, L), True everywhere: padding comes last, where causal attention cannot see it.

        A mask that leaves something out would keep a GPU's attention from its fastest kernels; none at all would have
        transformers look for packed rows in the positions.
        """
        return torch.ones_like(self.input_ids, dtype=torch.bool)

    @property
    def position_ids(self) -> Tensor:
        """int64 (B, L), positions from 0; padding stands at its row's last one, since lengths are rounded up, and
        GPT-2's and OPT's positions end."""
        steps = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return torch.minimum(steps.expand_as(self.input_ids), self.lengths[:, None] - 1)

    @property
    def response_mask(self) -> Tensor:
        """bool (B, T), True at the tokens of the response; T is the longest response of the batch."""
        return self._response_steps < self.response_lengths[:, None]

    @property
    def response_positions(self) -> Tensor:
        """int64 (B, T), where in a row each response token stands; outside the mask, the row's last token."""
        return torch.minimum(self.prompt_lengths[:, None] + self._response_steps, self.lengths[:, None] - 1)

    @property
    def _response_steps(self) -> Tensor:
        return torch.arange(int(self.response_lengths.max()), device=self.input_ids.device)

    @property
    def response_tokens(self) -> Tensor:
        """int64 (N,), the real tokens of all responses, a row after the other."""
        return self.input_ids.gather(1, self.response_positions)[self.response_mask]


def release_memory() -> None:
    """Return freed memory to the system, where the C library would keep it.

    Activations of one micro-batch after another are of all sizes; glibc keeps what they leave, and the peak grows
    over a run. On a GPU PyTorch's own cache serves better, and nothing is done.
    """
    if not torch.cuda.is_available():
        with suppress(OSError, AttributeError, TypeError):  # glibc has it, other C libraries do not
            ctypes.CDLL(None).malloc_trim(0)
