"""One page about several runs of a stage: overlaid curves, figures, settings that differ, answers."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.reports.charts import curves
from toolkit.reports.document import page, table
from toolkit.reports.evaluated import evaluations, points_of, spread_of
from toolkit.reports.page import CURVES, figures_table, number, score_and_judge
from toolkit.reports.verdict import verdict

_MOST_PROMPTS = 100


@dataclass(frozen=True)
class ComparedRun:
    """A run by its name: its result as far as it is known, the rows of its metrics, and its samples."""

    name: str
    result: dict[str, Any]
    metrics: Sequence[dict[str, Any]]
    samples: Sequence[dict[str, Any]]


def comparison_page(
    stage: str, runs: Sequence[ComparedRun], differing: Mapping[str, Sequence[Any]], *, about: str = ""
) -> str:
    """The page as text; `differing` are the values that each run has at a key of the recipe, `about` is said first."""
    names = [run.name for run in runs]
    title = f"{stage}: {', '.join(names)}"
    said = ((run.name, verdict(run.result, run.samples)) for run in runs)
    verdicts = "".join(f"<p><b>{html.escape(name)}</b>: {html.escape(text)}</p>" for name, text in said if text)
    body = (
        f"<h1>{html.escape(title)}</h1>{f'<p>{html.escape(about)}</p>' if about else ''}{verdicts}{_figures(runs)}"
        f"{_settings(names, differing) if len(runs) > 1 else ''}{_curves(runs)}{_samples(runs)}"
    )
    return page(title, body)


def _figures(runs: Sequence[ComparedRun]) -> str:
    sides = [(run.result.get("before") or {}, run.result.get("after") or {}) for run in runs]
    keys = dict.fromkeys(key for pair in sides for side in pair for key in side)
    rows = [(key, *(" → ".join(number(side.get(key)) for side in pair) for pair in sides)) for key in keys]
    if any("seconds" in run.result for run in runs):
        rows += [("seconds", *(number(run.result.get("seconds")) for run in runs))]
    rows += [("warnings", *(str(len(run.result.get("warnings") or ())) for run in runs))]
    columns = ("", *(run.name for run in runs))
    return f"<h2>Figures, before → after</h2>{figures_table(columns, rows)}"


def _settings(names: Sequence[str], differing: Mapping[str, Sequence[str]]) -> str:
    if not differing:
        return "<h2>Settings</h2><p>The recipes say the same.</p>"
    rows = ((key, *values) for key, values in differing.items())
    return f"<h2>Settings that differ</h2>{table(('key', *names), rows, numbers=())}"


def _curves(runs: Sequence[ComparedRun]) -> str:
    charts = []
    for name in CURVES:
        points = {run.name: found for run in runs if len(found := points_of(run.metrics, name)) > 1}
        if points:
            spread = {run.name: spread_of(run.metrics, name) for run in runs if run.name in points}
            charts.append(curves(name, points, spread=spread, places=[run.name for run in runs]))
    gains = (
        score_and_judge(f"{run.name}: gain in standard errors vs. KL", evaluations(run.result, run.metrics))
        for run in runs
    )
    charts = [*filter(None, gains), *charts]
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>' if charts else ""


def _samples(runs: Sequence[ComparedRun]) -> str:
    by_prompt = [{row["prompt"]: row for row in run.samples} for run in runs]
    asked = [prompt for prompt in by_prompt[0] if all(prompt in of for of in by_prompt)]
    if not asked:
        return ""
    columns, rows = ["prompt"], []
    for run in runs:
        columns += [run.name, f"score of {run.name}"]
    for prompt in asked[:_MOST_PROMPTS]:
        answers = [of[prompt] for of in by_prompt]
        rows.append((prompt, *(cell for row in answers for cell in (row["after"], float(row["after_score"])))))
    shown = f"The first {_MOST_PROMPTS} of {len(asked)} that all were asked. " if len(asked) > _MOST_PROMPTS else ""
    about = f'<p class="soft">{shown}A click on a name sorts.</p>'
    places = range(2, len(columns), 2)
    return f"<h2>Answers to the same prompts</h2>{about}{table(columns, rows, numbers=places, sortable=True)}"
