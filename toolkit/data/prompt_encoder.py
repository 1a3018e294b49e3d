"""One row to one prompt: which column it is in, and how it becomes token ids."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat import PROMPT_COLUMNS, chat_prompt, checked_messages
from toolkit.data.dialogues import dialogue_prompt, is_dialogue, parse_prompt
from toolkit.data.left_out import Unusable
from toolkit.errors import DataError


@dataclass
class PromptEncoder:
    """Called with place and row of one source; its first row decides which column is the prompt.

    Args:
        tokenizer: of the base.
        columns: as in `Prompts`, as are the others.
        chat: whether text becomes a message of the user.
        system: a system message before each prompt.
        max_prompt_length: tokens of a prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    columns: dict[str, str] | None
    chat: bool
    system: str | None
    max_prompt_length: int
    _chosen: tuple[str, str] | None = field(default=None, init=False)

    def __call__(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """`input_ids`, `prompt` (text), `messages` if it is a conversation, and the row's other columns.

        Raises:
            Unusable: the row cannot be a prompt.
            DataError: the source cannot give any, or the row lacks the column that the first row has.
        """
        if self._chosen is None:
            self._chosen = self._prompt_column(place, row)
        kind, column = self._chosen
        if column not in row:
            raise DataError(
                f'{place}: no column "{column}", which the first row has; present: {", ".join(row) or "none"}. '
                "Give every row the same column for the prompt."
            )
        value = row[column]
        if value is None:
            raise Unusable("an empty prompt")
        if kind == "input_ids":
            input_ids = self._checked_ids(value)
            messages, prompt = None, str(self.tokenizer.decode(input_ids))
        else:
            messages = self._messages(place, kind, value)
            prompt = self._text(value, messages)
            input_ids = self.tokenizer.encode(prompt, add_special_tokens=not self.chat)
        if not input_ids:
            raise Unusable("an empty prompt")
        if len(input_ids) > self.max_prompt_length:
            raise Unusable(f"a prompt over {self.max_prompt_length} tokens")
        others = {name: item for name, item in row.items() if name != column}
        asked = {} if messages is None else {"messages": messages}
        return {**others, "input_ids": input_ids, "prompt": prompt, **asked}

    def _prompt_column(self, place: str, row: dict[str, Any]) -> tuple[str, str]:
        """Which kind of prompt the source has, and its column's name there."""
        columns = self.columns or {name: name for name in PROMPT_COLUMNS}
        for kind in PROMPT_COLUMNS:
            if kind in columns and columns[kind] in row:
                self._check_kind(place, kind)
                return kind, columns[kind]
        wanted = ", ".join(f'"{columns[kind]}"' for kind in PROMPT_COLUMNS if kind in columns)
        raise DataError(
            f"{place}: a prompt is in the column {wanted}; present: {', '.join(row) or 'none'}. "
            "Name the column with data.columns.prompt=…."
        )

    def _check_kind(self, place: str, kind: str) -> None:
        if kind == "input_ids":
            if self.system is not None:
                raise DataError(f"{place}: data.system has no effect on prompts that are token ids. Remove it.")
        elif kind == "messages" and not self.chat:
            raise DataError(f"{place}: messages need the chat template. Remove data.chat=false, or name a text column.")
        elif self.chat and self.tokenizer.chat_template is None:
            way_out = "" if kind == "messages" else ", or set data.chat=false to take text as it is"
            raise DataError(
                f"{place}: the tokenizer has no chat template, which prompts need. "
                f"Use an instruction-tuned checkpoint{way_out}."
            )

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    def _checked_ids(self, value: Any) -> list[int]:
        # Not isinstance: True is an int.
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise Unusable("input_ids that are no list of whole numbers")
        if not self._vocabulary.issuperset(value):
            raise Unusable("ids that are not in the vocabulary")
        return value

    def _messages(self, place: str, kind: str, value: Any) -> list[dict[str, Any]] | None:
        """The prompt as messages; None where text is taken as it is."""
        if kind == "messages" or (kind == "prompt" and isinstance(value, list)):
            self._check_kind(place, "messages")
            return checked_messages(value)
        if not isinstance(value, str):
            raise Unusable(f"a {kind} that is no text")
        if not value.strip():
            raise Unusable("an empty prompt")
        if is_dialogue(value):
            try:
                return parse_prompt(value)
            except ValueError as error:
                raise Unusable(f"a dialogue that cannot be a prompt: {error}") from error
        return [{"role": "user", "content": value}] if self.chat else None

    def _text(self, value: Any, messages: list[dict[str, Any]] | None) -> str:
        if messages is None:
            return str(value)
        return chat_prompt(self.tokenizer, messages, self.system) if self.chat else dialogue_prompt(messages)
