"""What an update of PPO is made from, and what it minimises: shaped scores, a rollout's experience, the loss."""

import math
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit import functional as F
from toolkit.data import Rollout
from toolkit.errors import DataError, RewardError
from toolkit.models import PolicyReading
from toolkit.rewards import Scores
from toolkit.sampling import distinct_share
from toolkit.trainers.ppo_config import PPOConfig

_NOTHING_TO_LEARN = 1e-6  # rounding leaves about as much


class ScoreShaper:
    """Scales, centres and clips scores by what was seen so far, those of this update among it, as TRL up to 0.11 did
    under the same names."""

    def __init__(self, args: PPOConfig):
        self.args, self.moments = args, F.Moments()
        self.scales = args.use_score_scaling or args.score_clip is not None
        self.penalizes = args.missing_eos_penalty is not None or args.short_response_penalty is not None

    def __call__(self, scores: Tensor) -> Tensor:
        """Scaled scores, (B,); remembers those that it is given."""
        args = self.args
        if args.use_score_scaling:
            self.moments = F.update_moments(self.moments, scores)
            centre = self.moments.mean if args.use_score_norm else 0.0
            scores = (scores - centre) / self.moments.std
        return scores if args.score_clip is None else scores.clamp(-args.score_clip, args.score_clip)

    def place(self, scores: Scores, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Scores as the reward gave them; as trained on: scaled, clipped and with penalties; and the share of the
        latter that stands at the last token, all of it unless the reward is dense: (B,) each.

        Raises:
            RewardError: dense scores, with a setting that is for one number a response.
        """
        if isinstance(scores, Tensor):
            shaped = self._penalized(self(scores), rollout)
            return scores, shaped, shaped
        if self.scales:
            wrong = "the reward gives scores within responses (DenseScores), and use_score_scaling and score_clip are "
            raise RewardError(f"{wrong}for one number a response.", remedy="Leave them out, and scale in the reward.")
        at_end = self._penalized(torch.as_tensor(scores.scores), rollout)
        return scores.total, self._penalized(scores.total, rollout), at_end

    def _penalized(self, scores: Tensor, rollout: Rollout) -> Tensor:
        args = self.args
        if args.missing_eos_penalty is not None:
            scores = torch.where(torch.tensor(rollout.ended), scores, scores - args.missing_eos_penalty)
        if args.short_response_penalty is not None:
            short = torch.tensor(rollout.lengths) < args.min_response_length
            scores = torch.where(short, scores - args.short_response_penalty, scores)
        return scores


class Experience(NamedTuple):
    """What an update needs to know about a rollout of B responses of up to T tokens."""

    rollout: Rollout
    response_mask: Tensor  # bool (B, T)
    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor  # (B, T)
    old_values: Tensor  # (B, T)
    scores: Tensor  # (B,), as the reward gave them
    shaped_scores: Tensor  # (B,), as trained on: scaled, clipped and with penalties
    kl: Tensor  # (B, T), by the estimator that was asked for
    rewards: Tensor  # (B, T)
    advantages: Tensor  # (B, T), whitened and weighted
    returns: Tensor  # (B, T)
    sampler_logprobs: Tensor | None = None  # (B, T), of the policy that sampled, in the passes that did

    def of(self, rows: list[int], mask: Tensor) -> "Experience":
        """What a forward pass of some rows is held against, as wide as their mask and on its device."""
        names = ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns")
        held = {name: getattr(self, name)[rows, : mask.shape[1]].to(mask.device) for name in names}
        return self._replace(response_mask=mask, **held)

    def learning_roles(self, rows: list[int]) -> set[str]:
        """The roles whose gradient of these rows is not 0 by right: nothing is learnt from equal advantages, or from
        one alone, which are 0 when whitened, or by a value that is right."""
        errors = {"policy": self.advantages, "value": self.returns - self.old_values}
        mask = self.response_mask[rows]
        return {role for role, error in errors.items() if not error[rows][mask].abs().max() <= _NOTHING_TO_LEARN}


def describe(experience: Experience, *, kl_coef: float, cap: float | None) -> dict[str, float]:
    """Metrics of the rollout and of the critic on it; `cap` is that of the importance weights."""
    mask = experience.response_mask
    kl = experience.kl.masked_fill(~mask, 0.0).sum(dim=1).mean()
    entropy = -experience.old_logprobs.masked_fill(~mask, 0.0).sum(dim=1).mean()
    variance = F.masked_var(experience.returns, mask)
    residual = F.masked_var(experience.returns - experience.old_values, mask)
    lengths = torch.tensor(experience.rollout.lengths, dtype=torch.float32)
    rows = len(experience.rollout)
    # Scores that are alike differ by penalties, and those that differ are alike where they are clipped.
    tied = max(n for of in (experience.scores, experience.shaped_scores) for n in Counter(of.tolist()).values())
    # Of a critic nothing can be explained where all returns are one number.
    explained = {"explained_variance": float(1 - residual / variance)} if variance > 1e-8 else {}
    of_sampler: dict[str, float] = {}
    if (drawn_with := experience.sampler_logprobs) is not None:
        log_weights = (experience.old_logprobs - drawn_with)[mask]
        of_sampler["sampler_gap"] = float(log_weights.abs().mean())
        if cap is not None:
            of_sampler["capped_share"] = float((log_weights > math.log(cap)).float().mean())
    return {
        "score": float(experience.scores.mean()),
        "score_se": F.standard_error(experience.scores),
        "kl": float(kl),
        "rlhf_reward": float(experience.shaped_scores.mean() - kl_coef * kl),
        "length": float(lengths.mean()),
        "eos_share": sum(experience.rollout.ended) / rows,
        "distinct_share": distinct_share(experience.rollout),
        "tied_share": tied / rows if rows > 1 else 0.0,
        "entropy": float(entropy),
        **explained,
        **of_sampler,
    }


def sampler_logprobs(rollout: Rollout, mask: Tensor) -> Tensor | None:
    """What each token was drawn with, float32 (B, T), 0 outside the mask; None where the rollout does not say, or says
    it of other tokens than it has."""
    if list(map(len, rollout.sampler_logprobs)) != rollout.lengths:
        return None
    drawn_with = torch.zeros(mask.shape)
    drawn_with[mask] = torch.tensor([x for row in rollout.sampler_logprobs for x in row], dtype=torch.float32)
    return drawn_with


def importance_weights(logprobs: Tensor, drawn_with: Tensor | None, cap: float) -> Tensor:
    """min(π / π_sampler, cap) of each token, (B, T) as the log-probabilities are.

    Generation rounds in another way than the passes that gradients come from, above all with merged weights in 16 bits:
    truncated importance sampling (Ionides 2008) of rollouts that are, by so much, of another policy.

    Raises:
        DataError: it is not known what the tokens were drawn with.
    """
    if drawn_with is None:
        wrong = "the rollout does not say with which probabilities its tokens were drawn (sampler_logprobs)."
        remedy = "Take rollouts of trainer.generate, or leave it out."
        raise DataError(wrong, field="importance_sampling_cap", remedy=remedy)
    return (logprobs - drawn_with).exp().clamp(max=cap)


def policy_objective(
    args: PPOConfig, reading: PolicyReading, held: Experience, *, kl_coef: float, count: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = L_clip + β · KL(π, π_ref) + α · KL(π_old, π) − c · H(π), each a mean over the tokens of a mini-batch.

    The surrogate is equation 7 of Schulman et al. 2017, arXiv 1707.06347, the entropy bonus that of equation 9, with
    the sign that makes a positive coefficient raise the entropy. KL to the old policy is the penalty of their section
    4, estimated from the tokens that the old policy sampled. KL to the reference as a loss term is that of GRPO, Shao
    et al. 2024, arXiv 2402.03300, equation 4.

    Args:
        args: which terms there are.
        reading: of the policy being trained, with gradient.
        held: what it is held against.
        kl_coef: β, now.
        count: tokens of the mini-batch, of which these are a part.

    Returns:
        The loss, and metrics that add up over the parts of a mini-batch.
    """
    mask, logprobs, old_logprobs = held.response_mask, reading.logprobs, held.old_logprobs

    def mean(values: Tensor) -> Tensor:
        return F.masked_mean(values, mask, count=count)

    limits = {"cliprange": args.cliprange, "cliprange_high": args.cliprange_high}
    clipped = F.clipped_policy_loss(logprobs, old_logprobs, held.advantages, mask, **limits, count=count)
    # The old policy sampled, so that it is the first argument: KL(old policy, new policy).
    approx_kl = mean(F.kl_k3(old_logprobs, logprobs))
    loss, metrics = clipped.loss, {"policy_loss": clipped.loss, "clip_fraction": clipped.clip_fraction}
    metrics |= {"approx_kl": approx_kl, "ratio": mean((logprobs - old_logprobs).exp())}
    if args.kl_penalty_in == "loss":
        full = reading.ref_kl
        kl = mean(F.KL_ESTIMATORS[args.kl_estimator](logprobs, held.ref_logprobs) if full is None else full)
        loss, metrics["kl_loss"] = loss + kl_coef * kl, kl
    if args.old_policy_kl_coef:
        loss = loss + args.old_policy_kl_coef * approx_kl
    if reading.entropy is not None:
        entropy = mean(reading.entropy)
        loss, metrics["token_entropy"] = loss - args.entropy_coef * entropy, entropy
    return loss, metrics
