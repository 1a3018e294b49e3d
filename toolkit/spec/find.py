"""Find a recipe's file by its name or path, and the name of its run; no library is loaded."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from toolkit.disk import MANIFEST, REPLACED, UNFINISHED
from toolkit.errors import RecipeError, did_you_mean
from toolkit.spec.shipped import names, recipe_folder


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
        raise RecipeError(f"{name!r} names no recipe: {reason(error)}") from error
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


def is_run_name(name: str) -> bool:
    """Whether a text names one folder within the folder of all runs, on any system; no hidden one, and no option."""
    return (
        name.isprintable() and not name.startswith((".", "-")) and 0 < len(name.encode(errors="replace")) <= 200
        and PureWindowsPath(name).name == PurePosixPath(name).name == name
    )  # fmt: skip


def home_of(path: Path) -> Path:
    """The folder beside which the files of a recipe lie: its own, or the run's in which a kill has left it aside."""
    folder = Path(os.path.abspath(path)).parent  # of a link the one that it lies in
    return folder.parent if path.name == "recipe.yaml" and folder.name in (REPLACED, UNFINISHED) else folder


def named(name: str | os.PathLike[str] | Mapping[str, Any], run: str | None, runs: Path) -> tuple[Path, str, str]:
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
        folder = home_of(path.resolve())
        # The recipe that a run folder keeps is that run's, and not a recipe called "recipe".
        kept = path.name == "recipe.yaml" and folder.parent == runs.resolve()
        own = folder.name if kept else path.stem
        if run is None and not kept and path.name == "recipe.yaml" and any(folder.glob(f"*/{MANIFEST}")):
            wrong = f"{path} is the recipe of the run {folder.name} in {folder.parent}, and the runs are in {runs}."
            raise RecipeError(wrong, remedy="Give that folder as $runs_dir, or name a new run: $run.")
    run = own if run is None else run
    if not isinstance(run, str) or not is_run_name(run):
        wrong = f"{run!r} is no name of a run: that is one folder among all runs, with no slash, no dot or dash first."
        raise RecipeError(wrong, remedy="Name it $run; where the runs are is $runs_dir.")
    return path, own, run


def reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    return " ".join((getattr(error, "strerror", None) or str(error)).split())  # a file's name is said already
