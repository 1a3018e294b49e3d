"""Whether all contenders compute the same: their figures on one micro-batch, before anything is timed.

All start as the same functions, the learning rate is 0, the batch is one micro-batch, and its responses have full
length. What is left between two trainers is rounding, which in bfloat16 is much: TRL takes its old log-probabilities
from generation, ours come from a forward pass; adapters run under autocast here and without it there.
"""

from collections.abc import Mapping

from benchmarks.contenders import CONTENDERS
from benchmarks.errors import BenchmarkError

# How far from its partner's figure one may be: as a share of it, or absolutely where it is near 0. Measured on
# SmolLM2-135M-Instruct in bfloat16 (ours, TRL's with three PEFT models, and ours in float32): the policy's gradient
# 1.55, 1.39 and 1.53, the score 0.126, 0.133 and 0.148 (0.164 with the adapter in a whole model), the KL -2.9, -2.5 and
# -2.8; value losses 1.3 % apart, their gradients 4 % (AgileRL's 8 %), the sum of log-probabilities of a response 0.2 %.
# A KL is the difference of two such sums, and may be off by so much of their size.
TOLERANCES = {
    "score": (0.0, 0.05),
    "kl": (0.01, 0.0),
    "entropy": (0.01, 0.0),
    "policy_loss": (0.0, 0.02),
    "value_loss": (0.05, 0.0),
    "policy_gradient": (0.15, 0.0),
    "value_head_gradient": (0.1, 0.0),
}


def partner_of(name: str) -> str:
    """With whose figures those of a contender are compared: weights in 4 bits are other weights, and without a reward
    role all have the score 0, and so other advantages."""
    contender = CONTENDERS[name]
    return f"ours-separate{'' if contender.rewarded else '-unscored'}{'-nf4' if contender.quantised else ''}"


def differences(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One line for each figure, from `worker.compare`, that is further from its partner's than `TOLERANCES` allow."""
    lines = []
    for name, figures in found.items():
        if (partner := partner_of(name)) not in found:  # memory did not hold it
            continue
        for figure, (relative, absolute) in TOLERANCES.items():
            # The value loss of a shared value role reaches the policy's adapter too.
            if figure == "policy_gradient" and CONTENDERS[name].value == "shared":
                continue
            ours, theirs = found[partner][figure], figures[figure]
            # Not "more than": a figure that is not a number differs.
            size = found[partner]["entropy"] if figure == "kl" else ours
            if not abs(theirs - ours) <= relative * abs(size) + absolute:
                lines.append(f"{figure}: {theirs:.5g} in {name}, {ours:.5g} in {partner}")
    return lines


def check_equal(found: Mapping[str, Mapping[str, float]]) -> None:
    """Stop where the contenders do not compute the same.

    Raises:
        BenchmarkError: with every figure that differs.
    """
    lines = differences(found)
    if lines:
        raise BenchmarkError("the contenders do not compute the same, so nothing is timed. " + "; ".join(lines))
