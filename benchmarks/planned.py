"""What `toolkit.costs` says of a random Llama, for the benchmarks that measure one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, TrainingArguments

from benchmarks.contenders import add_roles
from benchmarks.random_llama import outline
from benchmarks.start import nf4
from toolkit.costs import Counted, CountedUpdate, Device, Lengths, Phase, optimizer_bytes, take_shape, weight_bytes_of
from toolkit.models import SharedBase, quantize_outline
from toolkit.trainers.ppo_config import PPOConfig


class Planned(NamedTuple):
    """Bytes of weights and optimizer, and the phases of an update by a benchmark's own names."""

    static: int
    phases: dict[str, list[Phase]]

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes that are live in each phase, weights and optimizer and all."""
        return {name: self.static + max(part.costs.peak for part in parts) for name, parts in self.phases.items()}

    def seconds(self, device: Device) -> dict[str, float]:
        """Of each phase on a device."""
        return {name: sum(part.seconds(device) for part in parts) for name, parts in self.phases.items()}


def without_numbers(values: dict[str, Any], *, value: str, weights: str) -> SharedBase:
    """A Llama of these arguments of `LlamaConfig` with its roles, the value role "separate" or "shared", of the form in
    which "float32", "bf16" or "nf4" weights would be loaded."""
    base = outline(LlamaConfig(**values)).to(torch.float32 if weights == "float32" else torch.bfloat16)
    if weights == "nf4":
        quantize_outline(base, nf4())
    with torch.device("meta"):
        roles = add_roles(SharedBase(base.requires_grad_(False)), value)
    take_shape(roles)
    return roles


def static_bytes(roles: SharedBase, args: TrainingArguments) -> int:
    """Of weights and optimizer."""
    trained = sum(p.numel() for p in roles.trained_parameters)
    return weight_bytes_of(roles) + round(trained * optimizer_bytes(args))


def planned(
    values: dict[str, Any], args: PPOConfig, lengths: Lengths, *, value: str, weights: str, names: Mapping[str, str]
) -> Planned:
    """An update of what `without_numbers` gives, with rows of these lengths. `names` are what the benchmark calls a
    plan's phases; others are left out."""
    roles = without_numbers(values, value=value, weights=weights)
    phases: dict[str, list[Phase]] = {name: [] for name in names.values()}
    update = CountedUpdate(Counted(values["vocab_size"]), roles, args, lengths, on_cpu=args.use_cpu)
    for phase in update.phases("rollout", "score", "read", "update"):
        if phase.name in names:
            phases[names[phase.name]].append(phase)
    return Planned(static_bytes(roles, args), phases)
