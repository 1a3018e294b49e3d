import json
import math
import shutil
import sys
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from tests.tiny_models import ARCHITECTURES, lora, shared_base, tiny_model
from tests.tolerances import FP32
from toolkit.data import pad_rows
from toolkit.errors import AdapterError
from toolkit.models import SharedBase, base_digest, load_role, load_weights, save_level, save_role, sequence_logits
from toolkit.models import lora as module
from toolkit.runs.build import _pad_token_of
from toolkit.time_limit import time_limit

ROWS = [[1, 5, 6, 7, 2], [1, 9, 8, 2], [1, 30, 31, 32, 33, 34, 2]]
SAVE = {"pad_token_id": 0, "base_name": "tiny"}


def scores(base, pad_token_id=0):
    ids, mask = pad_rows(ROWS, pad_token_id=pad_token_id, side="right")
    with torch.no_grad():
        return sequence_logits(base, ids, mask, pad_token_id=pad_token_id)


def bare(architecture="llama"):
    return SharedBase(tiny_model(architecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("labels", [1, 3])
def test_reward_loads_with_auto_peft_and_gives_the_same_scores(architecture, labels, tmp_path):
    base = shared_base(labels=labels, architecture=architecture)
    tiny_model(architecture).save_pretrained(tmp_path / "base")
    folder = save_role(base, "reward", tmp_path / "reward", pad_token_id=0, base_name=str(tmp_path / "base"))
    plain = AutoPeftModelForSequenceClassification.from_pretrained(str(folder), num_labels=labels).eval()
    ids, mask = pad_rows(ROWS, pad_token_id=0, side="right")
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids, attention_mask=mask).logits, scores(base), **FP32)


@pytest.mark.parametrize("role", ["value", "reward", "policy"])
@pytest.mark.parametrize("value", ["separate", "shared"])
def test_round_trip(role, value, tmp_path):
    base = shared_base(value=value, labels=3)
    save_role(base, role, tmp_path / role, **SAVE)
    other = bare()
    if role == "value" and value == "shared":
        other.add_role("policy", lora())
    about = load_role(other, role, tmp_path / role)
    assert about["role"] == role and about.get("pad_token_id", 0) == 0
    for ours, theirs in zip(other.parameters_of(role), base.parameters_of(role), strict=True):
        assert torch.equal(ours, theirs)


def test_a_value_role_of_another_form_takes_the_place_of_an_earlier_one(tmp_path):
    for value in ("shared", "separate", "shared"):
        base, other = shared_base(value=value), bare()
        save_role(base, "value", tmp_path, **SAVE)
        other.add_role("policy", lora())
        load_role(other, "value", tmp_path)
        assert other.shares_value is (value == "shared")
        for ours, theirs in zip(other.parameters_of("value"), base.parameters_of("value"), strict=True):
            assert torch.equal(ours, theirs)


def test_what_held_out_responses_scored_stays_with_the_adapter(tmp_path):
    folder = save_role(shared_base(), "reward", tmp_path / "reward", **SAVE)
    save_level(folder, [9.0] * 99)  # too few
    load_role(unknown := bare(), "reward", folder)
    save_level(folder, [float(i) for i in range(101)])
    about = load_role(known := bare(), "reward", folder)
    levels = [(head.mean_score, head.high_score) for head in (unknown.head("reward"), known.head("reward"))]
    assert levels == [(9.0, None), (50.0, 99.0)]
    load_role(again := bare(), "reward", save_role(known, "reward", tmp_path / "again", **SAVE))
    assert (again.head("reward").mean_score, again.head("reward").high_score) == (50.0, 99.0)
    known.train_roles("reward")  # whose scores are others by then
    load_role(later := bare(), "reward", save_role(known, "reward", tmp_path / "later", **SAVE))
    assert (later.head("reward").mean_score, later.head("reward").high_score) == (None, None)
    assert about["num_labels"] == 1 and about["role"] == "reward"


