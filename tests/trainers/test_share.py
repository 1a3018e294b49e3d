"""The same step by two processes as by one, which other tests hold against TRL and torch."""

import errno
import hashlib
import json
import shutil
import signal
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from tests.tiny_models import lora, randomize, saved_base, shared_base, tiny_model
from tests.tolerances import RELATIVE
from tests.trainers import helpers, resumable, test_float16
from tests.trainers.helpers import PROMPTS, RESPONSES, SCORES, count_reward, rollout, trainer
from tests.trainers.resumable import TIMING
from tests.trainers.test_value_options import base_with, classifier
from toolkit import phases, processes
from toolkit.checkpoints import newest_whole, problem_of
from toolkit.errors import RunInterrupted, ToolkitError
from toolkit.models import SharedBase, ValueModel
from toolkit.reports import versions
from toolkit.rewards import DenseScores, RewardAdapter, check_scores, score_with
from toolkit.rewards import adapter as reward_adapter
from toolkit.trainers import resume, same_run, share
from toolkit.trainers.share import own_randomness

LONG = [[12, 13, 2], [9, 8, 7] * 10, [20, 30, 2], [5, 6, 2]]  # one is ten times as long

CASES = {
    "separate": {},
    "shared value": {"value": "shared"},
    "full KL in the loss, entropy": {"kl_estimator": "full", "kl_penalty_in": "loss", "entropy_coef": 0.1},
    "pooled values, one row a forward pass": {"value_pooling": "response_mean", "per_device_train_batch_size": 1,
                                              "gradient_accumulation_steps": 4},
    "bootstrapped": {"truncated_as": "bootstrap"},
    "dense scores": {},
    "a base of its own": {},
    "one response ten times as long": {"response_length": 30},
}  # fmt: skip


def gradients(folder, case, mini_batches):
    """Metrics and all gradients of each mini-batch of these rows, from rollouts that are given."""
    base = base_with(ValueModel(classifier(), None)) if case == "a base of its own" else None
    ours = trainer(Path(folder) / str(processes.rank()), base, **CASES[case])
    given = rollout(LONG if case == "one response ten times as long" else RESPONSES)
    dense = DenseScores(tokens=[[0.1 * token for token in ids] for ids in given.response_ids])
    return gradients_of(ours, given, dense if case == "dense scores" else SCORES, mini_batches)


def gradients_of(ours, given, scores, mini_batches):
    ours._prepare_training()
    experience = ours._make_experience(given, check_scores(scores, given))
    trained = [p for role in ours.roles.trained_roles for p in ours.roles.parameters_of(role)]
    return [
        (ours._backward_mini_batch(experience, rows), [p.grad.numpy().copy() for p in trained if p.grad is not None])
        for rows in mini_batches
    ]


def assert_gradients(found, expected):
    metrics, alone = expected
    assert found[0] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    apart = [one - other for one, other in zip(alone, found[1], strict=True)]
    assert norm(apart) <= 1e-5 * norm(alone)
    for difference, one in zip(apart, alone, strict=True):
        assert abs(difference).max() <= RELATIVE * max(abs(one).max(), 1e-6)


def norm(tensors):
    return float(np.linalg.norm(np.concatenate([tensor.ravel() for tensor in tensors])))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_mini_batch(case, two, tmp_path):
    mini_batches = [0, 1, 2, 3], [1, 0, 2], [3]  # of one row, one process has none
    alone = gradients(tmp_path, case, mini_batches)
    for found in two(gradients, tmp_path, case, mini_batches):
        for divided, whole in zip(found, alone, strict=True):
            assert_gradients(divided, whole)


def test_gradients_of_fewer_rows_than_processes(four, tmp_path):
    (alone,) = gradients(tmp_path, "separate", [[1, 3]])
    for (found,) in four(gradients, tmp_path, "separate", [[1, 3]]):
        assert_gradients(found, alone)


def drawn():
    found = []
    for at, where in enumerate(((0, 1), (0, 1), (0, 2), (1, 1))):
        torch.manual_seed(at)
        with own_randomness(*where):
            found.append(torch.rand(2).tolist())
    return found, torch.rand(2).tolist()


