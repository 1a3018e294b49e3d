"""Stages of a run folder that are kept while something is written in their place.

`.replaced` holds stages, with the recipe that they ran under, until what was begun in their place has finished. Where
that fails they come back, and `.unfinished` holds what was begun, for a run that goes on with it. A list of moves is
written before the first one, and carried out to its end by the next stage that runs there: a kill at any moment loses
nothing.
"""

import json
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from toolkit.disk import (
    MANIFEST,
    REPLACED,
    RESULT_FILE,
    UNFINISHED,
    files_in,
    is_plain,
    prune,
    read_object,
    unfinished_in,
    write_whole,
    writing,
)
from toolkit.errors import ToolkitError
from toolkit.runs.owned import EVALUATION, RECIPE_FILE, delete, refuse_link, written
from toolkit.spec.plan import STAGES

TAKEN, _DELETED, _MOVES = ".taken", ".deleted", ".moves.json"
_STORES = (REPLACED, UNFINISHED, _DELETED)
_FOLDERS = (*STAGES, EVALUATION)  # in which everything lies that is moved, but for a recipe


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: by its recipe, or where a kill has left that aside, by the list of moves."""
    return any(os.path.isfile(folder / name) for name in (RECIPE_FILE, _MOVES, f"{REPLACED}/{_MOVES}"))


def is_moving(run: Path) -> bool:
    """Whether a kill has left moves to be carried out: what is in the run's folders may be half of one thing."""
    return (run / _MOVES).is_file()


def left_aside(run: Path) -> dict[str, str]:
    """Folders of a run that come back, each with the stage for which it was replaced: that has not finished, or a kill
    came while files were moved."""
    moving, state = _moves_in(run), _moves_in(run / REPLACED)
    replaced = {} if state is None or _has_finished(run, state) else state
    return {name: found["wanted"] for found in (replaced, moving or {}) for name in found.get("names", [])}


def changing(run: Path, stored: str) -> list[str]:
    """Folders of a run that were replaced, or begun, since stages were `stored`; none where none are."""
    return list((_moves_in(run / stored) or {"names": []})["names"])


def _moves_in(folder: Path) -> dict[str, Any] | None:
    """The list of moves in a folder; None where it has none.

    Raises:
        ToolkitError: it is not as it was written, and would move what is not the run's.
    """
    path, remedy = folder / _MOVES, "Move it away, with what was begun or replaced."
    state = read_object(path, remedy)
    if state is not None and not _is_whole(state, stored=folder.name in (REPLACED, UNFINISHED)):
        raise ToolkitError(f"{path} is damaged: it is no list of moves within the run.", remedy=remedy)
    return state


def _is_whole(state: dict[str, Any], *, stored: bool) -> bool:
    wanted: Any = state.get("wanted")
    moves, names, last = (state.get(key, []) for key in ("moves", "names", "last_saved"))
    if "moves" not in state or not all(isinstance(each, list) for each in (moves, names, last)) or "into" not in state:
        return False
    if (stored or state["into"] is not None) and not {"names", "wanted"} <= state.keys():
        return False
    if any(state.get(key) not in (None, *_STORES) for key in ("into", "from")):
        return False
    if names and wanted is None:
        return False
    pairs = all(isinstance(move, list) and len(move) == 2 for move in moves)
    wanted = [] if wanted is None else [wanted]
    if not pairs or not all(map(_is_moved, chain.from_iterable(moves))):
        return False
    if not all(name in _FOLDERS for name in (*names, *wanted)):
        return False
    return all(map(_is_within, last)) and all(len({*map(_is_recipe, move)}) == 1 for move in moves)


def _is_within(name: Any) -> bool:
    path = Path(name) if isinstance(name, str) else Path()
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_moved(name: Any) -> bool:
    """Whether a file of a run, by its name there, is one that is moved: no reward function beside the recipe, say."""
    if not _is_within(name):
        return False
    first, *rest = Path(name).parts
    if first in _STORES and rest:
        first, *rest = rest
    if not rest:
        return first == RECIPE_FILE
    return first in (*_FOLDERS, TAKEN)


def _is_recipe(name: str) -> bool:
    """Whether a file that is moved is a recipe: no stage has one."""
    return Path(name).name == RECIPE_FILE


def make_room(run: Path, names: Iterable[str], *, wanted: str | None) -> None:
    """Move folders of a run aside until the stage `wanted` has finished; delete what this run has begun in their place.

    Called before the recipe of the new ones is written. The one of the old goes with them.
    """
    state = _moves_in(run / REPLACED) or {"names": [], "wanted": None}
    begun, names = set(state["names"]), list(names)
    for name in names:
        if name in begun:
            delete(run / name)
    files = [path for name in names if name not in begun for path in written(run / name)]
    if not begun:
        files += [run / RECIPE_FILE]
    moves = [(path, run / REPLACED / path.relative_to(run)) for path in files]
    wanted = wanted or state["wanted"] or names[0]
    _move(run, moves, {"into": REPLACED, "wanted": wanted, "names": sorted(begun | set(names))})


