"""A sequence classifier on a base of its own: loaded or built, given LoRA, saved and read back.

transformers' own classes pool as they do everywhere: decoders at the last token that is not the padding token, encoders
such as BERT at the first one. What is written here is what `AutoModelForSequenceClassification.from_pretrained`, or for
LoRA `AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=…)`, loads.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_NAME

from toolkit.errors import ModelError
from toolkit.models.base import default_device, keep_differentiable, random_config

HEAD_NAMES = ("score", "classifier")
"""What transformers calls the head of a sequence classifier."""
_FRESH = (*HEAD_NAMES, "pre_classifier", "pooler")  # parts of a classifier that a checkpoint of another kind lacks


def classifier_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_labels: int,
    model: str | None = None,
    config: dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    place: str = "reward_model",
) -> PreTrainedConfig:
    """The configuration of a classifier that reads the ids of `tokenizer`.

    Args:
        tokenizer: the policy's. Its padding token is the classifier's.
        num_labels: outputs of the head.
        model: hub id or folder of the base.
        config: in place of `model`, as for `random_config`.
        revision: of a hub id.
        trust_remote_code: run code that comes with the checkpoint.
        place: what a recipe calls this model, for messages.

    Raises:
        ModelError: there is no such checkpoint or configuration, none for sequence classification, or its tokenizer is
            another one.
    """
    if model is None:
        found = random_config(dict(config or {}), tokenizer, place=f"{place}.config")
    else:
        arguments: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            found = AutoConfig.from_pretrained(model, **arguments)
        except (OSError, ValueError) as error:
            raise not_loaded(place, model, error) from error
        check_same_tokenizer(model, tokenizer, place=place, **arguments)
    if type(found) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not trust_remote_code:
        raise ModelError(
            f"{place}: transformers has no sequence classifier for models of type {found.model_type}. "
            "Use a type that has one, such as Llama, OPT, GPT-2 or BERT."
        )
    if found.get_text_config().vocab_size < len(tokenizer):
        raise ModelError(
            f"{place}: the model has {found.get_text_config().vocab_size} tokens and the tokenizer of base "
            f"{len(tokenizer)}. Name a model that knows them all."
        )
    found.get_text_config().pad_token_id = tokenizer.pad_token_id
    found.num_labels = num_labels
    return found


def check_same_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, *, place: str, **arguments: Any) -> None:
    """Nothing, if the checkpoint's tokenizer gives the ids that `tokenizer` gives.

    Raises:
        ModelError: it has another one, or none.
    """
    try:
        own = AutoTokenizer.from_pretrained(path, **arguments)
    except (OSError, ValueError) as error:
        raise not_loaded(place, path, error) from error
    differ = set(own.get_vocab().items()) ^ set(tokenizer.get_vocab().items())
    if differ:
        raise ModelError(
            f'{place}.model: "{path}" has another tokenizer than base ({len(differ)} entries differ), and it is to '
            "read the ids of base. Name a model with the same one, or score by a model trained elsewhere, on its own "
            "text: scorer.kind=model with scorer.model."
        )


def not_loaded(place: str, path: str, error: Exception) -> ModelError:
    """What to raise where a checkpoint cannot be loaded."""
    reason = str(error).splitlines()[0]
    return ModelError(
        f'{place}.model: no base for a classifier could be loaded from "{path}" ({reason}) Name a folder or hub id '
        "with safetensors weights and a tokenizer."
    )


def load_classifier(
    config: PreTrainedConfig,
    path: str | None = None,
    *,
    quantization: BitsAndBytesConfig | None = None,
    dtype: str = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    place: str = "reward_model",
    trained: bool = False,
) -> PreTrainedModel:
    """A classifier with a fresh head on a checkpoint, or with random weights all over.

    Args:
        config: from `classifier_config`.
        path: hub id or folder of the base; None for random weights.
        quantization: as for `from_pretrained`.
        dtype: of the weights that are not quantised.
        revision: of a hub id.
        attn_implementation: as for `from_pretrained`.
        trust_remote_code: run code that comes with the checkpoint.
        device: defaults to the first GPU, else the CPU.
        place: what a recipe calls this model, for messages.
        trained: whether the checkpoint is of a classifier, whose head has to be there too.

    Raises:
        ModelError: no such checkpoint, one that lacks weights, or transformers cannot build the model.
    """
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    try:
        if path is None:
            model = AutoModelForSequenceClassification.from_config(config, **arguments)
            return model.to(device or default_device())
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            quantization_config=quantization,
            revision=revision,
            use_safetensors=True,
            device_map={"": device or default_device()},
            output_loading_info=True,
            **arguments,
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise not_loaded(place, path or str(config.model_type), error) from error
    fresh = () if trained else _FRESH
    missing = [key for key in sorted(report["missing_keys"]) if not set(fresh) & set(key.split("."))]
    if missing:
        raise ModelError(
            f'{place}.model: "{path}" has no weights for {", ".join(missing[:3])}{" and others" * (len(missing) > 3)}, '
            "where the model would be random. Download, convert or train it again."
        )
    keep_differentiable(model)
    return model


def classifier_outline(config: PreTrainedConfig, *, dtype: str, **arguments: Any) -> PreTrainedModel:
    """The classifier of a configuration on the meta device: all names and shapes, and no weights.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, dtype=getattr(torch, dtype), **arguments)
    except (TypeError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"reward_model: transformers cannot build this model: {error}") from error


