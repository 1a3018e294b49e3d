"""The clipped losses of PPO, and the loss of a reward that is trained on pairs at every token.

The Bradley–Terry loss of whole responses is TRL's.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from toolkit.functional.statistics import masked_mean


class ClippedLoss(NamedTuple):
    """A loss and the share of tokens where clipping decides."""

    loss: Tensor  # scalar
    clip_fraction: Tensor  # scalar, detached


def _larger(unclipped: Tensor, clipped: Tensor, mask: Tensor, count: Tensor | float | None) -> ClippedLoss:
    return ClippedLoss(
        masked_mean(torch.maximum(unclipped, clipped), mask, count=count),
        masked_mean((clipped > unclipped).detach().float(), mask, count=count),
    )


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange: float | None,
    cliprange_high: float | None = None,
    count: Tensor | float | None = None,
) -> ClippedLoss:
    """Clipped surrogate objective, negated: mean of max(−A·ratio, −A·clip(ratio, 1 − ε, 1 + ε_high)).

    Schulman et al. 2017, arXiv 1707.06347, equation 7, where ε_high is ε. With two, as in DAPO, Yu et al. 2025, arXiv
    2503.14476, equation 10.

    Args:
        logprobs: (B, T), with gradient; `old_logprobs` and `advantages` are constant.
        response_mask: bool (B, T).
        cliprange: ε; None leaves the ratio as it is.
        cliprange_high: ε_high; None for ε.
        count: divisor of the mean in place of the mask's own token count: see `masked_mean`.
    """
    ratio = torch.exp(torch.where(response_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)))
    unclipped = -advantages * ratio
    if cliprange is None:
        return ClippedLoss(masked_mean(unclipped, response_mask, count=count), unclipped.new_zeros(()))
    high = cliprange if cliprange_high is None else cliprange_high
    clipped = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + high)
    return _larger(unclipped, clipped, response_mask, count)


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
    RLHF with PPO", as value-function clipping. The half is part of it.

    Args:
        values: (B, T), with gradient; `old_values` and `returns` are constant.
        response_mask: bool (B, T).
        cliprange: ε, a distance in units of the return; None gives the plain squared error, ½ · mean of (V − R)².
        count: as for `clipped_policy_loss`.
    """

    def squared(estimates: Tensor) -> Tensor:
        # Masked before the square, whose gradient of what is not finite would be NaN behind the mask, too.
        return torch.where(response_mask, estimates - returns, torch.zeros_like(estimates)).square()

    unclipped = squared(values)
    if cliprange is None:
        return ClippedLoss(0.5 * masked_mean(unclipped, response_mask, count=count), unclipped.new_zeros(()))
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    loss, clip_fraction = _larger(unclipped, squared(clipped_values), response_mask, count)
    return ClippedLoss(0.5 * loss, clip_fraction)


def first_differences(
    chosen_ids: Tensor, rejected_ids: Tensor, *, chosen_ends: Tensor, rejected_ends: Tensor
) -> Tensor:
    """The first position of each pair where the two differ, or where only one of them goes on: int64 (B,).

    Ids are int64 (B, L), padded on the right; ends int64 (B,), the last position that counts. One past that where the
    two are equal.
    """
    positions = torch.arange(chosen_ids.shape[1], device=chosen_ids.device)
    common = torch.minimum(chosen_ends, rejected_ends).unsqueeze(1)  # (B, 1)
    same = (chosen_ids == rejected_ids) & (positions <= common)
    return same.long().cumprod(dim=1).sum(dim=1)


def token_level_preference_loss(
    chosen_values: Tensor,
    rejected_values: Tensor,
    *,
    starts: Tensor,
    chosen_ends: Tensor,
    rejected_ends: Tensor,
    margin: Tensor | float = 0.0,
) -> Tensor:
    """−log σ of the difference of the two values at every token, averaged over a pair's tokens and then over pairs.

    For each pair: 1/(e − s + 1) · Σ_t −log σ(v_chosen[t] − v_rejected[t] − m), t from s, the first position where the
    two differ, to e, the end of the longer one; 0 where they do not differ. The form is that of DeepSpeed-Chat (Yao et
    al. 2023, arXiv 2308.01320) and of its shorter retellings.

    These read whatever the model says of padding where the shorter one is over. Here its last value is held: a
    sequence that has ended keeps its score. The last term of the sum is then the difference of the two scores as PPO
    reads them, and no value depends on padding.

    Args:
        chosen_values: (B, L), the head's output at each token, padded on the right; `rejected_values` likewise.
        starts: int64 (B,), from `first_differences`.
        chosen_ends: int64 (B,), the position where the sequence's score is read; `rejected_ends` likewise.
        margin: m, (B,) or one for all.
    """
    positions = torch.arange(chosen_values.shape[1], device=chosen_values.device).unsqueeze(0)  # (1, L)
    chosen = chosen_values.gather(1, torch.minimum(positions, chosen_ends.unsqueeze(1)))
    rejected = rejected_values.gather(1, torch.minimum(positions, rejected_ends.unsqueeze(1)))
    last = torch.maximum(chosen_ends, rejected_ends).unsqueeze(1)
    counts = (positions >= starts.unsqueeze(1)) & (positions <= last)  # (B, L)
    margins = margin.unsqueeze(1) if isinstance(margin, Tensor) else margin
    losses = torch.where(counts, -logsigmoid(chosen - rejected - margins), 0.0)
    return (losses.sum(dim=1) / counts.sum(dim=1).clamp(min=1)).mean()
