"""A few cases of the fuzz; `python -m tests.fuzz` does thousands. And that it tells the ways to end apart."""

import sys
import time

import pytest

from tests import fuzz
from tests.fuzz import files
from tests.fuzz.cases import Case, judged, make_place, refusal
from toolkit.data import TASKS
from toolkit.data.source_task import SourceTask
from toolkit.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no timer signals and no FIFOs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize(("kind", "number"), [("recipes", 4), ("files", 80), ("folders", 4), ("rewards", 40)])
def test_every_case_is_fine_or_refused_in_a_clear_sentence(kind, number, place, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    ended = list(fuzz.run(place, kind, range(number), seed=7))
    assert [case for case in ended if case[1] in fuzz.BAD] == []
    assert len(ended) == number and {"clear", "fine"} & {ends for _, ends, _ in ended}


def test_every_task_that_reads_files_has_rows_here():
    assert files._SOURCES.keys() == {name for name, task in TASKS.items() if issubclass(task, SourceTask)}


def raised(error):
    raise error


@pytest.mark.parametrize(
    ("ends", "act", "more"),
    [
        ("fine", lambda: (0, "done"), {}),
        ("clear", lambda: (1, 'DataError: x.jsonl, line 2: no column "a".'), {}),
        ("clear", lambda: refusal(lambda: raised(DataError("x.jsonl is empty."))), {"must": "refused"}),
        ("vague", lambda: (1, "DataError: it is wrong."), {}),
        ("vague", lambda: (1, "DataError: x.jsonl: 'NoneType' object is not iterable."), {}),
        ("vague", lambda: (1, "DataError: x.jsonl: \x1b[31m."), {}),
        ("vague", lambda: (1, "x.jsonl"), {}),
        ("traceback", lambda: refusal(lambda: raised(KeyError("x.jsonl"))), {}),
        ("wrong", lambda: (0, ""), {"must": "refused"}),
        ("wrong", lambda: (1, "DataError: x.jsonl is empty."), {"must": "fine"}),
        ("wrong", lambda: (2, "x.jsonl"), {}),
        ("wrong", lambda: (0, ""), {"check": lambda: "a file is gone"}),
        ("hang", lambda: time.sleep(9), {}),
        ("hang", lambda: refusal(lambda: sum(1 for _ in iter(int, 1))), {}),
    ],
)
def test_the_ways_to_end_are_told_apart(ends, act, more):
    assert judged(Case("", act, ("x.jsonl",), **more), seconds=0.3)[0] == ends


def test_a_case_is_drawn_from_its_name_alone(place):
    ((_, _, first), (_, _, other)) = fuzz.run(place, "files", range(4, 6), seed=3)
    ((_, _, again),) = fuzz.run(place, "files", range(4, 5), seed=3)
    assert first.partition("\n")[0] == again.partition("\n")[0] != other.partition("\n")[0]
