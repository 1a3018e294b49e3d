"""The cache of what a model has read: what transformers calls it, and what it keeps of tokens."""

import inspect
import math
from typing import Any

from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_PREPARES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _PREPARES else "past_key_values"
"""The name by which models take and give it: from transformers 5.24 on, and before."""


def keeps_all(cache: Any, width: float = math.inf) -> bool:
    """Whether it is a cache of keys and values, of which each layer keeps all tokens of rows that are so wide."""
    return isinstance(cache, DynamicCache) and all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > width)
        for layer in cache.layers
    )
