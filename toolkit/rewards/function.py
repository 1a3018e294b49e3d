"""A plain Python function as a reward callback."""

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from toolkit.errors import RewardError
from toolkit.rewards.base import Reward


def load_function(name: str) -> Reward:
    """Find a function by "module:function" or "file.py:function", sync or async.

    Modules of the current folder are found as by `python -m`; a file is run, and a relative one is looked for from the
    current folder.

    Raises:
        RewardError: the name has another form, there is no such module, file or function, or its code fails.
    """
    place, function_name = _halves(name)
    module = _module_of_file(place) if is_file(name) else _module(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f'scorer.function: {place} has no function "{function_name}".')
    return function


def check_function(name: str) -> None:
    """That there is such a function. A file is read and not run; a module has to be imported, as by `load_function`.

    Raises:
        RewardError: as by `load_function`.
    """
    if not is_file(name):
        load_function(name)
        return
    place, function_name = _halves(name)
    path = _existing(place)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise RewardError(f"scorer.function: {place} is not Python: {error}. Mend it there.") from error
    if function_name not in _names(tree):
        raise RewardError(f'scorer.function: {place} has no function "{function_name}".')


def is_file(name: str) -> bool:
    """Whether a function's name has a file in it, in place of a module."""
    return name.rpartition(":")[0].endswith(".py")


def beside(name: str, folder: Path) -> str:
    """A function's name with its file in `folder`, if that has it and the current folder does not."""
    place, _, function_name = name.rpartition(":")
    there = folder / place
    if not is_file(name) or Path(place).expanduser().is_file() or not there.is_file():
        return name
    return f"{there.resolve()}:{function_name}"


def _halves(name: str) -> tuple[str, str]:
    place, _, function_name = name.rpartition(":")  # the last one: C:\rewards.py:brevity
    if not place or not function_name:
        raise RewardError(f'scorer.function: "{name}" is not of the form module:function or file.py:function.')
    return place, function_name


def _existing(place: str) -> Path:
    path = Path(place).expanduser().absolute()
    if not path.is_file():
        raise RewardError(f'scorer.function: no file "{place}", looked for at {path}.')
    return path


def _names(tree: ast.Module) -> set[str]:
    """What a module's code names: functions, classes, variables and imports, those within an `if` or `try`, too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def _run(what: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        raise RewardError(
            f'scorer.function: no module "{error.name}", looked for from {Path.cwd()} and in the environment.'
        ) from error
    except Exception as error:
        # A syntax error has no line of its own in the traceback.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
        raise RewardError(
            f"scorer.function: {what} cannot be loaded: {type(error).__name__}: {error}{at}. Mend it there."
        ) from error


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return _run(name, lambda: importlib.import_module(name))


def _module_of_file(place: str) -> ModuleType:
    path = _existing(place)
    # Not by its own name: a file rewards.py must not stand in for an installed module of that name.
    spec = importlib.util.spec_from_file_location(f"reward_file_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    loader = spec.loader

    def load() -> ModuleType:
        loader.exec_module(module)
        return module

    return _run(place, load)
