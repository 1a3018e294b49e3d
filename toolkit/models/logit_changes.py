"""What a model does to its logits after `lm_head`: a scale or a cap, of those that its configuration names."""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.models.trials import SUGGESTION, apart_by, tolerance

Logits = Callable[[Tensor], Tensor]


def as_they_are(logits: Tensor) -> Tensor:
    return logits


def _scaled(factor: float, logits: Tensor) -> Tensor:
    return factor * logits.float()


def _capped(cap: float, logits: Tensor) -> Tensor:
    return cap * torch.tanh(logits.float() / cap)


def scales_logits(model: PreTrainedModel) -> bool:
    """Whether the configuration names a scale of logits, of which other libraries' losses do not know every one."""
    return any(isinstance(change, partial) and change.func is _scaled for change in _logit_changes(model))


def _logit_changes(model: PreTrainedModel) -> list[Logits]:
    """What a model may do with the logits of `lm_head`, by the scales and caps that its configuration names."""
    options: list[Logits] = []
    for name, value in model.config.get_text_config().to_dict().items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Attention and the routers of experts have logits of their own.
        of_the_head = ("logit" in name or "lm_head" in name) and not re.search("attn|attention|router", name)
        if number and value > 0 and value != 1 and of_the_head:
            options += [partial(_capped, value)] if "cap" in name else [partial(_scaled, x) for x in (value, 1 / value)]
    return options


def logits_of(model: PreTrainedModel, plain: Tensor, given: Tensor) -> Logits:
    """What makes the logits that a model gives of those that `lm_head` gives."""
    options = [*_logit_changes(model), as_they_are]
    apart = [apart_by(option(plain), given) for option in options] if plain.shape == given.shape else [torch.inf]
    if not min(apart) <= tolerance(model) / 10:
        wrong = f"a {type(model).__name__} changes its logits after lm_head by more than a scale or a cap that its "
        wrong += "configuration names, which the log-probabilities here do not follow."
        raise ModelError(wrong, remedy=SUGGESTION)
    # Where logits are small a cap does next to nothing; a configuration that names one is believed.
    noise = 4 * torch.finfo(model.dtype).eps
    return next(option for option, distance in zip(options, apart, strict=True) if distance <= min(apart) + noise)
