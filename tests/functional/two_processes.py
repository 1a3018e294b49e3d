"""One of the processes of `test_statistics.py`: whitens its part of the values, and writes down what it got."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.functional import scale_to_unit_variance, whiten

# Parts of unlike size.
PARTS = [
    ([[1.0, 2.0, 100.0], [3.0, 6.0, -50.0]], [[True, True, False], [True, True, False]]),
    ([[40.0, -7.0, 9.0, 8.0, 1.5]], [[True, True, True, True, True]]),
]


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(PARTS))

    def add_up(values: torch.Tensor) -> torch.Tensor:
        sums = values.clone()
        dist.all_reduce(sums)
        return sums

    values, mask = (torch.tensor(x) for x in PARTS[rank])
    found = [function(values, mask, reduce=add_up).tolist() for function in (whiten, scale_to_unit_variance)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
