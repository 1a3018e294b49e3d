"""One update of PPO by several processes: measured on this machine's cores, and what a model of its cost says of cards.

    python -m benchmarks.scaling

The measured part runs a small random Llama with 1 and 2 processes of one thread each, on the same prompts and given
responses. The model counts operations, bytes and the longest response; its rates are arguments, and their defaults
assumptions.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist
from transformers import LlamaConfig

from benchmarks import floor, gpu
from benchmarks.contenders import RANK, add_roles
from benchmarks.loops import PhaseClock, run_ours
from benchmarks.random_llama import LLAMA_8B, TINY, outline, random_llama
from benchmarks.work import PHASES, Size, Work, uneven_lengths
from toolkit import processes
from toolkit.models import SharedBase
from toolkit.runs.process import run_in_processes

SMALL = {**TINY, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
ON_A_CPU = Size(rollouts=16, response_length=64, micro_batch=4)


# ---------------------------------------------------------------------- measured


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
    work = uneven(gpu.random_work(given.llama, given.size, given.prompt_length))
    roles = add_roles(SharedBase(random_llama(given.llama, given.device)), "separate")
    clock = PhaseClock()
    with tempfile.TemporaryDirectory() as folder, counted_bytes() as sent:
        built = gpu.build(given, roles, work, Path(folder), value="separate", checkpointing=False)
        run_ours(built, work, clock, gpu.WARM_UP)
        sent.update(summed=0, objects=0)
        run_ours(built, work, clock, updates)
    measured = clock.updates[gpu.WARM_UP :]
    return {
        "seconds": {phase: statistics.median(update[phase] for update in measured) for phase in PHASES},
        "bytes": {kind: number // updates for kind, number in sent.items()},
    }


def uneven(work: Work) -> Work:
    """The same prompts with responses of uneven length."""
    return replace(work, lengths=uneven_lengths(work.size.rollouts, work.size.response_length))


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


# ---------------------------------------------------------------------- on paper


@dataclass(frozen=True)
class Card:
    """Rates that are reached, not those of a data sheet.

    Args:
        operations: a second, in the matmuls of a forward or backward pass.
        bandwidth: bytes of its memory a second.
    """

    operations: float
    bandwidth: float


@dataclass(frozen=True)
class Net:
    """What joins the processes: bytes a second and direction between two of them, and the seconds of one message."""

    name: str
    bandwidth: float
    latency: float = 50e-6


PCIE = Net("PCIe 4 x16", 20e9)
TEN, HUNDRED = Net("10 GbE", 1.1e9, 200e-6), Net("100 GbE", 11e9, 100e-6)
CLUSTERS = ((1, PCIE), (4, PCIE), (8, PCIE), (16, TEN), (16, HUNDRED))


@dataclass(frozen=True)
class Update:
    """One update of the recipe llama3_8b_lora_fast, with random prompts of one length.

    Args:
        work: prompts, and the lengths of the responses.
        mini_batches: optimizer steps of a pass.
        value: "shared" or "separate".
        checkpointing: whether forward passes are computed again for the backward pass.
    """

    work: Work
    mini_batches: int
    value: str
    checkpointing: bool

    @property
    def trained(self) -> int:
        """Parameters whose gradients are summed."""
        layers, _ = floor.linear_layers(outline(LlamaConfig(**LLAMA_8B)))
        return (1 if self.value == "shared" else 2) * RANK * sum(i + o for i, o in layers)

    @property
    def steps(self) -> int:
        return self.mini_batches * self.work.size.epochs


def fast_recipe(rollouts: int = 32) -> Update:
    size = Size(rollouts=rollouts, response_length=128, micro_batch=4, epochs=2)
    work = uneven(gpu.random_work(LLAMA_8B, size, prompt_length=128))
    return Update(work, mini_batches=4, value="shared", checkpointing=True)


def predicted(update: Update, number: int, card: Card, net: Net) -> dict[str, float]:
    """Seconds of the phases of an update by so many processes.

    A new token costs a pass over all weights, whatever the rows: bitsandbytes unpacks 4-bit weights to 16 bits for a
    product of more than one row, so that they are read once, written once and read again. The phases of reading and
    training are limited by operations, and divided by tokens. A ring sums gradients by sending each byte twice, but for
    one part of the number of processes.
    """
    shapes, head = floor.linear_layers(outline(LlamaConfig(**LLAMA_8B)))
    weights, in_head = sum(i * o for i, o in shapes), head[0] * head[1]
    work = update.work
    rows = math.ceil(work.size.rollouts / number)
    unpacked = weights * (0.53 if rows == 1 else 0.53 + 2 + 2) + 2 * in_head
    decoding = max(work.lengths) * max(unpacked / card.bandwidth, 2 * rows * (weights + in_head) / card.operations)
    operations = dict.fromkeys(PHASES, 0.0)
    for product in floor.matmuls(work, shapes, head, value=update.value, rank=RANK):
        again = 2 if update.checkpointing and product.phase == "update" and product.name == "forward" else 1
        if product.name not in ("new tokens",) and (product.phase, product.name) != ("rollout", "lm_head"):
            operations[product.phase] += again * product.operations
    seconds = {phase: value / card.operations * _largest_share(work, number) for phase, value in operations.items()}
    seconds["rollout"] += decoding
    sent = 4 * update.trained * 2 * (number - 1) / number
    seconds["sum"] = update.steps * (sent / net.bandwidth + 2 * (number - 1) * net.latency) if number > 1 else 0.0
    return seconds


def _largest_share(work: Work, number: int) -> float:
    """Of all tokens, those of the process that has most."""
    tokens = [len(ids) + length for ids, length in zip(work.prompt_ids, work.lengths, strict=True)]
    with mock.patch.object(processes, "count", lambda: number):
        shares = []
        for rank in range(number):
            with mock.patch.object(processes, "rank", lambda rank=rank: rank):
                shares.append(sum(tokens[i] for i in processes.own(tokens)))
    return max(shares) / sum(tokens)


def rows_of(update: Update, card: Card, clusters: Sequence[tuple[int, Net]] = CLUSTERS) -> list[dict[str, Any]]:
    """Of each cluster the seconds of this update, and how many responses a second it learns from where an update has
    as many a card as this one has in all."""
    alone = sum(predicted(update, 1, card, PCIE).values())
    rows = []
    for number, net in clusters:
        seconds = predicted(update, number, card, net)
        whole = sum(seconds.values())
        rollouts = number * update.work.size.rollouts
        grown = rollouts / sum(predicted(fast_recipe(rollouts), number, card, net).values())
        row = {"processes": number, "net": net.name, **seconds, "all": whole, "faster": alone / whole}
        rows.append({**row, f"responses/s of {update.work.size.rollouts} a card": grown})
    return rows


def _shown(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3, help="measured updates")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="numbers that are measured")
    parser.add_argument("--tflops", type=float, default=60.0, help="of a card, reached in bf16")
    parser.add_argument("--bandwidth", type=float, default=800.0, help="of a card's memory, reached, in GB a second")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        processes.join()
        found = measure(args.updates)
        if processes.is_main():
            args.worker.write_text(json.dumps(found), encoding="utf-8")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows: list[dict[str, Any]] = []
    for number in args.processes:
        found = measured(number, args.updates)
        whole = sum(found["seconds"].values())
        sent = {f"kB {kind}": number / 1e3 for kind, number in found["bytes"].items()}
        rows.append({"processes": number, **found["seconds"], "all": whole, **sent})
    if rows:
        console.print(_shown(rows, f"measured: seconds and kilobytes of an update ({asdict(ON_A_CPU)})"))
    card, update = Card(1e12 * args.tflops, 1e9 * args.bandwidth), fast_recipe()
    longest, mean = max(update.work.lengths), statistics.mean(update.work.lengths)
    console.print(
        f"on paper: {update.work.size.rollouts} responses of {mean:.0f} tokens, the longest {longest}; {update.steps} "
        f"optimizer steps of {4 * update.trained / 1e6:.0f} MB of gradients"
    )
    console.print(_shown(rows_of(update, card), "on paper: seconds of an update of llama3_8b_lora_fast"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
