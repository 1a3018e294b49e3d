"""The instructions task: plain questions, each with one or two rules that a program can check.

`Why does bread rise? Use at most 20 words. Do not use any commas.` Questions, and pairs of rules, are kept apart: those
of the validation and the test split are never a PPO prompt, and a third of these prompts put rules together that
training never puts together (`composition` is "unseen" there). Demonstrations are written by a program.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from importlib.resources import files
from itertools import combinations
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.chat_template import with_opening
from toolkit.data.encoder import PromptEncoder
from toolkit.data.messages import Messages
from toolkit.data.rollouts import Rollout
from toolkit.data.rows import Unusable
from toolkit.data.rules import RULES, instruction, keeps, sentences_of, share_kept
from toolkit.data.task import Task
from toolkit.errors import DataError

# A line a topic: its forms, the one that is asked about first, and three sentences that name it, from which
# demonstrations are written.
_LINES = [
    line.split(": ", 1) for line in files(__package__).joinpath("facts.txt").read_text(encoding="utf-8").splitlines()
]
FORMS = {forms.split(", ")[0]: forms.split(", ") for forms, _ in _LINES}
FACTS = {topic: sentences_of(facts) for topic, (_, facts) in zip(FORMS, _LINES, strict=True)}
TOPICS = list(FACTS)
_QUESTIONS = (
    "Tell me something about {}.",
    "What is interesting about {}?",
    "Why do people care about {}?",
    "Give me some advice about {}.",
    "How would you explain {} to a child?",
    "Write something short about {}.",
    "What should everybody know about {}?",
    "What do you like about {}?",
)
# No opening and no ending has a word that is to be avoided.
_OPENINGS = ("Well", "In short", "My answer", "To be honest", "Good question")
_ENDINGS = ("Thank you", "I hope this helps", "Ask me more", "See you soon", "Good luck")
_AVOIDED = ("the", "is", "and", "very", "it")
_KEYS = (["answer"], ["topic", "answer"], ["question", "answer"], ["title", "text"])
_AT_ODDS = {  # beside those about the same
    "answer_line": {"lower_case", "upper_case", "begins_with"},
    "json_keys": {"upper_case", "no_comma", "sentences", "begins_with", "ends_with"},
    "quoted": {"begins_with"},
    "bullets": {"sentences"},
}
_WORDS = 5
_TRIES = 20
_ASKED = [rule for rule in RULES if rule != "mentions"]
PER_RULE = "kept_"
"""How the names of the figures begin that are of one rule each."""
COMPOSITIONS = ("one", "seen", "unseen")


def pairs() -> dict[str, list[tuple[str, str]]]:
    """The pairs of rules that can be kept together: those that training has ("seen"), and a third that it never has.

    They are the same for every seed of a recipe.
    """
    every = [
        (a, b)
        for a, b in combinations(_ASKED, 2)
        if RULES[a].about != RULES[b].about and b not in _AT_ODDS.get(a, ()) and a not in _AT_ODDS.get(b, ())
    ]
    unseen = set(random.Random(0).sample(every, len(every) // 3))
    return {"seen": [pair for pair in every if pair not in unseen], "unseen": sorted(unseen)}


def _drawn(rule: str, topic: str, draw: random.Random) -> dict[str, Any]:
    """A rule with its number and words, those that it does not take None: tables have the keys of all."""
    numbers = {"at_most_words": (10, 30), "at_least_words": (12, 24), "sentences": (1, 3), "contains": (2, 3)}
    words = {"begins_with": _OPENINGS, "ends_with": _ENDINGS, "avoids": _AVOIDED, "contains": (topic,)}
    number = draw.randint(*numbers.get(rule, (2, 4)))
    chosen = draw.choice(_KEYS) if rule == "json_keys" else [draw.choice(words.get(rule, ("",)))]
    takes = RULES[rule].takes
    return {
        "rule": rule,
        "required": False,
        "number": number if "number" in takes else None,
        "words": chosen if "words" in takes else None,
    }


def written(row: Mapping[str, Any], draw: random.Random) -> str | None:
    """A response to one of the task's `rows` that keeps all its rules, from what is known of its topic; None if none of
    a few that are drawn does."""
    asked = {rule["rule"]: rule["words"] for rule in row["rules"] if not rule["required"]}
    for _ in range(_TRIES):
        facts = FACTS[row["topic"]]
        text = _worded(draw.sample(facts, draw.randint(1, len(facts))), row, asked)
        if share_kept(row["rules"], text) == 1.0:
            return text
    return None


def _worded(facts: Sequence[str], row: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Sentences in the form that rules ask for, which do not contradict each other."""
    between = "\n" if "bullets" in asked else " "
    text = between.join(f"* {fact}" if "bullets" in asked else fact for fact in facts)
    if "begins_with" in asked:
        text = f"{asked['begins_with'][0]}{':' if 'bullets' in asked else ','}{between}{text}"
    if "ends_with" in asked:
        text += f"{between}{asked['ends_with'][0]}."
    if "no_comma" in asked:
        text = text.replace(",", "")
    if "json_keys" in asked:
        *others, last = asked["json_keys"]
        text = json.dumps(
            {key: row["question"] if key == "question" else row["topic"] for key in others} | {last: text}
        )
    if "answer_line" in asked:
        text = f"Answer: {text}"
    if "quoted" in asked:
        text = f'"{text}"'
    return text.lower() if "lower_case" in asked else text.upper() if "upper_case" in asked else text


