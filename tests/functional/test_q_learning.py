"""Q-learning on token trees, against dynamic programming written out in plain Python."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import tensor

from tests.tolerances import EXACT, FP32, RELATIVE
from toolkit.functional import (
    best_q_values,
    bounded_q,
    conservative_loss,
    monte_carlo_returns,
    q_policy_logprobs,
    q_targets,
    td_loss,
    token_q_values,
)

EOS, TOKENS = 0, 4
GAMMA = 0.9


@dataclass
class Step:
    """One token of a sample: the state it was taken in, and the reward after it (None: none was given)."""

    state: object
    token: int
    reward: float | None = None


@dataclass
class Data:
    """Samples, and the tensors that the functions take. A state is whatever names it; the table has a row for each."""

    samples: list[list[Step]]
    ended: list[bool] | None = None
    after: list[object] = field(default_factory=list)  # the state after the last token, of samples that were cut

    def __post_init__(self):
        self.ended = self.ended or [True] * len(self.samples)
        states = [step.state for sample in self.samples for step in sample] + self.after
        self.row_of = {state: i for i, state in enumerate(dict.fromkeys(states))}
        longest = max(map(len, self.samples))

        def padded(value, fill):
            return tensor([[value(step) for step in s] + [fill] * (longest - len(s)) for s in self.samples])

        self.rows = padded(lambda step: self.row_of[step.state], 0)
        self.tokens = padded(lambda step: step.token, 0)
        self.rewards = padded(lambda step: 0.0 if step.reward is None else step.reward, 7.0)
        self.reward_mask = padded(lambda step: step.reward is not None, True)
        self.mask = padded(lambda step: True, False)


def learn(
    data, *, decay=0.9, rounds=200, alpha=0.0, lowest=0.0, n_steps=1, bound=False, start=0.0, final_values=None,
    gamma=GAMMA,
):  # fmt: skip
    """The table that gradients of the two losses come to, each coordinate scaled by its own curvature."""
    table = torch.full((len(data.row_of), TOKENS), start)
    target = table.clone()
    given = data.rewards, data.reward_mask
    returns = monte_carlo_returns(*given, data.mask, gamma=gamma, cut=~tensor(data.ended))

    def gradient(targets, shift=0.0):
        shifted = (table + shift).requires_grad_()
        states = shifted[data.rows[data.mask]]
        found = token_q_values(states, lambda q: q, data.tokens[data.mask], lowest=lowest, chunk_size=500)
        q, excess = (torch.zeros(data.mask.shape).masked_scatter(data.mask, x) for x in found)
        loss = td_loss(q, targets, data.mask) + alpha * conservative_loss(excess, data.mask)
        return torch.autograd.grad(loss, shifted)[0]

    zeros = torch.zeros(data.mask.shape)
    curvature = (gradient(zeros, 1.0) - gradient(zeros)).clamp(min=1e-9)
    for _ in range(rounds):
        values = best_q_values(target[data.rows.flatten()], lambda q: q).view(data.rows.shape)
        after = None if final_values is None else final_values(target, data)
        targets = q_targets(values, *given, data.mask, gamma=gamma, n_steps=n_steps, final_values=after)
        targets = torch.maximum(targets, returns) if bound else targets
        step = gradient(targets) / curvature
        with torch.no_grad():
            table -= step
            target.lerp_(table, 1 - decay)
    return table


# ---------------------------------------------------------------------- the oracle


def exact(data, *, alpha=0.0, lowest=0.0, bound=False, gamma=GAMMA):
    """The fixed point by backward induction over the samples, without a tensor."""
    q = {}

    def best(state):
        return max(q.get((state, token), lowest) for token in range(TOKENS))

    depth = max(map(len, data.samples))
    for t in reversed(range(depth)):
        held: dict[tuple, list[float]] = {}
        for sample in data.samples:
            if t >= len(sample):
                continue
            step, following = sample[t], sample[t + 1].state if t + 1 < len(sample) else None
            rest = 0.0 if following is None else best(following)
            y = rest if step.reward is None else step.reward + gamma * rest
            g = 0.0
            for later in reversed(sample[t:]):
                g = g if later.reward is None else later.reward + gamma * g
            held.setdefault((step.state, step.token), []).append(max(y, g) if bound else y)
        for state, token in itertools.product({state for state, _ in held}, range(TOKENS)):
            own = held.get((state, token), [])
            others = sum(len(v) for (s, a), v in held.items() if s == state and a != token)
            weight = len(own) + alpha * others / (TOKENS - 1)
            if weight:
                q[state, token] = (sum(own) + alpha * others / (TOKENS - 1) * lowest) / weight
    return q


def largest_difference(data, table, expected):
    assert len(expected) > 4
    return max(abs(float(table[data.row_of[state], token]) - value) for (state, token), value in expected.items())


# ---------------------------------------------------------------------- trees


def whole_tree(depth, reward):
    """Every sequence of up to `depth` tokens that ends by EOS or at the last level; each state holds its tokens."""
    samples = []
    for tokens in itertools.product(range(TOKENS), repeat=depth):
        ended = tokens.index(EOS) + 1 if EOS in tokens else depth
        if all(token == EOS for token in tokens[ended:]):
            samples.append([Step(tokens[:t], tokens[t], reward(tokens[:t], tokens[t])) for t in range(ended)])
    return samples


def by_hash(state, token):
    """Some number from −1 to 1 in steps of 0.25, zero among them."""
    return ((7 * sum((i + 2) * (x + 1) for i, x in enumerate(state)) + 5 * token) % 9 - 4) / 4


def terminal(state, token):
    return by_hash(state, token) if token == EOS or len(state) == 2 else None


def sparse(state, token):
    """Also in the middle: positive, negative and zero ones, and none at odd states."""
    return by_hash(state, token) if token == EOS or len(state) == 2 or sum(state) % 2 else None


TREES = {"terminal": terminal, "dense": by_hash, "sparse": sparse}


def random_rewards():
    """Each sequence twice, with rewards of which one is a zero or of the other sign."""
    once = whole_tree(3, terminal)
    again = [[Step(s.state, s.token, None if s.reward is None else -0.5 * s.reward) for s in x] for x in once]
    return once + again


def random_states():
    """After a token the world answers in one of two ways, which a state also holds: three to one."""
    samples = []
    for first, second in itertools.product(range(TOKENS), repeat=2):
        for world in ("rain", "rain", "rain", "sun"):
            reward = by_hash((first,), second) * (1.0 if world == "rain" else -1.0)
            start = Step((), first, None if first == EOS else 0.25)
            samples.append([start] if first == EOS else [start, Step((first, world), second, reward)])
    return samples


STOCHASTIC = {"rewards": random_rewards, "states": random_states}


@pytest.mark.parametrize("kind", TREES)
def test_q_of_a_deterministic_tree_is_that_of_dynamic_programming(kind):
    data = Data(whole_tree(3, TREES[kind]))
    rewards = {step.reward for sample in data.samples for step in sample}
    assert min(r for r in rewards if r is not None) < 0 < max(r for r in rewards if r is not None) and 0.0 in rewards
    assert largest_difference(data, learn(data), exact(data)) < 1e-3


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_q_of_a_stochastic_tree_is_that_of_dynamic_programming(kind):
    data = Data(STOCHASTIC[kind]())
    assert largest_difference(data, learn(data), exact(data)) < 1e-3


def test_with_the_figures_of_the_seed():
    data = Data(whole_tree(3, by_hash))
    table = learn(data, gamma=0.998, decay=0.99, rounds=1500)
    assert largest_difference(data, table, exact(data, gamma=0.998)) < 1e-3


NOISY = random_rewards()


@pytest.mark.parametrize("samples", [whole_tree(3, by_hash), whole_tree(3, terminal), NOISY])
@pytest.mark.parametrize("alpha, lowest, bound", [(1.0, -1.0, False), (0.0, 0.0, True), (0.5, -2.0, True)])
def test_with_conservative_term_and_bound_it_is_their_own_fixed_point(samples, alpha, lowest, bound):
    data = Data(samples)
    table = learn(data, alpha=alpha, lowest=lowest, bound=bound)
    expected = exact(data, alpha=alpha, lowest=lowest, bound=bound)
    assert largest_difference(data, table, expected) < 1e-3
    # Another point than without them; but for the bound alone, which is never above the best that can be had.
    sure = samples is not NOISY and not alpha
    assert (largest_difference(data, table, exact(data)) < 1e-3) == sure


# ---------------------------------------------------------------------- each term matters


def narrow_data():
    """Token 3 is in no sample."""
    return Data([sample for sample in whole_tree(3, terminal) if all(step.token != 3 for step in sample)])


def test_without_the_conservative_term_a_token_that_was_never_seen_looks_best():
    data = narrow_data()
    without = learn(data, start=2.0)
    assert without[data.row_of[()], 1:].tolist() == [2.0, 2.0, 2.0]  # it draws all that leads to it with it
    table = learn(data, start=2.0, alpha=0.1, lowest=-1.0)
    expected = exact(data, alpha=0.1, lowest=-1.0)
    assert largest_difference(data, table, expected) < 1e-3
    best = max(range(3), key=lambda token: expected[(), token])
    assert int(table[data.row_of[()]].argmax()) == best
    assert torch.allclose(table[:, 3], tensor(-1.0), atol=1e-3)


def test_a_response_that_was_cut_goes_on_with_the_value_of_its_last_state():
    """Two tokens of a response that was cut, and whole ones from the same state: 0.5 + 0.9 · 1 at best."""
    cut = [Step("a", 1), Step("b", 2, 0.5)]
    whole = [Step("c", 3, 1.0)]
    data = Data([cut, whole], ended=[False, True])

    def after(target, data):
        return torch.stack([target[data.row_of["c"]].amax(), tensor(0.0)])

    for n_steps in (1, 2, 5):
        table = learn(data, final_values=after, n_steps=n_steps, bound=True, rounds=150)
        assert float(table[data.row_of["b"], 2]) == pytest.approx(1.4, abs=1e-3)
        assert float(table[data.row_of["a"], 1]) == pytest.approx(1.4, abs=1e-3)
    assert float(learn(data)[data.row_of["a"], 1]) == pytest.approx(0.5, abs=1e-3)


# ---------------------------------------------------------------------- by hand

VALUES = tensor([[9.0, 0.8, 0.6, 0.4]])
REWARDS = tensor([[5.0, 0.0, -1.0, 2.0]])
GIVEN = tensor([[False, True, True, True]])
WHOLE = torch.ones(1, 4, dtype=torch.bool)


def targets(**changes):
    settings = {"rewards": REWARDS, "reward_mask": GIVEN, "response_mask": WHOLE, "gamma": 0.5, **changes}
    return q_targets(VALUES, **settings)


def test_targets_by_hand():
    # 0.8 | 0 + 0.5·0.6 | −1 + 0.5·0.4 | 2
    torch.testing.assert_close(targets(), tensor([[0.8, 0.3, -0.8, 2.0]]), **EXACT)
    # two steps: 1·(0 + 0.5·0.6) | 0 + 0.5·(−1 + 0.5·0.4) | −1 + 0.5·2 | 2
    torch.testing.assert_close(targets(n_steps=2), tensor([[0.3, -0.4, 0.0, 2.0]]), **EXACT)
    # cut, with 4 still to come: 2 + 0.5·4 at the end
    torch.testing.assert_close(targets(final_values=tensor([4.0])), tensor([[0.8, 0.3, -0.8, 4.0]]), **EXACT)


def test_more_steps_than_tokens_are_the_return():
    returns = monte_carlo_returns(REWARDS, GIVEN, WHOLE, gamma=0.5)
    torch.testing.assert_close(returns, tensor([[0.0, 0.0, 0.0, 2.0]]), **EXACT)
    for steps in (9, 10**12):
        torch.testing.assert_close(targets(n_steps=steps), returns, **EXACT)


def test_nothing_outside_the_mask_and_no_bound_for_what_was_cut():
    short = tensor([[True, True, False, False]])
    torch.testing.assert_close(targets(response_mask=short), tensor([[0.8, 0.0, 0.0, 0.0]]), **EXACT)
    returns = monte_carlo_returns(REWARDS, GIVEN, short, gamma=0.5, cut=tensor([True]))
    assert returns.tolist() == [[-torch.inf, -torch.inf, 0.0, 0.0]]


def test_a_last_token_without_a_reward_is_worth_nothing():
    none = torch.zeros_like(GIVEN)
    torch.testing.assert_close(targets(reward_mask=none), tensor([[0.8, 0.6, 0.4, 0.0]]), **EXACT)


def test_losses_by_hand():
    mask = tensor([[True, True, False]])
    q, y = tensor([[1.0, 3.0, torch.nan]]), tensor([[0.0, 1.0, 0.0]])
    assert float(td_loss(q, y, mask)) == pytest.approx(0.5 * (1 + 4) / 2)
    assert float(td_loss(q, y, mask, count=5.0)) == pytest.approx(0.5)
    assert float(conservative_loss(tensor([[2.0, 4.0, torch.inf]]), mask)) == pytest.approx(1.5)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="n_steps must be at least 1, got 0"):
        targets(n_steps=0)
    with pytest.raises(ValueError, match=r"rewards \(1, 4\), reward_mask \(1, 3\)"):
        targets(reward_mask=GIVEN[:, :3])
    with pytest.raises(ValueError, match="do not fit"):
        token_q_values(torch.zeros(2, 3), torch.nn.Identity(), torch.zeros(3, dtype=torch.long), lowest=0.0)
    for call in (
        lambda: token_q_values(
            torch.zeros(2, 3), torch.nn.Identity(), torch.zeros(2, dtype=torch.long), lowest=0.0, chunk_size=0
        ),
        lambda: best_q_values(torch.zeros(2, 3), torch.nn.Identity(), chunk_size=0),
    ):
        with pytest.raises(ValueError, match="chunk_size must be positive, got 0"):
            call()
    with pytest.raises(ValueError, match="temperature must be positive"):
        q_policy_logprobs(torch.zeros(2), torch.zeros(2), temperature=0.0)


# ---------------------------------------------------------------------- in chunks


def test_q_values_in_chunks_are_those_of_the_whole_with_their_gradients():
    torch.manual_seed(0)
    weight = torch.randn(11, 6, requires_grad=True)
    hidden, tokens = torch.randn(10, 6, requires_grad=True), torch.randint(11, (10,))
    lengths = []

    def head(states):
        lengths.append(len(states))
        return states @ weight.T

    q_taken, excess = token_q_values(hidden, head, tokens, lowest=-0.5, chunk_size=4)
    assert lengths == [4, 4, 2]
    (q_taken.sum() + 3 * excess.sum()).backward()
    assert sorted(lengths) == [2, 2, 4, 4, 4, 4]  # computed again in the backward pass, no more positions at a time
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    q = hidden @ weight.T
    taken, others = [], []
    for n, token in enumerate(tokens.tolist()):
        taken.append(q[n, token])
        others.append(sum((q[n, v] + 0.5) ** 2 for v in range(11) if v != token) / 10)
    torch.testing.assert_close(q_taken, torch.stack(taken), **FP32)
    torch.testing.assert_close(excess, torch.stack(others), **FP32)
    (torch.stack(taken).sum() + 3 * torch.stack(others).sum()).backward()
    for ours, theirs in zip(grads, (hidden.grad, weight.grad), strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < RELATIVE
    torch.testing.assert_close(best_q_values(hidden, head, chunk_size=3), q.max(dim=1).values, **FP32)
    assert best_q_values(hidden[:0], head).shape == (0,)


def test_bounds():
    q = bounded_q(tensor([-1e4, 0.0, 1e4]), tensor(2.0), tensor(0.0), lowest=-2.0, highest=4.0)
    torch.testing.assert_close(q, tensor([-2.0, 1.0, 4.0]), **EXACT)


# ---------------------------------------------------------------------- the policy


def test_the_policy_is_the_reference_times_exp_q_whatever_v_is():
    torch.manual_seed(0)
    q, ref = torch.randn(3, 5), torch.randn(3, 5).log_softmax(-1)
    ref[0, 2] = -torch.inf
    ref = ref.log_softmax(-1)
    weights = ref.exp() * torch.exp(q / 0.3)
    expected = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(q_policy_logprobs(q, ref, temperature=0.3).exp(), expected, **FP32)
    shifted = q - torch.randn(3, 1)  # another V
    torch.testing.assert_close(q_policy_logprobs(shifted, ref, temperature=0.3).exp(), expected, **FP32)


def test_its_limits_are_the_reference_and_the_best_token():
    torch.manual_seed(0)
    q, ref = torch.randn(4, 6), torch.randn(4, 6).log_softmax(-1)
    torch.testing.assert_close(q_policy_logprobs(q, ref, temperature=1e6), ref, rtol=1e-4, atol=1e-4)
    sharp = q_policy_logprobs(1e3 * q, ref, temperature=1e-2)
    assert torch.equal(sharp.argmax(-1), q.argmax(-1)) and float(sharp.max(-1).values.exp().min()) > 0.999
