"""Fields that configurations inherit from TRL and transformers, and that the loop which they are for does not read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

from toolkit.errors import Problem
from toolkit.trainers.trl_compat import PPOFields, TRLPPOConfig

# Of the run, the machine and the command: a recipe has none of them, and transformers sets some by itself.
OF_THE_RUN = {
    "output_dir", "seed", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "hub_token",
    "restore_callback_states_from_checkpoint", "fsdp", "fsdp_config", "deepspeed",
}  # fmt: skip

# Fields of transformers' that our loop of PPO reads.
READ_BY_PPO = {
    # the run and the machine
    "run_name", "report_to", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "hub_private_repo", "data_seed", "full_determinism", "use_cpu", "disable_tqdm", "log_level",
    "dataloader_num_workers",
    # batches and the number of updates
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps",
    # the optimizer, precision and memory
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "optim_args",
    "lr_scheduler_type", "warmup_steps", "fp16", "tf32", "gradient_checkpointing_kwargs",
    # logging, evaluation, saving
    "logging_strategy", "logging_first_step", "eval_strategy", "eval_steps", "eval_on_start", "eval_delay",
    "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better",
}  # fmt: skip

# Why some are not, where "does not read it" would not help.
# But for hub_private_repo: by it transformers' callback makes a Trackio Space private.
NO_UPLOADS = dict.fromkeys(
    ("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    "transformers cannot upload a folder of weights per role; upload what toolkit export writes",
)
NO_CAST = dict.fromkeys(
    ("bf16_full_eval", "fp16_full_eval"),
    "evaluation has the precision of training; this would cast the weights being trained",
)
INSTEAD = {
    **NO_UPLOADS,
    **NO_CAST,
    "sft_model_path": "the base is base.model",
    "reward_model_path": "the reward role is trained by the reward stage, or loaded with start.reward",
    **dict.fromkeys(
        ("batch_size", "local_batch_size"), "a batch is per_device_train_batch_size × gradient_accumulation_steps"
    ),
    **dict.fromkeys(
        ("mini_batch_size", "local_mini_batch_size"), "a mini-batch is the batch divided by num_mini_batches"
    ),
    "micro_batch_size": "a micro-batch is per_device_train_batch_size",
    "num_total_batches": "the number of updates is max_steps",
    "model_adapter_name": "the policy's adapter is adapters.policy",
    "ref_adapter_name": "the reference is chosen by where the policy starts",
    **dict.fromkeys(
        ("stop_token", "stop_token_id"),
        "responses stop at any end of sequence that the tokenizer or the checkpoint names",
    ),
    "num_sample_generations": "samples are written before and after training",
}

# Of those that ours reads the ones that TRL's loop does not, or to which `stock_ppo.trl_config` gives a value; and the
# other way round.
_NOT_READ_BY_TRL = {
    "eval_strategy", "eval_on_start", "eval_delay", "load_best_model_at_end", "metric_for_best_model", "data_seed",
    "full_determinism", "dataloader_num_workers",
}  # fmt: skip
_READ_BY_TRL = {"stop_token", "exp_name", "optim_target_modules"}

# Fields of TrainingArguments that have no effect on Q-learning.
UNREAD_BY_Q = {
    **dict.fromkeys(("label_smoothing_factor", "label_names"), "the loss is that of Q-learning"),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
        "a step runs several roles, not one forward pass of a model",
    ),
    "neftune_noise_alpha": "states and targets have to be those of decoding",
    "remove_unused_columns": "the collator takes the columns that it needs",
    **dict.fromkeys(
        ("prediction_loss_only", "eval_accumulation_steps", "eval_do_concat_batches", "batch_eval_metrics",
         "include_for_metrics"),
        "evaluation decodes the held-out prompts",
    ),
    "include_num_input_tokens_seen": "the loss is a mean over response tokens, not input tokens",
    "average_tokens_across_devices": "a mean is over all rows, whatever the number of processes",
    **NO_UPLOADS,
    **NO_CAST,
}  # fmt: skip


def unread_by_ppo(ours: Iterable[str]) -> dict[str, str]:
    """Fields of TRL's PPOConfig that our loop does not read, each with the reason; `ours` are those that ours has."""
    read = {*READ_BY_PPO, *PPOFields.__annotations__, *OF_THE_RUN, *ours}
    every = dict.fromkeys([*(f.name for f in fields(TRLPPOConfig) if f.init), *INSTEAD])
    return {name: INSTEAD.get(name, "the toolkit's PPO loop does not read it") for name in every if name not in read}


def unread_by_trl(ours: Iterable[str]) -> dict[str, str]:
    """Those that TRL's own loop does not read, likewise."""
    return dict.fromkeys((unread_by_ppo(ours).keys() | _NOT_READ_BY_TRL) - _READ_BY_TRL, "TRL's loop does not read it")


# What transformers makes of a field that nobody gives, and what it sets by itself.
_AS_MADE = {"accelerator_config": AcceleratorConfig(), "debug": []}
_SET_BY_ITSELF = {
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("dataloader_pin_memory", "dataloader_multiprocessing_context"),  # on a CPU, and on a Mac
    *("torch_compile_backend", "torch_compile_mode"),  # by which torch_compile is set, and by that they
}


def given_in_vain(config: Any, unread: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of unread fields that have another value than where nobody gives one."""
    for f in fields(config):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        plain = getattr(config, f.name) in (default, _AS_MADE.get(f.name, default))
        if f.name in unread and f.name not in _SET_BY_ITSELF and not plain:
            yield Problem(f"would have no effect: {unread[f.name]}.", f.name)
