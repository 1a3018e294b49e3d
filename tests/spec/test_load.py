import os
import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path
from re import escape

import accelerate
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from transformers import GraniteConfig, GraniteForCausalLM, TrainingArguments
from typer.testing import CliRunner

from toolkit import recipes
from toolkit.cli import app
from toolkit.errors import RecipeError, RewardError
from toolkit.models import Precision, fast_precision
from toolkit.rewards import WeightedSum, load_function
from toolkit.rewards.function import in_no_file
from toolkit.runs.differences import changes
from toolkit.runs.take_over import take_over
from toolkit.spec import stage as stage_section
from toolkit.spec.shipped import recipe_folder
from toolkit.spec.sources import lora_config
from toolkit.spec.stage import check_stage
from toolkit.trainers.sft import _fitting
from toolkit.trainers.trl_compat import HAS_PPO

MINIMAL = {
    "base": {"model": "some/checkpoint"},
    "data": {"task": "doubling"},
    "adapters": {"policy": {"r": 4}, "value": {"r": 4}, "reward": {"r": 4}},
    "reward": {"max_steps": 1},
    "ppo": {"max_steps": 1},
}


def written(tmp_path, values):
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(values, allow_unicode=True) if isinstance(values, dict) else values, encoding="utf-8"
    )
    return path


def load_changed(tmp_path, **sections):
    return recipes.load(written(tmp_path, {**MINIMAL, **sections}))


