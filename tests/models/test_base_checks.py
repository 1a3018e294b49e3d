"""What is relied on of a base holds for it, or the base is refused with the reason. The oracle is transformers."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import BdLoraConfig, KasaConfig, LoraConfig, MontecloraConfig, VeloraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_models import SPECIAL, lora, randomize, tiny_model
from tests.tolerances import FP32, RELATIVE
from toolkit.errors import AdapterError, ModelError
from toolkit.models import (
    Sequences,
    SharedBase,
    ValueModel,
    add_q_roles,
    load_base,
    load_role,
    read_policy,
    response_q,
)
from toolkit.models import lora as lora_module
from toolkit.models.logit_changes import logits_of

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
_NO_GROUPS = {name: value for name, value in _LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
_MOE = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}


def made(kind: str, **settings) -> PreTrainedModel:
    """A random model in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SPECIAL, **settings})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


IDS = torch.tensor([[3, 5, 9, 12, 7], [11, 4, 6, 30, 8]])
MASK = torch.ones_like(IDS)

# ---------------------------------------------------------------------- nothing is drawn at random

NOISY = [
    ("starcoder2", {**_NO_GROUPS, "num_key_value_heads": 2, "residual_dropout": 0.2, "embedding_dropout": 0.2}),
    ("gpt_bigcode", {**_GPT, "attn_pdrop": 0.2}),
    ("seed_oss", {**_LLAMA, "residual_dropout": 0.2}),
    ("falcon", {**_NO_GROUPS, "hidden_dropout": 0.2, "attention_dropout": 0.2}),  # read from the configuration
    ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2}),
    # By SDPA it reads both ways with transformers 5.17 and torch 2.11, and is refused.
    ("doge", {**_LLAMA, "hidden_dropout": 0.2, "attn_implementation": "eager"}),
    ("biogpt", {**_NO_GROUPS, "layerdrop": 0.5, "activation_dropout": 0.2}),
    ("opt", {**_NO_GROUPS, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.5, "activation_dropout": 0.2}),
    ("mixtral", {**_MOE, "router_jitter_noise": 0.2}),
]


@pytest.mark.parametrize(("kind", "settings"), NOISY, ids=[kind for kind, _ in NOISY])
def test_training_reads_what_a_rollout_reads(kind, settings):
    model = made(kind, **settings)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK).logits
        stochastic = model.train()(input_ids=IDS, attention_mask=MASK).logits
        assert not torch.allclose(stochastic, expected, atol=1e-3)
        base = SharedBase(model.eval())
        base.train()
        for _ in range(5):
            torch.testing.assert_close(base(input_ids=IDS, attention_mask=MASK).logits, expected, **FP32)


def test_a_value_model_draws_nothing_either():
    torch.manual_seed(0)
    config = AutoConfig.for_model("starcoder2", **NOISY[0][1], **SPECIAL, num_labels=1)
    from transformers import AutoModelForSequenceClassification

    value = ValueModel(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), None).train()
    with torch.no_grad():
        assert torch.equal(value.hidden_states(IDS, MASK), value.hidden_states(IDS, MASK))


@pytest.mark.parametrize(
    ("noise", "why"),
    [
        (lambda x: x * torch.rand_like(x), "it draws random numbers that no setting of it switches off"),
        (lambda x: x if torch.rand([]) < 0.5 else 2 * x, "it draws random numbers"),
        (lambda x: 1.1 * x, "it computes something else"),
    ],
    ids=["noise", "now and then", "another mode"],
)
def test_what_cannot_be_switched_off_is_refused(noise, why, monkeypatch):
    model = tiny_model()
    layer = model.model.layers[1].mlp
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: noise(plain(x)) if layer.training else plain(x))
    with pytest.raises(ModelError, match=f"a LlamaForCausalLM gives other hidden states in training, by .*: {why}"):
        SharedBase(model)


def test_jitter_that_counts_outside_of_training_too_is_refused():
    """PhiMoE's router leaves out experts by it in each mode: at 0 it would be another model."""
    with pytest.raises(ModelError, match="^a PhimoeForCausalLM applies its dropout or jitter outside of training, too"):
        SharedBase(made("phimoe", **_MOE))


