"""Load the base model that all roles share, or build one with random weights."""

import inspect
import math
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import nn
from transformers import (
    CONFIG_MAPPING,
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
from transformers.quantizers import AutoHfQuantizer

from toolkit.errors import ModelError


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _not_found(path: str, error: Exception) -> ModelError:
    kind = "folder" if Path(path).exists() or path.startswith((".", "/", "~")) else "folder or hub id"
    reason = str(error).splitlines()[0]
    if kind == "folder" and not Path(path).expanduser().exists():
        reason = "there is no such folder."
    elif Path(path).expanduser().is_file():
        reason = "it is a file; a checkpoint is a folder with config.json and safetensors, and GGUF is none."
    elif Path(path, "adapter_config.json").expanduser().is_file() and not Path(path, "config.json").is_file():
        return ModelError(
            f'base.model: "{path}" is a PEFT adapter and no whole model. Name it with start.policy={path}, and the '
            "base that it was trained on with base.model=…."
        )
    return ModelError(
        f'base.model: no checkpoint could be loaded from the {kind} "{path}" ({reason}) '
        "Name a local checkpoint with MODEL=/path/to/checkpoint (make) or base.model=/path/to/checkpoint."
    )


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The checkpoint's configuration.

    Raises:
        ModelError: there is none, or it is not that of a decoder-only language model of text.
    """
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _not_found(path, error) from error
    parts = [name for name in ("text_config", "vision_config", "audio_config") if getattr(config, name, None)]
    if parts:
        raise ModelError(
            f'base.model: "{path}" is of type {config.model_type}, with {" and ".join(parts)}: multimodal models are '
            "not supported. Name a checkpoint of text alone."
        )
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
        ModelError: no such checkpoint, one that lacks weights, or not a decoder-only language model.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            quantization_config=quantization,
            dtype=getattr(torch, dtype),
            revision=revision,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            device_map={"": device or default_device()},
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise _not_found(path, error) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(
            f'base.model: "{path}" has no weights for {", ".join(missing[:3])}{" and others" * (len(missing) > 3)}, '
            "where the model would be random. Download or convert it again."
        )
    keep_differentiable(model)
    return model.requires_grad_(False)


def keep_differentiable(model: nn.Module) -> None:
    """Keep 4-bit layers on a CPU in the layout that has gradients.

    In eval mode on a CPU with AVX512-BF16 bitsandbytes repacks a layer's weights for a kernel outside autograd, for
    good: every later backward pass through the layer would leave out the base's part of the gradient, with nothing but
    a warning. The packed layout is about a quarter faster at decoding and slower in whole forward passes.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def random_config(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, place: str = "base.config"
) -> PreTrainedConfig:
    """The configuration of a model with random weights.

    Args:
        config: `model_type` and that configuration's own arguments; vocabulary and special tokens come
            from the tokenizer.
        tokenizer: the one that the model is to be used with.
        place: where a recipe says it, for messages.

    Raises:
        ModelError: transformers knows no such `model_type` or setting of it, or refuses an argument.
    """
    _check_settings(config, place)
    arguments = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **config,
    }
    try:
        return AutoConfig.for_model(**arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{place}: transformers cannot build this model: {error}") from error


# Taken by every configuration, or turned into another setting of it, without standing in its signature.
_COMMON_SETTINGS = ("model_type", "num_labels", "rope_theta", "rope_scaling")


def _check_settings(config: dict[str, Any], place: str) -> None:
    """transformers takes any key: a mistyped one would be kept, and the default used, without a word."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return  # `AutoConfig` says so
    owner = CONFIG_MAPPING[kind]
    known = [*inspect.signature(owner).parameters, *owner.attribute_map, *_COMMON_SETTINGS]
    for key in config:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.6)
            raise ModelError(
                f"{place}.{key}: a model of type {kind} has no such setting."
                + (f" Did you mean {near[0]}?" if near else " Remove it.")
            )


def build_base(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, dtype: str = "float32"
) -> PreTrainedModel:
    """A causal language model with random weights, trainable, for pretraining.

    Args:
        config: as for `random_config`.
        tokenizer: the one that the model is to be used with.
        dtype: of the weights.

    Raises:
        ModelError: transformers knows no such `model_type`, or refuses an argument.
    """
    try:
        model = AutoModelForCausalLM.from_config(random_config(config, tokenizer), dtype=getattr(torch, dtype))
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"base.config: transformers cannot build this model: {error}") from error
    return model.to(default_device())


def outline(config: PreTrainedConfig, *, dtype: str = "bfloat16", **arguments: Any) -> PreTrainedModel:
    """The model of a configuration on the meta device: all names and shapes, and no weights.

    Args:
        config: from `load_config` or `random_config`.
        dtype: of the weights.
        arguments: further ones of `from_config`: `attn_implementation`, `trust_remote_code`.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **arguments)
    except (TypeError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"base: transformers cannot build this model: {error}") from error


def weight_bytes(model: PreTrainedModel, quantization: BitsAndBytesConfig | None) -> int:
    """Bytes that the weights will take once they are loaded.

    Args:
        model: from `outline`. Its linear layers are replaced by quantised ones, as loading replaces them.
        quantization: as for `load_base`.
    """
    size = model.dtype.itemsize
    if quantization is not None:
        AutoHfQuantizer.from_config(quantization, pre_quantized=False).preprocess_model(model, device_map=None)
    total = sum(parameter.numel() * size for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, (Linear4bit, Linear8bitLt)):
            total += _quantised_bytes(module) - module.weight.numel() * size
    return total


def _quantised_bytes(module: nn.Linear) -> int:
    weights = module.in_features * module.out_features
    if not isinstance(module, Linear4bit):
        return weights + 4 * module.out_features  # a byte a weight, a float32 scale a row
    blocks = math.ceil(weights / module.weight.blocksize)
    # One scale a block: float32, or a byte and in turn a float32 for every 256 of these.
    scales = blocks + 4 * math.ceil(blocks / 256) if module.weight.compress_statistics else 4 * blocks
    return math.ceil(weights / 2) + scales


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
