"""Load the base model that all roles share, or build one with random weights."""

from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit.errors import ModelError


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _not_found(path: str, error: Exception) -> ModelError:
    kind = "folder" if Path(path).exists() or path.startswith((".", "/", "~")) else "folder or hub id"
    reason = str(error).splitlines()[0]
    return ModelError(
        f'base.model: no checkpoint could be loaded from the {kind} "{path}" ({reason}) '
        "Name a local checkpoint with MODEL=/path/to/checkpoint (make) or base.model=/path/to/checkpoint."
    )


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The checkpoint's configuration.

    Raises:
        ModelError: there is none, or it is not that of a decoder-only language model.
    """
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _not_found(path, error) from error
    if config.is_encoder_decoder or (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code):
        raise ModelError(
            f'base.model: "{path}" is of type {config.model_type}, which is not a decoder-only language model. '
            "PPO here needs one, such as Llama, Mistral, Qwen, GPT-2 or OPT."
        )
    return config


def load_base(
    path: str,
    *,
    quantization: BitsAndBytesConfig | None = None,
    dtype: str = "bfloat16",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal language model, frozen, from a hub id or a local folder.

    Args:
        path: hub id or folder with safetensors weights.
        quantization: as for `from_pretrained`; NF4 works on a CPU too. None loads the weights as they are.
        dtype: of the weights that are not quantised.
        revision: of a hub id.
        attn_implementation: as for `from_pretrained`.
        trust_remote_code: run code that comes with the checkpoint. Off unless the user says so.
        device: defaults to the first GPU, else the CPU.

    Raises:
        ModelError: no such checkpoint, or not a decoder-only language model.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            quantization_config=quantization,
            dtype=getattr(torch, dtype),
            revision=revision,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            device_map={"": device or default_device()},
        )
    except (OSError, ValueError) as error:
        raise _not_found(path, error) from error
    _keep_differentiable(model)
    return model.requires_grad_(False)


def _keep_differentiable(model: nn.Module) -> None:
    """Keep 4-bit layers on a CPU in the layout that has gradients.

    In eval mode on a CPU with AVX512-BF16 bitsandbytes repacks a layer's weights for a kernel outside autograd, for
    good: every later backward pass through the layer would leave out the base's part of the gradient, with nothing but
    a warning. The packed layout is about a quarter faster at decoding and slower in whole forward passes.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def build_base(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, dtype: str = "float32"
) -> PreTrainedModel:
    """A causal language model with random weights, trainable, for pretraining.

    Args:
        config: `model_type` and that configuration's own arguments; vocabulary and special tokens come
            from the tokenizer.
        tokenizer: the one that the model is to be used with.
        dtype: of the weights.

    Raises:
        ModelError: transformers knows no such `model_type`, or refuses an argument.
    """
    arguments = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **config,
    }
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**arguments), dtype=getattr(torch, dtype))
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"base.config: transformers cannot build this model: {error}") from error
    return model.to(default_device())


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, left-padding; one without a pad token pads with its end-of-sequence token.

    That is safe here, where no mask is made from pad ids.

    Raises:
        ModelError: there is no tokenizer, or it has no end-of-sequence token, without which no response ends.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _not_found(path, error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f'base.model: the tokenizer of "{path}" has no eos_token, so that no response could end.')
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def neutral_generation_config(tokenizer_or_config: Any) -> GenerationConfig:
    """A generation configuration that holds special tokens and nothing else.

    transformers fills what a caller leaves open from the checkpoint's own settings; a repetition penalty
    from there would make the sampled distribution differ from the one that PPO trains.
    """
    return GenerationConfig(
        bos_token_id=tokenizer_or_config.bos_token_id,
        eos_token_id=tokenizer_or_config.eos_token_id,
        pad_token_id=tokenizer_or_config.pad_token_id,
    )


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout of a base model to 0, in place.

    A frozen base has nothing to regularise, and dropout between rollout and update would make the ratio
    differ from 1 before the first step. The adapters' own dropout comes later and is not touched.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout"):  # used as F.dropout(p=self.dropout)
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
