"""What is counted, against numbers worked by hand."""

import gc
import math
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from trl import RewardConfig

from benchmarks.architectures import tiny_config
from tests.tiny_models import lora, shared_base
from toolkit.costs import (
    CARDS,
    Counted,
    CountedUpdate,
    Device,
    Lengths,
    Weightless,
    counted_step,
    named,
    optimizer_bytes,
    passes,
    take_shape,
    weight_bytes_of,
)
from toolkit.costs import counted as counted_module
from toolkit.costs.counted import as_on_a_card
from toolkit.costs.devices import here, this_cpu
from toolkit.costs.outline import alike, truncated
from toolkit.data import doubling
from toolkit.errors import ModelError, ToolkitError
from toolkit.models import SharedBase, ValueModel, copies, quantize_outline
from toolkit.trainers.ppo_config import PPOConfig

ROWS, WIDTH = 1000, 500
SIZE = ROWS * WIDTH * 4  # bytes of one activation


def fresh(*shape):
    counted = Counted(vocabulary=77)
    return counted, nn.Parameter(Weightless.like(torch.empty(shape, device="meta")))


def test_a_product_costs_its_operations_and_its_bytes():
    counted, weight = fresh(WIDTH, WIDTH)
    data = Weightless.like(torch.empty(ROWS, WIDTH, device="meta"))
    with counted.phase() as costs:
        product = data @ weight
    (kernel,) = costs.kernels.elements()
    assert kernel.flops == 2 * ROWS * WIDTH * WIDTH and kernel.dtype is torch.float32
    assert kernel.bytes == 2 * SIZE + WIDTH * WIDTH * 4  # both are read, one is written
    assert costs.peak == counted.total == SIZE and isinstance(product, Weightless)
    del product
    assert counted.total == 0


def test_operations_of_products_that_torch_counts_by_another_name_or_not_at_all():
    counted, weight = fresh(WIDTH, 16)
    data = Weightless.like(torch.empty(ROWS, 16, device="meta"))
    made = Weightless.like(torch.empty(ROWS, WIDTH, device="meta"))
    experts = Weightless.like(torch.empty(4, 16, WIDTH, device="meta"))
    with counted.phase() as costs, torch.no_grad():
        made.addmm_(data, weight.t())
        grouped = torch._grouped_mm(data, experts, torch.tensor([10, 20, 30, ROWS], dtype=torch.int32))
    assert grouped.shape == (ROWS, WIDTH) and grouped.dtype is torch.float32
    # A row of each is multiplied with one matrix of its kind.
    assert [kernel.flops for kernel in costs.kernels.elements()] == [2 * ROWS * 16 * WIDTH] * 2


@pytest.mark.parametrize(("causal", "of_all_pairs"), [(True, 0.5), (False, 1.0)])
def test_operations_of_attention_with_and_without_a_mask(causal, of_all_pairs):
    counted, query = fresh(2, 3, 10, 16)
    mask = None if causal else Weightless.like(torch.empty(2, 1, 10, 10, device="meta"))
    with counted.phase() as costs:
        F.scaled_dot_product_attention(query, query, query, mask, is_causal=causal).sum().backward()
    flops = [kernel.flops for kernel in costs.kernels.elements() if kernel.flops]
    product = 2 * 2 * 3 * 10 * 10 * 16 * of_all_pairs
    assert flops == [2 * product, 5 * product]  # the two again, and two for each one's gradients, of which one is again


def test_what_is_remembered_of_an_operator_is_what_it_gives(monkeypatch):
    monkeypatch.setattr(counted_module, "_remembered", {})
    counted, data = fresh(300, 400)
    with counted.phase() as costs, torch.no_grad():
        whole = data.int()
        for _ in range(2):
            assert (data + 1).dtype is torch.float32 and (whole + 1).dtype is torch.int32
            assert (whole + 1.0).dtype is torch.float32 and (data.double() + 1).dtype is torch.float64
            assert (data.t() + 1).stride() == (1, 400) and (data[:1] + data).shape == (300, 400)
            values, places = data.max(1)
            assert (values.shape, values.dtype, places.dtype) == ((300,), torch.float32, torch.int64)
            first, second = data + 1, data + 1
            assert counted.total >= whole.nbytes + 2 * first.nbytes  # each has bytes of its own
            del values, places, first, second
            assert counted.total == whole.nbytes
        kernels = Counter(costs.kernels)
        same_bytes = [torch.ops.aten._unsafe_view(data, [400, 300]) for _ in range(2)]
        assert counted.total == whole.nbytes and costs.kernels == kernels and same_bytes[1].shape == (400, 300)
        assert (whole / 2).dtype is torch.float32
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert (whole / 2).dtype is torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(counted_module._remembered) > 5