def test_the_trial_takes_no_random_numbers_and_leaves_no_mark():
    model, before = made(*NOISY[7][:1], **NOISY[7][1]), torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    base = SharedBase(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert not any(module.training for module in base.causal_lm.modules())


# ---------------------------------------------------------------------- logits

AFTER_LM_HEAD = [
    ("gemma2", {**_LLAMA, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
    ("gemma3_text", {**_LLAMA, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
    ("vaultgemma", {**_LLAMA, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
    ("nanochat", {**_NO_GROUPS, "final_logit_softcapping": 2.0}),
    ("granite", {**_NO_GROUPS, "logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}),
    ("hyperclovax", {**_NO_GROUPS, "logits_scaling": 0.25}),
    ("cohere", {**_NO_GROUPS, "logit_scale": 0.0625}),
    ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1, "logit_scale": 0.5}),  # which no line of MPT reads
    ("llama", {**_LLAMA, "logit_scale": 0.5}),  # a key that Llama does not know
]
PROMPTS, RESPONSES = [[3, 4, 9], [3, 30, 31, 32, 33]], [[12, 13, 5], [20, 21, 22, 23]]


def sequences() -> Sequences:
    return Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0)


def stock_logits(model, prompt, response):
    """(T, V) before each response token: the model's own, of one unpadded row."""
    return model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize(("kind", "settings"), AFTER_LM_HEAD, ids=[kind for kind, _ in AFTER_LM_HEAD])
def test_logprobs_and_gradients_are_those_of_the_stock_model(kind, settings):
    """Also of the entropy and the full KL, with logits large enough that a cap and a scale count."""
    model = made(kind, **settings)
    alone = get_peft_model(copy.deepcopy(model), lora(), adapter_name="policy")
    base = SharedBase(model)
    base.add_role("policy", lora())
    base.add_role("reference")
    randomize(base, "policy")
    ours = {name: p for name, p in base.named_parameters() if "lora_" in name}
    theirs = {name: p for name, p in alone.named_parameters() if "lora_" in name}
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        other.data.copy_(mine)
    base.train_roles("policy")
    base.train()
    weight = torch.linspace(0.5, 2.0, 8).view(2, 4)
    with base.role("policy"):
        read = read_policy(base, sequences(), chunk_size=2, temperature=0.8, entropy=True, ref_kl=True)
        (weight * (read.logprobs + 0.3 * read.entropy + 0.2 * read.ref_kl)).sum().backward()
    loss = 0.0
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        log_p = (stock_logits(alone, prompt, response) / 0.8).log_softmax(-1)
        with torch.no_grad(), alone.disable_adapter():
            log_ref = (stock_logits(alone, prompt, response) / 0.8).log_softmax(-1)
        logprobs = log_p[torch.arange(len(response)), torch.tensor(response)]
        entropy, kl = -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_ref)).sum(-1)
        for found, expected in ((read.logprobs, logprobs), (read.entropy, entropy), (read.ref_kl, kl)):
            torch.testing.assert_close(found[row, : len(response)], expected, rtol=1e-4, atol=1e-5)
        loss = loss + (weight[row, : len(response)] * (logprobs + 0.3 * entropy + 0.2 * kl)).sum()
    loss.backward()
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert (mine.grad - other.grad).abs().max() < RELATIVE * other.grad.abs().max()


def test_q_values_are_the_logits_as_the_model_gives_them():
    base = SharedBase(made(*AFTER_LM_HEAD[0][:1], **AFTER_LM_HEAD[0][1]))
    base.add_role("reference")
    add_q_roles(base, lora())
    randomize(base, "q")
    with torch.no_grad(), base.role("q"):
        q = response_q(base, sequences()).q
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            expected = stock_logits(base, prompt, response)[torch.arange(len(response)), torch.tensor(response)]
            torch.testing.assert_close(q[row, : len(response)], expected, **FP32)


def test_a_cap_that_does_next_to_nothing_on_small_logits_is_followed_on_large_ones():
    model = made("gemma2", **_LLAMA | {"final_logit_softcapping": 30.0, "initializer_range": 0.001})
    base = SharedBase(model)
    assert base.logits(torch.full((1, 32), 1e6)).abs().max() <= 30.0


def test_the_cap_of_attentions_logits_is_none_of_the_heads():
    settings = {**_LLAMA, "final_logit_softcapping": None, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 8}
    base = SharedBase(made("gemma2", **settings).bfloat16())
    hidden = torch.full((1, 32), 1e3, dtype=torch.bfloat16)
    assert torch.equal(base.logits(hidden), base.causal_lm.lm_head(hidden))


def test_the_cap_of_a_routers_logits_is_none_of_the_heads():
    model = tiny_architecture("laguna", moe_router_logit_softcapping=30.0).bfloat16()
    plain = torch.linspace(-3, 3, 99, dtype=torch.bfloat16).view(1, 1, 99)
    assert torch.equal(logits_of(model, plain, plain.float())(plain), plain)


def test_logits_that_are_changed_otherwise_are_refused():
    model = tiny_model()
    plain = model.forward

    def shifted(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out

    model.forward = shifted
    with pytest.raises(ModelError, match="changes its logits after lm_head by more than a scale or a cap"):
        SharedBase(model)


# ---------------------------------------------------------------------- other bases


def test_left_padding_that_changes_what_follows_is_refused():
    minimax = made("minimax", **_MOE, block_size=16, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ModelError, match="MiniMaxForCausalLM gives other logits .* after left padding .* sampled from"):
        SharedBase(minimax)


def test_a_model_that_reads_both_ways_is_refused():
    with pytest.raises(ModelError, match="^a BertLMHeadModel is not causal.* Take a decoder"):
        SharedBase(made("bert", **_NO_GROUPS))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_as_that(name, number):
    model = tiny_model()
    model.get_submodule(name).weight.data[0] = number
    with pytest.raises(
        ModelError, match="tokens is not finite: a weight is damaged, or too large for float32. Download"
    ):
        SharedBase(model)


def test_modules_that_are_called_as_a_role_are_refused():
    with pytest.raises(ModelError, match='^a BertGenerationDecoder has modules called "value", as a role is'):
        SharedBase(made("bert-generation", **_NO_GROUPS, is_decoder=True))


def test_a_model_that_carries_adapters_is_no_base():
    """A cell that is run again gives one that has roles; PEFT and transformers give others."""
    used, by_transformers = tiny_model(), tiny_model()
    base = SharedBase(used)
    base.add_role("policy", lora())
    base.train_roles("policy")
    by_transformers.add_adapter(lora(), "default")
    for model in (used, by_transformers, get_peft_model(tiny_model(), lora())):
        with pytest.raises(ModelError, match=r"^a \w+ with adapters on it is given.* Load the model anew.*load_role"):
            SharedBase(model)
    assert all(p.requires_grad for p in base.parameters_of("policy"))


@pytest.mark.parametrize("kind", ["xlnet", "llama4_text"])
def test_a_model_without_last_hidden_states_is_refused_in_a_sentence(kind):
    settings = {"xlnet": {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64}, "llama4_text": _MOE}[kind]
    with pytest.raises(ModelError, match=r"^a \w+ .*Llama, Mistral, Qwen"):
        SharedBase(made(kind, **settings))


def test_a_base_in_8_bits_is_refused(tmp_path):
    tiny_model(size=64).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="^quantization: with a base in 8 bits a token's outputs depend on its batch"):
        SharedBase(load_base(str(tmp_path), quantization=BitsAndBytesConfig(load_in_8bit=True)))


@pytest.mark.parametrize("said", [False, lambda: False], ids=["property", "method"])
def test_a_base_in_bits_without_gradients_is_refused(said):
    model = tiny_model()
    model.hf_quantizer = SimpleNamespace(
        is_trainable=said, quantization_config=SimpleNamespace(quant_method=QuantizationMethod.MXFP4)
    )
    with pytest.raises(ModelError, match="^quantization: transformers' kernels for weights in mxfp4 have no gradients"):
        SharedBase(model)


def test_a_quantised_lm_head(tmp_path):
    """Heads are as wide as its input, which the packed weight does not show."""
    made("llama", **_LLAMA | {"hidden_size": 64, "vocab_size": 64}).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=[])
    base = SharedBase(load_base(str(tmp_path), quantization=nf4, dtype="float32"))
    assert base.lm_head.weight.dtype is torch.uint8
    base.add_role("reward", lora())
    assert base.head("reward").in_features == 64


def test_checkpointing_that_a_model_does_not_have_is_an_error_with_a_field():
    base = SharedBase(made("openai-gpt", **_GPT))
    with pytest.raises(ModelError, match="^gradient_checkpointing: a OpenAIGPTLMHeadModel .* Set it to false."):
        base.gradient_checkpointing_enable()


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_replication": [[0, 2], [0, 1]]}, "^layer_replication: layers of the base would be replicated for all"),
        ({"alora_invocation_tokens": [5, 6]}, "^alora_invocation_tokens: an aLoRA adapter acts in PEFT's own forward"),
        ({"ensure_weight_tying": True}, "^ensure_weight_tying: .* in the first adapter of a base alone"),
    ],
    ids=["layers", "aLoRA", "tied"],
)
def test_adapters_that_are_more_than_their_weights_are_refused(settings, message):
    base = SharedBase(tiny_model())
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **settings)
    with pytest.raises(AdapterError, match=message):
        base.add_role("policy", config)
    assert base.roles == () and base.config.num_hidden_layers == 2 == len(base.causal_lm.model.layers)


