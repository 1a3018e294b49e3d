"""KL divergence between policy and reference, estimated from the sampled tokens or summed over the vocabulary.

The estimators are from Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html),
with samples from the policy and log r = ref_logprobs − logprobs. They take the log-probabilities (B, T) of the sampled
tokens under the policy that sampled them and under the reference, and give (B, T).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.functional.logprobs import check_temperature, in_chunks, log_softmax_at


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = −log r = logprobs − ref_logprobs. Unbiased; a single token's may be negative."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 = ½ (log r)². Biased, never negative."""
    return 0.5 * (ref_logprobs - logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 = (r − 1) − log r. Unbiased, never negative."""
    log_r = ref_logprobs - logprobs
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where a policy starts.
    return torch.expm1(log_r) - log_r


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log r|, "abs" of TRL up to 0.11. Not a KL, but what punishes each token's change."""
    return (ref_logprobs - logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "abs": kl_abs}


class FullKL(NamedTuple):
    """KL over the vocabulary at each position, and what falls out on the way; (N,) each."""

    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor


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
    """
    if hidden.shape != ref_hidden.shape or hidden.shape[:-1] != tokens.shape or tokens.dim() != 1:
        shapes = (tuple(x.shape) for x in (hidden, ref_hidden, tokens))
        raise ValueError("hidden {}, ref_hidden {} and tokens {} do not fit".format(*shapes))
    check_temperature(temperature)

    def of_chunk(hidden: Tensor, ref_hidden: Tensor, tokens: Tensor) -> Tensor:
        log_p = log_softmax_at(lm_head(hidden), temperature)  # (chunk, V)
        with torch.no_grad():
            log_q = log_softmax_at(ref_lm_head(ref_hidden), temperature)
        token = tokens.unsqueeze(1)
        sampled, ref_sampled = (x.gather(1, token).squeeze(1) for x in (log_p, log_q))
        # A token of probability 0 counts nothing, where 0·∞ would be nan.
        log_ratio = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
        return torch.stack([(log_p.exp() * log_ratio).sum(dim=-1), sampled, ref_sampled])

    return FullKL(*in_chunks(of_chunk, hidden, ref_hidden, tokens, chunk_size=chunk_size))


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
