import math

import pytest
import torch

from tests.tolerances import EXACT, FP32
from toolkit.functional import clipped_policy_loss, clipped_value_loss

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.2, 1.0),  # gained enough: the clipped 1.2 counts
        (0.5, 1.0, -0.5, 0.0),  # the bad side is never clipped
        (0.5, -1.0, 0.8, 1.0),
        (1.5, -1.0, 1.5, 0.0),
        (1.1, 2.0, -2.2, 0.0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, clipped):
    ours = clipped_policy_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), ONE, cliprange=0.2
    )
    assert ours.loss.item() == pytest.approx(loss, abs=1e-6)
    assert ours.clip_fraction.item() == clipped


def test_at_ratio_one_the_loss_is_minus_the_mean_advantage_and_its_gradient_minus_the_advantages():
    torch.manual_seed(0)
    logprobs, advantages = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    loss, clip_fraction = clipped_policy_loss(logprobs, logprobs.detach(), advantages, mask, cliprange=0.2)
    loss.backward()
    torch.testing.assert_close(loss.detach(), -advantages[mask].mean(), **FP32)
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -advantages / 4, 0.0), **FP32)
    assert clip_fraction.item() == 0


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (1.0, 0.0, 2.0, 0.5 * (0.2 - 2) ** 2, 1.0),  # moved by 1, counted as if by 0.2
        (1.0, 0.0, 0.0, 0.5 * 1.0, 0.0),  # the larger of the two errors counts
        (0.1, 0.0, 2.0, 0.5 * 1.9**2, 0.0),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    ours = clipped_value_loss(
        torch.tensor([[value]]), torch.tensor([[old]]), torch.tensor([[target]]), ONE, cliprange=0.2
    )
    assert ours.loss.item() == pytest.approx(loss, abs=1e-6)
    assert ours.clip_fraction.item() == clipped


def test_gradients_by_finite_differences():
    torch.manual_seed(3)
    x, old, target = (torch.randn(2, 3, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_policy_loss(v, old, target, mask, cliprange=0.2).loss, x)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, target, mask, cliprange=0.2).loss, x)


@pytest.mark.parametrize("loss", [clipped_policy_loss, clipped_value_loss])
def test_micro_batches_add_up_and_padding_changes_nothing(loss):
    torch.manual_seed(4)
    a, b, c = (torch.randn(4, 5) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2]).unsqueeze(1)
    whole = loss(a, b, c, mask, cliprange=0.2).loss
    count = mask.sum()
    parts = sum(loss(*(x[i : i + 1] for x in (a, b, c, mask)), cliprange=0.2, count=count).loss for i in range(4))
    torch.testing.assert_close(parts, whole, **FP32)
    spoilt = [x.masked_fill(~mask, float("nan")) for x in (a, b, c)]
    torch.testing.assert_close(loss(*spoilt, mask, cliprange=0.2).loss, whole, **EXACT)
