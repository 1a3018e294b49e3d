"""A tokenizer's chat template: rendered within limits of time and length, and what it writes around what is said."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from functools import cached_property
from threading import Lock
from typing import Any, Self

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from toolkit import phases
from toolkit.data.files import shown
from toolkit.data.messages import Messages
from toolkit.data.rows import Unusable
from toolkit.errors import DataError
from toolkit.time_limit import time_limit

_LARGEST = 2**20  # characters around what is said
_MARK = "qzxvw"  # in no template and in no conversation
_NAMED = {"name": _MARK, "arguments": {"key": "value"}}  # a call, as some templates have it and as others do
_MARKED_CALL = {"id": "call", "type": "function", "function": _NAMED, **_NAMED}


class _FixedDay(datetime):
    """A clock that shows the day that Llama's templates write where they are told none."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2024, 7, 26, tzinfo=tz)


_ONE_AT_A_TIME = Lock()  # the clock is that of the module: another thread would put it back too early


@contextmanager
def _fixed_day(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    # `strftime_now` cannot be given to a template: transformers makes text of a function.
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


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> str:
    """Messages in a tokenizer's chat template, within a limit of time, with its further options.

    A template that writes today's date (Llama 3.2, gpt-oss) writes 26 Jul 2024: else a prompt would have other ids on
    another day, and a run could not be resumed. Raises whatever a template does in Python, and `TimeoutError`.
    """
    with time_limit(), _fixed_day(tokenizer):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer that has one; conversations without a system message get `system`, where given.

    What it says of a template it finds out by rendering a mark, since a template is a program.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None

    def asking(self, messages: Messages) -> str:
        """The text that asks for the assistant's next turn; raises `Unusable` where the template leaves out what a
        message says, or a tool call."""
        messages = self._with_system(messages)
        text = self._rendered(messages)
        for place, message in enumerate(messages):
            if message["content"].strip() and not self._shows(messages, place):
                raise Unusable(f"the chat template leaves out a message of the {message['role']}")
            if message.get("tool_calls") and not self._shows(messages, place, call=True):
                raise Unusable("the chat template leaves out a tool call")
        return text

    @cached_property
    def refusal_of_system(self) -> str:
        """Why it takes no system message, where it takes a conversation without; nothing if it does."""
        if self.system is None:
            return ""
        asked: Messages = [{"role": "user", "content": "?"}]
        try:
            self.asking(asked)
        except Unusable as reason:
            with suppress(Unusable):
                replace(self, system=None).asking(asked)
                return str(reason)
        return ""

    @cached_property
    def before_answer(self) -> str:
        """What it writes between its generation prompt and an answer, thoughts apart, which are told; nothing where it
        has another beginning for an answer, or refuses the question."""
        asked: Messages = self._with_system([{"role": "user", "content": _MARK}])
        try:
            waiting = self._rendered(asked).split(_MARK)
            answered = self._rendered([*asked, {"role": "assistant", "content": _MARK}], waits=False).split(_MARK)
        except Unusable:
            return ""
        begun, before = waiting[-1].rstrip(), "".join(answered[1:-1][-1:])
        # Of a thought that the generation prompt opens a response has the rest: `after_opening`.
        if opens_thought(begun) or not before.startswith(begun):
            return ""
        between = before.removeprefix(begun).strip()
        if not any(word in between.lower() for word in ("think", "thought")):
            return between
        written = f'the chat template writes "{shown(between)}" before an answer'
        phases.tell(f"{written}: responses of the data follow its generation prompt without it.")
        return ""

    @cached_property
    def behind_answer(self) -> str:
        """What it writes behind an answer: its end, and a line break after it in ChatML; nothing where it refuses a
        question with one, or leaves the answer out."""
        asked: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        with suppress(Unusable):
            _, there, behind = self._rendered(self._with_system(asked), waits=False).rpartition(_MARK)
            return behind if there else ""
        return ""

    @cached_property
    def behind_question(self) -> str:
        """What it writes behind a question, if it is more than words that a question may have."""
        try:
            behind = self._rendered(self._with_system([{"role": "user", "content": _MARK}])).split(_MARK)[-1].strip()
        except Unusable:
            return ""
        return behind if any(sign in behind for sign in "<[|｜") else ""

    def _with_system(self, messages: Messages) -> Messages:
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _shows(self, messages: Messages, place: int, *, call: bool = False) -> bool:
        """Whether it writes what the message at a place says, or which tool it calls; one like an earlier one that it
        wrote is not tried. By a mark, since templates may change a content."""
        message = messages[place]
        # Some leave out the content of a first message alone, or beside tool calls; Mistral's that of the system where
        # the user does not have the last turn.
        last = messages[-1]["role"]
        like = (message["role"], last, place == 0, call, bool(message["content"].strip()), *message)
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
        """Messages that it writes: role, that of the last one, whether it comes first, and keys."""
        return set()

    def _rendered(self, messages: Messages, *, waits: bool = True) -> str:
        """Messages with the generation prompt if the assistant is to respond."""
        try:
            text = render(self.tokenizer, messages, add_generation_prompt=waits)
        except (TimeoutError, MemoryError) as error:
            raise self._endless(error) from error
        except Exception as error:  # of jinja2, and of whatever a template does in Python
            raise Unusable(f"the chat template refuses it: {error}") from error
        if len(text) > _LARGEST + 8 * sum(len(str(message)) for message in messages):
            raise self._endless(f"it makes {len(text):,} characters of a conversation")
        return text

    def _endless(self, why: object) -> DataError:
        wrong = f'the chat template of "{self.tokenizer.name_or_path}" cannot be used: {why}.'
        return DataError(wrong, field="chat", remedy="Mend its chat_template.jinja or tokenizer_config.json.")


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with a `<think>`, with which a response goes on."""
    return prompt.rstrip().endswith("<think>")


def with_opening(response: str, prompt: str) -> str:
    """A sampled response with the `<think>` that its prompt has opened: the thought is no part of what it says."""
    return f"<think>{response}" if opens_thought(prompt) else response


def after_opening(text: str, prompt: str, ended: bool) -> str:
    """A response without the `<think>` with which its prompt ends in templates such as DeepSeek-R1's; raises `Unusable`
    where one that has `ended` has no thought."""
    if not opens_thought(prompt):
        return text
    if ended and "</think>" not in text:  # one that a limit cut may be a thought alone
        raise Unusable("a response without the thought that the chat template opens")
    return text.removeprefix("<think>").removeprefix(prompt[len(prompt.rstrip()) :])
