"""What `result.json` holds of a stage, and the files beside it that a finished stage writes."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from transformers import EarlyStoppingCallback

from toolkit import phases, processes, reports
from toolkit.models import save_level
from toolkit.reports import Progress, ScoredPair, write_jsonl
from toolkit.runs.differences import COLLECTED, SOURCES, digest_of
from toolkit.runs.folder import finish
from toolkit.runs.owned import SAMPLES_FILE
from toolkit.runs.said import say
from toolkit.spec.recipe import Recipe
from toolkit.trainers.best import has_stopped


def figures(
    recipe: Recipe, stage: str, started: float, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """What `result.json` holds of every stage; `started` is when it began, by `time.perf_counter`."""
    return {
        "run": recipe.run,
        "recipe": recipe.name,
        "stage": stage,
        "seed": recipe.seed,
        "dtype": recipe.precision(stage).dtype,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        **({"processes": processes.count()} if processes.count() > 1 else {}),
        "peak_memory_gb": reports.peak_memory_gb(),
        "versions": reports.versions(),
        "machine": reports.machine(),
        "before": before,
        "after": after,
    }


def of_training(trainer: Any, progress: Progress) -> dict[str, Any]:
    """What `result.json` holds of a stage that trains something: rows, warnings, where the time went."""
    rows = {"train": trainer.train_dataset, "held out": trainer.eval_dataset}
    if trainer.eval_dataset is trainer.train_dataset:  # TRL's PPO is given one, and reads none
        del rows["held out"]
    found: dict[str, Any] = {"rows": {name: len(of) for name, of in rows.items() if of is not None}}
    if resumed_at := getattr(trainer, "resumed_at", ()):
        found["resumed_at"] = list(resumed_at)
    if (watch := getattr(trainer, "watch", None)) and watch.given:
        found["warnings"] = watch.given
    if (skipped := getattr(trainer, "skipped", None)) and skipped.total:
        found["skipped_steps"] = skipped.total
    return {**found, "spent": progress.spent}


def how_it_ended(trainer: Any) -> dict[str, str]:
    """For the result a sentence where training ended before its last step, or not with its last weights: it is said."""
    args, state = trainer.args, trainer.state
    said, metric = [], (args.metric_for_best_model or "loss").removeprefix("eval_")
    if state.global_step < state.max_steps:
        stoppers = (one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback))
        patience = next((one.early_stopping_patience for one in stoppers if has_stopped(one)), 0)
        why = f": no better {metric} in {patience} evaluation{'s' * (patience > 1)}" if patience else ""
        said.append(f"It stopped early, at step {state.global_step} of {state.max_steps}{why}.")
    if (best := trainer.step_of_weights) < state.global_step:
        unsaved = state.best_global_step not in (None, best)
        better = (
            f" of those that were saved; step {state.best_global_step} had {state.best_metric:.4g}" if unsaved else ""
        )
        said.append(f"The weights are those of step {best} of {state.global_step}, the best by {metric}{better}.")
    for sentence in said:
        say(sentence)
    return {"ended": " ".join(said)} if said else {}


def rows_read(recipe: Recipe, stage: str) -> dict[str, Any]:
    """For the result how many rows could not be used, and why; which these are, and which the stage has, in files."""
    folder, (task, *others) = recipe.stage_folder(stage), recipe.tasks_of(stage).values()
    if not task.left_out:  # a task that reads no file
        return {}
    write_jsonl(folder / "left_out.jsonl", [row for one in (task, *others) for row in one.left_out_rows()])
    write_jsonl(folder / "rows.jsonl", _rows_of(recipe, stage))
    found = zip(("left_out", "left_out_prompts"), (task, *others), strict=False)
    return {name: {split: dict(reasons) for split, reasons in of.left_out.items()} for name, of in found if of.left_out}


def sources_read(recipe: Recipe, stage: str) -> dict[str, dict[str, str]]:
    """For the result the SHA-256 of each file and folder of data that the stage has read, taken before it trains: of
    those that change meanwhile it is that of before. Nothing of the hub's."""
    named = sorted({source for task in recipe.tasks_of(stage).values() for source in task.read_from})
    if stage == "q" and "q_data" not in recipe.values:
        named.append(COLLECTED)
    with phases.phase("digests of data"):
        found = {source: digest_of(source, recipe.folder) for source in named}
    digests = {source: digest for source, digest in found.items() if digest is not None}
    return {SOURCES: digests} if digests else {}


def _rows_of(recipe: Recipe, stage: str) -> list[dict[str, str]]:
    """The place of each row that a stage has: of a collection those of the prompts that are answered, which q learns
    from, beside the held-out ones that it is measured with."""
    task = recipe.task_of(stage)
    if stage not in ("collect", "q") or recipe.data_section(stage) != "data":
        return task.row_places(stage)
    most = {"train": recipe.collect.max_prompts} | ({"validation": None} if stage == "q" else {})
    return [{"split": split, "place": place} for split in most for place in task.prompt_places(split)[: most[split]]]


def write_up(
    recipe: Recipe, stage: str, result: dict[str, Any], samples: list[dict[str, Any]], judged: Sequence[ScoredPair]
) -> dict[str, Any]:
    """Everything that a finished stage says, `result.json`, which is given back, last."""
    folder = recipe.stage_folder(stage)
    result = result | rows_read(recipe, stage)
    if samples:
        write_jsonl(folder / SAMPLES_FILE, samples)
    if judged:
        result["judgement"] = reports.pair_evaluation(judged)
        write_jsonl(folder / reports.SCORES_FILE, judged)
        write_jsonl(folder / reports.ERRORS_FILE, reports.worst_errors(judged))
        if recipe.plan.stages["reward"].own is None:
            save_level(folder / "reward", reports.of_responses(judged))
    metrics = reports.read_jsonl(folder / reports.METRICS_FILE)
    reports.write_report(folder, result, metrics, samples, recipe.to_yaml(), judged)
    finish(folder, result)
    return result
