"""What a recipe may say: each section is its owner's own configuration class, checked before anything loads."""

import math
import warnings
from inspect import signature
from typing import Any

from peft import LoraConfig
from pydantic import PositiveFloat, PositiveInt
from transformers import CONFIG_MAPPING, BitsAndBytesConfig

from toolkit.data import TASKS
from toolkit.errors import ConfigError, Problem
from toolkit.models import MOST_LAYERS, quantization_config
from toolkit.rewards import DEFAULT_KIND, SCORERS, scorer_of
from toolkit.sampling import measured_with
from toolkit.settings import fits, problems_of
from toolkit.spec.keys import check_keys, owner_fields, suggestion
from toolkit.spec.plan import at, section
from toolkit.spec.refused import OF_NO_RECIPE, WITHOUT_EFFECT
from toolkit.spec.resolve import resolve
from toolkit.spec.sections import (
    ADAPTER_ROLES,
    DATA_SECTIONS,
    MODEL_SECTIONS,
    PLAIN_SECTIONS,
    SCORER_SECTIONS,
    STAGE_CLASSES,
    TOP_LEVEL,
)
from toolkit.spec.stage import check_stage

# Of make and of the commands; by mistake among the keys.
_ARGUMENTS = {
    "RECIPE": "its first one",
    "MODEL": "base.model=… here, MODEL=… with make",
    **dict.fromkeys(("RUN", "run"), "--run name"),
    "runs_dir": "--runs-dir folder",
    **dict.fromkeys(("FROM", "from_run"), "--from-run name"),
    **dict.fromkeys(("OVERWRITE", "overwrite"), "--overwrite"),
    **dict.fromkeys(("RESUME", "resume"), "--resume"),
    **dict.fromkeys(("PROCESSES", "GPUS", "processes"), "--processes number"),
    **dict.fromkeys(("GPU", "gpu"), "--gpu name, of plan"),
    "OUTPUT": "its second one, of export",
    "MERGE": "--merge, of export",
    "SET": "the keys themselves, each a word",
}


_OF_8_BITS = ("llm_int8_threshold", "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload")
# What fields of PEFT's class are for the roles here, whatever a recipe says.
_OF_EVERY_ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": False, "base_model_name_or_path": None,
    "revision": None, "auto_mapping": None, "peft_version": None, "megatron_config": None,
    "megatron_core": "megatron.core", "use_qalora": False, "qalora_group_size": 16,
}  # fmt: skip
_NO_ADAPTER = {
    "layer_replication": Problem("would change the layers of the base, which all roles share.", remedy="Leave it out."),
    "arrow_config": Problem("routes between adapters of other tasks, and a role has one.", remedy="Leave it out."),
    "lora_ga_config": Problem("would change the base, which all roles share.", remedy="Leave it out."),
    "runtime_config": Problem("is for adapters that are loaded onto a GPU one by one.", remedy="Leave it out."),
}


def check_adapters(values: Any) -> list[Problem]:
    """Problems of the section `adapters`."""
    if not isinstance(values, dict):
        return [Problem(f"a section with a role for each key is needed, got {values!r}.", "adapters")]
    problems = []
    for role, config in values.items():
        if role not in ADAPTER_ROLES:
            problems.append(Problem("no such role.", f"adapters.{role}", suggestion(role, ADAPTER_ROLES)))
            continue
        given = config if isinstance(config, dict) else {}
        refused = {
            key: Problem(f"would have no effect: it is {fixed}, got {given[key]!r}.", remedy="Leave it out.")
            for key, fixed in _OF_EVERY_ADAPTER.items()
            if given.get(key, fixed) != fixed
        }
        refused |= {key: problem for key, problem in _NO_ADAPTER.items() if given.get(key) is not None}
        problems += check_keys(f"adapters.{role}", config, LoraConfig, refused=refused, build=_lora)
        for key, hint in (("rank_pattern", PositiveInt), ("alpha_pattern", PositiveFloat)):
            for name, value in given[key].items() if isinstance(given.get(key), dict) else ():
                if not fits(value, hint):
                    wrong = f"a positive {'whole ' * (hint is PositiveInt)}number is needed, got {value!r}."
                    problems.append(Problem(wrong, f"adapters.{role}.{key}.{name}"))
    return problems


def _lora(**values: Any) -> LoraConfig:
    with warnings.catch_warnings():  # of settings that are ignored without another one
        warnings.simplefilter("error", UserWarning)
        return LoraConfig(**values)


