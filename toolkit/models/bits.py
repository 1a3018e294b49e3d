"""Bases in 4 bits, those that a checkpoint has already included: outlines of them, and what may not be."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from toolkit.errors import ModelError
from toolkit.models.precision import default_device, resolved
from toolkit.models.pretrained import HEAD_NAMES, quiet_transformers
from toolkit.models.trials import raise_of_the_card

_STORAGE = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
_LAYOUT = ("llm_int8_skip_modules", "bnb_4bit_quant_storage")  # which it says of itself where nothing is asked for


class _NotQuantised(BaseException):
    """No `Exception`: transformers would log it, go on to the next weight, and at the end blame the checkpoint."""


@contextmanager
def quantising_told() -> Iterator[None]:
    """Inside, transformers puts a checkpoint's weights into 4 bits.

    Raises:
        ModelError: one cannot be. Memory that runs out is torch's own error.
        ToolkitError: the card has failed.
    """
    to, failed = Params4bit.to, list[Exception]()

    def told(weight: Params4bit, *arguments: Any, **named: Any) -> Any:
        try:
            return to(weight, *arguments, **named)
        except Exception as error:
            failed.append(error)
            raise _NotQuantised from error

    Params4bit.to = told
    try:
        yield
    except _NotQuantised:
        error = failed[0]
        raise_of_the_card(error)
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        wrong = f"weights cannot be put into 4 bits here: {said}."
        remedy = "See what python -m bitsandbytes says of this machine, or set it to null."
        raise ModelError(wrong, field="quantization", remedy=remedy) from error
    finally:
        Params4bit.to = to


def sparing_heads(quantization: BitsAndBytesConfig) -> BitsAndBytesConfig:
    """The same, with a classifier's head among the modules that it names to skip, where it names any: transformers
    leaves the head whole by itself only where none is named."""
    if quantization.llm_int8_skip_modules is not None:
        named = dict.fromkeys([*quantization.llm_int8_skip_modules, *HEAD_NAMES])
        quantization = copy.copy(quantization)
        quantization.llm_int8_skip_modules = [*named]
    return quantization


def quantize_outline(model: PreTrainedModel, quantization: BitsAndBytesConfig | None) -> None:
    """Give a model on the meta device the layers that loading would quantise, as PEFT knows them; those that a
    checkpoint has quantised already, where it has."""
    if (quantization := own_quantization(model.config) or quantization) is None:
        return
    # Attributes as loading leaves them: trainers ask for the quantizer, and PEFT chooses its layer by the last one.
    model.hf_quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    model.hf_quantizer.preprocess_model(model, device_map=None)
    model.is_loaded_in_4bit = quantization.load_in_4bit
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True  # where Jamba calls a layer of which it else reads the weight
        elif isinstance(module, Linear4bit):
            module.weight.quant_state = _unpacks(module, model.dtype)


def _unpacks(module: Linear4bit, dtype: torch.dtype) -> QuantState:
    """What a weight that is not there, and was in a dtype, is unpacked by: DoRA begins with the norms of what comes of
    it."""
    weight = module.weight
    scales = torch.empty(math.ceil(weight.numel() / weight.blocksize), dtype=torch.float32, device=weight.device)
    named = {"blocksize": weight.blocksize, "quant_type": weight.quant_type}
    return QuantState(scales, shape=weight.shape, dtype=dtype, **named)


def own_quantization(config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """That of a checkpoint which is quantised already."""
    saved = getattr(config, "quantization_config", None)
    keys = saved if isinstance(saved, dict) else {}
    ours = keys.get("quant_method") == "bitsandbytes" or keys.get("load_in_4bit") or keys.get("load_in_8bit")
    return BitsAndBytesConfig.from_dict(keys) if ours else None


def take_own_bits(config: PreTrainedConfig, model: str, asked: BitsAndBytesConfig | None, dtype: str) -> None:
    """Let a checkpoint in 4 bits compute in what is asked for: transformers takes its own settings, and no other.

    Raises:
        ModelError: other bits are asked for than it has.
    """
    saved, own = getattr(config, "quantization_config", None), own_quantization(config)
    remedy = "Set it to null, or name the checkpoint in 16 bits."
    if own is None:
        if asked is not None and isinstance(saved, dict):
            wrong = f'"{model}" is quantised by {saved.get("quant_method")} already, and cannot be again.'
            raise ModelError(wrong, field="quantization", remedy=remedy)
        return
    own, computes = sparing_heads(own), getattr(torch, resolved(dtype))
    if asked is not None:
        computes = asked.bnb_4bit_compute_dtype
        others = [name for name in _LAYOUT if getattr(asked, name) != getattr(BitsAndBytesConfig(), name)]
        for name in (*_STORAGE, *others):
            if (there := getattr(own, name)) != (given := getattr(asked, name)):
                wrong = f'"{model}" is quantised already, with {name}: {there}, and {given} is given.'
                raise ModelError(wrong, field="quantization", remedy=remedy)
    config.quantization_config = own.to_dict() | {"bnb_4bit_compute_dtype": str(computes).removeprefix("torch.")}


def about_other_bits(model: PreTrainedModel) -> str:
    """A sentence on the outline of a checkpoint that is quantised already; "" of any other.

    Raises:
        ModelError: transformers has no gradients for it on this machine, or it is in 8 bits.
    """
    saved: Any = getattr(model.config, "quantization_config", None)
    method = saved.get("quant_method") if isinstance(saved, dict) else None
    if (own := own_quantization(model.config)) is not None:
        check_bits(own)
        return "its weights are in 4 bits already: an adapter on them is exported alone, and not merged."
    if method is None:
        return ""
    quantizer: Any = None
    with suppress(Exception), quiet_transformers():  # of a method or a package that is not there: loading says which
        made: Any = AutoHfQuantizer.from_config(dict(saved), pre_quantized=True)
        made.validate_environment(device_map={"": default_device()})
        unpacked = getattr(made.quantization_config, "dequantize", False)  # as MXFP4 is without kernels for it
        quantizer = None if unpacked else made
    check_gradients_of_bits(quantizer)
    dtype = str(model.dtype).removeprefix("torch.")
    return f"its weights are quantised by {method}, and counted as if in {dtype}: they take less than that."


def cast_what_is_not_quantised(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Beside weights that are quantised already transformers keeps the dtype in which the others were saved, and
    bitsandbytes unpacks to that in which they were quantised."""
    for weight in model.parameters():
        if hasattr(weight, "quant_state"):
            weight.quant_state.dtype = dtype
        elif weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def check_bits(quantization: Any) -> None:
    """Nothing, if a base may be quantised so; else a `ModelError`."""
    if getattr(quantization, "load_in_8bit", False):
        raise ModelError(
            "with a base in 8 bits a token's outputs depend on its batch (LLM.int8 rounds a batch as a whole), so "
            "that the policy trained would not be the one that sampled.",
            field="quantization",
            remedy="Load it in 4 bits, or in 16.",
        )


