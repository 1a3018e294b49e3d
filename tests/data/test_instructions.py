import copy
import re

import pytest

from tests.data.test_prompts import TEMPLATE
from tests.tiny_runs import byte_tokenizer
from toolkit.data import Instructions, Rollout, check_rules, instruction, keeps
from toolkit.data.instructions import TOPICS, pairs
from toolkit.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(byte_tokenizer())
    made.chat_template = TEMPLATE
    return made


def names(row):
    return frozenset(asked["rule"] for asked in row["rules"] if not asked["required"])


def topics(rows):
    asked = (re.search(r"(?:about|explain) (\w+)", row["question"]) for row in rows)
    return {found.group(1) for found in asked}


def test_held_out_topics_and_pairs_are_never_trained_on(tokenizer):
    task = Instructions(tokenizer, seed=3)
    rows = {split: task.rows(split) for split in ("train", "validation", "test")}
    assert [len(rows[split]) for split in rows] == [4000, 90, 300]
    asked = {split: topics(rows[split]) for split in rows}
    assert set().union(*asked.values()) == set(TOPICS) and len(asked["train"]) == 64
    assert not asked["train"] & (asked["test"] | asked["validation"])
    trained = {names(row) for row in rows["train"]}
    for split in ("validation", "test"):
        kinds = [row["composition"] for row in rows[split]]
        assert {kind: kinds.count(kind) * 3 for kind in set(kinds)} == dict.fromkeys(
            ("one", "seen", "unseen"), len(kinds)
        )
        for row in rows[split]:
            assert len(names(row)) == (1 if row["composition"] == "one" else 2)
            assert (names(row) in trained) == (row["composition"] != "unseen"), row
    assert {row["composition"] for row in rows["train"]} == {"one", "seen"}


def test_a_prompt_asks_for_its_rules_and_each_can_be_checked(tokenizer):
    task = Instructions(tokenizer, test_size=60)
    prompts = task.prompts("test")
    for row, plain in zip(prompts, task.rows("test"), strict=True):
        text = row["messages"][-1]["content"]
        assert text == plain["question"] and text in row["prompt"]
        assert all(asked["required"] != (instruction(asked) in text) for asked in row["rules"])
        topic = re.search(r"(?:about|explain) (\w+)", text).group(1)
        condition = [asked for asked in row["rules"] if asked["required"]]
        assert all(keeps(asked, f"Now {topic.capitalize()} are what they are.") for asked in condition)
        assert not any(keeps(asked, "No, never.") for asked in condition)
        check_rules(row["rules"], "row")
        assert tokenizer.decode(row["input_ids"]) == row["prompt"]


def test_a_seed_draws_the_rows_and_not_the_pairs(tokenizer):
    one, other = (Instructions(tokenizer, seed=seed, train_size=50).rows("train") for seed in (1, 2))
    assert Instructions(tokenizer, seed=1, train_size=50).rows("train") == one != other
    assert len(set(pairs()["seen"]) | set(pairs()["unseen"])) == len(pairs()["seen"]) + len(pairs()["unseen"])
    assert 0.3 < len(pairs()["unseen"]) / len(pairs()["seen"] + pairs()["unseen"]) <= 1 / 3


def test_metrics_by_hand(tokenizer):
    comma, short = {"rule": "no_comma", "required": False}, {"rule": "at_most_words", "number": 2, "required": False}
    one = {"rule": "mentions", "words": ["one"], "required": True}
    rows = [
        ("one two", [comma, short], "seen"),  # both
        ("one, two", [short, comma], "seen"),  # one of two
        ("one, two three", [comma, short], "unseen"),  # none
        ("one two three", [comma, one], "one"),
        ("two", [comma, one], "one"),  # the rule, and not what is required
    ]
    texts, rules, kinds = map(list, zip(*rows, strict=True))
    columns = {"rules": rules, "composition": kinds}
    rollout = Rollout([""] * 5, texts, [[1]] * 5, [[2]] * 5, [True] * 5, columns)
    assert Instructions(tokenizer).metrics(rollout) == {
        "satisfied": 0.4,
        "satisfied_one": 0.5,
        "satisfied_seen": 0.5,
        "satisfied_unseen": 0.0,
        "kept_no_comma": 0.6,
        "kept_at_most_words": pytest.approx(2 / 3),
        "kept_required": 0.5,
    }
    assert set(Instructions(tokenizer).metrics(rollout)) <= set(Instructions.metric_names)


def test_what_cannot_be_is_said(tokenizer):
    with pytest.raises(DataError, match="at least 3 prompts are needed, got 2"):
        Instructions(tokenizer, test_size=2)
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Instructions(without)
