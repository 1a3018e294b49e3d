"""Losses of a reward that is trained on pairs."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0) -> Tensor:
    """Mean of −log σ(r_chosen − r_rejected − m): Ouyang et al. 2022, arXiv 2203.02155, equation 1.

    The margin m is that of Touvron et al. 2023, arXiv 2307.09288, equation 2: a pair that is clearly better has to be
    further apart.

    Args:
        chosen: scores (B,).
        rejected: scores (B,).
        margin: (B,), or one for all.

    Returns:
        Scalar.

    Example:
        >>> bradley_terry_loss(torch.tensor([1.0]), torch.tensor([1.0]))  # log 2
        tensor(0.6931)
    """
    return -logsigmoid(chosen - rejected - margin).mean()


def first_differences(
    chosen_ids: Tensor, rejected_ids: Tensor, *, chosen_ends: Tensor, rejected_ends: Tensor
) -> Tensor:
    """The first position of each pair where the two differ, or where only one of them goes on.

    Args:
        chosen_ids: int64 (B, L), padded on the right.
        rejected_ids: likewise.
        chosen_ends: int64 (B,), the last position that counts.
        rejected_ends: likewise.

    Returns:
        int64 (B,). One past the last position that counts, where the two are equal.

    Example:
        >>> first_differences(
        ...     torch.tensor([[7, 8, 9]]), torch.tensor([[7, 8, 0]]),
        ...     chosen_ends=torch.tensor([2]), rejected_ends=torch.tensor([1]),
        ... )
        tensor([2])
    """
    positions = torch.arange(chosen_ids.shape[1], device=chosen_ids.device)
    common = torch.minimum(chosen_ends, rejected_ends).unsqueeze(1)  # (B, 1)
    same = (chosen_ids == rejected_ids) & (positions <= common)
    return same.long().cumprod(dim=1).sum(dim=1)


def token_level_preference_loss(
    chosen_values: Tensor,
    rejected_values: Tensor,
    *,
    starts: Tensor,
    chosen_ends: Tensor,
    rejected_ends: Tensor,
    margin: Tensor | float = 0.0,
) -> Tensor:
    """−log σ of the difference of the two values at every token, averaged over a pair's tokens and then over pairs.

    For each pair: 1/(e − s + 1) · Σ_t −log σ(v_chosen[t] − v_rejected[t] − m), t from s, the first position where the
    two differ, to e, the end of the longer one. The form is that of DeepSpeed-Chat (Yao et al. 2023, arXiv 2308.01320)
    and of its shorter retellings.

    These read whatever the model says of padding where the shorter one is over. Here its last value is held: a
    sequence that has ended keeps its score. The last term of the sum is then the difference of the two scores as PPO
    reads them, and no value depends on padding.

    Args:
        chosen_values: (B, L), the head's output at each token, padded on the right.
        rejected_values: likewise.
        starts: int64 (B,), from `first_differences`.
        chosen_ends: int64 (B,), the position where the sequence's score is read.
        rejected_ends: likewise.
        margin: (B,), or one for all.

    Returns:
        Scalar. A pair without a difference counts as a pair, with a loss of 0.

    Example:
        >>> round(float(token_level_preference_loss(
        ...     torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([[5.0, 1.0, 9.0]]), starts=torch.tensor([1]),
        ...     chosen_ends=torch.tensor([2]), rejected_ends=torch.tensor([1]),
        ... )), 4)  # (−log σ(1 − 1) − log σ(2 − 1)) / 2
        0.5032
    """
    positions = torch.arange(chosen_values.shape[1], device=chosen_values.device).unsqueeze(0)  # (1, L)
    held = [
        values.gather(1, torch.minimum(positions, ends.unsqueeze(1)))
        for values, ends in ((chosen_values, chosen_ends), (rejected_values, rejected_ends))
    ]
    last = torch.maximum(chosen_ends, rejected_ends).unsqueeze(1)
    counts = (positions >= starts.unsqueeze(1)) & (positions <= last)  # (B, L)
    margins = margin.unsqueeze(1) if isinstance(margin, Tensor) else margin
    losses = torch.where(counts, -logsigmoid(held[0] - held[1] - margins), 0.0)
    return (losses.sum(dim=1) / counts.sum(dim=1).clamp(min=1)).mean()
