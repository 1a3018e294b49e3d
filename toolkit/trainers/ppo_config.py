"""The configuration of the ppo stage: TRL's, with what it lacks, less what would be ignored."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from trl.experimental.ppo import PPOConfig as TRLPPOConfig

from toolkit.functional import KL_ESTIMATORS

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
        "loop",
        "value",
        "eval_do_sample",
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
    "stop_token": "responses always stop at the tokenizer's eos_token",
    "stop_token_id": "responses always stop at the tokenizer's eos_token",
    "num_sample_generations": "samples are written before and after training",
    "resume_from_checkpoint": "to resume is no part of a recipe: give RESUME=1 (--resume)",
}


@dataclass
class PPOConfig(TRLPPOConfig):
    """TRL's `PPOConfig` and what it lacks.

    A batch, the rollout of one update, is `per_device_train_batch_size × gradient_accumulation_steps`
    prompts. It is divided into `num_mini_batches`, each of which is one optimizer step in each of
    `num_ppo_epochs` passes; the forward passes of a step take `per_device_train_batch_size` rows at a time.
    (In TRL 1.12 `num_mini_batches` does not change the number of steps: huggingface/trl#5645.)

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
    eval_do_sample: bool = field(
        default=False,
        metadata={"help": "Whether evaluation samples at `temperature`, with a fixed seed, or decodes greedily."},
    )
    logprob_chunk_size: int = field(
        default=128,
        metadata={"help": "Response tokens for which vocabulary-sized logits exist at a time."},
    )
    kl_estimator: Literal["k1", "k2", "k3", "full"] = field(
        default="k1",
        metadata={
            "help": "KL(policy, reference) in the reward penalty: an estimator from the sampled tokens, or the full "
            "sum over the vocabulary."
        },
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
    sample_with_replacement: bool = field(
        default=False,
        metadata={"help": "Draw prompts with replacement, where otherwise each comes once in a pass over the data."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            f"{name} must be {rule}, got {value!r}"
            for name, value, rule, good in (
                ("temperature", self.temperature, "positive", self.temperature > 0),
                ("response_length", self.response_length, "at least 1", self.response_length >= 1),
                ("num_ppo_epochs", self.num_ppo_epochs, "at least 1", self.num_ppo_epochs >= 1),
                ("num_mini_batches", self.num_mini_batches, "at least 1", self.num_mini_batches >= 1),
                ("logprob_chunk_size", self.logprob_chunk_size, "at least 1", self.logprob_chunk_size >= 1),
                ("gamma", self.gamma, "between 0 and 1", 0 <= self.gamma <= 1),
                ("lam", self.lam, "between 0 and 1", 0 <= self.lam <= 1),
                ("cliprange", self.cliprange, "positive", self.cliprange > 0),
                ("cliprange_value", self.cliprange_value, "positive", self.cliprange_value > 0),
                ("kl_coef", self.kl_coef, "0 or more", self.kl_coef >= 0),
                (
                    "kl_estimator",
                    self.kl_estimator,
                    f"one of {', '.join(KL_ESTIMATORS)}, full",
                    self.kl_estimator in (*KL_ESTIMATORS, "full"),
                ),
                ("kl_target", self.kl_target, "positive", self.kl_target is None or self.kl_target > 0),
                ("kl_horizon", self.kl_horizon, "at least 1", self.kl_horizon >= 1),
                ("loop", self.loop, "toolkit or trl", self.loop in ("toolkit", "trl")),
                ("value", self.value, "separate or shared", self.value in ("separate", "shared")),
            )
            if not good
        ]
        if self.missing_eos_penalty is not None and self.missing_eos_penalty <= 0:
            problems.append(
                f"missing_eos_penalty is taken from the score and must be positive, got {self.missing_eos_penalty}"
            )
        if self.rollout_batch_size % self.num_mini_batches:
            problems.append(
                f"a batch of {self.rollout_batch_size} (per_device_train_batch_size × gradient_accumulation_steps) "
                f"cannot be divided into num_mini_batches = {self.num_mini_batches}"
            )
        if self.max_steps > 0 and self.total_episodes is not None:
            problems.append("max_steps and total_episodes both set the number of updates; give one")
        if self.loop == "trl":
            problems += self._beyond_trl()
        if problems:
            raise ValueError("; ".join(problems))

    def _beyond_trl(self) -> list[str]:
        """What TRL's own loop does not know."""
        problems = []
        if self.kl_estimator not in ("k1", "k3"):
            problems.append("loop: trl knows the kl_estimator k1 and k3 only")
        if self.kl_target is not None:
            problems.append("loop: trl has a fixed kl_coef; kl_target would have no effect")
        if self.sample_with_replacement:
            problems.append("loop: trl draws without replacement; sample_with_replacement would have no effect")
        return problems

    @property
    def rollout_batch_size(self) -> int:
        """Prompts of one update."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def number_of_updates(self, rows: int) -> int:
        """Updates of a whole run over a data set of `rows` prompts, at least 1."""
        if self.max_steps > 0:
            return self.max_steps
        episodes = self.total_episodes or int(self.num_train_epochs * rows)
        return max(1, episodes // self.rollout_batch_size)


def ignored_by_our_loop(keys: dict[str, Any]) -> dict[str, str]:
    """Of the given keys, those that are fields of the class but not read by our loop, each with a reason."""
    known = {f.name: f for f in fields(PPOConfig)}
    ignored = {}
    for key in keys:
        if key in known and key not in HONOURED and known[key].default is not MISSING:
            ignored[key] = INSTEAD.get(key, "the toolkit's PPO loop does not read it")
    return ignored
