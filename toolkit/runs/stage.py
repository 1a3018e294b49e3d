"""One stage alone: measured, trained, measured again, and what it leaves in its folder.

It can be killed at any moment: `before.json` keeps what was measured first, checkpoints the training, and `result.json`
says that it is finished.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed
from transformers.integrations import INTEGRATION_TO_CALLBACK

from toolkit import phases, processes, reports
from toolkit.data import data_digest
from toolkit.disk import writing
from toolkit.errors import CheckpointError, RunInterrupted, within
from toolkit.reports import APART, Progress, Responses
from toolkit.runs.build import RESPONSES_FILE, Callbacks, about_stage, make_trainer, measures, stage_dataset
from toolkit.runs.check_data import check_best
from toolkit.runs.collect import collect
from toolkit.runs.folder import finish
from toolkit.runs.memory import weights_fit
from toolkit.runs.owned import BEFORE_FILE
from toolkit.runs.report_on_the_way import ReportAtEvaluations, evaluated_apart
from toolkit.runs.result import figures, how_it_ended, of_training, rows_read, sources_read, write_up
from toolkit.runs.said import banner, say, say_shares, show_result, warn_of_other_weights
from toolkit.sampling import Evaluation
from toolkit.spec.plan import RESPONDING
from toolkit.spec.recipe import Recipe
from toolkit.trainers.common import SamplingTrainer
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.resume import ResumableTrainer
from toolkit.trainers.reward import class_figures, judge_pairs, pair_figures
from toolkit.trainers.same_run import check_alike, made_with, of_base
from toolkit.trainers.sft import cut_rows, packs
from toolkit.trainers.stock_ppo import StockPPOTrainer, stock_rollouts


def collect_stage(recipe: Recipe) -> dict[str, Any]:
    """Sample and score responses; there is nothing to train, and so nothing before."""
    started, folder = time.perf_counter(), recipe.stage_folder("collect")
    for sentence in about_stage(recipe, "collect"):
        say(sentence)
    say_shares("collect", recipe.collect.batch_size)
    if (rows := recipe.task_of("collect").report()) is not None:
        say(f"data: {rows}")
    sources = processes.by_main(lambda: sources_read(recipe, "collect"))
    collected = collect(recipe, folder / RESPONSES_FILE)
    result = figures(recipe, "collect", started, {}, collected)

    def write() -> dict[str, Any]:
        whole = result | rows_read(recipe, "collect") | sources
        finish(folder, whole)
        return whole

    result = processes.by_main(write)
    shown = ", ".join(f"{key} {value:.4g}" for key, value in result["after"].items())
    say(f"collect took {result['seconds']:.0f} s: {shown}")
    say(f"responses: {folder / RESPONSES_FILE}")
    return result


def train_stage(
    recipe: Recipe, stage: str, checkpoint: Path | None, *, callbacks: Callbacks = (), **given: Any
) -> dict[str, Any]:
    """Train a stage, from a checkpoint if there is one; what stands in `result.json`. What is given goes to its
    trainer."""
    progress = Progress(f"{recipe.run} {stage}", quiet=not processes.is_main())
    with progress:
        result, samples = _trained(recipe, stage, checkpoint, progress, callbacks, given)
    show_result(result, samples)
    say(f"report: {recipe.stage_folder(stage) / reports.REPORT_FILE}")
    return result


def _trained(
    recipe: Recipe,
    stage: str,
    checkpoint: Path | None,
    progress: Progress,
    callbacks: Callbacks,
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    started = time.perf_counter()
    folder = recipe.stage_folder(stage)
    with phases.phase("load"), processes.agreed(), weights_fit(recipe):
        for sentence in about_stage(recipe, stage):
            say(sentence)
        shown = [] if progress.quiet else [progress]
        trainer = make_trainer(recipe, stage, callbacks=[*shown, *callbacks], **given)
        check_best_is_measured(recipe, stage, trainer)
    for line in banner(recipe, stage, trainer):
        say(line)
    if processes.count() > 1:  # never by TRL's own loop, whose arguments are others
        say_shares(stage, _rows_of_step(trainer))
    cut = say_rows(recipe, stage, trainer)
    sources = processes.by_main(lambda: sources_read(recipe, stage))
    stock = isinstance(trainer, StockPPOTrainer)
    trainer.started = started
    for earlier in recipe.plan.needs(stage) if getattr(trainer, "roles", None) is not None else ():
        remedy = f"Name that base as base.model, or repeat {earlier} on this one (OVERWRITE=1, --overwrite)."
        warn_of_other_weights(recipe, earlier, trainer.roles.causal_lm, remedy)
    before, responses_before = _before(recipe, stage, trainer, goes_on=checkpoint is not None)
    _tell(trainer, before, responses_before, goes_on=checkpoint is not None)
    so_far = ReportAtEvaluations(recipe, stage, started, before, trainer, progress)
    if processes.is_main():
        trainer.add_callback(so_far)
    ended = {}
    with so_far.told():
        if stock:
            trainer.train()
            _save_model(trainer, folder)
        else:
            try:
                trainer.train(resume_from_checkpoint=checkpoint)
            except RunInterrupted as stop:
                raise RunInterrupted(f"{stage} {stop}", stop.signal_number) from stop
            processes.by_main(lambda: _save_model(trainer, folder))
            started -= trainer.seconds_before
            ended = how_it_ended(trainer)
        last = isinstance(trainer, PPOTrainer) and not trainer.args.load_best_model_at_end
        kept = trainer.saved_if_the_reward_fails() if last else nullcontext()
        with phases.phase("answers after" if stage in RESPONDING else "measure after"), kept:
            after, responses_after = _measure(recipe, stage, trainer)
        _tell(trainer, after, responses_after)
        result = figures(recipe, stage, started, before, after) | of_training(trainer, progress) | ended | sources
        if responses_after and (measured := len(responses_after.responses)) != result["rows"].get("held out"):
            result["rows"]["test"] = measured
        if so_far.apart:
            result[APART] = True
        if given_prompts := recipe.given(stage):
            result["given"] = given_prompts
        if cut:
            result["cut"] = cut
        samples = reports.sample_rows(responses_before, responses_after) if responses_before and responses_after else []
        judged = trainer.judged if stage == "reward" else ()
        with phases.phase("write"):
            result = processes.by_main(lambda: write_up(recipe, stage, result, samples, judged))
    return result, samples


def _rows_of_step(trainer: Any) -> int:
    """Of an optimizer step, which several processes divide."""
    args = trainer.args
    if isinstance(trainer, PPOTrainer):
        found: int = args.update_batch_size // args.num_mini_batches
        return found
    whole = getattr(trainer, "padding_free", False)  # TRL packs a micro-batch of sft into one row
    return int((1 if whole else args.train_batch_size) * args.gradient_accumulation_steps)


def check_best_is_measured(recipe: Recipe, stage: str, trainer: Any) -> None:
    """Raises: ConfigError: what is to decide which checkpoint is the best is not measured of the held-out prompts."""
    if isinstance(trainer, SamplingTrainer) and trainer.eval_dataset is not None:
        with within(stage):
            check_best(recipe, trainer.args, trainer.eval_dataset)


def say_rows(recipe: Recipe, stage: str, trainer: Any) -> dict[str, dict[str, int]]:
    """Say of each data set how many rows were read and left out, and of sft's how many are cut; these by split."""
    for section, task in recipe.tasks_of(stage).items():
        if (rows := task.report()) is not None:
            say(f"{section}: {rows}")
    return _report_cuts(recipe, trainer.args) if stage == "sft" else {}


