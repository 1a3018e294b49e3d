"""What `toolkit plan` prints: memory and time of an update by phase, and what to change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.costs import Lengths
from toolkit.errors import IN_PYTHON, Problem, printable

ROOM = 0.9
"""Of the memory there is; the rest is for what a plan does not count."""


@dataclass(frozen=True)
class PhaseMemory:
    """The most bytes that are live in a phase, by what they are for."""

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase in an update, and of those that rollouts could take with CUDA graphs, or merged, too."""

    phase: str
    seconds: float
    graphs: float | None = None
    merged: float | None = None


@dataclass(frozen=True)
class PlanReport:
    """What `toolkit plan` prints.

    Args:
        name: of the recipe.
        where: the card or CPU, and the precision.
        lengths: of the rows that it is for.
        memory: of each phase.
        limit: bytes that there are.
        times: of each phase; none where only a size of memory was named.
        notes: what else is to be known, one of them what to change where it does not fit.
        updates: of the whole run; None where the data decide, which a plan does not read for it.
        left_out: stages that train a model of their own, which are not planned.
    """

    name: str
    where: str
    lengths: Lengths
    memory: tuple[PhaseMemory, ...]
    limit: int
    times: tuple[PhaseTime, ...]
    notes: tuple[Problem, ...]
    updates: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def largest(self) -> PhaseMemory:
        return max(self.memory, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.largest.total <= self.limit

    @property
    def verdict(self) -> str:
        """Whether it fits, in words: "barely" where it leaves less free than a tenth."""
        if not self.fits:
            return "does not fit"
        return "fits" if self.largest.total <= ROOM * self.limit else "barely fits"

    @property
    def seconds(self) -> float:
        """Of an update, as it runs now."""
        return sum(time.seconds for time in self.times)

    def summary(self) -> Iterator[tuple[str, str]]:
        """The two lines with which `toolkit check` ends."""
        largest = self.largest
        taken = f"{size_of(largest.total)} in {largest.phase}"
        left_out = "".join(f"; {stage}, which trains a model of its own, is not planned" for stage in self.left_out)
        yield "memory", f"{taken}; {self.verdict} {self.where} ({size_of(self.limit)}){left_out}"
        if self.times:
            whole = f", all {self.updates} of them {seconds_of(self.updates * self.seconds)}" if self.updates else ""
            yield "time", f"an update about {seconds_of(self.seconds)}{whole}, as toolkit plan estimates"

    def text(self, options: Mapping[str, str] = IN_PYTHON) -> str:
        """The report, for a notebook or with the options of the command line."""
        lengths = self.lengths
        in_all = lengths.prompt + lengths.response
        bound = f", {lengths.both} in all" if lengths.both is not None and lengths.both < in_all else ""
        lines = [
            f"{self.name} on {self.where}: rows of {lengths.prompt} + {lengths.response} tokens{bound}, all at their "
            "limit"
        ]
        kinds = list(dict.fromkeys(kind for phase in self.memory for kind in phase.parts))
        unit, of_unit = ("GB", 1e9) if self.largest.total >= 1e9 else ("MB", 1e6)
        rows = [[kind, *(f"{phase.parts.get(kind, 0) / of_unit:.2f}" for phase in self.memory)] for kind in kinds]
        rows.append(["all", *(f"{phase.total / of_unit:.2f}" for phase in self.memory)])
        lines += ["", *_table([unit, *(phase.phase for phase in self.memory)], rows)]
        lines += ["", *(f"{label}: {text}" for label, text in self.summary())]
        if self.times:
            columns = ["seconds", "as it runs"]
            columns += ["with CUDA graphs", "and merged"] if any(time.graphs for time in self.times) else []
            shown = [
                [t.phase, *(seconds_of(s) if s else "" for s in (t.seconds, t.graphs, t.merged))] for t in self.times
            ]
            lines += ["", *_table(columns, [row[: len(columns)] for row in shown])]
        lines += ["", *(f"- {note.text(options)}" for note in self.notes)]
        return printable("\n".join(lines))

    __str__ = __repr__ = text  # a notebook shows the latter


def size_of(number: float) -> str:
    """Bytes as a report shows them."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def seconds_of(value: float) -> str:
    """A time as a report shows it."""
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min" if value < 36_000 else f"{value / 3600:.3g} h"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
