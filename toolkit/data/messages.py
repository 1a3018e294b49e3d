"""Conversations: lists of messages, also in ShareGPT's form, or in hh-rlhf's (`"\\n\\nHuman: a\\n\\nAssistant: b"`)."""

import re
from collections.abc import Sequence
from typing import Any

from toolkit.data.files import kind_of
from toolkit.data.rows import Unusable, present
from toolkit.errors import DataError

Messages = list[dict[str, Any]]

_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# What others call the two who speak; a template would write such a name into a header that no model knows.
_OTHER_ROLES = ("human", "gpt", "model", "ai", "bot", "chatbot")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # where templates look for one
SYSTEM = ("system", "system_prompt")
PARTS = (*SYSTEM, "history")  # what other tools keep beside a prompt
BESIDE_AN_INSTRUCTION = ("input", "context")
# A first message with both of its keys, as in a cell of a CSV file.
_WRITTEN = re.compile(
    r"""\s*\[\s*\{\s*(?:['"](?:role['"]\s*:.*?['"]content|content['"]\s*:.*?['"]role)['"]\s*:"""
    r"""|['"](?:from['"]\s*:.*?['"]value|value['"]\s*:.*?['"]from)['"]\s*:)""",
    re.DOTALL,
)
# The first turn may have lost the lines before it.
_TURN = re.compile(r"(?:\A\s*(?=Human: )|\r?\n\r?\n)(?:(Human): |Assistant:)")


def as_messages(value: Any) -> Any:
    """Messages of ShareGPT's form (`from` and `value`) as those with `role` and `content`; anything else as it is."""
    dicts = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if dicts and all(_in_sharegpt(message) for message in value):
        return [{"role": _SHAREGPT[message["from"]], "content": message["value"]} for message in value]
    return value


def _in_sharegpt(message: dict[str, Any]) -> bool:
    speaker = message.get("from")
    return isinstance(speaker, str) and speaker in _SHAREGPT and "value" in message


def without_empty(message: dict[str, Any]) -> dict[str, Any]:
    """A message without keys that are None and without an empty list of tool calls.

    Tables give every message the keys of all, and a template may take a key that is there for a value.
    """
    return {key: item for key, item in message.items() if item is not None and (key != "tool_calls" or item)}


