"""Prompts and responses to token ids, a response as a sampled one would be."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat_template import ChatTemplate, after_opening
from toolkit.data.files import shown
from toolkit.data.messages import (
    Messages,
    checked_messages,
    dialogue_prompt,
    read_prompt,
    refuse_template_settings,
    without_answer,
)
from toolkit.data.rows import Unusable, present
from toolkit.errors import DataError

PROMPT_COLUMNS = {name: name for name in ("input_ids", "messages", "prompt", "query")}

OnLong = Literal["leave_out", "cut"]


def within_limit(ids: list[int], what: str, limit: int | None, on_long: OnLong = "leave_out") -> list[int]:
    """The ids of a "prompt" or a "response"; of more than the limit the last ones of a prompt, which ask for the
    response, and the first ones of a response, without its end. Raises `Unusable` where they are to be left out."""
    if limit is None or len(ids) <= limit:
        return ids
    if on_long == "leave_out":
        raise Unusable(f"a {what} over {limit} tokens", limit=f"max_{what}_length")
    return ids[-limit:] if what == "prompt" else ids[:limit]


def padded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt's ids begin or end with padding, which would be read as text. (A response may end with such a
    token: a checkpoint may name it as one of its stops.)"""
    pad = tokenizer.pad_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    padding = [pad] * (2 if pad in others else 1)
    return pad is not None and padding in (ids[: len(padding)], ids[-len(padding) :])


def without_end(text: str, ends: Sequence[str]) -> str:
    """A text without the ends of a turn behind it, and without the white space behind these, where chat templates
    write a line break; one without an end as it is."""
    kept = stop = len(text)  # with the white space behind it, and without
    while True:
        if end := next((end for end in ends if text.endswith(end, 0, stop)), None):
            kept = stop = stop - len(end)
        elif text[stop - 1 : stop].isspace():
            stop -= 1
        else:
            return text[:kept]


