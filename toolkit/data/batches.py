"""Rows of token ids to padded batches, in an order whose place can be saved; and whether two runs have the same rows.

Every mask comes from the lengths.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from toolkit.errors import DataError


def pad_rows(
    rows: Sequence[Sequence[Any]], *, pad_token_id: int, side: str, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged rows padded to the longest, rounded up to a multiple, and a mask, 1 at real entries: int64 (B, L) each."""
    longest = -(-max(len(row) for row in rows) // multiple) * multiple

    def padded(row: Sequence[Any], value: int) -> list[Any]:
        fill = [value] * (longest - len(row))
        return [*fill, *row] if side == "left" else [*row, *fill]

    mask = torch.tensor([padded([1] * len(row), 0) for row in rows])
    return torch.tensor([padded(row, pad_token_id) for row in rows]), mask


@dataclass(frozen=True)
class PromptCollator:
    """Left-pads prompts for generation: `input_ids` and `attention_mask` (B, P).

    Beside them `prompt_ids`, B lists without padding, and `columns`, the others by name.
    """

    pad_token_id: int
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if any(not isinstance(row, Mapping) or "input_ids" not in row for row in rows):
            wrong = "prompts need to be rows with input_ids, and some have none."
            raise DataError(wrong, remedy="Make them of texts or rows: recipe.task.prompts_of(prompts).")
        prompt_ids = [list(row["input_ids"]) for row in rows]
        ids, mask = pad_rows(prompt_ids, pad_token_id=self.pad_token_id, side="left", multiple=self.multiple)
        columns = {key: [row[key] for row in rows] for key in rows[0] if key != "input_ids"}
        return {"input_ids": ids, "attention_mask": mask, "prompt_ids": prompt_ids, "columns": columns}


@dataclass(frozen=True)
class LabelledCollator:
    """Right-pads whole sequences with a class label each: `input_ids`, `attention_mask` (B, L), `labels` (B,)."""

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids, mask = pad_rows([row["input_ids"] for row in rows], pad_token_id=self.pad_token_id, side="right")
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


@dataclass(frozen=True)
class RatedCollator:
    """Right-pads rated responses.

    `input_ids` (B, L) are prompt and response without a gap, `prompt_lengths`, `response_lengths` and `ended` (B,);
    `rewards`, `reward_mask` (True where a reward was given) and `labels` (B, T), the response's tokens and −100 after
    them, by which `Trainer` counts what a batch's mean is over.
    """

    pad_token_id: int
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [[*row["prompt_ids"], *row["response_ids"]] for row in rows]
        rewards = [[0.0 if x is None else float(x) for x in row["rewards"]] for row in rows]
        given = [[x is not None for x in row["rewards"]] for row in rows]
        return {
            "input_ids": pad_rows(ids, pad_token_id=self.pad_token_id, side="right", multiple=self.multiple)[0],
            "prompt_lengths": torch.tensor([len(row["prompt_ids"]) for row in rows]),
            "response_lengths": torch.tensor([len(row["response_ids"]) for row in rows]),
            "ended": torch.tensor([bool(row["ended"]) for row in rows]),
            "rewards": pad_rows(rewards, pad_token_id=0, side="right")[0],
            "reward_mask": pad_rows(given, pad_token_id=False, side="right")[0],
            "labels": pad_rows([row["response_ids"] for row in rows], pad_token_id=-100, side="right")[0],
        }


class PlacedDataLoader(DataLoader):
    """A `DataLoader` whose order comes from a generator of its own, and whose place can be saved and restored.

    A place is the generator's state at the beginning of the pass, and how many batches were drawn since. After
    `load_state_dict` the next pass goes on behind them, with the same rows in the same order. A sampler has to draw
    from the same generator.
    """

    generator: torch.Generator
    pass_is_over = False
    """Whether `next_batch` gave the last batch of a pass. To be set back when what is due at its end is done."""
    _pass: Iterator[Any]  # the one that `next_batch` draws from
    _pass_began: torch.Tensor | None  # None between passes

    def __init__(self, dataset: Any, *, generator: torch.Generator, **named: Any):
        super().__init__(dataset, generator=generator, **named)
        self._to_skip = self._first = self._drawn = 0
        self.end_pass()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self._to_skip = self._to_skip, 0
        self._pass_began, self._drawn = self.generator.get_state(), skip
        self._first = skip
        for number, batch in enumerate(super().__iter__(), skip + 1):
            self._drawn = number
            yield batch
        self.end_pass()

    def __len__(self) -> int:
        return len(super()._index_sampler)

    @property
    def _index_sampler(self) -> Any:
        """What the pass takes the numbers of its rows from: those of batches to skip are drawn, their rows not read."""
        return islice(super()._index_sampler, self._first, None)

    def next_batch(self) -> Any:
        """The next batch, of the next pass where one ends."""
        while (batch := next(self._pass, None)) is None:
            self._pass = iter(self)
        if self._drawn == len(self):
            next(self._pass, None)  # ends the pass
            self.pass_is_over = True
        return batch

    def end_pass(self) -> int:
        """Leave the rest of the pass out, and say how many batches: the place is the beginning of the next one."""
        left = len(self) - self._drawn
        if self._to_skip:  # of a place that was loaded: what the batches before it drew is drawn again
            self._to_skip -= 1
            next(iter(self))
        self._pass = iter(())
        self._pass_began, self._drawn = None, 0
        return left

    def state_dict(self) -> dict[str, Any]:
        """The place: `generator`, its state when the pass began (uint8), and `batches` drawn since."""
        began = self.generator.get_state() if self._pass_began is None else self._pass_began
        return {"generator": began, "batches": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place in the next pass."""
        self.generator.set_state(state["generator"])
        self._pass, self._to_skip = iter(()), state["batches"]
        self._pass_began, self._drawn = state["generator"], state["batches"]

    def look(self) -> DataLoader:
        """A loader of the same rows, for whoever wants to see them: whenever it is gone through the pass that would
        begin when it was made, and the place stays where it is."""
        now = self.generator.get_state()
        batches: list[list[int]] = list(
            DataLoader(
                range(len(self.dataset)),  # type: ignore[arg-type]
                batch_sampler=self.batch_sampler,
                generator=self.generator,
                collate_fn=list,
            )
        )
        self.generator.set_state(now)
        own = torch.Generator()  # from which a loader draws a number, sampler or not
        return DataLoader(self.dataset, batch_sampler=batches, collate_fn=self.collate_fn, generator=own)


def data_digest(dataset: Dataset) -> str:
    """SHA-256 of a data set's rows in order, with the names and types of its columns; equal for equal content."""
    sha256 = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        # A copy: of a part of a buffer arrow would also write some bytes of what comes next.
        plain = pa.concat_tables([table, table.slice(0, 0)]).combine_chunks().replace_schema_metadata(None)
        written = pa.BufferOutputStream()
        with pa.ipc.new_stream(written, plain.schema) as stream:
            stream.write_table(plain)
        sha256.update(written.getvalue())
    return sha256.hexdigest()
