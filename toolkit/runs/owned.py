"""Which files of a run folder are the toolkit's own: those alone are moved or deleted, and no link is followed."""

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from toolkit.checkpoints import CHECKPOINT
from toolkit.disk import (
    ASIDE,
    MANIFEST,
    RESULT_FILE,
    check_file,
    files_in,
    is_half_saved,
    is_unfinished,
    prune,
    read_object,
    seal,
    sealed_files,
    unfinished_in,
    writing,
    written_in,
)
from toolkit.errors import RecipeError, ToolkitError
from toolkit.reports import ERRORS_FILE, METRICS_FILE, REPORT_FILE, ROLLOUTS_FILE, SCORES_FILE, WARNINGS_FILE

RECIPE_FILE, BEFORE_FILE, SAMPLES_FILE = "recipe.yaml", "before.json", "samples.jsonl"
EVALUATION = "eval"  # folder of what was measured of a trained policy
WAS_FINISHED_FILE = "was_finished.json"  # what a finished stage that is made longer comes back by

# What a stage or an evaluation writes into its folder, and the folders for weights in it with what is in them.
_FILES = {
    RESULT_FILE, MANIFEST, BEFORE_FILE, SAMPLES_FILE, METRICS_FILE, ROLLOUTS_FILE, "rows.jsonl", "left_out.jsonl",
    SCORES_FILE, ERRORS_FILE, "responses.jsonl", "responses.jsonl.partial", "begun_with.json", WAS_FINISHED_FILE,
    REPORT_FILE, "README.md", WARNINGS_FILE, "not_finite.jsonl", "not_finite.safetensors",
}  # fmt: skip
WEIGHTS = {"policy", "value", "reward", "q", "q_target", "model"}
_SUFFIXES = {".json", ".jsonl", ".safetensors", ".jinja", ".model", ".txt", ASIDE}


def _is_written(name: Path, listed: Collection[str]) -> bool:
    """Whether a file of a stage's folder, by its name there, is one that the toolkit writes."""
    top = name.parts[0]
    if len(name.parts) == 1:
        return top in _FILES
    ours = top in WEIGHTS or (top.startswith(CHECKPOINT) and top.endswith(ASIDE))
    if ours and is_half_saved(name):
        return True
    if listed and top in WEIGHTS:  # a finished stage: what it has written is listed
        return name.as_posix() in listed
    return ours and name.suffix in _SUFFIXES


def written(folder: Path) -> list[Path]:
    """Files in a stage's folder that the toolkit wrote: none where no manifest says that it writes there."""
    listed = sealed_files(folder)
    if listed is None:  # but for what a kill has left of the manifest itself
        return [] if folder.is_symlink() else unfinished_in(folder)
    others = _others(folder)

    def is_ours(path: Path) -> bool:
        name = path.relative_to(folder)
        return is_unfinished(path) or (_is_written(name, listed) and name.as_posix() not in others)

    return [*filter(is_ours, files_in(folder)), *_of_checkpoints(folder)]


def _of_checkpoints(folder: Path) -> list[Path]:
    """What the checkpoints in a stage's folder list as theirs; behind a link nothing is."""
    checkpoints = () if folder.is_symlink() else sorted(folder.glob(f"*{CHECKPOINT}*"))
    return [path for checkpoint in checkpoints for path in written_in(checkpoint)]


def _others(folder: Path) -> list[str]:
    """Files that were in a stage's folder when the toolkit began to write there."""
    return list((read_object(folder / MANIFEST) or {}).get("others", []))


def refuse_others(folder: Path) -> None:
    """That the toolkit can write to a stage's folder, and overwrites nothing but files of its own.

    Raises:
        RecipeError: there are files by the names of its own, and no manifest that says so.
        ToolkitError: a link stands where it would write.
    """
    links = [folder.parent, folder.parent / RECIPE_FILE, folder]
    for place, folders, names in os.walk(folder) if not folder.is_symlink() else ():
        inner = [Path(place, name) for name in (*folders, *names)]
        links += [path for path in inner if path.relative_to(folder).parts[0] in _FILES | WEIGHTS]
    for path in links:
        refuse_link(path)
    if sealed_files(folder) is None:
        known = [path for path in files_in(folder) if _is_written(path.relative_to(folder), ())]
        for path in known + _of_checkpoints(folder):
            wrong = f"{path} is not known to be the toolkit's: {folder} has no {MANIFEST}."
            raise RecipeError(wrong, remedy="Move that folder away, or name a new run ($run).")


def refuse_recipe(run: Path, text: str, stages: Iterable[str]) -> None:
    """Raises a RecipeError where a run folder has another recipe than this text, and nothing of the toolkit's."""
    path = run / RECIPE_FILE
    own = any(sealed_files(run / stage) is not None for stage in stages)
    if not own and path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text:
        wrong = f"{path} is not known to be the toolkit's: no stage beside it has a {MANIFEST}."
        raise RecipeError(wrong, remedy="Move it away, or name a new run ($run).")


def check_output(output: Path | None, runs: Iterable[Path]) -> None:
    """As `check_file`, of a file that is none of those which the toolkit wrote into some runs.

    Raises:
        ToolkitError: it cannot be written, or is one of them.
    """
    check_file(output)
    for run in map(Path.resolve, runs):
        if output is not None and (there := output.resolve()).is_file() and there.is_relative_to(run):
            stage = run / there.relative_to(run).parts[0]
            if there == run / RECIPE_FILE or there in written(stage):
                raise ToolkitError(
                    f"{output} is a file of the run {run}, and would be overwritten.", remedy="Name another."
                )


def refuse_link(path: Path) -> None:
    """Raises a ToolkitError where a run, or what it writes, is a link, a pipe or a device."""
    if path.is_symlink():
        wrong = f"{path} is a link to {os.readlink(path)}, and a run is not written through links."
        raise ToolkitError(wrong, remedy="Remove the link, or name a new run ($run).")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ToolkitError(f"{path} is a pipe or a device.", remedy="Remove it, or name a new run ($run).")


def has_begun(folder: Path) -> bool:
    """Whether there is anything of a stage. A run that begins may delete its folder meanwhile."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return any(folder.iterdir())
    return False


def begin(folder: Path) -> None:
    """Say in a stage's folder that the toolkit writes there, and which files are others'."""
    ours = written(folder)
    others = [path.relative_to(folder).as_posix() for path in files_in(folder) if path not in ours]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        seal(folder, [], others=others)


def seal_weights(folder: Path) -> None:
    """List the weights that a stage has written, with their SHA-256."""
    files = [path for path in written(folder) if path.relative_to(folder).parts[0] in WEIGHTS]
    with writing(folder):
        seal(folder, files, others=_others(folder))


def delete(folder: Path) -> None:
    """Delete what the toolkit wrote in a stage's folder, and the folder if it is empty then."""
    for path in sorted(written(folder), key=lambda path: path.name == MANIFEST):  # which says whose the others are
        path.unlink(missing_ok=True)
    prune(folder)
