"""Entropy and full KL against torch's own distributions; and what the gradient of each KL estimator is on average."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from tests.tolerances import EXACT, FP32
from toolkit.functional import (
    KL_ESTIMATORS,
    Moments,
    clipped_policy_loss,
    clipped_value_loss,
    full_kl,
    kl_abs,
    token_logprobs,
    token_logprobs_and_entropy,
    update_moments,
)


def states(n=7, hidden=5, vocabulary=11):
    torch.manual_seed(0)
    head, ref_head = torch.nn.Linear(hidden, vocabulary), torch.nn.Linear(hidden, vocabulary)
    tokens = torch.randint(vocabulary, (n,))
    return torch.randn(n, hidden), torch.randn(n, hidden), head, ref_head, tokens


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_its_gradient_are_those_of_torch_s_distribution(chunk_size, temperature):
    hidden, _, head, _, tokens = states()
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
    hidden, _, head, _, tokens = states(6)
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


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_full_kl_has_the_gradient_of_torch_s_divergence_and_none_for_the_reference(chunk_size):
    hidden, ref_hidden, head, ref_head, tokens = states()
    ours_in, theirs_in = (hidden.clone().requires_grad_() for _ in range(2))
    ref_in = ref_hidden.clone().requires_grad_()
    found = full_kl(ours_in, ref_in, head, ref_head, tokens, temperature=0.7, chunk_size=chunk_size)
    theirs = kl_divergence(
        Categorical(logits=head(theirs_in) / 0.7), Categorical(logits=ref_head(ref_hidden).detach() / 0.7)
    )
    torch.testing.assert_close(found.kl, theirs, **FP32)
    (found.kl * torch.arange(7)).sum().backward()
    (theirs * torch.arange(7)).sum().backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, **FP32)
    assert ref_in.grad is None


def expected_gradient(estimator, logits, reference):
    """E_π[∇ estimator(log π, log π_ref)], by summing over every token."""
    total = torch.zeros_like(logits)
    for token, probability in enumerate(logits.softmax(-1)):
        variable = logits.clone().requires_grad_()
        estimator(variable.log_softmax(-1)[token], reference.log_softmax(-1)[token]).backward()
        total += probability * variable.grad
    return total


def test_what_each_estimator_does_as_a_loss():
    """k1 nothing, k2 KL(π, ref), k3 KL(ref, π): Tang and Munos 2025, arXiv 2506.09477."""
    torch.manual_seed(1)
    logits, reference = torch.randn(6).double(), torch.randn(6).double()

    def gradient(divergence):
        variable = logits.clone().requires_grad_()
        divergence(Categorical(logits=variable), Categorical(logits=reference)).backward()
        return variable.grad

    found = {name: expected_gradient(estimator, logits, reference) for name, estimator in KL_ESTIMATORS.items()}
    assert found["k1"].abs().max() < 1e-12
    torch.testing.assert_close(found["k2"], gradient(kl_divergence), **EXACT)
    torch.testing.assert_close(found["k3"], gradient(lambda p, q: kl_divergence(q, p)), **EXACT)
    # abs pushes each token's probability back to the reference's, by the same force whatever the distance.
    signs = torch.sign(logits.log_softmax(-1) - reference.log_softmax(-1))
    p = logits.softmax(-1)
    torch.testing.assert_close(found["abs"], p * (signs - (p * signs).sum()), **EXACT)


def test_abs_by_hand():
    found = kl_abs(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.5]]))
    assert found.tolist() == [[2.0, 0.5]]


def test_without_a_clip_range_the_losses_are_the_plain_ones():
    torch.manual_seed(2)
    logprobs, old, advantages, values, returns = torch.randn(5, 2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    loss, fraction = clipped_policy_loss(3 * logprobs, old, advantages, mask, cliprange=None)
    by_hand = sum(-advantages[i, j] * torch.exp(3 * logprobs[i, j] - old[i, j]) for i, j in mask.nonzero()) / 4
    torch.testing.assert_close(loss, by_hand, **FP32)
    squared, also = clipped_value_loss(values, old, returns, mask, cliprange=None)
    torch.testing.assert_close(squared, 0.5 * torch.nn.functional.mse_loss(values[mask], returns[mask]), **FP32)
    assert fraction.item() == also.item() == 0


@pytest.mark.parametrize("splits", [[12], [1, 11], [5, 4, 3], [1] * 12])
def test_moments_do_not_depend_on_the_batches(splits):
    torch.manual_seed(3)
    values = 1000 + torch.randn(12)
    moments = Moments()
    for part in values.split(splits):
        moments = update_moments(moments, part)
    assert moments.seen == 12
    assert moments.mean == pytest.approx(values.double().mean().item(), rel=1e-12)
    assert moments.std == pytest.approx(values.double().std().item(), rel=1e-9)


def test_moments_of_too_little_or_of_equal_numbers_divide_by_one():
    assert update_moments(Moments(), torch.tensor([5.0])).std == 1.0
    assert update_moments(Moments(), torch.tensor([5.0, 5.0])).std == 1.0
