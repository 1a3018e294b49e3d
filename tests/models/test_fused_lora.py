"""Layers with one input that are computed together give what PEFT gives layer by layer."""

import warnings
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig
from transformers import GenerationConfig

from tests.tiny_models import lora, randomize, saved_base, shared_base, tiny_model
from tests.tolerances import FP32
from toolkit import processes
from toolkit.functional import token_logprobs
from toolkit.models import SharedBase, copies
from toolkit.models.fused_lora import is_plain

IDS = torch.tensor([[1, 5, 9, 12, 4], [1, 7, 3, 3, 2]])
MASK = torch.ones_like(IDS)


def by_peft(base):
    """The same base with the forward pass of PEFT on each layer."""
    for layer in base._layers:
        layer.__dict__.pop("forward", None)
    return base


def passes(base, role, *, precision=None):
    """Hidden states in a role, and the gradients of its adapter from a sum of their sines."""
    base.zero_grad()
    with base.role(role), torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        hidden = base.hidden_states(IDS, MASK)
    with base.role(role):
        hidden.float().sin().sum().backward()
    return hidden.detach().float(), [None if p.grad is None else p.grad.clone() for p in base.parameters_of(role)]


def assert_same(ours, theirs):
    assert any(g is not None for g in theirs[1])
    for mine, its in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert (mine is None) == (its is None)
        assert its is None or is_near(mine, its)


def is_near(ours, theirs):
    """By norm: of numbers near 0 some CPUs round more away than of the others."""
    return (ours - theirs).norm() <= 1e-5 * theirs.norm()


def names(base):
    paths = {id(module): name.rpartition(".")[2] for name, module in base.named_modules()}
    return sorted({tuple(paths[id(layer)] for layer in group.layers) for group in base._fused})


def test_layers_are_found_by_the_tensor_that_they_read():
    expected = [("down_proj",), ("gate_proj", "up_proj"), ("o_proj",), ("q_proj", "k_proj", "v_proj")]
    assert names(shared_base()) == expected
    expected = [("fc1",), ("fc2",), ("out_proj",), ("project_in",), ("project_out",), ("q_proj", "k_proj", "v_proj")]
    assert names(shared_base(architecture="opt")) == expected
    assert shared_base(architecture="gpt2")._fused == ()  # its layers are no nn.Linear


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "opt"])
def test_states_and_gradients_are_those_of_peft(architecture):
    base = shared_base(architecture=architecture)
    ours = {role: passes(base, role) for role in ("policy", "value")}
    with torch.no_grad(), base.role("reward"):
        unlearnt = base.hidden_states(IDS, MASK)
    by_peft(base)
    for role, of_role in ours.items():
        assert_same(of_role, passes(base, role))
    with torch.no_grad(), base.role("reward"):
        assert is_near(unlearnt, base.hidden_states(IDS, MASK))


