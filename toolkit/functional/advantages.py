"""From one score a response to a reward a token, and from rewards and values to advantages."""

from typing import Literal, get_args

import torch
from torch import Tensor

ValuePooling = Literal["none", "response_mean", "prefix_mean"]
VALUE_POOLINGS = get_args(ValuePooling)


def _at_last(response_mask: Tensor) -> Tensor:
    """1 at the last response token of each row, 0 elsewhere: int64 (B, T)."""
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, -1).argmax(dim=1)  # (B,)
    return torch.nn.functional.one_hot(last, response_mask.shape[1]) * response_mask


def next_values(values: Tensor, response_mask: Tensor, final_values: Tensor | None) -> Tensor:
    """Values (B, T) of the states after each token; after the last one 0, or `final_values` (B,)."""
    kept = torch.where(response_mask, values, torch.zeros_like(values))
    following = torch.cat([kept[:, 1:], torch.zeros_like(kept[:, :1])], dim=1)
    return following if final_values is None else following + _at_last(response_mask) * final_values.unsqueeze(1)


def shape_rewards(
    scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float, token_scores: Tensor | None = None
) -> Tensor:
    """Rewards (B, T) a token: −kl_coef · KL at every response token, plus the score at the last one; 0 elsewhere.

    r_t = −β · KL_t + 1[t = last] · score    (Ziegler et al. 2019, arXiv 1909.08593, equation 2, with the
    KL penalty given token by token as in Stiennon et al. 2020, arXiv 2009.01325.)

    The last response token is the end-of-sequence token where there is one. TRL puts the score one
    position further for responses that end early, where no action was taken.

    Args:
        scores: (B,).
        kl: (B, T), an estimate for each token.
        response_mask: bool (B, T), with at least one True in each row.
        kl_coef: β.
        token_scores: (B, T), what a dense reward gives at each token besides.

    Raises:
        ValueError: an empty response, or scores of another shape, such as (B, 1).

    Example:
        >>> shape_rewards(torch.tensor([1.0]), torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]]), kl_coef=0.2)
        tensor([[-0.1000,  0.9000]])
    """
    if scores.shape != response_mask.shape[:1]:
        raise ValueError(f"scores have shape {tuple(scores.shape)}, and ({len(response_mask)},) is needed")
    empty = (~response_mask.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"responses {empty} are empty; a score needs at least one token to stand at")
    at_each = -kl_coef * kl if token_scores is None else token_scores - kl_coef * kl
    rewards = torch.where(response_mask, at_each, torch.zeros_like(kl))
    return rewards + _at_last(response_mask) * scores.to(kl.dtype).unsqueeze(1)


def pool_values(values: Tensor, response_mask: Tensor, pooling: ValuePooling) -> Tensor:
    """Values (B, T) as they are if "none"; else averages over tokens of what a linear head says, 0 outside the mask.

    "response_mean" gives every token of a response the mean over all of it, which is what PaLM-rlhf-pytorch's
    `critic_pooled_values` makes of the states before its tokens: the mean of a linear head's outputs is its output for
    the mean state. Such a value has seen the whole response, and is a baseline of the response rather than of a token.
    "prefix_mean" gives each token the mean up to and with itself, and sees nothing of what comes.
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


def generalized_advantage_estimation(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages, not whitened, and returns of one episode a row; (B, T) each, 0 outside the mask.

    δ_t = r_t + γ V_{t+1} − V_t,   A_t = Σ_{k≥0} (γλ)^k δ_{t+k},   returns = A + V

    Schulman et al. 2016, arXiv 1506.02438, equations 11 and 16. `values[:, t]` is the estimate before
    token t is chosen. After the last response token the value is 0, the episode being over, or `final_values` where
    it was only cut off (Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv 1712.00378).

    Args:
        rewards: (B, T).
        values: (B, T).
        response_mask: bool (B, T), True from the first response token to the last without a gap.
        gamma: discount γ in [0, 1].
        lam: λ in [0, 1]; 1 gives the Monte-Carlo return minus the value.
        final_values: (B,), estimates after the last response token, 0 for episodes that are over; None for all 0.
    """
    zero = torch.zeros_like(values)
    values = torch.where(response_mask, values, zero)
    rewards = torch.where(response_mask, rewards, zero)
    # (B, T), 0 outside the mask
    deltas = rewards + gamma * next_values(values, response_mask, final_values) - values
    advantage, backwards = zero[:, 0], []
    for t in reversed(range(values.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        backwards.append(advantage)
    # Before a response that begins later in its row the last advantage goes on backwards.
    advantages = torch.where(response_mask, torch.stack(backwards[::-1], dim=1), zero)
    return advantages, advantages + values
