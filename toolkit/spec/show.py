"""Show a recipe as resolved, each value beside its owner's default, and what the toolkit adds to it."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import yaml
from peft import LoraConfig
from transformers import CONFIG_MAPPING, BitsAndBytesConfig

from toolkit.data import TASKS
from toolkit.errors import printable
from toolkit.models import AUTO
from toolkit.rewards import DEFAULT_KIND, SCORERS
from toolkit.spec.as_text import to_yaml
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import DATA_SECTIONS, DEFAULT_SEED, PLAIN_SECTIONS, SCORER_SECTIONS, STAGE_CLASSES
from toolkit.spec.stage import presets


def owner_defaults(owner: type) -> dict[str, Any]:
    """Defaults of the class's settings, as YAML would hold them. Those that have to be given have none."""
    given = {p.name: p.default for p in inspect.signature(owner).parameters.values() if p.default is not p.empty}
    made = {}
    for field in fields(owner) if is_dataclass(owner) else ():
        if field.name in given and callable(field.default_factory):
            made[field.name] = field.default_factory()
    kind = {"kind": DEFAULT_KIND} if owner in SCORERS.values() else {}
    return {name: _plain(default) for name, default in {**kind, **given, **made}.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def as_yaml(value: Any) -> str:
    """A value as YAML on one line."""
    form: dict[str, Any] = {"default_flow_style": True, "width": 2**31}
    try:
        text = to_yaml([value], **form).strip()
        if not text.isprintable():  # a line break in a text is then written \n
            text = to_yaml([value], **form, default_style='"', allow_unicode=text == printable(text)).strip()
    except yaml.YAMLError:  # a default of a type that YAML has no form for
        return repr(value)
    return text[1:-1]


def _same(value: Any, default: Any) -> bool:
    # In Python True is 1, in a recipe it is not.
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _owners(values: dict[str, Any]) -> dict[tuple[str, ...], type]:
    """Whose class each mapping of a recipe is, by its path."""
    owners: dict[tuple[str, ...], type] = {}
    for section in values:
        if section in DATA_SECTIONS:
            owners[section,] = TASKS[values[section]["task"]]
        elif section in SCORER_SECTIONS:
            owners[section,] = SCORERS[values[section].get("kind", DEFAULT_KIND)]
        elif section in PLAIN_SECTIONS or section in STAGE_CLASSES:
            owners[section,] = {**PLAIN_SECTIONS, **STAGE_CLASSES}[section]
    owners |= {("adapters", role): LoraConfig for role in values.get("adapters", {})}
    for section in (*PLAIN_SECTIONS, *SCORER_SECTIONS):
        owners[section, "quantization"] = BitsAndBytesConfig
        kind = (values.get(section, {}).get("config") or {}).get("model_type")
        if kind in CONFIG_MAPPING:
            owners[section, "config"] = CONFIG_MAPPING[kind]
    return owners


def show(recipe: Recipe) -> str:
    """The resolved recipe as YAML, with its owner's default as a comment beside each value.

    `# the default` where it is that, `# default: X` where it differs, and nothing where there is none. What the toolkit
    sets in a stage, where the recipe is silent and the default is another, is a comment line with the reason. Read back
    all gives `recipe.values`.
    """
    lines: list[str] = []
    owners = _owners(recipe.values)
    for key, value in recipe.values.items():
        if isinstance(value, dict) and lines:
            lines.append("")
        lines += _lines({key: value}, (), {"seed": DEFAULT_SEED}, owners)
        if key in STAGE_CLASSES:
            lines += _preset_lines(recipe, key)
        if key == "base" and (chosen := recipe.base_precision).why:
            lines.append(f"  # dtype: {chosen.dtype}  # default: {AUTO}; set by the toolkit: {chosen.why}")
    return "\n".join(lines) + "\n"


def _preset_lines(recipe: Recipe, stage: str) -> Iterator[str]:
    defaults = owner_defaults(STAGE_CLASSES[stage])
    model = recipe.plan.stages[stage].model
    ours = presets(stage, recipe.values[stage], precision=recipe.precision(stage), model=model, run=recipe.run)
    for name, preset in ours.items():
        if not _same(preset.value, defaults[name]):
            default = f"default: {as_yaml(defaults[name])}"
            yield f"  # {name}: {as_yaml(preset.value)}  # {default}; set by the toolkit: {preset.reason}"


def _lines(
    values: dict[str, Any], place: tuple[str, ...], defaults: dict[str, Any], owners: dict[tuple[str, ...], type]
) -> Iterator[str]:
    indent = "  " * len(place)
    for key, value in values.items():
        label = f"{indent}{as_yaml(key)}:"
        inner = (*place, key)
        if isinstance(value, dict) and value and (inner in owners or not place):
            yield label
            yield from _lines(value, inner, owner_defaults(owners[inner]) if inner in owners else {}, owners)
            continue
        comment = ""
        if key in defaults:
            same = _same(value, defaults[key])
            comment = "  # the default" if same else f"  # default: {as_yaml(defaults[key])}"
        yield f"{label} {as_yaml(value)}{comment}"
