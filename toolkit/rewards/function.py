"""A plain Python function as a reward callback."""

import ast
import importlib
import importlib.util
import inspect
import struct
import symtable
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from toolkit.errors import Problem, RewardError, words_of
from toolkit.rewards.base import Reward, check_reward, check_signature, of_a_class, of_a_library, place_of, state_of
from toolkit.rewards.kept import process_kept
from toolkit.rewards.scorer import Scorer, ScorerContext, problems_of
from toolkit.settings import setting


def load_function(function: str) -> Reward:
    """A function by "module:function" or "file.py:function", sync or async.

    Modules of the current folder are found as by `python -m`; a file is run, and looked for from the current folder.
    Raises: RewardError: the name has another form, there is no such module, file or function, or its code fails.
    """
    module, reward = _loaded(function)
    if state_of(reward) is None:
        return reward
    name = _halves(function)[1]
    earlier = vars(module).setdefault(_GIVEN, {}).get(name)
    if earlier is reward:  # each run has one of its own
        if module.__name__ != "__main__":
            module, reward = _loaded(function, anew=True)
        if earlier is reward:
            told = "has the state in which an earlier run of this process has left it: nothing makes it anew."
            warnings.warn(f"{function} {told}", stacklevel=2)
    vars(module).setdefault(_GIVEN, {})[name] = reward
    return reward


_TEXT = "__text_read__"  # in a module of a user's: what its file had in it when it was run
_GIVEN = "__rewards_given__"  # in a module: the rewards with a state that runs have got from it, by name


def _loaded(function: str, *, anew: bool = False) -> tuple[ModuleType, Reward]:
    """The module and the function of a name; its code is run again if `anew`."""
    place, name = _halves(function)
    path, here = _existing(place) if place.endswith(".py") else None, str(Path.cwd())
    if path is None and here not in sys.path:
        sys.path.insert(0, here)
    try:
        with process_kept():
            if path is not None:
                module = _run(path, anew=anew)
            else:
                imported = place in sys.modules
                module = importlib.import_module(place)
                text = _own_text(module)
                changed = vars(module)[_TEXT] != text if _TEXT in vars(module) else imported and _is_edited(module)
                module = importlib.reload(module) if anew or (changed and place != "__main__") else module
                vars(module)[_TEXT] = text
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != place.split(".")[0]:  # a user's own words; what it imports
            raise _not_loaded(place, error) from error
        where = f"from {here} and " if path is None else ""
        raise _wrong(f'no module "{error.name}", looked for {where}in the environment.') from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _not_loaded(place, error) from error
    reward: Reward | None = getattr(module, name, None)
    if not callable(reward):
        remedy = "A notebook or script has given it: put it into a file, and name that." if in_no_file(function) else ""
        raise _wrong(f'{place} has no function "{name}".', remedy)
    check_reward(reward, "function")
    return module, reward


def _not_loaded(place: str, error: BaseException) -> RewardError:
    # A syntax error has no line of its own in the traceback.
    at = "" if isinstance(error, SyntaxError) else f" ({place_of(error)})"
    return _wrong(f"{place} cannot be loaded: {type(error).__name__}: {words_of(error)}{at}.", "Mend it there.")


