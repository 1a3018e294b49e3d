"""A prompt and its answer as token ids, the answer as a sampled one would be."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat import chat_prompt, chat_prompt_ids
from toolkit.data.dialogues import dialogue_prompt
from toolkit.errors import DataError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text, as ids, and as messages if it is a conversation."""

    text: str
    ids: list[int]
    messages: list[dict[str, Any]] | None


@dataclass(frozen=True)
class TurnEncoder:
    """Prompts and answers to token ids.

    Args:
        tokenizer: with a chat template, unless `chat` is off.
        chat: a conversation is written in the chat template, and a prompt that is text becomes a message of the user.
            False writes conversations in hh-rlhf's own form and takes text as it is, with the special tokens that the
            tokenizer adds.
        system: a system message before each prompt that has none.

    Raises:
        DataError: the tokenizer has no chat template, or `system` would have no effect.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool
    system: str | None

    def __post_init__(self) -> None:
        if self.chat and self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, and dialogues need one. Use an instruction-tuned checkpoint, "
                "or set data.chat=false for hh-rlhf's own plain form."
            )
        if self.system is not None and not self.chat:
            raise DataError("data.system has no effect with data.chat=false. Remove one of them.")

    def prompt(self, prompt: list[dict[str, Any]] | str) -> EncodedPrompt:
        """A conversation or a text that waits for its answer.

        Raises:
            Unusable: the template refuses the conversation, or the plain form has no name for one of its roles.
        """
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if self.chat else None
        if messages is None:
            text = str(prompt)
        else:
            text = chat_prompt(self.tokenizer, messages, self.system) if self.chat else dialogue_prompt(messages)
        return EncodedPrompt(text, self.tokenizer.encode(text, add_special_tokens=not self.chat), messages)

    def answer(self, text: str, prompt: EncodedPrompt) -> list[int]:
        """The ids of an answer with its end.

        It is tokenised alone and ends as a sampled one does, so that a reward is trained at the very position where it
        is read in PPO. A chat template would add a newline after the end.
        """
        if prompt.messages is not None and not self.chat:
            text = f" {text}"  # hh-rlhf's own, after "Assistant:"
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def asked(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation that a person just typed.

        Raises:
            DataError: the chat template refuses it.
        """
        if self.chat:
            return chat_prompt_ids(self.tokenizer, messages, self.system)
        return list(self.tokenizer.encode(dialogue_prompt(messages)))