@pytest.mark.smoke
@pytest.mark.parametrize("path", sorted(recipe_folder().rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_loads(path):
    recipe = recipes.load(path.stem)
    assert recipe.values["about"] and recipe.folder.name == path.stem
    for stage in ("sft", "reward", "ppo"):
        if stage in recipe.values:
            assert recipe.stage_config(stage).seed == 0
    for role in recipe.values["adapters"]:
        assert lora_config(recipe.values["adapters"][role]).target_modules
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert yaml.safe_load(recipe.to_yaml()) == recipe.values


def test_there_are_recipes():
    assert {"doubling", "smollm2_135m_lora"} <= set(recipes.names())


def test_overrides_and_interpolation():
    recipe = recipes.load("doubling", "seed=3", "ppo.learning_rate=3e-6", "adapters.policy.r=2", run="x", runs_dir="y")
    assert recipe.values["data"]["seed"] == 3 and recipe.seed == 3
    assert recipe.stage_config("ppo").learning_rate == 3e-6
    assert [recipe.stage_config(stage).seed for stage in ("sft", "reward", "ppo")] == [3, 3, 3]
    assert recipe.values["adapters"]["policy"]["r"] == 2
    assert str(recipe.stage_folder("ppo")) == "y/x/ppo"
    assert recipes.load("doubling", "seed=3", "about=s${seed}-${base.dtype}").values["about"] == "s3-float32"


@pytest.mark.parametrize(("value", "left_out"), [("hashtags like #fun", "#fun"), ("#fun", "#fun")])
def test_what_yaml_would_take_for_a_comment_is_refused(value, left_out):
    with pytest.raises(RecipeError, match=f'data.system: override ".*": "{left_out}.*would be a comment of YAML'):
        recipes.load("smollm2_135m_instructions", f"data.system={value}")
    quoted = recipes.load("smollm2_135m_instructions", "data.system='hashtags #fun'", "about=a#b")
    assert quoted.values["data"]["system"] == "hashtags #fun" and quoted.values["about"] == "a#b"


@pytest.mark.parametrize("override", ["ppo.kl_coef=", "start.policy= "])
def test_an_override_without_a_value_is_refused(override):
    with pytest.raises(RecipeError, match='override ".*= ?" has no value. Give one: .* null takes a stage.s key away'):
        recipes.load("doubling", override)
    with pytest.raises(RecipeError, match="ppo.kl_coef — has no value. Give one."):
        recipes.load("doubling", "ppo.kl_coef=???")
    with pytest.raises(RecipeError, match="has no value"):
        recipes.load("doubling", "about='???'")
    with pytest.raises(RecipeError) as refused:
        recipes.load("doubling", "data.system=")  # as the shell leaves data.system=''
    assert """an empty text is "data.system=''" on the command line""" in str(refused.value)


def test_a_seed_that_no_recipe_names_can_be_inserted():
    doubling = recipes.load("doubling").values
    values = {key: value for key, value in doubling.items() if key != "seed"}
    values["data"] = {**doubling["data"], "seed": "${seed}"}
    assert recipes.load(values, run="x").values["data"]["seed"] == recipes.load(values, run="x").seed == 0


def test_nf4_with_double_quantisation_is_the_real_config():
    import torch

    config = recipes.load("smollm2_135m_lora").quantization()
    assert config.load_in_4bit and config.bnb_4bit_use_double_quant and config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_compute_dtype == getattr(torch, fast_precision().dtype)


def test_three_mistakes_one_error(tmp_path):
    with pytest.raises(RecipeError) as error:
        load_changed(
            tmp_path,
            base={"model": "m", "quantization": {"load_in_4bit": True, "bnb_4bit_quant_typ": "nf4"}},
            ppo={"kl_coeff": 0.1, "learning_rate": "fast"},
        )
    text = str(error.value)
    assert "mine.yaml has 3 problems" in text
    assert "base.quantization.bnb_4bit_quant_typ — BitsAndBytesConfig (transformers" in text
    assert "would ignore it without a word). Did you mean bnb_4bit_quant_type?" in text
    owner = f"trl {version('trl')}" if HAS_PPO else f"transformers {version('transformers')}"
    assert f"ppo.kl_coeff — PPOConfig ({owner}) has no such field. Did you mean kl_coef?" in text
    assert "ppo.learning_rate — a number is needed, got 'fast'." in text


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"ppoo": {}}, "ppoo — no such section. Did you mean ppo?"),
        ({"PPO": {}}, "PPO — no such section. Did you mean ppo?"),
        ({"ppo": {"batch_size": 8}}, "ppo.batch_size — would have no effect: a batch is per_device_train_batch_size ×"),
        (
            {"ppo": {"neftune_noise_alpha": 1.0}},
            "ppo.neftune_noise_alpha — would have no effect: the toolkit's PPO loop",
        ),
        ({"sft": {"fsdp": "full_shard"}}, "sft.fsdp — shards a model's weights across processes, and here each holds"),
        ({"ppo": {"deepspeed": "z.json"}}, "ppo.deepspeed — shards a model's weights across processes"),
        ({"ppo": {"output_dir": "x"}}, 'ppo.output_dir — the run folder decides it. Name the run with run="name".'),
        ({"ppo": {"seed": 1}}, "ppo.seed — the recipe's own seed is for all stages."),
        (
            {"report_to": "none"},
            "It is a key of sft, reward, ppo, q: write ppo.report_to.",
        ),
        ({"system": "Be brief."}, "system — no such section. It is a key of data: write data.system."),
        ({"train_size": 8}, "train_size — no such section. It is a key of data: write data.train_size."),
        ({"RUN": "mine"}, "RUN — no such section. It is an argument of the command: --run name."),
        ({"run": "mine"}, "run — no such section. It is an argument of the command: --run name."),
        ({"from_run": "a"}, "from_run — no such section. It is an argument of the command: --from-run name."),
        ({"ppo": {"target_kl": 0.1}}, "Did you mean update_kl_limit? It is the limit itself, 1.5 × target_kl."),
        ({"ppo": {"lr": 0.1}}, "has no such field. Did you mean learning_rate?"),
        ({"ppo": {"learning_rate": -1e-4}}, "ppo.learning_rate — must be 0 or more, got -0.0001."),
        ({"ppo": {"per_device_train_batch_size": 0}}, "ppo.per_device_train_batch_size — must be at least 1, got 0."),
        ({"sft": {"max_steps": 0}}, "sft.max_steps — must be at least 1, or -1 for what num_train_epochs says, got 0."),
        ({"reward": {"save_steps": -3}}, "reward.save_steps — must be positive, got -3."),
        ({"ppo": {"vf_coef": -1.0}}, "ppo.vf_coef — must be 0 or more, got -1.0"),
        (
            {"ppo": {"kl_coef": 0.0, "kl_target": 6.0}},
            "ppo.kl_target — steers by multiplying kl_coef, which starts at 0",
        ),
        (
            {"ppo": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}},
            "reduce_lr_on_plateau follows a metric; PPO schedules by update count",
        ),
        ({"ppo": {"total_episodes": 0}}, "ppo.total_episodes — must be at least 1 or null, got 0"),
        ({"adapters": {"policy": {"lora_alpha": -1}}}, "adapters.policy.lora_alpha — must be positive, got -1."),
        ({"ppo": {"temperature": 1e-300}}, "ppo.temperature — must be at least 0.0001, got 1e-300"),
        ({"ppo": {"value": "shared"}}, "adapters.value — would have no effect: ppo.value is shared"),
        (
            {"ppo": {"value": "shared"}, "start": {"value": "reward"}},
            "start.value — is reward, an adapter of its own, and with ppo.value: shared the value role has none.",
        ),
        (
            {"ppo": {"value": "shared"}, "start": {"value": "x"}, "value_head": {"bias": True}},
            "value_head — would have no effect: the head starts as start.value says. Take it away: value_head=null.",
        ),
        ({"ppo": {"whiten_rewards": "yes"}}, "ppo.whiten_rewards — true or false is needed, got 'yes'."),
        ({"ppo": []}, "ppo — a section with keys is needed, got []."),
        ({"adapters": {"critic": {"r": 4}, **MINIMAL["adapters"]}}, "adapters.critic — no such role. Known: policy"),
        ({"adapters": {**MINIMAL["adapters"], "policy": {"rank": 4}}}, "adapters.policy.rank — LoraConfig (peft"),
        ({"adapters": {"value": {"r": 4}, "reward": {"r": 4}}}, "adapters.policy — is missing: PPO trains it."),
        ({"adapters": {"policy": {"r": 4}, "reward": {"r": 4}}}, "adapters.value — is missing: ppo.value is separate."),
        (
            {"adapters": {"policy": {"r": 4}, "value": {"r": 4}}},
            "adapters.reward — is missing: the reward stage trains it.",
        ),
        ({"base": {}}, "base — exactly one of model (a checkpoint) and config (random weights) is needed."),
        (
            {"base": {"model": "m", "config": {"model_type": "gpt2"}}},
            "is needed, and both are given. Leave one out: base.config=null or base.model=null, or name a recipe for "
            "a checkpoint (toolkit recipes).",
        ),
        ({"base": {"config": {"model_type": "gpt2"}}}, "sft — this section is missing: a base with random weights"),
        (
            {"base": {"config": {"model_type": "gpt2"}, "dtype": "bfloat16"}},
            "base.dtype — float32 is needed where all weights are trained, got bfloat16: small steps would round to",
        ),
        (
            {"base": {"config": {"model_type": "gpt2"}, "revision": "main"}},
            "base.revision — would have no effect: random weights come from no repository. Remove it.",
        ),
        (
            {"base": {"config": {"model_type": "gpt2"}}, "sft": {}, "data": {"task": "prompts", "train": "x.txt"}},
            "base.config — data.task prompts needs a checkpoint's tokenizer, and random weights have none.",
        ),
        (
            {
                "base": {"model": "m", "quantization": {"load_in_4bit": True}},
                "sft": {},
                "ppo": {"max_steps": 1},
                "adapters": {"value": {"r": 4}, "reward": {"r": 4}},
                "start": {"policy": "x"},
            },
            "Full fine-tuning of the base is refused: 4-bit weights have no gradients.",
        ),
        (
            {"base": {"model": "m", "dtype": "int4"}},
            "base.dtype — 'auto' or 'bfloat16' or 'float16' or 'float32' is needed",
        ),
        (
            {"base": {"model": "m", "quantisation": {}}},
            "base.quantisation — section base has no such field. Did you mean quantization?",
        ),
        (
            {"data": {"task": "poetry"}},
            "data.task — one of doubling, instructions, preferences, demonstrations, labelled, prompts, rated is "
            "needed, got 'poetry'.",
        ),
        (
            {"data": {"task": "doubling", "tset_size": 3}},
            "data.tset_size — section doubling has no such field. Did you mean test_size?",
        ),
        ({"reward_data": {"task": "doubling", "sed": 1}}, "reward_data.sed — section doubling has no such field."),
        ({"sft_data": {"task": "doubling"}}, "sft_data — would have no effect: there is no section sft."),
        ({"ppo": None, "start": {"policy": "x"}}, "start.policy — would have no effect: no stage begins with it."),
        ({"scorer": {"kind": "length"}, "start": {"reward": "x"}}, "start.reward — would have no effect: no stage"),
        ({"adapters": {"q": {"r": 4}}}, "adapters.q — would have no effect: there is no section q."),
        ({"sft": {"eval_steps": 5}}, "sft.eval_steps — would have no effect: nothing is evaluated on the way without"),
        ({"q": {}, "collect": {}}, "adapters.q — is missing: the q stage trains it."),
        ({"q": {}}, "q — has nothing to learn from: give rated responses (q_data), or sample them (collect)."),
        (
            {"q": {}, "collect": {}, "q_data": {"task": "rated", "train": "x.jsonl"}},
            "collect — would have no effect: q_",
        ),
        ({"q": {"bound_bias": 1.0}}, "q.bound_bias — would have no effect without bound: sigmoid."),
        (
            {"q": {"decoding_temperature": 0.5}},
            "q.decoding_temperature — would have no effect without decoding: sample.",
        ),
        ({"q": {"bound": "none", "highest_return": 2.0}}, "q.highest_return — would have no effect without bound: s"),
        ({"q": {"gama": 1}}, "q.gama — QConfig (transformers"),
        ({"q": {"gama": 1}}, "has no such field. Did you mean gamma?"),
        ({"sft": {"resume_from_checkpoint": "x"}}, "sft.resume_from_checkpoint — to resume is no part of a recipe."),
        ({"reward": {"hub_token": "hf_x"}}, "reward.hub_token — it is a secret, and the recipe is saved with the run."),
        ({"q": {"do_train": False}}, "q.do_train — it has no effect: a stage trains and measures."),
        ({"ppo": {"report_to": 3}}, "ppo.report_to — null or text or a list is needed, got 3."),
        ({"adapters": {"policy": {"lora_dropout": 1.0}}}, "adapters.policy.lora_dropout — must be from 0 to below 1"),
        ({"q": {"neftune_noise_alpha": 1.0}}, "q.neftune_noise_alpha — would have no effect: states and targets have"),
        ({"collect": {"batch_size": 0}}, "collect.batch_size — must be at least 1, got 0."),
        ({"collect": {"temperature": 0}}, "collect.temperature — must be at least 0.0001, got 0."),
        ({"collect": {"samples": 2}}, "collect.samples — section collect has no such field."),
        ({"scorer": {"kind": "function", "function": "a:b"}, "start": {"value": "reward"}}, "there is no reward role"),
        ({"seed": "one"}, "seed — a whole number is needed, got 'one'."),
        ({"data": {"task": "prompts"}}, "data.train — is missing: task prompts needs it."),
        ({"": 1}, "'' — no such section."),
        ({"output_dir": "x"}, "output_dir — no such section. It is not a recipe key: the run folder decides it. Name"),
        ({"tokenizer": "x"}, "tokenizer — no such section."),
        ({"batch_size": 1}, "batch_size — no such section. It is a key of collect, scorer: write collect.batch_size."),
        ({"reward": {"max_steps": 1, "bf16": True, "fp16": True}}, "reward — At most one of fp16 and bf16"),
        (
            {"base": {"model": "x", "dtype": "float16"}, "ppo": {"max_steps": 1, "fp16": False}},
            "ppo.fp16 — false leaves a model in float16 without a loss scaler",
        ),
        (
            {"base": {"model": "x", "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": 0}}},
            "base.quantization.bnb_4bit_quant_type — bnb_4bit_quant_type must be a string (got 0)",
        ),
        (
            {"sft": {"packing": True, "max_length": None}},
            "sft.max_length — a whole number is needed with sft.packing, got None: rows are packed to it.",
        ),
        (
            {"sft": {"packing_strategy": "bdf"}},
            "sft.packing_strategy — bfd or bfd_split or wrapped is needed, got 'bdf'.",
        ),
        (
            {"ppo": {"top_p": 0.9}},
            "ppo.top_p — is refused: it keeps tokens by the policy that samples",
        ),
        ({"ppo": {"top_k": 50}}, "Lower ppo.temperature instead"),
        ({"ppo": {"min_p": 0.1, "loop": "trl"}}, "ppo.min_p — is refused"),
        ({"ppo": {"repetition_penalty": 1.2}}, "ppo.repetition_penalty — is refused: it changes the distribution that"),
        ({"ppo": {"max_new_tokens": 32}}, "ppo.max_new_tokens — is named response_length"),
        ({"ppo": {"num_generations": 8}}, "ppo.num_generations — is refused: each prompt of a batch gets one"),
        ({"ppo": {"n_samples_per_prompt": 8}}, "ppo.n_samples_per_prompt — is refused: each prompt of a batch gets"),
        ({"ppo": {"use_vllm": True}}, "ppo.use_vllm — is refused: the toolkit generates rollouts itself, on the base"),
        ({"ppo": {"log_level": "loud"}}, "ppo.log_level — detail or debug or info or "),
    ],
)
def test_problems(sections, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_changed(tmp_path, **sections)
    assert message in str(error.value)


@pytest.mark.parametrize("word", ["no", "off", "No"])
def test_a_word_that_yaml_takes_for_false_is_to_be_quoted(word, tmp_path):
    hint = (
        "got False. YAML takes no and off without quotes for false: "
        'write save_strategy: "no" in a file, \'ppo.save_strategy="no"\' on the command line, '
        "SET='ppo.save_strategy=\\\"no\\\"' with make."
    )
    text = yaml.safe_dump({**MINIMAL, "ppo": {"max_steps": 1}})
    with pytest.raises(RecipeError) as in_a_file:
        recipes.load(written(tmp_path, text.replace("ppo:\n", f"ppo:\n  save_strategy: {word}\n")))
    assert f"ppo.save_strategy — SaveStrategy or text is needed, {hint}" in str(in_a_file.value)
    path = written(tmp_path, text)
    with pytest.raises(RecipeError) as in_an_override:
        recipes.load(path, f"ppo.save_strategy={word}")
    assert hint in str(in_an_override.value)
    assert recipes.load(path, 'ppo.save_strategy="no"').stage_config("ppo").save_strategy == "no"  # as the hint says


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("ppo.run_name=on", """ YAML takes yes and on without quotes for true: write run_name: "yes" in a file"""),
        ("ppo.eval_strategy=yes", ""),  # not one of its words in any writing
        ("ppo.loop=no", ""),
        ("ppo.save_strategy=3", ""),
        ("ppo.run_name=3", """ YAML takes it for a number: text stands in quotes, 'ppo.run_name="…"' on the"""),
        ("ppo.run_name=a: b", """ YAML takes it for a mapping: text stands in quotes, 'ppo.run_name="…"' on the"""),
        ("ppo.learning_rate=no", ""),
    ],
)
def test_only_where_the_word_would_fit(override, hint, tmp_path):
    with pytest.raises(RecipeError) as error:
        recipes.load(written(tmp_path, MINIMAL), override)
    assert hint in str(error.value) and ("YAML takes" in str(error.value)) == bool(hint)


