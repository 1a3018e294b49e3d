"""The loop over new tokens of `generate`: transformers' own, from which rows that have ended leave.

transformers computes a row that has ended until the last one has. Here the rows that go on are taken together whenever
a quarter has ended: cache, masks and positions of the others are dropped. Prompts may be read in one line, without
padding and what they begin with once; passes over new tokens may be played back from a CUDA graph. What is prepared
before the loop, and each pass's inputs, stay transformers'.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
    TextStreamer,
)

from toolkit.models.caches import CACHE, keeps_all
from toolkit.models.graphs import RecordedPass
from toolkit.models.sequences import Sequences

_FEW = 4  # rows for which transformers' kernels of few tokens are taken: of a mixture they copy experts for each row
_LIVING = 0.75  # of the rows computed; at or below it the others leave. Each time costs a copy of the cache
_LIVING_IN_GRAPHS = 0.5  # where it costs a pass to record, too, and one before


def all_positions_of(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model takes at all, where its configuration says so."""
    config = config.get_text_config()
    positions: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return positions


def positions_of(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model takes among others, where its configuration says so.

    LongRoPE (Phi-3.5, Phi-4-mini) has other angles for a whole pass once its longest row is past the positions that
    there were before: what a row says would depend on those beside it. So the first ones are all that is taken.
    """
    return _positions_of_longrope(config) or all_positions_of(config)


def _positions_of_longrope(config: PreTrainedConfig) -> int | None:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = (rope, *(kind for kind in rope.values() if isinstance(kind, dict)))
    firsts = (kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope")
    return next((first for first in firsts if first), None)


def padding_takes_positions(model: PreTrainedModel) -> bool:
    """Whether tokens before a row count towards the positions of a model: it has a table of attention by width, a mask
    (GPT-Neo, the first GPT) or a bias (MPT), or LongRoPE, where transformers drops the cache once a batch is as wide
    (and in 5.17 all tokens but the last with it)."""
    if _positions_of_longrope(model.config) is not None:
        return True
    positions = positions_of(model.config)
    tables = (x for name, x in model.named_buffers() if name.endswith((".attn.bias", ".attention.bias")))
    return hasattr(model.base_model, "build_mpt_alibi_tensor") or any(
        table.ndim == 4 and table.shape[-1] == positions for table in tables
    )


class RowProcessor(LogitsProcessor):
    """A processor of logits beside which rows may leave."""

    def keep(self, rows: Tensor) -> None:
        """Rows that stay, by their places among the rows so far: int64 (N,). What is held of each row follows."""


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: TextStreamer | None = None,
    rows_leave: bool = True,
    packs_prompts: bool = False,
    graphs: bool = False,
    **inputs: Any,
) -> Tensor:
    """Prompts (B, P) with the greedy tokens after them, int64 (B, P + T): a `custom_generate` of transformers.

    Args:
        rows_leave: whether the cache may be taken apart by rows, as `base_checks` has tried, so that those that have
            ended leave; none does beside a processor that is no `RowProcessor`.
        packs_prompts: whether prompts may be read one after the other in a line, as `base_checks` has tried; they are
            where the cache is one of keys and values of all tokens.
        graphs: whether passes over new tokens are recorded, and played back.
        inputs: of the model's passes, as `generate` prepares them.

    Raises:
        ConfigError: passes of this model cannot be recorded.
    """
    rows_leave = rows_leave and all(isinstance(processor, RowProcessor) for processor in logits_processor)
    width, pad, ids = input_ids.shape[1], generation_config._pad_token_tensor, input_ids
    output = input_ids.new_full((len(ids), generation_config.max_length), 0 if pad is None else int(pad))
    output[:, :width] = input_ids
    rows = torch.arange(len(ids), device=ids.device)  # of the output
    living = torch.ones_like(rows, dtype=torch.bool)
    positions = positions_of(model.config)
    first = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **inputs)
    in_line = packs_prompts and len(ids) > 1 and "logits_to_keep" in first and keeps_all(first.get(CACHE))
    step = RecordedPass(model, output.shape[1]) if graphs else partial(model, return_dict=True)
    asked, late = None, graphs and streamer is None  # how many go on, of the token before: a card plays back meanwhile
    passed = _read_in_line(model, first) if in_line else model(**first, return_dict=True)
    living_at_least = _LIVING_IN_GRAPHS if graphs else _LIVING
    with model._optimize_model_for_decode() if len(ids) <= _FEW else nullcontext():
        while True:
            inputs = model._update_model_kwargs_for_generation(passed, inputs)
            scores = logits_processor(ids, passed.logits[:, -1].to(torch.float32, copy=True))
            del passed  # logits of all prompt tokens, for a model that cannot leave them out
            tokens = scores.argmax(dim=-1)
            if pad is not None:
                tokens = torch.where(living, tokens, pad)
            output[rows, width] = tokens
            width += 1
            ids = torch.cat([ids, tokens.unsqueeze(1)], dim=1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            living &= ~stopping_criteria(ids, None)
            latest = _asked(living)
            answer = asked or latest
            if not (number := answer()):
                width -= answer is not latest  # the last token was computed for none
                break
            if width == output.shape[1]:
                break
            asked = latest if late else None
            if rows_leave and number <= living_at_least * len(rows):
                stay = living.nonzero().squeeze(1)
                if not len(stay):
                    break
                asked = None
                for processor in logits_processor:
                    processor.keep(stay)
                inputs = {name: _kept(value, stay, len(rows)) for name, value in inputs.items()}
                rows, ids, living = rows[stay], ids[stay], living[stay]
            of_token = model.prepare_inputs_for_generation(
                ids, next_sequence_length=1 if inputs["use_cache"] else None, **inputs
            )
            if positions is not None and of_token.get("position_ids") is not None:
                # A row that is at its own limit, of which nothing more is kept, is computed beside others.
                of_token["position_ids"] = of_token["position_ids"].clamp(max=positions - 1)
            passed = step(**of_token)
    if streamer is not None:
        streamer.end()
    return output[:, :width]


def _asked(living: Tensor) -> Callable[[], int]:
    """Has a device count the rows that go on; what it gives waits for the answer."""
    number = living.sum().to("cpu", non_blocking=True)
    if not living.is_cuda:
        return partial(int, number)
    (answered := torch.cuda.Event()).record(torch.cuda.current_stream(living.device))

    def waited_for() -> int:
        answered.synchronize()
        return int(number)

    return waited_for


def _read_in_line(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """What a pass over left-padded prompts gives and leaves in its cache, from one over their tokens alone.

    Args:
        inputs: of that pass: `input_ids` (B, P) and, where there is padding, `attention_mask`, among others.
    """
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    line = Sequences.from_padded(inputs["input_ids"], mask)
    places = line.places((mask.cumsum(dim=1) - 1).clamp(min=0))  # of padding, which is masked, any
    laid_out = {"input_ids": line.input_ids, "attention_mask": line.attention_mask, "position_ids": line.position_ids}
    rows = {"row_lengths": line.row_lengths, "common_length": line.common_length, "logits_to_keep": places[:, -1]}
    passed = model(**{**inputs, **laid_out, **rows}, return_dict=True)
    passed.logits = passed.logits.transpose(0, 1)
    for layer in inputs[CACHE].layers:
        layer.keys, layer.values = (of_line[0][:, places].transpose(0, 1) for of_line in (layer.keys, layer.values))
    return passed


def _kept(value: Any, rows: Tensor, number: int) -> Any:
    if isinstance(value, Cache):
        value.reorder_cache(rows)  # all layers have it; recurrent ones have no `batch_select_indices`
        return value
    return value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == number else value
