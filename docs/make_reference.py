"""The recipe reference, made from the classes that own the sections, so that it cannot go stale.

python -m docs.make_reference docs/recipe_reference.md    (to standard output without a path)
"""

import toolkit  # noqa: F401  (it sets what the libraries below read when they are imported)

# isort: split

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from peft import LoraConfig
from transformers import BitsAndBytesConfig, TrainingArguments
from trl import RewardConfig as TRLRewardConfig
from trl import SFTConfig

from toolkit.data import TASKS
from toolkit.rewards import DEFAULT_KIND, SCORERS
from toolkit.settings import declared, range_of, type_name
from toolkit.spec.keys import owner_fields
from toolkit.spec.refused import OF_NO_RECIPE, WITHOUT_EFFECT
from toolkit.spec.sections import ADAPTER_ROLES, DATA_SECTIONS, DEFAULT_SEED, PLAIN_SECTIONS
from toolkit.spec.show import as_yaml, owner_defaults
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.reward import RewardConfig
from toolkit.trainers.trl_compat import TRLPPOConfig

_HEADER = """\
# Recipe reference

Written by `make docs` from the classes that own the sections: change those, not this file.

A recipe is a YAML mapping of the sections below. Any key can be given on the command line as `section.key=value`;
`${{seed}}` inserts the plain value of another key. `toolkit show RECIPE` shows a recipe beside the defaults, and
`toolkit check RECIPE` checks it. A field without a default has to be given.

| key | what |
|---|---|
| `about` | a sentence on the recipe |
| `seed` | a whole number for all stages; {seed} by default |"""


def _elsewhere(owner: type, whose: str, page: str) -> str:
    """Of a class whose fields another library describes, on a page of its docs."""
    name, count = owner.__name__, len(owner_fields(owner))
    link = f"https://huggingface.co/docs/{page}.{name}"
    return f"The {count} fields of {whose} `{name}`, by its own names: [{name}]({link})."


_ELSEWHERE = {
    "lora": _elsewhere(LoraConfig, "PEFT's", "peft/package_reference/lora#peft"),
    "quantization": _elsewhere(
        BitsAndBytesConfig, "transformers'", "transformers/main_classes/quantization#transformers"
    ),
    "sft": _elsewhere(SFTConfig, "TRL's", "trl/sft_trainer#trl"),
    "q": _elsewhere(TrainingArguments, "transformers'", "transformers/main_classes/trainer#transformers"),
    "reward": _elsewhere(TRLRewardConfig, "TRL's", "trl/reward_trainer#trl"),
}


# Where TRL's and transformers' words are of their own loops: of a batch on each device, where ours is the whole run's.
_OF_PPO = {
    "bf16": "Whether passes are in bfloat16. A recipe's are as `base.dtype` says, where it does not say.",
    "fp16": "Whether passes are in float16, with a loss scaler. A recipe's are as `base.dtype` says, where it does not "
    "say.",
    "local_rollout_forward_batch_size": "A forward pass without gradient, of log-probabilities, values or scores, has "
    "room for so many of the longest rows.",
    "per_device_train_batch_size": "This × `gradient_accumulation_steps` is the number of prompts of a batch, in the "
    "whole run, whatever the number of processes. A forward pass of a step has room for so many of the longest rows.",
    "gradient_accumulation_steps": "`per_device_train_batch_size` × this is the number of prompts of a batch, in the "
    "whole run, whatever the number of processes.",
}


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def summary(owner: type) -> str:
    """The text of a class's docstring before `Args:`, less a leading "Section `x`"."""
    text = re.split(r"^(?:Args|Raises|Example):\n", inspect.getdoc(owner) or "", maxsplit=1, flags=re.MULTILINE)[0]
    paragraphs = re.sub(r"^Section `\w+`[:.]\s*", "", text).strip().split("\n\n")
    return "\n\n".join(_sentence(paragraph) for paragraph in paragraphs)


def described(owner: type) -> dict[str, str]:
    """What the `Args:` in the docstrings of a class and those that it inherits from say about each field."""
    texts: dict[str, str] = {}
    for part in reversed(owner.__mro__):
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(part.__doc__ or ""), re.MULTILINE | re.DOTALL)
        entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section.group(1) if section else "", re.M | re.S)
        texts |= {name: re.sub(r"\bNone\b", "null", _sentence(text)) for name, text in entries}  # as YAML says it
    return texts


def helped(owner: type) -> dict[str, str]:
    """What the metadata of a dataclass's fields say; argparse's `%%` is a per cent sign."""
    helps, ours = {}, declared(owner)
    for f in fields(owner) if is_dataclass(owner) else ():
        needs = ours[f.name].only_with.items() if f.name in ours else ()
        condition = [f"With {other}: {str(needed).lower()}." for other, needed in needs]
        helps[f.name] = " ".join([*condition, _sentence(f.metadata.get("help", ""))]).replace("%%", "%")
    return {name: text for name, text in helps.items() if text}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(owner: type, names: Iterable[str]) -> list[str]:
    """A markdown table of some fields of a class: name, type, default, what it is."""
    types, defaults = owner_fields(owner), owner_defaults(owner)
    texts = {**helped(owner), **described(owner), **(_OF_PPO if owner is PPOConfig else {})}
    lines = ["| field | type | default | what |", "|---|---|---|---|"]
    for name in names:
        default = f"`{as_yaml(defaults[name])}`" if name in defaults else ""
        allowed = range_of(owner, name)
        kind = type_name(types[name]) + (f": {allowed.words}" if allowed else "")
        lines.append(f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(texts.get(name, ''))} |")
    return lines


