"""Find a recipe, read it, apply overrides, check it."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Set
from difflib import get_close_matches
from functools import reduce
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.representer import RepresenterError

from toolkit.data import TASKS
from toolkit.data.sources import PART_SETTINGS, has_part, is_downloaded, sources_of
from toolkit.disk import MANIFEST
from toolkit.errors import Problem, RecipeError, did_you_mean
from toolkit.rewards.function import beside
from toolkit.settings import fits
from toolkit.spec.as_text import to_yaml
from toolkit.spec.chat_template import with_template
from toolkit.spec.insertions import with_insertions
from toolkit.spec.keys import owner_fields
from toolkit.spec.plan import STAGES
from toolkit.spec.plan import section as at_section
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import DATA_SECTIONS, SCORER_SECTIONS, STAGE_CLASSES
from toolkit.spec.shipped import as_shipped, names, recipe_folder
from toolkit.spec.validate import check_recipe

_DEEPEST, _MOST = 50, 100_000  # of the values of a recipe
_LONGEST = 100  # digits of a whole number


def about(name: str) -> str:
    """The line in which a shipped recipe says what it is."""
    return str(yaml.safe_load(find(name).read_text(encoding="utf-8")).get("about", ""))


def find(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe, by name or path.

    Raises:
        RecipeError: there is none; with the nearest names.
    """
    try:
        path = Path(name).expanduser()
        there = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, or with NUL, or a ~user that is not
        raise RecipeError(f"{name!r} names no recipe: {_reason(error)}") from error
    if path.suffix in (".yaml", ".yml"):
        if there:
            return path
        near = [one.name for one in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near)
        if path.stem in names():
            hint = f"The shipped recipe is named without .yaml: {path.stem}."
        looked = "" if path.is_absolute() else f", looked for from {Path.cwd()}"
        raise RecipeError(f"{path}: there is no such file{looked}.", remedy=hint)
    shipped = next(recipe_folder().rglob(f"{name}.yaml"), None) if str(name) in names() else None
    if shipped is None:
        for run in (path, Path("runs") / path):
            if (kept := run / "recipe.yaml").is_file():
                raise RecipeError(f'"{name}" is a run and no recipe.', remedy=f"Its own recipe is {kept}.")
        near = get_close_matches(str(name), names(), n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(names())}."
        hint += f" Keys come after the recipe: doubling {name}." if "=" in str(name) else ""
        raise RecipeError(f'no recipe "{name}". {hint} A file of your own is named by its path, ending in .yaml.')
    return shipped


# What reading YAML can come to: ValueError also for text that is not UTF-8, or `!!float x`.
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError, RecursionError)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OF_YAML_1_1 = re.compile(r"[-+]?(0[0-7_]+$|.*:)")  # 010 is 8 and 1:30 is 90


