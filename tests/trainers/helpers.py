"""Small PPO set-ups for the tests of this folder."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.tiny_models import shared_base
from toolkit.data import Rollout, doubling
from toolkit.models import ModelSpec, SharedBase, load_model
from toolkit.rewards import RewardAdapter
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import PPOConfig

PROMPTS = [[1, 4, 9, 7], [1, 30, 31, 32, 33, 34], [1, 5, 6], [1, 20, 21, 22, 23]]
RESPONSES = [[12, 13, 2], [9, 9, 8, 8, 7, 7], [20, 30, 21, 2], [5, 2]]  # one has no end
SCORES = torch.tensor([1.0, -1.0, 0.5, 2.0])


def dataset(copies: int = 4) -> Dataset:
    return Dataset.from_dict({"input_ids": PROMPTS * copies, "number": list(range(len(PROMPTS) * copies))})


def config(folder: Path | str, **changes: Any) -> PPOConfig:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_ppo_epochs": 1,
        "max_steps": 2,
        "response_length": 6,
        "temperature": 0.8,
        "learning_rate": 1e-3,
        "kl_coef": 0.1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return PPOConfig(**{**settings, **changes})


def rollout(responses: list[list[int]], prompts: list[list[int]] = PROMPTS) -> Rollout:
    tokenizer = doubling.tokenizer()
    return Rollout(
        prompts=tokenizer.batch_decode(prompts),
        responses=tokenizer.batch_decode(responses, skip_special_tokens=True),
        prompt_ids=prompts,
        response_ids=responses,
        ended=[2 in r for r in responses],
        columns={"number": list(range(len(prompts)))},
    )


def trainer(folder: Path | str, base: SharedBase | None = None, reward: Any = None, **changes: Any) -> PPOTrainer:
    args = config(folder, **changes)
    base = base or shared_base(value=args.value)
    tokenizer = doubling.tokenizer()
    reward = reward or RewardAdapter(base, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    return PPOTrainer(args, tokenizer, base, reward, dataset(), dataset(1), callbacks=[])


def weights(ours: PPOTrainer) -> list[torch.Tensor]:
    """Copies of what is trained."""
    return [p.detach().clone() for p in ours.roles.trained_parameters]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def count_reward(token: int) -> Any:
    """Scores the share of one token in a response."""
    return lambda rollout: torch.tensor([ids.count(token) / len(ids) for ids in map(list, rollout.response_ids)])


class Counting:
    """A reward that changes as it goes: the number of its call. Its state is handed out as it is, and not copied."""

    def __init__(self):
        self.state = {"calls": 0}

    @property
    def calls(self):
        return self.state["calls"]

    def __call__(self, rollout):
        self.state["calls"] += 1
        return [float(self.calls)] * len(rollout)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state.update(state)


_OWN = {
    "llama": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "initializer_range": 0.3, "classifier_dropout": 0.1,
    },
    # As OPT-350M: hidden states are projected to another size.
    "opt": {
        "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "init_std": 0.3, "do_layer_norm_before": False,
    },
}  # fmt: skip


def own_classifier(kind: str, *, labels: int = 1, tokenizer: Any = None, dtype: str = "float32", **changes: Any) -> Any:
    """A random sequence classifier for the ids of `tokenizer`, of the doubling task if None."""
    values = {"max_position_embeddings": 64, **_OWN[kind], **changes}
    settings = {"tokenizer": tokenizer or doubling.tokenizer(), "num_labels": labels, "device": torch.device("cpu")}
    torch.manual_seed(0)
    return load_model(ModelSpec(config=values, dtype=dtype), "sequence_classifier", **settings)
