"""Prompts for PPO, as text, messages or token ids; and demonstrations for sft: prompts with responses, or text."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from datasets import Dataset

from toolkit import phases
from toolkit.data.encoder import without_end
from toolkit.data.files import listed
from toolkit.data.messages import (
    BESIDE_AN_INSTRUCTION,
    PARTS,
    Messages,
    checked_messages,
    has_tools,
    part_beside,
    refuse_parts,
    refuse_tools,
    text_or_messages,
)
from toolkit.data.pairs import read_sides
from toolkit.data.rows import SHOWN, Split, Unusable, as_dataset, each_of, present
from toolkit.data.source_kinds import Source, names_of
from toolkit.data.source_task import SplitTask
from toolkit.errors import DataError


@dataclass(frozen=True)
class Prompts(SplitTask):
    """Prompts for PPO. All columns but the prompt's own go to the reward and the metrics.

    A row's prompt is its `input_ids` (token ids, taken as they are), `messages`, `prompt` (text or messages) or
    `query` (text): the first of these that the first row of the source has.

    Args:
        tokenizer: with a chat template, unless prompts are token ids or `chat` is off.
        validation: file, folder or hub id; of a hub id or a saved `DatasetDict` its `test` split. None holds rows of
            `train` out, or takes its `validation_split`.
        chat: text becomes a message of the user in the tokenizer's chat template, and a dialogue in hh-rlhf's form a
            conversation. False takes it as it is, with the special tokens that the tokenizer adds and, after a
            dialogue, the `Assistant:` that asks for the response.
        columns: where the prompt is, if the source has other names: `prompt`, `messages` or `input_ids` to the
            source's column. Columns that it does not name are then no prompts; lines of a text file are in any case.
        drop_answer: takes the last turn off a conversation that ends with the assistant's, as data for sft do. False
            leaves such a row out.
        on_long: whether a prompt over its limit is left out, or cut: its last tokens stay.
        max_prompt_length: tokens of a prompt; longer ones are left out.
    """

    _: KW_ONLY
    validation_size: int = 100
    columns: dict[str, str] | None = None
    drop_answer: bool = False
    max_prompt_length: int = 512

    task: ClassVar[str] = "prompts"
    unit: ClassVar[str] = "prompts"
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "messages", "input_ids")
    may_be_plain: ClassVar[bool] = True

    def _encode(self, place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        lines = place.rpartition(", line ")[0].lower().endswith(".txt")  # which have no columns to be named
        return self._encode_prompt(place, row, first, None if lines else self.columns)

    def _read(self, split: str, source: Source, limit: int | None = None) -> Split:
        part = super()._read(split, source, limit)
        columns = self._prompt_columns(part.rows)
        return replace(part, rows=as_dataset(columns, place=listed(names_of(source)), field=split, places=part.places))

    def _prompts_of(self, rows: Dataset) -> list[tuple[int, ...]]:
        return [tuple(ids) for ids in rows["input_ids"][:]]

    def report(self, *splits: str) -> str | None:
        return f"{super().report(*splits)}{self._not_read(*(self._splits[one].rows for one in splits or self._splits))}"

    def prompts_of(self, rows: Any, *, field: str = "train_dataset") -> Dataset:
        given = super().prompts_of(rows, field=field)
        if told := self._not_read(given):
            phases.tell(f"{field}: {len(given)} {self.unit}{told}")
        return given

    def _not_read(self, *data: Dataset) -> str:
        """What is said of the columns that `_beside` finds."""
        # Of a prompt that is cut the first part is not there to be found.
        counts = Counter(name for rows in data if self.on_long == "leave_out" for name in self._beside(rows))
        told = (
            f'; {count:,} have a column "{name}" that is no part of the prompt: if it should be, write it there'
            for name, count in counts.items()
        )
        return "".join(told)

    def _beside(self, rows: Dataset) -> Iterator[str]:
        """The columns that hold what other tools take for a part of the prompt. A reward may read them."""
        known = [name for name in rows.column_names if name.lower() in (*PARTS, *BESIDE_AN_INSTRUCTION, "tools")]
        asked = [name for name in ("messages", "prompt") if name in rows.column_names]
        for row in each_of(rows.select_columns([*known, *asked])) if known and asked else ():
            for name in known:
                value = row[name]
                if value and not (isinstance(value, dict) and not any(value.values())):
                    prompt = _turns(row.get("messages")) or row.get("prompt") or ""
                    if has_tools({name: value}) or part_beside(
                        {name: value}, prompt, self.system, BESIDE_AN_INSTRUCTION
                    ):
                        yield name

    def prompts(self, split: str) -> Dataset:
        """Prompts; columns `input_ids`, `prompt` (text), and all that the source has beside its own prompt.

        "test" is "validation". A column that some rows lack is None there.
        """
        return self._splits["train" if split == "train" else "validation"].rows


def _turns(value: Any) -> Messages | None:
    """Messages of text; None for anything else, as may stand beside token ids."""
    dicts = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    return value if dicts and all(isinstance(message.get("content"), str) for message in value) else None


@dataclass(frozen=True)
class Answered(SplitTask):
    """Prompts with a response: what `Demonstrations` and `Labelled` read."""

    def _answered(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """`input_ids` of prompt and response, and `labels`, −100 where a token is no part of the response."""
        refuse_tools(row)
        if row.get("messages") is not None:
            messages = checked_messages(row["messages"], answered=True)
            asked: Messages | str = checked_messages(messages[:-1])
            response = str(messages[-1]["content"])
        elif row.get("prompt") is not None and row.get("completion") is not None:
            given, said = (text_or_messages(place, row, column) for column in ("prompt", "completion"))
            asked, response, _ = read_sides(given, said, said)
        elif row.get("text") is not None:
            if not isinstance(row["text"], str):
                raise Unusable("a text that is no text")
            refuse_parts(row, row["text"])
            text = without_end(row["text"], self._encoder.ends)
            ids = self._encoder.ids(text, special=True) if text.strip() else []
            if not ids:
                raise Unusable("an empty text")
            ids = ids if ids[-1] == self.tokenizer.eos_token_id else [*ids, self.tokenizer.eos_token_id]
            return {"input_ids": ids, "labels": list(ids)}
        else:
            raise _nothing_read(place, row)
        refuse_parts(row, asked, self.system)
        self._encoder.check_answers()
        prompt = self._encoder.prompt(asked)
        if not response.strip():
            raise Unusable("an empty response")
        start, ids = prompt["input_ids"], self._encoder.response(response, prompt)
        return {"input_ids": start + ids, "labels": [-100] * len(start) + ids}


@dataclass(frozen=True)
class Demonstrations(Answered):
    """Responses to imitate, for the sft stage.

    A row is `messages` that end with the assistant's, or `prompt` with `completion`, which may repeat it, or `text`.
    With the first two only the last response counts in the loss, with `text` all of it.

    Args:
        on_long: no row is over a limit here, so that cut is refused: the sft stage cuts rows by its max_length.
    """

    task: ClassVar[str] = "demonstrations"
    unit: ClassVar[str] = "demonstrations"
    _packed_as: ClassVar[Any] = SHOWN

    def _encode(self, place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        return self._answered(place, row)

    def _prompts_of(self, rows: Dataset) -> list[tuple[int, ...]]:
        return [tuple(row["input_ids"][: row["labels"].count(-100) or None]) for row in each_of(rows)]

    def demonstrations(self, split: str) -> Dataset:
        return self._splits[split].rows


def _nothing_read(place: str, row: dict[str, Any]) -> Exception:
    """Why no column of a demonstration is read: it is null, or there is none."""
    if row.keys() >= {"prompt", "completion"}:
        return Unusable(f"an empty {'prompt' if row['prompt'] is None else 'response'}")
    if "messages" in row or "text" in row:
        return Unusable("an empty response" if "messages" in row else "an empty text")
    columns = "in the column messages, in prompt and completion, or in text"
    return DataError(f"{place}: a demonstration is {columns}; {present(row)}", remedy="Rename the columns.")
