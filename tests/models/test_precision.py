"""`auto` by what the machine says of itself, which is made up here."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from toolkit.models import ModelSpec, fast_precision, load_model, quantization_config, slow_here
from toolkit.models import precision as module


@pytest.fixture
def machine(monkeypatch):
    """A machine by the capability of its card, or by what its CPU has."""

    def be(card=None, amx=False, bf16=False, slower=0.4):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: card)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A card")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        monkeypatch.setattr(module, "slower_than_float32", lambda dtype: slower)

    return be


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({"card": (8, 9)}, "bfloat16, since A card has compute capability 8.9"),
        ({"card": (8, 0)}, "bfloat16, since A card has compute capability 8.0"),
        ({"card": (7, 5)}, "float16, since A card has compute capability 7.5, and bfloat16 begins with 8.0"),
        (
            {"card": (7, 0), "bf16": True},
            "float16, since A card has compute capability 7.0, and bfloat16 begins with 8.0",
        ),
        ({"amx": True}, "bfloat16, since this CPU has AMX"),
        ({"amx": True, "bf16": True, "slower": 2}, "bfloat16, since this CPU has AMX"),
        ({"bf16": True}, "bfloat16, since this CPU has AVX512-BF16"),
        (
            {"bf16": True, "slower": 1.9},
            "float32, since this CPU computes it faster than bfloat16, in spite of AVX512-BF16",
        ),
        ({}, "float32, since this CPU (AVX2) has neither AMX nor AVX512-BF16"),
    ],
)
def test_auto_is_what_the_machine_computes_fast(has, expected, machine):
    machine(**has)
    assert str(fast_precision()) == expected


@pytest.mark.parametrize(
    ("cuda", "visible", "available", "expected"),
    [
        ("13.0", None, False, True),
        ("13.0", "0", False, True),
        ("13.0", "", False, False),
        ("13.0", "-1", False, False),
        ("13.0", "NoDevFiles", False, False),
        ("13.0", "GPU-8932f937", False, True),
        ("13.0", None, True, False),
        (None, None, False, False),
    ],
)
def test_a_build_for_cuda_that_finds_no_gpu_is_noticed(cuda, visible, available, expected, monkeypatch):
    """As with a driver that is too old for it; unless all are hidden."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert module.finds_no_gpu() == expected


def test_a_model_is_loaded_in_it(checkpoint, machine):
    for has, dtype in (({}, torch.float32), ({"bf16": True}, torch.bfloat16)):
        machine(**has)
        assert load_model(ModelSpec(str(checkpoint))).dtype is dtype
        assert load_model(ModelSpec(str(checkpoint)), device=torch.device("meta")).dtype is dtype
        assert load_model(ModelSpec(str(checkpoint), dtype="float16")).dtype is torch.float16


def test_the_sentence_about_a_slow_one_has_what_was_measured(machine, monkeypatch):
    machine()
    monkeypatch.setattr(module, "slower_than_float32", lambda dtype: 61.25)
    expected = "a matmul in bfloat16 takes 61.2 times as long here as in float32: this CPU (AVX2) has neither"
    assert slow_here("bfloat16").startswith(expected)
    assert slow_here("float32") == ""
    monkeypatch.setattr(module, "slower_than_float32", lambda dtype: 1.2)  # units that torch does not tell of
    assert slow_here("bfloat16") == ""
    machine(bf16=True)
    assert slow_here("bfloat16") == ""
    machine(bf16=True, slower=1.9)
    assert slow_here("bfloat16").startswith(
        "a matmul in bfloat16 takes 1.9 times as long here as in float32: this CPU "
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "float16"),
        ({"bnb_4bit_compute_dtype": "auto"}, "float16"),
        ({"bnb_4bit_compute_dtype": "float32"}, "float32"),
    ],
)
def test_4_bit_layers_compute_in_the_precision_of_the_others(given, expected):
    config = quantization_config({"load_in_4bit": True, **given}, "float16")
    assert config.bnb_4bit_compute_dtype is getattr(torch, expected)


def test_a_card_that_emulates_bfloat16_is_told_of(machine):
    machine(card=(7, 5))
    assert slow_here("bfloat16").startswith("this GPU emulates bfloat16: A card has compute capability 7.5, and")
    assert slow_here("float16") == slow_here("float32") == ""
    machine(card=(8, 0))
    assert slow_here("bfloat16") == ""


def test_the_ratio_is_that_of_its_time_to_float32_s(monkeypatch):
    """By a clock on which the first product of each round takes three times as long as the second."""
    ticks = itertools.accumulate(itertools.chain([0.0], itertools.cycle([0, 0, 0.003, 0, 0.001])))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert module.slower_than_float32.__wrapped__("bfloat16") == pytest.approx(3)


def test_work_that_holds_up_the_cores_for_a_while_changes_no_ratio(monkeypatch):
    class Clock:
        """What begins in the first fifth of a second takes ten times as long as what begins later."""

        now = 0.0

        def perf_counter(self):
            self.now += 0.01 if self.now < 0.2 else 0.001
            return self.now

    monkeypatch.setattr(module, "time", Clock())
    assert module.slower_than_float32.__wrapped__("bfloat16") == pytest.approx(1)
