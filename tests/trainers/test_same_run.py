"""A checkpoint of other data, another base or other versions is not gone on with in silence."""

from pathlib import Path

import pytest
import torch
from trl import RewardConfig, SFTConfig

from tests.tiny_models import shared_base
from tests.trainers.resumable import make, ppo, reward_pairs, sft_policy
from toolkit.checkpoints.state import read_state
from toolkit.errors import CheckpointError
from toolkit.rewards import load_function
from toolkit.runs.differences import _LENGTHS, _MAY_CHANGE, _ROWS_OF_A_STEP, _SHOWN_BY
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.same_run import check_same_run, check_same_settings, made_with, other_than, settings_of


def test_other_data_and_other_versions(tmp_path, monkeypatch):
    make(reward_pairs, tmp_path / "a", max_steps=1).train()
    other = make(reward_pairs, tmp_path / "a", max_steps=1)
    other.train_dataset = other.train_dataset.select(range(10))
    with pytest.raises(CheckpointError, match=r"other training data \(11 rows; now 10\), or the toolkit reads"):
        other.train(resume_from_checkpoint=True)
    monkeypatch.setattr("toolkit.trainers.same_run.versions", lambda: {"torch": "9.9", "transformers": "9", "trl": "9",
                                                                     "peft": "9", "bitsandbytes": "9"})  # fmt: skip
    with pytest.warns(UserWarning, match=r"other versions \(torch .* → 9.9, .*the resumed run is not bit-identical"):
        make(reward_pairs, tmp_path / "a", max_steps=1).train(resume_from_checkpoint=True)


PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes")


@pytest.mark.parametrize("name", PACKAGES)
def test_another_version_of_any_package_that_counts_is_said(name):
    of_run = {"data": {}, "base": None, "dtype": "float32", "reward": {}, "processes": 1}
    then, now = (of_run | {"versions": dict.fromkeys(PACKAGES, "1") | other} for other in ({}, {name: "2"}))
    with pytest.warns(UserWarning, match=rf"other versions \({name} 1 → 2\): the resumed run is not bit-identical"):
        check_same_run(Path("checkpoint-1"), then, now)


def test_a_run_that_goes_on_with_other_settings_says_so(tmp_path):
    """From Python, or where a run's own recipe was edited: nothing else holds the two against each other."""
    make(ppo, tmp_path, max_steps=1).train()
    other = make(ppo, tmp_path, max_steps=2, cliprange=0.3, logprob_chunk_size=7)
    with pytest.warns(UserWarning, match=r"checkpoint-1 was written with other settings \(cliprange 0.2 → 0.3\): the"):
        other.train(resume_from_checkpoint=True)
    make(ppo, tmp_path, max_steps=3, cliprange=0.3).train(resume_from_checkpoint=True)  # warnings are errors here


@pytest.mark.parametrize("owner", [PPOConfig, QConfig, SFTConfig, RewardConfig])
def test_what_a_stage_may_go_on_with_is_not_said(owner):
    said = settings_of(owner("unused", use_cpu=True, bf16=False)).keys()
    assert {"seed", "max_grad_norm"} < said
    assert not said & {*_MAY_CHANGE, *_SHOWN_BY, *_LENGTHS, *_ROWS_OF_A_STEP}


@pytest.mark.parametrize("stage", [ppo, sft_policy], ids=lambda stage: stage.__name__)
def test_a_base_that_changed_is_refused(stage, tmp_path):
    make(stage, tmp_path, max_steps=1).train()
    other = make(stage, tmp_path, max_steps=2)
    with torch.no_grad():
        other.roles.causal_lm.model.norm.weight.add_(1e-3)
    with pytest.raises(CheckpointError, match="written on a base with other weights"):
        other.train(resume_from_checkpoint=True)


def test_another_precision_is_gone_on_with_and_said(tmp_path):
    """As where `auto` is another on the machine that goes on."""
    make(reward_pairs, tmp_path, max_steps=1).train()
    other = make(reward_pairs, tmp_path, max_steps=2)
    other.roles.causal_lm.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="with its model in float32, and goes on in bfloat16: not exact"):
        other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 2


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        (ppo, {"learning_rate": 1e-6}, "with learning_rate 0.01, and here it is 1e-06"),
        (ppo, {"value_learning_rate": 1e-6}, "with value_learning_rate 0.01, and here it is 1e-06"),
        (ppo, {"kl_coef": 0.9}, "with kl_coef 0.1, and here it is 0.9"),
        (ppo, {"optim": "sgd"}, r"with optim adamw_torch\w*, and here it is sgd"),
        (ppo, {"weight_decay": 0.5}, "with weight_decay 0.0, and here it is 0.5"),
        (sft_policy, {"adam_beta2": 0.5}, "with adam_beta2 0.999, and here it is 0.5"),
        (reward_pairs, {"adam_epsilon": 0.5}, "with adam_epsilon 1e-08, and here it is 0.5"),
    ],
)
def test_a_setting_that_would_be_replaced_is_refused(stage, change, said, tmp_path):
    make(stage, tmp_path, max_steps=1).train()
    with pytest.raises(CheckpointError, match=f"checkpoint-1 is of a run {said}: it cannot change within a run"):
        make(stage, tmp_path, max_steps=2, **change).train(resume_from_checkpoint=True)


def test_a_rate_of_the_value_role_that_is_written_out_is_the_same(tmp_path):
    made = make(ppo, tmp_path, max_steps=1)
    made.train()
    rate = made.args.learning_rate
    other = make(ppo, tmp_path, max_steps=2, value_learning_rate=rate)
    other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 2
    settings = read_state(tmp_path / "checkpoint-1")["settings"]
    with pytest.raises(KeyError):  # of a version that kept no such setting: it is not taken for the same
        check_same_settings(tmp_path, {}, settings)


def test_what_responses_are_made_and_scored_with_is_told_apart(tmp_path):
    """The reward's file, the judge's, the adapters that are not trained, and the base."""

    def made(text, base):
        (tmp_path / "rule.py").write_text(f"def reward(rollout):\n    return rollout.lengths  # {text}\n")
        rule = load_function(f"{tmp_path}/rule.py:reward")
        return made_with(base, lambda rollout: [0.0], rule), made_with(base, rule)

    by_judge, by_reward = made("as it was", shared_base())
    assert other_than(by_judge, by_judge) == other_than(by_judge, by_reward) == []  # nothing is there both times
    judge_now, reward_now = made("changed", shared_base())
    assert other_than(by_judge, judge_now) == ["rule.py (judge)"] and other_than(by_reward, reward_now) == ["rule.py"]
    base = shared_base()
    with torch.no_grad():
        base.parameters_of("reward")[0].add_(1.0)
    assert other_than(reward_now, made("changed", base)[1]) == ["reward adapter"]
    with torch.no_grad():
        base.causal_lm.get_input_embeddings().weight.add_(1.0)
    assert other_than(reward_now, made("changed", base)[1]) == ["base", "reward adapter"]
