"""Allocated memory as `toolkit plan` predicts it, beside what this CPU's allocator counts in the same update.

    python -m benchmarks.plan

Small Llamas with random weights: vocabulary, batch, length, checkpointing, precision and the value role vary. Each is
planned without a weight, then built and trained for two updates, the second under torch's profiler, which records every
allocation. What is compared is the most that is live in a phase: weights, optimizer and all. `--page docs/plan.md`
writes the table into a page.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.contenders import Job, add_roles, our_loop, ppo_config
from benchmarks.gpu import random_work
from benchmarks.planned import planned
from benchmarks.random_llama import TINY, id_tokenizer, random_llama
from benchmarks.records import fill, markdown
from benchmarks.work import Size, given_responses
from toolkit.costs import Lengths, weight_bytes_of
from toolkit.models import SharedBase

PHASES = ("rollout", "score", "step")
_OF_PHASE = {"prefill": "rollout", "decode": "rollout", "score": "score", "read": "step", "update": "step"}
LIMIT = 0.1  # of a prediction's error


@dataclass(frozen=True)
class Case:
    """A small Llama and an update of it."""

    hidden: int = 128
    layers: int = 2
    vocabulary: int = 1024
    rollouts: int = 8
    micro_batch: int = 4
    prompt: int = 32
    response: int = 32
    value: str = "separate"
    checkpointing: bool = False
    weights: str = "float32"  # float32, bf16 or nf4
    kl: str = "k1"

    @property
    def llama(self) -> dict[str, Any]:
        """Arguments of `LlamaConfig`."""
        ends = {"bos_token_id": self.vocabulary - 3, "eos_token_id": self.vocabulary - 2}
        sizes = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        return {**TINY, **sizes, **ends, "vocab_size": self.vocabulary}

    def job(self, folder: Path) -> tuple[Job, Any]:
        """The job, and the configuration of ours for it."""
        size = Size(rollouts=self.rollouts, response_length=self.response, micro_batch=self.micro_batch)
        work = random_work(self.llama, size, self.prompt)
        job = Job("", work, id_tokenizer(self.llama), folder, updates=2)
        settings = {"value": self.value, "gradient_checkpointing": self.checkpointing, "kl_estimator": self.kl}
        settings |= {"local_rollout_forward_batch_size": self.micro_batch, "bf16": self.weights != "float32"}
        return job, ppo_config(job, **settings)

    def __str__(self) -> str:
        tokens = f"{self.rollouts} × {self.prompt}+{self.response}, micro-batch {self.micro_batch}"
        extra = [f"value {self.value}", *(["checkpointing"] if self.checkpointing else [])]
        extra += [f"KL {self.kl}"] if self.kl != "k1" else []
        shape = f"{self.hidden} × {self.layers}, V {self.vocabulary}"
        return f"{self.weights}, {shape}; {tokens}; {', '.join(extra)}"


CASES = (
    Case(),
    Case(value="shared"),
    Case(checkpointing=True, layers=6),
    Case(weights="bf16", hidden=256, layers=4, vocabulary=8192),
    Case(weights="nf4", hidden=256, layers=4, vocabulary=16384),
    Case(weights="nf4", hidden=256, layers=6, checkpointing=True, prompt=128, response=64),
    Case(vocabulary=16384, value="shared"),
    Case(vocabulary=16384, kl="full", response=64),
    Case(hidden=256, layers=2, rollouts=16, micro_batch=8, prompt=96, response=96),
    Case(hidden=64, layers=6, prompt=16, response=128, micro_batch=2),
)


def predicted(case: Case) -> dict[str, int]:
    """Bytes that are live at the most in each phase, and `static`, those of weights and optimizer, without a weight."""
    with tempfile.TemporaryDirectory() as folder:
        _, args = case.job(Path(folder))
    lengths = Lengths(case.prompt, case.response)
    static, phases = planned(case.llama, args, lengths, value=case.value, weights=case.weights, names=_OF_PHASE)
    peaks = {name: static + max(part.costs.peak for part in parts) for name, parts in phases.items()}
    return {"static": static, **peaks}


def measured(case: Case) -> dict[str, int]:
    """The same of a real update, by the allocator's own count."""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as inside:
        job, args = case.job(Path(folder))
        torch.manual_seed(0)
        if case.weights == "nf4":
            base = random_llama(case.llama, cpu)
        else:
            dtype = torch.float32 if case.weights == "float32" else torch.bfloat16
            base = AutoModelForCausalLM.from_config(LlamaConfig(**case.llama), dtype=dtype).requires_grad_(False)
        roles = add_roles(SharedBase(base), case.value)
        trainer = our_loop(job, roles, args).trainer
        batch = trainer.data_collator([{"input_ids": ids} for ids in job.work.prompt_ids])
        inside.enter_context(given_responses(roles.causal_lm, job.work))
        trainer.step(batch, first := trainer.generate(batch), trainer.score(batch, first))
        state = [t for held in trainer.optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
        static = weight_bytes_of(roles) + sum(t.nbytes for t in state if t.numel() > 1)
        responses, rollout = _peak(lambda: trainer.generate(batch))
        scores, score = _peak(lambda: trainer.score(batch, responses))
        _, step = _peak(lambda: trainer.step(batch, responses, scores))
    return {"static": static, "rollout": static + rollout, "score": static + score, "step": static + step}


def _peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What some work gives, and the most bytes that were live in it at a time, beyond what was live before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        made = work()
    events = recorded.profiler.kineto_results.events()
    live = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        most = max(most, live)
    return made, most


def errors(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, float]:
    """By how much of the measured bytes a prediction is over, of each phase."""
    return {phase: ours[phase] / theirs[phase] - 1 for phase in PHASES}


_COLUMNS = (
    "case",
    *(f"{phase}: planned MB" for phase in PHASES),
    *(f"{phase}: measured MB" for phase in PHASES),
    "off",
)


def row(case: Case, ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """A row of the table; the last cell is the largest error."""
    off = max(errors(ours, theirs).values(), key=abs)
    cells = [f"{found[phase] / 1e6:.2f}" for found in (ours, theirs) for phase in PHASES]
    return [str(case), *cells, f"{off:+.1%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="page between whose markers the table goes")
    args = parser.parse_args()
    rows, worst = [], 0.0
    for case in CASES:
        ours, theirs = predicted(case), measured(case)
        rows.append(row(case, ours, theirs))
        worst = max(worst, *map(abs, errors(ours, theirs).values()))
        print(" | ".join(rows[-1]), flush=True)
    print(f"largest error: {worst:.1%}")
    if args.page is not None:
        text = args.page.read_text(encoding="utf-8")
        table = markdown(_COLUMNS, rows)
        args.page.write_text(fill(text, "plan results", "end of plan results", table), encoding="utf-8")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
