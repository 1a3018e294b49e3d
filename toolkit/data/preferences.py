"""Preference pairs for the reward stage, their better responses for sft, and their prompts for PPO."""

import pickle
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import chain, cycle
from typing import Any, ClassVar, Literal

import pyarrow as pa
from datasets import Dataset

from toolkit.data.encoder import within_limit
from toolkit.data.messages import BESIDE_AN_INSTRUCTION, refuse_parts
from toolkit.data.pairs import Pair, read_pair, repeats_prompt
from toolkit.data.rows import (
    PARTS,
    SHOWN,
    Split,
    Unusable,
    as_dataset,
    draw_parts,
    each_of,
    in_memory,
    packed,
    renamed,
    tables_of,
)
from toolkit.data.source_kinds import Source
from toolkit.data.source_task import SplitTask
from toolkit.errors import DataError, did_you_mean

Made = Literal["other_prompt", "cut"]
_TOKENS = pa.list_(pa.int64())
_SIDES = {"chosen_ids": _TOKENS, "rejected_ids": _TOKENS, "prompt_length": pa.int64()}
_COLUMNS = {**_SIDES, "margin": pa.float64(), "has_margin": pa.bool_(), "repeats": pa.bool_(), "asked": pa.binary()}
_REPEAT = (
    "; in every row chosen and rejected begin with the text of prompt, which is learnt as part of a response: take it "
    "off them, or take the column prompt out, and what both begin with is the prompt"
)