@pytest.mark.parametrize(
    "given",
    [
        {"kasa_config": KasaConfig()},
        {"monteclora_config": MontecloraConfig()},
        {"use_bdlora": BdLoraConfig()},
        {"velora_config": VeloraConfig(num_groups=4)},
    ],
    ids=["KaSA", "MonteCLoRA", "BD-LoRA", "VeLoRA"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variants_that_would_be_something_else_are_refused_before_peft_has_them(given, dtype):
    base = SharedBase(tiny_model().to(dtype))
    weight = base.causal_lm.model.layers[0].self_attn.q_proj.weight
    before, (field,) = weight.clone(), given
    with pytest.raises(AdapterError, match=f"^{field}: "):
        base.add_role("policy", LoraConfig(task_type="CAUSAL_LM", r=1, target_modules=["q_proj"], **given))
    assert torch.equal(weight, before)
    base.add_role("policy", lora())


def test_orthogonal_factors_are_refused_on_4_bits_and_read_from_a_file_there(checkpoint, tmp_path):
    orthogonal = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights="orthogonal")
    plain = load_base(str(checkpoint), dtype="float32")
    get_peft_model(plain, orthogonal).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = SharedBase(load_base(str(checkpoint), quantization=nf4))
    with pytest.raises(AdapterError, match="^init_lora_weights: PEFT makes orthogonal factors in the dtype"):
        base.add_role("policy", orthogonal)
    load_role(base, "policy", tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    own = {name.rpartition("layers.")[2]: p for name, p in base.named_parameters() if ".lora_" in name}
    for name, tensor in saved.items():
        mine = own[name.rpartition("layers.")[2].replace(".weight", ".policy.weight")]
        assert torch.equal(mine, tensor)


def test_an_adapter_that_changes_the_base_is_refused(monkeypatch):
    """KaSA cuts the smallest singular values off the weights that it stands on."""
    monkeypatch.delitem(lora_module._NOT_BY_ROLE, "kasa_config")
    base = SharedBase(tiny_model())
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], kasa_config=KasaConfig())
    with pytest.raises(AdapterError, match="^the adapter changes the base, which the other roles share"):
        base.add_role("policy", config)
    assert base.roles == ()


