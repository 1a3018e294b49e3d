"""Generalised advantage estimation."""

import torch
from torch import Tensor


def generalized_advantage_estimation(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one episode a row.

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

    Returns:
        advantages (B, T), not whitened, and returns (B, T), both 0 outside the mask.

    Example:
        >>> a, r = generalized_advantage_estimation(
        ...     torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]]), gamma=1.0, lam=1.0
        ... )
        >>> a, r
        (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))
    """
    zero = torch.zeros_like(values)
    values = torch.where(response_mask, values, zero)
    rewards = torch.where(response_mask, rewards, zero)
    next_values = torch.cat([values[:, 1:], zero[:, :1]], dim=1)
    if final_values is not None:
        positions = torch.arange(values.shape[1], device=values.device)
        last = torch.where(response_mask, positions, -1).argmax(dim=1)  # (B,)
        at_last = torch.nn.functional.one_hot(last, values.shape[1]) * response_mask
        next_values = next_values + at_last * final_values.unsqueeze(1)
    deltas = rewards + gamma * next_values - values  # (B, T), 0 outside the mask
    advantage = zero[:, 0]
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        reversed_advantages.append(advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values
