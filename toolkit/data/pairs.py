"""One row to one preference pair, in hh-rlhf's form or in any of TRL's.

| `chosen` and `rejected` are | `prompt` | what it is |
|---|---|---|
| dialogues of hh-rlhf, as text | none | the turns before the last |
| messages | none | the messages that both begin with |
| text | none | the words that both begin with |
| an answer, as text | text, messages or a dialogue | itself |
| messages, an answer alone | messages or text | itself |
| messages, a whole conversation | messages or text, which they repeat | the messages before the answers |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.data.chat import as_messages, checked_messages
from toolkit.data.dialogues import is_dialogue, parse_dialogue, parse_prompt
from toolkit.data.left_out import Unusable
from toolkit.errors import DataError


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers.

    Args:
        prompt: as a conversation or, where the row has none, as text.
        chosen: the better answer, text.
        rejected: the worse one.
        margin: by how much it is better; None where the row does not say.
    """

    prompt: list[dict[str, Any]] | str
    chosen: str
    rejected: str
    margin: float | None = None


def read_pair(place: str, row: dict[str, Any]) -> Pair:
    """The pair of a row.

    Raises:
        Unusable: the row is of a known form, and cannot be used.
        DataError: a column is missing or of a kind that no form has; with the place.
    """
    sides = []
    for column in ("chosen", "rejected"):
        value = row.get(column)
        value = as_messages([value]) if isinstance(value, dict) else as_messages(value)  # one message by itself
        if not isinstance(value, (str, list)):
            what = f"neither text nor messages, but {type(value).__name__}" if column in row else "missing"
            raise DataError(f'{place}: column "{column}" is {what}; present: {", ".join(row)}.')
        sides.append(value)
    if isinstance(sides[0], str) != isinstance(sides[1], str):
        raise Unusable("one of chosen and rejected is text, the other messages")
    given = as_messages(row.get("prompt"))
    if given is None:
        if not any(_holds_its_prompt(side) for side in sides):
            _check_nothing_is_left(place, row)
        prompt, chosen, rejected = _implicit(*sides)
    elif _repeats(given, *sides):
        prompt, chosen, rejected = _implicit(*sides)
    else:
        prompt, chosen, rejected = read_prompt(place, given), *map(read_answer, sides)
    if not chosen.strip() or not rejected.strip():
        raise Unusable("an empty response")
    if chosen == rejected:
        raise Unusable("chosen and rejected are equal")
    return Pair(prompt, chosen, rejected, _margin(row.get("margin")))


# What other tools call a prompt, or a part of one.
_OTHER_PROMPTS = ("question", "query", "instruction", "input", "context", "messages", "conversations", "conversation")


def _check_nothing_is_left(place: str, row: dict[str, Any]) -> None:
    """A prompt in a column of another name is not passed over: what both answers begin with would be taken for it.

    Raises:
        DataError: there is one; with the place.
    """
    for column in _OTHER_PROMPTS:
        if row.get(column):
            raise DataError(
                f'{place}: there is no column "prompt", and "{column}" beside chosen and rejected is not read. Name it '
                f"with data.columns.prompt={column}, or take it out if the answers hold their prompts themselves."
            )


def _holds_its_prompt(side: Any) -> bool:
    """Whether a side says itself what it answers: a dialogue, or several messages."""
    return is_dialogue(side) if isinstance(side, str) else len(side) > 1


def _repeats(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Whether both sides are whole conversations that begin with the prompt, which the row also has by itself."""
    if not (isinstance(chosen, list) and isinstance(rejected, list) and min(len(chosen), len(rejected)) > 1):
        return False
    if isinstance(prompt, list):
        return chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
    asked = [
        message.get("content")
        for message in (*chosen, *rejected)
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    return isinstance(prompt, str) and prompt in asked


def _margin(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Unusable("a margin that is no finite number")
    return float(value)


def read_prompt(place: str, value: Any) -> list[dict[str, Any]] | str:
    """A column `prompt`: messages, a dialogue of hh-rlhf, or other text.

    Raises:
        Unusable: it is none that could be answered.
        DataError: it is of another kind; with the place.
    """
    if not isinstance(value, (str, list)):
        raise DataError(f'{place}: column "prompt" is neither text nor messages, but {type(value).__name__}.')
    if isinstance(value, list):
        return checked_messages(value)
    if not value.strip():
        raise Unusable("an empty prompt")
    if is_dialogue(value):
        try:
            return parse_prompt(value)
        except ValueError as error:
            raise Unusable(f"a prompt that is no dialogue: {error}") from error
    return value


def read_answer(value: Any) -> str:
    """What answers a prompt: text, or one message of the assistant.

    Raises:
        Unusable: it is neither.
    """
    if isinstance(value, str):
        return value
    messages = checked_answered(value)
    if len(messages) != 1:
        raise Unusable(f"an answer of {len(messages)} messages beside its prompt, where one is needed")
    return str(messages[0]["content"])


def checked_answered(value: Any) -> list[dict[str, Any]]:
    """Messages that end with the assistant's.

    Raises:
        Unusable: they are malformed, or do not.
    """
    value = as_messages(value)
    if not isinstance(value, list):
        raise Unusable("messages that are no list")
    if not value:
        raise Unusable("an empty response")
    for message in value:
        if not isinstance(message, dict) or any(not isinstance(message.get(key), str) for key in ("role", "content")):
            raise Unusable("a message that is no object with role and content, both text")
    if value[-1]["role"] != "assistant":
        raise Unusable("its last turn is not the assistant's")
    # Tables give every message the keys of all, and a template may take a key that is None for a value.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _implicit(chosen: Any, rejected: Any) -> tuple[list[dict[str, Any]] | str, str, str]:
    """Prompt and answers of two sides that hold the prompt themselves."""
    if isinstance(chosen, str) and not (is_dialogue(chosen) or is_dialogue(rejected)):
        return _shared_words(chosen, rejected)
    if isinstance(chosen, str):
        try:
            sides: Sequence[list[dict[str, Any]]] = (parse_dialogue(chosen), parse_dialogue(rejected))
        except ValueError as error:
            raise Unusable(f"not a dialogue: {error}") from error
    else:
        sides = (checked_answered(chosen), checked_answered(rejected))
    first, second = sides
    if first[:-1] != second[:-1]:
        raise Unusable("chosen and rejected have different prompts")
    if not first[:-1]:
        raise Unusable("an empty prompt")
    return first[:-1], str(first[-1]["content"]), str(second[-1]["content"])


def _shared_words(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The words that both texts begin with, and the rest of each; no word is divided."""
    if chosen == rejected:
        raise Unusable("chosen and rejected are equal")
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    end = same.index(False) if False in same else len(same)
    while end and not (chosen[end : end + 1].isspace() and rejected[end : end + 1].isspace()):
        end -= 1
    if not chosen[:end].strip():
        raise Unusable("texts that begin with no common words, and no column prompt")
    return chosen[:end], chosen[end:], rejected[end:]