def check_yaml(text: str) -> yaml.Node | None:
    """What a text is; None of an empty one.

    Its keys are text, no number is beyond all sense, and a few lines do not stand for thousands of values, as with
    aliases of aliases.

    Raises:
        ValueError: they are not, or do.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    nodes, seen = [(root, 0)] if root is not None else [], 0
    while nodes:
        node, depth = nodes.pop()
        seen += 1
        if depth > _DEEPEST or seen > _MOST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep, or has more than {_MOST:,} values.")
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                    what = repr(key.value) if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                    line = key.start_mark.line + 1
                    raise ValueError(f"a key has to be text, in quotes if need be: {what} in line {line} is not.")
                nodes.append((value, depth + 1))
        elif isinstance(node, yaml.SequenceNode):
            nodes += [(item, depth + 1) for item in node.value]
        elif node.tag == "tag:yaml.org,2002:int" and len(node.value) > _LONGEST:
            raise ValueError(f"it has a number of {len(node.value):,} digits.")
        elif node.tag in _NUMBERS and _OF_YAML_1_1.match(node.value):
            wrong = f"{node.value} would be a number to base 8 or 60. Write it in tens, or in quotes if it is text."
            raise ValueError(wrong)
    return root


def _plain(values: Any) -> Any:
    """What OmegaConf has parsed, as plain dicts and lists: where it merged or resolved, it would ask its resolvers for
    what `${…}` names, and they read the environment and more."""
    return OmegaConf.to_container(values, resolve=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        root = check_yaml(text)
        values = _plain(OmegaConf.create(text)) if root is None or isinstance(root, yaml.MappingNode) else None
    except _UNREADABLE as error:
        raise RecipeError(f"{path} cannot be read as YAML: {_reason(error)}") from error
    if not isinstance(values, dict):
        kind = type(root).__name__.removesuffix("Node").lower()
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is a {kind}.")
    if empty := next(_empty_stages(root), None):
        wrong = "is empty, which is YAML's null, and null takes a stage away."
        raise RecipeError(str(path), problems=[Problem(wrong, empty, f"Write {empty}: {{}} for its defaults.")])
    return values


def _empty_stages(root: yaml.Node | None) -> Iterator[str]:
    """The stages of a recipe's file after whose name nothing stands."""
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value in STAGES and isinstance(value, yaml.ScalarNode) and not (value.value or value.style):
            yield key.value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections from Python, held to what a file can say."""
    try:
        text = to_yaml(dict(values))
        check_yaml(text)
        return cast(dict[str, Any], _plain(OmegaConf.create(text)))
    except RepresenterError as error:
        wrong = f"what was given cannot be a recipe: {_key_of(error.args[-1], values)} is {error.args[-1]!r}."
        raise RecipeError(wrong, remedy="Give text, numbers, lists and sections.") from error
    except _UNREADABLE as error:
        raise RecipeError(f"what was given cannot be a recipe: {_reason(error)}") from error


def _key_of(item: Any, values: Any, above: str = "") -> str:
    """The key at which an item stands within values."""
    inside = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inside:
        place = f"{above}.{key}".lstrip(".")
        if found := place if value is item else _key_of(item, value, place):
            return found
    return ""


def _change(override: str) -> dict[str, Any]:
    """What an override says, as sections."""
    if not isinstance(override, str):
        wrong = f"override {override!r} is no text of the form section.key=value."
        raise RecipeError(wrong, remedy="Sections are given by name: ppo={…}.")
    key, equals, value = override.strip().partition("=")
    if not equals or not all(part.strip("[]{} ") for part in key.split(".")) or key.count(".") > _DEEPEST:
        raise RecipeError(f'override "{override}" is not of the form section.key=value.')
    if not value.strip():  # YAML's null, as where a variable of the shell is not set
        wrong = f'override "{override}" has no value.'
        empty = f'an empty text is "{key}=\'\'" on the command line, SET="{key}=\\"\'\'\\"" with make'
        raise RecipeError(wrong, field=key, remedy=f"Give one: {empty}; null takes a stage's key away.")
    try:
        node = check_yaml(value)
        change: dict[str, Any] = _plain(OmegaConf.from_dotlist([override.strip()]))
    except _UNREADABLE as error:
        raise RecipeError(f'override "{override}" cannot be read: {_reason(error)}') from error
    if left_out := value[0 if node is None else node.end_mark.index :].strip():
        wrong = f'override "{override}": "{left_out}" would be a comment of YAML.'
        raise RecipeError(wrong, field=key, remedy="Put the value in quotes of its own.")
    return change


def _merged(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Values with a change, which goes into the sections that are there and replaces all else."""
    both = {
        key: _merged(values[key], item) if isinstance(item, dict) and isinstance(values.get(key), dict) else item
        for key, item in change.items()
    }
    return {**values, **both}


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    return " ".join((getattr(error, "strerror", None) or str(error)).split())  # a file's name is said already


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


def is_run_name(name: str) -> bool:
    """Whether a text names one folder within the folder of all runs, on any system; no hidden one, and no option."""
    return (
        name.isprintable() and not name.startswith((".", "-")) and 0 < len(name.encode(errors="replace")) <= 200
        and PureWindowsPath(name).name == PurePosixPath(name).name == name
    )  # fmt: skip


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


def _named(name: str | os.PathLike[str] | Mapping[str, Any], run: str | None, runs: Path) -> tuple[Path, str, str]:
    """The file of a recipe, or the place of one that is given; its own name; and that of its run.

    Raises:
        RecipeError: there is no such file, or no name of a run.
    """
    if isinstance(name, Mapping):
        if run is None:
            raise RecipeError("a recipe that is a mapping has no name for its run.", remedy="Name it $run.")
        path, own = Path(f"{run}.yaml"), run
    else:
        path = find(name)
        # The recipe that a run folder keeps is that run's, and not a recipe called "recipe".
        kept = path.name == "recipe.yaml" and path.resolve().parent.parent == runs.resolve()
        own = path.resolve().parent.name if kept else path.stem
        folder = path.resolve().parent
        if run is None and not kept and path.name == "recipe.yaml" and any(folder.glob(f"*/{MANIFEST}")):
            wrong = f"{path} is the recipe of the run {folder.name} in {folder.parent}, and the runs are in {runs}."
            raise RecipeError(wrong, remedy="Give that folder as $runs_dir, or name a new run: $run.")
    run = own if run is None else run
    if not isinstance(run, str) or not is_run_name(run):
        wrong = f"{run!r} is no name of a run: that is one folder among all runs, with no slash, no dot or dash first."
        raise RecipeError(wrong, remedy="Name it $run; where the runs are is $runs_dir.")
    return path, own, run


def load(
    name: str | os.PathLike[str] | Mapping[str, Any],
    *overrides: str,
    run: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    sections: Mapping[str, Any] | None = None,
) -> Recipe:
    """As `toolkit.recipes.load`, for those that make no trainers of it."""
    runs = Path(os.path.expanduser(runs_dir))
    path, own, run = _named(name, run, runs)
    begun = _given(name) if isinstance(name, Mapping) else _read(path)
    changes = [_given(sections or {}), *map(_change, overrides)]
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
        found = with_reward_files(found, path.parent)
        found = _with_whole_paths(found)
    except (OSError, ValueError, RuntimeError) as error:  # as in `find`
        raise RecipeError(f"{path} names a file that cannot be: {_reason(error)}") from error
    found = with_template(found, path.parent)
    problems = check_recipe(found)
    if problems:
        raise RecipeError(str(path), problems=problems)
    return Recipe(own, found, run, runs)
