"""Recipes whose value role has a base, or a head, of its own."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_runs import REPOSITORY, byte_tokenizer, chat_recipe, command_here, save_llama, texts
from toolkit import recipes
from toolkit.errors import RecipeError
from toolkit.models import save_role
from toolkit.runs import build
from toolkit.runs.check import check
from toolkit.spec.sources import lora_config

ADAPTERS = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "reward")}
UNQUANTISED = {"quantization": None, "dtype": "float32"}
PPO = {
    "max_steps": 2, "per_device_train_batch_size": 2, "response_length": 4, "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip
SMALLER = {"hidden_size": 32, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The policy's base and a smaller one of the same tokens."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return save_llama(folder / "large", byte_tokenizer()), save_llama(folder / "small", byte_tokenizer(), **SMALLER)


def made(folder, checkpoint, **sections):
    base = {"model": str(checkpoint), **UNQUANTISED}
    return chat_recipe(folder, checkpoint, **{"base": base, "adapters": ADAPTERS, "ppo": PPO, **sections})


def value(report):
    return next(facts for facts in report.roles if facts.role == "value")


def test_a_check_counts_what_trains(tmp_path, checkpoints):
    large, small = checkpoints
    tensors = load_file(small / "model.safetensors")
    whole = sum(t.numel() for name, t in tensors.items() if name != "lm_head.weight")
    report = check(made(tmp_path, large, value_model={"model": str(small), "dtype": "float32"}))
    assert texts(report) == () and value(report).parameters == whole + 32
    assert f"on a base of its own; all {whole:,} weights + head 32 (float32)" in str(report)
    with_adapter = {**ADAPTERS, "value": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}
    report = check(made(tmp_path, large, value_model={"model": str(small)}, adapters=with_adapter))
    # q: 32 → 32; v: 32 → half of it, since keys and values have half the heads; the head has no bias here.
    assert value(report).parameters == 2 * (64 + 48) + 32 and (value(report).rank, value(report).modules) == (2, 2)
    report = check(made(tmp_path, large, value_model={"model": "nowhere", "dtype": "float32"}))
    assert texts(report)[0].startswith(
        'value_model.model — no checkpoint could be loaded from the folder or hub id "nowhere"'
    )


def test_a_run_with_a_critic_of_random_weights_and_one_that_starts_from_it(tmp_path, checkpoints, monkeypatch):
    large, _ = checkpoints
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 2048}
    chosen = {"value_model": {"config": config, "dtype": "float32"}, "value_head": {"init": "orthogonal", "bias": True}}
    made(tmp_path, large, **chosen, scorer={"kind": "function", "function": "len_reward.py:score"}, reward=None)
    (tmp_path / "len_reward.py").write_text("def score(rollout):\n    return [float(n) for n in rollout.lengths]\n")
    done = command_here("ppo", "chat.yaml", "ppo.value_pooling=response_mean", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "chat" / "ppo" / "value"
    assert json.loads((folder / "role.json").read_text())["role"] == "value"
    saved = load_file(folder / "model.safetensors")
    assert saved["score.bias"].shape == (1,) and saved["transformer.wte.weight"].shape == (259, 16)
    again = [f"start.value={folder}", "value_head=null"]
    done = command_here("check", "chat.yaml", *again, cwd=tmp_path)
    assert done.returncode == 0, done.stdout  # whose head has the bias that it was trained with
    done = command_here("check", "chat.yaml", *again, "value_head.bias=true", cwd=tmp_path)
    assert done.returncode == 1 and "value_head" in done.stderr + done.stdout and "Traceback" not in done.stderr
    recipe = recipes.load("chat.yaml", "ppo.value_pooling=response_mean", runs_dir="runs")
    assert "value_model" in recipe.values and texts(check(recipe)) == ()
    done = command_here("eval", "chat", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_trained_critic_comes_back(tmp_path, checkpoints):
    large, small = checkpoints
    sections = {
        "value_model": {"model": str(small), "dtype": "float32"},
        "scorer": {"kind": "function", "function": "builtins:len"},
    }

    def rewards(rollout):
        return [float(n) for n in rollout.lengths]

    trainer = made(tmp_path, large, **sections, reward=None).ppo_trainer(rewards)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    recipe = made(tmp_path, large, **sections, reward=None, start={"value": str(tmp_path / "saved" / "value")})
    assert texts(check(recipe)) == ()
    other = recipe.ppo_trainer(rewards, overwrite=True)
    saved = load_file(tmp_path / "saved" / "value" / "model.safetensors")
    assert (other.roles.value_model.head.weight == saved["score.weight"]).all()
    assert (other.roles.value_model.backbone.norm.weight == saved["model.norm.weight"]).all()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"value_model": {"model": "m", "dtype": "bfloat16"}},
            "value_model.dtype — float32 is needed where all weights are trained, got bf",
        ),
        (
            {"value_model": {"config": {"model_type": "gpt2"}}, "adapters": {**ADAPTERS, "value": {"r": 2}}},
            "adapters.value — would leave random weights (value_model.config) as they are. Remove it.",
        ),
        (
            {"value_model": {"model": "m", "dtype": "float32"}, "ppo": {**PPO, "value": "shared"}},
            "value_model — would have no effect: ppo.value is shared",
        ),
        (
            {"value_model": {"model": "m", "dtype": "float32"}, "ppo": {**PPO, "loop": "trl"}},
            "ppo.loop — trl runs the value role on the shared base, not on value_model.",
        ),
        (
            {"value_model": {"model": "m", "dtype": "float32"}, "start": {"value": "reward"}},
            "start.value — is reward, whose base is not that of value_model. Remove one of them.",
        ),
        ({"value_model": {"model": "m", "dtype": "float32"}, "ppo": None}, "value_model — would have no effect: there"),
        (
            {"value_head": {"init": "zero"}},
            "value_head.init — 'normal' or 'orthogonal' or 'zeros' is needed, got 'zero'.",
        ),
        (
            {"value_head": {"bias": True}, "start": {"value": "reward"}},
            "value_head — would have no effect: the head starts as start.value says. Take it away: value_head=null.",
        ),
    ],
)
def test_problems(sections, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        made(tmp_path, "m", **sections)
    assert message in str(error.value).replace("bfloat16", "bf")


def test_the_figures_of_actor_critic_lora():
    """PaLM-rlhf-pytorch's defaults, read from its trainer."""
    recipe = recipes.load("actor_critic_lora")
    for role in ("policy", "value"):
        adapter = lora_config(recipe.values["adapters"][role])
        assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (8, 8, 0)
    config = recipe.stage_config("ppo")
    assert (config.learning_rate, config.value_learning_rate, config.adam_epsilon, config.value_adam_epsilon) == (
        1e-4, 1e-4, 1e-7, 1e-7,
    )  # fmt: skip
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.9, 0.999, 0, 0)
    assert (config.cliprange, config.cliprange_value, config.entropy_coef, config.old_policy_kl_coef) == (
        0.2, 0.4, 0.01, 0.1,
    )  # fmt: skip
    assert (config.value_pooling, config.num_ppo_epochs, config.kl_coef) == ("response_mean", 1, 0.0)
    assert config.update_batch_size // config.num_mini_batches == 16 and config.sample_with_replacement
    assert recipe.values["value_head"] == {"init": "orthogonal", "bias": True}