def place(run: Path, source: Path, name: str) -> None:
    """Move what lies in a folder of ours to be a stage's: all of it, or with the next stage the rest."""
    (run / name / MANIFEST).unlink(missing_ok=True)  # that of the new one comes with it
    _move(run, [(path, run / name / path.relative_to(source)) for path in files_in(source)], {"into": None})


def settle(run: Path) -> bool:
    """Carry on with what a kill has broken off; whether stages are replaced and the new ones are not finished."""
    with writing(run):
        _carry_out(run)
        if (run / RECIPE_FILE).is_file():  # else it may be no run, and have folders by these names
            _forget(run / _DELETED)
            shutil.rmtree(run / TAKEN, ignore_errors=True)  # a copy that a kill has broken off
        for path in unfinished_in(run):
            path.unlink()
        state = _moves_in(run / REPLACED)
        if state is not None and _has_finished(run, state):
            _forget(run / REPLACED)
            _forget(run / UNFINISHED)
            return False
    return state is not None


def _has_finished(run: Path, state: dict[str, Any]) -> bool:
    """Whether the stage for which others were replaced has finished: what a notebook trains writes no result, and has
    once all of it is saved."""
    folder = run / str(state["wanted"])
    last = [folder / name for name in state.get("last_saved", [])]
    return (bool(last) and all(map(Path.is_file, last))) or (folder / RESULT_FILE).is_file()


def train_by_hand(run: Path, last_saved: Iterable[str]) -> None:
    """Say that what replaces others is trained by a notebook, which measures nothing and writes no result: it is done
    once these files are in its folder, the last that are written of each of its weights."""
    state = _moves_in(run / REPLACED)
    if state is not None:
        write_whole(run / REPLACED / _MOVES, json.dumps({**state, "last_saved": [*last_saved]}) + "\n")


def put_back(run: Path, *, keep: bool) -> None:
    """What was replaced comes back. What was begun is kept in `.unfinished`, in place of what is there; or deleted."""
    _exchange(run, REPLACED, UNFINISHED if keep else _DELETED)
    with writing(run):
        _forget(run / _DELETED)


def take_up(run: Path) -> None:
    """What was begun and not finished comes back, and what it is to replace is moved aside again."""
    _exchange(run, UNFINISHED, REPLACED)


def _exchange(run: Path, stored: str, into: str) -> None:
    state = _moves_in(run / stored)
    if state is None:
        return
    with writing(run):
        _forget(run / into)
        here = [path for name in state["names"] for path in written(run / name)] + [run / RECIPE_FILE]
        moves = [(path, run / into / path.relative_to(run)) for path in here]
        kept = [path for path in files_in(run / stored) if _is_moved(path.relative_to(run / stored).as_posix())]
        moves += [(path, run / path.relative_to(run / stored)) for path in kept]
        _move(run, moves, {**state, "into": into, "from": stored})


def _move(run: Path, moves: list[tuple[Path, Path]], about: dict[str, Any]) -> None:
    named = [[source.relative_to(run).as_posix(), to.relative_to(run).as_posix()] for source, to in moves]
    with writing(run):
        write_whole(run / _MOVES, json.dumps({**about, "moves": named}, indent=1) + "\n")
        _carry_out(run)


def _carry_out(run: Path) -> None:
    """Do what is left of the moves that are written down. Once they are done the list says what lies in `into`."""
    journal = _moves_in(run)
    if journal is None:
        return
    # A list that another has written may lead elsewhere by its folders, although its names lie within the run.
    folders = {Path(journal[key]) for key in ("into", "from") if journal.get(key)}
    folders |= {folder for name in chain.from_iterable(journal["moves"]) for folder in Path(name).parents[:-1]}
    for folder in sorted(folders):
        refuse_link(run / folder)
    for source, to in ((run / source, run / to) for source, to in journal["moves"]):
        if is_plain(source) and not os.path.lexists(to):
            to.parent.mkdir(parents=True, exist_ok=True)
            source.rename(to)
    if "from" in journal:
        (run / journal["from"] / _MOVES).unlink(missing_ok=True)
    for name in {Path(source).parts[0] for source, _ in journal["moves"]}:
        prune(run / name)
    if journal["into"] is None:
        (run / _MOVES).unlink()
    else:
        (run / journal["into"]).mkdir(exist_ok=True)
        (run / _MOVES).replace(run / journal["into"] / _MOVES)


def _forget(folder: Path) -> None:
    """Delete a folder of ours: under another name first, so that half of it is never taken for the whole."""
    gone = folder.with_name(_DELETED)
    shutil.rmtree(gone, ignore_errors=True)
    if folder.is_dir() and folder != gone:
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
