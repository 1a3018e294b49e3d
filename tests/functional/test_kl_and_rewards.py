import math

import pytest
import torch

from tests.tolerances import EXACT, FP32
from toolkit.functional import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3, penalize_missing_eos, shape_rewards


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


def test_rewards_by_hand():
    kl = torch.tensor([[0.5, 0.25, 9.0], [1.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = shape_rewards(torch.tensor([1.0, -1.0]), kl, mask, kl_coef=0.2)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.95, 0.0], [-1.2, 0.0, 0.0]]), **EXACT)


def test_the_score_stands_at_the_last_token_whatever_follows():
    mask = torch.tensor([[True, True, False, False]])
    rewards = shape_rewards(torch.tensor([3.0]), torch.zeros(1, 4), mask, kl_coef=0.1)
    assert rewards.tolist() == [[0.0, 3.0, 0.0, 0.0]]


def test_an_empty_response_is_an_error():
    with pytest.raises(ValueError, match=r"responses \[1\] are empty"):
        shape_rewards(torch.zeros(2), torch.zeros(2, 1), torch.tensor([[True], [False]]), kl_coef=0.1)


def test_missing_eos_penalty():
    scores = penalize_missing_eos(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), penalty=0.5)
    assert scores.tolist() == [2.0, 1.5]
