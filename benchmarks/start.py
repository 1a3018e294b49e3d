"""What every contender starts from: its job, its adapters' shape, and weights that are equal in all.

It imports nothing that an environment with another framework in the place of TRL lacks.
"""

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.work import Work
from toolkit.models import quantization_config

RANK = 16
MOVED = 0.02
"""The size of each adapter's B: with it policy and reference, and each role and the base, say different things."""
LEARNING_RATE = 1e-5
PRECISIONS = {"bfloat16": "bf16", "float32": "float32"}
"""In which contenders run, and what the tables call them."""


@dataclass(frozen=True)
class Job:
    """What a contender is built for.

    Args:
        model: folder of the checkpoint.
        work: prompts and responses.
        tokenizer: from `padding_tokenizer`.
        folder: for whatever a trainer writes.
        updates: how many will be run.
        dtype: in which the base is loaded and computed; of one in NF4, in which it is computed.
        learning_rate: 0 to leave the weights as they are.
    """

    model: str
    work: Work
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    updates: int
    dtype: str = "bfloat16"
    learning_rate: float = LEARNING_RATE


@dataclass(frozen=True)
class Built:
    """A trainer that is ready to run.

    Args:
        trainer: ours or TRL's.
        generator: the model whose `generate` it calls in the end.
        policy: the policy's trained parameters.
        value_head: weight (1, H) of the value role's head.
    """

    trainer: Any
    generator: PreTrainedModel
    policy: list[nn.Parameter]
    value_head: Tensor


def nf4(dtype: str = "bfloat16") -> BitsAndBytesConfig:
    values = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return quantization_config(values, dtype)


def lora(task_type: str = "CAUSAL_LM") -> LoraConfig:
    return LoraConfig(task_type=task_type, r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


@torch.no_grad()
def seed_adapter(parameters: Iterable[tuple[str, nn.Parameter]], role: str, *, moved: float = 0.0) -> None:
    """Give an adapter values that depend on the role and the layer's place alone.

    Args:
        parameters: by name, of this adapter only.
        role: "policy", "value" or "reward"; a value's are the policy's, so that one on that adapter does the same.
        moved: the size of B's; where it is 0, as before training, the role does what the base does.
    """
    whose = "policy" if role == "value" else role
    for name, parameter in parameters:
        place = re.search(r"(layers\.\d+\..+)\.lora_([AB])\b", name)
        if place:
            of_b = "" if place[2] == "A" else ".B"
            noise = torch.randn(parameter.shape, generator=_generator(f"{whose}.{place[1]}{of_b}"))
            parameter.copy_(noise * moved if of_b else noise / parameter.shape[1] ** 0.5)


@torch.no_grad()
def seed_head(weight: Tensor, role: str) -> None:
    """Give a head values that bfloat16 can hold: stock TRL's is in that precision, ours in float32."""
    noise = 0.02 * torch.randn(weight.shape, generator=_generator(f"{role}.head"))
    weight.copy_(noise.bfloat16())
