"""One step of the benchmark in a process of its own: its peak memory is that of nothing else.

    python -m benchmarks.worker sample  --model FOLDER --work FILE --size base     the prompts and responses
    python -m benchmarks.worker compare --model FOLDER --work FILE --contender N   its losses on one micro-batch
    python -m benchmarks.worker time    --model FOLDER --work FILE --contender N   its seconds and its memory
    python -m benchmarks.worker floor   --model FOLDER --work FILE                 what the matmuls alone take

`run` starts these; each writes its answer as JSON to `--output`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor
from benchmarks.contenders import CONTENDERS, LEARNING_RATE, RANK, Job
from benchmarks.loops import PhaseClock, gradient_norms, run
from benchmarks.work import PROMPTS, SIZES, Size, Work, padding_tokenizer, sample_work
from toolkit.models import META, ModelSpec, load_base, load_model
from toolkit.reports import peak_memory_gb

WARM_UP = 1  # updates


def sample(model: str, size: Size) -> Work:
    """The prompts of the benchmark with sampled responses, by the checkpoint as it is in bfloat16."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return sample_work(load_base(model), padding_tokenizer(model), size, prompts=lines)


def _job(model: str, work: Work, folder: str, updates: int, learning_rate: float = LEARNING_RATE) -> Job:
    return Job(model, work, padding_tokenizer(model), Path(folder), updates, learning_rate)


def compare(model: str, work: Work, name: str) -> dict[str, float]:
    """Score, KL, entropy, losses and gradient norms of a contender on the first micro-batch of a work."""
    contender, work = CONTENDERS[name], work.one_micro_batch()
    with tempfile.TemporaryDirectory() as folder:
        built = contender.build(_job(model, work, folder, updates=1, learning_rate=0.0))
        with gradient_norms(built) as norms:
            found = run(contender.kind, built, work, PhaseClock(), 1)
    return {**found, **norms}


def measure(model: str, work: Work, name: str, *, updates: int) -> dict[str, Any]:
    """Seconds by phase of each measured update, after a warm-up, and the peak memory of this process."""
    contender, clock, total = CONTENDERS[name], PhaseClock(), WARM_UP + updates
    with tempfile.TemporaryDirectory() as folder:
        built = contender.build(_job(model, work, folder, updates=total))
        run(contender.kind, built, work, clock, total)
    return {"updates": clock.updates[WARM_UP:], "memory_gb": peak_memory_gb()}


def measure_floor(model: str, work: Work) -> dict[str, Any]:
    """Operations and seconds of the matmuls, for a separate and for a shared value role."""
    layers, head = floor.linear_layers(load_model(ModelSpec(model), device=META))
    found = {value: floor.matmuls(work, layers, head, value=value, rank=RANK) for value in ("separate", "shared")}
    return floor.measure(found, dtype=torch.bfloat16, device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("sample", "compare", "time", "floor"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.step == "sample":
        sample(args.model, SIZES[args.size]).write(args.work)
        return
    work = Work.read(args.work)
    if args.step == "compare":
        found: dict[str, Any] = compare(args.model, work, args.contender)
    elif args.step == "time":
        found = measure(args.model, work, args.contender, updates=args.updates)
    else:
        found = measure_floor(args.model, work)
    args.output.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
