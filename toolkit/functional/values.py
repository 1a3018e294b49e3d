"""One value for a whole response, or for what is behind each token, in place of a value a token."""

from typing import Literal

import torch
from torch import Tensor

ValuePooling = Literal["none", "response_mean", "prefix_mean"]
VALUE_POOLINGS = ("none", "response_mean", "prefix_mean")


def pool_values(values: Tensor, response_mask: Tensor, pooling: ValuePooling) -> Tensor:
    """Average what a linear value head says over tokens.

    "response_mean" gives every token of a response the mean over all of it, which is what PaLM-rlhf-pytorch's
    `critic_pooled_values` makes of the states before its tokens: the mean of a linear head's outputs is its output for
    the mean state. Such a value has seen the whole response, and is a baseline of the response rather than of a token.
    "prefix_mean" gives each token the mean up to and with itself, and sees nothing of what comes.

    Args:
        values: (B, T), with or without gradient.
        response_mask: bool (B, T).
        pooling: "none" leaves the values as they are.

    Returns:
        (B, T), 0 outside the mask.

    Raises:
        ValueError: no such pooling.

    Example:
        >>> pool_values(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]), "response_mean")
        tensor([[2., 2.]])
        >>> pool_values(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]), "prefix_mean")
        tensor([[1., 2.]])
    """
    if pooling not in VALUE_POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(VALUE_POOLINGS)}, got {pooling!r}")
    if pooling == "none":
        return values
    kept = torch.where(response_mask, values, torch.zeros_like(values))
    if pooling == "response_mean":
        counts = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
        means = (kept.sum(dim=1, keepdim=True) / counts).expand_as(values)
    else:
        # A product in place of a running sum, which has no deterministic kernel on a GPU.
        until = torch.ones(kept.shape[1], kept.shape[1], dtype=kept.dtype, device=kept.device).triu()
        with torch.autocast(kept.device.type, enabled=False):
            means = kept @ until / response_mask.cumsum(dim=1).clamp(min=1)
    return torch.where(response_mask, means, torch.zeros_like(values))
