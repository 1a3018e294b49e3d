"""What a change of role costs, by our switch and by PEFT's own: `python -m benchmarks.role_switch`.

On an 8B-shaped Llama on the meta device, where modules are all there and weights take no memory: a switch changes
attributes of modules and computes nothing.
"""

import statistics
import time
from collections.abc import Callable

import torch
from peft import LoraConfig
from transformers import LlamaConfig

from benchmarks.random_llama import LLAMA_8B, outline
from toolkit.models import SharedBase
from toolkit.reports import machine

REPEATS = 20


def base(values: dict[str, object]) -> SharedBase:
    """All four roles on a Llama without weights."""
    with torch.device("meta"):
        made = SharedBase(outline(LlamaConfig(**values)))
        for role in ("policy", "value", "reward"):
            made.add_role(role, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        made.add_role("reference")
    made.train_roles("policy", "value")
    return made


def ours(roles: SharedBase) -> None:
    """Policy, value, reference: three changes of role, as in a reading of a rollout."""
    for role in ("policy", "value", "reference"):
        roles.switch_to(role)


def peft_s(roles: SharedBase) -> None:
    """The same by PEFT's own methods, with gradients put back as they were."""
    for role in ("policy", "value", "reference"):
        if role == "reference":
            roles.model.base_model.disable_adapter_layers()
        else:
            roles.model.base_model.enable_adapter_layers()
            roles.model.set_adapter(role)
        roles.train_roles(*roles.trained_roles)


def milliseconds(switch: Callable[[SharedBase], None], roles: SharedBase) -> float:
    """Median of one change of role."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        switch(roles)
        seconds.append((time.perf_counter() - started) / 3)
    return 1000 * statistics.median(seconds)


def main() -> int:
    roles = base(LLAMA_8B)
    found = {"ours": milliseconds(ours, roles), "PEFT's": milliseconds(peft_s, roles)}
    for name, value in found.items():
        print(f"{name}: {value:.2f} ms a change of role")
    where = machine()
    print(f"on {where['processor']}, {where['cores']} cores")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
