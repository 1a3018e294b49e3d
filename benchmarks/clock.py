"""What is read from a contender while it runs: seconds by phase, and the gradients at its optimizer's step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.start import Built

WARM_UP = 1  # updates


class PhaseClock:
    """Seconds of the phases of each update.

    Args:
        at_phase_end: called with each phase's name, and as what runs on a GPU has come to its end.
    """

    def __init__(self, at_phase_end: Callable[[str], None] | None = None):
        self.updates: list[dict[str, float]] = []
        self.phase: str | None = None
        self._at_phase_end = at_phase_end
        self._seconds: dict[str, float] = {}
        self._since = 0.0

    def start(self, phase: str) -> None:
        """Begin a phase; the one before it is over."""
        self._end_phase()
        self.phase, self._since = phase, time.perf_counter()

    def stop(self) -> None:
        """The update is over."""
        self._end_phase()
        self.updates.append(self._seconds)
        self._seconds = {}

    def _end_phase(self) -> None:
        if self.phase is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[self.phase] = time.perf_counter() - self._since
        if self._at_phase_end is not None:
            self._at_phase_end(self.phase)
        self.phase = None


@contextmanager
def gradient_norms(built: Built) -> Iterator[dict[str, float]]:
    """Norms of the gradients at the latest optimizer step: `policy_gradient`, `value_head_gradient`."""
    norms: dict[str, float] = {}

    def take(*_: Any) -> None:
        for name, parameters in (("policy_gradient", built.policy), ("value_head_gradient", [built.value_head])):
            found = [p.grad.float().norm() for p in parameters if p.grad is not None]
            norms[name] = float(torch.stack(found).norm()) if found else 0.0

    handle = register_optimizer_step_pre_hook(take)
    try:
        yield norms
    finally:
        handle.remove()
