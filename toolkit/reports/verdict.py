"""What came of a run in a sentence, measured by its own noise."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

NOISE = 2.0
"""Standard errors below which a difference is not told from chance: about 95 of 100."""


def verdict(result: dict[str, Any], samples: Sequence[dict[str, Any]] = ()) -> str:
    """Whether the score, and that of a judge, rose by more than its noise; empty where there is no score, or of one
    prompt alone, which has no noise to hold it against.

    Args:
        result: with `before` and `after`, where they are known.
        samples: rows of `sample_rows`: with them the difference is of pairs, which have less noise.
    """
    if len(samples) == 1:
        return ""
    return " ".join(filter(None, (_change(name, result, samples) for name in ("score", "judge"))))


def _change(name: str, result: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """A sentence on the score or the judge; empty where it is not known."""
    scored = (row.get(f"{side}_{name}") for row in samples for side in ("before", "after"))
    if len(samples) > 1 and all(isinstance(score, (int, float)) for score in scored):
        changes = [row[f"after_{name}"] - row[f"before_{name}"] for row in samples]
        difference, of = statistics.fmean(changes), f"over the same {len(samples)} prompts"
        error = statistics.stdev(changes) / math.sqrt(len(changes))
    else:
        sides = (result.get("before") or {}, result.get("after") or {})
        given = [side.get(key) for side in sides for key in (name, f"{name}_se")]
        numbers = [float(value) for value in given if isinstance(value, (int, float)) and math.isfinite(value)]
        if len(numbers) < len(given):
            return ""
        first, first_se, last, last_se = numbers
        difference, error, of = last - first, math.hypot(first_se, last_se), "of two means"
    if error == 0:
        what = "did not change" if difference == 0 else f"changed by {difference:+.4g}"
        return f"The {name} {what}, without noise ({of})."
    sizes = f"{difference:+.4g} ± {error:.2g}, {abs(difference) / error:.1f} standard errors {of}"
    if abs(difference) < NOISE * error:
        return f"The {name} did not change by more than its noise: {sizes}."
    return f"The {name} {'rose' if difference > 0 else 'fell'}: {sizes}."
