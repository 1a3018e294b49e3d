"""Preference pairs in the form of hh-rlhf: `chosen` and `rejected`, each a whole dialogue.

The prompt of a pair is all up to and with the last `Assistant:`, which both sides share. Rows that cannot
be used are left out, counted by reason, and reported: never dropped in silence.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.rollouts import Rollout
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


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a JSON Lines file, each with its place ("file, line 3").

    Raises:
        DataError: the file is missing, not UTF-8, or a line is not a JSON object; with the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON ({error}). Mend or remove the line.") from error
        if not isinstance(row, dict):
            raise DataError(f"{place}: a JSON object is needed, this is a {type(row).__name__}.")
        yield place, row


@dataclass(frozen=True)
class Preferences:
    """Pairs for the reward stage, their chosen responses for sft, and their prompts for PPO.

    Args:
        tokenizer: with a chat template.
        train: JSON Lines file, or a hub id.
        validation: JSON Lines file; None takes the hub id's `test` split.
        subset: `data_dir` of a hub id, for example "harmless-base".
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
    max_prompt_length: int = 256
    max_response_length: int = 256
    max_train_rows: int | None = None
    max_validation_rows: int | None = None
    system: str | None = None
    left_out: dict[str, Counter] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, and dialogues need one. Use an instruction-tuned checkpoint, "
                "or set chat_template in its tokenizer_config.json."
            )

    def _rows(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        source = self.train if split == "train" else self.validation or self.train
        path = Path(source).expanduser()
        if path.suffix in (".json", ".jsonl") or path.exists():
            if split != "train" and self.validation is None:
                raise DataError("data.validation is missing: name a JSON Lines file of held-out pairs.")
            yield from read_jsonl(path)
            return
        hub_split = "train" if split == "train" else "test"
        try:
            data = load_dataset(source, data_dir=self.subset, split=hub_split)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f'data.{split}: "{source}" is no file, and the hub did not give it ({reason}). '
                "Name JSON Lines files with data.train=… and data.validation=…."
            ) from error
        for number, row in enumerate(data):
            yield f"{source} ({hub_split}), row {number}", row

    def _encode(self, place: str, row: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """A tokenised pair, or None and the reason why it cannot be used."""
        for column in ("chosen", "rejected"):
            if not isinstance(row.get(column), str):
                raise DataError(f'{place}: column "{column}" is missing or no text; present: {", ".join(row)}.')
        try:
            chosen, rejected = parse_dialogue(row["chosen"]), parse_dialogue(row["rejected"])
        except ValueError as error:
            return None, f"not a dialogue: {error}"
        if chosen[:-1] != rejected[:-1]:
            return None, "chosen and rejected have different prompts"
        if not chosen[-1]["content"] or not rejected[-1]["content"]:
            return None, "an empty response"
        if chosen[-1] == rejected[-1]:
            return None, "chosen and rejected are equal"
        messages = chosen[:-1] if self.system is None else [{"role": "system", "content": self.system}, *chosen[:-1]]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        if len(prompt_ids) > self.max_prompt_length:
            return None, f"a prompt over {self.max_prompt_length} tokens"
        # A response is tokenised alone and ends as a sampled one does, so that the reward is trained at
        # the very position where it is read in PPO. A chat template would add a newline after the end.
        responses = {}
        for name, messages in (("chosen", chosen), ("rejected", rejected)):
            ids = self.tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
            responses[name] = [*ids, self.tokenizer.eos_token_id]
        if max(map(len, responses.values())) > self.max_response_length:
            return None, f"a response over {self.max_response_length} tokens"
        encoded = {f"{name}_ids": prompt_ids + ids for name, ids in responses.items()}
        return {"input_ids": prompt_ids, "prompt": prompt, **encoded}, ""

    @cached_property
    def _splits(self) -> dict[str, list[dict[str, Any]]]:
        splits = {}
        for split, limit in (("train", self.max_train_rows), ("validation", self.max_validation_rows)):
            kept: list[dict[str, Any]] = []
            reasons: Counter = Counter()
            for place, row in self._rows(split):
                encoded, reason = self._encode(place, row)
                if encoded is None:
                    reasons[reason] += 1
                else:
                    kept.append(encoded)
                if limit is not None and len(kept) == limit:
                    break
            if not kept:
                raise DataError(f"data.{split}: no row can be used ({_listed(reasons) or 'the file is empty'}).")
            self.left_out[split] = reasons
            splits[split] = kept
        return splits

    def report(self) -> str:
        """One line on how many rows each split has, and how many were left out for which reason."""
        parts = []
        for split, rows in self._splits.items():
            reasons = self.left_out[split]
            out = f"; {reasons.total()} left out: {_listed(reasons)}" if reasons else ""
            parts.append(f"{split}: {len(rows)} pairs{out}")
        return " | ".join(parts)

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
        """Prompts; columns `input_ids`, `prompt`. Each prompt once, however many pairs have it.

        "test" is "validation": a preference file has no third part.
        """
        rows = self._splits["train" if split == "train" else "validation"]
        unique = {row["prompt"]: row["input_ids"] for row in rows}
        return Dataset.from_list([{"input_ids": ids, "prompt": prompt} for prompt, ids in unique.items()])

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """None of its own: what counts is the reward's score."""
        return {}


def _listed(reasons: Counter) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
