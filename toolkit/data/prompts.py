"""Prompts for PPO from a file, a folder or the hub: as text, as messages, or as token ids.

Rows that cannot be used are left out, counted by reason, and reported with their place: never dropped in silence.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from toolkit.data.chat import chat_prompt_ids
from toolkit.data.columns import check_columns
from toolkit.data.left_out import LeftOut, ReportsLeftOut
from toolkit.data.parts import draw_held_out
from toolkit.data.prompt_encoder import PromptEncoder
from toolkit.data.rollouts import Rollout
from toolkit.data.sources import check_hub_settings, read_rows
from toolkit.errors import DataError

_MAPPABLE = ("prompt", "messages", "input_ids")


@dataclass(frozen=True)
class Prompts(ReportsLeftOut):
    """Prompts for PPO. All columns but the prompt's own go to the reward and the metrics.

    A row's prompt is its `input_ids` (token ids, taken as they are), `messages`, `prompt` (text or messages) or
    `query` (text): the first of these that the first row of the source has.

    Args:
        tokenizer: with a chat template, unless prompts are token ids or `chat` is off.
        train: file, folder or hub id, as `toolkit.data.sources` reads them.
        validation: likewise; of a hub id or a saved `DatasetDict` its `test` split. None holds rows of `train` out.
        subset: `data_dir` of a hub id.
        name: of a hub id's configuration, where it has several: "main" for openai/gsm8k.
        validation_size: rows of `train` to hold out where `validation` is None; a few more if prompts repeat, since
            rows with the same prompt stay together.
        seed: draws the rows to hold out.
        columns: where the prompt is, if the source has other names: `prompt`, `messages` or `input_ids` to the
            source's column. Columns that it does not name are then no prompts.
        chat: text becomes a message of the user in the tokenizer's chat template, and a dialogue in hh-rlhf's form a
            conversation. False takes it as it is, with the special tokens that the tokenizer adds and, after a
            dialogue, the `Assistant:` that asks for the answer.
        system: a system message before each prompt that has none; None gives none, and "" an empty one, which keeps
            a template's own default system message away.
        max_prompt_length: tokens of a prompt; longer ones are left out.
        max_train_rows: at most so many rows for training, the first that fit. None takes all.
        max_validation_rows: likewise for validation.
    """

    tokenizer: PreTrainedTokenizerBase
    train: str
    validation: str | None = None
    subset: str | None = None
    name: str | None = None
    validation_size: int = 100
    seed: int = 0
    columns: dict[str, str] | None = None
    chat: bool = True
    system: str | None = None
    max_prompt_length: int = 512
    max_train_rows: int | None = None
    max_validation_rows: int | None = None
    _left_out: LeftOut = field(default_factory=LeftOut, init=False, repr=False, compare=False)
    _unit: ClassVar[str] = "prompts"

    def __post_init__(self) -> None:
        check_hub_settings(self.train, self.validation, subset=self.subset, name=self.name)
        check_columns(self.columns, _MAPPABLE)
        if self.system is not None and not self.chat:
            raise DataError("data.system has no effect with data.chat=false. Remove one of them.")
        limits = ("max_prompt_length", "max_train_rows", "max_validation_rows", "validation_size")
        for name in limits[: None if self.validation is None else -1]:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"data.{name}: a number from 1 is needed, got {value}.")

    def _read(self, split: str, source: str, limit: int | None) -> Dataset:
        rows = read_rows(source, setting=f"data.{split}", split=split, subset=self.subset, name=self.name)
        encode = PromptEncoder(self.tokenizer, self.columns, self.chat, self.system, self.max_prompt_length)
        kept = self._left_out.usable(split, rows, encode, source=source, limit=limit)
        return _as_dataset(kept, f"data.{split}: {source}")

    @cached_property
    def _splits(self) -> dict[str, Dataset]:
        if self.validation is not None:
            return {
                "train": self._read("train", self.train, self.max_train_rows),
                "validation": self._read("validation", self.validation, self.max_validation_rows),
            }
        # All is read whatever max_train_rows is, so that another limit does not draw other rows for validation.
        every = self._read("train", self.train, None)
        ids = [tuple(row) for row in every["input_ids"][:]]
        held_out = draw_held_out(ids, self.validation_size, seed=self.seed, source=self.train)
        self._left_out.rows["validation"] = []
        rest = [row for row in range(len(every)) if row not in held_out]
        rows = {"train": rest[: self.max_train_rows], "validation": sorted(held_out)[: self.max_validation_rows]}
        places = self._left_out.kept["train"]
        self._left_out.kept |= {split: [places[row] for row in chosen] for split, chosen in rows.items()}
        return {split: every.select(chosen) for split, chosen in rows.items()}

    @property
    def chats(self) -> bool:
        """Whether prompts are conversations, to which what was said before belongs."""
        return self.chat and self.tokenizer.chat_template is not None

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as a prompt; its last message alone where prompts are plain text.

        Raises:
            DataError: the chat template refuses it.
        """
        if self.chats:
            return chat_prompt_ids(self.tokenizer, messages, self.system)
        return list(self.tokenizer.encode(messages[-1]["content"]))

    def prompts(self, split: str) -> Dataset:
        """Prompts; columns `input_ids`, `prompt` (text), and all that the source has beside its own prompt.

        "test" is "validation". A column that some rows lack is None there.
        """
        return self._splits["train" if split == "train" else "validation"]

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """None of its own: what counts is the reward's score."""
        return {}


def _as_dataset(rows: list[dict[str, Any]], place: str) -> Dataset:
    """Rows to columns, `input_ids` and `prompt` first."""
    columns = []
    for name in dict.fromkeys(["input_ids", "prompt", *chain.from_iterable(rows)]):
        try:
            columns.append(Dataset.from_dict({name: [row.get(name) for row in rows]}))
        except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
            raise DataError(
                f'{place}: column "{name}" does not hold values of one type ({error}). Mend or remove it.'
            ) from error
    return concatenate_datasets(columns, axis=1)
