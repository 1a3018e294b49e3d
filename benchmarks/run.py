"""`make bench`: contenders on the same work, one process each, in turn, several rounds.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.run cpu --model /path/to/SmolLM2-135M-Instruct

First the contenders' losses on one micro-batch are compared; if one differs, nothing is timed. Then each round runs
all contenders and the floor. The result goes to `benchmarks/results/<date>_<kind>_<dtype>.json` after every round, in
place of one of the same day, and `python -m benchmarks.table` makes the docs' table from it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import check_equal
from benchmarks.contenders import CONTENDERS
from benchmarks.errors import BenchmarkError, KilledError
from benchmarks.processes import python_of, run_module
from benchmarks.random_llama import LLAMA_8B, save_slice
from benchmarks.records import RESULTS, new_result, read_result, result_path, say, write_result
from benchmarks.summary import bars, seconds_of, summarise
from benchmarks.table import section
from benchmarks.work import Work
from toolkit.costs.devices import this_cpu
from toolkit.errors import ToolkitError
from toolkit.models import META, ModelSpec, load_model, load_tokenizer
from toolkit.models.precision import AUTO, resolved, slow_here

Step = Callable[..., dict[str, Any]]
REWARDED = tuple(name for name, contender in CONTENDERS.items() if contender.rewarded)


@dataclass(frozen=True)
class Benchmark:
    """What a kind of benchmark runs.

    Args:
        about: for whoever chooses.
        sizes: names of `SIZES`.
        contenders: names of `CONTENDERS`.
        dtype: in which its contenders run: one of `PRECISIONS`, or "auto", what this machine computes faster.
        of_a_slice: on two layers of Llama-3.1-8B's shape with random weights in place of the checkpoint's model.
        leaves_out: whether a contender that the machine's memory does not hold is left out of a size.
    """

    about: str
    sizes: tuple[str, ...] = ("base",)
    contenders: tuple[str, ...] = REWARDED
    dtype: str = AUTO
    of_a_slice: bool = False
    leaves_out: bool = False


BENCHMARKS = {
    "cpu": Benchmark("a checkpoint as it is"),
    "apart": Benchmark(
        "the same with prompts that begin with nothing in common",
        sizes=("apart",),
        contenders=tuple(name for name in REWARDED if name != "stock-views"),
    ),
    "slice": Benchmark(
        "two layers of Llama-3.1-8B's width, with a checkpoint's tokenizer",
        sizes=("few",),
        # Whole value and reward models, with the optimizer of one, take more than 24 GB there; float32 would take twice
        # the 15 of three PEFT models.
        dtype="bfloat16",
        contenders=tuple(name for name in REWARDED if name not in ("stock-full", "stock-views")),
        of_a_slice=True,
    ),
    "agilerl": Benchmark(
        "AgileRL, ours without a reward role, which it has not, and both loops with one",
        contenders=(
            *(name for name in CONTENDERS if name not in REWARDED),
            *("ours-separate", "ours-shared", "stock-full", "stock-peft"),
        ),
    ),
    "growth": Benchmark(
        "a checkpoint over longer responses and more rollouts",
        sizes=("few", "base", "many", "longer", "longest"),
        contenders=("ours-separate", "ours-shared", "stock-full"),
        leaves_out=True,
    ),
}


_SAME = ("machine", "versions", "model", "sources")  # of a result and one that it goes on with
# glibc's, by which a process keeps freed memory, as ours does by itself: in float32 stock TRL is faster so.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def step_in_process(
    step: str, *, model: str, work: Path, agilerl: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Run one step of `benchmarks.worker` in a process of its own, or of `benchmarks.agile` if it is AgileRL's, by the
    Python of an environment that has it.

    Returns:
        What it wrote; {} for "sample".

    Raises:
        BenchmarkError: it failed.
    """
    name = options.get("contender")
    module, python, who = "benchmarks.worker", None, f" of {name}" if name else ""
    variables = KEEP_FREED_MEMORY if name and CONTENDERS[name].kind in ("stock", "agilerl") else {}
    if name and CONTENDERS[name].kind == "agilerl":
        module, python = "benchmarks.agile", agilerl
        options["base"] = "nf4" if CONTENDERS[options.pop("contender")].quantised else "plain"
    given = {"model": model, "work": work, **options}
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    return run_module(module, step, *words, what=f'the step "{step}"{who}', python=python, variables=variables)


