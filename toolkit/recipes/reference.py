"""The recipe reference, made from the classes that own the sections, so that it cannot go stale.

python -m toolkit.recipes.reference docs/recipe_reference.md    (to standard output without a path)
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from peft import LoraConfig
from transformers import BitsAndBytesConfig, TrainingArguments
from trl import RewardConfig as TRLRewardConfig
from trl import SFTConfig
from trl.experimental.ppo import PPOConfig as TRLPPOConfig

from toolkit.data import TASKS
from toolkit.recipes.keys import SET_ELSEWHERE, owner_fields, type_name
from toolkit.recipes.sections import ADAPTER_ROLES, DATA_SECTIONS, PLAIN_SECTIONS
from toolkit.recipes.show import as_yaml, owner_defaults, top_level_defaults
from toolkit.trainers.ppo_config import HONOURED, PPOConfig, ignored_by_our_loop
from toolkit.trainers.q_config import IGNORED, QConfig
from toolkit.trainers.reward_config import RewardConfig

_HEADER = """\
# Recipe reference

Written by `make docs` from the classes that own the sections: change those, not this file.

A recipe is a YAML mapping of the sections below. Any key can be given on the command line as `section.key=value`;
`${{seed}}` inserts the value of another key. `toolkit show RECIPE` shows a recipe beside the defaults, and
`toolkit check RECIPE` checks it. A field without a default has to be given.

| key | what |
|---|---|
| `about` | a sentence on the recipe |
| `seed` | a whole number for all stages; {seed} by default |"""


@dataclass(frozen=True)
class _Elsewhere:
    """A class whose fields are described by its owner."""

    owner: type
    whose: str
    docs: str

    def __str__(self) -> str:
        name, count = self.owner.__name__, len(owner_fields(self.owner))
        return f"The {count} fields of {self.whose} `{name}`, by its own names: [{name}]({self.docs})."


_DOCS = "https://huggingface.co/docs"
_ELSEWHERE = {
    "lora": _Elsewhere(LoraConfig, "PEFT's", f"{_DOCS}/peft/package_reference/lora#peft.LoraConfig"),
    "quantization": _Elsewhere(
        BitsAndBytesConfig,
        "transformers'",
        f"{_DOCS}/transformers/main_classes/quantization#transformers.BitsAndBytesConfig",
    ),
    "sft": _Elsewhere(SFTConfig, "TRL's", f"{_DOCS}/trl/sft_trainer#trl.SFTConfig"),
    "q": _Elsewhere(
        TrainingArguments, "transformers'", f"{_DOCS}/transformers/main_classes/trainer#transformers.TrainingArguments"
    ),
    "reward": _Elsewhere(TRLRewardConfig, "TRL's", f"{_DOCS}/trl/reward_trainer#trl.RewardConfig"),
}


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def summary(owner: type) -> str:
    """The first paragraph of a class's docstring, less a leading "Section `x`"."""
    return _sentence(re.sub(r"^Section `\w+`[:.]\s*", "", (inspect.getdoc(owner) or "").split("\n\n")[0]))


