"""A row as a pair of a better and a worse response, in hh-rlhf's form or in any of TRL's:

| `chosen` and `rejected` are | `prompt` | what it is |
|---|---|---|
| dialogues of hh-rlhf, as text | none | the turns before the last |
| messages | none | the messages that both begin with |
| text | no column | the words that both begin with, and the line breaks behind these |
| a response, as text | text, messages or a dialogue | itself |
| messages, a response alone | messages or text | itself |
| messages, a whole conversation | messages or text, which they repeat | the messages before the responses |
| whole dialogues of hh-rlhf | a dialogue or text, which they repeat | likewise |
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from toolkit.data.messages import (
    SYSTEM,
    Messages,
    checked_messages,
    dialogue_turns,
    is_dialogue,
    read_prompt,
    read_response,
    refuse_tools,
    text_or_messages,
)
from toolkit.data.rows import Unusable, as_number
from toolkit.errors import DataError


@dataclass(frozen=True)
class Pair:
    """A prompt, as a conversation or as text, its better response and its worse one, and by how much it is better."""

    prompt: Messages | str
    chosen: str
    rejected: str
    margin: float | None = None  # where the row does not say


def read_pair(place: str, row: dict[str, Any]) -> Pair:
    """The pair of a row; raises DataError, with the place, if a column is missing or of a kind that no form has."""
    refuse_tools(row)
    if any(row.get(column, "") is None for column in ("chosen", "rejected")):
        raise Unusable("an empty response")
    sides = [text_or_messages(place, row, column) for column in ("chosen", "rejected")]
    if isinstance(sides[0], str) != isinstance(sides[1], str):
        raise Unusable("one of chosen and rejected is text, the other messages")
    given = None if row.get("prompt") is None else text_or_messages(place, row, "prompt")
    whole = [is_dialogue(side) if isinstance(side, str) else len(side) > 1 for side in sides]
    if given is None and not any(whole):
        others = _beside(row, _OTHER_PROMPTS)
        if "prompt" in row and isinstance(sides[0], str):
            raise Unusable(f"an empty prompt{f', and a column {others[0]} that is not read' if others else ''}")
        if others:  # what both responses begin with would be taken for the prompt
            raise _not_named(place, [*others, *_beside(row, SYSTEM)])
    prompt, chosen, rejected = read_sides(given, *sides)
    if not chosen.strip() or not rejected.strip():
        raise Unusable("an empty response")
    if chosen == rejected:
        raise Unusable("chosen and rejected are equal")
    return Pair(prompt, chosen, rejected, _margin(row.get("margin")))


# What other tools call a prompt, or a part of one; first what is a whole one as a rule.
_OTHER_PROMPTS = (
    "prompt", "question", "query", "problem", "instruction", "post", "messages", "conversations", "conversation",
    "input", "inputs", "context", "text", "history",
)  # fmt: skip


def _beside(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The columns of a row that hold something and have one of the names, in any letters, in the order of these."""
    return [column for name in names for column in row if column.lower() == name and row[column]]


def _not_named(place: str, columns: Sequence[str]) -> DataError:
    """That of a pair without a prompt, beside which stand columns that may be one."""
    one = len(columns) == 1
    there = ", ".join(f'"{column}"' for column in columns) + f" beside chosen and rejected {'is' if one else 'are'}"
    named = f"{'Name it' if one else 'Write them into one and name it'} (prompt: {columns[0]})"
    remedy = f"{named}, or take {'it' if one else 'them'} out if the responses hold their prompts themselves."
    return DataError(f'{place}: there is no column "prompt", and {there} not read.', field="columns", remedy=remedy)


def read_sides(given: Messages | str | None, *sides: Messages | str) -> tuple[Messages | str, str, str]:
    """The prompt and the two responses, which may repeat it; without one it is what both begin with."""
    dialogues = [side for side in sides if isinstance(side, str) and is_dialogue(side)]
    if given is not None and len(dialogues) == len(sides):
        given, sides = read_prompt(given), tuple(dialogue_turns(side, answered=True) for side in dialogues)
    elif isinstance(given, str):
        given = read_prompt(given)  # of a dialogue the messages, which both may repeat
    if given is None or _repeats(given, *sides):
        return _implicit(*sides)
    prompt, chosen, rejected = read_prompt(given), *map(read_response, sides)
    return prompt, chosen, rejected


def _repeats(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Whether both sides are whole conversations that begin with the prompt, which the row also has by itself."""
    if not (isinstance(chosen, list) and isinstance(rejected, list) and min(len(chosen), len(rejected)) > 1):
        return False
    if isinstance(prompt, list):
        return _said(chosen[: len(prompt)]) == _said(prompt) == _said(rejected[: len(prompt)])
    messages = (message for message in (*chosen, *rejected) if isinstance(message, dict))
    # White space around a turn belongs to the format.
    return prompt.strip() in [str(m.get("content")).strip() for m in messages if m.get("role") == "user"]


def repeats_prompt(pair: Pair) -> bool:
    """Whether both responses begin with the text of their prompt, as where a column has it and the sides have it, too.
    A single row may say so of itself."""
    asked = pair.prompt.strip() if isinstance(pair.prompt, str) else ""
    return bool(asked) and all(said.lstrip().startswith(asked) for said in (pair.chosen, pair.rejected))


def _said(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Who says what, without the keys that a table gives to one column's messages and not to another's."""
    both = [(message.get("role"), message.get("content")) for message in messages if isinstance(message, dict)]
    return [(role, said.strip()) for role, said in both if isinstance(role, str) and isinstance(said, str)]


def _margin(value: Any) -> float | None:
    value = as_number(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise Unusable("a margin that is no finite number")
    return float(value)


def _implicit(chosen: Any, rejected: Any) -> tuple[Messages | str, str, str]:
    """Prompt and responses of two sides that hold the prompt themselves."""
    if isinstance(chosen, list):
        first, second = (checked_messages(side, answered=True) for side in (chosen, rejected))
    elif is_dialogue(chosen) or is_dialogue(rejected):
        first, second = (dialogue_turns(side, answered=True) for side in (chosen, rejected))
    else:
        return _shared_words(chosen, rejected)
    if first[:-1] != second[:-1]:
        raise Unusable("chosen and rejected have different prompts")
    return checked_messages(first[:-1]), str(first[-1]["content"]), str(second[-1]["content"])


def _shared_words(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The words that both texts begin with, with the line breaks behind these, and the rest of each; no word is
    divided."""
    if chosen == rejected:
        raise Unusable("chosen and rejected are equal")
    end = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    while end and not (chosen[end : end + 1].isspace() and rejected[end : end + 1].isspace()):
        end -= 1
    if not (words := chosen[:end].rstrip()):
        raise Unusable("texts that begin with no common words, and no column prompt")
    if "\n" in (chosen[end], rejected[end]):
        # Line breaks in a row have a token of their own, and belong to the prompt, as a chat template writes them. A
        # space belongs to the word behind it.
        space = [side[len(words) : len(side) - len(side[len(words) :].lstrip())] for side in (chosen, rejected)]
        end = len(words) + (len(space[0]) if space[0] == space[1] else 0)
    return chosen[:end], chosen[end:], rejected[end:]
