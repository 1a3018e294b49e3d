"""Llamas with random weights, for measuring time and memory, which do not depend on the weights' values.

`random_llama` is built in NF4 on the device. It never exists in 16 bits as a whole: each linear layer is filled on the
device and quantised there before the next one, so that a machine needs neither a checkpoint nor the memory of one.
`save_slice` is a checkpoint of two layers of the true width, where a machine's memory does not hold all of them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.start import nf4
from toolkit.models import quantize_outline

# The configuration of Llama-3.1-8B, from its checkpoint's config.json.
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# The same code on a CPU in seconds; an NF4 block is 64 weights.
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 500,
    "eos_token_id": 501,
}
_STD = 0.02  # LlamaConfig.initializer_range


def _quantised(layer: Linear4bit, weights: torch.Tensor) -> Params4bit:
    """Weights for a layer, quantised as `from_pretrained` quantises them."""
    found = Params4bit(
        weights,
        requires_grad=False,
        blocksize=layer.weight.blocksize,
        compress_statistics=layer.weight.compress_statistics,
        quant_type=layer.weight.quant_type,
        quant_storage=layer.weight.quant_storage,
        module=layer,
    )
    return found.to(weights.device)  # here bitsandbytes quantises it


def outline(config: LlamaConfig) -> LlamaForCausalLM:
    """All names and shapes of the model in bfloat16, and no weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def random_llama(values: dict[str, Any], device: torch.device) -> LlamaForCausalLM:
    """The model of these arguments of `LlamaConfig`, frozen, in the form that `load_base` gives: linear layers in NF4,
    all else in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(**values)
    model = outline(config)
    quantize_outline(model, nf4())
    noise = partial(torch.randn, dtype=torch.bfloat16, device=device)
    # Smaller where a layer writes to the residual stream, as GPT-2's are: rounding of one layer would else be so much
    # in the last that a base is not known by what it gives.
    of_residuals = _STD / (2 * config.num_hidden_layers) ** 0.5
    for place, module in model.named_modules():
        if isinstance(module, Linear4bit):
            std = of_residuals if place.endswith(("o_proj", "down_proj")) else _STD
            module.weight = _quantised(module, std * noise(module.out_features, module.in_features))
            module.support_avx512bf16_for_cpu = False  # as in `load_base`: its packed layout has no gradients
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = parameter.shape
            norm = len(shape) == 1
            data = torch.ones(shape, dtype=torch.bfloat16, device=device) if norm else _STD * noise(shape)
            setattr(module, name, torch.nn.Parameter(data, requires_grad=False))
    # Its buffers are computed in the constructor, which on the meta device computes nothing.
    with device:
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.requires_grad_(False)


def save_slice(folder: Path, tokenizer: PreTrainedTokenizerBase, values: dict[str, Any]) -> None:
    """Write a checkpoint in bfloat16 with two layers of these arguments of `LlamaConfig`, random weights, and a
    tokenizer of a smaller vocabulary, whose special tokens are the model's."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(**{**values, **special, "num_hidden_layers": 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def id_tokenizer(values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the ids themselves: the trainer asks for one, and no text is read here."""
    vocabulary = {str(i): i for i in range(values["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    eos = values["eos_token_id"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=str(values["bos_token_id"]), eos_token=str(eos), pad_token=str(eos + 1)
    )
    tokenizer.padding_side = "left"
    return tokenizer
