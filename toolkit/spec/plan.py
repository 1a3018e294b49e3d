"""The plan of roles: where each role of each stage comes from.

`toolkit.spec.resolve` makes it of a recipe, once, and everything else follows from it: a run is built by placing the
sources of a plan on the base, `check` places the same ones on the meta device, a stage's prerequisites are the stages
that its sources need, its outputs are outdated when a key changes that was looked up to plan it, and a key that no plan
looked up, though it is there, would have no effect.
"""

import os
from dataclasses import dataclass
from typing import Any

from toolkit.data import Kind
from toolkit.errors import Problem, RecipeError
from toolkit.models import Precision
from toolkit.rewards import DEFAULT_KIND
from toolkit.spec.sections import precision_of
from toolkit.spec.sources import OwnBase, Source, Values

STAGES = ("sft", "reward", "ppo", "q", "collect")
RESPONDING = ("ppo", "q")  # those that measure responses to held-out prompts, and by one of which a run responds


@dataclass(frozen=True)
class StagePlan:
    """What a stage stands on.

    Args:
        stage: its name.
        roles: the sources of its roles, in the order in which they are placed on the base; none where it trains a
            model of its own.
        own: the base of its own that it trains, in place of a role.
        rows: the kind of data that it trains on: see `toolkit.data`.
        needs: stages that have to run first, in order.
        reads: keys, and beginnings of keys, that decide what it does; those of the stages that it needs included.
        missing: why it cannot run, though the recipe as a whole is right.
    """

    stage: str
    roles: tuple[Source, ...] = ()
    own: OwnBase | None = None
    rows: Kind = "prompts"
    needs: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    missing: Problem | None = None

    @property
    def model(self) -> str:
        """The section with the model that it trains, whose `dtype` its precision follows."""
        return "base" if self.own is None else self.own.section

    def precision(self, values: Values) -> Precision:
        """The dtype of that model on this machine, and why."""
        if self.own is not None:
            return self.own.precision
        return base_precision(values)

    def source(self, role: str) -> Source | None:
        """Where a role comes from; None where the stage does not have it."""
        return next((source for source in self.roles if source.role == role), None)

    def reads_key(self, key: str) -> bool:
        """Whether a dotted key of a recipe decides anything here."""
        return any(f"{key}.".startswith(f"{read}.") for read in self.reads)


@dataclass(frozen=True)
class Plan:
    """The stages of a recipe, and what is wrong between its sections."""

    stages: dict[str, StagePlan]
    problems: tuple[Problem, ...]
    scored_by: OwnBase | None = None  # what the reward stage trains, where a scorer of kind model reads that

    def needs(self, stage: str) -> list[str]:
        """Stages that have to be finished before `stage`, in order.

        Raises:
            RecipeError: the recipe has no such stage, or does not say how to run one that is needed.
        """
        if stage not in STAGES:
            raise RecipeError(f'no stage "{stage}"; the stages are {", ".join(STAGES)}.')
        if stage not in self.stages:
            has = f"It has {', '.join(self.stages)}. " if self.stages else ""
            wrong = f'the recipe has no section "{stage}", so this stage has nothing to run.'
            raise RecipeError(wrong, remedy=f"{has}Add {stage}: {{}} for that stage with its defaults.")
        missing = self.stages[stage].missing
        if missing is not None:
            raise RecipeError(missing.wrong, remedy=missing.remedy)
        return list(self.stages[stage].needs)


def at(values: Values, key: str) -> Any:
    """What stands at a dotted key; None where there is nothing."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def by_trl(values: Values) -> bool:
    """Whether TRL's own loop trains in the ppo stage."""
    return bool(at(values, "ppo.loop") == "trl")


def base_precision(values: Values) -> Precision:
    """The dtype of the base on this machine, and why; one with random weights is trained whole."""
    return precision_of(section(values, "base"), whole=at(values, "base.model") is None)


def section(values: Values, key: str) -> Values:
    """A section; empty where it is missing or none, which is a problem of its own."""
    there = at(values, key)
    return there if isinstance(there, dict) else {}


def adapter_roles(values: Values, place: str = "scorer") -> dict[str, str]:
    """By their folders the roles of the adapters that parts of the scorer or the judge name, beside that of it."""
    # In the order of their names, by which a recipe whose parts stand otherwise has the same roles.
    parts = (part for _, part in sorted(scorer_parts(values, place).items()))
    adapters = (part for part in parts if part.get("kind", DEFAULT_KIND) == "adapter")
    folders = {folder: _place(folder) for folder in (str(part["adapter"]) for part in adapters if part.get("adapter"))}
    numbers = {folder: number for number, folder in enumerate(dict.fromkeys(folders.values()), 1)}
    role = "judge" if place == "judge" else "reward"
    return {folder: f"{role}_{numbers[as_one]}" for folder, as_one in folders.items()}


def same_rewards(values: Values, place: str, start: str) -> list[tuple[str, str]]:
    """Pairs of parts with a weight, of the scorer or the judge, that read the same adapter, or the model that the run
    trains; `start` names the adapter of a part that names none."""
    found, seen = list[tuple[str, str]](), dict[str, str]()
    for key, part in scorer_parts(values, place).items():
        kind = part.get("kind", DEFAULT_KIND)
        of_a_class = part.get("class_column") or part.get("wanted_class") is not None
        if kind not in ("adapter", "model") or of_a_class or part.get("weight") == 0:
            continue
        folder = part.get("model") if kind == "model" else part.get("adapter") or at(values, start)
        reads = kind + (_place(str(folder)) if folder else "")
        found += [(seen[reads], key)] if reads in seen else []
        seen.setdefault(reads, key)
    return found


def _place(folder: str) -> str:
    return os.path.realpath(os.path.expanduser(folder))


def scorer_parts(values: Values, place: str = "scorer") -> dict[str, Values]:
    """The scorer or the judge, or the parts of a sum, by their place in the recipe."""
    scorer = section(values, place)
    if scorer.get("kind") != "sum":
        return {place: scorer}
    parts = section(scorer, "parts")
    return {f"{place}.parts.{name}": part for name, part in parts.items() if isinstance(part, dict)}
