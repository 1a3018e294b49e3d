"""Preference pairs for the reward stage, their better answers for sft, and their prompts for PPO.

Rows that cannot be used are left out, counted by reason, and reported with their place: never dropped in silence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.columns import check_columns, renamed
from toolkit.data.left_out import LeftOut, ReportsLeftOut, Unusable
from toolkit.data.pairs import read_pair
from toolkit.data.parts import check_parts, draw_held_out, draw_parts
from toolkit.data.rollouts import Rollout
from toolkit.data.sources import Row, check_hub_settings, has_splits, read_rows
from toolkit.data.turns import TurnEncoder
from toolkit.errors import DataError

_NUMBERS = ("max_prompt_length", "max_response_length", "max_train_rows", "max_validation_rows", "validation_size")
_COLUMNS = ("prompt", "chosen", "rejected", "margin")


@dataclass(frozen=True)
class Preferences(ReportsLeftOut):
    """Pairs for the reward stage, their chosen responses for sft, and their prompts for PPO.

    Args:
        tokenizer: with a chat template, unless `chat` is off.
        train: file, folder or hub id, as `toolkit.data.sources` reads them.
        validation: likewise; None takes the `test` split of a hub id or a saved `DatasetDict`.
        subset: `data_dir` of a hub id, for example "harmless-base".
        name: of a hub id's configuration, where it has several.
        max_prompt_length: tokens of a prompt; pairs with longer ones are left out.
        max_response_length: tokens of a response, end of sequence included; likewise.
        max_train_rows: at most so many pairs for training, the first that fit. None takes all.
        max_validation_rows: likewise for validation.
        parts: how many of the training pairs each of the stages `sft`, `reward` and `ppo` gets: disjoint, pairs with
            the same prompt together, drawn with `seed`. A stage that is not named gets what is left over. None gives
            every stage all pairs.
        seed: of that draw, and of the one for `validation_size`.
        validation_size: pairs of `train` to hold out where `validation` is None; a few more if prompts repeat, since
            pairs with the same prompt stay together.
        columns: the source's names of the columns `prompt`, `chosen`, `rejected` and `margin`, where they are others.
        chat: a conversation is written in the tokenizer's chat template, and a prompt that is text becomes a message of
            the user. False writes conversations in hh-rlhf's own form and takes text as it is, with the special tokens
            that the tokenizer adds.
        system: a system message before each dialogue; None gives none, and "" an empty one, which keeps a
            template's own default system message away.
    """

    tokenizer: PreTrainedTokenizerBase
    train: str
    validation: str | None = None
    subset: str | None = None
    name: str | None = None
    max_prompt_length: int = 256
    max_response_length: int = 256
    max_train_rows: int | None = None
    max_validation_rows: int | None = None
    parts: dict[str, int] | None = None
    seed: int = 0
    chat: bool = True
    system: str | None = None
    validation_size: int | None = None
    columns: dict[str, str] | None = None
    _left_out: LeftOut = field(default_factory=LeftOut, init=False, repr=False, compare=False)
    _unit: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        check_hub_settings(self.train, self.validation, subset=self.subset, name=self.name)
        _ = self._turns  # what does not fit is found before anything is read
        check_parts(self.parts)
        check_columns(self.columns, _COLUMNS)
        if self.validation_size is not None and self.validation is not None:
            raise DataError("data.validation_size has no effect with data.validation. Remove one of them.")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"data.{name}: a number from 1 is needed, got {value}.")

    def _rows(self, split: str) -> tuple[str, Iterator[Row]]:
        """The split's source and its rows."""
        source = self.train if split == "train" else self.validation or self.train
        if split != "train" and self.validation is None and not has_splits(source):
            raise DataError(
                "data.validation is missing: name a file of held-out pairs with data.validation=…, or hold some of the "
                "training pairs out with data.validation_size=100."
            )
        return source, read_rows(source, setting=f"data.{split}", split=split, subset=self.subset, name=self.name)

    def _encode(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """A tokenised pair; raises `Unusable` with the reason why it cannot be one."""
        pair = read_pair(place, renamed(place, row, self.columns))
        prompt = self._turns.prompt(pair.prompt)
        if len(prompt.ids) > self.max_prompt_length:
            raise Unusable(f"a prompt over {self.max_prompt_length} tokens")
        chosen, rejected = (self._turns.answer(text, prompt) for text in (pair.chosen, pair.rejected))
        if chosen == rejected:
            raise Unusable("chosen and rejected are equal")
        if max(len(chosen), len(rejected)) > self.max_response_length:
            raise Unusable(f"a response over {self.max_response_length} tokens")
        found: dict[str, Any] = {
            "input_ids": prompt.ids,
            "prompt": prompt.text,
            "chosen_ids": prompt.ids + chosen,
            "rejected_ids": prompt.ids + rejected,
        }
        found |= {} if prompt.messages is None else {"messages": prompt.messages}
        return found if pair.margin is None else {**found, "margin": pair.margin}

    @cached_property
    def _turns(self) -> TurnEncoder:
        return TurnEncoder(self.tokenizer, self.chat, self.system)

    @cached_property
    def _splits(self) -> dict[str, list[dict[str, Any]]]:
        if self.validation_size is not None:
            return self._held_out(self.validation_size)
        splits = {}
        for split, limit in (("train", self.max_train_rows), ("validation", self.max_validation_rows)):
            source, rows = self._rows(split)
            splits[split] = self._left_out.usable(split, rows, self._encode, source=source, limit=limit)
        return splits

    def _held_out(self, number: int) -> dict[str, list[dict[str, Any]]]:
        """Both splits from the training pairs, of which all are read: another limit draws no other pairs."""
        source, rows = self._rows("train")
        every = self._left_out.usable("train", rows, self._encode, source=source)
        held_out = draw_held_out([row["prompt"] for row in every], number, seed=self.seed, source=source)
        rest = [row for row in range(len(every)) if row not in held_out]
        chosen = {"train": rest[: self.max_train_rows], "validation": sorted(held_out)[: self.max_validation_rows]}
        places, self._left_out.rows["validation"] = self._left_out.kept["train"], []
        self._left_out.kept |= {split: [places[row] for row in numbers] for split, numbers in chosen.items()}
        return {split: [every[row] for row in numbers] for split, numbers in chosen.items()}

    @cached_property
    def _drawn(self) -> dict[str, list[int]]:
        """Training rows by stage."""
        return draw_parts([row["prompt"] for row in self._splits["train"]], self.parts, seed=self.seed)

    def _rows_of(self, stage: str, split: str) -> list[int]:
        if split != "train" or self.parts is None:
            return list(range(len(self._splits[split])))
        rows = self._drawn[stage]
        if not rows:
            raise DataError(
                f"data.parts takes all {len(self._splits['train'])} pairs and leaves none for the {stage} stage. Name "
                f"a number for it with data.parts.{stage}=…."
            )
        return rows

    def _encoded(self, stage: str, split: str) -> list[dict[str, Any]]:
        rows = self._splits[split]
        return [rows[number] for number in self._rows_of(stage, split)]

    def row_places(self, stage: str) -> list[dict[str, str]]:
        """Which rows of the sources a stage has, with the keys `split` and `place`."""
        return [
            {"split": split, "place": self._left_out.kept[split][number]}
            for split in self._splits
            for number in self._rows_of(stage, split)
        ]

    @property
    def chats(self) -> bool:
        """Whether prompts are conversations, to which what was said before belongs."""
        return self.chat

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as a prompt.

        Raises:
            DataError: the chat template refuses it.
        """
        return self._turns.asked(messages)

    def pairs(self, split: str) -> Dataset:
        """Tokenised pairs for `trl.RewardTrainer`; columns `chosen_ids`, `rejected_ids`, `prompt_length` (tokens).

        And `margin`, 0 where a row has none, if any row of the split has one.
        """
        rows = self._encoded("reward", split)
        columns: dict[str, Any] = {key: [row[key] for row in rows] for key in ("chosen_ids", "rejected_ids")}
        columns["prompt_length"] = [len(row["input_ids"]) for row in rows]
        if any("margin" in row for row in rows):
            return Dataset.from_dict({**columns, "margin": [row.get("margin", 0.0) for row in rows]})
        return Dataset.from_dict(columns)

    def demonstrations(self, split: str) -> Dataset:
        """Prompts with their chosen responses, which alone are part of the loss; columns `input_ids`, `labels`."""
        return Dataset.from_list(
            [
                {
                    "input_ids": row["chosen_ids"],
                    "labels": [-100] * len(row["input_ids"]) + row["chosen_ids"][len(row["input_ids"]) :],
                }
                for row in self._encoded("sft", split)
            ]
        )

    def prompts(self, split: str) -> Dataset:
        """Prompts; columns `input_ids`, `prompt`, and `messages` if any is a conversation.

        Each prompt once, however many pairs have it. "test" is "validation": a preference file has no third part.
        """
        rows = self._encoded("ppo", "train" if split == "train" else "validation")
        unique = list({row["prompt"]: row for row in rows}.values())
        present = set(chain.from_iterable(unique))
        names = [name for name in ("input_ids", "prompt", "messages") if name in present]
        return Dataset.from_list([{name: row.get(name) for name in names} for row in unique])

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """None of its own: what counts is the reward's score."""
        return {}
