from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel

from tests.tiny_models import ARCHITECTURES, lora, randomize, shared_base, tiny_model
from tests.tolerances import EXACT, FP32
from toolkit.errors import AdapterError, ModelError
from toolkit.models import SharedBase, load_base, save_role
from toolkit.models.lora import delete_adapter

IDS = torch.tensor([[1, 5, 9, 12, 7]])
MASK = torch.ones_like(IDS)


def hidden(base, role):
    with torch.no_grad(), base.role(role):
        return base.hidden_states(IDS, MASK)


def test_each_role_has_its_own_output_and_reference_is_the_bare_base():
    bare = tiny_model()
    base = shared_base()
    outputs = {role: hidden(base, role) for role in base.roles}
    assert not torch.allclose(outputs["policy"], outputs["value"])
    assert not torch.allclose(outputs["policy"], outputs["reward"])
    with torch.no_grad():
        torch.testing.assert_close(outputs["reference"], bare.base_model(IDS).last_hidden_state, **EXACT)
        torch.testing.assert_close(base.hidden_states(IDS, MASK), outputs["reference"], **EXACT)  # outside all roles


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_role_equals_the_same_adapter_alone(architecture, tmp_path):
    base = shared_base(architecture=architecture)
    folder = save_role(base, "policy", tmp_path / "policy", pad_token_id=0, base_name="tiny")
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "role.json"}
    alone = PeftModel.from_pretrained(tiny_model(architecture), str(folder))
    with torch.no_grad(), base.role("policy"):
        ours = base(input_ids=IDS, attention_mask=MASK).logits
        torch.testing.assert_close(ours, alone(input_ids=IDS, attention_mask=MASK).logits, **FP32)


def test_roles_nest_and_are_restored_after_an_exception():
    base = shared_base()
    with base.role("policy"):
        with pytest.raises(RuntimeError, match="inside"), base.role("value"):
            assert base.active_role == "value"
            raise RuntimeError("inside")
        assert base.active_role == "policy"
        torch.testing.assert_close(hidden(base, "policy"), base.hidden_states(IDS, MASK).detach(), **EXACT)
        with base.role("reference"):
            assert base.active_role == "reference"
        assert base.active_role == "policy"
    assert base.active_role is None


def trainable(base):
    return {name for name, p in base.named_parameters() if p.requires_grad}


def test_switching_changes_nothing_about_what_is_trained():
    base = shared_base()
    before = trainable(base)
    assert any(".policy." in n for n in before) and any(".value." in n for n in before)
    assert not any(".reward." in n or "heads.reward" in n for n in before)
    for role in base.roles:
        with base.role(role):
            assert trainable(base) == before
    assert trainable(base) == before


def test_a_joint_loss_over_two_roles_reaches_both_adapters():
    # PEFT alone drops the policy's gradient here without a word: leaving an adapter freezes it.
    base = shared_base()
    weights = torch.randn(1, 5, 32)
    with base.role("policy"):
        first = (base.hidden_states(IDS, MASK) * weights).sum()
    with base.role("value"):
        second = (base.hidden_states(IDS, MASK) * weights).sum()
    (first + second).backward()
    for role in ("policy", "value"):
        gradients = [p.grad for name, p in base.named_parameters() if f".{role}." in name and "lora_" in name]
        assert gradients and all(g is not None and g.any() for g in gradients)
    assert all(p.grad is None for p in base.parameters_of("reward"))


def test_shared_value_has_a_head_and_no_adapter():
    base = shared_base(value="shared")
    assert base.shares_value
    assert [p.shape for p in base.parameters_of("value")] == [(1, 32)]
    torch.testing.assert_close(hidden(base, "value"), hidden(base, "policy"), **EXACT)


def test_copying_an_adapter():
    base = SharedBase(tiny_model())
    for role in ("reward", "value", "policy", "reference"):
        base.add_role(role, lora())
    randomize(base, "reward", "policy")
    base.copy_adapter("reward", "value")
    base.copy_adapter("policy", "reference")
    torch.testing.assert_close(hidden(base, "value"), hidden(base, "reward"), **EXACT)
    torch.testing.assert_close(base.heads["value"].weight, base.heads["reward"].weight, **EXACT)
    torch.testing.assert_close(hidden(base, "reference"), hidden(base, "policy"), **EXACT)