def head_name(model: nn.Module) -> str:
    """What the model calls its head.

    Raises:
        ModelError: neither `score` nor `classifier`.
    """
    for name in HEAD_NAMES:
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise ModelError(
        f"reward_model: the head of a {type(model).__name__} is called neither {' nor '.join(HEAD_NAMES)}. "
        "Use another base."
    )


def check_reads_tokens(model: PreTrainedModel | PeftModel) -> None:
    """Nothing, if the head of a classifier can be read at every token.

    Raises:
        ModelError: it is read off the whole sequence, as BERT's is.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if head_name(inner) != "score":
        raise ModelError(
            f"reward.loss: token_level reads the head at every token, and that of a {type(inner).__name__} reads the "
            "whole sequence at once. Use bradley_terry, or a decoder such as Llama, OPT or GPT-2."
        )


def classifier_token_scores(model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The head of a decoder with one output at every token: float32 (B, L).

    Args:
        model: passes `check_reads_tokens`.
        input_ids: int64 (B, L), padded on the right.
        attention_mask: (B, L), 1 at real tokens.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    states = inner.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    scores: Tensor = inner.score(states)
    return scores.squeeze(-1)


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """A LoRA adapter on the classifier, whose head trains with it; both in float32, the base frozen.

    Raises:
        ModelError: the configuration names no module of this base.
    """
    config = copy.deepcopy(config)
    config.task_type, config.modules_to_save = "SEQ_CLS", [head_name(model)]
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"adapters.reward: {str(error).splitlines()[0]}") from error
    assert isinstance(adapted, PeftModel)
    return adapted


def train_in_float32(model: PreTrainedModel | PeftModel) -> None:
    """What trains is float32: in 16 bits the small steps of AdamW round to nothing, and neighbouring scores are equal.

    The head also computes in it, whatever an autocast region or the base computes in.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    head_in_float32(model)


def head_in_float32(model: PreTrainedModel | PeftModel) -> None:
    """Make the classifier's head compute in float32, as `ScoreHead` does."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    head = getattr(inner, head_name(inner))
    if isinstance(head, ModulesToSaveWrapper):
        head = head.modules_to_save["default"]
    head.float()
    plain = type(head).forward

    @functools.wraps(plain)
    def forward(hidden: Tensor, *arguments: Any, **named: Any) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return plain(head, hidden.float(), *arguments, **named)

    head.forward = forward


def save_classifier(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write the model, or its adapter and head where it has one, with the tokenizer: an ordinary checkpoint folder."""
    folder = Path(folder)
    if isinstance(model, PeftModel):
        # "auto" would ask the hub whether the vocabulary grew; it cannot, the base is frozen.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_classifier_weights(model: PreTrainedModel | PeftModel, folder: str | Path) -> None:
    """Put the weights that `save_classifier` wrote into a model of the same form.

    Raises:
        ModelError: the folder holds none, or those of another model.
    """
    folder = Path(folder)
    name = SAFETENSORS_WEIGHTS_NAME if isinstance(model, PeftModel) else SAFE_WEIGHTS_NAME
    try:
        if not isinstance(model, PeftModel):
            load_model(model, folder / name)
            return
        result = set_peft_model_state_dict(model, load_file(folder / name))
        missing = [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{folder / name} does not fit this model: {str(error).splitlines()[0]}") from error
    if missing:
        raise ModelError(f"{folder / name} does not fit this model: it has no weights for {missing[0]}.")