@dataclass(frozen=True)
class Instructions(Task):
    """The task's data sets.

    Args:
        tokenizer: with a chat template.
        system: a system message before each prompt. None adds none; "" adds an empty one, which keeps a template's
            own default system message away.
        seed: draws questions and rules.
        train_size: prompts to train on.
        validation_size: prompts for choosing a checkpoint while training, a third of each composition.
        test_size: prompts for the figures before and after, likewise.
    """

    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    system: str | None = None
    seed: int = 0
    train_size: int = 4000
    validation_size: int = 90
    test_size: int = 300

    task: ClassVar[str] = "instructions"

    def __post_init__(self) -> None:
        for name in ("train_size", "validation_size", "test_size"):
            if getattr(self, name) < len(COMPOSITIONS):
                wrong = f"at least {len(COMPOSITIONS)} prompts are needed, got {getattr(self, name)}."
                raise DataError(wrong, field=name)
        self._encoder.check_template()

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, True, self.system)

    @property
    def chats(self) -> bool:
        return True

    def prompt_ids(self, messages: Messages) -> list[int]:
        """A conversation that a person typed, as a prompt."""
        return self._encoder.typed(messages)

    @cached_property
    def _topics(self) -> dict[str, list[str]]:
        """A tenth of the topics for validation and a fifth for the test, the rest for training."""
        drawn = random.Random(self.seed).sample(TOPICS, len(TOPICS))
        tenth = len(drawn) // 10
        return {"validation": drawn[:tenth], "test": drawn[tenth : 3 * tenth], "train": drawn[3 * tenth :]}

    @cached_property
    def _trained(self) -> set[frozenset[str]]:
        """The rules that training asks for together."""
        return {
            frozenset(asked["rule"] for asked in row["rules"] if not asked["required"]) for row in self.rows("train")
        }

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Plain rows: `question`, `topic`, `rules` and `composition`: "one" rule, or a pair that training has "seen" or
        not."""
        draw, together = random.Random(f"{self.seed} {split}"), pairs()
        if split != "train":  # a small training split does not have them all
            together["seen"] = [pair for pair in together["seen"] if frozenset(pair) in self._trained]
        kinds = COMPOSITIONS[:2] if split == "train" else COMPOSITIONS
        rows = []
        for number in range(getattr(self, f"{split}_size")):
            kind, topic = kinds[number % len(kinds)], draw.choice(self._topics[split])
            names = [draw.choice(_ASKED)] if kind == "one" else list(draw.choice(together[kind]))
            draw.shuffle(names)
            rules = [_drawn(name, topic, draw) for name in names]
            text = " ".join([draw.choice(_QUESTIONS).format(topic), *map(instruction, rules)])
            # What every response has to do.
            named = {"rule": "mentions", "required": True, "number": None, "words": FORMS[topic]}
            long = {"rule": "at_least_words", "required": True, "number": _WORDS, "words": None}
            rows.append({"question": text, "topic": topic, "rules": [*rules, named, long], "composition": kind})
        return rows

    def demonstrations(self, split: str) -> Dataset:
        """The prompts with `written` responses, which alone are part of the loss: no pair that training never has, and
        no prompt for which none is found."""
        self._encoder.check_answers("task")
        draw, rows = random.Random(f"{self.seed} {split} written"), []
        for row in self.rows(split):
            if row["composition"] == "unseen" or (text := written(row, draw)) is None:
                continue
            prompt = self._encoder.prompt(row["question"])
            try:
                response = self._encoder.response(text, prompt)
            except Unusable as reason:  # a program writes no thoughts
                remedy = "Give a base.chat_template that opens none, or train on responses of your own."
                raise DataError(f"no demonstration can be written: {reason}.", field="task", remedy=remedy) from reason
            ids = [*prompt["input_ids"], *response]
            rows.append({"input_ids": ids, "labels": [-100] * len(prompt["input_ids"]) + response})
        return Dataset.from_list(rows)

    def prompts(self, split: str) -> Dataset:
        """Columns `input_ids`, `prompt` and `messages`, as of a chat, and `rules` and `composition`."""
        rows = self.rows(split)
        encoded = [self._encoder.prompt(row.pop("question")) | row for row in rows]
        return Dataset.from_list(encoded).remove_columns("topic")

    metric_names = (
        "satisfied",
        *(f"satisfied_{kind}" for kind in COMPOSITIONS),
        *(f"{PER_RULE}{name}" for name in (*_ASKED, "required")),
    )

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """`satisfied`, the share of responses that do what is required and keep all their rules, also by composition;
        `kept_<rule>`, the share that keeps a rule of those that are asked to; `kept_required`, that of what is
        required. What is not among the prompts is not among the metrics."""
        shares: dict[str, list[bool]] = {name: [] for name in self.metric_names}
        columns = (rollout.columns["rules"], rollout.columns["composition"])
        said = map(with_opening, rollout.responses, rollout.prompts)
        for text, rules, kind in zip(said, *columns, strict=True):
            for name in ("satisfied", f"satisfied_{kind}"):
                shares[name].append(share_kept(rules, text) == 1.0)
            for asked in rules:
                name = "required" if asked["required"] else asked["rule"]
                shares[f"{PER_RULE}{name}"].append(keeps(asked, text))
        return {name: sum(share) / len(share) for name, share in shares.items() if share}
