"""The keys of a section and their values, held against the class that owns it."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from importlib.metadata import version
from typing import Any, get_args

from transformers import BitsAndBytesConfig

from toolkit.errors import Problem, ToolkitError, did_you_mean, within
from toolkit.models import raise_of_the_card
from toolkit.settings import fits, hints_of, problems_of

REFUSALS = (TypeError, ValueError, AttributeError, ImportError, LookupError, RuntimeError, ArithmeticError, UserWarning)
"""What the libraries raise of values that they cannot do with."""


def owner_fields(owner: type) -> dict[str, Any]:
    """Names of the class's settings with their types; `Any` where its author gave none.

    From the signature, since not every owner is a plain dataclass: `BitsAndBytesConfig` has an `__init__` of its own
    that swallows unknown keys.
    """
    hints = hints_of(owner)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(owner).parameters.values() if p.kind in kinds]
    return {p.name: hints.get(p.name, Any) for p in parameters}


# What other tools, and other versions of TRL, call a field: likeness of letters alone would suggest another one. Of
# several names the first that the section has is meant.
_ELSEWHERE = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "ppo_epochs": "num_ppo_epochs",
    "kl": "kl_coef",
    "beta": "kl_coef",
    "init_kl_coef": "kl_coef",
    "target": "kl_target",
    "target_kl": "update_kl_limit",
    "horizon": "kl_horizon",
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "model_name_or_path": "model",
    "torch_dtype": "dtype",
    "cutoff_len": "max_prompt_length",
    "max_length": "max_prompt_length",
    "template": "chat",
    # LLaMA-Factory, and TRL up to 0.11: docs/coming_from.md
    "lora_rank": "r",
    "lora_r": "r",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "dataset": "train",
    "dataset_name": "train",
    "ppo_target": "kl_target",
    "ppo_whiten_rewards": "whiten_rewards",
    "ppo_score_norm": "use_score_norm",
    "kl_penalty": "kl_estimator",
    "early_stopping": "update_kl_limit",
    "forward_batch_size": "per_device_train_batch_size",
    "backward_batch_size": "num_mini_batches",
    "steps": "total_episodes max_steps",  # responses of PPO
    "quantization_config": "quantization",
    "quantization_bit": "quantization",
    "adapter_name_or_path": "policy",
    "reward_model": "reward",
    # TRL's GRPO, OpenRLHF, verl and PaLM-rlhf-pytorch: docs/coming_from.md
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "eps_clip": "cliprange",
    "value_clip": "cliprange_value",
    "max_completion_length": "response_length",
    "generate_max_len": "response_length",
    "critic_learning_rate": "value_learning_rate",
    "num_iterations": "num_ppo_epochs",
    "max_epochs": "num_ppo_epochs num_train_epochs",
    "prompt_max_len": "max_prompt_length",
    "max_len": "max_prompt_length",
    "max_response_length": "response_length",
    "pretrain": "model",
    "reward_clip_range": "score_clip",
}

# What has to be said of a field beside its name, since theirs is in another unit.
_OTHER_UNIT = {
    "target_kl": " It is the limit itself, 1.5 × target_kl.",
    "early_stopping": " It is the limit itself, 1.5 × target_kl.",
    "backward_batch_size": " It is the batch divided by backward_batch_size.",
}

# What other tools write for a value.
_SPELT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32", "fp32": "float32"}


def suggestion(name: str, known: Sequence[str]) -> str:
    """`Did you mean x?`, or the known names where none is near."""
    for ours in _ELSEWHERE.get(name, "").split():
        if ours in known:
            return f"Did you mean {ours}?{_OTHER_UNIT.get(name, '')}"
    return did_you_mean(name, known) or (f"Known: {', '.join(sorted(known))}." if len(known) <= 15 else "")


def _owner_name(owner: type) -> str:
    package = next(c.__module__ for c in owner.__mro__ if not c.__module__.startswith("toolkit.")).partition(".")[0]
    if package != "builtins":
        return f"{owner.__name__} ({package} {version(package)})"
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner.__name__.removesuffix("Section"))
    return f"section {words.lower()}"


def check_keys(
    place: str,
    values: Any,
    owner: type,
    *,
    hidden: Sequence[str] = (),
    refused: Mapping[str, Problem] | None = None,
    build: Callable[..., Any] | None = None,
) -> list[Problem]:
    """Problems of one section: unknown keys, and values that cannot be.

    Args:
        place: of the section in the recipe.
        values: its keys and values.
        owner: the class that they are for.
        hidden: fields of the class that are none of a recipe.
        refused: keys that are refused, whatever their value, each with its problem.
        build: makes an object of keys that are right; what that says of them is a problem, too.
    """
    if not isinstance(values, dict):
        return [Problem(f"a section with keys is needed, got {values!r}.", place)]
    refused = refused or {}
    known = {name: hint for name, hint in owner_fields(owner).items() if name not in hidden and name not in refused}
    problems, given = [], {}
    for key, value in values.items():
        where = f"{place}.{key}"
        if key in refused:
            problems.append(refused[key].within(where))
        elif key not in known:
            silent = " (and would ignore it without a word)" if owner is BitsAndBytesConfig else ""
            wrong = f"{_owner_name(owner)} has no such field{silent}."
            problems.append(Problem(wrong, where, suggestion(str(key), list(known))))
        elif key.endswith("_kwargs") and isinstance(value, str) and not value.lstrip().startswith("{"):
            # Text is among the types of these, since transformers reads a mapping in JSON.
            problems.append(Problem(f"a section with keys is needed, got {value!r}.", where))
        else:
            given[key] = value
    for problem in problems_of(owner, given):
        about = (f"{place}.{problem.field}", given[problem.field], known[problem.field])
        remedy = _in_quotes(*about) or _other_words(*about)
        problems.append(replace(problem.within(place), remedy=remedy))
    if problems or build is None:
        return problems
    try:
        with within(place):
            build(**values)
    except ToolkitError as error:
        return list(error.problems)
    except REFUSALS as error:
        raise_of_the_card(error)  # of which no key can say anything
        return [_of_key(place, values, " ".join(str(error).split()) or type(error).__name__, build)]
    return []


def _of_key(place: str, values: Mapping[str, Any], wrong: str, build: Callable[..., Any]) -> Problem:
    """What a library said of the one key that it names, or without which it says nothing."""
    about = [key for key in values if re.search(rf"\b{re.escape(key)}\b", wrong)]
    if not about:
        about = [key for key in values if _builds(build, {name: values[name] for name in values.keys() - {key}})]
    if len(about) != 1:
        return Problem(wrong, place)
    seen = "" if str(values[about[0]]) in wrong else f" (got {values[about[0]]!r})"
    return Problem(f"{wrong}{seen}", f"{place}.{about[0]}")


def _builds(build: Callable[..., Any], values: Mapping[str, Any]) -> bool:
    try:
        build(**values)
    except (*REFUSALS, ToolkitError):
        return False
    return True


def _other_words(where: str, value: Any, hint: Any) -> str:
    """How this toolkit writes what other tools write in another way; nothing where it is none of that."""
    if isinstance(value, str) and _SPELT.get(value) in get_args(hint):
        return f"Did you mean {_SPELT[value]}?"
    if where.endswith(".quantization") and value in ("nf4", "fp4", "int4", 4):
        kind = value if value in ("nf4", "fp4") else "nf4"
        return f"Write {where}.load_in_4bit=true {where}.bnb_4bit_quant_type={kind}."
    return ""


def _in_quotes(where: str, value: Any, hint: Any) -> str:
    """How to write the text that YAML took for a truth value, a number or a mapping; nothing where it cannot have been
    one."""
    # A member of an enum is often annotated as any text, too.
    members = [
        member.value for part in get_args(hint) if inspect.isclass(part) and issubclass(part, Enum) for member in part
    ]
    if not isinstance(value, bool):
        may_be_text = not members and fits("any text", hint) and not where.endswith("_kwargs")
        if not may_be_text or not isinstance(value, int | float | Mapping):
            return ""
        taken = "a mapping" if isinstance(value, Mapping) else "a number"
        return f"YAML takes it for {taken}: text stands in quotes, '{where}=\"…\"' on the command line."
    text, bare = ("yes", "yes and on") if value else ("no", "no and off")
    if not (text in members if members else fits(text, hint)):
        return ""
    return (
        f"YAML takes {bare} without quotes for {str(value).lower()}: "
        f'write {where.rpartition(".")[2]}: "{text}" in a file, \'{where}="{text}"\' on the command line, '
        f"SET='{where}=\\\"{text}\\\"' with make."
    )
