"""What `toolkit plan` predicts of this CPU beside what the same update takes: allocated memory, and seconds.

    python -m benchmarks.plan

Llamas with random weights, small ones and two of a true width: vocabulary, batch, length, checkpointing, precision and
the value role vary. Each is planned without a weight, then built and trained for two updates, the second under torch's
profiler, which records every allocation; so are a step of sft and one of the reward stage. What is compared is the most
that is live in a phase: weights, optimizer and all. Of larger ones the seconds of a phase are compared, the median of
five updates after a first one; a CPU has no limits by a data sheet, and is measured for a second. `--page docs/plan.md`
writes the tables into a page, `--only "plan times"` does that of one table alone.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig
from trl import SFTConfig

from benchmarks.contenders import add_roles, our_loop, ppo_config
from benchmarks.gpu import random_work
from benchmarks.planned import Planned, planned, static_bytes, without_numbers
from benchmarks.random_llama import TINY, id_tokenizer, random_llama
from benchmarks.records import fill_file, markdown, new_result, where
from benchmarks.run import about_cpu
from benchmarks.start import Job
from benchmarks.table import cpu_in_words
from benchmarks.work import Size, given_responses
from toolkit.costs import Lengths, counted_step, weight_bytes_of
from toolkit.costs.devices import this_cpu
from toolkit.data import Kind
from toolkit.models import SharedBase
from toolkit.trainers.reward import RewardConfig, reward_trainer
from toolkit.trainers.sft import sft_trainer

PHASES = ("rollout", "score", "step")
_OF_PHASE = {
    "prefill": "rollout",
    "decode": "rollout",
    "score": "score",
    "read": "step",
    "update": "step",
    "optimizer": "step",
}
LIMIT = 0.1  # of a prediction's error in memory
ROUNDS = 5


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
        job = Job("", work, id_tokenizer(self.llama), folder, updates=1 + ROUNDS)
        settings = {"value": self.value, "gradient_checkpointing": self.checkpointing, "kl_estimator": self.kl}
        settings |= {"local_rollout_forward_batch_size": self.micro_batch, "bf16": self.weights != "float32"}
        return job, ppo_config(job, **settings)

    def stage(self, kind: Kind, folder: Path) -> Any:
        """The configuration of a stage with as many rows of that length in a step."""
        settings: dict[str, Any] = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "max_length": None}
        settings |= {"gradient_checkpointing": self.checkpointing, "bf16": self.weights != "float32"}
        settings |= {"per_device_train_batch_size": self.micro_batch}
        if kind == "pairs":
            return RewardConfig(**settings)
        return SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True})

    def roles(self) -> SharedBase:
        """A real one, with random weights."""
        torch.manual_seed(0)
        if self.weights == "nf4":
            return add_roles(SharedBase(random_llama(self.llama, torch.device("cpu"))), self.value)
        dtype = torch.float32 if self.weights == "float32" else torch.bfloat16
        base = AutoModelForCausalLM.from_config(LlamaConfig(**self.llama), dtype=dtype).requires_grad_(False)
        return add_roles(SharedBase(base), self.value)

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
    # The size of SmolLM2-135M, and two layers and a vocabulary of Llama 3.1 8B's.
    Case(576, 30, 49152, rollouts=16, micro_batch=8, prompt=64, response=48, weights="nf4"),
    Case(4096, 2, 128256, prompt=64, response=64, weights="nf4", value="shared", checkpointing=True),
)
TIMED = tuple(
    Case(512, 8, 8192, rollouts=16, micro_batch=16, prompt=64, response=48, weights=weights, value=value)
    for weights in ("float32", "bf16", "nf4")
    for value in ("separate", "shared")
)


def predicted(case: Case) -> dict[str, int]:
    """Bytes that are live at the most in each phase, and `static`, those of weights and optimizer, without a weight."""
    found = _planned(case)
    return {"static": found.static, **found.peaks}


def _planned(case: Case) -> Planned:
    with tempfile.TemporaryDirectory() as folder:
        _, args = case.job(Path(folder))
    lengths = Lengths(case.prompt, case.response)
    return planned(case.llama, args, lengths, value=case.value, weights=case.weights, names=_OF_PHASE)


def measured(case: Case) -> dict[str, int]:
    """The same of a real update, by the allocator's own count."""
    with _trained_once(case) as (trainer, update):
        static, given = _static(trainer), update()
        return {"static": static, **{name: static + _peak(work) for name, work in given}}


def seconds_predicted(case: Case) -> dict[str, float]:
    """Seconds of each phase on this CPU, without a weight."""
    return _planned(case).seconds(this_cpu())


