"""Tokens from uniform numbers."""

import pytest
import torch

from toolkit.functional import inverse_cdf

LOGITS = torch.tensor([1.0, -2.0, 0.5, 3.0, float("-inf"), 0.0])


def test_tokens_have_the_probabilities_of_the_softmax():
    """On an even grid in place of random numbers each token has its probability, to one point of the grid."""
    points = 20_000
    grid = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    for temperature in (1.0, 0.3, 4.0):
        tokens, of_tokens = inverse_cdf(LOGITS.expand(points, -1), grid, temperature=temperature)
        share, exact = tokens.bincount(minlength=6) / points, (LOGITS / temperature).softmax(0)
        torch.testing.assert_close(share, exact, atol=1 / points, rtol=1e-5)
        torch.testing.assert_close(of_tokens, exact[tokens])
    assert share[4] == 0


def test_rare_tokens_of_a_large_vocabulary_are_reached():
    """Half of the probability on one token, half even over 120,000: sums in float32 would take a neighbour."""
    rare = 120_000
    logits = torch.zeros(1, rare + 1)
    logits[0, 500] = torch.tensor(float(rare)).log()
    for token in (0, 499, 501, 60_000, 119_999, 120_000):
        before = (token - (token > 500)) * 0.5 / rare + (0.5 if token > 500 else 0.0)
        middle = torch.tensor([before + 0.25 / rare], dtype=torch.float64)  # of the token's own piece of [0, 1)
        assert int(inverse_cdf(logits, middle)[0]) == token


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 1000, 50_257])
def test_each_token_has_its_piece_of_the_whole(vocabulary):
    """Against the sums of the whole vocabulary in float64, at the middle of each of some tokens' pieces."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(vocabulary, generator=generator)
    probabilities = logits.double().softmax(0)
    chosen = torch.cat([torch.randperm(vocabulary, generator=generator)[:60], torch.tensor([0, vocabulary - 1])])
    middle = probabilities.cumsum(0)[chosen] - probabilities[chosen] / 2
    # float32 knows a probability to 1e-7, as does the sum of a block: thinner pieces may be a neighbour's
    wide = probabilities[chosen] > 1e-6
    tokens, of_tokens = inverse_cdf(logits.expand(len(chosen), -1), middle)
    assert int(wide.sum()) >= min(15, vocabulary)
    assert tokens[wide].tolist() == chosen[wide].tolist()
    torch.testing.assert_close(of_tokens, probabilities[tokens].float(), rtol=1e-5, atol=0.0)


def test_the_ends_of_the_distribution():
    almost_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for logits, last in ((LOGITS, 5), (LOGITS[:5], 3)):  # a last token of probability 0 is never taken
        assert int(inverse_cdf(logits.unsqueeze(0), almost_one)[0]) == last
        assert int(inverse_cdf(logits.unsqueeze(0), torch.zeros(1, dtype=torch.float64))[0]) == 0
    first_is_impossible = torch.tensor([[float("-inf"), 0.0]])
    assert int(inverse_cdf(first_is_impossible, torch.zeros(1, dtype=torch.float64))[0]) == 1


def test_at_the_edge_of_a_block_no_token_without_probability_is_taken():
    """Blocks so thin beside the first that their sums round, each with a first token that is impossible."""
    rows, blocks = 500, 8
    logits = 2 * torch.randn(rows, blocks, 256, generator=torch.Generator().manual_seed(0))
    logits[:, 1:] -= 22
    logits[:, :, 0] = float("-inf")
    probabilities = logits.view(rows, -1).softmax(1)
    until = probabilities.view(rows, blocks, 256).sum(2).double().cumsum(1)
    for edge in range(blocks - 1):
        tokens, _ = inverse_cdf(logits.view(rows, -1), until[:, edge] / until[:, -1])
        assert bool((probabilities.gather(1, tokens.unsqueeze(1)) > 0).all())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_is_told(broken):
    logits = torch.zeros(2, 4)
    logits[1, 2] = broken
    tokens, of_tokens = inverse_cdf(logits, torch.full((2,), 0.5, dtype=torch.float64))
    assert of_tokens.isnan().tolist() == [False, True] and int(tokens[0]) == 2 and 0 <= int(tokens[1]) < 4


def test_a_temperature_that_is_not_positive_is_refused():
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature must be positive"):
            inverse_cdf(torch.zeros(1, 3), torch.tensor([0.5]), temperature=temperature)
