"""One update of PPO by several processes, measured on this machine's cores.

    python -m benchmarks.scaling

A small random Llama with 1 and 2 processes of one thread each, on the same prompts and given responses.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from benchmarks import gpu
from benchmarks.clock import WARM_UP, PhaseClock
from benchmarks.contenders import add_roles
from benchmarks.loops import run_ours
from benchmarks.random_llama import TINY, random_llama
from benchmarks.work import PHASES, Size, uneven_lengths
from toolkit import processes
from toolkit.models import SharedBase
from toolkit.runs.process import run_in_processes

SMALL = {**TINY, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
ON_A_CPU = Size(rollouts=16, response_length=64, micro_batch=4)


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Bytes of what this process gives to the others: of tensors that are summed, and of objects."""
    sent = {"summed": 0, "objects": 0}
    summed, gathered = dist.all_reduce, dist.all_gather_object

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sent["summed"] += tensor.nbytes
        return summed(tensor, *arguments, **named)

    def all_gather(values: list[Any], value: Any, *arguments: Any, **named: Any) -> Any:
        sent["objects"] += len(json.dumps(value, default=str))
        return gathered(values, value, *arguments, **named)

    with mock.patch.object(dist, "all_reduce", all_reduce), mock.patch.object(dist, "all_gather_object", all_gather):
        yield sent


def measure(updates: int) -> dict[str, Any]:
    """Of one of several processes: median seconds of each phase, and bytes of an update."""
    torch.set_num_threads(1)
    given = gpu.Settings(SMALL, ON_A_CPU, prompt_length=64, updates=updates, device=torch.device("cpu"))
    work = gpu.random_work(given.llama, given.size, given.prompt_length)
    work = replace(work, lengths=uneven_lengths(work.size.rollouts, work.size.response_length))
    roles = add_roles(SharedBase(random_llama(given.llama, given.device)), "separate")
    clock = PhaseClock()
    with tempfile.TemporaryDirectory() as folder, counted_bytes() as sent:
        built = gpu.build(given, roles, work, Path(folder), value="separate")
        run_ours(built, work, clock, WARM_UP)
        sent.update(summed=0, objects=0)
        run_ours(built, work, clock, updates)
    measured = clock.updates[WARM_UP:]
    return {
        "seconds": {phase: statistics.median(update[phase] for update in measured) for phase in PHASES},
        "bytes": {kind: number // updates for kind, number in sent.items()},
    }


def measured(number: int, updates: int) -> dict[str, Any]:
    """What `measure` found in the main one of so many processes of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        worker = [sys.executable, "-m", "benchmarks.scaling", "--updates", str(updates), "--worker", str(output)]
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        with mock.patch.dict(os.environ, alone):
            if run_in_processes(worker, number):
                raise SystemExit(f"{number} processes failed; their message is above.")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3, help="measured updates")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers that are measured")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        processes.join()
        found = measure(args.updates)
        if processes.is_main():
            args.worker.write_text(json.dumps(found), encoding="utf-8")
        return 0
    print(f"seconds and kilobytes of an update ({asdict(ON_A_CPU)})")
    for number in args.processes:
        found = measured(number, args.updates)
        sent = {f"kB {kind}": size / 1e3 for kind, size in found["bytes"].items()}
        row = {**found["seconds"], "all": sum(found["seconds"].values()), **sent}
        print(f"{number} processes: {', '.join(f'{name} {value:.2f}' for name, value in row.items())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
