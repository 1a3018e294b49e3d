"""A run folder: which of its stages hold under a recipe's settings, and who may write there.

The folder keeps its recipe. When another one comes, the keys that differ decide: a stage stands as long as neither it
nor a stage before it reads one of them. What has taken hours is replaced by those alone who say so, and by what has
finished.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from toolkit.checkpoints import checkpoint_folders, checkpoints_in, step_of
from toolkit.disk import ASIDE, MANIFEST, REPLACED, RESULT_FILE, UNFINISHED, damage, write_whole, writing
from toolkit.errors import Problem, RecipeError, ToolkitError
from toolkit.reports import REPORT_FILE, read_result, write_result
from toolkit.runs import aside, owned
from toolkit.runs.collect import partial_file
from toolkit.runs.differences import Changes, changed_data, changes, described, may_change, recorded
from toolkit.runs.lock import owner_of
from toolkit.runs.longer import drop_evaluation, finished_before, stages_as_they_were
from toolkit.runs.owned import BEFORE_FILE, EVALUATION, RECIPE_FILE, WAS_FINISHED_FILE, has_begun
from toolkit.spec.find import is_run_name
from toolkit.spec.plan import RESPONDING, STAGES, at, by_trl, section
from toolkit.spec.recipe import Recipe

SAFETENSORS = "*model*.safetensors"  # of a PEFT folder, and of a checkpoint


def run_folder(name: str, runs_dir: Path) -> Path | None:
    """The folder of a run: the one of that name in `runs_dir`, or else the one at that path; None if there is none."""
    for folder in [*([runs_dir / name] if is_run_name(name) else []), Path(name)]:
        if (folder / RECIPE_FILE).is_file() or aside.is_run(folder):  # the first raises for a name that no disk takes
            return folder if is_run_name(folder.name) else folder.resolve()  # as of "." and ".."
    return None


def find_run(name: str, runs_dir: Path) -> Path:
    """As `run_folder`; a RecipeError in place of None."""
    folder = run_folder(name, runs_dir)
    if folder is None:
        raise RecipeError(no_such_run(name, runs_dir))
    return folder


def check_whole(run: Path, stages: Iterable[str] = STAGES) -> None:
    """That none of these stages of a run lies aside, as a kill leaves them, and nothing is half moved. Only commands
    that run a stage bring it back: those who read a run change nothing there, and load what its own recipe names.

    Raises:
        ToolkitError: something does, or is; or what is kept is damaged.
    """
    wanted = {stage: stage for stage in finished_before(run)} | aside.left_aside(run)
    left, moving = [name for name in STAGES if name in wanted], aside.is_moving(run)
    half = moving or (aside.is_run(run) and not (run / RECIPE_FILE).is_file())
    if not (half or {*left}.intersection(stages)) or owner_of(run) is not None:
        return
    wrong = f"{run}: files were being moved there when a kill came."
    if left and not moving:
        wrong = f"{run} keeps its earlier {listed(left)} aside: what was begun instead has not finished."
    places = (run, run / REPLACED, run / UNFINISHED)
    recipe = next((place / RECIPE_FILE for place in places if (place / RECIPE_FILE).is_file()), "the recipe")
    where = f'$run, here "{run.name}"' + (f"; $runs_dir, here {run.parent}" if run.parent != Path("runs") else "")
    stage, way = "a stage", "which moves the rest"
    if left:
        stage = f"the {wanted[left[-1]]} stage"
        way = "with $resume what was begun goes on, without it what is kept comes back"
    raise ToolkitError(wrong, remedy=f"Run {stage} of {recipe} in it ({where}): {way}.")


def no_such_run(name: str, runs_dir: Path) -> str:
    """That there is no such run, and which there are."""
    others = sorted(path.parent.name for path in runs_dir.glob(f"*/{RECIPE_FILE}") if path.is_file())
    there = f"There are {', '.join(others)}." if others else "There is none yet: make ppo trains one."
    there_is = Path(name).resolve()
    of_runs = [above for above in there_is.parents if (above / RECIPE_FILE).is_file()] if there_is.exists() else []
    within = next((run for run in of_runs if there_is.relative_to(run).parts[0] in (*STAGES, EVALUATION)), None)
    if within is not None:
        there = f"That is a folder of the run {within.name}, which is meant by its own name or path."
        saved = next((one for one in (there_is, *there_is.parents) if one in checkpoint_folders(within / "ppo")), None)
        there += "" if saved is None else f" chat, generate, eval and export take --checkpoint {step_of(saved)}, too."
    elif not runs_dir.is_dir():
        there = "That folder does not exist yet: make ppo trains a run."
    return f'no run "{name}" in {runs_dir}. {there}'


def finished(recipe: Recipe, stage: str) -> dict[str, Any] | None:
    """The result of a stage that the run folder has finished under settings that are this recipe's too, else None."""
    return None if changes(recipe, stage, recipe.folder) else read_result(recipe.stage_folder(stage))


