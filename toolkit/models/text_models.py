"""The text model of a checkpoint that has further parts, such as one for images: its configuration and its names."""

import re
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import PrefixChange

from toolkit.errors import ModelError

_PARTS = ("text_config", "vision_config", "audio_config")
_SKIPPED = "llm_int8_skip_modules"
_PREFIX = re.compile(r"\blanguage_model\.")  # of the text model's layers, among those of other parts


def config_of_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """What `AutoModelForCausalLM` reads such a checkpoint by: the text model's, as for Qwen3.5; of any other the same.

    So for every type whose class there is that of its text model, if that has a type of its own in the same table: else
    (Llama 3.2 Vision, Emu3) what is saved of it could not be loaded again. Of these types the weights fit, too.
    """
    if not _has_type_of_its_own(config):
        return config
    text = config.text_config
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "config_class", None) is not type(text):
        return config
    for name in ("_commit_hash", "name_or_path"):
        setattr(text, name, getattr(config, name, None))
    if (saved := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = _with_names_of_text(saved)
    return text


def _has_type_of_its_own(config: PreTrainedConfig) -> bool:
    return type(getattr(config, "text_config", None)) in MODEL_FOR_CAUSAL_LM_MAPPING


def _with_names_of_text(saved: Any) -> Any:
    """The settings of a quantised checkpoint, whose modules that are left whole are also named as in the text model:
    transformers 5.23 fails where they are not."""
    skipped = saved.get(_SKIPPED) if isinstance(saved, dict) else None
    if not skipped:
        return saved
    return {**saved, _SKIPPED: [*dict.fromkeys([*skipped, *(_PREFIX.sub("", name) for name in skipped)])]}


def check_text_alone(config: PreTrainedConfig, model: str) -> None:
    """Nothing, if a configuration, as `config_of_text` gives it, has no part beside text; else a `ModelError`."""
    parts = [name for name in _PARTS if getattr(config, name, None)]
    if not parts:
        return
    wrong = f'"{model}" is of type {config.model_type}, with {" and ".join(parts)}: multimodal models are not '
    wrong += "supported."
    remedy = "Name a checkpoint of text alone."
    if _has_type_of_its_own(config):
        remedy = "Name a checkpoint of text alone, or write one of its text model: docs/architectures.md says how."
    raise ModelError(wrong, field="model", remedy=remedy)


def save_without_prefix(model: PreTrainedModel) -> None:
    """Let a text model be saved by its own names, and not by those that its layers have in a checkpoint with others."""
    used = getattr(model, "_weight_conversions", None) or []  # by transformers, which turns them round
    kept = [one for one in used if not (isinstance(one, PrefixChange) and one.prefix_to_remove)]
    if len(kept) < len(used):
        model._weight_conversions = kept
