"""The loop over new tokens, against that of transformers; and rows that leave it once they have ended."""

import gc
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, Cache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.models.test_q_values import q_base
from tests.tiny_models import ARCHITECTURES, VOCABULARY, lora, randomize, saved_base, shared_base, tiny_model
from tests.tolerances import FP32
from toolkit import processes
from toolkit.data import doubling
from toolkit.models import RowProcessor, SharedBase, copies
from toolkit.models.decoding import decode
from toolkit.sampling import Sampler

PROMPTS = [[1, 4, 9, 7, 3], [1, 30], [1, 5, 6, 8, 11, 12], [1, 9, 9], [1, 14], [1, 3, 8, 7]]
IDS = torch.tensor([[0] * (6 - len(prompt)) + prompt for prompt in PROMPTS])
MASK = (IDS != 0).long()


class Seen(RowProcessor):
    """What a loop gives for each token, float32 (N, V)."""

    def __init__(self):
        self.scores = []

    def __call__(self, input_ids, scores):
        self.scores.append(scores.clone())
        return scores


def greedy(model, *, by, eos=None, tokens=9, ids=IDS):
    """int64 (B, T) and the logits of each step: by `decode` or, where that is None, by transformers' own loop."""
    seen = Seen()
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    output = model.generate(
        input_ids=ids, attention_mask=(ids != 0).long(), generation_config=config, custom_generate=by,
        logits_processor=LogitsProcessorList([seen]),
    )  # fmt: skip
    return output[:, ids.shape[1] :], seen.scores


