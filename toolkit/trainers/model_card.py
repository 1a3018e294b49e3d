"""The README.md beside trained roles: what they are, and how to load them."""

import hashlib
import os
from pathlib import Path

from toolkit import phases
from toolkit.disk import write_whole
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
    """Write it into the folder of the roles, named after it, or after the run whose stage it is. One that a user
    changed stays."""
    path = folder / "README.md"
    if path.is_file() and not _is_as_written(path.read_text(encoding="utf-8", errors="replace")):
        phases.tell(f"{path} is not as this version writes it, and stays as it is: delete it to have it written anew.")
        return
    listed = "\n".join(f"- {package} {number}" for package, number in versions().items())
    base = _as_from(folder, base_name) if base_name else "a base without a name"
    revision = getattr(roles.config, "_commit_hash", None)  # of one from the hub
    of_hub = f', revision="{revision}"' if revision else ""
    known = {"base": base, "revision": of_hub, "critic": _critic(roles), "versions": listed}
    whole = folder.resolve()
    name = whole.parent.name if whole.name == "ppo" else whole.name
    write_whole(path, _sealed(_CARD.format(ours=_OURS, name=name, **known)))


def _as_from(folder: Path, base: str) -> str:
    """A base as it is named in a folder; a hub id is everywhere the same."""
    path = Path(base).expanduser()
    if not path.is_dir():
        return base
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # on another drive
        return str(path.absolute())


def _sealed(card: str) -> str:
    """A card that ends with its own SHA-256, by which one that a user has added to is known."""
    return f"{card}\n<!-- {_OURS}: renewed while this is its SHA-256: {hashlib.sha256(card.encode()).hexdigest()} -->\n"


def _is_as_written(text: str) -> bool:
    return text == _sealed(text.rpartition("\n<!-- ")[0])


def _critic(roles: SharedBase) -> str:
    if roles.shares_value:
        return "the critic's head, `value_head.safetensors`, which reads the states of the policy's adapter"
    if roles.value_model is None:
        return "the critic's"
    return "the critic" + (", a checkpoint of its own" if roles.value_model.adapted is None else "'s, on another base")
