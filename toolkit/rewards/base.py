"""What a reward is, how it is called, and the check on what it returns."""

import asyncio
import hashlib
import inspect
import os
import re
import reprlib
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toolkit import processes
from toolkit.data import Rollout
from toolkit.errors import PeerError, RewardError, RewardStateError, ToolkitError, words_of
from toolkit.rewards.dense import DenseScores, Scores
from toolkit.rewards.kept import process_kept

ScoreLike = Tensor | Sequence[float] | DenseScores
"""What a reward may return."""
_ANY, _ANY_NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_NOT_OWN = (f"{sysconfig.get_path('stdlib')}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<frozen ")
_OF_A_LIBRARY = re.compile(rf"[/\\](site|dist)-packages[/\\]|^({'|'.join(map(re.escape, _NOT_OWN))})")


class Reward(Protocol):
    """Called with a rollout of B responses; returns B scores, as a tensor (B,) or any sequence of numbers.

    Scores within responses, at tokens or at spans of the text, are returned as `DenseScores`.

    An `async def` will do: it is awaited, once for the whole rollout.

    One that changes as it goes, as by a running mean, can have `state_dict()` and `load_state_dict(state)`: its state,
    made of numbers, text, lists, dicts and tensors, is then part of every checkpoint.

    Of several processes the main one alone calls it, with the responses of all. One whose `on_every_process` is True is
    called by all with all of them, has the same result in each, and divides its work by itself.
    """

    def __call__(self, rollout: Rollout) -> ScoreLike | Awaitable[ScoreLike]: ...


def of_a_library(file: str) -> bool:
    """Whether a file is an installed one's, Python's or the toolkit's, and none of the user's own."""
    return _OF_A_LIBRARY.search(file) is not None


