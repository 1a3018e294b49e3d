"""A stage's section: what is refused in it, what the toolkit presets, and the object of the owner's class."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import get_annotations
from typing import Any

import torch
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import is_liger_kernel_available

from toolkit.errors import ConfigError, Problem
from toolkit.models import Precision
from toolkit.settings import declared
from toolkit.spec.keys import check_keys, suggestion
from toolkit.spec.plan import RESPONDING
from toolkit.spec.sections import STAGE_CLASSES
from toolkit.spec.trial import check_training
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.trainer_internals import trainers_kept, use_one_card
from toolkit.trainers.trl_compat import PPOFields, TRLPPOConfig

_IN_FLOAT32 = Precision("float32")
_DIVIDED_WEIGHTS = Problem(
    "shards a model's weights across processes, and here each holds the whole base: bitsandbytes' 4-bit weights are "
    "not sharded (huggingface/accelerate#3983).",
    remedy="Take it out: several processes divide the rows, and a base has to fit on one card.",
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
_BREAKS_GOING_ON = {
    "save_only_model": "no run could go on from its checkpoints.",
    "ignore_data_skip": "a run that goes on would train some rows of a pass twice, and others never.",
    "enable_jit_checkpoint": "it intercepts SIGTERM, on which the toolkit saves everything and stops.",
    "auto_find_batch_size": "it restarts with fewer rows, on weights that the failed attempt has changed. The toolkit "
    "halves the rows of a pass itself when memory runs out.",
}

# transformers reads the old name, which remedies and plans give, only where the new one is not there.
_OTHER_NAMES = {"activation_checkpointing": Problem("has another name here.", remedy="Write gradient_checkpointing.")}

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

# What is measured and not plainly better the higher it is, as transformers takes all but losses to be.
_EITHER_WAY = {
    *("kl", "length", "eos_share", "opening_share", "phrase_share", "length_correlation", "cut_gap", "entropy"),
    *("num_tokens", "runtime", "min_reward", "mean_reward", "max_reward", "score/spread", "judge/spread"),
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

_ORDERS = ("random", "sequential")

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
_NOT_OFFERED = {
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


def check_stage(
    stage: str, values: Any, *, precision: Precision = _IN_FLOAT32, measured: Sequence[str] | None = None
) -> list[Problem]:
    """Problems of a stage's section, what its owner, optimizer and schedule refuse included.

    Args:
        stage: its name.
        values: its keys and values.
        precision: of the model that it trains.
        measured: names of what its evaluation measures, where they are known.
    """
    if not isinstance(values, dict):
        return check_keys(stage, values, STAGE_CLASSES[stage])
    refused = {**OF_NO_RECIPE, **(_NOT_OFFERED if stage == "ppo" else _OTHER_NAMES)}
    if not (stage == "ppo" and values.get("loop") == "trl"):
        reasons = WITHOUT_EFFECT[stage]
        refused |= {name: Problem(f"would have no effect: {reason}.") for name, reason in reasons.items()}

    def build(**values: Any) -> None:
        config = stage_config(stage, values, output_dir="unused", seed=0, precision=precision)
        check_training(config)
        _check_order(config)
        _check_best(config)
        if config.metric_for_best_model is not None:
            _check_metric(stage, config.metric_for_best_model, measured, values.get("greater_is_better"))

    problems = check_keys(stage, values, STAGE_CLASSES[stage], refused=refused, build=build)
    if precision.dtype == "float16" and values.get("fp16") is False and not values.get("bf16"):
        wrong = "false leaves a model in float16 without a loss scaler, and what is small in its gradients is 0."
        problems.append(Problem(wrong, f"{stage}.fp16", "Take it out, or set base.dtype to float32."))
    if stage == "sft" and values.get("packing") and values.get("max_length", 0) is None:
        wrong = "a whole number is needed with sft.packing, got None: rows are packed to it."
        problems.append(Problem(wrong, "sft.max_length"))
    if stage == "sft" and values.get("packing") and values.get("truncation_mode") == "keep_end":
        wrong = "keep_end would have no effect with packing, which keeps the start."
        problems.append(Problem(wrong, "sft.truncation_mode"))
    if values.get("eval_steps") is not None and "eval_strategy" not in values:
        wrong = "would have no effect: nothing is evaluated on the way without eval_strategy."
        problems.append(Problem(wrong, f"{stage}.eval_steps", f"Add {stage}.eval_strategy=steps."))
    unpacked = values.get("padding_free") and not values.get("packing")
    if stage == "sft" and unpacked and values.get("max_length", 0) is not None:
        wrong = "true without packing holds no row to max_length."
        problems.append(Problem(wrong, "sft.padding_free", "Add packing, or set max_length to null."))
    if stage == "sft" and values.get("eval_packing") and not values.get("packing"):
        wrong = "true needs packing: else each row is read as a continuation of the last."
        problems.append(Problem(wrong, "sft.eval_packing"))
    if stage == "reward" and values.get("max_length") is not None:
        wrong = "is refused: TRL leaves out pairs that are longer, and says nothing."
        remedy = "Limit max_prompt_length and max_response_length of the data."
        problems.append(Problem(wrong, "reward.max_length", remedy))
    broken = [name for name in _BREAKS_GOING_ON if stage != "ppo" and values.get(name)]
    problems += [Problem(_BREAKS_GOING_ON[name], f"{stage}.{name}", "Take it out.") for name in broken]
    return problems + _not_installed(stage, values)


def _check_metric(stage: str, best: str, measured: Sequence[str] | None, greater_is_better: bool | None) -> None:
    """Raises: ConfigError: nothing measures what is to decide, or which of two values of it is the better is open."""
    name = best.removeprefix("eval_")
    if measured is not None and name not in measured:
        remedy = suggestion(best, measured) or f"There are {', '.join(measured)}."
        if stage in RESPONDING and name in ("judge", "judge_se"):
            remedy = "Add a section judge; a judge given in Python then replaces it."
        raise ConfigError(f"{best!r} is nothing that is measured.", field="metric_for_best_model", remedy=remedy)
    if greater_is_better is None and (name.endswith("_se") or name in _EITHER_WAY):
        wrong = f"is needed with {best}: more of it may be better or worse."
        raise ConfigError(wrong, field="greater_is_better", remedy="Set it to true or false.")


def _check_best(config: Any) -> None:
    """Raises: ConfigError: the best checkpoint alone is to be saved, and nothing says which it is."""
    needed = {"eval_strategy": IntervalStrategy.NO, "metric_for_best_model": None}
    missing = [name for name, none in needed.items() if getattr(config, name) == none]
    if config.save_strategy == SaveStrategy.BEST and missing:
        wrong = f"best saves a checkpoint where an evaluation is the best so far, and needs {' and '.join(missing)}."
        raise ConfigError(wrong, field="save_strategy", remedy="Add them, or set save_strategy to steps.")


def _check_order(config: Any) -> None:
    """Raises: ConfigError: rows in an order that a run which goes on would not have again."""
    order = config.train_sampling_strategy
    if order not in _ORDERS:
        wrong = f"{order} draws batches by the lengths of input_ids, in an order that no checkpoint keeps."
        raise ConfigError(wrong, field="train_sampling_strategy", remedy=f"Take {' or '.join(_ORDERS)}.")
    if not config.accelerator_config.use_seedable_sampler:
        wrong = "use_seedable_sampler false draws an order that a run which goes on would not have again."
        raise ConfigError(wrong, field="accelerator_config", remedy="Leave it out.")


def _not_installed(stage: str, values: dict[str, Any]) -> list[Problem]:
    """Problem of a section that needs what is not here: transformers says so when the stage begins."""
    if values.get("use_liger_kernel") is True and not is_liger_kernel_available():
        wrong = "liger-kernel is not installed."
        return [Problem(wrong, f"{stage}.use_liger_kernel", "pip install liger-kernel, or remove it.")]
    wanted = values.get("report_to")
    both = isinstance(wanted, list) and len(wanted) > 1 and not {"none", "all"}.isdisjoint(map(str, wanted))
    if both or ("report_to" in values and wanted is None):
        alone = "transformers takes none or all only by itself, and no null."
        return [Problem(f"got {wanted!r}: {alone}", f"{stage}.report_to", "Write none, or list what to report to.")]
    for name in [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []:
        if name not in ("none", "all", *INTEGRATION_TO_CALLBACK):
            near = suggestion(str(name), list(INTEGRATION_TO_CALLBACK))
            wrong = f"{name} is not known to transformers."
            return [Problem(wrong, f"{stage}.report_to", near or f"There are {', '.join(INTEGRATION_TO_CALLBACK)}.")]
        if name not in ("none", "all", *get_available_reporting_integrations()):
            return [Problem(f"{name} is not installed.", f"{stage}.report_to", f"pip install {name}, or take it out.")]
    return []


@dataclass(frozen=True)
class Preset:
    """A value that the toolkit gives a stage's field where the recipe gives none."""

    value: Any
    reason: str