def test_weights_go_back_into_a_role(tmp_path):
    base = shared_base()
    for role in ("policy", "value"):
        save_role(base, role, tmp_path / role, **SAVE)
        saved = [p.clone() for p in base.parameters_of(role)]
        with torch.no_grad():
            for p in base.parameters_of(role):
                p.add_(1.0)
        load_weights(base, role, tmp_path / role)
        assert all(torch.equal(p, s) for p, s in zip(base.parameters_of(role), saved, strict=True))


@pytest.mark.parametrize("pad", ["P", "E"])  # pad ≠ eos and pad == eos
def test_an_adapter_of_plain_trl_gives_its_own_scores_here(pad, tmp_path, tokenizer):
    tokenizer.pad_token = pad
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    pairs = {"chosen_ids": [[*r[:-1], 9, 2] for r in ROWS] * 4, "rejected_ids": [[*r[:-1], 20, 2] for r in ROWS] * 4}
    trainer = RewardTrainer(
        model=classifier,
        args=RewardConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "trl"))
    pad_token_id = tokenizer.pad_token_id
    ids, mask = pad_rows(ROWS, pad_token_id=pad_token_id, side="right")
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(input_ids=ids, attention_mask=mask).logits
    base = bare()
    base.add_role("policy", lora())
    assert load_role(base, "reward", tmp_path / "trl") == {"pad_token": pad}
    torch.testing.assert_close(scores(base, pad_token_id), expected, **FP32)
    assert expected.std() > 0
    path = tmp_path / "trl" / "tokenizer_config.json"
    said = json.loads(path.read_text()) | {"pad_token": {"__type": "AddedToken", "content": pad}}  # of transformers 4
    path.write_text(json.dumps(said))
    assert load_role(bare(), "reward", tmp_path / "trl") == {"pad_token": pad}


def test_weights_of_another_scaling_are_refused(tmp_path):
    """They have the same names and shapes, and would compute something else."""
    base = bare()
    base.add_role("policy", lora())
    save_role(base, "policy", tmp_path, pad_token_id=0, base_name="tiny")
    for other in ({"lora_alpha": 1}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}):
        again = bare()
        again.add_role("policy", replace(lora(), **other))
        with pytest.raises(AdapterError, match=rf"adapter_config.json: {next(iter(other))} is .* that of the role"):
            load_weights(again, "policy", tmp_path)


def test_a_missing_head_is_an_error_and_never_random(tmp_path):
    get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path)
    for role in ("reward", "value"):
        with pytest.raises(AdapterError, match="needs one score head and the adapter holds 0; a random head"):
            load_role(bare(), role, tmp_path)


def with_tensors(change):
    def changed(folder):
        state = load_file(folder / "adapter_model.safetensors")
        change(state, next(name for name in state if ".score.weight" in name))
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return changed


def with_config(**values):
    def changed(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_tensors(lambda state, head: state.update({head: state[head][:0]})), "its head is no matrix of weights"),
        (with_tensors(lambda state, head: state.update({head: state[head].to(torch.int8)})), "score.weight is int8"),
        (with_tensors(lambda state, head: state.update({head: state[head].to(torch.float8_e4m3fn)})), "float8_e4m3fn"),
        (with_config(modules_to_save=5), "modules_to_save is 5, and names of modules are needed"),
        (with_config(modules_to_save=[None]), r"modules_to_save is \[None\]"),
        (with_config(lora_alpha=10**400), "lora_alpha is 1000.*finite numbers are needed"),
        (with_config(r=2**31), "a rank is larger than 65,536"),
        (with_config(r="4"), "adapter_config.json"),
        (with_config(rank_pattern={"q_proj": 2**31}), "a rank is larger than 65,536"),
    ],
)  # fmt: skip
def test_damaged_tensors_and_settings(change, said, tmp_path):
    folder = save_role(shared_base(), "reward", tmp_path, **SAVE)
    change(folder)
    with pytest.raises(AdapterError, match=said):
        load_role(bare(), "reward", folder)


