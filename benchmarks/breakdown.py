"""Where an update goes: seconds of each kind of operator in each phase, by torch's profiler.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.breakdown /path/to/SmolLM2-135M-Instruct

Of the work of `make bench`, each contender after a warm-up: an update as it is, and one under the profiler. What no
operator accounts for is Python, and what the profiler itself takes. Writes `benchmarks/results/DATE_breakdown.json` and
the table in `docs/benchmarks.md`.
"""

import tempfile
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from torch.profiler import ProfilerActivity, profile

from benchmarks.clock import WARM_UP, PhaseClock
from benchmarks.contenders import CONTENDERS
from benchmarks.loops import run
from benchmarks.records import DOCS, RESULTS, fill_file, markdown, new_result, say, where, write_result
from benchmarks.run import about_cpu
from benchmarks.table import cpu_in_words
from benchmarks.work import PHASES, SIZES, Work
from benchmarks.worker import contender_job, sample
from toolkit.models import fast_precision

# A kind by what the name of an operator has, or of one that called it: the first of these that fits.
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "_Causal", "fmha"),
    "unpacking 4-bit weights": ("dequantize_4bit",),
    "matmuls": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "linear"),
}
OTHER, PYTHON = "other operators", "Python"


def kind_of(names: Iterable[str]) -> str:
    """The kind of an operator, by its own name and those of the operators that called it."""
    known = list(names)
    fits = (kind for kind, parts in KINDS.items() if any(part in name for name in known for part in parts))
    return next(fits, OTHER)


def _kinds(profiled: profile) -> dict[str, float]:
    """Seconds by kind of operator."""
    seconds = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in profiled.events() or ():
        names, caller = [event.name], event.cpu_parent
        while caller is not None:
            names.append(caller.name)
            caller = caller.cpu_parent
        seconds[kind_of(names)] += event.self_cpu_time_total / 1e6
    return seconds


def break_down(model: str, work: Work, name: str, dtype: str) -> dict[str, Any]:
    """A contender's seconds by phase of an update as it is, and by phase and kind of one under the profiler."""
    by_kind: dict[str, dict[str, float]] = {}
    profiled: list[profile] = []
    phases_left = (WARM_UP + 1) * len(PHASES)  # until the profiler is there

    def at_phase_end(phase: str) -> None:
        nonlocal phases_left
        phases_left -= 1
        if profiled:
            profiled[0].stop()
            by_kind[phase] = _kinds(profiled.pop())
        if phases_left <= 0 and len(by_kind) < len(PHASES):
            profiled.append(profile(activities=[ProfilerActivity.CPU]))
            profiled[0].start()

    clock = PhaseClock(at_phase_end)
    with tempfile.TemporaryDirectory() as folder:
        built = CONTENDERS[name].build(contender_job(model, work, folder, updates=WARM_UP + 2, dtype=dtype))
        run(CONTENDERS[name].kind, built, work, clock, WARM_UP + 2)
    plain, under_it = clock.updates[WARM_UP:]
    for phase, seconds in by_kind.items():
        seconds[PYTHON] = under_it[phase] - sum(seconds.values())
    return {"seconds": plain, "profiled": under_it, "by_kind": by_kind}


def table(result: Mapping[str, Any]) -> str:
    """What the page has of a result."""
    kinds = ("matmuls", "attention", "unpacking 4-bit weights", OTHER, PYTHON)
    rows = [
        [f"{CONTENDERS[name].label(result['dtype'])}: {phase}"]
        + [f"{found['seconds'][phase]:.2f}", f"{found['profiled'][phase]:.2f}"]
        + [f"{found['by_kind'][phase][kind]:.2f}" for kind in kinds]
        for name, found in result["contenders"].items()
        for phase in PHASES
    ]
    about = f"{where(result)} {cpu_in_words(result['cpu'])}"
    return f"{markdown(['s', 'as it is', 'profiled', *kinds], rows)}\n\n{about}"


def main(
    model: Annotated[str, typer.Argument(help="folder of the checkpoint")],
    contender: Annotated[list[str], typer.Option(help="of `benchmarks.contenders`")] = [  # noqa: B006
        "ours-separate-nf4",
        "ours-shared-nf4",
    ],
) -> None:
    """Measure, write the result and fill the page."""
    dtype = fast_precision().dtype
    work = sample(model, SIZES["base"])
    found = {}
    for name in contender:
        found[name] = break_down(model, work, name, dtype)
        say(f"{name}: {found[name]}")
    result = new_result("breakdown", dtype=dtype, contenders=found, cpu=about_cpu())
    write_result(result, RESULTS)
    fill_file(DOCS / "benchmarks.md", "breakdown: made by benchmarks.breakdown", "end of breakdown", table(result))


if __name__ == "__main__":
    typer.run(main)
