"""Linear heads that read scores, values or classes off the hidden states."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

HeadInit = Literal["normal", "orthogonal"]


class ScoreHead(nn.Linear):
    """A linear layer in float32, whatever the base or an autocast region computes in.

    The form is that of transformers' `*ForSequenceClassification.score`, so that a saved head loads there; a bias,
    which those do not have, is for values alone. In bfloat16 neighbouring scores near 4 are 1/64 apart, too coarse to
    rank responses.

    Args:
        hidden_size: H.
        num_labels: 1 for a score or value, more for classes.
        init: of the weights: "normal" with standard deviation 0.02, or "orthogonal" with gain √2 (Saxe et al. 2014,
            arXiv 1312.6120; the gain of OpenAI baselines and of PaLM-rlhf-pytorch's value head).
        bias: whether there is one, starting at 0.
    """

    def __init__(self, hidden_size: int, num_labels: int, *, init: HeadInit = "normal", bias: bool = False):
        super().__init__(hidden_size, num_labels, bias=bias, dtype=torch.float32)
        if init == "orthogonal":
            nn.init.orthogonal_(self.weight, gain=math.sqrt(2))
        else:
            nn.init.normal_(self.weight, std=0.02)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) of any floating type to float32 (..., num_labels)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def score_positions(input_ids: Tensor, attention_mask: Tensor, pad_token_id: int) -> Tensor:
    """Where a sequence's score is read: its last token that is not `pad_token_id`.

    That is where transformers' sequence-classification models read, and so where `trl.RewardTrainer`
    trains. Where pad and end-of-sequence are one token, it is the token before the end; a score read
    one token further would come from a state that training never saw.

    Args:
        input_ids: int64 (B, L).
        attention_mask: bool (B, L), True at real tokens.
        pad_token_id: the one that the head was trained with.

    Returns:
        int64 (B,). A row that holds nothing but pad tokens is read at its last real one.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    kept = attention_mask.bool()
    last_real = torch.where(kept, positions, -1).amax(dim=1)
    last_not_pad = torch.where(kept & (input_ids != pad_token_id), positions, -1).amax(dim=1)
    return torch.where(last_not_pad >= 0, last_not_pad, last_real)
