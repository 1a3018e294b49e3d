"""Signs in the metrics of an update that a run goes wrong.

The metrics are equal in all of several processes, so that all of them decide the same. The thresholds are beyond what
our own runs had while they learnt what they should (doubling, three seeds: a KL of up to 0.53 nats a token, an entropy
down to 0.0025 with every response of its own, an explained variance of -0.002 to 0.03 in the first thirty updates, of
either sign); where they are argued, the argument stands beside them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """

    name: str
    number: Callable[[Any], float | None]
    out_of_bounds: Callable[[float], bool]
    text: str
    remedy: str
    updates: int = 1


def _metric(name: str) -> Callable[[Metrics], float | None]:
    return lambda metrics: metrics.get(name)


def _a_token(name: str) -> Callable[[Metrics], float | None]:
    return lambda metrics: metrics[name] / metrics["length"] if name in metrics and metrics.get("length") else None


def _distinct_of_certain(metrics: Metrics) -> float | None:
    """The share of different responses, of a policy that hardly ever says anything but its likeliest token.

    Below 0.05 nats the likeliest token has 99 % of the probability. By itself that is no fault: a task may have one
    right response to each prompt.
    """
    entropy = _a_token("entropy")(metrics)
    return metrics.get("distinct_share") if entropy is not None and entropy < 0.05 else None


GUARDS = (
    Guard(
        "kl_explosion",
        _a_token("kl"),
        lambda kl: kl > 1.0,  # the policy's tokens are e times as likely as the reference has them, each of them
        "the KL to the reference is {value:.2f} nats a token: the policy has become another model.",
        "Raise kl_coef, lower learning_rate, or set kl_target; go on from an earlier checkpoint.",
        updates=3,
    ),
    Guard(
        "entropy_collapse",
        _distinct_of_certain,
        lambda share: share < 0.5,
        "the policy is certain of every token, and only {value:.0%} of its responses are different ones.",
        "Raise kl_coef, set entropy_coef, or lower learning_rate; see in rollouts.jsonl what it says.",
        updates=3,
    ),
    Guard(
        "scores_equal",
        _metric("tied_share"),
        lambda share: share == 1.0,
        "all scores of an update have been the same number {updates} times in a row: there is nothing to learn from.",
        "See in rollouts.jsonl whether the reward tells good from bad; where all are as good as can be, stop here.",
        updates=3,
    ),
    Guard(
        "scores_at_bound",
        _metric("tied_share"),
        lambda share: 0.9 <= share < 1.0,
        "{value:.0%} of the scores are one number, as at the bound of a reward: little is left to learn from.",
        "Stop here, give harder prompts or a finer reward, or raise score_clip where it is set.",
        updates=10,
    ),
    Guard(
        "critic_explains_nothing",
        _metric("explained_variance"),
        lambda explained: explained <= 0.0,  # a critic that says the same of everything has 0
        "the critic has explained nothing of the returns for {updates} updates (explained_variance {value:.2f}).",
        "Raise value_learning_rate, train more updates before judging, or take value_pooling or start.value.",
        updates=30,
    ),
    Guard(
        "nothing_ends",
        _metric("eos_share"),
        lambda share: share == 0.0,
        "no response has ended by itself for {updates} updates: each is cut at the limit.",
        "Set missing_eos_penalty, or raise response_length; a base that was never taught to end needs the sft stage.",
        updates=5,
    ),
    Guard(
        "steps_skipped",
        _metric("skipped_steps"),
        lambda number: number >= 1,
        "{value:.0f} of the updates or optimizer steps were skipped, since something in them was not finite.",
        "A few do no harm. Where they go on: a lower learning_rate, or a base in float32.",
    ),
)
