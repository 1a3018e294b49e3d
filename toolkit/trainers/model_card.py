"""The README.md beside trained roles: what they are, and how to load them."""

from pathlib import Path

from toolkit import phases
from toolkit.models import SharedBase
from toolkit.reports import versions

_OURS = "ppo-lora-toolkit"
_CARD = """---
library_name: peft
tags: [ppo, trl, {ours}]
---

# {name}

LoRA adapters trained with PPO (Ziegler et al. 2019, arXiv 1909.08593) on `{base}`.

## Quick start

`policy/` is the trained adapter, and `value/` {critic}; for the base that they were trained on:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}"{revision})
tokenizer = AutoTokenizer.from_pretrained("{base}"{revision})
policy = PeftModel.from_pretrained(base, "policy")  # of this folder
```

## Versions

{versions}
"""


def write_model_card(folder: Path, roles: SharedBase, *, base_name: str) -> None:
    """Write it into the folder of the roles, whose parent is named after the run. One of a user's own stays."""
    path = folder / "README.md"
    if path.is_file() and _OURS not in path.read_text(encoding="utf-8", errors="replace"):
        phases.tell(f"{path} is not one of ours, and stays as it is.")
        return
    listed = "\n".join(f"- {package} {number}" for package, number in versions().items())
    base = base_name or "a base without a name"
    revision = getattr(roles.config, "_commit_hash", None)  # of one from the hub
    of_hub = f', revision="{revision}"' if revision else ""
    known = {"base": base, "revision": of_hub, "critic": _critic(roles), "versions": listed}
    path.write_text(_CARD.format(ours=_OURS, name=folder.resolve().parent.name, **known), encoding="utf-8")


def _critic(roles: SharedBase) -> str:
    if roles.shares_value:
        return "the critic's head, `value_head.safetensors`, which reads the states of the policy's adapter"
    if roles.value_model is None:
        return "the critic's"
    return "the critic" + (", a checkpoint of its own" if roles.value_model.adapted is None else "'s, on another base")