PAIRS_OF_THE_HUB = {"task": "preferences", "train": "some/pairs", "subset": "part", "name": "main"}


def test_another_source_in_place_of_a_hub_id_takes_its_subset_away(tmp_path):
    path = written(tmp_path, {**MINIMAL, "data": PAIRS_OF_THE_HUB, "reward_data": PAIRS_OF_THE_HUB})
    local = {"task": "preferences", "train": "x.jsonl", "validation": "y.jsonl"}
    values = recipes.load(path, "data.train=x.jsonl", "data.validation=y.jsonl").values
    assert values["data"] == local and values["reward_data"] == PAIRS_OF_THE_HUB
    # What the command line itself names is kept, and refused with the data.
    values = recipes.load(path, "reward_data.train=x.jsonl", "reward_data.subset=mine").values
    assert values["reward_data"] == {"task": "preferences", "train": "x.jsonl", "subset": "mine"}
    assert recipes.load(path, data={"train": "x.jsonl", "validation": "y.jsonl"}).values["data"] == local
    assert recipes.load(path, "data={train: x.jsonl, validation: y.jsonl}").values["data"] == local
    assert "subset" not in recipes.load(path, "data.train=other/pairs").values["data"]
    assert recipes.load(path, f"data.train={PAIRS_OF_THE_HUB['train']}").values["data"]["subset"] == "part"  # its own
    both = written(tmp_path, {**MINIMAL, "data": {**PAIRS_OF_THE_HUB, "validation": "some/pairs"}})
    assert recipes.load(both, "data.train=x.jsonl").values["data"]["subset"] == "part"  # of what is held out
    assert "subset" not in recipes.load(both, "data.train=x.jsonl", "data.validation=y.jsonl").values["data"]
    path = written(tmp_path, {**MINIMAL, "data": PAIRS_OF_THE_HUB})
    assert recipes.load(path, "data.train=other/pairs", "data.subset=b").values["data"]["subset"] == "b"
    (tmp_path / "downloaded" / ".cache" / "huggingface").mkdir(parents=True)  # as it is named where there is no hub
    kept = recipes.load(path, f"data.train={tmp_path / 'downloaded'}").values["data"]
    assert kept["subset"] == "part" and kept["name"] == "main"
    more = recipes.load(path, f"data.train=[x.jsonl,{PAIRS_OF_THE_HUB['train']}]").values["data"]
    assert more["subset"] == "part" and more["name"] == "main"  # a file beside it
    assert recipes.load(path, "data.validation=some/pairs").values["data"]["subset"] == "part"


