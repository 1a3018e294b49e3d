"""The doubling task: the double of a number, written in the style that a prefix asks for.

`S小写:5487x2=` is to be continued with `一〇九七四E`. `S` begins a sequence, `E` ends it, `P` pads. A model is
pretrained on questions without a prefix (`S__:5487x2=`), which it answers in any of three styles; PPO is to teach it
what the prefix means, from nothing but a reward for the style. Of the 27,000 questions with a prefix (9,000 numbers, 3
styles) those of the validation and the test split are never a PPO prompt.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from toolkit.data.messages import Messages
from toolkit.data.rollouts import Rollout
from toolkit.data.task import Task
from toolkit.errors import DataError

STYLES = {"数字": "0123456789", "小写": "〇一二三四五六七八九", "大写": "零壹贰叁肆伍陆柒捌玖"}
VOCABULARY = ["P", "S", "E", *"".join(STYLES.values()), *"数字大写小:=_x"]
NO_PREFIX = "__"
_IDS = {char: i for i, char in enumerate(VOCABULARY)}
_WRITTEN = {style: str.maketrans("0123456789", digits) for style, digits in STYLES.items()}


def question(number: int, prefix: str = NO_PREFIX) -> str:
    """`S小写:5487x2=` for (5487, "小写")."""
    return f"S{prefix}:{number}x2="


def answer(number: int, style: str) -> str:
    """Twice `number`, written with the digits of `style`."""
    return str(2 * number).translate(_WRITTEN[style])


def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one token a character of the task."""
    backend = Tokenizer(models.WordLevel(_IDS))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="S", eos_token="E", pad_token="P", padding_side="left"
    )


@dataclass(frozen=True)
class Doubling(Task):
    """The task's data sets.

    Args:
        seed: draws the splits and orders them.
        validation_size: questions for choosing a checkpoint while training.
        test_size: questions for the figures before and after.
    """

    seed: int = 0
    validation_size: int = 300
    test_size: int = 1000

    task: ClassVar[str] = "doubling"

    def __post_init__(self) -> None:
        total = 9000 * len(STYLES)
        if min(self.validation_size, self.test_size) < 1 or self.validation_size + self.test_size >= total:
            sizes = f"validation_size ({self.validation_size}) and test_size ({self.test_size})"
            wrong = f"{sizes} must be positive and together fewer than the {total} questions that there are."
            raise DataError(wrong, field="test_size")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer()

    @cached_property
    def _questions(self) -> dict[str, list[tuple[int, str]]]:
        every = [(number, style) for number in range(1000, 10000) for style in STYLES]
        random.Random(self.seed).shuffle(every)
        first, last = self.validation_size, self.validation_size + self.test_size
        return {"validation": every[:first], "test": every[first:last], "train": every[last:]}

    def _encode(self, text: str) -> list[int]:
        # Not by the tokenizer, which takes a second for every ten thousand questions.
        return [*map(_IDS.__getitem__, text)]

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The last message as a question, which stands alone."""
        text = messages[-1]["content"]
        unknown = "".join(sorted(set(text) - set(VOCABULARY)))
        if unknown or not text:
            wrong = f'the prompt "{text}": "{unknown}" is not in the vocabulary.'
            raise DataError(wrong, remedy=f"Ask like {question(5487, '小写')}.")
        return self._encode(text)

    def demonstrations(self, split: str) -> Dataset:
        """Whole sequences without a prefix, "train" all but validation; the question, a guess, is not in the loss."""
        rows = self._questions["train"] + self._questions["test"] if split == "train" else self._questions[split]
        encoded = [(self._encode(question(n)), self._encode(answer(n, s) + "E")) for n, s in rows]
        labels = [[-100] * len(q) + a for q, a in encoded]
        return Dataset.from_dict({"input_ids": [q + a for q, a in encoded], "labels": labels})

    def labelled(self, split: str) -> Dataset:
        """Whole sequences without a prefix, and the style of the answer."""
        rows, styles = self._questions[split], list(STYLES)
        ids = [self._encode(question(n) + answer(n, s) + "E") for n, s in rows]
        return Dataset.from_dict({"input_ids": ids, "labels": [styles.index(s) for _, s in rows]})

    def prompts(self, split: str) -> Dataset:
        """Questions with a prefix, `style` (class index) and `answer`."""
        rows, styles = self._questions[split], list(STYLES)
        ids, answers = [self._encode(question(n, s)) for n, s in rows], [answer(n, s) for n, s in rows]
        return Dataset.from_dict({"input_ids": ids, "style": [styles.index(s) for _, s in rows], "answer": answers})

    metric_names = ("exact_match", "style_accuracy")

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """`exact_match` (right number, right style, ended) and `style_accuracy` (only digits of the style)."""
        digits, rows = list(STYLES.values()), zip(rollout.responses, rollout.columns["style"], strict=True)
        styled = [bool(text) and set(text) <= set(digits[style]) for text, style in rows]
        answered = zip(rollout.responses, rollout.columns["answer"], rollout.ended, strict=True)
        exact = [text == expected and ended for text, expected, ended in answered]
        return {"exact_match": sum(exact) / len(exact), "style_accuracy": sum(styled) / len(styled)}
