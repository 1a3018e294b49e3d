"""Run a stage of a recipe in its run folder, after what it needs."""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import phases, processes
from toolkit.checkpoints import checkpoints_in, newest_whole
from toolkit.disk import RESULT_FILE, UNFINISHED, takes_no_more
from toolkit.errors import IN_PYTHON, CheckpointError, ConfigError, RecipeError, ToolkitError
from toolkit.reports import Progress, read_json
from toolkit.rewards import code_digests
from toolkit.runs import aside, writers
from toolkit.runs.build import Callbacks, about_stage, make_trainer, trainer_config
from toolkit.runs.check import check_stages
from toolkit.runs.folder import (
    check_outputs,
    claim,
    data_changed,
    finished,
    no_such_run,
    restore,
    settle,
    way_on,
)
from toolkit.runs.lock import acquire, at_work, release
from toolkit.runs.longer import result_comes_back
from toolkit.runs.memory import card_holds
from toolkit.runs.owned import BEFORE_FILE, RECIPE_FILE, has_begun
from toolkit.runs.process import run_stage, this_toolkit
from toolkit.runs.said import say
from toolkit.runs.stage import check_best_is_measured, collect_stage, say_rows, train_stage
from toolkit.runs.take_over import take_over
from toolkit.sampling import check_room
from toolkit.spec.plan import STAGES, by_trl
from toolkit.spec.recipe import Recipe
from toolkit.trainers.self_checks import check_dataset


def _run_prerequisites(
    recipe: Recipe,
    stage: str,
    *,
    from_run: str | None,
    handed_over: Collection[str],
    in_python: bool,
    **way: bool,
) -> None:
    """Take from another run, or run, what a stage needs and the run does not have.

    `handed_over` is that of `check_stages`, and the `way` on, to overwrite or to resume, that of `claim`; `in_python`
    says how options are named.
    """
    needs = recipe.plan.needs(stage)
    if from_run is not None:
        for sentence in processes.by_main(lambda: take_over(recipe, from_run, needs, wanted=stage, **way)):
            say(sentence)
    missing = processes.by_main(lambda: [earlier for earlier in needs if finished(recipe, earlier) is None])
    _tell_of_changed_data(recipe, needs, in_python=in_python)
    if missing:
        # A mistake of the last stage's is found before the first one has run for an hour.
        with Progress(f"{recipe.run} {stage}", quiet=not processes.is_main()), phases.phase("check"):
            processes.by_main(lambda: check_stages(recipe, {stage, *needs}, handed_over=handed_over).raise_problems())
    processes.by_main(lambda: check_outputs(recipe.folder, (earlier for earlier in needs if earlier not in missing)))
    for earlier in missing:
        # In a process of its own: its memory is given back, and accelerate's state takes one precision a process.
        command = this_toolkit(earlier, str(recipe.folder / RECIPE_FILE))
        command += ["--run", recipe.run, "--runs-dir", str(recipe.runs_dir), "--name", recipe.name]
        with _result_comes_back(recipe, earlier, **way):  # that process finds it unfinished, and could not put it back
            processes.by_main(partial(claim, recipe, earlier, wanted=stage, **way))
            with processes.agreed():
                run_stage(command + (["--resume"] if way.get("resume") else []), earlier, stage)


_BY_COMMAND = {"overwrite": "--overwrite (make: OVERWRITE=1)"}


def _tell_of_changed_data(recipe: Recipe, stages: Collection[str], *, in_python: bool) -> None:
    """Say which of the stages are finished, and were run on data that have changed since."""
    options = IN_PYTHON if in_python else _BY_COMMAND
    for sentence in processes.by_main(lambda: [problem.text(options) for problem in data_changed(recipe, stages)]):
        say(sentence)


