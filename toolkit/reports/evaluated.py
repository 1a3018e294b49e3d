"""What was measured, step by step and by evaluation: from the rows of a metrics file and a result, without a page."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from toolkit.reports.charts import Band, Point
from toolkit.reports.files import SPREADS

APART = "evaluated_apart"
"""Of a result, where evaluations on the way are of other prompts than those before and after."""
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def points_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """A metric by step."""
    return [(row["step"], row[name]) for row in metrics if is_number(row.get(name)) and is_number(row.get("step"))]


def spread_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Band]:
    """A metric with a standard error each way, by step; empty where that is not measured."""
    if (error := SPREADS.get(name)) is None:
        return []
    rows = [row for row in metrics if all(is_number(row.get(key)) for key in ("step", name, error))]
    return [(row["step"], row[name] - row[error], row[name] + row[error]) for row in rows]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a figure is there, and finite; a whole number of a damaged file may be more than a float can hold."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row of the metrics what an evaluation has measured, by the names of a result; empty where there was none."""
    return {name.removeprefix("eval_"): value for name, value in row.items() if name.startswith("eval_")}


def at_start(metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of an evaluation before the first step; empty where there was none."""
    return next((row for row in metrics if row.get("step") == 0 and _measured(row)), {})


def of_steps(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows from the first step on; one of before is what later ones are held against."""
    return [row for row in metrics if row.get("step")]


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
    measured = _measured(row)
    # It has the loss that is trained, and `before` a plain one: of pairs without their margins, centring or every
    # token, of classes not smoothed.
    if stage == "reward" and ("accuracy" in measured or smoothed):
        measured.pop("loss", None)
    return {name: value for name, value in measured.items() if (name in before if before else name not in _TIMES)}


def evaluations(result: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of all evaluations in order: before, while it trained, after; where before and after are of other
    prompts, those while it trained alone."""
    during = [*map(_measured, metrics)]
    apart = result.get(APART) is True
    sides = [during] if apart else [[result.get("before") or {}], during, [result.get("after") or {}]]
    return [row for part in sides for row in part if all(is_number(row.get(name)) for name in ("kl", "score"))]
