"""One self-contained HTML page a stage: what came of it, curves, samples, what was run. It loads nothing from anywhere.

Whatever a model, a file or a recipe says is text in it; the page's own script, which sorts tables, is the only one that
a browser may run there, by its hash.
"""

import base64
import hashlib
import html
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.data import PER_RULE
from toolkit.disk import write_whole, writing
from toolkit.errors import printable
from toolkit.reports.charts import COLOURS, Band, Point, bars, curves, histogram, scatter
from toolkit.reports.files import SPREADS
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
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d5dae0; --back: #fff; --box: #f5f7f9;
  --s0: #0a62c9; --s1: #c2410c; --s2: #1a7f37; --s3: #8250df; --s4: #b5179e; --s5: #57606a; --warn: #9a6700;
  --warn-box: #fff6dd }
@media (prefers-color-scheme: dark) { :root { --text: #e3e8ee; --soft: #9aa5b1; --line: #363d47; --back: #12161b;
  --box: #1b2027; --s0: #6cb0ff; --s1: #ff9a5c; --s2: #57d17c; --s3: #bd9bff; --s4: #ff7ac8; --s5: #a9b3bd;
  --warn: #e8b84b; --warn-box: #2c2612 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 0 auto; padding: 1.2rem clamp(.8rem, 3vw, 2rem);
  color: var(--text); background: var(--back) }
h1 { margin: .2rem 0; font-size: 1.5rem } h2 { margin: 2rem 0 .4rem; font-size: 1.15rem }
body { overflow-wrap: anywhere } p { margin: .3rem 0; max-width: 50rem } .soft, small, caption { color: var(--soft) }
.verdict { font-size: 1.1rem; font-weight: 600; max-width: none }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .6rem 0 } caption { text-align: left; padding: .2rem 0 }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: left; vertical-align: top }
td { white-space: pre-wrap; min-width: 4rem; unicode-bidi: plaintext }
table:not(.text) td:first-child:not(:last-child) { min-width: 9rem; overflow-wrap: break-word }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0; cursor: pointer }
th button::after { content: " \\2195"; color: var(--soft) }
summary { cursor: pointer; color: var(--soft) }
table.text { width: 100% } table.text td:not(.n) { min-width: 12rem }
td.share { width: 12rem } td.share svg { width: 100%; height: .6rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: .6rem 1.2rem }
figure { margin: 0; min-width: 0 }
figcaption { font-weight: 600; font-size: .85rem } figure svg { width: 100%; height: auto }
.legend span { margin-left: .8rem; font-weight: 400; color: var(--c) }
.legend .again { text-decoration: underline dashed } .line.again { stroke-dasharray: 5 3 }
.tick { font-size: 10px; fill: var(--soft) } .end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--line); stroke-width: .6 }
.mark { stroke: var(--warn); stroke-width: 1.2; stroke-dasharray: 3 2; fill: none }
.line { fill: none; stroke-width: 1.5 } .thin { stroke-width: .6; opacity: .5 }
.line { stroke: var(--c) } .dot, .bar, .band { fill: var(--c) }
.band { opacity: .22 } .bar { opacity: .6 } .dot { opacity: .75 }
.warnings { background: var(--warn-box); border-left: 3px solid var(--warn); padding: .4rem .8rem; margin: .6rem 0 }
pre { background: var(--box); padding: .8rem; overflow: auto; font-size: .85rem }
""" + "".join(f".s{i} {{ --c: var(--s{i}) }}\n" for i in range(COLOURS))
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const th = button.parentElement, place = th.cellIndex, body = th.closest("table").tBodies[0];
  const rows = [...body.rows], up = th.dataset.up !== "1";
  const of = row => { const cell = row.cells[place]; return cell.dataset.v ?? cell.textContent };
  rows.sort((a, b) => { const x = of(a), y = of(b), n = Number(x) - Number(y);
    return (isNaN(n) ? x.localeCompare(y) : n) * (up ? 1 : -1) });
  th.dataset.up = up ? "1" : "0";
  body.append(...rows);
};
"""


def page(title: str, body: str, *, refresh: int = 0) -> str:
    """A whole page; with `refresh` it loads itself again after so many seconds."""
    own = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[int], sortable: bool = False
) -> str:
    """A table of escaped cells; `numbers` are the places of the columns that hold figures."""
    mark = dict.fromkeys(numbers, ' class="n"')
    names = (f"<button>{html.escape(name)}</button>" if sortable and name else html.escape(name) for name in columns)
    head = "".join(f"<th{mark.get(place, '')}>{name}</th>" for place, name in enumerate(names))
    lines = "".join(
        f"<tr>{''.join(_cell(value, mark.get(place, '')) for place, value in enumerate(row))}</tr>" for row in rows
    )
    kind = ' class="text"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(value: object, mark: str) -> str:
    # A number is sorted by itself, not by the form in which it is shown.
    own = f' data-v="{value!r}"' if isinstance(value, float) and math.isfinite(value) else ""
    text = html.escape(f"{value:.3f}" if isinstance(value, float) else printable(str(value)))
    return f"<td{mark}{own}>{text}</td>"


def points_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """A metric by step."""
    return [(row["step"], row[name]) for row in metrics if _is_number(row.get(name)) and _is_number(row.get("step"))]


