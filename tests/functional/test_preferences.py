import math

import pytest
import torch

from tests.tolerances import EXACT
from toolkit.functional import bradley_terry_loss, first_differences, token_level_preference_loss

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


def batch(length=8):
    """Ids, ends and values of both sides; the values of padding are huge, so that a sum with them would show it."""
    sides = []
    for side in (0, 1):
        rows = [pair[side] for pair in PAIRS]
        ids, ends = padded(rows, length)
        generator = torch.Generator().manual_seed(side)
        values = torch.randn(len(rows), 8, generator=generator, dtype=torch.float64)
        values = torch.cat([values, torch.zeros(len(rows), length - 8, dtype=torch.float64)], dim=1)
        past = torch.arange(length) > ends.unsqueeze(1)
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


def test_more_padding_changes_nothing():
    losses = []
    for length in (8, 11):
        (chosen_ids, chosen_ends, chosen), (rejected_ids, rejected_ends, rejected) = batch(length)
        bounds = {"chosen_ends": chosen_ends, "rejected_ends": rejected_ends}
        starts = first_differences(chosen_ids, rejected_ids, **bounds)
        losses.append(token_level_preference_loss(chosen, rejected, starts=starts, **bounds))
    torch.testing.assert_close(*losses, **EXACT)


def test_pairs_that_differ_in_the_last_token_alone_have_the_bradley_terry_loss():
    ids = torch.tensor([[4, 5, 6], [4, 5, 7]])
    values = torch.tensor([[9.0, 9.0, 1.5], [-9.0, 9.0, 0.5]])
    ends = torch.tensor([2])
    bounds = {"chosen_ends": ends, "rejected_ends": ends}
    starts = first_differences(ids[:1], ids[1:], **bounds)
    loss = token_level_preference_loss(values[:1], values[1:], starts=starts, **bounds)
    torch.testing.assert_close(loss, bradley_terry_loss(torch.tensor([1.5]), torch.tensor([0.5])), **EXACT)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)))


def test_equal_sides_teach_nothing():
    ids, ends = torch.tensor([[4, 5, 6]]), torch.tensor([2])
    bounds = {"chosen_ends": ends, "rejected_ends": ends}
    starts = first_differences(ids, ids, **bounds)
    assert starts.tolist() == [3]
    values = torch.zeros(1, 3, requires_grad=True)
    loss = token_level_preference_loss(values, values, starts=starts, **bounds)
    loss.backward()
    assert float(loss.detach()) == 0 and values.grad.tolist() == [[0, 0, 0]]


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])
    # −log σ(1) = 0.313262, −log σ(−1) = 1.313262; with margins 1 and −1 both differences are 0.
    assert float(bradley_terry_loss(chosen, rejected)) == pytest.approx(0.813262, abs=1e-6)
    margins = torch.tensor([1.0, -1.0])
    assert float(bradley_terry_loss(chosen, rejected, margin=margins)) == pytest.approx(math.log(2), abs=1e-6)
