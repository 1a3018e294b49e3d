"""Prompts to responses, in any role that can respond."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer

from toolkit.data import PromptCollator, Rollout
from toolkit.errors import DataError
from toolkit.models import LENGTH_MULTIPLE, LargestQ, SharedBase, WeightedByQ, release_memory

Rows: TypeAlias = Dataset | Sequence[dict[str, Any]]
"""Prompts: rows with `input_ids`, and the columns that a reward or a metric needs."""


@dataclass(frozen=True)
class Sampler:
    """A role of the shared base as something that responds to prompts. No setting of the checkpoint has a part in it.

    Args:
        roles: the base, carrying the role.
        tokenizer: of the base.
        role: "policy", "reference", or "q" for the policy that Q defines, which reads the reference too.
        response_length: tokens of a response at most, its stop token included.
        max_length: tokens of prompt and response together at most; None for no such limit.
        temperature: of sampling from the whole vocabulary; for "q" the τ of π ∝ π_ref · exp(Q/τ). None decodes
            greedily.
        autocast: gives the precision region to respond in; that of the base if None.
    """

    roles: SharedBase
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    response_length: int
    role: str = "policy"
    max_length: int | None = None
    temperature: float | None = 1.0
    autocast: Callable[[], AbstractContextManager] | None = None

    @property
    def reference(self) -> "Sampler":
        """The same of the reference; at temperature 1 in place of the τ of Q."""
        temperature = 1.0 if self.role == "q" and self.temperature is not None else self.temperature
        return replace(self, role="reference", temperature=temperature)

    @property
    def collator(self) -> PromptCollator:
        """Makes a batch of rows."""
        return PromptCollator(self.tokenizer.pad_token_id, multiple=LENGTH_MULTIPLE)

    def __call__(self, batch: Mapping[str, Any], *, streamer: TextStreamer | None = None) -> Rollout:
        """One response to each prompt of a batch from `collator`; a streamer shows that to a single prompt as it comes.

        Raises:
            DataError: `max_length` leaves a prompt no room for a response.
        """
        limits = self._limits([len(ids) for ids in batch["prompt_ids"]])
        ids, mask = (batch[name].to(self.roles.device) for name in ("input_ids", "attention_mask"))
        stops = self.roles.stop_token_ids(self.tokenizer)
        role, temperature, processors = self._decoding(mask)
        # The whole distribution is sampled, which is what the log-probabilities of an update are of.
        sampling = {} if temperature is None else {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=max(limits),
            do_sample=temperature is not None,
            eos_token_id=stops,
            pad_token_id=self.tokenizer.pad_token_id,
            **sampling,
        )
        with self.roles.role(role), (self.autocast or self.roles.autocast)():
            output = self.roles.generate(ids, mask, config, logits_processor=processors, streamer=streamer)
        release_memory()
        return rollout_of(batch, output.tolist(), tokenizer=self.tokenizer, stop_token_ids=stops, limits=limits)

    def _decoding(self, mask: Tensor) -> tuple[str, float | None, LogitsProcessorList]:
        """The role that generates, the temperature of its logits, and what is done to them before."""
        if self.role != "q":
            return self.role, self.temperature, LogitsProcessorList()
        if self.temperature is None:
            return "q", None, LogitsProcessorList([LargestQ(self.roles)])
        weighted = WeightedByQ(self.roles, mask, temperature=self.temperature)
        return "reference", 1.0, LogitsProcessorList([weighted])

    def _limits(self, prompt_lengths: list[int]) -> list[int]:
        """Tokens that each response may have."""
        if self.max_length is None:
            return [self.response_length] * len(prompt_lengths)
        check_room(prompt_lengths, self.max_length)
        return [min(self.response_length, self.max_length - length) for length in prompt_lengths]


def rollout_of(
    batch: Mapping[str, Any],
    generated: Sequence[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    limits: Sequence[int] | None = None,
) -> Rollout:
    """What generation gave for a batch of `PromptCollator`, each response cut after its first stop token.

    `generated` are the tokens after each prompt, and `limits` how many of them each response may have; None for all.
    """
    response_ids, ended = [], []
    for row, limit in zip(generated, limits or [len(row) for row in generated], strict=True):
        # All rows go on to the longest limit of a batch: what one says before its own does not depend on what follows.
        ids = list(row[:limit])
        stop = next((i + 1 for i, token in enumerate(ids) if token in stop_token_ids), 0)
        response_ids.append(ids[:stop] if stop else ids)
        ended.append(bool(stop))
    return Rollout(
        prompts=tokenizer.batch_decode(batch["prompt_ids"]),
        responses=tokenizer.batch_decode(response_ids, skip_special_tokens=True),
        prompt_ids=batch["prompt_ids"],
        response_ids=response_ids,
        ended=ended,
        columns=batch["columns"],
    )


def check_room(prompt_lengths: Iterable[int], max_length: int | None) -> None:
    """Raises a DataError unless each prompt leaves room for a token more; a `max_length` of None is no limit."""
    longest = max(prompt_lengths, default=0)
    if max_length is not None and longest >= max_length:
        raise DataError(
            f"a prompt has {longest} tokens, and {max_length} leaves no room for a response.",
            field="max_length",
            remedy=f"Shorten the prompts to {max_length - 1} tokens or less, or raise it.",
        )


def batches(rows: Rows, size: int) -> Iterable[list[dict[str, Any]]]:
    """Rows in order, `size` at a time; the last may be fewer."""
    return ([rows[i] for i in range(start, min(start + size, len(rows)))] for start in range(0, len(rows), size))