def data_changed(recipe: Recipe, stages: Iterable[str]) -> list[Problem]:
    """For each of the stages that is finished and whose data have changed since: that they have, and the way on."""
    done = (stage for stage in stages if finished(recipe, stage) is not None)
    found = ((stage, changed_data(recipe.stage_folder(stage))) for stage in done)
    return [
        Problem(f"{changed} since {stage} of this run was run.", remedy=f"Repeat {stage} with $overwrite.")
        for stage, changed in found
        if changed
    ]


@dataclass(frozen=True)
class Work(Problem):
    """What a stage's folder holds that would have to be computed again, the ways on, and whether it can be gone on
    from."""

    goes_on: bool = False


_in_the_way = partial(Work, remedy="Name a new run ($run), or give $overwrite to delete it.")
_begun = partial(Work, remedy="Go on with $resume, or begin anew with $overwrite.", goes_on=True)


def has_weights(folder: Path) -> bool:
    """Whether a stage's folder holds weights, as a notebook's `save_model` leaves them."""
    return any(folder.glob(f"[!.]*/{SAFETENSORS}")) or any(folder.glob("value/value_head.safetensors"))


def saved_by_hand(folder: Path) -> bool:
    """Whether a notebook's own loop of PPO has saved weights there, and no checkpoint; a command measures first."""
    saved = folder.name == "ppo" and (folder / "policy").is_dir() and has_weights(folder)
    return saved and not (folder / BEFORE_FILE).exists() and not checkpoints_in(folder)


def work_of(folder: Path) -> Work | None:
    """What a stage's folder holds that would have to be computed again, and the ways on; None if there is nothing."""
    stage, collected = folder.name, partial_file(folder)
    if (folder / RESULT_FILE).exists():
        return _in_the_way(f"{folder} holds a finished {stage} stage.")
    # The whole file, too, where a kill came before the result.
    if any(file.is_file() and file.stat().st_size > 0 for file in (collected, collected.with_suffix(""))):
        return _begun(f"{folder} holds responses of a {stage} stage that was not finished.")
    # And a checkpoint that a kill has kept from its name: it is whole once it is sealed.
    sealed = (path for path in checkpoint_folders(folder, ASIDE) if (path / MANIFEST).is_file())
    if saved := checkpoints_in(folder) or [*sealed]:
        return _begun(f"{folder} holds a {stage} stage that was not finished, saved up to step {step_of(saved[-1])}.")
    if has_weights(folder):
        return _in_the_way(f"{folder} holds weights that were saved without a checkpoint to go on from.")
    return None


