"""The README.md beside trained roles: what they are, and how to load them."""

from pathlib import Path

from transformers import PreTrainedConfig

from toolkit.reports import versions

_CARD = """---
library_name: peft
tags: [ppo, trl, ppo-lora-toolkit]
---

# {name}

LoRA adapters trained with PPO (Ziegler et al. 2019, arXiv 1909.08593) on `{base}`.

## Quick start

`policy/` is the trained adapter, and `value/` the critic's; for the base that they were trained on:

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


def write_model_card(folder: Path, *, base_name: str, config: PreTrainedConfig) -> None:
    """Write it into the folder of the roles, whose parent is named after the run; `config` is the base's."""
    listed = "\n".join(f"- {package} {number}" for package, number in versions().items())
    base = base_name or "a base without a name"
    revision = getattr(config, "_commit_hash", None)  # of one from the hub
    of_hub = f', revision="{revision}"' if revision else ""
    text = _CARD.format(name=folder.resolve().parent.name, base=base, revision=of_hub, versions=listed)
    (folder / "README.md").write_text(text, encoding="utf-8")
