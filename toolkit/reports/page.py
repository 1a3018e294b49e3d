"""One self-contained HTML page a stage: figures before and after, held-out pairs, curves, samples."""

import html
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.reports.pairs import ScoredPair, worst_errors

REPORT_FILE = "report.html"
_CURVES = (
    "score", "shaped_score", "kl", "length", "eos_share", "entropy", "policy_loss", "value_loss", "approx_kl",
    "clip_fraction", "loss", "accuracy", "eval_loss", "eval_score", "eval_kl", "eval_exact_match", "eval_accuracy",
)  # fmt: skip
_PAIRS_WHERE = {
    "the chosen response is longer": "chosen_longer",
    "the chosen response is shorter": "chosen_shorter",
    "both are of one length": "equal",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left; vertical-align: top }
td { white-space: pre-wrap; overflow-wrap: anywhere }
td.n { text-align: right; white-space: nowrap }
.curves svg { width: 100%; height: auto }
pre { background: #f6f6f6; padding: .8rem; overflow: auto }
small { color: #666 }
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[int]) -> str:
    """A table of escaped cells; `numbers` are the places of the columns that hold figures."""
    start = ['<td class="n">' if place in numbers else "<td>" for place in range(len(columns))]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = (zip(start, map(str, row), strict=True) for row in rows)
    body = "".join(f"<tr>{''.join(f'{td}{html.escape(cell)}</td>' for td, cell in line)}</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def svg(figure: Any) -> str:
    """A figure of matplotlib, as wide as the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return f'<div class="curves">{buffer.getvalue()[buffer.getvalue().index("<svg") :]}</div>'


def _curves(metrics: Sequence[dict[str, Any]]) -> str:
    names = [name for name in _CURVES if sum(name in row for row in metrics) > 1]
    if not names:
        return ""
    from matplotlib.figure import Figure  # takes half a second, which a command without a report does not pay

    columns, rows = 3, -(-len(names) // 3)
    figure = Figure(figsize=(11, 2.4 * rows), layout="constrained")
    for i, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, i)
        points = [(row["step"], row[name]) for row in metrics if name in row]
        axes.plot(*zip(*points, strict=True), linewidth=1.3)
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    return f"<h2>Curves</h2>{svg(figure)}"


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " – ".join(_number(v) for v in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _before_after(result: dict[str, Any]) -> str:
    before, after = result.get("before") or {}, result.get("after") or {}
    rows = ((key, _number(before.get(key, "–")), _number(value)) for key, value in after.items())
    return f"<h2>Before and after</h2>{table(('', 'before', 'after'), rows, numbers={1, 2})}"


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    rows = (
        (row["prompt"], row["before"], row["after"], f"{row['before_score']:.2f} → {row['after_score']:.2f}")
        for row in samples[:20]
    )
    return f"<h2>Samples</h2>{table(('prompt', 'before', 'after', 'score'), rows, numbers={3})}"


def _pairs_figure(evaluation: dict[str, Any], pairs: Sequence[ScoredPair]) -> str:
    from matplotlib.figure import Figure

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
    bins = evaluation["calibration"]["bins"]
    calibration.plot([0.5, 1], [0.5, 1], linewidth=0.8, color="gray")
    sizes = [20 + 180 * one["number"] / len(pairs) for one in bins]
    calibration.scatter([one["predicted"] for one in bins], [one["observed"] for one in bins], s=sizes)
    calibration.set(title="calibration", xlabel="predicted P(right)", ylabel="observed", ylim=(-0.05, 1.05))
    scores.legend(fontsize=8)
    lengths.legend(fontsize=8)
    return svg(figure)


def _accuracy(label: str, part: dict[str, Any]) -> tuple[object, ...]:
    if not part["pairs"]:
        return label, 0, "–", "–"
    low, high = part["accuracy_ci"]
    return label, part["pairs"], f"{part['accuracy']:.3f}", f"{low:.3f} – {high:.3f}"


def _error(row: dict[str, Any]) -> tuple[object, ...]:
    scores = f"{row['chosen_score']:.2f} − {row['rejected_score']:.2f} = {row['margin']:.2f}"
    return row["prompt"], row["chosen"], row["rejected"], scores


def _pairs(evaluation: dict[str, Any], pairs: Sequence[ScoredPair]) -> str:
    length, errors = evaluation["length"], worst_errors(pairs)
    accuracies = (_accuracy(label, length[name]) for label, name in _PAIRS_WHERE.items())
    worst = table(("prompt", "chosen", "rejected", "scores"), map(_error, errors[:10]), numbers={3})
    return (
        f"<h2>Held-out pairs</h2>{_pairs_figure(evaluation, pairs)}"
        f"<p>Expected calibration error {evaluation['calibration']['error']:.3f}. Score and length: Spearman "
        f"{length['spearman']:.2f}, Pearson {length['pearson']:.2f}; differences within a pair: Spearman "
        f"{length['spearman_within']:.2f}, Pearson {length['pearson_within']:.2f}.</p>"
        f"{table(('pairs where', 'number', 'accuracy', '95 %'), accuracies, numbers={1, 2, 3})}"
        f"{'<h2>Worst errors</h2>' + worst if errors else ''}"
    )


def write_report(
    folder: Path,
    result: dict[str, Any],
    metrics: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]],
    recipe: str,
    pairs: Sequence[ScoredPair] = (),
) -> Path:
    """Write the page into a stage's folder.

    Args:
        result: what goes to `result.json`.
        metrics: rows of the metrics file.
        samples: rows of `sample_rows`.
        recipe: the resolved one as YAML.
        pairs: held-out pairs of a reward, whose evaluation is `result["judgement"]`.
    """
    title = html.escape(f"{result['recipe']}: {result['stage']}")
    memory = ", ".join(f"{key} {value:.2f} GB" for key, value in result["peak_memory_gb"].items())
    figures = html.escape(f"seed {result['seed']} · {result['seconds']:.0f} s · peak memory {memory}")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{figures}</p>"
        f"{_before_after(result)}{_pairs(result['judgement'], pairs) if pairs else ''}"
        f"{_curves(metrics)}{_samples(samples)}"
        f"<h2>Recipe</h2><pre>{html.escape(recipe)}</pre>"
        f"<small>{html.escape(', '.join(f'{k} {v}' for k, v in result['versions'].items()))}</small></html>\n"
    )
    path = folder / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    return path
