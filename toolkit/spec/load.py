"""Load a recipe: find and read it, apply overrides with what they replace, check it."""

import os
from collections.abc import Collection, Iterator, Mapping, Set
from functools import reduce
from pathlib import Path
from typing import Any

from toolkit.data import TASKS
from toolkit.data.source_kinds import PART_SETTINGS, has_part, is_downloaded, sources_of
from toolkit.errors import RecipeError
from toolkit.rewards.function import beside
from toolkit.settings import fits
from toolkit.spec.chat_template import with_template
from toolkit.spec.find import home_of, named, reason
from toolkit.spec.insertions import with_insertions
from toolkit.spec.keys import owner_fields
from toolkit.spec.plan import section as at_section
from toolkit.spec.read import read_file, read_override, read_sections
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import DATA_SECTIONS, SCORER_SECTIONS, STAGE_CLASSES
from toolkit.spec.shipped import as_shipped, recipe_folder
from toolkit.spec.validate import check_recipe


def _merged(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Values with a change, which goes into the sections that are there and replaces all else."""
    both = {
        key: _merged(values[key], item) if isinstance(item, dict) and isinstance(values.get(key), dict) else item
        for key, item in change.items()
    }
    return {**values, **both}


def _without_what_hides(values: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The recipe without the keys of its stages beside which those that are given would have no effect: a number of
    updates beside one of passes, and that nothing is evaluated, or saved, beside the steps after which it is to be."""
    for stage in STAGE_CLASSES:
        settings = values.get(stage)
        if not isinstance(settings, dict):
            continue
        new = {key for key, value in settings.items() if value is not None and f"{stage}.{key}" in given}
        if new & {"num_train_epochs", "total_episodes"} and "max_steps" not in new:
            settings.pop("max_steps", None)
        if "num_train_epochs" in new and "total_episodes" not in new:
            settings.pop("total_episodes", None)
        for name, hides in (("eval", ("no",)), ("save", ("no", "epoch"))):
            if f"{name}_steps" in new and f"{name}_strategy" not in new and settings.get(f"{name}_strategy") in hides:
                del settings[f"{name}_strategy"]
    return values


# Of two of these that are given for held-out rows one would have no effect.
_HELD_OUT_BY = tuple(
    pair for key in ("validation", "validation_split") for pair in ((key, "validation_size"), ("validation_size", key))
)


def _of_others(data: Mapping[str, Any], begun: Mapping[str, Any]) -> Iterator[str]:
    """Keys that select a part of what a section of data has `begun` with, where it names none of these sources now, nor
    a folder that may be one of them, downloaded: reading it tells where that has no such part."""
    before = sources_of("", begun)
    for key in PART_SETTINGS:
        now = sources_of(key, data)
        kept = (has_part(key, str(name)) for name in now if name in before or is_downloaded(str(name)))
        if now != sources_of(key, begun) and not any(kept):
            yield key


def _without_the_replaced(values: dict[str, Any], given: Set[str], begun: dict[str, Any]) -> dict[str, Any]:
    """The recipe without what it says of a task, of a source of the hub, or of held-out rows, in whose place others are
    given than it `begun` with."""
    for section in DATA_SECTIONS:
        data = values.get(section)
        if not isinstance(data, dict):
            continue
        if f"{section}.task" in given and (task := TASKS.get(str(data.get("task")))) is not None:
            known = {name for one in TASKS.values() for name in owner_fields(one)}  # a misspelt key is no other task's
            others = (data.keys() & known) - {"task", *owner_fields(task)}
            data = values[section] = {k: v for k, v in data.items() if k not in others or f"{section}.{k}" in given}
        if not given.isdisjoint({f"{section}.train", f"{section}.validation"}):
            for key in _of_others(data, at_section(begun, section)):
                if f"{section}.{key}" not in given:
                    data.pop(key, None)
        for key, instead in _HELD_OUT_BY:
            if data.get(key) is not None and f"{section}.{key}" in given and f"{section}.{instead}" not in given:
                data.pop(instead, None)
    return values


def _without_null(values: dict[str, Any]) -> dict[str, Any]:
    """Sections and adapters that are null are not there: `sft=null`, `adapters.value=null`. Nor are keys of a stage
    that cannot be null: `ppo.max_steps=null` takes a number away, so that its owner's default holds."""
    kept = {key: value for key, value in values.items() if value is not None}
    for stage, owner in STAGE_CLASSES.items():
        if isinstance(kept.get(stage), dict):
            hints = owner_fields(owner)
            gone = {key for key, value in kept[stage].items() if value is None and not fits(None, hints.get(key, Any))}
            kept[stage] = {key: value for key, value in kept[stage].items() if key not in gone}
    if isinstance(kept.get("adapters"), dict):
        kept["adapters"] = {role: config for role, config in kept["adapters"].items() if config is not None}
    return kept


def _with_shipped_data(values: dict[str, Any], path: Path, given: Collection[str]) -> dict[str, Any]:
    """A shipped recipe with the example data that is shipped beside it, where this folder has none of the name, and a
    run's with that of this environment, where another had it; a file that is `given` is where the user says."""
    shipped = path.resolve().is_relative_to(recipe_folder().resolve())
    beside = recipe_folder().resolve().parent

    def placed(name: Any) -> Any:
        if isinstance(name, list):
            return [placed(one) for one in name]
        if not isinstance(name, str) or Path(name).exists():
            return name
        known = as_shipped(name)
        return str(beside / known) if (shipped or known != name) and (beside / known).is_file() else name

    for section in DATA_SECTIONS:
        if isinstance(data := values.get(section), dict):
            own = [key for key in ("train", "validation") if key in data and f"{section}.{key}" not in given]
            values[section] = data | {key: placed(data[key]) for key in own}
    return values


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

    return {**values, **{section: placed(values[section]) for section in SCORER_SECTIONS if section in values}}


def _with_whole_paths(values: Any) -> Any:
    """Models in folders of a user's, as ~/models/llama: transformers would take the name for that of the hub."""
    if not isinstance(values, dict):
        return values
    return {
        key: str(Path(value).expanduser())
        if key == "model" and isinstance(value, str) and value.startswith("~")
        else _with_whole_paths(value)
        for key, value in values.items()
    }


def load(
    name: str | os.PathLike[str] | Mapping[str, Any],
    *overrides: str,
    run: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    sections: Mapping[str, Any] | None = None,
) -> Recipe:
    """As `toolkit.recipes.load`, for those that make no trainers of it."""
    runs = Path(os.path.expanduser(runs_dir))
    path, own, run = named(name, run, runs)
    begun = read_sections(name) if isinstance(name, Mapping) else read_file(path)
    changes = [read_sections(sections or {}), *map(read_override, overrides)]
    resolved, problems = with_insertions(reduce(_merged, changes, begun))
    if problems:
        raise RecipeError(str(path), problems=problems)
    sections_given = [(section, inside) for change in changes for section, inside in change.items()]
    given = {f"{section}.{key}" for section, inside in sections_given if isinstance(inside, dict) for key in inside}
    try:
        found = _without_null(resolved)
        found = _without_what_hides(found, given)
        found = _without_the_replaced(found, given, begun)
        found = _with_shipped_data(found, path, given)
        found = with_reward_files(found, home_of(path))
        found = _with_whole_paths(found)
    except (OSError, ValueError, RuntimeError) as error:  # as in `find.find`
        raise RecipeError(f"{path} names a file that cannot be: {reason(error)}") from error
    found = with_template(found, home_of(path))
    problems = check_recipe(found)
    if problems:
        raise RecipeError(str(path), problems=problems)
    return Recipe(own, found, run, runs)
