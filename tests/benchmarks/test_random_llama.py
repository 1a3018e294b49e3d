import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from benchmarks import worker
from benchmarks.compare import differences
from benchmarks.contenders import add_roles
from benchmarks.random_llama import LLAMA_8B, TINY, outline, random_llama, save_slice
from tests.benchmarks.examples import SIZE
from tests.tiny_runs import byte_tokenizer
from toolkit.costs import weight_bytes_of
from toolkit.models import SharedBase


def test_the_8b_shape_is_that_of_llama_3_1():
    assert sum(p.numel() for p in outline(LlamaConfig(**LLAMA_8B)).parameters()) == 8_030_261_248


def test_the_random_llama_is_what_loading_in_4_bit_gives():
    model = random_llama(TINY, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    # PEFT's layer for 4 bits is another than for 16, with other casts, and so other seconds and memory.
    adapted = add_roles(SharedBase(random_llama(TINY, torch.device("cpu"))), "shared").causal_lm
    assert {type(layer) for layer in adapted.modules() if isinstance(layer, LoraLayer)} == {LoraLinear4bit}
    layers = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert len(layers) == 2 * 7 and not any("lm_head" in name for name in layers)
    plain = LlamaForCausalLM(LlamaConfig(**TINY))
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    quantised = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    in_16_bits = 2 * 512 * 64 + 5 * 64
    codes = 4 * (16 + 256) * len(layers)  # of weights and of their scales
    assert weight_bytes_of(model) == pytest.approx(quantised / 2 + 2 * in_16_bits + codes, rel=0.02)  # scales: 1.6 %
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()


def test_a_slice_is_a_checkpoint_that_all_contenders_read_alike(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<pad>"
    save_slice(tmp_path, tokenizer, {**TINY, "num_hidden_layers": 32})
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.vocab_size, config.dtype) == (2, 512, torch.bfloat16)
    assert config.eos_token_id == tokenizer.eos_token_id
    work = worker.sample(str(tmp_path), SIZE)
    assert max(map(max, work.sampled)) >= len(tokenizer)  # of the model's vocabulary, which is the larger one
    names = ("ours-separate", "stock-full")
    assert differences({name: worker.compare(str(tmp_path), work, name, dtype="bfloat16") for name in names}) == []
