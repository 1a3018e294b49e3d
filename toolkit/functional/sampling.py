"""Sampling of tokens from numbers that are given."""

import torch
from torch import Tensor

from toolkit.functional.logprobs import check_temperature

#: Tokens in a block: the sum of a block takes one pass over it, a running sum over the vocabulary three, in float64.
BLOCK = 256


def inverse_cdf(logits: Tensor, uniform: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The tokens v with P(u' < v) ≤ u < P(u' ≤ v) under softmax(logits / temperature): (B, V) and (B,) to int64 (B,).

    The second is their probabilities, float32 (B,): NaN where a row had no distribution to draw from, a logit being
    NaN or inf. Two searches: for the block of the vocabulary that u falls into, and within that block. Raises a
    ValueError for a temperature that is not positive.
    """
    check_temperature(temperature)
    logits = logits.float()
    probabilities = (logits if temperature == 1.0 else logits / temperature).softmax(dim=-1)
    missing = -logits.shape[-1] % BLOCK
    if missing:
        probabilities = torch.nn.functional.pad(probabilities, (0, missing))
    blocks = probabilities.view(len(logits), -1, BLOCK)
    sums = blocks.sum(dim=-1).double()
    cumulative = _running_sum(sums)
    sought = _below(uniform.unsqueeze(1) * cumulative[:, -1:], cumulative)
    block = torch.searchsorted(cumulative, sought, right=True).clamp(max=blocks.shape[1] - 1)
    rest = (sought - (cumulative - sums).gather(1, block)).clamp(min=0)  # below 0 by rounding, at the edge of a block
    within = _running_sum(blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double())
    token = torch.searchsorted(within, _below(rest, within), right=True)
    # A row of NaN is searched too, and its token thrown away by who reads the second result.
    tokens = (block * BLOCK + token).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1)


def _running_sum(values: Tensor) -> Tensor:
    """Sums up to and with each of a row (B, N), which never fall."""
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(dim=-1)
    # A running sum has no deterministic kernel on a GPU. Those of a product may be rounded out of order.
    until = torch.ones(values.shape[1], values.shape[1], dtype=values.dtype, device=values.device).triu()
    return (values @ until).cummax(dim=-1).values


def _below(sought: Tensor, cumulative: Tensor) -> Tensor:
    """Below the total whatever is rounded, so that no token of probability 0 is taken at the end."""
    total = cumulative[:, -1:]
    return torch.minimum(sought, total.nextafter(torch.zeros_like(total)))
