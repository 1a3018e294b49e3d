"""Callback events and strategies, against transformers' own `Trainer` on a schedule of the same steps.

What differs on purpose is listed in docs/ppo_options.md.
"""

import itertools

import pytest
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from tests.tiny_models import shared_base
from tests.trainers.helpers import count_reward, trainer
from toolkit.errors import ToolkitError

EVENTS = sorted(
    name for name in vars(TrainerCallback) if name.startswith("on_") and name not in ("on_init_end", "on_push_begin")
)
ROWS, EVALUATED = 16, 4
COMMON = {
    "max_steps": 6, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "save_strategy": "no",
    "logging_strategy": "no", "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


class Recorder(TrainerCallback):
    """Every event, with its step, and whose metrics were logged."""

    def __init__(self):
        self.seen = []

    def record(self, name, args, state, control, logs=None, **kwargs):
        if logs is not None and "train_runtime" in logs:
            return
        held_out = logs is not None and any(key.startswith("eval_") for key in logs)
        self.seen.append((name, state.global_step, "held out" if held_out else ""))
        if name == "on_train_begin":
            assert kwargs["optimizer"] is not None and kwargs["train_dataloader"] is not None
        if name == "on_prediction_step":
            assert len(kwargs["eval_dataloader"]) == 2


for event in EVENTS:
    setattr(Recorder, event, lambda self, *args, _name=event, **kwargs: self.record(_name, *args, **kwargs))


class At(TrainerCallback):
    """Sets flags of the control at given events and steps."""

    def __init__(self, wishes):
        self.wishes = wishes

    def wish(self, name, state, control):
        for flag in self.wishes.get((name, state.global_step), ()):
            setattr(control, flag, True)

    def on_step_end(self, args, state, control, **kwargs):
        self.wish("on_step_end", state, control)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.wish("on_epoch_end", state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        self.wish("on_evaluate", state, control)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        return {"loss": (self.weight * x - labels).square().mean(), "logits": x}


def scripted():
    """Metrics of the evaluations of a run: the best is the second, and the fourth is better still."""
    values = itertools.chain([0.1, 0.5, 0.3, 0.7], itertools.repeat(0.2))
    return lambda _: {"scripted": next(values)}


def of_transformers(folder, wishes, extra, accumulated, **settings):
    rows = [{"x": torch.ones(1), "labels": torch.zeros(1)}] * ROWS
    recorder = Recorder()
    args = TrainingArguments(output_dir=str(folder), gradient_accumulation_steps=accumulated, **{**COMMON, **settings})
    made = Trainer(
        Line(), args, train_dataset=rows, eval_dataset=rows[:EVALUATED], compute_metrics=scripted(),
        callbacks=[At(wishes), *extra(), recorder],
    )  # fmt: skip
    made.train()
    return recorder.seen


def of_ours(folder, wishes, extra, accumulated, **settings):
    settings = {**COMMON, "response_length": 2, "value": "shared", "rollouts_per_update": accumulated, **settings}
    ours = trainer(folder, shared_base(value="shared"), count_reward(7), **settings)
    ours.metrics = scripted()
    recorder = Recorder()
    for callback in (At(wishes), *extra(), recorder):
        ours.add_callback(callback)
    ours.train()
    return recorder.seen


ALL = ("should_log", "should_evaluate", "should_save")
BEST = {"metric_for_best_model": "scripted", "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 1}
CASES = {
    "steps": (
        {
            "logging_strategy": "steps", "logging_steps": 4, "logging_first_step": True, "eval_strategy": "steps",
            "eval_steps": 2, "eval_delay": 3, "save_strategy": "steps", "save_steps": 4,
        },
        {},
    ),
    "epochs": ({"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}, {}),
    "epochs, later": ({"eval_strategy": "epoch", "eval_delay": 1.5, "save_strategy": "steps", "save_steps": 5}, {}),
    "the best": ({**BEST, "save_strategy": "best"}, {}),
    "at the start": ({"eval_on_start": True, "logging_strategy": "steps", "logging_steps": 3}, {}),
    "all that a callback asks for": ({}, {("on_step_end", 2): ALL, ("on_epoch_end", 4): ALL}),
    "the epoch's log is not the step's again": (
        {"logging_strategy": "steps", "logging_steps": 2},
        {("on_epoch_end", 4): ("should_log",)},
    ),
    "a callback stops": ({"save_strategy": "epoch"}, {("on_step_end", 3): ("should_training_stop", "should_save")}),
    "a callback of the evaluation stops": (
        {"eval_strategy": "steps", "eval_steps": 2},
        {("on_evaluate", 4): ("should_training_stop",)},
    ),
    "a callback ends the last pass": (
        {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 6},
        {("on_evaluate", 6): ("should_epoch_stop",)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "accumulated"), [*((case, 1) for case in CASES), ("steps", 2), ("epochs, later", 2)])
def test_events_come_as_in_transformers(case, accumulated, tmp_path):
    settings, wishes = CASES[case]
    theirs = of_transformers(tmp_path / "theirs", wishes, list, accumulated, **settings)
    ours = of_ours(tmp_path / "ours", wishes, list, accumulated, **settings)
    assert {name for name, *_ in theirs} >= {"on_train_begin", "on_optimizer_step", "on_epoch_end", "on_train_end"}
    if case.startswith("a callback ends"):
        # transformers counts passes, even where max_steps was asked for; here the updates asked for are made.
        cut = theirs.index(("on_train_end", 6, ""))
        assert ours[:cut] == theirs[:cut] and ours[-1] == ("on_train_end", 8, "")
        return
    assert ours == theirs
    checkpoints = [sorted(p.name for p in (tmp_path / side).glob("checkpoint-*")) for side in ("ours", "theirs")]
    assert checkpoints[0] == checkpoints[1]


def test_patience_ends_both(tmp_path):
    found = []
    for make in (of_transformers, of_ours):
        seen = make(tmp_path / make.__name__, {}, lambda: [EarlyStoppingCallback(2)], 1, max_steps=12, **BEST)
        found.append(seen)
    assert found[0] == found[1] and found[1][-1] == ("on_train_end", 6, "")  # the fourth is the best


def test_each_optimizer_step_of_an_update_has_its_events(tmp_path):
    seen = of_ours(tmp_path, {}, list, 1, max_steps=1, num_ppo_epochs=2, num_mini_batches=2)
    steps = [("on_pre_optimizer_step", 0, ""), ("on_optimizer_step", 0, "")]
    assert seen[2:-3] == [("on_step_begin", 0, ""), *(steps * 4)]


def test_to_evaluate_without_held_out_prompts_is_an_error(tmp_path):
    ours = trainer(tmp_path, shared_base(), count_reward(7), **COMMON)
    ours.eval_dataset = None
    ours.add_callback(At({("on_step_end", 1): ("should_evaluate",)}))
    with pytest.raises(ToolkitError, match="evaluate needs held-out prompts"):
        ours.train()


def test_a_pass_that_leaves_prompts_over_is_a_whole_epoch(tmp_path):
    """16 prompts in batches of 5: the pass is over, and so is the epoch, after the third."""
    epochs = []

    class Epochs(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            epochs.append(state.epoch)

    ours = trainer(tmp_path, shared_base(), count_reward(7), **{**COMMON, "per_device_train_batch_size": 5})
    ours.add_callback(Epochs())
    ours.train()
    assert epochs == [1.0, 2.0]


def test_a_callback_s_wish_to_save_outlasts_the_strategy_best(tmp_path):
    wishes = {("on_step_end", 3): ("should_save",)}
    of_ours(tmp_path, wishes, list, 1, max_steps=3, save_strategy="best", **BEST)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 3)]


def test_a_run_that_is_stopped_at_its_beginning_makes_no_update(tmp_path):
    class Stop(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            control.should_training_stop = True

    seen = of_ours(tmp_path, {}, lambda: [Stop()], 1)
    assert seen == [("on_train_begin", 0, ""), ("on_train_end", 0, "")]


def test_a_resumed_run_is_not_evaluated_at_its_start_again(tmp_path):
    settings = {**COMMON, "max_steps": 2, "eval_on_start": True, "save_strategy": "steps", "save_steps": 1}
    found = []
    for arguments in ({}, {"resume_from_checkpoint": tmp_path / "checkpoint-1"}):
        ours, recorder = trainer(tmp_path, shared_base(), count_reward(7), **settings), Recorder()
        ours.add_callback(recorder)
        ours.train(**arguments)
        found.append([event for event in recorder.seen if event[0] == "on_evaluate"])
    assert found == [[("on_evaluate", 0, "")], []]
