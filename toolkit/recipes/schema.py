"""What a recipe may say: each section is its owner's own configuration class, checked before anything loads."""

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig

from toolkit.data import TASKS
from toolkit.rewards import PartSection
from toolkit.rewards import ScorerSection as ScorerSection  # where recipes look for all sections
from toolkit.rewards.function import beside
from toolkit.rewards.section import section_problems
from toolkit.trainers.ppo_config import NOT_OFFERED, PPOConfig, ignored_by_our_loop
from toolkit.trainers.q_config import IGNORED as IGNORED_BY_Q
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.reward_config import RewardConfig


@dataclass(frozen=True)
class BaseSection:
    """Section `base`: the model that all roles share.

    Args:
        model: hub id or local folder.
        config: in place of `model`, `model_type` and that configuration's arguments: a model with random
            weights, which the sft stage pretrains.
        quantization: arguments of transformers' `BitsAndBytesConfig`.
        dtype: of the weights that are not quantised.
        revision: of a hub id.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the checkpoint.
    """

    model: str | None = None
    config: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class RewardModelSection(BaseSection):
    """Section `reward_model`: a base of its own for the reward, of the same tokens as the policy's.

    The reward stage trains it as a sequence classifier: all its weights, or with `adapters.reward` that adapter and the
    head.

    Args:
        model: hub id or local folder.
        config: in place of `model`, `model_type` and that configuration's arguments: random weights.
        quantization: arguments of transformers' `BitsAndBytesConfig`.
        dtype: of the weights that are not quantised; float32 where all are trained.
        revision: of a hub id.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the checkpoint.
    """


@dataclass(frozen=True)
class StartSection:
    """Section `start`: trained adapters to start from, in place of fresh ones.

    Args:
        policy: PEFT folder. The reference is then a frozen copy of it.
        reward: PEFT folder with a score head: the reward stage is not needed.
        value: PEFT folder with a score head, or "reward" for a copy of the reward role.
    """

    policy: str | None = None
    reward: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class RewardHeadSection:
    """Section `reward_head`.

    Args:
        num_labels: outputs: 1 for a score, more for classes.
    """

    num_labels: int = 1


@dataclass(frozen=True)
class ValueHeadSection:
    """Section `value_head`: how a fresh head of the value role starts.

    Args:
        init: weights drawn with standard deviation 0.02, or orthogonal with gain √2.
        bias: whether it has a bias, starting at 0.
    """

    init: Literal["normal", "orthogonal"] = "normal"
    bias: bool = False


@dataclass(frozen=True)
class ValueModelSection(BaseSection):
    """Section `value_model`: a base of its own for the value role, of the same tokens as the policy's.

    With `adapters.value` it is frozen under that adapter; without, all its weights are trained.

    Args:
        model: hub id or local folder, of a language model or of a reward model.
        config: in place of `model`, `model_type` and that configuration's arguments: random weights.
        quantization: arguments of transformers' `BitsAndBytesConfig`.
        dtype: of the weights that are not quantised; float32 where all are trained.
        revision: of a hub id.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the checkpoint.
    """


@dataclass(frozen=True)
class CollectSection:
    """Section `collect`: responses to the training prompts, sampled where the policy starts and scored by `scorer`.

    Args:
        samples_per_prompt: responses to each prompt.
        max_prompts: the first so many prompts; null for all.
        temperature: of sampling.
        response_length: tokens of a response, its end included.
        batch_size: responses sampled at a time.
    """

    samples_per_prompt: int = 1
    max_prompts: int | None = None
    temperature: float = 1.0
    response_length: int = 53
    batch_size: int = 64


STAGE_CLASSES: dict[str, type] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "q": QConfig}
PLAIN_SECTIONS: dict[str, type] = {
    "base": BaseSection,
    "scorer": ScorerSection,
    "start": StartSection,
    "reward_head": RewardHeadSection,
    "reward_model": RewardModelSection,
    "value_head": ValueHeadSection,
    "value_model": ValueModelSection,
    "collect": CollectSection,
}
ADAPTER_ROLES = ("policy", "value", "reward", "q")
# `data` is for all stages; the others, for one stage each, come before it.
DATA_SECTIONS = ("data", "sft_data", "reward_data", "q_data")
TOP_LEVEL = ("about", "seed", *DATA_SECTIONS, "adapters", *PLAIN_SECTIONS, *STAGE_CLASSES)
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


