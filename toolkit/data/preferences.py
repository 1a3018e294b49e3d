"""Preference pairs in the form of hh-rlhf: `chosen` and `rejected`, each a whole dialogue.

The prompt of a pair is all up to and with the last `Assistant:`, which both sides share. Rows that cannot
be used are left out, counted by reason, and reported with their place: never dropped in silence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.chat import chat_prompt, chat_prompt_ids
from toolkit.data.left_out import LeftOut, ReportsLeftOut, Unusable
from toolkit.data.rollouts import Rollout
from toolkit.data.sources import Row, check_hub_settings, has_splits, read_rows
from toolkit.errors import DataError

_TURN = re.compile(r"\n\nHuman: |\n\nAssistant:")
_ROLES = {"\n\nHuman: ": "user", "\n\nAssistant:": "assistant"}


def parse_dialogue(text: str) -> list[dict[str, str]]:
    """`"\\n\\nHuman: a\\n\\nAssistant: b"` to messages with `role` and `content`.

    Raises:
        ValueError: the text does not begin with a turn, or its last turn is not the assistant's.
    """
    marks = list(_TURN.finditer(text))
    if not marks or text[: marks[0].start()].strip():
        raise ValueError('it does not begin with "\\n\\nHuman: "')
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    messages = [
        {"role": _ROLES[mark.group()], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]
    if messages[-1]["role"] != "assistant":
        raise ValueError("its last turn is not the assistant's")
    return messages


@dataclass(frozen=True)
class Preferences(ReportsLeftOut):
    """Pairs for the reward stage, their chosen responses for sft, and their prompts for PPO.

    Args:
        tokenizer: with a chat template.
        train: file, folder or hub id, as `toolkit.data.sources` reads them.
        validation: likewise; None takes the `test` split of a hub id or a saved `DatasetDict`.
        subset: `data_dir` of a hub id, for example "harmless-base".
        name: of a hub id's configuration, where it has several.
        max_prompt_length: tokens of a prompt; pairs with longer ones are left out.
        max_response_length: tokens of a response, end of sequence included; likewise.
        max_train_rows: at most so many pairs for training, the first that fit. None takes all.
        max_validation_rows: likewise for validation.
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
    system: str | None = None
    _left_out: LeftOut = field(default_factory=LeftOut, init=False, repr=False, compare=False)
    _unit: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        check_hub_settings(self.train, self.validation, subset=self.subset, name=self.name)
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, and dialogues need one. Use an instruction-tuned checkpoint, "
                "or set chat_template in its tokenizer_config.json."
            )

    def _rows(self, split: str) -> tuple[str, Iterator[Row]]:
        """The split's source and its rows."""
        source = self.train if split == "train" else self.validation or self.train
        if split != "train" and self.validation is None and not has_splits(source):
            raise DataError("data.validation is missing: name a file of held-out pairs with data.validation=….")
        return source, read_rows(source, setting=f"data.{split}", split=split, subset=self.subset, name=self.name)

    def _encode(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """A tokenised pair; raises `Unusable` with the reason why it cannot be one."""
        for column in ("chosen", "rejected"):
            if not isinstance(row.get(column), str):
                raise DataError(f'{place}: column "{column}" is missing or no text; present: {", ".join(row)}.')
        try:
            chosen, rejected = parse_dialogue(row["chosen"]), parse_dialogue(row["rejected"])
        except ValueError as error:
            raise Unusable(f"not a dialogue: {error}") from error
        if chosen[:-1] != rejected[:-1]:
            raise Unusable("chosen and rejected have different prompts")
        if not chosen[:-1]:
            raise Unusable("an empty prompt")
        if not chosen[-1]["content"] or not rejected[-1]["content"]:
            raise Unusable("an empty response")
        if chosen[-1] == rejected[-1]:
            raise Unusable("chosen and rejected are equal")
        prompt = chat_prompt(self.tokenizer, chosen[:-1], self.system)
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        if len(prompt_ids) > self.max_prompt_length:
            raise Unusable(f"a prompt over {self.max_prompt_length} tokens")
        # A response is tokenised alone and ends as a sampled one does, so that the reward is trained at
        # the very position where it is read in PPO. A chat template would add a newline after the end.
        responses = {}
        for name, messages in (("chosen", chosen), ("rejected", rejected)):
            ids = self.tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
            responses[name] = [*ids, self.tokenizer.eos_token_id]
        if max(map(len, responses.values())) > self.max_response_length:
            raise Unusable(f"a response over {self.max_response_length} tokens")
        encoded = {f"{name}_ids": prompt_ids + ids for name, ids in responses.items()}
        return {"input_ids": prompt_ids, "prompt": prompt, "messages": chosen[:-1], **encoded}

    @cached_property
    def _splits(self) -> dict[str, list[dict[str, Any]]]:
        splits = {}
        for split, limit in (("train", self.max_train_rows), ("validation", self.max_validation_rows)):
            source, rows = self._rows(split)
            splits[split] = self._left_out.usable(split, rows, self._encode, source=source, limit=limit)
        return splits

    @property
    def chats(self) -> bool:
        """Whether prompts are conversations, to which what was said before belongs."""
        return True

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as a prompt.

        Raises:
            DataError: the chat template refuses it.
        """
        return chat_prompt_ids(self.tokenizer, messages, self.system)

    def pairs(self, split: str) -> Dataset:
        """Tokenised pairs for `trl.RewardTrainer`; columns `chosen_ids`, `rejected_ids`."""
        return Dataset.from_list(
            [{key: row[key] for key in ("chosen_ids", "rejected_ids")} for row in self._splits[split]]
        )

    def demonstrations(self, split: str) -> Dataset:
        """Prompts with their chosen responses, which alone are part of the loss; columns `input_ids`, `labels`."""
        return Dataset.from_list(
            [
                {
                    "input_ids": row["chosen_ids"],
                    "labels": [-100] * len(row["input_ids"]) + row["chosen_ids"][len(row["input_ids"]) :],
                }
                for row in self._splits[split]
            ]
        )

    def prompts(self, split: str) -> Dataset:
        """Prompts; columns `input_ids`, `prompt`, `messages`. Each prompt once, however many pairs have it.

        "test" is "validation": a preference file has no third part.
        """
        rows = self._splits["train" if split == "train" else "validation"]
        unique = {row["prompt"]: {key: row[key] for key in ("input_ids", "prompt", "messages")} for row in rows}
        return Dataset.from_list(list(unique.values()))

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """None of its own: what counts is the reward's score."""
        return {}