def seconds_measured(case: Case) -> dict[str, float]:
    """The same of real updates, the median of `ROUNDS`."""
    found: dict[str, list[float]] = {name: [] for name in PHASES}
    with _trained_once(case) as (_, update):
        for _ in range(ROUNDS):
            for name, work in update():
                started = time.perf_counter()
                work()
                found[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


@contextmanager
def _trained_once(case: Case) -> Iterator[tuple[Any, Callable[[], Iterator[tuple[str, Callable[[], Any]]]]]]:
    """A trainer with an update behind it, and what goes through the phases of another."""
    with tempfile.TemporaryDirectory() as folder:
        job, args = case.job(Path(folder))
        roles = case.roles()
        trainer = our_loop(job, roles, args).trainer
        batch = trainer.data_collator([{"input_ids": ids} for ids in job.work.prompt_ids])
        made: dict[str, Any] = {}

        def update() -> Iterator[tuple[str, Callable[[], Any]]]:
            yield "rollout", lambda: made.update(responses=trainer.generate(batch))
            yield "score", lambda: made.update(scores=trainer.score(batch, made["responses"]))
            yield "step", lambda: trainer.step(batch, made["responses"], made["scores"])

        with given_responses(roles.causal_lm, job.work):
            for _, work in update():
                work()
            yield trainer, update


STAGES: dict[str, Kind] = {"sft": "demonstrations", "reward": "pairs"}


def steps_predicted(case: Case) -> dict[str, int]:
    """Bytes that are live at the most in a step and in an evaluation of sft and of the reward stage, without a
    weight."""
    found: dict[str, int] = {}
    for kind in STAGES.values():
        roles = without_numbers(case.llama, value=case.value, weights=case.weights)
        with tempfile.TemporaryDirectory() as folder:
            args = case.stage(kind, Path(folder))
            phases = counted_step(kind, roles, args, *[case.prompt + case.response] * 2, on_cpu=True)
        found |= {phase.name: static_bytes(roles, args) + phase.costs.peak for phase in phases}
    return found


def steps_measured(case: Case) -> dict[str, int]:
    """The same of a real step, the second, and of an evaluation after it."""
    found = dict[str, int]()
    ids, others = ([token] * (case.prompt + case.response) for token in (1, 3))  # a pair shares no beginning
    for stage, kind in STAGES.items():
        roles, sft = case.roles(), stage == "sft"

        def unpacked(step: Callable[..., Any], *given: Any, roles: SharedBase = roles) -> None:
            with roles.unpacked_for_gradients():  # as in a run
                step(*given)

        row = {"input_ids": ids, "labels": ids} if sft else {"chosen_ids": ids, "rejected_ids": others}
        rows = [row] * case.micro_batch
        with tempfile.TemporaryDirectory() as folder, roles.role("policy") if sft else nullcontext():
            given = case.stage(kind, Path(folder)), id_tokenizer(case.llama), roles, Dataset.from_list(rows)
            trainer: Any = (sft_trainer if sft else reward_trainer)(*given)
            trainer.create_optimizer_and_scheduler(2)
            trainer.current_gradient_accumulation_steps = 1
            if case.checkpointing:
                roles.gradient_checkpointing_enable()
            batch = trainer.data_collator(rows)
            trainer.training_step(trainer.model, dict(batch))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            peak = _peak(partial(unpacked, trainer.training_step, trainer.model, dict(batch)))
            found[stage] = _static(trainer) + peak
            trainer.optimizer.zero_grad()
            trainer.model.eval()
            batch = trainer.data_collator([row] * trainer.args.per_device_eval_batch_size)
            peak = _peak(partial(unpacked, trainer.prediction_step, trainer.model, dict(batch), True))
            found[f"{stage} evaluation"] = _static(trainer) + peak
    return found


def _static(trainer: Any) -> int:
    """Bytes of the weights and of the optimizer's state."""
    state = [t for held in trainer.optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return weight_bytes_of(trainer.roles) + sum(t.nbytes for t in state if t.numel() > 1)


def _peak(work: Callable[[], Any]) -> int:
    """The most bytes that were live at a time in some work, beyond what was live before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = recorded.profiler.kineto_results.events()
    live = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        most = max(most, live)
    return most


def errors(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """By how much of what was measured a prediction is over, of each phase."""
    return {phase: ours[phase] / theirs[phase] - 1 for phase in theirs if phase != "static"}


@dataclass(frozen=True)
class Compared:
    """A table of the page.

    Args:
        phases: what is compared.
        cases: of what.
        predict: gives it by the plan.
        measure: gives it of a real one.
        unit: in which it is shown.
        size: of the unit.
        limit: of an error.
    """

    phases: Sequence[str]
    cases: Sequence[Case]
    predict: Callable[[Case], Mapping[str, float]]
    measure: Callable[[Case], Mapping[str, float]]
    unit: str = "MB"
    size: float = 1e6
    limit: float | None = LIMIT

    @property
    def columns(self) -> list[str]:
        """The first line."""
        found = (f"{phase}: {how} {self.unit}" for how in ("planned", "measured") for phase in self.phases)
        return ["case", *found, "off"]

    def row(self, case: Case, ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
        """One of the table; the last cell is the largest error."""
        off = errors(ours, theirs)
        cells = [f"{found[phase] / self.size:.2f}" for found in (ours, theirs) for phase in off]
        return [str(case), *cells, f"{max(off.values(), key=abs):+.1%}"]


_OF_STAGES = tuple(f"{stage}{part}" for stage in STAGES for part in ("", " evaluation"))
TABLES = {
    "plan results": Compared(PHASES, CASES, predicted, measured),
    "plan of stages": Compared(_OF_STAGES, CASES[:6], steps_predicted, steps_measured),
    "plan times": Compared(PHASES, TIMED, seconds_predicted, seconds_measured, "s", 1.0, limit=None),
}
"""By the name of its place on the page."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="page between whose markers the tables go")
    parser.add_argument("--only", choices=TABLES, help="the one table to make")
    args = parser.parse_args()
    good, rates = True, cpu_in_words(about_cpu())
    for name, table in TABLES.items():
        if args.only not in (None, name):
            continue
        rows, worst = [], 0.0
        for case in table.cases:
            ours, theirs = table.predict(case), table.measure(case)
            rows.append(table.row(case, ours, theirs))
            worst = max(worst, *map(abs, errors(ours, theirs).values()))
            print(" | ".join(rows[-1]), flush=True)
        if args.page is not None:
            made = f"{markdown(table.columns, rows)}\n\n{where(new_result(name))} {rates}"
            fill_file(args.page, name, f"end of {name}", made)
        print(f"{name}: largest error {worst:.1%}")
        good = good and (table.limit is None or worst <= table.limit)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
