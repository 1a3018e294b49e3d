"""What sections that are right by themselves say against each other."""

from typing import Any

from toolkit.data import TASKS
from toolkit.recipes.keys import check_quantization, owner_fields
from toolkit.recipes.sections import DATA_SECTIONS, RewardModelSection, ValueModelSection


def check_base(base: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Problems of the section `base` beyond its keys."""
    problems = []
    if base.get("quantization") is not None:
        problems += check_quantization("base.quantization", base["quantization"])
    if (base.get("model") is None) == (base.get("config") is None):
        problems.append(
            "base — exactly one of model (a checkpoint) and config (random weights) is needed. "
            "Name a checkpoint with MODEL=/path/to/checkpoint (make) or base.model=/path/to/checkpoint."
        )
    elif base.get("config") is not None:
        if "sft" not in values:
            problems.append("sft — this section is missing: a base with random weights needs pretraining.")
        task = section_of(values, "data").get("task")
        if task in TASKS and "tokenizer" in owner_fields(TASKS[task]):
            problems.append(
                f"base.config — data.task {task} needs a checkpoint's tokenizer, and random weights have none. "
                "Name a checkpoint with base.model=/path/to/checkpoint."
            )
    return problems


def check_value_model(section: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Problems of the section `value_model` beyond its keys."""
    problems = []
    quantized = section.get("quantization") is not None
    if quantized:
        problems += check_quantization("value_model.quantization", section["quantization"])
    if (section.get("model") is None) == (section.get("config") is None):
        problems.append("value_model — exactly one of model (a checkpoint) and config (random weights) is needed.")
    if "value" not in section_of(values, "adapters"):
        dtype = section.get("dtype", ValueModelSection.dtype)
        if quantized:
            problems.append("adapters.value — is missing: 4-bit weights have no gradients, and so need an adapter.")
        elif dtype != "float32":
            problems.append(
                f"value_model.dtype — float32 is needed where all weights are trained, got {dtype}: small steps would "
                "round to nothing. Or give adapters.value."
            )
    elif section.get("config") is not None:
        problems.append("adapters.value — would leave random weights (value_model.config) as they are. Remove it.")
    ppo = section_of(values, "ppo")
    if "ppo" not in values:
        problems.append("value_model — would have no effect: there is no section ppo.")
    if ppo.get("value", "separate") == "shared":
        problems.append("value_model — would have no effect: ppo.value is shared, so value is a head on the policy.")
    if ppo.get("loop") == "trl":
        problems.append("ppo.loop — trl runs the value role on the shared base, not on value_model. Use toolkit.")
    if section_of(values, "start").get("value") == "reward":
        problems.append("start.value — is reward, whose base is not that of value_model. Remove one of them.")
    return problems


def _check_copied_reward(values: dict[str, Any]) -> list[str]:
    """Problems of a value role that starts as a copy of the section `reward_model`."""
    problems, adapters = [], section_of(values, "adapters")
    if section_of(values, "reward_head").get("num_labels", 1) != 1:
        problems.append("start.value — is reward, whose head has several outputs, and a value is one number.")
    if {"reward", "value"} <= adapters.keys():
        problems.append("adapters.value — would have no effect: the value role starts with the adapter of the reward.")
    if section_of(values, "ppo").get("loop") == "trl":
        problems.append("ppo.loop — trl runs the value role on the shared base, not on a copy of reward_model.")
    return problems


def check_collect(collect: dict[str, Any]) -> list[str]:
    """Numbers of the section `collect` that cannot be; those of a wrong type are noted elsewhere."""
    least = {"samples_per_prompt": 1, "max_prompts": 1, "response_length": 1, "batch_size": 1}
    problems = [
        f"collect.{key} — a number from {minimum} is needed, got {collect[key]}."
        for key, minimum in least.items()
        if isinstance(collect.get(key), int) and collect[key] < minimum
    ]
    temperature = collect.get("temperature", 1.0)
    if isinstance(temperature, (int, float)) and not temperature > 0:
        problems.append(f"collect.temperature — a number above 0 is needed, got {temperature}.")
    return problems


def check_together(values: dict[str, Any]) -> list[str]:
    """Problems between sections."""
    problems = [
        f"{place} — would have no effect: there is no section {place.removesuffix('_data')}."
        for place in DATA_SECTIONS[1:]
        if place in values and place.removesuffix("_data") not in values
    ]
    adapters = section_of(values, "adapters")
    if "ppo" in values:
        problems += _check_roles_of_ppo(values)
    if "sft" in values and "policy" not in adapters and section_of(values, "base").get("model") is not None:
        why = (
            "4-bit weights have no gradients"
            if section_of(values, "base").get("quantization")
            else "all roles share it"
        )
        problems.append(
            f"adapters.policy — is missing: the sft stage trains it. Full fine-tuning of the base is refused: {why}."
        )
    if (
        section_of(values, "reward").get("loss") == "token_level"
        and section_of(values, "reward_head").get("num_labels", 1) != 1
    ):
        problems.append("reward.loss — token_level is of pairs, and reward_head.num_labels says classes. Remove one.")
    if "reward" in values and "reward" not in adapters and "reward_model" not in values:
        problems.append("adapters.reward — is missing: the reward stage trains it.")
    return problems + _check_reward_model(values)


def _check_roles_of_ppo(values: dict[str, Any]) -> list[str]:
    """Problems between the section `ppo` and those that say where its roles come from."""
    adapters, scorer, start, ppo = (section_of(values, name) for name in ("adapters", "scorer", "start", "ppo"))
    problems = []
    shared = ppo.get("value", "separate") == "shared"
    if "policy" not in adapters and not start.get("policy"):
        problems.append("adapters.policy — is missing: PPO trains it.")
    if shared and "value" in adapters:
        problems.append(
            "adapters.value — would have no effect: ppo.value is shared, so value has the policy's adapter."
        )
    if shared and start.get("value"):
        problems.append("start.value — would have no effect: ppo.value is shared.")
    if not shared and "value_model" not in values and "value" not in adapters and not start.get("value"):
        problems.append("adapters.value — is missing: ppo.value is separate. Add it, or set ppo.value to shared.")
    if start.get("value") and "value_head" in values:
        problems.append("value_head — would have no effect: the head starts as start.value says.")
    kind = scorer.get("kind", "adapter")
    copied = start.get("value") == "reward"
    if copied and "reward_model" in values:
        problems += _check_copied_reward(values)
    elif copied and not needs_reward_role(scorer):
        problems.append(f"start.value — is reward, but with scorer.kind: {kind} there is no reward role.")
    if kind == "sum" and ppo.get("loop") == "trl":
        problems.append("ppo.loop — trl scores with the reward adapter alone, not with a sum. Use toolkit.")
    return problems


def _check_reward_model(values: dict[str, Any]) -> list[str]:
    """Problems between the section `reward_model`, the scorer that reads it and the stage that trains it."""
    scorer, start, adapters = (section_of(values, name) for name in ("scorer", "start", "adapters"))
    parts = {f"scorer.parts.{name}": part for name, part in section_of(scorer, "parts").items()}
    every = parts if scorer.get("kind") == "sum" else {"scorer": scorer}
    unnamed = [
        place
        for place, part in every.items()
        if isinstance(part, dict) and part.get("kind") == "model" and part.get("model") is None
    ]
    if "reward_model" not in values:
        return [
            f"{place}.model — belongs to scorer.kind: model, and is needed there (a folder or hub id). Or add the "
            "section reward_model, for a model that the reward stage trains."
            for place in unnamed
        ]
    own, problems = section_of(values, "reward_model"), []
    quantized = own.get("quantization") is not None
    if quantized:
        problems += check_quantization("reward_model.quantization", own["quantization"])
    if "reward" not in adapters:
        dtype = own.get("dtype", RewardModelSection.dtype)
        if quantized:
            problems.append("adapters.reward — is missing: quantised weights have no gradients and so need an adapter.")
        elif dtype != "float32":
            problems.append(
                f"reward_model.dtype — float32 is needed where all weights are trained, got {dtype}: small steps would "
                "round to nothing. Or give adapters.reward."
            )
    if (own.get("model") is None) == (own.get("config") is None):
        problems.append("reward_model — exactly one of model (a checkpoint) and config (random weights) is needed.")
    elif own.get("config") is not None and quantized:
        problems.append("reward_model.quantization — would have no effect: random weights are not quantised.")
    elif own.get("config") is not None and "reward" in adapters:
        problems.append("adapters.reward — is not for reward_model.config: random weights have to train whole.")
    if "reward" not in values:
        problems.append(
            "reward_model — would have no effect: there is no section reward, which trains it. One that is trained "
            "already is named by scorer.model."
        )
    if "ppo" in values and not unnamed and needs_reward_role(scorer) and not start.get("reward"):
        problems.append(
            "scorer.kind — adapter reads the reward role, and the reward stage trains reward_model. Use kind: model."
        )
    return problems


def check_q(values: dict[str, Any]) -> list[str]:
    """Problems between the section `q` and others."""
    adapted = "q" in section_of(values, "adapters")
    if "q" not in values:
        return ["adapters.q — would have no effect: there is no section q."] if adapted else []
    problems = [] if adapted else ["adapters.q — is missing: the q stage trains it."]
    if "q_data" not in values and "collect" not in values:
        problems.append("q — has nothing to learn from: give rated responses (q_data), or sample them (collect).")
    q = section_of(values, "q")
    of_one_choice = (
        ("bound", "sigmoid", ("highest_return", "bound_scale", "bound_bias")),
        ("decoding", "sample", ("decoding_temperature",)),
    )
    for choice, needed, names in of_one_choice:
        problems += [
            f"q.{name} — would have no effect: it belongs to q.{choice}: {needed}."
            for name in names
            if name in q and q.get(choice) != needed
        ]
    if "q_data" in values and "collect" in values:
        problems.append("collect — would have no effect: q_data names the responses.")
    return problems


def needs_reward_role(scorer: dict[str, Any]) -> bool:
    """As `ScorerSection.needs_reward_role`, of a section that may have problems."""
    parts = scorer.get("parts")
    every = [scorer, *parts.values()] if isinstance(parts, dict) else [scorer]
    return any(isinstance(part, dict) and part.get("kind", "adapter") == "adapter" for part in every)


def section_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section; empty where it is missing or none, which is noted elsewhere."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}
