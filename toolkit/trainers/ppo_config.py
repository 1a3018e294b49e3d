"""The configuration of the ppo stage: TRL's, with what it lacks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from transformers.trainer_utils import IntervalStrategy

from toolkit.errors import Problem
from toolkit.functional import ValuePooling
from toolkit.models import fast_precision
from toolkit.settings import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check,
    declared,
    fits,
    setting,
    type_name,
)
from toolkit.trainers.trainer_internals import states_kept
from toolkit.trainers.trl_compat import HAS_PPO, NO_TRL_LOOP, TRLPPOConfig
from toolkit.trainers.unread import given_in_vain, unread_by_ppo, unread_by_trl

GREEDY_ROLLOUTS = Problem(
    "is false: each prompt gets the likeliest tokens alone, so that nothing is explored, and ratio and advantages are "
    "of one deterministic response, not of draws from the policy.",
    "rollout_do_sample",
)
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_LEAST_WHITENED_BY_TRL = 8


def _of_the_value_role(name: str, allowed: Range) -> Any:
    return setting(None, f"The value role's own {name}; null takes {name}.", allowed)


WITHOUT_COPY = {"merged": "eager", "merged_graphs": "graphs"}
"""The same `generation` without a copy of the weights."""


@dataclass
class PPOConfig(TRLPPOConfig):
    """The `PPOConfig` of TRL 1.12 and what it lacks.

    A batch is `per_device_train_batch_size × gradient_accumulation_steps` prompts, which are answered together. The
    rollout of one update is `rollouts_per_update` of them. It is divided into `num_mini_batches`, each of which is one
    optimizer step in each of `num_ppo_epochs` passes. A forward pass of a step takes as many tokens as
    `per_device_train_batch_size` of the longest rows have, hence more rows where they are short. For forward passes
    without gradient the number is `local_rollout_forward_batch_size`. (In TRL 1.12 a step has
    `gradient_accumulation_steps` micro-batches, whatever `num_mini_batches` is: huggingface/trl#5645.)

    Of a script that sets neither `bf16` nor `fp16` the passes are in bfloat16 if the machine computes it fast.

    The number of updates is `max_steps`, or follows from `total_episodes` or `num_train_epochs`.
    """

    loop: Literal["toolkit", "trl"] = setting(
        "toolkit", "Which loop trains: ours, or that of the unmodified trl PPOTrainer.", in_trl_loop=True
    )
    value: Literal["separate", "shared"] = setting(
        "separate",
        "Whether the value role has its own adapter, or is a head on the policy's (one forward pass instead of two, "
        "and the value loss then also trains the policy's adapter).",
        in_trl_loop=True,
    )
    value_pooling: ValuePooling = setting(
        "none",
        "By none each response token has a value of its own; by response_mean all have the mean over the response, "
        "which has seen all of it; by prefix_mean each has the mean up to itself.",
    )
    eval_do_sample: bool = setting(
        False, "Whether evaluation samples at `temperature`, with a fixed seed, or decodes greedily.", in_trl_loop=True
    )
    generation: Literal["eager", "graphs", "merged", "merged_graphs"] = setting(
        "eager",
        "How the responses to learn from are generated. eager: with the layers as they are; on a CPU in float32 with a "
        "merged copy, if it fits into an eighth of the memory. merged: with a copy of the weights that has the adapter "
        "merged in, made for each rollout. graphs, merged_graphs: the same two on a GPU, with CUDA graphs, recorded "
        "for each rollout.",
    )
    importance_sampling_cap: float | None = setting(
        None,
        "Cap of the importance weight of a token's clipped loss: its probability at the start of the update, divided "
        "by the one it was sampled with. null: no weights.",
        POSITIVE,
    )
    rollouts_per_update: int = setting(
        1, "Batches of prompts that are answered and scored before an update, which is over all of them.", AT_LEAST_1
    )
    rollout_do_sample: bool = setting(
        True, "Whether the responses that are trained on are sampled, or decoded greedily, which explores nothing."
    )
    max_length: int | None = setting(
        None, "Tokens of prompt and response together at most; null for the limit of response_length alone.", AT_LEAST_1
    )
    logprob_chunk_size: int = setting(
        128, "Response tokens for which vocabulary-sized logits exist at a time.", AT_LEAST_1, in_trl_loop=True
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = setting(
        "k1",
        "KL(policy, reference) of the penalty: an estimator from the sampled tokens, their absolute log-ratio, or "
        "the full sum over the vocabulary.",
    )
    kl_penalty_in: Literal["reward", "loss"] = setting(
        "reward",
        "Where kl_coef times the KL goes: into each token's reward, or into the policy's loss. In the loss k2 and "
        "full have the gradient of KL(policy, reference), k3 that of KL(reference, policy), abs its own; that of k1 "
        "is 0 on average, and refused.",
    )
    old_policy_kl_coef: float = setting(
        0.0,
        "Weight of KL(policy that sampled, policy being trained) in the policy's loss; of an update with one optimizer "
        "step it is 0 but for dropout.",
        NOT_NEGATIVE,
    )
    update_kl_limit: float | None = setting(
        None, "KL per token of an update (approx_kl) above which its remaining optimizer steps are skipped.", POSITIVE
    )
    entropy_coef: float = setting(
        0.0, "Weight of the entropy bonus: positive keeps the policy's distribution wide.", NOT_NEGATIVE
    )
    cliprange: float | None = setting(
        TRLPPOConfig.cliprange, "The ratio is clipped to 1 ± this; null for no clipping.", POSITIVE
    )
    cliprange_high: float | None = setting(
        None, "The ratio is clipped to 1 + this above, and to 1 − cliprange below; null for cliprange.", POSITIVE
    )
    cliprange_value: float | None = setting(
        TRLPPOConfig.cliprange_value, "Values are clipped to the old value ± this; null for no clipping.", POSITIVE
    )
    whiten_advantages: bool = setting(
        True, "Whether advantages are shifted and scaled to mean 0 and variance 1 over the batch."
    )
    truncated_as: Literal["terminal", "bootstrap"] = setting(
        "terminal",
        "How a response that the length limit cuts is valued: terminal, as if it were over; bootstrap, with the value "
        "role's estimate of what would follow, which a score of the whole response would count twice: only for "
        "scores within responses (DenseScores without scores).",
    )
    use_score_scaling: bool = setting(False, "Divide scores by the standard deviation of all scores so far.")
    use_score_norm: bool = setting(
        False, "Before scaling, subtract the mean of all scores so far.", only_with={"use_score_scaling": True}
    )
    score_clip: float | None = setting(
        None, "Clip scores to plus or minus this, after scaling and before penalties.", POSITIVE
    )
    min_response_length: int = setting(
        1, "Tokens, end included, below which a response is punished or dropped.", AT_LEAST_1
    )
    short_response_penalty: float | None = setting(
        None, "Subtracted from the score of a response shorter than min_response_length.", POSITIVE
    )
    drop_short_responses: bool = setting(
        False, "Leave responses shorter than min_response_length out of the update; dropped_responses counts them."
    )
    value_learning_rate: float | None = _of_the_value_role("learning_rate", NOT_NEGATIVE)
    value_weight_decay: float | None = _of_the_value_role("weight_decay", NOT_NEGATIVE)
    value_adam_beta1: float | None = _of_the_value_role("adam_beta1", BELOW_1)
    value_adam_beta2: float | None = _of_the_value_role("adam_beta2", BELOW_1)
    value_adam_epsilon: float | None = _of_the_value_role("adam_epsilon", NOT_NEGATIVE)
    kl_target: float | None = setting(
        None,
        "Target KL per response, which a controller meets by adjusting the coefficient (kl_coef at first).",
        POSITIVE,
    )
    kl_horizon: int = setting(
        10_000, "Responses over which the adaptive controller changes the coefficient by up to a fifth.", AT_LEAST_1
    )
    early_stopping_patience: int | None = setting(
        None,
        "Evaluations in a row without a better metric_for_best_model after which training ends; with "
        "load_best_model_at_end the best checkpoint comes back.",
        AT_LEAST_1,
    )
    sample_with_replacement: bool = setting(
        False, "Draw prompts with replacement, where otherwise each comes once in a pass over the data."
    )
    rollouts_shown: int = setting(
        4, "Responses of an update that are written to rollouts.jsonl at each logged step.", NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        # TRL sets it to true, on every machine.
        if self.bf16 is None and not self.fp16:  # type: ignore[has-type]
            self.bf16 = fast_precision().dtype == "bfloat16"
        with states_kept():  # of a trainer that there is already
            super().__post_init__()
        check(self, self._conflicts)

    def _conflicts(self) -> Iterator[Problem]:
        size, parts, several = self.update_batch_size, self.num_mini_batches, self.rollouts_per_update > 1
        if size % parts:
            factors = "per_device_train_batch_size × gradient_accumulation_steps" + " × rollouts_per_update" * several
            yield Problem(f"a batch of {size} ({factors}) cannot be divided into {parts}.", "num_mini_batches")
        yield from self._conflicts_of_kl()
        yield from self._conflicts_of_value()
        if self.lr_scheduler_type in BY_METRIC:
            wrong = f"{self.lr_scheduler_type.value} follows a metric; PPO schedules by update count."
            yield Problem(wrong, "lr_scheduler_type", "Take linear, cosine or constant.")
        if self.optim.value.startswith("schedule_free"):
            wrong = f"{self.optim.value} has to be told when it trains, and no loop of PPO does so."
            yield Problem(wrong, "optim", "Take adamw_torch.")
        if self.cliprange_high is not None and self.cliprange is None:
            yield Problem("would have no effect with cliprange null, by which no ratio is clipped.", "cliprange_high")
        if self.importance_sampling_cap is not None and not self.rollout_do_sample:
            yield Problem("needs sampled rollouts (rollout_do_sample: true).", "importance_sampling_cap")
        punished, dropped = self.short_response_penalty is not None, self.drop_short_responses
        if (self.min_response_length > 1) != (punished or dropped):
            wrong = "above 1 it needs short_response_penalty or drop_short_responses, and each of these needs it "
            yield Problem(f"{wrong}above 1.", "min_response_length")
        elif self.min_response_length > self.response_length:
            wrong = f"{self.min_response_length} is more than the {self.response_length} tokens of response_length: "
            yield Problem(f"{wrong}each response would be punished or dropped.", "min_response_length", "Lower it.")
        if punished and dropped:
            yield Problem("would have no effect with drop_short_responses.", "short_response_penalty", "Give one.")
        measured = self.metric_for_best_model is not None and self.eval_strategy != IntervalStrategy.NO
        if self.early_stopping_patience is not None and not measured:
            yield Problem("needs an eval_strategy and metric_for_best_model.", "early_stopping_patience")
        if self.max_steps > 0 and self.total_episodes is not None:
            yield Problem("sets the number of updates, and so does max_steps.", "total_episodes", "Give one.")
        if self.loop == "toolkit":
            yield from given_in_vain(self, UNREAD_BY_PPO)
        else:
            yield from self._beyond_trl() if HAS_PPO else [NO_TRL_LOOP]

    def _conflicts_of_value(self) -> Iterator[Problem]:
        decay = self.weight_decay if self.value_weight_decay is None else self.value_weight_decay
        if self.vf_coef == 0 and not decay:  # which moves the weights by itself
            for name in ("value_learning_rate", "value_adam_beta1", "value_adam_beta2", "value_adam_epsilon"):
                if getattr(self, name) is not None:
                    yield Problem("would have no effect with vf_coef 0.", name)
        if self.value_pooling != "none" and self.truncated_as == "bootstrap":
            wrong = "bootstrap needs the value after the last token, which value_pooling averages."
            yield Problem(wrong, "truncated_as")
        given = self.lr_scheduler_kwargs if isinstance(self.lr_scheduler_kwargs, dict) else {}
        own = self.value_learning_rate not in (None, self.learning_rate)
        for name in [name for name in ("min_lr", "lr_end") if own and name in given]:
            wrong = f"{name} is the policy's final learning rate, and value_learning_rate would end at another."
            remedy = "Take min_lr_rate, a share of each, with cosine_with_min_lr, or leave value_learning_rate out."
            yield Problem(wrong, "lr_scheduler_kwargs", remedy)

    def _conflicts_of_kl(self) -> Iterator[Problem]:
        if self.kl_penalty_in == "loss" and self.kl_estimator == "k1":
            wrong = "loss needs another kl_estimator than k1, whose gradient is 0 on average (Tang and Munos 2025, "
            remedy = "Take k2 or full for KL(policy, reference), or k3 for KL(reference, policy)."
            yield Problem(f"{wrong}arXiv 2506.09477).", "kl_penalty_in", remedy)
        if self.kl_penalty_in == "loss" and self.kl_coef == 0:
            yield Problem("would have no effect with kl_coef 0.", "kl_penalty_in")
        if self.kl_target is not None and self.kl_coef == 0:
            yield Problem("steers by multiplying kl_coef, which starts at 0 and would stay there.", "kl_target")
        if self.kl_target is None and self.kl_horizon != type(self).kl_horizon:
            yield Problem("would have no effect without kl_target.", "kl_horizon")
        if self.update_kl_limit is not None and self.num_ppo_epochs * self.num_mini_batches == 1:
            wrong = "would have no effect: an update has one optimizer step, which is always taken."
            yield Problem(wrong, "update_kl_limit")
        if self.kl_target is not None and 5 * self.kl_horizon <= self.update_batch_size:
            wrong = f"with {self.kl_horizon} the {self.update_batch_size} responses of one update"
            yield Problem(
                f"{wrong} can take kl_coef to 0 and below.", "kl_horizon", "It counts responses: take thousands."
            )

    def _beyond_trl(self) -> Iterator[Problem]:
        """What TRL's own loop does not know: fields and values that are not in its class."""
        known = get_type_hints(TRLPPOConfig)
        for name, ours in declared(type(self)).items():
            value = getattr(self, name)
            if name in known and not fits(value, known[name]):
                yield Problem(f"{type_name(known[name])} is needed with loop: trl, got {value!r}.", name)
            elif name not in known and not ours.in_trl_loop and value != ours.default:
                yield Problem("would have no effect with loop: trl, which has none.", name)
        yield from given_in_vain(self, unread_by_trl(declared(type(self))))
        if self.max_grad_norm not in (0, type(self).max_grad_norm):
            yield Problem("would have no effect with loop: trl, which clips no gradients.", "max_grad_norm")
        rows = self.rollout_batch_size // self.num_mini_batches
        if self.whiten_rewards and rows < _LEAST_WHITENED_BY_TRL:
            wrong = f"needs mini-batches of {_LEAST_WHITENED_BY_TRL} with loop: trl, and they have {rows}."
            yield Problem(wrong, "whiten_rewards")

    @property
    def value_optimizer(self) -> dict[str, Any]:
        """What the optimizer's group of the value role has of its own, by torch's names."""
        beta1, beta2 = self.value_adam_beta1, self.value_adam_beta2
        betas = (self.adam_beta1 if beta1 is None else beta1, self.adam_beta2 if beta2 is None else beta2)
        given = {
            "lr": self.value_learning_rate,
            "weight_decay": self.value_weight_decay,
            "eps": self.value_adam_epsilon,
            "betas": None if beta1 is None and beta2 is None else betas,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def decoding(self) -> dict[str, bool]:
        """`generation`, by the arguments of `SharedBase.generate`."""
        return {"merged": "merged" in self.generation, "graphs": "graphs" in self.generation}

    @property
    def rollout_batch_size(self) -> int:
        """Prompts that are answered together."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def update_batch_size(self) -> int:
        """Prompts of one update."""
        return self.rollout_batch_size * self.rollouts_per_update

    def number_of_updates(self, rows: int) -> int:
        """Updates of a whole run over a data set of `rows` prompts, at least 1."""
        if self.max_steps > 0:
            return self.max_steps
        if self.total_episodes is not None:
            # The last update answers whole batches, which may be more prompts, as in TRL's loop.
            return math.ceil(self.total_episodes / self.update_batch_size)
        # A pass leaves out the rows that do not fill its last batch.
        batches = math.floor(self.num_train_epochs * (rows // self.rollout_batch_size) + 1e-9)  # 0.29 · 100 is 28.99…
        return max(1, batches // self.rollouts_per_update)


UNREAD_BY_PPO = unread_by_ppo(declared(PPOConfig))
"""Fields that our loop does not read, each with the reason."""
