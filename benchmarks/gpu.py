"""`make bench-gpu`: PPO on an 8B-shaped Llama in NF4, where there is a GPU and nothing else.

    python -m benchmarks.gpu

No network, no checkpoint, no tokenizer file: the model has Llama-3.1-8B's configuration and random weights, prompts and
responses are random ids of one length each, and in two rows of uneven ones, of which one packs them. All four roles,
value separate and shared; checkpointing off and on, responses by a merged copy of the weights, and either with CUDA
graphs; seconds and peak memory by phase, each with what `toolkit plan` says of it. A run that was cut short goes on
with its next row. `--small` runs the same code on a CPU with a tiny model, for the tests.
"""

import argparse
import gc
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks import floor
from benchmarks.clock import WARM_UP, PhaseClock
from benchmarks.contenders import add_roles, our_loop, ppo_config
from benchmarks.errors import BenchmarkError
from benchmarks.loops import run_ours
from benchmarks.planned import planned
from benchmarks.random_llama import LLAMA_8B, TINY, id_tokenizer, outline, random_llama
from benchmarks.records import RESULTS, new_result, read_result, result_path, say, write_result
from benchmarks.start import RANK, Built, Job
from benchmarks.table import section
from benchmarks.work import PHASES, Size, Work
from toolkit.costs import Device, Lengths, here, weight_bytes_of
from toolkit.costs.devices import this_cpu
from toolkit.errors import ConfigError, ModelError, SelfCheckError
from toolkit.models import SharedBase
from toolkit.reports import peak_memory_gb
from toolkit.trainers.ppo_config import PPOConfig

FORMS: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": False, "generation": "eager"},
    {"gradient_checkpointing": True, "generation": "eager"},
    {"gradient_checkpointing": False, "generation": "merged"},
)
"""Settings of each row, with either value role; the first is measured of uneven lengths, too, padded and packed."""
BY_GRAPHS: tuple[dict[str, Any], ...] = tuple(
    {"gradient_checkpointing": False, "generation": way} for way in ("graphs", "merged_graphs")
)
"""Those of a card alone, and after all others: in a process in which a recording has failed nothing more can be
measured."""
LENGTHS = ("even", "uneven")
PACKED = "uneven, packed"
# Of a plan's phases: the benchmark's update begins after what its score phase reads.
_OF_PLAN = {"prefill": "rollout", "decode": "rollout", "score": "score", "read": "score"}
_OF_PLAN |= {"update": "update", "optimizer": "update"}


