"""Prompts and responses to token ids, a response as a sampled one would be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from toolkit.data.messages import Messages, checked_messages, dialogue_prompt, read_prompt
from toolkit.data.rows import Unusable, present
from toolkit.errors import DataError

PROMPT_COLUMNS = ("input_ids", "messages", "prompt", "query")


def within_limit(ids: list[int], what: str, limit: int | None) -> list[int]:
    """The ids of a "prompt" or a "response"; raises `Unusable` if they are more than the limit."""
    if limit is not None and len(ids) > limit:
        raise Unusable(f"a {what} over {limit} tokens", limit=f"max_{what}_length")
    return ids


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text, as ids, and as messages if it is a conversation."""

    text: str
    ids: list[int]
    messages: Messages | None = None

    def columns(self) -> dict[str, Any]:
        """`input_ids`, `prompt` (text) and, if it is a conversation, `messages`."""
        columns: dict[str, Any] = {"input_ids": self.ids, "prompt": self.text}
        return columns if self.messages is None else {**columns, "messages": self.messages}


@dataclass(frozen=True)
class PromptEncoder:
    """Prompts and responses to token ids; `chat` and `system` as in `SourceTask`."""

    tokenizer: PreTrainedTokenizerBase
    chat: bool = True
    system: str | None = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise DataError("it has no effect where chat is false.", field="system", remedy="Remove one of them.")

    def check_template(self) -> None:
        """Raises DataError if the tokenizer has no chat template, and one is needed."""
        if self.chat and self.tokenizer.chat_template is None:
            remedy = "Use an instruction-tuned checkpoint, or set chat to false for plain text and hh-rlhf's own form."
            raise DataError("the tokenizer has no chat template, which prompts need.", field="chat", remedy=remedy)

    def prompt(self, prompt: Messages | str, limit: int | None = None) -> EncodedPrompt:
        """A conversation or a text that waits for its response, of at most `limit` tokens."""
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if self.chat else None
        text = str(prompt) if messages is None else self._written(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=not self.chat)
        if not ids:
            raise Unusable("an empty prompt")
        return EncodedPrompt(text, within_limit(ids, "prompt", limit), messages)

    def response(self, text: str, prompt: EncodedPrompt) -> list[int]:
        """The ids of a response with its end.

        It is tokenised alone and ends as a sampled one does, so that a reward is trained at the very position where it
        is read in PPO. A chat template would add a newline after the end.
        """
        if prompt.messages is not None and not self.chat:
            text = f" {text}"  # hh-rlhf's own, after "Assistant:"
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def typed(self, messages: Messages) -> list[int]:
        """The ids of a conversation that a person just typed; raises DataError if it cannot be written."""
        try:
            return self.prompt(messages).ids
        except Unusable as reason:
            wrong = f'the prompt "{messages[-1]["content"]}": {reason}.'
            raise DataError(wrong, remedy="Ask in another way.") from reason

    def checked_ids(self, value: Any, column: str) -> list[int]:
        """Token ids of a column, taken as they are; raises `Unusable` if they are none of this tokenizer's."""
        # Not isinstance: True is an int.
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise Unusable(f"{column} that are no list of whole numbers")
        if not self._vocabulary.issuperset(value):
            raise Unusable("ids that are not in the vocabulary")
        return value

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    def _written(self, messages: Messages) -> str:
        """The text that asks for the assistant's next turn."""
        if not self.chat:
            return dialogue_prompt(messages)
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            raise Unusable(f"the chat template refuses it: {error}") from error


@dataclass
class PromptReader:
    """Rows of one source to encoded prompts; the first decides which of `PROMPT_COLUMNS`, by its own name, they are."""

    encoder: PromptEncoder
    columns: Mapping[str, str] | None
    max_prompt_length: int
    _chosen: tuple[str, str] | None = field(default=None, init=False)

    def __call__(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """The columns of the encoded prompt, and the row's others.

        Raises:
            DataError: the source has no prompts, or the row lacks the column that the first row has.
        """
        kind, column = self._chosen = self._chosen or self._prompt_column(place, row)
        if column not in row:
            remedy = "Give every row the same column for the prompt."
            raise DataError(f'{place}: no column "{column}", which the first row has; {present(row)}', remedy=remedy)
        others = {name: item for name, item in row.items() if name != column}
        return others | self._encoded(place, kind, row[column]).columns()

    def _prompt_column(self, place: str, row: dict[str, Any]) -> tuple[str, str]:
        """Which kind of prompt the source has, and its column's name there."""
        columns = self.columns or {name: name for name in PROMPT_COLUMNS}
        named = [(kind, columns[kind]) for kind in PROMPT_COLUMNS if kind in columns]
        for kind, column in named:
            if column in row:
                self._check_kind(place, kind)
                return kind, column
        wanted = ", ".join(f'"{column}"' for _, column in named)
        remedy = "Rename the column of the prompt, or name it as columns.prompt."
        raise DataError(f"{place}: a prompt is in the column {wanted}; {present(row)}", remedy=remedy)

    def _check_kind(self, place: str, kind: str) -> None:
        if kind == "messages" and not self.encoder.chat:
            remedy = "Set it to true, or name a column of text."
            raise DataError(f"{place}: messages need the chat template.", field="chat", remedy=remedy)
        if kind != "input_ids":
            self.encoder.check_template()
        elif self.encoder.system is not None:
            wrong = f"{place}: it has no effect on prompts that are token ids."
            raise DataError(wrong, field="system", remedy="Remove it.")

    def _encoded(self, place: str, kind: str, value: Any) -> EncodedPrompt:
        if value is None:
            raise Unusable("an empty prompt")
        if kind == "input_ids":
            ids = within_limit(self.encoder.checked_ids(value, kind), "prompt", self.max_prompt_length)
            if not ids:
                raise Unusable("an empty prompt")
            return EncodedPrompt(str(self.encoder.tokenizer.decode(ids)), ids)
        if kind == "messages" or (kind == "prompt" and isinstance(value, list)):
            self._check_kind(place, "messages")
            return self.encoder.prompt(checked_messages(value), self.max_prompt_length)
        if not isinstance(value, str):
            raise Unusable(f"a {kind} that is no text")
        return self.encoder.prompt(read_prompt(value), self.max_prompt_length)
