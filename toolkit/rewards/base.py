"""What a reward is, and the check on what it returns."""

import inspect
import traceback
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.data import Rollout
from toolkit.errors import RewardError, ToolkitError
from toolkit.rewards.awaiting import wait_for
from toolkit.rewards.dense import DenseScores, Scores

Answer = Tensor | Sequence[float] | DenseScores


class Reward(Protocol):
    """Called with a rollout of B responses; returns B scores, as a tensor (B,) or any sequence of numbers.

    Scores within responses, at tokens or at spans of the text, are returned as `DenseScores`.

    An `async def` will do: it is awaited, once for the whole rollout.

    One that changes as it goes, as by a running mean, can have `state_dict()` and `load_state_dict(state)`: its state,
    made of numbers, text, lists, dicts and tensors, is then part of every checkpoint.
    """

    def __call__(self, rollout: Rollout) -> Answer | Awaitable[Answer]: ...


def score_with(reward: Reward, rollout: Rollout) -> Scores:
    """The reward's scores of a rollout, float32 (B,) on the CPU, or dense ones.

    No gradient is recorded in the callback, and no autocast region is around it: in which precision a model scores is
    its own affair.

    Raises:
        RewardError: the callback raised, with the place in its code, or returned what `check_scores` refuses.
    """
    try:
        with torch.no_grad():
            answer = reward(rollout)
            scores: Any = wait_for(answer) if inspect.isawaitable(answer) else answer
    except ToolkitError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(
            f"the reward raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}). "
            "Mend it there; --debug shows the whole traceback."
        ) from error
    return check_scores(scores, rollout)


def check_scores(scores: Answer, rollout: Rollout) -> Scores:
    """The scores as float32 (B,) on the CPU, or dense ones as `DenseScores.checked` makes them.

    Raises:
        RewardError: not one number for each response, or one that is not finite.
    """
    if isinstance(scores, DenseScores):
        return scores.checked(rollout)
    try:
        tensor = torch.as_tensor(scores, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward returned {type(scores).__name__}, not one number a response: {error}") from error
    if tensor.shape != (len(rollout),):
        raise RewardError(
            f"the reward returned shape {tuple(tensor.shape)} for {len(rollout)} responses; "
            f"({len(rollout)},) is needed, one number each."
        )
    if not bool(torch.isfinite(tensor).all()):
        row = int((~torch.isfinite(tensor)).nonzero()[0])
        raise RewardError(
            f"the reward gave {tensor[row]} to the response {rollout.responses[row]!r}; scores are finite."
        )
    return tensor
