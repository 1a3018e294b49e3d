"""Models from a checkpoint or a configuration: with weights, or on the meta device as names and shapes alone."""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit.errors import ModelError, ToolkitError, did_you_mean
from toolkit.models.attention import without_cudnn_attention
from toolkit.models.bits import (
    cast_what_is_not_quantised,
    keep_layout,
    own_quantization,
    quantising_told,
    quantize_outline,
    sparing_heads,
    take_own_bits,
)
from toolkit.models.precision import AUTO, default_device, resolved
from toolkit.models.pretrained import (
    cached_commit,
    check_same_tokenizer,
    check_there,
    check_weights_alone,
    embeddings_needed,
    head_outputs,
    not_loaded,
    quiet_transformers,
    weight_file_problems,
    weights_outline,
)
from toolkit.models.text_models import check_text_alone, config_of_text, save_without_prefix
from toolkit.models.trials import raise_of_the_card

Kind = Literal["causal_lm", "sequence_classifier"]
_OWNERS = {"causal_lm": AutoModelForCausalLM, "sequence_classifier": AutoModelForSequenceClassification}
# Parts of a classifier that a checkpoint of another kind lacks.
_FRESH = {"score", "classifier", "pre_classifier", "pooler"}
# Taken by every configuration, or turned into another setting of it, without standing in its signature.
_COMMON_SETTINGS = ("model_type", "num_labels", "rope_theta", "rope_scaling")
# What transformers and torch raise of a configuration's values.
_REFUSALS = (
    TypeError, ValueError, LookupError, AttributeError, ImportError, ArithmeticError, AssertionError, RuntimeError,
    StrictDataclassError,
)  # fmt: skip
_OF_ATTENTION = re.compile(
    r"attn_implementation|flash.?attention|flex.?attention|scaled.?dot.?product|\bkernels\b", re.IGNORECASE
)
META = torch.device("meta")
MOST_LAYERS = 1000
"""More than any model has: to build a billion would come to no end."""
_LARGEST = 10**8  # size of any model, its vocabulary and positions included


@dataclass(frozen=True)
class ModelSpec:
    """Where a model comes from, and the form that it is loaded in; as for `from_pretrained` where nothing is said."""

    model: str | None = None  # hub id or folder with safetensors weights
    config: Mapping[str, Any] | None = None  # in its place `model_type` and that configuration's own: random weights
    quantization: BitsAndBytesConfig | None = None  # None loads the weights as they are
    dtype: str = AUTO  # of the weights that are not quantised
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.quantization is not None:
            object.__setattr__(self, "quantization", sparing_heads(self.quantization))


def load_model(spec: ModelSpec, kind: Kind = "causal_lm", **settings: Any) -> PreTrainedModel:
    """The model of a spec, its weights trainable. For arguments and errors see `load_with_report`."""
    return load_with_report(spec, kind, **settings)[0]


def load_base(model: str, *, device: torch.device | None = None, **settings: Any) -> PreTrainedModel:
    """A causal language model, frozen, from a hub id or a local folder; `settings` are further ones of `ModelSpec`."""
    return load_model(ModelSpec(model, **settings), device=device).requires_grad_(False)


def load_with_report(
    spec: ModelSpec,
    kind: Kind,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_labels: int | None = None,
    trained: bool = False,
    device: torch.device | None = None,
) -> tuple[PreTrainedModel, bool]:
    """The model of a spec, and whether all of its weights, a head's too, come from a checkpoint; on the meta device as
    far as the headers of a folder's files say so.

    Args:
        tokenizer: whose ids the model reads. Random weights need it; a classifier is checked against it, and pads with
            its padding token. None for a checkpoint that reads the ids of its own.
        num_labels: outputs of a classifier's head; None for what its configuration says.
        trained: whether a classifier's head has to be in the checkpoint too; it is random where it is not.
        device: defaults to the first GPU, else the CPU; "meta" gives names and shapes alone, with the layers that
            quantisation puts there.

    Raises:
        ModelError: no such checkpoint, or one that lacks weights, is of another kind, or reads other tokens.
    """
    without_cudnn_attention()
    config = model_config(spec, kind, tokenizer=tokenizer, num_labels=num_labels)
    device, owner, own = device or default_device(), _OWNERS[kind], own_quantization(config)
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, resolved(spec.dtype)),
        "attn_implementation": spec.attn_implementation,
        "trust_remote_code": spec.trust_remote_code,
    }
    if spec.model is None or device.type == "meta":
        try:
            # Random numbers are drawn on the CPU, so that they are the same wherever the model goes.
            with device if device.type == "meta" else nullcontext():
                model = owner.from_config(config, **arguments).to(device)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            raise _not_built(error, spec, config) from error
        complete = False
        if spec.model is not None:
            report, known = _report_of_headers(model, spec.model)
            _check_complete(spec.model, report, kind, trained=trained)
            complete = known and not report["missing_keys"]
        if device.type == "meta":
            quantize_outline(model, spec.quantization)
        return model, complete
    with _loading(spec), quiet_transformers() if kind == "sequence_classifier" else nullcontext(), quantising_told():
        check_weights_alone(spec.model, config, asks_hub=True)
        model, report = owner.from_pretrained(
            spec.model,
            config=config,
            quantization_config=spec.quantization if own is None else None,
            revision=spec.revision,
            use_safetensors=True,
            device_map={"": device},
            ignore_mismatched_sizes=True,  # reported, where it would be a RuntimeError
            output_loading_info=True,
            **arguments,
        )
    if own is not None:
        cast_what_is_not_quantised(model, arguments["dtype"])
    save_without_prefix(model)
    _check_complete(spec.model, report, kind, trained=trained)
    if not trained:
        keep_layout(model)
    return model, not report["missing_keys"]