@pytest.mark.parametrize("key", ["validation", "validation_size"])
def test_held_out_rows_that_are_given_take_the_place_of_the_recipe_s(key, tmp_path):
    held_out = {"validation": "held.jsonl", "validation_size": 9}
    other = {name: value for name, value in held_out.items() if name != key}
    path = written(tmp_path, {**MINIMAL, "data": {"task": "preferences", "train": "x.jsonl", **other}})
    given = recipes.load(path, f"data.{key}={held_out[key]}").values["data"]
    assert given == {"task": "preferences", "train": "x.jsonl", key: held_out[key]}
    assert recipes.load(path, data=held_out).values["data"].keys() > held_out.keys()  # which the task refuses
    assert recipes.load(path, f"data.{key}=null").values["data"].items() >= other.items()


def test_another_task_takes_away_what_is_not_its_own(tmp_path):
    pairs = {"task": "preferences", "train": "some/pairs", "max_prompt_length": 9, "max_response_length": 8, "seed": 3}
    path = written(tmp_path, {**MINIMAL, "data": pairs})
    values = recipes.load(path, "data.task=prompts", "data.train=x.jsonl").values
    assert values["data"] == {"task": "prompts", "train": "x.jsonl", "max_prompt_length": 9, "seed": 3}
    # What the command line itself names is kept, and refused.
    with pytest.raises(RecipeError, match="data.max_response_length — section prompts has no such field"):
        recipes.load(path, "data.task=prompts", "data.train=x.jsonl", "data.max_response_length=7")
    assert recipes.load(path, "data.task=preferences").values["data"] == pairs
    # A misspelt key is no other task's.
    misspelt = written(tmp_path, {**MINIMAL, "data": {**pairs, "max_prompt_lenght": 9}})
    with pytest.raises(RecipeError, match=r"max_prompt_lenght — .*Did you mean max_prompt_length"):
        recipes.load(misspelt, "data.task=prompts", "data.train=x.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:SECRET_OF_A_TEST}",
        "x ${oc.decode:1}",
        "${env:SECRET_OF_A_TEST}",
        "${seed}${oc.env:SECRET_OF_A_TEST}",  # behind a key that may be inserted
        "${${base.revision}:SECRET_OF_A_TEST}",  # a name that is inserted itself
        "${oc.${base.attn_implementation}:SECRET_OF_A_TEST}",
        "\\${oc.env:SECRET_OF_A_TEST}",  # as text, which a run's own recipe would have without the backslash
        "${base.dtype}",  # which inserts in its turn
        "${data}",
        "${nothing}",
        "a ${nothing}",
        "${base.model}",
    ],
)
def test_only_plain_values_of_the_recipe_are_inserted(text, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "a secret")
    base = {"model": text, "revision": "oc.env", "attn_implementation": "env", "dtype": "${seed}"}
    with pytest.raises(
        RecipeError, match=r"base.model — .*: only plain values of the recipe itself can be inser"
    ) as error:
        load_changed(tmp_path, base=base, seed=0)
    assert "a secret" not in str(error.value)


@pytest.mark.parametrize("override", ["base.dtype=float32", "base=null", "seed=1"])
def test_no_resolver_is_asked_where_an_override_meets_it(override, tmp_path, monkeypatch):
    """As it is where OmegaConf merges."""
    monkeypatch.setenv("SECRET_OF_A_TEST", "a secret")
    asked = []
    OmegaConf.register_new_resolver("of_a_test", lambda secret: asked.append(secret) or "x")
    base = "${oc.create:{model:${of_a_test:${oc.env:SECRET_OF_A_TEST}}}}"
    try:
        for values, given in (({**MINIMAL, "base": base}, [override]), (MINIMAL, [f"base='{base}'", override])):
            try:
                said = str(recipes.load(written(tmp_path, values), *given).values)
            except RecipeError as error:
                said = str(error)
            assert "a secret" not in said and asked == []
    finally:
        OmegaConf.clear_resolver("of_a_test")
    if override == "seed=1":  # which leaves it where it is
        assert "base — " in said and "only plain values of the recipe itself can be inserted" in said