def agilerl_versions(python: Path) -> str:
    """AgileRL's version in an environment, and in brackets those of what it runs on there.

    Raises:
        BenchmarkError: the environment lacks it.
    """
    versions = run_module("benchmarks.agile", "about", what=f"AgileRL by {python}", python=python)
    beside = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "agilerl")
    return f"{versions['agilerl']} (with {beside})"


def about_model(model: str) -> dict[str, Any]:
    """What tells one checkpoint from another; not where it lies."""
    outline = load_model(ModelSpec(model), device=META)
    config = outline.config
    return {
        "architecture": (config.architectures or [config.model_type])[0],
        "parameters": sum(p.numel() for p in outline.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
    }


def about_cpu() -> dict[str, Any]:
    """What torch finds in this processor, and what a product of two matrices of 512 × 512 reaches in each precision."""
    rates = {str(dtype).removeprefix("torch."): rate / 1e9 for dtype, rate in this_cpu().peak.items()}
    return {"capability": torch.backends.cpu.get_cpu_capability(), "gigaoperations_per_second": rates}


@contextmanager
def _left_out(kind: str, title: str) -> Iterator[None]:
    """Inside a contender may be killed, if the kind leaves such out."""
    try:
        yield
    except KilledError as error:
        if not BENCHMARKS[kind].leaves_out:
            raise
        say(f"{title}: {error}")


def compare_all(step: Step, kind: str) -> dict[str, dict[str, float]]:
    """The figures of a kind's contenders on one micro-batch.

    Raises:
        BenchmarkError: they differ.
    """
    found = {}
    for name in BENCHMARKS[kind].contenders:
        with _left_out(kind, name):
            found[name] = step("compare", contender=name)
    for name, figures in found.items():
        shown = ", ".join(f"{key} {value:.4f}" for key, value in figures.items())
        say(f"compare {name}: {shown}")
    check_equal(found)
    return found


def run_round(step: Step, kind: str, names: Iterable[str], *, updates: int, title: str) -> dict[str, Any]:
    """These contenders in turn, and the floor."""
    found: dict[str, Any] = {}
    for name in names:
        started = time.perf_counter()
        with _left_out(kind, f"{title} {name}"):
            found[name] = step("time", contender=name, updates=updates)
        if name not in found:
            continue
        seconds = seconds_of(found[name])
        shown = ", ".join(f"{key} {value:.1f}" for key, value in seconds.items())
        say(
            f"{title} {name}: {shown} s an update, {found[name]['memory_gb']['resident']:.2f} GB "
            f"({time.perf_counter() - started:.0f} s in all)"
        )
    return {"contenders": found, "floor": step("floor")}


def run_size(
    step: Step, name: str, kind: str, *, updates: int, repeats: int, earlier: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """The benchmark at one size: comparison, then rounds, after those of an earlier run of the same work; gives what
    there is after each round."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        step = partial(step, work=path)
        step("sample", size=name)
        work = Work.read(path)
        about = {
            **vars(work.size),
            "prompt_tokens": [len(ids) for ids in work.prompt_ids],
            "response_tokens": work.lengths,
            "tokens": work.tokens,
        }
        comparison = compare_all(step, kind)
        rounds = list(earlier["rounds"]) if earlier and earlier["work"] == about else []
        for number in range(len(rounds) + 1, repeats + 1):
            title = f"{name}, round {number}/{repeats},"
            rounds.append(run_round(step, kind, comparison, updates=updates, title=title))
            summary = summarise(rounds, tokens=work.tokens, rollouts=work.size.rollouts)
            yield {
                "work": about,
                "comparison": comparison,
                "rounds": rounds,
                "summary": summary,
                "bars": bars(summary, kind),
            }


def precision_of(kind: str) -> str:
    """The dtype of a kind of benchmark on this machine.

    Raises:
        BenchmarkError: it is one in which this CPU is slow.
    """
    dtype = resolved(BENCHMARKS[kind].dtype)
    if slow := slow_here(dtype):
        raise BenchmarkError(f"{kind} is of {dtype} alone, and {slow} Take another machine.")
    return dtype


def run(
    model: str,
    kind: str,
    *,
    rounds: int,
    updates: int,
    save: Callable[[dict[str, Any]], object],
    others: Mapping[str, str] | None = None,
    before: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda result: None,
    step: Step = step_in_process,
) -> dict[str, Any]:
    """Run a benchmark: so many rounds of each size. Returns the result, which is also saved after each round.

    `others` are versions of what another environment holds. `before` gives what stands where a result is to be saved: a
    run that was broken off on the same day, or made fewer rounds, goes on with its next round.
    """
    dtype = precision_of(kind)
    arguments = {"updates": updates, "rounds": rounds, "dtype": dtype}
    result = new_result(f"{kind}_{dtype}", cpu=about_cpu(), model=about_model(model), arguments=arguments, sizes={})
    result["versions"] |= others or {}
    result["sizes"] = dict(_unfinished(before(result), result))
    step = partial(step, model=model, dtype=dtype)
    for name in BENCHMARKS[kind].sizes:
        earlier = result["sizes"].get(name)
        if earlier and len(earlier["rounds"]) >= rounds:
            continue
        for found in run_size(step, name, kind, updates=updates, repeats=rounds, earlier=earlier):
            result["sizes"][name] = found
            save(result)
    return result


def _unfinished(before: Mapping[str, Any] | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of an earlier run of the same that lacks rounds; none of one that has them all."""
    if before is None or any(before.get(key) != result[key] for key in _SAME):
        return {}
    if not _as_fast(before["cpu"], result["cpu"]):
        return {}
    rounds = result["arguments"]["rounds"]
    if before["arguments"] | {"rounds": rounds} != result["arguments"]:
        return {}
    of_each = [len(found["rounds"]) for found in before["sizes"].values()]
    whole = len(of_each) == len(BENCHMARKS[result["kind"].split("_")[0]].sizes) and min(of_each) >= rounds
    return {} if whole else before["sizes"]


def _as_fast(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two CPUs, as `about_cpu` has them, may be one: those of one name can differ twofold in one precision."""
    rates, others = one["gigaoperations_per_second"], other["gigaoperations_per_second"]
    near = all(rates[dtype] < 1.5 * others[dtype] and others[dtype] < 1.5 * rates[dtype] for dtype in rates)
    return one["capability"] == other["capability"] and near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = "; ".join(f"{kind}: {benchmark.about}" for kind, benchmark in BENCHMARKS.items())
    parser.add_argument("kind", choices=BENCHMARKS, help=kinds)
    parser.add_argument("--model", required=True, help="folder of a chat checkpoint, such as SmolLM2-135M-Instruct")
    parser.add_argument("--agilerl", help="an environment that has AgileRL, by its folder or its Python: of that kind")
    parser.add_argument("--rounds", type=int, default=5, help="of all contenders at each size")
    parser.add_argument("--updates", type=int, default=1, help="measured updates of a contender in a round")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    benchmark = BENCHMARKS[args.kind]
    if (args.kind == "agilerl") != (args.agilerl is not None):
        parser.error("the kind agilerl, and no other, needs an environment that has it: --agilerl /path/to/environment")
    model = Path(args.model).expanduser().resolve()  # steps run in the repository's folder
    with tempfile.TemporaryDirectory() as folder:
        try:
            agilerl = python_of(args.agilerl) if args.agilerl else None
            precision_of(args.kind)  # before a slice is written
            if benchmark.of_a_slice:
                save_slice(Path(folder), load_tokenizer(str(model)), LLAMA_8B)
                model = Path(folder)
            result = run(
                str(model),
                args.kind,
                rounds=args.rounds,
                updates=args.updates,
                save=lambda found: write_result(found, args.output),
                others={"agilerl": agilerl_versions(agilerl)} if agilerl else None,
                before=lambda found: read_result(found, args.output),
                step=partial(step_in_process, agilerl=agilerl),
            )
        except ToolkitError as error:
            say(f"{type(error).__name__}: {error}")
            return 1
    print(section(args.kind, result))
    say(f"result: {result_path(result, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
