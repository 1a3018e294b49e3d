"""The interface that users write against: names and signatures."""

import inspect

import pytest
from transformers import Trainer, TrainingArguments

from toolkit import recipes
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import PPOConfig


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_recipes():
    assert parameters(recipes.load) == ["name", "overrides", "run", "runs_dir", "sections"]
    for stage in ("sft", "reward", "q"):
        found = parameters(getattr(recipes.Recipe, f"{stage}_trainer"))
        assert found == ["self", "callbacks", "resume", "overwrite", "from_run"]
    given, way = ["reward", "judge", "train_dataset", "eval_dataset"], ["callbacks", "resume", "overwrite", "from_run"]
    assert parameters(recipes.Recipe.ppo_trainer) == ["self", *given, "trainer_class", *way]
    assert parameters(recipes.Recipe.run_stage) == ["self", "stage", *given, *way]
    assert parameters(recipes.check) == parameters(recipes.show) == ["recipe"]
    assert parameters(recipes.plan)[:2] == ["recipe", "gpu"]


def test_the_loop_of_a_notebook():
    assert parameters(PPOTrainer.generate)[:2] == ["self", "batch"]
    assert parameters(PPOTrainer.score) == ["self", "batch", "responses"]
    assert parameters(PPOTrainer.step) == ["self", "batch", "responses", "scores"]
    assert parameters(PPOTrainer.train)[:2] == ["self", "resume_from_checkpoint"]
    assert parameters(PPOTrainer.load_checkpoint) == ["self", "folder"]


def test_it_is_a_trainer_of_transformers():
    assert issubclass(PPOTrainer, Trainer) and issubclass(PPOConfig, TrainingArguments)


def test_it_is_a_trl_ppo_trainer_where_trl_has_one():
    trl = pytest.importorskip("trl.experimental.ppo", reason="TRL 1.12 is the last with PPO")
    assert issubclass(PPOTrainer, trl.PPOTrainer) and issubclass(PPOConfig, trl.PPOConfig)


def test_nothing_is_sent_anywhere_by_default():
    import os

    from datasets import config as datasets_config
    from huggingface_hub import constants
    from transformers import TrainingArguments

    from toolkit.trainers.reward import RewardTrainer
    from toolkit.trainers.sft import SFTTrainer
    from toolkit.trainers.trainer_internals import TrainerHooks

    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1" and constants.HF_HUB_DISABLE_TELEMETRY
    assert not datasets_config.HF_UPDATE_DOWNLOAD_COUNTS and os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "1"
    assert inspect.signature(TrainingArguments).parameters["report_to"].default == "none"
    for trainer in (RewardTrainer, SFTTrainer):
        assert trainer._send_telemetry is TrainerHooks._send_telemetry


def test_what_a_trainer_is_asked_for_is_handed_on(monkeypatch):
    told = []
    monkeypatch.setattr("toolkit.runs.stages.prepared", lambda _, stage, **way: told.append((stage, way)))
    recipe, way = recipes.load("doubling"), {"callbacks": [1], "resume": True, "overwrite": True, "from_run": "x"}
    for stage in ("sft", "reward", "q"):
        getattr(recipe, f"{stage}_trainer")(**way)
    recipe.ppo_trainer(train_dataset=["a"], trainer_class=PPOTrainer, **way)
    given = {"reward": None, "judge": None, "train_dataset": ["a"], "eval_dataset": None}
    of_trainer = {**way, "given": {**given, "trainer_class": PPOTrainer}}
    assert told == [*((stage, way) for stage in ("sft", "reward", "q")), ("ppo", of_trainer)]
    monkeypatch.setattr("toolkit.runs.stages.run", lambda _, stage, **way: (stage, way))
    assert recipe.run_stage("ppo", train_dataset=["a"], **way) == ("ppo", {**way, "given": given})
