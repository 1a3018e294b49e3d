"""Prompts that are given in Python, in place of those that a task reads."""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from toolkit.data.task import Kind, Task


class GivenPrompts:
    """A task with other prompts: those to train on, the held-out ones, or both. All else is the task's own.

    Args:
        task: encodes them, and has what is not given.
        given: by their argument's name, `train_dataset` or `eval_dataset`, as `Task.prompts_of` takes them.

    Raises:
        DataError: of the argument's name: they are no prompts.
    """

    def __init__(self, task: Task, given: Mapping[str, Any]):
        self._task = task
        splits = {"train_dataset": ("train",), "eval_dataset": ("validation", "test")}
        encoded = {name: task.prompts_of(rows, field=name) for name, rows in given.items()}
        self._given = {split: rows for name, rows in encoded.items() for split in splits[name]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def dataset(self, kind: Kind, split: str) -> Dataset:
        return self.prompts(split) if kind == "prompts" else self._task.dataset(kind, split)

    def prompts(self, split: str) -> Dataset:
        return self._given[split] if split in self._given else self._task.prompts(split)

    def report(self, *splits: str) -> str | None:
        """One line on the rows of these splits, or of both; what could not be read of given ones was told then."""
        told = [
            f"{split}: {len(self._given[split])} prompts, given" if split in self._given else self._task.report(split)
            for split in splits or ("train", "validation")
        ]
        return " | ".join(filter(None, told)) or None

    left_out: dict[str, Any] = {}

    def left_out_rows(self) -> list[dict[str, str]]:
        return []

    def row_places(self, stage: str) -> list[dict[str, str]]:
        """None: rows that are given have no place in a file."""
        return []