def _save_model(trainer: Any, folder: Path) -> None:
    with writing(folder):
        trainer.save_model(str(folder))


def _before(recipe: Recipe, stage: str, trainer: Any, *, goes_on: bool) -> tuple[dict[str, Any], Responses | None]:
    """What was measured first, by this process or by one that began the stage."""
    path = recipe.stage_folder(stage) / BEFORE_FILE
    rows = recipe.task.prompts("test") if stage in RESPONDING else trainer.eval_dataset
    held_out = None if rows is None else data_digest(rows)
    check_alike({"held-out rows": held_out})
    if isinstance(trainer, ResumableTrainer):  # before what may take an hour
        trainer.check_alike()
    kept = processes.by_main(lambda: reports.read_json(path))
    if kept is None:  # also where a notebook, which measures nothing, began the run: no checkpoint is read yet
        with phases.phase("answers before" if stage in RESPONDING else "measure before"):
            measured, responses = _measure(recipe, stage, trainer)
        kept = {"metrics": measured, "answers": asdict(responses) if responses else None, "held_out": held_out}
        kept[APART] = evaluated_apart(recipe, stage, trainer)
        if given := recipe.given(stage):
            kept["given"] = given
        if hasattr(trainer, "roles") and hasattr(trainer, "reward"):  # which TRL's own loop has not
            kept["made_with"] = made_with(trainer.roles, trainer.reward, trainer.judge)
        elif getattr(trainer, "roles", None) is not None:
            kept["made_with"] = of_base(trainer.roles.causal_lm)
        processes.by_main(partial(reports.write_json, path, kept))
    if kept.get("given", {}) != recipe.given(stage) and not goes_on:  # else the checkpoint knows its rows
        wrong = f"{path} was measured in a run whose prompts were others: what was given in Python has changed."
        with processes.agreed():
            raise CheckpointError(wrong, remedy="Give run_stage what it was given, or begin anew with $overwrite.")
    if kept["held_out"] != held_out:
        wrong = f"{path} was measured on other held-out rows: figures after training cannot be compared."
        with processes.agreed():  # told once
            raise CheckpointError(wrong, remedy="Restore those rows, or begin anew with $overwrite.")
    return kept["metrics"], Responses(**kept["answers"]) if kept["answers"] else None