def _plain_section(name: str, owner: type) -> Iterator[str]:
    yield from (f"## {name}", "", summary(owner), "") if summary(owner) else (f"## {name}", "")
    yield from table(owner, owner_fields(owner))
    yield ""
    if "quantization" in owner_fields(owner):
        yield from (f"### {name}.quantization", "", _ELSEWHERE["quantization"], "")


def _data_sections() -> Iterator[str]:
    own = " and ".join(f"`{section}`" for section in DATA_SECTIONS[1:])
    yield from ("## data", "")
    yield f"The field `task` names the task, and the others are that task's. {own}, of the same form, are for one stage"
    yield from ("and come before `data` there.", "")
    for task, owner in TASKS.items():
        yield from (f"### data, task: {task}", "", summary(owner), "")
        yield from table(owner, [name for name in owner_fields(owner) if name != "tokenizer"])
        yield ""


def _refused(stage: str) -> Iterator[str]:
    """A table of the fields that a stage refuses, the reason of most of them last."""
    run = {name: problem.wrong.rstrip(".") for name, problem in OF_NO_RECIPE.items()}
    by_reason: dict[str, list[str]] = {}
    for name, reason in {**WITHOUT_EFFECT[stage], **run}.items():
        by_reason.setdefault(reason, []).append(name)
    yield from ("| field | why |", "|---|---|")
    for reason, names in sorted(by_reason.items(), key=lambda item: len(item[1])):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {_cell(_sentence(reason))} |"


def _scorer_sections() -> Iterator[str]:
    yield from ("## scorer", "")
    yield "Where a response's score comes from. `docs/rewards.md` shows each kind. The field `kind` names it, by"
    yield from (f"default `{DEFAULT_KIND}`, and the others are that kind's.", "")
    for kind, owner in SCORERS.items():
        yield from (f"### scorer, kind: {kind}", "", summary(owner), "")
        own_first = sorted(owner_fields(owner), key=lambda name: name not in inspect.get_annotations(owner))
        yield from table(owner, [name for name in own_first if name != "weight"])
        yield ""
    yield from ("### scorer.quantization", "", _ELSEWHERE["quantization"], "")
    yield from ("## judge", "")
    yield "A second reward, of the form of `scorer`, which PPO and Q-learning do not train on. It scores the responses"
    yield "to held-out prompts wherever they are evaluated, as `judge`. One of kind adapter is read from `start.judge`,"
    yield from ("one of kind model names its `model`: `docs/rewards.md`.", "")


def _ppo_section() -> Iterator[str]:
    yield from ("## ppo", "", inspect.getdoc(PPOConfig) or "", "")
    groups: dict[str, list[str]] = {"from the toolkit": [], "from TRL": [], "from transformers": []}
    for name in owner_fields(PPOConfig):
        if name not in {*WITHOUT_EFFECT["ppo"], *OF_NO_RECIPE}:
            shared = "from transformers" if name in owner_fields(TrainingArguments) else "from TRL"
            groups[shared if name in owner_fields(TRLPPOConfig) else "from the toolkit"].append(name)
    for title, names in groups.items():
        yield from (f"### ppo: {title}", "", *table(PPOConfig, names), "")
    yield from ("### ppo: refused", "")
    yield "Fields of `PPOConfig` that are refused with `loop: toolkit`, where they would have no effect."
    yield from ("", *_refused("ppo"))


def _q_section() -> Iterator[str]:
    yield from ("## q", "", inspect.getdoc(QConfig) or "", "")
    ours = [name for name in declared(QConfig) if name not in owner_fields(TrainingArguments)]
    yield from ("### q: from the toolkit", "", *table(QConfig, ours), "")
    yield from ("### q: from transformers", "", _ELSEWHERE["q"], "", "Of these are refused, having no effect:", "")
    yield from _refused("q")


def reference() -> str:
    """All sections of a recipe as markdown."""
    lines = [_HEADER.format(seed=DEFAULT_SEED), ""]
    for name, owner in PLAIN_SECTIONS.items():
        lines += _plain_section(name, owner)
        if name == "base":
            lines += _data_sections()
            roles = ", ".join(f"`{role}`" for role in ADAPTER_ROLES)
            lines += ["## adapters", "", f"A LoRA configuration for each of the roles {roles}.", ""]
            lines += [_ELSEWHERE["lora"], "", *_scorer_sections()]
    for name in ("sft", "reward"):
        lines += [f"## {name}", "", _ELSEWHERE[name], ""]
    lines += ["### reward: from the toolkit", "", *table(RewardConfig, declared(RewardConfig)), ""]
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
