"""Merge a policy's adapter into the weights of its base: a checkpoint that needs no PEFT."""

from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.errors import AdapterError


class Merged(NamedTuple):
    """A merged model and how far its logits are from those of base and adapter apart.

    `largest` is the largest difference of a logit, `scale` the largest logit, and `agreement` the share of positions
    with the same most likely token.
    """

    model: PreTrainedModel
    largest: float
    scale: float
    agreement: float


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: str | Path, probe: Tensor) -> Merged:
    """Add an adapter to the weights of an unquantised base, in place.

    Merging into 4-bit weights would round the sum to 16 levels and change what the model says (huggingface/peft#2321).

    Args:
        model: the base, in 16 or 32 bits.
        folder: a PEFT folder.
        probe: int64 (B, L), tokens without padding on which both forms are compared.

    Raises:
        AdapterError: the base is quantised, or PEFT cannot put the adapter on it.
    """
    if getattr(model, "is_quantized", False):
        raise AdapterError("an adapter is never merged into a quantised base: load the base in 16 bits.")
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, OSError) as error:
        raise AdapterError(f"{folder}: the adapter does not fit the base: {str(error).splitlines()[0]}") from error
    adapted.eval()
    apart = adapted(input_ids=probe).logits.float()
    merged = adapted.merge_and_unload(safe_merge=True)
    together = merged(input_ids=probe).logits.float()
    return Merged(
        merged,
        float((together - apart).abs().max()),
        float(apart.abs().max()),
        float((together.argmax(-1) == apart.argmax(-1)).float().mean()),
    )
