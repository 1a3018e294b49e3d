"""Signs that a run goes wrong, in the metrics of an update, or that a reward is fooled, in an evaluation; each is a
warning, given once, with its number and what to try.

The metrics are equal in all of several processes, so that all of them decide the same. The thresholds are beyond what
our own runs had while they learnt what they should (doubling, three seeds: a KL of up to 0.53 nats a token, an entropy
down to 0.0025 with every response of its own, an explained variance of -0.002 to 0.03 in the first thirty updates, of
either sign); where they are argued, the argument stands beside them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import itemgetter, methodcaller
from typing import Any

from toolkit.sampling import since_first

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Guard:
    """A sign: it is there when its number has been out of bounds for some updates in a row.

    Args:
        name: of the warning.
        number: what is watched, from the metrics of an update, or of an evaluation; None where they do not have it.
        out_of_bounds: whether a number is a sign.
        text: what is told, with `value`, `updates` and the metrics.
        remedy: what to try.
        updates: so many in a row, or evaluations.
        unless: a warning that says more, before it in the table: once that is given, this one is not.
    """

    name: str
    number: Callable[[Any], float | None]
    out_of_bounds: Callable[[float], bool]
    text: str
    remedy: str
    updates: int = 1
    unless: str = ""


def _a_token(name: str) -> Callable[[Metrics], float | None]:
    return lambda metrics: metrics[name] / metrics["length"] if name in metrics and metrics.get("length") else None


def _distinct_of_certain(metrics: Metrics) -> float | None:
    """The share of different responses, of a policy that hardly ever says anything but its likeliest token.

    Below 0.05 nats the likeliest token has 99 % of the probability. By itself that is no fault: a task may have one
    right response to each prompt.
    """
    entropy = _a_token("entropy")(metrics)
    return metrics.get("distinct_share") if entropy is not None and entropy < 0.05 else None


def _all_dropped(metrics: Metrics) -> float | None:
    """How many responses an update has dropped that had no others."""
    nothing_left = metrics.get("optimizer_steps") == 0 and "score" not in metrics  # float16 may pass over all steps
    return metrics.get("dropped_responses") if nothing_left else None


def _ending(metrics: Metrics) -> float | None:
    """The share that ends by itself, where it is that of all responses: those that are dropped are short ones."""
    return None if metrics.get("dropped_responses") else metrics.get("eos_share")


GUARDS = (
    Guard(
        "kl_explosion",
        _a_token("kl"),
        lambda kl: kl > 1.0,  # the policy's tokens are e times as likely as the reference has them, each of them
        "the KL to the reference is {value:.2f} nats a token: the policy has become another model.",
        "Begin a new run with a higher kl_coef or a lower learning_rate, or set kl_target.",
        updates=3,
    ),
    Guard(
        "entropy_collapse",
        _distinct_of_certain,
        lambda share: share < 0.5,
        "the policy is certain of every token, and only {value:.0%} of its responses are different ones.",
        "See in rollouts.jsonl what it says. Another kl_coef, entropy_coef or learning_rate takes a new run.",
        updates=3,
    ),
    Guard(
        "scores_equal",
        methodcaller("get", "tied_share"),
        lambda share: share == 1.0,
        "all scores of an update were equal, {updates} updates in a row: there is nothing to learn from but penalties.",
        "See in rollouts.jsonl whether the reward tells good from bad; where all are as good as can be, stop here.",
        updates=3,
    ),
    Guard(
        "scores_at_bound",
        methodcaller("get", "tied_share"),
        lambda share: share >= 0.9,
        "{value:.0%} of the scores are equal, as when a reward is at its bound: little is left to learn from.",
        "Stop here, give harder prompts or a finer reward, or raise score_clip where it is set.",
        updates=10,
        unless="scores_equal",
    ),
    Guard(
        "critic_explains_nothing",
        methodcaller("get", "explained_variance"),
        lambda explained: explained <= 0.0,  # a critic that says the same of everything has 0
        "the critic has explained nothing of the returns for {updates} updates (explained_variance {value:.2f}).",
        "Raise value_learning_rate, train more updates before judging, or take value_pooling or start.value.",
        updates=30,
    ),
    Guard(
        "nothing_ends",
        _ending,
        lambda share: share == 0.0,
        "no response has ended by itself for {updates} updates: each is cut at the limit.",
        "Where responses are continuations of so many tokens this is no fault. Else set missing_eos_penalty, or raise "
        "response_length; a base that was never taught to end needs the sft stage. One that another tool taught to end "
        "turns with a token of the chat template may need that among its stops: toolkit check names it.",
        updates=5,
    ),
    Guard(
        "all_dropped",
        _all_dropped,
        lambda number: number > 0,
        "all responses of {updates} updates in a row were shorter than min_response_length, and dropped: nothing was "
        "learnt.",
        "See in rollouts.jsonl what the policy says. Begin a new run with a lower min_response_length, or with "
        "short_response_penalty in place of drop_short_responses.",
        updates=3,
    ),
    Guard(
        "sampler_gap",
        methodcaller("get", "sampler_gap"),
        lambda gap: gap > 0.2,  # in bfloat16 it was 0.03 to 0.05, merged or not
        "sampling and update log-probabilities differ by {value:.2f} nats a token on average.",
        "Set importance_sampling_cap to 2, which corrects for it; or set base.dtype to float32 or generation to eager.",
        updates=3,
    ),
    Guard(
        "steps_skipped",
        methodcaller("get", "skipped_steps"),
        lambda number: number >= 1,
        "{value:.0f} of the updates or optimizer steps were skipped, since something in them was not finite.",
        "A few do no harm. Where they go on: a lower learning_rate, or a base in float32.",
    ),
)

# ---------------------------------------------------------------------- an evaluation beside the first one

_FEWEST = 10  # responses below which a phrase may be there by chance
_LESS_PULL = "Begin a new run with a higher kl_coef or a lower learning_rate; or mend the reward."


def _length_that_pays(numbers: Mapping[str, Any]) -> float | None:
    """The correlation of length and score, where the length has moved by half in the direction that it asks for."""
    factor = numbers["length"] / numbers["length_first"]
    pays = numbers["length_correlation"]
    return pays if (factor if pays > 0 else 1 / factor) >= 1.5 else None


def _cut_that_pays(numbers: Mapping[str, Any]) -> float | None:
    """How much more of the responses are cut than at first, where those score higher; they did, where all are cut."""
    pays = numbers["cut_gap" if numbers["eos_share"] else "cut_gap_first"] > 0
    return numbers["eos_share_first"] - numbers["eos_share"] if pays else None


def _judge_against_score(numbers: Mapping[str, Any]) -> float | None:
    """How far the judge is below its best evaluation, in standard errors, where the score is above what it was then."""
    if not {"judge", "judge_best"} <= numbers.keys():  # an evaluation may have a judge that the one before had not
        return None
    if numbers["score"] <= numbers["score_best"] or numbers["prompts"] < 2:
        return None  # of one prompt there is no error
    fall, error = numbers["judge_best"] - numbers["judge"], math.hypot(numbers["judge_se"], numbers["judge_se_best"])
    return fall / max(error, fall / 1000) if fall > 0 else 0.0  # without noise 1000


def _length_left(numbers: Mapping[str, Any]) -> float | None:
    """The length as a multiple of what it was at first, where the score has risen."""
    return numbers["length"] / numbers["length_first"] if numbers["score"] > numbers["score_first"] else None


EVALUATION_GUARDS = (
    # By chance: `benchmarks.signs`. Of 400 runs of six draws of hh-rlhf's answers none crosses it, of 40 or of 300.
    Guard(
        "phrase",
        lambda numbers: numbers["phrase_now"] if numbers["phrase_rows"] >= _FEWEST else None,
        lambda share: share > 0.2,
        '{value:.0%} of the responses have "{phrase}", which {phrase_then:.0%} had at the first evaluation.',
        f"See in the samples whether they are the better for it. {_LESS_PULL}",
    ),
    # Nor this one. Where one sentence with four ends stands in for half of 40 it is crossed in one run of 400, for 78 %
    # of them in each.
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
        lambda more: more >= 0.25 - 1e-9,  # from 4 of 40 to 14 is less by rounding
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
    # Halves of the scores of 159 held-out pairs of hh-rlhf were compared, 2,000 times: of 80, 159 responses more than
    # 0.10, 0.06 were beyond in one of 100. Of a policy that learnt to say "no" 0.16 were, 0.04 before.
    Guard(
        "beyond_reward",
        lambda numbers: numbers.get("beyond_share"),
        lambda share: share > 0.15,
        "{value:.0%} of the responses score higher than 99% of the held-out ones that the reward was measured on: it "
        "judges what it has hardly met.",
        f"See in the samples whether they are good. {_LESS_PULL}",
    ),
    # 2 would be met by chance in one of 40 evaluations, and the best of several is high by chance.
    Guard(
        "judge_falls",
        _judge_against_score,
        lambda errors: errors > 3.0,
        "the judge has fallen from {judge_best:.3f} at update {step_best:.0f} to {judge:.3f}, {value:.1f} standard "
        "errors, and the score has risen from {score_best:.3f} to {score:.3f}.",
        "Go back to the checkpoint of then (--checkpoint of chat, eval and export), and let metric_for_best_model be "
        "judge, with early_stopping_patience.",
    ),
)
"""Of doubling's responses, right and wrong, none is one."""


