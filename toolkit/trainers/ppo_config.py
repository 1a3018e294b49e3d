"""The configuration of the ppo stage: TRL's, with what it lacks, less what would be ignored."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from transformers.trainer_utils import IntervalStrategy
from trl.experimental.ppo import PPOConfig as TRLPPOConfig

from toolkit.functional import KL_ESTIMATORS, VALUE_POOLINGS

# What our loop reads. Everything else that PPOConfig inherits would be ignored by it, and is refused.
HONOURED = frozenset(
    {
        # the run and the machine
        "output_dir",
        "run_name",
        "report_to",
        "project",
        "seed",
        "data_seed",
        "full_determinism",
        "use_cpu",
        "disable_tqdm",
        "log_level",
        # batches and the number of updates
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "num_mini_batches",
        "num_train_epochs",
        "max_steps",
        "total_episodes",
        "rollouts_per_update",
        "num_ppo_epochs",
        "local_rollout_forward_batch_size",
        # the optimizer
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "optim",
        "optim_args",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        # precision and memory
        "bf16",
        "fp16",
        "tf32",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        # logging, evaluation, saving
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "eval_strategy",
        "eval_steps",
        "eval_on_start",
        "eval_delay",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "dataloader_num_workers",
        # PPO
        "response_length",
        "max_length",
        "temperature",
        "missing_eos_penalty",
        "whiten_rewards",
        "kl_coef",
        "kl_estimator",
        "cliprange",
        "cliprange_value",
        "vf_coef",
        "gamma",
        "lam",
        # ours
        "kl_penalty_in",
        "old_policy_kl_coef",
        "update_kl_limit",
        "entropy_coef",
        "whiten_advantages",
        "truncated_as",
        "early_stopping_patience",
        "use_score_scaling",
        "use_score_norm",
        "score_clip",
        "min_response_length",
        "short_response_penalty",
        "drop_short_responses",
        "value_learning_rate",
        "value_weight_decay",
        "value_adam_beta1",
        "value_adam_beta2",
        "value_adam_epsilon",
        "loop",
        "value",
        "value_pooling",
        "eval_do_sample",
        "rollout_do_sample",
        "logprob_chunk_size",
        "kl_target",
        "kl_horizon",
        "sample_with_replacement",
    }
)

# Why some of the others are refused, where "our loop does not read it" would not help.
INSTEAD = {
    "sft_model_path": "the base is base.model",
    "reward_model_path": "the reward role is trained by the reward stage, or loaded with start.reward",
    "batch_size": "a batch is per_device_train_batch_size × gradient_accumulation_steps",
    "local_batch_size": "a batch is per_device_train_batch_size × gradient_accumulation_steps",
    "mini_batch_size": "a mini-batch is the batch divided by num_mini_batches",
    "local_mini_batch_size": "a mini-batch is the batch divided by num_mini_batches",
    "micro_batch_size": "a micro-batch is per_device_train_batch_size",
    "num_total_batches": "the number of updates is max_steps",
    "model_adapter_name": "the policy's adapter is adapters.policy",
    "ref_adapter_name": "the reference is chosen by where the policy starts",
    "stop_token": "responses stop at any end of sequence that the tokenizer or the checkpoint names",
    "stop_token_id": "responses stop at any end of sequence that the tokenizer or the checkpoint names",
    "num_sample_generations": "samples are written before and after training",
    "resume_from_checkpoint": "to resume is no part of a recipe: give RESUME=1 (--resume)",
}

# What a user of other generation code looks for, and why it is not to be had here. No fields: nothing could read them.
_TRUNCATES = (
    "is refused: the tokens that it keeps are those of the policy which samples, so that the new policy's ratio and "
    "the KL to the reference would be of other distributions than the one sampled from. Lower ppo.temperature instead, "
    "which all of them follow"
)
NOT_OFFERED = {
    "top_k": _TRUNCATES,
    "top_p": _TRUNCATES,
    "min_p": _TRUNCATES,
    "repetition_penalty": "is refused: it changes the distribution that is sampled, and not the log-probabilities that "
    "are trained. Punish repetition in the reward instead (scorer.kind: function)",
    "max_new_tokens": "is named response_length, as in TRL",
}

GREEDY_ROLLOUTS = (
    "ppo.rollout_do_sample is false: each prompt gets the likeliest tokens alone, so that nothing is explored, and "
    "ratio and advantages are of one deterministic answer, not of draws from the policy."
)

_OF_THE_VALUE_ROLE = (
    "value_learning_rate",
    "value_weight_decay",
    "value_adam_beta1",
    "value_adam_beta2",
    "value_adam_epsilon",
)
_RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "positive": (
        lambda value: value > 0,
        (
            "temperature", "cliprange", "cliprange_value", "update_kl_limit", "score_clip", "kl_target",
            "missing_eos_penalty", "short_response_penalty",
        ),
    ),
    "0 or more": (
        lambda value: value >= 0,
        ("kl_coef", "old_policy_kl_coef", "entropy_coef", "vf_coef", *_OF_THE_VALUE_ROLE),
    ),
    "at least 1": (
        lambda value: value >= 1,
        (
            "response_length", "max_length", "min_response_length", "num_ppo_epochs", "num_mini_batches",
            "rollouts_per_update", "logprob_chunk_size", "kl_horizon", "early_stopping_patience", "total_episodes",
        ),
    ),
    "between 0 and 1": (lambda value: 0 <= value <= 1, ("gamma", "lam")),
}  # fmt: skip
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_WORDS = {
    "kl_estimator": (*KL_ESTIMATORS, "full"),
    "kl_penalty_in": ("reward", "loss"),
    "loop": ("toolkit", "trl"),
    "truncated_as": ("terminal", "bootstrap"),
    "value": ("separate", "shared"),
    "value_pooling": VALUE_POOLINGS,
}

# Terms and treatments that TRL's loop has no place for.
_NOT_IN_TRL = (
    "max_length",
    "rollout_do_sample",
    "rollouts_per_update",
    "kl_penalty_in",
    "old_policy_kl_coef",
    "update_kl_limit",
    "entropy_coef",
    "whiten_advantages",
    "truncated_as",
    "value_pooling",
    "use_score_scaling",
    "score_clip",
    "short_response_penalty",
    "drop_short_responses",
    "early_stopping_patience",
    *_OF_THE_VALUE_ROLE,
)


@dataclass
class PPOConfig(TRLPPOConfig):
    """TRL's `PPOConfig` and what it lacks.

    A batch is `per_device_train_batch_size × gradient_accumulation_steps` prompts, which are answered together. The
    rollout of one update is `rollouts_per_update` of them. It is divided into `num_mini_batches`, each of which is one
    optimizer step in each of `num_ppo_epochs` passes; the forward passes of a step take `per_device_train_batch_size`
    rows at a time. (In TRL 1.12 `num_mini_batches` does not change the number of steps: huggingface/trl#5645.)

    The number of updates is `max_steps`, or follows from `total_episodes` or `num_train_epochs`.
    """

    loop: Literal["toolkit", "trl"] = field(
        default="toolkit",
        metadata={"help": "Which loop trains: ours, or that of the unmodified trl PPOTrainer on the shared base."},
    )
    value: Literal["separate", "shared"] = field(
        default="separate",
        metadata={
            "help": "Whether the value role has its own adapter, or is a head on the policy's (one forward pass "
            "instead of two, and the value loss then also trains the policy's adapter)."
        },
    )
    value_pooling: Literal["none", "response_mean", "prefix_mean"] = field(
        default="none",
        metadata={
            "help": "Whether each response token has a value of its own, the mean over the whole response (which has "
            "then seen all of it: a baseline of the response), or the mean up to itself."
        },
    )
    eval_do_sample: bool = field(
        default=False,
        metadata={"help": "Whether evaluation samples at `temperature`, with a fixed seed, or decodes greedily."},
    )
    rollouts_per_update: int = field(
        default=1,
        metadata={
            "help": "Batches of prompts that are answered and scored, one after another, before an update, which is "
            "over all of them."
        },
    )
    rollout_do_sample: bool = field(
        default=True,
        metadata={
            "help": "Whether the responses that are trained on are sampled, or decoded greedily, which explores "
            "nothing: a warning says so."
        },
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of prompt and response together at which a response is cut, if response_length does not "
            "cut it before; null for no such limit."
        },
    )
    logprob_chunk_size: int = field(
        default=128,
        metadata={"help": "Response tokens for which vocabulary-sized logits exist at a time."},
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = field(
        default="k1",
        metadata={
            "help": "KL(policy, reference) of the penalty: an estimator from the sampled tokens, their absolute "
            "log-ratio, or the full sum over the vocabulary."
        },
    )
    kl_penalty_in: Literal["reward", "loss"] = field(
        default="reward",
        metadata={
            "help": "Where kl_coef times the KL goes: into each token's reward, or into the policy's loss. In the loss "
            "k2 and full have the gradient of KL(policy, reference), k3 that of KL(reference, policy), abs its own; "
            "that of k1 is 0 on average, and refused."
        },
    )
    old_policy_kl_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of KL(policy that sampled, policy being trained) in the policy's loss."},
    )
    update_kl_limit: float | None = field(
        default=None,
        metadata={
            "help": "KL a token between the policy that sampled and the one being trained (approx_kl) over which an "
            "update's remaining optimizer steps are left out."
        },
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of the entropy bonus: positive keeps the policy's distribution wide."},
    )
    cliprange: float | None = field(
        default=TRLPPOConfig.cliprange,
        metadata={"help": "Range around 1 in which the ratio counts; null for no clipping."},
    )
    cliprange_value: float | None = field(
        default=TRLPPOConfig.cliprange_value,
        metadata={
            "help": "How far from the old value, in units of the return, a value counts; null for the plain squared "
            "error."
        },
    )
    whiten_advantages: bool = field(
        default=True,
        metadata={"help": "Whether advantages are shifted and scaled to mean 0 and variance 1 over the batch."},
    )
    truncated_as: Literal["terminal", "bootstrap"] = field(
        default="terminal",
        metadata={
            "help": "Whether a response that the length limit cut is over, or goes on with what the value role says "
            "comes after it (one more forward pass of those rows)."
        },
    )
    use_score_scaling: bool = field(
        default=False, metadata={"help": "Divide scores by the standard deviation of all scores so far."}
    )
    use_score_norm: bool = field(
        default=False, metadata={"help": "With use_score_scaling: first take the mean of all scores so far away."}
    )
    score_clip: float | None = field(
        default=None, metadata={"help": "Cut scores at plus and minus this, after scaling and before penalties."}
    )
    min_response_length: int = field(
        default=1, metadata={"help": "Tokens, end included, below which a response is punished or dropped."}
    )
    short_response_penalty: float | None = field(
        default=None, metadata={"help": "Taken from the score of a response shorter than min_response_length."}
    )
    drop_short_responses: bool = field(
        default=False,
        metadata={
            "help": "Leave responses shorter than min_response_length out of the update; they are counted as "
            "dropped_responses, and all other metrics are of those that are left."
        },
    )
    value_learning_rate: float | None = field(
        default=None, metadata={"help": "Of the value role's own parameters; null for learning_rate."}
    )
    value_weight_decay: float | None = field(
        default=None, metadata={"help": "Of the value role's own parameters; null for weight_decay."}
    )
    value_adam_beta1: float | None = field(
        default=None, metadata={"help": "Of the value role's own parameters; null for adam_beta1."}
    )
    value_adam_beta2: float | None = field(
        default=None, metadata={"help": "Of the value role's own parameters; null for adam_beta2."}
    )
    value_adam_epsilon: float | None = field(
        default=None, metadata={"help": "Of the value role's own parameters; null for adam_epsilon."}
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "help": "KL a response that an adaptive controller steers towards by changing the coefficient, which "
            "starts at kl_coef. Without it the coefficient is fixed."
        },
    )
    kl_horizon: int = field(
        default=10_000,
        metadata={"help": "Responses over which the adaptive controller changes the coefficient by up to a fifth."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Evaluations in a row without a better metric_for_best_model after which training ends; with "
            "load_best_model_at_end the best checkpoint comes back."
        },
    )
    sample_with_replacement: bool = field(
        default=False,
        metadata={"help": "Draw prompts with replacement, where otherwise each comes once in a pass over the data."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = self._out_of_range()
        if self.num_mini_batches >= 1 and self.update_batch_size % self.num_mini_batches:
            factors = "per_device_train_batch_size × gradient_accumulation_steps"
            factors += " × rollouts_per_update" * (self.rollouts_per_update > 1)
            problems.append(
                f"a batch of {self.update_batch_size} ({factors}) cannot be divided into num_mini_batches = "
                f"{self.num_mini_batches}"
            )
        problems += self._without_effect()
        if self.max_steps > 0 and self.total_episodes is not None:
            problems.append("max_steps and total_episodes both set the number of updates; give one")
        if self.loop == "trl":
            problems += self._beyond_trl()
        if problems:
            raise ValueError("; ".join(problems))

    def _out_of_range(self) -> list[str]:
        """Numbers and words that cannot be."""
        may_be_null = {f.name for f in fields(self) if type(None) in get_args(f.type)}
        problems = []
        for rule, (holds, names) in _RANGES.items():
            for name in names:
                value = getattr(self, name)
                if not (name in may_be_null if value is None else holds(value)):
                    problems.append(f"{name} must be {rule}{' or null' * (name in may_be_null)}, got {value!r}")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                problems.append(f"{name} must be one of {', '.join(words)}, got {getattr(self, name)!r}")
        return problems

    def _without_effect(self) -> list[str]:
        """Settings that rule each other out, or need another."""
        problems = []
        if self.kl_penalty_in == "loss" and self.kl_estimator == "k1":
            problems.append(
                "kl_penalty_in: loss needs another kl_estimator than k1, whose gradient is 0 on average (Tang and "
                "Munos 2025, arXiv 2506.09477): k2 or full for KL(policy, reference), k3 for KL(reference, policy)"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            problems.append("kl_target steers by multiplying kl_coef, which starts at 0 and would stay there")
        if self.lr_scheduler_type in _BY_METRIC:
            problems.append(
                f"lr_scheduler_type: {self.lr_scheduler_type.value} goes by a metric, and PPO's schedule by updates; "
                "take linear, cosine or constant"
            )
        if self.value_pooling != "none" and self.truncated_as == "bootstrap":
            problems.append(
                "truncated_as: bootstrap needs the value after the last token, which value_pooling averages"
            )
        if (self.min_response_length > 1) != (self.short_response_penalty is not None or self.drop_short_responses):
            problems.append(
                "min_response_length (2 or more) and one of short_response_penalty and drop_short_responses have an "
                "effect together only"
            )
        if self.short_response_penalty is not None and self.drop_short_responses:
            problems.append("short_response_penalty would have no effect with drop_short_responses; give one")
        if self.use_score_norm and not self.use_score_scaling:
            problems.append("use_score_norm would have no effect without use_score_scaling")
        if self.early_stopping_patience is not None and (
            self.metric_for_best_model is None or self.eval_strategy == IntervalStrategy.NO
        ):
            problems.append("early_stopping_patience needs an eval_strategy and metric_for_best_model")
        return problems

    def _beyond_trl(self) -> list[str]:
        """What TRL's own loop does not know."""
        problems = []
        if self.kl_estimator not in ("k1", "k3"):
            problems.append("loop: trl knows the kl_estimator k1 and k3 only")
        if self.kl_target is not None:
            problems.append("loop: trl has a fixed kl_coef; kl_target would have no effect")
        if self.sample_with_replacement:
            problems.append("loop: trl draws without replacement; sample_with_replacement would have no effect")
        for name in ("cliprange", "cliprange_value"):
            if getattr(self, name) is None:
                problems.append(f"loop: trl always clips; {name} must be a number")
        ours = [name for name in _NOT_IN_TRL if getattr(self, name) != type(self).__dataclass_fields__[name].default]
        return problems + [f"loop: trl has no {name}; it would have no effect" for name in ours]

    @property
    def punishes(self) -> bool:
        """Whether penalties are taken from scores."""
        return self.missing_eos_penalty is not None or self.short_response_penalty is not None

    @property
    def value_optimizer(self) -> dict[str, Any]:
        """What the optimizer's group of the value role has of its own, by torch's names."""
        betas = (self.value_adam_beta1, self.value_adam_beta2)
        own = {
            "lr": self.value_learning_rate,
            "weight_decay": self.value_weight_decay,
            "betas": None
            if betas == (None, None)
            else tuple(
                ours if own is None else own
                for own, ours in zip(betas, (self.adam_beta1, self.adam_beta2), strict=True)
            ),
            "eps": self.value_adam_epsilon,
        }
        return {name: value for name, value in own.items() if value is not None}

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
            return max(1, self.total_episodes // self.update_batch_size)
        # A pass leaves out the rows that do not fill its last batch.
        batches = int(self.num_train_epochs * (rows // self.rollout_batch_size))
        return max(1, batches // self.rollouts_per_update)


def ignored_by_our_loop(keys: dict[str, Any]) -> dict[str, str]:
    """Of the given keys, those that are fields of the class but not read by our loop, each with a reason."""
    known = {f.name: f for f in fields(PPOConfig)}
    ignored = {}
    for key in keys:
        if key in known and key not in HONOURED and known[key].default is not MISSING:
            ignored[key] = INSTEAD.get(key, "the toolkit's PPO loop does not read it")
    return ignored