def leads_nowhere(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether a stage that has not finished has left something that cannot be gone on from.

    Args:
        folder: the stage's.
        recipe: values of the one that the run folder has, or is to have.
    """
    if (folder / RESULT_FILE).exists():
        return False
    if folder.name == "ppo" and by_trl(recipe):  # TRL's own loop saves no checkpoints
        return has_begun(folder)
    work = work_of(folder)
    return work is not None and not work.goes_on


def _outdated(recipe: Recipe, resumed: str | None = None) -> dict[str, Changes]:
    """Stages whose work in the run folder was done under other settings, each with what differs."""
    found = {stage: changes(recipe, stage, recipe.folder) for stage in STAGES}
    if resumed is not None:
        kept = may_change(recipe, resumed, recipe.folder)
        found[resumed] = {key: pair for key, pair in found[resumed].items() if key not in kept}
    return {stage: differing for stage, differing in found.items() if differing and work_of(recipe.stage_folder(stage))}


def last_stage(run: Path, checkpoint: int | None = None) -> Literal["ppo", "q"]:
    """The stage by which the run in a folder responds: q where it has trained Q-values, and no policy; ppo where one of
    its checkpoints is meant."""
    if checkpoint is not None and checkpoints_in(run / "ppo"):
        return "ppo"
    return "q" if [stage for stage in RESPONDING if (run / stage / RESULT_FILE).is_file()] == ["q"] else "ppo"


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
    why = described(differing) if recorded(recipe.folder) else f"its {RECIPE_FILE} is missing or cannot be read"
    begin = keep = ""
    done = [stage for stage in STAGES if (recipe.stage_folder(stage) / RESULT_FILE).is_file()]
    if standing := [stage for stage in done if not changes(recipe, stage, recipe.folder)]:
        kept = listed(standing)
        begin, keep = f", which can begin with the {kept} of {recipe.run} ($from_run)", f", and keep its {kept}"
    anew = f" Or give $overwrite to delete its {listed(outdated)}{keep}."
    return Problem(
        f"{recipe.folder} holds a run of another recipe or other settings: {why}.",
        remedy=f"Name a new run ($run){begin}.{'' if _begins_in(recipe, outdated) else anew}",
    )


def _begins_in(recipe: Recipe, stages: Iterable[str]) -> str | None:
    """The key by which a recipe begins with what one of these stages has left in its own run folder."""
    folders = [recipe.stage_folder(stage).resolve() for stage in stages]
    for key, place in section(recipe.values, "start").items():
        path = Path(os.path.expanduser(str(place))).resolve()
        if (
            place is not None
            and (key, place) != ("value", "reward")
            and any(path.is_relative_to(folder) for folder in folders)
        ):
            return f"start.{key}"
    return None


def claim(
    recipe: Recipe, stage: str, *, wanted: str | None = None, overwrite: bool = False, resume: bool = False
) -> None:
    """Make the run folder this recipe's own, and its stage's folder ready to be written.

    With `overwrite` the stages there that were run under other settings, and what an earlier try of this one left, are
    moved aside until the stage `wanted`, for which this one runs, has finished. With `resume` an earlier try stays.

    Raises:
        RecipeError: stages there were run under other settings, or the stage's results or checkpoints are there, and
            no way on was chosen; or there are files that the toolkit has not written.
        ToolkitError: the folder cannot be written.
    """
    run, folder, resumed = recipe.folder, recipe.stage_folder(stage), stage if resume else None
    problem, work = conflict(recipe, resumed=resumed), work_of(folder)
    if problem is not None and not overwrite:
        own = f" The run goes on with its own recipe, {run / RECIPE_FILE}, and $resume." if resume else ""
        raise RecipeError(problem.wrong, remedy=problem.remedy + own)
    if work is not None and not (overwrite or resume):
        raise RecipeError(work.wrong, remedy=work.remedy)
    if work is not None and resume and not work.goes_on and not checkpoints_in(folder):
        wrong = f"{folder} holds a {stage} stage and no checkpoint of it to go on from."
        raise RecipeError(wrong, remedy=work.remedy)
    goes_on = resume and work is not None
    stages = {*_outdated(recipe, resumed), *([] if goes_on else [stage])}
    if not goes_on and (key := _begins_in(recipe, stages)) is not None:
        wrong = f"{at(recipe.values, key)} is in a stage that would be replaced."
        raise RecipeError(wrong, field=key, remedy="Name a new run ($run).")
    gone = [*stages, *([EVALUATION] if last_stage(run) in stages else [])]
    for name in {*gone, stage}:
        owned.refuse_others(run / name)
    if not goes_on:
        owned.refuse_recipe(run, recipe.to_yaml(), STAGES)
    with writing(run):
        if aside.changing(run, REPLACED) or any(work_of(run / name) for name in stages):
            aside.make_room(run, gone, wanted=wanted)
        else:
            for name in gone:
                owned.delete(run / name)
        run.mkdir(parents=True, exist_ok=True)
        if (folder / RESULT_FILE).is_file():  # of a stage that goes on: they are those of other settings
            for name in (REPORT_FILE, RESULT_FILE):
                (folder / name).unlink(missing_ok=True)
        owned.begin(folder)
        write_whole(run / RECIPE_FILE, recipe.to_yaml())


def finish(folder: Path, result: dict[str, Any]) -> None:
    """Mark a stage as finished, with the SHA-256 of the weights that it leaves."""
    drop_evaluation(folder)
    owned.seal_weights(folder)
    (folder / WAS_FINISHED_FILE).unlink(missing_ok=True)  # it is finished otherwise now
    write_result(folder, result)


def check_outputs(run: Path, stages: Iterable[str]) -> None:
    """That the weights of finished stages are as they were written.

    Raises:
        ToolkitError: they are not.
    """
    for stage in stages:
        problem = damage(run / stage)
        if problem is not None:
            remedy = f"Put it back as it was, or run the {stage} stage again with $overwrite."
            raise ToolkitError(f"{run / stage}: {problem}.", remedy=remedy)


# ---------------------------------------------------------------------- after a kill, or a failure


def settle(recipe: Recipe, stage: str, *, overwrite: bool = False, resume: bool = False) -> str:
    """Bring a run folder into a whole state after a kill; a sentence where earlier stages have come back.

    Those that were replaced come back, unless the run goes on with what was begun in their place.
    """
    run = recipe.folder
    back = stages_as_they_were(run)
    earlier = _again(run, back) if back else ""
    open_ = aside.settle(run)
    goes_on = resume and any(work_of(run / name) for name in aside.changing(run, REPLACED))
    if open_ and goes_on:
        return earlier
    said = " ".join(filter(None, (earlier, restore(run) if open_ else "")))
    there, before = run / UNFINISHED, recipe.plan.needs(stage)
    if aside.changing(run, UNFINISHED):
        done = [name for name in before if (there / name / RESULT_FILE).is_file()]
        replaces = overwrite and any(not changes(recipe, name, there) for name in done)
        if replaces or (resume and _goes_on_there(recipe, stage)):
            aside.take_up(run)
            return earlier
    return said


def restore(run: Path) -> str:
    """Put back the stages that were replaced; a sentence about them, and about what was begun in their place."""
    names = [name for name in aside.changing(run, REPLACED) if name != EVALUATION]
    if not names:
        return ""
    begun = [name for name in names if work_of(run / name)]
    aside.put_back(run, keep=bool(begun))
    back = [name for name in names if work_of(run / name)]
    if not back:
        return ""
    more = f"What was begun in its place is in {run / UNFINISHED}, and goes on where it is resumed."
    return f"{_again(run, back)} {more}" if begun else _again(run, back)


def _again(run: Path, back: list[str]) -> str:
    return f"{run} has its earlier {listed(back)} again. Its {RECIPE_FILE} is the earlier one, too."


def _goes_on_there(recipe: Recipe, stage: str) -> bool:
    """Whether a stage goes on, under these settings, with what was begun in place of it or of stages before it: not
    where it has work of its own, which stands on those that were to be replaced."""
    run, unfinished = recipe.folder, recipe.folder / UNFINISHED
    if stage not in aside.changing(run, UNFINISHED) and work_of(run / stage) is not None:
        return False
    return not (changes(recipe, stage, unfinished).keys() - may_change(recipe, stage, unfinished))


def way_on(recipe: Recipe, stage: str) -> str:
    """How a stage that was broken off, or one before it, is gone on with: "resume"; "overwrite" where it has left what
    cannot be; "" where it has left nothing."""
    run, unfinished = recipe.folder, recipe.folder / UNFINISHED
    there, replacing = run, aside.changing(run, REPLACED)
    if replacing and not any(work_of(run / name) for name in replacing):
        return ""  # the next command puts the replaced ones back: see `settle`
    if aside.changing(run, UNFINISHED) and _goes_on_there(recipe, stage):
        there = unfinished
    elif not (run / RECIPE_FILE).is_file() or conflict(recipe, resumed=stage) is not None or finished(recipe, stage):
        return ""
    tried = (there / name for name in (*recipe.plan.needs(stage), stage))
    return "overwrite" if any(leads_nowhere(folder, recipe.values) for folder in tried) else "resume"