def test_what_is_done_in_place_is_remembered_where_the_form_stays(monkeypatch):
    monkeypatch.setattr(counted_module, "_remembered", {})
    counted, data = fresh(300, 400)
    other = Weightless.like(torch.empty(300, 400, device="meta"))
    with counted.phase() as costs, torch.no_grad():
        for _ in range(3):
            assert data.add_(other) is data and data.shape == (300, 400)
        assert len(counted_module._remembered) == 1
        assert {kernel.bytes: number for kernel, number in costs.kernels.items()} == {3 * other.nbytes: 3}
        for shape in ((400, 300), (300, 400), (400, 300)):  # another form, also where it has been met
            assert data.form.t_() is data.form and data.form.shape == shape
            data.mul_(2.0)
        data.form.t_()
    for _ in range(2):
        one, another = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
        counted_module._made(torch.ops.aten.set_.source_Tensor, (one, another), {}, [one, another])
        assert one.untyped_storage()._cdata == another.untyped_storage()._cdata  # of the same form, and not what it was


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(counted_module, "_remembered", {})
    monkeypatch.setattr(counted_module, "_MOST", 3)
    counted, data = fresh(4, 6)
    with counted.phase(), torch.no_grad():
        for number in range(10):
            data + number
            assert 0 < len(counted_module._remembered) <= 3


def test_a_lookup_reads_the_rows_that_it_is_asked_for():
    counted, table = fresh(50000, WIDTH)
    with counted.phase() as costs:
        F.embedding(torch.zeros(4, 8).long(), table)
    (kernel,) = costs.kernels.elements()
    assert kernel.bytes == 32 * 8 + 2 * 32 * WIDTH * 4  # ids; rows, read and written


