"""`toolkit eval`: a trained run measured again on its held-out prompts."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed

from toolkit import processes
from toolkit.checkpoints import step_of
from toolkit.data import Task, data_digest, values_of
from toolkit.disk import RESULT_FILE
from toolkit.errors import DataError, Problem, RecipeError, ToolkitError, within
from toolkit.inference import NOT_READ
from toolkit.inference.saved_run import not_here, policy_folder
from toolkit.models import base_digest, load_weights, scores_for
from toolkit.phases import phase
from toolkit.reports import Progress, Responses, read_json, sample_rows, write_jsonl, write_result
from toolkit.rewards import LEVELS
from toolkit.runs import build
from toolkit.runs.differences import ABSENT, changes
from toolkit.runs.folder import last_stage
from toolkit.runs.lock import at_work
from toolkit.runs.owned import BEFORE_FILE, EVALUATION, RECIPE_FILE, SAMPLES_FILE, begin, refuse_others
from toolkit.runs.result import figures
from toolkit.runs.said import say, show_result
from toolkit.sampling import Evaluation
from toolkit.spec.load import load
from toolkit.spec.recipe import Recipe
from toolkit.spec.sources import OwnBase
from toolkit.trainers.rollouts import QRollouts, Rollouts
from toolkit.trainers.same_run import check_alike, made_with, other_than

_SAVED = ("adapters.policy", "adapters.q", "adapters.value")  # of what is measured, as the run has saved it, or is not


def evaluate(recipe: Recipe) -> dict[str, Any]:
    """Measure a trained run on its held-out prompts, before and after training, into `eval/result.json`.

    Raises:
        RecipeError: another process is at work in the run folder, or a setting of training was given.
    """
    folder = recipe.stage_folder(EVALUATION)
    with ExitStack() as stack:
        with processes.agreed():
            if processes.is_main():
                stack.enter_context(at_work(recipe.folder, EVALUATION))
                refuse_others(folder)
                begin(folder)
        result, samples = measured(recipe)
        found, told = as_trained(recipe, result)
        result |= found | ({} if recipe.checkpoint is None else {"checkpoint": recipe.checkpoint})
        try:
            processes.by_main(lambda: write_jsonl(folder / SAMPLES_FILE, samples))
            processes.by_main(lambda: write_result(folder, result))
        except ToolkitError:  # of a full disk: it may have taken an hour
            for sentence in told:
                say(sentence)
            show_result(result, samples)
            raise
    for sentence in told:  # now that all is written: standard output may be closed
        say(sentence)
    show_result(result, samples)
    say(f"result: {folder / RESULT_FILE}")
    return result


_PRECISION = frozenset(("bf16", "fp16", "tf32", "torch_compile", "use_cpu"))
_LEVELS_OF = {"reward": LEVELS, "judge": f"{LEVELS} (judge)"}


def as_trained(recipe: Recipe, evaluated: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What `trained_on` finds, and what of the run's base, adapters, reward and judge is not what it was trained with,
    by the result of an evaluation; but for what was asked for in place of it."""
    (found, told), stage = trained_on(recipe), last_stage(recipe.folder, recipe.checkpoint)
    try:
        then = (read_json(recipe.stage_folder(stage) / BEFORE_FILE) or {}).get("made_with")
    except ToolkitError as error:
        return found, [*told, f"whether base, adapters and reward are those of the training is not known: {error}"]
    changed = evaluated.get("changed", {})
    given = {source.role for source in recipe.plan.stages[stage].roles if source.key in changed}
    given |= {key.removeprefix("start.") for key in changed if key.startswith("start.")}
    of_given = {f"{role} adapter" for role in given}
    of_given |= {_LEVELS_OF[kind] for role in given if (kind := scores_for(role))}
    others = [] if then is None else other_than(then, evaluated["made_with"])
    if others := [other for other in others if other not in of_given]:
        found["not_as_trained"] = others
        told.append(f"{', '.join(others)}: changed since the run was trained. Before and after are of what is here.")
    return found, told


