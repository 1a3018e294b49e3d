"""A case, how it ends, and what all mutations are made of."""

import contextlib
import copy
import datetime
import io
import json
import math
import random
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.testing import CliRunner

from tests.tiny_runs import REPOSITORY, byte_tokenizer, chat_recipe, save_llama, stages_here
from toolkit.cli import app
from toolkit.errors import ToolkitError
from toolkit.runs import stages

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 0.5, -2.5, 2**31, 2**63, 10**30, 10**400, 1e-300, 1e300, math.nan, math.inf, "",
    " ", "no", "bogus", "0", "1e-3", "x" * 5000, "\x1b[31mred", "nul\0", "a/../../b", "~nobody/x", "/dev/null",
    "${seed}", "${oc.env:HOME}", "${", "{% for i in range(9) %}", "日本語", "\u202eabc", "\u2028", "(a+)+$", [], [None],
    [1, 2], ["a", ["b"]], {}, {"a": 1}, {"a": {"b": [{}]}}, [{"role": "user", "content": "a"}],
    datetime.date(2026, 11, 22),
]  # fmt: skip
# Words of Python and of libraries, which tell a user nothing; but where they are of the user's own code.
_INTERNAL = re.compile(
    r"NoneType|object has no attribute|unhashable|positional argument|must be real number|not iterable|KeyError|"
    r"unsupported operand|non-string|indices must be|to unpack|AttributeError|pydantic"
)
_OF_THE_USER = re.compile(
    r"the reward raised \w+|returned .*, which is not made of numbers.*|Validation error for field.*"
)
_KEY_OF_A_RECIPE = re.compile(r"^(  |\w+: )[\w.]+( — |: )", re.MULTILINE)
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]")
_LONGEST = 6000  # characters of a message


class Case(NamedTuple):
    """What is done, in words; the names of which a refusal has to say one; "fine" or "refused" where only that is
    right; what is wrong with what was done, "" for nothing."""

    what: str
    act: Callable[[], tuple[int, str]]
    names: tuple[str, ...] = ("",)
    must: str = ""
    check: Callable[[], str] = lambda: ""


class Place(NamedTuple):
    """A folder with a tiny base, data and runs that have finished; and the shipped recipes on that base."""

    folder: Path
    recipes: dict[str, dict[str, Any]]


def make_place(folder: Path) -> Place:
    save_llama(folder / "model", byte_tokenizer())
    shutil.copytree(REPOSITORY / "data", folder / "data")
    shipped = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    recipes = {path.stem: _on_tiny_base(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in shipped}
    rated = [{"prompt": f"{n}?", "response": "yes", "rewards": n % 2} for n in range(8)]
    (folder / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    small = ("data.train=data/preferences_example.jsonl", "data.validation=null", "data.validation_size=2")
    saving = {"save_strategy": "steps", "save_steps": 1, "response_length": 3, "eval_strategy": "no"}
    by_q = {
        "reward": None, "ppo": None, "adapters": {"q": {"r": 4, "target_modules": "all-linear"}},
        "q": {"max_steps": 1, "per_device_train_batch_size": 2, "bound": "sigmoid", **saving},
        "q_data": {"task": "rated", "train": "rated.jsonl"},
        "scorer": {"kind": "function", "function": "toolkit.rewards.rules:plain_words"},
    }  # fmt: skip
    with contextlib.chdir(folder), stages_here(), contextlib.redirect_stdout(io.StringIO()):
        ppo = [f"ppo.{key}={value}" for key, value in saving.items() if key != "eval_strategy"]
        stages.run(chat_recipe(folder, "model", *small, *ppo), "ppo")
        stages.run(chat_recipe(folder, "model", *small, name="by_q", **by_q), "q")
    return Place(folder, recipes)


def _on_tiny_base(values: dict[str, Any]) -> dict[str, Any]:
    for section in ("base", "reward_model"):
        if "model" in values.get(section, {}):
            values[section]["model"] = "model"
    for data in (values[section] for section in ("data", "reward_data") if section in values):
        if "Anthropic" in data.get("train", ""):
            for key in ("subset", "parts", "max_train_rows"):
                data.pop(key, None)
            data |= {"train": "data/preferences_example.jsonl", "validation_size": 4}
            if "ppo" in values:  # 20 rows fill a batch
                values["ppo"] |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
                values["ppo"] |= {"rollouts_per_update": 1, "num_mini_batches": 2}
    for config in values["adapters"].values():
        config["target_modules"] = "all-linear"
    return values


# ---------------------------------------------------------------------- how a case ends


def command(*words: str) -> tuple[int, str]:
    """A command in this process: its exit code, and what it says."""
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stderr if done.exit_code else done.stdout


def refusal(act: Callable[[], Any]) -> tuple[int, str]:
    """The same of a function."""
    try:
        act()
    except ToolkitError as error:
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def judged(case: Case, seconds: float) -> tuple[str, str]:
    """How a case ends, and why."""
    expired: list[bool] = []

    def stop(*_: Any) -> None:
        expired.append(True)
        raise KeyboardInterrupt

    before, code, said, error = signal.signal(signal.SIGALRM, stop), 0, "", None
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with warnings.catch_warnings(action="ignore"):
            code, said = case.act()
    except BaseException as raised:
        error = raised
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wrong = case.check()
    if expired:
        return "hang", f"{said[-300:]} {_frames(error)}"
    if error is not None:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]} at {_frames(error)}"
    if wrong or code not in (0, 1) or case.must == ("refused" if code == 0 else "fine"):
        return "wrong", f"{wrong or f'exit code {code}'} {said[-600:]}"
    if code == 0:
        return "fine", ""
    message = said[max((found.start() for found in re.finditer(r"^\w+Error: ", said, re.MULTILINE)), default=0) :]
    return ("clear" if _is_clear(message, case.names) else "vague"), message[:700]


