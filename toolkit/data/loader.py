"""A shuffling data loader that knows its place, so that a resumed run draws the batches that are left."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


class PlacedDataLoader(DataLoader):
    """A `DataLoader` whose order comes from a generator of its own, and whose place can be saved and restored.

    A place is the generator's state at the beginning of the pass, and how many batches were drawn since. After
    `load_state_dict` the next pass goes on behind them, with the same rows in the same order.

    Args:
        dataset: what is loaded.
        generator: decides the order; a sampler draws from the same one.
        named: as for `DataLoader`.
    """

    generator: torch.Generator

    def __init__(self, dataset: Any, *, generator: torch.Generator, **named: Any):
        super().__init__(dataset, generator=generator, **named)
        self._pass_began: torch.Tensor | None = None  # None between passes
        self._drawn = self._to_skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self._to_skip = self._to_skip, 0
        self._pass_began, self._drawn = self.generator.get_state(), skip
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self._drawn = number + 1
                yield batch
        self._pass_began, self._drawn = None, 0

    @property
    def is_drawn(self) -> bool:
        """Whether the pass has given its last batch."""
        return self._pass_began is not None and self._drawn == len(self)

    def end_pass(self) -> None:
        """Leave the rest of the pass out: the place is the beginning of the next one."""
        self._pass_began, self._drawn = None, 0

    def state_dict(self) -> dict[str, Any]:
        """The place: `generator`, its state when the pass began (uint8), and `batches` drawn since."""
        began = self.generator.get_state() if self._pass_began is None else self._pass_began
        return {"generator": began, "batches": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place in the next pass."""
        self.generator.set_state(state["generator"])
        self._pass_began, self._drawn = state["generator"], state["batches"]
        self._to_skip = state["batches"]