def spread_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Band]:
    """A metric with a standard error each way, by step; empty where that is not measured."""
    if (error := SPREADS.get(name)) is None:
        return []
    rows = [row for row in metrics if all(_is_number(row.get(key)) for key in ("step", name, error))]
    return [(row["step"], row[name] - row[error], row[name] + row[error]) for row in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


APART = "evaluated_apart"
"""Of a result, where evaluations on the way are of other prompts than those before and after."""


_TIMES = ("runtime", "samples_per_second", "steps_per_second")


def at_start(metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of an evaluation before the first step; empty where there was none."""
    return next((row for row in metrics if row.get("step") == 0 and any(key[:5] == "eval_" for key in row)), {})


def of_evaluation(
    row: Mapping[str, Any], before: Mapping[str, Any], *, stage: str, smoothed: bool = False
) -> dict[str, Any]:
    """What an evaluation on the way has measured, of what was measured before; of all, where nothing was.

    Args:
        row: of the metrics; without an evaluation the result is empty.
        before: the figures from before the first step.
        stage: whose evaluation it is.
        smoothed: whether classes are trained with `label_smoothing_factor`.
    """
    measured = {name.removeprefix("eval_"): value for name, value in row.items() if name.startswith("eval_")}
    # It has the loss that is trained, and `before` a plain one: of pairs without their margins, centring or every
    # token, of classes not smoothed.
    if stage == "reward" and ("accuracy" in measured or smoothed):
        measured.pop("loss", None)
    return {name: value for name, value in measured.items() if (name in before if before else name not in _TIMES)}


def evaluations(result: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of all evaluations in order: before, while it trained, after; where before and after are of other
    prompts, those while it trained alone."""
    during = [
        {name.removeprefix("eval_"): value for name, value in row.items() if name.startswith("eval_")}
        for row in metrics
    ]
    apart = result.get(APART) is True
    sides = [during] if apart else [[result.get("before") or {}], during, [result.get("after") or {}]]
    return [row for part in sides for row in part if all(_is_number(row.get(name)) for name in ("kl", "score"))]


def score_and_judge(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What score and judge have gained over KL, evaluation by evaluation (Gao et al. 2022, arXiv 2210.10760, figure 1).

    Two rewards have scales of their own: each is drawn in the largest standard error of its evaluations.
    """
    rows = [row for row in rows if all(_is_number(row.get(name)) for name in ("kl", "judge", "judge_se", "score_se"))]
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
    pairs = [(row["kl"], row["score"]) for row in metrics if _is_number(row.get("kl")) and _is_number(row.get("score"))]
    if len(pairs) > 1:
        charts.insert(1, scatter("score over KL, in the order of updates", {"": pairs}, below="KL", joined=True))
    if judged := score_and_judge("gain in standard errors over KL, by evaluation", measured):
        charts.insert(0, judged)
    if not charts:
        return ""
    about = "Bands are a standard error each way, or the range of the updates that one point stands for."
    return f'<h2>Curves</h2><p class="soft">{about}</p><div class="charts">{"".join(charts)}</div>'


def number(value: Any) -> str:
    """A figure as a page shows it."""
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
    rows = [(key, number(before.get(key, "–")), number(after.get(key, "–"))) for key in {**before, **after}]
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
    charts.append(scatter("each prompt's score, after over before", {"": both}, below="before", diagonal=True))
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
    rows: Sequence[Mapping[str, Any]] = pairs
    sides = ("chosen", "rejected")
    scores = {side: [row[f"{side}_score"] for row in rows] for side in sides}
    lengths = {side: [(row[f"{side}_length"], row[f"{side}_score"]) for row in rows] for side in sides}
    bins = [(one["predicted"], one["observed"]) for one in evaluation["calibration"]["bins"]]
    charts = (
        histogram("scores", scores, below="score"),
        scatter("calibration: observed over predicted P(right)", {"": bins}, below="predicted", diagonal=True),
        scatter("score over length", lengths, below="tokens of the response"),
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
    memory = ", ".join(f"{key} {value:.2f} GB" for key, value in result["peak_memory_gb"].items())
    written = "written" if _unfinished(result) else "finished"
    rows = [("recipe", result["recipe"]), ("stage", result["stage"]), ("seed", result["seed"])]
    rows += [(written, result.get("date", "–"))]
    rows += [("took", f"{result['seconds']:.0f} s"), ("peak memory", memory)]
    rows += [(f"rows: {split}", count) for split, count in (result.get("rows") or {}).items()]
    for split, reasons in (result.get("left_out") or {}).items():
        rows += [(f"left out of {split}", ", ".join(f"{n} × {why}" for why, n in reasons.items()))] if reasons else []
    rows += [(name.replace("_", " "), value) for name, value in (result.get("machine") or {}).items()]
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
            `ended` says so; of a stage that has not finished what is known of it, and as `running` or
            `stopped` how far it is.
        metrics: rows of the metrics file.
        samples: rows of `sample_rows`.
        recipe: the resolved one as YAML.
        pairs: held-out pairs of a reward, whose evaluation is `result["judgement"]`.
    """
    title, told = f"{result['run']}: {result['stage']}", str(_unfinished(result) or result.get("ended", ""))
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
