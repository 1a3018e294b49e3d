"""One stage alone: measured, trained, measured again, and what it leaves in its folder.

It can be killed at any moment: `before.json` keeps what was measured first, checkpoints the training, and `result.json`
says that it is finished.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from toolkit import phases, processes, reports
from toolkit.checkpoints import step_of
from toolkit.data import PER_RULE, data_digest
from toolkit.disk import writing
from toolkit.errors import CheckpointError, RunInterrupted, printable, within
from toolkit.models import save_high_score
from toolkit.reports import APART, Output, Progress, Responses, ScoredPair, write_jsonl
from toolkit.runs.build import MAKERS, RESPONSES_FILE, about_precision, measures, stage_dataset
from toolkit.runs.check_data import check_best
from toolkit.runs.collect import collect
from toolkit.runs.folder import finish
from toolkit.runs.owned import BEFORE_FILE, SAMPLES_FILE
from toolkit.sampling import SIGNS
from toolkit.spec.recipe import Recipe
from toolkit.trainers.common import SamplingTrainer
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.reward import class_figures, judge_pairs, pair_figures
from toolkit.trainers.same_run import check_alike
from toolkit.trainers.sft import cut_rows, packs
from toolkit.trainers.stock_ppo import stock_rollouts


def say(sentence: str) -> None:
    """A line for a person, neither coloured nor wrapped; square brackets in it are no markup."""
    Output().print(printable(sentence), highlight=False, soft_wrap=True, markup=False)


def collect_stage(recipe: Recipe) -> dict[str, Any]:
    """Sample and score responses; there is nothing to train, and so nothing before."""
    started, folder = time.perf_counter(), recipe.stage_folder("collect")
    for sentence in about_precision(recipe, "collect"):
        say(sentence)
    say_shares("collect", recipe.collect.batch_size)
    if (rows := recipe.task_of("collect").report()) is not None:
        say(f"data: {rows}")
    collected = collect(recipe, folder / RESPONSES_FILE)
    result = figures(recipe, "collect", started, {}, collected)

    def write() -> None:
        result.update(_rows_read(recipe, "collect"))
        finish(folder, result)

    processes.by_main(write)
    shown = ", ".join(f"{key} {value:.4g}" for key, value in result["after"].items())
    say(f"collect took {result['seconds']:.0f} s: {shown}")
    say(f"responses: {folder / RESPONSES_FILE}")
    return result


def say_shares(stage: str, rows: int) -> None:
    """Say where several processes do not come out even, and what would."""
    number = processes.count()
    if rows % number:
        wrong = f"{stage}: {number} processes divide the {rows} rows of a step, to the same result, but not evenly: "
        wrong += f"{number - rows} have none" if rows < number else f"some have {-(-rows // number)}"
        even = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        say(f"{wrong}. Numbers that divide them: {even}.")


def banner(recipe: Recipe, stage: str, trainer: Any) -> Iterator[str]:
    """Lines about a stage whose trainer has been made: where it runs, what it trains, where it goes."""
    args, together = trainer.args, f" × {processes.count()} processes" if processes.count() > 1 else ""
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.precision(stage).dtype
    bits = recipe.base.quantization
    base = f", base in {'4' if bits.get('load_in_4bit') else '8'} bits" if bits else ""
    yield f"{recipe.run} {stage}: {reports.device_in_words(args.device)}{together}; {precision}{base}"

    def number(parameters: Any) -> int:
        return sum(p.numel() for p in parameters if p.requires_grad)

    roles = trainer.roles if hasattr(trainer, "roles") else stock_rollouts(trainer).roles
    if roles is None:
        trained = f"{number(trainer.model.parameters()):,} of the model's own weights"
    else:
        of_roles = {role: number(roles.parameters_of(role)) for role in roles.trained_roles}
        trained = " and ".join(f"{role} ({weights:,} weights)" for role, weights in of_roles.items())
    yield f"trains {trained}; writes to {recipe.stage_folder(stage)}"


def train_stage(recipe: Recipe, stage: str, checkpoint: Path | None) -> dict[str, Any]:
    """Train a stage, from a checkpoint if there is one; what stands in `result.json`."""
    progress = Progress(f"{recipe.run} {stage}", quiet=not processes.is_main())
    with progress:
        result, samples = _trained(recipe, stage, checkpoint, progress)
    show_result(result, samples)
    say(f"report: {recipe.stage_folder(stage) / reports.REPORT_FILE}")
    return result


def _trained(
    recipe: Recipe, stage: str, checkpoint: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    started = time.perf_counter()
    folder = recipe.stage_folder(stage)
    with phases.phase("load"), processes.agreed():
        for sentence in about_precision(recipe, stage):
            say(sentence)
        trainer = MAKERS[stage](recipe, callbacks=[] if progress.quiet else [progress])
        _check_best(recipe, stage, trainer)
    for line in banner(recipe, stage, trainer):
        say(line)
    if processes.count() > 1:  # never by TRL's own loop, whose arguments are others
        args = trainer.args
        whole = getattr(trainer, "padding_free", False)  # TRL packs a micro-batch of sft into one row
        of_step = (1 if whole else args.train_batch_size) * args.gradient_accumulation_steps
        if stage == "ppo":
            of_step = args.update_batch_size // args.num_mini_batches
        say_shares(stage, of_step)
    _say_rows(recipe, stage)
    cut = _report_cuts(recipe, trainer.args) if stage == "sft" else {}
    stock = stage == "ppo" and not isinstance(trainer, PPOTrainer)
    before, responses_before = _before(recipe, stage, trainer)
    _tell_before(trainer, before, responses_before, goes_on=checkpoint is not None)
    so_far = ReportAtEvaluations(recipe, stage, started, before, trainer, progress)
    if processes.is_main():
        trainer.add_callback(so_far)
    ended = {}
    with so_far.told():
        if stock:
            trainer.train()
            trainer.save_model(str(folder))
        else:
            try:
                trainer.train(resume_from_checkpoint=checkpoint)
            except RunInterrupted as stop:
                raise RunInterrupted(f"{stage} {stop}", stop.signal_number) from stop
            processes.by_main(lambda: _save_model(trainer, folder))
            started -= trainer.seconds_before
            ended = _how_it_ended(trainer)
        last = isinstance(trainer, PPOTrainer) and not trainer.args.load_best_model_at_end
        kept = trainer.saved_if_the_reward_fails() if last else nullcontext()
        with phases.phase("answers after" if stage in ("ppo", "q") else "measure after"), kept:
            after, responses_after = _measure(recipe, stage, trainer)
        _tell_after(trainer, after, responses_after)
        result = figures(recipe, stage, started, before, after) | _of_training(trainer, progress) | ended
        if so_far.apart:
            result[APART] = True
        if cut:
            result["cut"] = cut
        samples = reports.sample_rows(responses_before, responses_after) if responses_before and responses_after else []
        judged = trainer.judged if stage == "reward" else ()
        with phases.phase("write"):
            processes.by_main(lambda: _write_up(recipe, stage, result, samples, judged))
    return result, samples


def _check_best(recipe: Recipe, stage: str, trainer: Any) -> None:
    if isinstance(trainer, SamplingTrainer) and trainer.eval_dataset is not None:
        with within(stage):
            check_best(recipe, trainer.args, trainer.eval_dataset)


def _say_rows(recipe: Recipe, stage: str) -> None:
    for section, task in recipe.tasks_of(stage).items():
        if (rows := task.report()) is not None:
            say(f"{section}: {rows}")


def _save_model(trainer: Any, folder: Path) -> None:
    with writing(folder, "Make room, then go on with $resume."):
        trainer.save_model(str(folder))


def _before(recipe: Recipe, stage: str, trainer: Any) -> tuple[dict[str, Any], Responses | None]:
    """What was measured first, by this process or by one that began the stage."""
    path = recipe.stage_folder(stage) / BEFORE_FILE
    rows = recipe.task.prompts("test") if stage in ("ppo", "q") else trainer.eval_dataset
    held_out = None if rows is None else data_digest(rows)
    check_alike({"held-out rows": held_out}, getattr(trainer, "roles", None))
    kept = processes.by_main(lambda: reports.read_json(path))
    if kept is None:  # also where a notebook, which measures nothing, began the run: no checkpoint is read yet
        with phases.phase("answers before" if stage in ("ppo", "q") else "measure before"):
            measured, responses = _measure(recipe, stage, trainer)
        kept = {"metrics": measured, "answers": asdict(responses) if responses else None, "held_out": held_out}
        kept[APART] = _evaluated_apart(recipe, stage, trainer)
        processes.by_main(partial(reports.write_json, path, kept))
    elif APART not in kept:  # of an earlier version
        kept[APART] = _evaluated_apart(recipe, stage, trainer)
        processes.by_main(partial(reports.write_json, path, kept))
    if kept.get("held_out", held_out) != held_out:
        wrong = f"{path} was measured on other held-out rows, with which what comes after cannot be compared."
        with processes.agreed():  # told once
            raise CheckpointError(wrong, remedy="Give those rows back, or begin anew with $overwrite.")
    return kept["metrics"], Responses(**kept["answers"]) if kept["answers"] else None


def _evaluated_apart(recipe: Recipe, stage: str, trainer: Any) -> bool:
    """Whether evaluations on the way are of other prompts than those before and after: not to be held against them."""
    if stage not in ("ppo", "q") or trainer.eval_dataset is None or recipe.values[stage].get("loop") == "trl":
        return False  # TRL's loop evaluates nothing
    return data_digest(recipe.task.prompts("test")) != data_digest(trainer.eval_dataset)


def _tell_before(trainer: Any, metrics: dict[str, Any], responses: Responses | None, *, goes_on: bool) -> None:
    if not isinstance(trainer, PPOTrainer) or responses is None:
        return
    evaluation = metrics, responses.responses, responses.prompts
    if not goes_on:  # else a checkpoint knows what it was a warning of
        trainer.evaluated(*evaluation)
    elif metrics.keys() >= {*SIGNS}:  # a notebook's checkpoint does not know it; an earlier version measured less
        trainer.measured_before = evaluation


def _tell_after(trainer: Any, metrics: dict[str, Any], responses: Responses | None) -> None:
    if isinstance(trainer, PPOTrainer) and responses is not None:
        trainer.evaluated(metrics, responses.responses, responses.prompts, step=_step_of_weights(trainer))


def _of_training(trainer: Any, progress: Progress) -> dict[str, Any]:
    """What `result.json` holds of a stage that trains something: rows, warnings, where the time went."""
    rows = {"train": trainer.train_dataset, "held out": trainer.eval_dataset}
    found: dict[str, Any] = {"rows": {name: len(of) for name, of in rows.items() if of is not None}}
    if resumed_at := getattr(trainer, "resumed_at", ()):
        found["resumed_at"] = list(resumed_at)
    if (watch := getattr(trainer, "watch", None)) and watch.given:
        found["warnings"] = watch.given
    if (skipped := getattr(trainer, "skipped", None)) and skipped.total:
        found["skipped_steps"] = skipped.total
    return {**found, "spent": progress.spent}


def _how_it_ended(trainer: Any) -> dict[str, str]:
    """For the result a sentence where training ended before its last step, or not with its last weights: it is said."""
    args, state = trainer.args, trainer.state
    said, metric = [], (args.metric_for_best_model or "loss").removeprefix("eval_")
    if state.global_step < state.max_steps:
        stoppers = (one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback))
        patience = next((one.early_stopping_patience for one in stoppers if _has_stopped(one)), 0)
        why = f": no better {metric} in {patience} evaluation{'s' * (patience > 1)}" if patience else ""
        said.append(f"It stopped early, at step {state.global_step} of {state.max_steps}{why}.")
    if (best := _step_of_weights(trainer)) < state.global_step:
        said.append(f"The weights are those of step {best} of {state.global_step}, the best by {metric}.")
    for sentence in said:
        say(sentence)
    return {"ended": " ".join(said)} if said else {}


def _step_of_weights(trainer: Any) -> int:
    """The step whose weights a trainer has at its end: the best come back where the settings say so."""
    state = trainer.state
    best = state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    return step_of(Path(best)) if best else int(state.global_step)


def _has_stopped(stopper: EarlyStoppingCallback) -> bool:
    return bool(stopper.early_stopping_patience_counter >= stopper.early_stopping_patience)


class ReportAtEvaluations(TrainerCallback):
    """Writes the report of a stage that goes on, as far as it is, at each evaluation and where it is stopped; not more
    often than its page loads itself again once the metrics, which it reads, are many."""

    many = 10_000_000  # bytes

    def __init__(
        self, recipe: Recipe, stage: str, started: float, before: dict[str, Any], trainer: Any, progress: Progress
    ):
        self.recipe, self.stage, self.started, self.before = recipe, stage, started, before
        self.trainer, self.progress = trainer, progress
        self.now: dict[str, Any] | None = None  # what the last evaluation has measured
        self.written = float("-inf")  # when the last report was, by `time.monotonic`
        self.apart = _evaluated_apart(recipe, stage, trainer)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.trainer.is_in_train:
            self.now = self._of_evaluation(metrics or {})
            metrics_file = self.recipe.stage_folder(self.stage) / reports.METRICS_FILE
            is_recent = time.monotonic() - self.written < reports.RELOADS_AFTER
            if not (is_recent and metrics_file.stat().st_size >= self.many):
                self._write("running")

    def stopped(self) -> None:
        """The stage has been stopped, or has failed; where no evaluation has written a report there is none."""
        if self.now is None:  # of a run that goes on, and has not come to its next evaluation
            rows = reports.read_jsonl(self.recipe.stage_folder(self.stage) / reports.METRICS_FILE)
            self.now = next(filter(None, map(self._of_evaluation, reversed(rows))), None)
        if self.now is not None and self.trainer.state.global_step:
            self._write("stopped")

    def _of_evaluation(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        measured = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
        # It has the loss that is trained, and `before` a plain one: of pairs without their margins, centring or every
        # token, of classes not smoothed.
        if self.stage == "reward" and ("accuracy" in measured or self.trainer.args.label_smoothing_factor):
            measured.pop("loss", None)
        return {name: value for name, value in measured.items() if name in self.before}

    @contextmanager
    def told(self) -> Iterator[None]:
        """Whatever ends the stage inside but its end, the report says that it has stopped."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # what has ended the stage says more
                if processes.is_main():
                    self.stopped()
            raise

    def _write(self, how: str) -> None:
        folder, state = self.recipe.stage_folder(self.stage), self.trainer.state
        started = self.started - getattr(self.trainer, "seconds_before", 0.0)
        metrics = reports.read_jsonl(folder / reports.METRICS_FILE)
        before = self._of_evaluation(reports.at_start(metrics)) if self.apart else self.before
        result = figures(self.recipe, self.stage, started, before, self.now or {})
        result |= _of_training(self.trainer, self.progress) | ({APART: True} if self.apart else {})
        result[how] = f"{how.title()}: step {state.global_step} of {state.max_steps} at {result['date']}."
        reports.write_report(folder, result, metrics, [], self.recipe.to_yaml())
        self.written = time.monotonic()


