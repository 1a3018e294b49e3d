"""From one score a response to one reward a token."""

import torch
from torch import Tensor


def shape_rewards(
    scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float, token_scores: Tensor | None = None
) -> Tensor:
    """Per-token rewards: −kl_coef · KL at every response token, plus the score at the last one.

    r_t = −β · KL_t + 1[t = last] · score    (Ziegler et al. 2019, arXiv 1909.08593, equation 2, with the
    KL penalty given token by token as in Stiennon et al. 2020, arXiv 2009.01325.)

    The last response token is the end-of-sequence token where there is one. TRL puts the score one
    position further for responses that end early, where no action was taken.

    Args:
        scores: (B,).
        kl: (B, T), an estimate for each token.
        response_mask: bool (B, T), with at least one True in each row.
        kl_coef: β.
        token_scores: (B, T), what a dense reward gives at each token besides; None for nothing.

    Returns:
        (B, T), 0 outside the mask.

    Raises:
        ValueError: a response is empty, so that its score has nowhere to go.

    Example:
        >>> shape_rewards(torch.tensor([1.0]), torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]]), kl_coef=0.2)
        tensor([[-0.1000,  0.9000]])
    """
    if not bool(response_mask.any(dim=1).all()):
        empty = (~response_mask.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"responses {empty} are empty; a score needs at least one token to stand at")
    at_each = -kl_coef * kl if token_scores is None else token_scores - kl_coef * kl
    rewards = torch.where(response_mask, at_each, torch.zeros_like(kl))
    positions = torch.arange(kl.shape[1], device=kl.device)
    last = torch.where(response_mask, positions, -1).argmax(dim=1)  # (B,)
    return rewards + torch.nn.functional.one_hot(last, kl.shape[1]) * scores.to(kl.dtype).unsqueeze(1)


def penalize_short(scores: Tensor, lengths: Tensor, *, minimum: int, penalty: float) -> Tensor:
    """Take `penalty` from the score of each response of fewer than `minimum` tokens.

    Args:
        scores: (B,).
        lengths: (B,), tokens of each response, its end included.
        minimum: the least length that is not punished.
        penalty: positive.

    Returns:
        (B,).

    Example:
        >>> penalize_short(torch.tensor([1.0, 1.0]), torch.tensor([1, 2]), minimum=2, penalty=3.0)
        tensor([-2.,  1.])
    """
    return torch.where(lengths < minimum, scores - penalty, scores)


def penalize_missing_eos(scores: Tensor, ended: Tensor, *, penalty: float) -> Tensor:
    """Take `penalty` from the score of each response that did not end by itself.

    Args:
        scores: (B,).
        ended: bool (B,), True where the response holds a stop token.
        penalty: positive.

    Returns:
        (B,).

    Example:
        >>> penalize_missing_eos(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), penalty=2.0)
        tensor([ 1., -1.])
    """
    return torch.where(ended, scores, scores - penalty)