@contextmanager
def _loading(spec: ModelSpec) -> Iterator[None]:
    """Inside, what transformers raises where a checkpoint's weights cannot be loaded is a ModelError."""
    assert spec.model is not None
    try:
        yield
    except ToolkitError:
        raise
    except (SafetensorError, FileNotFoundError) as error:  # a file that is cut, or that may not be read
        folder = Path(spec.model).expanduser()
        for problem in weight_file_problems(folder) if folder.is_dir() else ():
            raise ModelError(problem, field="model") from error
        raise not_loaded(spec.model, error) from error
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise (_attention_refused(spec, " ".join(str(error).split())) or not_loaded(spec.model, error)) from error
    except RuntimeError as error:
        raise_of_the_card(error)
        raise _not_put_together(spec.model, error) from error


def _not_put_together(model: str, error: RuntimeError) -> ModelError:
    """What to raise where transformers does not come from a checkpoint's weights to a model."""
    if not Path(model).expanduser().is_dir():  # it may be of what loads them from the hub
        return not_loaded(model, error)
    wrong = f'"{model}": transformers cannot put the model together from its weights: one is missing, or of another '
    first = str(error).strip().partition("\n")[0]
    return ModelError(f"{wrong}shape ({first}).", field="model", remedy="Download or convert it again.")


def _check_complete(model: str, report: Mapping[str, Any], kind: Kind, *, trained: bool) -> None:
    """That all weights of a model come from its checkpoint, by what transformers reports of loading it."""
    fresh = set() if trained or kind == "causal_lm" else _FRESH
    missing = [key for key in sorted(report["missing_keys"]) if not fresh & set(key.split("."))]
    if missing:
        raise ModelError(
            f'"{model}" has no weights for {", ".join(missing[:3])}{" and others" * (len(missing) > 3)}, where '
            "the model would be random.",
            field="model",
            remedy="Download, convert or train it again.",
        )
    if other := sorted((key, list(there), list(asked)) for key, there, asked in report["mismatched_keys"]):
        key, there, asked = other[0]
        wrong = f'"{model}" has weights of another shape than its configuration asks for: {key} is {there}, and '
        wrong += f"{asked} is asked for{' (and others)' * (len(other) > 1)}."
        remedy = "Mend its config.json, or download it again."
        if trained and _FRESH & set(key.split(".")):
            remedy = f"Give it so many classes in its config.json (id2label, num_labels): {there[0]}."
        elif _FRESH & set(key.split(".")):
            remedy = "Name a checkpoint with as many outputs, or a language model, whose head is new."
        raise ModelError(wrong, field="model", remedy=remedy)


def _report_of_headers(model: PreTrainedModel, folder: str) -> tuple[Mapping[str, Any], bool]:
    """What loading a checkpoint's folder would report of its weights, by the headers of its files alone, and whether
    that is known.

    transformers loads names and shapes into a model on the meta device. Where it cannot, as with weights that are
    quantised already, or files are missing, nothing is known.
    """
    unknown: tuple[Mapping[str, Any], bool] = {"missing_keys": (), "mismatched_keys": ()}, False
    quantised = getattr(model.config, "quantization_config", None) is not None
    state = {} if quantised else weights_outline(Path(folder).expanduser())
    if not state:
        return unknown
    try:
        with quiet_transformers():
            report = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=state,
                dtype=model.dtype,
                device_map={"": META},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )[1]
            return report, True
    except Exception:  # of an architecture that wants numbers: the build will say
        return unknown


def model_config(
    spec: ModelSpec,
    kind: Kind = "causal_lm",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_labels: int | None = None,
) -> PreTrainedConfig:
    """The configuration of the model of a spec. For arguments and errors see `load_with_report`."""
    if spec.model is not None:
        code: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
        check_there(spec.model, spec.revision)
        try:
            config = AutoConfig.from_pretrained(spec.model, **code)
        except Exception as error:  # of transformers, as the file has it
            raise not_loaded(spec.model, error, scores=kind == "sequence_classifier") from error
        if getattr(config, "_commit_hash", None) is None:  # transformers 5.23 notes it no more
            config._commit_hash = cached_commit(spec.model, spec.revision)
        check_weights_alone(spec.model, config)
        if kind == "causal_lm":
            config = config_of_text(config)
        take_own_bits(config, spec.model, spec.quantization, spec.dtype)
        if kind == "causal_lm":
            _check_decoder(config, spec)
        elif tokenizer is not None:
            check_same_tokenizer(spec.model, tokenizer, **code)
    else:
        config = _random_config(spec.config or {}, tokenizer)
    _check_size(config, spec)
    if kind == "sequence_classifier":
        _check_classifier(config, spec, tokenizer)
        if tokenizer is not None:
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if num_labels is None and spec.model is not None and config.id2label == PreTrainedConfig().id2label:
            num_labels = head_outputs(spec.model)  # two are what transformers takes where a checkpoint does not say
        if num_labels is not None:
            config.num_labels = num_labels
    return config


