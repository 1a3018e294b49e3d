"""Prompts that are given in Python, in place of those that a task reads."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from toolkit.data.batches import data_digest
from toolkit.data.rollouts import Rollout
from toolkit.data.rows import Split, Splits
from toolkit.data.task import Kind, Task
from toolkit.errors import DataError

_SPLITS = {"train_dataset": ("train",), "eval_dataset": ("validation", "test")}


class GivenPrompts:
    """A task with other prompts: those to train on, the held-out ones, or both. All else is the task's own.

    Args:
        task: encodes them, and has what is not given.
        given: by their argument's name, `train_dataset` or `eval_dataset`, as `Task.prompts_of` takes them.

    Raises:
        DataError: of the argument's name: they are no prompts, or lack a column that the task's metrics read.
    """

    def __init__(self, task: Task, given: Mapping[str, Any]):
        self._task = task
        encoded = {name: task.prompts_of(rows, field=name) for name, rows in given.items()}
        if (held_out := encoded.get("eval_dataset")) is not None:
            _check_measured(task, held_out)
        self._given = {split: rows for name, rows in encoded.items() for split in _SPLITS[name]}
        self.digests = {name: data_digest(rows) for name, rows in encoded.items()}
        """SHA-256 of what was given, by its argument's name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # whoever copies this asks before it has a task
            raise AttributeError(name)
        return getattr(self._task, name)

    def dataset(self, kind: Kind, split: str) -> Dataset:
        return self.prompts(split) if kind == "prompts" else self._task.dataset(kind, split)

    def prompts(self, split: str) -> Dataset:
        return self._given[split] if split in self._given else self._task.prompts(split)

    def prompt_places(self, split: str) -> Sequence[str]:
        """The place in a source of each prompt that is the task's own; given ones have none."""
        return () if split in self._given else self._task.prompt_places(split)

    def report(self, *splits: str) -> str | None:
        """One line on the rows of these splits, or of both; what could not be read of given ones was told then."""
        told = [
            f"{split}: {len(self._given[split])} prompts, given" if split in self._given else self._task.report(split)
            for split in splits or ("train", "validation")
        ]
        return " | ".join(filter(None, told)) or None

    @property
    def _splits(self) -> Mapping[str, Split]:
        """The task's own that are read: rows that are given have no place in a file."""
        if {"train", "validation"} <= self._given.keys():
            return {}
        own = self._task._splits
        return Splits(**{split: partial(own.__getitem__, split) for split in own if split not in self._given})

    def _rows_of(self, stage: str, split: str) -> Split:
        return self._task._rows_of(stage, split)

    left_out: Any = Task.left_out
    left_out_rows: Any = Task.left_out_rows
    row_places: Any = Task.row_places


def _check_measured(task: Task, prompts: Dataset) -> None:
    nothing: list[Any] = [""] * len(prompts)
    ids: list[list[int]] = [[] for _ in nothing]
    columns = {name: prompts[name][:] for name in prompts.column_names}
    try:
        task.metrics(Rollout(nothing, nothing, ids, ids, [False] * len(nothing), columns))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        lacks = isinstance(error, KeyError) and error.args[0] not in columns
        what = f"by a column {error}, which these prompts do not have" if lacks else "by columns of another form"
        remedy = "Give them as the task has them, or take a recipe whose data are of the task prompts."
        wrong = f'the task "{task.task}" measures responses {what}.'
        raise DataError(wrong, field="eval_dataset", remedy=remedy) from error
