"""What is refused in a stage's section whatever its value, by field, each with the reason."""

from toolkit.errors import Problem
from toolkit.trainers.ppo_config import UNREAD_BY_PPO
from toolkit.trainers.unread import NO_CAST, NO_UPLOADS, UNREAD_BY_Q

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
        **NO_UPLOADS,
        **NO_CAST,
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
        **NO_UPLOADS,
        **NO_CAST,
        **dict.fromkeys(("trust_remote_code", "model_init_kwargs"), "the model is loaded by base or reward_model"),
    },
    "ppo": UNREAD_BY_PPO,
    "q": UNREAD_BY_Q,
}
"""Fields of a stage's class that the stage does not read, each with the reason; of PPO those with `loop: toolkit`."""