def test_second_derivatives_are_refused():
    """Of what a pass keeps they would be none."""
    base = shared_base()
    with base.role("policy"):
        hidden = base.hidden_states(IDS, MASK)
    (first, *_) = torch.autograd.grad(hidden.sin().sum(), base.parameters_of("policy"), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def test_adapters_on_some_layers_of_a_group():
    base = SharedBase(tiny_model())
    base.add_role("policy", LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj"]))
    base.add_role("value", LoraConfig(r=2, target_modules=["k_proj", "up_proj", "gate_proj"], use_rslora=True))
    randomize(base, "policy", "value")
    base.train_roles("policy", "value")
    ours = {role: passes(base, role) for role in ("policy", "value")}
    for role, of_role in ours.items():
        assert_same(of_role, passes(by_peft(base), role))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_layers_that_are_joined_give_what_each_gives_alone(architecture):
    base = SharedBase(tiny_model(architecture=architecture))
    base.add_role("policy", LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
    base.add_role("value", LoraConfig(r=2, target_modules=["k_proj", "up_proj", "gate_proj"], use_rslora=True))
    base.add_role("reference")
    randomize(base, "policy", "value")
    base.train_roles("policy")
    with base.role("policy"):
        for group in base._fused:
            group.join(copies._copy, torch.float32)
    products, linear = [], torch.nn.functional.linear

    def states(role, precision=None):
        with base.role(role), torch.autocast("cpu", dtype=precision, enabled=precision is not None), torch.no_grad():
            return base.hidden_states(IDS, MASK).float()

    ours = {role: states(role) for role in ("policy", "value", "reference")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda *given: products.append(given) or linear(*given))
        states("policy")
    assert len(products) == 2 * 4  # a block's q, k and v; o; gate and up; down
    in_16_bits, with_gradients = states("policy", torch.bfloat16), passes(base, "policy")
    for group in base._fused:
        group.joint = None
    assert torch.equal(in_16_bits, states("policy", torch.bfloat16))
    assert_same(with_gradients, passes(by_peft(base), "policy"))
    assert all(is_near(found, states(role)) for role, found in ours.items())


def test_an_adapter_that_does_not_train_lets_the_gradient_through():
    base = shared_base()
    base.train_roles("value")
    states = base.causal_lm.get_input_embeddings()(IDS).detach().requires_grad_()

    def gradient():
        with base.role("policy"):
            out = base.causal_lm.base_model(inputs_embeds=states, attention_mask=MASK).last_hidden_state
        return torch.autograd.grad(out.sin().sum(), states)[0]

    ours = gradient()
    by_peft(base)
    assert is_near(ours, gradient())


@pytest.mark.parametrize("bits", [4, 16])
def test_in_16_bits_they_are_as_near_to_exact_ones_as_peft_s(tmp_path, bits):
    tiny_model(size=64).to(torch.bfloat16).save_pretrained(tmp_path)
    kind = bits == 4 and "nf4"
    base = saved_base(tmp_path, "bfloat16", kind=kind, compute="bfloat16", double=True, roles=["policy"])
    base.train_roles("policy")
    assert names(base)[-1] == ("q_proj", "k_proj", "v_proj")
    ours = passes(base, "policy", precision=torch.bfloat16)
    theirs = passes(by_peft(base), "policy", precision=torch.bfloat16)
    for module in list(base.modules()):
        if isinstance(module, Linear4bit):
            module.compute_dtype = torch.float32
    exact = passes(base.float(), "policy")

    def apart(found):
        return [float((x - y).norm() / y.norm()) for x, y in zip(found[1], exact[1], strict=True)]

    assert sum(apart(ours)) <= 1.2 * sum(apart(theirs)) and max(apart(ours)) < 0.2


@pytest.mark.parametrize("change", [{"use_dora": True}, {"lora_bias": True}])
def test_layers_with_more_than_two_factors_are_left_to_peft(change):
    base = SharedBase(tiny_model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT: a bias cannot be merged
        base.add_role("policy", LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], **change))
    assert base._fused == ()
    base.add_role("value", lora())
    assert ("gate_proj", "up_proj") in names(base) and not any("q_proj" in group for group in names(base))
    base.remove_role("policy")


def test_dropout_of_an_adapter_is_peft_s():
    base = SharedBase(tiny_model())
    base.add_role("policy", lora(lora_dropout=0.5))
    randomize(base, "policy")
    base.train_roles("policy")
    base.train()
    torch.manual_seed(3)
    ours = passes(base, "policy")
    torch.manual_seed(3)
    assert_same(ours, passes(by_peft(base), "policy"))


def test_another_role_does_not_get_what_was_computed_for_one():
    base = shared_base()
    attention = base.causal_lm.model.layers[0].self_attn
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        with base.role("policy"):
            attention.q_proj(x)  # computes k and v too
        with base.role("value"):
            ours = attention.k_proj(x)
            theirs = type(attention.k_proj).forward(attention.k_proj, x)
    torch.testing.assert_close(ours, theirs, **FP32)


def attention_and_input():
    base = shared_base()
    return base, base.causal_lm.model.layers[0].self_attn, torch.randn(2, 3, 32)


def test_what_was_computed_for_one_input_is_no_other_s():
    base, attention, x = attention_and_input()
    with torch.no_grad(), base.role("policy"):
        attention.q_proj(x)  # computes k and v too
        ours = attention.k_proj(other := x + 1)
        torch.testing.assert_close(ours, type(attention.k_proj).forward(attention.k_proj, other), **FP32)


def test_what_was_computed_without_gradients_is_not_learnt_from():
    base, attention, x = attention_and_input()
    with base.role("policy"):
        with torch.no_grad():
            attention.q_proj(x)  # computes k and v too
        attention.k_proj(x).sum().backward()
    (name,) = attention.k_proj.active_adapters
    assert attention.k_proj.lora_B[name].weight.grad is not None


@pytest.mark.parametrize("state", ["merged", "two adapters", "a base that trains"])
def test_layers_in_a_state_that_is_not_the_plain_one_are_peft_s(state):
    base, attention, x = attention_and_input()
    layer = attention.q_proj
    with base.role("policy"):
        (name,) = layer.active_adapters
        if state == "merged":
            layer.merge(adapter_names=[name])
        elif state == "two adapters":
            layer.set_adapter([name, next(other for other in layer.lora_A if other != name)])
        else:
            layer.base_layer.weight.requires_grad_(True)
        ours = layer(x)
        torch.testing.assert_close(ours, type(layer).forward(layer, x), **FP32)
        if state == "a base that trains":
            ours.sum().backward()
            assert layer.base_layer.weight.grad is not None


def test_a_layer_whose_weight_accelerate_may_keep_elsewhere_is_not_joined():
    _, attention, _ = attention_and_input()
    assert is_plain(attention.q_proj)
    attention.q_proj.base_layer._hf_hook = object()
    assert not is_plain(attention.q_proj)


def test_what_is_kept_while_responses_are_generated_is_not_kept_after_it():
    base = shared_base()
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=2)
    with base.role("policy"):
        before = base.generate(IDS, MASK, config)
        assert all(group.kept is None for group in base._fused)
        with torch.no_grad():
            for p in base.parameters_of("policy"):
                p.mul_(-3)
        after = base.generate(IDS, MASK, config)
        by_peft(base)
        assert torch.equal(after, base.generate(IDS, MASK, config)) and not torch.equal(before, after)


def test_layers_of_a_group_whose_first_has_another_role_s_adapter_keep_their_own():
    base = SharedBase(tiny_model())
    base.add_role("policy", LoraConfig(r=4, lora_alpha=8, target_modules=["k_proj", "v_proj"]))
    base.add_role("value", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    randomize(base, "policy", "value")
    assert ("q_proj", "k_proj", "v_proj") in names(base)
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=2)

    def of_roles():
        for role in ("policy", "value"):
            with base.role(role), torch.no_grad(), base.weights_kept():
                states = base.hidden_states(IDS, MASK)
            with base.role(role):
                yield states, base.generate(IDS, MASK, config)

    ours = list(of_roles())
    attention, x = base.causal_lm.model.layers[0].self_attn, torch.randn(2, 3, 32)
    with base.role("policy"), torch.no_grad(), base.weights_kept():
        for layer in (attention.k_proj, attention.v_proj):  # without q_proj, each by itself
            torch.testing.assert_close(layer(x), type(layer).forward(layer, x), **FP32)
    by_peft(base)
    for (states, ids), (its_states, its_ids) in zip(ours, of_roles(), strict=True):
        assert is_near(states, its_states) and torch.equal(ids, its_ids)


def test_4_bit_layers_are_unpacked_while_responses_are_generated(tmp_path):
    base = saved_base(tmp_path)
    layers = [module for module in base.modules() if isinstance(module, Linear4bit)]
    seen = []
    layers[0].register_forward_hook(
        lambda layer, given, out: seen.append((layer.__dict__.get("forward"), given[0], out))
    )
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    base.generate(IDS, MASK, config)
    assert len(seen) == 4 and all(forward is not None for forward, *_ in seen)
    assert not any("forward" in layer.__dict__ for layer in layers)
    for _, given, out in list(seen):
        assert torch.equal(Linear4bit.forward(layers[0], given), out)


def test_4_bit_layers_that_compute_in_another_precision_are_not_unpacked(tmp_path):
    base = saved_base(tmp_path, "bfloat16", kind="fp4", compute="float32")
    layers = [module for module in base.modules() if isinstance(module, Linear4bit)]
    assert layers and not set(layers) & set(copies.unpackable(base, besides=(), on_cpu=True))
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert base.generate(IDS, MASK, config).shape == (2, 4)


def of_4_bits(folder, dtype):
    base = saved_base(folder, str(dtype)[6:], compute=dtype, double=True, roles=["policy"])
    base.train_roles("policy")
    return base, [module for module in base.modules() if isinstance(module, Linear4bit)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_weights_stay_unpacked_for_passes_with_gradients_of_the_same_bits(tmp_path, dtype, unpacked, monkeypatch):
    base, layers = of_4_bits(tmp_path, dtype)
    precision = None if dtype is torch.float32 else dtype
    hidden, gradients = passes(base, "policy", precision=precision)
    assert sum(g is not None for g in gradients) == 2 * len(layers)
    with pytest.raises(KeyError), base.unpacked_for_gradients():
        unpacked.clear()
        monkeypatch.setattr(Linear4bit, "forward", None)  # none unpacks in its own pass
        found = [passes(base, "policy", precision=precision) for _ in range(2)]
        monkeypatch.undo()
        assert not unpacked
        raise KeyError
    for its_hidden, its_gradients in found:
        assert torch.equal(its_hidden, hidden)
        assert all(torch.equal(a, b) for a, b in zip(its_gradients, gradients, strict=True))
    assert not any({"forward", "unpacked_weight"} & vars(layer).keys() for layer in layers)


@pytest.mark.skipif(not copies.lays_out(torch.float32), reason="this CPU has no kernel for weights that are laid out")
@pytest.mark.parametrize("quantized", [False, True])
def test_in_float32_weights_are_laid_out_for_readings_and_updates(tmp_path, quantized, monkeypatch):
    base = of_4_bits(tmp_path, torch.float32)[0] if quantized else shared_base()
    base.train_roles("policy")
    layers = [layer.base_layer for group in base._fused for layer in group.layers]
    tokens = torch.arange(5)

    def of_policy():
        hidden, gradients = passes(base, "policy")
        states = hidden[0, :5].detach().requires_grad_()
        logprobs = token_logprobs(states, base.lm_head, tokens, frozen_head=True)
        return [hidden, *gradients, logprobs, *torch.autograd.grad(logprobs.sum(), states)]

    def laid_out():
        return [layer for layer in (*layers, base.lm_head) if "laid_out" in getattr(layer.forward, "__qualname__", "")]

    apart = of_policy()
    with base.unpacked_for_gradients():
        assert not laid_out()  # small ones
    monkeypatch.setattr(copies, "_LARGE", 0)
    with base.unpacked_for_gradients():
        assert laid_out() == [*layers, base.lm_head]
        together = of_policy()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # another precision is the layer's own
            in_16_bits = base.lm_head(apart[0].detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(base.lm_head(apart[0].detach()), in_16_bits)
    assert not any("forward" in vars(layer) for layer in (*layers, base.lm_head))
    for a, b in zip(apart, together, strict=True):
        assert (a is None) == (b is None)
        assert a is None or is_near(b, a)
    needed = 4 * sum(layer.in_features * layer.out_features for layer in (*layers, base.lm_head))
    monkeypatch.setattr(processes.exchange, "count", lambda: 4)  # each of which has copies: no number depends on it
    for total, fits in ((8 * needed, True), (8 * needed - 8, False)):
        memory = SimpleNamespace(available=0, total=total)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        with base.unpacked_for_gradients():
            assert bool(laid_out()) == fits


def test_4_bit_weights_are_unpacked_again_where_memory_has_no_room_for_all(tmp_path, monkeypatch):
    base, layers = of_4_bits(tmp_path, torch.float32)
    needed = 2 * 4 * sum(layer.in_features * layer.out_features for layer in layers)
    cases = (needed - 1, 1, False), (needed, 1, True), (4 * needed - 1, 4, False), (4 * needed, 4, True)
    for free, number, ready in cases:  # of all processes of a machine
        monkeypatch.setattr(processes.exchange, "count", lambda number=number: number)
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free, total=0))
        with base.unpacked_for_gradients():
            assert all(("unpacked_weight" in vars(layer)) == ready for layer in layers)
        with base.unpacked():  # to decode
            assert all(("forward" in vars(layer)) == ready for layer in layers)
    with base.unpacked_for_gradients(on_cpu=False):
        assert not any("unpacked_weight" in vars(layer) for layer in layers)


def test_what_a_pass_that_broke_off_has_left_is_let_go_before_the_next_needs_the_memory():
    base = shared_base()
    *_, last = base.causal_lm.model.layers
    left, alive = [], []

    def break_off(module, given, result):
        if not left:
            left.append(weakref.ref(result.grad_fn))
            raise torch.OutOfMemoryError

    last.mlp.gate_proj.register_forward_hook(
        break_off
    )  # up_proj's result is there, and its graph reaches back to the ids
    base.causal_lm.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda *_: alive.extend(ref() is not None for ref in left)
    )
    with base.role("policy"):
        with pytest.raises(torch.OutOfMemoryError):
            base.hidden_states(IDS, MASK)
        assert left[0]() is not None
        base.hidden_states(IDS, MASK)
    assert alive == [False]