@pytest.mark.parametrize("on_card", [False, True])
def test_dropout_and_norms_of_a_card(on_card):
    """Dropout on a card keeps a byte for each number, and layer norms are in float32 under autocast."""
    counted, weight = fresh(WIDTH, WIDTH)
    with as_on_a_card() if on_card else nullcontext(), counted.phase() as costs, torch.autocast("cpu", torch.bfloat16):
        made = nn.Dropout(0.5)(weight)
    assert costs.of_end["activations"] == made.nbytes + (made.numel() if on_card else made.nbytes)
    norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
    data = Weightless.like(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"))
    with as_on_a_card() if on_card else nullcontext(), counted.phase(), torch.autocast("cpu", torch.bfloat16):
        assert norm(data).dtype is (torch.float32 if on_card else torch.bfloat16)
    assert F.dropout.__module__ == F.layer_norm.__module__ == "torch.nn.functional"


def test_what_checkpointing_computes_again_is_a_cards_too():
    counted, weight = fresh(WIDTH, WIDTH)
    data = Weightless.like(torch.empty(ROWS, WIDTH, device="meta"))
    with as_on_a_card(), counted.phase():
        # torch compares what is kept with what is computed again.
        checkpoint(lambda x: nn.Dropout(0.5)(x @ weight).tanh(), data, use_reentrant=False).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(("checkpointed", "kept"), [(False, 8), (True, 0)])
def test_what_lives_on_to_the_backward_pass(checkpointed, kept):
    """tanh keeps its result, the product with a weight that trains its input; checkpointing keeps neither."""
    counted, weight = fresh(WIDTH, WIDTH)
    data = Weightless.like(torch.empty(ROWS, WIDTH, device="meta"))

    def layers(x):
        for _ in range(4):
            x = torch.tanh(x @ weight)
        return x

    with counted.phase():
        out = checkpoint(layers, data, use_reentrant=False) if checkpointed else layers(data)
        # Of 4 layers their 4 results; the last is what is given back.
        assert counted.total == (4 if kept else 1) * SIZE
        out.sum().backward()
    gc.collect()
    del out
    assert counted.total == weight.grad.nbytes


def test_ids_and_masks_stay_real_and_numbers_that_are_asked_for_are_0():
    counted, weight = fresh(10, WIDTH)
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    with counted.phase():
        states = nn.functional.embedding(ids, weight)
        chosen = states[ids > 0]
        assert chosen.shape == (5, WIDTH) and not isinstance(ids > 0, Weightless)
        assert float(chosen.sum()) == 0 and states.argmax(-1).tolist() == [[0] * 3] * 2
        filled = torch.zeros(2, 3)
        filled[0] = chosen[:3, 0]  # a real tensor, which keeps what it has
    assert filled.tolist() == [[0.0] * 3] * 2


def test_logits_are_told_from_other_activations():
    counted, weight = fresh(77, WIDTH)
    data = Weightless.like(torch.empty(ROWS, WIDTH, device="meta"))
    with counted.phase() as costs:
        logits = nn.functional.linear(torch.tanh(data), weight)
    assert costs.of_peak == {"activations": SIZE, "logits": logits.nbytes}


@pytest.mark.parametrize("double", [True, False])
def test_a_4_bit_layer_has_its_constants_and_is_unpacked_for_a_product(double):
    config = LlamaConfig(
        vocab_size=77, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        base = LlamaForCausalLM(config).requires_grad_(False)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=double)
    quantize_outline(base, nf4)
    with torch.device("meta"):
        roles = SharedBase(base)
    counted = Counted(77)
    take_shape(roles)
    linear = 4 * 128 * 128 + 3 * 128 * 256
    scales = linear // 64 + 7 * 4 * (1 + 256 + 1) + 4 * (linear // 64 // 256) if double else 4 * linear // 64
    if double:  # each layer's own number of groups of 256 scales, rounded up, and its offset
        scales = linear // 64 + sum(4 * math.ceil(n / 64 / 256) for n in [128 * 128] * 4 + [128 * 256] * 3)
        scales += 7 * 4 * (256 + 1)
    whole = 2 * 77 * 128 * 4 + 3 * 128 * 4 + sum(b.nbytes for b in roles.buffers())
    assert weight_bytes_of(roles) == linear // 2 + scales + 7 * 16 * 4 + whole
    layer = next(m for m in roles.modules() if isinstance(m, Linear4bit))
    data = Weightless.like(torch.empty(ROWS, layer.in_features, device="meta"))
    with torch.no_grad(), counted.phase() as costs:
        layer(data)
    (kernel,) = [kernel for kernel in costs.kernels if kernel.flops]
    assert kernel.flops == 2 * ROWS * layer.in_features * layer.out_features
    assert costs.of_peak["unpacked layer"] == 4 * layer.in_features * layer.out_features


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def outline(kind, *roles, quantization=None, **named):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
        quantize_outline(model, quantization)
        base = SharedBase(model)
        for role in roles:
            base.add_role(role, LoraConfig(task_type="CAUSAL_LM", r=4, **named))
    return base


def test_a_base_in_4_bits_has_the_layers_called_that_loading_would_have_called():
    """Jamba reads the weight of one itself where it is not packed."""
    take_shape(outline("jamba", "policy", quantization=NF4, target_modules=["dt_proj"]))


@pytest.mark.parametrize(
    ("kind", "quantization", "said"),
    [("llama4_text", None, "^a Llama4ForCausalLM has no base_model"), ("mamba", NF4, "^a Mamba.* tried on 6 tokens")],
)
def test_what_loading_refuses_is_refused_without_numbers_too(kind, quantization, said):
    with pytest.raises(ModelError, match=said):
        take_shape(outline(kind, quantization=quantization))


def test_a_token_costs_a_token_where_a_model_calls_its_cache_otherwise(tmp_path):
    roles = outline("mamba", "policy", "value", target_modules=["in_proj", "x_proj"])
    roles.add_role("reference")
    take_shape(roles)
    args = PPOConfig(str(tmp_path), use_cpu=True, bf16=False, response_length=8)
    phases = CountedUpdate(Counted(99), roles, args, Lengths(48, 8)).phases("rollout")
    prompts, *tokens = [sum(k.flops * number for k, number in phase.costs.kernels.items()) for phase in phases]
    assert len(tokens) == 2 and 0 < max(tokens) < prompts / 20  # by graphs of its states there are none


def test_parameters_are_replaced_wherever_they_are_held():
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=77, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        )
        roles = SharedBase(LlamaForCausalLM(config))
        roles.add_role("policy", lora())
        roles.add_role("value", lora())
    roles.train_roles("policy")
    before = [(p.shape, p.requires_grad) for role in roles.roles for p in roles.parameters_of(role)]
    take_shape(roles)
    own = [p for role in roles.roles for p in roles.parameters_of(role)]
    assert [(p.shape, p.requires_grad) for p in own] == before and all(isinstance(p, Weightless) for p in own)
    assert {id(p) for p in own} <= {id(p) for p in roles.parameters()}


