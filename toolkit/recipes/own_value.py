"""The value role on a base of its own: the section `value_model`, or a copy of the reward model that a stage trains."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig

from toolkit.errors import RecipeError
from toolkit.models import SharedBase, ValueModel, load_value_model, load_weights
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.sections import BaseSection


def copies_reward_model(recipe: Recipe) -> bool:
    """Whether the value role starts as a copy of a reward model that has a base of its own."""
    return recipe.start.value == "reward" and "reward_model" in recipe.values


def has_own_value(recipe: Recipe) -> bool:
    """Whether the value role has a base of its own."""
    return recipe.value_model is not None or copies_reward_model(recipe)


def place_value_model(recipe: Recipe, roles: SharedBase) -> str:
    """Put the value role on its own base; where `roles` are on the meta device, names and shapes alone.

    Returns:
        Where it starts, in words.

    Raises:
        ModelError: it cannot be had, or its tokens are not the policy's.
        AdapterError: a saved value role does not fit it.
        RecipeError: it is to be a copy, and the reward stage has not run.
    """
    start = recipe.start.value
    if copies_reward_model(recipe):
        roles.place_value(_copy_of_reward(recipe, roles))
        return "on a base of its own, a copy of the reward model"
    section = recipe.value_model
    assert section is not None
    roles.place_value(_made(recipe, roles, section, section.model, adapted="value"))
    if start is None:
        return "on a base of its own"
    load_weights(roles, "value", Path(start).expanduser())
    return f"on a base of its own, from {start}"


def _copy_of_reward(recipe: Recipe, roles: SharedBase) -> ValueModel:
    section, folder = recipe.reward_model, recipe.stage_folder("reward") / "model"
    adapted = "reward" in recipe.values.get("adapters", {})
    if roles.device.type == "meta":
        return _made(recipe, roles, section, section.model, adapted="reward" if adapted else "value")
    if not folder.is_dir():
        raise RecipeError(f"{folder} is missing: the reward stage has to train the reward model first.")
    if not adapted:
        return _made(recipe, roles, section, str(folder), adapted="value")
    made = _made(recipe, roles, section, section.model, adapted="reward")
    made.load(load_file(folder / SAFETENSORS_WEIGHTS_NAME), folder)
    return made


def _made(recipe: Recipe, roles: SharedBase, section: BaseSection, path: str | None, *, adapted: str) -> ValueModel:
    """`adapted` is the role whose section of `adapters`, if there is one, gives the LoRA configuration."""
    arguments: dict[str, Any] = asdict(section)
    config, quantization = arguments.pop("config"), arguments.pop("quantization")
    del arguments["model"]
    if path is not None:
        config = None
    elif config is not None:  # the embeddings of a base may have more rows than its tokenizer has tokens
        config = {"vocab_size": roles.config.vocab_size, **config}
    return load_value_model(
        path,
        recipe.tokenizer,
        config=config,
        lora=recipe.adapter(adapted) if adapted in recipe.values.get("adapters", {}) else None,
        head_init=recipe.value_head.init,
        head_bias=recipe.value_head.bias,
        quantization=None if quantization is None else BitsAndBytesConfig(**quantization),
        device=roles.device,
        **arguments,
    )
