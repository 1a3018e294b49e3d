"""The reward model on a base of its own: what a recipe may say of it, and how it is made."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from toolkit.errors import RecipeError
from toolkit.models import (
    add_lora,
    check_reads_tokens,
    classifier_config,
    classifier_outline,
    head_in_float32,
    load_classifier,
    load_classifier_weights,
)
from toolkit.models.classifier import head_name
from toolkit.recipes.facts import RoleFacts
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.sections import RewardModelSection


def quantization_of(section: RewardModelSection) -> BitsAndBytesConfig | None:
    """The section's quantisation as its owner's object."""
    return None if section.quantization is None else BitsAndBytesConfig(**section.quantization)


def reward_model_config(recipe: Recipe) -> PreTrainedConfig:
    """The configuration of the section `reward_model`, checked against the policy's tokenizer.

    Raises:
        ModelError: no such model, or one with another tokenizer.
    """
    section = recipe.reward_model
    return classifier_config(
        recipe.tokenizer,
        num_labels=recipe.reward_head.num_labels,
        model=section.model,
        config=section.config,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )


def _arguments(section: RewardModelSection) -> dict[str, Any]:
    return {"attn_implementation": section.attn_implementation, "trust_remote_code": section.trust_remote_code}


def untrained_reward_model(recipe: Recipe) -> PreTrainedModel | PeftModel:
    """The model of the section `reward_model` as its training begins, with LoRA where `adapters.reward` asks for it.

    Raises:
        ModelError: it cannot be had, or its tokens are not the policy's.
    """
    section, adapted = recipe.reward_model, "reward" in recipe.values.get("adapters", {})
    model = load_classifier(
        reward_model_config(recipe),
        section.model,
        quantization=quantization_of(section),
        dtype=section.dtype,
        revision=section.revision,
        **_arguments(section),
    )
    return add_lora(model, recipe.adapter("reward")) if adapted else model


def outlined_reward_model(recipe: Recipe) -> PreTrainedModel | PeftModel:
    """The same on the meta device."""
    section, adapted = recipe.reward_model, "reward" in recipe.values.get("adapters", {})
    model = classifier_outline(reward_model_config(recipe), dtype=section.dtype, **_arguments(section))
    if not adapted:
        return model
    with torch.device("meta"):
        return add_lora(model, recipe.adapter("reward"))


def trained_reward_model(recipe: Recipe) -> PreTrainedModel | PeftModel:
    """The model that the reward stage has trained, in `reward_model.dtype`; its head computes in float32.

    Raises:
        RecipeError: the stage has not run.
    """
    section, folder = recipe.reward_model, recipe.stage_folder("reward") / "model"
    if not folder.is_dir():
        raise RecipeError(f"{folder} is missing: the reward stage has to train the reward model first.")
    if "reward" in recipe.values.get("adapters", {}):
        model = untrained_reward_model(recipe)
        load_classifier_weights(model, folder)
    else:
        config = reward_model_config(recipe)
        model = load_classifier(config, str(folder), dtype=section.dtype, trained=True, **_arguments(section))
    head_in_float32(model)
    return model


@dataclass(frozen=True)
class OwnModelFacts:
    """What a check finds out: the role's facts, and the longest sequence that the model takes."""

    role: RoleFacts
    positions: int | None


def own_model_facts(recipe: Recipe) -> OwnModelFacts:
    """The section `reward_model` on the meta device.

    Raises:
        ModelError: as for `reward_model_config`, or an adapter that does not fit.
    """
    section, model = recipe.reward_model, outlined_reward_model(recipe)
    if recipe.values.get("reward", {}).get("loss") == "token_level":
        check_reads_tokens(model)
    adapted = isinstance(model, PeftModel)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    in_head = sum(p.numel() for name, p in trained.items() if f".{head_name(inner)}." in f".{name}")
    others = sum(p.numel() for p in trained.values()) - in_head
    folder = recipe.stage_folder("reward") / "model"
    start = f"a {model.config.model_type} of its own, {section.model or 'random weights'}"
    if folder.is_dir():
        start += f", trained in {folder}"
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return OwnModelFacts(
        RoleFacts(
            "reward",
            start,
            recipe.adapter("reward").r if adapted else None,
            sum(isinstance(layer, LoraLayer) for layer in model.modules()),
            others,
            in_head,
            "float32",
            "reward",
        ),
        positions if isinstance(positions, int) else None,
    )