@dataclass(frozen=True)
class Preferences(SplitTask):
    """Pairs for the reward stage, their chosen responses for sft, and their prompts for PPO.

    Args:
        seed: draws the rows to hold out, and the parts.
        max_prompt_length: tokens of a prompt; pairs with longer ones are left out.
        max_response_length: tokens of a response, end of sequence included; likewise.
        parts: how many of the training pairs each of the stages `sft`, `reward` and `ppo` gets: disjoint, pairs with
            the same prompt together, drawn with `seed`. A stage that is not named gets what is left over. None gives
            every stage all pairs.
        made_pairs: for each training pair the reward also trains on a made one, of these kinds in turn: the chosen
            response is better than that to another prompt (`other_prompt`; Liu et al. 2024, arXiv 2409.13156), or than
            up to four fifths of itself, ended there (`cut`). None makes none.
        columns: the source's names of the columns `prompt`, `chosen`, `rejected` and `margin`, where they are others.
    """

    _: KW_ONLY
    max_prompt_length: int = 256
    max_response_length: int = 256
    parts: dict[str, int] | None = None
    made_pairs: list[Made] | None = None
    columns: dict[str, str] | None = None

    task: ClassVar[str] = "preferences"
    unit: ClassVar[str] = "pairs"
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected", "margin")
    _packed_as: ClassVar[Any] = _COLUMNS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.made_pairs == []:
            raise DataError("it names no kind.", field="made_pairs", remedy="Name other_prompt or cut, or remove it.")
        for stage, number in (self.parts or {}).items():
            if stage not in PARTS:
                hint = did_you_mean(stage, PARTS) or f"The names are {', '.join(PARTS)}."
                raise DataError(f'no stage is called "{stage}".', field="parts", remedy=hint)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise DataError(f"a whole number from 1 is needed, got {number!r}.", field=f"parts.{stage}")

    def _encode(self, place: str, row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        """The encoded pair: both sides with the prompt, the prompt itself, and the margin where the row has one."""
        pair, prompt = self._pair_of(place, row, self.max_prompt_length)
        chosen, rejected = (self._encoder.response(text, prompt) for text in (pair.chosen, pair.rejected))
        if chosen == rejected:
            raise Unusable("chosen and rejected are equal")
        limit, long = self.max_response_length, self.on_long
        chosen, rejected = (within_limit(ids, "response", limit, long) for ids in (chosen, rejected))
        if chosen == rejected:
            raise Unusable("chosen and rejected are equal once cut")
        asked = prompt["input_ids"]
        sides = {"chosen_ids": asked + chosen, "rejected_ids": asked + rejected, "prompt_length": len(asked)}
        margin = {"margin": pair.margin, "has_margin": self._margin_column in row}
        # As bytes that stay in this process: messages may hold what no column can, or JSON, as they may a date.
        told = {name: value for name, value in prompt.items() if name != "input_ids"}
        return {**sides, **margin, "repeats": repeats_prompt(pair), "asked": pickle.dumps(told)}

    def _pair_of(self, place: str, row: dict[str, Any], limit: int | None) -> tuple[Pair, dict[str, Any]]:
        """The pair of a row, and its prompt encoded."""
        named = renamed(place, row, self.columns, optional="margin")
        pair = read_pair(place, named)
        if self.chat and isinstance(pair.prompt, str) and named.get("prompt") is None:
            # What the texts begin with becomes a turn, whose end the template writes.
            pair = replace(pair, prompt=pair.prompt.rstrip())
        mapped = (self.columns or {}).get("prompt", "prompt") != "prompt"
        refuse_parts(named, pair.prompt, self.system, BESIDE_AN_INSTRUCTION if mapped else ())
        return pair, self._encoder.prompt(pair.prompt, limit)

    @property
    def _margin_column(self) -> str:
        return (self.columns or {}).get("margin", "margin")

    def _read(self, split: str, source: Source, limit: int | None = None) -> Split:
        part = super()._read(split, source, limit)
        # Rows may lack it, all of them that name it wrongly.
        if split == "train" and "margin" in (self.columns or {}) and not any(part.rows["has_margin"][:]):
            wrong = f'no row of {split} that can be used has the column "{self._margin_column}".'
            raise DataError(wrong, field="columns.margin", remedy="Correct the name, or remove it.")
        return part

    def prompt_of(self, place: str, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """As of every task; of a pair that has its prompt in its sides, that, as PPO has it."""
        sides = all((self.columns or {}).get(side, side) in row for side in ("chosen", "rejected"))
        if not sides or any(column in row for column in self._prompt_columns_in(row).values()):
            return super().prompt_of(place, row)
        try:
            _, prompt = self._pair_of(place, row, None)
        except Unusable as reason:
            raise DataError(f"{place}: {reason}.", remedy="Mend or remove the row.") from reason
        return prompt["messages"][-1]["content"] if "messages" in prompt else prompt["prompt"], prompt

    def _prompts_of(self, rows: Dataset) -> list[tuple[int, ...]]:
        return [tuple(row["chosen_ids"][: row["prompt_length"]]) for row in each_of(rows)]

    @cached_property
    def _drawn(self) -> dict[str, list[int]]:
        """Training rows by stage."""
        part = self._splits["train"]
        return draw_parts(self._prompts_of(part.rows), self.parts or {}, seed=self.seed, left_out=part.listed())

    def _rows_of(self, stage: str, split: str) -> Split:
        part = self._splits[split]
        if split != "train" or self.parts is None:
            return part
        rows = self._drawn[stage if stage in PARTS else "ppo"]  # of other stages the prompts alone count
        if not rows:
            wrong = f"they take all {len(part.rows)} pairs and leave none for the {stage} stage."
            raise DataError(wrong, field="parts", remedy=f"Name a number for it with parts.{stage}.")
        return part.take(rows)

    def pairs(self, split: str) -> Dataset:
        """For `trl.RewardTrainer`; `margin` is 0 where a row has none, if any row of the split has one."""
        self._encoder.check_answers()
        made = [self._made] if split == "train" and self.made_pairs else []
        parts = [self._rows_of("reward", split).rows, *made]
        table = pa.concat_tables(chain.from_iterable(map(tables_of, parts)))
        sides, margins = table.select(list(_SIDES)), table["margin"]
        if margins.null_count < len(margins):
            sides = sides.append_column("margin", pa.array([margin or 0.0 for margin in margins.to_pylist()]))
        return in_memory(sides)

    @cached_property
    def _made(self) -> Dataset:
        """`made_pairs` of the reward stage's rows."""
        rows = self._rows_of("reward", "train").rows
        return packed(_made(rows, self.made_pairs or (), end=self.tokenizer.eos_token_id, seed=self.seed), _COLUMNS)

    def report(self, *splits: str) -> str | None:
        made = "" if splits or not self.made_pairs else f"; {len(self._made)} pairs more are made of the reward's"
        repeat = "" if splits or not all(self._splits["train"].rows["repeats"][:]) else _REPEAT
        return f"{super().report(*splits)}{made}{repeat}"

    def demonstrations(self, split: str) -> Dataset:
        """Prompts with their chosen responses, which alone are part of the loss."""
        self._encoder.check_answers()
        rows = each_of(self._rows_of("sft", split).rows.select_columns(["chosen_ids", "prompt_length"]))
        shown = ((row["chosen_ids"], row["prompt_length"]) for row in rows)
        return packed(({"input_ids": ids, "labels": [-100] * n + ids[n:]} for ids, n in shown), SHOWN)

    def _asked_once(self, split: str) -> Split:
        part = self._rows_of("ppo", "train" if split == "train" else "validation")
        return part.take(list({asked["prompt"]: number for number, asked in enumerate(_asked(part.rows))}.values()))

    def prompt_places(self, split: str) -> Sequence[str]:
        return self._asked_once(split).places

    def prompts(self, split: str) -> Dataset:
        """Each prompt once, with `messages` if any is a conversation; "test" is "validation"."""
        unique = self._asked_once(split)
        asked = list(_asked(unique.rows))
        names = ["input_ids", "prompt", *(["messages"] if any("messages" in row for row in asked) else [])]
        columns = {name: [row.get(name) for row in asked] for name in names}
        field = "validation" if split != "train" else split
        return as_dataset(columns, place=f"the prompts of {split}", field=field, places=unique.places)


def _asked(rows: Dataset) -> Iterator[dict[str, Any]]:
    """The encoded prompt of each pair."""
    for row in each_of(rows.select_columns(["chosen_ids", "prompt_length", "asked"])):
        yield {"input_ids": row["chosen_ids"][: row["prompt_length"]], **pickle.loads(row["asked"])}


def _made(rows: Dataset, kinds: Sequence[Made], *, end: int | None, seed: int) -> Iterator[dict[str, Any]]:
    """A pair beside each encoded one, of these kinds in turn; none of a response that is too short, or of one that all
    other prompts have."""
    drawn = random.Random(seed)
    pairs = [_better(row) for row in each_of(rows.select_columns(["chosen_ids", "prompt_length"]))]
    for (asked, said), kind in zip(pairs, cycle(kinds), strict=False):
        ended = said[-1:].tolist() == [end]
        words = len(said) - ended
        if kind == "cut":
            ends = array("i", [] if end is None else [end])  # also where a limit has cut the response itself
            worse = said[: max(1, int(0.8 * drawn.random() * words))] + ends if words > 1 else None
        else:
            first = drawn.randrange(len(pairs))
            others = (pairs[(first + step) % len(pairs)] for step in range(len(pairs)))
            worse = next((of_other for other, of_other in others if other != asked and of_other != said), None)
        if worse is not None:
            sides = {"chosen_ids": (asked + said).tolist(), "rejected_ids": (asked + worse).tolist()}
            yield {**sides, "prompt_length": len(asked)}


def _better(row: dict[str, Any]) -> "tuple[array[int], array[int]]":
    """The prompt and the chosen response of an encoded pair, in a small part of a list's memory."""
    ids = array("i", row["chosen_ids"])
    return ids[: row["prompt_length"]], ids[row["prompt_length"] :]