def test_bad_folders(tmp_path):
    base = shared_base()
    good = save_role(base, "reward", tmp_path / "good", **SAVE)

    def broken(name, change):
        folder = tmp_path / name
        shutil.copytree(good, folder)
        change(folder)
        return folder

    with pytest.raises(AdapterError, match="there is no folder"):
        load_role(bare(), "reward", tmp_path / "nowhere")

    three = save_role(shared_base(labels=3), "reward", tmp_path / "three", **SAVE)
    without_value = bare()
    with pytest.raises(AdapterError, match="three.*a value is one number per token, and this head has 3 outputs"):
        load_role(without_value, "value", three)
    assert without_value.roles == ()

    def flat(folder):
        state = load_file(folder / "adapter_model.safetensors")
        flat = {name: tensor.flatten() if ".score." in name else tensor for name, tensor in state.items()}
        save_file(flat, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    with pytest.raises(AdapterError, match="flat: its head is no matrix of weights"):
        load_role(bare(), "reward", broken("flat", flat))

    with pytest.raises(AdapterError, match=r"adapter_config.json is missing"):
        load_role(bare(), "reward", broken("a", lambda f: (f / "adapter_config.json").unlink()))
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is missing"):
        load_role(bare(), "reward", broken("b", lambda f: (f / "adapter_model.safetensors").unlink()))
    with pytest.raises(AdapterError, match="pickle"):
        load_role(
            bare(),
            "reward",
            broken("c", lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin")),
        )
    with pytest.raises(AdapterError, match="damaged"):
        load_role(bare(), "reward", broken("d", lambda f: (f / "adapter_model.safetensors").write_bytes(b"\0" * 40)))
    with pytest.raises(AdapterError, match=r"role.json cannot be read"):
        load_role(bare(), "reward", broken("e", lambda f: (f / "role.json").write_text("{")))
    odd = (
        "[]",
        '{"high_score": "x"}',
        '{"high_score": NaN}',
        '{"mean_score": NaN}',
        '{"pad_token_id": "x"}',
        '{"pad_token_id": true}',
        f'{{"pad_token_id": {10**30}}}',
    )
    for number, text in enumerate(odd):
        folder = broken(f"e{number}", lambda f, text=text: (f / "role.json").write_text(text))
        with pytest.raises(AdapterError, match=r"role.json(:| is damaged).*Copy it again, or train the role again"):
            load_role(bare(), "reward", folder)
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be read: .*Train or copy it again"):
        load_role(bare(), "reward", broken("e9", lambda f: (f / "adapter_config.json").write_text("[]")))
    with pytest.raises(AdapterError, match="belongs to another base.*Name the base that it was trained on"):
        load_role(bare("gpt2"), "reward", good)

    def other_size(folder):
        path = folder / "adapter_model.safetensors"
        state = load_file(path)
        key = min(k for k in state if "lora_A" in k)
        state[key] = state[key][:, :-1].contiguous()
        save_file(state, path)

    with pytest.raises(AdapterError, match=r"first: it is \[4, 63\] there and \[4, 64\] here"):
        load_role(bare(), "reward", broken("f", other_size))

    def other_head(folder):
        path = folder / "adapter_model.safetensors"
        state = load_file(path)
        state["base_model.model.score.weight"] = torch.zeros(1, 7)
        save_file(state, path)

    with pytest.raises(AdapterError, match=r"head.weight first: it is \[1, 7\] there and \[1, 32\] here"):
        load_role(bare(), "reward", broken("g", other_head))

    def other_modules(folder):
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "modules_to_save": ["lm_head", "score"]}))

    with pytest.raises(AdapterError, match="replaces lm_head of the base"):
        load_role(bare(), "reward", broken("h", other_modules))

    def other_kind(folder):
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM"})
        )

    with pytest.raises(AdapterError, match="the roles here are LoRA adapters"):
        load_role(bare(), "reward", broken("i", other_kind))
    for number, (changes, message) in enumerate({
        ("lora_alpha", math.nan): r"adapter_config.json: lora_alpha is nan, and finite numbers are needed\. Train",
        ("alpha_pattern", "q_proj"): r"adapter_config.json: alpha_pattern is 'q_proj', and finite numbers are needed",
        ("target_modules", "(q_proj"): r"adapter_config.json: target_modules: '\(q_proj' is no pattern of module n",
    }.items()):  # fmt: skip
        name, value = changes

        def other_setting(folder, name=name, value=value):
            path = folder / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

        with pytest.raises(AdapterError, match=message):
            load_role(bare(), "reward", broken(f"j{number}", other_setting))
    shared = shared_base(value="shared")
    save_role(shared, "value", tmp_path / "shared", **SAVE)
    with pytest.raises(AdapterError, match='cannot be the role "reward"'):
        load_role(bare(), "reward", tmp_path / "shared")


