"""Evaluation of a reward on held-out pairs: distribution of its scores, calibration, length, worst errors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit import functional as F

ERRORS_FILE = "errors.jsonl"
SCORES_FILE = "scores.jsonl"
_QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}

ScoredPair = dict[str, Any]
"""One held-out pair: `prompt`, `chosen` and `rejected` (text), `chosen_score`, `rejected_score`, `chosen_length` and
`rejected_length` (tokens of the response)."""


def of_responses(pairs: Iterable[ScoredPair]) -> list[float]:
    """The scores of both responses of each pair."""
    return [pair[f"{side}_score"] for pair in pairs for side in ("chosen", "rejected")]


def _distribution(scores: Tensor) -> dict[str, float]:
    quantiles = {name: float(scores.quantile(share)) for name, share in _QUANTILES.items()}
    return {"mean": float(scores.mean()), "std": float(scores.std(unbiased=False)), **quantiles}


def _accuracy(margins: Tensor) -> dict[str, Any]:
    number, right = len(margins), int((margins > 0).sum())
    interval = list(F.wilson_interval(right, number)) if number else None
    return {"pairs": number, "accuracy": right / number if number else None, "accuracy_ci": interval}


def pair_evaluation(pairs: Sequence[ScoredPair]) -> dict[str, Any]:
    """Score distributions, calibration, and what the score has to do with length, of at least one pair.

    Each pair is turned so that the side with the higher score comes first: σ(|difference|) is the probability that it
    is the better one, and it came true where it is the chosen one. A tie counts half.

    Returns:
        `chosen` and `rejected`: distributions of the scores. `calibration`: `error` (expected calibration error) and
        `bins`. `length`: `pearson` and `spearman` of score and length over all responses, the same of the two
        differences within a pair as `pearson_within` and `spearman_within`, and the accuracy where the chosen
        response is `chosen_longer`, `chosen_shorter` or of `equal` length.
    """
    columns = ("chosen_score", "rejected_score", "chosen_length", "rejected_length")
    table = torch.tensor([[pair[name] for name in columns] for pair in pairs], dtype=torch.float64)
    chosen, rejected, *lengths = table.T.contiguous()
    margins, apart = chosen - rejected, lengths[0] - lengths[1]
    bins = F.calibration_bins(torch.sigmoid(margins.abs()), (torch.sign(margins) + 1) / 2)
    scores, every_length = torch.cat([chosen, rejected]), torch.cat(lengths)
    return {
        "chosen": _distribution(chosen),
        "rejected": _distribution(rejected),
        "calibration": {"error": F.expected_calibration_error(bins), "bins": [one._asdict() for one in bins]},
        "length": {
            "pearson": F.pearson_correlation(scores, every_length),
            "spearman": F.spearman_correlation(scores, every_length),
            "pearson_within": F.pearson_correlation(margins, apart),
            "spearman_within": F.spearman_correlation(margins, apart),
            "chosen_longer": _accuracy(margins[apart > 0]),
            "chosen_shorter": _accuracy(margins[apart < 0]),
            "equal": _accuracy(margins[apart == 0]),
        },
    }


def worst_errors(pairs: Sequence[ScoredPair]) -> list[dict[str, Any]]:
    """The pairs whose rejected side scores higher, the largest difference first: 20 at most."""
    rows = [{"margin": pair["chosen_score"] - pair["rejected_score"], **pair} for pair in pairs]
    return sorted((row for row in rows if row["margin"] < 0), key=lambda row: row["margin"])[:20]
