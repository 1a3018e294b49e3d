"""The part of a reward's report page that shows what it makes of held-out pairs."""

import html
import io
from collections.abc import Sequence
from typing import Any

from toolkit.reports.judged import JudgedPair, worst_errors

_SHOWN = 10


def _figure(found: dict[str, Any], pairs: Sequence[JudgedPair]) -> str:
    from matplotlib.figure import Figure  # as in `page`

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    scores, calibration, lengths = figure.subplots(1, 3)
    sides = {side: [pair[f"{side}_score"] for pair in pairs] for side in ("chosen", "rejected")}
    every = sides["chosen"] + sides["rejected"]
    span = (min(every), max(every)) if min(every) < max(every) else None
    for side, values in sides.items():
        scores.hist(values, bins=25, range=span, alpha=0.55, label=side)
        lengths.scatter([pair[f"{side}_length"] for pair in pairs], values, s=8, alpha=0.6, label=side)
    scores.set(title="scores", xlabel="score", ylabel="responses")
    lengths.set(title="score and length", xlabel="tokens of the response", ylabel="score")
    bins = found["calibration"]["bins"]
    calibration.plot([0.5, 1], [0.5, 1], linewidth=0.8, color="gray")
    sizes = [20 + 180 * one["number"] / len(pairs) for one in bins]
    calibration.scatter([one["predicted"] for one in bins], [one["observed"] for one in bins], s=sizes)
    calibration.set(title="calibration", xlabel="predicted P(right)", ylabel="observed", ylim=(-0.05, 1.05))
    scores.legend(fontsize=8)
    lengths.legend(fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return f'<div class="curves">{buffer.getvalue()[buffer.getvalue().index("<svg") :]}</div>'


def _accuracy(label: str, part: dict[str, Any]) -> str:
    if not part["pairs"]:
        return f'<tr><td>{label}</td><td class="n">0</td><td class="n">–</td><td class="n">–</td></tr>'
    low, high = part["accuracy_ci"]
    return (
        f'<tr><td>{label}</td><td class="n">{part["pairs"]}</td><td class="n">{part["accuracy"]:.3f}</td>'
        f'<td class="n">{low:.3f} – {high:.3f}</td></tr>'
    )


def _error(row: dict[str, Any]) -> str:
    texts = "".join(f"<td>{html.escape(str(row[key]))}</td>" for key in ("prompt", "chosen", "rejected"))
    figures = f"{row['chosen_score']:.2f} − {row['rejected_score']:.2f} = {row['margin']:.2f}"
    return f'<tr>{texts}<td class="n">{figures}</td></tr>'


def judged_section(found: dict[str, Any], pairs: Sequence[JudgedPair]) -> str:
    """HTML of the section.

    Args:
        found: from `judgement`.
        pairs: those that it was made from.
    """
    length, errors = found["length"], worst_errors(pairs)
    rows = "".join(
        _accuracy(label, length[key])
        for label, key in (
            ("the chosen response is longer", "chosen_longer"),
            ("the chosen response is shorter", "chosen_shorter"),
            ("both are of one length", "equal"),
        )
    )
    shown = "".join(_error(row) for row in errors[:_SHOWN])
    worst = (
        "<h2>Worst errors</h2><table><tr><th>prompt</th><th>chosen</th><th>rejected</th><th>scores</th></tr>"
        f"{shown}</table>"
    )
    return (
        f"<h2>Held-out pairs</h2>{_figure(found, pairs)}"
        f"<p>Expected calibration error {found['calibration']['error']:.3f}. Score and length: Spearman "
        f"{length['spearman']:.2f}, Pearson {length['pearson']:.2f}; differences within a pair: Spearman "
        f"{length['spearman_within']:.2f}, Pearson {length['pearson_within']:.2f}.</p>"
        "<table><tr><th>pairs where</th><th>number</th><th>accuracy</th><th>95 %</th></tr>"
        f"{rows}</table>{worst if errors else ''}"
    )
