"""The clipped losses of PPO."""

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.functional.statistics import masked_mean


class ClippedLoss(NamedTuple):
    """A loss and how much of it was clipped."""

    loss: Tensor  # scalar
    clip_fraction: Tensor  # scalar, detached


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange: float | None,
    count: Tensor | float | None = None,
) -> ClippedLoss:
    """Clipped surrogate objective, negated: mean of max(−A·ratio, −A·clip(ratio, 1 − ε, 1 + ε)).

    Schulman et al. 2017, arXiv 1707.06347, equation 7.

    Args:
        logprobs: (B, T), with gradient.
        old_logprobs: (B, T), constant.
        advantages: (B, T), constant.
        response_mask: bool (B, T).
        cliprange: ε; None leaves the ratio as it is.
        count: divisor of the mean in place of the mask's own token count: see `masked_mean`.

    Returns:
        The loss, and the share of tokens where clipping decides.
    """
    ratio = torch.exp(torch.where(response_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)))
    unclipped = -advantages * ratio
    if cliprange is None:
        return ClippedLoss(masked_mean(unclipped, response_mask, count=count), unclipped.new_zeros(()))
    clipped = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    return ClippedLoss(
        masked_mean(torch.maximum(unclipped, clipped), response_mask, count=count),
        masked_mean((clipped > unclipped).detach().float(), response_mask, count=count),
    )


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange: float | None,
    count: Tensor | float | None = None,
) -> ClippedLoss:
    """Clipped value loss: ½ · mean of max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²).

    From OpenAI's baselines `ppo2`; described in Huang et al. 2024, "The N+ Implementation Details of
    RLHF with PPO", as value-function clipping. The half is part of it. ε is a distance in units of the return, not a
    share of the old value.

    Args:
        values: (B, T), with gradient.
        old_values: (B, T), constant.
        returns: (B, T), constant.
        response_mask: bool (B, T).
        cliprange: ε, in units of the return; None gives the plain squared error, ½ · mean of (V − R)².
        count: as for `clipped_policy_loss`.

    Returns:
        The loss, and the share of tokens where clipping decides.
    """
    unclipped = (values - returns).square()
    if cliprange is None:
        return ClippedLoss(0.5 * masked_mean(unclipped, response_mask, count=count), unclipped.new_zeros(()))
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    clipped = (clipped_values - returns).square()
    return ClippedLoss(
        0.5 * masked_mean(torch.maximum(unclipped, clipped), response_mask, count=count),
        masked_mean((clipped > unclipped).detach().float(), response_mask, count=count),
    )
