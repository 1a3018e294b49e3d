"""One self-contained HTML page a stage: figures before and after, curves, samples."""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.reports.judged import JudgedPair
from toolkit.reports.judged_page import judged_section

REPORT_FILE = "report.html"
_CURVES = (
    "score", "shaped_score", "kl", "length", "eos_share", "entropy", "policy_loss", "value_loss", "approx_kl",
    "clip_fraction", "loss", "accuracy", "eval_loss", "eval_score", "eval_kl", "eval_exact_match", "eval_accuracy",
)  # fmt: skip
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


def _curves(metrics: Sequence[dict[str, Any]]) -> str:
    names = [name for name in _CURVES if sum(name in row for row in metrics) > 1]
    if not names:
        return ""
    from matplotlib.figure import Figure  # half a second that a command without a report does not pay

    columns, rows = 3, -(-len(names) // 3)
    figure = Figure(figsize=(11, 2.4 * rows), layout="constrained")
    for i, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, i)
        points = [(row["step"], row[name]) for row in metrics if name in row]
        axes.plot(*zip(*points, strict=True), linewidth=1.3)
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return f'<h2>Curves</h2><div class="curves">{buffer.getvalue()[buffer.getvalue().index("<svg") :]}</div>'


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " – ".join(_number(v) for v in value)
    return f"{value:.4f}" if isinstance(value, float) else html.escape(str(value))


def _before_after(result: dict[str, Any]) -> str:
    before, after = result.get("before") or {}, result.get("after") or {}
    rows = "".join(
        f'<tr><td>{html.escape(key)}</td><td class="n">{_number(before.get(key, "–"))}</td>'
        f'<td class="n">{_number(after[key])}</td></tr>'
        for key in after
    )
    return f"<h2>Before and after</h2><table><tr><th></th><th>before</th><th>after</th></tr>{rows}</table>"


def _samples(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(str(row[key]))}</td>" for key in ("prompt", "before", "after"))
        + f'<td class="n">{row["before_score"]:.2f} → {row["after_score"]:.2f}</td></tr>'
        for row in rows[:20]
    )
    return f"<h2>Samples</h2><table><tr><th>prompt</th><th>before</th><th>after</th><th>score</th></tr>{body}</table>"


def write_report(
    folder: Path,
    result: dict[str, Any],
    metrics: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]],
    recipe: str,
    judged: Sequence[JudgedPair] = (),
) -> Path:
    """Write the page.

    Args:
        folder: of the stage.
        result: what goes to `result.json`.
        metrics: rows of the metrics file.
        samples: rows of `sample_rows`; may be empty.
        recipe: the resolved recipe as YAML.
        judged: held-out pairs of a reward, on which `result["judgement"]` is; may be empty.

    Returns:
        The path of the page.
    """
    title = html.escape(f"{result['recipe']}: {result['stage']}")
    memory = ", ".join(f"{key} {value:.2f} GB" for key, value in result["peak_memory_gb"].items())
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>seed {result['seed']} · {result['seconds']:.0f} s · peak memory {memory}</p>"
        f"{_before_after(result)}{judged_section(result['judgement'], judged) if judged else ''}"
        f"{_curves(metrics)}{_samples(samples)}"
        f"<h2>Recipe</h2><pre>{html.escape(recipe)}</pre>"
        f"<small>{html.escape(', '.join(f'{k} {v}' for k, v in result['versions'].items()))}</small></html>\n"
    )
    path = folder / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    return path