def test_cards_and_sizes():
    assert named("24GB") == 24 * 10**9 and named("80 GiB") == 80 * 2**30
    assert named("4090").name == "RTX 4090" and named("rtx-3090").name == "RTX 3090"
    assert all(named(card.name) is card for card in CARDS.values())
    assert named("H100").name == "H100 SXM" and named("a100-80gb").name == "A100 80 GB"
    assert named("A100").name == named("A100-40").name == "A100 40 GB"
    for other in ("B300", "A11", "40", "9", "RTX"):  # no part of a name is a card
        with pytest.raises(ToolkitError, match=rf"'{other}' is neither a known GPU nor a size of memory. Name"):
            named(other)


GIB = 2**30
CALLED = {  # as torch names them, what they are taken for, and GiB
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 79), "NVIDIA H100 PCIe": ("H100 PCIe", 79), "NVIDIA H200": ("H200", 139),
    "NVIDIA A100-SXM4-80GB": ("A100 80 GB", 79), "NVIDIA A100-PCIE-40GB": ("A100 40 GB", 39),
    "NVIDIA L4": ("L4", 22), "NVIDIA L40S": ("L40S", 44), "Tesla T4": ("T4", 14), "NVIDIA A10": ("A10", 22),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", 23), "NVIDIA RTX A6000": ("RTX A6000", 47),
}  # fmt: skip
OTHERS = ("NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA T400 4GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")


@pytest.mark.parametrize("name", [*CALLED, *OTHERS])
def test_the_card_of_a_machine_is_known_by_its_whole_name_and_has_its_own_memory(name, monkeypatch):
    expected, gib = CALLED.get(name, (None, 7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    has = SimpleNamespace(name=name, total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: has)
    card = here()
    if expected is None:  # another card than the one whose name it begins with: what it does is not known
        assert card == 7 * GIB
    else:
        assert (card.name, card.memory) == (expected, gib * GIB)


def test_a_device_takes_the_longer_of_operations_and_bytes():
    device = Device("x", 0, 100.0, {torch.float32: 10.0, torch.bfloat16: 50.0}, 0.0, reached=(0.5, 1.0))
    assert device.seconds(100.0, 1.0, torch.float32) == 20.0
    assert device.seconds(100.0, 1.0, torch.bfloat16) == 4.0
    assert device.seconds(1.0, 1000.0, torch.float32) == 10.0
    assert device.seconds(100.0, 1.0, torch.uint8) == 20.0  # as float32 where nothing is known
    slow_products = replace(device, products=10.0)
    assert slow_products.seconds(1.0, 1000.0, torch.float32) == 100.0
    assert slow_products.seconds(0.0, 1000.0, torch.float32) == 10.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a card")
def test_this_cpu_is_measured():
    cpu = here()
    assert cpu is this_cpu() and not cpu.graphs
    assert 1e8 < cpu.peak[torch.float32] < 1e14 and 1e8 < cpu.bandwidth < 1e13 and 1e-8 < cpu.operator < 1e-3
    assert cpu.products is None or 1e7 < cpu.products < cpu.bandwidth


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        *(("adamw_torch", 8.0), ("sgd", 0.0), ("rmsprop", 4.0), ("ademamix", 12)),
        *(("adamw_8bit", 2), ("lion_8bit", 1), ("paged_adamw_8bit", 2)),
    ],
)
def test_bytes_of_an_optimizer(optim, expected, tmp_path):
    args = PPOConfig(str(tmp_path), optim=optim, use_cpu=True, bf16=False)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a plan for a card nothing is said of this machine
        assert optimizer_bytes(args) == pytest.approx(expected, rel=0.05)
    assert torch.equal(torch.get_rng_state(), before)


