"""Demonstrations for sft: conversations, prompts with completions, or text.

Rows that cannot be used are left out, counted by reason, and reported with their place: never dropped in silence.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.left_out import LeftOut, ReportsLeftOut, Unusable
from toolkit.data.pairs import checked_answered, read_answer, read_prompt
from toolkit.data.sources import check_hub_settings, has_splits, read_rows
from toolkit.data.turns import TurnEncoder
from toolkit.errors import DataError


@dataclass(frozen=True)
class Demonstrations(ReportsLeftOut):
    """Answers to imitate, for the sft stage.

    A row is `messages` that end with the assistant's, or `prompt` with `completion`, or `text`. Of the first two the
    last answer alone is part of the loss, of a text all.

    Args:
        tokenizer: with a chat template, unless `chat` is off.
        train: file, folder or hub id, as `toolkit.data.sources` reads them.
        validation: likewise; None takes the `test` split of a hub id or a saved `DatasetDict`.
        subset: `data_dir` of a hub id.
        name: of a hub id's configuration, where it has several.
        max_train_rows: at most so many rows for training, the first that fit. None takes all.
        max_validation_rows: likewise for validation.
        chat: as for preferences.
        system: a system message before each prompt that has none; None gives none, and "" an empty one, which keeps
            a template's own default system message away.
    """

    tokenizer: PreTrainedTokenizerBase
    train: str
    validation: str | None = None
    subset: str | None = None
    name: str | None = None
    max_train_rows: int | None = None
    max_validation_rows: int | None = None
    chat: bool = True
    system: str | None = None
    _left_out: LeftOut = field(default_factory=LeftOut, init=False, repr=False, compare=False)
    _unit: ClassVar[str] = "demonstrations"

    def __post_init__(self) -> None:
        check_hub_settings(self.train, self.validation, subset=self.subset, name=self.name)
        if self.validation is None and not has_splits(self.train):
            raise DataError("data.validation is missing: name a file of held-out rows with data.validation=….")
        _ = self._turns  # what does not fit is found before anything is read

    @cached_property
    def _turns(self) -> TurnEncoder:
        return TurnEncoder(self.tokenizer, self.chat, self.system)

    def _encode(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """`input_ids` and `labels`; raises `Unusable` with the reason why it cannot be a demonstration."""
        if row.get("messages") is not None:
            messages = checked_answered(row["messages"])
            if len(messages) == 1:
                raise Unusable("an empty prompt")
            prompt, answer = self._turns.prompt(messages[:-1]), str(messages[-1]["content"])
        elif row.get("prompt") is not None and row.get("completion") is not None:
            prompt, answer = self._turns.prompt(read_prompt(place, row["prompt"])), read_answer(row["completion"])
        elif row.get("text") is not None:
            return self._text(row["text"])
        else:
            raise DataError(
                f"{place}: a demonstration is in the column messages, in prompt and completion, or in text; present: "
                f"{', '.join(row) or 'none'}. Rename the columns."
            )
        if not answer.strip():
            raise Unusable("an empty response")
        ids = self._turns.answer(answer, prompt)
        return {"input_ids": prompt.ids + ids, "labels": [-100] * len(prompt.ids) + ids}

    def _text(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise Unusable("a text that is no text")
        if not value.strip():
            raise Unusable("an empty text")
        ids = self.tokenizer.encode(value)
        ids = ids if ids[-1] == self.tokenizer.eos_token_id else [*ids, self.tokenizer.eos_token_id]
        return {"input_ids": ids, "labels": list(ids)}

    @cached_property
    def _splits(self) -> dict[str, list[dict[str, Any]]]:
        splits = {}
        sources = (
            ("train", self.train, self.max_train_rows),
            ("validation", self.validation, self.max_validation_rows),
        )
        for split, named, limit in sources:
            source = named or self.train
            rows = read_rows(source, setting=f"data.{split}", split=split, subset=self.subset, name=self.name)
            splits[split] = self._left_out.usable(split, rows, self._encode, source=source, limit=limit)
        return splits

    def demonstrations(self, split: str) -> Dataset:
        """Columns `input_ids` and `labels`, −100 where a token is not part of the loss."""
        return Dataset.from_list(self._splits[split])
