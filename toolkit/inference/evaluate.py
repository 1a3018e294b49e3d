"""`toolkit eval`: a trained run measured again on its held-out prompts."""

import time
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import set_seed

from toolkit.inference.saved_run import policy_folder, responds_by_q
from toolkit.models import load_weights
from toolkit.reports import Responses, sample_rows, samples_table, write_jsonl, write_result
from toolkit.runs import build, stage
from toolkit.runs.folder import EVALUATION
from toolkit.sampling import Evaluation
from toolkit.spec.recipe import Recipe
from toolkit.trainers.common import precision
from toolkit.trainers.rollouts import QRollouts


def evaluate(recipe: Recipe, *, console: Console | None = None) -> dict[str, Any]:
    """Measure a trained run on its held-out prompts, before and after training, into `eval/result.json`."""
    console = console or Console()
    started = time.perf_counter()
    folder = recipe.stage_folder(EVALUATION)
    folder.mkdir(exist_ok=True)
    prompts = recipe.task.prompts("test")
    if (rows := recipe.task.report()) is not None:
        console.print(f"data: {rows}", highlight=False, soft_wrap=True)
    set_seed(recipe.seed)
    before, after = (_by_q if responds_by_q(recipe) else _of_policy)(recipe, prompts)
    result = stage.figures(recipe, EVALUATION, started, before.metrics, after.metrics)
    samples = sample_rows(*(Responses.of(evaluation.rollout, evaluation.scores) for evaluation in (before, after)))
    write_jsonl(folder / "samples.jsonl", samples)
    write_result(folder, result)
    console.print(samples_table(samples))
    stage.print_result(console, result)
    console.print(f"result: {folder / 'result.json'}", highlight=False, soft_wrap=True)
    return result


def _of_policy(recipe: Recipe, prompts: Dataset) -> tuple[Evaluation, Evaluation]:
    """Where the policy starts, and what was trained."""
    roles, pad_token_id = build.placed_roles(recipe, "ppo")
    evaluator = build.make_evaluator(recipe, build.make_rollouts(recipe, roles), pad_token_id)
    before = evaluator(prompts)
    load_weights(roles, "policy", policy_folder(recipe))
    return before, evaluator(prompts)


def _by_q(recipe: Recipe, prompts: Dataset) -> tuple[Evaluation, Evaluation]:
    """The reference, and what Q makes of it."""
    config = build.trainer_config(recipe, "q")
    roles, pad_token_id = build.placed_roles(recipe, "q", trained=recipe.stage_folder("q") / "q")
    reward = build.make_reward(recipe, roles, pad_token_id, config.per_device_eval_batch_size)
    rollouts = QRollouts(config, recipe.tokenizer, roles, precision(config, roles))
    before, after = (rollouts.evaluator(reward, recipe.task.metrics, by_q=by_q) for by_q in (False, True))
    return before(prompts), after(prompts)