def test_dropout_is_of_a_process_and_a_place_and_all_else_of_none(two):
    (first, of_all), (second, of_all_too) = two(drawn)
    assert first[0] == first[1] and len({tuple(numbers) for numbers in (*first[1:], *second[1:])}) == 6
    torch.manual_seed(3)
    assert of_all == of_all_too == torch.rand(2).tolist()


def seeds(folder):
    """That of each forward pass of two steps of four micro-batches."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 2}
    made = resumable.make(resumable.sft_policy, Path(folder), save_strategy="no", **settings)
    compute_loss, seen = made.compute_loss, []
    made.compute_loss = lambda *of, **named: (seen.append(torch.initial_seed()), compute_loss(*of, **named))[1]
    made.train()
    return seen


def test_no_two_passes_of_a_run_draw_the_same_dropout(two, tmp_path):
    one, other = two(seeds, tmp_path)
    assert len(one) == len(other) == 4 and len({*one, *other}) == 8


def in_float16(folder, stage):
    if stage == "ppo":
        made = test_float16.in_float16(Path(folder) / "ppo", num_mini_batches=4, max_steps=1)
        return made.train()["optimizer_steps"]
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 2, "fp16": True}
    made = test_float16.with_scaler(resumable.sft_policy(Path(folder) / "sft", save_strategy="no", **settings))
    made.train()
    return made.state.global_step


@pytest.mark.parametrize(("stage", "steps"), [("ppo", 4), ("sft", 2)])
def test_a_scaler_of_a_process_without_a_row(stage, steps, two, tmp_path):
    assert list(two(in_float16, tmp_path, stage)) == [steps, steps]


def rounded_gradients(folder, nf4, micro_batch):
    """Of a base in bfloat16, or in NF4, as one vector."""
    if nf4:
        base = saved_base(Path(folder) / "checkpoint", "bfloat16", compute="bfloat16", size=128)
    else:
        base = SharedBase(tiny_model().to(torch.bfloat16))
    base.add_role("policy", lora())
    base.add_role("reference")
    base.add_role("value", lora())
    randomize(base, "policy", "value")
    settings = {"bf16": True, "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 4}
    ours = trainer(Path(folder) / str(processes.rank()), base, count_reward(7), **settings)
    ((_, found),) = gradients_of(ours, rollout(RESPONSES), SCORES, [[0, 1, 2, 3]])
    return np.concatenate([gradient.ravel() for gradient in found])


@pytest.mark.parametrize("nf4", [False, True])
def test_in_less_precision_gradients_part_no_further_than_by_other_micro_batches(nf4, two, tmp_path):
    alone = rounded_gradients(tmp_path, nf4, 4)
    regrouped = max(np.linalg.norm(rounded_gradients(tmp_path, nf4, size) - alone) for size in (1, 2, 3))
    assert 0 < regrouped < 0.1 * np.linalg.norm(alone)
    for divided in two(rounded_gradients, tmp_path, nf4, 4):
        assert np.linalg.norm(divided - alone) <= 2 * regrouped


def trained(folder, stage, changes):
    """Losses and weights of a short run without dropout, and a digest of the weights."""
    return trained_together(Path(folder) / f"{processes.count()}-{processes.rank()}", stage, changes)


def trained_together(folder, stage, changes):
    """The same, in one folder."""
    resumable.DROPOUT["lora_dropout"] = 0.0
    try:
        made = resumable.make(getattr(resumable, stage), Path(folder), **changes)
    finally:
        resumable.DROPOUT["lora_dropout"] = 0.3
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    made.train()
    weights = {name: tensor.numpy() for name, tensor in resumable.weights(made).items()}
    rows = [{k: v for k, v in row.items() if not any(t in k for t in TIMING)} for row in made.state.log_history]
    return rows, weights, digest_of(made)


def digest_of(made):
    weights = resumable.weights(made)
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


SGD = {"optim": "sgd", "learning_rate": 1e-2, "max_steps": 3, "save_strategy": "no", "logging_steps": 1}


def test_the_best_model_is_put_back_in_every_process(two, tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 3, "save_steps": 1}
    best |= {"metric_for_best_model": "eval_score", "greater_is_better": False, "learning_rate": 0.3}
    best |= {"lr_scheduler_type": "constant", "num_ppo_epochs": 2}
    (history, _, one), (_, _, other) = two(trained_together, tmp_path / "two", "ppo", best)
    scores = [row["eval_score"] for row in history if "eval_score" in row]
    step = scores.index(min(scores)) + 1
    assert len(scores) == 3 and step < 3  # so that another one than the last is put back
    until = {**best, "max_steps": step, "load_best_model_at_end": False}
    (_, _, expected), _ = two(trained_together, tmp_path / "until", "ppo", until)
    assert one == other == expected


@pytest.mark.parametrize(
    "stage", ["sft_policy", "sft_model", "reward_pairs", "reward_classes", "q", "ppo", "ppo_gathered"]
)
def test_three_steps_of_every_stage(stage, two, tmp_path):
    history, weights, _ = trained(tmp_path, stage, SGD)
    (one, of_one, digest), (_, _, other) = two(trained, tmp_path, stage, SGD)
    assert digest == other
    assert len(history) >= 3
    for row, divided in zip(history, one, strict=True):
        assert divided == pytest.approx(row, rel=1e-4, abs=1e-5)
    for name, value in weights.items():
        assert abs(value - of_one[name]).max() < 1e-6, name


ADAM = {**SGD, "optim": "adamw_torch", "learning_rate": 1e-3}


@cache
def initial(stage):
    """The weights that all begin with."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: value.numpy() for name, value in
                resumable.weights(resumable.make(getattr(resumable, stage), Path(folder))).items()}  # fmt: skip


