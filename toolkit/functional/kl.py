"""KL divergence between policy and reference, estimated from the sampled tokens or summed over the vocabulary.

The estimators are from Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html),
with samples from the policy and log r = ref_logprobs − logprobs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = −log r = logprobs − ref_logprobs. Unbiased; a single token's may be negative.

    Args:
        logprobs: (B, T) under the policy that sampled the tokens.
        ref_logprobs: (B, T) under the reference.

    Returns:
        (B, T).
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 = ½ (log r)². Biased, never negative. Arguments as for `kl_k1`."""
    return 0.5 * (ref_logprobs - logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 = (r − 1) − log r. Unbiased, never negative. Arguments as for `kl_k1`."""
    log_r = ref_logprobs - logprobs
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where a policy starts.
    return torch.expm1(log_r) - log_r


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log r|, "abs" of TRL up to 0.11. Not a KL, but what punishes each token's change. Arguments as for `kl_k1`."""
    return (ref_logprobs - logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
}


class FullKL(NamedTuple):
    """KL over the vocabulary at each position, and what falls out on the way; (N,) each."""

    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor


def _chunk_full_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    ref_lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    temperature: float,
) -> Tensor:
    log_p = (lm_head(hidden).float() / temperature).log_softmax(dim=-1)  # (chunk, V)
    with torch.no_grad():
        log_q = (ref_lm_head(ref_hidden).float() / temperature).log_softmax(dim=-1)
    token = tokens.unsqueeze(1)
    sampled, ref_sampled = (x.gather(1, token).squeeze(1) for x in (log_p, log_q))
    # A token of probability 0 counts nothing, where 0·∞ would be nan.
    log_ratio = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
    return torch.stack([(log_p.exp() * log_ratio).sum(dim=-1), sampled, ref_sampled])


def full_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    ref_lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
) -> FullKL:
    """KL(policy ‖ reference) = Σ_v p(v) (log p(v) − log q(v)) at each position, in float32.

    This is "full" of TRL up to 0.11 (`kl_penalty="full"`). The two heads run on `chunk_size` positions at a time,
    so that the peak is some 6·chunk_size·V numbers, however many positions there are. Gradients reach `hidden` (and
    what `lm_head` depends on), not the reference; logits are then computed again in the backward pass.

    Args:
        hidden: (N, H), the policy's state before each token.
        ref_hidden: (N, H), the reference's.
        lm_head: maps (N, H) to the policy's logits (N, V).
        ref_lm_head: maps (N, H) to the reference's logits.
        tokens: int64 (N,), the sampled tokens, for their log-probabilities.
        temperature: positive; of both distributions.
        chunk_size: positions for which logits exist at a time.

    Raises:
        ValueError: the shapes do not fit, or the temperature or chunk size is not positive.
    """
    if hidden.shape != ref_hidden.shape or hidden.shape[:-1] != tokens.shape or tokens.dim() != 1:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, ref_hidden {tuple(ref_hidden.shape)} and tokens {tuple(tokens.shape)} "
            "do not fit"
        )
    if temperature <= 0 or chunk_size < 1:
        raise ValueError(f"temperature ({temperature}) and chunk_size ({chunk_size}) must be positive")
    recompute = torch.is_grad_enabled() and hidden.requires_grad
    parts = [torch.empty(3, 0, device=hidden.device)]
    for start in range(0, tokens.numel(), chunk_size):
        part = slice(start, start + chunk_size)
        chunk = hidden[part], ref_hidden[part], lm_head, ref_lm_head, tokens[part], temperature
        parts.append(checkpoint(_chunk_full_kl, *chunk, use_reentrant=False) if recompute else _chunk_full_kl(*chunk))
    return FullKL(*torch.cat(parts, dim=1))


def adapt_kl_coef(kl_coef: float, kl: float, *, target: float, episodes: int, horizon: int) -> float:
    """The next KL coefficient of the adaptive controller: β · (1 + e · episodes / horizon).

    e = clip((KL − target) / target, −0.2, 0.2)    (Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with
    K_β = episodes / horizon as in TRL up to 0.11)

    Args:
        kl_coef: β.
        kl: mean KL of the responses of this update.
        target: KL a response to steer towards; positive.
        episodes: responses of this update.
        horizon: responses over which the coefficient may change by up to a fifth.

    Example:
        >>> adapt_kl_coef(1.0, 12.0, target=6.0, episodes=500, horizon=1000)
        1.1
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * episodes / horizon)
