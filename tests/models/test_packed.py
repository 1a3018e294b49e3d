"""Rows one after the other in a line, against the same rows by themselves."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_models import shared_base
from toolkit.models import Sequences, SharedBase, response_logprobs, value_after_response
from toolkit.models.sequences import attention_by_rows

PROMPTS = [[1, 4, 9], [1, 30, 31, 32, 33], [8], [5, 6]]
RESPONSES = [[12, 13, 2], [20, 21, 22, 23, 24, 2], [7, 7, 7, 2], [3]]


def packed():
    return Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0, pack=True)


def test_a_line_of_rows():
    """6, 11, 5 and 3 tokens, 25 rounded up to 32; a row a line would be 4 times 16."""
    sequences, positions = packed(), [*range(6), *range(11), *range(5), *range(3), *[2] * 7]
    assert sequences.packed and sequences.input_ids.shape == (1, 32)
    assert sequences.row_lengths == [6, 11, 5, 3, 7] and sequences.position_ids.tolist() == [positions]
    assert sequences.starts.tolist() == [0, 6, 17, 22]
    assert sequences.response_positions[0].tolist() == [3, 4, 5, 5, 5, 5]
    assert sequences.response_positions[2].tolist() == [18, 19, 20, 21, 21, 21]
    assert sequences.response_tokens.tolist() == [token for response in RESPONSES for token in response]


def test_rows_are_packed_where_it_is_asked_for():
    of_8 = [[1, 2]] * 4, [[3] * 6] * 4
    assert Sequences.from_ids(*of_8, pad_token_id=0, pack=True).input_ids.shape == (1, 32)  # nothing is padded
    assert not Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0).packed
    long = [[1] * 500, [1] * 260], [[2] * 4] * 2
    sequences = Sequences.from_ids(*long, pad_token_id=0, pack=True)
    assert sequences.input_ids.shape == (1, 768)  # a multiple of 32, the power of two up to a sixteenth


# Full attention, windows shorter than a row, both in turn, learned positions.
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "qwen3", "gpt2", "opt"])
def test_packed_rows_say_what_they_say_alone(kind):
    base = SharedBase(tiny_architecture(kind, **({"sliding_window": 4} if kind in ("mistral", "gemma3_text") else {})))
    base.add_role("reference")
    assert base.packs_rows
    with torch.no_grad(), base.role("reference"):
        found = response_logprobs(base, packed())
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            logits = base(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
            torch.testing.assert_close(found[row, : len(response)], expected, rtol=1e-4, atol=1e-5)
            assert (found[row, len(response) :] == 0).all()


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2", "bloom"])
def test_states_that_reach_from_row_to_row_are_not_packed(kind):
    assert not SharedBase(tiny_architecture(kind)).packs_rows


def test_what_comes_after_packed_responses():
    base, alone = shared_base(), Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0)
    with torch.no_grad(), base.role("value"):
        found, expected = (value_after_response(base, sequences) for sequences in (packed(), alone))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of_mask", [None, torch.bool, torch.bfloat16, "bias"])
def test_gradients_of_rows_in_bfloat16_are_exact_to_their_last_bit(of_mask):
    """Two rows, two heads to a key, against float64 by the definition of causal attention.

    Args:
        of_mask: of what a mask is by which the rows are told apart, as transformers gives it; None where they are by
            their lengths; "bias" where a model's own bias by positions does it.
    """
    if of_mask == "bias" and "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        pytest.skip("this transformers knows no bias by positions")
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 45, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    row_of = torch.tensor([0] * 40 + [1] * 5)
    allowed = (row_of[:, None] == row_of) & torch.ones(45, 45, dtype=torch.bool).tril()
    mask, told = allowed[None, None], {"row_lengths": [40, 5]} if of_mask is None else {}
    if of_mask in (torch.bfloat16, "bias"):
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
    if of_mask in (None, "bias"):
        told, mask = told if of_mask is None else {"position_bias": mask}, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = attention_by_rows(module, *given, mask, **told)
    query, key, value = (part.detach().double().requires_grad_() for part in given)
    products = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 4
    shares = products.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = (shares @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert found.dtype is torch.bfloat16
    along = torch.randn_like(found)
    of_found = torch.autograd.grad(found, given, along)
    of_expected = torch.autograd.grad(expected, (query, key, value), along.double())
    for ours, exact in zip((found, *of_found), (expected, *of_expected), strict=True):
        # Half of bfloat16's last bit is at most 2^-9 of a number; torch's own gradients are 1.5 times that away.
        assert (ours.double() - exact).norm() < 2**-9 * exact.norm()
