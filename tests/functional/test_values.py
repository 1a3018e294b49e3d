import numpy as np
import pytest
import torch

from tests.tolerances import EXACT, FP32
from toolkit.functional import pool_values

VALUES = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_by_hand():
    torch.testing.assert_close(pool_values(VALUES, MASK, "none"), VALUES, **EXACT)
    expected = torch.tensor([[3.0, 3.0, 3.0], [2.0, 2.0, 0.0]])
    torch.testing.assert_close(pool_values(VALUES, MASK, "response_mean"), expected, **EXACT)
    expected = torch.tensor([[1.0, 1.5, 3.0], [4.0, 2.0, 0.0]])
    torch.testing.assert_close(pool_values(VALUES, MASK, "prefix_mean"), expected, **EXACT)
    with pytest.raises(ValueError, match="must be one of none, response_mean, prefix_mean, got 'mean'"):
        pool_values(VALUES, MASK, "mean")


def test_the_mean_of_values_is_the_value_of_the_mean_state():
    """What a critic that pools its states before a linear head computes, in numpy."""
    generator = np.random.default_rng(0)
    states, weight, bias = generator.normal(size=(2, 3, 5)), generator.normal(size=5), 0.7
    mask = MASK.numpy()
    values = torch.tensor(states @ weight + bias, dtype=torch.float32)
    for row in range(2):
        real = states[row, mask[row]]
        whole = torch.tensor(real.mean(axis=0) @ weight + bias, dtype=torch.float32).expand(len(real))
        torch.testing.assert_close(pool_values(values, MASK, "response_mean")[row, : len(real)], whole, **FP32)
        means = [real[: t + 1].mean(axis=0) @ weight + bias for t in range(len(real))]
        prefix = torch.tensor(np.array(means), dtype=torch.float32)
        torch.testing.assert_close(pool_values(values, MASK, "prefix_mean")[row, : len(real)], prefix, **FP32)


def test_a_prefix_mean_knows_nothing_of_later_values():
    values = VALUES.clone().requires_grad_()
    pool_values(values, MASK, "prefix_mean")[0, 1].backward()
    torch.testing.assert_close(values.grad[0], torch.tensor([0.5, 0.5, 0.0]), **EXACT)
    values.grad = None
    pool_values(values, MASK, "response_mean")[0, 0].backward()
    torch.testing.assert_close(values.grad[0], torch.full((3,), 1 / 3), **FP32)
