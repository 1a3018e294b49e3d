"""A small trainer of every stage, for the tests of resuming."""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import SFTConfig

from tests.tiny_models import lora, made_once, randomize, tiny_model
from tests.trainers.helpers import count_reward, own_classifier
from tests.trainers.helpers import trainer as ppo_trainer
from toolkit.data import doubling
from toolkit.models import QBound, SharedBase, ValueModel, add_lora, add_q_roles
from toolkit.reports import MetricsFile
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.q_learning import QTrainer
from toolkit.trainers.reward import RewardConfig, reward_trainer
from toolkit.trainers.sft import sft_trainer

STEPS = 6
COMMON = {
    "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2, "report_to": "none",
    "use_cpu": True, "bf16": False, "disable_tqdm": True, "learning_rate": 1e-2, "gradient_checkpointing": False,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine",
}  # fmt: skip
DROPOUT = {"lora_dropout": 0.3}  # draws random numbers in every forward pass
TIMING = ("seconds", "runtime", "per_second")


def rows(columns: dict, count: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    middles = torch.randint(10, 40, (count, 4), generator=generator).tolist()
    return Dataset.from_dict({name: [make(m) for m in middles] for name, make in columns.items()})


PAIRS = {"chosen_ids": lambda m: [1, *m, 5, 2], "rejected_ids": lambda m: [1, *m, 6, 2]}
CLASSES = {"input_ids": lambda m: [1, *m, 2], "labels": lambda m: m[0] % 3}


def _sft(folder: Path, model, count: int, changes: dict):
    data = rows({"input_ids": lambda m: [1, *m, 2]}, count)
    args = SFTConfig(output_dir=str(folder), **{**COMMON, **changes})
    callbacks = [MetricsFile(folder / "metrics.jsonl")]
    return sft_trainer(args, doubling.tokenizer(), model, data, data, callbacks=callbacks)


def _reward(folder: Path, model, data: Dataset, changes: dict):
    args = RewardConfig(output_dir=str(folder), max_length=None, **{**COMMON, **changes})
    callbacks = [MetricsFile(folder / "metrics.jsonl")]
    return reward_trainer(args, doubling.tokenizer(), model, data, data, callbacks=callbacks)


def _base(role: str, **head) -> SharedBase:
    def base() -> SharedBase:
        base = SharedBase(tiny_model(layers=1))
        base.add_role(role, lora(**DROPOUT), **head)
        return base

    return made_once((role, *head.items()), base)


def _base_of_ppo(value: str) -> SharedBase:
    base = SharedBase(tiny_model(layers=1))
    base.add_role("policy", lora(**DROPOUT))
    base.add_role("reference")
    base.add_role("value", None if value == "shared" else lora(**DROPOUT))
    base.add_role("reward", lora())
    return randomize(base, "policy", "value", "reward")


def _base_of_q() -> SharedBase:
    base = SharedBase(tiny_model(layers=1))
    add_q_roles(base, lora(**DROPOUT), bound=QBound())
    base.add_role("reference")
    return base


def sft_model(folder: Path, **changes):
    model = tiny_model("gpt2", layers=1)  # tied embeddings
    model.config.resid_pdrop = model.transformer.drop.p = 0.1
    return _sft(folder, model, 12, changes)


def sft_policy(folder: Path, **changes):
    return _sft(folder, _base("policy"), 10, changes)


def reward_pairs(folder: Path, **changes):
    return _reward(folder, _base("reward"), rows(PAIRS, 11), changes)


def reward_classes(folder: Path, **changes):
    return _reward(folder, _base("reward", num_labels=3), rows(CLASSES, 8), changes)


def reward_model_lora(folder: Path, **changes):
    return _reward(folder, add_lora(own_classifier("llama"), lora(**DROPOUT)), rows(PAIRS, 11), changes)


def reward_model_classes(folder: Path, **changes):
    return _reward(folder, own_classifier("bert", labels=3), rows(CLASSES, 8), changes)


def ppo(folder: Path, reward=None, **changes):
    value = changes.get("value", "separate")
    base = made_once(("resumable ppo", value), partial(_base_of_ppo, value))
    settings = {**COMMON, "num_ppo_epochs": 1, "num_mini_batches": 2, **changes}
    made = ppo_trainer(folder, base, reward, **settings)
    made.add_callback(MetricsFile(folder / "metrics.jsonl"))
    return made


def ppo_shared_adaptive(folder: Path, **changes):
    adaptive = {"value": "shared", "kl_target": 0.5, "kl_horizon": 8, "kl_estimator": "full", "use_score_scaling": True}
    return ppo(folder, **{**adaptive, "sample_with_replacement": True, **changes})


def ppo_own_value(folder: Path, **changes):
    """A critic on a base of its own, all of whose weights train, and an optimizer that keeps its state in 8 bits."""
    base = SharedBase(tiny_model(layers=1))
    base.add_role("policy", lora(r=64, **DROPOUT))  # large enough to be kept in 8 bits
    base.add_role("reference")
    base.add_role("reward", lora())
    settings = tiny_model("gpt2", layers=1).config
    settings.num_labels = 1
    base.place_value(ValueModel(AutoModelForSequenceClassification.from_config(settings), None))
    randomize(base, "policy", "reward")
    options = {"optim": "lion_8bit", "value_pooling": "response_mean", "learning_rate": 1e-3, "num_ppo_epochs": 2}
    made = ppo_trainer(folder, base, **{**COMMON, **options, **changes})
    made.add_callback(MetricsFile(folder / "metrics.jsonl"))
    return made


def ppo_gathered(folder: Path, **changes):
    """Updates of three batches, from passes of four."""
    return ppo(folder, **{"rollouts_per_update": 3, **changes})


def q(folder: Path, **changes):
    base = made_once("resumable q", _base_of_q)
    data = rows(
        {
            "prompt_ids": lambda m: [1, *m[:2]],
            "response_ids": lambda m: [*m[2:], 2] if m[3] % 3 else [m[3], 2],  # not all are as long
            "rewards": lambda m: [None, 0.0, m[3] / 50] if m[3] % 3 else [0.0, m[3] / 50],
            "ended": lambda m: True,
        },
        11,
    )
    settings = {**COMMON, "bound": "sigmoid", "target_decay": 0.7, "response_length": 3, **changes}
    prompts = Dataset.from_dict({"input_ids": [[1, 20], [1, 30, 31]]})
    return QTrainer(QConfig(output_dir=str(folder), **settings), doubling.tokenizer(), base, data, prompts,
                    reward=count_reward(2), callbacks=[MetricsFile(folder / "metrics.jsonl")])  # fmt: skip


STAGES = (
    sft_model, sft_policy, reward_pairs, reward_classes, reward_model_lora, reward_model_classes, ppo,
    ppo_shared_adaptive, ppo_own_value, q,
)  # fmt: skip


def make(stage, folder: Path, **changes):
    transformers.set_seed(7)
    torch.manual_seed(7)
    return stage(folder, **changes)


def weights(made) -> dict[str, torch.Tensor]:
    # The target of Q is not trained, and moves all the same.
    every = made.model.named_parameters()
    return {name: p.detach().clone() for name, p in every if p.requires_grad or "q_target" in name}


def metrics(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMING)} for row in found]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 1
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def disturb() -> None:
    """What another process would have: other random states."""
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