def presets(
    stage: str, values: dict[str, Any], *, precision: Precision, model: str = "base", run: str | None = None
) -> dict[str, Preset]:
    """The fields of a stage that the toolkit sets, where the section does not.

    Weights & Biases and MLflow show a stage under the name of its `run`, where they would draw one at random. (Trackio
    would go on with an earlier curve of that name.)

    Precision follows the `dtype` of the section `model` unless the stage's section says otherwise: TRL's own default is
    bf16 on every card, also on those that have none. transformers refuses bf16 without a GPU unless `use_cpu` says that
    the CPU is meant; here that goes by itself.
    """
    ours: dict[str, Preset] = {}
    given = values.get("report_to", "none")
    tools = {given} if isinstance(given, str) else {*(given or ())}
    if run is not None and tools & {"wandb", "mlflow"} and not tools & {"trackio", "all"}:
        # An artifact of Weights & Biases, which is named after it, takes no other signs.
        ours["run_name"] = Preset(re.sub(r"[^A-Za-z0-9_.-]", "-", f"{run}-{stage}"), "the run and the stage")
    if not torch.cuda.is_available():
        ours["use_cpu"] = Preset(True, "no GPU is here")
    reason = f"{model}.dtype is {precision}"
    ours["bf16"] = Preset(precision.dtype == "bfloat16" and not values.get("fp16"), reason)
    ours["fp16"] = Preset(precision.dtype == "float16" and not values.get("bf16"), reason)
    return {name: preset for name, preset in ours.items() if values.get(name) is None}


def stage_config(
    stage: str, values: dict[str, Any], *, output_dir: str, seed: int, precision: Precision, run: str | None = None
) -> Any:
    """A stage's section as an object of its owner's class, with the toolkit's presets where it is silent."""
    ours = {name: preset.value for name, preset in presets(stage, values, precision=precision, run=run).items()}
    with trainers_kept():
        made = STAGE_CLASSES[stage](output_dir=output_dir, seed=seed, **{**values, **ours})
        # With several cards in sight transformers would wrap the model in DataParallel, whose copies share one active
        # role, and multiply the batch: the first card is the one (CUDA_VISIBLE_DEVICES chooses another).
        use_one_card(made)
        # And where neither is set, it would take what accelerate's launcher has in the environment.
        made.mixed_precision = "fp16" if made.fp16 else "bf16" if made.bf16 else "no"
    return made
