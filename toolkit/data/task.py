"""What a run asks of its data, and what all tasks that read their rows from sources have in common."""

from collections import Counter
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.encoder import PromptEncoder
from toolkit.data.messages import Messages
from toolkit.data.rollouts import Rollout
from toolkit.data.rows import RowEncoder, Split, check_columns, draw_held_out, usable_rows
from toolkit.data.sources import check_hub_settings, has_splits, read_rows
from toolkit.errors import DataError

Kind = Literal["demonstrations", "pairs", "labelled", "prompts", "rated"]
_NEEDED_BY = {"demonstrations": "sft", "pairs": "reward", "labelled": "reward", "prompts": "ppo", "rated": "q"}


class Task:
    """Data of the kinds that stages train on, and the metrics of a rollout.

    A task has some of five kinds: `demonstrations` for sft, `pairs` or `labelled` sequences for the reward stage,
    `prompts` for PPO and `rated` responses for the q stage. Each is asked for by split: "train", "validation" or, for
    prompts, "test". What a task does not override, it does not have.

    Attributes:
        task: its name in a recipe.
        tokenizer: of the ids.
        columns: the source's names of the task's columns, where they are others.
        chats: whether prompts are conversations, to which what was said before belongs.
    """

    task: ClassVar[str]
    tokenizer: PreTrainedTokenizerBase
    columns: dict[str, str] | None = None

    @property
    def chats(self) -> bool:
        return False

    def dataset(self, kind: Kind, split: str) -> Dataset:
        """The rows of one kind; raises DataError if the task has none of it."""
        rows: Dataset = getattr(self, kind)(split)
        return rows

    def demonstrations(self, split: str) -> Dataset:
        """Columns `input_ids` and `labels`, −100 where a token is not part of the loss."""
        raise self._lacks("demonstrations")

    def pairs(self, split: str) -> Dataset:
        """Columns `chosen_ids`, `rejected_ids`, `prompt_length` (tokens) and, where rows have one, `margin`."""
        raise self._lacks("pairs")

    def labelled(self, split: str) -> Dataset:
        """Whole sequences with a class each; columns `input_ids`, `labels`."""
        raise self._lacks("labelled")

    def prompts(self, split: str) -> Dataset:
        """Column `input_ids`, and those that go to the reward and the metrics."""
        raise self._lacks("prompts")

    def rated(self, split: str) -> Dataset:
        """Columns `prompt_ids`, `response_ids`, `rewards` (a number or None a token) and `ended`."""
        raise self._lacks("rated")

    def _lacks(self, kind: Kind) -> DataError:
        wrong = f'"{self.task}" has no {kind} data, which the {_NEEDED_BY[kind]} stage needs.'
        return DataError(wrong, field="task", remedy="Name another task, or give that stage data of its own.")

    def prompt_ids(self, messages: Messages) -> list[int]:
        """A conversation that a person typed, as a prompt; raises DataError if it cannot be one."""
        raise self._lacks("prompts")

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Figures of a rollout beside the reward's score; none if the score is what counts."""
        return {}

    def report(self) -> str | None:
        """One line on the rows that were read and left out; None for a task that reads none."""
        return None

    @property
    def left_out(self) -> dict[str, Counter[str]]:
        """How many rows were left out for which reason, for each split that is read."""
        return {}

    def left_out_rows(self) -> list[dict[str, str]]:
        """Every row left out, with the keys `split`, `place` and `reason`."""
        return []

    def row_places(self, stage: str) -> list[dict[str, str]]:
        """Which rows of the sources a stage has, with the keys `split` and `place`."""
        return []


