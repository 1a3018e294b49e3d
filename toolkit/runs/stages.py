"""Run a stage of a recipe in its run folder, after what it needs."""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from toolkit.checkpoints import checkpoint_folders, newest_whole
from toolkit.errors import CheckpointError, RecipeError, ToolkitError
from toolkit.runs.build import MAKERS
from toolkit.runs.check import check_for
from toolkit.runs.folder import RECIPE_FILE, claim, finished, no_such_run
from toolkit.runs.process import run_stage
from toolkit.runs.stage import collect_stage, say, train_stage
from toolkit.runs.take_over import take_over
from toolkit.spec.recipe import Recipe


def _run_prerequisites(
    recipe: Recipe,
    stage: str,
    console: Console,
    *,
    overwrite: bool = False,
    resume: bool = False,
    from_run: str | None = None,
    scorer: bool = True,
) -> None:
    """Take from another run, or run, what a stage needs and the run does not have; `scorer` as for `check_for`."""
    if from_run is not None:
        needs = {earlier: recipe.plan.needs(earlier) for earlier in recipe.plan.needs(stage)}
        for sentence in take_over(recipe, from_run, needs, overwrite=overwrite, resume=resume):
            say(console, sentence)
    missing = [earlier for earlier in recipe.plan.needs(stage) if finished(recipe, earlier) is None]
    if missing:
        # A mistake of the last stage's is found before the first one has run for an hour.
        check_for(recipe, stage, scorer=scorer).raise_problems()
    for earlier in missing:
        claim(recipe, earlier, overwrite=overwrite, resume=resume)
        # In a process of its own: its memory is given back, and accelerate's state takes one precision a process.
        command = [sys.executable, "-m", "toolkit", earlier, str(recipe.folder / RECIPE_FILE)]
        command += ["--run", recipe.run, "--runs-dir", str(recipe.runs_dir), "--name", recipe.name]
        run_stage(command + (["--resume"] if resume else []), earlier, stage)


def prepared(
    recipe: Recipe,
    stage: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    from_run: str | None = None,
    **arguments: Any,
) -> Any:
    """The stage's trainer, after its prerequisites: for notebooks. `arguments` are those of its maker."""
    named = arguments.get("reward") is None
    _run_prerequisites(recipe, stage, Console(), overwrite=overwrite, resume=resume, from_run=from_run, scorer=named)
    claim(recipe, stage, overwrite=overwrite, resume=resume)
    return MAKERS[stage](recipe, **arguments)


def run(
    recipe: Recipe,
    stage: str,
    *,
    overwrite: bool = False,
    resume: bool = False,
    from_run: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run one stage and what it needs. A stage that this recipe has finished is not repeated.

    Args:
        recipe: the recipe, bound to its run folder.
        stage: its name.
        overwrite: repeat a finished stage; delete stages in the same folder that were run under other settings.
        resume: go on from the newest whole checkpoint of each unfinished stage; from the beginning where none is.
        from_run: name of another run in the same folder of runs. Its finished stages are taken where this one lacks
            them and the settings that they read agree.
        console: for what a person reads; standard output if None.

    Returns:
        What stands in `result.json`.

    Raises:
        RunInterrupted: a signal asked to stop, and the stage was saved.
        ToolkitError: whatever a user can mend.
    """
    console = console or Console()
    recipe.plan.needs(stage)
    if overwrite and resume:
        raise RecipeError("to overwrite and to resume are two ways on.", remedy="Give $overwrite or $resume.")
    done = finished(recipe, stage)
    if done is not None and not overwrite:
        say(console, f"{stage} of this run is finished: {recipe.stage_folder(stage)}. OVERWRITE=1 repeats it.")
        return done
    if resume and stage == "ppo" and recipe.values["ppo"].get("loop") == "trl":
        raise RecipeError(
            "trl saves no checkpoints, since TRL's loop cannot go on from one (huggingface/trl#2657).",
            field="ppo.loop",
            remedy="Run it anew, or use ppo.loop: toolkit.",
        )
    if resume and not (recipe.folder / RECIPE_FILE).is_file():
        raise RecipeError(f"there is nothing to go on with: {no_such_run(recipe.run, recipe.runs_dir)}")
    _run_prerequisites(recipe, stage, console, overwrite=overwrite, resume=resume, from_run=from_run)
    claim(recipe, stage, overwrite=overwrite, resume=resume)
    try:
        if stage == "collect":
            return collect_stage(recipe, console)
        return train_stage(recipe, stage, console, _to_resume(recipe, stage, console) if resume else None)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(stage, recipe.stage_folder(stage)) from error


def _to_resume(recipe: Recipe, stage: str, console: Console) -> Path | None:
    folder = recipe.stage_folder(stage)
    checkpoint = newest_whole(folder, say=lambda sentence: say(console, sentence))
    if checkpoint is not None:
        say(console, f"{stage} goes on from {checkpoint}.")
        return checkpoint
    if checkpoint_folders(folder):
        raise CheckpointError(
            f"{folder}: no checkpoint there is whole.",
            remedy="Save what you want of them, then begin anew with $overwrite.",
        )
    say(console, f"{folder} holds no checkpoint: {stage} begins anew.")
    claim(recipe, stage, overwrite=True)
    return None


def _out_of_memory(stage: str, folder: Path) -> ToolkitError:
    """What can be done where a GPU's memory ran out in a stage."""
    wrong = f"{stage} ran out of GPU memory."
    if stage == "collect":
        return ToolkitError(
            wrong,
            remedy="Halve collect.batch_size, then run it again, with $overwrite if responses had been saved: each "
            "batch draws by a seed of its own.",
        )
    elsewhere = {"ppo": "in the rollout or the scoring ppo.local_rollout_forward_batch_size and ppo.logprob_chunk_size",
                 "q": "in the readings of whole rows q.q_chunk_size"}  # fmt: skip
    more = f", {elsewhere[stage]}" if stage in elsewhere else ""
    saved = bool(checkpoint_folders(folder))
    return ToolkitError(
        wrong,
        remedy=f"Set {stage}.gradient_checkpointing=true, or halve what is done at a time: in training "
        f"{stage}.per_device_train_batch_size, with {stage}.gradient_accumulation_steps doubled, which changes no "
        f"gradient{more}, in the evaluation {stage}.per_device_eval_batch_size. Then "
        + ("go on with $resume." if saved else "run it again: nothing had been saved yet."),
    )