# ---------------------------------------------------------------------- at work


@dataclass
class Watch:
    """Guards at work over a run."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    given: list[dict[str, Any]] = field(default_factory=list)
    """Warnings so far, one of each guard at most: `step`, `name`, `value`, `text`, `remedy`."""
    first: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The `metrics` and `responses` of the first evaluation, by a digest of its prompts."""
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    """Likewise the metrics of the evaluation that the judge liked best, with its `step`."""

    def seen(self, step: int, metrics: Metrics) -> list[dict[str, Any]]:
        """The warnings that the metrics of an update are reason for, and that were not given before."""
        return self._new(GUARDS, step, metrics)

    def evaluated(
        self, step: int, metrics: Metrics, responses: Sequence[str], prompts: Sequence[str]
    ) -> list[dict[str, Any]]:
        """The warnings that an evaluation is reason for, held against the first one of the same prompts, and that were
        not given before."""
        first, best = self.measured(step, metrics, responses, prompts)
        numbers: dict[str, Any] = {**metrics, "prompts": len(set(prompts))}
        numbers |= since_first(responses, first["responses"])
        for moment, held in (("first", first["metrics"]), ("best", best)):
            numbers |= {f"{name}_{moment}": value for name, value in held.items()}
        return self._new(EVALUATION_GUARDS, step, numbers)

    def measured(
        self, step: int, metrics: Metrics, responses: Sequence[str], prompts: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Keep an evaluation that is the first one of its prompts, or the judge's best; `first` and `best` of them."""
        asked = sha256("\0".join(prompts).encode()).hexdigest()
        first = self.first.setdefault(asked, {"metrics": dict(metrics), "responses": list(responses)})
        if "judge" in metrics and (asked not in self.best or metrics["judge"] > self.best[asked]["judge"]):
            self.best[asked] = {**metrics, "step": float(step)}
        return first, self.best.get(asked, {})

    def _new(self, guards: Iterable[Guard], step: int, numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
        told = {warning["name"] for warning in self.given}
        new = []
        for guard in guards:
            value = guard.number(numbers)
            there = value is not None and guard.out_of_bounds(value)
            self.in_a_row[guard.name] = self.in_a_row.get(guard.name, 0) + 1 if there else 0
            if not told & {guard.name, guard.unless} and self.in_a_row[guard.name] >= guard.updates:
                told.add(guard.name)
                text = guard.text.format(**{**numbers, "value": value, "updates": guard.updates})
                about = {"step": step, "name": guard.name, "value": value, "text": text, "remedy": guard.remedy}
                new.append(about)
        self.given += new
        return new