@dataclass(frozen=True)
class PromptEncoder:
    """Prompts and responses to token ids; `chat` and `system` as in `SourceTask`, `drop_answer` as in `Prompts`, and
    None for a task without that key.

    An encoded prompt has the columns `input_ids`, `prompt` (text) and, if it is a conversation, `messages`.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool = True
    system: str | None = None
    on_long: OnLong = "leave_out"
    drop_answer: bool | None = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise DataError("it has no effect where chat is false.", field="system", remedy="Remove one of them.")

    def check_template(self) -> None:
        """Raises DataError if the tokenizer has no chat template, and one is needed."""
        if self.chat and self.tokenizer.chat_template is None:
            remedy = (
                "Use an instruction-tuned checkpoint, name a template as base.chat_template, or set chat to false for "
            )
            remedy += "plain text and hh-rlhf's own form."
            raise DataError("the tokenizer has no chat template, which prompts need.", field="chat", remedy=remedy)
        if refusal := self._template.refusal_of_system:
            remedy = "Remove it (data.system=null), or use another checkpoint."
            raise DataError(f"no prompt can have a system message: {refusal}.", field="system", remedy=remedy)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.system)

    def check_answers(self, field: str = "chat") -> None:
        """Raises DataError, of `field`, if the chat template writes more before an answer than its generation prompt
        ends with, as gpt-oss's does: a response of text would stand in a header. An empty thought there is told."""
        if self.chat and (before := self._template.before_answer):
            written = f'the chat template writes "{shown(before)}"'
            wrong = f"{written} between its generation prompt and an answer, which a response of text would lack."
            remedy = "Write it into the generation prompt of a base.chat_template of your own, or give rows that are "
            raise DataError(wrong, field=field, remedy=f"{remedy}rendered already, with chat: false.")

    def closing(self) -> list[int]:
        """The ids of what the chat template writes behind an answer."""
        return self.ids(self._template.behind_answer)

    def prompt(self, prompt: Messages | str, limit: int | None = None) -> dict[str, Any]:
        """A conversation or a text that waits for its response, of at most `limit` tokens."""
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if self.chat else None
        if messages is not None and self.chat:
            # An earlier turn of the assistant may have its end, to which the template would add its own.
            behind = self._template.behind_answer
            own = [end for end in self.ends if end in behind]
            said = (without_end(turn["content"], own if turn["role"] == "assistant" else ()) for turn in messages)
            messages = [{**turn, "content": text} for turn, text in zip(messages, said, strict=True)]
            others = [turn["content"] for turn in messages if turn["role"] != "assistant"]
            ends = [end for end in (*self.ends, self._template.behind_question) if end]
            if any(end in text for end in ends for text in others):
                why = "a prompt with an end of turn inside, as if in a chat template already"
                raise Unusable(f"{why} (chat: false takes it so)")
        written = self._template.asking if self.chat else dialogue_prompt
        text = str(prompt) if messages is None else written(messages)
        ids = self.ids(text) if self.chat else self._waiting(text)
        if not ids:
            raise Unusable("an empty prompt")
        kept = within_limit(ids, "prompt", limit, self.on_long)
        if len(kept) < len(ids):
            text = self.tokenizer.decode(kept)
        encoded = {"input_ids": kept, "prompt": text}
        return encoded if messages is None else {**encoded, "messages": messages}

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text as it is, or with the special tokens that the tokenizer adds, where it has no first one."""
        begin = self.tokenizer.bos_token
        begun = begin is not None and text.startswith(begin)
        try:
            return self.tokenizer.encode(text, add_special_tokens=special and not begun)
        except Exception as error:  # of tokenizers, which has no other class
            raise Unusable(f"the tokenizer refuses it: {error}") from error

    def _waiting(self, text: str) -> list[int]:
        """The ids of a text that waits for its response, with the special tokens that the tokenizer adds, but for an
        end of sequence behind it."""
        ids = self.ids(text, special=True)
        if ids[-1:] == [self.tokenizer.eos_token_id] and (own := self.ids(text)) and ids[:-1][-len(own) :] == own:
            return ids[:-1]
        return ids

    @cached_property
    def ends(self) -> Sequence[str]:
        """What ends a turn: the end of sequence, and the first special token that the chat template writes behind an
        answer, which is another one in Gemma, in Phi-3, and where a base got the template of its chat model."""
        behind, added = list[int](), self.tokenizer.added_tokens_decoder
        with suppress(DataError, Unusable):  # of a template that nothing else may need
            behind = self.closing()
        added = added if isinstance(added, Mapping) else {}  # of mistral-common's tokenizers a method, which has none
        special = {token: one.content for token, one in added.items() if one.special}
        own = [special[token] for token in behind if token in special]
        return list(dict.fromkeys(end for end in (self.tokenizer.eos_token, *own[:1]) if end))

    def typed(self, messages: Messages, *, plain: bool = False) -> list[int]:
        """A conversation that a person typed as a prompt, its last message alone if `plain`; raises DataError if it
        cannot be one."""
        try:
            if not messages[-1]["content"].strip():
                raise Unusable("an empty prompt")
            return self._waiting(messages[-1]["content"]) if plain else self.prompt(messages)["input_ids"]
        except Unusable as reason:
            wrong = f'the prompt "{shown(messages[-1]["content"])}": {reason}.'
            raise DataError(wrong, remedy="Ask in another way.") from reason

    def response(self, text: str, prompt: Mapping[str, Any], *, ended: bool = True) -> list[int]:
        """The ids of a response, with its end where it has `ended`.

        It is tokenised by itself and ends as a sampled one does, so that a reward is trained at the very position where
        it is read in PPO. A chat template would add a newline after the end. The space around a turn of a conversation
        is the form's, not the row's. A text that has its end already gets no second one (that of a chat template
        becomes the end of sequence, as in PPO), and a thought that the template has opened is not opened twice; raises
        `Unusable` if it goes on after its end, or has no thought.
        """
        if "messages" in prompt:
            text = text.strip()
            text = after_opening(text, prompt["prompt"], ended) if self.chat else f" {text}"  # as in hh-rlhf
        said = without_end(text, self.ends)
        if inside := [end for end in self.ends if end in said]:
            raise Unusable(f"a response that goes on after its end ({inside[0]})")
        ids = self._on_a_line(said) if self._ends_a_line(prompt) else self.ids(said)
        return [*ids, self.tokenizer.eos_token_id] if ended or said != text else ids

    def _on_a_line(self, text: str) -> list[int]:
        """The ids that a text has behind a line break: SentencePiece writes a space before one that stands alone, which
        a model does not say there."""
        on_line, before = self.ids(f"\n{text}"), self._line_break
        return on_line[len(before) :] if on_line[: len(before)] == before else self.ids(text)

    def _ends_a_line(self, prompt: Mapping[str, Any]) -> bool:
        """Whether a prompt's text ends with a line break, and its ids too: some tokens before one take it with them, as
        those of the roles in Phi-3. (Where two have a token of their own, one behind them changes nothing.)"""
        broken = prompt.get("prompt", "").endswith("\n")
        return broken and bool(self._line_break) and prompt["input_ids"][-1] == self._line_break[-1]

    @cached_property
    def _line_break(self) -> list[int]:
        return self.ids("\n")

    def checked_ids(self, value: Any, column: str) -> list[int]:
        """Token ids of a column, taken as they are; raises `Unusable` if they are none of this tokenizer's."""
        # Not isinstance: True is an int.
        if not isinstance(value, list) or not {int}.issuperset(map(type, value)):
            raise Unusable(f"{column} that are no list of whole numbers")
        if not self._vocabulary.issuperset(value):
            raise Unusable("ids that are not in the vocabulary")
        return value

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    def row(
        self,
        place: str,
        row: dict[str, Any],
        first: dict[str, Any],
        columns: Mapping[str, str] | None,
        limit: int | None,
        *,
        remedy: str = "Rename the column of the prompt, or name it as columns.prompt.",
    ) -> tuple[str, dict[str, Any]]:
        """The column of a row's prompt, and the prompt encoded; of token ids without its text.

        The prompt is in the first of `columns` (kinds of `PROMPT_COLUMNS` to the source's names) that the first row of
        the source has. Raises DataError if it has none of them, or the row lacks that one.
        """
        looked_for = columns or PROMPT_COLUMNS
        named = {kind: looked_for[kind] for kind in PROMPT_COLUMNS if kind in looked_for}
        kind = next((kind for kind, column in named.items() if column in first), None)
        if kind is None:
            wanted = ", ".join(f'"{column}"' for column in named.values())
            raise DataError(f"{place}: a prompt is in the column {wanted}; {present(row)}", remedy=remedy)
        if named[kind] not in row:
            wrong = f'{place}: no column "{named[kind]}", which the first row has; {present(row)}'
            raise DataError(wrong, remedy="Give every row the same column for the prompt.")
        value = row[named[kind]]
        messages = kind == "messages" or (kind == "prompt" and isinstance(value, list))
        try:
            encoded = self._of_kind(place, "messages" if messages else kind, named[kind], value, limit)
        except Unusable as reason:
            texts = [name for name in ("prompt", "query") if isinstance(row.get(name), str) and row[name].strip()]
            hints = ["drop_answer: true takes it off"] if reason.answered and self.drop_answer is False else []
            if texts and not columns and kind == "messages" and not reason.limit:
                # Answered conversations often have their question beside them.
                hints.append(f"there is a column {texts[0]}, too: columns.prompt={texts[0]}")
            if not hints:
                raise
            raise Unusable(f"{reason} ({'; '.join(hints)})") from reason
        if "messages" in encoded:
            refuse_template_settings(row)
        return named[kind], encoded

    def _of_kind(self, place: str, kind: str, column: str, value: Any, limit: int | None) -> dict[str, Any]:
        if kind == "messages" and not self.chat:
            remedy = "Set it to true, or name a column of text."
            raise DataError(f"{place}: messages need the chat template.", field="chat", remedy=remedy)
        if kind != "input_ids":
            self.check_template()
        elif self.system is not None:
            wrong = f"{place}: it has no effect on prompts that are token ids."
            raise DataError(wrong, field="system", remedy="Remove it.")
        if self.drop_answer:
            value = without_answer(value)
        if value is None:
            raise Unusable("an empty prompt")
        if kind == "input_ids":
            ids = self.checked_ids(value, column)
            if padded(ids, self.tokenizer):
                raise Unusable(f"{column} with padding ({self.tokenizer.pad_token})")
            ids = within_limit(ids, "prompt", limit, self.on_long)
            if not ids:
                raise Unusable("an empty prompt")
            return {"input_ids": ids}
        if kind == "messages":
            return self.prompt(checked_messages(value), limit)
        if not isinstance(value, str):
            raise Unusable(f"a {column} that is no text")
        return self.prompt(read_prompt(value), limit)
