"""What a check finds, against numbers worked by hand, published sizes, and models that are really loaded."""

import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, OpenAIGPTConfig, OpenAIGPTLMHeadModel
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from trl import SFTConfig

from tests.tiny_models import lora, needs_trl_loop, tiny_model
from tests.tiny_runs import PAIRS, byte_tokenizer, chat_recipe, save_llama, texts
from toolkit import recipes
from toolkit.data import doubling
from toolkit.errors import ConfigError, DataError, ModelError, RecipeError
from toolkit.models import SharedBase, load_base, save_role
from toolkit.runs import build
from toolkit.runs.check import check, check_stages
from toolkit.runs.check_data import counted_rows
from toolkit.runs.check_report import Findings
from toolkit.runs.plan import plan
from toolkit.runs.stages import run
from toolkit.trainers.sft import cut_rows, packs, sft_trainer
from toolkit.trainers.trl_compat import HAS_PPO

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value", "reward")}
UNQUANTISED = {"quantization": None, "dtype": "float32"}
# The helpers' Llama: hidden size 64, 2 of 4 heads for keys and values, 128 inside, so that rank 4 costs a layer
# 4 · ((64 + 64) + (64 + 32) + (64 + 32) + (64 + 64) + 3 · (64 + 128)) = 4096 in the projections q, k, v, o and the MLP.
TRAINED_ON = "of these have a prompt that is trained on, too"
LORA_PARAMETERS = 2 * 4096


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Of two layers, so that what is counted a layer shows."""
    return save_llama(tmp_path_factory.mktemp("checkpoint"), byte_tokenizer(), num_hidden_layers=2)


def role(report, name):
    return next(facts for facts in report.roles if facts.role == name)


def stage(report, name):
    return next(facts for facts in report.stages if facts.stage == name)


def saved_roles(checkpoint, folder, *names, r=4):
    """Roles of this base as PEFT folders."""
    base = SharedBase(load_base(str(checkpoint), dtype="float32"))
    for name in names:
        base.add_role(name, lora(r))
        save_role(base, name, folder / name, pad_token_id=2, base_name="tiny")
    return folder


# ---------------------------------------------------------------------- what it says


def test_the_demo():
    report = check(recipes.load("doubling", runs_dir="nowhere"))
    assert texts(report) == () and report.raise_problems() is None
    # Each of the 4 layers: c_attn 64 → 192, c_proj 64 → 64, c_fc 64 → 256, c_proj 256 → 64.
    assert role(report, "policy").parameters == 16 * 4 * (256 + 128 + 320 + 320) == 65_536
    assert role(report, "value").parameters == 65_536 + 64
    assert (role(report, "reward").modules, role(report, "reward").head_parameters) == (16, 3 * 64)
    ppo = stage(report, "ppo")
    assert (ppo.rows, ppo.held_out, ppo.longest) == (27_000 - 1_300, 300, len("S小写:5487x2=") + 8)
    assert (ppo.batch, ppo.batches, ppo.steps, ppo.episodes) == (128, 80, 80 * 4 * 2, 80 * 128)
    assert ppo.passes == 10_240 / 25_700
    assert stage(report, "sft").passes == 1200 / 418  # 26,700 questions: 417 batches of 64 and one of 12
    text = str(report)
    assert "base       gpt2, random weights: " in text
    assert (
        "an update of 128 prompts: num_ppo_epochs 4 × mini-batches 2 of 64 prompts, in up to 1 micro-batches each"
        in text
    )
    assert "reward     to be run, after sft; 25,700 rows" in text
    assert "ppo        to be run, after sft and reward; 25,700 prompts, 300 held out, at most 19 tokens" in text


def test_an_8b_llama_takes_no_memory(tmp_path):
    LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    adapters = {name: {"r": 8, "target_modules": PROJECTIONS} for name in ("policy", "value", "reward")}
    resource = pytest.importorskip("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = check(chat_recipe(tmp_path, tmp_path / "llama", "base.dtype=bfloat16", adapters=adapters))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 1e9  # the weights would be 16e9 bytes
    assert report.base.parameters == 8_030_261_248  # as Meta's checkpoint has it
    assert role(report, "policy").parameters == 20_971_520
    assert role(report, "value").parameters == 20_971_520 + 4096
    assert role(report, "reward").modules == 7 * 32
    # The projections of 32 layers at 4 bits and a byte for 64, and a float32 for 256 of those; the rest in bfloat16.
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    expected = linear * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 2 * (8_030_261_248 - linear)
    expected += 7 * 32 * 4 * (16 + 256 + 1)  # the codes of weights and scales, and the mean of the scales
    assert report.base.gigabytes == pytest.approx(expected / 1e9, rel=1e-6)
    assert "nf4 with double quantisation and bfloat16: about 5.70 GB; at most 131,072 tokens" in str(report)
    assert len(texts(report)) == 2  # no weights, no tokenizer
    assert "model.safetensors is missing: weights are read from safetensors alone" in texts(report)[0]


@pytest.mark.parametrize("double", [True, False])
def test_the_estimate_is_what_a_quantised_base_takes(double, checkpoint, tmp_path):
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    recipe = chat_recipe(tmp_path, checkpoint, base={"model": str(checkpoint), "quantization": quantization})
    model = load_base(str(checkpoint), quantization=BitsAndBytesConfig(**quantization))
    taken = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for state in (layer.weight.quant_state for layer in model.modules() if isinstance(layer, Linear4bit)):
        taken += state.absmax.nbytes + state.code.nbytes
        taken += state.state2.absmax.nbytes + state.state2.code.nbytes + state.offset.nbytes if double else 0
    assert check(recipe).base.gigabytes == taken / 1e9


def test_bits_that_are_not_bitsandbytes_are_said_or_refused_before_loading(checkpoint, tmp_path, monkeypatch):
    folder = tmp_path / "quantised"
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())

    def recipe_of(method, **settings):
        quantised = {**config, "quantization_config": {"quant_method": method, **settings}}
        path.write_text(json.dumps(quantised))
        return chat_recipe(tmp_path, folder, "base.quantization=null", "base.dtype=bfloat16")

    recipe = recipe_of("gptq", bits=4)
    report, said = check(recipe), "base.model — its weights are quantised by gptq, and counted as if in bfloat16: they"
    assert texts(report) == () and any(str(note).startswith(said) for note in report.notes)
    assert any(str(note).startswith(said) for note in plan(recipe, "4090").notes)
    monkeypatch.setattr(Mxfp4HfQuantizer, "validate_environment", lambda *_, **__: None)  # as with kernels for it
    recipe, said = recipe_of("mxfp4"), "quantization.* kernels for weights in mxfp4 have no gradients"
    assert re.match(rf"base\.{said}", texts(check(recipe))[0])
    with pytest.raises(ModelError, match=said):
        plan(recipe, "4090", notes=False)
    eight = {"model": str(checkpoint), "quantization": {"load_in_8bit": True}}
    assert problems_of(tmp_path, checkpoint, base=eight)[0].startswith("base.quantization — with a base in 8 bits")


def test_pairs_on_a_checkpoint(checkpoint, tmp_path, capfd):
    report = check(chat_recipe(tmp_path, checkpoint, "ppo.num_mini_batches=2", "ppo.num_ppo_epochs=3"))
    assert texts(report) == () and "[transformers]" not in capfd.readouterr().err
    assert role(report, "policy").parameters == LORA_PARAMETERS and role(report, "policy").modules == 14
    assert role(report, "value").parameters == role(report, "reward").parameters == LORA_PARAMETERS + 64
    assert role(report, "reference").parameters == 0 and role(report, "reference").start == "the base itself"
    assert role(report, "policy").dtype == "float32"
    assert report.data[0] == f"data: train: 24 pairs | validation: 6 pairs; 6 {TRAINED_ON}"
    ppo = stage(report, "ppo")
    assert (ppo.batch, ppo.update.mini_batch, ppo.update.micro_batches, ppo.update.steps) == (4, 2, 1, 6)
    assert (ppo.batches, ppo.steps, ppo.episodes, ppo.held_out) == (2, 12, 8, 6)
    assert ppo.state == "to be run, after reward"


_EPISODES = ("ppo.num_mini_batches=2", "ppo.num_ppo_epochs=3", "ppo.max_steps=-1", "ppo.total_episodes=30")


def test_packed_rows_that_lose_their_response_are_left_out_and_said(tmp_path):
    rows = [{"input_ids": [5] * n, "labels": [-100] * (n - 2) + [5, 2]} for n in (20, 6)]
    named = {"output_dir": str(tmp_path), "max_length": 8, "packing": True, "use_cpu": True, "report_to": "none"}
    dataset, args = Dataset.from_list(rows), SFTConfig(**named, bf16=False)
    assert cut_rows(dataset, args, packing=True) == {"cut": 1, "without_loss": 1}
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    made = sft_trainer(args, doubling.tokenizer(), base, dataset, dataset)
    assert [sum(map(len, made.train_dataset["input_ids"])), len(counted_rows(dataset, args))] == [6, 1]
    assert [sum(map(len, made.eval_dataset["input_ids"])), packs(args, "validation")] == [6, True]


@pytest.mark.parametrize(
    ("packing", "strategy", "cut"), [(False, "wrapped", 1), (True, "bfd", 1), (True, "wrapped", 0)]
)
def test_a_row_of_just_the_limit_is_not_cut_and_none_that_is_wrapped(packing, strategy, cut, tmp_path):
    rows = [{"input_ids": [5] * n, "labels": [5] * n} for n in (20, 8)]
    named = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "bf16": False}
    args = SFTConfig(max_length=8, packing=packing, packing_strategy=strategy, **named)
    assert cut_rows(Dataset.from_list(rows), args, packing=packing).get("cut", 0) == cut


def test_updates_follow_from_episodes(checkpoint, tmp_path):
    assert (
        stage(check(chat_recipe(tmp_path, checkpoint, *_EPISODES)), "ppo").batches == 8
    )  # of 4 responses; as TRL, no fewer


@needs_trl_loop
def test_trls_loop_takes_one_step_a_pass(checkpoint, tmp_path):
    report = check(chat_recipe(tmp_path, checkpoint, *_EPISODES, "ppo.loop=trl"))
    assert stage(report, "ppo").steps == 8 * 3
    # Without accumulation each mini-batch of one micro-batch is a step.
    whole = ("ppo.per_device_train_batch_size=4", "ppo.gradient_accumulation_steps=1")
    report = check(chat_recipe(tmp_path, checkpoint, *_EPISODES, *whole, "ppo.loop=trl"))
    assert stage(report, "ppo").update.steps == 2 * 3


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated")
@pytest.mark.parametrize("settings", [
    {"packing": True, "max_length": 200},
    {"packing": True, "max_length": 60, "packing_strategy": "bfd_split"},
    {"packing": True, "max_length": 300, "packing_strategy": "wrapped", "shuffle_dataset": True},
    {"max_length": 100},
    {"max_length": 100, "truncation_mode": "keep_end"},
], ids=str)  # fmt: skip
def test_steps_of_sft_are_those_of_the_trainer(settings, checkpoint, tmp_path):
    sft = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **settings}
    recipe = chat_recipe(tmp_path, checkpoint, sft=sft, base={"model": str(checkpoint), "dtype": "float32"})
    report = check(recipe)
    found, trainer = stage(report, "sft"), recipe.sft_trainer()
    assert texts(report) == () and found.rows == 24 and found.batch == 4
    assert found.prepared == len(trainer.train_dataset)
    whole = "truncation_mode" in settings  # responses stand at the end
    assert (found.prepared == 24) == whole
    assert found.batches == found.steps == 2 * -(-len(trainer.train_dataset) // 4) and found.passes == 2
    longest = max(map(len, recipe.task.demonstrations("train")["input_ids"]))
    assert found.longest == (300 if "shuffle_dataset" in settings else min(longest, settings["max_length"]))
    prepared = "" if whole else f" ({found.prepared} once packed or cut to max_length)"
    assert f"24 rows{prepared}, 6 held out, at most " in str(report)


@pytest.mark.parametrize(("dropped", "steps"), [(True, 2), (False, 3)])
def test_rows_that_do_not_fill_a_micro_batch_may_be_dropped(dropped, steps, checkpoint, tmp_path):
    """24 rows are four batches of 5 and one of 4, two of which are a step."""
    sft = {"num_train_epochs": 1, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 2}
    report = check(chat_recipe(tmp_path, checkpoint, sft=sft | {"dataloader_drop_last": dropped}))
    assert stage(report, "sft").batches == steps and stage(report, "sft").passes == 1


def test_a_shared_value_role(checkpoint, tmp_path):
    adapters = {name: ADAPTERS[name] for name in ("policy", "reward")}
    report = check(chat_recipe(tmp_path, checkpoint, "ppo.value=shared", adapters=adapters))
    assert texts(report) == () and role(report, "value").rank is None
    assert role(report, "value").parameters == 64
    assert "value      a head on the policy's adapter; head 64 (float32); 64 parameters train in ppo" in str(report)


def test_the_policy_of_the_sft_stage_alone(checkpoint, tmp_path):
    adapters = {"policy": ADAPTERS["policy"]}
    sft = {"max_steps": 2, "per_device_train_batch_size": 2}
    report = check(chat_recipe(tmp_path, checkpoint, adapters=adapters, sft=sft, reward=None, ppo=None))
    assert texts(report) == () and [facts.role for facts in report.roles] == ["policy"]
    assert "8,192 parameters train in sft" in str(report)


def test_a_recipe_of_the_reward_stage_alone(checkpoint, tmp_path):
    report = check(chat_recipe(tmp_path, checkpoint, ppo=None, adapters={"reward": {"r": 4}}))
    assert [facts.role for facts in report.roles] == ["reward"] and texts(report) == ()
    assert role(report, "reward").modules == 4  # PEFT's own choice for Llama: q_proj and v_proj


def test_rows_left_out_are_said_of_any_stage(checkpoint, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        PAIRS.read_text(encoding="utf-8") + '{"prompt": "", "chosen": "a", "rejected": "b"}\n', encoding="utf-8"
    )
    data = {"task": "preferences", "train": str(path), "validation": str(PAIRS)}
    report = check(chat_recipe(tmp_path, checkpoint, ppo=None, adapters={"reward": {"r": 4}}, data=data))
    left_out = f"1 left out: 1 × an empty prompt (first: {path}, line 25)"
    assert report.data[0] == f"data: train: 24 pairs; {left_out} | validation: 24 pairs; 24 {TRAINED_ON}"
    assert f"data       data: train: 24 pairs; {left_out}" in str(report)
    # Once for each section, however many stages have it.
    assert len(check(chat_recipe(tmp_path, checkpoint, data=data)).data) == 2  # the section once, and a row of it
    own = check(chat_recipe(tmp_path, checkpoint, data=data, reward_data={**data, "train": str(PAIRS)})).data
    assert [line.partition(":")[0] for line in own[:2]] == ["reward_data", "data"] and left_out not in own[0]


def test_saved_adapters_are_checked_by_their_headers(checkpoint, tmp_path, monkeypatch):
    folder = saved_roles(checkpoint, tmp_path, "policy", "reward")
    monkeypatch.setattr("toolkit.models.folders.load_file", None)
    start = {name: str(folder / name) for name in ("policy", "reward")}
    report = check(chat_recipe(tmp_path, checkpoint, "start.value=reward", start=start, adapters={}, reward=None))
    assert texts(report) == ()
    assert role(report, "policy").start == f"from {folder / 'policy'}, trained on tiny"
    assert role(report, "policy").parameters == LORA_PARAMETERS
    assert role(report, "reward").parameters == 0 and role(report, "reward").head_parameters == 64
    assert role(report, "value").start == "a copy of the reward role"
    assert role(report, "value").parameters == LORA_PARAMETERS + 64
    assert role(report, "reference").start == "a frozen copy of where the policy starts"
    slip = check(chat_recipe(tmp_path, checkpoint, start={"policy": start["reward"]}))
    said = f"from {folder / 'reward'}, trained on tiny as a classifier, whose head is left out"
    assert role(slip, "policy").start == said
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    home = check(chat_recipe(tmp_path, checkpoint, start={"policy": "~/reward"}))
    assert role(home, "policy").start == "from ~/reward, trained on tiny as a classifier, whose head is left out"


def test_finished_stages_and_a_run_of_other_settings(checkpoint, tmp_path):
    recipe = chat_recipe(tmp_path, checkpoint)
    recipe.stage_folder("reward").mkdir(parents=True)
    (recipe.folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    (recipe.stage_folder("reward") / "result.json").write_text("{}")
    saved_roles(checkpoint, recipe.stage_folder("reward"), "reward", r=2)
    report = check(recipe)
    assert texts(report) == () and report.notes == ()
    assert stage(report, "reward").state == f"finished in {recipe.stage_folder('reward')}"
    assert stage(report, "ppo").state == "to be run"
    assert role(report, "reward").rank == 2 and "from " in role(report, "reward").start
    other = check(chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.3"))  # which the reward does not read
    assert other.notes == () and stage(other, "reward").state.startswith("finished")
    other = check(chat_recipe(tmp_path, checkpoint, "reward.max_steps=9"))
    assert texts(other) == () and "other settings: reward.max_steps is 2 there and 9 here" in other.notes[0].wrong
    assert stage(other, "reward").state == "to be run"


def test_a_reward_stage_that_nothing_needs(checkpoint, tmp_path):
    folder = saved_roles(checkpoint, tmp_path, "reward")
    report = check(chat_recipe(tmp_path, checkpoint, f"start.reward={folder / 'reward'}"))
    assert stage(report, "reward").state == "not needed for ppo" and stage(report, "ppo").state == "to be run"
    assert report.notes == ()
    asked = ("adapters.reward.r=16", "adapters.reward.lora_dropout=0.5")
    (note,) = check(chat_recipe(tmp_path, checkpoint, f"start.reward={folder / 'reward'}", *asked)).notes
    taken = f"adapters.reward — the adapter in {folder / 'reward'} is taken as it is (r 16, there 4; lora_dropout 0.5, "
    assert str(note).startswith(taken)
    elsewhere = {"reward_data": {"task": "preferences", "train": "nobody/pairs"}}  # and there is no hub
    report = check(chat_recipe(tmp_path, checkpoint, f"start.reward={folder / 'reward'}", **elsewhere))
    problem = 'reward_data.train — "nobody/pairs" is no file, and the hub did not give it'
    note = f"note       reward, which ppo does not need, could not run: {problem}"
    assert texts(report) == () and note in str(report)
    planned = plan(chat_recipe(tmp_path, checkpoint, f"start.reward={folder / 'reward'}", **elsewhere), "4090")
    assert not any("reward" in phase.phase for phase in planned.memory)
    needed = check(chat_recipe(tmp_path, checkpoint, **elsewhere))
    assert texts(needed)[0].startswith(problem) and "Name files in its place." in texts(needed)[0]
    assert needed.notes == ()


# ---------------------------------------------------------------------- what it refuses


def problems_of(tmp_path, checkpoint, *overrides, **sections):
    return texts(check(chat_recipe(tmp_path, checkpoint, *overrides, **sections)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["adapters.policy.target_modules=[q_prj,v_proj]"],
            'adapters.policy.target_modules — the base has no module "q_prj". Did you mean q_proj?',
        ),
        (
            ["adapters.value.target_modules=[c_attn]"],
            'adapters.value.target_modules — the base has no module "c_attn". Known: ',
        ),
        (["adapters.reward.target_modules=.*attn"], "adapters.reward — Target module LlamaAttention"),
        (["adapters.reward.target_modules=.*c_attn"], "adapters.reward — Target modules .*c_attn not found"),
        (
            ["adapters.value.modules_to_save=[lm_head]"],
            "adapters.value.modules_to_save — modules_to_save would change",
        ),
        (["start.value=reward", "adapters.value.r=8"], 'start.value — role "value" cannot start as a copy of "reward"'),
        (["start.policy=no/where"], 'start.policy — role "policy": there is no folder no/where.'),
        (["scorer.class_column=style"], "scorer.class_column — the reward head has 1 output(s)"),
        (["scorer.class_column=style"], 'scorer.class_column — the prompts have no column "style"; present: input_ids'),
        (["data.train=no.jsonl"], "data.train — no.jsonl: there is no such file."),
        (["data.max_prompt_length=1"], "data.train — no row can be used ("),
        (["ppo.per_device_train_batch_size=500"], "ppo — 24 prompts are fewer than one batch of 1000"),
        (["ppo.max_length=8"], "ppo.max_length — a prompt has"),
        (["base.dtype=float16"], "reward — float16 training needs a GPU, and none is here."),
        (
            ["reward.dataloader_drop_last=true", "reward.per_device_train_batch_size=1000"],
            "reward.dataloader_drop_last — true leaves out the only batch",
        ),
        (["base.attn_implementation=no_such"], 'base.attn_implementation — "no_such" cannot be had here: '),
        (
            ["adapters.policy.rank_pattern={no_proj: 4}"],
            "adapters.policy — The following rank_pattern keys did not match",
        ),
        (
            ["adapters.value.alpha_pattern={no_proj: 4}"],
            "adapters.value — The following alpha_pattern keys did not match",
        ),
        (["adapters.policy.exclude_modules=[no_proj]"], "adapters.policy — You have passed exclude_modules"),
        (
            ["adapters.policy.target_parameters=[no.weight]"],
            "adapters.policy — target_parameters=['no.weight'] were set",
        ),
        (
            ["adapters.policy.layers_to_transform=[1, 2]", "adapters.policy.target_modules=[q_proj]"],
            "adapters.policy.layers_to_transform — the base has layers 0 to 1, and none 2. Layers are counted from 0.",
        ),
        (["adapters.value.init_lora_weights=orthogonal"], "adapters.value.init_lora_weights — PEFT makes orthogonal"),
        (["adapters.policy.target_modules=(["], "adapters.policy.target_modules — '([' is no pattern of module names"),
    ],
)
def test_problems(overrides, message, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = problems_of(tmp_path, checkpoint, *overrides)
    assert any(problem.startswith(message) for problem in found), found


def test_the_best_checkpoint_goes_by_what_the_held_out_prompts_ask_for(checkpoint, tmp_path):
    data = {"task": "instructions", "train_size": 4, "validation_size": 3, "test_size": 3}
    recipe = chat_recipe(
        tmp_path, checkpoint, reward=None, data=data, scorer={"kind": "rules", "column": "rules"},
        ppo={"max_steps": 1, "response_length": 2, "per_device_train_batch_size": 2, "eval_strategy": "steps",
             "eval_steps": 1, "metric_for_best_model": "kept_quoted"},
    )  # fmt: skip
    assert texts(check(recipe)) == ()
    other = {**recipe.values["ppo"], "metric_for_best_model": "eval_kept_json_keys"}
    recipe = replace(recipe, values={**recipe.values, "ppo": other})
    said = "ppo.metric_for_best_model — 'kept_json_keys' is not measured: none of the 3 validation prompts asks for it."
    (problem,) = texts(check(recipe))
    assert problem.startswith(said) and problem.endswith("Take satisfied, or more prompts: raise data.validation_size.")
    with pytest.raises(ConfigError, match="none of the 3 validation prompts asks for it"):
        run(recipe, "ppo")
    assert not (recipe.stage_folder("ppo") / "before.json").exists()  # nothing was measured
    with pytest.raises(ConfigError, match="none of the 3 validation prompts asks for it"):
        recipe.ppo_trainer(overwrite=True)
    q = {"max_steps": 1, "per_device_train_batch_size": 2, "response_length": 2, "eval_strategy": "steps",
         "eval_steps": 1, "metric_for_best_model": "kept_json_keys"}  # fmt: skip
    by_q = chat_recipe(
        tmp_path, checkpoint, reward=None, ppo=None, data=data, scorer={"kind": "rules", "column": "rules"}, q=q,
        collect={"response_length": 2, "batch_size": 2}, adapters={"q": {"r": 4, "target_modules": "all-linear"}},
        name="by_q",
    )  # fmt: skip
    assert any(line.startswith("q.metric_for_best_model — 'kept_json_keys' is not") for line in texts(check(by_q)))


def test_all_problems_in_one_error(checkpoint, tmp_path):
    report = check(
        chat_recipe(
            tmp_path, checkpoint, "adapters.policy.target_modules=[q_prj]", "data.train=no.jsonl", "start.value=there"
        )
    )
    with pytest.raises(RecipeError) as error:
        report.raise_problems()
    text = str(error.value)
    assert text.startswith("chat has 3 problems\n  ") and text.count("\n  ") == 3
    assert role(report, "reward").modules == 14  # the check went on


@needs_trl_loop
def test_what_trls_loop_cannot_run(checkpoint, tmp_path):
    """The reasons are those of the trainer at the start of a run."""
    adapters = {name: ADAPTERS[name] for name in ("policy", "reward")}
    settings = ("ppo.loop=trl", "ppo.value=shared", "ppo.gradient_checkpointing=true", "start.reward=null")
    recipe = chat_recipe(tmp_path, checkpoint, *settings, adapters=adapters)
    told = texts(check(recipe))
    for reason in ("pad and eos are one token", "ppo.value — ", "ppo.gradient_checkpointing — "):
        assert len([line for line in told if reason in line]) == 1, told
    assert len(told) == 3
    rule = {"scorer": {"kind": "function", "function": "statistics:fmean"}, "reward": None}
    told = problems_of(tmp_path, checkpoint, "ppo.loop=trl", "ppo.gradient_checkpointing=false", **rule)
    assert len(told) == 2 and "pad and eos are one token" in told[0] and "reward adapter of one output" in told[1]
    other = byte_tokenizer()
    other.pad_token = "<pad>"
    folder = save_llama(tmp_path / "llama", other)
    assert problems_of(tmp_path, folder, "ppo.loop=trl", "ppo.gradient_checkpointing=false") == ()
    # A reward role that could not be made is one problem, not two.
    (found,) = problems_of(tmp_path, folder, "ppo.loop=trl", "adapters.reward.target_modules=[c_attn]")
    assert found.startswith("adapters.reward.target_modules — ")


def test_a_missing_prerequisite(checkpoint, tmp_path):
    found = problems_of(tmp_path, checkpoint, reward=None)
    assert len(found) == 1 and found[0].startswith('ppo — stage "ppo" needs a trained reward role')


def test_updates_of_several_rollouts(checkpoint, tmp_path):
    report = check(chat_recipe(tmp_path, checkpoint, "ppo.rollouts_per_update=3", "ppo.num_mini_batches=2"))
    facts = stage(report, "ppo")
    rollout = facts.update.rollout
    assert texts(report) == () and facts.batch == 3 * rollout == 2 * facts.update.mini_batch
    assert f"an update of {3 * rollout} prompts, answered {rollout} at a time: " in str(report)


def test_a_response_without_room_for_its_length_is_noted_and_a_prompt_without_any_is_a_problem(checkpoint, tmp_path):
    report = check(chat_recipe(tmp_path, checkpoint, "ppo.response_length=500"))
    assert texts(report) == () and "has positions for 512: its response can have " in report.notes[0].text()
    limited = check(chat_recipe(tmp_path, checkpoint, "ppo.response_length=500", "ppo.max_length=512"))
    assert limited.notes == ()
    if HAS_PPO:  # whose loop goes on
        found = problems_of(tmp_path, checkpoint, "ppo.response_length=500", "ppo.loop=trl")
        assert any(
            "has positions for 512. Shorten the limits of the section data or ppo.resp" in text for text in found
        )
    rows = tmp_path / "long.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": "x" * 600 + str(n), "chosen": "a", "rejected": "b"}) + "\n" for n in range(24))
    )
    found = problems_of(tmp_path, checkpoint, f"data.train={rows}", "data.max_prompt_length=2000")
    assert any(text.endswith("has positions for 512. Shorten the limits of the section data.") for text in found), found


def test_merged_generation_with_nothing_to_merge_is_found_before_any_stage(checkpoint, tmp_path):
    biased = ("adapters.policy.lora_bias=true", "ppo.generation=merged")
    computes = ("base.dtype=bfloat16", "base.quantization.bnb_4bit_compute_dtype=float32", "ppo.generation=merged")
    for changes in (biased, computes):
        found = problems_of(tmp_path, checkpoint, *changes)
        assert [text for text in found if "ppo.generation" in text] == [
            "ppo.generation — merged finds no layer that the policy's adapter can be merged into: it needs plain LoRA "
            "on linear layers, and bnb_4bit_compute_dtype equal to the dtype that 4-bit layers were quantised from. "
            "Take eager.",
        ]
    with pytest.raises(ConfigError, match="merged finds no layer"):
        plan(chat_recipe(tmp_path, checkpoint, *biased), "4090")
    misspelt = problems_of(tmp_path, checkpoint, "adapters.policy.target_modules=[q_prj]", "ppo.generation=merged")
    assert misspelt and not any("merged" in text for text in misspelt)


def test_greedy_rollouts_are_noted(checkpoint, tmp_path):
    report = check(chat_recipe(tmp_path, checkpoint, "ppo.rollout_do_sample=false"))
    assert texts(report) == () and "ppo.rollout_do_sample — is false: " in report.notes[0].text()


def test_adapters_that_do_not_fit(checkpoint, tmp_path):
    headless = tmp_path / "headless"
    get_peft_model(tiny_model(), lora()).save_pretrained(headless)
    found = problems_of(tmp_path, checkpoint, f"start.reward={headless}")
    assert "start.reward — " in found[0] and "needs one score head and the adapter holds 0" in found[0]
    found = problems_of(tmp_path, checkpoint, f"start.policy={headless}")  # of a smaller base
    assert "belongs to another base: 28 of " in found[0] and "layers.0.mlp.down_proj.lora_A.weight" in found[0]
    folder = saved_roles(checkpoint, tmp_path, "reward") / "reward"
    state = load_file(folder / "adapter_model.safetensors")
    state["base_model.model.score.weight"] = torch.zeros(1, 7)
    save_file(state, folder / "adapter_model.safetensors")
    found = problems_of(tmp_path, checkpoint, f"start.reward={folder}")
    assert "weight first: it is [1, 7] there and [1, 64] here" in found[0]
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    assert "adapter_model.safetensors is damaged" in problems_of(tmp_path, checkpoint, f"start.reward={folder}")[0]


def test_a_base_that_scales_its_logits(tmp_path):
    small = {
        "vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    base = {"config": {"model_type": "cohere", **small}, "dtype": "float32"}
    values = {"base": base, "data": {"task": "doubling"}, "sft": {"max_steps": 1}, "adapters": ADAPTERS, "reward": {}}
    report = check(chat_recipe(tmp_path, None, **values, ppo={"max_steps": 1}))
    assert report.base is not None and len(report.roles) == 4
    assert not [p for p in texts(report) if "logits" in p]


def test_weights_that_are_missing_or_cut_short(tmp_path, checkpoint):
    folder = save_llama(tmp_path / "llama", byte_tokenizer())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert problems_of(tmp_path, folder)[0].startswith(f"base.model — {weights} is damaged (")
    weights.write_bytes(whole)
    kept = {name: tensor for name, tensor in load_file(weights).items() if name != "model.norm.weight"}
    save_file(kept, weights, metadata={"format": "pt"})
    (found,) = problems_of(tmp_path, folder)
    assert found.startswith(f'base.model — "{folder}" has no weights for model.norm.weight, where the model would be')
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    found = problems_of(tmp_path, folder)
    assert len(found) == 2 and "model-2.safetensors is missing" in found[1]
    index.write_text("[]")
    assert "model.safetensors.index.json cannot be read" in problems_of(tmp_path, folder)[0]
    own = {"model": str(folder), "dtype": "float32"}
    adapters = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value", "reward")}
    for section, others, more in (
        ("reward_model", ("policy", "value"), {"scorer": {"kind": "model"}}),
        ("value_model", ("policy", "reward"), {}),
    ):
        trained = {role: adapters[role] for role in others}
        found = problems_of(tmp_path, checkpoint, adapters=trained, **{section: own}, **more)
        assert any(line.startswith(f"{section}.model — {index} cannot be read") for line in found), found


def test_a_tokenizer_that_cannot_be_had_is_asked_for_once(checkpoint, tmp_path, monkeypatch):
    asked = []

    def load_tokenizer(path, **_):
        asked.append(path)
        raise ModelError("there is none.", field="model")

    monkeypatch.setattr("toolkit.spec.recipe.load_tokenizer", load_tokenizer)
    report = check(chat_recipe(tmp_path, checkpoint))
    assert texts(report) == ("base.model — there is none.",) and len(asked) == 1
    assert report.base is not None and len(report.roles) == 4 and report.stages == ()


def test_no_checkpoint_and_no_such_architecture(tmp_path):
    found = problems_of(tmp_path, tmp_path / "nothing")
    assert found[0].startswith("base.model — no checkpoint could be loaded from the folder") and len(found) == 1
    report = check(recipes.load("doubling", "base.config.model_type=gpt7", runs_dir=tmp_path))
    assert texts(report)[0].startswith("base.config — transformers cannot build this model: ")


@pytest.mark.parametrize("size", ["-1", "0", "1000000000000000000"])
def test_a_random_base_whose_data_cannot_be_made(size, tmp_path):
    report = check(recipes.load("doubling", f"data.test_size={size}", runs_dir=tmp_path))
    assert len(texts(report)) == 1 and texts(report)[0].startswith("data")


def test_ends_that_stand_in_the_settings_of_generation_alone(tmp_path, checkpoint):
    """Some chat models say so: config.json knows the end of a text, generation_config.json that of a turn."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))
    problem = "the tokenizer ends a response with id 2 and the base with [7]"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert any(problem in line for line in texts(check(chat_recipe(tmp_path, folder))))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert texts(check(chat_recipe(tmp_path, folder))) == ()