@contextmanager
def _kept_whole(recipe: Recipe, stage: str, **way: bool) -> Iterator[str | None]:
    """Inside, the run folder is this process's alone, of several the main one's; what is overwritten comes back if an
    error ends it.

    Gives the stage whose end lets go of what is overwritten; None for one that is part of another command.
    """
    with ExitStack() as stack:
        with processes.agreed():
            if way.get("overwrite") and way.get("resume"):
                raise RecipeError("overwrite and resume exclude each other.", remedy="Give $overwrite or $resume.")
            ours = processes.is_main() and stack.enter_context(at_work(recipe.folder, stage))
            if ours and (sentence := settle(recipe, stage, **way)):
                say(sentence)
        results = {name: recipe.stage_folder(name) / RESULT_FILE for name in STAGES}
        back = processes.by_main(lambda: [name for name, path in results.items() if path.is_file()])
        writers.take_from_finished(recipe, back)
        if not ours:
            try:
                yield None
            except ToolkitError as error:
                _add_way_on(error, recipe, stage)
                raise
            return
        result = recipe.stage_folder(stage) / RESULT_FILE
        earlier = _of_file(result)
        try:
            yield stage
            aside.settle(recipe.folder)  # what a finished stage has replaced goes
        except BaseException as error:
            sentence = ""
            with suppress(OSError, ToolkitError):  # a full disk may be what ended it; the next stage puts back, too
                if aside.settle(recipe.folder):  # not what has finished, and was only to be shown
                    sentence = restore(recipe.folder)
            if sentence and isinstance(error, ToolkitError):
                error.moved(recipe.stage_folder(stage), recipe.folder / UNFINISHED / stage)
            if isinstance(error, ToolkitError):
                _add_way_on(error, recipe, stage)
            if isinstance(error, KeyboardInterrupt | BrokenPipeError | MemoryError | RuntimeError):
                done = _of_file(result) not in (None, earlier) or (not way.get("overwrite") and finished(recipe, stage))
                ended = "finished" if done else ""
                error.way_on = way_on(recipe, stage) or ended  # type: ignore[union-attr]  # for the command to say
            if sentence:
                with suppress(OSError):  # a closed pipe may be what ended it
                    say(sentence)
            raise


def _add_way_on(error: ToolkitError, recipe: Recipe, stage: str) -> None:
    """An error of a disk says how the stage goes on once that can be written again."""
    if takes_no_more(error.__cause__) and (way := way_on(recipe, stage)):
        goes_on = "goes on" if way == "resume" else "begins anew"
        error.add_remedy(f"Once it can be written there, {stage} {goes_on} with ${way}.")


