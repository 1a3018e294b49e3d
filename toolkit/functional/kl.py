"""Estimators of KL(policy ‖ reference) from the sampled tokens' log-probabilities.

All three are from Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html),
with samples from the policy and log r = ref_logprobs − logprobs.
"""

from collections.abc import Callable

import torch
from torch import Tensor


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


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