def test_a_folder_without_its_tokenizer_is_told_what_it_lacks(tmp_path, checkpoint):
    """Of the library's own words one installs packages that do not help."""
    without, pointer = (shutil.copytree(checkpoint, tmp_path / name) for name in ("without", "pointer"))
    for path in (*without.glob("*token*"), *without.glob("chat_template*")):
        path.unlink()
    (problem,) = texts(check(chat_recipe(tmp_path, without)))
    assert f'base.model — "{without}" has no tokenizer: neither tokenizer.json' in problem and "Copy that of" in problem
    (pointer / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (problem,) = texts(check(chat_recipe(tmp_path, pointer)))
    assert f"{pointer / 'tokenizer.json'} is a pointer of Git LFS, and not the file. Run git lfs pull" in problem
    (pointer / "data.json").write_text('{"one": 1}\n{"another": 2}\n')  # which is no matter of the tokenizer's
    (pointer / "tokenizer.json").write_text("{")
    (problem,) = texts(check(chat_recipe(tmp_path, pointer)))
    assert f"{pointer / 'tokenizer.json'} is damaged (" in problem


@pytest.mark.parametrize("named", ["flash_attention_2", "foo"])
def test_attention_that_cannot_be_had_is_a_matter_of_its_own_key(named, tmp_path, checkpoint):
    (problem,) = texts(check(chat_recipe(tmp_path, checkpoint, f"base.attn_implementation={named}")))
    assert problem.startswith(f'base.attn_implementation — "{named}" cannot be had here: ')
    assert problem.endswith("Install what it needs, or leave it out, for what transformers takes by itself.")


def test_a_recipe_without_a_stage_would_do_nothing(tmp_path, checkpoint):
    bare = {"base": {"model": str(checkpoint)}, "data": {"task": "prompts", "train": "nosuch.jsonl"}}
    problem = texts(check(recipes.load(bare, run="bare", runs_dir=tmp_path)))[-1]
    assert problem.startswith("it has no stage: nothing would be run. Add a section: ppo: {}")


def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path, checkpoint):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF\x03")
    (problem,) = texts(check(chat_recipe(tmp_path, gguf)))
    assert "it is a file; a checkpoint is a folder with config.json and safetensors, and GGUF is not read" in problem
    (problem,) = texts(check(chat_recipe(tmp_path, f"{checkpoint}/config.json")))
    assert f"safetensors, and GGUF is not read. Name its folder: {checkpoint}" in problem
    adapter = saved_roles(checkpoint, tmp_path / "run", "policy") / "policy"
    (problem,) = texts(check(chat_recipe(tmp_path, adapter)))
    assert f'"{adapter}" is a PEFT adapter and no whole model. Name the base that it was trained on here' in problem
    scorer = {"kind": "model", "model": str(adapter)}
    (problem, *_) = texts(check(chat_recipe(tmp_path, checkpoint, scorer=scorer, reward=None)))
    assert (
        problem.startswith("scorer.model — ")
        and "Merge it into its base, and name that; for one on the shared base" in problem
    )


