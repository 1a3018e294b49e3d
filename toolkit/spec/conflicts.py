"""What the sections of a recipe say against each other, once its stages are planned."""

from collections.abc import Iterator, Mapping

from toolkit.data import TASKS
from toolkit.errors import Problem
from toolkit.spec.keys import owner_fields
from toolkit.spec.plan import RESPONDING, StagePlan, at, by_trl, same_rewards, scorer_parts, section
from toolkit.spec.sections import DATA_SECTIONS, MODEL_SECTIONS, not_whole
from toolkit.spec.sources import SharedWith, Values

# The stage that alone can read a section: without the stage it would have no effect.
_READ_BY = {
    "sft_data": "sft", "reward_data": "reward", "q_data": "q", "value_model": "ppo", "reward_model": "reward",
    "adapters.q": "q", "value_head": "ppo", "reward_head": "reward",
}  # fmt: skip
_OF_VALUE = ("adapters.value", "start.value", "value_head", "value_model")


def conflicts(values: Values, stages: Mapping[str, StagePlan]) -> Iterator[Problem]:
    """Problems between the sections of a recipe, whose `stages` say which keys they look up."""
    yield from _of_base(values)
    yield from _of_scorer(values)
    yield from _without_effect(values, stages)


def _of_base(values: Values) -> Iterator[Problem]:
    for name in MODEL_SECTIONS:
        own = at(values, name)
        if isinstance(own, dict) and (own.get("model") is None) == (own.get("config") is None):
            wrong, remedy = "is needed.", f"Name a checkpoint with {name}.model=/path/to/checkpoint."
            if own.get("model") is not None:
                other = ", or name a recipe for a checkpoint (toolkit recipes)" if name == "base" else ""
                wrong = "is needed, and both are given."
                remedy = f"Leave one out: {name}.config=null or {name}.model=null{other}."
            yield Problem(f"exactly one of model (a checkpoint) and config (random weights) {wrong}", name, remedy)
        elif isinstance(own, dict) and own.get("model") is None:
            for key in ("revision", "trust_remote_code", "chat_template"):
                if own.get(key):
                    what = "have a task's own tokens" if key == "chat_template" else "come from no repository"
                    wrong = f"would have no effect: random weights {what}."
                    yield Problem(wrong, f"{name}.{key}", "Remove it.")
    base = section(values, "base")
    if base.get("chat_template") is not None and renders_nothing(values):
        wrong = "would have no effect with chat: false, by which prompts are plain text."
        yield Problem(wrong, "base.chat_template", "Remove one of them.")
    if base.get("model") is None and base.get("config") is not None:
        if wrong := not_whole(base):
            yield Problem(wrong, "base.dtype", "Remove it. A stage's own bf16: true computes in 16 bits.")
        if "sft" not in values:
            yield Problem("this section is missing: a base with random weights needs pretraining.", "sft")
        task = section(values, "data").get("task")
        if task in list(TASKS) and "tokenizer" in owner_fields(TASKS[task]):
            wrong = f"data.task {task} needs a checkpoint's tokenizer, and random weights have none."
            yield Problem(wrong, "base.config", "Name a checkpoint with base.model=/path/to/checkpoint.")


def renders_nothing(values: Values) -> bool:
    """Whether no data section writes conversations in a chat template."""
    return all(at(values, f"{place}.chat") is False for place in DATA_SECTIONS if place in values)


def _of_scorer(values: Values) -> Iterator[Problem]:
    if section(values, "scorer").get("kind") == "sum" and by_trl(values):
        yield Problem("trl scores with the reward adapter alone, not with a sum.", "ppo.loop", "Use toolkit.")
    for place, start in (("scorer", "start.reward"), ("judge", "start.judge")):
        if at(values, f"{place}.adapter") is not None:
            wrong = f"is for parts of a sum, which can name more than one; a {place} alone has {start}."
            yield Problem(wrong, f"{place}.adapter", f"Write {start} in its place.")
        if at(values, f"{place}.spread_coef") is not None:
            for one, other in same_rewards(values, place, start):
                yield Problem(f"is the same reward as {one}, so that the two have no spread.", other, "Name another.")
    for place, part in scorer_parts(values, "judge").items():
        if part.get("kind") == "model" and part.get("model") is None:
            yield Problem("is needed for a judge (a folder or hub id).", f"{place}.model")
    for place, part in scorer_parts(values).items():
        if part.get("kind") == "model" and part.get("model") is None and "reward_model" not in values:
            wrong = "belongs to kind: model, and is needed there (a folder or hub id)."
            remedy = "Or add the section reward_model, for a model that the reward stage trains."
            yield Problem(wrong, f"{place}.model", remedy)


def _without_effect(values: Values, stages: Mapping[str, StagePlan]) -> Iterator[Problem]:
    """Keys that are there and that no stage looks up."""
    for key, stage in _READ_BY.items():
        if at(values, key) is not None and stage not in values:
            remedy = "One that is trained already is named by scorer.model." if key == "reward_model" else ""
            yield Problem(f"would have no effect: there is no section {stage}.", key, remedy)
    if "judge" in values and not {*RESPONDING} & stages.keys():
        yield Problem("would have no effect: there is no section ppo or q.", "judge")
    if at(values, "start.judge") is not None and not any(plan.reads_key("start.judge") for plan in stages.values()):
        remedy = "Take it away: start.judge=null." if "judge" in values else "Add judge.kind=adapter."
        yield Problem("would have no effect: no judge reads an adapter.", "start.judge", remedy)
    for key in ("start.policy", "start.reward"):
        if at(values, key) is not None and not any(plan.reads_key(key) for plan in stages.values()):
            yield Problem("would have no effect: no stage begins with it.", key, "Remove it.")
    for key in _OF_VALUE if "ppo" in stages else ():
        if at(values, key) is not None and not stages["ppo"].reads_key(key):
            why = "the head starts as start.value says"
            if key != "value_head" and isinstance(stages["ppo"].source("value"), SharedWith):
                why = "ppo.value is shared, so value is a head on the policy's adapter"
            elif key == "adapters.value":
                why = "the value role starts with the adapter of the reward"
            yield Problem(f"would have no effect: {why}.", key, f"Take it away: {key}=null.")