def change(weights, stage):
    return np.concatenate([(weights[name] - value).ravel() for name, value in initial(stage).items()])


@pytest.mark.parametrize("stage", ["sft_policy", "ppo"])
def test_what_three_steps_of_adamw_change(stage, two, tmp_path):
    """Adam turns a gradient of nearly 0 into a whole step of either sign: the change is compared as one vector."""
    alone = change(trained(tmp_path, stage, ADAM)[1], stage)
    (_, one, digest), (_, _, other) = two(trained, tmp_path, stage, ADAM)
    assert digest == other
    assert np.linalg.norm(change(one, stage) - alone) <= 1e-3 * np.linalg.norm(alone) > 0


TWO = {**SGD, "max_steps": 2}
FEW = {**TWO, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
SHORT = {**TWO, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("stage", "changes"),
    [("ppo", FEW), ("sft_policy", SHORT), ("q", {**TWO, "gradient_accumulation_steps": 3}), ("reward_pairs", SGD)],
)
def test_steps_where_rows_do_not_divide_or_do_not_suffice(stage, changes, four, tmp_path):
    history, weights, _ = trained(tmp_path, stage, changes)
    (divided, found, digest), *others = four(trained, tmp_path, stage, changes)
    assert [digest] * 3 == [other for *_, other in others]
    for row, ours in zip(history, divided, strict=True):
        assert ours == pytest.approx(row, rel=1e-4, abs=1e-5)
    for name, value in weights.items():
        assert abs(value - found[name]).max() < 1e-5, name


def measured(folder, stage, size):
    """Held-out loss and TRL's metrics, and how many batches this process has read for them."""
    folder, read = Path(folder) / f"{processes.count()}-{processes.rank()}", []
    made = resumable.make(getattr(resumable, stage), folder, per_device_eval_batch_size=size)
    if stage == "sft_policy":
        cut = [row["input_ids"][: 2 + number % 5] for number, row in enumerate(made.eval_dataset)]
        made.eval_dataset = Dataset.from_dict({"input_ids": cut})
    compute_loss = made.compute_loss
    made.compute_loss = lambda *arguments, **named: (read.append(1), compute_loss(*arguments, **named))[1]
    metrics = made.evaluate()
    metrics = {name: value for name, value in metrics.items() if not any(t in name for t in (*TIMING, "time"))}
    batches = len(read)
    predicted = made.predict(made.eval_dataset).predictions.tolist() if stage == "reward_classes" else []
    return metrics, batches, predicted


@pytest.mark.parametrize(("stage", "size"), [("sft_policy", 2), ("reward_pairs", 5), ("reward_classes", 3)])
def test_held_out_batches_are_divided(stage, size, four, tmp_path):
    """What they give is as of single rows, of sft's 2 to 6 tokens."""
    metrics, batches, predicted = measured(tmp_path, stage, size)
    assert metrics == pytest.approx(measured(tmp_path, stage, 1)[0], rel=1e-4)
    found = four(measured, tmp_path, stage, size)
    assert sum(read for _, read, _ in found) == batches and max(read for _, read, _ in found) == -(-batches // 4)
    for divided, _, of_all in found:
        assert divided == pytest.approx(metrics, rel=1e-6)
        assert of_all == predicted and len(predicted) == (8 if stage == "reward_classes" else 0)  # all rows in each


def trained_short_of_memory(folder, stage):
    """As `trained`, where the last process has no room for two rows; what each then computes at a time, and is told."""
    step, told = Trainer.training_step, []

    def limited(self, model, inputs, *arguments, **named):
        if processes.rank() == processes.count() - 1 and self.rows_of(inputs) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, model, inputs, *arguments, **named)

    with mock.patch.object(Trainer, "training_step", limited), mock.patch.object(phases, "tell", told.append):
        rows, weights, digest = trained(folder, stage, WIDE)
    return rows, weights, digest, told


WIDE = {**SGD, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("stage", ["sft_policy", "reward_pairs", "q"])
def test_one_process_that_runs_out_of_memory_halves_its_rows_and_no_gradient(stage, two, tmp_path):
    """It goes on by itself within the step, and from the next one on so do the others."""
    history, weights, _ = trained(tmp_path, stage, WIDE)
    (rows, found, digest, told), (*_, other, told_other) = two(trained_short_of_memory, tmp_path, stage)
    assert digest == other
    for row, divided in zip(history, rows, strict=True):
        assert divided == pytest.approx(row, rel=1e-4, abs=1e-5)
    for name, value in weights.items():
        assert abs(value - found[name]).max() < 1e-6, name
    assert ["per_device_train_batch_size is 1" in text for text in told] == [True] == [True for _ in told_other]


class _Signal(TrainerCallback):
    """A signal to one of the processes in the second step."""

    def __init__(self, rank):
        self.rank = rank

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and processes.rank() == self.rank:
            signal.raise_signal(signal.SIGTERM)


def stopped(folder, stage, rank, steps):
    made = resumable.make(getattr(resumable, stage), Path(folder), save_steps=100, max_steps=steps)
    made.add_callback(_Signal(rank))
    try:
        made.train()
    except RunInterrupted as stop:
        return made.state.global_step, str(stop)


class _Asks(TrainerCallback):
    """Asks for something after the second step, or after the pass that it is in, in one of the processes."""

    def __init__(self, what, event):
        self.what, self.event = what, event

    def on_step_end(self, args, state, control, **kwargs):
        if self.event == "step" and state.global_step == 2 and processes.is_main():
            self.ask(control)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.event == "pass" and state.global_step < 5 and processes.is_main():
            self.ask(control)

    def ask(self, control):
        for what in self.what.split():
            setattr(control, what, True)


def asked_for(folder, stage, what, event):
    """The last step, where it is in its pass, the steps that were evaluated and those that were saved."""
    never = {"save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no"}
    steps = 3 if event == "step" else 5  # after a pass of four
    made = resumable.make(getattr(resumable, stage), Path(folder), max_steps=steps, **never)
    made.add_callback(_Asks(what, event))
    made.train()
    rows = made.state.log_history
    evaluated = [row["step"] for row in rows if any(name.startswith("eval_") for name in row)]
    logged = [row["step"] for row in rows if "learning_rate" in row]
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return made.state.global_step, made.state.epoch, evaluated, logged, saved, digest_of(made)


@pytest.mark.parametrize(
    ("stage", "what", "event", "expected"),
    [
        ("reward_pairs", "should_training_stop", "step", (2, 2 / 3, [], [], [])),
        ("ppo", "should_training_stop", "step", (2, 1 / 2, [], [], [])),
        ("reward_pairs", "should_save should_evaluate should_log", "step", (3, 1.0, [2], [2], ["checkpoint-2"])),
        ("ppo", "should_save", "step", (3, 3 / 4, [], [], ["checkpoint-2"])),
        ("ppo", "should_evaluate", "pass", (5, 5 / 4, [4], [], [])),
    ],
)
def test_what_a_callback_asks_for_in_one_all_do(stage, what, event, expected, two, tmp_path):
    one, other = two(asked_for, tmp_path, stage, what, event)
    assert one == other and one[:-1] == expected


class _Alone(TrainerCallback):
    """Changes the weights of the second process alone."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if processes.rank() == 1:
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).add_(1.0)


def parts_ways(folder, strategy):
    made = resumable.make(resumable.sft_policy, Path(folder), save_strategy=strategy, max_steps=1)
    made.add_callback(_Alone())
    try:
        made.train()
    except ToolkitError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_processes_whose_weights_differ_end_and_save_nothing(strategy, two, tmp_path):
    (main, said), (other, heard) = two(parts_ways, tmp_path, strategy)
    assert (main, other) == ("SelfCheckError", "PeerError") and said in heard
    assert said.startswith("after step 1 the processes do not hold the same weights any more.")
    assert list(tmp_path.glob("*checkpoint*")) == []


def goes_on_with_fewer_rows(folder, stage):
    made = resumable.make(getattr(resumable, stage), Path(folder))
    made.train_dataset = made.train_dataset.select(range(3))
    with pytest.raises(ToolkitError) as refused:
        made.train(resume_from_checkpoint=True)
    return type(refused.value).__name__


def goes_on(folder, stage, resume, steps=resumable.STEPS):
    """With dropout, of a run that is whole or goes on; and whether this process is the one that reports."""
    resumable.disturb()
    made = resumable.make(getattr(resumable, stage), Path(folder), max_steps=steps)
    made.train(resume_from_checkpoint=resume)
    state = made.state
    return state.global_step, digest_of(made), state.is_world_process_zero, state.is_local_process_zero


@pytest.mark.parametrize(("stage", "rank", "times"), [("reward_pairs", 0, 2), ("ppo", 1, 1)])
def test_a_signal_to_one_stops_all_at_the_same_step_and_the_run_goes_on_to_the_same_bits(
    stage, rank, times, two, tmp_path
):
    """Once stopped, and where all its steps are behind it; one reports, though the checkpoint is the main one's."""
    stops = two(stopped, tmp_path / "stopped", stage, rank, resumable.STEPS)
    assert stops[0] == stops[1] and stops[0][0] == 2 and "stopped by SIGTERM after step 2 of 6" in stops[0][1]
    whole = two(goes_on, tmp_path / "whole", stage, None)
    assert whole[0][:2] == whole[1][:2]  # each with dropout of its own
    assert [one[2:] for one in whole] == [(True, True), (False, False)]
    assert two(goes_on_with_fewer_rows, tmp_path / "stopped", stage) == ["CheckpointError", "PeerError"]  # told once
    for _ in range(times):
        assert two(goes_on, tmp_path / "stopped", stage, True) == whole


def goes_on_saying(folder):
    """What is said of processes, and the first responses of a run that goes on."""
    resumable.disturb()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = resumable.make(resumable.ppo, Path(folder), logging_steps=1, max_steps=3)
        made.train(resume_from_checkpoint=True)
    if processes.is_main():
        rows = [json.loads(line) for line in (Path(folder) / "rollouts.jsonl").read_text().splitlines()]
        first = [row["response"] for row in rows if row["step"] == 3]
        return digest_of(made), [str(one.message) for one in said if "processes" in str(one.message)], first
    return digest_of(made), None, None


def test_another_number_goes_on_as_one_would_and_says_so(two, four, tmp_path):
    two(stopped, tmp_path / "two", "ppo", 1, 3)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    main, *others = four(goes_on_saying, tmp_path / "two")
    assert [digest for digest, *_ in others] == [main[0]] * 3
    assert "was written by 2 processes, and 4 resume it: rows and responses are drawn alike, but sums" in main[1][0]
    _, said, first = goes_on_saying(tmp_path / "one")
    assert "by 2 processes, and 1 resumes it: rows and responses are drawn alike" in said[0]
    assert first == main[2] and len(first) == len(PROMPTS)


def fails_to_save(folder):
    """A run whose disk is full when the main process writes its second checkpoint."""
    whole, written = resume.checkpoints.whole_folder, []

    @contextmanager
    def full(path, **settings):
        written.append(path)
        with whole(path, **settings) as aside:
            yield aside
            if len(written) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

    made = resumable.make(resumable.ppo, Path(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume.checkpoints, "whole_folder", full)
        try:
            made.train()
        except ToolkitError as error:
            return len(written), type(error).__name__, str(error)


def test_a_full_disk_of_the_main_process_ends_all_and_leaves_the_last_checkpoint(two, tmp_path):
    main, other = two(fails_to_save, tmp_path)
    assert main[:2] == (2, "CheckpointError") and "cannot be written" in main[2] and "No space left" in main[2]
    assert other[:2] == (0, "PeerError") and "process 0 of 2: CheckpointError" in other[2]
    left = newest_whole(tmp_path, say=print)
    assert left == tmp_path / "checkpoint-1" and problem_of(left) is None


def scored_by(folder, rank):
    """Responses and scores of a first rollout, by a reward that counts its calls, and fails in one process."""
    calls = []

    def reward(rollout):
        calls.append(len(rollout))
        if processes.rank() == rank:
            raise ValueError("no score today")
        return count_reward(7)(rollout)

    ours = trainer(Path(folder) / str(processes.rank()), reward=reward)
    batch = ours.dataloader.next_batch()
    responses = ours.generate(batch)
    try:
        return responses.response_ids, ours.score(batch, responses).tolist(), calls
    except ToolkitError as error:
        return responses.response_ids, str(error), calls


class _Draws(TrainerCallback):
    """Draws a random number in one of the processes, as whoever shows a sample there."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            torch.rand(1)


def own_scores(rollout):
    """By a reward that each process calls, and that has not the same result in each."""
    return count_reward(9)(rollout) + processes.rank()


own_scores.on_every_process = True


def begun_with(folder, what):
    """What a process says whose base, or prompts, are its own."""
    prompts = [row[::-1] for row in PROMPTS] if what == "data" and processes.rank() else PROMPTS
    base = shared_base()
    if what == "base" and processes.rank():
        with torch.no_grad():
            base.causal_lm.model.embed_tokens.weight.mul_(1.5)
    if what in ("adapters", "weights to train") and processes.rank():  # of which the reward is not trained
        with torch.no_grad():
            base.parameters_of("reward" if what == "adapters" else "policy")[0].mul_(1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "PROMPTS", prompts)
        changes = {"cliprange": 0.3} if what == "settings (cliprange)" and processes.rank() else {}
        ours = trainer(folder, base, own_scores if what == "scores" else count_reward(9), max_steps=1, **changes)
    if what == "draws":
        ours.add_callback(_Draws())
    if what == "responses" and processes.rank():
        generate = ours.generate
        ours.generate = lambda batch: other_responses(generate(batch))
    with pytest.MonkeyPatch.context() as patch:
        if what == "versions (torch)" and processes.rank():
            patch.setattr(same_run, "versions", lambda: {**versions(), "torch": "another"})
        return said_by(ours)


def other_responses(rollout):
    """With another token at the beginning of the first."""
    first, *others = map(list, rollout.response_ids)
    return replace(rollout, response_ids=[[first[0] - 1, *first[1:]], *others])


def said_by(ours):
    try:
        ours.train()
    except ToolkitError as error:
        return str(error)
    return ours.state.is_world_process_zero, ours.state.is_local_process_zero


def test_processes_begin_with_the_same_and_one_of_them_reports(two, tmp_path):
    assert two(begun_with, tmp_path, "") == [(True, True), (False, False)]
    for what in ("base", "data", "adapters", "weights to train", "settings (cliprange)", "versions (torch)"):
        said = f"the processes do not begin with the same {what}. Give all machines the same settings, checkpoint, data"
        assert all(said in one for one in two(begun_with, tmp_path, what))
    assert two(begun_with, tmp_path, "draws") == [(True, True), (False, False)]  # a callback, in one process alone
    for what in ("responses", "scores"):
        said, heard = two(begun_with, tmp_path, what)
        assert said.startswith(f"at update 1 the processes do not have the same {what}. Let all processes do what one")
        assert heard == f"process 0 of 2: SelfCheckError: {said}"


def sums_of(folder):
    """How many numbers are added up over the processes before anything is measured, and by the time a run has begun
    twice; and whether the weights stay."""
    ours, seen = trainer(folder, max_steps=1), []
    trained = sum(p.numel() for p in ours.roles.trained_parameters)
    whole = processes.sum_

    def sum_(tensors):
        tensors = list(tensors)
        seen.append(sum(tensor.numel() for tensor in tensors))
        whole(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "sum_", sum_)
        before = helpers.weights(ours)
        patch.setattr(ours, "_run", lambda *_: all(map(torch.equal, before, ours.roles.trained_parameters)))
        ours.check_alike()  # as a stage does first of all
        first = [*seen]
        return trained, ours.train() and ours.train(), first, seen


def test_the_first_sum_is_before_the_work_and_as_large_as_one_of_gradients(two, tmp_path):
    """NCCL takes memory of a card with it, which passes may have filled by the first optimizer step."""
    for trained, unchanged, first, seen in two(sums_of, tmp_path):
        assert first == [trained] and seen == [trained] and unchanged


def fails_alone(folder, name):
    """What a process says where the last one of them runs out of memory in a method of its trainer or optimizer."""
    ours = trainer(folder, reward=count_reward(9), max_steps=1)
    if name == "step":
        ours._prepare_training()
    if processes.rank():
        held = ours.optimizer if name == "step" else ours
        setattr(held, name, mock.Mock(side_effect=torch.OutOfMemoryError("no room")))
    try:
        ours.train()
    except (ToolkitError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_memory_that_one_lacks_for_the_optimizer_or_a_check_is_told_once(two, tmp_path):
    for name in ("create_optimizer", "_check_rollouts", "step"):
        heard = ["PeerError: process 1 of 2: OutOfMemoryError: no room", "OutOfMemoryError: no room"]
        assert two(fails_alone, tmp_path, name) == heard, name


def own_metric(folder):
    number = processes.rank()
    ours = trainer(Path(folder) / str(number))
    ours.metrics = lambda rollout: {"mine": number + float(score_with(ours.reward, rollout).mean())}
    found = ours.evaluate()
    return found["eval_mine"], found["eval_score"]


def test_a_metric_of_a_user_s_own_is_asked_of_one(two, tmp_path):
    """Which checkpoint is the best would else be another in each; it may call what divides its work."""
    (mine, score), other = two(own_metric, tmp_path)
    assert mine == pytest.approx(score, rel=1e-5) and other == (mine, score)


def sum_that_loses(everything):
    shown = mock.Mock()
    with (
        mock.patch("torch.distributed.all_reduce", lambda *_, **__: None) if everything else nullcontext(),
        phases.watched_by(shown),
    ):
        share.sum_like_gradients([torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.bfloat16)])
    return shown.begun.call_args.args


def test_a_first_sum_that_is_not_of_all_is_told(two):
    """As where the cards of a machine cannot copy to one another."""
    assert two(sum_that_loses, False) == [("first sum of all processes", None)] * 2  # shown, since it may hang
    for whole, error in two.answers(sum_that_loses, True):
        assert not whole and "a sum over 2 processes lacks what some of them gave" in error


def test_a_function_scores_once_and_its_error_reaches_all(two, tmp_path):
    alone = scored_by(tmp_path, None)
    assert alone[2] == [len(PROMPTS)]
    main, other = two(scored_by, tmp_path, None)
    assert main == alone  # what is sampled does not depend on how many sample it
    assert other == (*alone[:2], [])
    (_, said, _), (_, heard, _) = two(scored_by, tmp_path, 0)
    assert said.startswith("the reward raised ValueError: no score today") and "no score today" in heard
    assert two(scored_by, tmp_path, 1) == [main, other]  # where it is not called, it cannot fail


def scored_by_adapter(folder, rank):
    """By the reward adapter, whose rows are divided, and which fails in one process."""
    ours = trainer(Path(folder) / str(processes.rank()))
    batch = ours.dataloader.next_batch()
    responses = ours.generate(batch)

    def fails(*_):
        if processes.rank() == rank:
            raise ValueError("no score today")

    ours.roles.causal_lm.register_forward_pre_hook(fails)
    ours.roles.causal_lm.model.register_forward_pre_hook(fails)
    try:
        ours.score(batch, responses)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_reward_that_is_divided_and_fails_in_one_process_ends_all(rank, two, tmp_path):
    answers = two(scored_by_adapter, tmp_path, rank)
    assert "ValueError: no score today" in answers[rank][1] and answers[rank][0] != "PeerError"
    assert answers[1 - rank][0] == "PeerError" and f"process {rank} of 2: " in answers[1 - rank][1]
    assert "no score today" in answers[1 - rank][1]


def scored_through_a_function(folder):
    """By a function, which the main process alone calls, and which calls the reward adapter."""
    base = shared_base()
    adapter = RewardAdapter(base, pad_token_id=0, eos_token_id=2)
    ours = trainer(Path(folder) / str(processes.rank()), base, lambda rollout: adapter(rollout) + 1.0)
    batch = ours.dataloader.next_batch()
    return ours.score(batch, ours.generate(batch)).tolist()


def test_a_function_may_call_a_reward_that_divides_its_work(two, tmp_path):
    assert two(scored_through_a_function, tmp_path) == [pytest.approx(scored_through_a_function(tmp_path))] * 2


def evaluated(folder, prompts):
    ours = trainer(Path(folder) / str(processes.rank()), per_device_eval_batch_size=2)
    prompts = ours.train_dataset.select(range(prompts))
    metrics, measured, scores, *_ = ours.evaluate_rollout(prompts)
    best = ours.best_of(prompts, 2)
    return (
        metrics,
        [*measured.response_ids, *best.candidates.response_ids],
        [*scores.tolist(), *best.scores.flatten().tolist()],
    )


@pytest.mark.parametrize("prompts", [1, 7])
def test_evaluation_and_best_of_n(prompts, two, tmp_path):
    metrics, responses, scores = evaluated(tmp_path, prompts)
    for found, divided, scored in two(evaluated, tmp_path, prompts):
        assert divided == responses
        assert found == pytest.approx(metrics, rel=RELATIVE) and scored == pytest.approx(scores, rel=RELATIVE)


def fails_late(folder):
    """A run whose reward fails in its third update, in whichever process calls it."""
    calls = []

    def reward(rollout):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("no score today")
        return count_reward(7)(rollout)

    made = resumable.make(resumable.ppo, Path(folder), reward=reward, save_strategy="no", max_steps=4)
    try:
        made.train()
    except ToolkitError as error:
        return made.state.global_step, type(error).__name__, str(error)


def test_a_reward_that_fails_leaves_the_run_saved(two, tmp_path):
    main, other = two(fails_late, tmp_path)
    assert main[:2] == (2, "RewardError") and other[:2] == (2, "PeerError")
    assert "All up to update 2 is saved" in main[2]
    assert two(goes_on, tmp_path, "ppo", True, 4)[0][0] == 4


def fails_late_in_one(folder, rank):
    """A run whose reward adapter, which all of them read, fails in the third update of one."""
    made = resumable.make(resumable.ppo, Path(folder), save_strategy="no")
    read = reward_adapter.sequence_logits

    def fails(*arguments, **named):
        if processes.rank() == rank and made.state.global_step == 2:
            raise ValueError("no score today")
        return read(*arguments, **named)

    with mock.patch.object(reward_adapter, "sequence_logits", fails):
        try:
            made.train()
        except ToolkitError as error:
            return made.state.global_step, type(error).__name__, str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_so_it_does_where_all_of_them_read_it_and_one_fails(rank, two, tmp_path):
    told = two(fails_late_in_one, tmp_path, rank)
    assert told[rank][:2] == (2, "RewardError") and "All up to update 2 is saved" in told[rank][2]
    assert told[1 - rank][:2] == (2, "PeerError")
    assert problem_of(tmp_path / "checkpoint-2") is None


def test_so_it_does_with_four_of_which_three_hear_of_it(four, tmp_path):
    told = four(fails_late_in_one, tmp_path, 1)
    assert [one[:2] for one in told] == [(2, "RewardError" if rank == 1 else "PeerError") for rank in range(4)]
    assert problem_of(tmp_path / "checkpoint-2") is None
