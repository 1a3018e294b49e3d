"""What a recipe costs on a card or a CPU: memory by stage and phase, and time, before a weight is loaded.

report = plan(recipes.load("llama3_8b_lora_fast"), "4090")
print(report)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import psutil
import torch

from toolkit.costs import (
    CARDS,
    GRAPH_KERNEL,
    SUPERVISED,
    Costs,
    Counted,
    CountedUpdate,
    Device,
    Lengths,
    Phase,
    counted_step,
    here,
    named,
    optimizer_bytes,
    pack,
    take_shape,
    weight_bytes_of,
)
from toolkit.errors import ConfigError, Problem, RecipeError, within
from toolkit.models import (
    META,
    Precision,
    SharedBase,
    about_other_bits,
    all_positions_of,
    load_model,
    on_another_machine,
    own_quantization,
)
from toolkit.runs.build import stage_dataset
from toolkit.runs.check_data import longest_row
from toolkit.runs.plan_report import ROOM, PhaseMemory, PhaseTime, PlanReport, seconds_of, size_of
from toolkit.spec.plan import by_trl
from toolkit.spec.recipe import Recipe
from toolkit.spec.sources import OwnBase, Site
from toolkit.trainers.ppo_config import WITHOUT_COPY
from toolkit.trainers.self_checks import check_can_merge

# Settings that say how many rows a phase without gradients has at a time.
_AT_ONCE = "local_rollout_forward_batch_size"
_ROWS = {"score": _AT_ONCE, "read": _AT_ONCE, "evaluation": "per_device_eval_batch_size"}


def plan(recipe: Recipe, gpu: str | None = None, *, notes: bool = True) -> PlanReport:
    """Plan the ppo stage of a recipe, and the sft and reward stages that train a role of the base.

    Args:
        recipe: whose data is read only where it sets no lengths.
        gpu: a card by its name, or a size of memory; None for the card, or CPU, of this machine.
        notes: whether to find out, too, what checkpointing changes and what would fit.

    Raises:
        RecipeError: there is no ppo stage, or it is TRL's own loop.
        ToolkitError: the card is not known, a CPU is to have graphs, or base, adapters or data cannot be read.
    """
    if "ppo" not in recipe.plan.stages:
        raise RecipeError('the recipe has no section "ppo", and an update of that is what is planned.')
    if by_trl(recipe.values):
        raise RecipeError("trl is TRL's own loop, which is not planned.", field="ppo.loop", remedy="Take toolkit.")
    card = here() if gpu is None else named(gpu)
    with nullcontext() if gpu is None else on_another_machine(_precision_of(card)):
        return _Planner(recipe, card).report(notes=notes)


def _precision_of(card: Device | int) -> Precision:
    """What `auto` comes to on a card that was named."""
    half = "bfloat16" if isinstance(card, int) or torch.bfloat16 in card.peak else "float16"
    return Precision(half, "that is what the GPU computes fast")


def _without_numbers(recipe: Recipe, stage: str) -> SharedBase:
    """The base with the roles of a stage, as it would be loaded, without numbers."""
    tokenizer = recipe.tokenizer if recipe.base.model is None else None
    with within("base"):
        base = load_model(recipe.base.model_spec(), tokenizer=tokenizer, device=META).requires_grad_(False)
    roles, sources = SharedBase(base), recipe.plan.stages[stage].roles
    own_base = any(isinstance(source, OwnBase) for source in sources)
    nothing_yet = Site(recipe.tokenizer if own_base else None, lambda stage: None)
    with torch.device("meta"):
        for source in sources:
            source = source.as_of(nothing_yet)
            with within(source.key):
                source.place(roles, nothing_yet)
    take_shape(roles)
    return roles


def _weights(roles: SharedBase, args: Any) -> dict[str, int]:
    """Bytes of the base, the adapters and heads of all roles, and the optimizer of those that are trained."""
    adapters = sum({id(p): p.nbytes for role in roles.roles for p in roles.parameters_of(role)}.values())
    state = round(optimizer_bytes(args) * sum(p.numel() for p in roles.trained_parameters))
    return {"base": weight_bytes_of(roles) - adapters, "adapters": adapters, "optimizer": state}


class _Planner:
    def __init__(self, recipe: Recipe, card: Device | int):
        self.recipe = recipe
        self.device = card if isinstance(card, Device) else None
        self.limit = card.memory if isinstance(card, Device) else card
        self.context = card.context if isinstance(card, Device) else next(iter(CARDS.values())).context
        self.args = recipe.stage_config("ppo")
        self.roles = _without_numbers(recipe, "ppo")
        with within("base"):
            self.other_bits = about_other_bits(self.roles.causal_lm)
        with within("ppo"):
            check_can_merge(self.roles, self.args)
        if self._on_cpu and self.args.decoding["graphs"]:
            wrong = "graphs are of CUDA devices, and this is a plan for a CPU."
            raise ConfigError(wrong, field="ppo.generation", remedy="Name a GPU ($gpu), or take eager or merged.")
        self.lengths, self.evaluated = self._lengths("train"), self._lengths("validation", "test")
        self.counted = Counted(self.roles.config.get_text_config().vocab_size)
        self.update = self._update(self.args)
        self.static = {**_weights(self.roles, self.args), **self._beside()}

    def _lengths(self, *splits: str) -> Lengths:
        data, args = self.recipe.values["data"], self.args
        prompt = data.get("max_prompt_length") or max(
            longest_row(stage_dataset(self.recipe, "ppo", "prompts", split)) for split in splits
        )
        limits = [limit for limit in (args.max_length, self.roles.positions[0]) if limit is not None]
        if not limits:
            return Lengths(prompt, args.response_length)
        both = min(limits)
        return Lengths(min(prompt, max(1, both - 1)), min(args.response_length, max(1, both - 1)), both)

    def _update(self, args: Any) -> CountedUpdate:
        return CountedUpdate(
            self.counted, self.roles, args, self.lengths, evaluated=self.evaluated, on_cpu=self._on_cpu
        )

    @property
    def _on_cpu(self) -> bool:
        return self.device is not None and not self.device.graphs

    def _beside(self) -> dict[str, int]:
        """Bytes of the models that reward and judge load beside the base."""
        recipe = self.recipe
        models: list[Any] = []
        for section, scorer in (("scorer", recipe.scorer), ("judge", recipe.judge)):
            with within(section):
                models += [] if scorer is None else scorer.outlines()
        if (own := recipe.plan.scored_by) is not None:
            with within(own.key):
                models.append(own.classifier(Site(recipe.tokenizer, lambda stage: None), device=META))
        for model in models:
            pack(model)
        return {"reward models": sum(map(weight_bytes_of, models))} if models else {}

    def report(self, *, notes: bool) -> PlanReport:
        with within("ppo"):
            phases = self.update.phases()
        needed = self.recipe.plan.stages["ppo"].needs  # another one of the recipe is not run for PPO
        stages = {stage: self.recipe.plan.stages[stage] for stage in SUPERVISED if stage in needed}
        supervised = {stage: self._supervised(stage) for stage, planned in stages.items() if planned.roles}
        memory = (*(phase for memory, _ in supervised.values() for phase in memory), *self._memory(phases))
        times = tuple(self._times(phases, self.device)) if self.device is not None else ()
        dtype = self.recipe.precision("ppo").dtype
        name = self.device.name if self.device is not None else f"a GPU of {size_of(self.limit)}"
        about = (self.recipe.name, f"{name} in {dtype}", self.lengths, memory, self.limit, times)
        # The limits of the data stand for their rows here, whose number is known once they are read.
        updates = (
            None if self.args.max_steps <= 0 and self.args.total_episodes is None else self.args.number_of_updates(0)
        )
        report = PlanReport(*about, (), updates, tuple(stage for stage in stages if stage not in supervised))
        if not notes:
            return report
        steps = [self._step(stage, step) for stage, (_, step) in supervised.items()]
        return replace(report, notes=(*steps, *self._notes(report)))

    # ------------------------------------------------------------------ sft and reward

    def _supervised(
        self, stage: str, changes: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[tuple[PhaseMemory, ...], Phase]:
        """Memory of a step and of an evaluation, and the step."""
        args, roles = self.recipe.stage_config(stage, **changes), _without_numbers(self.recipe, stage)
        kind = self.recipe.plan.stages[stage].rows
        lengths = (self._longest(stage, args, split) for split in ("train", "validation"))
        step, evaluation = counted_step(kind, roles, args, *lengths, on_cpu=self._on_cpu)
        static = _weights(roles, args)
        return tuple(self._of_phase(phase.name, phase.costs, static) for phase in (step, evaluation)), step

    def _longest(self, stage: str, args: Any, split: str) -> int:
        """Tokens of the longest row of a stage."""
        data, kind = self.recipe.values[self.recipe.data_section(stage)], self.recipe.plan.stages[stage].rows
        keys = ("max_length",) if kind == "labelled" else ("max_prompt_length", "max_response_length")
        limits = [data.get(key) for key in keys]
        longest = sum(limits) if all(limits) else longest_row(stage_dataset(self.recipe, stage, kind, split))
        longest = max(1, longest)  # where nothing is held out
        # Limits need not come down to the positions of the base: all it has, where rollouts keep to LongRoPE's first.
        longest = min(longest, all_positions_of(self.roles.config) or longest)
        return args.max_length if getattr(args, "packing", False) else min(longest, args.max_length or longest)

    def _step(self, stage: str, step: Phase) -> Problem:
        args = self.recipe.stage_config(stage)
        rows, length = args.per_device_train_batch_size, self._longest(stage, args, "train")
        what, each = ("pair", "2 × ") if self.recipe.plan.stages[stage].rows == "pairs" else ("row", "")
        time = ""
        if self.device is not None:
            time = f"; a step takes about {seconds_of(step.times * self.device.eager(step.costs))}"
        less = " Liger's kernels take less memory than is planned." if args.use_liger_kernel else ""
        return Problem(f"{stage} has {rows} {what}{'s' * (rows > 1)} of {each}{length} tokens at a time{time}.{less}")

    # ------------------------------------------------------------------ memory

    def _memory(self, phases: Sequence[Phase]) -> Iterator[PhaseMemory]:
        of: dict[str, Costs] = {}
        for phase in phases:
            # The optimizer's step has less than the update before it.
            if phase.name in ("graphs", "merged", "optimizer"):
                continue
            name = "rollout" if phase.name in ("prefill", "decode") else phase.name
            if name not in of or phase.costs.peak > of[name].peak:
                of[name] = phase.costs
        for name, costs in of.items():
            yield self._of_phase(name, costs, self.static)

    def _of_phase(self, name: str, costs: Costs, static: Mapping[str, int]) -> PhaseMemory:
        parts = {kind: size for kind, size in costs.of_peak.items() if size}
        return PhaseMemory(name, {**static, **parts, **({"context": self.context} if self.context else {})})

    # ------------------------------------------------------------------ time

    def _times(self, phases: Sequence[Phase], device: Device) -> Iterator[PhaseTime]:
        of: dict[str, float] = {}
        for phase in phases:
            of[phase.name] = of.get(phase.name, 0.0) + phase.seconds(device)
        others = {"graphs": of.pop("graphs", None), "merged": of.pop("merged", None)}
        del of["evaluation"]
        for name, seconds in of.items():
            yield PhaseTime(name, seconds, **(others if name == "decode" else {}))

    # ------------------------------------------------------------------ what to change, and what is assumed

    def _notes(self, report: PlanReport) -> Iterator[Problem]:
        args = self.args
        if self._can_checkpoint:
            other = self._with({"gradient_checkpointing": not args.gradient_checkpointing}, "update")
            said = "without" if args.gradient_checkpointing else "with"
            yield Problem(f"the update {said} gradient checkpointing: {size_of(other.total)}.")
        if report.verdict != "fits":
            yield self._way_out(report)
        if self.other_bits:
            yield Problem(self.other_bits, "base.model")
        yield Problem(self._assumed(self.device) if self.device else "time: not planned, for want of the GPU's limits.")
        busy, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
        if self._on_cpu and busy > 0.75 * cores:
            wrong = (
                f"this machine is busy (load {busy:.1f} on {cores} cores): the rates measured now vary, and can be a"
            )
            yield Problem(f"{wrong} tenth of the true ones; a run beside other work can be as slow.")
        if self._on_cpu:
            yield Problem(
                "Python and its libraries (0.4 GB), and what the C library keeps of freed memory, are not counted: a "
                "run of SmolLM2 held 1.8 times what is planned (docs/plan.md). Each of several processes takes as much."
            )
        else:
            unseen = "the allocator's unused blocks and what other programs hold"
            yield Problem(f"{unseen} are not counted: leave a tenth of a GPU free.")

    @property
    def _can_checkpoint(self) -> bool:
        own = self.roles.value_model
        models = [self.roles.causal_lm, *([] if own is None else [own.classifier])]
        return all(model.supports_gradient_checkpointing for model in models)

    def _assumed(self, device: Device) -> str:
        rates = ", ".join(
            f"{str(dtype).removeprefix('torch.')} {peak / 1e12:.3g}" for dtype, peak in device.peak.items()
        )
        matmuls, bandwidth = device.reached
        thin = f"; {device.products / 1e9:.3g} in matmuls of few rows" if device.products else ""
        graphs = (
            f" With CUDA graphs {GRAPH_KERNEL * 1e6:.3g} µs replace the Python time, except in drawing each token. "
            "Merged means 16-bit weights with the adapter in them (ppo.generation)."
            if device.graphs
            else " Measured, phases took 0.8 to 1.1 times what was planned, and beside other work up to 1.9 times "
            "(docs/plan.md)."
        )
        return (
            f"time: for each operator the longer of compute ({rates} TFLOP/s, of which {matmuls:.0%} are reached) and "
            f"memory traffic ({device.bandwidth / 1e9:.3g} GB/s, {bandwidth:.0%}{thin}). Python takes "
            f"{device.operator * 1e6:.3g} µs for each, {'at the same time' if device.graphs else 'in addition'}. "
            "All responses have full length. Not counted: evaluations of held-out prompts, and scoring by anything but "
            f"the reward role.{graphs}"
        )

    def _way_out(self, report: PlanReport) -> Problem:
        """What would fit, and which key to change first."""
        no_sharding = "One base over several GPUs (FSDP) is not supported."
        largest = report.largest
        needed = sum(largest.parts.get(kind, 0) for kind in (*self.static, "context"))
        if needed > (ROOM if report.fits else 1.0) * self.limit:
            bits = self.recipe.quantization() or own_quantization(self.roles.causal_lm.config)
            fewer = "" if bits else "base.quantization in 4 bits, a smaller base, or "
            wrong = f"weights and optimizer alone take {size_of(needed)} of {size_of(self.limit)}."
            cards = [card.name for card in CARDS.values() if ROOM * card.memory > largest.total]
            another = f"a GPU as {cards[0]}" if cards else "fewer parameters"
            return Problem(wrong, "base", f"Take {fewer}{another}. {no_sharding}")
        takes = f"{largest.phase} takes {size_of(largest.total)} of {size_of(self.limit)}"
        barely, total = "", largest.total
        for changes in self._changes(largest.phase):
            total = self._with(changes, largest.phase).total
            keys = " ".join(f"{_stage_of(largest.phase)}.{key}={str(value).lower()}" for key, value in changes.items())
            if total <= ROOM * self.limit:
                return Problem(f"{takes}.", remedy=f"Set {keys}: {size_of(total)}. {no_sharding}")
            if total <= self.limit < largest.total and not barely:
                barely = f"Set {keys}: {size_of(total)}, which barely fits. {no_sharding}"
        if barely:
            return Problem(f"{takes}.", remedy=barely)
        shorter = f"Shorten the rows, or take another GPU. {no_sharding}"
        return Problem(f"{takes}, and a row at a time {size_of(total)}.", remedy=shorter)

    def _changes(self, phase: str) -> Iterator[dict[str, Any]]:
        """What takes less memory in a phase and changes no gradient, the cheapest first."""
        args = self.recipe.stage_config(_stage_of(phase))
        merged = phase == "rollout" and args.decoding["merged"]
        apart = [{"generation": WITHOUT_COPY[args.generation]}] if merged else []
        yield from apart
        if name := _ROWS.get(phase.split()[-1]):
            rows = getattr(args, name)
            while rows > 1:
                rows //= 2
                yield {name: rows}
        learns = phase == "update" or phase in SUPERVISED
        more = learns and self._can_checkpoint and not args.gradient_checkpointing
        checkpointing = {"gradient_checkpointing": True} if more else {}
        if checkpointing:
            yield checkpointing
        rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if learns:
            for parts in _divisors(rows):
                changed = {"per_device_train_batch_size": rows // parts, "gradient_accumulation_steps": steps * parts}
                yield {**checkpointing, **changed}
        for also in [{}, *apart] if phase == "rollout" else ():
            for parts in _divisors(rows * steps):
                of_steps = math.gcd(steps, parts)
                changed = {**also, "gradient_accumulation_steps": steps // of_steps}
                if of_steps < parts:
                    changed["per_device_train_batch_size"] = rows // (parts // of_steps)
                yield {**changed, "rollouts_per_update": args.rollouts_per_update * parts}

    def _with(self, changes: dict[str, Any], phase: str) -> PhaseMemory:
        if (stage := _stage_of(phase)) in SUPERVISED:
            return next(memory for memory in self._supervised(stage, changes)[0] if memory.phase == phase)
        (memory,) = self._memory(self._update(self.recipe.stage_config("ppo", **changes)).phases(phase))
        return memory


def _divisors(number: int) -> list[int]:
    """Beyond 1, the smallest first."""
    return [part for part in range(2, number + 1) if number % part == 0]


def _stage_of(phase: str) -> str:
    stage = phase.split()[0]  # of "sft evaluation", too
    return stage if stage in SUPERVISED else "ppo"
