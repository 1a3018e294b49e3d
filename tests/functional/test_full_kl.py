import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tolerances import EXACT, FP32
from toolkit.functional import adapt_kl_coef, full_kl


def case(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, ref_hidden = torch.randn(2, 21, 8, dtype=dtype)
    return hidden, ref_hidden, nn.Linear(8, 50, dtype=dtype), nn.Linear(8, 50, dtype=dtype), torch.randint(0, 50, (21,))


def test_by_hand():
    # p = (1/2, 1/2), q = (3/4, 1/4): ½ ln(2/3) + ½ ln 2 = ½ ln(4/3).
    def head(x):
        return x.log()

    found = full_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.75, 0.25]]), head, head, torch.tensor([1]))
    torch.testing.assert_close(found.kl, torch.tensor([0.5 * math.log(4 / 3)]), **EXACT)
    torch.testing.assert_close(found.logprobs, torch.tensor([math.log(0.5)]), **EXACT)
    torch.testing.assert_close(found.ref_logprobs, torch.tensor([math.log(0.25)]), **EXACT)


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_torchs_own_divergence(chunk_size, temperature):
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


def test_never_negative_and_nothing_to_itself():
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
def test_settings_must_be_positive(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        full_kl(*case(), **wrong)


def test_shapes_must_fit():
    hidden, ref_hidden, head, ref_head, tokens = case()
    with pytest.raises(ValueError, match="do not fit"):
        full_kl(hidden, ref_hidden, head, ref_head, tokens[:3])
    with pytest.raises(ValueError, match="do not fit"):
        full_kl(hidden, ref_hidden[:, :4], head, ref_head, tokens)


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