def checked_messages(value: Any, *, answered: bool = False) -> Messages:
    """The messages of a row, fit for a chat template: the assistant has the last turn if `answered`, else the next."""
    value = as_messages(value)
    if not isinstance(value, list):
        raise Unusable("messages that are no list")
    if not value:
        raise Unusable(f"an empty {'response' if answered else 'prompt'}")
    speakers = [turn.get("from") for turn in value if isinstance(turn, dict) and turn.get("role") is None]
    if odd := [speaker for speaker in speakers if isinstance(speaker, str) and speaker not in _SHAREGPT]:
        raise Unusable(f'a message from "{odd[0]}", a speaker that is not known')
    messages = [_checked(message) for message in value]
    if (messages[-1]["role"] == "assistant") != answered:
        raise Unusable(f"its last turn is {'not ' if answered else ''}the assistant's", answered=not answered)
    if answered:
        _check_response(messages[-1])
        return messages
    if not any(message["role"] == "user" for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise Unusable(f"messages without a turn of the user (roles: {roles})")
    if not messages[-1]["content"].strip():
        raise Unusable("an empty prompt")
    return messages


def _checked(message: Any) -> dict[str, Any]:
    """One message, whose role is no name that templates do not mean; of other roles the template decides."""
    if not isinstance(message, dict):
        raise Unusable("a message that is no object with role and content")
    if message.get("tool_calls") and message.get("content") is None:  # as a rule the call is all that is said
        message = {**message, "content": ""}
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise Unusable(f'a message without text as "{key}"')
    role = message["role"]
    if role in _OTHER_ROLES or role != role.lower():
        known = "user, assistant, system or another one of the chat template, in small letters"
        raise Unusable(f'a message with the role "{role}"; a role is {known}')
    return without_empty(message)


def _check_response(message: dict[str, Any]) -> None:
    """Raises `Unusable` for a response with more than its content, which alone is learnt."""
    if message.get("tool_calls"):
        raise Unusable("a response with tool calls, which are not learnt")
    if any(message.get(key) for key in _THOUGHTS):
        raise Unusable("a response with a thought beside its content, which is not learnt")


def read_prompt(value: Messages | str) -> Messages | str:
    """A prompt as a row has it: messages, a dialogue of hh-rlhf, or other text."""
    if isinstance(value, list):
        return checked_messages(value)
    if not value.strip():
        raise Unusable("an empty prompt")
    _refuse_written(value)
    return checked_messages(dialogue_turns(value, answered=False)) if is_dialogue(value) else value


def without_answer(value: Any) -> Any:
    """Messages or a dialogue without the last turn, if that is the assistant's; anything else as it is."""
    if isinstance(value, str) and is_dialogue(value):
        *_, mark = _TURN.finditer(value)
        return value if mark.group(1) else value[: mark.end()]
    turns = as_messages(value)
    last = turns[-1] if isinstance(turns, list) and turns else None
    return turns[:-1] if isinstance(last, dict) and last.get("role") == "assistant" else turns


def messages_of_row(place: str, row: dict[str, Any]) -> Messages:
    """The conversation of one row: its `messages`, or its `prompt` or `query` as a message of the user.

    Raises DataError, with the place, if the row has no conversation that can be used.
    """
    column = next((name for name in ("messages", "prompt", "query") if name in row), None)
    if column is None:
        wrong = f"{place}: no column messages, prompt or query; {present(row)}"
        raise DataError(wrong, remedy="Rename the one with the prompt.")
    value = row[column]
    try:
        return checked_messages([{"role": "user", "content": value}] if isinstance(value, str) else value)
    except Unusable as reason:
        raise DataError(f'{place}, column "{column}": {reason}.', remedy="Mend or remove the row.") from reason


def text_or_messages(place: str, row: dict[str, Any], column: str) -> Messages | str:
    """The value of a column; raises DataError, with the place, if it is missing or of another kind, and `Unusable` for
    messages that are written as text.

    A single message may stand without a list.
    """
    value = row.get(column)
    value = as_messages([value] if isinstance(value, dict) else value)
    if isinstance(value, (str, list)):
        _refuse_written(value)
        return value
    what = f"neither text nor messages, but {kind_of(value)}" if column in row else "missing"
    remedy = "" if column in row else f"Rename the column, or name yours as columns.{column} of the data."
    raise DataError(f'{place}: column "{column}" is {what}; {present(row)}', remedy=remedy)


def _refuse_written(value: Messages | str) -> None:
    if isinstance(value, str) and _WRITTEN.match(value):
        raise Unusable("messages that are written as text: keep them in a .jsonl or .parquet file")


def has_tools(row: dict[str, Any]) -> bool:
    """Whether a row has tools, which no chat template would be told of."""
    return bool(row.get("tools")) and _holds(row["tools"])


def refuse_tools(row: dict[str, Any]) -> None:
    """Raises `Unusable` for a row that has tools."""
    if has_tools(row):
        raise Unusable("tools, which are not read")


def refuse_template_settings(row: dict[str, Any]) -> None:
    """Raises `Unusable` for a row with settings of its chat template, which TRL would hand over."""
    settings = row.get("chat_template_kwargs")
    if any(map(_holds, settings.values() if isinstance(settings, dict) else [settings])):
        raise Unusable("chat_template_kwargs, which are not read")


def _holds(value: Any) -> bool:
    """Whether a value is more than an empty one, which may stand as JSON in a text."""
    return value.strip() not in ("", "[]", "{}", "null") if isinstance(value, str) else value not in (None, [], {})


def refuse_parts(
    row: dict[str, Any], prompt: Messages | str, system: str | None = None, others: Sequence[str] = ()
) -> None:
    """Raises `Unusable` for a row with a part of its prompt in a column of its own, or in one of the `others`, which
    are not read. The prompt, or the `system` message before it, may hold that part itself. So for one with settings of
    its chat template."""
    refuse_template_settings(row)
    if name := part_beside(row, prompt, system, others):
        raise Unusable(f'a column "{name}", which is not read: write it into the prompt, or take it out')


def part_beside(
    row: dict[str, Any], prompt: Messages | str, system: str | None = None, others: Sequence[str] = ()
) -> str | None:
    """The column in which a row has a part of its prompt that the prompt does not hold; None where there is none."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    read = "\n".join([*texts, system or ""])
    for name, value in row.items():
        if not _holds(value) or name.lower() not in (*PARTS, *others):
            continue
        if isinstance(value, str):
            there = value.strip() in read
        else:  # earlier turns, as lists or messages; a number is no part of a prompt
            there = len(texts) > 1 or not isinstance(value, (list, dict))
        if not there:
            return name
    return None


def read_response(value: Messages | str) -> str:
    """What the assistant says to a prompt: text, or one message; raises `Unusable` for others."""
    if isinstance(value, str):
        return value
    messages = checked_messages(value, answered=True)
    if len(messages) != 1:
        raise Unusable(f"an answer of {len(messages)} messages beside its prompt, where one is needed")
    return str(messages[0]["content"])


def is_dialogue(text: str) -> bool:
    """Whether a text begins with a turn of hh-rlhf's form."""
    mark = _TURN.search(text)
    if mark is None or text[: mark.start()].strip():
        return False
    # Other texts may begin with "Human: ", too.
    return mark.group().count("\n") > 1 or any(turn.group(1) is None for turn in _TURN.finditer(text))


def dialogue_turns(text: str, *, answered: bool) -> Messages:
    """Messages of a dialogue; if not `answered`, it may end with the bare `Assistant:` that asks for the response."""
    if not is_dialogue(text):
        raise Unusable('not a dialogue: it does not begin with "\\n\\nHuman: "')
    marks = list(_TURN.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = [(mark.group(1), text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    messages = [{"role": "user" if human else "assistant", "content": said} for human, said in turns]
    by_assistant = messages[-1]["role"] == "assistant"
    if answered and not by_assistant:
        raise Unusable("not a dialogue: its last turn is not the assistant's")
    if not answered and by_assistant and messages.pop()["content"]:
        raise Unusable("a dialogue that cannot be a prompt: its last turn is the assistant's", answered=True)
    if not messages:
        raise Unusable("an empty prompt")
    return messages


def dialogue_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as a dialogue that asks for the assistant's response, for a model without a chat template.

    >>> dialogue_prompt([{"role": "user", "content": "Name a river."}])
    '\\n\\nHuman: Name a river.\\n\\nAssistant:'
    """
    names = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}
    if unknown := [message["role"] for message in messages if message["role"] not in names]:
        raise Unusable(f"a message of the {unknown[0]}, which the plain form has no name for")
    return "".join(names[message["role"]] + message["content"] for message in messages) + "\n\nAssistant:"
