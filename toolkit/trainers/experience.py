"""A scored rollout with all that an update needs to know about it."""

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.data import Rollout
from toolkit.functional import masked_var, standard_error


class RolesOnRollout(NamedTuple):
    """What the roles say about a rollout, float32 (B, T) each; zeros where something was not asked for."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    full_kl: Tensor


class Experience(NamedTuple):
    """What an update needs to know about a rollout of B responses of up to T tokens."""

    rollout: Rollout
    response_mask: Tensor  # bool (B, T)
    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor  # (B, T)
    old_values: Tensor  # (B, T)
    scores: Tensor  # (B,), as the reward gave them
    shaped_scores: Tensor  # (B,), as trained on: scaled, clipped and with the penalties that ppo says
    kl: Tensor  # (B, T), as ppo.kl_estimator says
    rewards: Tensor  # (B, T)
    advantages: Tensor  # (B, T), whitened
    returns: Tensor  # (B, T)


def describe(experience: Experience, *, kl_coef: float) -> dict[str, float]:
    """Metrics of the rollout and of the critic on it."""
    mask = experience.response_mask
    kl = experience.kl.masked_fill(~mask, 0.0).sum(dim=1).mean()
    entropy = -experience.old_logprobs.masked_fill(~mask, 0.0).sum(dim=1).mean()
    variance = masked_var(experience.returns, mask)
    residual = masked_var(experience.returns - experience.old_values, mask)
    lengths = torch.tensor(experience.rollout.lengths, dtype=torch.float32)
    return {
        "score": float(experience.scores.mean()),
        "score_se": standard_error(experience.scores),
        "kl": float(kl),
        "rlhf_reward": float(experience.shaped_scores.mean() - kl_coef * kl),
        "length": float(lengths.mean()),
        "eos_share": sum(experience.rollout.ended) / len(experience.rollout),
        "entropy": float(entropy),
        "explained_variance": float(1 - residual / variance.clamp(min=1e-8)),
    }
