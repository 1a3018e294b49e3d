"""Run the stages of a recipe in a run folder: prerequisites, before, training, after, result.

A stage can be killed at any moment: `before.json` keeps what was measured first, checkpoints the training, and
`result.json` says that it is finished.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from toolkit.checkpoints import checkpoint_folders, newest_whole
from toolkit.errors import CheckpointError, RecipeError, RunInterrupted, ToolkitError
from toolkit.models import PolicyView
from toolkit.recipes.assemble import MAKERS, RESPONSES_FILE, make_meter, stage_dataset
from toolkit.recipes.child import run_stage
from toolkit.recipes.collecting import collect
from toolkit.recipes.own_value import copies_reward_model
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.run_folder import RECIPE_FILE, STAGES, claim, finished, no_such_run, take_over
from toolkit.recipes.schema import model_section
from toolkit.reports import (
    ERRORS_FILE,
    SCORES_FILE,
    Answers,
    judgement,
    peak_memory_gb,
    read_json,
    read_jsonl_metrics,
    sample_rows,
    samples_table,
    versions,
    worst_errors,
    write_json,
    write_jsonl,
    write_report,
    write_result,
)
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.reward import evaluate_reward, judge_pairs, pair_figures
from toolkit.trainers.sft import cut_rows

BEFORE_FILE = "before.json"
_ANSWERING = ("ppo", "collect", "q")  # stages in which responses are scored, from where the policy starts


def prerequisites(recipe: Recipe, stage: str) -> list[str]:
    """Stages that have to be finished before `stage`, in order.

    Raises:
        RecipeError: one of them is needed, and the recipe does not say how to run it.
    """
    if stage not in STAGES:
        raise RecipeError(f'no stage "{stage}"; the stages are {", ".join(STAGES)}.')
    if stage not in recipe.values:
        raise RecipeError(f'{recipe.name}: the recipe has no section "{stage}", so this stage has nothing to run.')
    needed = []
    if (
        stage != "sft"
        and "sft" in recipe.values
        and (recipe.base.model is None or (stage in _ANSWERING and not recipe.start.policy))
        and model_section(stage, recipe.values) == "base"
    ):
        needed.append("sft")
    if stage in _ANSWERING and recipe.scorer.needs_reward_role and not recipe.start.reward:
        if "reward" not in recipe.values:
            raise RecipeError(
                f'{recipe.name}: stage "{stage}" needs a trained reward role, and the recipe has no section "reward". '
                "Add one, name a trained adapter with start.reward=FOLDER, or score by something else (scorer.kind)."
            )
        needed.append("reward")
    elif (stage in _ANSWERING and recipe.scorer.needs_reward_model) or (stage == "ppo" and copies_reward_model(recipe)):
        needed.append("reward")
    if stage == "q" and "collect" in recipe.values:
        needed.append("collect")
    return needed


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
        needs = {earlier: prerequisites(recipe, earlier) for earlier in prerequisites(recipe, stage)}
        for sentence in take_over(recipe, from_run, needs, overwrite=overwrite, resume=resume):
            console.print(sentence, highlight=False, soft_wrap=True)
    missing = [earlier for earlier in prerequisites(recipe, stage) if finished(recipe, earlier) is None]
    if missing:
        from toolkit.recipes.check import check_for  # which asks this module what a stage needs

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
    """The stage's trainer, after its prerequisites: for notebooks. Its outputs go to the run folder.

    Args:
        recipe: the recipe.
        stage: its name.
        resume: keep the checkpoints of an earlier try, for `train(resume_from_checkpoint=True)`.
        overwrite: delete them.
        from_run: as for `run`.
        arguments: for the function that makes the trainer.

    Raises:
        RecipeError: as for `claim` and `prerequisites`.
    """
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
        stage: one of `STAGES`.
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
    prerequisites(recipe, stage)
    if overwrite and resume:
        raise RecipeError("OVERWRITE (--overwrite) and RESUME (--resume) are two ways on; give one.")
    done = finished(recipe, stage)
    if done is not None and not overwrite:
        console.print(
            f"{stage} of this run is finished: {recipe.stage_folder(stage)}. OVERWRITE=1 repeats it.", soft_wrap=True
        )
        return done
    if resume and stage == "ppo" and recipe.values["ppo"].get("loop") == "trl":
        raise RecipeError(
            "ppo.loop: trl saves no checkpoints, since TRL's loop cannot go on from one (huggingface/trl#2657). "
            "Run it anew, or use ppo.loop: toolkit."
        )
    if resume and not (recipe.folder / RECIPE_FILE).is_file():
        raise RecipeError(f"there is nothing to go on with: {no_such_run(recipe.run, recipe.runs_dir)}")
    _run_prerequisites(recipe, stage, console, overwrite=overwrite, resume=resume, from_run=from_run)
    claim(recipe, stage, overwrite=overwrite, resume=resume)
    try:
        if stage == "collect":
            return _run_collect(recipe, console)
        return _run_alone(recipe, stage, console, _to_resume(recipe, stage, console) if resume else None)
    except torch.OutOfMemoryError as error:
        raise ToolkitError(_out_of_memory(stage, recipe.stage_folder(stage))) from error


def _run_collect(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Sample and score responses; there is nothing to train, and so nothing before."""
    started, folder = time.perf_counter(), recipe.stage_folder("collect")
    collected = collect(recipe, folder / RESPONSES_FILE)
    result = figures(recipe, "collect", started, {}, collected)
    write_result(folder, result)
    shown = ", ".join(f"{key} {value:.4g}" for key, value in result["after"].items())
    console.print(f"collect took {result['seconds']:.0f} s: {shown}", highlight=False, soft_wrap=True)
    console.print(f"responses: {folder / RESPONSES_FILE}", highlight=False, soft_wrap=True)
    return result


