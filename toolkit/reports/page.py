"""One page a stage: what came of it, curves, samples, what was run."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.data import PER_RULE
from toolkit.disk import write_whole, writing
from toolkit.reports.charts import bars, curves, histogram, scatter
from toolkit.reports.document import page, table
from toolkit.reports.evaluated import evaluations, is_number, points_of, spread_of
from toolkit.reports.files import memory_in_words
from toolkit.reports.pairs import ScoredPair, worst_errors
from toolkit.reports.verdict import verdict

REPORT_FILE = "report.html"
RELOADS_AFTER = 60  # seconds, of a stage that goes on
CURVES = (
    "score", "shaped_score", "kl", "length", "eos_share", "entropy", "distinct_share", "policy_loss", "value_loss",
    "explained_variance", "approx_kl", "clip_fraction", "grad_norm", "loss", "accuracy", "margin", "eval_loss",
    "eval_score", "eval_judge", "eval_kl", "eval_exact_match", "eval_accuracy", "eval_distinct_2",
    "eval_distinct_share", "eval_phrase_share", "eval_length_correlation", "eval_beyond_share",
)  # fmt: skip
"""Names of what is drawn, in order."""
_MOST_SAMPLES = 200
_PAIRS_WHERE = {
    "the chosen response is longer": "chosen_longer",
    "the chosen response is shorter": "chosen_shorter",
    "both are of one length": "equal",
}


def score_and_judge(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What score and judge have gained over KL, evaluation by evaluation (Gao et al. 2022, arXiv 2210.10760, figure 1).

    Two rewards have scales of their own: each is drawn in the largest standard error of its evaluations.
    """
    rows = [row for row in rows if all(is_number(row.get(name)) for name in ("kl", "judge", "judge_se", "score_se"))]
    if len(rows) < 2:
        return ""
    series = {}
    for name in ("score", "judge"):
        unit = max(row[f"{name}_se"] for row in rows) or 1.0
        series[name] = [(row["kl"], (row[name] - rows[0][name]) / unit) for row in rows]
    return scatter(title, series, below="KL", joined=True)


def _curves(
    metrics: Sequence[dict[str, Any]], warnings: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]
) -> str:
    marks = [(warning["step"], warning["text"]) for warning in warnings]
    charts = [
        curves(name, {name: points}, spread={name: spread_of(metrics, name)}, marks=marks)
        for name in CURVES
        if len(points := points_of(metrics, name)) > 1
    ]
    pairs = [(row["kl"], row["score"]) for row in metrics if is_number(row.get("kl")) and is_number(row.get("score"))]
    if len(pairs) > 1:
        charts.insert(1, scatter("score vs. KL, in the order of updates", {"": pairs}, below="KL", joined=True))
    if judged := score_and_judge("gain in standard errors vs. KL, by evaluation", measured):
        charts.insert(0, judged)
    if not charts:
        return ""
    about = "Bands are a standard error each way, or the range of the updates that one point stands for."
    return f'<h2>Curves</h2><p class="soft">{about}</p><div class="charts">{"".join(charts)}</div>'


def number(value: Any) -> str:
    """A figure as a page shows it; one that was not finite is None."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return " – ".join(number(v) for v in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def figures_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Figures by name, one or more a row; those of single rules, of which there are many, stand folded below."""
    numbers = range(1, len(columns))
    shown, folded = ([row for row in rows if row[0].startswith(PER_RULE) is single] for single in (False, True))
    above = table(columns, shown, numbers=numbers)
    if not folded:
        return above
    below = f"<summary>{len(folded)} of single rules</summary>{table(columns, folded, numbers=numbers)}"
    return f"{above}<details>{below}</details>"


def _before_after(result: dict[str, Any]) -> str:
    before, after = result.get("before") or {}, result.get("after") or {}
    rows = [(key, number(before.get(key)), number(after.get(key))) for key in {**before, **after}]
    last = "now" if _unfinished(result) else "after"
    return f"<h2>Before and {last}</h2>{figures_table(('', 'before', last), rows)}" if rows else ""