def _is_edited(module: ModuleType) -> bool:
    """Whether the file of a module that a notebook has imported is another by now; run again for nothing, it would lose
    what the notebook has put into it. By the code of its functions; and by the compiled file, which has the time and
    size of what was compiled (PEP 552), unless another process has compiled it since."""
    if (text := _own_text(module)) is None:
        return False
    try:
        known = set(_codes(compile(text, module.__file__ or "", "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return True  # which its reload tells
    own = [one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__]
    own += [one for kind in own if isinstance(kind, type) for one in vars(kind).values()]
    held = [one.__code__ for one in own if isinstance(one, FunctionType) and one.__closure__ is None]
    if any(code not in known for code in held if code.co_filename == module.__file__):
        return True
    compiled = Path(getattr(module.__spec__, "cached", None) or "")
    if not compiled.is_file() or len(head := compiled.read_bytes()[:16]) < 16:
        return False
    flags, seconds, size = struct.unpack("<4x3I", head)
    now = Path(module.__file__ or "").stat()
    return not flags and (seconds, size) != (int(now.st_mtime) & 0xFFFFFFFF, now.st_size & 0xFFFFFFFF)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _own_text(module: ModuleType) -> bytes | None:
    """What the file of a user's module has in it; None of a library's, and of one without a file."""
    path = Path(getattr(module, "__file__", None) or "")
    return path.read_bytes() if path.suffix == ".py" and path.is_file() and not of_a_library(str(path)) else None


def check_function(function: str) -> None:
    """What `load_function` would raise. A file is read and not run; a module has to be imported."""
    place, name = _halves(function)
    if not place.endswith(".py"):
        _loaded(function)
        return
    path = _existing(place)
    try:
        with tokenize.open(path) as file:  # a byte-order mark and a coding line as Python takes them
            code = file.read()
        symbols, tree = symtable.symtable(code, str(path), "exec").get_symbols(), ast.parse(code)
        everything = any(
            isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
            for node in ast.walk(tree)
        )
    except (SyntaxError, ValueError) as error:
        raise _wrong(f"{place} is not Python: {error}.", "Mend it there.") from error
    if everything:  # what it imports is known once it runs
        return
    if not any(symbol.get_name() == name and (symbol.is_assigned() or symbol.is_imported()) for symbol in symbols):
        raise _wrong(f'{place} has no function "{name}".')
    if (node := _only_definition(tree, name)) is None:
        return
    at = f"{place}, line {node.lineno}"
    if isinstance(node, ast.ClassDef):
        raise of_a_class(name, "function", at=at)
    check_signature(_signature_of(node), "function", at=at)


_CHANGES_NAMES = {"globals", "vars", "locals", "setattr", "exec", "eval", "__dict__", "__defaults__", "__kwdefaults__"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _only_definition(tree: ast.Module, name: str) -> _Function | ast.ClassDef | None:
    """The function or class that a name of a file is; None where the file, as it runs, may put something else in its
    place."""
    if _CHANGES_NAMES & {
        one for node in ast.walk(tree) for one in (getattr(node, "id", ""), getattr(node, "attr", ""))
    }:
        return None
    found = [node for node in tree.body if isinstance(node, _Function | ast.ClassDef) and node.name == name]
    named = [node for node in ast.walk(tree) if name in (getattr(node, "name", None), getattr(node, "asname", None))]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    given = any(not isinstance(node.ctx, ast.Load) for node in names)
    return found[0] if len(found) == len(named) == 1 and not given and not found[0].decorator_list else None


def _signature_of(node: _Function) -> inspect.Signature:
    own, empty = node.args, inspect.Parameter.empty
    placed = [*own.posonlyargs, *own.args]
    defaults = [empty] * (len(placed) - len(own.defaults)) + [None] * len(own.defaults)
    only, either = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    kinds: list[Any] = [only] * len(own.posonlyargs) + [either] * len(own.args)
    parameters = [
        inspect.Parameter(one.arg, kind, default=default)
        for one, kind, default in zip(placed, kinds, defaults, strict=True)
    ]
    if own.vararg is not None:
        parameters.append(inspect.Parameter(own.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for one, default in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        given = empty if default is None else None
        parameters.append(inspect.Parameter(one.arg, inspect.Parameter.KEYWORD_ONLY, default=given))
    if own.kwarg is not None:
        parameters.append(inspect.Parameter(own.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def in_no_file(function: str) -> bool:
    """Whether a function was defined in a notebook or within another one, or was an object or a method, so that its
    name alone does not find it."""
    place, _, name = function.rpartition(":")
    return place == "__main__" or "<" in name or "." in name


def beside(function: str, folder: Path) -> str:
    """A function's name with its file in `folder`, if that has it and the current folder does not."""
    place, _, name = function.rpartition(":")
    there = folder / place
    if not place.endswith(".py") or Path(place).expanduser().is_file() or not there.is_file():
        return function
    return f"{there.resolve()}:{name}"


def _wrong(wrong: str, remedy: str = "") -> RewardError:
    return RewardError(wrong, field="function", remedy=remedy)


def _halves(function: str) -> tuple[str, str]:
    place, _, name = function.rpartition(":")  # the last one: C:\rewards.py:brevity
    if not place or not name:
        raise _wrong(f'"{function}" is not of the form module:function or file.py:function.')
    return place, name


def _existing(place: str) -> Path:
    path = Path(place).expanduser().absolute()
    if not path.is_file():
        raise _wrong(f'no file "{place}", looked for at {path}.')
    return path


def _run(path: Path, *, anew: bool = False) -> ModuleType:
    """The module of a file, not by its own name: `rewards.py` must not stand in for an installed module `rewards`.

    It is run once, whatever is taken from it, as long as its text stays: it may load a model. Or else `anew`."""
    name, text = f"reward_file_{abs(hash(path.resolve()))}", path.read_bytes()
    there = sys.modules.get(name)
    if getattr(there, _TEXT, None) == text and not anew:
        assert there is not None
        return there
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    # The loader would take a compiled file beside it, which need not be of this text.
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    vars(module)[_TEXT] = text  # not of one that failed
    return module


@dataclass(kw_only=True)
class FunctionScorer(Scorer):
    """A Python function, sync or async."""

    kind: ClassVar[str] = "function"
    function: str = setting(MISSING, '"module:function" or "file.py:function".')

    def conflicts(self) -> Iterator[Problem]:
        yield from problems_of(_halves, self.function)

    def check(self, context: ScorerContext) -> list[Problem]:
        return problems_of(check_function, self.function)

    def build(self, context: ScorerContext) -> Reward:
        return load_function(self.function)
