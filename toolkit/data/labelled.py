"""Responses with a class each: what a reward stage of several outputs learns from."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import pyarrow as pa
from datasets import Dataset

from toolkit.data.prompts import Answered
from toolkit.data.rows import Unusable, as_number, each_of, present
from toolkit.data.task import Kind
from toolkit.errors import DataError


@dataclass(frozen=True)
class Labelled(Answered):
    """Responses with a class each, for a reward stage with as many outputs as there are classes.

    A row is one of demonstrations (`messages`, `prompt` with `completion`, or `text`), with its class in the column
    `label`: a whole number from 0, or true and false for 1 and 0.

    Args:
        on_long: a row that is cut may be of another class, so that cut is refused.
        max_length: tokens of prompt and response together; longer rows are left out.
    """

    _: KW_ONLY
    max_length: int = 512

    task: ClassVar[str] = "labelled"
    unit: ClassVar[str] = "labelled responses"
    too_long: ClassVar[str] = "what is over max_length is left out"
    _packed_as: ClassVar[Any] = {"input_ids": pa.list_(pa.int32()), "labels": pa.int64(), "asked": pa.int32()}

    def _encode(self, place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        if "label" not in row:
            raise DataError(f'{place}: a class is in the column "label"; {present(row)}', remedy="Rename the column.")
        label = as_number(row["label"])
        if isinstance(label, str):  # as CSV has them
            label = {"true": 1, "false": 0}.get(label.strip().lower(), label)
        if label is None:
            raise Unusable("no label")
        if not (isinstance(label, (int, float)) and 0 <= label < 2**31 and label == int(label)):
            raise Unusable("a label that is no whole number from 0")
        answered = self._answered(place, row)
        ids = answered["input_ids"]
        if len(ids) > self.max_length:
            raise Unusable(f"a row over {self.max_length} tokens", limit="max_length")
        return {"input_ids": ids, "labels": int(label), "asked": answered["labels"].count(-100)}

    def _prompts_of(self, rows: Dataset) -> list[tuple[int, ...]]:
        return [tuple(row["input_ids"][: row["asked"] or None]) for row in each_of(rows)]

    def _lacks(self, kind: Kind) -> DataError:
        error = super()._lacks(kind)
        if kind == "pairs":  # what a reward of one output learns from
            error.add_remedy("Or set reward_head.num_labels to the number of classes.")
        return error

    def labelled(self, split: str) -> Dataset:
        return self._splits[split].rows.select_columns(["input_ids", "labels"])
