import math

import pytest
import torch

from tests.tolerances import EXACT, FP32
from toolkit.functional import (
    clipped_policy_loss,
    clipped_value_loss,
    first_differences,
    td_loss,
    token_level_preference_loss,
)

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "loss", "clipped"),
    [
        (1.5, 1.0, None, -1.2, 1.0),  # gained enough: the clipped 1.2 counts
        (0.5, 1.0, None, -0.5, 0.0),  # the bad side is never clipped
        (0.5, -1.0, None, 0.8, 1.0),
        (1.5, -1.0, None, 1.5, 0.0),
        (1.1, 2.0, None, -2.2, 0.0),
        (1.5, 1.0, 0.28, -1.28, 1.0),  # the upper side has a range of its own
        (1.25, 1.0, 0.28, -1.25, 0.0),
        (0.5, -1.0, 0.28, 0.8, 1.0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, high, loss, clipped):
    given = torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), ONE
    ours = clipped_policy_loss(*given, cliprange=0.2, cliprange_high=high)
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


@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        (clipped_policy_loss, lambda logprobs, old, advantages: -advantages * (logprobs - old).exp()),
        (clipped_value_loss, lambda values, old, returns: 0.5 * (values - returns) ** 2),
    ],
)
def test_micro_batches_add_up_without_a_clip_range(loss, plain):
    torch.manual_seed(5)
    given = torch.randn(3, 4, 5)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2]).unsqueeze(1)
    parts = [loss(*given[:, i : i + 1], mask[i : i + 1], cliprange=None, count=mask.sum()) for i in range(4)]
    torch.testing.assert_close(sum(part.loss for part in parts), plain(*given)[mask].mean(), **FP32)
    whole, fraction = loss(*given, mask, cliprange=None)
    torch.testing.assert_close(whole, plain(*given)[mask].mean(), **FP32)
    assert fraction.item() == 0


PAD = 0
# Each pair as two rows of ids: unequal lengths either way, equal ones, one that is the other's beginning, no prompt.
PAIRS = [
    ([5, 6, 7, 8, 9], [5, 6, 1]),
    ([5, 2], [5, 3, 4, 4, 4, 4, 1]),
    ([5, 6, 7], [5, 6, 8]),
    ([5, 6, 7, 7], [5, 6]),
    ([9], [8, 8]),
]


def padded(rows, length):
    ids = torch.full((len(rows), length), PAD)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(row) - 1 for row in rows])


def batch():
    """Ids, ends and values of both sides; the values of padding are huge, so that a sum with them would show it."""
    sides = []
    for side in (0, 1):
        rows = [pair[side] for pair in PAIRS]
        ids, ends = padded(rows, length=8)
        generator = torch.Generator().manual_seed(side)
        values = torch.randn(len(rows), 8, generator=generator, dtype=torch.float64)
        past = torch.arange(8) > ends.unsqueeze(1)
        sides.append((ids, ends, torch.where(past, 1e3, values).requires_grad_()))
    return sides


def literal(chosen_values, rejected_values, margins):
    """The definition, one number at a time: Python's own floats, lists and logarithms."""
    losses = []
    for (chosen, rejected), v, w, margin in zip(PAIRS, chosen_values, rejected_values, margins, strict=True):
        last = max(len(chosen), len(rejected)) - 1
        start = next(t for t in range(last + 1) if chosen[t : t + 1] != rejected[t : t + 1])
        terms = []
        for t in range(start, last + 1):
            difference = v[min(t, len(chosen) - 1)] - w[min(t, len(rejected) - 1)] - margin
            terms.append(torch.log1p(torch.exp(-difference)))
        losses.append(sum(terms) / len(terms))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("margins", [None, [0.0, 0.5, 1.0, 2.0, -1.0]])
def test_the_token_level_loss_is_the_literal_loop_and_so_is_its_gradient(margins):
    (chosen_ids, chosen_ends, chosen), (rejected_ids, rejected_ends, rejected) = batch()
    bounds = {"chosen_ends": chosen_ends, "rejected_ends": rejected_ends}
    starts = first_differences(chosen_ids, rejected_ids, **bounds)
    assert starts.tolist() == [2, 1, 2, 2, 0]
    given = {} if margins is None else {"margin": torch.tensor(margins, dtype=torch.float64)}
    loss = token_level_preference_loss(chosen, rejected, starts=starts, **bounds, **given)
    found = torch.autograd.grad(loss, (chosen, rejected))
    expected = literal(chosen, rejected, margins or [0.0] * len(PAIRS))
    torch.testing.assert_close(loss, expected, **EXACT)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, (chosen, rejected)), strict=True):
        torch.testing.assert_close(gradient, wanted, **EXACT)
    assert all(bool((gradient[:, 7:] == 0).all()) for gradient in found)  # nothing reaches padding


def test_pairs_that_differ_in_the_last_token_alone_have_the_bradley_terry_loss():
    ids = torch.tensor([[4, 5, 6], [4, 5, 7]])
    values = torch.tensor([[9.0, 9.0, 1.5], [-9.0, 9.0, 0.5]])
    ends = torch.tensor([2])
    bounds = {"chosen_ends": ends, "rejected_ends": ends}
    starts = first_differences(ids[:1], ids[1:], **bounds)
    loss = token_level_preference_loss(values[:1], values[1:], starts=starts, **bounds)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)))  # −log σ(1.5 − 0.5)


def test_equal_sides_teach_nothing():
    ids, ends = torch.tensor([[4, 5, 6]]), torch.tensor([2])
    bounds = {"chosen_ends": ends, "rejected_ends": ends}
    starts = first_differences(ids, ids, **bounds)
    assert starts.tolist() == [3]
    values = torch.zeros(1, 3, requires_grad=True)
    loss = token_level_preference_loss(values, values, starts=starts, **bounds)
    loss.backward()
    assert float(loss.detach()) == 0 and values.grad.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("cliprange", [0.2, None])
@pytest.mark.parametrize("behind", [float("nan"), float("inf")])
def test_what_stands_behind_the_mask_has_no_part_in_the_gradient(behind, cliprange):
    mask = torch.tensor([[True, True, False]])
    for place in range(3):
        given = [torch.tensor([[0.5, -0.25, 0.125]]) for _ in range(3)]
        given[place][0, 2] = behind
        estimates = given[0].requires_grad_()
        losses = [clipped_policy_loss(estimates, *given[1:], mask, cliprange=cliprange).loss]
        losses.append(clipped_value_loss(estimates, *given[1:], mask, cliprange=cliprange).loss)
        losses.append(td_loss(estimates, given[1], mask))
        for loss in losses:
            (gradient,) = torch.autograd.grad(loss, estimates)
            assert bool(gradient.isfinite().all()) and gradient[0, 2] == 0
