"""What a run may ask of any task."""

from typing import get_args

import pytest

from tests.tiny_runs import byte_tokenizer
from toolkit.data import TASKS, Doubling, Kind, Task
from toolkit.errors import DataError

KINDS = {
    "doubling": {"demonstrations", "labelled", "prompts"},
    "instructions": {"demonstrations", "prompts"},
    "preferences": {"pairs", "demonstrations", "prompts"},
    "demonstrations": {"demonstrations"},
    "labelled": {"labelled"},
    "prompts": {"prompts"},
    "rated": {"rated"},
}


def has(owner: type[Task], kind: str) -> bool:
    return getattr(owner, kind) is not getattr(Task, kind)


def test_every_task_declares_its_name_and_kinds():
    assert {name: {kind for kind in get_args(Kind) if has(owner, kind)} for name, owner in TASKS.items()} == KINDS
    assert all(owner.task == name and issubclass(owner, Task) for name, owner in TASKS.items())


@pytest.mark.parametrize("name", TASKS)
def test_a_kind_that_a_task_does_not_have_is_one_error(name):
    arguments = {"doubling": (), "instructions": (byte_tokenizer(),)}.get(name, (byte_tokenizer(), "x.jsonl"))
    task = TASKS[name](*arguments)
    for kind in set(get_args(Kind)) - KINDS[name]:
        with pytest.raises(DataError, match=f'^task: "{name}" has no {kind} data, which the .* stage needs.') as error:
            task.dataset(kind, "train")
        assert error.value.problems[0].field == "task"


def test_a_task_that_reads_nothing_reports_nothing():
    task = Doubling()
    assert task.dataset("prompts", "test")[:3] == task.prompts("test")[:3]
    assert task.report() is None and task.left_out == {} and task.left_out_rows() == task.row_places("ppo") == []
    assert not task.chats and task.columns is None
