from dataclasses import dataclass, field
from enum import Enum

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_runs import chat_recipe
from toolkit import recipes
from toolkit.errors import printable
from toolkit.runs.differences import changes
from toolkit.spec.recipe import Recipe
from toolkit.spec.show import as_yaml, owner_defaults, show


@pytest.mark.parametrize("name", recipes.names())
def test_reads_back_as_the_recipe(name):
    recipe = recipes.load(name)
    assert yaml.safe_load(show(recipe)) == recipe.values


@pytest.mark.parametrize("text", ["\u202eabc\u2066", "a\nb", "Größe 大", "\x1b[2J"])
def test_text_that_a_terminal_would_obey_is_escaped(text):
    shown = as_yaml(text)
    assert printable(shown) == shown and "\n" not in shown and yaml.safe_load(shown) == text


def test_each_value_is_beside_its_owners_default():
    text = show(recipes.load("doubling", "ppo.kl_coef=0.05", "adapters.policy.r=8"))
    lines = [line.strip() for line in text.splitlines()]
    assert "seed: 0  # the default" in lines
    assert "dtype: float32  # default: auto" in lines  # our section
    assert "n_layer: 4  # default: 12" in lines  # GPT2Config
    assert "r: 8  # the default" in lines and "lora_alpha: 32  # default: 8" in lines  # LoraConfig
    assert "learning_rate: 0.004  # default: 2.0e-05" in lines  # SFTConfig
    assert "kl_coef: 0.05  # the default" in lines and "response_length: 8  # default: 53" in lines  # TRL's PPOConfig
    assert "eval_strategy: steps  # default: 'no'" in lines
    assert "task: doubling" in lines  # has no default
    assert "about: Doubles" in text or "about: 'Doubles" in text


@pytest.mark.parametrize(("gpu", "dtype"), [(False, "bfloat16"), (True, "float16"), (True, "float32")])
def test_what_the_toolkit_sets_is_shown_with_the_reason(gpu, dtype, checkpoint, tmp_path, monkeypatch):
    recipe = chat_recipe(tmp_path, checkpoint, f"base.dtype={dtype}", reward={}, sft=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)  # not while it is loaded, which would use a GPU
    text = show(recipe)
    stages = dict(section.split(":", 1) for section in ("\n" + text).split("\n\n")[1:])
    cpu = ["  # use_cpu: true  # default: false; set by the toolkit: no GPU is here"]
    precision = {
        "bfloat16": ["  # bf16: true  # default: null; set by the toolkit: base.dtype is bfloat16"],
        "float16": [
            "  # bf16: false  # default: null; set by the toolkit: base.dtype is float16",
            "  # fp16: true  # default: false; set by the toolkit: base.dtype is float16",
        ],
        "float32": ["  # bf16: false  # default: null; set by the toolkit: base.dtype is float32"],
    }[dtype]
    ours = {name: [line for line in body.splitlines() if "set by the toolkit" in line] for name, body in stages.items()}
    assert ours["ppo"] == ours["reward"] == [*(() if gpu else cpu), *precision]
    assert not any(ours[name] for name in ("base", "data", "adapters"))
    assert yaml.safe_load(text) == recipe.values


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_what_is_shown_is_what_the_stage_gets(stage, monkeypatch):
    """Read as if the comments were lines: the stage's object has those very values."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = recipes.load("doubling")
    shown = yaml.safe_load(show(recipe).replace("\n  # ", "\n  "))
    config = recipe.stage_config(stage)
    assert set(shown[stage]) > set(recipe.values[stage])
    assert {name: getattr(config, name) for name in shown[stage]} == shown[stage]


def test_a_stage_is_reported_under_the_name_of_its_run(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.spec.stage.get_available_reporting_integrations", lambda: ["wandb"])
    told = "  # run_name: chat-ppo  # default: null; set by the toolkit: the run and the stage"
    reported = chat_recipe(tmp_path, checkpoint, "ppo.report_to=wandb")
    assert told in show(reported).splitlines() and reported.stage_config("ppo").run_name == "chat-ppo"
    named = chat_recipe(tmp_path, checkpoint, "ppo.report_to=wandb", "ppo.run_name=mine")
    assert named.stage_config("ppo").run_name == "mine" and reported.stage_config("reward").run_name is None
    (tmp_path / "runs" / "chat").mkdir(parents=True)
    (tmp_path / "runs" / "chat" / "recipe.yaml").write_text(chat_recipe(tmp_path, checkpoint).to_yaml())
    assert not changes(reported, "ppo", reported.folder)  # what was begun without it goes on


def test_what_the_recipe_sets_is_not_set_again(checkpoint, tmp_path):
    keys = ("ppo.bf16=false", "ppo.use_cpu=true", "base.dtype=float32")
    lines = show(chat_recipe(tmp_path, checkpoint, *keys, reward=None, start={"reward": "x"})).splitlines()
    assert not [line for line in lines if "set by the toolkit" in line]
    assert "  bf16: false  # default: null" in lines


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
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    pairs: tuple[tuple[str, int], ...] = (("a", 1),)
    of_init: int = field(default=3, init=False)


def test_defaults_are_as_yaml_would_hold_them():
    assert owner_defaults(Owner) == {"colour": "red", "names": ["a", "b"], "pairs": [["a", 1]]}


def test_the_models_of_other_roles_are_shown_like_the_base():
    values = {
        "base": {"model": "m"},
        "data": {"task": "doubling"},
        "value_model": {"config": {"model_type": "gpt2", "n_layer": 2}, "quantization": {"load_in_4bit": True}},
        "scorer": {"kind": "model", "model": "m", "quantization": {"load_in_4bit": True}},
    }
    text = show(Recipe("x", values, "x", "runs"))
    assert "n_layer: 2  # default: 12" in text and text.count("load_in_4bit: true  # default: false") == 2


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