class RewardState:
    """What a reward has as it goes: its `state_dict` and `load_state_dict`, whose errors are RewardStateErrors with
    the place."""

    def __init__(self, reward: Any):
        self._reward = reward

    def state_dict(self) -> Any:
        """The state as it is now, the reward's own objects in it."""
        return self._by("state_dict")

    def load_state_dict(self, state: Any) -> None:
        """Put a state back that `state_dict` gave."""
        self._by("load_state_dict", state)

    def _by(self, name: str, *given: Any) -> Any:
        try:
            return getattr(self._reward, name)(*given)
        except (ToolkitError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            wrong = f"{name} of the reward raised {type(error).__name__}: {words_of(error)}"
            raise RewardStateError(f"{wrong} ({place_of(error, self._reward)}).", remedy="Mend it there.") from error


def state_of(reward: Any) -> RewardState | None:
    """The state of a reward that has one. The weights of a network that scores are none: they stay as they are."""
    has = hasattr(reward, "state_dict") and hasattr(reward, "load_state_dict") and not isinstance(reward, nn.Module)
    return RewardState(reward) if has else None


def check_reward(reward: Any, field: str) -> None:
    """Raises RewardError: it is nothing that can be called with a rollout."""
    if not callable(reward):
        raise RewardError(f"a function of a rollout is needed, got {reprlib.repr(reward)}.", field=field)
    if inspect.isclass(reward):
        raise of_a_class(reward.__name__, field, at=_definition(reward))
    kinds = [one for one in type(reward).__mro__ if one.__module__.partition(".")[0] in ("transformers", "peft")]
    if any(one.__name__ in ("PreTrainedModel", "PeftModel", "Pipeline") for one in kinds):
        wrong = f"a {type(reward).__name__} takes token ids or texts, and a reward is called with a rollout."
        remedy = "Give RewardModel(model, tokenizer) of toolkit.rewards, or call it in a function of the rollout."
        raise RewardError(wrong, field=field, remedy=remedy)
    try:
        signature = _signature(reward)
    except ValueError:  # some functions of C do not say
        return
    check_signature(signature, field, at=_definition(reward))


def _signature(reward: Any) -> inspect.Signature:
    """Its own; that of what it wraps where it hands on whatever it is given, as `functools.cache` does."""
    with suppress(ValueError):
        own = inspect.signature(reward, follow_wrapped=False)
        if not {parameter.kind for parameter in own.parameters.values()} <= {_ANY, _ANY_NAMED}:
            return own
    return inspect.signature(reward)


def of_a_class(name: str, field: str, *, at: str) -> RewardError:
    """What is wrong with a class in the place of a reward, defined `at` a place if that is known."""
    wrong = f"{name} is a class, and an object is needed, or a function{f' ({at})' if at else ''}."
    return RewardError(wrong, field=field, remedy=f"Make one, by reward = {name}(), and give that.")


def check_signature(signature: inspect.Signature, field: str, *, at: str | None) -> None:
    """Raises RewardError: what has it, and is defined `at` a place if that is known, does not take a rollout."""
    place, refused, first = f" ({at})" if at else "", "", ""
    try:
        first = next(iter(signature.bind(None).arguments), "")
    except TypeError as error:
        refused = str(error)
    any_keyword = any(parameter.kind is _ANY_NAMED for parameter in signature.parameters.values())
    of_trl = first == "completions" and any_keyword
    if of_trl or (refused and "completions" in signature.parameters):
        wrong = f"it is called with a rollout, and takes completions, as a reward of TRL's GRPOTrainer does{place}."
        raise RewardError(wrong, field=field, remedy='Wrap it: docs/coming_from.md, "Reward functions of GRPO".')
    if refused:
        of_openrlhf = {"queries", "labels"} <= signature.parameters.keys()
        wrong = f"it is called with a rollout, and does not take one: {refused}{place}."
        remedy = 'Wrap it: docs/coming_from.md, "Reward functions of OpenRLHF".' if of_openrlhf else ""
        raise RewardError(wrong, field=field, remedy=remedy)


def score_with(reward: Reward, rollout: Rollout) -> Scores:
    """The reward's scores of a rollout, float32 (B,) on the CPU, or dense ones.

    No gradient is recorded in the callback, and no autocast region is around it: in which precision a model scores is
    its own affair. It is given a copy of the rollout, and what it changes in the process is put back.

    Raises:
        RewardError: the callback raised, with the place in its code, or returned what `check_scores` refuses.
    """
    if getattr(reward, "on_every_process", False):
        with processes.agreed():
            return _scores(reward, rollout)
    return processes.by_main(lambda: _scores_alone(reward, rollout))


def _scores_alone(reward: Reward, rollout: Rollout) -> Scores:
    """By the main process, also where a function calls a reward that would divide its work."""
    with processes.alone():
        return _scores(reward, rollout)


def _scores(reward: Reward, rollout: Rollout) -> Scores:
    inference = torch.is_inference_mode_enabled()
    try:
        with torch.no_grad(), process_kept():
            returned = reward(deepcopy(rollout))
            scores: Any = wait_for(returned, loop="async rewards") if inspect.isawaitable(returned) else returned
    except (RewardError, PeerError, KeyboardInterrupt):
        raise
    except ToolkitError as error:
        raise _as_the_reward_s(error) from error
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError) and not _own_frames(error):
            wrong = "a GPU's memory ran out while responses were scored, with one row at a time."
            remedy = "Load the model that scores in 4 bits (its quantization), or a smaller one, or shorten responses."
            raise RewardError(wrong, remedy=remedy) from error
        wrong = f"the reward raised {type(error).__name__}: {words_of(error)} ({place_of(error, reward)})."
        raise RewardError(wrong, remedy=f"Mend it there{_or_prompts(error, rollout)}.") from error
    if torch.is_inference_mode_enabled() != inference:  # which nothing can put back
        wrong = f"the reward has left torch's inference mode on, in which nothing is learnt ({_definition(reward)})."
        raise RewardError(wrong, remedy="Enter it by: with torch.inference_mode().")
    return check_scores(scores, rollout)


def _as_the_reward_s(error: ToolkitError) -> RewardError:
    """An error of another kind as one of the reward in which it was raised; with the place, where that is a user's."""
    one = error.problems[0]
    problems = error.problems if len(error.problems) > 1 else ()
    wrong = f"{error.args[0]}" if problems else one.wrong
    raised = RewardError(wrong, field=one.field, remedy=one.remedy, problems=problems)
    if own := _own_frames(error):
        raised.add_remedy(f"It was raised in {own[-1].filename}, line {own[-1].lineno}.")
    return raised