def test_a_role_that_cannot_be_loaded_is_not_there_afterwards(tmp_path):
    """It would be there with random weights, and stand in the way of the right folder."""
    base = shared_base()
    save_role(base, "reward", tmp_path / "whole", **SAVE)
    weights = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    name = next(name for name in weights if "lora_A" in name)
    save_file({key: t for key, t in weights.items() if key != name}, tmp_path / "cut" / "adapter_model.safetensors")
    for roles in ((), ("policy",)):  # as the first adapter, and as another
        other = SharedBase(tiny_model())
        for role in roles:
            other.add_role(role, lora())
        with pytest.raises(AdapterError, match="belongs to another base"):
            load_role(other, "reward", tmp_path / "cut")
        assert other.roles == roles and not [n for n, _ in other.named_parameters() if "reward" in n]
        load_role(other, "reward", tmp_path / "whole")
        for ours, theirs in zip(other.parameters_of("reward"), base.parameters_of("reward"), strict=True):
            assert torch.equal(ours, theirs)


def test_bases_are_told_apart_and_adapters_make_no_difference():
    base, other = SharedBase(tiny_model()), SharedBase(tiny_model())
    assert base_digest(base) == base_digest(other)
    base.add_role("policy", lora())
    assert base_digest(base) == base_digest(other)
    with torch.no_grad():
        other.causal_lm.model.norm.weight.add_(1e-3)
    assert base_digest(base) != base_digest(other)


@pytest.mark.parametrize(("field", "pattern"), [
    # As PEFT searches with it: these would end soon with something before them, or behind.
    ("target_modules", r"\w+|([\w.]+)+!"),
    ("exclude_modules", r"\w+|([\w.]+)+!"),
    ("layers_pattern", r"([\w.]+)+(?:$|!)"),
    ("rank_pattern", r"(\w+\.?)+!"),
])  # fmt: skip
def test_a_pattern_that_tries_every_way_is_refused_in_time(field, pattern, monkeypatch):
    monkeypatch.setattr(module, "time_limit", partial(time_limit, 0.15))
    given = {"target_modules": ["q_proj"], "layers_to_transform": [0] if field == "layers_pattern" else None}
    given |= {field: {pattern: 2} if field == "rank_pattern" else pattern}
    with pytest.raises(AdapterError, match=f"^{field}: the pattern .* takes too long on the names"):
        bare().add_role("policy", LoraConfig(task_type="CAUSAL_LM", r=4, **given))


def test_a_pattern_that_pefts_search_takes_is_taken():
    """Python takes a flag at the beginning alone."""
    base = bare()
    base.add_role("policy", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=r"(?i).*\.Q_PROJ"))
    assert {name.split(".")[-4] for name, _ in base.named_parameters() if "lora_A" in name} == {"q_proj"}


def test_a_head_is_read_with_the_pad_token_that_it_was_trained_with():
    """That of `role.json`, or that of a tokenizer beside TRL's adapter; else the policy's own."""
    recipe = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"<pad>": 5}))
    for about, expected in (({"pad_token_id": 0, "pad_token": "<pad>"}, 0), ({"pad_token": "<pad>"}, 5), ({}, 2)):
        assert _pad_token_of(about, recipe, 2) == expected