def without_numbers(dtype=torch.float32):
    """A tiny Llama with all roles, as a plan has it: packed rows are tried on numbers alone."""
    with torch.device("meta"):
        roles = shared_base()
    roles.causal_lm.to(dtype)
    take_shape(roles)
    return roles


def deep(adapter, dtype=torch.float32, roles_of=("policy", "value", "reward", "judge"), **sizes):
    """A Llama without numbers, with these roles and the reference."""
    with torch.device("meta"):
        config = LlamaConfig(intermediate_size=64, num_attention_heads=4, **sizes)
        roles = SharedBase(LlamaForCausalLM(config).to(dtype).requires_grad_(False))
        for role in roles_of:
            roles.add_role(role, adapter)
        roles.add_role("reference")
    take_shape(roles)
    return roles


def test_every_second_layer_is_counted_as_it_is_kept(monkeypatch):
    def peak(given):
        args = RewardConfig(
            output_dir="nowhere", per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to="none",
            gradient_checkpointing=True, gradient_checkpointing_kwargs=given,
        )  # fmt: skip
        roles = deep(lora(), roles_of=("reward",), vocab_size=77, hidden_size=32, num_hidden_layers=6)
        return counted_step("pairs", roles, args, 24, 24)[0].costs.peak

    every, moved, second = peak(None), peak({"offload": True}), peak({"every_n_layers": 2})
    monkeypatch.setattr(passes, "alike", lambda roles: None)
    assert (every, second) == (peak(None), peak({"every_n_layers": 2})) and every == moved < second


def test_where_adapters_are_large_their_gradients_at_the_end_are_the_most(tmp_path, monkeypatch):
    """With few layers the logits are."""
    args = PPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, response_length=8, per_device_train_batch_size=2, num_ppo_epochs=1,
        gradient_accumulation_steps=1, num_mini_batches=1, gradient_checkpointing=True,
    )  # fmt: skip
    roles = deep(lora(r=64), vocab_size=8000, hidden_size=64, num_hidden_layers=9)
    update = CountedUpdate(Counted(8000), roles, args, Lengths(16, 8))
    told = update.phases("update")[0]
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.costs.passes.alike", lambda roles: None)
        whole = update.phases("update")[0]
    assert told.costs.of_peak["gradients"] == sum(p.nbytes for p in roles.trained_parameters)
    assert whole.costs.of_peak["gradients"] > 0.9 * told.costs.of_peak["gradients"]
    assert 0.9 * whole.costs.peak < told.costs.peak <= whole.costs.peak


def test_gradients_of_an_update_are_of_no_other_phase(tmp_path):
    args = PPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, response_length=8, per_device_train_batch_size=1,
        gradient_accumulation_steps=8, num_mini_batches=1, local_rollout_forward_batch_size=1,
    )  # fmt: skip
    roles = without_numbers()
    phases = CountedUpdate(Counted(len(doubling.VOCABULARY)), roles, args, Lengths(16, 8)).phases()
    with_them = {phase.name for phase in phases if phase.costs.of_peak.get("gradients")}
    assert with_them == {"update"} and min(size for phase in phases for size in phase.costs.of_peak.values()) >= 0


