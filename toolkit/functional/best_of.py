"""Best-of-N sampling: what N buys, and what it costs in KL."""

import math

import torch
from torch import Tensor


def expected_best(scores: Tensor) -> Tensor:
    """Mean score of the best of k, for each k from 1 to n: unbiased, from n samples a prompt.

    The best of k among n sorted samples s_1 ≤ … ≤ s_n is s_i with probability C(i − 1, k − 1) / C(n, k); so that all
    subsets of k are averaged over (the estimator of Chen et al. 2021, arXiv 2107.03374, section 2.1, for scores).

    Args:
        scores: (B, n), n samples of each prompt.

    Returns:
        float64 (n,), the mean over prompts; the first is the mean score, the last the mean of the best.

    Example:
        >>> expected_best(torch.tensor([[1.0, 3.0, 2.0]]))
        tensor([2.0000, 2.6667, 3.0000], dtype=torch.float64)
    """
    n = scores.shape[1]
    ranked = scores.double().sort(dim=1).values.mean(dim=0)  # (n,)
    weights = torch.tensor(
        [[math.comb(i, k - 1) / math.comb(n, k) for i in range(n)] for k in range(1, n + 1)], dtype=torch.float64
    )  # (n, n), row k
    return weights @ ranked.cpu()


def best_of_kl_bound(n: int) -> float:
    """KL(best-of-n policy, policy) ≤ log n − (n − 1)/n, in nats a response.

    Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy", arXiv 2401.01879: an
    upper bound.

    Example:
        >>> round(best_of_kl_bound(4), 4)
        0.6363
    """
    return math.log(n) - (n - 1) / n
