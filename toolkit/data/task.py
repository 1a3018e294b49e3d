"""What a run asks of its data."""

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.encoder import padded
from toolkit.data.messages import Messages, messages_of_row
from toolkit.data.rollouts import Rollout
from toolkit.data.rows import Split, as_dataset, rows_in_memory, values_of
from toolkit.errors import DataError

Kind = Literal["demonstrations", "pairs", "labelled", "prompts", "rated"]
_NEEDED_BY = {"demonstrations": "sft", "pairs": "reward", "labelled": "reward", "prompts": "ppo", "rated": "q"}


class Task:
    """Data of the kinds that stages train on, and the metrics of a rollout.

    A task has some of five kinds: `demonstrations` for sft, `pairs` or `labelled` sequences for the reward stage,
    `prompts` for PPO and `rated` responses for the q stage. Each is asked for by split: "train", "validation" or, for
    prompts, "test". What a task does not override, it does not have.
    """

    task: ClassVar[str]  # its name in a recipe
    unit: ClassVar[str] = ""  # what its rows are, if it reads any
    tokenizer: PreTrainedTokenizerBase
    columns: dict[str, str] | None = None  # the source's names of the task's columns, where they are others

    @property
    def chats(self) -> bool:
        """Whether prompts have the chat template of the base around them."""
        return False

    @property
    def converses(self) -> bool:
        """Whether prompts are conversations, to which what was said before belongs."""
        return self.chats

    def dataset(self, kind: Kind, split: str) -> Dataset:
        """The rows of one kind; raises DataError if the task has none of it."""
        return getattr(self, kind)(split)

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

    def prompts_of(self, rows: Any, *, field: str = "train_dataset") -> Dataset:
        """Rows in memory as prompts: texts, or mappings with a column of ours for the prompt, or ready `input_ids`.

        Raises: DataError, of `field`: they are none.
        """
        dataset = rows_in_memory(rows, field)
        if not (isinstance(dataset, Dataset) and "input_ids" in dataset.column_names):
            given = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in dataset]
            numbered = ((f"{field}: row {number}", row) for number, row in enumerate(given, 1))
            read = [row if "input_ids" in row else self.prompt_of(place, row)[1] for place, row in numbered]
            columns = {name: [row.get(name) for row in read] for name in dict.fromkeys(chain.from_iterable(read))}
            dataset = as_dataset(columns, place="the rows given", field=field)
        known = frozenset(self.tokenizer.get_vocab().values())  # not all ids below their number, where there is a gap
        for number, ids in enumerate(values_of(dataset, "input_ids"), 1):
            if not (isinstance(ids, list) and ids and all(type(i) is int and i in known for i in ids)):
                wrong = f"row {number}: input_ids is {reprlib.repr(ids)}, and ids of known tokens are needed."
                raise DataError(wrong, field=field, remedy="Mend or remove the row.")
            if padded(ids, self.tokenizer):
                wrong = f"row {number}: input_ids has padding ({self.tokenizer.pad_token}), which would be read as text"
                raise DataError(f"{wrong}.", field=field, remedy="Give the ids without it.")
        return dataset

    def rated(self, split: str) -> Dataset:
        """Columns `prompt_ids`, `response_ids`, `rewards` (a number or None a token) and `ended`."""
        raise self._lacks("rated")

    def _lacks(self, kind: Kind) -> DataError:
        stage = _NEEDED_BY[kind]
        wrong = f'"{self.task}" has no {kind} data, which the {stage} stage needs.'
        own = "" if stage == "ppo" else f", or give that stage data of its own: {stage}_data"
        return DataError(wrong, field="task", remedy=f"Name another task{own}.")

    def prompt_ids(self, messages: Messages) -> list[int]:
        """A conversation that a person typed, as a prompt; raises DataError if it cannot be one."""
        raise self._lacks("prompts")

    def typed(self, text: str) -> dict[str, Any]:
        """A text that a person typed as the row of a prompt, as training has it: where prompts may be dialogues, as
        a turn of one. Raises DataError if it cannot be one."""
        return self._asked([{"role": "user", "content": text}])

    def _asked(self, messages: Messages) -> dict[str, Any]:
        ids = self.prompt_ids(messages)
        row = {"input_ids": ids, "prompt": str(self.tokenizer.decode(ids))}
        return row | ({"messages": messages} if self.chats else {})

    def prompt_of(self, place: str, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The prompt of a row of another file as text, and the row as a stage has it, with `input_ids`; raises
        DataError, with the place, if it has none."""
        messages = messages_of_row(place, row)
        return messages[-1]["content"], {**row, **self._asked(messages)}

    metric_names: ClassVar[tuple[str, ...]] = ()
    """Of what `metrics` gives."""

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Figures of a rollout beside the reward's score; none if the score is what counts."""
        return {}

    @property
    def read_from(self) -> set[str]:
        """The sources of which rows have been read."""
        return set()

    @property
    def _splits(self) -> Mapping[str, Split]:
        """The rows that are read from sources, by split."""
        return {}

    def _rows_of(self, stage: str, split: str) -> Split:
        """Those that a stage gets."""
        return self._splits[split]

    def report(self, *splits: str) -> str | None:
        """One line on the rows that were read and left out, of these splits or of all; None for a task that reads
        none."""
        parts = ((split, self._splits[split]) for split in self._splits if split in (splits or self._splits))
        return " | ".join(f"{split}: {part.report(self.unit)}" for split, part in parts) or None

    @property
    def left_out(self) -> dict[str, Counter[str]]:
        """How many rows were left out for which reason, for each split that is read."""
        return {split: part.counts() for split, part in self._splits.items()}

    def left_out_rows(self) -> list[dict[str, str]]:
        """Every row left out, with the keys `split`, `place` and `reason`."""
        rows = ((split, *row) for split, part in self._splits.items() for row in part.left_out)
        return [{"split": split, "place": place, "reason": reason} for split, place, reason in rows]

    def prompt_places(self, split: str) -> Sequence[str]:
        """The place in a source of each row of `prompts`; of a task that makes them none."""
        return self._splits[split].places if split in self._splits else ()

    def row_places(self, stage: str, *splits: str) -> list[dict[str, str]]:
        """Which rows of the sources a stage has, of these splits or of all, with the keys `split` and `place`."""
        wanted = [split for split in self._splits if not splits or split in splits]
        rows = ((split, place) for split in wanted for place in self._rows_of(stage, split).places)
        return [{"split": split, "place": place} for split, place in rows]
