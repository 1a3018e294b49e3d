"""Prompts for PPO: as text, as messages, or as token ids."""

from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import ClassVar

from datasets import Dataset, concatenate_datasets

from toolkit.data.encoder import PromptReader
from toolkit.data.messages import Messages
from toolkit.data.rows import RowEncoder, Split
from toolkit.data.task import SplitTask
from toolkit.errors import DataError


@dataclass(frozen=True)
class Prompts(SplitTask):
    """Prompts for PPO. All columns but the prompt's own go to the reward and the metrics.

    A row's prompt is its `input_ids` (token ids, taken as they are), `messages`, `prompt` (text or messages) or
    `query` (text): the first of these that the first row of the source has.

    Args:
        tokenizer: with a chat template, unless prompts are token ids or `chat` is off.
        validation: file, folder or hub id; of a hub id or a saved `DatasetDict` its `test` split. None holds rows of
            `train` out.
        chat: text becomes a message of the user in the tokenizer's chat template, and a dialogue in hh-rlhf's form a
            conversation. False takes it as it is, with the special tokens that the tokenizer adds and, after a
            dialogue, the `Assistant:` that asks for the response.
        columns: where the prompt is, if the source has other names: `prompt`, `messages` or `input_ids` to the
            source's column. Columns that it does not name are then no prompts.
        max_prompt_length: tokens of a prompt; longer ones are left out.
    """

    _: KW_ONLY
    validation_size: int = 100
    columns: dict[str, str] | None = None
    max_prompt_length: int = 512

    task: ClassVar[str] = "prompts"
    unit: ClassVar[str] = "prompts"
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "messages", "input_ids")

    def _row_encoder(self) -> RowEncoder:
        return PromptReader(self._encoder, self.columns, self.max_prompt_length)

    def _read(self, split: str, source: str, limit: int | None = None) -> Split:
        """Rows as columns, `input_ids` and `prompt` first."""
        part, columns = super()._read(split, source, limit), []
        for name in dict.fromkeys(["input_ids", "prompt", *chain.from_iterable(part.rows)]):
            try:
                columns.append(Dataset.from_dict({name: [row.get(name) for row in part.rows]}))
            except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
                wrong = f'{source}: column "{name}" does not hold values of one type ({error}).'
                raise DataError(wrong, field=split, remedy="Mend or remove it.") from error
        return replace(part, rows=concatenate_datasets(columns, axis=1))

    def _prompts_of(self, rows: Dataset) -> list[tuple[int, ...]]:
        return [tuple(ids) for ids in rows["input_ids"][:]]

    @property
    def chats(self) -> bool:
        return self.chat and self.tokenizer.chat_template is not None

    def prompt_ids(self, messages: Messages) -> list[int]:
        """A conversation as a prompt; its last message alone where prompts are plain text."""
        return super().prompt_ids(messages) if self.chats else list(self.tokenizer.encode(messages[-1]["content"]))

    def prompts(self, split: str) -> Dataset:
        """Prompts; columns `input_ids`, `prompt` (text), and all that the source has beside its own prompt.

        "test" is "validation". A column that some rows lack is None there.
        """
        return self._splits["train" if split == "train" else "validation"].rows
