"""A plain Python function as a reward callback."""

import importlib
import sys
from pathlib import Path

from toolkit.errors import RewardError
from toolkit.rewards.base import Reward


def load_function(name: str) -> Reward:
    """Find a function by "module:function"; modules of the current folder are found as by `python -m`.

    Raises:
        RewardError: the name has another form, or there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise RewardError(f'scorer.function: "{name}" is not of the form module:function.')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise RewardError(
            f'scorer.function: no module "{error.name}", looked for from {here} and in the environment.'
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f'scorer.function: {module_name} has no function "{function_name}".')
    return function