def test_patterns_of_layers_that_are_no_experts_are_taken_on_mixtures():
    base = SharedBase(tiny_architecture("mixtral"))
    named = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"}
    base.add_role("policy", LoraConfig(**named, rank_pattern={"q_proj": 2}))
    ranks = {p.shape[0] for name, p in base.named_parameters() if "q_proj.lora_A" in name}
    assert ranks == {2}
    with pytest.raises(AdapterError, match="rank_pattern keys did not match any"):
        SharedBase(tiny_architecture("mixtral")).add_role("policy", LoraConfig(**named, rank_pattern={"w_proj": 2}))


def test_an_adapter_that_training_passes_by_is_refused():
    """Gemma 3n clamps the weights of a layer in training, and leaves the layer out."""
    base = SharedBase(tiny_architecture("gemma3n_text"))
    with pytest.raises(
        AdapterError, match="^target_modules: in training a Gemma3n.* gives an adapter on correction_coefs no gradient"
    ):
        base.add_role("policy", lora())
    assert base.roles == () and not base.causal_lm.training
    base.add_role("policy", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("jamba", "dt_proj"), ("hy_v4", "weights_proj, wk, wq_b")],
    ids=["weights read", "without gradients"],
)
def test_an_adapter_that_never_gets_a_gradient_is_refused_in_the_words_that_leave_it_out(kind, layers):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    base = SharedBase(tiny_architecture(kind))
    said = rf"gives an adapter on {layers} no gradient: .* Leave it out: exclude_modules: \[{layers}\]\.$"
    with pytest.raises(AdapterError, match=said):
        base.add_role("policy", lora())
    assert base.roles == () and not base.causal_lm.training
    base.add_role("policy", lora(exclude_modules=layers.split(", ")))
    assert not any(p.requires_grad for p in base.parameters())
    base.train_roles("policy")
    with base.role("policy"):
        base.hidden_states(IDS, MASK).sum().backward()
    assert all(p.grad is not None for p in base.parameters_of("policy"))


