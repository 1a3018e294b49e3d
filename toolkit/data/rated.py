"""Responses with rewards, for learning from what was said before: prompt, response, and a reward at some tokens."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset

from toolkit.data.encoder import PROMPT_COLUMNS, within_limit
from toolkit.data.files import listed
from toolkit.data.messages import refuse_parts, refuse_tools
from toolkit.data.rows import Unusable, as_number, each_of, present
from toolkit.data.source_task import SourceTask
from toolkit.errors import DataError

_LARGEST = float(np.finfo(np.float32).max)  # what they are computed in
_TOKENS = pa.list_(pa.int64())
_COLUMNS = {"prompt_ids": _TOKENS, "response_ids": _TOKENS, "rewards": pa.list_(pa.float64()), "ended": pa.bool_()}


@dataclass(frozen=True)
class RatedResponses(SourceTask):
    """Prompts with a response each and the rewards that it got, for the q stage.

    A row has a prompt (`prompt_ids`, `messages`, `prompt` or `query`), a response (`response_ids`, taken as they are,
    or `response`, text to which the end of sequence is added) and `rewards`: a number, given at the last token, or a
    list with an entry for each of `response_ids`, null where no reward is given. `ended` is false where a length limit
    cut the response; without it a response has ended if its last token is the end of sequence.

    Args:
        tokenizer: of the base.
        chat: a prompt of text becomes a message of the user in the tokenizer's chat template. False takes it as it is.
        on_long: whether a row with a prompt over its limit is left out, or the prompt cut: its last tokens stay. One
            with a response over its limit is left out in any case.
        max_prompt_length: tokens of a prompt; longer ones are left out.
        max_response_length: tokens of a response, its end included; likewise.
    """

    _: KW_ONLY
    max_prompt_length: int = 512
    max_response_length: int = 512

    task: ClassVar[str] = "rated"
    unit: ClassVar[str] = "rated responses"
    may_be_plain: ClassVar[bool] = True
    _packed_as: ClassVar[Any] = _COLUMNS

    def _encode(self, place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        columns = {**PROMPT_COLUMNS, "input_ids": "prompt_ids"}
        remedy = "Rename the column of the prompt."
        _, prompt = self._encoder.row(place, row, first, columns, self.max_prompt_length, remedy=remedy)
        if "prompt" in prompt:  # and no ids, which are all of it
            refuse_tools(row)
            refuse_parts(row, prompt.get("messages", prompt["prompt"]), self.system)
        ids, ended = self._response(place, row, prompt)
        within_limit(ids, "response", self.max_response_length)
        rewards = _rewards(place, row, len(ids))
        return {"prompt_ids": prompt["input_ids"], "response_ids": ids, "rewards": rewards, "ended": ended}

    def _response(self, place: str, row: dict[str, Any], prompt: dict[str, Any]) -> tuple[list[int], bool]:
        ids, ended, end = row.get("response_ids"), row.get("ended"), self.tokenizer.eos_token_id
        if isinstance(ended, str):  # of CSV
            ended = {"true": True, "false": False, "": None}.get(ended.strip().lower(), ended)
        if ended is not None and not isinstance(ended, bool):
            raise Unusable("ended that is neither true nor false")
        if ids is not None:
            ids = self._encoder.checked_ids(ids, "response_ids")
        elif isinstance(row.get("response"), str):
            text = row["response"] if row["response"].strip() else ""
            if "messages" in prompt:
                self._encoder.check_answers()
            ids = self._encoder.response(text, prompt, ended=ended is not False) if text else []
        elif row.get("response") is None and not row.keys().isdisjoint(("response", "response_ids")):
            ids = []
        else:
            wrong = f'{place}: a response is in the column "response_ids" or, as text, "response"; {present(row)}'
            raise DataError(wrong)
        if not ids:
            raise Unusable("an empty response")
        return ids, ids[-1] == end if ended is None else ended

    def rated(self, split: str) -> Dataset:
        """All rows are of the split "train"."""
        return self._splits["train"].rows


def _rewards(place: str, row: dict[str, Any], length: int) -> list[float | None]:
    if "rewards" not in row:
        raise DataError(f'{place}: no column "rewards"; {present(row)}')
    value = as_number(row["rewards"])
    if value is None:
        raise Unusable("no reward")
    if not isinstance(value, list):
        value = [None] * (length - 1) + [value]
    elif row.get("response_ids") is None:
        raise Unusable("rewards per token for a response given as text, not as tokens")
    if len(value) != length:
        raise Unusable("rewards that are not as many as response_ids")
    if not {int, float, type(None)}.issuperset(map(type, value)):
        raise Unusable("rewards that are no numbers")
    if not all(abs(x) <= _LARGEST for x in value if x is not None):
        raise Unusable("rewards that are not finite")
    return [None if x is None else float(x) for x in value]


def check_rated(dataset: Dataset) -> None:
    """Raises DataError unless a data set is as `RatedResponses.rated` gives it; names the first row that is not."""
    if not _COLUMNS.keys() <= set(dataset.column_names):
        there = listed(dataset.column_names)
        raise DataError(f"the q stage needs the columns {', '.join(_COLUMNS)}; present: {there}.")
    for number, row in enumerate(each_of(dataset.select_columns(list(_COLUMNS)))):
        place, tokens = f"row {number} of the rated responses", len(row["response_ids"])
        if not row["prompt_ids"] or not tokens:
            raise DataError(f"{place}: prompt and response need a token at least.")
        if len(row["rewards"]) != tokens:
            wrong = f"{place}: {len(row['rewards'])} rewards for {tokens} tokens; one per token is needed"
            raise DataError(f"{wrong}, None where none is given.")
        if odd := [x for x in row["rewards"] if x is not None and not abs(x) <= _LARGEST]:
            raise DataError(f"{place}: a reward is {odd[0]}; finite numbers of 32 bits are needed, or None.")
