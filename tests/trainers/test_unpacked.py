"""On a CPU each 4-bit weight is unpacked once for an update of PPO, and once for the whole of sft and reward."""

import pytest
import torch
from trl import SFTConfig

from tests.tiny_models import lora, saved_base
from tests.trainers.helpers import count_reward, trainer
from tests.trainers.test_reward_and_sft import COMMON, pairs
from toolkit.data import doubling
from toolkit.trainers.reward import RewardConfig, reward_trainer
from toolkit.trainers.sft import sft_trainer


@pytest.fixture
def base(tmp_path):
    return saved_base(tmp_path / "base")


def assert_once_each(unpacked, base):
    layers = [layer for group in base._fused for layer in group.layers]
    assert sorted(map(id, unpacked)) == sorted(id(layer.base_layer.weight) for layer in layers)


def test_an_update_of_ppo(base, unpacked, tmp_path):
    for role in ("policy", "value"):
        base.add_role(role, lora())
    base.add_role("reference")
    made = trainer(tmp_path, base, count_reward(5), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    batch = next(iter(made.dataloader))
    responses = made.generate(batch)
    learn = made._learn

    def alone(*given):
        unpacked.clear()
        stats = learn(*given)
        assert_once_each(unpacked, base)
        return stats

    made._learn = alone
    assert made.step(batch, responses, torch.ones(len(responses)))["optimizer_steps"] == 1


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_stage_on_given_texts(base, stage, unpacked, tmp_path):
    base.add_role("policy" if stage == "sft" else "reward", lora())
    settings = {**COMMON, "output_dir": str(tmp_path), "max_steps": 2, "gradient_accumulation_steps": 2}
    settings |= {"gradient_checkpointing": False, "eval_strategy": "steps", "eval_steps": 1}
    if stage == "sft":
        rows = pairs().rename_column("chosen_ids", "input_ids").remove_columns("rejected_ids")
        args = SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **settings)
        made = sft_trainer(args, doubling.tokenizer(), base, rows, rows.select(range(8)), callbacks=[])
    else:
        args = RewardConfig(max_length=None, **settings)
        made = reward_trainer(args, doubling.tokenizer(), base, pairs(), pairs(8), callbacks=[])
    unpacked.clear()
    made.train()
    assert_once_each(unpacked, base)
