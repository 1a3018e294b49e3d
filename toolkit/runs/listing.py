"""All runs of a folder: how far each is, its last figures, and the command that goes on. Read alone, nothing loaded."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoints import checkpoints_in, step_of
from toolkit.checkpoints.state import STATE_FILE
from toolkit.disk import RESULT_FILE, read_object
from toolkit.errors import Problem, ToolkitError
from toolkit.reports import METRICS_FILE, count_lines, figures_of, iter_jsonl, read_result
from toolkit.runs.aside import is_run
from toolkit.runs.collect import BEGUN_FILE, partial_file
from toolkit.runs.differences import recorded
from toolkit.runs.folder import check_whole, has_weights, leads_nowhere, saved_by_hand
from toolkit.runs.lock import LOCK_FILE, doing_in, elsewhere, owner_of
from toolkit.runs.owned import RECIPE_FILE, has_begun
from toolkit.spec.plan import RESPONDING, STAGES

FINISHED, AT_WORK, STOPPED, DAMAGED = "finished", "at work", "stopped", "damaged"
_PROCESSES = re.compile(r'\["processes", (\d+)\]')  # an entry of a state, as `write_state` has it


@dataclass(frozen=True)
class StageState:
    """How far a stage of a run is: `state` in a word, `where` with its step, and its last figures."""

    stage: str
    state: str
    where: str
    figures: str


@dataclass(frozen=True)
class RunState:
    """A run: its stages that have begun, in order, the command that goes on or uses it, as for a shell, and what is
    `told` of stages that a kill has left aside."""

    name: str
    stages: tuple[StageState, ...]
    command: tuple[str, ...]
    told: Problem | None = None


def all_runs(runs_dir: Path) -> Iterator[RunState]:
    """The runs of a folder by name."""
    for path in sorted(runs_dir.glob("*")):
        if not is_run(path):  # nor where another user's folder cannot be entered
            continue
        try:
            yield replace(state_of(path), told=_left_aside(path))
        except PermissionError as error:  # a stage of it alone, as a container's
            stage = StageState(Path(error.filename or path).name, DAMAGED, f"{error.filename}: {error.strerror}", "")
            yield RunState(path.name, (stage,), ())


def _left_aside(run: Path) -> Problem | None:
    try:
        check_whole(run)
    except ToolkitError as error:
        return error.problems[0]
    return None


def state_of(run: Path) -> RunState:
    """How far a run is."""
    owner = owner_of(run)
    begun = [stage for stage in STAGES if has_begun(run / stage)]
    open_ = [stage for stage in begun if not (run / stage / RESULT_FILE).is_file()]
    newest = max(open_, key=lambda stage: (run / stage).stat().st_mtime, default=None)
    whose = doing_in(run) or newest  # a notebook trains the one that it has made the trainer of
    states = tuple(_stage(run / stage, owner if stage == whose else None) for stage in begun)
    return RunState(run.name, states, _command(run, states, at_work=owner is not None))


def _stage(folder: Path, owner: dict[str, Any] | None) -> StageState:
    try:
        result, path = read_result(folder), folder / METRICS_FILE
        rows = iter_jsonl(path) if path.is_file() else ()
        at_first: dict[str, Any] = {}
        later: dict[str, Any] = {}  # than the start; the newest value of each
        for row in rows:
            (later if row.get("step") else at_first).update(row)
        metrics = later or at_first
        files = (partial := partial_file(folder)), partial.with_suffix("")  # whole, where only the result is missing
        found = (count_lines(file) for file in files if result is None and file.is_file())
        collected = next(found, None)
    except ToolkitError as error:
        return StageState(folder.name, DAMAGED, str(error.problems[0].wrong), "")
    step = f"step {metrics['step']}" if "step" in metrics else "before its first step"
    if result is not None:
        after = result.get("after")
        figures = figures_of(after) if isinstance(after, dict) else ""
        return StageState(folder.name, FINISHED, str(result.get("date", "")), figures)
    if collected is not None:
        where = f"{collected:,} responses saved"
    elif owner is not None:
        where = step
    elif saved := checkpoints_in(folder):
        where = f"saved up to step {step_of(saved[-1])}"
    else:
        kept = "weights saved, and no checkpoint" if has_weights(folder) else "nothing saved"
        if saved_by_hand(folder):
            kept = f"weights saved by a loop of your own, for start.policy={folder / 'policy'}"
        where = f"{step}, {kept}"
    if owner is not None and (other := elsewhere(owner)):
        where += f", by {other}: if that has ended, delete {folder.parent / LOCK_FILE}"
    return StageState(folder.name, STOPPED if owner is None else AT_WORK, where, figures_of(metrics))


def _command(run: Path, states: tuple[StageState, ...], *, at_work: bool) -> tuple[str, ...]:
    if at_work:
        return ()
    done = {one.stage for one in states if one.state == FINISHED}
    recipe = recorded(run)
    begun = [one.stage for one in states if one.state == STOPPED]
    wanted = {*begun, "q"} if "collect" in begun else {*begun}  # q, where there is one, collects first
    aims = [stage for stage in ("ppo", "q", "collect", "reward", "sft") if stage in recipe]
    aims.sort(key=lambda stage: stage not in wanted or stage in ("reward", "sft"))
    beside = () if run.parent == Path("runs") else ("--runs-dir", str(run.parent))
    if done.intersection(RESPONDING) and not (aims and aims[0] in wanted - done):
        return ("toolkit", "chat", run.name, *beside)
    if not aims or aims[0] in done:
        return ()
    # What was stopped before the aim had begun is what it needs.
    tried = aims[:1] if aims[0] in begun else [*begun, aims[0]]
    if any(saved_by_hand(run / stage) for stage in tried):
        return ()  # there is nothing to go on with, and beginning anew would delete them
    anew = any(leads_nowhere(run / stage, recipe) for stage in tried)
    number = _processes(run / begun[-1]) if begun else 1
    together = ("--processes", str(number)) if number > 1 else ()
    way = "--overwrite" if anew else "--resume"
    return ("toolkit", aims[0], str(run / RECIPE_FILE), way, *together, *beside)


def _processes(stage: Path) -> int:
    """How many processes began a collection, or wrote the newest checkpoint of another stage, whose tensors are not
    read; 1 where nothing says."""
    if stage.name == "collect":
        with suppress(ToolkitError):  # of a damaged file, which the stage itself tells of
            number = (read_object(stage / BEGUN_FILE) or {}).get("processes")
            return number if isinstance(number, int) else 1
        return 1
    state = next((folder / STATE_FILE for folder in reversed(checkpoints_in(stage))), None)
    text = state.read_text(encoding="utf-8", errors="replace") if state is not None and state.is_file() else ""
    found = _PROCESSES.findall(text)
    return int(found[-1]) if found else 1  # a reward's own state, which may have such an entry, comes before