@pytest.mark.parametrize(
    "other",
    [{"lora_alpha": 16}, {"use_rslora": True}, {"target_modules": ["k_proj", "o_proj"]}, {"r": 2, "lora_alpha": 4}],
    ids=str,
)
def test_a_copy_that_would_compute_something_else_is_refused(other):
    """Of another scaling, and on other modules of the same shapes."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    base = SharedBase(tiny_model())
    base.add_role("reward", LoraConfig(**settings))
    base.add_role("value", LoraConfig(**{**settings, **other}))
    with pytest.raises(AdapterError, match=r"differ in modules, shape or scaling. Give its adapter the rank, lora_"):
        base.copy_adapter("reward", "value")
    base.add_role("policy", LoraConfig(**settings))
    base.copy_adapter("policy", "reward")  # whose head stays as it is
    base.add_role("reference")
    with pytest.raises(AdapterError, match='role "reference" has no adapter of its own that could be copied'):
        base.copy_adapter("reference", "value")


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_every_weight_of_an_adapter_is_one_role_s_on_an_embedding_too(architecture):
    """PEFT keeps those of an embedding under other names; what is in no role is never trained, copied or compared."""
    embedding = "embed_tokens" if architecture == "llama" else "wte"
    config = {"r": 4, "target_modules": [embedding, "lm_head"], "task_type": "CAUSAL_LM"}
    base = SharedBase(tiny_model(architecture))
    for role in ("policy", "reference"):
        base.add_role(role, LoraConfig(**config))
    with pytest.raises(AdapterError, match="target_modules: the value role has a head of its own, so that an adapter"):
        base.add_role("value", LoraConfig(**config))
    base.add_role("value", LoraConfig(**{**config, "target_modules": [embedding]}))
    base.train_roles("policy")
    every = {id(p): name for name, p in base.named_parameters() if "lora_" in name}
    of_roles = [id(p) for role in base.roles for p in base.parameters_of(role) if id(p) in every]
    assert sorted(of_roles) == sorted(every) and len(every) == 2 * 4 + 2
    assert {name for name, p in base.named_parameters() if p.requires_grad} == {
        name for name in every.values() if ".policy" in name
    }
    randomize(base, "policy")
    base.copy_adapter("policy", "reference")
    torch.testing.assert_close(hidden(base, "reference"), hidden(base, "policy"), **EXACT)
    assert not torch.equal(hidden(base, "value"), hidden(base, "policy"))


def test_a_role_that_is_taken_away_leaves_the_others_as_they_were():
    base = shared_base()
    expected = {role: hidden(base, role) for role in ("policy", "reference", "reward")}
    with base.role("value"), pytest.raises(AdapterError, match='role "value" cannot be taken away: it is in use'):
        base.remove_role("value")
    base.remove_role("value")
    assert base.roles == ("policy", "reference", "reward") and base.trained_roles == ("policy",)
    assert not [name for name, _ in base.named_parameters() if "value" in name]
    for role, states in expected.items():
        torch.testing.assert_close(hidden(base, role), states, **EXACT)
    base.add_role("value", lora())
    assert base.parameters_of("value")


def test_a_new_role_is_as_quiet_as_the_base():
    """PEFT's layers begin in training mode: with dropout two readings would differ."""
    base = SharedBase(tiny_model())
    base.add_role("policy", lora(lora_dropout=0.5))
    randomize(base, "policy")
    assert not any(module.training for module in base.modules())
    assert torch.equal(hidden(base, "policy"), hidden(base, "policy"))
    base.train()
    base.add_role("value", lora(lora_dropout=0.5))
    assert all(module.training for module in base.modules())


@pytest.mark.parametrize("end", [10**6, -1, 10**79, [2, 10**6]])
@pytest.mark.parametrize("place", ["config", "generation_config"])
def test_a_base_that_ends_responses_at_a_token_that_it_lacks(place, end):
    model = tiny_model()
    rows = model.get_input_embeddings().weight.shape[0]
    odd = end[1] if isinstance(end, list) else end
    getattr(model, place).eos_token_id = end
    with pytest.raises(
        ModelError, match=rf"eos_token_id is {odd} in its config.json .* embeddings for 0 to {rows - 1}: no"
    ):
        SharedBase(model)


def test_other_special_tokens_that_the_base_lacks_are_of_no_use():
    model = tiny_model()
    model.config.bos_token_id, model.config.pad_token_id = 10**79, -1
    assert SharedBase(model).causal_lm.generation_config.pad_token_id is None


def test_a_rate_of_dropout_that_is_a_whole_number_is_switched_off():
    model = tiny_model()
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 10**9
    SharedBase(model)
    assert model.config.attention_dropout == model.model.layers[0].self_attn.attention_dropout == 0


def test_base_dropout_and_generation_settings_are_neutral():
    model = tiny_model("gpt2")
    model.generation_config.repetition_penalty = 3.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    base = SharedBase(model)
    base.add_role("policy", lora(lora_dropout=0.25))
    assert base.causal_lm.generation_config.repetition_penalty in (None, 1.0)
    rates = {m.p for m in base.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.0, 0.25}  # the base's is off, the adapter's as asked for


def test_heads_stay_in_float32():
    base = SharedBase(tiny_model().to(torch.bfloat16))
    base.add_role("reward", lora())
    with torch.autocast("cpu", torch.bfloat16):
        out = base.heads["reward"](torch.randn(2, 32, dtype=torch.bfloat16))
    assert out.dtype == base.heads["reward"].weight.dtype == torch.float32