def _to_resume(recipe: Recipe, stage: str, console: Console) -> Path | None:
    folder = recipe.stage_folder(stage)
    checkpoint = newest_whole(folder, say=lambda sentence: console.print(sentence, highlight=False, soft_wrap=True))
    if checkpoint is not None:
        console.print(f"{stage} goes on from {checkpoint}.", highlight=False, soft_wrap=True)
        return checkpoint
    if checkpoint_folders(folder):
        raise CheckpointError(
            f"{folder}: no checkpoint there is whole. Save what you want of them, then begin anew with OVERWRITE=1 "
            "(--overwrite)."
        )
    console.print(f"{folder} holds no checkpoint: {stage} begins anew.", highlight=False, soft_wrap=True)
    claim(recipe, stage, overwrite=True)
    return None


def _run_alone(recipe: Recipe, stage: str, console: Console, checkpoint: Path | None) -> dict[str, Any]:
    started = time.perf_counter()
    folder = recipe.stage_folder(stage)
    trainer = MAKERS[stage](recipe)
    task = recipe.task_of(stage)
    if hasattr(task, "report"):
        console.print(f"data: {task.report()}", highlight=False, soft_wrap=True)
    cut = _report_cuts(recipe, trainer.args, console) if stage == "sft" else {}
    measure = {"sft": _measure_sft, "reward": _measure_reward, "ppo": _measure_ppo, "q": _measure_q}[stage]
    stock = stage == "ppo" and not isinstance(trainer, PPOTrainer)
    kept = read_json(folder / BEFORE_FILE)
    if kept is None:  # also where a notebook, which measures nothing, began the run: no checkpoint is read yet
        before, answers_before = measure(recipe, trainer)
        kept = {"metrics": before, "answers": asdict(answers_before) if answers_before else None}
        write_json(folder / BEFORE_FILE, kept)
    else:
        before, answers_before = kept["metrics"], Answers(**kept["answers"]) if kept["answers"] else None
    if stock:
        trainer.train()
        _save_stock(recipe, trainer, folder)
    else:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except RunInterrupted as stop:
            raise RunInterrupted(f"{stage} {stop}", stop.signal_number) from stop
        trainer.save_model(str(folder))
        started -= trainer.seconds_before
    after, answers_after = measure(recipe, trainer)
    result = figures(recipe, stage, started, before, after)
    if not stock and trainer.resumed_at:
        result["resumed_at"] = list(trainer.resumed_at)
    if hasattr(task, "left_out_rows"):
        result["left_out"] = {split: dict(reasons) for split, reasons in task.left_out.items()}
        write_jsonl(folder / "left_out.jsonl", task.left_out_rows())
        write_jsonl(folder / "rows.jsonl", task.row_places(stage))
    if cut:
        result["cut"] = cut
    samples = sample_rows(answers_before, answers_after) if answers_before and answers_after else []
    if samples:
        write_jsonl(folder / "samples.jsonl", samples)
        console.print(samples_table(samples))
    judged = trainer.judged if stage == "reward" else ()
    if judged:
        result["judgement"] = judgement(judged)
        write_jsonl(folder / SCORES_FILE, judged)
        write_jsonl(folder / ERRORS_FILE, worst_errors(judged))
    metrics = read_jsonl_metrics(folder / "metrics.jsonl")
    report = write_report(folder, result, metrics, samples, recipe.to_yaml(), judged)
    write_result(folder, result)
    print_result(console, result)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    return result