def _random_config(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    """That of a model with random weights, with the vocabulary and special tokens of a tokenizer."""
    if tokenizer is None:
        raise ModelError("neither a checkpoint nor a tokenizer for random weights is given.", field="model")
    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:  # which would take any key: a mistyped one be kept, and the default used, without a word
        known = [*inspect.signature(CONFIG_MAPPING[kind]).parameters, *CONFIG_MAPPING[kind].attribute_map]
        for key in config.keys() - {*known, *_COMMON_SETTINGS}:
            wrong, remedy = f"a model of type {kind} has no such setting.", did_you_mean(key, known) or "Remove it."
            raise ModelError(wrong, field=f"config.{key}", remedy=remedy)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        return AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **config})
    except _REFUSALS as error:
        raise _not_built(error, ModelSpec(config=config), config) from error


def _attention_refused(spec: ModelSpec, said: str) -> ModelError | None:
    """What to raise where the attention that is asked for cannot be had, as an error of a library has it."""
    if spec.attn_implementation is None or not _OF_ATTENTION.search(said):
        return None
    wrong = f'"{spec.attn_implementation}" cannot be had here: {said}'
    remedy = "Install what it needs, or leave it out, for what transformers takes by itself."
    return ModelError(wrong, field="attn_implementation", remedy=remedy)


def _not_built(error: Exception, spec: ModelSpec, config: PreTrainedConfig | Mapping[str, Any]) -> ModelError:
    """What to raise where a model cannot be built of its configuration, with the values there that no model has."""
    if isinstance(config, PreTrainedConfig):
        text = config.get_text_config()
        values, size = text.to_diff_dict(), getattr(text, "vocab_size", None)
    else:
        values, size = config, None
    numbers = {name: x for name, x in values.items() if isinstance(x, int) and not isinstance(x, bool)}
    odd = {name: x for name, x in numbers.items() if x < (0 if name.endswith("_id") else 1)}
    if isinstance(size, int):
        odd |= {name: x for name, x in numbers.items() if name.endswith("_token_id") and x >= size}
    large = {name: x for name, x in numbers.items() if x > _LARGEST}
    said = " ".join(str(error).partition("Exception raised from")[0].split())  # torch goes on with frames of its C++
    seen = ", ".join(f"{name}: {x}" for name, x in (large or odd).items())
    if large:  # of which torch says how it stores numbers
        said = f"no model has {seen}."
    elif odd:
        said += f" (its configuration has {seen})"
    if spec.model is None:
        remedy = "Lower it." if large else ""
        return ModelError(f"transformers cannot build this model: {said}", field="config", remedy=remedy)
    if (refused := _attention_refused(spec, said)) is not None:
        return refused
    wrong = f'"{spec.model}": transformers cannot build this model: {said}'
    return ModelError(wrong, field="model", remedy="Mend its config.json.")


def _check_size(config: PreTrainedConfig, spec: ModelSpec) -> None:
    for name, value in config.get_text_config().to_dict().items():
        if isinstance(value, int) and value > MOST_LAYERS and "layers" in name:
            wrong = f"its configuration has {name}: {value}, and no model has more than {MOST_LAYERS}."
            if spec.model is None:
                raise ModelError(wrong, field="config", remedy="Lower it.")
            raise ModelError(f'"{spec.model}": {wrong}', field="model", remedy="Mend its config.json.")


def _check_decoder(config: PreTrainedConfig, spec: ModelSpec) -> None:
    check_text_alone(config, str(spec.model))
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or spec.trust_remote_code
    if config.is_encoder_decoder or not known:
        wrong = f'"{spec.model}" is of type {config.model_type}, which is not a decoder-only language model.'
        raise ModelError(wrong, field="model", remedy="Name one, such as Llama, Mistral, Qwen, GPT-2 or OPT.")


def _check_classifier(config: PreTrainedConfig, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase | None) -> None:
    field, size = "config" if spec.model is None else "model", config.get_text_config().vocab_size
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not spec.trust_remote_code:
        wrong = f"transformers has no sequence classifier for models of type {config.model_type}."
        raise ModelError(wrong, field=field, remedy="Use a type that has one, such as Llama, OPT, GPT-2 or BERT.")
    if tokenizer is not None and size < (tokens := embeddings_needed(tokenizer)):
        wrong = f"the model has {size} tokens and the tokenizer of base {tokens}."
        raise ModelError(wrong, field=field, remedy="Name a model that knows them all.")