def test_a_saved_adapter_may_have_had_no_gradient_in_places(tmp_path):
    plain = get_peft_model(tiny_architecture("jamba"), lora())
    plain.save_pretrained(tmp_path)
    base = SharedBase(tiny_architecture("jamba"))
    load_role(base, "reference", tmp_path)
    with torch.no_grad(), base.role("reference"):
        torch.testing.assert_close(base(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits)


def test_the_trial_holds_no_copies_of_a_mixture_s_experts(monkeypatch):
    """Each adapter on the experts of a layer adds itself to a copy of all of them."""
    held = []

    def kept(forward, self, *given, **named):
        if torch.is_grad_enabled():
            held.append(self.disable_adapters)
        return forward(self, *given, **named)

    monkeypatch.setattr(
        ParamWrapper, "forward", lambda self, *a, _plain=ParamWrapper.forward, **k: kept(_plain, self, *a, **k)
    )
    base = SharedBase(tiny_architecture("qwen3_moe"))
    base.add_role("policy", lora())
    assert held and all(held)
    with base.role("policy"):
        base.hidden_states(IDS, MASK)
    assert not held[-1]


def test_a_layer_beside_others_of_its_name_is_left_out_by_more_of_it(monkeypatch):
    """lm_head, which the trial does not read, has no gradient either, and may have an adapter."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp

    def forward(x):
        with torch.no_grad():
            up = mlp.up_proj(x)
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * up)

    monkeypatch.setattr(mlp, "forward", forward)
    base, named = SharedBase(model), {"task_type": "CAUSAL_LM", "target_modules": ["up_proj", "lm_head"]}
    with pytest.raises(AdapterError, match=r"exclude_modules: \[1\.mlp\.up_proj\]\.$"):
        base.add_role("policy", LoraConfig(**named))
    base.add_role("policy", LoraConfig(**named, exclude_modules=["1.mlp.up_proj"]))
    base.add_role("q", LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))


def test_an_adapter_on_a_layer_that_is_no_plain_one_is_refused_in_a_sentence():
    class Halved(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)[..., ::2]

    model = tiny_model()
    model.model.layers[0].mlp.gate_proj = Halved(32, 128, bias=False)
    base = SharedBase(model)
    with pytest.raises(AdapterError, match="^target_modules: with this adapter a LlamaForCausalLM cannot be read as"):
        base.add_role("policy", lora())
    assert base.roles == ()
    base.add_role("policy", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