def suggestion(name: str, known: Sequence[str]) -> str:
    """`Did you mean x?`, or the known names where none is near."""
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
        f'write {where.rpartition(".")[2]}: "{text}" in a file, \'{where}="{text}"\' on the command line.'
    )


def _construct(place: str, build: Callable[[], Any]) -> list[str]:
    try:
        build()
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        return [f"{place} — {error}"]
    return []


def model_section(stage: str, values: dict[str, Any]) -> str:
    """The section with the model that a stage trains, whose `dtype` its precision follows."""
    return "reward_model" if stage == "reward" and "reward_model" in values else "base"


def check_stage(stage: str, values: Any, *, base_dtype: str = "bfloat16") -> list[str]:
    """Problems of a stage's section, its owner's own complaints included."""
    owner = STAGE_CLASSES[stage]
    reasons = NOT_OFFERED if stage == "ppo" else None
    problems = check_keys(stage, values, owner, hidden=("output_dir", "seed"), reasons=reasons)
    if stage == "ppo" and isinstance(values, dict) and values.get("loop", "toolkit") == "toolkit":
        problems += [
            f"ppo.{key} — would have no effect: {reason}."
            for key, reason in ignored_by_our_loop(values).items()
            if key not in SET_ELSEWHERE
        ]
    if stage == "q" and isinstance(values, dict):
        problems += [f"q.{key} — would have no effect: {IGNORED_BY_Q[key]}." for key in values if key in IGNORED_BY_Q]
    if stage == "sft" and isinstance(values, dict) and values.get("packing") and values.get("max_length", 0) is None:
        problems.append("sft.max_length — a whole number is needed with sft.packing, got None: rows are packed to it.")
    build = partial(stage_config, stage, values, output_dir="unused", seed=0, base_dtype=base_dtype)
    return problems or _construct(stage, build)


@dataclass(frozen=True)
class Preset:
    """A value that the toolkit gives a stage's field where the recipe gives none."""

    value: Any
    reason: str


def presets(stage: str, values: dict[str, Any], *, base_dtype: str, model: str = "base") -> dict[str, Preset]:
    """The fields of a stage that the toolkit sets, where the section does not.

    Precision follows the `dtype` of the section `model` unless the stage's section says otherwise: TRL's own default is
    bf16 on every card, also on those that have none. transformers refuses bf16 without a GPU unless `use_cpu` says that
    the CPU is meant; here that goes by itself.
    """
    found: dict[str, Preset] = {}
    if not torch.cuda.is_available():
        found["use_cpu"] = Preset(True, "no GPU is here")
    if stage == "reward":
        # TRL would leave out pairs over it without a word.
        found["max_length"] = Preset(None, "the data section has limits, and reports what they leave out")
    if not {"bf16", "fp16"} & values.keys():
        reason = f"{model}.dtype is {base_dtype}"
        found["bf16"] = Preset(base_dtype == "bfloat16", reason)
        found["fp16"] = Preset(base_dtype == "float16", reason)
    return {name: preset for name, preset in found.items() if name not in values}


def stage_config(stage: str, values: dict[str, Any], *, output_dir: str, seed: int, base_dtype: str) -> Any:
    """A stage's section as an object of its owner's class, with the toolkit's presets where it is silent."""
    ours = {name: preset.value for name, preset in presets(stage, values, base_dtype=base_dtype).items()}
    return STAGE_CLASSES[stage](output_dir=output_dir, seed=seed, **ours, **values)


def check_adapters(values: Any) -> list[str]:
    """Problems of the section `adapters`."""
    if not isinstance(values, dict):
        return [f"adapters — a section with a role for each key is needed, got {values!r}."]
    problems = []
    for role, config in values.items():
        if role not in ADAPTER_ROLES:
            problems.append(f"adapters.{role} — no such role. {suggestion(role, ADAPTER_ROLES)}")
            continue
        found = check_keys(f"adapters.{role}", config, LoraConfig)
        problems += found or _construct(f"adapters.{role}", partial(LoraConfig, **config))
    return problems


def check_data(values: Any, place: str = "data") -> list[str]:
    """Problems of a data section: the task's own fields."""
    if not isinstance(values, dict) or values.get("task") not in TASKS:
        seen = values.get("task") if isinstance(values, dict) else values
        return [f"{place}.task — one of {', '.join(TASKS)} is needed, got {seen!r}."]
    arguments = {key: value for key, value in values.items() if key != "task"}
    return check_keys(place, arguments, TASKS[values["task"]], hidden=("tokenizer",))


