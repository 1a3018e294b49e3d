"""Faults of TRL 1.12's loop that ours could have inherited, where no other test holds them: docs/trl_faults.md."""

import itertools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tests.tiny_models import shared_base
from tests.trainers.helpers import PROMPTS, RESPONSES, SCORES, count_reward, dataset, rollout, trainer
from toolkit.errors import ToolkitError
from toolkit.models import LENGTH_MULTIPLE
from toolkit.trainers import ppo_loop


def test_metrics_are_means_over_all_optimizer_steps(tmp_path):
    """F2: with 4 mini-batches TRL reports a ratio of 0.25."""
    ours = trainer(tmp_path, shared_base(), num_mini_batches=4, num_ppo_epochs=2, learning_rate=1e-4)
    steps = []
    original = ours._backward_mini_batch
    ours._backward_mini_batch = lambda *arguments: steps.append(original(*arguments)) or steps[-1]
    stats = ours.step({}, rollout(RESPONSES), SCORES)
    assert len(steps) == stats["optimizer_steps"] == 8
    for name in ("ratio", "approx_kl", "policy_loss", "value_loss", "clip_fraction"):
        assert stats[name] == pytest.approx(sum(step[name] for step in steps) / 8), name
    assert stats["ratio"] == pytest.approx(1.0, abs=0.2)


def test_padding_counts_in_no_metric(tmp_path):
    """F13: rows of unlike length padded together, or alone and not padded at all."""
    found = []
    for alone in (False, True):
        size = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4} if alone else {}
        settings = {"num_ppo_epochs": 3, "learning_rate": 1e-2, "entropy_coef": 0.01, **size}
        ours = trainer(tmp_path, shared_base(), local_rollout_forward_batch_size=1 if alone else 4, **settings)
        found.append(ours.step({}, rollout(RESPONSES), SCORES))
    assert found[0]["approx_kl"] > 1e-4 and found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value == pytest.approx(found[1][name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("evaluated", [False, True])
def test_optimizer_steps_are_as_many_at_the_end_of_the_data(evaluated, tmp_path):
    """F3, F4: TRL steps after every micro-batch in the last batch of a pass, and after an evaluation of one batch."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_mini_batches": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1} if evaluated else {}
    ours = trainer(tmp_path, shared_base(), count_reward(7), max_steps=3, **settings, **evaluation)
    assert len(ours.dataloader) == 1
    ours._prepare_training()
    taken = []
    step = ours.optimizer.step
    ours.optimizer.step = lambda *arguments: taken.append(ours.state.global_step) or step(*arguments)
    ours.train()
    assert taken == [0, 0, 1, 1, 2, 2]


@pytest.fixture
def fresh_precision():
    """accelerate takes one precision a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("fresh_precision")
@pytest.mark.parametrize(
    "asked",
    [
        True,
        False,
    ],
)
def test_every_pass_runs_in_the_precision_that_was_asked_for(asked, tmp_path):
    """F6: TRL's accelerator does not hear of bf16."""
    base, seen = shared_base(), []
    ours = trainer(tmp_path, base, bf16=asked, max_steps=1)
    for module in (base.lm_head, base.head("value")):
        module.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    batch = next(iter(ours.dataloader))
    answers = ours.generate(batch)
    generated = len(seen)
    ours.rollouts.read(answers)
    read = len(seen)
    ours._prepare_training()
    del seen[read:]  # the self-check's own
    ours.step(batch, answers, torch.ones(4))
    assert 0 < generated < read < len(seen) and set(seen) == {asked}


def test_processes_that_accelerate_would_divide_are_refused(tmp_path, monkeypatch):
    """F21, F23: TRL's PPO breaks with adapters under DDP, and when several processes save."""
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(ToolkitError, match="accelerate would divide them once more. Call toolkit.processes.join"):
        trainer(tmp_path, shared_base())


def test_no_row_is_computed_beyond_its_own_end(tmp_path):
    """F31: TRL runs value and reference over what generation appended after the end of a response."""
    base = shared_base()
    ours = trainer(tmp_path, base, local_rollout_forward_batch_size=1)
    widths = []
    original = base.hidden_states
    base.hidden_states = lambda ids, *arguments, **named: (
        widths.append(ids.shape[1]) or original(ids, *arguments, **named)
    )
    ours.rollouts.read(rollout(RESPONSES))
    lengths = [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    rounded = sorted(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for length in lengths)
    assert len(widths) == 3 * 4 and max(widths) <= max(rounded)
    assert sorted(widths) == sorted(rounded * 3)


def test_slow_updates_have_a_speed(tmp_path, monkeypatch):
    """F33: TRL's episodes a second are whole numbers, 0 for anything that takes long."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(ppo_loop.time, "perf_counter", lambda: next(clock))
    metrics = trainer(tmp_path, shared_base(), count_reward(7), max_steps=1).train()
    assert metrics["rollout_seconds"] == metrics["score_seconds"] == metrics["step_seconds"] == 10.0
    assert metrics["samples_per_second"] == pytest.approx(4 / 30)


def test_evaluation_leaves_no_prompt_out(tmp_path):
    """F24: TRL's evaluation drops the prompts that do not fill a batch, and has no score."""
    ours = trainer(tmp_path, shared_base(), count_reward(7), per_device_eval_batch_size=3)
    ours.eval_dataset = dataset(2).select(range(7))
    ours.metrics = lambda r: {"sevens": sum(list(ids).count(7) / len(ids) for ids in r.response_ids), "rows": len(r)}
    found = ours.evaluate()
    assert found["eval_rows"] == 7 and found["eval_score"] == pytest.approx(found["eval_sevens"] / 7, abs=1e-6)
