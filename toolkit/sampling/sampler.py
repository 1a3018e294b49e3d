"""Prompts to responses, in any role that can respond."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from numpy.random import Generator, Philox
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer

from toolkit import processes
from toolkit.data import PromptCollator, Rollout
from toolkit.errors import DataError, LengthError, NotFiniteError
from toolkit.functional import inverse_cdf
from toolkit.models import LENGTH_MULTIPLE, LargestQ, RowProcessor, SharedBase, WeightedByQ
from toolkit.portion import Portion

Rows: TypeAlias = Dataset | Sequence[dict[str, Any]]
"""Prompts: rows with `input_ids`, and the columns that a reward or a metric needs."""
_Row: TypeAlias = tuple[list[int], list[float]]
"""Tokens, and the log-probabilities that they were drawn with: 0 in greedy decoding, NaN of logits without a number."""


def all_at_once() -> Portion:
    """All rows of a batch, until memory runs out."""
    return Portion("the number of responses that are generated at a time", 2**31)


@dataclass(frozen=True)
class Sampler:
    """A role of the shared base as something that responds to prompts. No setting of the checkpoint has a part in it.

    Args:
        roles: the base, carrying the role.
        tokenizer: of the base.
        role: "policy", "reference", or "q" for the policy that Q defines, which reads the reference too.
        response_length: tokens of a response at most, its stop token included; the base's positions limit it, too.
        max_length: tokens of prompt and response together at most; None for no such limit.
        temperature: of sampling from the whole vocabulary; for "q" the τ of π ∝ π_ref · exp(Q/τ). None decodes
            greedily.
        merged: whether the policy's adapter is merged into a copy of the weights: see `SharedBase.generate`.
        graphs: whether passes over new tokens are recorded as CUDA graphs, and played back.
        autocast: gives the precision region to respond in; that of the base if None.
        portion: rows that are generated at a time; as many as there are, where memory holds them.
    """

    roles: SharedBase
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    response_length: int
    role: str = "policy"
    max_length: int | None = None
    temperature: float | None = 1.0
    merged: bool = False
    graphs: bool = False
    autocast: Callable[[], AbstractContextManager] | None = None
    portion: Portion = field(default_factory=all_at_once)

    @property
    def reference(self) -> "Sampler":
        """The same of the reference; at temperature 1 in place of the τ of Q."""
        temperature = 1.0 if self.role == "q" and self.temperature is not None else self.temperature
        return replace(self, role="reference", temperature=temperature)

    @property
    def collator(self) -> PromptCollator:
        """Makes a batch of rows."""
        return PromptCollator(self.tokenizer.pad_token_id, multiple=LENGTH_MULTIPLE)

    def __call__(
        self, batch: Mapping[str, Any], *, keys: Tensor | None = None, streamer: TextStreamer | None = None
    ) -> Rollout:
        """One response to each prompt of a batch from `collator`.

        Args:
            keys: what each row is sampled by, int64 (B,), not negative: a row with the same key and policy gets the
                same response beside any others. Drawn from torch's global generator if None.
            streamer: shows the response to a single prompt as it comes.

        Raises:
            DataError: `max_length`, or the base's positions, leave a prompt no room for a response; or the base has no
                embedding for a token of one, or one has none; or it is no batch.
            NotFiniteError: the role's logits are not finite.
        """
        limits = self.limits(prompts_in(batch))
        stops = self.roles.stop_token_ids(self.tokenizer)
        uniform = None
        if self.temperature is not None:
            uniform = uniforms(torch.randint(2**63 - 1, (len(limits),)) if keys is None else keys, max(limits))
        alone = self._unpadded(batch["input_ids"].shape[1] + max(limits))

        def attempt(size: int) -> dict[int, _Row]:
            generated: dict[int, _Row] = {}
            with processes.agreed():
                own = processes.own([1.0] * len(limits))
                size = 1 if alone else size
                for rows in (own[start : start + size] for start in range(0, len(own), size)):
                    first = batch["input_ids"].shape[1] - len(batch["prompt_ids"][rows[0]]) if alone else 0
                    config = GenerationConfig(
                        max_new_tokens=limits[rows[0]] if alone else max(limits),
                        do_sample=False,
                        eos_token_id=stops,
                        pad_token_id=self.tokenizer.pad_token_id,
                    )
                    ids, mask = (
                        batch[name][rows, first:].to(self.roles.device) for name in ("input_ids", "attention_mask")
                    )
                    drawn = None if uniform is None else uniform[rows].to(ids.device)
                    generated |= dict(zip(rows, self._generate(ids, mask, drawn, config, streamer), strict=True))
            return generated

        generated = self.portion(attempt, most=-(-len(limits) // processes.count()))
        of_all = {row: made for of_process in processes.gather(generated) for row, made in of_process.items()}
        output, logprobs = zip(*(of_all[row] for row in range(len(limits))), strict=True)
        rollout = rollout_of(batch, output, tokenizer=self.tokenizer, stop_token_ids=stops, limits=limits)
        drawn_with = [row[:length] for row, length in zip(logprobs, rollout.lengths, strict=True)]
        # Not of what a row went on to say after its end, of which nothing is learnt.
        if not all(logprob < math.inf for row in drawn_with for logprob in row):
            wrong = f'the logits of the role "{self.role}" are not finite, so that nothing can be sampled.'
            with processes.agreed():  # all of several find it, and one tells
                remedy = "Its weights hold NaN or inf, or the base's precision is too small."
                raise NotFiniteError(wrong, remedy=remedy)
        return rollout if uniform is None else replace(rollout, sampler_logprobs=drawn_with)

    def _generate(
        self, ids: Tensor, mask: Tensor, uniform: Tensor | None, config: GenerationConfig, streamer: TextStreamer | None
    ) -> list[_Row]:
        """What comes after left-padded prompts (B, P). Decoding is greedy: `_Sampled` leaves one token to take."""
        role, temperature, processors = self._decoding(mask)
        if temperature is not None and uniform is not None:
            drawn: _Drawn = _Sampled(uniform, temperature)
        else:
            drawn = _Drawn(len(ids), int(config.max_new_tokens), ids.device)
        processors.append(drawn)
        with self.roles.role(role), (self.autocast or self.roles.autocast)():
            output = self.roles.generate(
                ids,
                mask,
                config,
                merged=self.merged,
                graphs=self.graphs,
                logits_processor=processors,
                streamer=streamer,
            ).tolist()
        return list(zip(output, drawn.probabilities.log().tolist(), strict=True))

    def _decoding(self, mask: Tensor) -> tuple[str, float | None, LogitsProcessorList]:
        """The role that generates, the temperature of its logits, and what is done to them before."""
        if self.role != "q":
            return self.role, self.temperature, LogitsProcessorList()
        if self.temperature is None:
            return "q", None, LogitsProcessorList([LargestQ(self.roles)])
        weighted = WeightedByQ(self.roles, mask, temperature=self.temperature)
        return "reference", 1.0, LogitsProcessorList([weighted])

    def _check_ids(self, prompts: Iterable[Sequence[int]]) -> None:
        """On a card the lookup of a token that the base does not know ends the process, and all that follows fails."""
        rows = self.roles.causal_lm.get_input_embeddings().weight.shape[0]
        for ids in prompts:
            if not ids:
                raise DataError("a prompt has no token.", remedy="Leave empty prompts out.")
            odd = min(ids) if min(ids) < 0 else max(ids)
            if not 0 <= odd < rows:
                named = f'"{self.tokenizer.convert_ids_to_tokens(odd)}" of id' if odd >= 0 else "id"
                wrong = f"a prompt has the token {named} {odd}, and the base has embeddings for 0 to {rows - 1}."
                raise DataError(wrong, remedy="Leave that text out of the prompts.")

    def _unpadded(self, width: int) -> bool:
        """Whether each prompt has to be read without padding, by itself, since that would take up positions that its
        response needs where a batch comes to this width."""
        positions, _ = self.roles.positions
        return positions is not None and width > positions and self.roles.padding_takes_positions

    def limits(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Tokens that the response to each prompt may have. Raises: DataError: there is no room for one, or a prompt
        has a token that the base does not know."""
        self._check_ids(prompts)
        prompt_lengths = [len(ids) for ids in prompts]
        check_room(prompt_lengths, self.max_length)
        positions, whose = self.roles.positions
        if positions is not None and (longest := max(prompt_lengths)) >= positions:
            wrong = f"a prompt has {longest} tokens, and {whose} has positions for {positions}."
            raise LengthError(wrong, remedy=f"Shorten the prompts to {positions - 1} tokens or less.")
        most = min((one for one in (self.max_length, positions) if one is not None), default=math.inf)
        return [int(min(self.response_length, most - length)) for length in prompt_lengths]


