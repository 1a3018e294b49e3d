"""Recipes with a key changed, in the file or on the command line; what `check` passes has to be built, too."""

import copy
import dataclasses
import hashlib
import random
import shutil
import tempfile

import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from tests.fuzz.cases import ODD, Case, Place, command, damaged, items_of, mutated, refusal
from toolkit import recipes
from toolkit.data import TASKS
from toolkit.spec.sections import PLAIN_SECTIONS, STAGE_CLASSES

# What many options can be: it passes more often, and has to be built then.
_LIKELY = [
    True, False, 1, 2, 3, 8, 0.5, 0.9, 1e-5, "no", "none", "steps", "epoch", "best", "cosine", "linear", "adamw_torch",
    "sgd", "adafactor", "lion_32bit", "inductor", "gaussian", "lora_only", "all", ["q_proj"], {"use_reentrant": False},
]  # fmt: skip
BUILT = 0.7  # share of what passes


def _options(section: str) -> list[str]:
    """Every option that the owner of a section has."""
    if section == "data":
        return sorted({"task"} | {field.name for task in TASKS.values() for field in dataclasses.fields(task)})
    if section == "base.quantization":
        return sorted(vars(BitsAndBytesConfig()))
    owner = LoraConfig if section.startswith("adapters.") else {**STAGE_CLASSES, **PLAIN_SECTIONS}[section]
    return sorted(field.name for field in dataclasses.fields(owner))


def recipe_case(place: Place, draw: random.Random) -> Case:
    values = copy.deepcopy(place.recipes[name := draw.choice(list(place.recipes))])
    ways = ["value", "value", "option", "option", "override", "override", "typo", "text"]
    way, words, must, names = draw.choice(ways), [], "", ("",)
    path = place.folder / "fuzz.yaml"
    if way == "value":
        values, what = mutated(draw, values)
    elif way == "typo":
        owner, key, where = draw.choice([one for one in items_of(values) if isinstance(one[0], dict)])
        owner[f"{key}_s"] = owner.pop(key)
        must, names, what = "refused", (f"{key}_s",), f"{where}_s"
    elif way in ("option", "override"):
        sections = ["data", "base", "base.quantization", *STAGE_CLASSES]
        there = {where: owner[key] for owner, key, where in items_of(values)}
        section = draw.choice([s for s in there if s in sections or (s.startswith("adapters.") and s.count(".") == 1)])
        option, odd = draw.choice(_options(section)), draw.choice(draw.choice([ODD, _LIKELY, _LIKELY]))
        names, what = (option,), f"{section}.{option}={odd!r}"
        if way == "override":
            words = [f"{section}.{option}={odd}"]
        else:
            there[section][option] = odd
    try:
        text = yaml.safe_dump(values, allow_unicode=True).encode(errors="surrogatepass")
    except yaml.YAMLError:
        text = str(values).encode(errors="replace")
    if way == "text":
        text = damaged(draw, text)
        what = f"text {hashlib.sha256(text).hexdigest()[:8]}"
    path.write_bytes(text)
    late: list[str] = []

    def act() -> tuple[int, str]:
        code, said = command("check", "fuzz.yaml", *words)
        if code == 0 and draw.random() < BUILT:
            late.append(_late_refusal(words, draw))
        return code, said

    return Case(f"{name}: {what[:300]}", act, names, must, lambda: "".join(late))


def _late_refusal(words: list[str], draw: random.Random) -> str:
    """What only the build of a stage says of a recipe that `check` has passed; "" if that builds."""
    recipe = recipes.load("fuzz.yaml", *words, runs_dir=tempfile.mkdtemp(dir="."))
    makers = {"sft": recipe.sft_trainer, "reward": recipe.reward_trainer, "ppo": recipe.ppo_trainer}
    first = [stage for stage, plan in recipe.plan.stages.items() if stage in makers and not plan.needs]
    code, said = refusal(makers[stage]) if (stage := draw.choice([*first, None])) else (0, "")
    shutil.rmtree(recipe.runs_dir, ignore_errors=True)
    return f"found late, by the {stage} stage: {said}" if code else ""
