"""Stages of another run, copied where their settings agree."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from peft.utils import CONFIG_NAME

from toolkit.checkpoints import CHECKPOINT
from toolkit.disk import copy_contents, writing
from toolkit.errors import RecipeError
from toolkit.models import base_named, name_base
from toolkit.reports import read_result
from toolkit.runs import aside
from toolkit.runs.differences import changed_data, changes, described
from toolkit.runs.folder import check_outputs, check_whole, claim, finish, finished, listed, work_of
from toolkit.runs.owned import RECIPE_FILE
from toolkit.spec.find import is_run_name
from toolkit.spec.recipe import Recipe


def take_over(recipe: Recipe, source: str, needs: list[str], *, wanted: str | None = None, **way: bool) -> list[str]:
    """Copy finished stages of another run whose settings, as far as the stages read them, are this recipe's too, and
    whose data have not changed since.

    Checkpoints stay where they are. A stage that this run has finished, or with `resume` begun, is left alone, and one
    that stands on a stage which is not finished here is not taken. `source` is the other run's name, in the same folder
    of runs, `needs` are the stages that are wanted, in order, and `wanted` and `way` are those of `claim`.

    Returns:
        A sentence for each stage that this run has not finished: that it is taken, or why not.

    Raises:
        RecipeError: there is no such run, or nothing of it can be taken; or as for `claim`.
        ToolkitError: the folder cannot be written, or a kill has left a stage aside there.
    """
    other = replace(recipe, run=source)
    if is_run_name(source):
        check_whole(other.folder, ())
    if source == recipe.run or not is_run_name(source) or not (other.folder / RECIPE_FILE).is_file():
        if not is_run_name(source):
            _refuse_path(recipe, source)
        why = "is this run itself" if source == recipe.run else f"is not in {recipe.runs_dir}"
        raise RecipeError(f'the run "{source}" to take from {why}.', remedy="Name another run: $from_run.")
    if not needs:
        wrong = f'nothing is taken from the run "{source}": no stage comes before this one.'
        raise RecipeError(wrong, remedy="Leave $from_run out.")
    said, refused = [], 0
    missing = [stage for stage in needs if finished(recipe, stage) is None]
    for stage in missing:
        problem = _not_taken(recipe, other, stage)
        if way.get("resume") and work_of(recipe.stage_folder(stage)):
            said.append(f"{stage} goes on here.")
        elif problem is not None:
            check_whole(other.folder, [stage])
            said.append(f"{stage} is run anew: {problem}.")
            refused += 1
        else:
            claim(recipe, stage, wanted=wanted, **way)
            _copy(other, recipe, stage)
            said.append(f"{stage} is taken from {other.stage_folder(stage)}.")
    taken = any(_taken_from(recipe, other, stage) for stage in needs if stage not in missing)  # by an earlier try
    if missing and refused == len(missing) and not taken:
        wrong = f'nothing can be taken from the run "{source}": {" ".join(said)}'
        raise RecipeError(wrong, remedy="Leave $from_run out.")
    return said


def _refuse_path(recipe: Recipe, source: str) -> None:
    """Raises a RecipeError where a run is named by its path, or its name is that of one here."""
    path = Path(os.path.expanduser(source))
    named, is_run = path.name, os.path.isfile(path / RECIPE_FILE)  # False of what no disk takes for a name
    if is_run and path.resolve().parent != recipe.runs_dir.resolve():
        wrong = f'"{source}" is a path, and a run is taken from by its name, in the same folder of runs as the new one.'
        remedy = f'Name the run, here "{named}", with its folder: $from_run, and $runs_dir, here {path.parent}.'
        raise RecipeError(wrong, remedy=f"{remedy} The new run is written there, too.")
    if os.path.isfile(recipe.runs_dir / named / RECIPE_FILE):
        raise RecipeError(f'"{source}" is a path.', remedy=f'Name the run: $from_run, here "{named}".')


def _taken_from(recipe: Recipe, other: Recipe, stage: str) -> bool:
    result = read_result(recipe.stage_folder(stage)) or {}
    return bool(result.get("taken_from") == str(other.stage_folder(stage)))


def _not_taken(recipe: Recipe, other: Recipe, stage: str) -> str | None:
    """Why another run's stage cannot be this one's; None where it can."""
    if differing := changes(recipe, stage, other.folder):
        return f"{described(differing)} ({other.folder} and {recipe.folder})"
    if read_result(other.stage_folder(stage)) is None:
        return f"{other.folder} has not finished it"
    if changed := changed_data(other.stage_folder(stage)):
        return f"{changed} since {other.folder} ran it"
    missing = [earlier for earlier in recipe.plan.needs(stage) if finished(recipe, earlier) is None]
    return f"{listed(missing)}, which it needs, is not finished here" if missing else None


def _copy(source: Recipe, target: Recipe, stage: str) -> None:
    """Under another name first: what carries the stage's name is whole."""
    folder, taken = target.stage_folder(stage), target.folder / aside.TAKEN
    check_outputs(source.folder, [stage])
    with writing(folder, "Make room, then repeat."):
        shutil.rmtree(taken, ignore_errors=True)
        try:
            copy_contents(source.stage_folder(stage), taken, leaving=_stays)
            for path in taken.glob(f"*/{CONFIG_NAME}"):
                if base_named(path.parent) == source.base_path:  # of which this run has a copy
                    name_base(path.parent, target.base_path)
            result = read_result(taken)
            assert result is not None
            finish(taken, {**result, "taken_from": str(source.stage_folder(stage))})
        except BaseException:
            shutil.rmtree(taken, ignore_errors=True)  # which may hold the room that is lacking
            raise
        aside.place(target.folder, taken, stage)


def _stays(path: Path) -> bool:
    return CHECKPOINT in path.name or path.is_symlink()