class _Drawn(RowProcessor):
    """Notes with which probability each token is taken, in greedy decoding 1; NaN where the logits are not finite, of
    which it would take the first token.

    `probabilities` are float32 (B, T), and 1 where a row drew nothing more.
    """

    def __init__(self, rows: int, length: int, device: torch.device):
        self.rows = torch.arange(rows, device=device)  # that go on
        self.probabilities, self.drawn = torch.ones(rows, length, dtype=torch.float32, device=device), 0

    def keep(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        largest = scores.amax(dim=-1)
        self.probabilities[self.rows, self.drawn] = torch.where(largest.isfinite(), 1.0, float("nan"))
        self.drawn += 1
        return scores


class _Sampled(_Drawn):
    """Leaves each row the one token that its next uniform number draws from the whole distribution, which is what the
    log-probabilities of an update are of. `of_rows` is float64 (B, T)."""

    def __init__(self, of_rows: Tensor, temperature: float):
        super().__init__(len(of_rows), of_rows.shape[1], of_rows.device)
        self.of_rows, self.temperature = of_rows, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = self.of_rows[self.rows, self.drawn]
        tokens, probabilities = inverse_cdf(scores, uniform, temperature=self.temperature)
        self.probabilities[self.rows, self.drawn] = probabilities
        self.drawn += 1
        return scores.scatter_(1, tokens.unsqueeze(1), float("inf"))


def prompts_in(batch: Any) -> list[list[int]]:
    """The prompts of a batch of a collator; a DataError for something else."""
    if not isinstance(batch, Mapping) or "prompt_ids" not in batch:
        wrong = f"a batch of a collator is needed, and this is a {type(batch).__name__} without prompt_ids."
        raise DataError(wrong, remedy="Of texts it is trainer.data_collator(recipe.task.prompts_of(texts)).")
    prompts: list[list[int]] = batch["prompt_ids"]
    return prompts


def key_of(*what: Any) -> int:
    """A key of 63 bits by what is drawn, as `uniforms` and torch's generators take one: SHA-256 leaves those of
    neighbours nothing in common."""
    return int.from_bytes(sha256(repr(what).encode()).digest()[:8], "little") >> 1


def uniforms(keys: Tensor, length: int) -> Tensor:
    """Numbers of [0, 1), each row's by its key alone: int64 (B,), not negative, to float64 (B, length) on the CPU.

    Philox4x64, a generator that counts (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a row is
    sampled the same whichever rows stand beside it, and in whichever process.
    """
    return torch.from_numpy(np.stack([Generator(Philox(key=key)).random(length) for key in keys.tolist()]))


def rollout_of(
    batch: Mapping[str, Any],
    generated: Sequence[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    limits: Sequence[int],
) -> Rollout:
    """What generation gave for a batch of `PromptCollator`, each response cut after its first stop token.

    `generated` are the tokens after each prompt, and `limits` how many of them each response may have.
    """
    response_ids, ended = [], []
    for row, limit in zip(generated, limits, strict=True):
        # All rows go on to the longest limit of a batch: what one says before its own does not depend on what follows.
        ids = list(row[:limit])
        stop = next((i + 1 for i, token in enumerate(ids) if token in stop_token_ids), 0)
        response_ids.append(ids[:stop] if stop else ids)
        ended.append(bool(stop))
    # Not every stop token is a special one.
    said = [ids[:-1] if whole else ids for ids, whole in zip(response_ids, ended, strict=True)]
    return Rollout(
        prompts=tokenizer.batch_decode(batch["prompt_ids"]),
        responses=tokenizer.batch_decode(said, skip_special_tokens=True),
        prompt_ids=batch["prompt_ids"],
        response_ids=response_ids,
        ended=ended,
        columns=batch["columns"],
        gaps=[_gap(ids, tokenizer) for ids in response_ids],
    )


def _gap(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The space with which the first word of a response begins, if its text as decoded alone lacks it."""
    begins = bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith("▁")
    return " " if begins and not tokenizer.decode(ids[:1]).startswith(" ") else ""


def check_room(prompt_lengths: Iterable[int], max_length: int | None, fewest: int = 1) -> None:
    """Raises a DataError unless each prompt leaves room for a response of `fewest` tokens; a `max_length` of None is no
    limit."""
    longest = max(prompt_lengths, default=0)
    if max_length is not None and longest + fewest > max_length:
        room = f" of {fewest} tokens, which is min_response_length" if fewest > 1 else ""
        raise LengthError(
            f"a prompt has {longest} tokens, and {max_length} leaves no room for a response{room}.",
            field="max_length",
            remedy=f"Shorten the prompts to {max_length - fewest} tokens or less, or raise it.",
        )


def batches(rows: Rows, size: int) -> Iterable[list[dict[str, Any]]]:
    """Rows in order, `size` at a time; the last may be fewer."""
    return ([rows[i] for i in range(start, min(start + size, len(rows)))] for start in range(0, len(rows), size))