def _check_positive(field: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise DataError(f"a number from 1 is needed, got {number}.", field=field)


@dataclass(frozen=True)
class SourceTask(Task):
    """Rows of a source for training.

    Args:
        tokenizer: with a chat template, unless `chat` is off.
        train: file, folder or hub id, as `toolkit.data.sources` reads them.
        subset: `data_dir` of a hub id, for example "harmless-base".
        name: of a hub id's configuration, where it has several: "main" for openai/gsm8k.
        chat: a conversation is written in the tokenizer's chat template, and a prompt that is text becomes a message of
            the user. False writes conversations in hh-rlhf's own form and takes text as it is, with the special tokens
            that the tokenizer adds.
        system: a system message before each prompt that has none; None gives none, and "" an empty one, which keeps
            a template's own default system message away.
        max_train_rows: at most so many rows for training, the first that can be used. None takes all.
    """

    tokenizer: PreTrainedTokenizerBase
    train: str
    _: KW_ONLY
    subset: str | None = None
    name: str | None = None
    chat: bool = True
    system: str | None = None
    max_train_rows: int | None = None

    unit: ClassVar[str]  # what its rows are
    known_columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_hub_settings(*self._sources, subset=self.subset, name=self.name)
        check_columns(self.columns, self.known_columns)
        for name, value in vars(self).items():
            if name.startswith("max_"):
                _check_positive(name, value)
        _ = self._encoder  # what does not fit is found before anything is read

    @property
    def _sources(self) -> list[str]:
        return [self.train]

    @property
    def chats(self) -> bool:
        return self.chat

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.chat, self.system)

    def _encode(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """One row as the stage reads it."""
        raise NotImplementedError

    def _row_encoder(self) -> RowEncoder:
        """For the rows of one source, where the first may decide how the others are read."""
        return self._encode

    def _read(self, split: str, source: str, limit: int | None = None) -> Split:
        rows = read_rows(source, field=split, split=split, subset=self.subset, name=self.name)
        return usable_rows(rows, self._row_encoder(), split=split, source=source, limit=limit)

    @cached_property
    def _splits(self) -> dict[str, Split]:
        return {"train": self._read("train", self.train, self.max_train_rows)}

    def _rows_of(self, stage: str, split: str) -> Split:
        """The rows of a split that a stage gets."""
        return self._splits[split]

    def prompt_ids(self, messages: Messages) -> list[int]:
        return self._encoder.typed(messages)

    def report(self) -> str:
        return " | ".join(f"{split}: {part.report(self.unit)}" for split, part in self._splits.items())

    @property
    def left_out(self) -> dict[str, Counter[str]]:
        return {split: part.counts() for split, part in self._splits.items()}

    def left_out_rows(self) -> list[dict[str, str]]:
        rows = ((split, *row) for split, part in self._splits.items() for row in part.left_out)
        return [{"split": split, "place": place, "reason": reason} for split, place, reason in rows]

    def row_places(self, stage: str) -> list[dict[str, str]]:
        rows = ((split, place) for split in self._splits for place in self._rows_of(stage, split).places)
        return [{"split": split, "place": place} for split, place in rows]


@dataclass(frozen=True)
class SplitTask(SourceTask):
    """Rows for training and for validation, from two sources or from one.

    Args:
        validation: file, folder or hub id. None holds `validation_size` rows of `train` out or, where that is None too,
            takes the `test` split of a hub id or a saved `DatasetDict`.
        validation_size: rows of `train` to hold out where `validation` is None; a few more if prompts repeat, since
            rows with the same prompt stay together.
        seed: draws the rows to hold out.
        max_validation_rows: at most so many rows for validation, the first that can be used. None takes all.
    """

    validation: str | None = None
    _: KW_ONLY
    validation_size: int | None = None
    seed: int = 0
    max_validation_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation is None:
            _check_positive("validation_size", self.validation_size)
        elif self.validation_size is not None and type(self).validation_size is None:
            raise DataError("it has no effect with validation.", field="validation_size", remedy="Remove one of them.")

    @property
    def _sources(self) -> list[str]:
        return [self.train] if self.validation is None else [self.train, self.validation]

    def _prompts_of(self, rows: Any) -> list[tuple[int, ...]]:
        """The prompts of encoded rows: those that share one are held out together."""
        return [tuple(row["input_ids"]) for row in rows]

    @cached_property
    def _splits(self) -> dict[str, Split]:
        if self.validation is None and self.validation_size is not None:
            # All are read: another limit draws no other rows.
            every = self._read("train", self.train)
            prompts = self._prompts_of(every.rows)
            held_out = draw_held_out(prompts, self.validation_size, seed=self.seed, source=self.train)
            rest = sorted({*range(len(every.rows))}.difference(held_out))
            return {
                "train": every.take(rest[: self.max_train_rows]),
                "validation": replace(every.take(held_out[: self.max_validation_rows]), left_out=()),
            }
        if self.validation is None and not has_splits(self.train):
            remedy = f"Name a source of held-out {self.unit}, or hold some of train out with validation_size."
            raise DataError("it is missing.", field="validation", remedy=remedy)
        return {
            "train": self._read("train", self.train, self.max_train_rows),
            "validation": self._read("validation", self.validation or self.train, self.max_validation_rows),
        }
