"""Signs in what a policy says that its reward is being fooled: figures of responses alone, which need no judge.

A word is what stands between white space, so that a text without any has one, and no phrase.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.data import Rollout
from toolkit.functional import pearson_correlation

SIGNS = ("distinct_2", "distinct_share", "opening_share", "phrase_share", "length_correlation", "cut_gap")
"""Names of the figures that `signs_of` gives of any reward."""
PHRASE = 4  # words; fewer are shared by right answers of one form
RARE = 0.05
"""Share of responses that have a rare phrase, at most. In 1,450 answers of hh-rlhf the commonest is in 0.017."""

Words = tuple[str, ...]


def signs_of(rollout: Rollout, scores: Tensor, high: float | None = None) -> dict[str, float]:
    """The figures of B responses and their scores (B,).

    `distinct_2`: different pairs of neighbouring words, as a share of all pairs (Li et al. 2016, arXiv 1510.03055); 1
    where there are none. `distinct_share`: see there. `opening_share` and `phrase_share`: responses that begin with the
    commonest four words, and that have the commonest four words in a row, as shares of all. `length_correlation`:
    Pearson's, of tokens and score. `cut_gap`: the mean score of responses that the limit cut less that of those that
    ended; 0 where there are none of one kind. `beyond_share`: scores above `high`, as a share of all; none without.
    """
    rows, ended = len(rollout), torch.tensor(list(rollout.ended), dtype=torch.bool)
    openings = Counter(words[:PHRASE] for words in map(_words, rollout.responses) if len(words) >= PHRASE)
    cut, whole = scores[~ended], scores[ended]
    beyond = {} if high is None else {"beyond_share": int((scores > high).sum()) / rows}
    return {
        "distinct_2": _distinct_2(rollout.responses),
        "distinct_share": distinct_share(rollout),
        "opening_share": max(openings.values(), default=0) / rows,
        "phrase_share": max(_phrases(rollout.responses).values(), default=0) / rows,
        "length_correlation": pearson_correlation(torch.tensor(rollout.lengths), scores),
        "cut_gap": float(cut.mean() - whole.mean()) if len(cut) and len(whole) else 0.0,
        **beyond,
    }


def distinct_share(rollout: Rollout) -> float:
    """Different responses, as a share of the different prompts; at most 1."""
    return min(1.0, len(set(map(tuple, rollout.response_ids))) / len(set(rollout.prompts)))


def since_first(responses: Sequence[str], first: Sequence[str]) -> dict[str, Any]:
    """What responses have become since the first evaluation, over equally many of each: shares depend on how many.

    `pairs_kept`: different pairs of neighbouring words as a multiple of what there were, over the first pairs of each
    response, as many as its shorter one has, now or then, for the share falls as texts grow; 1 where there are none.
    `different_kept`: different responses as a multiple of what there were; 1 where a response is shorter than a phrase
    on average. `phrase`: the commonest of the phrases that were rare; empty where there is none. `phrase_rows`:
    responses that have it; `phrase_now`: their share; `phrase_then`: the share that had it at first.
    """
    rows = min(len(responses), len(first))
    now, then = responses[:rows], first[:rows]
    pairs = [[_runs(text, 2) for text in texts] for texts in (now, then)]
    shorter = [min(map(len, both)) for both in zip(*pairs, strict=True)]
    left, had = (len({p for of, n in zip(side, shorter, strict=True) for p in of[:n]}) for side in pairs)
    mean_words = sum(len(_words(text)) for text in now) / rows
    counts, earlier = _phrases(now), _phrases(then)
    risen = {phrase: count for phrase, count in counts.items() if earlier[phrase] <= RARE * rows}
    phrase = max(risen, key=risen.__getitem__, default=())
    return {
        "pairs_kept": left / had if had else 1.0,
        "different_kept": len(set(now)) / len(set(then)) if mean_words >= PHRASE else 1.0,
        "phrase": " ".join(phrase),
        "phrase_rows": counts[phrase],
        "phrase_now": counts[phrase] / rows,
        "phrase_then": earlier[phrase] / rows,
    }


def _words(text: str) -> Words:
    return tuple(text.split())


def _runs(text: str, length: int) -> list[Words]:
    words = _words(text)
    return [words[i : i + length] for i in range(len(words) - length + 1)]


def _phrases(texts: Iterable[str]) -> Counter[Words]:
    """How many texts have each phrase, however often."""
    return Counter(phrase for text in texts for phrase in dict.fromkeys(_runs(text, PHRASE)))


def _distinct_2(texts: Iterable[str]) -> float:
    pairs = [pair for text in texts for pair in _runs(text, 2)]
    return len(set(pairs)) / len(pairs) if pairs else 1.0
