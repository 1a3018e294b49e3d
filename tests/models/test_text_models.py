"""Checkpoints that have more than text: those that are loaded as their text model, and those that are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    Emu3Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Mistral3Config,
    MllamaConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
)

from tests.tiny_models import SPECIAL, VOCABULARY, lora, randomize
from tests.tiny_runs import byte_tokenizer
from tests.tolerances import FP32
from toolkit.errors import ModelError
from toolkit.models import META, ModelSpec, SharedBase, load_base, load_model, merge_adapter, model_config, save_role
from toolkit.models.text_models import config_of_text

IDS = torch.tensor([[3, 14, 9, 12, 13, 5, 20, 21]])
SIZE = 64  # the length of a block of NF4
_TEXT = {
    **SPECIAL,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": SIZE,
    "shared_expert_intermediate_size": SIZE,
}
_IMAGES = {
    "depth": 1,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_heads": 2,
    "out_hidden_size": SIZE,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_MADE = {
    "qwen3_5": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, {**_TEXT, **_LINEAR}, False),
    "qwen3_5, tied": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, {**_TEXT, **_LINEAR}, True),
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, {**_TEXT, **_LINEAR, **_EXPERTS}, False),
}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.fixture(scope="module", params=_MADE)
def images_too(request, tmp_path_factory):
    """A checkpoint's folder, and the whole model that was saved there."""
    return _saved(request.param, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return _saved("qwen3_5", tmp_path_factory.mktemp("qwen"))


def _saved(kind, folder):
    model, config, text, tied = _MADE[kind]
    tying = {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    whole = model(config(text_config={**text, **tying}, vision_config=_IMAGES, **tying)).eval()
    whole.save_pretrained(folder)
    return folder, whole


@torch.no_grad()
def _logits(model):
    for module in model.modules():
        if isinstance(module, Linear4bit):  # where a CPU has a kernel for it, which refuses layers as small as these
            module.support_avx512bf16_for_cpu = False
    return model(input_ids=IDS).logits


def _names(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return [*file.keys()]


def _in_4_bits(model):
    return {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def _alone(tmp_path, config):
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_what_is_loaded_is_the_text_model_of_the_whole(images_too):
    folder, whole = images_too
    assert any("visual" in name for name in _names(folder))
    base = load_base(str(folder), dtype="float32")
    assert base.config.model_type == whole.config.text_config.model_type and base.config.name_or_path == str(folder)
    assert not any("visual" in name for name, _ in base.named_parameters())
    torch.testing.assert_close(_logits(base), _logits(whole), **FP32)
    outline = load_model(ModelSpec(str(folder), dtype="float32"), device=META)
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (outline, base)]
    assert shapes[0] == shapes[1] and outline.config.name_or_path == str(folder)
    SharedBase(outline)


def test_the_text_model_is_of_the_state_that_the_whole_was_read_at(qwen):
    config = AutoConfig.from_pretrained(qwen[0])
    config._commit_hash = "abc"
    assert config_of_text(config)._commit_hash == "abc"  # which saved adapters name


@pytest.mark.parametrize("device", [None, META])
def test_a_text_model_that_lacks_weights_is_refused(qwen, device, tmp_path):
    folder, whole = qwen
    whole.config.save_pretrained(tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.language_model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights for model\.norm\.weight"):
        load_base(str(tmp_path), dtype="float32", device=device)


def test_a_saved_policy_is_read_by_plain_peft_and_merged_by_plain_transformers(images_too, tmp_path):
    folder, _ = images_too
    base = SharedBase(load_base(str(folder), dtype="float32"))
    base.add_role("policy", lora())
    randomize(base, "policy")
    save_role(base, "policy", tmp_path / "policy", pad_token_id=0, base_name=str(folder))
    with base.role("policy"):
        ours = _logits(base.causal_lm)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(_logits(PeftModel.from_pretrained(plain, tmp_path / "policy").eval()), ours, **FP32)
    merged = merge_adapter(load_base(str(folder), dtype="float32"), tmp_path / "policy", IDS)
    merged.model.save_pretrained(tmp_path / "merged")
    whole, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values()) and whole.config.model_type.endswith("_text")
    torch.testing.assert_close(_logits(whole.eval()), merged.logits, **FP32)
    # As a checkpoint of text alone has them, which needs no renaming to be read.
    assert {name.split(".")[1] for name in _names(tmp_path / "merged")} <= {"embed_tokens", "layers", "norm", "weight"}
    torch.testing.assert_close(_logits(load_base(str(tmp_path / "merged"), dtype="float32")), merged.logits, **FP32)


def test_a_saved_reward_is_read_by_plain_peft_on_the_text_model(qwen, tmp_path):
    base = SharedBase(load_base(str(qwen[0]), dtype="float32"))
    base.add_role("reward", lora(), num_labels=1)
    randomize(base, "reward")
    save_role(base, "reward", tmp_path, pad_token_id=0, base_name=str(qwen[0]))
    with base.role("reward"), torch.no_grad():
        ours = base.head("reward")(base.hidden_states(IDS, torch.ones_like(IDS))[:, -1])
    text = AutoConfig.from_pretrained(qwen[0]).get_text_config()  # as docs/architectures.md says
    text.num_labels = 1
    plain = AutoModelForSequenceClassification.from_pretrained(qwen[0], config=text, dtype=torch.float32)
    torch.testing.assert_close(_logits(PeftModel.from_pretrained(plain, tmp_path).eval()), ours, **FP32)


def test_in_4_bits_it_is_what_plain_transformers_loads(qwen):
    base = load_base(str(qwen[0]), dtype="float32", quantization=NF4)
    plain = AutoModelForCausalLM.from_pretrained(qwen[0], quantization_config=NF4, dtype=torch.float32)
    outline = load_model(ModelSpec(str(qwen[0]), dtype="float32", quantization=NF4), device=META)
    assert len(_in_4_bits(base)) > 10 and _in_4_bits(base) == _in_4_bits(plain) == _in_4_bits(outline)
    torch.testing.assert_close(_logits(base), _logits(plain.eval()), **FP32)


@pytest.mark.parametrize("left_out", [None, "model.language_model.layers.0.mlp", "language_model.layers.1.mlp.up_proj"])
def test_a_checkpoint_in_4_bits_leaves_whole_what_it_names_by_the_whole_model(qwen, left_out, tmp_path):
    folder, whole = qwen
    skipped = {"llm_int8_skip_modules": ["lm_head", "model.visual", left_out]} if left_out else {}
    quantization = BitsAndBytesConfig(**{**NF4.to_dict(), **skipped})
    quantised = type(whole).from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    quantised.save_pretrained(tmp_path)
    base, outline = (load_base(str(tmp_path), dtype="float32", device=device) for device in (None, META))
    of_text = {name.replace("language_model.", "") for name in _in_4_bits(quantised) if "visual" not in name}
    assert _in_4_bits(base) == _in_4_bits(outline) == of_text
    assert (len(of_text) < len(_in_4_bits(load_base(str(folder), quantization=NF4)))) == bool(left_out)
    torch.testing.assert_close(_logits(base), _logits(quantised.eval()), **FP32)


def _gemma(vocabulary=VOCABULARY):
    text = {**_TEXT, "vocab_size": vocabulary, "query_pre_attn_scalar": 16, "sliding_window": 4}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = {**_CLIP, "model_type": "siglip_vision_model"}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


@pytest.mark.parametrize(
    "config", [_gemma(), Mistral3Config(text_config={"model_type": "mistral"})], ids=lambda config: config.model_type
)
def test_where_the_text_model_could_be_written_the_message_says_where_to_read_how(config, tmp_path):
    said = rf"of type {config.model_type}, with text_config and vision_config: multimodal models are not supported\. "
    said += r"Name a checkpoint of text alone, or write one of its text model: docs/architectures\.md says how\."
    with pytest.raises(ModelError, match=said):
        model_config(ModelSpec(_alone(tmp_path, config)))


@pytest.mark.parametrize("config", [MllamaConfig, Emu3Config, Qwen3VLConfig], ids=lambda config: config.model_type)
def test_a_text_model_without_a_type_of_its_own_is_refused(config, tmp_path):
    with pytest.raises(ModelError, match=r"multimodal models are not supported\. Name a checkpoint of text alone\.$"):
        model_config(ModelSpec(_alone(tmp_path, config())))


def test_a_text_model_that_holds_its_layers_elsewhere_is_refused_before_it_is_loaded(tmp_path):
    text = {**_TEXT, "intermediate_size_mlp": SIZE, "num_local_experts": 2}
    folder = _alone(tmp_path, Llama4Config(text_config=text))
    with pytest.raises(ModelError, match=r"a Llama4ForCausalLM has no base_model, of which"):
        SharedBase(load_base(folder, device=META))


def test_the_lines_of_the_page_write_a_checkpoint_of_text_alone(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    whole = Gemma3ForConditionalGeneration(_gemma(len(tokenizer))).eval()
    whole.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    name, folder = re.search(r'^name, folder = "(.+?)", "(.+?)"$', lines, re.MULTILINE).groups()
    monkeypatch.chdir(tmp_path)
    exec(lines.replace(f'"{name}"', '"whole"'), {})
    base = load_base(folder, dtype="float32")
    assert json.loads((tmp_path / folder / "config.json").read_text())["model_type"] == "gemma3_text"
    torch.testing.assert_close(_logits(base), _logits(whole), **FP32)
    SharedBase(base)
