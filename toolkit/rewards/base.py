"""What a reward is, how it is called, and the check on what it returns."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toolkit.data import Rollout
from toolkit.errors import RewardError, ToolkitError
from toolkit.rewards.dense import DenseScores, Scores

ScoreLike = Tensor | Sequence[float] | DenseScores
"""What a reward may return."""


class Reward(Protocol):
    """Called with a rollout of B responses; returns B scores, as a tensor (B,) or any sequence of numbers.

    Scores within responses, at tokens or at spans of the text, are returned as `DenseScores`.

    An `async def` will do: it is awaited, once for the whole rollout.

    One that changes as it goes, as by a running mean, can have `state_dict()` and `load_state_dict(state)`: its state,
    made of numbers, text, lists, dicts and tensors, is then part of every checkpoint.
    """

    def __call__(self, rollout: Rollout) -> ScoreLike | Awaitable[ScoreLike]: ...


def state_of(reward: Any) -> Any:
    """The reward, if it has a state. The weights of a network that scores are none: they stay as they are."""
    has = hasattr(reward, "state_dict") and hasattr(reward, "load_state_dict") and not isinstance(reward, nn.Module)
    return reward if has else None


def score_with(reward: Reward, rollout: Rollout) -> Scores:
    """The reward's scores of a rollout, float32 (B,) on the CPU, or dense ones.

    No gradient is recorded in the callback, and no autocast region is around it: in which precision a model scores is
    its own affair.

    Raises:
        RewardError: the callback raised, with the place in its code, or returned what `check_scores` refuses.
    """
    try:
        with torch.no_grad():
            returned = reward(rollout)
            scores: Any = wait_for(returned, loop="async rewards") if inspect.isawaitable(returned) else returned
    except ToolkitError:
        raise
    except Exception as error:
        wrong = f"the reward raised {type(error).__name__}: {error} ({place_of(error)})."
        raise RewardError(wrong, remedy="Mend it there.") from error
    return check_scores(scores, rollout)


def place_of(error: Exception) -> str:
    """The file and line that an error comes from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def check_scores(scores: ScoreLike, rollout: Rollout) -> Scores:
    """The scores as float32 (B,) on the CPU, or dense ones as `DenseScores.checked` makes them.

    Raises: RewardError: not one number for each response, or one that is not finite.
    """
    if isinstance(scores, DenseScores):
        return scores.checked(rollout)
    if scores is None:
        raise RewardError("the reward returned None, not one number a response.")
    return torch.as_tensor(DenseScores(scores).checked(rollout).scores)


@cache
def _loop(name: str) -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own.

    A notebook's main thread has a running loop, in which nothing can be waited for. One loop for all calls, since a
    reward's HTTP session belongs to the loop that it was first used in.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def wait_for(awaitable: Awaitable[Any], *, loop: str) -> Any:
    """What an awaitable comes to in a loop of ours, called from outside of what runs in that loop."""

    async def result() -> Any:
        with torch.no_grad():  # holds for the thread that enters it
            return await awaitable

    future = asyncio.run_coroutine_threadsafe(result(), _loop(loop))
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C while waiting
        raise
