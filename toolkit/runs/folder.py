"""A run folder: which of its stages hold under a recipe's settings, and what may be deleted there.

The folder keeps its recipe. When another one comes, the keys that differ decide: a stage stands as long as neither it
nor a stage before it reads one of them. What has taken hours is deleted by those alone who say so.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from toolkit.checkpoints import checkpoint_folders, step_of
from toolkit.errors import Problem, RecipeError, ToolkitError
from toolkit.reports import RESULT_FILE, read_result
from toolkit.runs.collect import partial_file
from toolkit.spec.plan import STAGES, section
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import STAGE_CLASSES

RECIPE_FILE = "recipe.yaml"
SAFETENSORS = "*model*.safetensors"  # of a PEFT folder, and of a checkpoint
EVALUATION = "eval"  # folder of what was measured of a trained policy

# What a stage can go on with changed: it decides when something is written or how much memory is taken, and nothing of
# what the run has done so far.
_MAY_CHANGE = (
    "gradient_checkpointing", "logprob_chunk_size", "q_chunk_size",
    "local_rollout_forward_batch_size", "per_device_eval_batch_size", "eval_strategy", "eval_steps", "save_strategy",
    "save_steps", "save_total_limit", "logging_steps", "report_to", "run_name", "dataloader_num_workers",
)  # fmt: skip
_LENGTHS = ("max_steps", "num_train_epochs")  # these may grow
_ROWS_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SHOWN = 3  # differences that a message names
_LONGEST = 60  # characters of a value in it
ABSENT = object()  # the value of a key that a recipe does not have
Changes: TypeAlias = Mapping[str, tuple[Any, Any]]


def no_such_run(run: str, runs_dir: Path) -> str:
    """That there is no such run, and which there are."""
    others = sorted(path.parent.name for path in runs_dir.glob(f"*/{RECIPE_FILE}"))
    there = f"There are {', '.join(others)}." if others else "There is none yet: make ppo trains one."
    return f'no run "{run}" in {runs_dir}. {there}'


def _recorded(folder: Path) -> dict[str, Any]:
    """The recipe that a run folder keeps; empty where it keeps none that can be read."""
    try:
        values = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _leaves(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a recipe by their dotted keys."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def changes(recipe: Recipe, stage: str, folder: Path) -> Changes:
    """Dotted keys that the stage, or one before it, reads, with their values in the folder's recipe and in this one.

    Those alone that differ; of a stage that is not the recipe's, all that differ.
    """
    there, here = dict(_leaves(_recorded(folder))), dict(_leaves(yaml.safe_load(recipe.to_yaml())))
    plan = recipe.plan.stages.get(stage)
    read = [key for key in {**there, **here} if plan is None or plan.reads_key(key)]
    pairs = {key: (there.get(key, ABSENT), here.get(key, ABSENT)) for key in read}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def finished(recipe: Recipe, stage: str) -> dict[str, Any] | None:
    """The result of a stage that the run folder has finished under settings that are this recipe's too, else None."""
    return None if changes(recipe, stage, recipe.folder) else read_result(recipe.stage_folder(stage))


_RENAME_OR_DELETE = "Name a new run ($run), or give $overwrite to delete it."
_GO_ON_OR_DELETE = "Go on with $resume, or begin anew with $overwrite."


def work_of(folder: Path) -> Problem | None:
    """What a stage's folder holds that would have to be computed again, and the ways on; None if there is nothing."""
    stage, partial = folder.name, partial_file(folder)
    if read_result(folder) is not None:
        return Problem(f"{folder} holds a finished {stage} stage.", remedy=_RENAME_OR_DELETE)
    if saved := checkpoint_folders(folder):
        wrong = f"{folder} holds a {stage} stage that was not finished, saved up to step {step_of(saved[-1])}."
        return Problem(wrong, remedy=_GO_ON_OR_DELETE)
    # As a notebook's `save_model` leaves them.
    if any(folder.glob(f"[!.]*/{SAFETENSORS}")) or any(folder.glob("value/value_head.safetensors")):
        wrong = f"{folder} holds weights that were saved without a checkpoint to go on from."
        return Problem(wrong, remedy=_RENAME_OR_DELETE)
    if partial.is_file() and partial.stat().st_size > 0:
        wrong = f"{folder} holds responses of a {stage} stage that was not finished."
        return Problem(wrong, remedy=_GO_ON_OR_DELETE)
    return None


def _may_change(recipe: Recipe, stage: str) -> set[str]:
    """Keys that may differ where the stage goes on: those above, a length that grows, a product that stays."""
    names = {*_MAY_CHANGE}
    if stage in STAGE_CLASSES:
        there, here = (_numbers(values, stage) for values in (_recorded(recipe.folder), recipe.values))
        names |= {name for name in _LENGTHS if 0 < there[name] < here[name]}
        if math.prod(there[name] for name in _ROWS_OF_A_STEP) == math.prod(here[name] for name in _ROWS_OF_A_STEP):
            names |= {*_ROWS_OF_A_STEP}
    return {f"{stage}.{name}" for name in names}


