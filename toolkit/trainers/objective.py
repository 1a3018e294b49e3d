"""What the policy's update minimises: the clipped surrogate, and the terms that a recipe adds to it."""

from typing import NamedTuple

from torch import Tensor

from toolkit.functional import KL_ESTIMATORS, clipped_policy_loss, kl_k3, masked_mean
from toolkit.models import PolicyReading
from toolkit.trainers.ppo_config import PPOConfig


class PolicyTargets(NamedTuple):
    """What the policy is held against; (B, T) each."""

    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor


def policy_objective(
    args: PPOConfig, reading: PolicyReading, targets: PolicyTargets, *, kl_coef: float, count: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = L_clip + β · KL(π, π_ref) + α · KL(π_old, π) − c · H(π), each a mean over the tokens of a mini-batch.

    The surrogate is equation 7 of Schulman et al. 2017, arXiv 1707.06347, the entropy bonus that of equation 9, with
    the sign that makes a positive coefficient raise the entropy. KL to the old policy is the penalty of their section
    4, estimated from the tokens that the old policy sampled. KL to the reference as a loss term is that of GRPO, Shao
    et al. 2024, arXiv 2402.03300, equation 4.

    Args:
        args: which terms there are.
        reading: of the policy being trained, with gradient.
        targets: constants.
        kl_coef: β, now.
        count: tokens of the mini-batch, of which these are a part.

    Returns:
        The loss, and metrics that add up over the parts of a mini-batch.
    """
    mask = targets.response_mask

    def mean(values: Tensor) -> Tensor:
        return masked_mean(values, mask, count=count)

    clipped = clipped_policy_loss(
        reading.logprobs, targets.old_logprobs, targets.advantages, mask, cliprange=args.cliprange, count=count
    )
    # The old policy sampled, so that it is the first argument: KL(old policy, new policy).
    approx_kl = mean(kl_k3(targets.old_logprobs, reading.logprobs))
    loss = clipped.loss
    metrics = {
        "policy_loss": clipped.loss,
        "clip_fraction": clipped.clip_fraction,
        "approx_kl": approx_kl,
        "ratio": mean((reading.logprobs - targets.old_logprobs).exp()),
    }
    if args.kl_penalty_in == "loss":
        if reading.ref_kl is None:
            kl = mean(KL_ESTIMATORS[args.kl_estimator](reading.logprobs, targets.ref_logprobs))
        else:
            kl = mean(reading.ref_kl)
        loss = loss + kl_coef * kl
        metrics["kl_loss"] = kl
    if args.old_policy_kl_coef:
        loss = loss + args.old_policy_kl_coef * approx_kl
    if reading.entropy is not None:
        entropy = mean(reading.entropy)
        loss = loss - args.entropy_coef * entropy
        metrics["token_entropy"] = entropy
    return loss, metrics
