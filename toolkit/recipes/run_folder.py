"""A run folder: which of its stages hold under a recipe's settings, and what may be deleted there.

The folder keeps its recipe. When another one comes, the keys that differ decide: a stage stands as long as neither it
nor a stage before it reads one of them. What has taken hours is deleted by those alone who say so.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.checkpoints import checkpoint_folders, step_of
from toolkit.errors import RecipeError, ToolkitError
from toolkit.recipes.assemble import MAKERS
from toolkit.recipes.collecting import partial_file
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.sections import STAGE_CLASSES
from toolkit.reports import RESULT_FILE, read_result, write_result

RECIPE_FILE = "recipe.yaml"
SAFETENSORS = "*model*.safetensors"  # of a PEFT folder, and of a checkpoint
STAGES = (*MAKERS, "collect")
EVALUATION = "eval"  # folder of what was measured of a trained policy

# What neither the stage nor one before it reads. Whatever is not listed counts as read: a stage repeated for nothing
# costs time, one that is wrongly kept gives wrong figures.
_OF_VALUE = ("adapters.value", "value_head", "value_model", "start.value")
_UNREAD: dict[str, tuple[str, ...]] = {
    "sft": (
        "reward_data", "q_data", "adapters.reward", "adapters.q", "scorer", "start", "reward_head", "reward_model",
        "collect", "reward", "ppo", "q", *_OF_VALUE,
    ),
    "reward": ("q_data", "adapters.policy", "adapters.q", "scorer", "start", "collect", "ppo", "q", *_OF_VALUE),
    "collect": ("q_data", "adapters.q", "ppo", "q", *_OF_VALUE),
    "ppo": ("q_data", "adapters.q", "collect", "q"),
    "q": ("ppo", *_OF_VALUE),
}  # fmt: skip
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
_ABSENT = object()


def no_such_run(run: str, runs_dir: Path) -> str:
    """That there is no such run, and which there are."""
    others = sorted(path.parent.name for path in runs_dir.glob(f"*/{RECIPE_FILE}"))
    there = f"There are {', '.join(others)}." if others else "There is none yet: make ppo trains one."
    return f'no run "{run}" in {runs_dir}. {there}'


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a recipe by their dotted keys."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _recorded(folder: Path) -> dict[str, Any]:
    """The recipe that a run folder keeps; empty where it keeps none that can be read."""
    try:
        values = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _differences(recipe: Recipe, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which the folder's recipe and this one differ: the value there, and here."""
    there, here = dict(_leaves(_recorded(folder))), dict(_leaves(yaml.safe_load(recipe.to_yaml())))
    pairs = {key: (there.get(key, _ABSENT), here.get(key, _ABSENT)) for key in {**there, **here}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _unread(recipe: Recipe, stage: str) -> tuple[str, ...]:
    """Keys, and beginnings of keys, that decide nothing of a stage of this recipe."""
    unread = ("about", *_UNREAD[stage])
    if recipe.base.model is not None and stage in ("sft", "reward"):
        # The tokenizer comes from the checkpoint and not from the data, and the base needs no sft stage.
        if f"{stage}_data" in recipe.values:
            unread += ("data",)
        if stage == "reward":
            unread += ("sft", "sft_data")
    if recipe.base.model is None and stage == "sft":
        unread += ("adapters.policy",)  # all weights are trained, and no adapter
    return unread


def _that_count(recipe: Recipe, stage: str, keys: Mapping[str, Any]) -> list[str]:
    """Those of the keys that the stage, or one before it, reads."""
    unread = _unread(recipe, stage)
    return [key for key in keys if not any(key == other or key.startswith(f"{other}.") for other in unread)]


def finished(recipe: Recipe, stage: str) -> dict[str, Any] | None:
    """The result of a stage that the run folder has finished under settings that are this recipe's too, else None."""
    if _that_count(recipe, stage, _differences(recipe, recipe.folder)):
        return None
    return read_result(recipe.stage_folder(stage))


def _holds_weights(folder: Path) -> bool:
    """Whether something trained was saved there, as by a notebook's `save_model`."""
    return any(folder.glob(f"[!.]*/{SAFETENSORS}")) or any(folder.glob("value/value_head.safetensors"))


def _holds_responses(folder: Path) -> bool:
    partial = partial_file(folder)
    return partial.is_file() and partial.stat().st_size > 0


def _holds_work(folder: Path) -> bool:
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
    differences = _differences(recipe, recipe.folder)
    found = {stage: _that_count(recipe, stage, differences) for stage in STAGES}
    if resumed is not None:
        kept = _may_change(recipe, resumed)
        found[resumed] = [key for key in found[resumed] if key not in kept]
    return {stage: keys for stage, keys in found.items() if keys and _holds_work(recipe.stage_folder(stage))}


def _told(differences: Mapping[str, tuple[Any, Any]], keys: list[str]) -> str:
    """The first few of the keys, with the values there and here."""

    def shown(value: Any) -> str:
        text = "not set" if value is _ABSENT else json.dumps(value, ensure_ascii=False, default=str)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    parts = [f"{key} is {shown(differences[key][0])} there and {shown(differences[key][1])} here"
             for key in keys[:_SHOWN]]  # fmt: skip
    more = len(keys) - _SHOWN
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _listed(stages: list[str]) -> str:
    return f"{', '.join(stages[:-1])} and {stages[-1]}" if len(stages) > 1 else "".join(stages)


def conflict(recipe: Recipe, *, resumed: str | None = None) -> str | None:
    """Why the run folder cannot be this recipe's without losing work, and the ways on; None where it can.

    Args:
        recipe: the recipe, bound to its run folder.
        resumed: a stage that is to go on from its checkpoints, which it can do with some settings changed.
    """
    outdated = _outdated(recipe, resumed)
    if not outdated:
        return None
    keys = max(outdated.values(), key=len)  # a later stage reads all that an earlier one does
    differences = _differences(recipe, recipe.folder)
    told = _told(differences, keys) if _recorded(recipe.folder) else f"its {RECIPE_FILE} is missing or cannot be read"
    kept = _listed([stage for stage in STAGES if finished(recipe, stage) is not None])
    taken = f"; FROM={recipe.run} (--from-run, from_run) lets that begin with the {kept} of this one" if kept else ""
    return (
        f"{recipe.folder} holds a run of another recipe or other settings: {told}. Name a new run with RUN=name "
        f"(--run name, run=name){taken}. Or give OVERWRITE=1 (--overwrite, overwrite=True) to delete its "
        f"{_listed(list(outdated))}{f', and keep its {kept}' if kept else ''}."
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
            goes_on = f" Its own settings go on with toolkit {stage} {marker} --run {recipe.run} --resume"
            raise RecipeError(problem + (goes_on if resume else ""))
        if not (overwrite or resume):
            _refuse_to_lose(folder, stage)
        if resume and not checkpoint_folders(folder) and not _holds_responses(folder) and _holds_work(folder):
            raise RecipeError(
                f"{folder} holds a {stage} stage and no checkpoint of it to go on from. Name a new run (RUN=name, "
                "--run name, run=name), or give OVERWRITE=1 (--overwrite, overwrite=True) to delete it."
            )
        if resume and finished(recipe, stage) is None:
            # What it came to so far is the result of other settings.
            (folder / RESULT_FILE).unlink(missing_ok=True)
            _delete_evaluation(recipe, stage)
        for outdated in _outdated(recipe, resumed):
            _delete(recipe, outdated)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(recipe.to_yaml(), encoding="utf-8")
        if not (resume and _holds_work(folder)):
            _delete(recipe, stage)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ToolkitError(f"{recipe.folder}: cannot write there ({error.strerror}). Choose another folder.") from error


def _delete(recipe: Recipe, stage: str) -> None:
    """A stage's folder, and what was measured of the policy that it trained."""
    shutil.rmtree(recipe.stage_folder(stage), ignore_errors=True)
    _delete_evaluation(recipe, stage)


def _delete_evaluation(recipe: Recipe, stage: str) -> None:
    if stage in ("ppo", "q"):
        shutil.rmtree(recipe.stage_folder(EVALUATION), ignore_errors=True)


def _refuse_to_lose(folder: Path, stage: str) -> None:
    saved = checkpoint_folders(folder)
    if read_result(folder) is not None:
        raise RecipeError(
            f"{folder} holds a finished {stage} stage. Name a new run (RUN=name, --run name, run=name), or give "
            "OVERWRITE=1 (--overwrite, overwrite=True) to delete it."
        )
    if saved:
        raise RecipeError(
            f"{folder} holds a {stage} stage that was not finished, saved up to step {step_of(saved[-1])}. "
            "Go on with RESUME=1 (--resume, resume=True), or begin anew with OVERWRITE=1 (--overwrite, "
            "overwrite=True)."
        )
    if _holds_weights(folder):
        raise RecipeError(
            f"{folder} holds weights that were saved without a checkpoint to go on from. Name a new run (RUN=name, "
            "--run name, run=name), or give OVERWRITE=1 (--overwrite, overwrite=True) to delete them."
        )
    if _holds_responses(folder):
        raise RecipeError(
            f"{folder} holds responses of a collect stage that was not finished. Go on with RESUME=1 (--resume, "
            "resume=True), or begin anew with OVERWRITE=1 (--overwrite, overwrite=True)."
        )


# ---------------------------------------------------------------------- stages of another run


def take_over(
    recipe: Recipe, source: str, needs: Mapping[str, list[str]], *, overwrite: bool = False, resume: bool = False
) -> list[str]:
    """Copy finished stages of another run whose settings, as far as the stages read them, are this recipe's too.

    Checkpoints stay where they are. A stage that this run has finished, or with `resume` begun, is left alone, and one
    that stands on a stage which is not finished here is not taken.

    Args:
        recipe: the recipe, bound to its run folder.
        source: name of the other run, in the same folder of runs.
        needs: the stages that are wanted, in order, each with those before it.
        overwrite: as for `claim`.
        resume: as for `claim`.

    Returns:
        A sentence for each stage that this run has not finished: that it is taken, or why not.

    Raises:
        RecipeError: there is no such run, or nothing of it can be taken; or as for `claim`.
        ToolkitError: the folder cannot be written.
    """
    other = replace(recipe, run=source)
    if source == recipe.run or not (other.folder / RECIPE_FILE).is_file():
        why = "is this run itself" if source == recipe.run else f"is not in {recipe.runs_dir}"
        raise RecipeError(f'the run "{source}" to begin with (FROM, --from-run, from_run) {why}. Name another run.')
    if not needs:
        raise RecipeError(f'nothing is taken from the run "{source}": no stage comes before this one. Leave FROM out.')
    differences = _differences(recipe, other.folder)
    said, refused = [], 0
    for stage in [stage for stage in needs if finished(recipe, stage) is None]:
        problem = _not_taken(recipe, other, stage, needs[stage], differences)
        if resume and _holds_work(recipe.stage_folder(stage)):
            said.append(f"{stage} goes on here.")
        elif problem is not None:
            said.append(f"{stage} is run anew: {problem}.")
            refused += 1
        else:
            claim(recipe, stage, overwrite=overwrite, resume=resume)
            _copy(other, recipe, stage)
            said.append(f"{stage} is taken from {other.stage_folder(stage)}.")
    if refused == len(needs):
        raise RecipeError(f'nothing can be taken from the run "{source}": {" ".join(said)} Leave FROM out.')
    return said


def _not_taken(
    recipe: Recipe, other: Recipe, stage: str, before: list[str], differences: Mapping[str, tuple[Any, Any]]
) -> str | None:
    """Why another run's stage cannot be this one's; None where it can."""
    keys = _that_count(recipe, stage, differences)
    if keys:
        return f"{_told(differences, keys)} ({other.folder} and {recipe.folder})"
    if read_result(other.stage_folder(stage)) is None:
        return f"{other.folder} has not finished it"
    missing = [earlier for earlier in before if finished(recipe, earlier) is None]
    return f"{_listed(missing)}, on which it stands, is not finished here" if missing else None


def _copy(source: Recipe, target: Recipe, stage: str) -> None:
    """Under another name first: what carries the stage's name is whole."""
    folder = target.stage_folder(stage)
    aside = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(source.stage_folder(stage), aside, ignore=shutil.ignore_patterns("*checkpoint-*"))
        for path in aside.glob("*/adapter_config.json"):
            config = json.loads(path.read_text(encoding="utf-8"))
            if config.get("base_model_name_or_path") == source.base_path:  # a base that this run has a copy of, too
                config["base_model_name_or_path"] = target.base_path
                path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        result = read_result(aside)
        assert result is not None
        write_result(aside, {**result, "taken_from": str(source.stage_folder(stage))})
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise ToolkitError(f"{folder}: cannot be copied there ({error.strerror}). Make room, then repeat.") from error
