"""A model tried on a few tokens, and how far what it makes of them may be from what it should."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.errors import ModelError, ToolkitError
from toolkit.models.precision import in_tf32

_NEAR, _NEAR_IN_16_BITS = 1e-3, 0.1
_TOKENS = 6
SUGGESTION = "Llama, Mistral, Qwen, GPT-2, OPT and Gemma can be used."


def probe(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """What a model is tried on, ids (2, L) and their attention mask."""
    ids = ids_of(model)
    return ids, torch.ones_like(ids)


def ids_of(model: PreTrainedModel) -> Tensor:
    """(2, L) that differ in the last token, none of them special."""
    config, vocabulary = model.config.get_text_config(), model.get_input_embeddings().weight.shape[0]
    ends = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    special = {x for end in ends for x in (end if isinstance(end, list) else [end])}
    plain = [token for token in range(min(vocabulary, 1000)) if token not in special] or [0]
    ids = [plain[i * len(plain) // (_TOKENS + 1)] for i in range(_TOKENS + 1)]
    return torch.tensor([ids[:-1], [*ids[:-2], ids[-1]]], device=model.device)


def tolerance(model: PreTrainedModel) -> float:
    """How far they may be: more where weights or activations have 16 bits or less, or their products TF32's."""
    exact = model.dtype is torch.float32 and not getattr(model, "is_quantized", False) and not in_tf32(model.device)
    return _NEAR if exact else _NEAR_IN_16_BITS


def apart_by(ours: Tensor, theirs: Tensor) -> float:
    """How far two computations of the same are apart, as a share of their norm."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-30))


def random_state(model: PreTrainedModel) -> tuple[Any, ...]:
    on_gpu = torch.cuda.get_rng_state(model.device).tolist() if model.device.type == "cuda" else []
    return torch.get_rng_state().tolist(), on_gpu, random.getstate()


def raise_of_the_card(error: Exception) -> None:
    """Raises: `error` itself where memory ran out; ToolkitError: the card failed, whatever was done there."""
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):  # the latter is a CPU's
        raise error from error.__cause__
    said = (str(error).splitlines() or [""])[0]
    if said.startswith(("CUDA error", "HIP error")):
        remedy = "See whether another process holds it (nvidia-smi), and whether torch was built for it (toolkit env)."
        raise ToolkitError(f"the GPU failed: {said.rstrip('.')}.", remedy=remedy) from error


@contextmanager
def tried(model: PreTrainedModel) -> Iterator[None]:
    """Random states are left as they were, and what a model cannot do at all is a `ModelError`."""
    python = random.getstate()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            yield
    except ToolkitError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise_of_the_card(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        wrong = f"a {type(model).__name__} cannot be read as a decoder, tried on {_TOKENS} tokens: {reason}"
        raise ModelError(wrong, remedy=SUGGESTION) from error
    finally:
        random.setstate(python)
