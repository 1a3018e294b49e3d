"""What all tasks that read their rows from sources have in common."""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit import phases
from toolkit.data.encoder import PROMPT_COLUMNS, OnLong, PromptEncoder
from toolkit.data.files import Row, listed, shown, without_added
from toolkit.data.messages import Messages, read_prompt
from toolkit.data.rows import (
    Split,
    Splits,
    Unusable,
    as_dataset,
    check_columns,
    draw_held_out,
    rows_in_memory,
    usable_rows,
    with_first,
)
from toolkit.data.source_kinds import Source, check_part_settings, has_splits, names_of
from toolkit.data.sources import read_rows
from toolkit.data.task import Task
from toolkit.errors import DataError


def _check_positive(field: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise DataError(f"a number from 1 is needed, got {number}.", field=field)


def _others(row: Mapping[str, Any], column: str, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A row's columns beside that of its encoded prompt.

    `messages` beside a text are not passed on: they may hold the response, and a reward would take them for the prompt.
    """
    taken = {column, "messages"} if "prompt" in prompt else {column}
    return {name: item for name, item in row.items() if name not in taken}


@dataclass(frozen=True)
class SourceTask(Task):
    """Rows of a source for training.

    Args:
        tokenizer: with a chat template, unless `chat` is off.
        train: file, folder or hub id, as `toolkit.data.sources` reads them; or several, read one after the other.
        subset: `data_dir` of a hub id, for example "harmless-base"; or several, read one after the other.
        name: configuration of a hub id that has several: "main" for openai/gsm8k.
        split: of a hub id or a saved `DatasetDict`, for training: "train_prefs" for
            HuggingFaceH4/ultrafeedback_binarized. None takes `train`.
        chat: a conversation is written in the tokenizer's chat template, and a prompt that is text becomes a message of
            the user. False writes conversations in hh-rlhf's own form and takes text as it is, with the special tokens
            that the tokenizer adds.
        system: a system message before each prompt that has none. None adds none; "" adds an empty one, which keeps a
            template's own default system message away.
        on_long: whether a prompt or response over its limit is left out, or cut: of a prompt the last tokens stay, of
            a response the first.
        max_train_rows: at most so many rows for training, the first that can be used. None takes all.
    """

    tokenizer: PreTrainedTokenizerBase
    train: str | list[str]
    _: KW_ONLY
    subset: str | list[str] | None = None
    name: str | None = None
    split: str | None = None
    chat: bool = True
    system: str | None = None
    on_long: OnLong = "leave_out"
    max_train_rows: int | None = None

    known_columns: ClassVar[tuple[str, ...]] = ()
    too_long: ClassVar[str] = "the sft stage cuts rows by its max_length"  # what becomes of rows that are
    _packed_as: ClassVar[Mapping[str, Any] | None] = None  # the columns of a data set of encoded rows, by arrow's types
    may_be_plain: ClassVar[bool] = False  # prompts may be ids or mere text, without what was said before

    def __post_init__(self) -> None:
        sources = {field: vars(self).get(field) for field in ("train", "validation")}
        for field, source in {**sources, "subset": self.subset}.items():
            if source == []:
                what = ("part", "one") if field == "subset" else ("source", "a file, a folder or a hub id")
                raise DataError(f"it names no {what[0]}.", field=field, remedy=f"Name {what[1]}.")
        check_part_settings(vars(self))
        check_columns(self.columns, self.known_columns)
        for name, value in vars(self).items():
            if name.startswith("max_"):
                _check_positive(name, value)
        if self.on_long != "leave_out" and not hasattr(self, "max_prompt_length"):
            wrong = f"{self.unit} are not cut here."
            raise DataError(wrong, field="on_long", remedy=f"Take it out: {self.too_long}.")
        if not self.may_be_plain:
            self._encoder.check_template()
        _ = self._encoder  # what does not fit is found before anything is read

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.chat, self.system, self.on_long, vars(self).get("drop_answer"))

    def _encode(self, place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        """One row as the stage reads it; the first of the source may decide how."""
        raise NotImplementedError

    def _read(self, split: str, source: Source, limit: int | None = None) -> Split:
        names = names_of(source)
        own_split = self.split if split == "train" else vars(self).get("validation_split")
        settings: dict[str, Any] = {"subset": self.subset, "name": self.name, "own_split": own_split}
        named_by = split if getattr(self, split, None) is not None else "train"
        sources = (
            with_first(self._noted(one, read_rows(one, field=named_by, split=split, **settings))) for one in names
        )
        rows, source = chain.from_iterable(sources), listed(names)
        return usable_rows(rows, self._encode, self._packed_as, split=split, source=source, limit=limit)

    @cached_property
    def read_from(self) -> set[str]:
        return set()

    def _noted(self, source: str, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows of a source, which is noted once one could be read: a wrong folder may hold anything."""
        for row in rows:
            self.read_from.add(source)
            yield row

    @cached_property
    def _splits(self) -> Mapping[str, Split]:
        return {"train": self._read("train", self.train, self.max_train_rows)}

    def _encode_prompt(
        self, place: str, row: dict[str, Any], first: dict[str, Any], columns: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """A row whose prompt is encoded; its other columns stay."""
        column, prompt = self._encoder.row(place, row, first, columns, getattr(self, "max_prompt_length", 512))
        others = _others(row, column, prompt)
        if "prompt" not in prompt:
            if vars(self).get("drop_answer"):
                wrong = f"{place}: it has no effect on prompts that are token ids."
                raise DataError(wrong, field="drop_answer", remedy="Remove it.")
            prompt["prompt"] = str(self.tokenizer.decode(prompt["input_ids"]))
        return others | prompt

    @staticmethod
    def _prompt_columns(rows: Any) -> dict[str, list[Any]]:
        """Encoded rows as columns, `input_ids` and `prompt` first."""
        names = dict.fromkeys(["input_ids", "prompt", *chain.from_iterable(rows)])
        return {name: [row.get(name) for row in rows] for name in names}

    def prompts_of(self, rows: Any, *, field: str = "train_dataset") -> Dataset:
        """Rows in memory as prompts: texts, or mappings with the columns of a file of prompts, or ready `input_ids`.

        Raises: DataError, of `field`: they are none.
        """
        rows = rows_in_memory(rows, field)
        if isinstance(rows, Dataset) and "input_ids" in rows.column_names:
            return super().prompts_of(rows, field=field)
        given = (dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in rows)
        if isinstance(rows, Dataset):  # as from its folder
            given = ({name: without_added(value) for name, value in row.items()} for row in given)
        numbered = ((f"row {number}", row) for number, row in enumerate(given, 1))

        def encoded(place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
            return self._encode_prompt(place, row, first, self._prompt_columns_in(first))

        part = usable_rows(with_first(numbered), encoded, split=field, source="the rows given")
        if part.left_out:
            phases.tell(f"{field}: {part.report('prompts')}")
        columns = self._prompt_columns(part.rows)
        return as_dataset(columns, place="the rows given", field=field, places=part.places)

    def _prompt_columns_in(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Where a row that is given by hand has its prompt: in a column that the task names, else in one of ours."""
        columns = (self.columns or {}).items()
        named = {ours: theirs for ours, theirs in columns if ours in PROMPT_COLUMNS and theirs in row}
        return named or PROMPT_COLUMNS

    @property
    def chats(self) -> bool:
        return self.chat and self.tokenizer.chat_template is not None

    def prompt_ids(self, messages: Messages) -> list[int]:
        """A conversation as a prompt; its last message alone where prompts are mere text."""
        return self._encoder.typed(messages, plain=not self.converses)

    @property
    def converses(self) -> bool:
        return self.chats or not self.may_be_plain

    def typed(self, text: str) -> dict[str, Any]:
        plain = not self.converses
        encoder = PromptEncoder(self.tokenizer, chat=False) if plain else self._encoder
        try:
            asked = read_prompt(text)
            messages: Messages = [{"role": "user", "content": text}]
            return encoder.prompt(messages if isinstance(asked, str) and not plain else asked)
        except Unusable as reason:
            raise DataError(f'the prompt "{shown(text)}": {reason}.', remedy="Ask in another way.") from reason

    def prompt_of(self, place: str, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        encoder = self._encoder if self.converses else replace(self._encoder, chat=False, system=None)
        try:
            column, prompt = encoder.row(place, row, row, self._prompt_columns_in(row), None)
        except Unusable as reason:
            raise DataError(f"{place}: {reason}.", remedy="Mend or remove the row.") from reason
        decoded = prompt.get("prompt") or str(self.tokenizer.decode(prompt["input_ids"]))
        text = prompt["messages"][-1]["content"] if "messages" in prompt else decoded
        return text, _others(row, column, prompt) | {"prompt": decoded} | prompt


@dataclass(frozen=True)
class SplitTask(SourceTask):
    """Rows for training and for validation, from two sources or from one.

    Args:
        validation: as `train`. None holds `validation_size` rows of `train` out or, where that is None too,
            takes the `test` split of a hub id or a saved `DatasetDict`.
        validation_split: of a hub id or a saved `DatasetDict`, held out: of `validation` or, where that is None, of
            `train`, of which no other rows are then held out. None takes `test`, or `validation` where there is none.
        validation_size: rows of `train` to hold out where `validation` and `validation_split` are None; a few more if
            prompts repeat, since rows with the same prompt stay together.
        seed: draws the rows to hold out.
        max_validation_rows: at most so many rows for validation, the first that can be used. None takes all.
    """

    validation: str | list[str] | None = None
    _: KW_ONLY
    validation_split: str | None = None
    validation_size: int | None = None
    seed: int = 0
    max_validation_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("validation_size", self._number_held_out)
        if self._number_held_out is None and self.validation_size is not None and type(self).validation_size is None:
            other = "validation" if self.validation is not None else "validation_split"
            raise DataError(f"it has no effect with {other}.", field="validation_size", remedy="Remove one of them.")

    @property
    def _number_held_out(self) -> int | None:
        """How many of the training rows are held out; None where held-out rows have a source or split of their own."""
        return self.validation_size if self.validation is None and self.validation_split is None else None

    def _prompts_of(self, rows: Dataset) -> list[tuple[int, ...]]:
        """The prompts of encoded rows: those that share one are held out together."""
        raise NotImplementedError

    @cached_property
    def _splits(self) -> Mapping[str, Split]:
        if self._number_held_out is not None:
            # All are read: another limit draws no other rows.
            every = self._read("train", self.train)
            prompts = self._prompts_of(every.rows)
            source, left_out = listed(names_of(self.train)), every.listed()
            held_out = draw_held_out(prompts, self._number_held_out, seed=self.seed, source=source, left_out=left_out)
            rest = sorted({*range(len(every.rows))}.difference(held_out))
            return {
                "train": every.take(rest[: self.max_train_rows]),
                "validation": replace(every.take(held_out[: self.max_validation_rows]), left_out=()),
            }
        if self.validation is None and not has_splits(self.train):
            remedy = f"Name a source of held-out {self.unit}, or hold some of train out with validation_size."
            raise DataError("it is missing.", field="validation", remedy=remedy)
        held_out_of = self.train if self.validation is None else self.validation

        def train() -> Split:
            if self.validation is None:
                _ = self._splits["validation"]  # that the source has none is told before all of it is encoded
            return self._read("train", self.train, self.max_train_rows)

        validation = partial(self._read, "validation", held_out_of, self.max_validation_rows)
        return Splits(train=train, validation=validation)

    @cached_property
    def _shared(self) -> int:
        """Held-out rows whose prompt is trained on, too."""
        trained, held_out = (self._prompts_of(self._splits[split].rows) for split in ("train", "validation"))
        return sum(map(set(trained).__contains__, held_out))

    def report(self, *splits: str) -> str | None:
        shared = 0 if splits else self._shared
        trained_on = f"; {shared} of these have a prompt that is trained on, too" if shared else ""
        return f"{super().report(*splits)}{trained_on}"
