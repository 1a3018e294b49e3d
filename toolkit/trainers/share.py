"""What each process does of a step, and how the parts become one step again.

All processes have the same batch, the same optimizer and the same shared randomness. Each computes some of the rows,
as their share of the whole batch's loss; the gradients are summed before they are clipped. No wrapper of
`torch.nn.parallel` has a part in it: adapters that are switched, two backward passes a step and calls of submodules do
not go through one.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from toolkit import phases, processes
from toolkit.checkpoints import kept_random_states
from toolkit.data import Rollout
from toolkit.errors import SelfCheckError
from toolkit.sampling import key_of


def own_rows(rollout: Rollout, rows: Sequence[int]) -> list[int]:
    """Those of some rows that fall to this process, divided by tokens."""
    return [rows[i] for i in processes.own([len(rollout.prompt_ids[j]) + len(rollout.response_ids[j]) for j in rows])]


@contextmanager
def own_randomness(seed: int, *where: Any) -> Iterator[None]:
    """Inside, each of several processes draws its own numbers, as for the dropout of adapters, by the seed of the run
    and by what tells one place of it from another; afterwards its generators are as they were."""
    if processes.count() == 1:
        yield
        return
    with kept_random_states():
        torch.manual_seed(key_of("dropout", seed, processes.rank(), where))
        yield


def sum_gradients(parameters: Iterable[nn.Parameter], scaler: torch.amp.GradScaler | None) -> None:
    """Add up the gradients of all processes; zeros from one that had no row, none where no process has one."""
    if processes.count() == 1:
        return
    parameters = list(parameters)
    if scaler is not None:  # which makes its scale with the first loss; a process may have none
        scaler.scale(torch.zeros((), device=parameters[0].device))
    reached = set().union(*processes.gather({i for i, p in enumerate(parameters) if p.grad is not None}))
    with processes.agreed():
        for i in reached:
            if parameters[i].grad is None:
                parameters[i].grad = torch.zeros_like(parameters[i])
    processes.sum_([gradient for i in sorted(reached) if (gradient := parameters[i].grad) is not None])


def sum_like_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """A sum as `sum_gradients` will make them, of numbers that are known. With its first sum NCCL takes memory of a
    card, which may lack at an optimizer step, when passes have filled it; and what is wrong between machines or cards
    shows before the work.

    Raises: SelfCheckError: the sum is another one.
    """
    if (number := processes.count()) == 1:
        return
    of_each = [torch.full_like(parameter, processes.rank() + 1) for parameter in parameters]
    with phases.phase("first sum of all processes"):  # which may hang, where cards cannot copy to one another
        processes.sum_(of_each)
        right = all(bool((summed == number * (number + 1) // 2).all()) for summed in of_each)
    if not right:
        wrong = f"a sum over {number} processes lacks what some of them gave: gradients would be wrong."
        raise SelfCheckError(wrong, remedy=processes.BY_MEMORY)