def test_a_micro_batch_has_no_more_rows_than_its_mini_batch(tmp_path):
    """8 rollouts in 4 mini-batches are 2 rows a step, whatever would fit."""

    def update(rows):
        args = PPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, response_length=8, per_device_train_batch_size=rows,
            gradient_accumulation_steps=8 // rows, num_mini_batches=4, local_rollout_forward_batch_size=8,
        )  # fmt: skip
        return CountedUpdate(Counted(len(doubling.VOCABULARY)), without_numbers(), args, Lengths(16, 8)).phases(
            "update"
        )

    two, eight = update(2), update(8)
    assert [phase.times for phase in two] == [phase.times for phase in eight] == [4 * 4, 4 * 4]
    assert [phase.costs.kernels for phase in two] == [phase.costs.kernels for phase in eight]
    assert [phase.costs.peak for phase in two] == [phase.costs.peak for phase in eight]
    assert update(1)[0].times == 8 * 4  # two micro-batches a step


@pytest.mark.parametrize("checkpointing", [False, True])
def test_deep_models_are_told_from_their_first_layers(checkpointing, tmp_path, monkeypatch):
    args = PPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, response_length=8, per_device_train_batch_size=2, num_ppo_epochs=1,
        gradient_accumulation_steps=2, num_mini_batches=1, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    roles, counted = deep(lora(), vocab_size=77, hidden_size=32, num_hidden_layers=5), Counted(77)
    assert alike(roles) == 5
    update = CountedUpdate(counted, roles, args, Lengths(16, 8))
    of = ("read", "update") if checkpointing else ()  # no other phase reads that setting
    told = update.phases(*of)
    monkeypatch.setattr("toolkit.costs.passes.alike", lambda roles: None)
    whole = update.phases(*of)
    assert [phase.name for phase in told] == [phase.name for phase in whole]
    for ours, theirs in zip(told, whole, strict=True):
        assert ours.costs.kernels == theirs.costs.kernels, ours.name
        assert (ours.costs.peak, ours.costs.of_peak) == (theirs.costs.peak, theirs.costs.of_peak), ours.name
    if not of:  # prompts, the last token, reading, reward and judge
        assert [phase.name for phase in told].count("evaluation") == 5
    # AdamW, of each number in float32: the gradient for its norm, clipped and read again, weight and state there and
    # back.
    (step,) = [phase for phase in told if phase.name == "optimizer"]
    trained = sum(p.numel() for role in ("policy", "value") for p in roles.parameters_of(role))
    (kernel,) = step.costs.kernels
    assert step.times == 1 and kernel.bytes == 4 * trained * (1 + 2 + 1 + 2 + 2 * 2)


def test_beside_a_value_model_all_layers_are_counted(tmp_path):
    """Of few layers the most would be the value model's pass, which does not grow with those left out."""
    args = PPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, response_length=8, per_device_train_batch_size=2, num_ppo_epochs=1,
        gradient_accumulation_steps=1, num_mini_batches=1, gradient_checkpointing=False,
    )  # fmt: skip

    def update(value_layers):
        roles = deep(lora(), vocab_size=77, hidden_size=32, num_hidden_layers=9)
        if value_layers:
            sizes = {"vocab_size": 77, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
            config = LlamaConfig(**sizes, num_hidden_layers=value_layers, num_labels=1)
            roles.remove_role("value")
            with torch.device("meta"):
                roles.place_value(ValueModel(LlamaForSequenceClassification(config), lora()))
            take_shape(roles)
        return CountedUpdate(Counted(77), roles, args, Lengths(48, 8)).phases("update")[0].costs.peak

    small, without = update(1), update(0)
    # The base's own pass is the most, to which a few layers of another add their gradients and no more.
    assert small == pytest.approx(without, rel=0.1) and update(3) == pytest.approx(small, rel=0.1)
    assert update(9) > 1.2 * small


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left", [0, 1])
def test_room_for_copies_on_a_cpu_is_asked_for_all_layers(left, dtype, tmp_path, monkeypatch):
    """Three layers of a deep model would fit where it does not: in half of what is free, or in float32, with the
    policy's adapter in them, in an eighth of all."""
    monkeypatch.setattr(copies, "lays_out", lambda dtype: True)
    monkeypatch.setattr(copies, "_LARGE", 0)
    roles = deep(lora(), dtype, vocab_size=77, hidden_size=32, num_hidden_layers=6)
    weights = dtype.itemsize * (6 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 77)
    in_16_bits = dtype is torch.bfloat16
    memory = (2 * weights - left, 0) if in_16_bits else (0, 8 * weights - left)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory[0], total=memory[1]))
    args = PPOConfig(str(tmp_path), use_cpu=True, bf16=in_16_bits, response_length=8, gradient_checkpointing=False)
    update = CountedUpdate(Counted(77), roles, args, Lengths(16, 8), on_cpu=True)
    held = [phase.costs.of_peak.get("copied weights", 0) for phase in update.phases("rollout")]
    assert all(copied >= weights for copied in held) if left == 0 else not any(held), (held, weights)