def _tell(trainer: Any, metrics: dict[str, Any], responses: Responses | None, *, goes_on: bool = False) -> None:
    if not isinstance(trainer, PPOTrainer) or responses is None:
        return
    evaluation = metrics, responses.responses, responses.prompts
    if not goes_on:  # else a checkpoint knows what it was a warning of
        trainer.evaluated(*evaluation)
    else:  # a notebook's checkpoint does not know it
        trainer.measured_before = evaluation


def _report_cuts(recipe: Recipe, args: Any) -> dict[str, dict[str, int]]:
    """Rows of the sft stage that `sft.max_length` cuts, by split: TRL cuts them without a word."""
    cuts = {}
    for split in ("train", "validation"):
        rows = stage_dataset(recipe, "sft", "demonstrations", split)
        cut = cut_rows(rows, args, packing=packs(args, split))
        if cut:
            cuts[split] = cut
            of = f"{cut['cut']} of {len(rows)} rows are cut to sft.max_length ({args.max_length})"
            lost = f"{cut['without_loss']} of them lose all tokens that the loss counts, and are left out"
            say(f"data: {split}: {of}; {lost}")
    return cuts


def _measure(recipe: Recipe, stage: str, trainer: Any) -> tuple[dict[str, Any], Responses | None]:
    """The figures of what a stage trains, and its responses to held-out prompts where it gives any."""
    if stage == "sft":
        of_another_step = trainer.step_of_weights < trainer.state.global_step  # by which it would be logged
        with _without(trainer, *((reports.MetricsFile,) if of_another_step else ())):
            return {"loss": trainer.evaluate()["eval_loss"]}, None
    if stage == "reward":
        return _reward_figures(recipe, trainer), None
    prompts = recipe.task.prompts("test")
    if stage == "q":  # before training it is the reference that responds, decoded in the same way
        evaluation = _evaluation(trainer, prompts, by_q=trainer.state.global_step > 0)
    elif isinstance(trainer, PPOTrainer):
        evaluation = _evaluation(trainer, prompts)
    else:  # in the same way as ours
        set_seed(recipe.seed)
        rollouts = stock_rollouts(trainer)
        named = measures(recipe, rollouts.roles, trainer.toolkit_pad_tokens, rollouts.portion.rows)
        evaluation = rollouts.evaluator(**named)(prompts)
    return evaluation.metrics, Responses.of(evaluation.rollout, evaluation.scores, evaluation.judged)


def _evaluation(trainer: SamplingTrainer, prompts: Dataset, **decoding: Any) -> Evaluation:
    """Of what is trained: the last one of training, where that was of these weights and these prompts."""
    step, last = trainer.last_evaluation or (None, None)
    if last is None or step != trainer.step_of_weights or data_digest(trainer.eval_dataset) != data_digest(prompts):
        return trainer.evaluate_rollout(prompts, **decoding)
    return last


@contextmanager
def _without(trainer: Any, *further: type) -> Iterator[None]:
    """Without trackers, which begin and end with training: what they are told outside of it becomes a run of its own,
    and TensorBoard, told before, keeps the whole stage in the working directory. And without callbacks of `further`
    kinds."""
    handler = trainer.callback_handler
    callbacks, kinds = handler.callbacks, (*INTEGRATION_TO_CALLBACK.values(), *further)
    handler.callbacks = [one for one in callbacks if not isinstance(one, kinds)]
    try:
        yield
    finally:
        handler.callbacks = callbacks


def _reward_figures(recipe: Recipe, trainer: Any) -> dict[str, Any]:
    scorer, rows = trainer.scorer, trainer.eval_dataset
    tokenizer, size = recipe.tokenizer, trainer.args.per_device_eval_batch_size
    with trainer.compute_loss_context_manager():
        if recipe.plan.stages["reward"].rows == "labelled":
            return class_figures(scorer, rows, pad_token_id=tokenizer.pad_token_id, batch_size=size)
        trainer.judged = judge_pairs(scorer, rows, tokenizer, batch_size=size)
    return pair_figures(trainer.judged)
