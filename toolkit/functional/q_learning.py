"""Q-learning over tokens: targets, losses and the policy that Q-values define.

Chebotar et al. 2023, "Q-Transformer", arXiv 2309.10150, divide an action into dimensions and let each be a step of
Q-learning. A response is such an action and its tokens are the dimensions: a state s_t is the prompt with the tokens
before t, and `Q(s_t, v)` is what can still be had after token v at best. Two masks say what a batch holds:

    response_mask   True at each token that was taken
    reward_mask     True at each token after which a reward was given, be it positive, negative or zero

Where a reward is given an action is over and time goes on (γ); where none is, it goes on within the action (no
discount). A reward at the last token alone is thus never discounted, and one at every token is the usual return.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.functional.advantages import next_values
from toolkit.functional.logprobs import check_temperature, in_chunks
from toolkit.functional.statistics import masked_mean


def bounded_q(logits: Tensor, scale: Tensor, bias: Tensor, *, lowest: float, highest: float) -> Tensor:
    """Q-values between the bounds of all returns: lowest + (highest − lowest) · σ(scale · logits + bias), in float32.

    Logits of any shape; scale and bias are scalars.

    Example:
        >>> bounded_q(torch.zeros(1), torch.tensor(1.0), torch.tensor(0.0), lowest=-1.0, highest=3.0)
        tensor([1.])
    """
    return lowest + (highest - lowest) * torch.sigmoid(scale * logits.float() + bias)


def _steps(rewards: Tensor, reward_mask: Tensor, response_mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """What each token brings by itself, and the factor of what comes after it; (B, T) each, 0 outside the mask."""
    if not rewards.shape == reward_mask.shape == response_mask.shape:
        shapes = (tuple(x.shape) for x in (rewards, reward_mask, response_mask))
        raise ValueError("rewards {}, reward_mask {} and response_mask {} differ in shape".format(*shapes))
    rewards, zero = rewards.float(), torch.zeros_like(rewards, dtype=torch.float32)
    given = reward_mask & response_mask
    discounts = torch.where(given, torch.full_like(zero, gamma), torch.ones_like(zero))
    return torch.where(given, rewards, zero), torch.where(response_mask, discounts, zero)


def q_targets(
    state_values: Tensor,
    rewards: Tensor,
    reward_mask: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    n_steps: int = 1,
    final_values: Tensor | None = None,
) -> Tensor:
    """What Q(s_t, a_t) is to become: float32 (B, T), 0 outside the mask.

        y_t = max_v Q̄(s_{t+1}, v)              where no reward is given at t
        y_t = r_t + γ · max_v Q̄(s_{t+1}, v)    where one is

    Chebotar et al. 2023, arXiv 2309.10150, equation 1; Q̄ is the target network. With n_steps = n the data's own
    tokens are followed for n steps before the maximum is taken (their n-step returns over action dimensions):

        y⁽¹⁾ = y,   y⁽ⁿ⁾_t = r_t + d_t · y⁽ⁿ⁻¹⁾_{t+1},   d_t = γ; and r_t = 0, d_t = 1 where no reward is given

    After the last token of a response there is nothing: the target there is its reward alone, or 0 without one.

    Args:
        state_values: (B, T), max_v Q̄(s_t, v) before each token.
        rewards: (B, T), read where `reward_mask` is True.
        reward_mask: bool (B, T), True where a reward was given.
        response_mask: bool (B, T), True from the first token to the last without a gap.
        gamma: γ in [0, 1].
        n_steps: n, at least 1.
        final_values: (B,), max_v Q̄ after the last token for responses that were only cut off, 0 for those that ended;
            None for all 0.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}")
    gained, discounts = _steps(rewards, reward_mask, response_mask, gamma)
    targets = state_values.float()
    for _ in range(min(n_steps, targets.shape[1])):
        targets = gained + discounts * next_values(targets, response_mask, final_values)
    return targets


def monte_carlo_returns(
    rewards: Tensor, reward_mask: Tensor, response_mask: Tensor, *, gamma: float, cut: Tensor | None = None
) -> Tensor:
    """What the response went on to get from each token on: G_t = r_t + d_t · G_{t+1}, discounted as in `q_targets`.

    Whoever acts at his best gets no less on average, so that max(y_t, G_t) is a better target while Q̄ is still far
    off (Chebotar et al. 2023, section 4.3). Where rewards are random the bound is that of each sample, and the maximum
    is above the mean. Arguments as for `q_targets`, but `cut`: bool (B,), True where a response was only cut off and
    what would have come is not known; None for none.

    Gives float32 (B, T), 0 outside the mask; −∞, which bounds nothing, in rows that were cut.
    """
    gained, discounts = _steps(rewards, reward_mask, response_mask, gamma)
    following, backwards = torch.zeros_like(gained[:, 0]), []
    for t in reversed(range(gained.shape[1])):
        following = gained[:, t] + discounts[:, t] * following
        backwards.append(following)
    returns = torch.stack(backwards[::-1], dim=1)
    return returns if cut is None else returns.masked_fill(cut.unsqueeze(1) & response_mask, -torch.inf)


