"""What an update of a recipe costs on a card or a CPU: memory and time by phase, before a weight is loaded.

report = plan(recipes.load("llama3_8b_lora_fast"), "4090")
print(report)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.costs import (
    CARDS,
    Costs,
    Counted,
    CountedUpdate,
    Device,
    Lengths,
    Phase,
    here,
    named,
    optimizer_bytes,
    take_shape,
    weight_bytes_of,
)
from toolkit.errors import IN_PYTHON, Problem, RecipeError, printable
from toolkit.models import AUTO, META, SharedBase, load_model, quantize_outline
from toolkit.runs.build import stage_dataset
from toolkit.runs.check_data import longest_row
from toolkit.spec.plan import at
from toolkit.spec.recipe import Recipe
from toolkit.spec.sources import OwnBase, Site

# Settings that say how many rows a phase without gradients has at a time.
_AT_ONCE = "local_rollout_forward_batch_size"
_ROWS = {"score": _AT_ONCE, "read": _AT_ONCE, "evaluation": "per_device_eval_batch_size"}


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
    eager: float
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
    """

    name: str
    where: str
    lengths: Lengths
    memory: tuple[PhaseMemory, ...]
    limit: int
    times: tuple[PhaseTime, ...]
    notes: tuple[Problem, ...]

    @property
    def largest(self) -> PhaseMemory:
        return max(self.memory, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.largest.total <= self.limit

    @property
    def seconds(self) -> float:
        """Of an update, as it runs now."""
        return sum(time.eager for time in self.times)

    def summary(self) -> Iterator[tuple[str, str]]:
        """The two lines with which `toolkit check` ends."""
        largest = self.largest
        verdict = "fits" if self.fits else "does not fit"
        yield "memory", f"{_size(largest.total)} in {largest.phase}; {verdict} {self.where} ({_size(self.limit)})"
        if self.times:
            yield "time", f"an update about {_seconds(self.seconds)}, by the model of toolkit plan"

    def text(self, options: Mapping[str, str] = IN_PYTHON) -> str:
        """The report, for a notebook or with the options of the command line."""
        lengths = self.lengths
        lines = [
            f"{self.name} on {self.where}: rows of {lengths.prompt} + {lengths.response} tokens, all at their limit"
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
            shown = [[t.phase, *(_seconds(s) if s else "" for s in (t.eager, t.graphs, t.merged))] for t in self.times]
            lines += ["", *_table(columns, [row[: len(columns)] for row in shown])]
        lines += ["", *(f"- {note.text(options)}" for note in self.notes)]
        return printable("\n".join(lines))

    def __str__(self) -> str:
        return self.text()


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]


# ---------------------------------------------------------------------- from a recipe


def plan(recipe: Recipe, gpu: str | None = None, *, notes: bool = True) -> PlanReport:
    """Plan the ppo stage of a recipe.

    Args:
        recipe: whose data is read only where it sets no `max_prompt_length`.
        gpu: a card by its name, or a size of memory; None for the card, or CPU, of this machine.
        notes: whether to find out, too, what checkpointing changes and what would fit.

    Raises:
        RecipeError: there is no ppo stage, or it is TRL's own loop.
        ToolkitError: the card is not known, or the base, an adapter or the data cannot be read.
    """
    if "ppo" not in recipe.plan.stages:
        raise RecipeError('the recipe has no section "ppo", and an update of that is what is planned.')
    if at(recipe.values, "ppo.loop") == "trl":
        raise RecipeError("trl is TRL's own loop, which is not planned.", field="ppo.loop", remedy="Take toolkit.")
    card = here() if gpu is None else named(gpu)
    return _Planner(_in_its_precision(recipe, card, gpu), card).report(notes=notes)


def _in_its_precision(recipe: Recipe, card: Device | int, gpu: str | None) -> Recipe:
    """With what `base.dtype: auto` comes to on another machine than this one."""
    base = recipe.values["base"]
    if gpu is None or base.get("dtype", AUTO) != AUTO or base.get("model") is None:
        return recipe
    half = torch.bfloat16 if isinstance(card, int) or torch.bfloat16 in card.peak else torch.float16
    return replace(recipe, values={**recipe.values, "base": {**base, "dtype": str(half).removeprefix("torch.")}})


class _Planner:
    def __init__(self, recipe: Recipe, card: Device | int):
        self.recipe, self.card = recipe, card
        self.device = card if isinstance(card, Device) else None
        self.limit = card.memory if isinstance(card, Device) else card
        self.context = card.context if isinstance(card, Device) else next(iter(CARDS.values())).context
        self.args = recipe.stage_config("ppo")
        self.lengths = self._lengths()
        self.roles, self.update = self._outlined()
        self.static = self._static()

    def _lengths(self) -> Lengths:
        data, args = self.recipe.values["data"], self.args
        prompt = data.get("max_prompt_length") or longest_row(stage_dataset(self.recipe, "ppo", "prompts", "train"))
        longest = args.max_length or prompt + args.response_length
        return Lengths(prompt, min(args.response_length, longest - prompt))

    def _outlined(self) -> tuple[SharedBase, CountedUpdate]:
        """The base with the roles of the stage, as it would be loaded, without numbers."""
        recipe = self.recipe
        tokenizer = recipe.tokenizer if recipe.base.model is None else None
        base = load_model(recipe.base.model_spec(), tokenizer=tokenizer, device=META).requires_grad_(False)
        if (quantization := recipe.quantization()) is not None:
            quantize_outline(base, quantization)
        roles, sources = SharedBase(base), recipe.plan.stages["ppo"].roles
        own_base = any(isinstance(source, OwnBase) for source in sources)
        nothing_yet = Site(recipe.tokenizer if own_base else None, lambda stage: None)
        with torch.device("meta"):
            for source in sources:
                source.as_of(nothing_yet).place(roles, nothing_yet)
        counted = Counted(base.config.get_text_config().vocab_size)
        take_shape(roles)
        return roles, CountedUpdate(counted, roles, self.args, self.lengths, on_cpu=self._on_cpu)

    @property
    def _on_cpu(self) -> bool:
        return self.device is not None and not self.device.graphs

    def _static(self) -> dict[str, int]:
        roles = self.roles
        own = {id(p): p.nbytes for role in roles.roles for p in roles.parameters_of(role)}
        trained = sum(p.numel() for role in roles.trained_roles for p in roles.parameters_of(role))
        adapters = sum(own.values())
        return {
            "base": weight_bytes_of(roles) - adapters,
            "adapters": adapters,
            "optimizer": round(trained * optimizer_bytes(self.args)),
        }

    def report(self, *, notes: bool = True) -> PlanReport:
        phases = self.update.phases(scored="reward" in self.roles.roles)
        memory = tuple(self._memory(phases))
        times = tuple(self._times(phases, self.device)) if self.device is not None else ()
        dtype = self.recipe.precision("ppo").dtype
        name = f"{self.device.name}" if self.device is not None else f"a card of {_size(self.limit)}"
        about = (self.recipe.name, f"{name} in {dtype}", self.lengths, memory, self.limit, times)
        report = PlanReport(*about, ())
        return replace(report, notes=tuple(self._notes(report))) if notes else report

    # ------------------------------------------------------------------ memory

    def _memory(self, phases: Sequence[Phase]) -> Iterator[PhaseMemory]:
        of: dict[str, Costs] = {}
        for phase in phases:
            if phase.name == "merged":
                continue
            name = "rollout" if phase.name in ("prefill", "decode") else phase.name
            if name not in of or phase.costs.peak > of[name].peak:
                of[name] = phase.costs
        for name, costs in of.items():
            yield self._of_phase(name, costs)

    def _of_phase(self, name: str, costs: Costs) -> PhaseMemory:
        parts = {kind: size for kind, size in costs.of_peak.items() if size}
        return PhaseMemory(name, {**self.static, **parts, **({"context": self.context} if self.context else {})})

    # ------------------------------------------------------------------ time

    def _times(self, phases: Sequence[Phase], device: Device) -> Iterator[PhaseTime]:
        of: dict[str, list[Phase]] = {}
        for phase in phases:
            of.setdefault(phase.name, []).append(phase)
        (merged,) = of.pop("merged")
        del of["evaluation"]
        for name, parts in of.items():
            eager = sum(part.times * device.eager(part.costs) for part in parts)
            if name != "decode" or not device.graphs:
                yield PhaseTime(name, eager)
                continue
            graphs = sum(part.times * device.recorded(part.costs) for part in parts)
            yield PhaseTime(name, eager, graphs, merged.times * device.recorded(merged.costs, merged=True))

    # ------------------------------------------------------------------ what to change, and what is assumed

    def _notes(self, report: PlanReport) -> Iterator[Problem]:
        args = self.args
        other = self._learning(gradient_checkpointing=not args.gradient_checkpointing)
        said = "without" if args.gradient_checkpointing else "with"
        total = _size(self._of_phase("update", other).total)
        yield Problem(f"the update {said} gradient checkpointing: {total}.")
        if not report.fits:
            yield self._way_out(report)
        if self.device is not None:
            yield Problem(self._assumed(self.device))
        yield Problem("the allocator's unused blocks are not counted: leave a tenth of a card free.")

    def _assumed(self, device: Device) -> str:
        rates = ", ".join(
            f"{str(dtype).removeprefix('torch.')} {peak / 1e12:.3g}" for dtype, peak in device.peak.items()
        )
        matmuls, bandwidth = device.reached
        return (
            f"time: each operator by its operations ({rates} TFLOP/s, of which {matmuls:.0%} are reached) or its bytes "
            f"({device.bandwidth / 1e9:.3g} GB/s, {bandwidth:.0%}), whichever take longer, and "
            f"{device.operator * 1e6:.3g} µs of Python for each; all responses at full length; scoring by anything but "
            "the reward role left out."
        )

    def _learning(self, **changes: Any) -> Costs:
        args = self.recipe.stage_config("ppo", **changes)
        return CountedUpdate(self.update.counted, self.roles, args, self.lengths).learning()

    def _way_out(self, report: PlanReport) -> Problem:
        """What would fit, and which key to change first."""
        no_sharding = "One base over several cards (FSDP) is not supported."
        needed = sum(self.static.values()) + self.context
        if needed > self.limit:
            fewer = "base.quantization in 4 bits, a smaller base, or " if self.recipe.quantization() is None else ""
            wrong = f"weights and optimizer alone take {_size(needed)} of {_size(self.limit)}."
            cards = [card.name for card in CARDS.values() if card.memory > report.largest.total]
            another = f"a card as {cards[0]}" if cards else "fewer parameters"
            return Problem(wrong, "base", f"Take {fewer}{another}. {no_sharding}")
        for changes in self._changes(report.largest.phase):
            memory = self._with(changes, report.largest.phase)
            if memory.total <= self.limit:
                keys = " ".join(f"ppo.{key}={str(value).lower()}" for key, value in changes.items())
                first = f"{report.largest.phase} takes {_size(report.largest.total)} of {_size(self.limit)}."
                return Problem(first, remedy=f"Set {keys}: {_size(memory.total)}. {no_sharding}")
        wrong = (
            f"{report.largest.phase} takes {_size(report.largest.total)} of {_size(self.limit)}, a row at a time too."
        )
        return Problem(wrong, remedy=f"Shorten the rows, or take another card. {no_sharding}")

    def _changes(self, phase: str) -> Iterator[dict[str, Any]]:
        """What takes less memory in a phase and changes no gradient, the cheapest first."""
        args = self.args
        if name := _ROWS.get(phase):
            rows = getattr(args, name)
            while rows > 1:
                rows //= 2
                yield {name: rows}
        checkpointing = {} if args.gradient_checkpointing or phase != "update" else {"gradient_checkpointing": True}
        if checkpointing:
            yield checkpointing
        rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if phase == "update":
            while rows > 1 and rows % 2 == 0:
                rows, steps = rows // 2, steps * 2
                changed = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
                yield {**checkpointing, **changed}
        several = args.rollouts_per_update
        while phase == "rollout" and steps > 1 and steps % 2 == 0:
            steps, several = steps // 2, several * 2
            yield {"gradient_accumulation_steps": steps, "rollouts_per_update": several}

    def _with(self, changes: dict[str, Any], phase: str) -> PhaseMemory:
        """The memory of a phase with other settings."""
        if phase == "update":
            return self._of_phase(phase, self._learning(**changes))
        args = self.recipe.stage_config("ppo", **changes)
        update = CountedUpdate(self.update.counted, self.roles, args, self.lengths, on_cpu=self._on_cpu)
        costs = max(update.without_gradients(phase), key=lambda costs: costs.peak)
        return self._of_phase(phase, costs)