def base_of(kind, tmp_path):
    if kind != "llama in NF4":
        return shared_base(architecture=kind)
    return saved_base(tmp_path, roles=["policy"])


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "llama in NF4"])
def test_tokens_and_logits_are_those_of_transformers_own_loop(kind, tmp_path):
    base = base_of(kind, tmp_path)
    with base.role("policy"):
        ours, our_logits = greedy(base.causal_lm, by=decode)
        theirs, their_logits = greedy(base.causal_lm, by=None)
        assert torch.equal(ours, theirs) and ours.shape == (6, 9)
        assert all(torch.equal(a, b) for a, b in zip(our_logits, their_logits, strict=True))  # nothing has left
        rows_with = {token: int((theirs[:, :7] == token).any(dim=1).sum()) for token in theirs.unique().tolist()}
        end = next(token for token, number in rows_with.items() if token and 2 <= number <= 5)
        ours, our_logits = greedy(base.causal_lm, by=decode, eos=end)
        theirs, their_logits = greedy(base.causal_lm, by=None, eos=end)
        assert torch.equal(ours, theirs)
        assert len(our_logits[-1]) < 6 == len(their_logits[-1])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "common", "padded"),
    [
        *((kind, True, True) for kind in (*ARCHITECTURES, "llama in NF4", "gemma3_text")),
        ("llama", False, True),
        ("gpt2", True, False),
    ],
)
def test_prompts_in_a_line_are_followed_by_what_follows_padded_ones(kind, common, padded, tmp_path):
    """They are not where a cache forgets tokens, by their places in it: mistral's and gemma3's, with windows."""
    base = SharedBase(tiny_architecture(kind)) if kind == "gemma3_text" else base_of(kind, tmp_path)
    if kind == "gemma3_text":
        base.add_role("policy", lora())
    beginning = [20, 21, 22, 23, 24, 25, 26, 27] if common else []
    rows = [beginning + prompt for prompt in (PROMPTS if padded else [[1, 2 + row, 9] for row in range(6)])]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    read = []
    hook = base.causal_lm.register_forward_pre_hook(
        lambda _, given, named: read.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    seen, config = Seen(), GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    with base.role("policy"):
        ours = base.generate(ids, (ids != 0).long(), config, logits_processor=LogitsProcessorList([seen]))
        in_line = (1, -(-(sum(map(len, rows)) - 5 * len(beginning)) // 8) * 8)
        assert read == [ids.shape if kind in ("mistral", "gemma3_text") else in_line] + [(6, 1)] * 8
        hook.remove()
        theirs, their_logits = greedy(base.causal_lm, by=None, ids=ids)
    assert torch.equal(ours, theirs)
    for one, other in zip(seen.scores, their_logits, strict=True):  # by the weights as rollouts have them
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rows", "times"), [(1, 1), (6, 0)])
def test_kernels_for_few_tokens_are_taken_for_few_rows(rows, times, monkeypatch):
    """A mixture's would copy experts for each row."""
    base, entered = shared_base(), []

    @contextmanager
    def for_few():
        entered.append(True)
        yield

    monkeypatch.setattr(base.causal_lm, "_optimize_model_for_decode", for_few)
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    base.generate(IDS[:rows], MASK[:rows], config)
    assert len(entered) == times


def sampled(base, *, role, **settings):
    """Responses to twelve prompts by their keys, and how many rows each pass of the model had."""
    numbers = []
    # Of the first pass, too, in which prompts may stand in one line: then there are the logits of so many tokens of it.
    hook = base.causal_lm.register_forward_hook(lambda _, __, made: numbers.append(max(made.logits.shape[:2])))
    base.stop_token_ids = lambda tokenizer: list(range(2, 8))  # so that many rows end soon
    made = Sampler(base, doubling.tokenizer(), role=role, response_length=16, **settings)
    rollout = made(made.collator([{"input_ids": ids} for ids in PROMPTS * 2]), keys=torch.arange(12))
    hook.remove()
    return rollout.response_ids, numbers


# Full attention, windows shorter than the responses, recurrent states, and both together.
KINDS = ["llama", "mistral", "gemma3_text", "mamba", "jamba", "lfm2", "qwen3_next", "bamba"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_have_ended_leave_and_the_others_say_what_they_would_have_said(kind):
    changes = {"sliding_window": 4} if kind in ("mistral", "gemma3_text") else {}
    base = SharedBase(tiny_architecture(kind, **changes))
    base.add_role("reference")
    responses, numbers = sampled(base, role="reference", temperature=2.0)
    assert numbers[0] == 12 > numbers[-1] and numbers == sorted(numbers, reverse=True)
    for step, number in enumerate(numbers):  # never a third more than those that go on
        assert number <= 12 if step == 0 else number < sum(len(ids) > step for ids in responses) / 0.75 + 1e-9
    base._rows_leave = False
    assert sampled(base, role="reference", temperature=2.0) == (responses, [12] * len(numbers))


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_rows_leave_both_passes_of_decoding_by_q(temperature):
    base = q_base()
    responses, numbers = sampled(base, role="q", temperature=temperature)
    base._rows_leave = False
    assert sampled(base, role="q", temperature=temperature) == (responses, [12] * len(numbers))
    assert numbers[-1] < 12


def test_rows_stay_beside_a_processor_that_does_not_know_of_it():
    class Plain(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert len(scores) == 6
            return scores

    base = shared_base()
    first = greedy(base.causal_lm, by=decode, tokens=1)[0][0].tolist()
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=first, pad_token_id=0)
    output = base.generate(IDS, MASK, config, logits_processor=LogitsProcessorList([Plain()]))
    assert output.shape == (6, 9) and output[0].tolist() == [*first, *[0] * 8]


def test_rows_stay_where_something_is_held_of_them_beside_the_cache(monkeypatch):
    assert shared_base(tiny_model())._rows_leave
    monkeypatch.setattr(Cache, "reorder_cache", lambda cache, rows: None)
    assert not shared_base(tiny_model())._rows_leave

    def first(cache, rows):
        Cache.batch_select_indices(cache, rows * 0)  # those of another row

    monkeypatch.setattr(Cache, "reorder_cache", first)
    assert not shared_base(tiny_model())._rows_leave


def needs_layout(dtype):
    return pytest.mark.skipif(not copies.lays_out(dtype), reason="this CPU has no kernel for weights that are laid out")


def in_float32(tmp_path, quantized):
    return saved_base(tmp_path, kind=quantized and "nf4", roles=["policy", "reward"])


def own_forwards(base):
    return [module.forward for module in base.causal_lm.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("laid_out", [False, pytest.param(True, marks=needs_layout(torch.float32))])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_policy_s_adapter_is_merged_for_its_responses_in_float32(tmp_path, quantized, laid_out, monkeypatch):
    monkeypatch.setattr(copies, "_LARGE", 0 if laid_out else math.inf)
    base = in_float32(tmp_path, quantized)
    before = own_forwards(base)
    with base.role("policy"):
        apart, of_apart = greedy(base.causal_lm, by=decode)
        with base.unpacked():
            merged = [forward for forward in own_forwards(base) if "merged" in getattr(forward, "__qualname__", "")]
            assert len(merged) == 14 + laid_out  # seven a block, and lm_head
            weights = [cell.cell_contents for forward in merged for cell in forward.__closure__]
            assert [w.is_mkldnn for w in weights if type(w) is torch.Tensor] == [laid_out] * len(merged)
            tokens, logits = greedy(base.causal_lm, by=decode)
            with base.role("reward"):
                of_reward = base.logits(base.hidden_states(IDS, MASK))
            with torch.autocast("cpu", dtype=torch.bfloat16):  # another precision is the layer's own
                in_16_bits = base.hidden_states(IDS, MASK)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(base.hidden_states(IDS, MASK), in_16_bits)
    assert own_forwards(base) == before
    assert torch.equal(tokens, apart)
    distance = max(float((a - b).abs().max()) for a, b in zip(logits, of_apart, strict=True))
    assert 0 < distance < 1e-4 * max(float(a.abs().max()) for a in of_apart)
    with base.role("reward"):
        torch.testing.assert_close(base.logits(base.hidden_states(IDS, MASK)), of_reward, **FP32)


def test_nothing_is_merged_for_other_roles_in_16_bits_or_beyond_a_share_of_the_memory(tmp_path, monkeypatch):
    base = in_float32(tmp_path, False)
    before = own_forwards(base)

    def changed(role):
        with base.role(role), base.unpacked():
            return own_forwards(base) != before

    assert changed("policy") and not changed("reward")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not changed("policy")
    numbers = sum(m.base_layer.weight.numel() for m in base.causal_lm.modules() if isinstance(m, LoraLayer))
    monkeypatch.setattr(processes.exchange, "count", lambda: 4)  # each of which has copies: no number depends on it
    for total, fits in ((8 * 4 * numbers, True), (8 * 4 * numbers - 8, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda total=total: SimpleNamespace(available=0, total=total))
        assert changed("policy") == fits
    monkeypatch.undo()
    base.causal_lm.to(torch.bfloat16)
    with base.role("policy"), base.unpacked():
        assert not any("merged" in getattr(forward, "__qualname__", "") for forward in own_forwards(base))


@pytest.mark.parametrize("quantized", [False, True])
def test_merged_in_16_bits_it_is_a_model_with_these_weights(tmp_path, quantized):
    """Against a plain model whose weights are W + s · B A, by hand in float64 and rounded once."""
    base = saved_base(tmp_path, "bfloat16", kind=quantized and "fp4", compute="bfloat16", roles=["policy", "reward"])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layers, with_adapter = dict(plain.named_modules()), []
    for name, layer in base.causal_lm.named_modules():
        if isinstance(layer, LoraLayer):
            held, a, b = layer.base_layer, layer.lora_A["policy"].weight, layer.lora_B["policy"].weight
            weight = dequantize_4bit(held.weight, held.weight.quant_state) if quantized else held.weight
            layers[name].weight.data = (weight.double() + 2 * b.double() @ a.double()).to(torch.bfloat16)
            with_adapter.append(held)
    assert len(with_adapter) == 14  # seven a block
    before = own_forwards(base)
    with base.role("policy"), base.autocast(), torch.no_grad():
        with base.unpacked(merged=True):
            found = base(input_ids=IDS, attention_mask=MASK).logits
            with base.role("reward"):
                of_reward = base.hidden_states(IDS, MASK)
        expected, apart = (of(input_ids=IDS, attention_mask=MASK).logits for of in (plain, base))
    assert own_forwards(base) == before
    # One rounding of a weight may fall the other way from float32 than from float64.
    assert float((found - expected)[MASK.bool()].abs().max()) < 0.1 * float((found - apart)[MASK.bool()].abs().max())
    with base.role("reward"), base.autocast(), torch.no_grad():
        assert torch.equal(base.hidden_states(IDS, MASK), of_reward)
    assert base.merged_bytes == 2 * sum(layer.in_features * layer.out_features for layer in with_adapter) + (
        0 if not copies.lays_out(torch.bfloat16) else 2 * 64 * VOCABULARY  # lm_head's, for the CPU
    )


def test_what_a_merged_copy_takes_is_counted_in_the_precision_of_the_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_LARGE", 0)
    base = in_float32(tmp_path, False)
    of_head = 4 * 64 * VOCABULARY if copies.lays_out(torch.float32) else 0
    assert base.merged_bytes == 4 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 64) + of_head
    in_float32_only = base.merged_bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert base.merged_bytes * 2 == in_float32_only - of_head
        with base.role("policy"), base.unpacked(merged=True):
            weights = [forward.__closure__ for forward in own_forwards(base) if "merged" in forward.__qualname__]
            held = {
                cell.cell_contents.dtype
                for cells in weights
                for cell in cells
                if isinstance(cell.cell_contents, torch.Tensor)
            }
    assert held == {torch.bfloat16}
    other = saved_base(tmp_path, kind="fp4", compute="bfloat16")  # not that of the base
    other.add_role("policy", lora())
    assert other.merged_bytes == 0


def test_what_tokens_were_drawn_with_is_what_a_pass_over_them_says(tmp_path):
    base = in_float32(tmp_path, True)
    base.stop_token_ids = lambda tokenizer: list(range(2, 8))
    made = Sampler(base, doubling.tokenizer(), response_length=9, max_length=12, temperature=0.7)
    rollout = made(made.collator([{"input_ids": ids} for ids in PROMPTS * 2]), keys=torch.arange(12))
    assert len(set(rollout.lengths)) > 3 and list(map(len, rollout.sampler_logprobs)) == rollout.lengths
    for prompt, response, found in zip(rollout.prompt_ids, rollout.response_ids, rollout.sampler_logprobs, strict=True):
        with base.role("policy"), torch.no_grad():
            logits = base(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
    greedy_too = replace(made, temperature=None)
    assert not greedy_too(made.collator([{"input_ids": PROMPTS[0]}])).sampler_logprobs


@needs_layout(torch.bfloat16)
@pytest.mark.parametrize("quantized", [False, True])
def test_weights_that_are_laid_out_give_the_same_bits(tmp_path, quantized):
    base = saved_base(tmp_path, "bfloat16", kind=quantized and "fp4", compute="bfloat16", roles=["policy"])
    with base.role("policy"), base.autocast():
        tokens, logits = greedy(base.causal_lm, by=decode)
        with base.unpacked():
            held = [group.joint.product for group in base._fused] + [base.lm_head.forward]
            assert sum(len(of.layers) for of in held) == 15 and all(of.weight.is_mkldnn for of in held)  # seven a block
            again, same_logits = greedy(base.causal_lm, by=decode)
            with torch.autocast("cpu", dtype=torch.float16):  # another precision is the layer's own
                assert base.lm_head(torch.randn(2, 64)).dtype is torch.float16
    assert torch.equal(tokens, again) and all(map(torch.equal, logits, same_logits))
    assert not any("forward" in vars(layer) for layer in base.causal_lm.modules() if isinstance(layer, nn.Linear))
    assert not any(group.joint for group in base._fused)


@needs_layout(torch.bfloat16)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_layers_with_one_copy_of_their_weights_give_the_same_bits_in_every_role(kind):
    base = shared_base(architecture=kind)
    base.causal_lm.to(torch.bfloat16)

    def of_roles():
        with base.weights_kept():
            for role in ("reward", "policy", "reference"):
                with base.role(role):
                    yield greedy(base.causal_lm, by=decode)

    with base.autocast():
        apart = list(of_roles())
        with base.role("policy"), base.unpacked():
            assert all(group.joint for group in base._fused)
            joint = list(of_roles())
    for (tokens, logits), (again, same_logits) in zip(apart, joint, strict=True):
        assert torch.equal(tokens, again) and all(map(torch.equal, logits, same_logits))


@pytest.mark.parametrize("large", [0, math.inf])
def test_biases_are_in_the_copies_that_responses_are_decoded_with(large, monkeypatch):
    monkeypatch.setattr(copies, "_LARGE", large)
    base = shared_base(architecture="qwen2")
    with torch.no_grad():
        for name, p in base.named_parameters():
            if name.endswith("bias"):
                p.normal_(generator=torch.Generator().manual_seed(len(name)))
    with base.role("policy"), torch.no_grad():
        expected = base(input_ids=IDS, attention_mask=MASK).logits
        with base.unpacked(merged=True):
            merged = base(input_ids=IDS, attention_mask=MASK).logits
        with base.unpacked_for_gradients():
            read = base(input_ids=IDS, attention_mask=MASK).logits
        for group in base._fused:
            group.join(copies._copy, torch.float32)
        joint = base(input_ids=IDS, attention_mask=MASK).logits
    for found in (merged, read, joint):
        torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()], rtol=1e-4, atol=1e-4)


def test_responses_have_no_dropout_while_a_trainer_trains():
    base = SharedBase(tiny_model())
    base.add_role("policy", lora(lora_dropout=0.5))
    randomize(base, "policy")
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)
    with base.role("policy"), torch.autocast("cpu", dtype=torch.bfloat16):  # where nothing is merged
        quiet = base.eval().generate(IDS, MASK, config)
        base.train()
        assert all(torch.equal(base.generate(IDS, MASK, config), quiet) for _ in range(3)) and base.training


@pytest.mark.parametrize("temperature", [0.7, None])
def test_logits_of_a_token_are_gone_when_the_next_one_s_are_made(temperature):
    base, alive = shared_base(), []

    def count(*_):
        whole = (found for found in gc.get_objects() if isinstance(found, torch.Tensor))
        alive.append(sum(found.numel() for found in whole if found.shape[-1:] == (VOCABULARY,) and found.dim() > 1))

    hook = base.causal_lm.get_output_embeddings().register_forward_pre_hook(count)
    base.stop_token_ids = lambda tokenizer: [2]
    made = Sampler(base, doubling.tokenizer(), response_length=12, temperature=temperature)
    rollout = made(made.collator([{"input_ids": ids} for ids in PROMPTS]), keys=torch.arange(6))
    hook.remove()
    assert len(alive) == max(rollout.lengths) > 4
    of_others, *alive = alive
    assert (
        max(alive) - of_others <= 2 * len(PROMPTS) * VOCABULARY
    )  # the last token's: logits, and what it was drawn from
