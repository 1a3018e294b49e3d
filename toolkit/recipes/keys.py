"""The keys of a section and the types of their values, held against the class that owns it."""

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from importlib.metadata import version
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import BitsAndBytesConfig
from transformers.integrations import get_available_reporting_integrations

# Set by the run, not by a recipe.
SET_ELSEWHERE = {
    "output_dir": "the run folder decides it: RUN=name",
    "seed": "the recipe's own seed is for all stages",
}
_OWNERS = {
    "SFTConfig": "trl",
    "RewardConfig": "trl",
    "PPOConfig": "trl",
    "LoraConfig": "peft",
    "BitsAndBytesConfig": "transformers",
}


def owner_fields(owner: type) -> dict[str, Any]:
    """Names of the class's settings with their types; `Any` where its author gave none.

    From the signature, since not every owner is a plain dataclass: `BitsAndBytesConfig` has an `__init__` of its own
    that swallows unknown keys.
    """
    hints = get_type_hints(owner)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(owner).parameters.values() if p.kind in kinds]
    return {p.name: hints.get(p.name, Any) for p in parameters}


def fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value is of the type that a field is annotated with.

    Types that YAML has no form for (a dtype, an enum) are given as text, and left to their owner.
    """
    origin = get_origin(hint)
    if hint is Any or (isinstance(hint, (str, type(None))) and hint is not None):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    container: Any = origin or hint
    if container in (list, set, tuple, Sequence):
        inner = (get_args(hint) or (Any,))[0]
        return isinstance(value, list) and all(fits(item, inner) for item in value)
    if container is dict:
        return isinstance(value, dict)
    if container is bool:
        return isinstance(value, bool)
    if container is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if container is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(container, type) and issubclass(container, Enum):
        return value in [member.value for member in container]
    return isinstance(value, str)


def type_name(hint: Any) -> str:
    """A type as a reader of a recipe would name it."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(x) for x in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in get_args(hint)))
    if hint is type(None):
        return "null"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


# What other tools, and other versions of TRL, call a field: likeness of letters alone would suggest another one.
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
}


def suggestion(name: str, known: Sequence[str]) -> str:
    """`Did you mean x?`, or the known names where none is near."""
    if _ELSEWHERE.get(name) in known:
        return f"Did you mean {_ELSEWHERE[name]}?"
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Known: {', '.join(sorted(known))}." if len(known) <= 15 else ""


def _words(name: str) -> str:
    """`value_model` for ValueModel."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _owner_name(owner: type) -> str:
    package = _OWNERS.get(owner.__name__)
    return (
        f"{owner.__name__} ({package} {version(package)})"
        if package
        else f"section {_words(owner.__name__.removesuffix('Section'))}"
    )


def check_keys(
    place: str, values: Any, owner: type, *, hidden: Sequence[str] = (), reasons: Mapping[str, str] | None = None
) -> list[str]:
    """Problems of one section: unknown keys, by `reasons` where it has one, and values of a wrong type."""
    if not isinstance(values, dict):
        return [f"{place} — a section with keys is needed, got {values!r}."]
    known = {name: hint for name, hint in owner_fields(owner).items() if name not in hidden}
    choices = _choices(owner)
    problems = []
    for key, value in values.items():
        where = f"{place}.{key}"
        if key in SET_ELSEWHERE and key in hidden:
            problems.append(f"{where} — {SET_ELSEWHERE[key]}.")
        elif key in (reasons or {}):
            problems.append(f"{where} — {(reasons or {})[key]}.")
        elif key not in known:
            silent = " (and would ignore it without a word)" if owner is BitsAndBytesConfig else ""
            unknown = f"{where} — {_owner_name(owner)} has no such field{silent}."
            problems.append(f"{unknown} {suggestion(key, list(known))}".rstrip())
        elif not fits(value, known[key]):
            problem = f"{where} — {type_name(known[key])} is needed, got {value!r}."
            problems.append(problem + _in_quotes(where, value, known[key]))
        elif value is not None and value not in choices.get(key, [value]):
            problems.append(f"{where} — {' or '.join(choices[key])} is needed, got {value!r}.")
    return problems


# What torch, transformers and PEFT find out when the stage runs, or take for something else (0 steps for all epochs).
_RANGES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "at least 1": (
        lambda value: value >= 1,
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "r"),
    ),
    "at least 1, or -1 for what num_train_epochs says": (lambda value: value >= 1 or value == -1, ("max_steps",)),
    "positive": (
        lambda value: value > 0,
        ("num_train_epochs", "save_steps", "eval_steps", "logging_steps", "lora_alpha"),
    ),
    "0 or more": (
        lambda value: value >= 0,
        ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "save_total_limit"),
    ),
    "from 0 to below 1": (lambda value: 0 <= value < 1, ("lora_dropout",)),
}  # fmt: skip


def out_of_range(place: str, values: Any) -> list[str]:
    """Problems of numbers that their owners take at first."""
    return [
        f"{place}.{name} — must be {rule}, got {values[name]!r}."
        for rule, (holds, names) in _RANGES.items()
        for name in names
        if isinstance(values, dict)
        and isinstance(values.get(name), (int, float))
        and not (isinstance(values[name], bool) or holds(values[name]))
    ]


def not_installed(place: str, values: Any) -> list[str]:
    """Problem of a section that reports to what is not here: transformers says so when the stage begins."""
    wanted = values.get("report_to") if isinstance(values, dict) else None
    wanted = [wanted] if isinstance(wanted, str) else wanted or []
    missing = [name for name in wanted if name not in ("none", "all", *get_available_reporting_integrations())]
    if not missing:
        return []
    return [
        f"{place}.report_to — {missing[0]} is not installed or not known to transformers. pip install {missing[0]}, or "
        "take it out."
    ]


def _choices(owner: type) -> dict[str, list[str]]:
    """What a dataclass's fields may be, where their metadata lists it."""
    every = fields(owner) if is_dataclass(owner) else ()
    return {field.name: list(field.metadata["choices"]) for field in every if "choices" in field.metadata}


def _in_quotes(where: str, value: Any, hint: Any) -> str:
    """How to write the text that YAML took for a truth value; nothing where it cannot have been one."""
    if not isinstance(value, bool):
        return ""
    text, bare = ("yes", "yes and on") if value else ("no", "no and off")
    # A member of an enum is often annotated as any text, too.
    members = [
        member.value for part in get_args(hint) if inspect.isclass(part) and issubclass(part, Enum) for member in part
    ]
    if not (text in members if members else fits(text, hint)):
        return ""
    return (
        f" YAML takes {bare} without quotes for {str(value).lower()}: "
        f'write {where.rpartition(".")[2]}: "{text}" in a file, \'{where}="{text}"\' on the command line, '
        f"SET='{where}=\\\"{text}\\\"' with make."
    )


def construction_problems(place: str, build: Callable[[], Any]) -> list[str]:
    try:
        build()
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        return [
            f"{place}.{said.group(1)} — {said.group(2)}" if said else f"{place} — {part}"
            for part in str(error).split("; ")
            for said in [re.match(r"(\w+) (must be .*)", part)]
        ]
    return []


def check_quantization(place: str, values: dict[str, Any]) -> list[str]:
    return check_keys(place, values, BitsAndBytesConfig) or construction_problems(
        place, lambda: BitsAndBytesConfig(**values)
    )
