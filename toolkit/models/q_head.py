"""What turns the logits of a Q role into Q-values between two bounds."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from toolkit.functional import bounded_q

Q_BOUND_FILE = "q_bound.safetensors"


class QBound(nn.Module):
    """lowest + (highest − lowest) · σ(scale · logit + bias), with a scale and a bias that are learned, in float32.

    Args:
        lowest: of all returns.
        highest: of all returns.
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
        self.lowest, self.highest = lowest, highest

    def forward(self, logits: Tensor) -> Tensor:
        """Of any floating type to float32."""
        return bounded_q(logits, self.scale, self.bias, lowest=self.lowest, highest=self.highest)

    def save(self, folder: Path) -> None:
        """Write scale, bias and bounds into a role's folder."""
        numbers = {"scale": self.scale, "bias": self.bias}
        bounds = {"lowest": torch.tensor(self.lowest).double(), "highest": torch.tensor(self.highest).double()}
        save_file(
            {name: x.detach().cpu().contiguous() for name, x in {**numbers, **bounds}.items()}, folder / Q_BOUND_FILE
        )

    @classmethod
    def load(cls, folder: Path) -> "QBound":
        """What `save` wrote."""
        saved = load_file(folder / Q_BOUND_FILE)
        made = cls(lowest=float(saved["lowest"]), highest=float(saved["highest"]))
        with torch.no_grad():
            made.scale.copy_(saved["scale"])
            made.bias.copy_(saved["bias"])
        return made
