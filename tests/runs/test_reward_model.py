"""The section `reward_model`: what is refused, what a check finds, and whole runs."""

import json

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, OPTConfig, OPTForCausalLM, OPTModel

from tests.tiny_runs import PAIRS, byte_tokenizer, chat_recipe, texts
from toolkit import recipes
from toolkit.errors import RecipeError
from toolkit.models import Sequences, value_after_response
from toolkit.rewards import RewardModel, score_with
from toolkit.runs import build, stages
from toolkit.runs.check import check

BERT = {"config": {"model_type": "bert", "hidden_size": 64}}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OWN = {"kind": "model"}
LORA = {"r": 4, "target_modules": "all-linear"}
WITHOUT = {"policy": LORA, "value": LORA}
SMALL = (
    "sft.max_steps=2", "reward.max_steps=2", "ppo.max_steps=2", "ppo.per_device_train_batch_size=8", "ppo.eval_steps=1",
    "data.validation_size=8", "data.test_size=8", "base.config.n_layer=1", "ppo.num_ppo_epochs=1",
    "ppo.logging_steps=1", "ppo.response_length=6",
)  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward_model": {}}, "reward_model — exactly one of model (a checkpoint) and config (random weights)"),
        ({"reward_model": {**BERT, "model": "m"}}, "reward_model — exactly one of model"),
        (
            {"reward_model": {**BERT, "quantisation": NF4}},
            "reward_model.quantisation — section reward_model has no such field. Did you mean quantization?",
        ),
        (
            {"reward_model": {"model": "m", "quantization": NF4}, "adapters": WITHOUT},
            "adapters.reward — is missing: 4-bit weights have no gradients, and so need an adapter.",
        ),
        (
            {"reward_model": {"model": "m", "quantization": {"load_in_4bits": True}}},
            "reward_model.quantization.load_in_4bits — BitsAndBytesConfig",
        ),
        (
            {"reward_model": {"model": "m", "dtype": "bfloat16"}, "adapters": WITHOUT},
            "reward_model.dtype — float32 is needed where all weights are trained, got bfloat16",
        ),
        ({"reward_model": {**BERT, "quantization": NF4}}, "reward_model.quantization — would have no effect: random"),
        (
            {"reward_model": BERT},
            "adapters.reward — would leave random weights (reward_model.config) as they are.",
        ),
        ({"reward_model": BERT, "reward": None}, "reward_model — would have no effect: there is no section reward"),
        ({"reward_model": {"model": "m"}}, "scorer.kind — adapter reads the reward role, and the reward stage trains"),
        (
            {
                "reward_model": {"model": "m"},
                "scorer": {"kind": "sum", "parts": {"a": OWN, "b": {"kind": "adapter"}}},
            },
            "scorer.kind — adapter reads the reward role, and the reward stage trains",
        ),
        (
            {"reward_model": {"model": "m"}, "scorer": {**OWN, "dtype": "float32"}},
            "scorer.dtype — would have no effect: no model is named, and the section reward_model describes",
        ),
        (
            {"scorer": {**OWN, "model": "m", "reads": "tokens", "prompt_column": "p"}},
            "scorer.prompt_column — would have no effect: the policy's own tokens are read.",
        ),
        (
            {"reward_model": {"model": "m"}, "scorer": OWN, "start": {"value": "reward"}},
            "adapters.value — would have no effect: the value role starts with the adapter of the reward. "
            "Take it away: adapters.value=null.",
        ),
        (
            {
                "reward_model": {**BERT, "dtype": "float32"},
                "reward_head": {"num_labels": 3},
                "adapters": WITHOUT,
                "scorer": {**OWN, "class_column": "c"},
                "start": {"value": "reward"},
            },
            "start.value — is reward, whose head has several outputs, and a value is one number.",
        ),
        (
            {"scorer": {"kind": "sum", "parts": {"own": OWN}}},
            "scorer.parts.own.model — belongs to kind: model, and is needed there",
        ),
    ],
)
def test_problems(sections, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        chat_recipe(tmp_path, "m", **sections)
    assert message in str(error.value)


def test_what_needs_the_stage(tmp_path):
    own = {"reward_model": {"model": "m"}, "scorer": OWN}
    assert chat_recipe(tmp_path, "m", **own).plan.needs("ppo") == ["reward"]
    rule = {"rule": {"kind": "function", "function": "statistics:fmean"}, "own": OWN}
    recipe = chat_recipe(tmp_path, "m", **own | {"scorer": {"kind": "sum", "parts": rule}})
    assert recipe.plan.needs("ppo") == ["reward"]
    other = chat_recipe(tmp_path, "m", **own | {"scorer": {**OWN, "model": "x"}})
    assert other.plan.needs("ppo") == []
    both = {"kind": "sum", "parts": {"saved": {"kind": "adapter"}, "own": OWN}}
    recipe = chat_recipe(tmp_path, "m", **own | {"scorer": both, "start": {"reward": "x"}})
    assert recipe.plan.needs("ppo") == ["reward"]
    seed = recipes.load("doubling_seed")
    # The model has nothing to do with the base, which need not be pretrained for it.
    assert seed.plan.needs("reward") == [] and seed.plan.needs("ppo") == ["sft", "reward"]
    with pytest.raises(RecipeError, match="the reward stage has to train the reward model first"):
        build.make_reward(recipes.load("doubling_seed", runs_dir=tmp_path), None, {"reward": 0}, 8)
    # A stage's precision is that of the model that it trains.
    half = chat_recipe(
        tmp_path, "m", "base.dtype=bfloat16", **own | {"reward_model": {"model": "m", "dtype": "float32"}}
    )
    assert not half.stage_config("reward").bf16 and half.stage_config("ppo").bf16
    assert "reward_model.dtype is float32" in recipes.show(half)


def test_the_figures_of_the_seed():
    recipe = recipes.load("doubling_seed")
    ppo = recipe.stage_config("ppo")
    assert (ppo.gamma, ppo.lam, ppo.vf_coef, ppo.response_length) == (0.95, 1.0, 0.1, 25)
    assert ppo.kl_coef == 0.4  # there 0.2, with which some runs end where the reward pays for mixed styles
    assert (ppo.cliprange, ppo.value, ppo.kl_estimator, ppo.kl_target) == (0.2, "shared", "k1", None)
    assert recipe.scorer.class_score == "logit" and recipe.values["reward_head"] == {"num_labels": 4}
    # 4 × (4·(64²+64) + 2·(64²+64) + 4·64) layers, 42 + 128 + 2 embeddings of 64 and their norm, a pooler of 64²+64.
    layers = 4 * (4 * (64**2 + 64) + 2 * (64**2 + 64) + 4 * 64)
    embeddings, pooler, head = (42 + 128 + 2) * 64 + 2 * 64, 64**2 + 64, 4 * 65
    reward = next(role for role in check(recipe).roles if role.role == "reward")
    assert reward.adapter_parameters == layers + embeddings + pooler and reward.head_parameters == head
    assert reward.parameters == layers + embeddings + pooler + head and reward.rank is None
    assert str(reward).startswith("a bert of its own, random weights; all ")


def test_a_check_finds_what_does_not_fit(checkpoint, tmp_path):
    def problems(scorer=OWN, **own):
        return texts(check(chat_recipe(tmp_path, checkpoint, reward_model=own, scorer=scorer, adapters=WITHOUT)))

    config = {"model_type": "bert", "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
    assert problems(dtype="float32", config=config) == ()
    short = problems(dtype="float32", config={**config, "max_position_embeddings": 16})
    assert [one.partition(" comes to ")[0] for one in sorted(short)] == [
        "ppo — the longest prompt with ppo.response_length",
        "reward — the longest row",
    ]
    assert all("and reward_model has positions for 16" in one for one in short)
    classes = problems({**OWN, "class_column": "messages"}, dtype="float32", config=config)
    assert classes == (
        "scorer.class_column — the model of section reward_model has 1 output(s) and class_column is "
        "'messages': a score needs one output and no class, classes need the column that names the wanted one, or "
        "wanted_class for all rows.",
    )
    (missing,) = problems(dtype="float32", model="no/where")
    assert missing.startswith("reward_model.model — no checkpoint could be loaded from")


def test_the_seed_demo_from_nothing(tmp_path):
    recipe = recipes.load("doubling_seed", *SMALL, runs_dir=tmp_path)
    result = stages.run(recipe, "reward")
    assert result["after"]["rows"] == 8 and len(result["after"]["accuracy_ci"]) == 2
    stages.run(recipe, "sft")
    stages.run(recipe, "ppo")
    done = json.loads((recipe.stage_folder("ppo") / "result.json").read_text())
    trained = AutoModelForSequenceClassification.from_pretrained(recipe.stage_folder("reward") / "model").eval()
    samples = [json.loads(line) for line in (recipe.stage_folder("ppo") / "samples.jsonl").read_text().splitlines()]
    rows = recipe.task.prompts("test")
    assert done["after"]["score"] == pytest.approx(sum(s["after_score"] for s in samples) / len(samples), abs=1e-4)
    # The score is the raw logit of the class that the prompt names.
    assert len(samples) == len(rows) == 8
    seen = rows[0]["input_ids"]
    reward = build.make_reward(recipe, None, {"reward": 0}, 8)
    assert isinstance(reward, RewardModel) and reward.reads == "tokens" and reward.batch_size == 128
    asked = _rollout(seen, [5, 6, 2], {"style": [rows[0]["style"]]})
    with torch.no_grad():
        logits = trained(torch.tensor([[*seen, 5, 6, 2]])).logits[0]
    torch.testing.assert_close(score_with(reward, asked)[0], logits[rows[0]["style"]], rtol=1e-5, atol=1e-6)
    assert f"trained in {recipe.stage_folder('reward')}" in str(check(recipe))


def _rollout(prompt, response, columns):
    from toolkit.data import Rollout

    return Rollout(["-"], ["-"], [prompt], [response], [True], columns)


@pytest.fixture(scope="module")
def opts(tmp_path_factory):
    """Two OPTs with one tokenizer whose bos is its eos: one as OPT-350M, projected, and a smaller one."""
    folder, tokenizer = tmp_path_factory.mktemp("opts"), byte_tokenizer()
    tokenizer.pad_token, tokenizer.bos_token = "<pad>", "</s>"
    common = {
        "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2, "ffn_dim": 64,
        "num_attention_heads": 4, "max_position_embeddings": 512, "num_hidden_layers": 2, "init_std": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    projected = OPTConfig(hidden_size=32, word_embed_proj_dim=16, do_layer_norm_before=False, **common)
    OPTForCausalLM(projected).save_pretrained(folder / "actor")
    OPTModel(OPTConfig(hidden_size=32, word_embed_proj_dim=32, **common)).save_pretrained(folder / "small")
    for name in ("actor", "small"):
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("whole", [True, False])
def test_an_opt_of_its_own_under_a_projected_one(whole, opts, tmp_path):
    base = {"model": str(opts / "actor"), "dtype": "float32"}
    own = {"model": str(opts / ("small" if whole else "actor")), "dtype": "float32"}
    adapters = {"policy": LORA} | ({} if whole else {"reward": LORA})
    recipe = chat_recipe(
        tmp_path, "", base=base, reward_model=own, scorer=OWN, adapters=adapters, start={"value": "reward"}
    )
    assert recipe.plan.needs("ppo") == ["reward"]
    found = check(recipe)
    assert not texts(found), texts(found)
    reward, value = (next(role for role in found.roles if role.role == name) for name in ("reward", "value"))
    assert (reward.rank is None) == whole and reward.parameters > 0
    assert value.parameters == reward.parameters and "a copy of the reward model" in value.start
    with pytest.raises(RecipeError, match="model is missing: the reward stage has to train the reward model first"):
        build.placed_roles(recipe, "ppo")
    stages.run(recipe, "reward")
    stages.run(recipe, "ppo")
    folder = recipe.stage_folder("reward") / "model"
    assert (folder / ("model.safetensors" if whole else "adapter_model.safetensors")).is_file()
    prompt, response = [2, 40, 41], [50, 51, 2]
    scores = score_with(build.make_reward(recipe, None, {"reward": 0}, 8), _rollout(prompt, response, {}))
    if not whole:
        from peft import AutoPeftModelForSequenceClassification as Auto

        plain = Auto.from_pretrained(folder, num_labels=1).eval().merge_and_unload()
    else:
        plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        states = plain.model(torch.tensor([[*prompt, *response]])).last_hidden_state
        assert states.shape[-1] == (32 if whole else 16)
        torch.testing.assert_close(scores[0], plain.score(states[0, -1])[0], rtol=1e-4, atol=1e-5)
    # Beyond what 99 in 100 held-out responses scored it judges what it has hardly met; of a few that is not known.
    pairs = recipe.stage_folder("reward") / "scores.jsonl"
    few = [json.loads(line) for line in pairs.read_text().splitlines()]
    given, made = (
        [row[f"{side}_score"] for row in few for side in ("chosen", "rejected")],
        build.make_reward(recipe, None, {"reward": 0}, 8),
    )
    assert few and made.high_score is None and made.mean_score == pytest.approx(sum(given) / len(given))
    many = [{**few[0], "chosen_score": float(i), "rejected_score": -1.0} for i in range(101)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in many))
    made = build.make_reward(recipe, None, {"reward": 0}, 8)
    assert (made.high_score, made.mean_score) == pytest.approx((97.99, (50 - 1) / 2))
    # The critic begins as the reward: before it is trained, what it says after a response is the response's score.
    roles, _ = build.placed_roles(recipe, "ppo")
    after = value_after_response(roles, Sequences.from_ids([prompt], [response], pad_token_id=0))
    torch.testing.assert_close(after.detach(), scores, rtol=1e-4, atol=1e-5)
    saved = recipe.stage_folder("ppo") / "value" / ("model.safetensors" if whole else "adapter_model.safetensors")
    started = load_file(folder / saved.name)
    assert any(not torch.equal(tensor, started[name]) for name, tensor in load_file(saved).items())  # it has learnt
    if whole:
        # The trained model scores another run, too, by the tokens or by its own text.
        named = {"kind": "model", "model": str(folder), "reads": "tokens", "dtype": "float32"}
        other = chat_recipe(tmp_path, "", base=base, scorer=named, reward=None, adapters=WITHOUT, name="other")
        assert not texts(check(other))
        again = score_with(build.make_reward(other, None, {"reward": 0}, 8), _rollout(prompt, response, {}))
        torch.testing.assert_close(again, scores)


def test_the_recipe_of_two_opts(opts, tmp_path):
    pairs = [f"data.{split}={PAIRS}" for split in ("train", "validation")]
    small = [
        f"base.model={opts / 'actor'}", f"reward_model.model={opts / 'small'}",
        "base.dtype=float32", "adapters.policy.r=4", "reward.max_steps=1", "reward.gradient_accumulation_steps=1",
        "ppo.max_steps=1", "ppo.per_device_train_batch_size=2", "ppo.gradient_accumulation_steps=1",
        "ppo.response_length=4", "ppo.num_ppo_epochs=1", "data.max_validation_rows=2", "data.parts={reward: 3}",
        "reward.gradient_checkpointing=false", "ppo.gradient_checkpointing=false",
    ]  # fmt: skip
    recipe = recipes.load("opt_hh_rlhf", *pairs, *small, runs_dir=tmp_path)
    assert not texts(check(recipe))
    stages.run(recipe, "reward")
    stages.run(recipe, "ppo")
    folder = recipe.stage_folder("ppo") / "policy"
    assert set(PeftConfig.from_pretrained(folder).target_modules) == {
        "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2",
    }  # fmt: skip
    shipped = recipes.load("opt_hh_rlhf").values["adapters"]["policy"]
    assert (shipped["r"], shipped["lora_alpha"]) == (128, 128)


def test_a_reward_model_with_another_tokenizer_is_refused(opts, checkpoint, tmp_path):
    own = {"model": str(opts / "small"), "dtype": "float32"}
    recipe = chat_recipe(tmp_path, checkpoint, reward_model=own, scorer=OWN, adapters=WITHOUT)
    changed = byte_tokenizer()
    changed.add_tokens(["<new>"])
    assert not texts(check(recipe))  # bos differs, and every token has the same id
    changed.save_pretrained(opts / "small")
    try:
        (problem,) = texts(check(recipe))
    finally:
        byte_tokenizer().save_pretrained(opts / "small")
    assert (
        problem.startswith("reward_model.model — ") and "has another tokenizer than base (1 entries differ)" in problem
    )
