"""The llama3 recipes: their settings, and whole runs on a tiny model of Llama 3's shape."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_runs import PAIRS, QUERIES
from toolkit import recipes
from toolkit.runs import stages
from toolkit.sampling import SIGNS
from toolkit.spec.sources import lora_config

pytestmark = pytest.mark.card


def test_the_scripts_settings_to_the_letter():
    recipe = recipes.load("llama3_8b_lora")
    quantization = recipe.quantization()
    assert quantization.load_in_4bit and quantization.bnb_4bit_use_double_quant
    assert quantization.bnb_4bit_quant_type == "nf4"
    assert quantization.bnb_4bit_compute_dtype is getattr(torch, recipe.base.dtype)
    for role in ("policy", "reward"):
        adapter = lora_config(recipe.values["adapters"][role])
        assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (8, 16, 0.05)
        assert set(adapter.target_modules) == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
    ppo = recipe.stage_config("ppo")
    assert ppo.rollout_batch_size == 2 and ppo.num_mini_batches == 2 and ppo.num_ppo_epochs == 3
    assert ppo.response_length == 32 and ppo.temperature == 1.0 and ppo.value == "shared"
    # defaults of PPOConfig in TRL 0.11
    assert ppo.learning_rate == 1.41e-5 and ppo.lr_scheduler_type == "constant" and ppo.max_grad_norm == 0
    assert (ppo.kl_estimator, ppo.kl_coef, ppo.kl_target, ppo.kl_horizon) == ("full", 0.2, 6.0, 10_000)
    assert (ppo.gamma, ppo.lam, ppo.cliprange, ppo.cliprange_value, ppo.vf_coef) == (1.0, 0.95, 0.2, 0.2, 0.1)
    assert not ppo.whiten_rewards and ppo.missing_eos_penalty is None and ppo.weight_decay == 0.0


def small(name, checkpoint, folder, *overrides):
    common = (
        f"base.model={checkpoint}", "reward.max_steps=2", "reward.per_device_train_batch_size=2",
        "reward.gradient_accumulation_steps=1", "ppo.max_steps=2", "ppo.response_length=8",
    )  # fmt: skip
    section = "reward_data" if name == "llama3_8b_lora" else "data"
    pairs = [f"{section}.train={PAIRS}", f"{section}.validation={PAIRS}", f"{section}.max_validation_rows=6"]
    return recipes.load(name, *common, *pairs, *overrides, runs_dir=folder / "runs")


def test_llama3_8b_lora_runs_whole_on_a_tiny_llama(tmp_path, llama3_checkpoint, stages_here):
    recipe = small("llama3_8b_lora", llama3_checkpoint, tmp_path, f"data.train={QUERIES}", "data.validation_size=4")
    assert recipe.plan.needs("ppo") == ["reward"]
    result = stages.run(recipe, "ppo")
    assert result["before"]["kl"] == pytest.approx(0.0, abs=1e-3)
    assert (recipe.stage_folder("reward") / "result.json").is_file()
    assert (recipe.stage_folder("ppo") / "value" / "value_head.safetensors").is_file()
    assert recipe.tokenizer.pad_token_id == recipe.tokenizer.eos_token_id
    # A query is taken as it is, with the tokenizer's own beginning.
    row = recipe.task.prompts("train")[0]
    assert recipe.tokenizer.decode(row["input_ids"]).startswith("<|begin_of_text|>")
    assert "<|start_header_id|>" not in row["prompt"]


def test_an_update_makes_six_optimizer_steps_with_active_dropout(tmp_path, llama3_checkpoint):
    recipe = small(
        "llama3_8b_lora", llama3_checkpoint, tmp_path, f"data.train={QUERIES}", "data.validation_size=4",
        "scorer.kind=function", "scorer.function=statistics:fmean",
    )  # fmt: skip
    trainer = recipe.ppo_trainer()
    batch = next(iter(trainer.dataloader))
    responses = trainer.generate(batch)
    steps, active = [], []
    trainer._prepare_training()
    step = trainer.optimizer.step
    dropouts = [m for name, m in trainer.roles.named_modules() if name.endswith("lora_dropout.policy")]
    assert len(dropouts) == 7 * 2 and all(m.p == 0.05 for m in dropouts)

    def counting():
        steps.append(len(responses))
        active.append(all(m.training for m in dropouts))
        step()

    trainer.optimizer.step = counting
    stats = trainer.step(batch, responses, [1.0, -1.0])
    assert steps == [2] * 6 and all(active)
    assert stats["kl_coef"] == 0.2 and trainer.kl_coef == pytest.approx(0.2 * (1 - 0.2 * 2 / 10_000))


def test_llama3_8b_lora_fast_has_chat_prompts(tmp_path, llama3_checkpoint):
    recipe = small("llama3_8b_lora_fast", llama3_checkpoint, tmp_path)
    assert "<|start_header_id|>user" in recipe.task.prompts("train")[0]["prompt"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU tests/test_docs.py runs it: make test-gpu")
def test_llama3_8b_lora_fast_runs_whole_on_a_tiny_llama(tmp_path, llama3_checkpoint, stages_here):
    recipe = small(
        "llama3_8b_lora_fast", llama3_checkpoint, tmp_path,
        "ppo.per_device_train_batch_size=2", "ppo.gradient_accumulation_steps=4",
    )  # fmt: skip
    result = stages.run(recipe, "ppo")
    assert result["after"].keys() == {"score", "score_se", "kl", "length", "eos_share", *SIGNS}


def test_a_card_without_bfloat16_is_one_setting():
    recipe = recipes.load("llama3_8b_lora", "base.dtype=float16")
    assert recipe.quantization().bnb_4bit_compute_dtype is torch.float16
    for stage in ("reward", "ppo"):
        config = recipe.stage_config(stage)
        assert config.fp16 and not config.bf16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="float16 training needs a GPU: make test-gpu")
def test_float16_training_on_a_gpu(tmp_path, llama3_checkpoint):
    recipe = small(
        "llama3_8b_lora", llama3_checkpoint, tmp_path, f"data.train={QUERIES}", "data.validation_size=4",
        "base.dtype=float16",
    )  # fmt: skip
    result = stages.run(recipe, "ppo")
    assert all(math.isfinite(value) for value in result["after"].values())
    assert result["peak_memory_gb"]["gpu"] > 0
    lines = [json.loads(line) for line in (recipe.stage_folder("ppo") / "metrics.jsonl").read_text().splitlines()]
    taken = [line["optimizer_steps"] for line in lines if "optimizer_steps" in line]
    assert sum(taken) > 0  # not all of them were passed over for overflow
    moved = load_file(recipe.stage_folder("ppo") / "policy" / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in moved.items() if "lora_B" in name)  # which starts at 0