def _rows_read(recipe: Recipe, stage: str) -> dict[str, Any]:
    """For the result how many rows could not be used, and why; which these are, and which the stage has, in files."""
    folder, (task, *others) = recipe.stage_folder(stage), recipe.tasks_of(stage).values()
    if not task.left_out:  # a task that reads no file
        return {}
    write_jsonl(folder / "left_out.jsonl", [row for one in (task, *others) for row in one.left_out_rows()])
    write_jsonl(folder / "rows.jsonl", task.row_places(stage))
    found = zip(("left_out", "left_out_prompts"), (task, *others), strict=False)
    return {name: {split: dict(reasons) for split, reasons in of.left_out.items()} for name, of in found if of.left_out}


def _write_up(
    recipe: Recipe, stage: str, result: dict[str, Any], samples: list[dict[str, Any]], judged: Sequence[ScoredPair]
) -> None:
    """Everything that a finished stage says, `result.json` last."""
    folder = recipe.stage_folder(stage)
    result |= _rows_read(recipe, stage)
    if samples:
        write_jsonl(folder / SAMPLES_FILE, samples)
    if judged:
        result["judgement"] = reports.pair_evaluation(judged)
        write_jsonl(folder / reports.SCORES_FILE, judged)
        write_jsonl(folder / reports.ERRORS_FILE, reports.worst_errors(judged))
        if recipe.plan.stages["reward"].own is None:
            of_both = (pair[f"{side}_score"] for pair in judged for side in ("chosen", "rejected"))
            save_high_score(folder / "reward", [*of_both])
    metrics = reports.read_jsonl(folder / reports.METRICS_FILE)
    reports.write_report(folder, result, metrics, samples, recipe.to_yaml(), judged)
    finish(folder, result)