def test_a_value_head_of_other_tools_is_no_reward(tmp_path):
    base = shared_base()
    folder = save_role(base, "policy", tmp_path / "theirs", **SAVE)
    save_file({"v_head.summary.weight": torch.ones(1, 8)}, folder / "value_head.safetensors")
    for role in ("reward", "value"):
        with pytest.raises(AdapterError, match="as TRL's AutoModelForCausalLMWithValueHead and LLaMA-Factory save it"):
            load_role(bare(), role, folder)
    other = bare()
    load_role(other, "policy", folder)  # it is that of a good policy
    pairs = zip(base.parameters_of("policy"), other.parameters_of("policy"), strict=True)
    assert all(torch.equal(mine, theirs) for theirs, mine in pairs)


def test_an_adapter_of_pefts_on_a_tied_head_comes_with_a_copy_too(tmp_path):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn", "lm_head"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of tied weights
        get_peft_model(tiny_model("gpt2"), config).save_pretrained(tmp_path)
    assert any(".base_layer." in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    load_role(bare("gpt2"), "policy", tmp_path)


def test_an_adapter_of_pefts_on_the_head_comes_with_a_copy_of_the_base(tmp_path):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "lm_head"])
    made = get_peft_model(tiny_model(), config)
    made.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    state = load_file(path)
    (copied,) = (name for name in state if ".base_layer." in name)
    load_role(bare(), "policy", tmp_path)
    save_file({**state, copied: state[copied] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="brings base_model.model.lm_head of its own, which all roles would share"):
        load_role(bare(), "policy", tmp_path)


@pytest.mark.parametrize("other", ["values", "rows"])
def test_embeddings_that_peft_was_asked_to_save_are_the_base_s_or_refused(other, tmp_path):
    made = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    made.save_pretrained(tmp_path, save_embedding_layers=True)
    path, name = tmp_path / "adapter_model.safetensors", "base_model.model.model.embed_tokens.weight"
    state = load_file(path)
    load_role(bare(), "policy", tmp_path)
    others = {"values": state[name] + 1, "rows": torch.cat([state[name], state[name][:1]])}
    save_file({**state, name: others[other]}, path, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="brings base_model.model.model.embed_tokens of its own, .* merge it into"):
        load_role(bare(), "policy", tmp_path)


@pytest.mark.parametrize(
    ("begun", "why"),
    [("eva", "starts from activations that PEFT collects"), ("mica", "trains the factor A alone, and a role trains")],
)
def test_an_adapter_that_eva_or_mica_began_is_plain_lora(begun, why, tmp_path):
    get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": begun}))
    load_role(bare(), "policy", tmp_path)
    with pytest.raises(AdapterError, match=f'^init_lora_weights: "{begun}" {why}'):
        bare().add_role("policy", LoraConfig(task_type="CAUSAL_LM", init_lora_weights=begun))


def test_no_module_is_imported_that_an_adapter_names(tmp_path, monkeypatch):
    """As PEFT does for megatron's layers."""
    get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path)
    plain = bare()
    load_role(plain, "policy", tmp_path)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "of_a_test.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"megatron_config": {"num_layers": 1}, "megatron_core": "megatron.of_a_test"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    named = bare()
    load_role(named, "policy", tmp_path)
    assert not [name for name in sys.modules if name.startswith("megatron")]
    pairs = list(zip(plain.parameters_of("policy"), named.parameters_of("policy"), strict=True))
    assert pairs and all(torch.equal(*pair) for pair in pairs)


def test_an_adapter_names_the_commit_of_its_base(tmp_path):
    base = shared_base()
    base.config._commit_hash = "abc"  # as of a base from the hub
    folder = save_role(base, "policy", tmp_path, **SAVE)
    assert json.loads((folder / "adapter_config.json").read_text())["revision"] == "abc"
