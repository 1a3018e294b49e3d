"""Plans of recipes on a tiny checkpoint."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AttentionInterface, LlamaConfig, LlamaForSequenceClassification
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.runs.test_rewards import save_reward
from tests.tiny_models import shared_base
from tests.tiny_runs import REPOSITORY, byte_tokenizer, chat_recipe, command_here, save_llama, texts
from toolkit import recipes
from toolkit.costs import CARDS, Lengths, here, named
from toolkit.errors import ConfigError, ModelError, RecipeError, ToolkitError
from toolkit.models import on_another_machine
from toolkit.runs.check import check
from toolkit.runs.plan import _Planner, _precision_of, plan
from toolkit.runs.plan_report import PhaseTime
from toolkit.trainers.trl_compat import HAS_PPO


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Of two layers, so that what is counted a layer shows."""
    return save_llama(tmp_path_factory.mktemp("checkpoint"), byte_tokenizer(), num_hidden_layers=2)


def phases(report):
    return {memory.phase: memory for memory in report.memory}


def part_of_plan(recipe, asked, gpu="4090"):
    """What is asked of the planner in place of its report, whose many phases are most of the work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Planner, "report", lambda planner, notes: asked(planner))
        return plan(recipe, gpu)


def memory_of(recipe, *names, gpu="4090"):
    """Of these phases alone."""
    return part_of_plan(recipe, lambda planner: {name: planner._with({}, name) for name in names}, gpu)


def static(recipe):
    """Bytes of what all phases hold."""
    return part_of_plan(recipe, lambda planner: planner.static)


def test_a_plan_has_memory_and_time_by_phase(checkpoint, tmp_path):
    recipe, drawn = chat_recipe(tmp_path, checkpoint), torch.get_rng_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    report = plan(recipe, "4090")
    # Of who plans in a notebook; a trainer that is made next would take the plan's device, the CPU, and no scaler.
    assert torch.equal(torch.get_rng_state(), drawn) and not AcceleratorState._shared_state
    found = phases(report)
    assert list(found) == ["reward", "reward evaluation", "rollout", "score", "read", "update", "evaluation"]
    assert [time.phase for time in report.times] == ["prefill", "decode", "score", "read", "update", "optimizer"]
    decode = report.times[1]
    assert decode.seconds > decode.graphs > decode.merged > 0 and report.times[0].graphs is None
    kinds = {kind for memory in report.memory for kind in memory.parts}
    assert {"base", "adapters", "optimizer", "gradients", "KV cache", "activations", "context"} <= kinds
    # Rank 4 on every linear layer of 64 and 128: for policy, value and reward; AdamW's two numbers for the first two.
    lora = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    parts = found["update"].parts
    assert parts["adapters"] == 4 * (3 * lora + 2 * 64) and parts["optimizer"] == 8 * (2 * lora + 64)
    assert parts["gradients"] == 4 * (2 * lora + 64)
    parts = found["reward"].parts  # which trains itself alone
    assert parts["adapters"] == 4 * (lora + 64) and parts["optimizer"] == 8 * (lora + 64)
    # Keys and values of 2 layers of 32 numbers in 16 bits, of 4 rows; the last token's place is made as it is said.
    tokens = report.lengths.prompt + report.lengths.response - 1
    assert found["rollout"].parts["KV cache"] == pytest.approx(2 * 2 * 32 * 2 * 4 * tokens, rel=0.15)
    assert report.fits and "fits RTX 4090 in bfloat16" in str(report) == repr(report)
    needed = report.largest.total
    for limit, verdict in ((needed / 0.89, "fits"), (needed / 0.91, "barely fits"), (needed - 1, "does not fit")):
        assert f"; {verdict} RTX 4090" in str(replace(report, limit=int(limit)))
    assert report.seconds == sum(time.seconds for time in report.times)
    # 1.5 µs is what a kernel of a graph is planned with; and what is left out of the time is said.
    assert re.search(r"Not counted: evaluations .* With CUDA graphs 1\.5 µs replace", report.notes[-2].text())
    assert "what other programs hold are not counted" in report.notes[-1].text()
    several = replace(report, updates=120, times=(PhaseTime("update", 301.0),))
    assert dict(several.summary())["time"] == "an update about 301 s, all 120 of them 10 h, as toolkit plan estimates"


def test_a_plan_does_not_depend_on_what_was_loaded_before_it(checkpoint, tmp_path):
    """Loading a base gives transformers the attention of which the plan is."""
    recipe = chat_recipe(tmp_path, checkpoint, "base.dtype=bfloat16")

    def planned():
        found = memory_of(recipe, "reward", "rollout", "read", "update", "evaluation", gpu=None)
        return [memory.total for memory in found.values()]

    AttentionInterface.register("sdpa", sdpa_attention_forward)
    fresh = planned()
    shared_base()
    assert fresh == planned()


def test_an_evaluation_is_of_the_held_out_rows(checkpoint, tmp_path):
    files = {}
    for name, length in (("short", 5), ("long", 300)):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"prompt": "x" * length + str(n)}) + "\n" for n in range(8)))

    def planned(train, validation):
        data = {"task": "prompts", "train": str(files[train]), "validation": str(files[validation])}
        rule = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}
        made = chat_recipe(tmp_path, checkpoint, data=data, reward=None, scorer=rule)
        found = memory_of(made, "rollout", "read", "update", "evaluation")
        return {name: memory.total for name, memory in found.items()}

    short, long, mixed = planned("short", "short"), planned("long", "long"), planned("short", "long")
    assert long["evaluation"] > short["evaluation"] + 1e6 and mixed["evaluation"] == long["evaluation"]
    assert all(mixed[name] == short[name] < long[name] for name in ("rollout", "read", "update"))


def test_merged_generation_holds_the_weights_a_second_time(checkpoint, tmp_path):
    eager, merged = (
        phases(plan(chat_recipe(tmp_path, checkpoint, f"ppo.generation={how}"), "4090", notes=False))
        for how in ("eager", "merged")
    )
    # Weights of 2 layers in 16 bits; the adapter of rank 4, which is converted once, is not held beside them.
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 128 + 128 * 64)
    adapter = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    more = merged["rollout"].total - eager["rollout"].total
    assert more == pytest.approx(2 * (weights - adapter), rel=0.03)
    assert merged["rollout"].parts["copied weights"] == 2 * weights and "copied weights" not in eager["rollout"].parts
    assert all(merged[name].total == eager[name].total for name in eager if name != "rollout")
    planner = _Planner(chat_recipe(tmp_path, checkpoint, "ppo.generation=merged"), named("4090"))
    assert next(planner._changes("rollout")) == {"generation": "eager"}  # which is what to change first
    both = [
        change
        for change in planner._changes("rollout")
        if len(change.keys() & {"generation", "rollouts_per_update"}) > 1
    ]
    assert both  # where neither is enough


def test_dora_is_planned_in_4_bits(checkpoint, tmp_path):
    recipe = chat_recipe(tmp_path, checkpoint, "adapters.policy.use_dora=true")
    dora, plain = (memory_of(of, "update")["update"] for of in (recipe, chat_recipe(tmp_path, checkpoint)))
    # A magnitude for each output of 2 layers, with its two moments.
    outputs = 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64)
    for kind, factor in (("adapters", 4), ("optimizer", 8)):
        assert dora.parts[kind] - plain.parts[kind] == factor * outputs
    assert dora.total > plain.total + 12 * outputs and texts(check(recipe)) == ()


def test_a_recipe_with_graphs_is_planned_with_them(checkpoint, tmp_path):
    ways = ("eager", "graphs", "merged", "merged_graphs")
    long = "ppo.response_length=400"
    reports = {
        how: plan(chat_recipe(tmp_path, checkpoint, f"ppo.generation={how}", long), "4090", notes=False) for how in ways
    }
    decode = {how: report.times[1] for how, report in reports.items()}
    for how, time in decode.items():
        assert time.phase == "decode" and (time.seconds == time.graphs) == ("graphs" in how)
    assert decode["graphs"].graphs == pytest.approx(decode["eager"].graphs)
    assert decode["merged_graphs"].seconds < decode["graphs"].seconds < decode["eager"].seconds
    card = named("4090")
    with on_another_machine(_precision_of(card)):
        planner = _Planner(chat_recipe(tmp_path, checkpoint, "ppo.generation=graphs", long), card)
        decoded = [phase.costs for phase in planner.update.phases("rollout") if phase.name == "decode"]
    assert planner.lengths == Lengths(105, 400, 512)
    # Keys and values of 2 layers of 32 numbers in 16 bits, of 4 rows: there is room for all tokens, a multiple of 8.
    assert [costs.of_peak["KV cache"] for costs in decoded] == [2 * 2 * 32 * 2 * 4 * 512] * 2
    planner = _Planner(chat_recipe(tmp_path, checkpoint, "ppo.generation=merged_graphs"), named("4090"))
    assert next(planner._changes("rollout")) == {"generation": "graphs"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU, whose rates are measured")
def test_rates_that_were_measured_beside_other_work_are_told(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    planner = _Planner(chat_recipe(tmp_path, checkpoint), here())
    report = planner.report(notes=False)

    def told(load):
        monkeypatch.setattr("psutil.getloadavg", lambda: (load, 0.0, 0.0))
        return [note.text() for note in planner._notes(report) if "busy" in note.text()]

    measured = (REPOSITORY / "docs" / "plan.md").read_text(encoding="utf-8").partition("So with all rows")[2]
    of_page = set(re.findall(r"\d\.\d", measured.partition("\n\n")[0]))
    (assumed,) = (note.text() for note in planner._notes(report) if "phases took" in note.text())
    said = set(re.findall(r"\d\.\d", assumed.partition("phases took")[2]))
    assert said <= of_page and (min(said), max(said)) == (min(of_page), max(of_page))
    assert told(2.0) == []
    assert told(3.5)[0].startswith("this machine is busy (load 3.5 on 4 cores): the rates measured now vary")
    monkeypatch.setattr(_Planner, "_on_cpu", False)
    assert told(9.0) == []


def test_responses_that_were_cut_are_read_by_the_value_role_once_more(checkpoint, tmp_path):
    def read(*given):
        recipe = chat_recipe(tmp_path, checkpoint, *given)
        parts = part_of_plan(recipe, lambda planner: planner.update.phases("read"))
        return sum(part.seconds(named("4090")) for part in parts)

    assert 1.2 * read() < read("ppo.truncated_as=bootstrap")


def test_steps_of_stages_that_train_a_role(checkpoint, tmp_path):
    recipe = chat_recipe(tmp_path, checkpoint, sft={"max_steps": 2, "per_device_train_batch_size": 3, "max_length": 16})
    pairs = recipe.task.pairs("train")
    longest = max(len(ids) for side in ("chosen_ids", "rejected_ids") for ids in pairs[side])
    report = plan(recipe, "4090")
    said = [note.text() for note in report.notes]
    assert said[0].startswith("sft has 3 rows of 16 tokens at a time; a step takes about ")
    assert said[1].startswith(f"reward has 2 pairs of 2 × {longest} tokens at a time; a step takes about ")
    assert [memory.phase for memory in report.memory][:4] == ["sft", "sft evaluation", "reward", "reward evaluation"]
    assert not (tmp_path / "runs").exists()
    limited = {"data.max_prompt_length=20", "data.max_response_length=10", "reward.per_device_train_batch_size=1"}
    limited |= {"reward.activation_offloading=true"}  # for which TRL asks for a card
    said = [note.text() for note in plan(chat_recipe(tmp_path, checkpoint, *limited), "24GB").notes]
    assert said[0] == "reward has 1 pair of 2 × 30 tokens at a time."


def test_a_step_on_a_card_has_a_copy_of_its_gradients_and_its_outputs_in_float32(checkpoint, tmp_path, monkeypatch):
    sft = {"max_steps": 2, "per_device_train_batch_size": 3, "max_length": 16, "loss_type": "nll"}
    recipe = chat_recipe(tmp_path, checkpoint, "reward.gradient_accumulation_steps=2", sft=sft)
    found = memory_of(recipe, "sft", "reward")
    lora = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    assert found["reward"].parts["gradients"] == 2 * 4 * (lora + 64)
    monkeypatch.setattr("toolkit.costs.supervised.convert_outputs_to_fp32", lambda forward: forward)
    rows, tokens, vocabulary = 3, 16, recipe.tokenizer.vocab_size
    without = memory_of(recipe, "sft")
    if HAS_PPO:  # later TRL makes no logits of whole rows
        assert found["sft"].total - without["sft"].total >= 4 * rows * tokens * vocabulary


def test_a_value_model_in_4_bits_is_planned_in_4_bits(checkpoint, tmp_path):
    def planned(quantization):
        value_model = {"model": str(checkpoint), "dtype": "bfloat16", "quantization": quantization}
        return static(chat_recipe(tmp_path, checkpoint, value_model=value_model))["base"]

    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    ours, whole = planned(nf4), planned(None)
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # of 2 layers, 2 bytes a weight where it is half a one
    assert whole - ours == pytest.approx(1.5 * linear, rel=0.15)


def test_a_checkpoint_that_is_quantised_already_takes_what_one_does_that_loading_quantises(checkpoint, tmp_path):
    quantised = Path(shutil.copytree(checkpoint, tmp_path / "quantised"))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    (quantised / "config.json").write_text(json.dumps(config))
    asked, found = chat_recipe(tmp_path, checkpoint), chat_recipe(tmp_path, quantised, "base.quantization=null")
    assert static(found)["base"] == static(asked)["base"]
    assert check(found).base.gigabytes == check(asked).base.gigabytes


CLASSIFIER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHTS = "adapter_model.safetensors"
ADAPTERS = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")}


def bytes_of_classifier(*, vocabulary, labels):
    """In float32: embeddings, the layer, three norms, the head, and the frequencies of rotary embeddings twice."""
    return 4 * (vocabulary * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32 + labels * 32 + 2 * 8)


def test_models_that_reward_and_judge_load_are_counted(checkpoint, tmp_path):
    config = LlamaConfig(vocab_size=50, pad_token_id=0, num_labels=2, **CLASSIFIER)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    own = {"kind": "model", "model": str(tmp_path / "classifier"), "dtype": "float32"}
    rule = {"kind": "function", "function": "rules:rule"}
    sections = {"scorer": {"kind": "sum", "parts": {"a": own, "b": rule}}, "judge": own, "adapters": ADAPTERS}
    found = static(chat_recipe(tmp_path, checkpoint, reward=None, **sections))
    assert found["reward models"] == 2 * bytes_of_classifier(vocabulary=50, labels=2)
    alone = {"scorer": rule, "adapters": ADAPTERS}
    without = static(chat_recipe(tmp_path, checkpoint, reward=None, **alone))
    assert {name: size for name, size in found.items() if name != "reward models"} == without


def test_each_adapter_of_a_sum_is_held_and_reads_the_responses(checkpoint, tmp_path):
    folders = [save_reward(checkpoint, tmp_path / f"reward-{seed}", seed) for seed in (1, 2)]
    parts = {f"part-{folder.name}": {"kind": "adapter", "adapter": str(folder)} for folder in folders}
    both, one = {"kind": "sum", "parts": parts}, {"kind": "sum", "parts": dict([*parts.items()][:1])}

    def asked(**sections):
        recipe = chat_recipe(tmp_path, checkpoint, adapters=ADAPTERS, reward=None, **sections)
        read = ("score", "evaluation")
        return part_of_plan(recipe, lambda to: (to.static["adapters"], *(to.update.phases(name) for name in read)))

    held, score, evaluation = asked(scorer=one)
    more, scores, evaluations = asked(scorer=both, judge=both)
    assert more - held == 3 * sum(4 * tensor.numel() for tensor in load_file(folders[0] / WEIGHTS).values())
    assert len(score) == 1 and [phase.costs.kernels for phase in scores] == [score[0].costs.kernels] * 2
    assert score[0].costs.kernels and {phase.times for phase in scores} == {score[0].times}
    assert len(evaluations) == len(evaluation) + 3


@pytest.mark.parametrize("this_machine_has_bfloat16", [True, False])
def test_models_beside_the_base_are_in_the_named_card_s_precision_too(
    this_machine_has_bfloat16, checkpoint, tmp_path, monkeypatch
):
    config = LlamaConfig(vocab_size=50, pad_token_id=0, num_labels=1, **CLASSIFIER)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    for unit in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, unit, lambda: this_machine_has_bfloat16)
    scorer = {"kind": "model", "model": str(tmp_path / "classifier")}
    recipe = chat_recipe(tmp_path, checkpoint, reward=None, scorer=scorer, adapters=ADAPTERS)
    # In 16 bits, but for the frequencies of rotary embeddings.
    in_32 = bytes_of_classifier(vocabulary=50, labels=1)
    asked = part_of_plan(recipe, lambda planner: (planner.static["reward models"], recipe.precision("ppo").dtype))
    assert asked == (in_32 // 2 + 2 * 2 * 8, "bfloat16")


@pytest.mark.parametrize(
    ("max_length", "rows", "row"),
    [
        (40, "39 + 6 tokens, 40 in all,", (34, 6)),
        (5, None, (1, 4)),
        (64, "63 + 6 tokens, 64 in all,", (58, 6)),
        (80, None, (64, 6)),
        ("null", "64 + 6 tokens, all", (64, 6)),
    ],
)
def test_rows_that_are_bounded_in_all(max_length, rows, row, checkpoint, tmp_path):
    """A batch has the longest prompt and the longest response, which are not of one row."""
    recipe = chat_recipe(tmp_path, checkpoint, "data.max_prompt_length=64", f"ppo.max_length={max_length}")
    assert _Planner(recipe, named("4090")).lengths.of_a_row == Lengths(*row)
    if rows is None:
        return
    report = plan(recipe, "4090", notes=False)
    assert f"rows of {rows}" in str(report)
    # Keys and values of 2 layers of 32 numbers in 16 bits, of 4 rows.
    tokens = report.lengths.prompt + report.lengths.response - 1
    assert phases(report)["rollout"].parts["KV cache"] == pytest.approx(2 * 2 * 32 * 2 * 4 * tokens, rel=0.15)


def test_no_row_is_longer_than_the_base_has_positions_for(checkpoint, tmp_path):
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.response_length=4000")
    lengths = part_of_plan(recipe, lambda planner: planner.lengths)
    config = json.loads((checkpoint / "config.json").read_text())
    assert lengths.both == config["max_position_embeddings"]
    row = lengths.of_a_row
    assert row.prompt + row.response == lengths.both


def test_rows_of_other_stages_have_all_positions_of_the_base(checkpoint, tmp_path):
    """Not those of a value model alone, nor the first ones that rollouts of LongRoPE keep to."""
    small = save_llama(tmp_path / "small", byte_tokenizer(), max_position_embeddings=32)
    value = {"model": str(small), "dtype": "float32"}
    keys = ("data.max_prompt_length=24", "data.max_response_length=24")
    report = plan(chat_recipe(tmp_path, checkpoint, *keys, value_model=value), "4090")
    assert "reward has 2 pairs of 2 × 48 tokens" in str(report) and report.lengths.both == 32


@pytest.mark.parametrize("kind", ["lfm2", "mixtral", "openai-gpt", "qwen2"])
def test_any_architecture_is_planned(kind, tmp_path):
    """Layers without keys, experts in float32, no gradient checkpointing, and kinds of layers by which caches are."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
    own = {
        "lfm2": {**sizes, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        "mixtral": {**sizes, "num_key_value_heads": 2, "num_local_experts": 4},
        "openai-gpt": {"n_embd": 64, "n_head": 4, "n_layer": 2},
        "qwen2": {**sizes, "num_key_value_heads": 2, "num_hidden_layers": 5},
    }[kind]
    stage = {"max_steps": 2, "gradient_checkpointing": False}
    values = recipes.load("doubling").values | {"base": {"config": {"model_type": kind, **own}, "dtype": "float32"}}
    values = {key: value for key, value in values.items() if key not in ("about", "reward", "reward_head", "scorer")}
    values |= {"sft": stage, "scorer": {"kind": "function", "function": "statistics:fmean"}}
    values |= {"adapters": {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")}}
    values |= {"ppo": {**stage, "response_length": 8}}
    recipe = recipes.load(values, run="planned", runs_dir=tmp_path)
    report = plan(recipe, "4090" if kind == "qwen2" else None)
    assert any(time.graphs for time in report.times) is (kind == "qwen2")
    if kind == "openai-gpt":  # which has a table of them: no more than what a prompt and its response take
        prompt = report.lengths.prompt
        values["ppo"]["response_length"] = 16 - prompt % 8  # rows are read in eights
        values["base"]["config"] |= {"n_positions": prompt + values["ppo"]["response_length"]}
        report = plan(recipes.load(values, run="planned", runs_dir=tmp_path))
    assert all(phase.total > 0 for phase in report.memory) and len(report.times) == 5
    assert any("gradient checkpointing" in str(note) for note in report.notes) is (kind != "openai-gpt")


def test_graphs_are_not_planned_for_a_cpu(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"ppo\.generation: graphs are of CUDA .* Name a GPU \(gpu="):
        plan(chat_recipe(tmp_path, checkpoint, "ppo.generation=graphs"))


def test_a_card_that_is_not_known_is_planned_by_its_memory(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.runs.plan.here", lambda: 8 * 10**9)
    report = plan(chat_recipe(tmp_path, checkpoint))
    assert report.fits and report.limit == 8 * 10**9 and report.times == ()
    assert "time: not planned, for want of the GPU's limits." in str(report)


def test_a_model_that_the_reward_stage_trains_is_counted(checkpoint, tmp_path):
    own = {"config": {"model_type": "llama", **CLASSIFIER}}
    sections = {"scorer": {"kind": "model"}, "reward_model": own, "adapters": ADAPTERS}
    found = static(chat_recipe(tmp_path, checkpoint, **sections))
    assert found["reward models"] == bytes_of_classifier(vocabulary=len(byte_tokenizer()), labels=1)


def test_on_a_card_without_bfloat16_it_is_float16(checkpoint, tmp_path):
    for overrides, dtype in (((), "float16"), (("base.dtype=float32",), "float32")):
        recipe = chat_recipe(tmp_path, checkpoint, *overrides)
        assert part_of_plan(recipe, lambda planner: planner.recipe.precision("ppo").dtype, "T4") == dtype


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_where_it_does_not_fit_what_would_is_named(checkpointing, checkpoint, tmp_path):
    keys = ("ppo.response_length=64", "data.max_prompt_length=64", f"ppo.gradient_checkpointing={checkpointing}")
    planner = _Planner(chat_recipe(tmp_path, checkpoint, *keys), 10**9)
    report = planner.report(notes=False)
    whole, planner.limit = report.largest, int(report.largest.total / 0.9) - 1000  # so that it barely fits
    report = replace(report, limit=planner.limit)
    (said,) = [note.text() for note in planner._notes(report) if "takes" in note.text()]
    assert report.verdict == "barely fits" and report.times == () and "(FSDP) is not supported" in said
    changes = re.findall(r"\w+\.\w+=\w+", said)
    stage = "reward" if whole.phase.startswith("reward") else "ppo"
    assert all(change.startswith(f"{stage}.") for change in changes)
    assert changes and said.startswith(f"{whole.phase} takes")
    changed = _Planner(chat_recipe(tmp_path, checkpoint, *keys, *changes), planner.limit)
    assert changed._with({}, whole.phase).total < 0.9 * planner.limit  # as promised


def test_what_would_barely_fit_is_better_than_nothing(checkpoint, tmp_path):
    keys = ("ppo.response_length=64", "data.max_prompt_length=64", "ppo.gradient_checkpointing=false")
    planner = _Planner(chat_recipe(tmp_path, checkpoint, *keys), 10**9)
    report = planner.report(notes=False)
    largest = report.largest
    least = min(planner._with(change, largest.phase).total for change in planner._changes(largest.phase))
    assert least < largest.total - 2
    for limit, told in ((least + 1, "which barely fits."), (least - 1, "Shorten the rows")):
        planner.limit = limit
        said = planner._way_out(replace(report, limit=limit)).text()
        assert told in said
    planner.limit = int(largest.total / 0.95)
    report = replace(report, limit=planner.limit)
    assert report.verdict == "barely fits" and "weights and optimizer alone take" in planner._way_out(report).text()


@pytest.mark.parametrize(
    ("rows", "steps", "learnt", "generated"),
    [
        (9, 1, [(3, 3), (1, 9)], [(3, 1, 3), (1, 1, 9)]),
        (2, 3, [(1, 6)], [(1, 3, 2), (2, 1, 3), (1, 1, 6)]),
    ],
)
def test_rows_are_divided_down_to_one(rows, steps, learnt, generated, checkpoint, tmp_path):
    keys = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "num_mini_batches": 1}
    of_ppo = [f"ppo.{key}={value}" for key, value in keys.items()]
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.gradient_checkpointing=true", *of_ppo)
    planner = _Planner(recipe, named("4090"))
    found = [(c["per_device_train_batch_size"], c["gradient_accumulation_steps"]) for c in planner._changes("update")]
    assert found == learnt
    changes = [{**keys, "rollouts_per_update": 1, **change} for change in planner._changes("rollout")]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "rollouts_per_update")
    assert [tuple(change[name] for name in names) for change in changes] == generated
    assert {change[names[0]] * change[names[1]] * change[names[2]] for change in changes} == {rows * steps}


def test_what_no_key_makes_fit_needs_another_card(checkpoint, tmp_path):
    report = plan(chat_recipe(tmp_path, checkpoint), "0.5GB")
    (said,) = [note.text() for note in report.notes if "alone" in note.text()]
    assert "weights and optimizer alone take" in said and "Take a GPU as T4. One base over several" in said


def test_what_is_not_planned_says_so(checkpoint, tmp_path):
    with pytest.raises(RecipeError, match='no section "ppo"'):
        plan(recipes.load("doubling_q"))
    with pytest.raises(ToolkitError, match="neither a known GPU"):
        plan(chat_recipe(tmp_path, checkpoint), "toaster")


def test_a_recipe_from_nothing_is_planned_here():
    report = plan(recipes.load("doubling"))
    assert report.times and report.largest.total > 0
    assert next(iter(phases(report))) == "reward"  # of classes, one sequence each
    said = [note.text() for note in report.notes]
    assert re.match(r"reward has \d+ rows of \d+ tokens at a time; a step takes about ", said[0])
    assert report.left_out == ("sft",)
    assert dict(report.summary())["memory"].endswith("; sft, which trains a model of its own, is not planned")
    assert "Each of several processes takes as much" in said[-1]
    assert torch.cuda.is_available() or all(time.graphs is None for time in report.times)


def test_the_command_and_the_end_of_check(checkpoint, tmp_path):
    chat_recipe(tmp_path, checkpoint)
    done = command_here("plan", tmp_path / "chat.yaml", "--gpu", "h100", cwd=tmp_path)
    assert done.returncode == 0 and "with CUDA graphs" in done.stdout and "H100 SXM" in done.stdout
    checked = command_here("check", tmp_path / "chat.yaml", cwd=tmp_path).stdout.splitlines()
    assert checked[-2].startswith("memory     ") and checked[-1].startswith("time       an update about ")
    assert re.search(r" m?s, all 2 of them [\d.]+ s, as toolkit plan estimates", checked[-1])
    wrong = command_here("plan", tmp_path / "chat.yaml", "--gpu", "toaster", cwd=tmp_path)
    assert wrong.returncode == 1 and "Name one of T4" in wrong.stderr


def test_every_card_has_its_limits():
    for card in CARDS.values():
        assert 10e9 < card.memory < 200e9 and 1e11 < card.bandwidth < 1e13 and card.graphs
        assert card.peak[torch.float16] > card.peak[torch.float32] > 1e12


SFT = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_stages_that_evaluate_as_they_train_are_planned(stage, checkpoint, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1}
    plain = chat_recipe(tmp_path, checkpoint, sft=SFT)
    changed = chat_recipe(tmp_path, checkpoint, **{"sft": SFT, stage: {**plain.values[stage], **settings}})
    (expected, _), (found, _) = (_Planner(recipe, named("4090"))._supervised(stage) for recipe in (plain, changed))
    assert [memory.total for memory in found] == [memory.total for memory in expected] and found[0].phase == stage


def test_settings_of_which_trl_makes_no_trainer_are_an_error_of_their_stage(checkpoint, tmp_path):
    by_its_type = "sft.loss_type — nll or dft or chunked_nll is needed, got 'foo'"  # where TRL says which there are
    with pytest.raises(
        RecipeError, match=f"^sft: TRL makes no trainer of these settings: Invalid `loss_type` foo|{by_its_type}"
    ):
        plan(chat_recipe(tmp_path, checkpoint, sft={**SFT, "loss_type": "foo"}), "4090")


def test_what_an_update_cannot_have_is_an_error_of_its_section(checkpoint, tmp_path, monkeypatch):
    def refuses(*given):
        raise ModelError("there is none.", field="gradient_checkpointing")

    monkeypatch.setattr("toolkit.runs.plan.CountedUpdate.phases", refuses)
    with pytest.raises(ModelError, match=r"^ppo\.gradient_checkpointing: there is none"):
        _Planner(chat_recipe(tmp_path, checkpoint), named("4090")).report(notes=False)


def test_a_base_that_is_not_there_is_named_by_its_key(tmp_path):
    with pytest.raises(ModelError) as error:
        plan(recipes.load("llama3_8b_lora", f"base.model={tmp_path}/gone", run="plan"), "T4")
    assert [problem.field for problem in error.value.problems] == ["base.model"]


ABSENT = {
    "adapters.policy.target_modules=[nope]": "adapters.policy.target_modules",
    "start.policy=/nope": "start.policy",
    "scorer={kind: model, model: /nope}": "scorer.model",
    "scorer={kind: sum, parts: {one: {kind: model, model: /nope}}}": "scorer.parts.one.model",
    "judge={kind: model, model: /nope}": "judge.model",
    "value_model={model: /nope}": "value_model.model",
}


@pytest.mark.parametrize(("override", "key"), ABSENT.items(), ids=ABSENT)
def test_what_is_not_there_is_named_by_its_key(override, key, checkpoint, tmp_path):
    with pytest.raises(ToolkitError) as error:
        plan(chat_recipe(tmp_path, checkpoint, override), "4090")
    assert [problem.field for problem in error.value.problems] == [key]
