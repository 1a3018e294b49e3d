"""Messages, and the text of a prompt that the tokenizer's chat template makes of them."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from toolkit.data.left_out import Unusable
from toolkit.errors import DataError

PROMPT_COLUMNS = ("input_ids", "messages", "prompt", "query")


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], system: str | None) -> str:
    """The prompt that asks for the next turn of the assistant.

    Args:
        tokenizer: with a chat template.
        messages: each with `role` and `content`.
        system: a system message before them, unless they begin with one of their own. None gives none, and
            "" an empty one, which keeps a template's own default system message away.

    Raises:
        Unusable: the template refuses the messages, as some do for a system message or for two turns of one role.
    """
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
        raise Unusable(f"the chat template refuses it: {error}") from error


def chat_prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], system: str | None
) -> list[int]:
    """Token ids of `chat_prompt`, for a prompt that a person just typed.

    Raises:
        DataError: the template refuses the messages.
    """
    try:
        prompt = chat_prompt(tokenizer, messages, system)
    except Unusable as error:
        raise DataError(f'the prompt "{messages[-1]["content"]}": {error}. Ask in another way.') from error
    return list(tokenizer.encode(prompt, add_special_tokens=False))


_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def as_messages(value: Any) -> Any:
    """Messages of ShareGPT's form (`from` and `value`) as those with `role` and `content`; anything else as it is."""
    if not isinstance(value, list) or not value:
        return value
    if not all(
        isinstance(message, dict) and message.get("from") in _SHAREGPT and "value" in message for message in value
    ):
        return value
    return [{"role": _SHAREGPT[message["from"]], "content": message["value"]} for message in value]


def checked_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a row, fit for a chat template.

    Raises:
        Unusable: they are malformed, or do not end where the assistant is to answer.
    """
    value = as_messages(value)
    if not isinstance(value, list):
        raise Unusable("messages that are no list")
    if not value:
        raise Unusable("an empty prompt")
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise Unusable("a message that is no object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise Unusable(f'a message without text as "{key}"')
        # Tables give every message the keys of all, and a template may take a key that is None for a value.
        messages.append({key: item for key, item in message.items() if item is not None})
    if messages[-1]["role"] == "assistant":
        raise Unusable("its last turn is the assistant's")
    if not any(message["role"] == "user" for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise Unusable(f"messages without a turn of the user (roles: {roles})")
    if not messages[-1]["content"].strip():
        raise Unusable("an empty prompt")
    return messages


def messages_of_row(place: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of one row: its `messages`, or its `prompt` or `query` as a message of the user.

    Raises:
        DataError: it has none, or one that cannot be used; with the place.
    """
    column = next((name for name in PROMPT_COLUMNS[1:] if name in row), None)
    if column is None:
        raise DataError(
            f"{place}: no column messages, prompt or query; present: {', '.join(row) or 'none'}. Rename the one "
            "with the prompt."
        )
    value = row[column]
    try:
        return checked_messages([{"role": "user", "content": value}] if isinstance(value, str) else value)
    except Unusable as error:
        raise DataError(f'{place}, column "{column}": {error}. Mend or remove the row.') from error
