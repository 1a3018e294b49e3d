"""A run that was stopped and resumed ends with the weights of one that was not, bit for bit, in every stage."""

import errno
import hashlib
import json
import linecache
import math
import os
import shutil
import signal
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.tiny_models import lora, randomize, tiny_model
from tests.trainers.helpers import Counting, count_reward
from tests.trainers.helpers import trainer as ppo_trainer
from tests.trainers.resumable import (
    COMMON,
    STAGES,
    STEPS,
    assert_same,
    disturb,
    make,
    metrics,
    ppo,
    ppo_gathered,
    ppo_shared_adaptive,
    q,
    reward_model_lora,
    reward_pairs,
    sft_model,
    sft_policy,
    weights,
)
from toolkit import processes
from toolkit.checkpoints import checkpoint_folders, newest_whole, read_state
from toolkit.errors import (
    CheckpointError,
    ColumnError,
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    RewardStateError,
    RunInterrupted,
    SelfCheckError,
    ToolkitError,
)
from toolkit.models import SharedBase
from toolkit.rewards import WeightedSum, code_digests, load_function
from toolkit.trainers.ppo import PPOTrainer


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_resumed_from_any_step_the_weights_are_the_same(stage, tmp_path):
    changes = {"num_ppo_epochs": 2} if stage in (ppo, ppo_shared_adaptive) else {}
    whole = make(stage, tmp_path / "whole", **changes)
    start = weights(whole)
    whole.train()
    final = weights(whole)
    assert any(not torch.equal(start[name], final[name]) for name in final)
    written = {path.suffix for path in (tmp_path / "whole" / "checkpoint-1").rglob("*") if path.is_file()}
    assert {".json", ".safetensors"} <= written <= {".json", ".safetensors", ".jinja", ".md"}  # no pickle
    for step in (3, 5):  # within a pass, and at its end
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole", folder)  # moved, and with what was written after that step
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(folder / f"checkpoint-{later}")
        again = make(stage, folder, **changes)
        disturb()
        again.train(resume_from_checkpoint=True)
        assert_same(final, weights(again))
        assert again.state.global_step == STEPS and again.resumed_at == (step,)
        logged = [row for row in metrics(folder) if "train_loss" not in row]
        assert logged == [row for row in metrics(tmp_path / "whole") if "train_loss" not in row]
        last = [load_file(run / f"checkpoint-{STEPS}" / "state.safetensors") for run in (tmp_path / "whole", folder)]
        assert_same(*last)


@pytest.mark.parametrize("stage", [sft_policy, reward_pairs, ppo, q], ids=lambda stage: stage.__name__)
def test_a_run_that_is_done_is_not_trained_further(stage, tmp_path):
    """The last step lies in the middle of a pass; transformers by itself would train one more."""
    whole = make(stage, tmp_path, max_steps=5)
    whole.skipped.total = 1
    whole.train()
    again = make(stage, tmp_path, max_steps=5)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(whole), weights(again))
    assert again.state.global_step == 5 and again.resumed_at == (5,)
    # Which the result, and what is measured after, tell of.
    assert again.skipped.total == 1 and again.tokens_read == whole.tokens_read
    assert again.tokens_read > 0 or stage is not sft_policy


def test_a_run_is_evaluated_at_its_start_and_not_where_it_goes_on(tmp_path):
    def run(**arguments):
        made = make(sft_policy, tmp_path, max_steps=2, eval_on_start=True)
        made.train(**arguments)
        assert made.args.eval_on_start
        return [row for row in metrics(tmp_path) if "train_loss" not in row]

    whole = run()
    assert [row["step"] for row in whole if "eval_loss" in row] == [0]
    assert run(resume_from_checkpoint=tmp_path / "checkpoint-1") == whole