@dataclass(frozen=True)
class Settings:
    """One run of this benchmark: arguments of `LlamaConfig`, sizes in tokens, measured updates, and where."""

    llama: dict[str, Any]
    size: Size
    prompt_length: int
    updates: int
    device: torch.device

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Of as many words as the model has ids: a second, which each row would take again."""
        return id_tokenizer(self.llama)


def settings(*, small: bool, updates: int = 3) -> Settings:
    """Those of the benchmark, or the small ones.

    Raises:
        BenchmarkError: there is no GPU, or it has no bfloat16.
    """
    if small:
        size = Size(rollouts=4, response_length=6, micro_batch=2)
        return Settings(TINY, size, prompt_length=10, updates=1, device=torch.device("cpu"))
    if not torch.cuda.is_available():
        raise BenchmarkError("bench-gpu needs a CUDA device, and torch sees none.")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BenchmarkError(f"bench-gpu runs in bfloat16, which {torch.cuda.get_device_name(0)} does not have.")
    size = Size(rollouts=16, response_length=128, micro_batch=8)
    return Settings(LLAMA_8B, size, prompt_length=256, updates=updates, device=torch.device("cuda", 0))


def random_work(values: dict[str, Any], size: Size, prompt_length: int, *, uneven: bool = False) -> Work:
    """Random prompts and responses of one length each; no id is a special token, so that nothing ends early.

    `uneven` spreads the lengths of both, each in an order of its own, from an eighth of the longest to it.
    """
    draw = random.Random(0)
    ordinary = range(min(values["bos_token_id"], values["eos_token_id"]))

    def lengths(longest: int) -> list[int]:
        if not uneven:
            return [longest] * size.rollouts
        shares = [1 - 7 / 8 * i / max(size.rollouts - 1, 1) for i in range(size.rollouts)]
        return [round(longest * share) for share in draw.sample(shares, k=size.rollouts)]

    return Work(
        size=size,
        prompt_ids=[draw.choices(ordinary, k=length) for length in lengths(prompt_length)],
        sampled=[draw.choices(ordinary, k=size.response_length) for _ in range(size.rollouts)],
        lengths=lengths(size.response_length),
        eos_token_id=values["eos_token_id"],
    )


class PeakMemory:
    """Peak memory of each phase in GB (10⁹ bytes): allocated on a GPU, on a CPU resident in this process so far.

    Left out are updates that warm up, in which there are checks.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.peaks = dict.fromkeys(PHASES, 0.0)
        self._warming_up = WARM_UP * len(PHASES)
        self._count_anew()

    def _count_anew(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def __call__(self, phase: str) -> None:
        """At the end of a phase."""
        self._warming_up -= 1
        if self._warming_up < 0:
            self.peaks[phase] = max(self.peaks[phase], peak_memory_gb()["gpu" if self.on_gpu else "resident"])
        self._count_anew()


def _job(given: Settings, work: Work, folder: Path, **form: Any) -> tuple[Job, PPOConfig]:
    job = Job("", work, given.tokenizer, folder, WARM_UP + given.updates)
    on_cpu, at_a_time = given.device.type == "cpu", work.size.micro_batch
    return job, ppo_config(job, **form, local_rollout_forward_batch_size=at_a_time, use_cpu=on_cpu)


def build(given: Settings, roles: SharedBase, work: Work, folder: Path, **form: Any) -> Built:
    """Our trainer on a base that has its roles, in a form of a row, or without checkpointing and eager."""
    job, args = _job(given, work, folder, **form)
    return our_loop(job, roles, args)


def measure(
    given: Settings, roles: SharedBase, work: Work, *, value: str, pack: bool = False, **form: Any
) -> dict[str, Any]:
    """One row, a form of `FORMS`: median seconds, and the peak memory, of each phase, and whose rows at a time were
    halved since they did not fit. Where memory runs out, the phase it ran out in; where it is refused, why; and where
    it fails in another way, how, after which nothing that this process measures can be trusted."""
    row: dict[str, Any] = {"value": value, **form}
    roles.pack_rows = pack
    if pack and not roles.can_pack:
        return {**row, "refused": "rows that are packed say something else here"}
    peaks = PeakMemory(given.device)
    clock = PhaseClock(peaks)
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = build(given, roles, work, Path(folder), value=value, **form)
            run_ours(built, work, clock, WARM_UP + given.updates)
        except Exception as error:
            return row | _failed(error, clock.phase or "building")
        finally:
            roles.gradient_checkpointing_disable()
            roles.zero_grad()  # where memory ran out, some are left
    trainer, at_a_time = built.trainer, work.size.micro_batch
    portions = {
        "update": (trainer.micro_batch, at_a_time),
        "read": (trainer.rollouts.portion, at_a_time),
        "rollout": (trainer.rollouts.generated, work.size.rollouts),
        "reward": (trainer.reward.portion, at_a_time),
    }
    measured = clock.updates[WARM_UP:]
    seconds = {phase: statistics.median(update[phase] for update in measured) for phase in PHASES}
    return {
        **row,
        "updates": measured,
        "seconds": seconds,
        "peak_gb": peaks.peaks,
        "lowered": {name: portion.rows for name, (portion, asked) in portions.items() if portion.rows < asked},
        "samples_per_second": work.size.rollouts / sum(seconds.values()),
    }


def _failed(error: Exception, phase: str) -> dict[str, Any]:
    """What a row says that came to nothing."""
    # In the reward, or outside.
    if any(isinstance(one, torch.cuda.OutOfMemoryError) for one in (error, error.__cause__)):
        return {"out_of_memory": phase}
    # No room to merge, a base without graphs, or a check or trial that holds two computations against each other; with
    # a cause it is a recording, or a kernel, that failed.
    foreseen = isinstance(error, ConfigError | ModelError | SelfCheckError)
    said = str(error) if foreseen else f"{type(error).__name__}: {error}"
    return {"refused": said, "broken": not foreseen or error.__cause__ is not None}


def _foreseen(given: Settings, work: Work, *, value: str, **form: Any) -> dict[str, dict[str, float]]:
    """What a plan says of a row, whose rows are of one length: allocated memory, without what the context takes, and
    seconds as it runs, unless the limits of the card are not known."""
    with tempfile.TemporaryDirectory() as folder:
        _, args = _job(given, work, Path(folder), value=value, **form)
    lengths = Lengths(given.prompt_length, given.size.response_length)
    plan = planned(given.llama, args, lengths, value=value, weights="nf4", names=_OF_PLAN)
    found = {"planned_gb": {name: peak / 1e9 for name, peak in plan.peaks.items()}}
    device = here() if given.device.type == "cuda" else this_cpu()
    if not isinstance(device, Device):
        return found
    return found | {"planned_seconds": plan.seconds(device)}


def run(
    given: Settings,
    save: Callable[[dict[str, Any]], Any],
    before: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda result: None,
) -> dict[str, Any]:
    """All rows on one machine. Returns the result as it is written, `whole` where no row has broken off.

    `save` is given the result so far after every row, so that a run that is cut short loses one row at most. `before`
    gives what stands where a result is to be saved, whose rows are kept if they are of the same.
    """
    works = {how: random_work(given.llama, given.size, given.prompt_length, uneven=how == "uneven") for how in LENGTHS}
    drawn = outline(LlamaConfig(**given.llama))
    layers, head = floor.linear_layers(drawn)
    values = ("separate", "shared")
    floors = {}
    for how, work in works.items():
        products = {value: floor.matmuls(work, layers, head, value=value, rank=RANK) for value in values}
        floors[how] = floor.measure(products, dtype=torch.bfloat16, device=given.device)
    result = new_result(
        "gpu" if given.device.type == "cuda" else "small",
        model={
            "architecture": "LlamaForCausalLM, random weights, NF4",
            "parameters": sum(p.numel() for p in drawn.parameters()),
            "layers": drawn.config.num_hidden_layers,
            "hidden_size": drawn.config.hidden_size,
            "vocabulary": drawn.config.vocab_size,
        },
        arguments={"updates": given.updates},
        work={
            **asdict(given.size),
            "prompt_tokens": given.prompt_length,
            "response_tokens": given.size.response_length,
            "tokens": {how: work.tokens for how, work in works.items()},
        },
        rows=[],
        floor=floors,
    )
    result |= _begun(before(result), result)
    done = [_key(row) for row in result["rows"]]
    by_graphs = BY_GRAPHS if given.device.type == "cuda" else ()
    plain = (*FORMS, *({**FORMS[0], "lengths": how} for how in ("uneven", PACKED)))
    for value, of_base in (("separate", plain), ("shared", (*plain, *by_graphs)), ("separate", by_graphs)):
        forms = [form for form in of_base if _key({"value": value, "lengths": "even", **form}) not in done]
        for row in _rows(given, value, forms, works, result["model"]) if forms else ():
            if "seconds" in row:
                of_work = floors[row["lengths"].split(",")[0]]
                row["over_floor"] = sum(row["seconds"].values()) / sum(of_work[value]["seconds"].values())
            result["rows"].append(row | {"processor": result["machine"]["processor"]})
            save(result)
            say(_line(row))
            if row.get("broken"):
                return result
            _free()
        _free()
    return _with_plans(result, given, works["even"], save)


def _rows(
    given: Settings, value: str, forms: Sequence[dict[str, Any]], works: Mapping[str, Work], model: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of a base; where it cannot be made, each says why. `model` is told of its weights."""
    try:
        base = random_llama(given.llama, given.device)
        model["weights_gb"] = weight_bytes_of(base) / 1e9
        roles = add_roles(_shared(base), value)
    except Exception as error:
        failed = _failed(error, "loading")
        yield from ({"value": value, **form, "lengths": form.get("lengths", "even"), **failed} for form in forms)
        return
    for form in forms:
        how = form.get("lengths", "even")
        asked = {key: setting for key, setting in form.items() if key != "lengths"}
        row = measure(given, roles, works[how.split(",")[0]], value=value, pack=how == PACKED, **asked)
        yield row | {"lengths": how}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["value"], *(row[key] for key in FORMS[0]), row["lengths"]


def _begun(before: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
    """Model and rows of an earlier run of the same that was cut short; nothing of one that has all, and its plans."""
    same = ("versions", "sources", "arguments", "work")
    if before is None or before.get("whole") or any(before.get(key) != result.get(key) for key in same):
        return {}
    if before["machine"].get("gpu") != result["machine"].get("gpu"):  # what is lent next may have another processor
        return {}
    return {"model": before["model"], "rows": before["rows"]}


def _shared(base: PreTrainedModel) -> SharedBase:
    """The base, with packing tried on it; without, where it cannot pack."""
    try:
        return SharedBase(base, pack_rows=True)
    except ModelError:
        return SharedBase(base)


def _with_plans(
    result: dict[str, Any], given: Settings, work: Work, save: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """The result with what plans say of its rows: some ten seconds each, for which no row has to wait."""
    for row in result["rows"]:
        if "seconds" in row and row["lengths"] == "even" and "planned_gb" not in row:
            form = {key: row[key] for key in ("value", *FORMS[0])}
            row |= _foreseen(given, work, **form)
            save(result)
    return result | {"whole": True}


def _line(row: dict[str, Any]) -> str:
    """A row for whoever watches."""
    checkpointing = "on" if row["gradient_checkpointing"] else "off"
    name = f"{row['value']} value, checkpointing {checkpointing}, {row['generation']}, {row['lengths']} lengths"
    if "refused" in row:
        return f"{name}: {row['refused']}"
    if "out_of_memory" in row:
        return f"{name}: out of memory in {row['out_of_memory']}"
    phases = (f"{phase} {row['seconds'][phase]:.2f} s, {row['peak_gb'][phase]:.2f} GB" for phase in PHASES)
    return f"{name}: {'; '.join(phases)}"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3, help="measured updates of each row")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    try:
        given = settings(small=args.small, updates=args.updates)
    except BenchmarkError as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    result = run(
        given,
        save=lambda so_far: write_result(so_far, args.output),
        before=lambda result: read_result(result, args.output),
    )
    write_result(result, args.output)
    print(section("gpu", result))
    say(f"result: {result_path(result, args.output)}")
    if "whole" not in result:
        say("a row broke off, and this process can measure no more: the same command goes on after it.")
    return 0 if "whole" in result else 1


if __name__ == "__main__":
    sys.exit(main())
