from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
import torch

from toolkit.errors import ConfigError, Problem
from toolkit.settings import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, UP_TO_1, check, declared, fits, setting, type_name


class Colour(Enum):
    RED = "red"


@dataclass
class Parent:
    learning_rate: float = 0.1  # whose range is known by its name
    beside: int = 0


@dataclass
class Mine(Parent):
    beta: float = setting(0.0, "A weight.", NOT_NEGATIVE)
    steps: int | None = setting(None, "How many.", AT_LEAST_1)
    kind: Literal["a", "b"] = setting("a", "Which.")
    gamma: float = setting(1.0, "Of another range than that known by its name.", POSITIVE)

    def __post_init__(self):
        check(self, self.conflicts)

    def conflicts(self):
        if self.kind == "b" and self.steps is None:
            yield Problem("b needs steps.", "kind")


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"beta": -1}, {"beta": "must be 0 or more, got -1."}),
        ({"beta": float("nan")}, {"beta": "a finite number below 2^63 is needed, got nan."}),
        ({"beta": None}, {"beta": "a number is needed, got None."}),
        ({"beta": True}, {"beta": "a number is needed, got True."}),
        ({"steps": 0}, {"steps": "must be at least 1 or null, got 0."}),
        ({"steps": 1.5}, {"steps": "a whole number or null is needed, got 1.5."}),
        ({"kind": "c"}, {"kind": "'a' or 'b' is needed, got 'c'."}),
        ({"learning_rate": -0.1}, {"learning_rate": "must be 0 or more, got -0.1."}),
        ({"gamma": 0.0}, {"gamma": "must be positive, got 0.0."}),
        ({"kind": "b"}, {"kind": "b needs steps."}),
        (
            {"kind": "c", "beta": -1, "steps": 0},  # in the order of the fields
            {
                "beta": "must be 0 or more, got -1.",
                "steps": "must be at least 1 or null, got 0.",
                "kind": "'a' or 'b' is needed, got 'c'.",
            },
        ),
    ],
)
def test_a_declaration_is_checked(changes, problems):
    with pytest.raises(ConfigError) as error:
        Mine(**changes)
    assert [(p.field, p.wrong) for p in error.value.problems] == list(problems.items())


def test_what_is_in_range_is_taken():
    made = Mine(beta=1, steps=1, kind="b", gamma=2.0, beside="of no setting that is known here")
    assert (made.beta, made.steps) == (1, 1) and Mine().kind == "a"
    assert declared(Mine).keys() == {"beta", "steps", "kind", "gamma"}
    assert declared(Mine)["kind"].default == "a" and declared(Parent) == {}


@pytest.mark.parametrize(
    ("number", "held"),
    [
        (-1, (False, False, False, False)),
        (0, (False, True, False, True)),
        (1, (True,) * 4),
        (2, (True, True, True, False)),
    ],
)
def test_ranges(number, held):
    assert tuple(r.holds(number) for r in (POSITIVE, NOT_NEGATIVE, AT_LEAST_1, UP_TO_1)) == held


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (float, [1, 0.5, float("inf")], [True, "1", None, [1.0]]),
        (int, [1, -1, 2**70], [True, 1.5, "1", None]),
        (bool, [True, False], [1, 0, "yes", None]),
        (str | None, ["x", "", None], [1, True, []]),
        (Literal["a", 2], ["a", 2], ["b", None]),
        (Colour, ["red"], ["RED", 1, None]),
        (Colour | str | None, ["red", "other", None], [False, 1]),
        (torch.dtype | str, ["bfloat16"], [16, None]),
        (list[str], [[], ["a"]], [["a", 1], "a"]),
        (tuple[int, int], [[1, 2]], [[1], 1]),
        (dict[str, Any] | str, [{"a": [1]}, "{}"], [[], 1]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "b"}]),
        (Parent, [{"beside": 1}], ["a name", 1]),
        (Any, [1, None, {}], []),
    ],
)
def test_types_as_yaml_has_them(hint, right, wrong):
    assert [value for value in right if not fits(value, hint)] == []
    assert [value for value in wrong if fits(value, hint)] == []


def test_types_by_name():
    assert type_name(int | None) == "a whole number or null"
    assert type_name(Literal["a", "b"]) == "'a' or 'b'"
    assert type_name(list[str] | dict[str, bool] | Colour) == "a list or a section with keys or Colour"
    assert [type_name(t) for t in (bool, float, str)] == ["true or false", "a number", "text"]