def test_a_file_or_run_is_told_by_the_name_that_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").touch()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "recipe.yaml").touch()
    for name, said in (
        (
            "doubling.yaml",
            f"no such file, looked for from {tmp_path}. The shipped recipe is named without .yaml: doubling",
        ),
        ("mine.yaml", "Did you mean mine.yml?"),
        ("first", '"first" is a run and no recipe. Its own recipe is runs/first/recipe.yaml'),
        ("runs/first", '"runs/first" is a run and no recipe. Its own recipe is runs/first/recipe.yaml'),
    ):
        with pytest.raises(RecipeError, match=escape(said)):
            recipes.load(name)


def test_unknown_and_broken_files(tmp_path):
    with pytest.raises(RecipeError, match='no recipe "doublin". Did you mean doubling?'):
        recipes.load("doublin")
    with pytest.raises(RecipeError, match="no.yaml: there is no such file.$"):
        recipes.load(tmp_path / "no.yaml")
    with pytest.raises(RecipeError, match="cannot be read as YAML"):
        recipes.load(written(tmp_path, "a: [1"))
    with pytest.raises(RecipeError, match="a recipe is a mapping of sections"):
        recipes.load(written(tmp_path, "- 1"))
    with pytest.raises(RecipeError, match='override "seed" is not of the form'):
        recipes.load("doubling", "seed")
    with pytest.raises(RecipeError, match="cannot be read as YAML"):
        recipes.load(written(tmp_path, "a: !!python/object/apply:os.getcwd []"))  # never run code from a file


_FLAGS = {"bfloat16": (True, False), "float16": (False, True), "float32": (False, False)}


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("bfloat16", {}, (True, False)),
        ("float16", {}, (False, True)),
        ("float32", {}, (False, False)),
        ("float32", {"bf16": True}, (True, False)),
        ("bfloat16", {"bf16": False}, (False, False)),
        ("float32", {"fp16": False}, (False, False)),
        ("float32", {"bf16": None}, (False, False)),
        ("float16", {"bf16": True}, (True, False)),
        (None, {}, _FLAGS[fast_precision().dtype]),
        ("auto", {}, _FLAGS[fast_precision().dtype]),
    ],
)
def test_precision_follows_the_base(dtype, given, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")  # as its launcher sets it
    base = {"model": "some/checkpoint", **({} if dtype is None else {"dtype": dtype})}
    recipe = load_changed(tmp_path, base=base, ppo={"max_steps": 1, **given}, reward={"max_steps": 1, **given})
    for stage in ("reward", "ppo"):
        config = recipe.stage_config(stage)
        assert (config.bf16, config.fp16) == expected
        assert config.mixed_precision == {(True, False): "bf16", (False, True): "fp16"}.get(expected, "no")


@pytest.mark.parametrize("fast", ["float16", "float32"])
def test_auto_is_one_decision(fast, tmp_path, monkeypatch):
    """Weights, 4-bit layers and the trainers' flags; and a recipe that is kept says `auto`, whichever machine it is."""
    monkeypatch.setattr("toolkit.spec.sections.fast_precision", lambda: Precision(fast, "it is said so"))
    nf4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "${base.dtype}"}
    stages = {"reward": {"max_steps": 1}, "ppo": {"max_steps": 1}}
    recipe = load_changed(tmp_path, base={"model": "m", "dtype": "auto", "quantization": nf4}, **stages)
    assert recipe.base.model_spec().dtype == fast
    assert recipe.quantization().bnb_4bit_compute_dtype is getattr(torch, fast)
    assert {(c.bf16, c.fp16) for c in map(recipe.stage_config, stages)} == {_FLAGS[fast]}
    assert str(recipe.precision("ppo")) == f"{fast}, since it is said so"
    assert "dtype: auto" in recipe.to_yaml() and fast not in recipe.to_yaml()


def test_where_all_weights_train_auto_is_float32(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.spec.sections.fast_precision", lambda: Precision("bfloat16", "it is said so"))
    own = {"model": "m"}
    scorer = {"kind": "model"}
    without = {"policy": {"r": 4}, "value": {"r": 4}}
    whole = load_changed(tmp_path, reward_model=own, scorer=scorer, adapters=without)
    assert whole.precision("reward").dtype == "float32"
    adapted = load_changed(tmp_path, reward_model=own, scorer=scorer)
    assert adapted.precision("reward").dtype == "bfloat16"
    random = load_changed(tmp_path, base={"config": {"model_type": "gpt2"}}, sft={"max_steps": 1})
    assert random.precision("sft").dtype == random.precision("ppo").dtype == "float32"


def test_a_stage_may_have_data_of_its_own(tmp_path):
    recipe = load_changed(tmp_path, reward_data={"task": "doubling", "validation_size": 7})
    assert len(recipe.task_of("reward").prompts("validation")) == 7
    assert recipe.task_of("reward") is recipe.task_of("reward")
    assert recipe.task_of("ppo") is recipe.task and len(recipe.task.prompts("validation")) == 300


def nothing(rollout):
    return [0.0] * len(rollout)


def test_a_function_in_place_of_the_scorer(tmp_path):
    recipe = load_changed(tmp_path)
    scored = recipe._scored_by(scorer=nothing)
    assert scored.values["scorer"] == {"kind": "function", "function": f"{__name__}:nothing"}
    as_object = recipe._scored_by(scorer=WeightedSum({"short": len})).values["scorer"]["function"]
    assert as_object == "toolkit.rewards.weighted:<WeightedSum>" and in_no_file(as_object)
    assert not in_no_file("runs/a<b/rewards.py:run")
    with pytest.raises(RewardError, match="put it into a file, and name that"):
        load_function(as_object)
    method = recipe._scored_by(scorer=WeightedSum({"short": len}).__call__).values["scorer"]["function"]
    assert method == "toolkit.rewards.weighted:WeightedSum.__call__" and in_no_file(method)
    with pytest.raises(RecipeError, match=r"mine, with a scorer of its own, has 1 problem\n  start.value — is reward"):
        load_changed(tmp_path, start={"value": "reward"})._scored_by(scorer=print)


def test_models_in_a_users_own_folder(monkeypatch):
    """transformers knows no ~, nor does a shell after `base.model=`."""
    monkeypatch.setenv("HOME", "/home/me")
    part = "scorer={kind: sum, parts: {a: {kind: model, model: ~/rm, weight: 1}}}"
    values = recipes.load("smollm2_135m_sentiment", "scorer.function=null", "base.model=~/models/llama", part).values
    assert values["base"]["model"] == "/home/me/models/llama"
    assert values["scorer"]["parts"]["a"]["model"] == "/home/me/rm"
    assert recipes.load("doubling", runs_dir="~/runs").folder == Path("/home/me/runs/doubling")


def test_null_takes_a_section_or_an_adapter_away():
    recipe = recipes.load("smollm2_135m_lora", "sft=null", "adapters.value=null", "ppo.value=shared")
    assert "sft" not in recipe.values and recipe.values["adapters"].keys() == {"policy", "reward"}
    with pytest.raises(RecipeError, match=r"adapters.reward — is missing: the reward stage trains it"):
        recipes.load("smollm2_135m_lora", "adapters.reward=null")
    with pytest.raises(RecipeError, match="base — this section is missing"):
        recipes.load("doubling", "base=null")


def test_one_card_is_used_where_several_are_in_sight(tmp_path, monkeypatch):
    """transformers would wrap the model in DataParallel, whose copies share one active role."""

    def two_cards(self):
        self._n_gpu = 2
        return torch.device("cpu")

    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(two_cards))
    recipe = recipes.load("smollm2_135m_lora", runs_dir=tmp_path)
    for stage in ("sft", "reward", "ppo"):
        config = recipe.stage_config(stage)
        assert config.n_gpu == 1 and config.train_batch_size == config.per_device_train_batch_size
    # As TRL can follow it on Granite, whose loss is ours.
    sft, granite = recipe.stage_config("sft"), GraniteConfig(num_hidden_layers=1)
    with torch.device("meta"):
        fitting = _fitting(sft, GraniteForCausalLM(granite), own_loss=True)
    assert fitting is not sft and fitting.loss_type == "nll"
    assert fitting.n_gpu == 1 and fitting.mixed_precision == sft.mixed_precision