def _numbers(values: dict[str, Any], stage: str) -> dict[str, float]:
    """The lengths and rows of a stage's section, or their defaults; -1 where there is no number."""
    owner, given = STAGE_CLASSES[stage], section(values, stage)
    numbers = {name: given.get(name, getattr(owner, name)) for name in (*_LENGTHS, *_ROWS_OF_A_STEP)}
    return {name: number if isinstance(number, (int, float)) else -1 for name, number in numbers.items()}


def _outdated(recipe: Recipe, resumed: str | None = None) -> dict[str, Changes]:
    """Stages whose work in the run folder was done under other settings, each with what differs."""
    found = {stage: changes(recipe, stage, recipe.folder) for stage in STAGES}
    if resumed is not None:
        kept = _may_change(recipe, resumed)
        found[resumed] = {key: pair for key, pair in found[resumed].items() if key not in kept}
    return {stage: differing for stage, differing in found.items() if differing and work_of(recipe.stage_folder(stage))}


def described(changes: Changes) -> str:
    """The first few of the keys, with the values there and here."""

    def shown(value: Any) -> str:
        text = "not set" if value is ABSENT else json.dumps(value, ensure_ascii=False, default=str)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    parts = [f"{key} is {shown(there)} there and {shown(here)} here" for key, (there, here) in changes.items()]
    more = len(parts) - _SHOWN
    return "; ".join(parts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def listed(stages: Iterable[str]) -> str:
    """Names as a sentence has them: "sft, reward and ppo"."""
    *first, last = stages
    return f"{', '.join(first)} and {last}" if first else last


def conflict(recipe: Recipe, *, resumed: str | None = None) -> Problem | None:
    """Why the run folder cannot be this recipe's without losing work, and the ways on; None where it can.

    With `resumed`, a stage that goes on from its checkpoints, which it can do with some settings changed.
    """
    outdated = _outdated(recipe, resumed)
    if not outdated:
        return None
    differing = max(outdated.values(), key=len)  # a later stage reads all that an earlier one does
    why = described(differing) if _recorded(recipe.folder) else f"its {RECIPE_FILE} is missing or cannot be read"
    begin = keep = ""
    if finished_ones := [stage for stage in STAGES if finished(recipe, stage) is not None]:
        kept = listed(finished_ones)
        begin, keep = f", which can begin with the {kept} of {recipe.run} ($from_run)", f", and keep its {kept}"
    return Problem(
        f"{recipe.folder} holds a run of another recipe or other settings: {why}.",
        remedy=f"Name a new run ($run){begin}. Or give $overwrite to delete its {listed(outdated)}{keep}.",
    )


def claim(recipe: Recipe, stage: str, *, overwrite: bool = False, resume: bool = False) -> None:
    """Make the run folder this recipe's own, and clear what an earlier try of the stage left.

    With `overwrite` the stages there that were run under other settings are deleted, and what an earlier try of this
    one left; with `resume` that is kept.

    Raises:
        RecipeError: stages there were run under other settings, or the stage's results or checkpoints are there, and
            no way on was chosen.
        ToolkitError: the folder cannot be written.
    """
    marker, folder = recipe.folder / RECIPE_FILE, recipe.stage_folder(stage)
    try:
        resumed = stage if resume else None
        problem, work = conflict(recipe, resumed=resumed), work_of(folder)
        if problem is not None and not overwrite:
            goes_on = f" The run goes on with its own recipe, {marker}, and $resume." if resume else ""
            raise RecipeError(problem.wrong, remedy=problem.remedy + goes_on)
        if work is not None and not (overwrite or resume):
            raise RecipeError(work.wrong, remedy=work.remedy)
        if work is not None and resume and work.remedy == _RENAME_OR_DELETE and not checkpoint_folders(folder):
            wrong = f"{folder} holds a {stage} stage and no checkpoint of it to go on from."
            raise RecipeError(wrong, remedy=_RENAME_OR_DELETE)
        if resume and finished(recipe, stage) is None:
            # What it came to so far is the result of other settings.
            (folder / RESULT_FILE).unlink(missing_ok=True)
            _delete_evaluation(recipe, stage)
        for outdated in _outdated(recipe, resumed):
            _delete(recipe, outdated)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(recipe.to_yaml(), encoding="utf-8")
        if not (resume and work_of(folder)):
            _delete(recipe, stage)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        wrong = f"{recipe.folder}: cannot write there ({error.strerror})."
        raise ToolkitError(wrong, remedy="Choose another folder.") from error


def _delete(recipe: Recipe, stage: str) -> None:
    """A stage's folder, and what was measured of the policy that it trained."""
    shutil.rmtree(recipe.stage_folder(stage), ignore_errors=True)
    _delete_evaluation(recipe, stage)


def _delete_evaluation(recipe: Recipe, stage: str) -> None:
    if stage in ("ppo", "q"):
        shutil.rmtree(recipe.stage_folder(EVALUATION), ignore_errors=True)