def check_scorer(values: Any, place: str = "scorer") -> list[str]:
    """Problems of the section `scorer`, or of a part of a sum."""
    owner = ScorerSection if place == "scorer" else PartSection
    problems = check_keys(place, values, owner)
    if problems:
        return problems
    problems = section_problems(place, values)
    if values.get("quantization") is not None:
        problems += _check_quantization(f"{place}.quantization", values["quantization"])
    for name, part in (values.get("parts") or {}).items():
        inner = f"{place}.parts.{name}"
        if owner is PartSection or (isinstance(part, dict) and part.get("kind") == "sum"):
            problems.append(f"{inner} — is a sum within a sum. Give its parts to the outer one.")
        else:
            problems += check_scorer(part, inner)
    return problems


def needs_reward_role(scorer: dict[str, Any]) -> bool:
    """As `ScorerSection.needs_reward_role`, of a section that may have problems."""
    parts = scorer.get("parts")
    every = [scorer, *parts.values()] if isinstance(parts, dict) else [scorer]
    return any(isinstance(part, dict) and part.get("kind", "adapter") == "adapter" for part in every)


def with_reward_files(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with a reward's file found in the recipe's own folder, where the current one has none of that name."""

    def found(scorer: Any) -> Any:
        if not isinstance(scorer, dict):
            return scorer
        changed = dict(scorer)
        if isinstance(scorer.get("function"), str):
            changed["function"] = beside(scorer["function"], folder)
        if isinstance(scorer.get("parts"), dict):
            changed["parts"] = {name: found(part) for name, part in scorer["parts"].items()}
        return changed

    return {**values, "scorer": found(values["scorer"])} if "scorer" in values else values


def _check_quantization(place: str, values: dict[str, Any]) -> list[str]:
    return check_keys(place, values, BitsAndBytesConfig) or _construct(place, lambda: BitsAndBytesConfig(**values))


def _check_base(base: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Problems of the section `base` beyond its keys."""
    problems = []
    if base.get("quantization") is not None:
        problems += _check_quantization("base.quantization", base["quantization"])
    if (base.get("model") is None) == (base.get("config") is None):
        problems.append(
            "base — exactly one of model (a checkpoint) and config (random weights) is needed. "
            "Name a checkpoint with MODEL=/path/to/checkpoint (make) or base.model=/path/to/checkpoint."
        )
    elif base.get("config") is not None:
        if "sft" not in values:
            problems.append("sft — this section is missing: a base with random weights needs pretraining.")
        task = _section(values, "data").get("task")
        if task in TASKS and "tokenizer" in owner_fields(TASKS[task]):
            problems.append(
                f"base.config — data.task {task} needs a checkpoint's tokenizer, and random weights have none. "
                "Name a checkpoint with base.model=/path/to/checkpoint."
            )
    return problems


def _check_value_model(section: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Problems of the section `value_model` beyond its keys."""
    problems = []
    quantized = section.get("quantization") is not None
    if quantized:
        problems += _check_quantization("value_model.quantization", section["quantization"])
    if (section.get("model") is None) == (section.get("config") is None):
        problems.append("value_model — exactly one of model (a checkpoint) and config (random weights) is needed.")
    if "value" not in _section(values, "adapters"):
        dtype = section.get("dtype", ValueModelSection.dtype)
        if quantized:
            problems.append("adapters.value — is missing: 4-bit weights have no gradients, and so need an adapter.")
        elif dtype != "float32":
            problems.append(
                f"value_model.dtype — float32 is needed where all weights are trained, got {dtype}: small steps would "
                "round to nothing. Or give adapters.value."
            )
    elif section.get("config") is not None:
        problems.append("adapters.value — would leave random weights (value_model.config) as they are. Remove it.")
    ppo = _section(values, "ppo")
    if "ppo" not in values:
        problems.append("value_model — would have no effect: there is no section ppo.")
    if ppo.get("value", "separate") == "shared":
        problems.append("value_model — would have no effect: ppo.value is shared, so value is a head on the policy.")
    if ppo.get("loop") == "trl":
        problems.append("ppo.loop — trl runs the value role on the shared base, not on value_model. Use toolkit.")
    if _section(values, "start").get("value") == "reward":
        problems.append("start.value — is reward, whose base is not that of value_model. Remove one of them.")
    return problems


def _check_copied_reward(values: dict[str, Any]) -> list[str]:
    """Problems of a value role that starts as a copy of the section `reward_model`."""
    problems, adapters = [], _section(values, "adapters")
    if _section(values, "reward_head").get("num_labels", 1) != 1:
        problems.append("start.value — is reward, whose head has several outputs, and a value is one number.")
    if {"reward", "value"} <= adapters.keys():
        problems.append("adapters.value — would have no effect: the value role starts with the adapter of the reward.")
    if _section(values, "ppo").get("loop") == "trl":
        problems.append("ppo.loop — trl runs the value role on the shared base, not on a copy of reward_model.")
    return problems


def check_recipe(values: dict[str, Any]) -> list[str]:
    """All problems of a resolved recipe; empty if there are none."""
    problems = [f"{key} — no such section. {suggestion(key, TOP_LEVEL)}" for key in values if key not in TOP_LEVEL]
    problems += [f"{key} — this section is missing." for key in ("base", "data") if key not in values]
    if not isinstance(values.get("seed", 0), int):
        problems.append(f"seed — a whole number is needed, got {values['seed']!r}.")
    for name, owner in PLAIN_SECTIONS.items():
        if name in values:
            problems += check_scorer(values[name]) if owner is ScorerSection else check_keys(name, values[name], owner)
    if isinstance(values.get("base"), dict):
        problems += _check_base(values["base"], values)
    if isinstance(values.get("value_model"), dict):
        problems += _check_value_model(values["value_model"], values)
    for place in DATA_SECTIONS:
        if place in values:
            problems += check_data(values[place], place)
    if "adapters" in values:
        problems += check_adapters(values["adapters"])
    for stage in STAGE_CLASSES:
        if stage in values:
            dtype = _section(values, model_section(stage, values)).get("dtype", BaseSection.dtype)
            problems += check_stage(stage, values[stage], base_dtype=dtype)
    return problems + _check_collect(_section(values, "collect")) + _check_together(values) + _check_q(values)


def _check_q(values: dict[str, Any]) -> list[str]:
    """Problems between the section `q` and others."""
    adapted = "q" in _section(values, "adapters")
    if "q" not in values:
        return ["adapters.q — would have no effect: there is no section q."] if adapted else []
    problems = [] if adapted else ["adapters.q — is missing: the q stage trains it."]
    if "q_data" not in values and "collect" not in values:
        problems.append("q — has nothing to learn from: give rated responses (q_data), or sample them (collect).")
    q = _section(values, "q")
    of_one_choice = (
        ("bound", "sigmoid", ("highest_return", "bound_scale", "bound_bias")),
        ("decoding", "sample", ("decoding_temperature",)),
    )
    for choice, needed, names in of_one_choice:
        problems += [
            f"q.{name} — would have no effect: it belongs to q.{choice}: {needed}."
            for name in names
            if name in q and q.get(choice) != needed
        ]
    if "q_data" in values and "collect" in values:
        problems.append("collect — would have no effect: q_data names the responses.")
    return problems


def _check_collect(collect: dict[str, Any]) -> list[str]:
    """Numbers of the section `collect` that cannot be; those of a wrong type are noted elsewhere."""
    least = {"samples_per_prompt": 1, "max_prompts": 1, "response_length": 1, "batch_size": 1}
    problems = [
        f"collect.{key} — a number from {minimum} is needed, got {collect[key]}."
        for key, minimum in least.items()
        if isinstance(collect.get(key), int) and collect[key] < minimum
    ]
    temperature = collect.get("temperature", 1.0)
    if isinstance(temperature, (int, float)) and not temperature > 0:
        problems.append(f"collect.temperature — a number above 0 is needed, got {temperature}.")
    return problems


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _check_together(values: dict[str, Any]) -> list[str]:
    """Problems between sections."""
    problems = [
        f"{place} — would have no effect: there is no section {place.removesuffix('_data')}."
        for place in DATA_SECTIONS[1:]
        if place in values and place.removesuffix("_data") not in values
    ]
    adapters = _section(values, "adapters")
    if "ppo" in values:
        problems += _check_roles_of_ppo(values)
    if "sft" in values and "policy" not in adapters and _section(values, "base").get("model") is not None:
        why = (
            "4-bit weights have no gradients" if _section(values, "base").get("quantization") else "all roles share it"
        )
        problems.append(
            f"adapters.policy — is missing: the sft stage trains it. Full fine-tuning of the base is refused: {why}."
        )
    if (
        _section(values, "reward").get("loss") == "token_level"
        and _section(values, "reward_head").get("num_labels", 1) != 1
    ):
        problems.append("reward.loss — token_level is of pairs, and reward_head.num_labels says classes. Remove one.")
    if "reward" in values and "reward" not in adapters and "reward_model" not in values:
        problems.append("adapters.reward — is missing: the reward stage trains it.")
    return problems + _check_reward_model(values)


def _check_roles_of_ppo(values: dict[str, Any]) -> list[str]:
    """Problems between the section `ppo` and those that say where its roles come from."""
    adapters, scorer, start, ppo = (_section(values, name) for name in ("adapters", "scorer", "start", "ppo"))
    problems = []
    shared = ppo.get("value", "separate") == "shared"
    if "policy" not in adapters and not start.get("policy"):
        problems.append("adapters.policy — is missing: PPO trains it.")
    if shared and "value" in adapters:
        problems.append(
            "adapters.value — would have no effect: ppo.value is shared, so value has the policy's adapter."
        )
    if shared and start.get("value"):
        problems.append("start.value — would have no effect: ppo.value is shared.")
    if not shared and "value_model" not in values and "value" not in adapters and not start.get("value"):
        problems.append("adapters.value — is missing: ppo.value is separate. Add it, or set ppo.value to shared.")
    if start.get("value") and "value_head" in values:
        problems.append("value_head — would have no effect: the head starts as start.value says.")
    kind = scorer.get("kind", "adapter")
    copied = start.get("value") == "reward"
    if copied and "reward_model" in values:
        problems += _check_copied_reward(values)
    elif copied and not needs_reward_role(scorer):
        problems.append(f"start.value — is reward, but with scorer.kind: {kind} there is no reward role.")
    if kind == "sum" and ppo.get("loop") == "trl":
        problems.append("ppo.loop — trl scores with the reward adapter alone, not with a sum. Use toolkit.")
    return problems


def _check_reward_model(values: dict[str, Any]) -> list[str]:
    """Problems between the section `reward_model`, the scorer that reads it and the stage that trains it."""
    scorer, start, adapters = (_section(values, name) for name in ("scorer", "start", "adapters"))
    parts = {f"scorer.parts.{name}": part for name, part in _section(scorer, "parts").items()}
    every = parts if scorer.get("kind") == "sum" else {"scorer": scorer}
    unnamed = [
        place
        for place, part in every.items()
        if isinstance(part, dict) and part.get("kind") == "model" and part.get("model") is None
    ]
    if "reward_model" not in values:
        return [
            f"{place}.model — belongs to scorer.kind: model, and is needed there (a folder or hub id). Or add the "
            "section reward_model, for a model that the reward stage trains."
            for place in unnamed
        ]
    own, problems = _section(values, "reward_model"), []
    quantized = own.get("quantization") is not None
    if quantized:
        problems += _check_quantization("reward_model.quantization", own["quantization"])
    if "reward" not in adapters:
        dtype = own.get("dtype", RewardModelSection.dtype)
        if quantized:
            problems.append("adapters.reward — is missing: quantised weights have no gradients and so need an adapter.")
        elif dtype != "float32":
            problems.append(
                f"reward_model.dtype — float32 is needed where all weights are trained, got {dtype}: small steps would "
                "round to nothing. Or give adapters.reward."
            )
    if (own.get("model") is None) == (own.get("config") is None):
        problems.append("reward_model — exactly one of model (a checkpoint) and config (random weights) is needed.")
    elif own.get("config") is not None and quantized:
        problems.append("reward_model.quantization — would have no effect: random weights are not quantised.")
    elif own.get("config") is not None and "reward" in adapters:
        problems.append("adapters.reward — is not for reward_model.config: random weights have to train whole.")
    if "reward" not in values:
        problems.append(
            "reward_model — would have no effect: there is no section reward, which trains it. One that is trained "
            "already is named by scorer.model."
        )
    if "ppo" in values and not unnamed and needs_reward_role(scorer) and not start.get("reward"):
        problems.append(
            "scorer.kind — adapter reads the reward role, and the reward stage trains reward_model. Use kind: model."
        )
    return problems
