"""Demonstrations for sft: conversations, prompts with completions, or text."""

from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset

from toolkit.data.messages import checked_messages, read_prompt, read_response, text_or_messages
from toolkit.data.rows import Unusable, present
from toolkit.data.task import SplitTask
from toolkit.errors import DataError


@dataclass(frozen=True)
class Demonstrations(SplitTask):
    """Responses to imitate, for the sft stage.

    A row is `messages` that end with the assistant's, or `prompt` with `completion`, or `text`. Of the first two the
    last response alone is part of the loss, of a text all.
    """

    task: ClassVar[str] = "demonstrations"
    unit: ClassVar[str] = "demonstrations"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._encoder.check_template()

    def _encode(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """`input_ids` and `labels`."""
        if row.get("messages") is not None:
            messages = checked_messages(row["messages"], answered=True)
            if len(messages) == 1:
                raise Unusable("an empty prompt")
            prompt, response = self._encoder.prompt(messages[:-1]), str(messages[-1]["content"])
        elif row.get("prompt") is not None and row.get("completion") is not None:
            prompt = self._encoder.prompt(read_prompt(text_or_messages(place, row, "prompt")))
            response = read_response(row["completion"])
        elif row.get("text") is not None:
            return self._text(row["text"])
        else:
            columns = "in the column messages, in prompt and completion, or in text"
            raise DataError(f"{place}: a demonstration is {columns}; {present(row)}", remedy="Rename the columns.")
        if not response.strip():
            raise Unusable("an empty response")
        ids = self._encoder.response(response, prompt)
        return {"input_ids": prompt.ids + ids, "labels": [-100] * len(prompt.ids) + ids}

    def _text(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise Unusable("a text that is no text")
        if not value.strip():
            raise Unusable("an empty text")
        ids = self.tokenizer.encode(value)
        ids = ids if ids[-1] == self.tokenizer.eos_token_id else [*ids, self.tokenizer.eos_token_id]
        return {"input_ids": ids, "labels": list(ids)}

    def _prompts_of(self, rows: Any) -> list[tuple[int, ...]]:
        return [tuple(row["input_ids"][: row["labels"].count(-100) or None]) for row in rows]

    def demonstrations(self, split: str) -> Dataset:
        return Dataset.from_list(self._splits[split].rows)
