"""Responses with rewards, for learning from what was said before: prompt, response, and a reward at some tokens.

Rows that cannot be used are left out, counted by reason, and reported with their place: never dropped in silence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.collators import pad_rows
from toolkit.data.left_out import LeftOut, ReportsLeftOut, Unusable
from toolkit.data.prompt_encoder import PromptEncoder
from toolkit.data.sources import read_rows
from toolkit.errors import DataError

RATED_COLUMNS = ("prompt_ids", "response_ids", "rewards", "ended")
# Where a row's prompt is: token ids, messages or text. The first of these that the first row has.
_PROMPT_COLUMNS = {"input_ids": "prompt_ids", "messages": "messages", "prompt": "prompt", "query": "query"}


@dataclass(frozen=True)
class RatedResponses(ReportsLeftOut):
    """Prompts with a response each and the rewards that it got, for the q stage.

    A row has a prompt (`prompt_ids`, `messages`, `prompt` or `query`), a response (`response_ids`, taken as they are,
    or `response`, text to which the end of sequence is added) and `rewards`: a number, given at the last token, or a
    list with an entry for each of `response_ids`, null where no reward is given. `ended` is false where a length limit
    cut the response; without it a response has ended if its last token is the end of sequence.

    Args:
        tokenizer: of the base.
        train: file, folder or hub id, as `toolkit.data.sources` reads them.
        chat: a prompt of text becomes a message of the user in the tokenizer's chat template. False takes it as it is.
        system: a system message before each prompt that has none, as in the task `prompts`.
        max_prompt_length: tokens of a prompt; longer ones are left out.
        max_response_length: tokens of a response, its end included; likewise.
        max_train_rows: at most so many rows, the first that fit. None takes all.
    """

    tokenizer: PreTrainedTokenizerBase
    train: str
    chat: bool = True
    system: str | None = None
    max_prompt_length: int = 512
    max_response_length: int = 512
    max_train_rows: int | None = None
    _left_out: LeftOut = field(default_factory=LeftOut, init=False, repr=False, compare=False)
    _unit: ClassVar[str] = "rated responses"

    def __post_init__(self) -> None:
        for name in ("max_prompt_length", "max_response_length", "max_train_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"q_data.{name}: a number from 1 is needed, got {value}.")

    @cached_property
    def _splits(self) -> dict[str, Dataset]:
        encoder = PromptEncoder(self.tokenizer, dict(_PROMPT_COLUMNS), self.chat, self.system, self.max_prompt_length)

        def encode(place: str, row: dict[str, Any]) -> dict[str, Any]:
            prompt_ids = encoder(place, row)["input_ids"]
            response_ids, ended = self._response(place, row)
            if len(response_ids) > self.max_response_length:
                raise Unusable(f"a response over {self.max_response_length} tokens")
            rewards = _rewards(place, row, len(response_ids))
            return dict(zip(RATED_COLUMNS, (prompt_ids, response_ids, rewards, ended), strict=True))

        rows = read_rows(self.train, setting="q_data.train")
        kept = self._left_out.usable("train", rows, encode, source=self.train, limit=self.max_train_rows)
        return {"train": Dataset.from_list(kept)}

    def _response(self, place: str, row: dict[str, Any]) -> tuple[list[int], bool]:
        ids, ended = row.get("response_ids"), row.get("ended")
        if ended is not None and not isinstance(ended, bool):
            raise Unusable("ended that is neither true nor false")
        if ids is None and not isinstance(row.get("response"), str):
            raise DataError(
                f'{place}: a response is in the column "response_ids" or, as text, "response"; present: '
                f"{', '.join(row) or 'none'}."
            )
        if ids is None:
            ids = self.tokenizer.encode(row["response"], add_special_tokens=False)
            ids = [*ids, self.tokenizer.eos_token_id] if ended in (None, True) else ids
        # Not isinstance: True is an int.
        elif not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise Unusable("response_ids that are no list of whole numbers")
        if not ids:
            raise Unusable("an empty response")
        if not self._vocabulary.issuperset(ids):
            raise Unusable("ids that are not in the vocabulary")
        return ids, ids[-1] == self.tokenizer.eos_token_id if ended is None else ended

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    def rated(self, split: str) -> Dataset:
        """Columns `prompt_ids`, `response_ids`, `rewards` (a number or None a token) and `ended`; "train" is all."""
        return self._splits["train"]


def _rewards(place: str, row: dict[str, Any], length: int) -> list[float | None]:
    """One entry a token of the response."""
    if "rewards" not in row:
        raise DataError(f'{place}: no column "rewards"; present: {", ".join(row) or "none"}.')
    value = row["rewards"]
    if value is None:
        raise Unusable("no reward")
    if not isinstance(value, list):
        value = [None] * (length - 1) + [value]
    elif "response_ids" not in row:
        raise Unusable("rewards a token for a response of text, whose tokens are not given")
    if len(value) != length:
        raise Unusable("rewards that are not as many as response_ids")
    if any(x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))) for x in value):
        raise Unusable("rewards that are no numbers")
    if not all(x is None or math.isfinite(x) for x in value):
        raise Unusable("rewards that are not finite")
    return [None if x is None else float(x) for x in value]


def check_rated(dataset: Dataset) -> None:
    """The columns of `RatedResponses.rated`, and one entry of rewards a token.

    Raises:
        DataError: a column is missing, or a row's rewards do not fit its response; the first such row is named.
    """
    missing = [name for name in RATED_COLUMNS if name not in dataset.column_names]
    if missing:
        raise DataError(
            f"the q stage needs the columns {', '.join(RATED_COLUMNS)}; present: {', '.join(dataset.column_names)}."
        )
    for number, row in enumerate(dataset.select_columns(list(RATED_COLUMNS))):
        if not row["prompt_ids"] or not row["response_ids"]:
            raise DataError(f"row {number} of the rated responses: prompt and response need a token at least.")
        if len(row["rewards"]) != len(row["response_ids"]):
            raise DataError(
                f"row {number} of the rated responses: {len(row['rewards'])} rewards for "
                f"{len(row['response_ids'])} tokens; one a token is needed, None where none is given."
            )


@dataclass(frozen=True)
class RatedCollator:
    """Right-pads rated responses.

    Returns `input_ids` (B, L), prompt and response without a gap; `prompt_lengths`, `response_lengths`, `ended` (B,);
    `rewards`, `reward_mask` (True where a reward was given) and `labels` (B, T), the response's tokens and −100 after
    them, by which `Trainer` counts what a batch's mean is over.
    """

    pad_token_id: int
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [[*row["prompt_ids"], *row["response_ids"]] for row in rows]
        input_ids, _ = pad_rows(ids, pad_token_id=self.pad_token_id, side="right", multiple=self.multiple)
        lengths = [len(row["response_ids"]) for row in rows]
        longest = max(lengths)
        labels = [[*row["response_ids"]] + [-100] * (longest - len(row["response_ids"])) for row in rows]
        rewards = [[*row["rewards"]] + [None] * (longest - len(row["rewards"])) for row in rows]
        return {
            "input_ids": input_ids,
            "prompt_lengths": torch.tensor([len(row["prompt_ids"]) for row in rows]),
            "response_lengths": torch.tensor(lengths),
            "ended": torch.tensor([bool(row["ended"]) for row in rows]),
            "rewards": torch.tensor([[0.0 if x is None else x for x in row] for row in rewards]),
            "reward_mask": torch.tensor([[x is not None for x in row] for row in rewards]),
            "labels": torch.tensor(labels),
        }
