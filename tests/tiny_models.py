"""Tiny models, built in memory: no test needs a hub."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from toolkit.data import doubling
from toolkit.models import SharedBase, load_base
from toolkit.trainers.trl_compat import HAS_PPO

needs_trl_loop = pytest.mark.skipif(not HAS_PPO, reason="the loop of TRL is in its releases up to 1.12")
VOCABULARY = len(doubling.VOCABULARY)
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large, so that adapters and positions matter
}


_TINY = {
    "llama": (LlamaForCausalLM, LlamaConfig, _LLAMA_LIKE),
    "mistral": (MistralForCausalLM, MistralConfig, {**_LLAMA_LIKE, "sliding_window": 32}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _LLAMA_LIKE),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3},
    ),
    # As OPT-350M: the hidden states are projected to another size before lm_head.
    "opt": (
        OPTForCausalLM,
        OPTConfig,
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 16,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "init_std": 0.3,
            "do_layer_norm_before": False,
        },
    ),
}
ARCHITECTURES = tuple(_TINY)


def tiny_model(architecture: str = "llama", *, size: int = 32, layers: int = 2) -> PreTrainedModel:
    """A random float32 model of a few thousand weights. NF4 needs a size of 64 or more, the length of its blocks."""
    torch.manual_seed(0)
    model, config, settings = _TINY[architecture]
    wide = {name: settings[name] * size // 32 for name in ("hidden_size", "word_embed_proj_dim") if name in settings}
    depth = {name: layers for name in ("num_hidden_layers", "n_layer") if name in settings}
    return model(config(**{**settings, **wide, **depth}, **SPECIAL)).eval()


def lora(r: int = 4, **arguments: object) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=r, lora_alpha=2 * r, target_modules="all-linear", **arguments)


def randomize(base: SharedBase, *roles: str, seed: int = 1) -> SharedBase:
    """Give adapters and heads non-zero weights: a fresh LoRA changes nothing, and so would hide everything."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for role in roles:
            for parameter in base.parameters_of(role):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return base


def in_nf4(folder: Path, dtype: str = "float32", **settings: Any) -> PreTrainedModel:
    """A tiny model from a folder, where it is saved if it is not there, in 4 bits that are unpacked to a precision."""
    if not folder.exists():
        tiny_model(size=128).half().save_pretrained(folder)  # so that all precisions quantise the same numbers
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return load_base(str(folder), dtype=dtype, quantization=quantization, **settings)


def saved_base(
    folder: Path,
    dtype: str = "float32",
    *,
    kind: str | bool = "nf4",
    compute: str | torch.dtype | None = None,
    double: bool = False,
    size: int = 64,
    card: bool = False,
    roles: Iterable[str] = (),
) -> SharedBase:
    """On a tiny model from a folder, where it is saved if it is not there; in 4 bits of a kind, or in none if False."""
    if not (folder / "config.json").exists():
        tiny_model(size=size).save_pretrained(folder)
    settings = {"bnb_4bit_compute_dtype": compute, "bnb_4bit_use_double_quant": double}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, **settings) if kind else None
    device = None if card else torch.device("cpu")  # None: on a card where there is one
    base = SharedBase(load_base(str(folder), device=device, dtype=dtype, quantization=quantization))
    for role in roles:
        base.add_role(role, lora())
        randomize(base, role)
    return base


_MADE: dict[Any, tuple[SharedBase, torch.Tensor]] = {}


def made_once(name: Any, make: Callable[[], SharedBase]) -> SharedBase:
    """A base that is made once in a process and copied for each who asks: to try one takes longer. torch's random state
    is then as making it leaves it, by seeds of its own."""
    key = name, torch.get_default_device()
    if key not in _MADE:
        _MADE[key] = make(), torch.get_rng_state()
    made, state = _MADE[key]
    torch.set_rng_state(state)
    return copy.deepcopy(made)


def shared_base(
    model: PreTrainedModel | None = None,
    *,
    value: str = "separate",
    labels: int = 1,
    architecture: str = "llama",
    fresh: bool = False,
) -> SharedBase:
    """All four roles on a tiny model, with non-zero weights unless `fresh`. Without a model it is `made_once`."""
    if model is None:
        settings = {"value": value, "labels": labels, "fresh": fresh}
        return made_once((architecture, *settings.values()), lambda: shared_base(tiny_model(architecture), **settings))
    base = SharedBase(model)
    base.add_role("policy", lora())
    base.add_role("reference")
    base.add_role("value", lora() if value == "separate" else None)
    base.add_role("reward", lora(), num_labels=labels)
    if not fresh:
        randomize(base, "policy", "value", "reward")
    base.train_roles("policy", "value")
    return base