def test_each_phase_is_told_as_often_as_an_update_does_it(tmp_path):
    args = PPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, response_length=9, per_device_train_batch_size=2, num_ppo_epochs=1,
        gradient_accumulation_steps=2, rollouts_per_update=3, num_mini_batches=1, local_rollout_forward_batch_size=4,
    )  # fmt: skip
    roles, times = without_numbers(), Counter()
    for phase in CountedUpdate(Counted(len(doubling.VOCABULARY)), roles, args, Lengths(16, 9)).phases():
        times[phase.name] += phase.times
    # 12 rows in three batches; of nine tokens the prompt gives the first.
    once = {"prefill": 3, "decode": 24, "score": 3, "read": 3, "update": 6, "optimizer": 1}
    once |= {"graphs": 2 * 24, "merged": 2 * 24}  # a pass, and the draw from what it gives
    assert dict(times) == once | {"evaluation": 0}


def test_a_reading_is_counted_as_its_settings_and_its_machine_have_it(tmp_path):
    def kernels(roles, *, on_cpu=False, **settings):
        args = PPOConfig(str(tmp_path), use_cpu=True, response_length=8, local_rollout_forward_batch_size=2, **settings)
        counted = Counted(len(doubling.VOCABULARY))
        (phase,) = CountedUpdate(counted, roles, args, Lengths(16, 8), on_cpu=on_cpu).phases("read")
        return phase.costs.kernels

    exact, half = without_numbers(), without_numbers(torch.bfloat16)
    assert kernels(exact, bf16=False, kl_estimator="full") != kernels(exact, bf16=False)
    assert kernels(half, bf16=True, on_cpu=True) != kernels(half, bf16=True)  # attention in float32


def test_an_update_s_memory_depends_on_the_vocabulary_by_a_chunk_however_long_responses_are(tmp_path):
    def most(vocabulary, response):
        with torch.device("meta"):
            config = LlamaConfig(
                vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
            )
            roles = SharedBase(LlamaForCausalLM(config).requires_grad_(False))
            for role in ("policy", "value", "reward"):
                roles.add_role(role, lora())
            roles.add_role("reference")
        roles.train_roles("policy", "value")
        take_shape(roles)
        settings = {"response_length": response, "per_device_train_batch_size": 8, "logprob_chunk_size": 32}
        args = PPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_mini_batches=1, **settings)
        counted = CountedUpdate(Counted(vocabulary), roles, args, Lengths(48, response))
        return max(phase.costs.peak for phase in counted.phases("score", "update"))

    small, large = 10_000, 60_000
    short, long = (most(large, response) - most(small, response) for response in (32, 256))
    # In float32 three times what 32 positions have of logits, while up to 8 x 256 positions are learnt from.
    assert 0 < long <= short <= 3 * 32 * (large - small) * 4


def test_a_base_that_is_cut_has_as_many_kinds_of_layers_as_layers():
    base = SharedBase(AutoModelForCausalLM.from_config(tiny_config("qwen2", num_hidden_layers=5)).requires_grad_(False))
    with truncated(base, 3):
        assert len(base.config.layer_types) == base.config.num_hidden_layers == 3
    assert len(base.config.layer_types) == base.config.num_hidden_layers == 5


def test_whoever_asks_for_a_card_s_autocast_is_told_of_the_one_that_is_counted():
    """PEFT asks so before it drops out: without autocast its 4-bit layers compute in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled()
        with as_on_a_card():
            assert torch.is_autocast_enabled() and not torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled()
    with as_on_a_card():
        assert not torch.is_autocast_enabled()