def _out_of_memory(stage: str, folder: Path) -> str:
    """What can be done where a GPU's memory ran out in a stage."""
    if stage == "collect":
        return (
            "collect ran out of GPU memory. Halve collect.batch_size, then run it again, with OVERWRITE=1 "
            "(--overwrite) if responses had been saved: each batch draws by a seed of its own."
        )
    elsewhere = {"ppo": "in the rollout or the scoring ppo.local_rollout_forward_batch_size and ppo.logprob_chunk_size",
                 "q": "in the readings of whole rows q.q_chunk_size"}  # fmt: skip
    more = f", {elsewhere[stage]}" if stage in elsewhere else ""
    saved = bool(checkpoint_folders(folder))
    return (
        f"{stage} ran out of GPU memory. Set {stage}.gradient_checkpointing=true, or halve what is done at a time: in "
        f"training {stage}.per_device_train_batch_size, with {stage}.gradient_accumulation_steps doubled, which "
        f"changes no gradient{more}, in the evaluation {stage}.per_device_eval_batch_size. Then "
        + ("go on with RESUME=1 (--resume, resume=True)." if saved else "run it again: nothing had been saved yet.")
    )


def _report_cuts(recipe: Recipe, args: Any, console: Console) -> dict[str, dict[str, int]]:
    """Rows of the sft stage that `sft.max_length` cuts, by split: TRL cuts them without a word."""
    found = {}
    for split in ("train", "validation"):
        rows = stage_dataset(recipe, "sft", "demonstrations", split)
        cut = cut_rows(rows, args)
        if cut:
            found[split] = cut
            console.print(
                f"data: {split}: {cut['cut']} of {len(rows)} rows are cut to sft.max_length ({args.max_length}); "
                f"{cut['without_loss']} of them lose all that the loss is taken of, and are left out",
                highlight=False,
                soft_wrap=True,
            )
    return found


def figures(
    recipe: Recipe, stage: str, started: float, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """What `result.json` holds of every stage; `started` is when it began, by `time.perf_counter`."""
    return {
        "recipe": recipe.name,
        "stage": stage,
        "seed": recipe.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "peak_memory_gb": peak_memory_gb(),
        "versions": versions(),
        "before": before,
        "after": after,
    }


def _measure_sft(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Answers | None]:
    return {"loss": trainer.evaluate()["eval_loss"]}, None


def _measure_reward(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Answers | None]:
    judge, rows = trainer.judge, trainer.eval_dataset
    read = {"pad_token_id": recipe.tokenizer.pad_token_id, "batch_size": trainer.args.per_device_eval_batch_size}
    with trainer.compute_loss_context_manager():
        if recipe.reward_head.num_labels > 1:
            return evaluate_reward(judge, rows, **read), None
        trainer.judged = judge_pairs(judge, rows, recipe.tokenizer, **read)
    return pair_figures(trainer.judged), None


def _measure_ppo(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Answers | None]:
    if not isinstance(trainer, PPOTrainer):
        trainer = _meter(recipe, trainer)
    metrics, rollout, scores = trainer.evaluate_rollout(recipe.task.prompts("test"))
    return metrics, Answers.of(rollout, scores)


def _measure_q(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Answers | None]:
    """Before training it is the reference that answers, decoded in the same way."""
    prompts = recipe.task.prompts("test")
    metrics, rollout, scores = trainer.evaluate_rollout(prompts, by_q=trainer.state.global_step > 0)
    return metrics, Answers.of(rollout, scores)


def _stock_roles(trainer: Any) -> Any:
    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    assert isinstance(policy, PolicyView)
    return policy.base


def _meter(recipe: Recipe, trainer: Any) -> PPOTrainer:
    """Our trainer around the roles that TRL's loop trains: to measure them in the same way."""
    roles = _stock_roles(trainer)
    was_trained = roles.trained_roles
    meter = make_meter(recipe, roles, recipe.tokenizer.pad_token_id, output_dir=recipe.stage_folder("ppo"))
    roles.train_roles(*was_trained)
    return meter


def _save_stock(recipe: Recipe, trainer: Any, folder: Path) -> None:
    _meter(recipe, trainer).save_model(str(folder))


def print_result(console: Console, result: dict[str, Any]) -> None:
    """The figures before and after, seconds and memory."""
    before, after = result["before"], result["after"]
    for key, value in after.items():
        if isinstance(value, float) and isinstance(before.get(key), float):
            console.print(f"{key:>16}  {before[key]:10.4f} → {value:.4f}", highlight=False)
    low_high = after.get("accuracy_ci")
    if low_high:
        console.print(f"{'accuracy_ci':>16}  {low_high[0]:.4f} – {low_high[1]:.4f} (95 %)", highlight=False)
    memory = ", ".join(f"{key} {value:.2f} GB" for key, value in result["peak_memory_gb"].items())
    console.print(f"{result['stage']} took {result['seconds']:.0f} s; peak memory: {memory}", highlight=False)
