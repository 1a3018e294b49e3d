"""One step of the benchmark in a process of its own: its peak memory is that of nothing else.

    python -m benchmarks.worker sample  --model FOLDER --work FILE --size base     the prompts and responses
    python -m benchmarks.worker compare --model FOLDER --work FILE --contender N   its losses on one micro-batch
    python -m benchmarks.worker time    --model FOLDER --work FILE --contender N   its seconds and its memory
    python -m benchmarks.worker floor   --model FOLDER --work FILE                 what the matmuls alone take
    python -m benchmarks.worker rollout --model FOLDER --work FILE --contender N   our loop over new tokens, and others

`run` starts these but the last; each writes its answer as JSON to `--output`, or prints it.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import floor
from benchmarks.clock import WARM_UP, PhaseClock, gradient_norms
from benchmarks.contenders import CONTENDERS
from benchmarks.loops import run
from benchmarks.start import PRECISIONS, RANK, Job
from benchmarks.work import PROMPTS, SIZES, Size, Work, given_responses, padding_tokenizer, sample_work
from toolkit.models import META, ModelSpec, copies, fast_precision, frozen_lm, load_base, load_model
from toolkit.reports import peak_memory_gb


def sample(model: str, size: Size) -> Work:
    """The prompts of the benchmark with sampled responses, by the checkpoint as it is."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return sample_work(load_base(model), padding_tokenizer(model), size, prompts=lines)


def contender_job(model: str, work: Work, folder: str, **settings: Any) -> Job:
    return Job(model, work, padding_tokenizer(model), Path(folder), **settings)


def compare(model: str, work: Work, name: str, *, dtype: str) -> dict[str, float]:
    """Score, KL, entropy, losses and gradient norms of a contender on the first micro-batch of a work."""
    contender, work = CONTENDERS[name], work.one_micro_batch()
    with tempfile.TemporaryDirectory() as folder:
        built = contender.build(contender_job(model, work, folder, updates=1, dtype=dtype, learning_rate=0.0))
        with gradient_norms(built) as norms:
            found = run(contender.kind, built, work, PhaseClock(), 1)
    return {**found, **norms}


def measure(model: str, work: Work, name: str, *, dtype: str, updates: int) -> dict[str, Any]:
    """Seconds by phase of each measured update, after a warm-up, and the peak memory of this process."""
    contender, clock, total = CONTENDERS[name], PhaseClock(), WARM_UP + updates
    with tempfile.TemporaryDirectory() as folder:
        built = contender.build(contender_job(model, work, folder, updates=total, dtype=dtype))
        run(contender.kind, built, work, clock, total)
    return {"updates": clock.updates[WARM_UP:], "memory_gb": peak_memory_gb()}


def _loop_of_transformers(
    model: Any, ids: Tensor, *, rows_leave: bool, packs_prompts: bool, graphs: Any, **inputs: Any
) -> Tensor:
    tokens: Tensor = model._sample(ids, **inputs)
    return tokens


def measure_rollout(model: str, work: Work, name: str, *, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor, which others on a machine change less than those of the clock, in the rollouts of one
    of ours: as they are, without something, and by transformers' own loop. All in turn in every round."""
    replaced = mock.patch.object
    with tempfile.TemporaryDirectory() as folder:
        built = CONTENDERS[name].build(contender_job(model, work, folder, updates=1, dtype=dtype))
        as_they_are, rows_stay, apart = (
            replaced(copies, "lays_out", lambda dtype: False),
            replaced(built.trainer.roles, "_rows_leave", False),
            replaced(copies, "_SHARE", 0),
        )
        ways: dict[str, list[Any]] = {
            "ours": [],
            "rows that have ended stay": [rows_stay],
            "weights are not laid out": [as_they_are],
            "each layer is multiplied with by itself": [replaced(copies, "_joinable", lambda layers: False)],
            "the adapter is not merged": [apart],
            "the adapter is merged in 16 bits, too": [replaced(built.trainer.args, "generation", "merged")],
            "none of these": [as_they_are, rows_stay, apart],
            "transformers' loop": [as_they_are, apart, replaced(frozen_lm, "decode", _loop_of_transformers)],
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        batch = built.trainer.data_collator([{"input_ids": ids} for ids in work.prompt_ids])
        for _ in range(WARM_UP + rounds):
            for way, patches in ways.items():
                with ExitStack() as held, given_responses(built.generator, work):
                    for patch in patches:
                        held.enter_context(patch)
                    began = time.process_time()
                    responses = built.trainer.generate(batch)
                    seconds[way].append(time.process_time() - began)
                work.check(responses.response_ids)
    return {way: of_way[WARM_UP:] for way, of_way in seconds.items()}


def measure_floor(model: str, work: Work, *, dtype: str) -> dict[str, Any]:
    """Operations and seconds of the matmuls, for a separate and for a shared value role."""
    layers, head = floor.linear_layers(load_model(ModelSpec(model), device=META))
    found = {value: floor.matmuls(work, layers, head, value=value, rank=RANK) for value in ("separate", "shared")}
    return floor.measure(found, dtype=getattr(torch, dtype), device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("sample", "compare", "time", "floor", "rollout"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--dtype", choices=PRECISIONS, default=fast_precision().dtype)
    parser.add_argument("--updates", type=int, default=1, help="measured ones, or rollouts")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.step == "sample":
        sample(args.model, SIZES[args.size]).write(args.work)
        return
    work = Work.read(args.work)
    if args.step == "compare":
        found: dict[str, Any] = compare(args.model, work, args.contender, dtype=args.dtype)
    elif args.step == "time":
        found = measure(args.model, work, args.contender, dtype=args.dtype, updates=args.updates)
    elif args.step == "rollout":
        found = measure_rollout(args.model, work, args.contender, dtype=args.dtype, rounds=args.updates)
        theirs = found["transformers' loop"]
        for way, seconds in found.items():
            ratios = sorted(b / a for a, b in zip(seconds, theirs, strict=True))
            median, least, most = statistics.median(ratios), ratios[0], ratios[-1]
            print(f"{way:39} {statistics.median(seconds):7.2f} s  {median:.2f} ({least:.2f}–{most:.2f}) times as fast")
    else:
        found = measure_floor(args.model, work, dtype=args.dtype)
    if args.output:
        args.output.write_text(json.dumps(found) + "\n", encoding="utf-8")
    elif args.step != "rollout":  # which has printed its table
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
