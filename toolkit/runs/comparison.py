"""Runs beside each other: what differs in their recipes, their figures and their answers to the same prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.disk import write_output
from toolkit.errors import RecipeError
from toolkit.reports import (
    APART,
    METRICS_FILE,
    WARNINGS_FILE,
    ComparedRun,
    at_start,
    comparison_page,
    is_number,
    of_evaluation,
    of_steps,
    read_json,
    read_jsonl,
    read_result,
)
from toolkit.runs.differences import ABSENT, leaves, recorded, shown
from toolkit.runs.folder import find_run
from toolkit.runs.owned import BEFORE_FILE, SAMPLES_FILE, check_output
from toolkit.spec.plan import at

COMPARED = ("ppo", "q", "reward", "sft")
"""The stage that is compared is the first of these that all runs have begun."""


def compare(names: Sequence[str], output: Path, *, runs_dir: Path, stage: str | None = None) -> Path:
    """Write one HTML page about several runs.

    Args:
        names: of at least two runs, or their folders.
        output: the file to write.
        runs_dir: folder of all runs.
        stage: which of theirs; by default the last one that all of them have begun.

    Raises:
        RecipeError: there is no such run, or no stage that all have.
        ToolkitError: a file is damaged, or the page cannot be written.
    """
    folders = [find_run(name, runs_dir).resolve() for name in names]
    check_output(output, folders)
    if len(set(folders)) < 2:
        raise RecipeError("compare needs at least two runs.", remedy="toolkit runs lists them.")
    begun = [[one for one in COMPARED if (folder / one / METRICS_FILE).is_file()] for folder in folders]
    shared = [one for one in COMPARED if all(one in of_run for of_run in begun)]
    if stage is not None and stage not in shared:
        wrong = f"not all of these runs have a {stage} stage with figures."
        raise RecipeError(wrong, remedy=f"They share {', '.join(shared)}." if shared else "")
    if not shared:
        of_each = (f"{name} {' and '.join(of_run) or 'none'}" for name, of_run in zip(names, begun, strict=True))
        wrong = f"{', '.join(names)} have no stage in common that has begun."
        raise RecipeError(wrong, remedy=f"They have begun: {', '.join(of_each)}.")
    wanted = stage or shared[0]
    runs = [_run(label, folder / wanted) for label, folder in zip(labels_of(folders), folders, strict=True)]
    write_output(output, comparison_page(wanted, runs, differing(folders)))
    return output


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Names of runs; their paths where two have one name, as in several folders of runs."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def differing(folders: Sequence[Path]) -> dict[str, list[str]]:
    """The keys in which the recipes of runs differ, each with the value of every run as it is shown."""
    recipes = [dict(leaves(recorded(folder))) for folder in folders]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    values = {key: [recipe.get(key, ABSENT) for recipe in recipes] for key in keys}
    differ = {key: of_runs for key, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}
    return {key: ["–" if value is ABSENT else shown(value) for value in of_runs] for key, of_runs in differ.items()}


def _run(label: str, folder: Path) -> ComparedRun:
    """What a run's stage has written so far; what is not as the toolkit writes it is left out."""
    result = dict(read_result(folder) or {})
    finished, warned, metrics = bool(result), folder / WARNINGS_FILE, read_jsonl(folder / METRICS_FILE)
    if not finished:
        before = read_json(folder / BEFORE_FILE) or {}
        kept: dict[str, Any] = before["metrics"] if isinstance(before.get("metrics"), dict) else {}
        smoothed = bool(at(recorded(folder.parent), "reward.label_smoothing_factor"))

        def measured(row: Mapping[str, Any]) -> dict[str, Any]:
            return of_evaluation(row, {}, stage=folder.name, smoothed=smoothed)

        result[APART] = before.get(APART)
        result["before"] = measured(at_start(metrics)) if result[APART] else kept
        result["after"] = next(filter(None, map(measured, reversed(of_steps(metrics)))), {})
        step = metrics[-1].get("step", "?") if metrics else 0
        label += f" (step {step}, not finished)" if metrics else " (not finished)"
        result["warnings"] = read_jsonl(warned) if warned.is_file() else []
    result |= {side: result.get(side) if isinstance(result.get(side), dict) else {} for side in ("before", "after")}
    for name, kind in {"warnings": list, "rows": dict}.items():
        if not isinstance(result.get(name), kind):
            result.pop(name, None)
    path = folder / SAMPLES_FILE
    # A run that was made longer has those of its earlier end until it ends again.
    samples = [row for row in read_jsonl(path) if _is_sample(row)] if finished and path.is_file() else []
    return ComparedRun(label, result, metrics, samples)


def _is_sample(row: dict[str, Any]) -> bool:
    texts, numbers = ("prompt", "before", "after"), ("before_score", "after_score")
    written = all(isinstance(row.get(name), str) for name in texts)
    return written and all(is_number(row.get(name)) for name in numbers)
