import re

import pytest
import torch
from transformers import BertConfig, BertModel, BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

from tests.conftest import ARCHITECTURES, lora, randomize, tiny_model
from tests.tolerances import RELATIVE
from toolkit.data import doubling
from toolkit.errors import ModelError
from toolkit.models import Sequences, SharedBase, build_base, load_base, load_tokenizer, response_logprobs
from toolkit.models.base import random_config

NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_real_nf4_with_double_quantisation(architecture, tmp_path):
    import bitsandbytes as bnb

    tiny_model(architecture, size=128).save_pretrained(tmp_path)
    model = load_base(str(tmp_path), quantization=NF4)
    # Looked at before any forward pass: the CPU kernel then holds the weights in a layout of its own.
    quantised = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) >= 2 * 6
    assert all(m.weight.quant_state.quant_type == "nf4" and m.weight.quant_state.nested for m in quantised)
    assert all(m.weight.nbytes == m.in_features * m.out_features // 2 for m in quantised)  # two weights a byte
    base = SharedBase(model)
    base.add_role("policy", lora())
    base.add_role("reference")
    randomize(base, "policy")
    base.train_roles("policy")
    sequences = Sequences.from_ids([[1, 4, 9]], [[12, 13, 2]], pad_token_id=0)
    base.train()
    with torch.autocast("cpu", torch.bfloat16), base.role("policy"):
        response_logprobs(base, sequences).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in base.parameters_of("policy"))
    assert all(p.dtype == torch.float32 for p in base.parameters_of("policy"))
    assert not any(p.requires_grad for n, p in base.named_parameters() if "lora_" not in n)


def test_nf4_gradients_on_a_cpu_are_those_of_the_dequantised_model(tmp_path):
    tiny_model(size=128).save_pretrained(tmp_path)
    exact = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    sequences = Sequences.from_ids([[1, 4, 9]], [[12, 13, 2]], pad_token_id=0)
    found = []
    for dequantise in (False, True):
        model = load_base(str(tmp_path), quantization=exact, dtype="float32")
        base = SharedBase(model.dequantize() if dequantise else model)
        base.add_role("policy", lora())
        randomize(base, "policy")
        base.train_roles("policy")
        # A rollout comes first. Left to itself bitsandbytes then repacks the weights, and the gradient is wrong.
        with base.role("policy"), base.in_eval_mode(), torch.no_grad():
            response_logprobs(base, sequences)
        base.train()
        with base.role("policy"):
            response_logprobs(base, sequences).sum().backward()
        found.append([p.grad for p in base.parameters_of("policy")])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < RELATIVE * theirs.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_load_unquantised_and_frozen(architecture, tmp_path):
    tiny_model(architecture).save_pretrained(tmp_path)
    model = load_base(str(tmp_path), dtype="float32")
    assert not any(p.requires_grad for p in model.parameters())
    assert SharedBase(model).hidden_size == (16 if architecture == "opt" else 32)


def test_a_missing_checkpoint_says_how_to_name_one(tmp_path):
    with pytest.raises(ModelError, match=r"no checkpoint could be loaded.*MODEL=/path/to/checkpoint"):
        load_base(str(tmp_path / "nothing"))


def test_other_kinds_of_models_are_refused(tmp_path):
    T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=16)).save_pretrained(
        tmp_path / "t5"
    )
    with pytest.raises(ModelError, match="of type t5, which is not a decoder-only language model"):
        load_base(str(tmp_path / "t5"))
    assert BertModel and BertConfig  # an encoder has a causal class in transformers, so that it is not refused here


def test_build_base(tokenizer):
    model = build_base({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}, tokenizer)
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ModelError, match=r"base.config: transformers cannot build this model"):
        build_base({"model_type": "gpt7"}, tokenizer)


def test_tokenizer_without_pad_pads_with_eos(tmp_path, tokenizer):
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == 2 and loaded.padding_side == "left"


def test_tokenizer_without_eos_is_refused(tmp_path, tokenizer):
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2", "n_layr": 2},
            "base.config.n_layr: a model of type gpt2 has no such setting. Did you mean n_l",
        ),
        (
            {"model_type": "bert", "hidden_dize": 8},
            "base.config.hidden_dize: a model of type bert has no such setting.",
        ),
        ({"model_type": "llama", "zzz": 8}, "base.config.zzz: a model of type llama has no such setting. Remove it."),
    ],
)
def test_a_mistyped_setting_of_a_random_model_is_found(config, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        random_config(config, doubling.tokenizer())


def test_other_names_of_a_setting_are_known():
    assert random_config({"model_type": "gpt2", "hidden_size": 8, "num_labels": 3}, doubling.tokenizer()).n_embd == 8