def _distributions(samples: Sequence[dict[str, Any]]) -> str:
    if len(samples) < 2:
        return ""
    sides = ("before", "after")
    charts = [histogram("scores", {side: [row[f"{side}_score"] for row in samples] for side in sides}, below="score")]
    if all("after_length" in row for row in samples):
        lengths = {side: [row[f"{side}_length"] for row in samples] for side in sides}
        charts.append(histogram("lengths", lengths, below="tokens"))
    both = [(row["before_score"], row["after_score"]) for row in samples]
    charts.append(scatter("each prompt's score, after vs. before", {"": both}, below="before", diagonal=True))
    return f'<h2>Before and after, by prompt</h2><div class="charts">{"".join(charts)}</div>'


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    order = sorted(samples, key=lambda row: row["after_score"] - row["before_score"])
    if len(order) > _MOST_SAMPLES:
        order = [*order[: _MOST_SAMPLES // 2], *order[-_MOST_SAMPLES // 2 :]]
    judged = [f"{side}_judge" for side in ("before", "after")] if "after_judge" in order[0] else []
    columns = ("prompt", "before", "after", "before_score", "after_score", "change", *judged)
    changed = ({**row, "change": round(row["after_score"] - row["before_score"], 4)} for row in order)
    rows = ([row[name] for name in columns] for row in changed)
    shown = f"{len(order)} of {len(samples)}; " if len(order) < len(samples) else ""
    names = ["prompt", "before", "after", "score before", "score after", "change"]
    names += ["judge before", "judge after"] if judged else []
    about = f'<p class="soft">{shown}the largest losses first, the largest gains last. A click on a name sorts.</p>'
    return f"<h2>Samples</h2>{about}{table(names, rows, numbers=range(3, len(names)), sortable=True)}"


def _pairs_charts(evaluation: dict[str, Any], pairs: Sequence[ScoredPair]) -> str:
    sides = ("chosen", "rejected")
    scores = {side: [row[f"{side}_score"] for row in pairs] for side in sides}
    lengths = {side: [(row[f"{side}_length"], row[f"{side}_score"]) for row in pairs] for side in sides}
    bins = [(one["predicted"], one["observed"]) for one in evaluation["calibration"]["bins"]]
    charts = (
        histogram("scores", scores, below="score"),
        scatter("calibration: observed vs. predicted P(right)", {"": bins}, below="predicted", diagonal=True),
        scatter("score vs. length", lengths, below="tokens of the response"),
    )
    return f'<div class="charts">{"".join(charts)}</div>'


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
        f"<h2>Held-out pairs</h2>{_pairs_charts(evaluation, pairs)}"
        f"<p>Expected calibration error {evaluation['calibration']['error']:.3f}. Score and length: Spearman "
        f"{length['spearman']:.2f}, Pearson {length['pearson']:.2f}; differences within a pair: Spearman "
        f"{length['spearman_within']:.2f}, Pearson {length['pearson_within']:.2f}.</p>"
        f"{table(('pairs where', 'number', 'accuracy', '95 %'), accuracies, numbers={1, 2, 3})}"
        f"{'<h2>Worst errors</h2>' + worst if errors else ''}"
    )


def _warnings(warnings: Sequence[dict[str, Any]]) -> str:
    if not warnings:
        return ""
    sentences = (f"At update {w['step']}: {w['text']} {w['remedy']}" for w in warnings)
    lines = (f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    return f'<h2>Warnings</h2><div class="warnings">{"".join(lines)}</div>'


def _unfinished(result: Mapping[str, Any]) -> Any:
    """How far a stage is that has not finished."""
    return result.get("running") or result.get("stopped")


def _what_was_run(result: dict[str, Any], recipe: str) -> str:
    written = "written" if _unfinished(result) else "finished"
    rows = [("recipe", result["recipe"]), ("stage", result["stage"]), ("seed", result["seed"])]
    rows += [(written, result.get("date", "–"))]
    rows += [("took", f"{result['seconds']:.0f} s"), ("peak memory", memory_in_words(result["peak_memory_gb"]))]
    rows += [(f"rows: {split}", count) for split, count in (result.get("rows") or {}).items()]
    for split, reasons in (result.get("left_out") or {}).items():
        rows += [(f"left out of {split}", ", ".join(f"{n} × {why}" for why, n in reasons.items()))] if reasons else []
    for name, value in (result.get("machine") or {}).items():
        in_gb = name.endswith("_gb") and isinstance(value, float)
        rows += [(name.removesuffix("_gb").replace("_", " "), f"{value:.1f} GB" if in_gb else value)]
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items()))]
    spent = result.get("spent") or {}
    return (
        f"<h2>What was run</h2>{table(('', ''), rows, numbers=())}"
        f"{bars('Where the time went', spent, unit='s') if spent else ''}"
        f"<h2>Recipe</h2><pre>{html.escape(recipe)}</pre>"
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
        result: what goes to `result.json`; where training did not end at its last step, or not with the last weights,
            `ended` says so; where prompts were given in Python, `given` names them; of a stage that has not finished
            what is known of it, and as `running` or `stopped` how far it is.
        metrics: rows of the metrics file.
        samples: rows of `sample_rows`.
        recipe: the resolved one as YAML.
        pairs: held-out pairs of a reward, whose evaluation is `result["judgement"]`.
    """
    title, told = f"{result['run']}: {result['stage']}", str(_unfinished(result) or result.get("ended", ""))
    if given := result.get("given"):
        told = f"{told} Prompts were given in Python, in place of those of the recipe: {', '.join(given)}.".lstrip()
    warnings = result.get("warnings") or ()
    said = verdict(result, samples)
    body = (
        f"<h1>{html.escape(title)}</h1>"
        f"{f'<p>{html.escape(told)}</p>' if told else ''}"
        f"{f'<p class=verdict>{html.escape(said)}</p>' if said else ''}"
        f"{_warnings(warnings)}{_before_after(result)}{_pairs(result['judgement'], pairs) if pairs else ''}"
        f"{_curves(metrics, warnings, evaluations(result, metrics))}"
        f"{_distributions(samples)}{_samples(samples)}{_what_was_run(result, recipe)}"
    )
    path = folder / REPORT_FILE
    with writing(path):
        return write_whole(path, page(title, body, refresh=RELOADS_AFTER if result.get("running") else 0))
