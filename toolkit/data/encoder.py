"""Prompts and responses to token ids, a response as a sampled one would be."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from functools import cached_property
from threading import Lock
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from toolkit import phases
from toolkit.data.files import shown
from toolkit.data.messages import Messages, checked_messages, dialogue_prompt, read_prompt, refuse_template_settings
from toolkit.data.rows import Unusable, present
from toolkit.errors import DataError
from toolkit.time_limit import time_limit

_LARGEST_TEMPLATE = 2**20  # characters around what is said
_MARK = "qzxvw"  # in no template and in no conversation
_NAMED = {"name": _MARK, "arguments": {"key": "value"}}  # a call, as some templates have it and as others do
_MARKED_CALL = {"id": "call", "type": "function", "function": _NAMED, **_NAMED}
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


class _FixedDay(datetime):
    """A clock that shows the day that Llama's templates write where they are told none."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2024, 7, 26, tzinfo=tz)


_ONE_AT_A_TIME = Lock()  # the clock is that of the module: another thread would put it back too early


@contextmanager
def fixed_day(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Inside, a chat template that writes today's date (Llama 3.2, gpt-oss) writes 26 Jul 2024.

    Else a prompt would have other ids on another day, and a run could not be resumed. `strftime_now` cannot be given
    to a template: transformers makes text of a function.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        yield
        return
    known = vars(chat_template_utils)
    with _ONE_AT_A_TIME:
        clock, known["datetime"] = known["datetime"], _FixedDay
        try:
            yield
        finally:
            known["datetime"] = clock


@dataclass(frozen=True)
class PromptEncoder:
    """Prompts and responses to token ids; `chat` and `system` as in `SourceTask`.

    An encoded prompt has the columns `input_ids`, `prompt` (text) and, if it is a conversation, `messages`.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool = True
    system: str | None = None
    on_long: OnLong = "leave_out"

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise DataError("it has no effect where chat is false.", field="system", remedy="Remove one of them.")

    def check_template(self) -> None:
        """Raises DataError if the tokenizer has no chat template, and one is needed."""
        if self.chat and self.tokenizer.chat_template is None:
            remedy = "Use an instruction-tuned checkpoint, or set chat to false for plain text and hh-rlhf's own form."
            raise DataError("the tokenizer has no chat template, which prompts need.", field="chat", remedy=remedy)
        if refusal := self._refusal:
            remedy = "Remove it (data.system=null), or use another checkpoint."
            raise DataError(f"no prompt can have a system message: {refusal}.", field="system", remedy=remedy)

    @cached_property
    def _refusal(self) -> str:
        """Why a template takes no system message, where it takes a conversation without; nothing if it does."""
        if self.system is None:
            return ""
        asked: Messages = [{"role": "user", "content": "?"}]
        try:
            self._written(asked)
        except Unusable as reason:
            with suppress(Unusable):
                replace(self, system=None)._written(asked)
                return str(reason)
        return ""

    def check_answers(self, field: str = "chat") -> None:
        """Raises DataError, of `field`, if the chat template writes more before an answer than its generation prompt
        ends with, as gpt-oss's does: a response of text would stand in a header. An empty thought there is told."""
        if self.chat and self._before_answer:
            written = f'the chat template writes "{shown(self._before_answer)}"'
            wrong = f"{written} between its generation prompt and an answer, which a response of text would lack."
            remedy = "Write it into the generation prompt of the base's chat_template.jinja, or give rows that are "
            raise DataError(wrong, field=field, remedy=f"{remedy}rendered already, with chat: false.")

    @cached_property
    def _before_answer(self) -> str:
        """What a template writes between its generation prompt and an answer, thoughts apart, which are told; nothing
        where it has another beginning for an answer, or refuses the question."""
        asked: Messages = self._with_system([{"role": "user", "content": _MARK}])
        try:
            waiting = self._rendered(asked).split(_MARK)
            answered = self._rendered([*asked, {"role": "assistant", "content": _MARK}], waits=False).split(_MARK)
        except Unusable:
            return ""
        begun, before = waiting[-1].rstrip(), "".join(answered[1:-1][-1:])
        # Of a thought that the generation prompt opens a response has the rest: `_after_opening`.
        if begun.endswith("<think>") or not before.startswith(begun):
            return ""
        between = before.removeprefix(begun).strip()
        if not any(word in between.lower() for word in ("think", "thought")):
            return between
        written = f'the chat template writes "{shown(between)}" before an answer'
        phases.tell(f"{written}: responses of the data follow its generation prompt without it.")
        return ""

    def closing(self) -> list[int]:
        """What a chat template writes behind an answer: its end, and a line break after it in ChatML; nothing where the
        template refuses a question with one, or leaves the answer out."""
        asked: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        with suppress(Unusable):
            _, there, behind = self._rendered(self._with_system(asked), waits=False).rpartition(_MARK)
            return self.ids(behind) if there else []
        return []

    @cached_property
    def _behind_question(self) -> str:
        """What a template writes behind a question, if it is more than words that a question may have."""
        try:
            behind = self._rendered(self._with_system([{"role": "user", "content": _MARK}])).split(_MARK)[-1].strip()
        except Unusable:
            return ""
        return behind if any(sign in behind for sign in "<[|｜") else ""

    def prompt(self, prompt: Messages | str, limit: int | None = None) -> dict[str, Any]:
        """A conversation or a text that waits for its response, of at most `limit` tokens."""
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if self.chat else None
        # An earlier turn of the assistant may have its end.
        others = [message["content"] for message in messages or () if message["role"] != "assistant"]
        ends = [end for end in (self.tokenizer.eos_token, self._behind_question if others else "") if end]
        if self.chat and any(end in text for end in ends for text in others):
            why = "a prompt that goes on after an end, as if it were in a chat template already"
            raise Unusable(f"{why} (chat: false takes it so)")
        text = str(prompt) if messages is None else self._written(messages)
        ids = self.ids(text) if self.chat else self._waiting(text)
        if not ids:
            raise Unusable("an empty prompt")
        kept = within_limit(ids, "prompt", limit, self.on_long)
        if len(kept) < len(ids):
            text = self.tokenizer.decode(kept)
        encoded = {"input_ids": kept, "prompt": text}
        return encoded if messages is None else {**encoded, "messages": messages}

    def _written(self, messages: Messages) -> str:
        """The text that asks for the assistant's next turn."""
        if not self.chat:
            return dialogue_prompt(messages)
        messages = self._with_system(messages)
        text = self._rendered(messages)
        for place, message in enumerate(messages):
            if message["content"].strip() and not self._shows(messages, place):
                raise Unusable(f"the chat template leaves out a message of the {message['role']}")
            if message.get("tool_calls") and not self._shows(messages, place, call=True):
                raise Unusable("the chat template leaves out a tool call")
        return text

    def _with_system(self, messages: Messages) -> Messages:
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _shows(self, messages: Messages, place: int, *, call: bool = False) -> bool:
        """Whether the chat template writes what the message at a place says, or which tool it calls; one like an
        earlier one that it wrote is not tried. By a mark, since templates may change a content."""
        message = messages[place]
        # Some leave out the content of a first message alone, or beside tool calls.
        like = (message["role"], place == 0, call, bool(message["content"].strip()), *message)
        if like not in self._known:
            other = {"tool_calls": [_MARKED_CALL]} if call else {"content": _MARK}
            marked = [*messages[:place], {**message, **other}, *messages[place + 1 :]]
            with suppress(Unusable):  # it may ask more of a content
                if _MARK not in self._rendered(marked):
                    return False
            self._known.add(like)
        return True

    @cached_property
    def _known(self) -> set[tuple[str | bool, ...]]:
        """Messages that the chat template writes: role, whether it comes first, and keys."""
        return set()

    def _rendered(self, messages: Messages, *, waits: bool = True) -> str:
        """Messages in the chat template, with the generation prompt if the assistant is to respond."""
        try:
            with time_limit(), fixed_day(self.tokenizer):
                text = str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=waits, tokenize=False))
        except (TimeoutError, MemoryError) as error:
            raise self._endless(error) from error
        except Exception as error:  # of jinja2, and of whatever a template does in Python
            raise Unusable(f"the chat template refuses it: {error}") from error
        if len(text) > _LARGEST_TEMPLATE + 8 * sum(len(str(message)) for message in messages):
            raise self._endless(f"it makes {len(text):,} characters of a conversation")
        return text

    def _endless(self, why: object) -> DataError:
        wrong = f'the chat template of "{self.tokenizer.name_or_path}" cannot be used: {why}.'
        return DataError(wrong, field="chat", remedy="Mend its chat_template.jinja or tokenizer_config.json.")

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

    def without_space_after_end(self, text: str) -> str:
        """A text without the white space behind its end, where chat templates write a line break."""
        end = self.tokenizer.eos_token
        return stripped if end is not None and (stripped := text.rstrip()).endswith(end) else text

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
        is the form's, not the row's. A text that has its end already gets no second one, and a thought that the
        template has opened is not opened twice; raises `Unusable` if it goes on after its end, or has no thought.
        """
        if "messages" in prompt:
            text = text.strip()
            text = self._after_opening(text, prompt["prompt"], ended) if self.chat else f" {text}"  # as in hh-rlhf
        text, end = self.without_space_after_end(text), self.tokenizer.eos_token_id
        ids = self._on_a_line(text) if self._ends_a_line(prompt) else self.ids(text)
        if end in ids[:-1]:
            raise Unusable(f"a response that goes on after its end ({self.tokenizer.eos_token})")
        return [*ids, end] if ended and ids[-1:] != [end] else ids

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

    @staticmethod
    def _after_opening(text: str, prompt: str, ended: bool) -> str:
        """A response without the `<think>` with which its prompt ends in templates such as DeepSeek-R1's."""
        opened = prompt.rstrip()
        if not opened.endswith("<think>"):
            return text
        if ended and "</think>" not in text:  # one that a limit cut may be a thought alone
            raise Unusable("a response without the thought that the chat template opens")
        return text.removeprefix("<think>").removeprefix(prompt[len(opened) :])

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
            if columns or kind != "messages" or reason.limit or not texts:
                raise
            # Answered conversations often have their question beside them.
            hint = f"there is a column {texts[0]}, too: columns.prompt={texts[0]}"
            raise Unusable(f"{reason} ({hint})") from reason
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
        if value is None:
            raise Unusable("an empty prompt")
        if kind == "input_ids":
            ids = within_limit(self.checked_ids(value, column), "prompt", limit, self.on_long)
            if not ids:
                raise Unusable("an empty prompt")
            return {"input_ids": ids}
        if kind == "messages":
            return self.prompt(checked_messages(value), limit)
        if not isinstance(value, str):
            raise Unusable(f"a {column} that is no text")
        return self.prompt(read_prompt(value), limit)
