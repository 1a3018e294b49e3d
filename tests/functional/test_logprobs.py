import pytest
import torch
from torch import nn

from tests.tolerances import FP32
from toolkit.functional import token_logprobs


def brute_force(hidden, head, tokens, temperature):
    return torch.log_softmax(head(hidden) / temperature, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def case(seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(3, 7, 8, requires_grad=True)
    return hidden, nn.Linear(8, 50), torch.randint(0, 50, (3, 7))


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_brute_force(chunk_size, temperature):
    hidden, head, tokens = case()
    ours = token_logprobs(hidden, head, tokens, temperature=temperature, chunk_size=chunk_size)
    theirs = brute_force(hidden, head, tokens, temperature)
    torch.testing.assert_close(ours, theirs, **FP32)
    weights = torch.randn(3, 7)
    for ours_grad, theirs_grad in zip(
        torch.autograd.grad((ours * weights).sum(), [hidden, *head.parameters()]),
        torch.autograd.grad((theirs * weights).sum(), [hidden, *head.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(ours_grad, theirs_grad, **FP32)


def test_no_logits_of_more_than_a_chunk_exist_and_none_are_kept():
    hidden, head, tokens = case()
    sizes, kept = [], []

    def counting_head(x):
        sizes.append(x.shape[0])
        return head(x)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = token_logprobs(hidden, counting_head, tokens, chunk_size=5)
    assert sizes == [5, 5, 5, 5, 1]
    assert max(kept, default=0) < 5 * 50  # less than one chunk of logits
    out.sum().backward()
    assert len(sizes) == 10  # each chunk once more, in the backward pass


def test_half_precision_logits_are_summed_in_float32():
    hidden, head, tokens = case()
    half = token_logprobs(hidden.bfloat16(), head.bfloat16(), tokens)
    assert half.dtype == torch.float32
    expected = head(hidden.bfloat16()).double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(half.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_at_all():
    hidden, head, tokens = case()
    assert token_logprobs(hidden[:0], head, tokens[:0]).shape == (0, 7)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_size": 0}])
def test_settings_must_be_positive(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        token_logprobs(*case(), **wrong)


def test_shapes_must_fit():
    hidden, head, tokens = case()
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(hidden, head, tokens[:, :3])