def test_checkpointing_on_and_off():
    base = shared_base()
    assert not base.causal_lm.is_gradient_checkpointing
    base.gradient_checkpointing_enable()
    assert base.causal_lm.is_gradient_checkpointing
    base.gradient_checkpointing_disable()
    assert not base.causal_lm.is_gradient_checkpointing
    base.gradient_checkpointing_enable({"preserve_rng_state": False, "use_reentrant": True})
    given = base.causal_lm.model.layers[0]._gradient_checkpointing_func.keywords
    assert (given["preserve_rng_state"], given["use_reentrant"]) == (False, False)  # the latter knows of no roles


def test_errors():
    base = shared_base()
    for way in (base.role, base.switch_to):
        with pytest.raises(
            AdapterError, match='no role "critic" on this base; it carries policy, reference, value, reward'
        ):
            way("critic")
    with pytest.raises(AdapterError, match='already carries the role "policy"'):
        base.add_role("policy", lora())
    with pytest.raises(AdapterError, match='unknown role "actor"'):
        base.add_role("actor", lora())
    fresh = SharedBase(tiny_model())
    with pytest.raises(AdapterError, match='role "policy" needs an adapter. Give it'):
        fresh.add_role("policy")
    with pytest.raises(AdapterError, match="^modules_to_save: modules_to_save would change weights of the base"):
        fresh.add_role("policy", lora(modules_to_save=["lm_head"]))
    with pytest.raises(AdapterError, match="^bias: bias and trainable_token_indices would change weights"):
        fresh.add_role("policy", lora(bias="all", trainable_token_indices=[1]))
    with pytest.raises(AdapterError, match='^init_lora_weights: "pissa" starts by changing weights'):
        fresh.add_role("policy", lora(init_lora_weights="pissa"))
    message = r'^target_modules: the base has no module "q_projj". Did you mean q_proj\?$'
    with pytest.raises(AdapterError, match=message):
        fresh.add_role("policy", LoraConfig(target_modules=["q_projj", "v_proj"]))  # PEFT would take v_proj alone
    with pytest.raises(AdapterError, match=r'no module "xyz". Known: .*, q_proj, .* no module "zyx"'):
        fresh.add_role("policy", LoraConfig(target_modules=["xyz", "zyx"]))
    with pytest.raises(AdapterError, match="^Target modules .*_projj not found"):
        fresh.add_role("policy", LoraConfig(target_modules=".*_projj"))
    with pytest.raises(AdapterError, match="a value is one number per token, and this head has 3 outputs"):
        fresh.add_role("value", lora(), num_labels=3)
    assert fresh.roles == ()
    with pytest.raises(AdapterError, match='"reference" has no adapter of its own'):
        base.adapter_config("reference")


def test_an_adapter_that_is_refused_halfway_leaves_the_others_training():
    base = shared_base()
    base.train_roles("policy", "value")
    with base.role("policy"):
        with pytest.raises(AdapterError, match="LlamaRMSNorm.* is not supported"):  # after PEFT has put it on q_proj
            base.add_role("judge", LoraConfig(target_modules=["q_proj", "input_layernorm"]))
        assert base.active_role == "policy"
    assert all(p.requires_grad for role in ("policy", "value") for p in base.parameters_of(role))
    assert not any(p.requires_grad for p in base.parameters_of("reward"))
    base.add_role("judge", LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"]))  # without what was left
    assert all("v_proj" in name for name, _ in base.named_parameters() if ".lora_" in name and ".judge." in name)


def test_a_role_whose_trial_breaks_off_is_not_there_by_half(monkeypatch):
    base = SharedBase(tiny_model())
    with monkeypatch.context() as broken:
        broken.setattr(base, "hidden_states", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            base.add_role("policy", lora())
    assert base.roles == () and not any(".lora_" in name for name, _ in base.named_parameters())
    # The states of the first trial stay where they are when a model is moved.
    states, moved = base._states, []
    base._states = SimpleNamespace(is_meta=False, to=lambda device: moved.append(device) or states)
    base.add_role("policy", lora())
    assert moved == [base.device]


def test_attention_of_cudnn_is_off_once_there_is_a_model(tmp_path):
    made = tiny_model()
    made.save_pretrained(tmp_path)
    for begin in (lambda: SharedBase(made), lambda: load_base(str(tmp_path))):
        torch.backends.cuda.enable_cudnn_sdp(True)
        begin()
        assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_tests_share_no_weight_of_a_base_that_was_made_once():
    ids = torch.tensor([[1, 5, 9, 7]])

    def said(base):
        with torch.no_grad(), base.role("policy"):
            return base.causal_lm(ids).logits

    expected = said(shared_base(tiny_model()))
    spoilt = shared_base()
    assert torch.equal(said(spoilt), expected)
    with torch.no_grad():
        for parameter in spoilt.parameters():
            parameter.zero_()
    assert torch.equal(said(shared_base()), expected) and not torch.equal(said(spoilt), expected)


def test_another_adapter_is_added_after_the_active_one_was_taken_away():
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    base.add_role("reward", lora())  # the last to come, so PEFT has it for the active one
    delete_adapter(base.model, "reward")
    base.model.add_adapter("value", lora())
    assert set(base.model.peft_config) == {"policy", "value"}
