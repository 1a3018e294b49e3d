"""KL estimators, KL over the vocabulary, and the adaptive coefficient."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tolerances import EXACT, FP32
from toolkit.functional import KL_ESTIMATORS, adapt_kl_coef, full_kl, kl_abs, kl_k1, kl_k2, kl_k3

# ---------------------------------------------------------------------- from the sampled tokens


def test_estimators_by_hand():
    # log r = ref − policy = −1 − (−2) = 1: k1 = −1, k2 = 1/2, k3 = e − 1 − 1.
    policy, reference = torch.tensor([[-2.0]]), torch.tensor([[-1.0]])
    torch.testing.assert_close(kl_k1(policy, reference), torch.tensor([[-1.0]]), **EXACT)
    torch.testing.assert_close(kl_k2(policy, reference), torch.tensor([[0.5]]), **EXACT)
    torch.testing.assert_close(kl_k3(policy, reference), torch.tensor([[math.e - 2]]), **EXACT)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(name):
    # Over a whole vocabulary, weighted with the policy's probabilities, the mean is exact.
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 50).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum(), exact, **FP32)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_never_negative(name):
    torch.manual_seed(1)
    assert (KL_ESTIMATORS[name](torch.randn(100), torch.randn(100)) >= 0).all()


def test_k3_keeps_its_digits_near_zero():
    # (r − 1) − log r = x²/2 + … for small x; exp(x) − 1 − x in float32 would be rounding noise.
    x = torch.tensor([1e-3])
    torch.testing.assert_close(kl_k3(torch.zeros(1), x), torch.tensor([5.0017e-7]), rtol=1e-3, atol=0)


def test_abs_by_hand():
    found = kl_abs(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.5]]))
    assert found.tolist() == [[2.0, 0.5]]


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


# ---------------------------------------------------------------------- over the vocabulary


def case(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, ref_hidden = torch.randn(2, 21, 8, dtype=dtype)
    return hidden, ref_hidden, nn.Linear(8, 50, dtype=dtype), nn.Linear(8, 50, dtype=dtype), torch.randint(0, 50, (21,))


def test_full_kl_by_hand():
    # p = (1/2, 1/2), q = (3/4, 1/4): ½ ln(2/3) + ½ ln 2 = ½ ln(4/3).
    def head(x):
        return x.log()

    found = full_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.75, 0.25]]), head, head, torch.tensor([1]))
    torch.testing.assert_close(found.kl, torch.tensor([0.5 * math.log(4 / 3)]), **EXACT)
    torch.testing.assert_close(found.logprobs, torch.tensor([math.log(0.5)]), **EXACT)
    torch.testing.assert_close(found.ref_logprobs, torch.tensor([math.log(0.25)]), **EXACT)


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_full_kl_equals_torchs_own_divergence(chunk_size, temperature):
    hidden, ref_hidden, head, ref_head, tokens = case()
    found = full_kl(hidden, ref_hidden, head, ref_head, tokens, temperature=temperature, chunk_size=chunk_size)
    policy, reference = (
        torch.distributions.Categorical(logits=(f(x) / temperature).double())
        for f, x in ((head, hidden), (ref_head, ref_hidden))
    )
    expected = torch.distributions.kl_divergence(policy, reference)
    torch.testing.assert_close(found.kl.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logprobs.double(), policy.log_prob(tokens), **FP32)
    torch.testing.assert_close(found.ref_logprobs.double(), reference.log_prob(tokens), **FP32)


def test_full_kl_is_never_negative_and_nothing_to_itself():
    hidden, ref_hidden, head, ref_head, tokens = case(torch.bfloat16)
    assert (full_kl(hidden, ref_hidden, head, ref_head, tokens).kl >= 0).all()
    assert full_kl(hidden, hidden, head, head, tokens).kl.abs().max() == 0
    assert full_kl(hidden, ref_hidden, head, ref_head, tokens).kl.dtype == torch.float32


def test_a_token_that_the_policy_excludes_counts_nothing():
    def head(x):
        return x

    p, q = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 0.0]])
    torch.testing.assert_close(full_kl(p, q, head, head, torch.tensor([0])).kl, torch.tensor([math.log(2.0)]), **EXACT)


def test_the_heads_see_a_chunk_at_a_time_and_no_token_at_all_is_fine():
    hidden, ref_hidden, head, ref_head, tokens = case()
    sizes = []

    def counting(x):
        sizes.append(x.shape[0])
        return head(x)

    full_kl(hidden, ref_hidden, counting, ref_head, tokens, chunk_size=8)
    assert sizes == [8, 8, 5]
    assert full_kl(hidden[:0], ref_hidden[:0], head, ref_head, tokens[:0]).kl.shape == (0,)


class _LiveNumbers(TorchDispatchMode):
    """Counts the numbers in tensors that are alive at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0

    def _freed(self, size):
        self.live -= size

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.live += tensor.numel()
                weakref.finalize(tensor, self._freed, tensor.numel())
        self.peak = max(self.peak, self.live)
        return out


def test_peak_memory_holds_no_vocabulary_by_response_tensor():
    vocabulary, length, chunk = 5000, 256, 8
    weight = torch.randn(vocabulary, 4)
    hidden, ref_hidden, tokens = torch.randn(length, 4), torch.randn(length, 4), torch.randint(0, vocabulary, (length,))

    def head(x):
        return x @ weight.T

    with _LiveNumbers() as numbers:
        full_kl(hidden, ref_hidden, head, head, tokens, chunk_size=chunk)
    assert chunk * vocabulary < numbers.peak < 9 * chunk * vocabulary + 10 * length
    assert numbers.peak < 0.3 * length * vocabulary


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_size": 0}])
def test_full_kl_settings_must_be_positive(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        full_kl(*case(), **wrong)


def test_full_kl_shapes_must_fit():
    hidden, ref_hidden, head, ref_head, tokens = case()
    with pytest.raises(ValueError, match="do not fit"):
        full_kl(hidden, ref_hidden, head, ref_head, tokens[:3])
    with pytest.raises(ValueError, match="do not fit"):
        full_kl(hidden, ref_hidden[:, :4], head, ref_head, tokens)


@pytest.mark.parametrize("chunk_size", [8, 100])
def test_full_kl_has_the_gradient_of_torch_s_divergence_and_none_for_the_reference(chunk_size):
    hidden, ref_hidden, head, ref_head, tokens = case()
    ours_in, theirs_in = (hidden.clone().requires_grad_() for _ in range(2))
    ref_in = ref_hidden.clone().requires_grad_()
    found = full_kl(ours_in, ref_in, head, ref_head, tokens, temperature=0.7, chunk_size=chunk_size)
    theirs = kl_divergence(
        Categorical(logits=head(theirs_in) / 0.7), Categorical(logits=ref_head(ref_hidden).detach() / 0.7)
    )
    torch.testing.assert_close(found.kl, theirs, **FP32)
    (found.kl * torch.arange(21)).sum().backward()
    (theirs * torch.arange(21)).sum().backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, **FP32)
    assert ref_in.grad is None


# ---------------------------------------------------------------------- the coefficient


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.6, 0.2 * (1 + 0.1 * 0.05)),  # a tenth over target, 500 of 10,000
        (60.0, 0.2 * (1 + 0.2 * 0.05)),  # at most a fifth
        (0.0, 0.2 * (1 - 0.2 * 0.05)),
        (6.0, 0.2),
    ],
)
def test_adaptive_controller_by_hand(kl, expected):
    assert adapt_kl_coef(0.2, kl, target=6.0, episodes=500, horizon=10_000) == pytest.approx(expected, rel=1e-12)