@pytest.mark.parametrize(("initialised", "current", "asked", "expected"), [
    (False, None, 0, []),  # to ask for the current one would initialise CUDA
    (True, 0, 0, []),
    (True, 1, 0, [0]),
    (False, None, 1, [1]),
])  # fmt: skip
def test_a_stage_that_is_read_makes_no_context_on_a_card(initialised, current, asked, expected, monkeypatch):
    """Which a command would hold while earlier stages run in processes of their own."""
    chosen = []

    def sets_one(self):
        self._n_gpu = 1
        torch.cuda.set_device(torch.device("cuda", asked))
        return torch.device("cpu")

    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(sets_one))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current if initialised else pytest.fail())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    recipes.load("doubling").stage_config("sft")
    assert sorted({*chosen}) == expected
    torch.cuda.set_device(torch.device("cuda", 0))
    assert chosen[-1:] == [0]


@pytest.mark.parametrize(("driver", "expected"), [
    ("535.183.01", {"NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "1"}),  # a user's own value stays
    ("550.40.07", {"NCCL_P2P_DISABLE": "0"}),
])  # fmt: skip
def test_accelerate_is_told_that_cards_do_not_copy_to_one_another(driver, expected, monkeypatch):
    """It would refuse one process, too, on a machine with several of such cards."""
    monkeypatch.setattr(accelerate.utils.environment, "get_gpu_info", lambda: (["NVIDIA GeForce RTX 4090"] * 2, 2))
    monkeypatch.setattr(accelerate.utils.environment, "get_driver_version", lambda: driver)
    asked, environ = stage_section._without_copies_between_cards, {"NCCL_P2P_DISABLE": "0"}
    asked.cache_clear()
    recipes.load("doubling").stage_config("sft")
    assert asked.cache_info().misses == 1
    monkeypatch.setattr(os, "environ", environ)
    asked.__wrapped__()
    assert environ == {"NCCL_P2P_DISABLE": "0"}  # without a card nobody is asked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked.__wrapped__()
    assert environ == expected


NO_NAMES = ("-x", "..", ".", "", "../x", "../../x", "a/../../b", "a/b", "/tmp/x", "a\\b", "C:x", "C:\\x", ".hidden",
            "line\nbreak", "nul\0", "\x1b[31m", "x" * 300)  # fmt: skip


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_of_a_run_is_one_folder_among_all_runs(name, tmp_path):
    with pytest.raises(RecipeError, match=r'is no name of a run.*run="name"; where the runs are is runs_dir="folder"'):
        recipes.load("doubling", run=name, runs_dir=tmp_path)
    with pytest.raises(RecipeError, match="^3 is no name of a run"):  # as of `for seed …: run=seed`
        recipes.load("doubling", run=3, runs_dir=tmp_path)
    with pytest.raises(RecipeError, match="to take from is not in "):
        take_over(recipes.load("doubling", runs_dir=tmp_path / "runs"), name, ["sft"])


def test_names_of_runs_that_are_fine(tmp_path):
    for name in ("more-kl", "läuft 2", "v1.5", "名前", "x-", "a..b"):
        assert recipes.load("doubling", run=name, runs_dir=tmp_path).folder == tmp_path / name


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "1" * 5000])
def test_a_number_beyond_all_sense_is_one_sentence(number, tmp_path):
    for key in ("ppo.max_steps", "seed", "about"):
        with pytest.raises(RecipeError, match=r"override .* cannot be read: .*(digits|too large)"):
            recipes.load("doubling", f"{key}={number}")


# ---------------------------------------------------------------------- from Python


AS_NUMBERS = ["1e-4", "41e6407", "+1E5", "1_0e5", "1.5e3", ".5e5", "1.e5", "0x1F", "017", "1:30", ".inf", "nan", "1e"]


@pytest.mark.parametrize("text", [*AS_NUMBERS, "yes", "~", "2024-01-01", "a: b", "a #b", "{a", "a\n\nb", "\ufeffx"])
def test_a_text_is_read_back_from_the_recipe_that_a_run_keeps(text, tmp_path):
    recipe = recipes.load(MINIMAL, run="mine", about=text, base={"model": "some/model", "revision": text})
    assert recipe.values["about"] == recipe.values["base"]["revision"] == text
    kept = tmp_path / "kept.yaml"
    kept.write_text(recipe.to_yaml(), encoding="utf-8")
    assert recipes.load(kept).values == recipe.values


