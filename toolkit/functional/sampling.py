"""Sampling of tokens from numbers that are given."""

import torch
from torch import Tensor


def inverse_cdf(logits: Tensor, uniform: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The tokens v with P(u' < v) ≤ u < P(u' ≤ v) under softmax(logits / temperature): (B, V) and (B,) to int64 (B,).

    The second is whether a row had a distribution to draw from: bool (B,), False where a logit was NaN or inf.
    """
    cumulative = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total whatever is rounded, so that no token of probability 0 is taken at the end.
    sought = torch.minimum(uniform.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, sought, right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[-1] - 1), total.squeeze(1).isfinite()