def _or_prompts(error: BaseException, rollout: Rollout) -> str:
    """What else may be wrong where a reward asks for a column that these prompts have not."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    frames = _own_frames(error)
    line = (frames[-1].line or "").replace("'", '"') if frames else ""
    if not isinstance(name, str) or name in rollout.columns or f'columns["{name}"]' not in line:
        return ""
    return f', or give prompts with a column "{name}": these have {", ".join(rollout.columns) or "none"}'


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Those of an error that are a user's."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not of_a_library(frame.filename)]


def place_of(error: BaseException, called: Any = None) -> str:
    """The file and line that an error comes from: the last of the user's own, above those of libraries; where it has
    none, as of a function that is not to be called so, where what was called is defined."""
    own = _own_frames(error)
    if not own and (place := _definition(called)):
        return place
    frame = (own or traceback.extract_tb(error.__traceback__))[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _definition(called: Any) -> str:
    code = _code_of(called)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code is not None else ""


def _without_partial(called: Any) -> Any:
    while isinstance(called, partial):
        called = called.func
    return called


def _code_of(called: Any) -> Any:
    """The code of a function, of what a partial one calls, or of an object's `__call__`; None where there is none."""
    called = _without_partial(called)
    if not callable(called):
        return None
    own = inspect.unwrap(called)
    return getattr(own, "__code__", None) or getattr(inspect.unwrap(type(own).__call__), "__code__", None)


def _file_of(part: Any) -> Path | None:
    """The user's own file that a reward is written in: that of its class, where its `__call__` is a library's."""
    code, module = _code_of(part), sys.modules.get(type(_without_partial(part)).__module__)
    names = (getattr(code, "co_filename", None), getattr(module, "__file__", None))
    own = (Path(name) for name in names if name and not of_a_library(name))
    return next((path for path in own if path.is_file()), None)


def _cell_of(part: Any) -> str:
    """The lines of a reward that is written in a notebook's cell, of an object those of all methods of its class; else
    nothing."""
    called = _without_partial(part)
    code, owner = _code_of(part), type(getattr(called, "__self__", called))
    if code is None or of_a_library(code.co_filename) or _file_of(part) is not None:
        return ""
    methods = [own.__code__ for one in owner.__mro__ for own in vars(one).values() if inspect.isfunction(own)]
    methods = [own for own in methods if not of_a_library(own.co_filename)]
    text = ""
    for one in dict.fromkeys([code, *methods]):
        with suppress(Exception):  # of code that is nowhere as text, as inspect has it
            text += inspect.getsource(one)
    return text


def code_digests(reward: Any) -> dict[str, str]:
    """SHA-256 by name of the files of a user's that a reward, or a part of it, is written in, or of its lines in a
    notebook's cell; and what a callback of ours gives as its `scoring_digests`: of the first numbers of a frozen
    model's weights, of rules."""
    own = getattr(reward, "parts", None)  # of a `WeightedSum`; one of a user's can be anything
    named = {"": reward, **(own if isinstance(own, dict) and all(map(callable, own.values())) else {})}
    files = sorted({path for path in map(_file_of, named.values()) if path is not None})
    shared = {name for name, number in Counter(path.name for path in files).items() if number > 1}
    texts = {
        str(path) if path.name in shared else path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    for name, part in named.items():
        if text := _cell_of(part):
            texts[f"{name} in a cell".lstrip()] = hashlib.sha256(text.encode()).hexdigest()
        if hasattr(type(part), "scoring_digests"):  # not of the object: what a user's has may be anything
            found = part.scoring_digests()
            texts |= {key if key not in texts else f"{key} of {name}": text for key, text in found.items()}
    return texts


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

    def serve() -> None:
        while not loop.is_closed():
            # sys.exit in a task ends run_forever; the task's future still has to hear of it.
            with suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=serve, name=name, daemon=True).start()
    return loop


def wait_for(awaitable: Awaitable[Any], *, loop: str) -> Any:
    """What an awaitable comes to in a loop of ours; called from within that one, as by an async reward that calls
    another, in a further one, since a loop cannot wait for itself."""

    async def result() -> Any:
        with torch.no_grad():  # holds for the thread that enters it
            return await awaitable

    if (here := threading.current_thread().name).startswith(loop):
        loop = f"{here}, called by one"
    future = asyncio.run_coroutine_threadsafe(result(), _loop(loop))
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C while waiting
        raise