def keep_layout(model: nn.Module) -> None:
    """Keep the 4-bit weights of a model in the layout that has gradients.

    In eval mode on a CPU with AVX512-BF16 bitsandbytes repacks them for a kernel outside autograd, for good: each later
    backward pass would leave out the base's part of the gradient, with nothing but a warning, or take it of other
    numbers. A model that is only read may have that layout, which decodes about a quarter faster and is slower in whole
    forward passes.

    Raises:
        ModelError: weights are repacked already.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                wrong = "the model has been used on this CPU before, and bitsandbytes has repacked its 4-bit weights "
                wrong += "for good: what is trained on them would get wrong gradients."
                raise ModelError(wrong, remedy="Load the model anew, and give it here before it reads anything.")
            module.support_avx512bf16_for_cpu = False


def check_gradients_of_bits(quantizer: Any) -> None:
    """Nothing, if a base may be in the bits of a quantizer of transformers, or has none; else a `ModelError`.

    transformers' trainers ask for the same of a model itself; those here have a module around it.
    """
    trainable = getattr(quantizer, "is_trainable", True)
    if not (trainable() if callable(trainable) else trainable):  # FP-Quant's is a method
        method = quantizer.quantization_config.quant_method
        raise ModelError(
            f"transformers' kernels for weights in {getattr(method, 'value', method)} have no gradients, so that "
            "adapters on such a base would be trained with wrong ones.",
            field="quantization",
            remedy="Name a checkpoint in 16 bits, and quantise it to 4 bits here.",
        )
