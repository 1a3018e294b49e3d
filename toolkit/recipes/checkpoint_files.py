"""What the files of a checkpoint say before their weights are read."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BitsAndBytesConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from toolkit.errors import ModelError

# Settings by which models of transformers scale or cap what comes from lm_head. None and 1 change nothing.
_LOGIT_SETTINGS = (
    "final_logit_softcapping",  # Gemma
    "logits_soft_cap",  # RecurrentGemma
    "logit_scale",  # Cohere
    "logits_scaling",  # Granite, HyperCLOVA X, MiniCPM3
    "lm_head_multiplier",  # Falcon H1
)


def check_logit_settings(config: Any) -> None:
    """As far as a configuration tells: the logits are what `lm_head` gives. A run compares them at its start.

    Raises:
        ModelError: a setting of the model changes them.
    """
    # MPT's logit_scale is read by nothing, and what code beside a checkpoint does with a setting is not known.
    if config.model_type == "mpt" or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    own = inspect.signature(type(config)).parameters  # any other key of a config.json has no effect
    for name in _LOGIT_SETTINGS:
        value = getattr(config, name, None) if name in own else None
        if value is not None and value != 1:
            raise ModelError(
                f"a model of type {config.model_type} changes its logits after lm_head ({name} is {value}), which the "
                "log-probabilities here do not follow. Llama, Mistral, Qwen, GPT-2 and OPT do not."
            )


def own_quantization(config: Any) -> BitsAndBytesConfig | None:
    """That of a checkpoint which is quantised already."""
    saved = getattr(config, "quantization_config", None)
    ours = isinstance(saved, dict) and saved.get("quant_method") == "bitsandbytes"
    return BitsAndBytesConfig.from_dict(saved) if ours else None


def precision_name(quantization: BitsAndBytesConfig | None, dtype: str) -> str:
    """As `check` and a reader say it."""
    if quantization is None:
        return dtype
    if not quantization.load_in_4bit:
        return f"8 bits and {dtype}"
    double = " with double quantisation" if quantization.bnb_4bit_use_double_quant else ""
    return f"{quantization.bnb_4bit_quant_type}{double} and {dtype}"


def weight_file_problems(folder: Path) -> Iterator[str]:
    """Weights that are missing or cut short, by their headers."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{index} cannot be read ({error}). Download it again."
            return
    for name in names:
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing: weights are read from safetensors alone. Download or convert the checkpoint."
            continue
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            yield f"{path} is damaged ({error}). Download it again."
