"""Dialogues in the text form of hh-rlhf: `"\\n\\nHuman: a\\n\\nAssistant: b"`."""

import re
from collections.abc import Sequence
from typing import Any

from toolkit.data.left_out import Unusable

_TURN = re.compile(r"\n\nHuman: |\n\nAssistant:")
_ROLES = {"\n\nHuman: ": "user", "\n\nAssistant:": "assistant"}
ASSISTANT = "\n\nAssistant:"


def is_dialogue(text: str) -> bool:
    """Whether a text begins with a turn of this form."""
    mark = _TURN.search(text)
    return mark is not None and not text[: mark.start()].strip()


def parse_turns(text: str) -> list[dict[str, str]]:
    """A dialogue to messages with `role` and `content`, whoever speaks last.

    A bare `"\\n\\nAssistant:"` at the end, which only asks for the answer, is a message without content.

    Raises:
        ValueError: the text does not begin with a turn.
    """
    marks = list(_TURN.finditer(text))
    if not is_dialogue(text):
        raise ValueError('it does not begin with "\\n\\nHuman: "')
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _ROLES[mark.group()], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def parse_dialogue(text: str) -> list[dict[str, str]]:
    """As `parse_turns`, of a dialogue that ends with the assistant's answer.

    Raises:
        ValueError: the text does not begin with a turn, or its last turn is not the assistant's.
    """
    messages = parse_turns(text)
    if messages[-1]["role"] != "assistant":
        raise ValueError("its last turn is not the assistant's")
    return messages


def parse_prompt(text: str) -> list[dict[str, str]]:
    """As `parse_turns`, of a dialogue that waits for the assistant, with or without the `Assistant:` that asks for it.

    Raises:
        ValueError: the text does not begin with a turn, or the assistant has answered.
    """
    messages = parse_turns(text)
    if messages[-1]["role"] == "assistant":
        if messages[-1]["content"]:
            raise ValueError("its last turn is the assistant's")
        messages.pop()
    return messages


def dialogue_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as a dialogue that asks for the assistant's answer, for a model without a chat template.

    Raises:
        Unusable: a message of a role that the form has no name for.

    Example:
        >>> dialogue_prompt([{"role": "user", "content": "Name a river."}])
        '\\n\\nHuman: Name a river.\\n\\nAssistant:'
    """
    names = {"user": "\n\nHuman: ", "assistant": f"{ASSISTANT} "}
    for message in messages:
        if message["role"] not in names:
            raise Unusable(f"a message of the {message['role']}, which the plain form has no name for")
    return "".join(names[message["role"]] + message["content"] for message in messages) + ASSISTANT
