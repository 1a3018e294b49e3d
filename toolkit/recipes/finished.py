"""What can be done with a trained policy: measure it again, take it elsewhere."""

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from toolkit.errors import RecipeError, ToolkitError
from toolkit.models import SharedBase, load_base, load_role, load_weights, merge_adapter
from toolkit.recipes import assemble, stages
from toolkit.recipes.loading import load
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.run_folder import EVALUATION, RECIPE_FILE, no_such_run
from toolkit.reports import Answers, read_result, sample_rows, samples_table, write_jsonl, write_result

_POSITIONS = 64  # tokens of the text on which a merged checkpoint is compared


def open_run(run: str, *overrides: str, runs_dir: str | Path = "runs", by_q: bool = False) -> Recipe:
    """The recipe of a run whose policy is trained.

    Args:
        run: its name, or its folder.
        overrides: "section.key=value", for example other held-out prompts.
        runs_dir: folder of all runs.
        by_q: whether a run whose q stage has finished will do, too.

    Raises:
        RecipeError: there is no such run, or its ppo stage has not finished.
    """
    folder = Path(run) if Path(run, RECIPE_FILE).is_file() else Path(runs_dir, run)
    if not (folder / RECIPE_FILE).is_file():
        raise RecipeError(no_such_run(run, Path(runs_dir)))
    recipe = load(folder / RECIPE_FILE, *overrides, run=folder.name, runs_dir=folder.parent)
    if answers_by_q(recipe):
        if by_q:
            return recipe
        raise RecipeError(
            f'the run "{folder.name}" has Q-values and no policy of its own, which this needs. Its answers are '
            f"shown by toolkit generate {folder.name} and chat, and measured by eval."
        )
    if read_result(recipe.stage_folder("ppo")) is None:
        last, what = (
            ("ppo", "trained policy") if "ppo" in recipe.values or "q" not in recipe.values else ("q", "Q-values")
        )
        raise RecipeError(
            f'the run "{folder.name}" has no {what}: its {last} stage has not finished. '
            f"Finish it with toolkit {last} {folder / RECIPE_FILE} --run {folder.name} "
            f"--runs-dir {folder.parent} --resume"
        )
    return recipe


def answers_by_q(recipe: Recipe) -> bool:
    """Whether what the run has trained are Q-values, and no policy."""
    trained = {stage for stage in ("ppo", "q") if read_result(recipe.stage_folder(stage)) is not None}
    return trained == {"q"}


def policy_folder(recipe: Recipe) -> Path:
    """The trained policy of a finished run, a PEFT folder."""
    return recipe.stage_folder("ppo") / "policy"


def policy_and_reference(recipe: Recipe) -> SharedBase:
    """The base of a finished run with its trained policy and the reference that it was held to."""
    roles = SharedBase(assemble.base_model(recipe))
    load_role(roles, "policy", policy_folder(recipe))
    assemble.add_reference(recipe, roles)
    return roles


def evaluate(recipe: Recipe, *, console: Console | None = None) -> dict[str, Any]:
    """Measure a finished run on its held-out prompts, before and after training, into `eval/result.json`."""
    console = console or Console()
    started = time.perf_counter()
    folder = recipe.stage_folder(EVALUATION)
    folder.mkdir(exist_ok=True)
    prompts = recipe.task.prompts("test")
    if hasattr(recipe.task, "report"):
        console.print(f"data: {recipe.task.report()}", highlight=False, soft_wrap=True)
    if answers_by_q(recipe):
        trainer = assemble.make_q_trainer(recipe, output_dir=folder)
        before, rollout_before, scores_before = trainer.evaluate_rollout(prompts, by_q=False)
        trainer.load_saved(recipe.stage_folder("q"))
        after, rollout_after, scores_after = trainer.evaluate_rollout(prompts)
    else:
        roles, pad_token_id = assemble.ppo_roles(recipe)
        meter = assemble.make_meter(recipe, roles, pad_token_id, output_dir=folder)
        before, rollout_before, scores_before = meter.evaluate_rollout(prompts)
        load_weights(roles, "policy", policy_folder(recipe))
        after, rollout_after, scores_after = meter.evaluate_rollout(prompts)
    result = stages.figures(recipe, EVALUATION, started, before, after)
    samples = sample_rows(Answers.of(rollout_before, scores_before), Answers.of(rollout_after, scores_after))
    write_jsonl(folder / "samples.jsonl", samples)
    write_result(folder, result)
    console.print(samples_table(samples))
    stages.print_result(console, result)
    console.print(f"result: {folder / 'result.json'}", highlight=False, soft_wrap=True)
    return result


def _empty(output: Path) -> Path:
    if output.exists() and any(output.iterdir()):
        raise ToolkitError(f"{output} is not empty. Name a new one: toolkit export RUN FOLDER (make: OUTPUT=folder).")
    return output


def export_adapter(recipe: Recipe, output: str | Path) -> Path:
    """Copy the policy's adapter with the tokenizer: a PEFT folder for whoever has the base.

    Raises:
        ToolkitError: the output folder is not empty.
    """
    folder = _empty(Path(output))
    shutil.copytree(policy_folder(recipe), folder, dirs_exist_ok=True)
    recipe.tokenizer.save_pretrained(folder)
    return folder


def export_merged(recipe: Recipe, output: str | Path) -> tuple[Path, str]:
    """Write the policy as a checkpoint of its own: its adapter merged into the base in `base.dtype`, unquantised.

    Returns:
        The folder, and a sentence on how far the merged logits are from those of base and adapter apart.

    Raises:
        ToolkitError: the output folder is not empty.
    """
    folder, base = _empty(Path(output)), recipe.base
    model = load_base(
        recipe.base_path, dtype=base.dtype, revision=base.revision, trust_remote_code=base.trust_remote_code
    )
    probe = [token for row in recipe.task.prompts("test")["input_ids"] for token in row][:_POSITIONS]
    merged = merge_adapter(model, policy_folder(recipe), torch.tensor([probe], device=model.device))
    merged.model.save_pretrained(folder)
    recipe.tokenizer.save_pretrained(folder)
    said = (
        f"merged in {base.dtype}: over {len(probe)} tokens of held-out prompts the logits differ from those of base "
        f"and adapter apart by at most {merged.largest:.3g} (the largest logit is {merged.scale:.3g}), and the most "
        f"likely token is the same at {merged.agreement:.1%} of them"
    )
    return folder, said