def test_problems_of_a_stage_s_own_data_name_its_section(tmp_path, checkpoint):
    lacking = {"task": "preferences", "train": str(PAIRS)}
    report = check(chat_recipe(tmp_path, checkpoint, reward_data=lacking))
    assert texts(report) and all("reward_data.validation — it is missing" in line for line in texts(report))


def test_rows_left_out_and_a_row_as_a_stage_reads_it(tmp_path, checkpoint):
    rows = [
        {"prompt": "Why?", "chosen": "Since.", "rejected": "No."},
        {"prompt": "Why?", "chosen": "a", "rejected": "a"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    data = {"task": "preferences", "train": str(path), "validation": str(path)}
    recipe = chat_recipe(tmp_path, checkpoint, data=data, ppo=None)
    text = str(check(recipe))
    assert "2 pairs; 2 left out: 2 × chosen and rejected are equal (first:" in text
    # The byte tokenizer: <s>Why?</s><s>Since.</s>
    assert "first row of reward: '<s>Why?</s><s>Since.</s>', 14 tokens: 1 " in text
    assert "pad '</s>' (2), a response ends at '</s>' (2)" in text


def test_a_problem_is_named_by_its_section_once():
    findings = Findings()
    for field in ("train", "q_data.train", ""):
        with findings.at("q_data"):
            raise DataError(f"{field or 'nothing'} is wrong", field=field)
    assert [problem.field for problem in findings.problems] == ["q_data.train", "q_data.train", "q_data"]


COLLECTS_ALONE = {
    "reward": None, "ppo": None, "adapters": None, "scorer": {"kind": "function", "function": "statistics:fmean"},
    "collect": {"samples_per_prompt": 2, "response_length": 6, "batch_size": 8},
}  # fmt: skip


def test_a_recipe_that_only_collects_has_its_prompts_checked(checkpoint, tmp_path):
    assert texts(check(chat_recipe(tmp_path, checkpoint, **COLLECTS_ALONE))) == ()
    (found,) = problems_of(tmp_path, checkpoint, "data.train=nowhere.jsonl", **COLLECTS_ALONE)
    assert found.startswith("data.train — nowhere.jsonl: there is no such file")
    report = check(chat_recipe(tmp_path, checkpoint, "collect.response_length=5000", **COLLECTS_ALONE))
    (note,) = [note.text() for note in report.notes]
    assert texts(report) == ()
    assert note.startswith("collect — the longest prompt with collect.response_length comes to 5")
    by_column = {**COLLECTS_ALONE, "scorer": {"kind": "rules", "column": "rules"}}
    (found,) = problems_of(tmp_path, checkpoint, **by_column)
    assert found.startswith("scorer.column — the prompts have no column")


@pytest.mark.parametrize(("wanted", "sections", "problem"), [
    ("q", {"q_data": {"task": "rated", "train": "none.jsonl"}}, "q_data.train — none.jsonl: there is no such file"),
    (
        "collect",
        {"collect": COLLECTS_ALONE["collect"], "scorer": {"kind": "rules", "column": "ruls"}},
        "scorer.column — the prompts have no column",
    ),
])  # fmt: skip
def test_the_stage_that_is_asked_for_is_checked_before_what_it_needs(wanted, sections, problem, checkpoint, tmp_path):
    """In a recipe whose ppo does not need it, and whose q would read what is collected."""
    adapters = {name: {"r": 4, "target_modules": "all-linear"} for name in ("policy", "value", "q")}
    others = {"sft": {"max_steps": 2}, "q": {"max_steps": 2}, "reward": None, "scorer": COLLECTS_ALONE["scorer"]}
    recipe = chat_recipe(tmp_path, checkpoint, **{**others, "adapters": adapters, **sections})
    assert recipe.plan.needs(wanted) == ["sft"]
    with pytest.raises(RecipeError, match=problem):
        check_stages(recipe, {wanted, "sft"}).raise_problems()


def test_rows_that_collect_cannot_use_are_said(checkpoint, tmp_path, capsys):
    rows = [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": None}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"task": "prompts", "train": str(tmp_path / "prompts.jsonl"), "validation_size": 1, "chat": False}
    scorer = {"kind": "rules", "rules": [{"rule": "no_comma"}]}
    recipe = chat_recipe(tmp_path, checkpoint, **{**COLLECTS_ALONE, "data": data, "scorer": scorer})
    run(recipe, "collect")
    folder = recipe.stage_folder("collect")
    assert sum(json.loads((folder / "result.json").read_text())["left_out"]["train"].values()) == 2
    left_out, kept = (
        [json.loads(line)["place"] for line in (folder / name).read_text().splitlines()]
        for name in ("left_out.jsonl", "rows.jsonl")
    )
    assert [place.rpartition(" ")[2] for place in left_out] == ["2", "4"]
    (asked,) = recipe.task.prompts("train")["prompt"]  # the other one is held out
    assert [place.rpartition(" ")[2] for place in kept] == [{"a": "1", "b": "3"}[asked]]
    assert "2 left out" in capsys.readouterr().out


def test_a_task_with_a_vocabulary_of_its_own_does_not_go_on_another_s_checkpoint(checkpoint, tmp_path):
    by_rule = {"reward": None, "scorer": {"kind": "rules", "rules": [{"rule": "no_comma"}]}}
    adapters = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")}
    sections = {"data": {"task": "doubling"}, "adapters": adapters, **by_rule}
    (found, *_) = problems_of(tmp_path, checkpoint, **sections)
    assert found.startswith("data.task — doubling has a vocabulary of its own") and str(checkpoint) in found


def test_gradient_checkpointing_that_a_model_does_not_have_is_named_by_its_stage(checkpoint, tmp_path):
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = OpenAIGPTConfig(vocab_size=len(tokenizer), n_embd=32, n_head=4, n_layer=1)
    OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "gpt")
    tokenizer.save_pretrained(tmp_path / "gpt")
    gpt, sft = {"model": str(tmp_path / "gpt"), "dtype": "float32"}, {"max_steps": 1, "per_device_train_batch_size": 2}

    def asking(*stages, **sections):
        asks = [f"{stage}.gradient_checkpointing={str(stage in stages).lower()}" for stage in ("sft", "reward", "ppo")]
        return chat_recipe(tmp_path, checkpoint, *asks, sft=sft, **sections)

    def asked_in_vain(recipe, *stages):
        found = [problem for problem in check_stages(recipe, stages).problems if "no gradient ch" in problem.wrong]
        return [problem.field for problem in found]

    whole, key = {"base": {**gpt, "quantization": None}}, "gradient_checkpointing"
    recipe = asking("sft", "reward", **whole)
    assert asked_in_vain(recipe, "sft", "reward", "ppo") == [f"sft.{key}", f"reward.{key}"]
    critic = {"value_model": gpt, "adapters": {role: ADAPTERS[role] for role in ("policy", "reward")}}
    assert asked_in_vain(asking("reward", "ppo", **critic), "reward", "ppo") == [f"ppo.{key}"]
    scorer = {"kind": "rules", "rules": [{"rule": "no_comma"}]}
    of_its_own = {"reward_model": gpt, "adapters": {role: ADAPTERS[role] for role in ("policy", "value")}}
    assert asked_in_vain(asking("reward", **of_its_own, scorer=scorer), "reward") == [f"reward.{key}"]
    for make in (build.make_sft_trainer, build.make_reward_trainer):
        stage = make.__name__.split("_")[1]
        with pytest.raises(ModelError, match=rf"^{stage}\.{key}: a OpenAIGPTLMHeadModel"):
            make(recipe)


def test_a_stage_is_not_kept_off_a_card_that_has_the_base(checkpoint, tmp_path, monkeypatch):
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.use_cpu=true", "ppo.bf16=false")
    config = recipe.stage_config("ppo")
    monkeypatch.setattr(type(recipe), "stage_config", lambda *given: config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"^ppo.use_cpu: true does not keep a run off the GPU") as refused:
        build.trainer_config(recipe, "ppo")
    assert refused.value.problems[0].field == "ppo.use_cpu"


def test_graphs_that_there_cannot_be_are_refused_before_earlier_stages_run(checkpoint, tmp_path, monkeypatch):
    (problem,) = check(chat_recipe(tmp_path, checkpoint, "ppo.generation=graphs")).problems
    assert (
        problem.field == "ppo.generation" and "graphs are of CUDA devices, and the base is on the CPU" in problem.wrong
    )
    monkeypatch.setattr(build, "check_device_records", lambda device: None)
    assert check(chat_recipe(tmp_path, checkpoint, "ppo.generation=graphs")).problems == ()
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.generation=graphs", "base.attn_implementation=eager")
    (problem,) = check(recipe).problems
    assert problem.field == "ppo.generation" and 'of a LlamaForCausalLM with "eager" attention' in problem.wrong
    with pytest.raises(
        ConfigError, match=r'^ppo\.generation: graphs cannot be made of a LlamaForCausalLM with "eager"'
    ):
        plan(recipe, "4090")


def test_prompts_that_pairs_share_are_named_by_the_line_of_a_pair(tmp_path, checkpoint):
    pairs = [{"prompt": prompt, "chosen": "Yes.", "rejected": "No."} for prompt in ("Hot?", "Hot?", "Cold?")]
    (path := tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    recipe = chat_recipe(tmp_path, checkpoint, f"data.train={path}")
    (prompts,) = build.scored_prompts(recipe, ["train"])
    assert [*prompts.places] == [f"{path}, line 2", f"{path}, line 3"]
