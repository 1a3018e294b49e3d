"""Run the stages of a recipe in a run folder: prerequisites, before, training, after, result."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.errors import RecipeError, ToolkitError
from toolkit.models import PolicyView
from toolkit.recipes.assemble import MAKERS, make_meter
from toolkit.recipes.recipe import Recipe
from toolkit.reports import (
    peak_memory_gb,
    read_jsonl_metrics,
    read_result,
    sample_rows,
    samples_table,
    versions,
    write_jsonl,
    write_report,
    write_result,
)
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.reward import evaluate_reward

RECIPE_FILE = "recipe.yaml"


def prerequisites(recipe: Recipe, stage: str) -> list[str]:
    """Stages that have to be finished before `stage`, in order.

    Raises:
        RecipeError: one of them is needed, and the recipe does not say how to run it.
    """
    if stage not in MAKERS:
        raise RecipeError(f'no stage "{stage}"; the stages are {", ".join(MAKERS)}.')
    if stage not in recipe.values:
        raise RecipeError(f'{recipe.name}: the recipe has no section "{stage}", so this stage has nothing to run.')
    needed = []
    if (
        stage != "sft"
        and "sft" in recipe.values
        and (recipe.base.model is None or (stage == "ppo" and not recipe.start.policy))
    ):
        needed.append("sft")
    if stage == "ppo" and recipe.scorer.kind == "adapter" and not recipe.start.reward:
        if "reward" not in recipe.values:
            raise RecipeError(
                f'{recipe.name}: stage "ppo" needs a trained reward role, and the recipe has no section "reward". '
                "Add one, name a trained adapter with start.reward=FOLDER, or set scorer.kind=function."
            )
        needed.append("reward")
    return needed


def claim(recipe: Recipe, stage: str, *, overwrite: bool) -> None:
    """Make the run folder this recipe's own, and clear what an earlier try of the stage left.

    Raises:
        RecipeError: the folder belongs to another recipe, and `overwrite` is off.
        ToolkitError: the folder cannot be written.
    """
    marker = recipe.folder / RECIPE_FILE
    try:
        if marker.is_file() and marker.read_text(encoding="utf-8") != recipe.to_yaml():
            if not overwrite:
                raise RecipeError(
                    f"{recipe.folder} holds a run of another recipe or other settings. Name a new run with RUN=name "
                    "(--run name), or give OVERWRITE=1 (--overwrite) to delete that one."
                )
            shutil.rmtree(recipe.folder)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(recipe.to_yaml(), encoding="utf-8")
        shutil.rmtree(recipe.stage_folder(stage), ignore_errors=True)
        recipe.stage_folder(stage).mkdir()
    except OSError as error:
        raise ToolkitError(f"{recipe.folder}: cannot write there ({error.strerror}). Choose another folder.") from error


def finished(recipe: Recipe, stage: str) -> dict[str, Any] | None:
    """The result of a stage that this very recipe has finished in its run folder, else None."""
    marker = recipe.folder / RECIPE_FILE
    if not marker.is_file() or marker.read_text(encoding="utf-8") != recipe.to_yaml():
        return None
    return read_result(recipe.stage_folder(stage))


def _run_prerequisites(recipe: Recipe, stage: str, *, overwrite: bool) -> None:
    for earlier in prerequisites(recipe, stage):
        if finished(recipe, earlier) is not None:
            continue
        claim(recipe, earlier, overwrite=overwrite)
        # In a process of its own: its memory is given back, and accelerate's state takes one precision a process.
        command = [sys.executable, "-m", "toolkit", earlier, str(recipe.folder / RECIPE_FILE)]
        command += ["--run", recipe.run, "--runs-dir", str(recipe.runs_dir), "--name", recipe.name]
        if subprocess.run(command, check=False).returncode != 0:
            raise ToolkitError(f'stage "{earlier}", which "{stage}" needs, failed; its message is above.')


def prepared(recipe: Recipe, stage: str, **arguments: Any) -> Any:
    """The stage's trainer, after its prerequisites: for notebooks. Its outputs go to the run folder.

    Args:
        recipe: the recipe.
        stage: its name.
        arguments: for the function that makes the trainer.

    Raises:
        RecipeError: as for `claim` and `prerequisites`.
    """
    _run_prerequisites(recipe, stage, overwrite=False)
    claim(recipe, stage, overwrite=False)
    return MAKERS[stage](recipe, **arguments)


def run(recipe: Recipe, stage: str, *, overwrite: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run one stage and what it needs. A stage that this recipe has finished is not repeated.

    Args:
        recipe: the recipe, bound to its run folder.
        stage: "sft", "reward" or "ppo".
        overwrite: repeat a finished stage; delete a run of another recipe in the same folder.
        console: for what a person reads; standard output if None.

    Returns:
        What stands in `result.json`.

    Raises:
        ToolkitError: whatever a user can mend.
    """
    console = console or Console()
    prerequisites(recipe, stage)
    done = finished(recipe, stage)
    if done is not None and not overwrite:
        console.print(
            f"{stage} of this run is finished: {recipe.stage_folder(stage)}. OVERWRITE=1 repeats it.", soft_wrap=True
        )
        return done
    _run_prerequisites(recipe, stage, overwrite=overwrite)
    claim(recipe, stage, overwrite=overwrite)
    return _run_alone(recipe, stage, console)


def _run_alone(recipe: Recipe, stage: str, console: Console) -> dict[str, Any]:
    started = time.perf_counter()
    folder = recipe.stage_folder(stage)
    trainer = MAKERS[stage](recipe)
    task = recipe.task_of(stage)
    if hasattr(task, "report"):
        console.print(f"data: {task.report()}", highlight=False, soft_wrap=True)
    measure = {"sft": _measure_sft, "reward": _measure_reward, "ppo": _measure_ppo}[stage]
    before, rollout_before = measure(recipe, trainer)
    trainer.train()
    after, rollout_after = measure(recipe, trainer)
    if isinstance(trainer, PPOTrainer) or stage != "ppo":
        trainer.save_model(str(folder))
    else:
        _save_stock(recipe, trainer, folder)
    result = figures(recipe, stage, started, before, after)
    if hasattr(task, "left_out_rows"):
        result["left_out"] = {split: dict(reasons) for split, reasons in task.left_out.items()}
        write_jsonl(folder / "left_out.jsonl", task.left_out_rows())
    samples = sample_rows(*rollout_before, *rollout_after) if rollout_before else []
    if samples:
        write_jsonl(folder / "samples.jsonl", samples)
        console.print(samples_table(samples))
    report = write_report(folder, result, read_jsonl_metrics(folder / "metrics.jsonl"), samples, recipe.to_yaml())
    write_result(folder, result)
    print_result(console, result)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    return result


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


def _measure_sft(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Any]:
    return {"loss": trainer.evaluate()["eval_loss"]}, None


def _measure_reward(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Any]:
    pad_token_id, size = recipe.tokenizer.pad_token_id, trainer.args.per_device_eval_batch_size
    with trainer.compute_loss_context_manager():
        return evaluate_reward(
            trainer.model.base, trainer.eval_dataset, pad_token_id=pad_token_id, batch_size=size
        ), None


def _measure_ppo(recipe: Recipe, trainer: Any) -> tuple[dict[str, Any], Any]:
    if not isinstance(trainer, PPOTrainer):
        trainer = _meter(recipe, trainer)
    metrics, rollout, scores = trainer.evaluate_rollout(recipe.task.prompts("test"))
    return metrics, (rollout, scores.tolist())


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
