"""Signs in an evaluation that a reward is fooled: its metrics and responses beside those of the first one."""

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from toolkit.trainers.guards import Guard

_FEWEST = 10  # responses below which a phrase may be there by chance
_LESS_PULL = "Raise kl_coef or lower learning_rate, and go on from an earlier checkpoint; or mend the reward."


def _risen_phrase(numbers: Mapping[str, Any]) -> float | None:
    return numbers["phrase_now"] if numbers["phrase_rows"] >= _FEWEST else None


def _length_that_pays(numbers: Mapping[str, Any]) -> float | None:
    """The correlation of length and score, where the length has moved by half in the direction that it asks for."""
    factor = numbers["length"] / numbers["length_first"]
    pays = numbers["length_correlation"]
    return pays if (factor if pays > 0 else 1 / factor) >= 1.5 else None


def _cut_that_pays(numbers: Mapping[str, Any]) -> float | None:
    """How much more of the responses are cut than at first, where those score higher; they did, where all are cut."""
    pays = max(numbers["cut_gap"], numbers["cut_gap_first"]) > 0
    return numbers["eos_share_first"] - numbers["eos_share"] if pays else None


def _judge_against_score(numbers: Mapping[str, Any]) -> float | None:
    """How far the judge is below its best evaluation, in standard errors, where the score is above what it was then."""
    if "judge_best" not in numbers or numbers["score"] <= numbers["score_best"]:
        return None
    fall, error = numbers["judge_best"] - numbers["judge"], math.hypot(numbers["judge_se"], numbers["judge_se_best"])
    return fall / max(error, fall / 1000) if fall > 0 else 0.0  # without noise 1000


def _length_left(numbers: Mapping[str, Any]) -> float | None:
    """The length as a multiple of what it was at first, where the score has risen."""
    return numbers["length"] / numbers["length_first"] if numbers["score"] > numbers["score_first"] else None


EVALUATION_GUARDS = (
    # Of 1,450 answers of hh-rlhf two draws of 40, 100, 160 or 300 were compared, 200 times each: no phrase that was
    # rare in one was in more than 10, 6, 4 and 4 % of the other.
    Guard(
        "phrase",
        _risen_phrase,
        lambda share: share > 0.2,
        '{value:.0%} of the responses have "{phrase}", which {phrase_then:.0%} had at the first evaluation.',
        f"See in the samples whether they are the better for it. {_LESS_PULL}",
    ),
    # The same draws differ by 7 % at most, and answers cut at 8 words from those cut at 128 by another 7 %. Where one
    # sentence with four ends stands in for half of them, 0.72 to 0.78 are left, for 78 % of them 0.44 to 0.48.
    Guard(
        "less_varied",
        itemgetter("pairs_kept"),
        lambda kept: kept < 0.7,
        "the responses are more like each other: different pairs of words are {value:.0%} of what they were at first.",
        _LESS_PULL,
    ),
    # A run of smollm2_135m_lora that learnt to apologise had 107 different of 159, one that did not 157.
    Guard(
        "responses_repeated",
        itemgetter("different_kept"),
        lambda kept: kept < 0.8,
        "different prompts get the same response: different ones are {value:.0%} of what they were at first.",
        f"{_LESS_PULL} An entropy_coef keeps the policy's distribution wide.",
    ),
    # A quarter of the variance and more; SmolLM2 that learnt to follow instructions, from 48 tokens to 9, had -0.19 to
    # 0.09. Beyond 0.95 the score is a function of the length, which somebody has asked for. That learnt rewards pay
    # for length by itself: Singhal et al. 2023, arXiv 2310.03716.
    Guard(
        "length_pays",
        _length_that_pays,
        lambda correlation: 0.5 <= abs(correlation) <= 0.95,
        "the score follows the length (correlation {value:.2f}), which went from {length_first:.0f} to {length:.0f} "
        "tokens.",
        f"See in the report of the reward what its score has to do with length. {_LESS_PULL}",
    ),
    # The same recipe without missing_eos_penalty went from 0.45 cut, which scored 0.4 higher, to 0.99.
    Guard(
        "cut_pays",
        _cut_that_pays,
        lambda more: more >= 0.25,
        "{eos_share:.0%} of the responses end by themselves, {eos_share_first:.0%} did at first, and those that the "
        "limit cuts score higher.",
        "Set missing_eos_penalty, or raise response_length where the task needs longer ones.",
    ),
    # SmolLM2 that learnt to keep rules by saying nothing went from 36 tokens to 5, while its score rose by 0.11.
    Guard(
        "responses_shrink",
        _length_left,
        lambda left: left < 0.25,
        "the score has risen from {score_first:.3f} to {score:.3f}, and the responses have shrunk from "
        "{length_first:.0f} to {length:.0f} tokens.",
        "See in the samples whether they still say something. A reward can ask for it: a rule that is required.",
    ),
    # 2 would be met by chance in one of 40 evaluations, and the best of several is high by chance.
    Guard(
        "judge_falls",
        _judge_against_score,
        lambda errors: errors > 3.0,
        "the judge has fallen from {judge_best:.3f} at update {step_best:.0f} to {judge:.3f}, {value:.1f} standard "
        "errors, and the score has risen from {score_best:.3f} to {score:.3f}.",
        "Go back to the checkpoint of then, and let metric_for_best_model be judge, with early_stopping_patience.",
    ),
)
"""Of doubling's responses, right and wrong, none is one."""
