"""Merged checkpoints say what base and adapter say apart; the oracle is PEFT on a base that nothing was merged into."""

import math

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_models import _LLAMA_LIKE, SPECIAL, lora, randomize, shared_base, tiny_model
from tests.tolerances import FP32
from toolkit.errors import AdapterError
from toolkit.models import SharedBase, ValueModel, merge_adapter, save_role, weights

PROBE = torch.tensor([[3, 5, 9, 12, 7]])


def model(kind):
    if kind == "gpt2":  # tied by default
        return tiny_model("gpt2")
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=True, **SPECIAL)).eval()


def saved_adapter(kind, targets, folder, **more):
    base = SharedBase(model(kind))
    base.add_role("policy", LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **more))
    randomize(base, "policy")
    return save_role(base, "policy", folder, pad_token_id=0, base_name="tiny")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("kind", "targets", "tied"),
    [
        ("llama", ["lm_head", "q_proj"], False),
        ("llama", ["embed_tokens"], False),
        ("llama", ["embed_tokens", "lm_head"], False),
        ("llama", ["q_proj"], True),
        ("gpt2", ["lm_head"], False),
        ("gpt2", ["wte", "c_attn"], False),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else str(x),
)
def test_tied_weights_are_untied_where_an_adapter_is_on_them(kind, targets, tied, tmp_path):
    folder = saved_adapter(kind, targets, tmp_path / "adapter")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(model(kind), str(folder)).eval()(input_ids=PROBE).logits
        untouched = model(kind)(input_ids=PROBE).logits
        merge_adapter(model(kind), folder, PROBE).model.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        found = loaded(input_ids=PROBE).logits
    torch.testing.assert_close(found, expected, rtol=FP32["rtol"], atol=1e-4)
    assert (expected - untouched).abs().max() > 0.1
    assert loaded.config.tie_word_embeddings is tied


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        *((kind, "all-linear") for kind in ("llama", "laguna", "mixtral")),
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),  # its experts' names in files; the model has two tensors of them
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_a_merge_says_what_the_role_says(kind, targets, tmp_path):
    """PEFT's own loading leaves tensors of some architectures out, as of Laguna's shared experts."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    base = SharedBase(tiny_architecture(kind))
    base.add_role("policy", LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    randomize(base, "policy")
    on_experts = [name for name, _ in base.model.named_parameters() if ".experts." in name and ".lora_A." in name]
    assert len(on_experts) == (2 * base.causal_lm.config.num_hidden_layers if "moe" in kind or "mix" in kind else 0)
    folder = save_role(base, "policy", tmp_path, pad_token_id=0, base_name="tiny")
    with torch.no_grad(), base.role("policy"):
        expected = base(input_ids=PROBE).logits
    found = merge_adapter(tiny_architecture(kind), folder, PROBE).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_dropout_of_an_adapter_has_no_part_in_a_merge(tmp_path):
    folder = saved_adapter("gpt2", ["c_attn"], tmp_path, lora_dropout=0.5)
    found = merge_adapter(model("gpt2"), folder, PROBE)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(model("gpt2"), str(folder)).eval()(input_ids=PROBE).logits
    torch.testing.assert_close(found.logits, expected, rtol=FP32["rtol"], atol=1e-4)
    assert found.largest < 1e-3 and found.agreement == 1.0


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_merge_says_how_far_it_is_from_base_and_adapter(tmp_path, monkeypatch):
    """Of one that gives another model."""
    folder, ids = saved_adapter("llama", ["lm_head"], tmp_path), torch.arange(3, 33).view(2, 15)
    monkeypatch.setattr(weights, "_untie", lambda *_: None)
    monkeypatch.setattr(weights, "tolerance", lambda _: math.inf)
    found = merge_adapter(model("llama"), folder, ids)
    with torch.no_grad():
        apart = PeftModel.from_pretrained(model("llama"), str(folder)).eval()(input_ids=ids).logits
    pairs = list(zip(found.logits.flatten(0, 1).tolist(), apart.flatten(0, 1).tolist(), strict=True))
    largest = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    same = sum(one.index(max(one)) == other.index(max(other)) for one, other in pairs) / 30
    assert 0 < same < 1
    assert found[2:] == pytest.approx((largest, max(abs(b) for _, other in pairs for b in other), same), rel=1e-4)


def test_a_projection_that_experts_keep_with_another_is_no_traceback_alone():
    with pytest.raises(AdapterError, match="Cannot convert PEFT target.* w1 without also targeting w3"):
        SharedBase(tiny_architecture("mixtral")).add_role("policy", LoraConfig(target_modules=["w1"]))


def test_the_digest_is_of_a_value_model_s_base_too():
    def base(seed):
        made, config = shared_base(), tiny_model().config
        config.num_labels = 1
        torch.manual_seed(seed)
        made.remove_role("value")
        made.place_value(ValueModel(AutoModelForSequenceClassification.from_config(config), lora()))
        return made

    assert weights.base_digest(base(1)) == weights.base_digest(base(1)) != weights.base_digest(base(2))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_merge_that_gives_another_model_is_refused(tmp_path, monkeypatch):
    folder = saved_adapter("llama", ["lm_head"], tmp_path)
    monkeypatch.setattr(weights, "_untie", lambda *_: None)
    with pytest.raises(AdapterError, match="it gives another model, whose logits are .*% apart. Export the adapter al"):
        merge_adapter(model("llama"), folder, PROBE)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed", "ignore:Adapter 'policy'")
def test_what_peft_cannot_merge_is_an_error_that_says_what_to_do(tmp_path):
    base = SharedBase(model("llama"))
    base.add_role("policy", LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_bias=True))
    save_role(base, "policy", tmp_path, pad_token_id=0, base_name="tiny")
    with pytest.raises(AdapterError, match="PEFT cannot merge it: .*lora_bias.* Export the adapter alone."):
        merge_adapter(model("llama"), tmp_path, PROBE)
