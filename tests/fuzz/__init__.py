"""Mutated recipes, data files, run folders and rewards through the front door: how does each end?

    python -m tests.fuzz --recipes 3000 --files 1500 --folders 300 --rewards 200 --seed 0
    python -m tests.fuzz --only folders-0-17

| ends as | when |
|---|---|
| fine | done, as an oracle that is not the code under test says |
| clear | refused with exit code 1, in one message that names the place |
| vague | refused in a message that does not name it, or in the words of Python's own errors |
| traceback | an exception that is no `ToolkitError` |
| wrong | done where it has to be refused, the other way round, with another result, or with a file of the user's gone |
| hang | longer than the time limit |

Each case is drawn from its own seed, which is its name. None of the last four may occur.
"""

import contextlib
import os
import random
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read as soon as a library of its is imported

from tests.fuzz.cases import Place, judged
from tests.fuzz.files import file_case
from tests.fuzz.folders import folder_case
from tests.fuzz.recipes import recipe_case
from tests.fuzz.rewards import reward_case

BAD = ("vague", "traceback", "wrong", "hang")
KINDS = {"recipes": recipe_case, "files": file_case, "folders": folder_case, "rewards": reward_case}


def run(place: Place, kind: str, numbers: range, seed: int, seconds: float = 30.0) -> Iterator[tuple[str, str, str]]:
    """How each case of a kind ends: its name, that, and what it was and why."""
    os.environ["no_proxy"] = "127.0.0.1"
    for number in numbers:
        name = f"{kind}-{seed}-{number}"
        with contextlib.chdir(place.folder):
            case = KINDS[kind](place, random.Random(name))
            ends, why = judged(case, seconds)
        yield name, ends, f"{case.what}\n    {why}"
