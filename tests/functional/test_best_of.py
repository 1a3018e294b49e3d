import itertools
import math

import pytest
import torch

from tests.tolerances import EXACT
from toolkit.functional import best_of_kl_bound, expected_best


@pytest.mark.parametrize("n", [1, 2, 5])
def test_expected_best_is_the_mean_over_all_subsets(n):
    torch.manual_seed(0)
    scores = torch.randn(3, n).double()
    by_hand = [
        sum(max(subset) for row in scores.tolist() for subset in itertools.combinations(row, k)) / (3 * math.comb(n, k))
        for k in range(1, n + 1)
    ]
    torch.testing.assert_close(expected_best(scores), torch.tensor(by_hand, dtype=torch.float64), **EXACT)
    assert expected_best(scores)[0] == pytest.approx(scores.mean().item())


def test_the_bound_holds_and_is_nearly_met_where_nothing_ties():
    """Of m equally likely responses with distinct scores, the i-th is chosen with p = (i^n − (i−1)^n) / m^n."""
    m = 2000
    for n in (1, 2, 4, 8):
        chosen = [((i / m) ** n) - ((i - 1) / m) ** n for i in range(1, m + 1)]
        kl = sum(p * math.log(p * m) for p in chosen if p > 0)
        assert kl <= best_of_kl_bound(n) + 1e-12
        assert kl == pytest.approx(best_of_kl_bound(n), abs=0.01)
