"""The weights of a model: whether they changed, and an adapter merged into them."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.errors import AdapterError
from toolkit.models.adapters import adapter_config
from toolkit.models.folders import put_adapter, read_tensors
from toolkit.models.lora import peft_errors
from toolkit.models.roles import SharedBase
from toolkit.models.trials import apart_by, raise_of_the_card, tolerance

_OF_AN_ADAPTER = re.compile(r"\.(lora_|modules_to_save\.|original_module\.)")  # the head that it trains, and had


def base_digest(base: SharedBase) -> str:
    """SHA-256 of the first 64 numbers of each tensor of the base but the quantised, which devices round differently; of
    a value model's base under an adapter, too."""
    frozen: list[nn.Module] = [base.causal_lm]
    if base.value_model is not None and base.value_model.adapted is not None:
        frozen.append(base.value_model.backbone)
    return frozen_digest(*frozen)


def frozen_digest(*models: nn.Module) -> str:
    """The same of the bases of models with adapters."""
    named = (pair for model in models for pair in model.named_parameters())
    return tensors_digest(
        p.flatten()[:64]
        for name, p in named
        if p.is_floating_point() and not hasattr(p, "quant_state") and not _OF_AN_ADAPTER.search(name)
    )


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of tensors in their order: equal for equal bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Merged(NamedTuple):
    """A merged model, its logits (B, L, V) of the probe, and how far they are from those of base and adapter apart."""

    model: PreTrainedModel
    logits: Tensor
    largest: float  # difference of a logit
    scale: float  # the largest logit
    agreement: float  # share of positions with the same most likely token


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: str | Path, probe: Tensor) -> Merged:
    """Add an adapter to the weights of an unquantised base, in place: a checkpoint that needs no PEFT.

    Merging into 4-bit weights would round the sum to 16 levels and change what the model says (huggingface/peft#2321).
    Both forms are compared on `probe`, int64 (B, L), tokens without padding.
    """
    if getattr(model, "is_quantized", False):
        wrong = "an adapter is never merged into a quantised base."
        raise AdapterError(wrong, remedy="Export the adapter alone, or set base.model to the checkpoint in 16 bits.")
    folder = Path(folder)
    with peft_errors():
        adapted = get_peft_model(model, adapter_config(folder)).eval()
    assert isinstance(adapted, PeftModel)
    put_adapter(adapted, "default", read_tensors(folder), folder)
    apart = adapted(input_ids=probe).logits.float()
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(end, LoraLayer) for end in ends):
        _untie(model, *(getattr(end, "base_layer", end) for end in ends))
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise_of_the_card(error)
        wrong = f"{folder}: PEFT cannot merge it: {str(error).splitlines()[0]}"
        raise AdapterError(wrong, remedy="Export the adapter alone.") from error
    whole = merged(input_ids=probe).logits.float()
    if not (distance := apart_by(whole, apart)) <= tolerance(merged):
        wrong = f"{folder}: merged into the base it gives another model, whose logits are {distance:.1%} apart."
        raise AdapterError(wrong, remedy="Export the adapter alone.")
    agreement = (whole.argmax(-1) == apart.argmax(-1)).float().mean()
    return Merged(merged, whole, float((whole - apart).abs().max()), float(apart.abs().max()), float(agreement))


def _untie(model: PreTrainedModel, embeddings: Any, head: Any) -> None:
    """Weights of its own for a head that has those of the embeddings: what is merged into one would be in the other."""
    if head.weight is embeddings.weight:
        head.weight = nn.Parameter(embeddings.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
