"""A run folder: which of its stages hold under a recipe's settings, and what may be deleted there.

The folder keeps its recipe. When another one comes, the keys that differ decide: a stage stands as long as neither it
nor a stage before it reads one of them. What has taken hours is deleted by those alone who say so.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.checkpoints import checkpoint_folders, step_of
from toolkit.errors import Problem, RecipeError, ToolkitError
from toolkit.reports import RESULT_FILE, read_result
from toolkit.runs.collect import partial_file
from toolkit.spec.plan import STAGES
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


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two recipes differ, with the value of each."""
    first, second = dict(_leaves(one)), dict(_leaves(other))
    pairs = {key: (first.get(key, ABSENT), second.get(key, ABSENT)) for key in {**first, **second}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _leaves(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a recipe by their dotted keys."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def differences_of(recipe: Recipe, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which the folder's recipe and this one differ: the value there, and here."""
    return differences(_recorded(folder), yaml.safe_load(recipe.to_yaml()))


def read_keys(recipe: Recipe, stage: str, keys: Mapping[str, Any]) -> list[str]:
    """Those of the keys that the stage, or one before it, reads; of a stage that is not the recipe's, all."""
    plan = recipe.plan.stages.get(stage)
    return [key for key in keys if plan is None or plan.reads_key(key)]


def finished(recipe: Recipe, stage: str) -> dict[str, Any] | None:
    """The result of a stage that the run folder has finished under settings that are this recipe's too, else None."""
    if read_keys(recipe, stage, differences_of(recipe, recipe.folder)):
        return None
    return read_result(recipe.stage_folder(stage))


def _holds_weights(folder: Path) -> bool:
    """Whether something trained was saved there, as by a notebook's `save_model`."""
    return any(folder.glob(f"[!.]*/{SAFETENSORS}")) or any(folder.glob("value/value_head.safetensors"))


def _holds_responses(folder: Path) -> bool:
    partial = partial_file(folder)
    return partial.is_file() and partial.stat().st_size > 0


def holds_work(folder: Path) -> bool:
    """Whether there is something in a stage's folder that would have to be computed again."""
    saved = read_result(folder) is not None or bool(checkpoint_folders(folder))
    return saved or _holds_weights(folder) or _holds_responses(folder)


def _may_change(recipe: Recipe, stage: str) -> set[str]:
    """Keys that may differ where the stage goes on: those above, a length that grows, a product that stays."""
    found = {f"{stage}.{name}" for name in _MAY_CHANGE}
    if stage not in STAGE_CLASSES:
        return found
    owner: Any = STAGE_CLASSES[stage]

    def numbers(values: dict[str, Any], names: tuple[str, ...]) -> list[float]:
        section = values.get(stage)
        given = section if isinstance(section, dict) else {}
        every = [given.get(name, owner.__dataclass_fields__[name].default) for name in names]
        return [number if isinstance(number, (int, float)) else -1 for number in every]

    recorded = _recorded(recipe.folder)
    for name in _LENGTHS:
        (there,), (here,) = numbers(recorded, (name,)), numbers(recipe.values, (name,))
        if 0 < there < here:
            found.add(f"{stage}.{name}")
    there_rows, here_rows = numbers(recorded, _ROWS_OF_A_STEP), numbers(recipe.values, _ROWS_OF_A_STEP)
    if math.prod(there_rows) == math.prod(here_rows):
        found |= {f"{stage}.{name}" for name in _ROWS_OF_A_STEP}
    return found


def _outdated(recipe: Recipe, resumed: str | None = None) -> dict[str, list[str]]:
    """Stages whose work in the run folder was done under other settings, each with the keys that differ."""
    differences = differences_of(recipe, recipe.folder)
    found = {stage: read_keys(recipe, stage, differences) for stage in STAGES}
    if resumed is not None:
        kept = _may_change(recipe, resumed)
        found[resumed] = [key for key in found[resumed] if key not in kept]
    return {stage: keys for stage, keys in found.items() if keys and holds_work(recipe.stage_folder(stage))}


def described(differences: Mapping[str, tuple[Any, Any]], keys: list[str]) -> str:
    """The first few of the keys, with the values there and here."""

    def shown(value: Any) -> str:
        text = "not set" if value is ABSENT else json.dumps(value, ensure_ascii=False, default=str)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    parts = [f"{key} is {shown(differences[key][0])} there and {shown(differences[key][1])} here"
             for key in keys[:_SHOWN]]  # fmt: skip
    more = len(keys) - _SHOWN
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def listed(stages: list[str]) -> str:
    return f"{', '.join(stages[:-1])} and {stages[-1]}" if len(stages) > 1 else "".join(stages)


def conflict(recipe: Recipe, *, resumed: str | None = None) -> Problem | None:
    """Why the run folder cannot be this recipe's without losing work, and the ways on; None where it can.

    Args:
        recipe: the recipe, bound to its run folder.
        resumed: a stage that is to go on from its checkpoints, which it can do with some settings changed.
    """
    outdated = _outdated(recipe, resumed)
    if not outdated:
        return None
    keys = max(outdated.values(), key=len)  # a later stage reads all that an earlier one does
    differing = differences_of(recipe, recipe.folder)
    why = described(differing, keys) if _recorded(recipe.folder) else f"its {RECIPE_FILE} is missing or cannot be read"
    kept = listed([stage for stage in STAGES if finished(recipe, stage) is not None])
    begin = f", which can begin with the {kept} of {recipe.run} ($from_run)" if kept else ""
    return Problem(
        f"{recipe.folder} holds a run of another recipe or other settings: {why}.",
        remedy=f"Name a new run ($run){begin}. Or give $overwrite to delete its {listed(list(outdated))}"
        f"{f', and keep its {kept}' if kept else ''}.",
    )


def claim(recipe: Recipe, stage: str, *, overwrite: bool = False, resume: bool = False) -> None:
    """Make the run folder this recipe's own, and clear what an earlier try of the stage left.

    Args:
        recipe: the recipe, bound to its run folder.
        stage: its name.
        overwrite: delete the stages there that were run under other settings, and the results or checkpoints of an
            earlier try of this one.
        resume: keep what an earlier try of the stage left.

    Raises:
        RecipeError: stages there were run under other settings, or the stage's results or checkpoints are there, and
            no way on was chosen.
        ToolkitError: the folder cannot be written.
    """
    marker, folder = recipe.folder / RECIPE_FILE, recipe.stage_folder(stage)
    try:
        resumed = stage if resume else None
        problem = conflict(recipe, resumed=resumed)
        if problem is not None and not overwrite:
            goes_on = f" The run goes on with its own recipe, {marker}, and $resume." if resume else ""
            raise RecipeError(problem.wrong, remedy=problem.remedy + goes_on)
        if not (overwrite or resume):
            _refuse_to_lose(folder, stage)
        if resume and not checkpoint_folders(folder) and not _holds_responses(folder) and holds_work(folder):
            raise RecipeError(
                f"{folder} holds a {stage} stage and no checkpoint of it to go on from.", remedy=_RENAME_OR_DELETE
            )
        if resume and finished(recipe, stage) is None:
            # What it came to so far is the result of other settings.
            (folder / RESULT_FILE).unlink(missing_ok=True)
            _delete_evaluation(recipe, stage)
        for outdated in _outdated(recipe, resumed):
            _delete(recipe, outdated)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(recipe.to_yaml(), encoding="utf-8")
        if not (resume and holds_work(folder)):
            _delete(recipe, stage)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ToolkitError(
            f"{recipe.folder}: cannot write there ({error.strerror}).", remedy="Choose another folder."
        ) from error


def _delete(recipe: Recipe, stage: str) -> None:
    """A stage's folder, and what was measured of the policy that it trained."""
    shutil.rmtree(recipe.stage_folder(stage), ignore_errors=True)
    _delete_evaluation(recipe, stage)


def _delete_evaluation(recipe: Recipe, stage: str) -> None:
    if stage in ("ppo", "q"):
        shutil.rmtree(recipe.stage_folder(EVALUATION), ignore_errors=True)


_RENAME_OR_DELETE = "Name a new run ($run), or give $overwrite to delete it."
_GO_ON_OR_DELETE = "Go on with $resume, or begin anew with $overwrite."


def _refuse_to_lose(folder: Path, stage: str) -> None:
    saved = checkpoint_folders(folder)
    if read_result(folder) is not None:
        raise RecipeError(f"{folder} holds a finished {stage} stage.", remedy=_RENAME_OR_DELETE)
    if saved:
        wrong = f"{folder} holds a {stage} stage that was not finished, saved up to step {step_of(saved[-1])}."
        raise RecipeError(wrong, remedy=_GO_ON_OR_DELETE)
    if _holds_weights(folder):
        wrong = f"{folder} holds weights that were saved without a checkpoint to go on from."
        raise RecipeError(wrong, remedy=_RENAME_OR_DELETE)
    if _holds_responses(folder):
        wrong = f"{folder} holds responses of a collect stage that was not finished."
        raise RecipeError(wrong, remedy=_GO_ON_OR_DELETE)
