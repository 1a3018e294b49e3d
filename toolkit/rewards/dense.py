"""Scores within a response: at its tokens, or at spans of its text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from toolkit.data import Rollout
from toolkit.errors import RewardError

Span = tuple[int, int, float]


@dataclass(frozen=True)
class DenseScores:
    """What a reward may return in place of one number a response, for B responses.

    A response's score, which is logged and by which the best of several is chosen, is the sum of all that it got.

    Args:
        scores: one number a response, given at its last token; None for 0.
        tokens: for each response one number a token, stop token included, or nothing; None for nothing everywhere.
        spans: for each response any number of `(start, end, score)`: characters `start` to `end` − 1 of its text, as
            `rollout.responses` has it. The score is given at the token with which the span is complete.

    Example:
        >>> DenseScores(tokens=[[0.5, 0.0, 0.5], []], spans=[[], [(0, 4, 2.0)]]).checked(
        ...     Rollout(["a", "b"], ["x y", "yes!"], [[1], [1]], [[2, 3, 4], [5]], [True, True])
        ... ).total
        tensor([1., 2.])
    """

    scores: Tensor | Sequence[float] | None = None
    tokens: Sequence[Tensor | Sequence[float]] | None = None
    spans: Sequence[Sequence[Span]] | None = None

    def checked(self, rollout: Rollout) -> "DenseScores":
        """The same, as float32 on the CPU with an entry for each response.

        Raises:
            RewardError: an entry too many or too few, a span outside of the text, or a number that is not finite.
        """
        given = {"scores": self.scores, "tokens": self.tokens, "spans": self.spans}
        for name, entries in given.items():
            if entries is not None and len(entries) != len(rollout):
                raise RewardError(f"the reward returned {len(entries)} {name} for {len(rollout)} responses.")
        nothing: list[list] = [[]] * len(rollout)
        try:
            scores = torch.zeros(len(rollout)) if self.scores is None else _floats(self.scores)
            tokens = [_floats(row) for row in (nothing if self.tokens is None else self.tokens)]
            spans = [
                [(int(start), int(end), float(score)) for start, end, score in row] for row in self.spans or nothing
            ]
        except (TypeError, ValueError) as error:
            raise RewardError(f"the reward returned DenseScores that are not made of numbers: {error}.") from error
        if scores.shape != (len(rollout),):
            raise RewardError(f"the reward returned scores of shape {tuple(scores.shape)}, not one a response.")
        for row, response in enumerate(rollout.responses):
            length = rollout.lengths[row]
            if tokens[row].dim() != 1 or tokens[row].numel() not in (0, length):
                raise RewardError(
                    f"the reward gave token scores of shape {tuple(tokens[row].shape)} to the response {response!r}, "
                    f"which has {length} tokens (rollout.response_ids)."
                )
            for start, end, _ in spans[row]:
                if not 0 <= start < end <= len(response):
                    raise RewardError(
                        f"the reward gave a score to the characters {start} to {end} of the response {response!r}, "
                        f"which has {len(response)}."
                    )
            given_here = [scores[row : row + 1], tokens[row], _floats([score for *_, score in spans[row]])]
            if not bool(torch.isfinite(torch.cat(given_here)).all()):
                raise RewardError(f"the reward gave a number that is not finite to the response {response!r}.")
        return DenseScores(scores, tokens, spans)

    # What follows is of scores that were checked.

    @property
    def total(self) -> Tensor:
        """The sum of all that each response got, (B,)."""
        within = [float(t.sum()) + sum(s for *_, s in row) for t, row in zip(*self._within, strict=True)]
        return torch.as_tensor(self.scores) + torch.tensor(within)

    def at_tokens(self, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """The scores of tokens and spans at their tokens, (B, T); those of whole responses are not among them."""
        placed = torch.zeros(len(rollout), max(rollout.lengths))
        for row, (tokens, spans) in enumerate(zip(*self._within, strict=True)):
            placed[row, : len(tokens)] += tokens
            ends = _completing_tokens(tokenizer, rollout.response_ids[row], rollout.responses[row]) if spans else []
            for _, end, score in spans:
                placed[row, ends[end - 1]] += score
        return placed

    @property
    def _within(self) -> tuple[Sequence[Tensor], Sequence[Sequence[Span]]]:
        return [torch.as_tensor(row) for row in self.tokens or []], self.spans or []


Scores = Tensor | DenseScores


def total_scores(scores: Scores) -> Tensor:
    """One number a response, (B,)."""
    return scores.total if isinstance(scores, DenseScores) else scores


def select_scores(scores: Scores, rows: Sequence[int]) -> Scores:
    """Those of some responses."""
    if isinstance(scores, Tensor):
        return scores[list(rows)]
    tokens, spans = scores._within
    return DenseScores(torch.as_tensor(scores.scores)[list(rows)], [tokens[i] for i in rows], [spans[i] for i in rows])


def concatenate_scores(scores: Sequence[Scores]) -> Scores:
    """Those of several rollouts, one after the other; dense if any are."""
    if all(isinstance(part, Tensor) for part in scores):
        return torch.cat([total_scores(part) for part in scores])
    dense = [_as_dense(part) for part in scores]
    return DenseScores(
        torch.cat([torch.as_tensor(part.scores) for part in dense]),
        [row for part in dense for row in part._within[0]],
        [row for part in dense for row in part._within[1]],
    )


def weighted_scores(scores: Sequence[Scores], weights: Sequence[float]) -> Scores:
    """Σ weight · scores of the same responses; dense if any are."""
    if all(isinstance(part, Tensor) for part in scores):
        return torch.stack([w * total_scores(part) for w, part in zip(weights, scores, strict=True)]).sum(dim=0)
    dense = [_as_dense(part) for part in scores]
    ends = torch.stack([w * torch.as_tensor(part.scores) for w, part in zip(weights, dense, strict=True)]).sum(dim=0)
    tokens, spans = [], []
    for row in range(len(ends)):
        of_parts = [w * part._within[0][row] for w, part in zip(weights, dense, strict=True)]
        lengths = {len(t) for t in of_parts if len(t)}
        tokens.append(torch.stack([t for t in of_parts if len(t)]).sum(dim=0) if lengths else torch.zeros(0))
        spans.append(
            [(a, b, w * s) for w, part in zip(weights, dense, strict=True) for a, b, s in part._within[1][row]]
        )
    return DenseScores(ends, tokens, spans)


def _floats(values: Tensor | Sequence[float]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32).detach().cpu()


def _as_dense(scores: Scores) -> DenseScores:
    if isinstance(scores, DenseScores):
        return scores
    return DenseScores(scores, [torch.zeros(0)] * len(scores), [[]] * len(scores))


def _completing_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[int]:
    """For each character of a response's text the first token with which it is there.

    A character of several bytes may take several tokens, before the last of which it is shown as another sign: so that
    what a beginning of the tokens decodes to counts as far as it agrees with the whole text.
    """
    beginnings = tokenizer.batch_decode([list(ids[:n]) for n in range(1, len(ids) + 1)], skip_special_tokens=True)
    found: list[int] = []
    for token, beginning in enumerate(beginnings):
        pairs = zip(beginning, text, strict=False)
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(beginning), len(text)))
        found += [token] * (agreed - len(found))
    return found + [len(ids) - 1] * (len(text) - len(found))