def trained_on(recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """How many prompts of changed data the run was trained on, by PPO or by Q-learning, for `result.json` and in words:
    a larger split reaches into what the run did not hold out. Nothing where the data are those of the run."""
    beyond = [f"{key}={value}" for key, value in not_here(recipe.folder).items()]
    by = last_stage(recipe.folder, recipe.checkpoint)
    try:
        run = load(recipe.folder / RECIPE_FILE, *beyond, run=recipe.run, runs_dir=recipe.runs_dir)
        before = read_json(recipe.stage_folder(by) / BEFORE_FILE) or {}
        same, given = run.values["data"] == recipe.values["data"], before.get("given", {})
        by_hand = given.get("train_dataset")  # the digest of prompts that were given in Python
        held_out = before.get("held_out") in (None, data_digest(recipe.task.prompts("test")))
        if same and held_out and by_hand is None:
            return {}, []
        if by_hand is not None and data_digest(recipe.task.prompts("train")) != by_hand:
            told = "data: the run was trained on prompts that were given in Python. "
            return {"other_prompts": True}, [f"{told}Whether some of these are among them is not known."]
        if same and not given:
            told = "data: these are not the prompts that the run held out: its data have changed since then, or the "
            told += "toolkit reads them otherwise, and it may have been trained on some of these."
            return {"other_prompts": True}, [told]
        if by == "q":
            ids = values_of(build.rated_dataset(run), "prompt_ids")
        else:
            ids = values_of((run if by_hand is None else recipe).task.prompts("train"), "input_ids")
    except ToolkitError as error:  # its data or its base may be gone
        return {}, [f"data: which of these are training prompts of the run is not known: {error}"]
    prompts = recipe.task.prompts("test")
    trained = set(map(tuple, ids))
    number = sum(tuple(prompt) in trained for prompt in values_of(prompts, "input_ids"))
    told = f"data: {number:,} of these {len(prompts):,} prompts are training prompts of the run's {by} stage."
    return {"trained_on": number}, [told]


def measured(recipe: Recipe, checkpoints: Sequence[Path] = ()) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `result.json` of an evaluation holds, among it what of the run's recipe was `changed`, and its samples;
    nothing is written. Of checkpoints, too, if any are given: their metrics by step as `checkpoints`."""
    started = time.perf_counter()
    with processes.agreed():
        changed = _changed(recipe)
        task = recipe.task
        with within(recipe.data_section("ppo")):
            prompts = task.prompts("test")
    check_alike({"held-out rows": data_digest(prompts)})
    if (rows := _about_rows(task, changed)) is not None:
        say(f"data: {rows}")
    set_seed(recipe.seed)
    with Progress(f"{recipe.run} {EVALUATION}", quiet=not processes.is_main()):
        (before, *between, after), used = _evaluated(recipe, prompts, checkpoints)
    result = figures(recipe, EVALUATION, started, before.metrics, after.metrics)
    result["made_with"] = used
    if checkpoints:
        result["checkpoints"] = {step_of(of): one.metrics for of, one in zip(checkpoints, between, strict=True)}
    if changed:
        result["changed"] = changed
    return result, sample_rows(*(Responses.of(one.rollout, one.scores, one.judged) for one in (before, after)))


def _about_rows(task: Task, changed: Mapping[str, Any]) -> str | None:
    """What is said of the rows: of the run's own also how many held-out prompts are trained on, if those are here."""
    if not any(key.startswith("data.") for key in changed):
        with suppress(DataError):
            return task.report()
    return task.report("validation")


def _changed(recipe: Recipe) -> dict[str, Any]:
    """What is asked for in place of what the run has: by key, None where it is taken away.

    Raises:
        RecipeError: a setting of training is among it.
    """
    differing, beyond = changes(recipe, EVALUATION, recipe.folder), not_here(recipe.folder)
    changed = {key: None if here is ABSENT else here for key, (_, here) in differing.items() if key not in beyond}
    stage = last_stage(recipe.folder, recipe.checkpoint)
    reads = {f"{stage}.{name}" for name in _PRECISION | (QRollouts if stage == "q" else Rollouts).reads}
    wrong = "would have no effect: nothing is trained where a run is measured, and what was trained is as it was saved."
    of_training = [key for key in changed if key.split(".")[0] in NOT_READ or key.startswith(_SAVED)]
    of_training = [key for key in of_training if key not in reads]
    problems = [Problem(wrong, key, "Leave it out.") for key in of_training]
    if problems:
        raise RecipeError(recipe.run, problems=problems)
    return changed


def _evaluated(
    recipe: Recipe, prompts: Dataset, checkpoints: Sequence[Path]
) -> tuple[list[Evaluation], dict[str, Any]]:
    """Where the policy starts, its checkpoints, and what was trained; of Q-values the reference, and what Q makes of
    it. And what they are `made_with`."""
    stage = last_stage(recipe.folder, recipe.checkpoint)
    by_q = stage == "q"
    with phase("load"), processes.agreed():
        # The value role reads no response here; where a model of its own has fewer positions, responses end with them.
        planned = recipe.plan.stages[stage].roles
        read = {one.role for one in planned if isinstance(one, OwnBase) or scores_for(one.role)}
        wanted = {"policy", "q", "reference", *read}
        trained = recipe.stage_folder("q") / "q" if by_q else None
        roles, pad_tokens = build.placed_roles(recipe, stage, trained=trained, wanted=wanted)
        rollouts = build.make_rollouts(recipe, roles, stage)
        measures = build.measures(recipe, roles, pad_tokens, rollouts.portion.rows, splits=build.HELD_OUT)
    check_alike({"base": base_digest(roles)}, roles)
    used = made_with(roles, measures["reward"], measures["judge"])
    with phase("answers before"):
        found = [rollouts.evaluator(**measures, **({"by_q": False} if by_q else {}))(prompts)]
    policies = {f"answers at {step_of(checkpoint)}": checkpoint / "policy" for checkpoint in checkpoints}
    for name, policy in (policies | {"answers after": policy_folder(recipe)}).items():
        with phase(name):
            if not by_q:
                load_weights(roles, "policy", policy)
                check_alike({}, roles)
            found.append(rollouts.evaluator(**measures)(prompts))
    return found, used