def described(owner: type) -> dict[str, str]:
    """What the `Args:` of a class's docstring say about each field."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(owner) or "", re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section.group(1) if section else "", re.M | re.S)
    return {name: _sentence(text) for name, text in entries}


def helped(owner: type) -> dict[str, str]:
    """What the metadata of a dataclass's fields say; argparse's `%%` is a per cent sign."""
    helps = {f.name: f.metadata.get("help") for f in fields(owner)} if is_dataclass(owner) else {}
    return {name: _sentence(text).replace("%%", "%") for name, text in helps.items() if text}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(owner: type, names: Iterable[str]) -> list[str]:
    """A markdown table of some fields of a class: name, type, default, what it is."""
    types, defaults = owner_fields(owner), owner_defaults(owner)
    texts = {**helped(owner), **described(owner)}
    lines = ["| field | type | default | what |", "|---|---|---|---|"]
    for name in names:
        default = f"`{as_yaml(defaults[name])}`" if name in defaults else ""
        kind = _cell(type_name(types[name]))
        lines.append(f"| `{name}` | {kind} | {_cell(default)} | {_cell(texts.get(name, ''))} |")
    return lines


def _plain_section(name: str, owner: type) -> Iterator[str]:
    yield from (f"## {name}", "", summary(owner), "") if summary(owner) else (f"## {name}", "")
    yield from table(owner, owner_fields(owner))
    yield ""
    if "quantization" in owner_fields(owner):
        yield from (f"### {name}.quantization", "", str(_ELSEWHERE["quantization"]), "")


def _data_sections() -> Iterator[str]:
    own = " and ".join(f"`{section}`" for section in DATA_SECTIONS[1:])
    yield from ("## data", "")
    yield f"The field `task` names the task, and the others are that task's. {own}, of the same form, are for one stage"
    yield from ("and come before `data` there.", "")
    for task, owner in TASKS.items():
        yield from (f"### data, task: {task}", "", summary(owner), "")
        yield from table(owner, [name for name in owner_fields(owner) if name != "tokenizer"])
        yield ""


def _ppo_section() -> Iterator[str]:
    yield from ("## ppo", "", inspect.getdoc(PPOConfig) or "", "")
    every = owner_fields(PPOConfig)
    refused = {**ignored_by_our_loop(every), **{name: SET_ELSEWHERE[name] for name in every if name in SET_ELSEWHERE}}
    groups: dict[str, list[str]] = {"from the toolkit": [], "from TRL": [], "from transformers": []}
    for name in every:
        if name in HONOURED and name not in refused:
            shared = "from transformers" if name in owner_fields(TrainingArguments) else "from TRL"
            groups[shared if name in owner_fields(TRLPPOConfig) else "from the toolkit"].append(name)
    for title, names in groups.items():
        yield from (f"### ppo: {title}", "", *table(PPOConfig, names), "")
    yield from ("### ppo: refused", "")
    yield "Fields of `PPOConfig` that are refused with `loop: toolkit`, where they would have no effect."
    yield from ("", "| field | why |", "|---|---|")
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in sorted(by_reason.items(), key=lambda item: len(item[1])):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {_cell(_sentence(reason))} |"


def _q_section() -> Iterator[str]:
    yield from ("## q", "", inspect.getdoc(QConfig) or "", "")
    inherited = owner_fields(TrainingArguments)
    yield from (
        "### q: from the toolkit",
        "",
        *table(QConfig, [n for n in owner_fields(QConfig) if n not in inherited]),
    )
    yield from ("", "### q: from transformers", "", str(_ELSEWHERE["q"]), "", "Of these are refused, having no effect:")
    yield from ("", "| field | why |", "|---|---|")
    for name, reason in {**IGNORED, **SET_ELSEWHERE}.items():
        yield f"| `{name}` | {_cell(_sentence(reason))} |"


def reference() -> str:
    """All sections of a recipe as markdown."""
    lines = [_HEADER.format(**top_level_defaults()), ""]
    for name, owner in PLAIN_SECTIONS.items():
        lines += _plain_section(name, owner)
        if name == "base":
            lines += _data_sections()
            roles = ", ".join(f"`{role}`" for role in ADAPTER_ROLES)
            lines += ["## adapters", "", f"A LoRA configuration for each of the roles {roles}.", ""]
            lines += [str(_ELSEWHERE["lora"]), ""]
    for name in ("sft", "reward"):
        lines += [f"## {name}", "", str(_ELSEWHERE[name]), ""]
    own = [name for name in owner_fields(RewardConfig) if name not in owner_fields(TRLRewardConfig)]
    lines += ["### reward: from the toolkit", "", *table(RewardConfig, own), ""]
    lines += [*_ppo_section(), "", *_q_section()]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> None:
    """Write the reference to the file that is named, or to standard output."""
    if not arguments:
        print(reference(), end="")
        return
    path = Path(arguments[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
