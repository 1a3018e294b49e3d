"""Every error that a user can cause, as a value.

`ToolkitError` is the root. Each category is also the built-in type that it replaces, so that `except ValueError` in a
notebook still works. To add one, inherit `ToolkitError` and that built-in type, and say when it is raised.

Whoever finds a problem says which setting (`field`), what is wrong with the value seen, and the next step (`remedy`).
A field is named as where it is known: an argument or a field of a configuration. Whoever knows more adds it: `within`
puts the section of a recipe before the field, and `text` writes the options of a remedy as notebooks or the command
line have them. Foreign text, as of files and servers, is made `printable`, here and wherever a terminal shows it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from string import Template
from typing import Self

IN_PYTHON = {
    "run": 'run="name"',
    "runs_dir": 'runs_dir="folder"',
    "overwrite": "overwrite=True",
    "resume": "resume=True",
    "from_run": 'from_run="name"',
    "gpu": 'gpu="4090"',
}
"""How the options that a remedy may name as `$run`, `$runs_dir` and so on are written in Python."""


# Control signs but line break and tab, those that turn the direction of what follows, and halves of a sign.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text of others for a terminal, which would obey its escape sequences: `\\x1b` stands there for such a sign."""
    return _UNPRINTABLE.sub(lambda sign: sign.group().encode("unicode_escape").decode(), text)


def words_of(error: BaseException) -> str:
    """What an error of others says; nothing where asking it raises another one."""
    try:
        return str(error)
    except Exception:
        return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean x?` of the nearest name that is known; nothing where none is near."""
    known = list(known)
    near = [one for one in known if one.lower() == name.lower()] or get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class Problem:
    """One thing that a user can mend.

    Args:
        wrong: what is wrong, with the value seen: a sentence.
        field: the setting, with dots; empty where it is no setting's.
        remedy: the next step: a sentence. `$overwrite` and the like stand for an option.
    """

    wrong: str
    field: str = ""
    remedy: str = ""

    def within(self, section: str) -> "Problem":
        """The same, with its field in a section; a problem of no field is one of the section itself."""
        return replace(self, field=".".join(filter(None, (section, self.field))))

    def text(self, options: Mapping[str, str] = IN_PYTHON, *, separator: str = " — ") -> str:
        """The problem on one line, its remedy in the words of Python or of another language."""
        field, wrong = _shown(self.field, 200), _shown(self.wrong, 1000)
        remedy = _shown(Template(self.remedy).safe_substitute(options), 1000)
        return f"{field}{separator if field else ''}{wrong} {remedy}".rstrip()

    __str__ = text


def _shown(text: str, most: int) -> str:
    """A text for a person: of its middle no more than fits, and nothing that a terminal would obey."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {len(text) - most:,} characters … {text[-most // 2 :]}"
    return printable(text)


class ToolkitError(Exception):
    """Root of the errors that a user can cause and mend: one `Problem`, or several, `wrong` saying whose they are."""

    def __init__(self, wrong: str, *, field: str = "", remedy: str = "", problems: Iterable[Problem] = ()):
        super().__init__(wrong)
        listed = tuple(problems)
        self._whose = wrong if listed else None
        self.problems = listed or (Problem(wrong, field, remedy),)

    def within(self, section: str) -> Self:
        """This error, its fields now in a section."""
        self.problems = tuple(problem.within(section) for problem in self.problems)
        return self

    def add_remedy(self, more: str) -> None:
        """Add a sentence to the remedy of each problem."""
        self.problems = tuple(replace(one, remedy=f"{one.remedy} {more}".lstrip()) for one in self.problems)

    def moved(self, old: Path, new: Path) -> None:
        """What it names in a folder is in another one now, if it is there."""
        if new.is_dir():
            way = f"{old}{os.sep}", f"{new}{os.sep}"
            self.problems = tuple(
                replace(one, wrong=one.wrong.replace(*way), remedy=one.remedy.replace(*way)) for one in self.problems
            )

    def text(self, options: Mapping[str, str] = IN_PYTHON) -> str:
        """The message, for a notebook or with the options of another language."""
        if self._whose is None:
            return self.problems[0].text(options, separator=": ")
        head = f"{_shown(self._whose, 200)} has {len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        return "\n  ".join([head, *(problem.text(options) for problem in self.problems)])

    __str__ = text


class PeerError(ToolkitError, RuntimeError):
    """Another of several processes has failed, and says so itself; `of` is the name of its error, "" where only the
    connection to it tells. `met` is in how many `processes.agreed` the one was that was in the fewest of them."""

    of = ""
    met = 0


@contextmanager
def within(section: str) -> Iterator[None]:
    """Errors inside name their fields in a section."""
    try:
        yield
    except ToolkitError as error:
        raise error.within(section)  # noqa: B904  (it is the same error)


class ConfigError(ToolkitError, ValueError):
    """Fields of a configuration object are out of range, or rule each other out. Carries all of them."""


class RecipeError(ToolkitError, ValueError):
    """A recipe, an override or the order of stages is wrong. Carries all problems of the file at once."""


class ModelError(ToolkitError, ValueError):
    """A base model cannot be loaded, or cannot be used for this."""


class AdapterError(ToolkitError, ValueError):
    """An adapter or head is missing, damaged, or belongs to another base."""


class DataError(ToolkitError, ValueError):
    """A file, row or column of a data set is wrong."""


class LengthError(DataError):
    """A prompt leaves no room for a response."""


class RewardError(ToolkitError, ValueError):
    """A reward callback cannot be found, or did not return one finite score a response."""


class ColumnError(RewardError):
    """The prompts lack a column that a reward reads."""


class RewardStateError(RewardError):
    """What a reward keeps as it goes could not be read or put back: a checkpoint of it would be another's."""


class NotFiniteError(RewardError):
    """A reward gave a number that is not finite, or a role made one of a response: the update is passed over, as long
    as they are few."""


class SelfCheckError(ToolkitError, RuntimeError):
    """A check at the start of training failed: going on would train the wrong thing."""


class CheckpointError(ToolkitError, ValueError):
    """A checkpoint cannot be written, or there is none from which training could go on."""


class RunInterrupted(ToolkitError, RuntimeError):
    """Ctrl-C, SIGTERM or SIGHUP ended a run, after its step was finished and all was saved."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number
