"""What is refused in a stage's section whatever its value, by field, each with the reason."""

from dataclasses import fields
from inspect import get_annotations

from toolkit.errors import Problem
from toolkit.settings import declared
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.trl_compat import PPOFields, TRLPPOConfig

_DIVIDED_WEIGHTS = Problem(
    "shards a model's weights across processes, and here each holds the whole base: bitsandbytes' 4-bit weights are "
    "not sharded (huggingface/accelerate#3983).",
    remedy="Take it out: several processes divide the rows, and a base has to fit on one GPU.",
)

# Fields that each stage's class inherits, and that are no recipe's.
OF_NO_RECIPE = {
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), _DIVIDED_WEIGHTS),
    "output_dir": Problem("the run folder decides it.", remedy="Name the run with $run."),
    "seed": Problem("the recipe's own seed is for all stages."),
    "resume_from_checkpoint": Problem("to resume is no part of a recipe.", remedy="Give $resume."),
    "hub_token": Problem("it is a secret, and the recipe is saved with the run.", remedy="Log in with hf auth login."),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), Problem("it has no effect: a stage trains and measures.")),
    "local_rank": Problem("it has no effect: processes are numbered by torchrun's variables."),
    "restore_callback_states_from_checkpoint": Problem("it has no effect: a run that goes on restores them."),
}

# What stops and goes on in a way of its own; of PPO nothing reads them.
BREAKS_GOING_ON = {
    "save_only_model": "no run could go on from its checkpoints.",
    "ignore_data_skip": "a run that goes on would train some rows of a pass twice, and others never.",
    "enable_jit_checkpoint": "it intercepts SIGTERM, on which the toolkit saves everything and stops.",
    "auto_find_batch_size": "it restarts with fewer rows, on weights that the failed attempt has changed. The toolkit "
    "halves the rows of a pass itself when memory runs out.",
}

# transformers reads the old name, which remedies and plans give, only where the new one is not there.
OTHER_NAMES = {"activation_checkpointing": Problem("has another name here.", remedy="Write gradient_checkpointing.")}

# Fields of TRL's PPOConfig that our loop reads, but for those that ours declares: TRL's own, and transformers'.
_READ_BY_PPO = {
    *(get_annotations(PPOFields).keys() - declared(PPOConfig).keys()),
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

# Why some of the others are refused, where "does not read it" would not help.
# But for hub_private_repo: by it transformers' callback makes a Trackio Space private.
_NO_UPLOADS = dict.fromkeys(
    ("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    "transformers cannot upload a folder of weights per role; upload what toolkit export writes",
)
_NO_CAST = dict.fromkeys(
    ("bf16_full_eval", "fp16_full_eval"),
    "evaluation has the precision of training; this would cast the weights being trained",
)
_INSTEAD = {
    **_NO_UPLOADS,
    **_NO_CAST,
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

# Fields of TrainingArguments that have no effect on Q-learning.
_IGNORED_BY_Q = {
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
}  # fmt: skip

# What a user of other generation code looks for, and why it is not to be had here. No fields: nothing could read them.
_TRUNCATES = Problem(
    "is refused: it keeps tokens by the policy that samples, so that the ratio of the new policy and the KL to the "
    "reference would be computed over other distributions than the one sampled from.",
    remedy="Lower ppo.temperature instead, which applies to all of them.",
)
_NO_STRINGS = Problem(
    "is refused: a response ends with a token, the tokenizer's end of sequence or another of the checkpoint's.",
    remedy="Add a token's id to eos_token_id in its generation_config.json.",
)
_NO_GROUPS = Problem(
    "is refused: each prompt of a batch gets one response. What it is held against is the value role's estimate, not "
    "the mean score of a group of responses.",
    remedy="Take it out; more prompts an update: ppo.gradient_accumulation_steps or ppo.rollouts_per_update.",
)
NOT_OFFERED = {
    **dict.fromkeys(("top_k", "top_p", "min_p"), _TRUNCATES),
    "repetition_penalty": Problem(
        "is refused: it changes the distribution that is sampled, and not the log-probabilities that are trained.",
        remedy="Punish repetition in the reward instead (scorer.kind: function).",
    ),
    "max_new_tokens": Problem("is named response_length, as in TRL."),
    **dict.fromkeys(("stop_strings", "stop"), _NO_STRINGS),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt"), _NO_GROUPS),
    "use_vllm": Problem(
        "is refused: the toolkit generates rollouts itself, on the base that all roles share.",
        remedy="Take it out; on a GPU try ppo.generation: graphs. What toolkit export writes is for vLLM.",
    ),
}

_OF_THE_TOKENIZER = dict.fromkeys(
    ("pad_token", "eos_token", "chat_template_path"), "the tokenizer is that of the base in every stage"
)
WITHOUT_EFFECT = {
    "sft": {
        **_OF_THE_TOKENIZER,
        **_NO_UPLOADS,
        **_NO_CAST,
        "label_smoothing_factor": "the losses of TRL's trainer have none",
        **dict.fromkeys(
            ("completion_only_loss", "assistant_only_loss", "dataset_text_field"),
            "the form of the data says what is predicted",
        ),
        "trust_remote_code": "the base is loaded by base.trust_remote_code",
        "model_init_kwargs": "the base is loaded by base",
        "dataset_kwargs": "rows come tokenised, and its skip_prepare_dataset would skip max_length and packing alone",
    },
    "reward": {
        **_OF_THE_TOKENIZER,
        **_NO_UPLOADS,
        **_NO_CAST,
        **dict.fromkeys(("trust_remote_code", "model_init_kwargs"), "the model is loaded by base or reward_model"),
    },
    "ppo": {
        name: _INSTEAD.get(name, "the toolkit's PPO loop does not read it")
        for name in dict.fromkeys([*(f.name for f in fields(TRLPPOConfig) if f.init), *_INSTEAD])
        if name not in {*_READ_BY_PPO, *declared(PPOConfig), *OF_NO_RECIPE}
    },
    "q": {**_IGNORED_BY_Q, **_NO_UPLOADS, **_NO_CAST},
}
"""Fields of a stage's class that the stage does not read, each with the reason; of PPO those with `loop: toolkit`."""