def test_a_recipe_from_a_mapping_and_sections_by_keyword():
    recipe = recipes.load(MINIMAL, "ppo.kl_coef=0.3", run="mine", ppo={"gamma": 0.5, "kl_coef": 0.1}, seed=7)
    assert recipe.values["ppo"] == {"max_steps": 1, "gamma": 0.5, "kl_coef": 0.3} and recipe.seed == 7
    assert (recipe.name, recipe.run) == ("mine", "mine") and "seed" not in MINIMAL
    assert recipes.load("doubling", adapters={"policy": {"r": 2}}).values["adapters"]["policy"]["r"] == 2
    assert "ppo" not in recipes.load("doubling", ppo=None).values
    with pytest.raises(RecipeError, match="has no name for its run"):
        recipes.load(MINIMAL)
    with pytest.raises(RecipeError, match=r"ppo.kl_coeff — .*Did you mean kl_coef"):
        recipes.load(MINIMAL, run="mine", ppo={"kl_coeff": 1})
    for what, wrong in (
        ({"ppo": {"kl_coef": object()}}, "what was given cannot be a recipe: ppo.kl_coef is <object"),
        ({"ppo": {1: 2}}, "what was given cannot be a recipe"),
        ({"ppo": []}, r"ppo — a section with keys is needed, got \[\]"),
    ):
        with pytest.raises(RecipeError, match=wrong):
            recipes.load(MINIMAL, run="mine", **what)
    for override in ({"ppo": {"kl_coef": 1}}, None, ["ppo.kl_coef=1"]):
        with pytest.raises(RecipeError, match="override .* is no text of the form section.key=value. Sections are"):
            recipes.load(MINIMAL, override, run="mine")


@pytest.mark.parametrize("reward", [5, "rules:fine", [1.0], {}, lambda: [1.0], lambda rollout, other: [1.0]])
def test_what_is_no_reward_is_found_before_anything_runs(reward, tmp_path):
    for name in ("reward", "judge"):
        with pytest.raises(RewardError, match=rf"^{name}: (a function of a rollout|it is called with a rollout)"):
            recipes.load("doubling", runs_dir=tmp_path).ppo_trainer(**{name: reward})
    assert list(tmp_path.iterdir()) == []


def test_null_takes_a_number_of_a_stage_away():
    config = recipes.load("doubling", "ppo.max_steps=null", "ppo.num_train_epochs=2").stage_config("ppo")
    assert config.max_steps == -1 and config.number_of_updates(1280) == 20
    assert recipes.load("doubling", "ppo.cliprange=null").values["ppo"]["cliprange"] is None  # null is a value of it


def test_a_length_in_passes_takes_the_place_of_the_recipe_s_in_updates():
    assert recipes.load("doubling").values["ppo"]["max_steps"] > 0
    for given in ("ppo.num_train_epochs=2", " ppo={num_train_epochs: 2}"):
        assert recipes.load("doubling", given).stage_config("ppo").number_of_updates(1280) == 20
    longer = recipes.load("doubling", ppo={"total_episodes": 1280}).stage_config("ppo")
    assert longer.number_of_updates(5) == 10
    both = recipes.load("doubling", "ppo.num_train_epochs=2", "ppo.max_steps=7").stage_config("ppo")
    assert both.number_of_updates(1280) == 7  # as transformers has it
    for nothing in ("ppo.num_train_epochs=null", "ppo.total_episodes=null"):
        assert recipes.load("doubling", nothing).stage_config("ppo").max_steps > 0
    two = recipes.load("doubling", "ppo={num_train_epochs: 2}", "ppo={learning_rate: 1e-4}").stage_config("ppo")
    assert (two.number_of_updates(1280), two.learning_rate) == (20, 1e-4)
    episodes = recipes.load("doubling", "ppo.total_episodes=128")
    again = recipes.load(episodes.values, "ppo.num_train_epochs=2", run="again").stage_config("ppo")
    assert again.number_of_updates(1280) == 20


def test_a_key_in_brackets_is_the_same_key():
    assert recipes.load("doubling", "ppo[num_train_epochs]=2").stage_config("ppo").number_of_updates(1280) == 20


def test_steps_between_checkpoints_are_not_passed_over_where_the_recipe_has_none(tmp_path):
    for strategy in ("no", "epoch"):
        path = tmp_path / "mine.yaml"
        recipe = {"base": {"model": "m"}, "adapters": {"policy": {"r": 4}}, "sft": {"save_strategy": strategy}}
        path.write_text(yaml.safe_dump(recipe | {"data": {"task": "doubling"}}))
        load = partial(recipes.load, path, "sft.save_steps=2")
        assert load().values["sft"] == {"save_steps": 2}
        assert load(f"sft.save_strategy='{strategy}'").values["sft"]["save_strategy"] == strategy


def test_steps_between_evaluations_are_not_passed_over_where_the_recipe_has_none():
    with pytest.raises(RecipeError, match="ppo.eval_steps — would have no effect.* Add ppo.eval_strategy=steps"):
        recipes.load("llama3_8b_lora", "ppo.eval_steps=5")
    given = recipes.load("llama3_8b_lora", "ppo.eval_steps=5", "ppo.eval_strategy=steps").stage_config("ppo")
    assert given.eval_steps == 5
    recipes.load("doubling", "ppo.eval_strategy='no'")  # its own steps wait


@pytest.mark.parametrize("stage", ["sft", "ppo", "collect"])
def test_an_empty_stage_of_a_file_is_no_stage_with_defaults(stage, tmp_path):
    path = tmp_path / "mine.yaml"
    for empty in ("", "   # all defaults", " ~", " null", " {}"):
        path.write_text(f"base: {{model: m}}\n{stage}:{empty}\nseed: 1\n")
        with pytest.raises(RecipeError) as raised:
            recipes.load(path)
        told = f"{stage} — is empty, which is YAML's null, and null takes a stage away. Write {stage}: {{}} for its"
        assert (told in str(raised.value)) == (empty in ("", "   # all defaults"))


def test_a_setting_at_its_default_needs_nothing_beside_it():
    settings = {"use_score_scaling": False, "use_score_norm": False}
    assert check_stage("ppo", settings) == []
    (problem,) = check_stage("ppo", {"use_score_norm": True})
    assert problem.text().startswith("ppo.use_score_norm — would have no effect without use_score_scaling: true.")


