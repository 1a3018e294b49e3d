"""Scores within a response: at its tokens, or at spans of its text."""

import math
import operator
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, takewhile
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.masked import MaskedTensor
from transformers import PreTrainedTokenizerBase

from toolkit.data import Rollout
from toolkit.errors import NotFiniteError, RewardError

Span = tuple[int, int, float]
T = TypeVar("T")
LARGEST_SCORE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class DenseScores:
    """What a reward may return in place of one number a response, for B responses.

    A response's score, which is logged and by which the best of several is chosen, is the sum of all that it got.

    Args:
        scores: one number a response, given at its last token; None for 0.
        tokens: for each response one number per token, stop token included, or nothing; None for nothing everywhere.
        spans: for each response any number of `(start, end, score)`: characters `start` to `end` − 1 of its text, as
            `rollout.responses` has it. The score is given at the token with which the span is complete.
        at_end: of checked scores, set by `checked`: False where `scores` was None, whose zeros nobody gave.

    Example:
        >>> DenseScores(tokens=[[0.5, 0.0, 0.5], []], spans=[[], [(0, 4, 2.0)]]).checked(
        ...     Rollout(["a", "b"], ["x y", "yes!"], [[1], [1]], [[2, 3, 4], [5]], [True, True])
        ... ).total
        tensor([1., 2.])
    """

    scores: Tensor | Sequence[float] | None = None
    tokens: Sequence[Tensor | Sequence[float]] | None = None
    spans: Sequence[Sequence[Span]] | None = None
    _: KW_ONLY
    at_end: bool = True

    def checked(self, rollout: Rollout) -> "DenseScores":
        """The same, as float32 on the CPU with an entry for each response.

        Raises:
            RewardError: an entry too many or too few, a span outside of the text.
            NotFiniteError: a number that is not finite.
        """
        count = len(rollout)
        scores = _read(self.scores, _floats, absent=torch.zeros(count))
        tokens = _read(self.tokens, lambda rows: [*map(_floats, rows)], absent=[torch.zeros(0)] * count)
        none: list[list[Span]] = [[]] * count
        spans = _read(self.spans, lambda rows: [[*map(_span, row)] for row in rows], absent=none)
        if scores.shape != (count,):
            raise RewardError(
                f"the reward returned shape {tuple(scores.shape)} for {count} responses; "
                f"({count},) is needed, one number each."
            )
        for name, number in (("tokens", len(tokens)), ("spans", len(spans))):
            if number != count:
                raise RewardError(f"the reward returned {number} {name} for {count} responses.")
        for row, (response, length) in enumerate(zip(rollout.responses, rollout.lengths, strict=True)):
            said = quoted(response)
            if tokens[row].dim() != 1 or tokens[row].numel() not in (0, length):
                raise RewardError(
                    f"the reward gave token scores of shape {tuple(tokens[row].shape)} to the response {said}, "
                    f"which has {length} tokens (rollout.response_ids)."
                )
            for start, end, _ in spans[row]:
                if not 0 <= start < end <= len(response):
                    raise RewardError(
                        f"the reward gave a score to the characters {start} to {end} of the response {said}, "
                        f"which has {len(response)}."
                    )
            given = [scores[row].item(), *tokens[row].tolist(), *(score for *_, score in spans[row])]
            if not sum(map(abs, given)) <= LARGEST_SCORE:
                gave = next((score for score in given if not math.isfinite(score)), "scores that overflow float32")
                raise NotFiniteError(f"the reward gave {gave} to the response {said}; scores are finite.")
        return DenseScores(scores, tokens, spans, at_end=self.at_end and self.scores is not None)

    # What follows is of scores that were checked.

    @property
    def total(self) -> Tensor:
        """The sum of all that each response got, (B,)."""
        scores, tokens, spans = _parts(self)
        return scores + torch.tensor(
            [float(of_tokens.sum()) + sum(s for *_, s in row) for of_tokens, row in zip(tokens, spans, strict=True)]
        )

    def at_tokens(self, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """The scores of tokens and spans at their tokens, (B, T); those of whole responses are not among them."""
        placed = torch.zeros(len(rollout), max(rollout.lengths))
        _, of_tokens, of_spans = _parts(self)
        for row, (tokens, spans) in enumerate(zip(of_tokens, of_spans, strict=True)):
            placed[row, : len(tokens)] += tokens
            ends = _completing_tokens(tokenizer, rollout.response_ids[row], rollout.responses[row]) if spans else []
            for _, end, score in spans:
                placed[row, ends[end - 1]] += score
        return placed


Scores = Tensor | DenseScores


def total_scores(scores: Scores) -> Tensor:
    """One number a response, (B,)."""
    return scores.total if isinstance(scores, DenseScores) else scores


def select_scores(scores: Scores, rows: Sequence[int]) -> Scores:
    """Those of some responses."""
    if isinstance(scores, Tensor):
        return scores[list(rows)]
    ends, tokens, spans = _parts(scores)
    some = ends[list(rows)], [tokens[i] for i in rows], [spans[i] for i in rows]
    return DenseScores(*some, at_end=scores.at_end)


def concatenate_scores(scores: Sequence[Scores]) -> Scores:
    """Those of several rollouts, one after the other; dense if any are."""
    ends, tokens, spans = zip(*map(_parts, scores), strict=True)
    whole = torch.cat(ends)
    if not _any_dense(scores):
        return whole
    return DenseScores(whole, [*chain(*tokens)], [*chain(*spans)], at_end=_any_at_end(scores))


def weighted_scores(scores: Sequence[Scores], weights: Sequence[float]) -> Scores:
    """Σ weight · scores of the same responses; dense if any are that have a weight."""
    paid = [(weight, part) for weight, part in zip(weights, scores, strict=True) if weight]
    if not paid:
        return torch.zeros_like(total_scores(scores[0]))
    parts = [(weight, *_parts(part)) for weight, part in paid]
    ends = torch.stack([weight * of_ends for weight, of_ends, _, _ in parts]).sum(dim=0)
    if not _any_dense([part for _, part in paid]):
        return ends
    tokens, spans = [], []
    for row in range(len(ends)):
        given = [weight * of_tokens[row] for weight, _, of_tokens, _ in parts if len(of_tokens[row])]
        tokens.append(torch.stack(given).sum(dim=0) if given else torch.zeros(0))
        spans.append([(a, b, weight * score) for weight, *_, of_spans in parts for a, b, score in of_spans[row]])
    return DenseScores(ends, tokens, spans, at_end=_any_at_end([part for _, part in paid]))


def _parts(scores: Scores) -> tuple[Tensor, Any, Any]:
    """Scores at the ends, at tokens and at spans; for plain numbers nothing at the latter."""
    if isinstance(scores, Tensor):
        return scores, [torch.zeros(0)] * len(scores), [[]] * len(scores)
    return torch.as_tensor(scores.scores), scores.tokens, scores.spans


def _any_dense(scores: Sequence[Scores]) -> bool:
    return any(isinstance(part, DenseScores) for part in scores)


def _any_at_end(scores: Sequence[Scores]) -> bool:
    return any(isinstance(part, Tensor) or part.at_end for part in scores)


def _read(part: Any, numbers: Callable[[Any], T], *, absent: T) -> T:
    """The numbers of a part of what the reward returned, or what stands for one that it did not."""
    if part is None:
        return absent
    try:
        return numbers(part)
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        seen = " ".join(reprlib.repr(part).split())
        raise RewardError(f"the reward returned {seen}, which is not made of numbers: {error}.") from error


def _floats(values: Tensor | Sequence[float]) -> Tensor:
    """Real numbers as float32, apart from what the reward keeps of its own."""
    given = torch.as_tensor(values) if hasattr(values, "dtype") else torch.as_tensor(values, dtype=torch.float32)
    masked = isinstance(values, (MaskedTensor, np.ma.MaskedArray))
    if masked or given.is_complex() or given.is_nested or given.layout != torch.strided:
        raise TypeError("real numbers in a plain tensor are needed, not complex, masked, nested or sparse ones")
    return given.detach().to("cpu", torch.float32, copy=True)


def quoted(text: str) -> str:
    """A response in a message: its beginning, where it is long."""
    return repr(text if len(text) <= 200 else f"{text[:199]}…")


def _span(span: Span) -> Span:
    start, end, score = span
    if isinstance(score, str):
        raise TypeError(f"the score of a span is a number, got {score!r}")
    return operator.index(start), operator.index(end), float(score)


def _completing_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[int]:
    """For each character of a response's text the first token with which it is there.

    A character of several bytes may take several tokens, before the last of which it is shown as another sign: so that
    what a beginning of the tokens decodes to counts as far as it agrees with the whole text.
    """
    beginnings = tokenizer.batch_decode([list(ids[:n]) for n in range(1, len(ids) + 1)], skip_special_tokens=True)
    completing: list[int] = []
    for token, beginning in enumerate(beginnings):
        agreed = len(beginning)
        if not text.startswith(beginning):
            agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(beginning, text, strict=False)))
        completing += [token] * (agreed - len(completing))
    return completing + [len(ids) - 1] * (len(text) - len(completing))