def _report_cuts(recipe: Recipe, args: Any) -> dict[str, dict[str, int]]:
    """Rows of the sft stage that `sft.max_length` cuts, by split: TRL cuts them without a word."""
    cuts = {}
    for split in ("train", "validation"):
        rows = stage_dataset(recipe, "sft", "demonstrations", split)
        cut = cut_rows(rows, args, packing=packs(args, split))
        if cut:
            cuts[split] = cut
            of = f"{cut['cut']} of {len(rows)} rows are cut to sft.max_length ({args.max_length})"
            lost = f"{cut['without_loss']} of them lose all that the loss is taken of, and are left out"
            say(f"data: {split}: {of}; {lost}")
    return cuts


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


def _measure(recipe: Recipe, stage: str, trainer: Any) -> tuple[dict[str, Any], Responses | None]:
    """The figures of what a stage trains, and its responses to held-out prompts where it gives any."""
    if stage == "sft":
        return {"loss": trainer.evaluate()["eval_loss"]}, None
    if stage == "reward":
        return _reward_figures(recipe, trainer), None
    prompts = recipe.task.prompts("test")
    if stage == "q":  # before training it is the reference that responds, decoded in the same way
        evaluation = trainer.evaluate_rollout(prompts, by_q=trainer.state.global_step > 0)
    elif isinstance(trainer, PPOTrainer):
        evaluation = trainer.evaluate_rollout(prompts)
    else:  # in the same way as ours
        set_seed(recipe.seed)
        rollouts = stock_rollouts(trainer)
        named = measures(recipe, rollouts.roles, trainer.toolkit_pad_tokens, rollouts.portion.rows)
        evaluation = rollouts.evaluator(**named)(prompts)
    return evaluation.metrics, Responses.of(evaluation.rollout, evaluation.scores, evaluation.judged)


