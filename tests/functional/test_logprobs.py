import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from tests.tolerances import EXACT, FP32
from toolkit.functional import token_logprobs, token_logprobs_and_entropy
from toolkit.functional.logprobs import in_chunks


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


def test_of_a_frozen_head_logits_are_made_once_and_none_are_kept():
    hidden, head, tokens = case()
    alive, sizes = [], []
    head.requires_grad_(False)

    def counting_head(x):
        sizes.append(x.shape[0])
        logits = head(x)
        alive.append(weakref.ref(logits.untyped_storage()))
        return logits

    out = token_logprobs(hidden, counting_head, tokens, chunk_size=5, frozen_head=True)
    assert [logits() for logits in alive] == [None] * 5
    out.sum().backward()
    assert sizes == [5, 5, 5, 5, 1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_logits_are_summed_in_float32(temperature):
    hidden, head, tokens = case()
    given = hidden.bfloat16(), head.bfloat16(), tokens
    half = token_logprobs(*given, temperature=temperature)
    with_entropy, _ = token_logprobs_and_entropy(*given, temperature=temperature)
    assert half.dtype == with_entropy.dtype == torch.float32
    logits = head(hidden.bfloat16()).double() / temperature
    expected = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(half.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(with_entropy.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_size": 0}])
def test_settings_must_be_positive(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        token_logprobs(*case(), **wrong)


def test_shapes_must_fit():
    hidden, head, tokens = case()
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(hidden, head, tokens[:, :3])


# ---------------------------------------------------------------------- with the entropy


def states(n=7):
    torch.manual_seed(0)
    return torch.randn(n, 5), nn.Linear(5, 11), torch.randint(11, (n,))


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_its_gradient_are_those_of_torch_s_distribution(chunk_size, temperature):
    hidden, head, tokens = states()
    ours_in, theirs_in = (hidden.clone().requires_grad_() for _ in range(2))
    settings = {"temperature": temperature, "chunk_size": chunk_size}
    logprobs, entropy = token_logprobs_and_entropy(ours_in, head, tokens, **settings)
    theirs = Categorical(logits=head(theirs_in) / temperature)
    torch.testing.assert_close(entropy, theirs.entropy(), **FP32)
    torch.testing.assert_close(logprobs, theirs.log_prob(tokens), **FP32)
    torch.testing.assert_close(logprobs, token_logprobs(hidden, head, tokens, **settings), **FP32)
    (entropy * torch.arange(7)).sum().backward()
    (theirs.entropy() * torch.arange(7)).sum().backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, **FP32)


def test_entropy_of_shapes_and_of_impossible_tokens():
    hidden, head, tokens = states(6)
    logprobs, entropy = token_logprobs_and_entropy(hidden.view(2, 3, -1), head, tokens.view(2, 3), chunk_size=4)
    assert logprobs.shape == entropy.shape == (2, 3)
    empty = token_logprobs_and_entropy(hidden[:0], head, tokens[:0])
    assert empty[0].shape == empty[1].shape == (0,) and token_logprobs(hidden[:0], head, tokens[:0]).shape == (0,)
    mask = torch.tensor([0.0, 0.0, -torch.inf])
    state = torch.zeros(1, 3, requires_grad=True)
    _, entropy = token_logprobs_and_entropy(state, lambda x: x + mask, torch.tensor([0]))
    torch.testing.assert_close(entropy, torch.log(torch.tensor([2.0])), **EXACT)
    entropy.sum().backward()
    assert torch.isfinite(state.grad).all()


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_results_and_gradients_are_those_of_one_call(chunk_size):
    torch.manual_seed(0)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    calls = []

    def function(x, y):
        calls.append(len(y))
        return torch.stack([(x @ weight).exp() * y, y])

    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = in_chunks(function, inputs[0], y, chunk_size=chunk_size), function(inputs[1], y)
    assert torch.equal(ours, theirs) and ours.shape == (2, 7)
    forward = -(-7 // chunk_size)
    assert calls[:-1] == [min(chunk_size, 7 - i * chunk_size) for i in range(forward)]
    grads = [torch.autograd.grad(found.square().sum(), [inside, weight])
             for found, inside in zip((ours, theirs), inputs, strict=True)]  # fmt: skip
    torch.testing.assert_close(*grads)
    assert len(calls) == 2 * forward + 1  # each chunk again in the backward pass


def test_without_gradient_nothing_is_computed_twice():
    calls = []
    x = torch.ones(4, 2, requires_grad=True)
    with torch.no_grad():
        in_chunks(lambda part: calls.append(1) or part.sum(dim=1), x, chunk_size=2)
    assert len(calls) == 2


def test_no_positions_and_no_chunk():
    assert in_chunks(lambda x: torch.stack([x.sum(dim=1)] * 3), torch.ones(0, 5), chunk_size=4).shape == (3, 0)
    with pytest.raises(ValueError, match="chunk_size must be positive, got 0"):
        in_chunks(torch.sum, torch.ones(3), chunk_size=0)


@pytest.mark.parametrize(("probability", "temperature"), [(0.9, 1.0), (0.9999, 1.0), (0.3, 0.001), (0.9999, 4.0)])
def test_gradients_of_likely_tokens_do_not_vanish_in_float16(probability, temperature):
    """The other 9,999 tokens have 1e-8 each, which float16 does not hold, and its gradient is theirs as much."""
    torch.manual_seed(0)
    vocabulary, weight = 10_000, 0.02 * (torch.randn(10_000, 64) + torch.randn(64))
    rest = torch.cat([weight[1:].mean(0, keepdim=True), weight[:1]])
    # A state of which the token has about this probability, and the others the same.
    logit = math.log(probability / (1 - probability) * vocabulary) * temperature
    half = torch.linalg.lstsq(rest, torch.tensor([0.0, logit])).solution[None].half().requires_grad_()
    head, scale = weight.half(), 256.0  # as of a loss scaler
    given = {"temperature": temperature, "frozen_head": True}
    (token_logprobs(half, lambda states: states @ head.T, torch.tensor([0]), **given).sum() * scale).backward()
    exact = half.detach().double().requires_grad_()
    (exact @ head.double().T / temperature).log_softmax(-1)[0, 0].backward()
    assert float((half.grad.double() / scale - exact.grad).norm() / exact.grad.norm()) < 0.02
