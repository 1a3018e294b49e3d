from dataclasses import dataclass, field
from enum import Enum

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes.helpers import chat_recipe
from toolkit import recipes
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.show import as_yaml, owner_defaults, show


@pytest.mark.parametrize("name", recipes.names())
def test_reads_back_as_the_recipe(name):
    recipe = recipes.load(name)
    assert yaml.safe_load(show(recipe)) == recipe.values


def test_each_value_is_beside_its_owners_default():
    text = show(recipes.load("doubling", "ppo.kl_coef=0.05", "adapters.policy.r=8"))
    lines = [line.strip() for line in text.splitlines()]
    assert "seed: 0  # the default" in lines
    assert "dtype: float32  # default: bfloat16" in lines  # our section
    assert "n_layer: 4  # default: 12" in lines  # GPT2Config
    assert "r: 8  # the default" in lines and "lora_alpha: 32  # default: 8" in lines  # LoraConfig
    assert "learning_rate: 0.004  # default: 2.0e-05" in lines  # SFTConfig
    assert "kl_coef: 0.05  # the default" in lines and "response_length: 8  # default: 53" in lines  # TRL's PPOConfig
    assert "eval_strategy: steps  # default: 'no'" in lines
    assert "task: doubling" in lines  # has no default
    assert "about: Doubles" in text or "about: 'Doubles" in text


def test_quantisation_data_and_lists(checkpoint, tmp_path):
    recipe = chat_recipe(
        tmp_path, checkpoint, "adapters.value.target_modules=[q_proj,v_proj]", "reward.lr_scheduler_type=cosine"
    )
    text = show(recipe)
    lines = [line.strip() for line in text.splitlines()]
    assert "load_in_4bit: true  # default: false" in lines
    assert "bnb_4bit_quant_type: nf4  # default: fp4" in lines
    assert "max_validation_rows: 6  # default: null" in lines
    assert "target_modules: [q_proj, v_proj]  # default: null" in lines
    assert f"train: {recipe.values['data']['train']}" in lines
    assert yaml.safe_load(text) == recipe.values


class Colour(Enum):
    RED = "red"


@dataclass
class Owner:
    size: int
    colour: Colour = Colour.RED
    dtype: torch.dtype = torch.bfloat16
    names: set[str] = field(default_factory=lambda: {"b", "a"})
    pairs: tuple[tuple[str, int], ...] = (("a", 1),)
    of_init: int = field(default=3, init=False)


def test_defaults_are_as_yaml_would_hold_them():
    assert owner_defaults(Owner) == {"colour": "red", "dtype": "bfloat16", "names": ["a", "b"], "pairs": [["a", 1]]}


def test_true_is_not_one():
    values = {"base": {"model": "m"}, "data": {"task": "doubling"}, "reward_head": {"num_labels": True}}
    assert "num_labels: true  # default: 1" in show(Recipe("x", values, "x", "runs"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(about=st.text(st.characters(codec="utf-8")), value=VALUES)
def test_any_value_reads_back(about, value):
    values = {
        "about": about,
        "base": {"config": {"model_type": "gpt2", "anything": value}},
        "data": {"task": "doubling"},
    }
    assert yaml.safe_load(show(Recipe("x", values, "x", "runs"))) == values
    assert "\n" not in as_yaml(value)