def _reward_figures(recipe: Recipe, trainer: Any) -> dict[str, Any]:
    scorer, rows = trainer.scorer, trainer.eval_dataset
    tokenizer, size = recipe.tokenizer, trainer.args.per_device_eval_batch_size
    with trainer.compute_loss_context_manager():
        if recipe.plan.stages["reward"].rows == "labelled":
            return class_figures(scorer, rows, pad_token_id=tokenizer.pad_token_id, batch_size=size)
        trainer.judged = judge_pairs(scorer, rows, tokenizer, batch_size=size)
    return pair_figures(trainer.judged)


def show_result(result: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """The samples; the figures before and after but the signs of a reward that is fooled and single rules, seconds
    and memory; a verdict."""
    console = Output()
    if samples:
        console.print(reports.samples_table(samples))
    before, after = result["before"], result["after"]
    for key, value in after.items():
        shown = key not in SIGNS and not key.startswith(PER_RULE)
        if shown and isinstance(value, float) and isinstance(before.get(key), float):
            console.print(f"{key:>16}  {before[key]:10.4f} → {value:.4f}", highlight=False)
    if rules := sum(key.startswith(PER_RULE) for key in after):
        console.print(f"{PER_RULE + '…':>16}  of {rules} rules: in result.json", highlight=False)
    low_high = after.get("accuracy_ci")
    if low_high:
        console.print(f"{'accuracy_ci':>16}  {low_high[0]:.4f} – {low_high[1]:.4f} (95 %)", highlight=False)
    memory = ", ".join(f"{key} {value:.2f} GB" for key, value in result["peak_memory_gb"].items())
    console.print(f"{result['stage']} took {result['seconds']:.0f} s; peak memory: {memory}", highlight=False)
    if said := reports.verdict(result, samples):
        say(said)