def _of_file(path: Path) -> tuple[int, int] | None:
    """What tells a file from the one that was there before, wherever that has been meanwhile."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _result_comes_back(recipe: Recipe, stage: str, *, trains: bool = True, **way: bool) -> AbstractContextManager[None]:
    resumed = way.get("resume") and processes.is_main()
    return result_comes_back(recipe, stage, trains=trains) if resumed else nullcontext()


def _given(recipe: Recipe, given: Mapping[str, Any] | None, callbacks: Callbacks) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with the prompts that Python gives, and what else it gives: reward and judge. Mistakes in them are
    found before a stage has run for an hour."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"a list of them is needed, got {type(callbacks).__name__}.", field="callbacks")
    others = {name: value for name, value in (given or {}).items() if value is not None}
    prompts: dict[str, Any] = {name: others.pop(name) for name in ("train_dataset", "eval_dataset") if name in others}
    if prompts:
        recipe = recipe.with_prompts(prompts)
        config = trainer_config(recipe, "ppo")
        if "train_dataset" in prompts:
            check_dataset(recipe.task.prompts("train"), config.rollout_batch_size)
        for split in [{"train_dataset": "train", "eval_dataset": "test"}[name] for name in prompts]:
            check_room(map(len, recipe.task.prompts(split)["input_ids"]), config.max_length, config.min_response_length)
    return recipe, others


def _by_section(given: Mapping[str, Any]) -> set[str]:
    """The sections in whose place something is given."""
    return {"scorer" if name == "reward" else name for name in given}


def prepared(
    recipe: Recipe,
    stage: str,
    *,
    from_run: str | None = None,
    callbacks: Callbacks = (),
    given: Mapping[str, Any] | None = None,
    **way: bool,
) -> Any:
    """The stage's trainer, after its prerequisites: for notebooks. As long as it is there, nobody else may train.

    `given` comes before what the recipe says: `reward`, `judge`, `train_dataset` and `eval_dataset` of ppo, and its
    `trainer_class`.
    """
    recipe = replace(recipe)  # its rows are read anew: a file may have been mended since an earlier trainer
    with writers.earlier_stays(recipe, stage), _kept_whole(recipe, stage, **way):
        if way.get("resume") and processes.by_main(lambda: finished(recipe, stage)) is not None:
            wrong = f"{stage} of this run is finished: {recipe.stage_folder(stage)}."
            longer = f"A larger {stage}.max_steps makes it longer."
            raise RecipeError(wrong, remedy=f"{longer} Else name a new run ($run), or give $overwrite to repeat it.")
        processes.by_main(lambda: _check_way(recipe, stage, resume=False))
        with processes.agreed():
            recipe, given = _given(recipe, given, callbacks)
        handed_over = _by_section(given)
        _run_prerequisites(recipe, stage, from_run=from_run, handed_over=handed_over, in_python=True, **way)
        with _result_comes_back(recipe, stage, trains=False, **way):
            processes.by_main(partial(claim, recipe, stage, wanted=stage, **way))
            for sentence in about_stage(recipe, stage):
                say(sentence)
            shown = Progress(f"{recipe.run} {stage}", quiet=not processes.is_main())
            with processes.agreed():  # room for copies is that of each one's card
                trainer = make_trainer(recipe, stage, callbacks=[shown, *callbacks], **given)
                check_best_is_measured(recipe, stage, trainer)
            say_rows(recipe, stage, trainer)
        processes.by_main(lambda: aside.train_by_hand(recipe.folder, trainer.last_saved))
        if processes.by_main(lambda: acquire(recipe.folder)) and processes.is_main():
            weakref.finalize(trainer, release, recipe.folder.resolve())
        writers.give(recipe.stage_folder(stage), trainer)
        return trainer


def run(
    recipe: Recipe,
    stage: str,
    *,
    overwrite: bool = False,
    resume: bool = False,
    from_run: str | None = None,
    callbacks: Callbacks = (),
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run one stage and what it needs; what stands in its `result.json`. One that is finished is not repeated.

    Args:
        recipe: bound to its run folder.
        stage: to be run.
        overwrite: repeat a finished stage, and replace stages in the same folder that were run under other settings.
            They are kept until the new one has finished.
        resume: go on from the newest whole checkpoint of each unfinished stage; from the beginning where none is.
        from_run: name of another run in the same folder of runs. Its finished stages are taken where this one lacks
            them, the settings that they read agree, and their data have not changed.
        callbacks: of transformers, beside those that show and record the run.
        given: as of `prepared`.

    Raises:
        RunInterrupted: a signal asked to stop, and the stage was saved.
        ToolkitError: whatever a user can mend.
    """
    way: dict[str, Any] = {"overwrite": overwrite, "resume": resume}
    repeats = ("--overwrite repeats it (make: OVERWRITE=1)" if given is None else "overwrite=True repeats it") + "."
    processes.by_main(lambda: recipe.plan.needs(stage))  # an error of all is told once
    with _kept_whole(recipe, stage, **way) as wanted:
        with processes.agreed():
            recipe, others = _given(recipe, given, callbacks)
        done = None if overwrite else processes.by_main(lambda: finished(recipe, stage))
        if done is not None:
            finished_in = f"{stage} of this run is finished: {recipe.stage_folder(stage)}."
            if changed := processes.by_main(lambda: _changed(recipe, stage, others)):
                finished_in += f" Its figures are those of another {changed}, with which it was run."
            say(f"{finished_in} {repeats}")
            _tell_of_changed_data(recipe, [*recipe.plan.needs(stage), stage], in_python=given is not None)
            return done
        processes.by_main(lambda: _check_way(recipe, stage, resume=resume))
        handed_over, in_python = _by_section(others), given is not None
        _run_prerequisites(recipe, stage, from_run=from_run, handed_over=handed_over, in_python=in_python, **way)
        with _result_comes_back(recipe, stage, **way):
            processes.by_main(lambda: claim(recipe, stage, wanted=wanted, **way))
            writers.take_from_earlier(recipe.stage_folder(stage))
            for later, planned in recipe.plan.stages.items() if overwrite else ():
                if stage in planned.needs and processes.by_main(partial(finished, recipe, later)):
                    old = f"{later} of this run was trained on the {stage} that is now replaced;"
                    say(f"{old} {repeats}")
            goes_on = resume and stage != "collect"
            checkpoint = processes.by_main(lambda: _to_resume(recipe, stage)) if goes_on else None
            with card_holds(recipe, stage):
                if stage == "collect":
                    return collect_stage(recipe)
                return train_stage(recipe, stage, checkpoint, callbacks=callbacks, **others)


