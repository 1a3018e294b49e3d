"""PEFT's parts that are not public are what `toolkit.models.lora` takes them for."""

from importlib.metadata import version

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from transformers import AutoModelForSequenceClassification

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_models import lora, tiny_model
from tests.trainers.helpers import own_classifier
from toolkit.errors import AdapterError
from toolkit.models import SharedBase, add_lora, load_role, save_role
from toolkit.models.lora import activate, adapted_layers, adapter_parameters, trained_copy

READ_IN = "0.21"
MOVED = f"PEFT {version('peft')} is not as read in {READ_IN}: mend toolkit/models/lora.py. "


def test_this_is_the_version_that_was_read():
    assert version("peft").startswith(f"{READ_IN}."), MOVED + "Then raise READ_IN here and the bound in pyproject.toml."


def test_the_two_attributes_of_a_layer_are_there():
    layer = adapted_layers(get_peft_model(tiny_model(), lora(), adapter_name="policy"))[0]
    for name in ("_disable_adapters", "_active_adapter"):
        assert hasattr(BaseTunerLayer, name), MOVED + f"BaseTunerLayer has no {name}."
    layer._disable_adapters, layer._active_adapter = True, ["other"]
    assert layer.disable_adapters and layer.active_adapters == ["other"], MOVED + "Layers read other attributes."


def test_activating_computes_what_peft_s_own_switch_computes():
    model = get_peft_model(tiny_model(), lora(), adapter_name="policy")
    model.add_adapter("value", lora())
    ids, generator = torch.tensor([[1, 5, 9]]), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))
        layers, logits = adapted_layers(model), {}
        for adapter in ("value", "policy"):
            activate(model, layers, adapter)
            logits[adapter] = model(input_ids=ids).logits
            assert model.active_adapters == model.base_model.active_adapters == [adapter], MOVED
            model.set_adapter(adapter)
            assert torch.equal(model(input_ids=ids).logits, logits[adapter]), MOVED
        activate(model, layers, None)
        off = model(input_ids=ids).logits
        activate(model, layers, "policy")
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, off), MOVED
    assert not torch.equal(off, logits["policy"]) and not torch.equal(logits["value"], logits["policy"])


def test_parameters_are_found_by_the_name_of_their_adapter():
    model = get_peft_model(tiny_model(), lora(), adapter_name="policy")
    model.add_adapter("value", lora())
    every = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert len(every) == 2 * 2 * 14, MOVED
    for adapter in ("policy", "value"):
        own = adapter_parameters(model, adapter)
        assert len(own) == 2 * 14 and not any(adapter in name for name in own), MOVED
    assert adapter_parameters(model, "polic") == {}


def test_layers_beside_experts_of_a_reward_model_are_told_of(caplog):
    config = tiny_architecture("qwen3_next").config
    add_lora(AutoModelForSequenceClassification.from_config(config), lora())
    assert sum("PEFT puts no adapter on" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("q_proj", r"Write a list: \[q_proj\]"),
        ("q_proj, v_proj", r"Write a list: \[q_proj, v_proj\]"),
        ("q_projj", "Name modules in a list"),
        ("all", "Did you mean all-linear"),
    ],
)
def test_names_of_modules_as_text_are_no_pattern(text, remedy):
    """PEFT says that the base has no such module, which it has."""
    with pytest.raises(AdapterError, match=f'^target_modules: "{text}" is taken as a pattern .*{remedy}'):
        SharedBase(tiny_model()).add_role("policy", LoraConfig(target_modules=text))
    (base := SharedBase(tiny_model())).add_role("policy", LoraConfig(task_type="CAUSAL_LM", target_modules="lm_head"))
    assert len(base.parameters_of("policy")) == 2  # that is the whole name of one


def test_a_pattern_that_peft_would_widen_on_a_mixture_is_refused():
    pattern = r".*layers\.0\.self_attn\.q_proj"
    dense = SharedBase(tiny_model())
    dense.add_role("policy", LoraConfig(target_modules=pattern))
    assert len(dense.parameters_of("policy")) == 2
    base = SharedBase(tiny_architecture("qwen3_moe"))
    base.add_role("policy", LoraConfig(target_modules=["q_proj"]))
    for one in (pattern, pattern.replace(".*layers", r"model\.layers")):
        with pytest.raises(AdapterError, match=r"PEFT would put this adapter on .*layers\.1\.self_attn\.q_proj, too"):
            base.add_role("value", LoraConfig(target_modules=one))
    of_experts = {"target_modules": r".*layers\.0\.mlp\.experts\.(gate_proj|up_proj|down_proj)"}
    for arguments in (of_experts, {"target_modules": ["gate_proj", "up_proj"], "layers_to_transform": [0]}):
        with pytest.raises(
            AdapterError, match="PEFT would put this adapter on the .*gate_up_proj of the experts of all"
        ):
            base.add_role("value", LoraConfig(**arguments))


def test_the_copy_of_a_head_that_trains():
    head = add_lora(own_classifier("llama"), lora()).get_base_model().score
    assert isinstance(head, ModulesToSaveWrapper) and trained_copy(head).weight.requires_grad, MOVED
    assert not head.original_module.weight.requires_grad
    plain = torch.nn.Linear(2, 2)
    assert trained_copy(plain) is plain


@pytest.mark.parametrize(
    ("kind", "beside"),
    [("qwen3_next", ("shared_expert",)), ("deepseek_v3", ("mlp", "shared_experts")), ("mixtral", ())],
)
def test_layers_beside_experts_that_peft_passes_over_are_told_once(kind, beside, caplog, tmp_path):
    """The names that are told give them adapters, which are saved and loaded."""
    base = SharedBase(tiny_architecture(kind))
    base.add_role("policy", lora())
    base.add_role("value", lora())
    told = [text for text in caplog.messages if "PEFT puts no adapter" in text]
    assert len(told) == bool(beside)
    if beside:
        assert "and 5 others, linear layers named like the experts beside them" in told[0]
        names = told[0].partition("target_parameters: [")[2].rstrip("].").split(", ")
        parts = ("down_proj", "gate_proj", "up_proj")
        assert names == [f"{one}.{part}.weight" for one in beside for part in parts]
        base, again = (SharedBase(tiny_architecture(kind)) for _ in range(2))
        base.add_role("reward", lora(target_parameters=names))
        layers = [m for n, m in base.causal_lm.named_modules() if n.endswith(f"{beside[-1]}.up_proj")]
        assert layers and all(isinstance(layer, LoraLayer) for layer in layers)
        save_role(base, "reward", tmp_path, pad_token_id=0, base_name="")
        load_role(again, "reward", tmp_path)
        ours, theirs = (x.parameters_of("reward") for x in (base, again))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert [text for text in caplog.messages if "PEFT puts no adapter" in text] == told
