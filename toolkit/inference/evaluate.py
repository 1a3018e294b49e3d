"""`toolkit eval`: a trained run measured again on its held-out prompts."""

import time
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import set_seed

from toolkit import processes
from toolkit.inference.saved_run import policy_folder, responds_by_q
from toolkit.models import load_weights
from toolkit.phases import phase
from toolkit.reports import Progress, Responses, sample_rows, write_jsonl, write_result
from toolkit.runs import build, stage
from toolkit.runs.folder import EVALUATION
from toolkit.runs.owned import begin, refuse_others
from toolkit.sampling import Evaluation
from toolkit.spec.recipe import Recipe
from toolkit.trainers.common import precision
from toolkit.trainers.rollouts import QRollouts


def evaluate(recipe: Recipe, *, console: Console | None = None) -> dict[str, Any]:
    """Measure a trained run on its held-out prompts, before and after training, into `eval/result.json`."""
    console = console or Console()
    folder = recipe.stage_folder(EVALUATION)
    processes.by_main(lambda: refuse_others(folder))
    processes.by_main(lambda: begin(folder))
    result, samples = measured(recipe, console)
    processes.by_main(lambda: write_jsonl(folder / "samples.jsonl", samples))
    processes.by_main(lambda: write_result(folder, result))
    stage.show_result(console, result, samples)
    stage.say(console, f"result: {folder / 'result.json'}")
    return result


def measured(recipe: Recipe, console: Console) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `result.json` of an evaluation holds, and its samples; nothing is written."""
    started = time.perf_counter()
    prompts = recipe.task.prompts("test")
    if (rows := recipe.task.report()) is not None:
        stage.say(console, f"data: {rows}")
    set_seed(recipe.seed)
    with Progress(f"{recipe.run} {EVALUATION}", quiet=not processes.is_main()):
        before, after = (_by_q if responds_by_q(recipe) else _of_policy)(recipe, prompts)
    result = stage.figures(recipe, EVALUATION, started, before.metrics, after.metrics)
    return result, sample_rows(*(Responses.of(one.rollout, one.scores, one.judged) for one in (before, after)))


def _of_policy(recipe: Recipe, prompts: Dataset) -> tuple[Evaluation, Evaluation]:
    """Where the policy starts, and what was trained."""
    with phase("load"):
        roles, pad_tokens = build.placed_roles(recipe, "ppo")
        evaluator = build.make_evaluator(recipe, build.make_rollouts(recipe, roles), pad_tokens)
    with phase("answers before"):
        before = evaluator(prompts)
    with phase("answers after"):
        load_weights(roles, "policy", policy_folder(recipe))
        return before, evaluator(prompts)


def _by_q(recipe: Recipe, prompts: Dataset) -> tuple[Evaluation, Evaluation]:
    """The reference, and what Q makes of it."""
    config = build.trainer_config(recipe, "q")
    with phase("load"):
        roles, pad_tokens = build.placed_roles(recipe, "q", trained=recipe.stage_folder("q") / "q")
    measures = build.measures(recipe, roles, pad_tokens, config.per_device_eval_batch_size)
    rollouts = QRollouts(config, recipe.tokenizer, roles, precision(config, roles))
    before, after = (rollouts.evaluator(**measures, by_q=by_q) for by_q in (False, True))
    with phase("answers before"):
        measured = before(prompts)
    with phase("answers after"):
        return measured, after(prompts)