class Ask(TrainerCallback):
    """A signal comes at an event, after some steps."""

    def __init__(self, event, after, number=signal.SIGTERM):
        self.after, self.number = after, number
        setattr(self, event, self._ask)

    def _ask(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            os.kill(os.getpid(), self.number)


def test_a_signal_while_a_pass_ends_is_met_by_the_next_step(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    made = make(ppo, tmp_path, **settings)
    assert len(made.dataloader) == 4
    made.add_callback(Ask("on_evaluate", 4))  # after the last of the first pass, whose own end has been looked at
    with pytest.raises(RunInterrupted, match="stopped by SIGTERM after step 5 of 6"):
        made.train()


@pytest.mark.parametrize("stage", [sft_policy, reward_pairs], ids=lambda stage: stage.__name__)
def test_a_cell_that_is_run_again_trains_another_course(stage, tmp_path):
    """Of transformers' trainers, which forget their step; PPO's own goes on."""
    made = make(stage, tmp_path)
    for asked, last in ((3, 4), (1, 2)):
        stop = Ask("on_step_begin", asked)
        made.add_callback(stop)
        told = "holds checkpoint-4 of an earlier try.* has 4 steps"
        again = pytest.warns(UserWarning, match=told) if asked == 1 else nullcontext()
        with again, pytest.raises(RunInterrupted, match=f"checkpoint-{last}"):
            made.train()
        made.remove_callback(stop)
    assert newest_whole(tmp_path, say=pytest.fail).name == "checkpoint-2"
    assert [row["step"] for row in metrics(tmp_path) if "train_loss" not in row] == [2]


class BreaksOff(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        1 / 0  # noqa: B018


def test_a_course_that_was_begun_by_mistake_takes_no_line_of_the_one_that_goes_on(tmp_path):
    make(sft_policy, tmp_path, max_steps=3).train()
    logged = metrics(tmp_path)
    made = make(sft_policy, tmp_path, max_steps=6, save_steps=6)  # what breaks it off comes before its first checkpoint
    made.add_callback(BreaksOff())
    with pytest.warns(UserWarning, match="of an earlier try"), pytest.raises(ZeroDivisionError):
        made.train()
    assert len(metrics(tmp_path)) > len(logged)
    made = make(sft_policy, tmp_path, max_steps=6)
    made.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert metrics(tmp_path)[:1] == logged[:1] and [row["step"] for row in metrics(tmp_path)][:2] == [2, 4]


def test_a_cell_that_is_run_again_without_checkpoints_logs_the_last_course(tmp_path):
    made = make(sft_policy, tmp_path, max_steps=2, save_strategy="no")
    made.train()
    with pytest.warns(UserWarning, match=r"anew\. Only the step count and schedule restart: this trainer has 2"):
        made.train()
    assert [row["step"] for row in metrics(tmp_path) if "train_loss" not in row] == [2]


def test_a_course_that_was_left_is_gone_on_with(tmp_path):
    """By its new name; and from a checkpoint that lies in another folder."""
    make(ppo, tmp_path / "a", max_steps=3).train()
    make(ppo, tmp_path / "a", max_steps=2).train(resume_from_checkpoint=tmp_path / "a" / "checkpoint-1")
    make(ppo, tmp_path / "a", max_steps=4).train(resume_from_checkpoint=tmp_path / "a" / "abandoned-checkpoint-3")
    assert [path.name for path in checkpoint_folders(tmp_path / "a")] == [f"checkpoint-{step}" for step in (1, 2, 4)]
    (tmp_path / "a" / "checkpoint-1").rename(tmp_path / "copy")
    made = make(ppo, tmp_path / "a", max_steps=2)
    made.train(resume_from_checkpoint=tmp_path / "copy")
    assert [path.name for path in checkpoint_folders(tmp_path / "a")] == ["checkpoint-2"]


def a_step(made):
    batch = made.dataloader.next_batch()
    responses = made.generate(batch)
    made.step(batch, responses, made.score(batch, responses))


def test_a_trainer_that_began_anew_by_mistake_and_goes_on_after_all_keeps_the_lines_of_its_checkpoint(tmp_path):
    make(ppo, tmp_path, max_steps=1, logging_steps=1).train()
    made = make(ppo, tmp_path, max_steps=2, logging_steps=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError), pytest.warns(match="earlier try"):
        patch.setattr(made, "generate", lambda batch: 1 // 0)
        made.train()
    made.train(resume_from_checkpoint=True)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


def test_a_loop_of_ones_own_that_begins_anew_leaves_the_course_of_an_earlier_try(tmp_path):
    before = make(ppo, tmp_path)
    before.log({"of": "before"})
    before.save_checkpoint().rename(tmp_path / "checkpoint-5")
    made = make(ppo, tmp_path, save_total_limit=1)
    a_step(made)
    made.log({"of": "now"})
    with pytest.warns(UserWarning, match="checkpoint-5 of an earlier try, and this loop begins anew: .*: load_c"):
        made.save_checkpoint()
    assert [row["of"] for row in metrics(tmp_path)] == ["now"]
    assert {path.name for path in tmp_path.glob("*checkpoint-*")} == {"checkpoint-1", "abandoned-checkpoint-5"}
    assert newest_whole(tmp_path, say=pytest.fail).name == "checkpoint-1"


def test_what_is_sampled_after_a_checkpoint_is_what_a_run_samples_that_goes_on_from_it(tmp_path):
    made = make(ppo, tmp_path, max_steps=2, save_strategy="no")
    a_step(made)
    batch = next(made.batches())
    said = made.generate(batch).response_ids
    made.save_checkpoint()
    assert made.generate(batch).response_ids == said


def test_a_loop_of_ones_own_goes_on_in_the_files_of_its_checkpoint(tmp_path):
    """And `train` after it, with the coefficient that it has set."""
    make(ppo, tmp_path, max_steps=2, logging_steps=1).train()
    made = make(ppo, tmp_path, max_steps=3, logging_steps=1, save_strategy="no")
    made.load_checkpoint(tmp_path / "checkpoint-1")
    batch = next(made.batches())
    said = made.generate(batch).response_ids
    assert made.generate(batch).response_ids != said
    made.load_checkpoint(tmp_path / "checkpoint-1")
    assert made.generate(batch).response_ids == said
    made.kl_coef = 0.2
    a_step(made)
    made.log({"mine": 1.0})
    assert len(metrics(tmp_path)) == 3  # whoever goes no further has lost nothing
    (tmp_path / "warnings.jsonl").write_text('{"step": 2, "text": "of a later update", "remedy": ""}\n')
    made.load_checkpoint(tmp_path / "checkpoint-1")
    made.kl_coef = 0.2
    a_step(made)
    made.log({"mine": 1.0})
    made.roles.train_roles("reward")  # as a trainer of the reward does that is made on the base
    made.save_checkpoint()
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "warnings.jsonl").read_text() == ""
    make(ppo, tmp_path, max_steps=3, save_strategy="no").load_checkpoint(tmp_path / "checkpoint-2")
    made.train()
    first, second, third = metrics(tmp_path)
    assert first["kl_coef"] == 0.1 and second["mine"] == 1.0
    assert third["step"] == 3 and third["kl_coef"] == made.kl_coef == 0.2


def test_the_best_of_a_course_that_was_left_is_not_what_another_saved_under_its_name(tmp_path):
    left = make(ppo, tmp_path, max_steps=3)
    left.train()
    other = make(ppo, tmp_path, max_steps=2)
    other.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    made, best = make(ppo, tmp_path, max_steps=4), str(tmp_path / "checkpoint-2")
    made.state.best_model_checkpoint, made.state.log_history = best, other.state.log_history
    made._find_best()
    assert made.state.best_model_checkpoint == best
    made.state.log_history = left.state.log_history
    with pytest.warns(
        UserWarning, match="checkpoint-2, by name the best so far, is skipped: another course of training wrote it"
    ):
        made._find_best()
    assert made.state.best_model_checkpoint is None


@pytest.mark.parametrize(("save_strategy", "still_due"), [("steps", [2, 3]), ("epoch", [3])])
def test_what_is_due_at_the_end_of_a_pass_comes_once(save_strategy, still_due, tmp_path):
    """Saved after an update in which a pass ends, before or with what is due at that end."""
    ends = []

    class Ends(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            ends.append(state.global_step)

    def run(**arguments):
        ends.clear()
        made = make(ppo_gathered, tmp_path, max_steps=3, save_strategy=save_strategy)
        made.add_callback(Ends())
        made.train(**arguments)
        return list(ends), weights(made)

    whole, final = run()
    assert whole == [2, 3]  # updates of 12 rows, passes of 16
    rest, resumed = run(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert rest == still_due
    assert_same(final, resumed)


def test_what_is_logged_at_the_end_of_a_pass_comes_with_its_rollouts(tmp_path):
    """Of an update after which a checkpoint was saved, before the pass ended."""

    def run(**arguments):
        made = make(ppo_gathered, tmp_path, max_steps=3, save_strategy="steps", logging_strategy="epoch")
        made.train(**arguments)
        return (tmp_path / "rollouts.jsonl").read_text()

    whole = run()
    assert {json.loads(line)["step"] for line in whole.splitlines()} == {2, 3}
    assert len(whole.splitlines()) == 2 * 4  # of 12 responses each
    assert run(resume_from_checkpoint=tmp_path / "checkpoint-2") == whole


def test_a_signal_saves_where_only_the_best_would_be_saved(tmp_path):
    """transformers' strategy "best" overrules a wish to save wherever an evaluation is due at the same step."""
    best = {"save_strategy": "best", "metric_for_best_model": "eval_loss", "greater_is_better": True}  # it falls
    made = make(sft_policy, tmp_path, eval_strategy="steps", eval_steps=1, **best)
    made.add_callback(Ask("on_step_begin", 2))
    with pytest.raises(RunInterrupted, match="everything is saved in .*checkpoint-3"):
        made.train()
    assert (tmp_path / "checkpoint-3").is_dir() and made.state.best_global_step == 1


@pytest.mark.parametrize(
    ("stage", "number"), [(sft_policy, signal.SIGINT), (reward_pairs, signal.SIGTERM), (ppo, signal.SIGINT)],
    ids=lambda given: getattr(given, "__name__", given),
)  # fmt: skip
def test_a_signal_finishes_the_step_saves_and_says_where(stage, number, tmp_path):
    whole = make(stage, tmp_path / "whole", save_strategy="no", eval_strategy="epoch")
    whole.train()
    made = make(stage, tmp_path / "cut", save_strategy="no", eval_strategy="epoch")
    made.add_callback(Ask("on_step_begin", 3, number))
    with pytest.raises(RunInterrupted, match=rf"stopped by {number.name} after step 4 of 6; .*checkpoint-4") as stop:
        made.train()
    assert stop.value.signal_number == number
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-4"]
    again = make(stage, tmp_path / "cut", save_strategy="no", eval_strategy="epoch")
    disturb()
    again.train(resume_from_checkpoint=True)
    assert_same(weights(whole), weights(again))
    logged = [row for row in metrics(tmp_path / "cut") if "train_loss" not in row]
    assert logged == [row for row in metrics(tmp_path / "whole") if "train_loss" not in row]


def test_a_line_of_metrics_is_of_its_pass_where_a_signal_came_in_the_last_step_of_one(tmp_path):
    def made(name):
        return make(sft_policy, tmp_path / name, save_strategy="no", logging_strategy="epoch")

    made("whole").train()
    cut = made("cut")
    cut.add_callback(Ask("on_step_begin", 2))
    with pytest.raises(RunInterrupted, match="after step 3 of 6"):
        cut.train()
    made("cut").train(resume_from_checkpoint=True)
    rows = [[row for row in metrics(tmp_path / name) if "train_loss" not in row] for name in ("whole", "cut")]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [3, 6]


@pytest.mark.parametrize("stage", [sft_policy, ppo])
def test_a_signal_after_the_last_step_stops_what_would_come_next_where_all_is_saved(stage, tmp_path):
    last = 3 if stage is sft_policy else 2  # at the end of a pass, and within one
    made = make(stage, tmp_path / "saved", max_steps=last)
    made.add_callback(Ask("on_save", last))
    with pytest.raises(RunInterrupted, match=rf"stopped by SIGTERM after step {last} of {last}; .*checkpoint-{last}"):
        made.train()
    again = make(stage, tmp_path / "saved", max_steps=last)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(made), weights(again))
    unsaved = make(stage, tmp_path / "unsaved", max_steps=last, save_strategy="no")
    unsaved.add_callback(Ask("on_train_end", last))
    unsaved.train()  # what a stop would lose
    assert_same(weights(made), weights(unsaved))
    assert not list((tmp_path / "unsaved").glob("checkpoint-*"))


@pytest.mark.parametrize("saved", ["no", "steps"])
@pytest.mark.parametrize("evaluated", ["steps", "epoch"])
@pytest.mark.parametrize("stage", [sft_policy, ppo])
def test_a_signal_in_the_last_evaluation_saves_once_and_stops(stage, evaluated, saved, tmp_path, monkeypatch):
    settings = {"eval_strategy": evaluated, "eval_steps": 3, "save_strategy": saved, "save_steps": 3, "max_steps": 3}
    made, written = make(stage, tmp_path, **settings), []
    write = made._write_checkpoint
    monkeypatch.setattr(made, "_write_checkpoint", lambda: written.append(made.state.global_step) or write())
    made.add_callback(Ask("on_evaluate", 3))
    with pytest.raises(RunInterrupted, match=r"stopped by SIGTERM after step 3 of 3; .*checkpoint-3"):
        made.train()
    assert written == [3] or (evaluated, saved) == ("epoch", "steps")  # there before the evaluation, too
    again = make(stage, tmp_path, **settings)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(made), weights(again))


def test_evaluation_leaves_the_random_states(tmp_path):
    for stage in (sft_model, reward_pairs, ppo):
        made = make(stage, tmp_path / stage.__name__, max_steps=1)
        made.train()
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        made.evaluate()
        assert torch.equal(torch.rand(3), expected), stage.__name__


def test_a_damaged_checkpoint_is_skipped_with_a_sentence(tmp_path):
    make(ppo, tmp_path, max_steps=2).train()
    state = tmp_path / "checkpoint-2" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    again = make(ppo, tmp_path, max_steps=2)
    with pytest.warns(UserWarning, match=r"checkpoint-2 is skipped: state.safetensors is damaged"):
        again.train(resume_from_checkpoint=True)
    assert again.resumed_at == (1,)
    with pytest.raises(CheckpointError, match=r"checkpoint-99 is no whole checkpoint: it has no manifest"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-99"))
    with pytest.raises(CheckpointError, match="holds no whole checkpoint to go on from"):
        make(ppo, tmp_path / "empty").train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("stage", "length"),
    [
        (sft_policy, {"max_steps": 4}),
        (sft_policy, {"max_steps": -1, "num_train_epochs": 2}),
        (sft_policy, {"max_steps": -1, "num_train_epochs": 1.8}),
        (ppo, {"max_steps": 4}),
        (ppo, {"max_steps": -1, "num_train_epochs": 1.8}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_run_that_is_done_goes_on_where_a_longer_one_is_asked_for(stage, length, tmp_path):
    epochs = 1.2 if length.get("num_train_epochs") == 1.8 else 1  # both of them two passes, as transformers counts
    shorter = {"max_steps": 2} if length["max_steps"] > 0 else {"max_steps": -1, "num_train_epochs": epochs}
    settings = {"lr_scheduler_type": "constant", "save_strategy": "epoch" if length["max_steps"] < 0 else "steps"}
    whole = make(stage, tmp_path / "whole", **{**settings, **length})
    whole.train()
    make(stage, tmp_path / "cut", **{**settings, **shorter}).train()
    again = make(stage, tmp_path / "cut", **{**settings, **length})
    disturb()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == whole.state.global_step
    assert_same(weights(whole), weights(again))


@pytest.mark.parametrize("stage", [sft_policy, ppo], ids=lambda stage: stage.__name__)
def test_a_run_is_not_shorter_than_what_it_has_behind_it(stage, tmp_path):
    make(stage, tmp_path, max_steps=4).train()
    with pytest.raises(CheckpointError, match="max_steps: .*checkpoint-4 has 4 steps .*, and the run is to have 2"):
        make(stage, tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    if stage is ppo:
        of_update = make(stage, tmp_path).args.update_batch_size
        shorter = make(stage, tmp_path, max_steps=-1, total_episodes=2 * of_update)
        with pytest.raises(CheckpointError, match="^total_episodes: .* 4 steps behind it, and the run is to have 2"):
            shorter.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("stage", [sft_policy, reward_pairs, q, ppo], ids=lambda stage: stage.__name__)
def test_a_run_that_is_to_end_where_it_was_stopped_is_done(stage, tmp_path):
    cut = make(stage, tmp_path, lr_scheduler_type="constant")
    cut.add_callback(Ask("on_step_begin", 3))
    with pytest.raises(RunInterrupted, match="after step 4 of 6"):
        cut.train()
    again = make(stage, tmp_path, max_steps=4, lr_scheduler_type="constant")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and not (tmp_path / "checkpoint-5").exists()
    assert_same(weights(cut), weights(again))


def test_another_course_begins_where_it_is_sure_to(tmp_path):
    """A checkpoint that cannot be gone on from moves no other aside."""
    make(ppo, tmp_path, max_steps=3).train()
    other = make(ppo, tmp_path, max_steps=3)
    with torch.no_grad():
        other.roles.head("reward").weight.add_(1)
    with pytest.raises(CheckpointError, match="the reward adapter is not the one that this run began with"):
        other.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("stage", [sft_policy, ppo], ids=lambda stage: stage.__name__)
def test_a_run_made_longer_has_the_rates_of_the_longer_schedule(stage, tmp_path):
    """The shorter one's ends at 0."""
    settings = {"lr_scheduler_type": "linear", "logging_steps": 1}
    make(stage, tmp_path, max_steps=2, **settings).train()
    made = make(stage, tmp_path, max_steps=4, **settings)
    made._prepare_training() if stage is ppo else made.create_optimizer()
    seen, step = [], made.optimizer.step

    def watched(*arguments, **named):
        seen.append(made.optimizer.param_groups[0]["lr"])
        return step(*arguments, **named)

    made.optimizer.step = watched
    made.train(resume_from_checkpoint=True)
    assert sorted(set(seen), reverse=True) == pytest.approx([5e-3, 2.5e-3])  # halfway, and three quarters
    rates = [row["learning_rate"] for row in metrics(tmp_path) if "learning_rate" in row]
    assert len(rates) == 4 and rates[2] > 0


def test_later_checkpoints_do_not_stand_before_those_of_a_course_that_began_earlier(tmp_path):
    make(ppo, tmp_path, max_steps=4).train()
    again = make(ppo, tmp_path, max_steps=3, save_total_limit=2)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    names = sorted(path.name for path in tmp_path.glob("*checkpoint-*"))
    assert names == ["abandoned-checkpoint-2", "abandoned-checkpoint-3", "abandoned-checkpoint-4", "checkpoint-2",
                     "checkpoint-3"]  # fmt: skip
    make(ppo, tmp_path, max_steps=3).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert (tmp_path / "abandoned-2-checkpoint-3").is_dir()


def test_a_loop_of_ones_own_leaves_the_end_of_a_pass_behind_it(tmp_path):
    made, passes = make(ppo, tmp_path, max_steps=6, rollouts_per_update=1), []
    for batch in made.batches():
        responses = made.generate(batch)
        made.step(batch, responses, made.score(batch, responses))
        passes.append(made.dataloader.pass_is_over)
        if made.state.global_step == len(made.dataloader) + 1:
            break
    assert passes == [False] * (len(passes) - 2) + [True, False]


@pytest.mark.parametrize("stage", [ppo, sft_policy], ids=lambda stage: stage.__name__)
def test_what_is_due_after_the_last_step_is_done_though_a_signal_came_in_it(stage, tmp_path):
    """The end of the run lies within a pass: no later step would evaluate, nor know which checkpoint was the best."""
    settings = {
        "max_steps": 3, "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_score"
        if stage is ppo else "eval_loss", "load_best_model_at_end": True,
    }  # fmt: skip
    whole = make(stage, tmp_path / "whole", **settings)
    whole.train()
    cut = make(stage, tmp_path / "cut", **settings)
    cut.add_callback(Ask("on_step_begin", 2))
    with pytest.raises(RunInterrupted, match="after step 3 of 3"):
        cut.train()
    again = make(stage, tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_global_step == whole.state.best_global_step
    evaluated = [[row["step"] for row in metrics(folder) if any(key.startswith("eval_") for key in row)]
                 for folder in (tmp_path / "whole", tmp_path / "cut")]  # fmt: skip
    assert evaluated[0] == evaluated[1] and 3 in evaluated[0]


class _LogsPasses(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log = True


def test_an_update_that_was_logged_before_the_checkpoint_is_not_logged_again_at_its_pass_s_end(tmp_path):
    def run(resumed):
        made = make(ppo, tmp_path, logging_steps=1)
        made.add_callback(_LogsPasses())
        made.train(resume_from_checkpoint=resumed)
        return [row["step"] for row in metrics(tmp_path)]

    assert run(None) == [*range(1, STEPS + 1)]
    assert run(tmp_path / "checkpoint-4") == [*range(1, STEPS + 1)]  # four updates are a pass


def test_the_rate_that_is_logged_is_that_of_the_update(tmp_path):
    make(ppo, tmp_path, logging_steps=1).train()
    cosine = [1e-2 * (1 + math.cos(math.pi * step / STEPS)) / 2 for step in range(STEPS)]
    assert [row["learning_rate"] for row in metrics(tmp_path)] == pytest.approx(cosine)


def test_time_that_was_spent_before_a_checkpoint_counts(tmp_path):
    make(ppo, tmp_path, max_steps=2).train()
    before = read_state(tmp_path / "checkpoint-1")["seconds"]
    assert 0 < before < read_state(tmp_path / "checkpoint-2")["seconds"]
    again = make(ppo, tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert again.seconds_before == before < read_state(tmp_path / "checkpoint-2")["seconds"]
    loaded_for_long = make(ppo, tmp_path / "stage", max_steps=1)
    loaded_for_long.started = time.perf_counter() - 1e6
    loaded_for_long.train()
    assert read_state(tmp_path / "stage" / "checkpoint-1")["seconds"] > 1e6


@pytest.mark.parametrize("name", ["left_out", "frozen"])
def test_a_checkpoint_of_another_version_is_told_from_one_of_this(name, tmp_path, monkeypatch):
    made, own = make(ppo, tmp_path, max_steps=1), PPOTrainer.own_state
    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "own_state", lambda self: {k: v for k, v in own(self).items() if k != name})
        made.train()
    says = rf"{ANOTHER_VERSION}KeyError '{name}'\. Go on with that version"
    with pytest.raises(CheckpointError, match=says):
        make(ppo, tmp_path, max_steps=2).train(resume_from_checkpoint=True)


ANOTHER_VERSION = "checkpoint-1 was written by another version of the toolkit or of transformers: "


def change_sealed(checkpoint, name, change):
    """A JSON file of a checkpoint, with the manifest agreeing, as whoever wrote it so would have it."""
    path, manifest = checkpoint / name, checkpoint / "manifest.json"
    path.write_text(change(path.read_text()))
    listed = json.loads(manifest.read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    listed["files"][name] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest.write_text(json.dumps(listed))


def without(key):
    def change(text):
        state = json.loads(text)
        state["map"] = [[name, value] for name, value in state["map"] if name != key]
        return json.dumps(state)

    return change


@pytest.mark.parametrize(
    ("stage", "over"),
    [(ppo, False), (sft_policy, False), (sft_policy, True)],
    ids=["ppo", "sft", "sft with no step left"],
)
def test_so_is_one_whose_files_have_other_keys(stage, over, tmp_path):
    """Of another transformers, or of nobody: each in one sentence."""
    make(stage, tmp_path / "whole", max_steps=1).train()
    cases = {
        f"{ANOTHER_VERSION}TypeError .*'of_tomorrow'": (
            "trainer_state.json",
            lambda text: '{"of_tomorrow": 1, ' + text[1:],
        ),
        "checkpoint-1: trainer_state.json cannot be read .*recursion": ("trainer_state.json", lambda _: "[" * 100_000),
        "checkpoint-1: the saved state cannot be read .*recursion": ("state.json", lambda _: "[" * 100_000),
        f"{ANOTHER_VERSION}TypeError": ("state.json", lambda _: "[]"),
    }
    needed = {"random", "stopped_early", "seconds", "resumed_at", "own", "skipped", "settings"}
    needed |= set() if over else {"optimizer", "scheduler", "scaler"}
    cases |= {f"{ANOTHER_VERSION}KeyError '{key}'": ("state.json", without(key)) for key in needed}
    asked = make(stage, tmp_path / "asked", max_steps=1 if over else 2)
    for number, (says, (name, change)) in enumerate(cases.items()):
        shutil.copytree(tmp_path / "whole", folder := tmp_path / str(number))
        change_sealed(folder / "checkpoint-1", name, change)
        with pytest.raises(CheckpointError, match=says):
            asked.train(resume_from_checkpoint=folder / "checkpoint-1")


def test_so_is_the_best_of_them(tmp_path):
    made, state = make(ppo, tmp_path, max_steps=2), "trainer_state.json"
    made.train()
    made.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    change_sealed(tmp_path / "checkpoint-1", state, lambda text: '{"of_tomorrow": 1, ' + text[1:])
    with pytest.raises(CheckpointError, match=f"{ANOTHER_VERSION}TypeError .*'of_tomorrow'"):
        made._find_best()


def test_a_run_whose_settings_a_callback_has_changed_goes_on(tmp_path):
    class Anneals(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            args.kl_coef *= 0.9

    whole, again = make(ppo, tmp_path / "whole", max_steps=3), make(ppo, tmp_path / "whole", max_steps=3)
    whole.add_callback(Anneals())
    whole.train()
    again.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    assert_same(weights(whole), weights(again))


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_best_is_by_the_held_out_rows_alone(by_hand, tmp_path):
    """Others that a callback measures at the same step, or a loop of one's own, are in the log as well."""
    scores = {"held out": [1.0, 0.5, 3.0], "others": [100.0] * 3}

    def reward(rollout):
        which = rollout.columns.get("which", ["train"] * len(rollout))[0]
        return [scores[which][ours.state.global_step - 1] if which in scores else 0.0] * len(rollout)

    class Measures(TrainerCallback):
        def on_save(self, args, state, control, **_):
            ours.evaluate(others)

    def made():
        options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "metric_for_best_model": "score"}
        one = make(ppo, tmp_path, reward=reward, greater_is_better=True, load_best_model_at_end=not by_hand, **options)
        one.eval_dataset, others = (
            Dataset.from_dict({"input_ids": [[1, 20], [1, 30]], "which": [which] * 2}) for which in scores
        )
        one.add_callback(Measures())
        return one, others

    ours, others = made()
    if by_hand:
        batches = ours.batches()
        for _ in range(3):
            batch = next(batches)
            responses = ours.generate(batch)
            ours.step(batch, responses, ours.score(batch, responses))
            ours.evaluate()
            ours.evaluate(others)
            ours.save_checkpoint()
    else:
        ours.train()
        ours, others = made()
        ours.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert Path(ours.state.best_model_checkpoint).name == "checkpoint-3"


def test_what_was_measured_of_other_rows_alone_decides_nothing(tmp_path):
    class Measures(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                ours.evaluate(others)
                os.kill(os.getpid(), signal.SIGTERM)

    def reward(rollout):
        return [100.0 if rollout.columns.get("other", [False])[0] else 1.0] * len(rollout)

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 4, "greater_is_better": True}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "score"}
    ours = make(ppo, tmp_path, reward=reward, **options)
    ours.eval_dataset, others = (
        Dataset.from_dict({"input_ids": [[1, 20], [1, 30]], "other": [other] * 2}) for other in (False, True)
    )
    ours.add_callback(Measures())
    with pytest.raises(RunInterrupted):
        ours.train()
    assert (tmp_path / "checkpoint-3").is_dir()
    assert Path(ours.state.best_model_checkpoint).name == "checkpoint-2"


def test_a_checkpoint_that_is_refused_changes_nothing(tmp_path):
    make(ppo, tmp_path / "other", max_steps=2).train()
    ours = make(ppo, tmp_path / "ours", kl_coef=0.7)
    before = weights(ours)
    with pytest.raises(CheckpointError, match="with kl_coef 0.1, and here it is 0.7"):
        ours.load_checkpoint(tmp_path / "other" / "checkpoint-2")
    assert_same(before, weights(ours))
    assert ours.state.global_step == 0 and not ours.optimizer.state_dict()["state"]
    ours.save_checkpoint()
    assert sorted(path.name for path in (tmp_path / "other").glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_reward_that_fails_on_another_course_is_not_saved_by_what_stood_there(tmp_path):
    make(ppo, tmp_path, max_steps=3).train()
    again, read = make(ppo, tmp_path, max_steps=3, save_strategy="no"), count_reward(5)

    def fails(rollout):
        if again.state.global_step == 2:
            raise ValueError("no score today")
        return read(rollout)

    again.reward = fails  # and so another course
    with pytest.raises(RewardError, match="All up to update 2 is saved"):
        again.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert newest_whole(tmp_path, say=print).name == "checkpoint-2" and (tmp_path / "abandoned-checkpoint-2").is_dir()
    resumed = make(ppo, tmp_path, max_steps=3)
    resumed.load_checkpoint(tmp_path / "checkpoint-2")
    assert_same(weights(again), weights(resumed))


def test_another_reference_than_the_run_began_with_is_refused(tmp_path):
    def run(seed, resumed=None):
        base = SharedBase(tiny_model())
        for role in ("policy", "reference", "value", "reward"):
            base.add_role(role, lora())
        randomize(base, "policy", "value", "reward")
        randomize(base, "reference", seed=seed)
        ppo_trainer(tmp_path, base, **{**COMMON, "max_steps": 2}).train(resume_from_checkpoint=resumed)

    run(2)
    run(2, tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match="the reference adapter is not the one that this run began with"):
        run(3, tmp_path / "checkpoint-1")


def test_another_frozen_adapter_of_q_is_refused_also_where_no_step_is_left(tmp_path):
    def run(seed, steps, resumed=None):
        made = make(q, tmp_path, max_steps=steps)
        made.roles.add_role("reward", lora())
        randomize(made.roles, "reward", seed=seed)
        made.roles.add_role("policy", lora())  # which is nothing to q: PPO may train it between two runs
        randomize(made.roles, "policy", seed=steps)
        made.train(resume_from_checkpoint=resumed)
        made.roles.train_roles("reward")  # as a trainer does that is made since
        made.save_checkpoint()

    run(2, 1)
    for steps in (1, 2):
        with pytest.raises(CheckpointError, match="the reward adapter is not the one that this run began with"):
            run(3, steps, tmp_path / "checkpoint-1")
    run(2, 2, tmp_path / "checkpoint-1")


def test_another_shape_of_adapter_is_refused(tmp_path, monkeypatch):
    make(ppo, tmp_path, max_steps=1).train()
    other = make(ppo_shared_adaptive, tmp_path)
    monkeypatch.setattr("toolkit.trainers.common.frozen_digests", lambda _: {})  # its reward is another, too
    told = pytest.warns(UserWarning, match="other settings .*value separate → shared")
    with told, pytest.raises(ToolkitError, match="belongs to another base|value_head"):
        other.train(resume_from_checkpoint=True)


class RunningMean:
    """A reward that changes as it goes, and hands its state out as it is, without a copy."""

    def __init__(self):
        self.seen, self.total = 0, 0.0

    def __call__(self, rollout):
        shares = count_reward(5)(rollout) + torch.tensor([len(ids) / 6 for ids in rollout.response_ids])
        self.seen, self.total = self.seen + len(rollout), self.total + float(shares.sum())
        return shares - self.total / self.seen

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Seen(RunningMean):
    """Has a state that no checkpoint could hold, once it has scored."""

    def state_dict(self):
        return {"seen": {self.seen} if self.seen else None}


def test_a_state_that_cannot_be_saved_is_known_after_the_first_update(tmp_path):
    made = make(ppo, tmp_path, reward=Seen(), save_strategy="no")
    with pytest.raises(CheckpointError, match=r"^the reward's state\.seen is a set, which cannot be saved"):
        made.train()
    assert made.reward.seen == 4  # one update of four rollouts


def test_a_reward_that_changes_is_part_of_the_state(tmp_path):
    whole = make(ppo, tmp_path / "whole", reward=RunningMean(), max_steps=3)
    whole.train()
    again = make(ppo, tmp_path / "again", reward=RunningMean(), max_steps=3)
    again.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    assert_same(weights(whole), weights(again))
    assert again.reward.state_dict() == whole.reward.state_dict()
    module = torch.nn.Linear(1, 1)
    module.forward = lambda rollout: torch.zeros(len(rollout))
    made = make(ppo, tmp_path / "module", reward=module, max_steps=1)
    made.train()
    assert not any("reward" in name for name in load_file(tmp_path / "module" / "checkpoint-1" / "state.safetensors"))


@pytest.mark.parametrize("role", ["reward", "judge"])
def test_a_reward_whose_file_has_changed_is_told_of(role, tmp_path):
    file, body = tmp_path / "own.py", "def rule(rollout):\n    return [{} for _ in rollout.responses]\n"

    def made(text):
        file.write_text(text)
        scores = WeightedSum({"a": load_function(f"{file}:rule")})
        ours = make(ppo, tmp_path / "run", max_steps=2, **({"reward": scores} if role == "reward" else {}))
        setattr(ours, role, scores)
        return ours

    made(body.format(1.0)).train()
    with pytest.warns(UserWarning, match="checkpoint-1 was written with another version of own.py"):
        made(body.format(2.0)).train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-1")
    with warnings.catch_warnings(record=True) as told:
        made(body.format(2.0)).train(resume_from_checkpoint=True)
    assert not any("own.py" in str(one.message) for one in told)


class Combined:
    def __init__(self, parts):
        self.parts = parts

    def __call__(self, rollout):
        return [0.0] * len(rollout)


@pytest.mark.parametrize("parts", [[len], {"length": 0.5}, {"length": len}, 3, {}])
def test_a_reward_may_call_anything_its_parts(parts):
    assert code_digests(Combined(parts)).keys() == {"test_resume.py"}


def test_a_reward_in_a_cell_is_told_from_another_by_its_lines(monkeypatch):
    found = []
    for number, bonus in enumerate((1, 2, 1)):
        cell = f"def mood(rollout):\n    return [{bonus}.0]\n"
        monkeypatch.setitem(linecache.cache, f"<cell {number}>", (len(cell), None, cell.splitlines(True), ""))
        names = {"__name__": "__main__"}
        exec(compile(cell, f"<cell {number}>", "exec"), names)
        found.append(code_digests(WeightedSum({"mood": names["mood"]})))
    assert found[0] == found[2] != found[1] and found[0].keys() == {"mood in a cell"}
    cell = "class Mean:\n    def add(self, x):\n        return x\n"
    cell += "    def __call__(self, rollout):\n        return self.add([0.0])\n"
    for number in (3, 4):
        monkeypatch.setitem(linecache.cache, f"<cell {number}>", (len(cell), None, cell.splitlines(True), ""))
        names = {"__name__": "__main__"}
        exec(compile(cell, f"<cell {number}>", "exec"), names)
        found.append(code_digests(names["Mean"]()))
        cell = cell.replace("return x", "return [1.0]")  # in a method that it calls
    assert found[3] != found[4] and found[3].keys() == {"in a cell"}
    assert code_digests(eval("lambda rollout: [0.0]")) == {}  # text that is nowhere


def test_files_of_rewards_that_are_objects_or_share_a_name_are_told_apart(tmp_path):
    body = "import torch\nclass Rule:\n    @torch.no_grad()\n    def __call__(self, rollout):\n        return [0.0]\n"
    body += "class Model(torch.nn.Module):\n    pass\nrule, model = Rule(), Model()\n"
    rules = {}
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(body)
        rules[name] = load_function(f"{tmp_path}/{name}/own.py:rule")
    assert code_digests(partial(rules["a"])).keys() == {"own.py"}
    model = sys.modules[type(rules["a"]).__module__].model
    assert code_digests(model) == code_digests(partial(model)) == code_digests(rules["a"])
    assert code_digests(torch.nn.Linear(1, 1)) == code_digests(len) == {}
    before = code_digests(WeightedSum(rules))
    (tmp_path / "a" / "own.py").write_text(f"{body}# edited\n")
    after = code_digests(WeightedSum(rules))
    assert [name for name in before if before[name] != after[name]] == [f"{tmp_path}/a/own.py"] and len(after) == 2


def test_processes_that_hold_other_weights_are_found(tmp_path, monkeypatch):
    made = make(ppo, tmp_path)
    monkeypatch.setattr(processes, "count", lambda: 2)
    held = []
    monkeypatch.setattr(processes, "gather", lambda mine: held.append(mine) or [mine, held[0]])
    made._check_equal()
    with torch.no_grad():
        made.roles.parameters_of("policy")[0].add_(1)
    monkeypatch.setattr(processes, "agreed", nullcontext)  # in which the others are told
    with pytest.raises(SelfCheckError, match="the processes do not hold the same weights any more"):
        made._check_equal()


@pytest.mark.parametrize(("rollouts", "good_calls"), [(1, 0), (2, 3)])
def test_a_reward_that_fails_ends_a_run_that_can_go_on(rollouts, good_calls, tmp_path):
    """Nothing had been saved; a part that changes had already seen the rollout that it failed on."""
    calls = 0

    def down(rollout):
        nonlocal calls
        calls += 1
        if calls == good_calls + 1:
            raise ConnectionError("nobody there")
        return [0.0] * len(rollout)

    def made(name, **parts):
        reward = WeightedSum({"mean": RunningMean(), **parts})
        settings = {"save_strategy": "no", "rollouts_per_update": rollouts, "max_steps": 2}
        return make(ppo, tmp_path / name, reward=reward, **settings)

    cut, step = made("cut", server=down), good_calls // rollouts
    with pytest.raises(RewardError, match="^parts.server: the reward raised ConnectionError: nobody there") as error:
        cut.train()
    said = f"All up to update {step} is saved in {tmp_path}/cut/checkpoint-{step}: then go on with resume=True."
    assert (said in str(error.value)) == bool(step)
    assert [path.name for path in checkpoint_folders(tmp_path / "cut")] == ([f"checkpoint-{step}"] if step else [])
    if not step:
        return
    whole, again = made("whole", server=lambda rollout: [0.0] * len(rollout)), made("cut", server=down)
    whole.train()
    for going_on in (cut, again):  # a notebook's own objects, and another process
        going_on.train(resume_from_checkpoint=True)
        assert_same(weights(whole), weights(going_on))
        assert going_on.reward.state_dict() == whole.reward.state_dict()


class Mine(RewardError):
    """Of a user's own."""


@pytest.mark.parametrize("kind", [DataError, ModelError, ColumnError, Mine])
def test_whatever_error_a_reward_raises_the_run_is_saved(kind, tmp_path):
    calls = 0

    def odd(rollout):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise kind("a row is wrong.", remedy="Mend the row.")
        return [0.0] * len(rollout)

    made = make(ppo, tmp_path, reward=odd, save_strategy="no", max_steps=4)
    with pytest.raises(RewardError, match=r"^a row is wrong\. Mend the row\. .*All up to update 2 is saved") as error:
        made.train()
    placed = f"It was raised in {__file__}, line " in str(error.value)
    assert placed == (not issubclass(kind, RewardError)) and (tmp_path / "checkpoint-2").is_dir()
    assert type(error.value) is (kind if issubclass(kind, RewardError) else RewardError)


def test_a_run_whose_evaluations_fail_goes_on_without_them(tmp_path):
    def away(rollout):
        if made._evaluation_due:
            raise ConnectionError("nobody there")
        return [float(len(ids)) for ids in rollout.response_ids]

    settings = {"max_steps": 4, "save_strategy": "no", "reward": away}
    made = make(ppo, tmp_path, eval_strategy="steps", eval_steps=2, **settings)
    with pytest.raises(RewardError, match="nobody there"):
        made.train()
    made = make(ppo, tmp_path, eval_strategy="no", **settings)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 4


@pytest.mark.parametrize("last", [False, True])
def test_an_evaluation_that_failed_is_made_up_for(last, tmp_path):
    calls, failing = 0, 3  # two updates, then the first evaluation
    error = RewardError("nobody there.") if last else ConnectionError("nobody there.")

    def down(rollout):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise error
        return [float(len(ids)) for ids in rollout.response_ids]

    def made(name):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2 if last else 4, "save_strategy": "no"}
        return make(ppo, tmp_path / name, reward=down, **settings)

    with pytest.raises(RewardError, match=r"nobody there\..*All up to update 2 is saved in .*checkpoint-2"):
        made("cut").train()
    failing = 0
    again = made("cut")
    again.train(resume_from_checkpoint=True)
    whole = made("whole")
    whole.train()
    of_both = [[row for row in metrics(tmp_path / name) if "eval_score" in row] for name in ("cut", "whole")]
    assert of_both[0] == of_both[1] and [row["step"] for row in of_both[0]] == ([2] if last else [2, 4])
    assert_same(weights(whole), weights(again))
    assert again.watch.first == whole.watch.first and not again.own_state()["evaluation_due"]


def test_evaluation_leaves_a_reward_that_changes(tmp_path):
    made = make(ppo, tmp_path, reward=RunningMean(), max_steps=2, eval_strategy="steps", eval_steps=1)
    made.train()
    assert made.reward.seen == 2 * 4  # two updates of four rollouts, and none of the evaluations
    plain = make(ppo, tmp_path / "plain", reward=RunningMean(), max_steps=2)
    plain.train()
    assert_same(weights(plain), weights(made))


def test_a_run_that_stopped_early_stays_stopped(tmp_path):
    """No evaluation is better than the first, of a constant score; after two of them training ends."""
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", "load_best_model_at_end": True,
        "early_stopping_patience": 2, "reward": lambda rollout: [0.0] * len(rollout), "logging_strategy": "epoch",
    }  # fmt: skip
    whole = make(ppo, tmp_path, **settings)
    whole.train()
    assert whole.state.global_step == 3 and whole.state.best_global_step == 1
    logged = metrics(tmp_path)
    assert any(row["step"] == 3 and "policy_loss" in row for row in logged)  # what is due as the pass breaks off
    for steps in (STEPS, STEPS + 4):  # nor is it lengthened
        again = make(ppo, tmp_path, **settings, max_steps=steps)
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 3 and again.resumed_at == (3,) and metrics(tmp_path) == logged
        assert_same(weights(whole), weights(again))


@pytest.mark.parametrize("stage", [sft_policy, reward_pairs, ppo, q], ids=lambda stage: stage.__name__)
def test_what_early_stopping_stops_with_is_saved(stage, tmp_path):
    """Between two saves it may be better than anything that they have; and it is known that the run has stopped."""
    settings = {
        **BETWEEN_SAVES, "max_steps": 6, "metric_for_best_model": "mine", "greater_is_better": True,
        "learning_rate": 1e-2,
    }  # fmt: skip
    by_step = {1: 0.1, 2: 0.5, 3: 0.9, 4: 0.4, 5: 0.7}

    def stopped():
        made = make(stage, tmp_path, **settings)
        if stage in (ppo, q):
            made.metrics = lambda rollout: {"mine": by_step[made.state.global_step]}
        else:
            measure = made.evaluation_loop

            def measured(*given, **named):
                found = measure(*given, **named)
                found.metrics["eval_mine"] = by_step[made.state.global_step]
                return found

            made.evaluation_loop = measured
        made.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        return made

    whole = stopped()
    whole.train()
    assert [path.name for path in checkpoint_folders(tmp_path)] == [f"checkpoint-{step}" for step in (2, 4, 5)]
    assert whole.state.global_step == 5 and Path(whole.state.best_model_checkpoint).name == "checkpoint-5"
    assert read_state(tmp_path / "checkpoint-5")["stopped_early"]
    again = stopped()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5 and again.resumed_at == (5,)
    assert_same(weights(whole), weights(again))


@pytest.mark.parametrize("stage", [ppo, q], ids=lambda stage: stage.__name__)
def test_a_best_that_is_not_measured_is_told_by_its_name(stage, tmp_path):
    made = make(stage, tmp_path, **{**BETWEEN_SAVES, "metric_for_best_model": "mime"})
    made.metrics = lambda rollout: {"mine": 0.0}
    with pytest.raises(
        ConfigError, match="metric_for_best_model: 'mime' is nothing that is measured here. Name one of"
    ):
        made.train()


def test_callbacks_and_the_best_checkpoint_go_on(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1,
                "metric_for_best_model": "score", "max_steps": 4}  # fmt: skip

    def made(folder):
        trainer = make(ppo, folder, **settings)
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=100))
        return trainer

    whole = made(tmp_path / "whole")
    whole.train()
    best = whole.state.best_global_step
    kept = {path.name for path in (tmp_path / "whole").glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-4"}
    half = made(tmp_path / "half")
    half.add_callback(Stops())
    half.train()
    (tmp_path / "half").rename(tmp_path / "moved")
    again = made(tmp_path / "moved")
    again.train(resume_from_checkpoint=True)
    patience = [
        callback.early_stopping_patience_counter
        for trainer in (whole, again)
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, EarlyStoppingCallback)
    ]
    assert patience[0] == patience[1] and again.state.best_global_step == best
    assert again.state.best_metric == whole.state.best_metric


class OfArguments(TrainerCallback, ExportableState):
    """Its state is what it was made with."""

    def state(self):
        return {"args": {}}


def test_a_callback_whose_state_has_no_attributes_goes_on(tmp_path):
    for again in (False, True):
        made = make(reward_pairs, tmp_path, max_steps=1)
        made.add_callback(OfArguments())
        made.train(resume_from_checkpoint=again)
    assert made.state.stateful_callbacks["OfArguments"] == {"args": {}} and made.resumed_at == (1,)


def test_the_custom_loop_saves_and_goes_on(tmp_path):
    def updates(trainer, number):
        while True:
            for batch in trainer.dataloader:
                responses = trainer.generate(batch)
                trainer.step(batch, responses, trainer.score(batch, responses))
                if trainer.state.global_step == number:
                    return trainer

    whole = updates(make(ppo, tmp_path), STEPS)
    half = updates(make(ppo, tmp_path), 3)
    saved = half.save_checkpoint()
    assert saved == tmp_path / "checkpoint-3"
    again = make(ppo, tmp_path)
    again.load_checkpoint(saved)
    disturbed = updates(again, STEPS)
    assert_same(weights(whole), weights(disturbed))


def test_the_deterministic_switch_runs_all_of_it(tmp_path):
    """On a GPU `full_determinism` makes two runs equal; here it shows that every operation has such a kernel."""
    try:
        made = make(ppo, tmp_path / "whole", full_determinism=True, max_steps=3)
        made.train()
        assert torch.are_deterministic_algorithms_enabled()
        again = make(ppo, tmp_path / "whole", full_determinism=True, max_steps=3)
        again.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
        assert_same(weights(made), weights(again))
    finally:
        torch.use_deterministic_algorithms(False)


def test_state_without_a_part_shows(tmp_path):
    """Each part of the state matters: with one left as it is in a fresh trainer, an update ends with other weights, or
    another learning rate.
    """
    whole = make(ppo_shared_adaptive, tmp_path / "whole")
    whole.add_callback(Stops())
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-1"

    def resumed_without(forget) -> bool:
        again = make(ppo_shared_adaptive, tmp_path / "whole")
        again._prepare_training()
        fresh = {
            "optimizer": again.optimizer.state_dict(), "scheduler": again.lr_scheduler.state_dict(),
            "kl_coef": again.kl_coef, "scores": again.score_shaper.moments, "place": again.dataloader.state_dict(),
        }  # fmt: skip
        disturb()
        again.load_checkpoint(checkpoint)
        forget(again, fresh)
        batch = next(iter(again.dataloader))
        responses = again.generate(batch)
        again.step(batch, responses, again.score(batch, responses))
        assert again.state.global_step == whole.state.global_step == 2
        final, rates = weights(whole), [made.optimizer.param_groups[0]["lr"] for made in (whole, again)]
        return rates[0] == rates[1] and all(torch.equal(final[name], p) for name, p in weights(again).items())

    def forget_weights(again, fresh):
        with torch.no_grad():
            again.roles.parameters_of("policy")[0].add_(1e-3)

    assert resumed_without(lambda again, fresh: None)
    for forget in (
        forget_weights,
        lambda again, fresh: again.optimizer.load_state_dict(fresh["optimizer"]),
        lambda again, fresh: again.lr_scheduler.load_state_dict(fresh["scheduler"]),
        lambda again, fresh: setattr(again, "kl_coef", fresh["kl_coef"]),
        lambda again, fresh: setattr(again.score_shaper, "moments", fresh["scores"]),
        lambda again, fresh: again.dataloader.load_state_dict(fresh["place"]),
        lambda again, fresh: disturb(),
    ):
        assert not resumed_without(forget)


EVALUATED = {1: 0.1, 2: 0.5, 3: 0.9, 4: 0.2}
BETWEEN_SAVES = {
    "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 2, "load_best_model_at_end": True,
    "metric_for_best_model": "mine",
}  # fmt: skip


def measured(stage, folder, **changes):
    made = make(stage, folder, **{**BETWEEN_SAVES, **changes})
    made.metrics = lambda rollout: {"mine": EVALUATED[made.state.global_step]}
    return made


@pytest.mark.parametrize("stage", [ppo, q], ids=lambda stage: stage.__name__)
def test_the_best_saved_checkpoint_stays_where_a_better_evaluation_lies_between_saves(stage, tmp_path):
    whole = measured(stage, tmp_path / "whole", save_total_limit=1)
    whole.train()
    assert whole.state.best_global_step == 3  # of which nothing was saved
    assert Path(whole.state.best_model_checkpoint).name == "checkpoint-2"
    rest = measured(stage, tmp_path / "rest")
    rest.train()
    shutil.rmtree(tmp_path / "rest" / "checkpoint-4")
    moved = (tmp_path / "rest").rename(tmp_path / "moved")
    again = measured(stage, moved, save_total_limit=1)
    again.train(resume_from_checkpoint=True)
    assert again.resumed_at == (2,) and again.state.best_model_checkpoint == str(moved / "checkpoint-2")
    assert (moved / "checkpoint-2").is_dir()
    assert_same(weights(whole), weights(again))


@pytest.mark.parametrize("stage", [ppo, q], ids=lambda stage: stage.__name__)
def test_a_checkpoint_that_could_not_be_written_is_not_the_best(stage, tmp_path, monkeypatch):
    made = measured(stage, tmp_path, save_steps=1)
    write = made._write_checkpoint

    def full():
        if made.state.global_step == 3:  # the best
            raise OSError(errno.ENOSPC, "No space left on device")
        return write()

    monkeypatch.setattr(made, "_write_checkpoint", full)
    with pytest.raises(OSError, match="No space"):
        made.train()
    assert Path(made.state.best_model_checkpoint).name == "checkpoint-2"


@pytest.mark.parametrize("stage", [ppo, q], ids=lambda stage: stage.__name__)
def test_the_best_weights_of_a_run_that_is_over_are_put_back_again_and_no_damaged_ones(stage, tmp_path):
    whole = measured(stage, tmp_path)
    whole.train()
    again = measured(stage, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert Path(again.state.best_model_checkpoint).name == "checkpoint-2"  # a better evaluation was not saved
    assert_same(weights(whole), weights(again))
    last = measured(stage, tmp_path, load_best_model_at_end=False)
    last.train(resume_from_checkpoint=True)  # its weights are those of the newest
    assert any(not torch.equal(weight, weights(whole)[name]) for name, weight in weights(last).items())
    path = next((tmp_path / "checkpoint-2").rglob("adapter_model.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = measured(stage, tmp_path)
    with pytest.warns(UserWarning, match=r"checkpoint-2, the best so far, is skipped: .*adapter_model.safetensors"):
        again.train(resume_from_checkpoint=True)
    assert_same(weights(last), weights(again))


def test_a_reward_adapter_goes_on_on_its_own_base_alone(tmp_path):
    first = make(reward_model_lora, tmp_path, max_steps=1)
    first.train()
    again = make(reward_model_lora, tmp_path, max_steps=2)
    for name, parameter in again.model.named_parameters():
        if ".original_module." in name:  # the head that is not read, drawn anew
            parameter.data += 1
    again.train(resume_from_checkpoint=True)
    other = make(reward_model_lora, tmp_path, max_steps=3)
    frozen = next(p for name, p in other.model.named_parameters() if name.endswith("base_layer.weight"))
    frozen.data[0, 0] += 1
    with pytest.raises(CheckpointError, match="was written on a base with other weights"):
        other.train(resume_from_checkpoint=True)


def test_a_pass_without_a_batch_is_an_error(tmp_path):
    made = make(reward_pairs, tmp_path, per_device_train_batch_size=16, dataloader_drop_last=True)
    with pytest.raises(
        DataError, match="^dataloader_drop_last: true leaves out the only batch: there are 11 rows, and"
    ):
        made.train()


def test_a_run_that_goes_on_saves_as_often_as_it_is_asked_to_now(tmp_path):
    cut = make(sft_policy, tmp_path, max_steps=2, save_steps=2)
    cut.train()
    again = make(sft_policy, tmp_path, max_steps=5, save_steps=1, logging_steps=1)
    again.train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoint_folders(tmp_path)] == [f"checkpoint-{step}" for step in (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("evaluations", "best", "greater_is_better"),
    [([0.9, 0.7, 0.4, 0.1], 2, True), ([0.2, 0.1, 0.9, 0.5], 4, True), ([0.2, 0.1, 0.9, 0.5], 4, False)],
    ids=["before the first save", "before the best save", "before the best save, where less is better"],
)
def test_what_lies_between_saves_is_not_what_the_saved_ones_are_held_against(
    evaluations, best, greater_is_better, tmp_path
):
    evaluations = evaluations if greater_is_better else [-one for one in evaluations]
    made = make(ppo, tmp_path, **BETWEEN_SAVES, save_total_limit=1, greater_is_better=greater_is_better)
    made.metrics = lambda rollout: {"mine": evaluations[made.state.global_step - 1]}
    made.train()
    assert made.state.best_metric == (max if greater_is_better else min)(evaluations)
    assert Path(made.state.best_model_checkpoint).name == f"checkpoint-{best}"
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-4"}


class Stops(TrainerCallback):
    """Ends training after two updates, once."""

    stopped = False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and not self.stopped:
            control.should_training_stop = self.stopped = True


@pytest.mark.parametrize(("by", "after"), [(Ask, ("on_step_begin", 1)), (Stops, ())], ids=["signal", "callback"])
def test_what_was_stopped_goes_on_with_its_own_weights_and_not_with_the_best(by, after, tmp_path):
    def falling(folder, **changes):
        made = measured(ppo, folder, save_steps=1, eval_on_start=True, **changes)
        made.metrics = lambda rollout: {"mine": -made.state.global_step}
        return made

    falling(tmp_path / "whole").train()
    made = falling(tmp_path / "cut")
    made.add_callback(by(*after))
    with pytest.raises(RunInterrupted) if by is Ask else nullcontext():
        made.train()
    assert made.state.global_step == 2 and made.state.best_model_checkpoint.endswith("checkpoint-1")
    made.train()
    for role in ("policy", "value"):
        saved = (f"{name}/checkpoint-4/{role}/adapter_model.safetensors" for name in ("whole", "cut"))
        assert_same(*(load_file(tmp_path / name) for name in saved))
    evaluated = [row["step"] for row in metrics(tmp_path / "cut") if "eval_score" in row]
    assert evaluated == [0, 1, 2, 3, 4]  # that of the start once
    with pytest.warns(UserWarning, match="the 4 updates of this run are done, and train\\(\\) makes no more"):
        made.train()


@pytest.mark.parametrize("stage", [q, sft_policy], ids=lambda stage: stage.__name__)
def test_the_best_weights_are_not_saved_as_those_of_the_last_step(stage, tmp_path):
    by = {} if stage is q else {"metric_for_best_model": "loss", "greater_is_better": True}  # it falls
    refused = partial(pytest.raises, CheckpointError, match="not those of step 4.* checkpoint-4 has those")
    for resumed in (None, True):  # where no step is left, they are put back, too
        made = measured(stage, tmp_path, **by)
        made.train(resume_from_checkpoint=resumed)
        with refused():
            made.save_checkpoint()
    made.metrics, noted = lambda rollout: {"mine": 2.0}, dict(made._metrics_at)
    made.evaluate()
    assert made._metrics_at == noted  # it is of another step's weights
    with pytest.warns(UserWarning, match="begins anew"), pytest.raises(TypeError):
        made.train(of_nothing=1)  # has moved no weights
    with refused():
        made.save_checkpoint()
    for reads in ("check_checkpoint", "load_best"):  # with no step left: of another run's checkpoint, or a damaged one
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="^another$"):
            patch.setattr(made, reads, mock.Mock(side_effect=CheckpointError("another")))
            made.train(resume_from_checkpoint=True)
        with refused():
            made.save_checkpoint()
    made.args.load_best_model_at_end = False
    with pytest.warns(UserWarning, match="begins anew"):
        made.train()
    assert made.save_checkpoint() == tmp_path / "checkpoint-4"


def test_weights_of_the_last_step_that_are_the_best_are_saved(tmp_path):
    by = {"max_steps": 2, "metric_for_best_model": "loss"}  # it falls
    made = make(sft_policy, tmp_path, **{**BETWEEN_SAVES, **by})
    made.train()
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert made.save_checkpoint() == tmp_path / "checkpoint-2"


def test_weights_that_were_not_saved_are_not_gone_on_with_as_the_best(tmp_path):
    made = measured(ppo, tmp_path, save_strategy="best")
    made.metrics = lambda rollout: {"mine": -made.state.global_step}
    made.add_callback(Stops())
    made.train()
    with pytest.raises(CheckpointError, match="the weights of update 2 were not saved, and those of the best"):
        made.train()
    with mock.patch.object(made.watch, "evaluated", return_value=[]) as told:
        made.evaluate()
    assert told.call_args.args[0] == made.last_evaluation[0] == 1  # whose weights they are
    unfit = mock.patch("toolkit.trainers.common.load_weights", side_effect=ModelError("of another rank"))
    with unfit, pytest.raises(ModelError, match="of another rank"):
        made.load_checkpoint(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match="not those of step 2"):  # where a checkpoint could not be read, too
        made.save_checkpoint()
    made.load_checkpoint(tmp_path / "checkpoint-1")
    assert made.save_checkpoint() == tmp_path / "checkpoint-1"


def test_an_evaluation_by_hand_is_none_that_early_stopping_waits_for(tmp_path):
    made = measured(ppo, tmp_path, save_steps=1, early_stopping_patience=1)
    made.add_callback(Ask("on_step_begin", 2))
    with pytest.raises(RunInterrupted):
        made.train()
    made.metrics = lambda rollout: {"mine": 0.0}
    made.evaluate()
    assert not read_state(made.save_checkpoint())["stopped_early"]


def test_nor_is_one_after_an_error(tmp_path):
    made = measured(ppo, tmp_path, save_steps=1, early_stopping_patience=1)
    read = made.reward

    def fails(rollout):
        if made.state.global_step == 2 and made.is_in_train and not made._evaluation_due:
            raise ValueError("no score today")
        return read(rollout)

    made.reward = fails
    with pytest.raises(RewardError):
        made.train()
    made.reward, made.metrics = read, lambda rollout: {"mine": 0.0}
    made.evaluate()
    assert not made.control.should_training_stop and not read_state(made.save_checkpoint())["stopped_early"]


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate"])
def test_it_is_over_too_where_the_evaluation_of_that_update_failed(event, tmp_path):
    made, ends = make(ppo, tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2), EndsPass(event)
    made.add_callback(ends)
    read, failed = made.reward, []

    def fails_once(rollout):
        if made.state.global_step == 2 and made._evaluation_due and not failed:
            failed.append(True)
            raise ValueError("no score today")
        return read(rollout)

    made.reward = fails_once
    with pytest.raises(RewardError):
        made.train()
    again, ends = make(ppo, tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2), EndsPass(event)
    again.add_callback(ends)
    again.train(resume_from_checkpoint=True)
    assert ends.ends == [(2, 0.5), (4, 1.5)]


class EndsPass(TrainerCallback):
    def __init__(self, event):
        self.ends = []
        setattr(self, event, self._ends)

    def _ends(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 2

    def on_epoch_end(self, args, state, control, **kwargs):
        self.ends.append((state.global_step, state.epoch))


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate", "on_save"])
def test_a_pass_that_a_callback_has_ended_is_over_for_whoever_goes_on(event, tmp_path):
    on = {"eval_strategy": "steps", "eval_steps": 2} if event == "on_evaluate" else {}

    def made():
        trainer, ends = make(ppo, tmp_path / "cut", max_steps=4, save_steps=1, **on), EndsPass(event)
        assert len(trainer.dataloader) == 4
        trainer.add_callback(ends)
        return trainer, ends.ends

    whole, ends = made()
    whole.train()
    assert ends == [(2, 0.5), (4, 1.5)]  # as transformers counts: the second pass is half over
    if event == "on_save":  # of which the checkpoint that has been saved cannot know
        return
    for step in (3, 4):
        shutil.rmtree(tmp_path / "cut" / f"checkpoint-{step}")
    again, ends = made()
    again.train(resume_from_checkpoint=True)
    assert ends == [(2, 0.5), (4, 1.5)]
    assert_same(weights(whole), weights(again))


@pytest.mark.parametrize("stage", [ppo, q, sft_policy], ids=lambda stage: stage.__name__)
def test_the_end_of_training_deletes_neither_the_newest_checkpoint_nor_a_user_s_files(stage, tmp_path):
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True} if stage is sft_policy else {}  # it falls
    settings = {**BETWEEN_SAVES, "save_steps": 1, "save_total_limit": 1, **best}
    made = make(stage, tmp_path, **settings)
    if not best:
        made.metrics = lambda rollout: {"mine": -made.state.global_step}
    mine = tmp_path / "checkpoint-4-notes.md", tmp_path / "checkpoint-9" / "notes.md"
    mine[1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    made.train()
    kept = {path.name for path in tmp_path.glob("checkpoint-*")} - {mine[0].name, mine[1].parent.name}
    assert made.state.best_global_step == 1 and kept == {"checkpoint-1", "checkpoint-4"}
    assert [path.read_text() for path in mine] == ["mine"] * 2
    assert made.args.save_total_limit == 1


def test_an_evaluation_that_failed_at_the_end_of_a_pass_that_was_saved_is_made_up_for(tmp_path):
    failing = True

    def down(rollout):
        if failing and made.state.global_step == 4:
            raise ConnectionError("nobody there")
        return [float(len(ids)) for ids in rollout.response_ids]

    settings = {"eval_strategy": "epoch", "max_steps": 4}  # a pass of 16 prompts is four updates
    made = make(ppo, tmp_path, reward=down, **settings)
    with pytest.raises(RewardError, match="All up to update 4 is saved"):
        made.train()
    failing = False
    made = make(ppo, tmp_path, reward=down, **settings)
    made.train(resume_from_checkpoint=True)
    assert [row["step"] for row in metrics(tmp_path) if "eval_score" in row] == [4]


def test_an_evaluation_in_which_ppo_was_killed_at_the_end_of_a_pass_comes_again(tmp_path):
    """Of the first pass, and of the run, which ends a step after it; at both a checkpoint is due, too."""
    killed_at, steps = [], 5

    def run(folder, *, killed, **arguments):
        made = make(ppo, folder, max_steps=steps, eval_strategy="epoch")
        evaluate = made.evaluate

        def may_be_killed(*given, **named):
            if killed and made.state.global_step not in killed_at:
                killed_at.append(made.state.global_step)
                raise KeyboardInterrupt
            return evaluate(*given, **named)

        made.evaluate = may_be_killed
        made.train(**arguments)
        return [row for row in metrics(folder) if "train_loss" not in row]

    whole = run(tmp_path / "whole", killed=False)
    for resumed in (None, True):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", killed=True, resume_from_checkpoint=resumed)
    assert run(tmp_path / "cut", killed=True, resume_from_checkpoint=True) == whole
    assert killed_at == [steps - 1, steps]


def test_an_evaluation_that_is_made_up_for_may_be_the_best(tmp_path):
    def made():
        def down(rollout):
            if failing and one.state.global_step == 4 and one.control.should_evaluate is False and one._evaluation_due:
                raise ConnectionError("nobody there")
            return [float(len(ids)) for ids in rollout.response_ids]

        one = measured(ppo, tmp_path, reward=down, eval_steps=2)
        one.metrics = lambda rollout: {"mine": {2: 0.1, 4: 0.9}[one.state.global_step]}
        return one

    failing = True
    with pytest.raises(RewardError, match="All up to update 4 is saved"):
        made().train()
    failing = False
    again = made()
    again.train(resume_from_checkpoint=True)
    assert again.resumed_at == (4,) and Path(again.state.best_model_checkpoint).name == "checkpoint-4"
    once_more = made()
    once_more.train(resume_from_checkpoint=True)
    assert Path(once_more.state.best_model_checkpoint).name == "checkpoint-4"


def test_an_evaluation_that_is_no_number_is_never_the_best(tmp_path):
    made = make(q, tmp_path, **BETWEEN_SAVES)
    for step, found in ((2, math.nan), (4, 0.5), (6, math.nan)):
        made.state.global_step, made._metrics_at[step] = step, found
        made._note_best()
    assert Path(made.state.best_model_checkpoint).name == "checkpoint-4"


def test_a_state_that_cannot_be_put_back_is_saved_nowhere(tmp_path):
    """It would be that of the held-out prompts, with which a run would go on."""

    class Stuck(Counting):
        def load_state_dict(self, state):
            raise ValueError("a slip of mine")

    stuck = ppo_trainer(tmp_path, reward=Stuck(), max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="no")
    with pytest.raises(RewardStateError, match=r"load_state_dict of the reward raised ValueError: a slip") as raised:
        stuck.train()
    assert "is saved in" not in str(raised.value) and not [*tmp_path.glob("checkpoint-*")]


@pytest.mark.parametrize("stage", [sft_policy, reward_pairs, q])
def test_fewer_passes_than_are_behind_a_checkpoint_are_refused(stage, tmp_path):
    lasts = {"max_steps": -1, "save_strategy": "epoch"}
    made = make(stage, tmp_path, num_train_epochs=3, **lasts)
    made.train()
    newest = tmp_path / f"checkpoint-{made.state.global_step * 2 // 3}"
    with pytest.raises(CheckpointError, match="^num_train_epochs: .* steps behind it, and the run is to have"):
        make(stage, tmp_path, num_train_epochs=1, **lasts).train(resume_from_checkpoint=newest)
    with pytest.raises(CheckpointError, match="^num_train_epochs: "):
        odd = tmp_path / f"checkpoint-{made.state.global_step}"
        make(stage, tmp_path, num_train_epochs=2.3, **lasts).train(resume_from_checkpoint=odd)
    over = make(stage, tmp_path, num_train_epochs=2, **lasts)
    over.train(resume_from_checkpoint=newest)
    assert over.state.global_step == over.state.max_steps == made.state.global_step * 2 // 3
