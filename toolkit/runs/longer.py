"""A finished stage that is made longer: what it was is kept until the next checkpoint, and comes back without one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit.checkpoints import checkpoint_folders
from toolkit.disk import MANIFEST, RESULT_FILE, damage, read_object, write_whole, writing
from toolkit.errors import ToolkitError
from toolkit.reports import METRICS_FILE, REPORT_FILE, ROLLOUTS_FILE, WARNINGS_FILE
from toolkit.runs import owned
from toolkit.runs.owned import EVALUATION, RECIPE_FILE, WAS_FINISHED_FILE
from toolkit.spec.plan import RESPONDING, STAGES
from toolkit.spec.recipe import Recipe


@contextmanager
def result_comes_back(recipe: Recipe, stage: str, *, trains: bool = True) -> Iterator[None]:
    """Inside, a stage may go on beyond its end. If that fails before its next checkpoint, it is finished as before:
    but not with other weights, which it may have saved without one. After a kill the next stage sees to it, and
    where a notebook only makes the trainer here, and `trains` after it."""
    folder = recipe.stage_folder(stage)
    checkpoints = checkpoint_folders(folder)
    if (folder / RESULT_FILE).is_file() and (folder / MANIFEST).is_file():
        _write_down(recipe.folder, stage)
    try:
        yield
    except BaseException:
        if checkpoint_folders(folder) != checkpoints:
            drop_evaluation(folder)
        with suppress(OSError, ToolkitError):  # of a full disk, of which the error that is raised again says more
            _as_it_was(folder)
        raise
    if trains:
        (folder / WAS_FINISHED_FILE).unlink(missing_ok=True)


_OF_A_RESULT = (MANIFEST, REPORT_FILE, METRICS_FILE, ROLLOUTS_FILE, WARNINGS_FILE)


def _checkpoints(folder: Path) -> dict[str, str]:
    """Checkpoints by name, each as its manifest has it: one of another course may have its name."""
    found = {path.name: path / MANIFEST for path in checkpoint_folders(folder)}
    return {name: path.read_text("utf-8", "replace") if path.is_file() else "" for name, path in found.items()}


def _write_down(run: Path, stage: str) -> None:
    """Keep in a finished stage's folder, in one file, what is written anew when it goes on."""
    folder = run / stage
    paths = {name: folder / name for name in (*_OF_A_RESULT, RESULT_FILE)} | {RECIPE_FILE: run / RECIPE_FILE}
    files = {name: path.read_text("utf-8", "replace") for name, path in paths.items() if path.is_file()}
    with writing(folder):
        write_whole(folder / WAS_FINISHED_FILE, json.dumps({"checkpoints": _checkpoints(folder), "files": files}))


def finished_before(run: Path) -> list[str]:
    """Stages that were finished, and were going on when a kill came before their next checkpoint.

    Raises:
        ToolkitError: what one of them was is damaged.
    """
    kept = ((folder, _kept(folder)) for folder in _written_down(run) if not (folder / RESULT_FILE).is_file())
    return [folder.name for folder, was in kept if was is not None and _checkpoints(folder) == was["checkpoints"]]


def stages_as_they_were(run: Path) -> list[str]:
    """Finish such stages again, with the recipe that they had; which of them have come back.

    Raises:
        ToolkitError: what one of them was is damaged.
    """
    before = finished_before(run)
    for folder in _written_down(run):
        _as_it_was(folder)
    return [stage for stage in before if (run / stage / RESULT_FILE).is_file()]


def _written_down(run: Path) -> list[Path]:
    there = [run / stage for stage in STAGES if (run / RECIPE_FILE).is_file()]
    return [folder for folder in there if (folder / WAS_FINISHED_FILE).is_file()]


def _kept(folder: Path) -> dict[str, Any] | None:
    """What is written down of a stage; None where nothing is."""
    path, remedy = folder / WAS_FINISHED_FILE, "Delete it: the stage goes on with $resume."
    owned.refuse_link(folder)
    if (kept := read_object(path, remedy)) is None:
        return None
    files: Any = kept.get("files")
    whole = isinstance(files, dict) and all(isinstance(text, str) for text in files.values())
    if not whole or not {RECIPE_FILE, RESULT_FILE, MANIFEST} <= files.keys() or "checkpoints" not in kept:
        raise ToolkitError(f"{path} is damaged: it lacks what the stage was.", remedy=remedy)
    return kept


def _as_it_was(folder: Path) -> None:
    """Finish a stage again as it is written down, if it has neither another checkpoint nor other weights since."""
    if (kept := _kept(folder)) is None:
        return
    files = kept["files"]
    if _checkpoints(folder) != kept["checkpoints"]:
        drop_evaluation(folder)
    else:
        write_whole(folder / MANIFEST, files[MANIFEST])
        if damage(folder) is None:
            if WARNINGS_FILE not in files:
                (folder / WARNINGS_FILE).unlink(missing_ok=True)
            for name in _OF_A_RESULT[1:]:
                if name in files:
                    write_whole(folder / name, files[name])
            write_whole(folder.parent / RECIPE_FILE, files[RECIPE_FILE])
            write_whole(folder / RESULT_FILE, files[RESULT_FILE])  # the last: by it the stage is finished
    (folder / WAS_FINISHED_FILE).unlink()


def drop_evaluation(folder: Path) -> None:
    """What `eval` measured of a run, where the stage by which it responds is another now: of Q-values beside a trained
    policy it has measured nothing."""
    beside = folder.name == "q" and (folder.parent / "ppo" / RESULT_FILE).is_file()
    if folder.name in RESPONDING and not beside:
        owned.delete(folder.parent / EVALUATION)
