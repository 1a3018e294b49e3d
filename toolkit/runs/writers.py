"""Which trainer of this process may write to a stage's folder: a notebook can make several."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.disk import RESULT_FILE
from toolkit.errors import ToolkitError
from toolkit.runs.owned import RECIPE_FILE
from toolkit.spec.recipe import Recipe

_trainers: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()  # by folder

_WRITES = ("train", "step", "evaluate", "log", "save_checkpoint", "save_model")


def give(folder: Path, trainer: Any) -> None:
    """A stage's folder is this trainer's, as long as it is there, and no earlier one's."""
    take_from_earlier(folder)
    _trainers[folder.resolve()] = trainer


def take_from_finished(recipe: Recipe, stages: Iterable[str]) -> None:
    """Of stages that have come back, finished, the trainer that was to replace each writes there no more."""
    for folder in map(recipe.stage_folder, stages):
        wrong = f"{folder} has its earlier, finished stage again, and what this trainer writes would be mixed with it."
        _take(folder, wrong, "Make another with overwrite=True.")


def take_from_earlier(folder: Path) -> None:
    """Let no earlier trainer of this process write to a folder that is another's now, as where a cell is run twice: it
    would be mixed with what that one writes."""
    wrong = f"a later trainer of this process has taken {folder}, and what both write there would be mixed."
    _take(folder, wrong, "Use that one, or name a run for each ($run).")


def _take(folder: Path, wrong: str, remedy: str) -> None:
    if (earlier := _trainers.pop(folder.resolve(), None)) is None:
        return
    taken = ToolkitError(wrong, remedy=f'{remedy} save_model("another folder") still saves this trainer\'s weights.')
    saves = earlier.save_model

    def refused(*_: Any, **__: Any) -> None:
        raise taken

    def saved(output_dir: Any = None, *arguments: Any, **named: Any) -> Any:  # of what it has learnt, elsewhere
        if output_dir is None or Path(output_dir).resolve().is_relative_to(folder.resolve()):
            raise taken
        return saves(output_dir, *arguments, **named)

    for name in _WRITES:
        if hasattr(earlier, name):
            setattr(earlier, name, refused)
    earlier.save_model = saved


@contextmanager
def earlier_stays(recipe: Recipe, stage: str) -> Iterator[None]:
    """Where an error or a stop ends the making of a later trainer, as where a cell was run twice by mistake, the
    earlier one may still write: unless the run has another recipe by then, or what both were to replace is back."""
    folder, path = recipe.stage_folder(stage).resolve(), recipe.folder / RECIPE_FILE
    was = path.read_bytes() if folder in _trainers and path.is_file() else None
    try:
        yield
    except BaseException:
        if folder in _trainers:
            if (folder / RESULT_FILE).is_file():
                take_from_finished(recipe, [stage])
            elif not path.is_file() or path.read_bytes() != was:
                take_from_earlier(folder)
        raise