def _check_quantization(name: str, values: dict[str, Any]) -> list[Problem]:
    place = f"{name}.quantization"
    problems = check_keys(place, values, BitsAndBytesConfig, build=lambda **own: quantization_config(own, "float32"))
    if problems:
        return problems
    bits = [4 if key.startswith("load_in_4") else 8 for key in ("load_in_4bit", "load_in_8bit") if values.get(key)]
    if not bits:
        remedy = f"Set load_in_4bit: true, or {place}=null for none."
        return [Problem("neither load_in_4bit nor load_in_8bit is true, so that nothing is asked for.", place, remedy)]
    others = [key for key in values if key.startswith("bnb_4bit_" if bits == [8] else _OF_8_BITS)]
    problems += [Problem(f"would have no effect on {bits[0]} bits.", f"{place}.{key}", "Remove it.") for key in others]
    skipped = values.get("llm_int8_skip_modules")
    if name == "base" and skipped is not None and "lm_head" not in skipped:
        wrong = (
            f"is {skipped!r}, so that transformers would quantise lm_head, which it leaves alone where none is given."
        )
        problems.append(Problem(wrong, f"{place}.llm_int8_skip_modules", "Add lm_head."))
    kind = values.get("bnb_4bit_quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        problems.append(Problem(f"nf4 or fp4 is needed, got {kind!r}.", f"{place}.bnb_4bit_quant_type"))
    return problems


def _check_config(name: str, config: Any) -> list[Problem]:
    """Problems of the `config` of random weights that building the model would not end with."""
    if not isinstance(config, dict):
        return []
    kind, place = config.get("model_type"), f"{name}.config"
    if not isinstance(kind, str):
        return [Problem(f"text is needed, got {kind!r}.", f"{place}.model_type")]
    endless = {key: value for key, value in config.items() if isinstance(value, float) and not math.isfinite(value)}
    if endless:  # weights that are no numbers would be found when the first stage has drawn them
        return [Problem(f"a finite number is needed, got {value}.", f"{place}.{key}") for key, value in endless.items()]
    if kind not in CONFIG_MAPPING:
        return []  # whoever makes the model says so
    layers = {"num_hidden_layers", CONFIG_MAPPING[kind].attribute_map.get("num_hidden_layers", "num_hidden_layers")}
    return [
        Problem(f"a whole number from 1 to {MOST_LAYERS} is needed, got {config[key]!r}.", f"{place}.{key}")
        for key in sorted(layers & config.keys())
        if not isinstance(config[key], int) or not 1 <= config[key] <= MOST_LAYERS
    ]


def check_data(values: Any, place: str = "data") -> list[Problem]:
    """Problems of a data section: the task's own fields."""
    if not isinstance(values, dict) or values.get("task") not in list(TASKS):
        seen = values.get("task") if isinstance(values, dict) else values
        return [Problem(f"one of {', '.join(TASKS)} is needed, got {seen!r}.", f"{place}.task")]
    arguments, task = {key: value for key, value in values.items() if key != "task"}, TASKS[values["task"]]
    needed = [name for name, one in signature(task).parameters.items() if one.default is one.empty]
    missing = [name for name in needed if name != "tokenizer" and name not in arguments]
    absent = [Problem(f"is missing: task {values['task']} needs it.", f"{place}.{name}") for name in missing]
    return absent + check_keys(place, arguments, task, hidden=("tokenizer",))


def check_scorer(values: Any, place: str = "scorer") -> list[Problem]:
    """Problems of the section `scorer` or `judge`, or of a part of a sum: the fields of its kind."""
    if not isinstance(values, dict):
        return [Problem(f"a section with keys is needed, got {values!r}.", place)]
    kind = values.get("kind", DEFAULT_KIND)
    if kind not in list(SCORERS):
        return [Problem(f"{' or '.join(map(repr, SCORERS))} is needed, got {kind!r}.", f"{place}.kind")]
    fields = {name: _scorer_fields(owner, part=place not in SCORER_SECTIONS) for name, owner in SCORERS.items()}
    given = {key: value for key, value in values.items() if key in fields[kind]}
    problems = check_keys(place, given, SCORERS[kind])
    for key in (key for key in values if key != "kind" and key not in given):
        kinds = " and ".join(name for name in SCORERS if key in fields[name])
        if not kinds:
            problems.append(
                Problem(f"kind: {kind} has no such field.", f"{place}.{key}", suggestion(key, fields[kind]))
            )
        elif values[key] is not None:
            wrong = f"belongs to kind: {kinds}, and would have no effect with kind: {kind}."
            problems.append(Problem(wrong, f"{place}.{key}", f"Remove it ({place}.{key}=null)."))
    if isinstance(given.get("quantization"), dict):
        problems += _check_quantization(place, given["quantization"])
    if isinstance(given.get("parts"), dict):
        problems += [p for name, part in given["parts"].items() for p in check_scorer(part, f"{place}.parts.{name}")]
    if not problems:
        try:
            scorer_of(values)
        except ConfigError as error:
            return [problem.within(place) for problem in error.problems]
    return problems


def _scorer_fields(owner: type, *, part: bool) -> list[str]:
    return [name for name in owner_fields(owner) if part or name != "weight"]


class _TopLevel:
    """The keys of a recipe that are no sections."""

    about: str
    seed: int


def _section_hint(key: str) -> str:
    """Where a key belongs that stands beside the sections, or the section that was meant."""
    if key in _ARGUMENTS:
        return f"It is an argument of the command: {_ARGUMENTS[key]}."
    owners = {**PLAIN_SECTIONS, **STAGE_CLASSES}
    if key in OF_NO_RECIPE:
        why = OF_NO_RECIPE[key]
        return f"It is not a recipe key: {why.wrong} {why.remedy}"
    refused = {section: {"tokenizer", *WITHOUT_EFFECT.get(section, ())} for section in owners}
    homes = [section for section, owner in owners.items() if key in owner_fields(owner).keys() - refused[section]]
    if key != "tokenizer" and any(key in owner_fields(task) for task in TASKS.values()):
        homes.append("data")
    if any(key in _scorer_fields(owner, part=False) for owner in SCORERS.values()):
        homes.append("scorer")
    if homes:
        return f"It is a key of {', '.join(homes)}: write {'ppo' if 'ppo' in homes else homes[0]}.{key}."
    return suggestion(key, TOP_LEVEL)


def measured_names(values: dict[str, Any], stage: str) -> list[str]:
    """What an evaluation of a stage measures, by its names in the metrics."""
    of_every_trainer = ["loss", "runtime", "samples_per_second", "steps_per_second"]
    if stage == "sft":
        return ["entropy", "mean_token_accuracy", "num_tokens", *of_every_trainer]
    if stage == "reward":
        of_pairs = ["accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens"]
        return [*(of_pairs if (at(values, "reward_head.num_labels") or 1) == 1 else []), *of_every_trainer]
    scored = {"score": "scorer", "judge": "judge"} if "judge" in values else {"score": "scorer"}
    sums = {name: place for name, place in scored.items() if section(values, place).get("kind") == "sum"}
    parts = [f"{name}/{part}" for name, place in sums.items() for part in section(values, f"{place}.parts")]
    parts += [f"{name}/spread" for name, place in sums.items() if at(values, f"{place}.spread_coef") is not None]
    return [*measured_with(*scored), *parts, *TASKS[values["data"]["task"]].metric_names]


def check_recipe(values: dict[str, Any]) -> list[Problem]:
    """All problems of a resolved recipe; empty if there are none."""
    unknown = [key for key in values if key not in TOP_LEVEL]
    problems = [Problem("no such section.", key.strip() or repr(key), _section_hint(key)) for key in unknown]
    problems += [Problem("this section is missing.", key) for key in ("base", "data") if key not in values]
    problems += problems_of(_TopLevel, {key: values[key] for key in ("about", "seed") if key in values})
    for name, owner in PLAIN_SECTIONS.items():
        if name in values:
            problems += check_keys(name, values[name], owner)
    for name in SCORER_SECTIONS:
        if name in values:
            problems += check_scorer(values[name], name)
    for name in MODEL_SECTIONS:
        if isinstance(given := at(values, f"{name}.quantization"), dict):
            problems += _check_quantization(name, given)
        problems += _check_config(name, at(values, f"{name}.config"))
    for place in DATA_SECTIONS:
        if place in values:
            problems += check_data(values[place], place)
    if "adapters" in values:
        problems += check_adapters(values["adapters"])
    plan = resolve(values)
    for stage in STAGE_CLASSES:
        if stage in values:
            precision = plan.stages[stage].precision(values)
            measured = None if problems else measured_names(values, stage)
            problems += check_stage(stage, values[stage], precision=precision, measured=measured)
    return [*problems, *plan.problems]
