import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import EXACT, FP32
from toolkit.functional import (
    generalized_advantage_estimation,
    pool_values,
    shape_rewards,
)


def double_sum(rewards, values, lengths, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k}, term by term in numpy: no recursion."""
    advantages = np.zeros_like(rewards)
    for row, length in enumerate(lengths):
        v = [*list(values[row, :length]), 0.0]
        deltas = [rewards[row, t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            advantages[row, t] = sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length))
    return advantages


def test_by_hand():
    # γ = 0.5, λ = 0.5; rewards 1, 2; values 4, 8.
    # δ₁ = 2 + 0 − 8 = −6; δ₀ = 1 + 0.5·8 − 4 = 1; A₁ = −6; A₀ = 1 + 0.25·(−6) = −0.5.
    advantages, returns = generalized_advantage_estimation(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 8.0]]), torch.ones(1, 2, dtype=torch.bool), gamma=0.5, lam=0.5
    )
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, -6.0]]), **EXACT)
    torch.testing.assert_close(returns, torch.tensor([[3.5, 2.0]]), **EXACT)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 10_000),
)
def test_against_the_double_sum(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(len(lengths), max(lengths), generator=generator) for _ in range(2))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ours, returns = generalized_advantage_estimation(rewards, values, mask, gamma=gamma, lam=lam)
    expected = double_sum(rewards.numpy().astype(np.float64), values.numpy().astype(np.float64), lengths, gamma, lam)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-5)
    assert (ours[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize("garbage", [7.0, float("nan")])
def test_padding_changes_nothing(garbage):
    rewards, values, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.1]]), torch.ones(1, 2, dtype=torch.bool)
    plain, _ = generalized_advantage_estimation(rewards, values, mask, gamma=0.9, lam=0.8)
    fill = torch.full((1, 3), garbage)
    padded, _ = generalized_advantage_estimation(
        torch.cat([rewards, fill], 1),
        torch.cat([values, fill], 1),
        torch.cat([mask, torch.zeros(1, 3, dtype=torch.bool)], 1),
        gamma=0.9,
        lam=0.8,
    )
    torch.testing.assert_close(padded[:, :2], plain, **EXACT)
    assert (padded[:, 2:] == 0).all()


def test_a_cut_episode_goes_on_with_its_final_value():
    """As one token more, without reward, whose value is the final one; and an episode that is over is as before."""
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 2, 4)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    final = torch.tensor([2.0, 0.0])
    settings = {"gamma": 0.9, "lam": 0.8}
    advantages, returns = generalized_advantage_estimation(rewards, values, mask, final_values=final, **settings)
    plain, _ = generalized_advantage_estimation(rewards, values, mask, **settings)
    torch.testing.assert_close(advantages[1], plain[1])
    # By hand, the first row: the last difference has γ · 2 more, and each token before it (γλ) times what follows.
    for t in range(3):
        assert (advantages - plain)[0, t].item() == pytest.approx(0.9 * 2.0 * (0.9 * 0.8) ** (2 - t), rel=1e-5)
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))
    assert not advantages[~mask].any()
    full = torch.ones(2, 4, dtype=torch.bool)
    to_the_end, _ = generalized_advantage_estimation(rewards, values, full, final_values=final, **settings)
    ended, _ = generalized_advantage_estimation(rewards, values, full, **settings)
    assert (to_the_end - ended)[0, 3].item() == pytest.approx(1.8, rel=1e-5)


def test_rewards_by_hand():
    kl = torch.tensor([[0.5, 0.25, 9.0], [1.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = shape_rewards(torch.tensor([1.0, -1.0]), kl, mask, kl_coef=0.2)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.95, 0.0], [-1.2, 0.0, 0.0]]), **EXACT)


def test_an_empty_response_is_an_error():
    with pytest.raises(ValueError, match=r"responses \[1\] are empty"):
        shape_rewards(torch.zeros(2), torch.zeros(2, 1), torch.tensor([[True], [False]]), kl_coef=0.1)


VALUES = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_pooled_values_by_hand():
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


def test_a_prefix_mean_is_exact_in_a_region_of_16_bits():
    values = VALUES + 0.001
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pool_values(values, MASK, "prefix_mean")
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.tensor([[1.001, 1.501, 3.001], [4.001, 2.001, 0.0]]), **FP32)


def test_scores_of_another_shape_are_refused():
    mask = torch.ones(2, 2, dtype=torch.bool)
    for scores in (torch.zeros(2, 1), torch.zeros(1), torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"scores have shape .*, and \(2,\) is needed"):
            shape_rewards(scores, torch.zeros(2, 2), mask, kl_coef=0.1)


def test_before_a_response_that_begins_later_in_its_row_there_is_nothing():
    rewards, values = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[5.0, 5.0, 1.0, 1.0]])
    mask = torch.tensor([[False, False, True, True]])
    advantages, returns = generalized_advantage_estimation(rewards, values, mask, gamma=1.0, lam=0.95)
    alone = generalized_advantage_estimation(rewards[:, 2:], values[:, 2:], mask[:, 2:], gamma=1.0, lam=0.95)
    assert torch.equal(advantages[:, 2:], alone[0]) and torch.equal(returns[:, 2:], alone[1])
    assert not advantages[:, :2].any() and not returns[:, :2].any()
