"""Run a stage of a recipe in its run folder, after what it needs."""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from toolkit.checkpoints import checkpoint_folders, newest_whole
from toolkit.errors import CheckpointError, RecipeError, ToolkitError
from toolkit.rewards import Reward
from toolkit.runs.build import MAKERS
from toolkit.runs.check import check_stages
from toolkit.runs.folder import RECIPE_FILE, claim, finished, no_such_run
from toolkit.runs.process import run_stage
from toolkit.runs.stage import collect_stage, say, train_stage
from toolkit.runs.take_over import take_over
from toolkit.spec.recipe import Recipe


def _run_prerequisites(
    recipe: Recipe, stage: str, console: Console, *, from_run: str | None, scorer: bool = True, **way: bool
) -> None:
    """Take from another run, or run, what a stage needs and the run does not have.

    `scorer` is that of `check_stages`, and the `way` on, to overwrite or to resume, that of `claim`.
    """
    needs = recipe.plan.needs(stage)
    if from_run is not None:
        for sentence in take_over(recipe, from_run, needs, **way):
            say(console, sentence)
    missing = [earlier for earlier in needs if finished(recipe, earlier) is None]
    if missing:
        # A mistake of the last stage's is found before the first one has run for an hour.
        check_stages(recipe, {stage, *needs}, scorer=scorer).raise_problems()
    for earlier in missing:
        claim(recipe, earlier, **way)
        # In a process of its own: its memory is given back, and accelerate's state takes one precision a process.
        command = [sys.executable, "-m", "toolkit", earlier, str(recipe.folder / RECIPE_FILE)]
        command += ["--run", recipe.run, "--runs-dir", str(recipe.runs_dir), "--name", recipe.name]
        run_stage(command + (["--resume"] if way["resume"] else []), earlier, stage)


def prepared(
    recipe: Recipe, stage: str, *, from_run: str | None = None, reward: Reward | None = None, **way: bool
) -> Any:
    """The stage's trainer, after its prerequisites: for notebooks."""
    _run_prerequisites(recipe, stage, Console(), from_run=from_run, scorer=reward is None, **way)
    claim(recipe, stage, **way)
    return MAKERS[stage](recipe, **({} if reward is None else {"reward": reward}))


def run(
    recipe: Recipe,
    stage: str,
    *,
    overwrite: bool = False,
    resume: bool = False,
    from_run: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run one stage and what it needs; what stands in its `result.json`. One that is finished is not repeated.

    Args:
        recipe: bound to its run folder.
        stage: to be run.
        overwrite: repeat a finished stage; delete stages in the same folder that were run under other settings.
        resume: go on from the newest whole checkpoint of each unfinished stage; from the beginning where none is.
        from_run: name of another run in the same folder of runs. Its finished stages are taken where this one lacks
            them and the settings that they read agree.
        console: for what a person reads; standard output if None.

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
    _run_prerequisites(recipe, stage, console, from_run=from_run, overwrite=overwrite, resume=resume)
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
        remedy = "Save what you want of them, then begin anew with $overwrite."
        raise CheckpointError(f"{folder}: no checkpoint there is whole.", remedy=remedy)
    say(console, f"{folder} holds no checkpoint: {stage} begins anew.")
    claim(recipe, stage, overwrite=True)
    return None


def _out_of_memory(stage: str, folder: Path) -> ToolkitError:
    """What can be done where a GPU's memory ran out in a stage."""
    elsewhere = {"ppo": "in the rollout or the scoring ppo.local_rollout_forward_batch_size and ppo.logprob_chunk_size",
                 "q": "in the readings of whole rows q.q_chunk_size"}  # fmt: skip
    more = f", {elsewhere[stage]}" if stage in elsewhere else ""
    then = "go on with $resume." if checkpoint_folders(folder) else "run it again: nothing had been saved yet."
    remedy = (
        f"Set {stage}.gradient_checkpointing=true, or halve what is done at a time: in training "
        f"{stage}.per_device_train_batch_size, with {stage}.gradient_accumulation_steps doubled, which changes no "
        f"gradient{more}, in the evaluation {stage}.per_device_eval_batch_size. Then {then}"
    )
    if stage == "collect":
        again = "run it again, with $overwrite if responses had been saved: each batch draws by a seed of its own."
        remedy = f"Halve collect.batch_size, then {again}"
    return ToolkitError(f"{stage} ran out of GPU memory.", remedy=remedy)
