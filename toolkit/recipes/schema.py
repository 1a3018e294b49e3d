"""What a recipe may say: each section is its owner's own configuration class, checked before anything loads."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from toolkit.data import TASKS
from toolkit.recipes.keys import (
    SET_ELSEWHERE,
    check_keys,
    check_quantization,
    construction_problems,
    not_installed,
    out_of_range,
    owner_fields,
    suggestion,
)
from toolkit.recipes.sections import (
    ADAPTER_ROLES,
    DATA_SECTIONS,
    PLAIN_SECTIONS,
    STAGE_CLASSES,
    TOP_LEVEL,
    BaseSection,
)
from toolkit.recipes.together import check_base, check_collect, check_q, check_together, check_value_model, section_of
from toolkit.rewards import PartSection, ScorerSection
from toolkit.rewards.function import beside
from toolkit.rewards.section import section_problems
from toolkit.trainers.ppo_config import NOT_OFFERED, ignored_by_our_loop
from toolkit.trainers.q_config import IGNORED as IGNORED_BY_Q

# Of make and of the commands; by mistake among the keys.
_ARGUMENTS = {
    "RECIPE": "its first one",
    "MODEL": "base.model=… here, MODEL=… with make",
    "RUN": "--run name",
    "FROM": "--from-run name",
    "OVERWRITE": "--overwrite",
    "RESUME": "--resume",
    "SET": "the keys themselves, each a word",
}


def model_section(stage: str, values: dict[str, Any]) -> str:
    """The section with the model that a stage trains, whose `dtype` its precision follows."""
    return "reward_model" if stage == "reward" and "reward_model" in values else "base"


def check_stage(stage: str, values: Any, *, base_dtype: str = "bfloat16") -> list[str]:
    """Problems of a stage's section, its owner's own complaints included."""
    owner = STAGE_CLASSES[stage]
    reasons = NOT_OFFERED if stage == "ppo" else None
    problems = check_keys(stage, values, owner, hidden=("output_dir", "seed"), reasons=reasons)
    problems += out_of_range(stage, values) + not_installed(stage, values)
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
    return problems or construction_problems(stage, build)


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
    made = STAGE_CLASSES[stage](output_dir=output_dir, seed=seed, **ours, **values)
    # With several cards in sight transformers would wrap the model in DataParallel, whose copies share one active role,
    # and multiply the batch: the first card is the one (CUDA_VISIBLE_DEVICES chooses another).
    made._n_gpu = min(made.n_gpu, 1)
    return made


def check_adapters(values: Any) -> list[str]:
    """Problems of the section `adapters`."""
    if not isinstance(values, dict):
        return [f"adapters — a section with a role for each key is needed, got {values!r}."]
    problems = []
    for role, config in values.items():
        if role not in ADAPTER_ROLES:
            problems.append(f"adapters.{role} — no such role. {suggestion(role, ADAPTER_ROLES)}")
            continue
        found = check_keys(f"adapters.{role}", config, LoraConfig) or out_of_range(f"adapters.{role}", config)
        problems += found or construction_problems(f"adapters.{role}", partial(LoraConfig, **config))
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
        problems += check_quantization(f"{place}.quantization", values["quantization"])
    for name, part in (values.get("parts") or {}).items():
        inner = f"{place}.parts.{name}"
        if owner is PartSection or (isinstance(part, dict) and part.get("kind") == "sum"):
            problems.append(f"{inner} — is a sum within a sum. Give its parts to the outer one.")
        else:
            problems += check_scorer(part, inner)
    return problems


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


def _section_hint(key: str) -> str:
    """Where a key belongs that stands beside the sections, or the section that was meant."""
    if key in _ARGUMENTS:
        return f"It is an argument of the command: {_ARGUMENTS[key]}."
    owners = {**PLAIN_SECTIONS, **STAGE_CLASSES, "data": TASKS["preferences"]}
    homes = [section for section, owner in owners.items() if key in owner_fields(owner)]
    if homes:
        return f"It is a key of {', '.join(homes)}: write {'ppo' if 'ppo' in homes else homes[0]}.{key}."
    return suggestion(key, TOP_LEVEL)


def check_recipe(values: dict[str, Any]) -> list[str]:
    """All problems of a resolved recipe; empty if there are none."""
    problems = [f"{key} — no such section. {_section_hint(key)}".rstrip() for key in values if key not in TOP_LEVEL]
    problems += [f"{key} — this section is missing." for key in ("base", "data") if key not in values]
    if not isinstance(values.get("seed", 0), int):
        problems.append(f"seed — a whole number is needed, got {values['seed']!r}.")
    for name, owner in PLAIN_SECTIONS.items():
        if name in values:
            problems += check_scorer(values[name]) if owner is ScorerSection else check_keys(name, values[name], owner)
    if isinstance(values.get("base"), dict):
        problems += check_base(values["base"], values)
    if isinstance(values.get("value_model"), dict):
        problems += check_value_model(values["value_model"], values)
    for place in DATA_SECTIONS:
        if place in values:
            problems += check_data(values[place], place)
    if "adapters" in values:
        problems += check_adapters(values["adapters"])
    for stage in STAGE_CLASSES:
        if stage in values:
            dtype = section_of(values, model_section(stage, values)).get("dtype", BaseSection.dtype)
            problems += check_stage(stage, values[stage], base_dtype=dtype)
    return problems + check_collect(section_of(values, "collect")) + check_together(values) + check_q(values)
