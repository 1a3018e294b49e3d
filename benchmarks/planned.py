"""What `toolkit.costs` says of a random Llama, for the benchmarks that measure one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig

from benchmarks.contenders import add_roles, nf4
from benchmarks.random_llama import outline
from toolkit.costs import Counted, CountedUpdate, Lengths, Phase, optimizer_bytes, take_shape, weight_bytes_of
from toolkit.models import SharedBase, quantize_outline
from toolkit.trainers.ppo_config import PPOConfig


class Planned(NamedTuple):
    """Bytes of weights and optimizer, and the phases of an update by a benchmark's own names."""

    static: int
    phases: dict[str, list[Phase]]


def planned(
    values: dict[str, Any], args: PPOConfig, lengths: Lengths, *, value: str, weights: str, names: Mapping[str, str]
) -> Planned:
    """An update without a weight.

    Args:
        values: arguments of `LlamaConfig`.
        args: of the trainer.
        lengths: of all rows.
        value: "separate" or "shared".
        weights: "float32", "bf16" or "nf4".
        names: what the benchmark calls a plan's phases; others are left out.
    """
    base = outline(LlamaConfig(**values)).to(torch.float32 if weights == "float32" else torch.bfloat16)
    if weights == "nf4":
        quantize_outline(base, nf4())
    with torch.device("meta"):
        roles = add_roles(SharedBase(base.requires_grad_(False)), value)
    counted = Counted(values["vocab_size"])
    take_shape(roles)
    phases: dict[str, list[Phase]] = {name: [] for name in names.values()}
    for phase in CountedUpdate(counted, roles, args, lengths, on_cpu=args.use_cpu).phases():
        if phase.name in names:
            phases[names[phase.name]].append(phase)
    trained = sum(p.numel() for p in roles.trained_parameters)
    return Planned(weight_bytes_of(roles) + round(trained * optimizer_bytes(args)), phases)
