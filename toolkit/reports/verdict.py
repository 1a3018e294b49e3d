"""What came of a run in a sentence, measured by its own noise."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.functional import standard_error
from toolkit.reports.evaluated import is_number

NOISE = 2.0
"""Standard errors below which a difference is not told from chance: about 95 of 100."""
_FEW = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10]
"""The same where the error is that of 2 pairs, 3 and so on: Student's t, its quantile 0.975 by degrees of freedom."""

_TOO_FEW = 5
"""Prompts below which equal changes are no sign that there is no noise."""


def verdict(result: dict[str, Any], samples: Sequence[dict[str, Any]] = ()) -> str:
    """Whether the score, and that of a judge, rose by more than its noise; empty where there is no score, or of one
    prompt alone, which has no noise to hold it against.

    Args:
        result: with `before` and `after`, where they are known.
        samples: rows of `sample_rows`: with them the difference is of pairs, which have less noise. Rows of one prompt
            are no evidence of their own.
    """
    held_out = (result.get("rows") or {}).get("held out")
    if len({row["prompt"] for row in samples}) == 1 or (not samples and held_out == 1):
        return ""
    return " ".join(filter(None, (_change(name, result, samples) for name in ("score", "judge"))))


def _change(name: str, result: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """A sentence on the score or the judge; empty where it is not known."""
    scored = (row.get(f"{side}_{name}") for row in samples for side in ("before", "after"))
    noise, number = NOISE, _TOO_FEW  # of two means nothing says of how many
    if samples and all(map(is_number, scored)):
        prompts = [row["prompt"] for row in samples]
        changes = [float(row[f"after_{name}"] - row[f"before_{name}"]) for row in samples]
        number = len(set(prompts))  # a prompt that stands several times is no more evidence: decoding is greedy
        difference, of = statistics.fmean(changes), f"over the same {number} prompts"
        error = standard_error(torch.tensor(changes, dtype=torch.float64), groups=prompts)
        noise = _FEW[number - 2] if number - 2 < len(_FEW) else NOISE
    else:
        sides = (result.get("before") or {}, result.get("after") or {})
        given = [side.get(key) for side in sides for key in (name, f"{name}_se")]
        numbers = [float(value) for value in given if is_number(value)]
        if len(numbers) < len(given):
            return ""
        first, first_se, last, last_se = numbers
        difference, error, of = last - first, math.hypot(first_se, last_se), "of two means"
    if error <= 1e-6 * abs(difference):  # of equal changes rounding leaves a little
        if difference and number < _TOO_FEW:
            return f"The {name} changed by {difference:+.4g} {of}, which are too few for a standard error."
        what = "did not change" if difference == 0 else f"changed by {difference:+.4g}"
        return f"The {name} {what}, without noise ({of})."
    sizes = f"{difference:+.4g} ± {error:.2g}, {abs(difference) / error:.1f} standard errors {of}"
    if abs(difference) < noise * error:
        return f"The {name} did not change by more than its noise: {sizes}."
    return f"The {name} {'rose' if difference > 0 else 'fell'}: {sizes}."
