"""A pass over one new token of each row, recorded as a CUDA graph and played back for the tokens after it.

Such a pass is some thousand small operators, for each of which Python takes longer than a fast card (docs/plan.md);
played back, the card goes from one to the next by itself. A graph reads and writes the same memory each time: so keys
and values stand in slots for all tokens to come, and what a pass is given is copied to where the graph reads it.

It is recorded anew in each rollout, and whenever rows have left. That costs Python's time for one pass, which it does
not execute. `torch.cuda.graph` first waits for the card and gives back the blocks that PyTorch has cached, so that the
next update takes its memory from the driver anew. In return nothing stays behind that an optimizer's step would make
stale, and an update has the memory.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from toolkit.errors import ConfigError
from toolkit.models.caches import CACHE, keeps_all

_MULTIPLE = 8  # of slots: where a mask has another width, attention copies it to such a one in each layer
_REMEDY = "Take eager or merged."


def check_records(model: PreTrainedModel, width: int) -> None:
    """Nothing, if passes over one token of rows of at most `width` tokens are of a kind that is known here.

    Raises:
        ConfigError: they are not. That one of another kind asks for a number, which no graph can, only a card tells.
    """
    what, takes = f"graphs cannot be made of a {type(model).__name__}", inspect.signature(model.forward).parameters
    if CACHE not in takes or not keeps_all(DynamicCache(config=model.config), width):
        raise _refused(f"{what}: its cache is not one of keys and values of all {width} tokens of a row.")
    if "position_ids" not in takes:
        raise _refused(f"{what}: it takes no positions.")
    if (attention := model.config.get_text_config()._attn_implementation) != "sdpa":
        remedy = 'Set base.attn_implementation to "sdpa", or take eager or merged.' if model._supports_sdpa else _REMEDY
        raise _refused(f'{what} with "{attention}" attention.', remedy)


class _Slots(CacheLayerMixin):
    """Keys and values of a layer, (N, heads, W, size) each, with room for tokens to come.

    Args:
        taken: those that are there.
        place: where the next token's go, int64 (1,): that of all layers.
    """

    def __init__(self, taken: DynamicLayer, width: int, place: Tensor):
        super().__init__()
        self.width, self.place, self.is_initialized = width, place, True
        self.keys, self.values = self._wider(taken.keys), self._wider(taken.values)

    def _wider(self, taken: Tensor) -> Tensor:
        wider = taken.new_zeros(*taken.shape[:2], self.width, taken.shape[-1])
        wider[:, :, : taken.shape[2]] = taken
        return wider

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("slots are there from the start")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width

    def get_max_length(self) -> int:
        return self.width


class RecordedPass:
    """`model(**inputs)` of one new token of each row.

    Args:
        width: tokens of a row at most, prompt and response.

    Raises:
        ConfigError: as `check_records` does.
    """

    def __init__(self, model: PreTrainedModel, width: int):
        self.model, self.width = model, -(-width // _MULTIPLE) * _MULTIPLE
        check_records(model, self.width)
        self._place = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._rows = self._tokens = 0  # now, and of a row, with padding
        self._given: dict[str, Any] = {}  # what each pass over so many rows reads
        self._passed: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, **inputs: Any) -> Any:
        """The pass with what `prepare_inputs_for_generation` gives; its logits are overwritten by the next one.

        Raises:
            ConfigError: it cannot be recorded.
        """
        if len(inputs["input_ids"]) != self._rows:  # kernels are loaded by the first, and adapters cast that are kept
            self._graph = self._passed = None
            return self.plain(**inputs)
        self._take(inputs)
        if self._graph is None:
            self._graph = self._recorded()
        try:
            self._graph.replay()
        except RuntimeError as error:  # the first one takes memory of the card's own, and torch's error is another one
            if "out of memory" not in (reason := _reason(error)):
                raise
        else:
            return self._passed
        raise torch.OutOfMemoryError(reason)

    def plain(self, **inputs: Any) -> Any:
        """The pass that is recorded, not played back."""
        if len(inputs["input_ids"]) != self._rows:
            self._make_room(inputs)
        self._take(inputs)
        return self.model(**self._given, return_dict=True)

    def _take(self, inputs: dict[str, Any]) -> None:
        self._tokens += 1
        self._place.fill_(self._tokens - 1)
        for name, held in self._given.items():
            if name == "attention_mask":  # transformers has none where there is no padding
                held[..., : self._tokens] = True if inputs.get(name) is None else inputs[name][:, None, None]
            elif isinstance(held, Tensor):
                held.copy_(inputs[name])

    def _make_room(self, inputs: dict[str, Any]) -> None:
        if not self._rows:
            cache = inputs[CACHE]
            if not keeps_all(cache, self.width):
                raise _refused(f"graphs cannot be made of a {type(cache).__name__}.")
            self._tokens = cache.get_seq_length()
            for number, layer in enumerate(cache.layers):
                cache.layers[number] = _Slots(layer, self.width, self._place)
        ids = inputs["input_ids"]
        self._rows = len(ids)
        self._given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        # Of four dimensions, which transformers hands down as it is.
        self._given["attention_mask"] = ids.new_zeros(self._rows, 1, 1, self.width, dtype=torch.bool)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._place.device)  # a recording that fails would not come back to it
        try:
            # What other threads do meanwhile, as those of a tracker, has no part in it.
            on = _stream(self._place.device)
            with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=on, capture_error_mode="thread_local"):
                self._passed = self.model(**self._given, return_dict=True)
        except RuntimeError as error:  # a recording that fails raises again at its end
            if "out of memory" not in (reason := _reason(error.__context__ or error)):
                wrong = f"graphs cannot be made of a {type(self.model).__name__}: {reason}."
                # torch 2.11 goes on as if it recorded, and refuses the next random number.
                raise _refused(wrong, f"In a new process: {_REMEDY[0].lower()}{_REMEDY[1:]}") from error
        else:
            return graph
        # Out of the handler, where nothing holds the frames of the pass: half of the rows are tried next.
        raise torch.OutOfMemoryError(reason)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """By which passes on a card are recorded: torch's own is of the card that was the first, and each further one would
    keep memory of cuBLAS."""
    return torch.cuda.Stream(device)


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _refused(wrong: str, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(wrong, field="generation", remedy=remedy)