def _is_clear(message: str, names: tuple[str, ...]) -> bool:
    """Whether it is one message of ours that says a name, or the key of a recipe where the change took effect."""
    ours = re.match(r"\w+Error: .", message) and len(message) < _LONGEST and "Traceback" not in message
    odd = _UNPRINTABLE.search(message) or _INTERNAL.search(_OF_THE_USER.sub("", message))
    return bool(ours and not odd and (any(name in message for name in names) or _KEY_OF_A_RECIPE.search(message)))


def _frames(error: BaseException | None) -> str:
    trace, frames = error and error.__traceback__, []
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(frames[-5:])


# ---------------------------------------------------------------------- mutations


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """Bytes that are cut, changed, doubled or gone."""
    at, end = sorted(draw.randrange(len(raw) + 1) for _ in range(2))
    odd = draw.choice(
        [b"\0", b"\xff\xfe", b"\n", b"{", b'"', b"\xed\xa0\x80", b",", b"}" * 9, b"\xef\xbb\xbf", draw.randbytes(9)]
    )
    return draw.choice([
        raw[:at], raw[:at] + raw[end:], raw[:at] + odd + raw[at:], raw[:at] + odd + raw[at + len(odd) :], odd + raw,
        b"", raw + raw, raw.decode("utf-8", "replace").encode("utf-16"), b"[" * 5000,
    ])  # fmt: skip


def items_of(value: Any) -> Iterator[tuple[Any, Any, str]]:
    """Each item within nested values: what holds it, its key there, and its dotted name."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key, str(key)
        yield from ((owner, inner, f"{key}.{name}") for owner, inner, name in items_of(item))


def mutated(draw: random.Random, value: Any) -> tuple[Any, str]:
    """Nested values with one item changed, gone, or of another key; and in words what was done."""
    value = copy.deepcopy(value)
    there = list(items_of(value))
    if not there or draw.random() < 0.03:
        odd = draw.choice(ODD)
        return odd, f"all is {odd!r}"
    owner, key, name = draw.choice(there)
    way = draw.choice(["odd", "odd", "odd", "gone", "renamed", "another's"])
    if way == "gone":
        del owner[key]
    elif way == "renamed" and isinstance(owner, dict):
        new = draw.choice([f"{key}s", str(key)[:-1], str(key).upper(), "bogus"])
        owner[new] = owner.pop(key)
        return value, f"{name} → {new}"
    else:
        other = draw.choice(there)
        owner[key] = copy.deepcopy(other[0][other[1]]) if way == "another's" else draw.choice(ODD)
        way = repr(owner[key])[:80]
    return value, f"{name}: {way}"
