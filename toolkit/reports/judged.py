"""What a reward makes of held-out pairs: how sure it is and how rightly, whether it counts words, and where it errs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.functional import (
    calibration_bins,
    expected_calibration_error,
    pearson_correlation,
    spearman_correlation,
    wilson_interval,
)

ERRORS_FILE = "errors.jsonl"
SCORES_FILE = "scores.jsonl"
_WORST = 20
_QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}

JudgedPair = dict[str, Any]
"""One held-out pair: `prompt`, `chosen` and `rejected` (text), `chosen_score`, `rejected_score`, `chosen_length` and
`rejected_length` (tokens of the response)."""


def _column(pairs: Sequence[JudgedPair], name: str) -> Tensor:
    return torch.tensor([pair[name] for pair in pairs], dtype=torch.float64)


def _distribution(scores: Tensor) -> dict[str, float]:
    quantiles = {name: float(scores.quantile(share)) for name, share in _QUANTILES.items()}
    return {"mean": float(scores.mean()), "std": float(scores.std(unbiased=False)), **quantiles}


def _accuracy(margins: Tensor) -> dict[str, Any]:
    """Of some pairs; None where there are none."""
    number, right = len(margins), int((margins > 0).sum())
    interval = list(wilson_interval(right, number)) if number else None
    return {"pairs": number, "accuracy": right / number if number else None, "accuracy_ci": interval}


def judgement(pairs: Sequence[JudgedPair]) -> dict[str, Any]:
    """Score distributions, calibration, and what the score has to do with length.

    Each pair is turned so that the side with the higher score comes first: σ(|difference|) is the probability that it
    is the better one, and it came true where it is the chosen one. A tie counts half.

    Args:
        pairs: at least one.

    Returns:
        `chosen` and `rejected`: distributions of the scores. `calibration`: `error` (expected calibration error) and
        `bins`. `length`: `pearson` and `spearman` of score and length over all responses, the same of the two
        differences within a pair as `pearson_within` and `spearman_within`, and the accuracy where the chosen
        response is `chosen_longer`, `chosen_shorter` or of `equal` length.
    """
    chosen, rejected = _column(pairs, "chosen_score"), _column(pairs, "rejected_score")
    margins = chosen - rejected
    lengths = [_column(pairs, f"{side}_length") for side in ("chosen", "rejected")]
    apart = lengths[0] - lengths[1]
    bins = calibration_bins(torch.sigmoid(margins.abs()), (torch.sign(margins) + 1) / 2)
    scores, every_length = torch.cat([chosen, rejected]), torch.cat(lengths)
    return {
        "chosen": _distribution(chosen),
        "rejected": _distribution(rejected),
        "calibration": {"error": expected_calibration_error(bins), "bins": [one._asdict() for one in bins]},
        "length": {
            "pearson": pearson_correlation(scores, every_length),
            "spearman": spearman_correlation(scores, every_length),
            "pearson_within": pearson_correlation(margins, apart),
            "spearman_within": spearman_correlation(margins, apart),
            "chosen_longer": _accuracy(margins[apart > 0]),
            "chosen_shorter": _accuracy(margins[apart < 0]),
            "equal": _accuracy(margins[apart == 0]),
        },
    }


def worst_errors(pairs: Sequence[JudgedPair]) -> list[dict[str, Any]]:
    """The pairs that are judged most wrongly, the worst first: those whose rejected side scores higher, 20 at most."""
    rows = [{"margin": pair["chosen_score"] - pair["rejected_score"], **pair} for pair in pairs]
    return sorted((row for row in rows if row["margin"] < 0), key=lambda row: row["margin"])[:_WORST]