def test_actor_critic_lora_runs_whole_on_a_tiny_llama(tmp_path, checkpoints, stages_here):
    large, small = checkpoints
    pairs = REPOSITORY / "data" / "preferences_example.jsonl"
    settings = [
        f"base.model={large}", "base.quantization=null", "base.dtype=float32", f"data.train={pairs}",
        f"data.validation={pairs}", "data.subset=null", "reward.max_steps=1", "reward.gradient_accumulation_steps=1",
        "ppo.max_steps=1", "ppo.per_device_train_batch_size=4", "ppo.response_length=4", "ppo.num_mini_batches=4",
        "data.max_validation_rows=4", f"value_model.model={small}", "value_model.dtype=float32",
    ]  # fmt: skip
    done = command_here("ppo", "actor_critic_lora", *settings, "--runs-dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = json.loads((tmp_path / "actor_critic_lora/ppo/metrics.jsonl").read_text().splitlines()[0])
    assert line["optimizer_steps"] == 4 and line["entropy"] > 0


@pytest.mark.parametrize("where", ["shared", "separate", "own"])
def test_a_head_starts_as_the_recipe_says(where, tmp_path, checkpoints):
    large, small = checkpoints
    lora = {"r": 2, "target_modules": ["q_proj"]}
    sections = {
        "shared": {"adapters": {"policy": lora}, "ppo": {**PPO, "value": "shared"}},
        "separate": {"adapters": {"policy": lora, "value": lora}},
        "own": {"adapters": {"policy": lora}, "value_model": {"model": str(small), "dtype": "float32"}},
    }[where]
    rule = {"kind": "function", "function": "builtins:len"}
    recipe = made(tmp_path, large, value_head={"init": "zeros"}, scorer=rule, reward=None, **sections)
    roles, _ = build.placed_roles(recipe, "ppo")
    assert not roles.heads["value"].weight.any()


@pytest.mark.parametrize("where", ["shared", "separate"])
def test_a_saved_critic_begins_another_run(where, tmp_path, checkpoints):
    large, _ = checkpoints
    lora = {"r": 2, "target_modules": ["q_proj"]}
    rule = {"scorer": {"kind": "function", "function": "builtins:len"}, "reward": None}
    adapters = {"adapters": {"policy": lora, **({"value": lora} if where == "separate" else {})}}
    first, _ = build.placed_roles(made(tmp_path, large, ppo={**PPO, "value": where}, **adapters, **rule), "ppo")
    folder = save_role(first, "value", tmp_path / "value", pad_token_id=2, base_name="tiny")
    rule |= {"start": {"value": str(folder)}}
    recipe = made(tmp_path, large, ppo={**PPO, "value": where}, adapters={"policy": lora}, **rule)
    assert texts(check(recipe)) == ()
    second, _ = build.placed_roles(recipe, "ppo")
    assert torch.equal(first.heads["value"].weight, second.heads["value"].weight)
    assert second.shares_value == (where == "shared")
    other = {"shared": "separate", "separate": "shared"}[where]
    (problem,) = texts(check(made(tmp_path, large, ppo={**PPO, "value": other}, adapters={"policy": lora}, **rule)))
    assert problem.startswith(f"start.value — {folder}: its value role has ")
    assert problem.endswith(f"and ppo.value is {other}. Set ppo.value={where}.")
