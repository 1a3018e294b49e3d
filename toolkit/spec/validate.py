"""What a recipe may say: each section is its owner's own configuration class, checked before anything loads."""

from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import BitsAndBytesConfig

from toolkit.data import TASKS
from toolkit.errors import ConfigError, Problem
from toolkit.rewards import DEFAULT_KIND, SCORERS, scorer_of
from toolkit.rewards.function import beside
from toolkit.spec.keys import check_keys, owner_fields, suggestion
from toolkit.spec.plan import section
from toolkit.spec.resolve import resolve
from toolkit.spec.sections import (
    ADAPTER_ROLES,
    DATA_SECTIONS,
    PLAIN_SECTIONS,
    STAGE_CLASSES,
    TOP_LEVEL,
    BaseSection,
)
from toolkit.spec.stage import check_stage

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


def check_adapters(values: Any) -> list[Problem]:
    """Problems of the section `adapters`."""
    if not isinstance(values, dict):
        return [Problem(f"a section with a role for each key is needed, got {values!r}.", "adapters")]
    problems = []
    for role, config in values.items():
        if role not in ADAPTER_ROLES:
            problems.append(Problem("no such role.", f"adapters.{role}", suggestion(role, ADAPTER_ROLES)))
            continue
        problems += check_keys(f"adapters.{role}", config, LoraConfig, build=LoraConfig)
    return problems


def _check_quantization(place: str, values: Any) -> list[Problem]:
    return check_keys(f"{place}.quantization", values, BitsAndBytesConfig, build=BitsAndBytesConfig)


def check_data(values: Any, place: str = "data") -> list[Problem]:
    """Problems of a data section: the task's own fields."""
    if not isinstance(values, dict) or values.get("task") not in TASKS:
        seen = values.get("task") if isinstance(values, dict) else values
        return [Problem(f"one of {', '.join(TASKS)} is needed, got {seen!r}.", f"{place}.task")]
    arguments = {key: value for key, value in values.items() if key != "task"}
    return check_keys(place, arguments, TASKS[values["task"]], hidden=("tokenizer",))


def check_scorer(values: Any, place: str = "scorer") -> list[Problem]:
    """Problems of the section `scorer`, or of a part of a sum: the fields of its kind."""
    if not isinstance(values, dict):
        return [Problem(f"a section with keys is needed, got {values!r}.", place)]
    kind = values.get("kind", DEFAULT_KIND)
    if kind not in list(SCORERS):
        return [Problem(f"{' or '.join(map(repr, SCORERS))} is needed, got {kind!r}.", f"{place}.kind")]
    fields = {name: _scorer_fields(owner, part=place != "scorer") for name, owner in SCORERS.items()}
    given = {key: value for key, value in values.items() if key in fields[kind]}
    problems = check_keys(place, given, SCORERS[kind])
    for key in (key for key in values if key != "kind" and key not in given):
        kinds = " and ".join(name for name in SCORERS if key in fields[name])
        if not kinds:
            problems.append(
                Problem(f"kind: {kind} has no such field.", f"{place}.{key}", suggestion(key, fields[kind]))
            )
        elif values[key] is not None:
            wrong = f"belongs to scorer.kind: {kinds}, and would have no effect with kind: {kind}."
            problems.append(Problem(wrong, f"{place}.{key}", f"Remove it ({place}.{key}=null)."))
    if isinstance(given.get("quantization"), dict):
        problems += _check_quantization(place, given["quantization"])
    if isinstance(given.get("parts"), dict):
        problems += [p for name, part in given["parts"].items() for p in check_scorer(part, f"{place}.parts.{name}")]
    if not problems:
        try:
            scorer_of(values)
        except ConfigError as error:
            return [problem.within(place) for problem in error.problems]
    return problems


def _scorer_fields(owner: type, *, part: bool) -> list[str]:
    return [name for name in owner_fields(owner) if part or name != "weight"]


def with_reward_files(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with a reward's file found in the recipe's own folder, where the current one has none of that name."""

    def placed(scorer: Any) -> Any:
        if not isinstance(scorer, dict):
            return scorer
        changed = dict(scorer)
        if isinstance(scorer.get("function"), str):
            changed["function"] = beside(scorer["function"], folder)
        if isinstance(scorer.get("parts"), dict):
            changed["parts"] = {name: placed(part) for name, part in scorer["parts"].items()}
        return changed

    return {**values, "scorer": placed(values["scorer"])} if "scorer" in values else values


def _section_hint(key: str) -> str:
    """Where a key belongs that stands beside the sections, or the section that was meant."""
    if key in _ARGUMENTS:
        return f"It is an argument of the command: {_ARGUMENTS[key]}."
    owners = {**PLAIN_SECTIONS, **STAGE_CLASSES, "data": TASKS["preferences"]}
    homes = [section for section, owner in owners.items() if key in owner_fields(owner)]
    if any(key in _scorer_fields(owner, part=False) for owner in SCORERS.values()):
        homes.append("scorer")
    if homes:
        return f"It is a key of {', '.join(homes)}: write {'ppo' if 'ppo' in homes else homes[0]}.{key}."
    return suggestion(key, TOP_LEVEL)


def check_recipe(values: dict[str, Any]) -> list[Problem]:
    """All problems of a resolved recipe; empty if there are none."""
    problems = [Problem("no such section.", key, _section_hint(key)) for key in values if key not in TOP_LEVEL]
    problems += [Problem("this section is missing.", key) for key in ("base", "data") if key not in values]
    if not isinstance(values.get("seed", 0), int):
        problems.append(Problem(f"a whole number is needed, got {values['seed']!r}.", "seed"))
    for name, owner in PLAIN_SECTIONS.items():
        if name in values:
            problems += check_keys(name, values[name], owner)
    if "scorer" in values:
        problems += check_scorer(values["scorer"])
    for name in ("base", "reward_model", "value_model"):
        if isinstance(values.get(name), dict) and values[name].get("quantization") is not None:
            problems += _check_quantization(name, values[name]["quantization"])
    for place in DATA_SECTIONS:
        if place in values:
            problems += check_data(values[place], place)
    if "adapters" in values:
        problems += check_adapters(values["adapters"])
    plan = resolve(values)
    for stage in STAGE_CLASSES:
        if stage in values:
            dtype = section(values, plan.stages[stage].model).get("dtype", BaseSection.dtype)
            problems += check_stage(stage, values[stage], base_dtype=dtype)
    return [*problems, *plan.problems]
