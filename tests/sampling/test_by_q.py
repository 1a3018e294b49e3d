"""Responses by Q: the token with the largest, and samples of the reference weighted by it."""

import pytest
import torch
from peft import LoraConfig

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.models.test_q_values import PROMPTS, logits, q_base
from tests.tiny_models import ARCHITECTURES, VOCABULARY, lora, randomize
from toolkit.data import doubling
from toolkit.models import QBound, SharedBase, add_q_roles
from toolkit.sampling import Sampler


def decode(base, prompts=PROMPTS, *, by_q=True, temperature=None, response_length=6):
    """(B, T), zeros after the end of a response."""
    sampler = Sampler(base, doubling.tokenizer(), role="q", response_length=response_length, temperature=temperature)
    sampler = sampler if by_q else sampler.reference
    rollout = sampler(sampler.collator([{"input_ids": prompt} for prompt in prompts]))
    longest = max(rollout.lengths)
    return torch.tensor([ids + [0] * (longest - len(ids)) for ids in map(list, rollout.response_ids)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decoding_takes_the_largest_q_of_whole_forward_passes(architecture):
    """Token by token from a cache, left-padded, in a batch; against each row alone, without cache or padding."""
    base = q_base(architecture, bound=QBound())
    responses = decode(base).tolist()
    for prompt, row in zip(PROMPTS, responses, strict=True):
        expected = []
        while len(expected) < 6 and 2 not in expected:
            expected.append(int(logits(base, "q", prompt, expected)[-1].argmax()))
        assert row[: len(expected)] == expected and not any(row[len(expected) :])
    assert base.active_role is None


def test_a_base_without_attention_reads_whole_rows_again():
    """Mamba's cache is of another kind. At so low a temperature a sample is the token with the largest Q."""
    base = SharedBase(tiny_architecture("mamba"))
    base.add_role("reference")
    add_q_roles(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["in_proj", "x_proj"]))
    randomize(base, "q")
    for prompt, row in zip(PROMPTS, decode(base, temperature=1e-4).tolist(), strict=True):
        expected = []
        while len(expected) < 6 and 2 not in expected:
            expected.append(int(logits(base, "q", prompt, expected)[-1].argmax()))
        assert row[: len(expected)] == expected


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_a_prompt_near_the_end_of_learnt_positions_waits_for_a_shorter_one(architecture):
    base = q_base(architecture)
    long, short = [5 + i % 20 for i in range(61)], PROMPTS[0]
    torch.manual_seed(0)
    sampler = Sampler(base, doubling.tokenizer(), role="q", response_length=12, temperature=1.0)
    lengths = {len(ids): 0 for ids in (long, short)}
    for _ in range(8):
        made = sampler(sampler.collator([{"input_ids": long}, {"input_ids": short}]))
        lengths = {len(p): max(lengths[len(p)], n) for p, n in zip(made.prompt_ids, made.lengths, strict=True)}
    assert lengths[61] <= 3 < lengths[len(short)]


@pytest.mark.parametrize(("architecture", "adapted"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_samples_are_of_the_reference_times_exp_q(architecture, adapted):
    base = q_base(architecture, reference=lora() if adapted else None)
    prompt = PROMPTS[0]
    torch.manual_seed(0)
    many = decode(base, [prompt] * 4000, response_length=2, temperature=2.0)
    first = many[:, 0].bincount(minlength=VOCABULARY) / len(many)

    def weights(response):
        ref = logits(base, "reference", prompt, response)[-1].softmax(-1)
        found = ref * torch.exp(logits(base, "q", prompt, response)[-1] / 2.0)
        return found / found.sum()

    expected = weights([])[: len(first)]
    assert float((first - expected).abs().max()) < 4 * (float(expected.max()) / 4000) ** 0.5
    common = int(first.argmax())  # and what comes after it, by which the caches of both roles are told apart
    second = many[many[:, 0] == common, 1].bincount(minlength=VOCABULARY) / int((many[:, 0] == common).sum())
    expected = weights([common])[: len(second)]
    assert float((second - expected).abs().max()) < 4 * (1 / int((many[:, 0] == common).sum())) ** 0.5


def test_without_q_the_reference_answers():
    base = q_base()
    greedy = decode(base, by_q=False)
    prompt, row = PROMPTS[2], greedy[2].tolist()
    expected = []
    while len(expected) < 6 and 2 not in expected:
        expected.append(int(logits(base, "reference", prompt, expected)[-1].argmax()))
    assert row[: len(expected)] == expected
    torch.manual_seed(0)
    first = decode(base, [prompt] * 3000, response_length=1, temperature=0.1, by_q=False)[:, 0].bincount(
        minlength=VOCABULARY
    )
    expected = logits(base, "reference", prompt, [])[-1].softmax(-1)  # at temperature 1, whatever that of Q is
    assert float((first / 3000 - expected[: len(first)]).abs().max()) < 0.04