_OF_JUDGE = " (judge)"  # as `made_with` names what a judge is made of


def _changed(recipe: Recipe, stage: str, others: Mapping[str, Any]) -> str:
    """Which of the objects that are given a finished stage did not begin with, in words; "" where it did."""
    with suppress(ToolkitError):  # of a damaged file: the stage is finished all the same
        then = read_json(recipe.stage_folder(stage) / BEFORE_FILE) or {}
        now, before = recipe.given(stage), then.get("given", {})
        changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
        if "made_with" not in then:  # of TRL's own loop
            return " and ".join(changed)
        code = then["made_with"].get("reward", {})
        of_judge = {name.removesuffix(_OF_JUDGE): text for name, text in code.items() if name.endswith(_OF_JUDGE)}
        of_reward = {name: text for name, text in code.items() if not name.endswith(_OF_JUDGE)}
        for name, texts in (("reward", of_reward), ("judge", of_judge)):
            changed += [name] * (name in others and code_digests(others[name]) != texts)
        return " and ".join(changed)
    return ""


def _check_way(recipe: Recipe, stage: str, *, resume: bool) -> None:
    trls_loop = stage == "ppo" and by_trl(recipe.values)
    if trls_loop and processes.count() > 1:
        raise RecipeError("trl is TRL's own loop, which runs in one process.", field="ppo.loop", remedy="Take toolkit.")
    if resume and trls_loop and has_begun(recipe.stage_folder(stage)):  # stages before it may go on
        wrong = "trl saves no checkpoints, since TRL's loop cannot go on from one (huggingface/trl#2657)."
        raise RecipeError(wrong, field="ppo.loop", remedy="Run it anew with $overwrite, or use ppo.loop: toolkit.")
    if resume and not (recipe.folder / RECIPE_FILE).is_file():
        raise RecipeError(f"there is nothing to go on with: {no_such_run(recipe.run, recipe.runs_dir)}")


def _to_resume(recipe: Recipe, stage: str) -> Path | None:
    folder = recipe.stage_folder(stage)
    checkpoint = newest_whole(folder, say=say)
    if checkpoint is not None:
        say(f"{stage} goes on from {checkpoint}.")
        return checkpoint
    if checkpoints_in(folder):
        remedy = "Save what you want of them, then begin anew with $overwrite."
        raise CheckpointError(f"{folder}: no checkpoint there is whole.", remedy=remedy)
    say(f"{folder} holds no checkpoint: {stage} begins anew.")
    claim(recipe, stage, overwrite=True)
    return None
