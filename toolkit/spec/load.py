"""Find a recipe, read it, apply overrides, check it."""

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit.data.sources import HUB_SETTINGS, is_hub_id
from toolkit.errors import Problem, RecipeError
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import DATA_SECTIONS
from toolkit.spec.validate import check_recipe, with_reward_files


def recipe_folder() -> Path:
    """Where the shipped recipes are: in the package if it was installed, in the repository if it runs from there."""
    installed = Path(str(files("toolkit.spec"))) / "files"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipe_folder().rglob("*.yaml"))


def about(name: str) -> str:
    """The line in which a shipped recipe says what it is."""
    return str(yaml.safe_load(find(name).read_text(encoding="utf-8")).get("about", ""))


def find(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe, by name or path.

    Raises:
        RecipeError: there is none; with the nearest names.
    """
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"{path}: there is no such file.")
    shipped = next(recipe_folder().rglob(f"{name}.yaml"), None) if str(name) in names() else None
    if shipped is None:
        near = get_close_matches(str(name), names(), n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(names())}."
        raise RecipeError(f'no recipe "{name}". {hint} A file of your own is named by its path, ending in .yaml.')
    return shipped


def _strings(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _strings(value, f"{place}.{key}" if place else str(key))
    elif isinstance(values, list):
        for i, value in enumerate(values):
            yield from _strings(value, f"{place}.{i}")
    elif isinstance(values, str):
        yield place, values


def _read(path: Path) -> DictConfig:
    try:
        values = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as error:
        raise RecipeError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, DictConfig):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is a {type(values).__name__}.")
    return values


def _without_the_replaced(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe without what it says of a hub id in whose place an override names a file or folder."""
    given = {override.partition("=")[0] for override in overrides}
    for section in DATA_SECTIONS:
        data = values.get(section)
        if f"{section}.train" not in given or not isinstance(data, dict):
            continue
        if not any(is_hub_id(str(data[key])) for key in ("train", "validation") if data.get(key) is not None):
            for key in HUB_SETTINGS:
                if f"{section}.{key}" not in given:
                    data.pop(key, None)
    return values


def _without_null(values: dict[str, Any]) -> dict[str, Any]:
    """Sections and adapters that are null are not there: `sft=null`, `adapters.value=null`."""
    kept = {key: value for key, value in values.items() if value is not None}
    if isinstance(kept.get("adapters"), dict):
        kept["adapters"] = {role: config for role, config in kept["adapters"].items() if config is not None}
    return kept


def load(
    name: str | os.PathLike[str], *overrides: str, run: str | None = None, runs_dir: str | os.PathLike[str] = "runs"
) -> Recipe:
    """As `toolkit.recipes.load`, for those that make no trainers of it."""
    path = find(name)
    values = _read(path)
    for override in overrides:
        if "=" not in override:
            raise RecipeError(f'override "{override}" is not of the form section.key=value.')
        try:
            merged = OmegaConf.merge(values, OmegaConf.from_dotlist([override]))
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            reason = " ".join(str(error).split())
            raise RecipeError(f'override "{override}" does not fit the recipe: {reason}') from error
        assert isinstance(merged, DictConfig)
        values = merged
    # Resolvers read the environment and more; a secret could so land in the resolved recipe of a run.
    raw = OmegaConf.to_container(values, resolve=False)
    forbidden = [
        Problem(f"{text!r} calls a resolver; only keys of the recipe itself, as ${{seed}}, can be inserted.", place)
        for place, text in _strings(raw)
        if "${" in text and ":" in text[text.index("${") :].split("}")[0]
    ]
    if forbidden:
        raise RecipeError(str(path), problems=forbidden)
    try:
        resolved = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RecipeError(str(path), problems=[Problem(" ".join(str(error).split()))]) from error
    assert isinstance(resolved, dict)
    checked = _without_the_replaced(_without_null({str(key): value for key, value in resolved.items()}), overrides)
    checked = with_reward_files(checked, path.parent)
    problems = check_recipe(checked)
    if problems:
        raise RecipeError(str(path), problems=problems)
    # The recipe that a run folder keeps is that run's, and not a recipe called "recipe".
    kept = path.name == "recipe.yaml" and path.resolve().parent.parent == Path(runs_dir).resolve()
    own = path.resolve().parent.name if kept else path.stem
    return Recipe(own, checked, run or own, Path(runs_dir))