def test_the_recipe_of_a_run_elsewhere_is_no_new_one(tmp_path):
    """As of a run that a notebook made in a folder of its own."""
    folder = tmp_path / "elsewhere" / "mine"
    (folder / "ppo").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipes.load(MINIMAL, run="mine").to_yaml())
    assert recipes.load(folder / "recipe.yaml", runs_dir=tmp_path).run == "recipe"  # no stage of it was begun
    (folder / "ppo" / "manifest.json").write_text("{}")
    with pytest.raises(RecipeError, match="is the recipe of the run mine in .*elsewhere, and the runs are"):
        recipes.load(folder / "recipe.yaml", runs_dir=tmp_path)
    assert recipes.load(folder / "recipe.yaml", runs_dir=tmp_path / "elsewhere").run == "mine"
    (folder / ".replaced").mkdir()
    aside = shutil.copy(folder / "recipe.yaml", folder / ".replaced")  # as a kill may leave it
    assert recipes.load(aside, runs_dir=tmp_path / "elsewhere").run == "mine"
    (folder / "mine.py").write_text("def rule(rollout):\n    return rollout.lengths\n")  # which lies where it lay
    (folder / "turns.jinja").write_text("{{ messages }}")
    text = yaml.safe_load((folder / "recipe.yaml").read_text())
    text["scorer"] = {"kind": "function", "function": "mine.py:rule"}
    text["base"]["chat_template"] = "turns.jinja"
    Path(aside).write_text(yaml.safe_dump(text))
    found = recipes.load(aside, runs_dir=tmp_path / "elsewhere").values
    assert found["scorer"]["function"] == f"{folder / 'mine.py'}:rule"
    assert found["base"]["chat_template"] == "{{ messages }}"
    links = tmp_path / "links"
    links.mkdir()
    (links / "mine.yaml").symlink_to(aside)
    shutil.copy(folder / "turns.jinja", links)
    shutil.copy(folder / "mine.py", links)
    assert recipes.load(links / "mine.yaml").values["scorer"]["function"] == f"{links / 'mine.py'}:rule"
    web = tmp_path / "web" / ".config"
    web.mkdir(parents=True)
    shutil.copy(folder / "recipe.yaml", web)
    (tmp_path / "web" / "app").mkdir()
    (tmp_path / "web" / "app" / "manifest.json").write_text("{}")  # of something else
    assert recipes.load(web / "recipe.yaml", runs_dir=tmp_path / "runs").run == "recipe"
    for option in (("--runs-dir", str(tmp_path / "elsewhere")), ("--run", "new")):
        done = CliRunner().invoke(app, ["show", str(folder / "recipe.yaml"), *option])
        assert done.exit_code == 0 and "some/checkpoint" in done.stdout
    assert recipes.load(folder / "recipe.yaml", run="new", runs_dir=tmp_path).run == "new"


def test_kernels_that_are_not_installed(monkeypatch):
    for there in (False, True):
        monkeypatch.setattr("toolkit.spec.stage.is_liger_kernel_available", lambda there=there: there)
        wrong = ["sft.use_liger_kernel"] if not there else []
        problems = check_stage("sft", {"max_steps": 1, "use_liger_kernel": True})
        assert [problem.field for problem in problems if "installed" in problem.wrong] == wrong


@pytest.mark.parametrize(
    ("sections", "hint"),
    [
        ({"ppo": {"max_steps": 1, "report_to": "tensorbord"}}, "tensorbord is not known.*Did you mean tensorboard?"),
        ({"adapters": {"policy": {"lora_rank": 8}}}, r"adapters.policy.lora_rank — .*Did you mean r\?"),
        ({"adapters": {"policy": {"lora_target": "all"}}}, "Did you mean target_modules"),
        ({"base": {"model": "m", "dtype": "bf16"}}, "Did you mean bfloat16"),
        (
            {"base": {"model": "m", "quantization": "nf4"}},
            r"1 problem\n.*load_in_4bit=true base.quantization.bnb_4bit_quant_type=nf4\.$",
        ),
        ({"ppo": {"ppo_target": 6.0}}, "Did you mean kl_target"),
        ({"ppo": {"max_response_length": 64}}, "Did you mean response_length"),
        ({"ppo": {"reward_clip_range": 10}}, "Did you mean score_clip"),
        ({"ppo": {"max_len": 2048}}, r"Did you mean max_length\?"),
        ({"data": {"task": "prompts", "max_len": 2048}}, r"data.max_len — .*Did you mean max_prompt_length\?"),
        ({"base": {"pretrain": "m"}}, r"Did you mean model\?"),
        ({"ppo": {"steps": 20000}}, r"Did you mean total_episodes\?$"),
        ({"sft": {"steps": 20}}, r"Did you mean max_steps\?$"),
        ({"ppo": {"forward_batch_size": 4}}, r"Did you mean per_device_train_batch_size\?$"),
        ({"ppo": {"epsilon": 0.2}}, r"Did you mean cliprange\?$"),
        ({"ppo": {"epsilon_high": 0.28}}, r"Did you mean cliprange_high\?$"),
        ({"ppo": {"eps_clip": 0.2}}, r"Did you mean cliprange\?$"),
        ({"ppo": {"value_clip": 0.2}}, r"Did you mean cliprange_value\?$"),
        ({"ppo": {"max_completion_length": 64}}, r"Did you mean response_length\?$"),
        ({"ppo": {"generate_max_len": 64}}, r"Did you mean response_length\?$"),
        ({"ppo": {"critic_learning_rate": 1e-5}}, r"Did you mean value_learning_rate\?$"),
        ({"ppo": {"num_iterations": 2}}, r"Did you mean num_ppo_epochs\?$"),
        ({"ppo": {"max_epochs": 2}}, r"Did you mean num_ppo_epochs\?$"),
        ({"sft": {"max_epochs": 2}}, r"Did you mean num_train_epochs\?$"),
        ({"ppo": {"backward_batch_size": 4}}, "num_mini_batches. It is the batch divided by backward_batch_size."),
    ],
)
def test_words_of_other_tools_are_led_to_ours(sections, hint, tmp_path):
    with pytest.raises(RecipeError, match=hint):
        load_changed(tmp_path, **sections)


def test_the_data_of_a_shipped_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = "base.model=some/checkpoint"
    train = recipes.load("llama3_8b_lora", model).values["data"]["train"]
    assert train == str(recipe_folder().parent / "data" / "queries.json")
    assert (
        recipes.load("llama3_8b_lora", model, "data.train=data/mine.json").values["data"]["train"] == "data/mine.json"
    )
    for given in ("data.train=data/prompts.txt", "data={train: data/prompts.txt}"):  # and no other stands in for it
        assert recipes.load("llama3_8b_lora", model, given).values["data"]["train"] == "data/prompts.txt"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "queries.json").write_text("[]")  # one's own comes first
    assert recipes.load("llama3_8b_lora", model).values["data"]["train"] == "data/queries.json"


def test_a_run_finds_shipped_data_in_another_environment_than_it_began_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "old" / "site-packages" / "toolkit" / "spec" / "data"
    begun = recipes.load("llama3_8b_lora", "base.model=some/checkpoint", run="begun")
    begun.folder.mkdir(parents=True)
    for name, found in (("queries.json", True), ("mine.json", False)):
        text = begun.to_yaml().replace(begun.values["data"]["train"], str(gone / name))
        (begun.folder / "recipe.yaml").write_text(text)
        again = recipes.load(begun.folder / "recipe.yaml")
        assert (again.values["data"]["train"] == begun.values["data"]["train"]) == found
        assert ("data.train" in changes(begun, "ppo", begun.folder)) == (not found)
