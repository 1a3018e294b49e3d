"""Heads that read scores, values or classes off the hidden states, and Q-values off the logits."""

import math
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from toolkit.functional import bounded_q

HeadInit = Literal["normal", "orthogonal", "zeros"]
Q_BOUND_FILE = "q_bound.safetensors"


class ScoreHead(nn.Linear):
    """A linear layer in float32, whatever the base or an autocast region computes in.

    The form is that of transformers' `*ForSequenceClassification.score`, so that a saved head loads there; a bias,
    which those do not have, is for values alone. In bfloat16 neighbouring scores near 4 are 1/64 apart, too coarse to
    rank responses.

    Args:
        init: of the weights: "normal" with standard deviation 0.02; "orthogonal" with gain √2 (Saxe et al. 2014,
            arXiv 1312.6120; the gain of OpenAI baselines and of PaLM-rlhf-pytorch's value head); or "zeros", by which
            values begin without an error of their own.
        bias: whether there is one, which starts at 0.
    """

    mean_score: float | None = None
    """What held-out responses scored on average when it was trained on pairs; None where nobody has said."""
    high_score: float | None = None
    """What 99 in 100 of them scored less than; None of fewer, too."""
    elsewhere: bool = False
    """Whether another tool trained it, which reads a conversation to the end of its chat template."""

    def __init__(self, hidden_size: int, num_labels: int, *, init: HeadInit = "normal", bias: bool = False):
        super().__init__(hidden_size, num_labels, bias=bias, dtype=torch.float32)
        if init == "orthogonal":
            nn.init.orthogonal_(self.weight, gain=math.sqrt(2))
        elif init == "zeros":
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=0.02)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) of any floating type to float32 (..., num_labels)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def score_positions(input_ids: Tensor, attention_mask: Tensor, pad_token_id: int) -> Tensor:
    """Where a sequence's score is read: int64 (B,), its last token that is not `pad_token_id`.

    That is where transformers' sequence-classification models read, and so where `trl.RewardTrainer` trains. Where pad
    and end-of-sequence are one token, it is the token before the end; a score read one token further would come from a
    state that training never saw. A row that holds nothing but pad tokens is read at its last real one.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    kept = attention_mask.bool()
    last_real = torch.where(kept, positions, -1).amax(dim=1)
    last_not_pad = torch.where(kept & (input_ids != pad_token_id), positions, -1).amax(dim=1)
    return torch.where(last_not_pad >= 0, last_not_pad, last_real)


class QBound(nn.Module):
    """lowest + (highest − lowest) · σ(scale · logit + bias), with a scale and a bias that are learned, in float32.

    Args:
        lowest: of all returns, as `highest`.
        scale: at first. A language model's logits are some tens apart, and σ is flat where it has to tell them apart.
        bias: at first. A negative one begins with low Q-values, from which rewards and Monte-Carlo returns raise what
            is good; high ones would have to come down token by token, behind a target that follows slowly.

    Raises:
        ValueError: the bounds are not in order.
    """

    def __init__(self, *, lowest: float = 0.0, highest: float = 1.0, scale: float = 0.2, bias: float = -5.0):
        super().__init__()
        if not lowest < highest:
            raise ValueError(f"the lowest return ({lowest}) must be below the highest ({highest})")
        self.scale = nn.Parameter(torch.tensor([scale], dtype=torch.float32))
        self.bias = nn.Parameter(torch.tensor([bias], dtype=torch.float32))
        self.lowest, self.highest = float(lowest), float(highest)

    def forward(self, logits: Tensor) -> Tensor:
        return bounded_q(logits, self.scale, self.bias, lowest=self.lowest, highest=self.highest)

    def save(self, folder: Path) -> None:
        """Write scale, bias and bounds into a role's folder."""
        bounds = {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("lowest", "highest")}
        save_file({**{name: x.cpu() for name, x in self.state_dict().items()}, **bounds}, folder / Q_BOUND_FILE)

    @classmethod
    def of(cls, saved: dict[str, Tensor]) -> "QBound":
        """Of tensors that `save` wrote. Raises KeyError, ValueError or RuntimeError where they are others."""
        bound = cls(lowest=float(saved["lowest"]), highest=float(saved["highest"]))
        bound.load_state_dict({name: tensor for name, tensor in saved.items() if name not in ("lowest", "highest")})
        return bound
