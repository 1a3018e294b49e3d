"""A stage's section: what is refused in it, what the toolkit presets, and the object of the owner's class."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accelerate.utils import check_cuda_p2p_ib_support
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import is_liger_kernel_available

from toolkit.errors import ConfigError, Problem
from toolkit.models import Precision
from toolkit.spec.keys import check_keys, suggestion
from toolkit.spec.plan import RESPONDING
from toolkit.spec.refused import BREAKS_GOING_ON, NOT_OFFERED, OF_NO_RECIPE, OTHER_NAMES, WITHOUT_EFFECT
from toolkit.spec.sections import STAGE_CLASSES
from toolkit.spec.trial import check_training
from toolkit.trainers.trainer_internals import trainers_kept, use_one_card

_IN_FLOAT32 = Precision("float32")
_ORDERS = ("random", "sequential")

# What is measured and not plainly better the higher it is, as transformers takes all but losses to be.
_EITHER_WAY = {
    *("kl", "length", "eos_share", "opening_share", "phrase_share", "length_correlation", "cut_gap", "entropy"),
    *("num_tokens", "runtime", "min_reward", "mean_reward", "max_reward", "score/spread", "judge/spread"),
}


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
    refused = {**OF_NO_RECIPE, **(NOT_OFFERED if stage == "ppo" else OTHER_NAMES)}
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
    return [*problems, *_between(stage, values, precision), *_not_installed(stage, values)]


def _between(stage: str, values: dict[str, Any], precision: Precision) -> Iterator[Problem]:
    """Problems of values that are right by themselves, and not beside others of the section or in this stage."""
    if precision.dtype == "float16" and values.get("fp16") is False and not values.get("bf16"):
        wrong = "false leaves a model in float16 without a loss scaler, and what is small in its gradients is 0."
        yield Problem(wrong, f"{stage}.fp16", "Take it out, or set base.dtype to float32.")
    if stage == "sft" and values.get("packing") and values.get("max_length", 0) is None:
        wrong = "a whole number is needed with sft.packing, got None: rows are packed to it."
        yield Problem(wrong, "sft.max_length")
    if stage == "sft" and values.get("packing") and values.get("truncation_mode") == "keep_end":
        wrong = "keep_end would have no effect with packing, which keeps the start."
        yield Problem(wrong, "sft.truncation_mode")
    if values.get("eval_steps") is not None and "eval_strategy" not in values:
        wrong = "would have no effect: nothing is evaluated on the way without eval_strategy."
        yield Problem(wrong, f"{stage}.eval_steps", f"Add {stage}.eval_strategy=steps.")
    unpacked = values.get("padding_free") and not values.get("packing")
    if stage == "sft" and unpacked and values.get("max_length", 0) is not None:
        wrong = "true without packing holds no row to max_length."
        yield Problem(wrong, "sft.padding_free", "Add packing, or set max_length to null.")
    if stage == "sft" and values.get("eval_packing") and not values.get("packing"):
        wrong = "true needs packing: else each row is read as a continuation of the last."
        yield Problem(wrong, "sft.eval_packing")
    if stage == "reward" and values.get("max_length") is not None:
        wrong = "is refused: TRL leaves out pairs that are longer, and says nothing."
        remedy = "Limit max_prompt_length and max_response_length of the data."
        yield Problem(wrong, "reward.max_length", remedy)
    for name in BREAKS_GOING_ON:
        if stage != "ppo" and values.get(name):
            yield Problem(BREAKS_GOING_ON[name], f"{stage}.{name}", "Take it out.")


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


@cache
def _without_copies_between_cards() -> None:
    """Say to NCCL what accelerate's launcher would, before accelerate, which raises where nobody has: with an old
    driver cards of the series RTX 40 cannot copy to one another. It asks of all cards, also those hidden from here."""
    if torch.cuda.is_available() and not check_cuda_p2p_ib_support():
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            os.environ.setdefault(name, "1")


@contextmanager
def _card_left_alone() -> Iterator[None]:
    """Inside, to set the device that is the current one does nothing. It would make CUDA's context there
    (pytorch/pytorch#155900), some hundred MB that a command holds while earlier stages run in processes of their own;
    and a card in EXCLUSIVE_PROCESS mode has one context alone."""
    usual = torch.cuda.set_device

    def set_another(device: Any) -> None:
        here = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # else to ask would initialise it
        if getattr(device, "index", device) != here:
            usual(device)

    torch.cuda.set_device = set_another
    try:
        yield
    finally:
        torch.cuda.set_device = usual


def stage_config(
    stage: str, values: dict[str, Any], *, output_dir: str, seed: int, precision: Precision, run: str | None = None
) -> Any:
    """A stage's section as an object of its owner's class, with the toolkit's presets where it is silent."""
    ours = {name: preset.value for name, preset in presets(stage, values, precision=precision, run=run).items()}
    _without_copies_between_cards()
    with trainers_kept(), _card_left_alone():
        made = STAGE_CLASSES[stage](output_dir=output_dir, seed=seed, **{**values, **ours})
        # With several cards in sight transformers would wrap the model in DataParallel, whose copies share one active
        # role, and multiply the batch: the first card is the one (CUDA_VISIBLE_DEVICES chooses another).
        use_one_card(made)
        # And where neither is set, it would take what accelerate's launcher has in the environment.
        made.mixed_precision = "fp16" if made.fp16 else "bf16" if made.bf16 else "no"
    return made