def td_loss(q: Tensor, targets: Tensor, response_mask: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """½ · mean of (Q(s_t, a_t) − y_t)², (B, T) each; `count` as for `masked_mean`.

    The first term of equation 2 of arXiv 2309.10150. Q has the gradient, targets are constant.
    """
    # Masked before the square, whose gradient of what is not finite would be NaN behind the mask, too.
    off = torch.where(response_mask, q - targets, torch.zeros_like(q))
    return 0.5 * masked_mean(off.square(), response_mask, count=count)


def conservative_loss(excess: Tensor, response_mask: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """½ · mean over tokens of the mean over the actions not taken of (Q(s_t, v) − lowest)².

    The second term of equation 2 of arXiv 2309.10150, where actions are drawn with a probability proportional to
    1 − π_β(v | s): with one action taken in each sample of a state, that is each of the others alike. The mean over
    those actions is `excess` (B, T), from `token_q_values`, with gradient.
    """
    return 0.5 * masked_mean(excess, response_mask, count=count)


def token_q_values(
    hidden: Tensor, q_head: Callable[[Tensor], Tensor], tokens: Tensor, *, lowest: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Q(s, a) at `tokens`, and their excess Σ_{v ≠ a} (Q(s, v) − lowest)² / (V − 1): float32 (N,) each.

    The head runs on `chunk_size` positions at a time and its outputs are computed again in the backward pass, so that
    the peak is some 3·chunk_size·V numbers however long the responses are.

    Args:
        hidden: (N, H), the state before each token.
        q_head: maps (N, H) to Q-values (N, V), V at least 2. What it depends on must be the same in the backward pass.
        tokens: int64 (N,).
        lowest: what the Q-values of the other actions are compared with.
        chunk_size: positions for which Q-values of the whole vocabulary exist at a time.
    """
    if hidden.shape[:-1] != tokens.shape or tokens.dim() != 1:
        raise ValueError(f"hidden {tuple(hidden.shape)} and tokens {tuple(tokens.shape)} do not fit")

    def of_chunk(hidden: Tensor, tokens: Tensor) -> Tensor:
        values, token = q_head(hidden).float(), tokens.unsqueeze(-1)  # (chunk, V), (chunk, 1)
        others = (values - lowest).scatter(-1, token, 0.0)
        excess = others.square().sum(dim=-1) / (values.shape[-1] - 1)
        return torch.stack([values.gather(-1, token).squeeze(-1), excess])

    q, excess = in_chunks(of_chunk, hidden, tokens, chunk_size=chunk_size)
    return q, excess


def best_q_values(hidden: Tensor, q_head: Callable[[Tensor], Tensor], *, chunk_size: int = 128) -> Tensor:
    """max_v Q(s, v) at each state, in float32: (N,). Arguments as for `token_q_values`."""
    return in_chunks(lambda chunk: q_head(chunk).float().amax(dim=-1), hidden, chunk_size=chunk_size)


def q_policy_logprobs(q: Tensor, ref_logprobs: Tensor, *, temperature: float) -> Tensor:
    """log π(v | s) with π ∝ π_ref · exp((Q − V) / τ), float32 (..., V): likely under the reference, and good by Q.

    V(s) = Σ_v π_ref(v | s) Q(s, v), so that Q − V is the advantage over the reference. This is the decoding of Snell et
    al. 2022, "Offline RL for Natural Language Generation with Implicit Language Q Learning", arXiv 2206.11871, with
    β = 1/τ and an expectile in V's place. Within one state V is a constant, and falls out when π is normalised:
    whichever V is taken, and none, π is the same. π maximises the mean of Q − τ · KL(π, π_ref) in each state.

    Args:
        q: (..., V).
        ref_logprobs: (..., V), normalised.
        temperature: τ, positive. Small values follow Q, large ones the reference.

    Example:
        >>> ref = torch.tensor([0.5, 0.5]).log()
        >>> q_policy_logprobs(torch.tensor([1.0986, 0.0]), ref, temperature=1.0).exp()  # 1.0986 = ln 3
        tensor([0.7500, 0.2500])
    """
    check_temperature(temperature)
    q, ref_logprobs = q.float(), ref_logprobs.float()
    value = (ref_logprobs.exp() * q).sum(dim=-1, keepdim=True)
    return (ref_logprobs + (q - value) / temperature).log_softmax(dim=-1)