def test_layers_of_4_bits_that_give_float32_under_autocast_have_their_adapters(tmp_path):
    base, _ = of_4_bits(tmp_path, torch.float32)
    ours, _ = passes(base, "policy", precision=torch.bfloat16)
    theirs, _ = passes(by_peft(base), "policy", precision=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        without = base.hidden_states(IDS, MASK).float()
    assert (ours - theirs).norm() < 0.1 * (theirs - without).norm()


def test_what_is_found_once_while_weights_are_kept_knows_of_dropout_and_precision():
    base = SharedBase(tiny_model())
    base.add_role("policy", lora(lora_dropout=0.5))
    base.add_role("value", lora())
    randomize(base, "policy", "value")
    layer, x = base.causal_lm.model.layers[0].self_attn.o_proj, torch.randn(2, 3, 32)

    def given():
        torch.manual_seed(5)
        return layer(x)

    def peft_s():
        torch.manual_seed(5)
        return type(layer).forward(layer, x)

    base.train()
    with torch.no_grad(), base.weights_kept():
        found = {}
        for _ in range(2):  # what the first finds, the second may take
            for role in ("value", "policy"):
                with base.role(role):
                    torch.testing.assert_close(given(), peft_s(), **FP32)
                    with base.without_dropout():
                        torch.testing.assert_close(found.setdefault(role, given()), peft_s(), **FP32)
                        with torch.autocast("cpu", dtype=torch.bfloat16):
                            assert given().dtype is torch.bfloat16
        assert not torch.equal(found["policy"], found["value"])
        with base.role("policy"):
            assert not torch.equal(given(), found["policy"])


def test_outside_autocast_a_layer_of_two_precisions_stays_peft_s_while_weights_are_kept():
    base = SharedBase(tiny_model().to(torch.bfloat16))
    base.add_role("policy", lora())
    randomize(base, "policy")
    layer, x = base.causal_lm.model.layers[0].self_attn.o_proj, torch.randn(2, 3, 32, dtype=torch.bfloat16)
    assert {p.dtype for p in base.parameters_of("policy")} == {torch.float32}
    with torch.no_grad(), base.role("policy"), base.weights_kept():
        with base.autocast():
            layer(x)
        assert torch.equal(layer(x), type(layer).forward(layer, x))
