"""What `check` finds out about a recipe, in the words of its report."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from toolkit.errors import IN_PYTHON, Problem, RecipeError, ToolkitError, printable


@dataclass(frozen=True)
class BaseFacts:
    """The base: `gigabytes` (10⁹ bytes) are its weights alone; `positions` is the longest sequence that it takes.

    `chosen` is the dtype with the reason, where the recipe leaves it to the machine.
    """

    kind: str
    name: str
    parameters: int
    precision: str
    gigabytes: float
    positions: int | None
    chosen: str = ""

    def __str__(self) -> str:
        limit = f"; at most {self.positions:,} tokens" if self.positions else ""
        chosen = f"; {self.chosen}" if self.chosen else ""
        size = f"{self.gigabytes:.2f} GB" if self.gigabytes >= 1 else f"{1000 * self.gigabytes:.3g} MB"
        return (
            f"{self.kind}, {self.name}: {self.parameters:,} parameters, {self.precision}: about {size}{limit}{chosen}"
        )


@dataclass(frozen=True)
class RoleFacts:
    """A role: where it starts, what it has of its own, and the stage that trains it, if one does.

    `rank` is None where a role has no adapter of its own, or trains all weights of a base of its own, which
    `adapter_parameters` then counts; `modules` counts the layers that its adapter is on.
    """

    role: str
    start: str
    rank: int | None = None
    modules: int = 0
    adapter_parameters: int = 0
    head_parameters: int = 0
    dtype: str = ""
    trained_by: str | None = None

    @property
    def parameters(self) -> int:
        """Parameters that train."""
        return self.adapter_parameters + self.head_parameters if self.trained_by else 0

    def __str__(self) -> str:
        parts = [f"LoRA r={self.rank} on {self.modules} modules, {self.adapter_parameters:,}"] if self.rank else []
        if self.adapter_parameters and self.rank is None:
            parts = [f"all {self.adapter_parameters:,} weights"]
        parts += [f"head {self.head_parameters:,}"] if self.head_parameters else []
        trains = f"{self.parameters:,} parameters train in {self.trained_by}" if self.trained_by else "is not trained"
        dtype = f" ({self.dtype})" if self.dtype else ""
        return "; ".join([self.start, *([" + ".join(parts) + dtype] if parts else []), trains])


@dataclass(frozen=True)
class UpdateFacts:
    """One update of PPO: `epochs` times over `mini_batches` of `mini_batch` prompts, each in `micro_batches` parts.

    `steps` are optimizer steps. `rollout` prompts are answered at a time.
    """

    epochs: int
    mini_batches: int
    mini_batch: int
    micro_batches: int
    steps: int
    rollout: int


@dataclass(frozen=True)
class StageFacts:
    """A stage: its rows and what the batches come to. `longest` is the longest sequence that it can meet, in tokens.

    `batches` counts updates for ppo and optimizer steps for the others, `steps` optimizer steps for all. `prepared` is
    how many rows TRL's trainer makes of the rows of sft, which it packs, or cuts and leaves out what is cut to nothing;
    `of_a_pass` counts the optimizer steps of one pass, but of ppo.
    """

    stage: str
    state: str
    rows: int
    held_out: int
    longest: int
    batch: int
    batches: int
    steps: int
    update: UpdateFacts | None = None
    prepared: int | None = None
    of_a_pass: int = 0

    @property
    def passes(self) -> float:
        """Passes over the training rows, of which a stage's last batch is a short one, and counts as one."""
        if self.update is not None:
            return self.episodes / self.rows
        return self.batches / self.of_a_pass

    @property
    def episodes(self) -> int:
        """Rows that training uses in all."""
        return self.batches * self.batch

    def __str__(self) -> str:
        what = "prompts" if self.update else "rows"
        if self.prepared not in (None, self.rows):
            what += f" ({self.prepared:,} once packed or cut to max_length)"
        lines = [f"{self.state}; {self.rows:,} {what}, {self.held_out:,} held out, at most {self.longest:,} tokens"]
        if self.update is None:
            lines.append(f"{self.batches:,} optimizer steps of {self.batch} rows; passes over them: {self.passes:.3g}")
        else:
            update, parts = self.update, f", answered {self.update.rollout} at a time"
            lines += [
                f"an update of {self.batch} prompts{parts * (update.rollout < self.batch)}: "
                f"num_ppo_epochs {update.epochs} × mini-batches {update.mini_batches} of {update.mini_batch} prompts, "
                f"in up to {update.micro_batches} micro-batches each: {update.steps} optimizer steps",
                f"{self.batches:,} updates, {self.steps:,} optimizer steps, {self.episodes:,} episodes; "
                f"passes over the prompts: {self.passes:.3g}",
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What a check of the recipe `name` found. As text it is what `toolkit check` prints."""

    name: str
    base: BaseFacts | None  # None where it could not be read
    roles: tuple[RoleFacts, ...]  # those that could be put on the base
    data: tuple[str, ...]  # a line for each data section
    stages: tuple[StageFacts, ...]  # those whose data could be read
    notes: tuple[Problem, ...]  # what hinders nothing
    problems: tuple[Problem, ...]  # each with its place in the recipe

    def raise_problems(self) -> None:
        """Raises a RecipeError with all problems, if there are any."""
        if self.problems:
            raise RecipeError(self.name, problems=self.problems)

    def text(self, options: Mapping[str, str] = IN_PYTHON) -> str:
        """The report, for a notebook or with the options of the command line."""
        entries = [("base", str(self.base))] if self.base else []
        entries += [(role.role, str(role)) for role in self.roles]
        entries += [("data", line) for line in self.data]
        entries += [(stage.stage, str(stage)) for stage in self.stages]
        entries += [("note", note.text(options)) for note in self.notes]
        lines = "\n".join(f"{label:<10} {text}".replace("\n", "\n" + " " * 11) for label, text in entries)
        return printable(lines)

    __str__ = text


class Findings:
    """Problems and notes of a check that goes on."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []

    @contextmanager
    def at(self, section: str = "", key: str = "") -> Iterator[None]:
        """What a user can mend is noted, with its section of the recipe, and the check goes on.

        What names no field is a problem of `key`, or of the section itself; what names the section is as it is.
        """
        try:
            yield
        except ToolkitError as error:
            for problem in error.problems:
                named = problem if problem.field or not key else problem.within(key)
                self.note(named if section and named.field.startswith(f"{section}.") else named.within(section))
        except OSError as error:
            if error.filename is None:
                raise
            wrong = f"{error.filename}: {error.strerror}."
            self.note(Problem(wrong, ".".join(filter(None, [section, key])), "Check the name and its permissions."))

    def note(self, problem: Problem) -> None:
        if problem not in self.problems:  # two stages may read one file
            self.problems.append(problem)
