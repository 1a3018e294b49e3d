import copy
import json
import random
import re

import pytest

from tests.data.test_prompts import TEMPLATE
from tests.tiny_runs import byte_tokenizer
from toolkit.data import Instructions, Rollout, check_rules, instruction, keeps
from toolkit.data.instructions import FACTS, FORMS, TOPICS, pairs, written
from toolkit.data.rules import sentences_of
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


def test_pairs_that_a_small_training_split_never_has_are_not_seen(tokenizer):
    task = Instructions(tokenizer, train_size=30)
    trained = {names(row) for row in task.rows("train")}
    for split in ("validation", "test"):
        kinds = [(row["composition"], names(row) in trained) for row in task.rows(split)]
        assert {kind for kind in kinds if kind[0] != "one"} == {("seen", True), ("unseen", False)}


def test_a_prompt_asks_for_its_rules_and_each_can_be_checked(tokenizer):
    task = Instructions(tokenizer, test_size=60)
    prompts = task.prompts("test")
    for row, plain in zip(prompts, task.rows("test"), strict=True):
        text = row["messages"][-1]["content"]
        assert text == plain["question"] and text in row["prompt"]
        assert all(asked["required"] != (instruction(asked) in text) for asked in row["rules"])
        topic = re.search(r"(?:about|explain) (\w+)", text).group(1)
        condition = [asked for asked in row["rules"] if asked["required"]]
        assert [asked["rule"] for asked in condition] == ["mentions", "at_least_words"]
        assert all(keeps(asked, f"Now {topic.capitalize()} are what they are.") for asked in condition)
        assert not any(keeps(asked, "No, never.") for asked in condition)
        check_rules(row["rules"], "row")
        assert tokenizer.decode(row["input_ids"]) == row["prompt"]


def test_no_other_word_is_taken_for_a_topic():
    other = "At first I should have been told what it must be, or that nothing could, and why that wins in the end."
    assert not any(keeps({"rule": "mentions", "words": forms}, other) for forms in FORMS.values())
    assert FORMS["batteries"] == ["batteries", "battery"] and FORMS["glass"] == ["glass", "glasses"]
    for topic, facts in FACTS.items():
        assert len(facts) == 3 and all(keeps({"rule": "mentions", "words": FORMS[topic]}, fact) for fact in facts)


def test_a_seed_draws_the_rows_and_not_the_pairs(tokenizer):
    one, other = (Instructions(tokenizer, seed=seed, train_size=50).rows("train") for seed in (1, 2))
    assert Instructions(tokenizer, seed=1, train_size=50).rows("train") == one != other
    assert len(set(pairs()["seen"]) | set(pairs()["unseen"])) == len(pairs()["seen"]) + len(pairs()["unseen"])
    assert 0.3 < len(pairs()["unseen"]) / len(pairs()["seen"] + pairs()["unseen"]) <= 1 / 3


def test_demonstrations_keep_the_rules_of_their_prompts_and_show_no_unseen_pair(tokenizer):
    task = Instructions(tokenizer, train_size=300, validation_size=90)
    shown = {name for row in task.demonstrations("train") for name in row}
    assert shown == {"input_ids", "labels"}
    for split in ("train", "validation"):
        by_prompt = {prompt["prompt"]: row for prompt, row in zip(task.prompts(split), task.rows(split), strict=True)}
        rows = task.demonstrations(split)
        unseen = [row for row in by_prompt.values() if row["composition"] == "unseen"]
        assert 0.8 * (len(by_prompt) - len(unseen)) < len(rows) <= len(by_prompt) - len(unseen)
        for row in rows:
            start = row["labels"].count(-100)
            assert row["labels"] == [-100] * start + row["input_ids"][start:]
            asked = by_prompt[tokenizer.decode(row["input_ids"][:start])]
            response = tokenizer.decode(row["input_ids"][start:-1])
            assert row["input_ids"][-1] == tokenizer.eos_token_id and asked["composition"] != "unseen"
            assert all(keeps(rule, response) for rule in asked["rules"]), (asked, response)


def test_responses_are_written_in_the_form_that_is_asked_for():
    def asked(*rules):
        required = [{"rule": "mentions", "words": ["salt"], "required": True}]
        rules = [{"words": None, "number": None, "required": False} | rule for rule in rules]
        row = {"question": "Why salt?", "topic": "salt", "rules": [*rules, *required]}
        return written(row, random.Random(0))

    end = {"rule": "ends_with", "words": ["Good luck"]}
    one = {"rule": "at_most_words", "number": 9}
    assert asked({"rule": "quoted"}, end)[-12:] == ' Good luck."'
    assert asked({"rule": "lower_case"}, one) in {
        "a pinch of salt makes soup taste better.",
        "too much salt makes us thirsty.",
        "sea water leaves salt behind as it dries.",
    }
    assert asked({"rule": "bullets", "number": 2}, end).count("\n") == 2
    keyed = json.loads(asked({"rule": "json_keys", "words": ["question", "answer"]}))
    assert keyed["question"] == "Why salt?" and set(sentences_of(keyed["answer"])) <= set(FACTS["salt"])
    assert asked({"rule": "at_least_words", "number": 99}) is None


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


def test_a_thought_that_the_prompt_opens_keeps_no_rule(tokenizer):
    columns = {"rules": [[{"rule": "no_comma", "required": False}]] * 3, "composition": ["one"] * 3}
    texts = ["hm", "hm</think>yes", "hm</think>yes, yes"]
    rollout = Rollout(["Q<think>\n"] * 3, texts, [[1]] * 3, [[2]] * 3, [True] * 3, columns)
    third = pytest.approx(1 / 3)
    assert Instructions(tokenizer).metrics(rollout) == dict.fromkeys(
        ("satisfied", "satisfied_one", "kept_no_comma"), third
    )


def test_what_cannot_be_is_said(tokenizer):
    with pytest.raises(DataError, match="at least 3 prompts are needed, got 2"):
        Instructions(tokenizer, test_size=2)
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Instructions(without)
    refuse = "{{ raise_exception('no system here') if messages[0].role == 'system' }}"
    without.chat_template = refuse + "{{ messages[0].content }}"
    assert len(Instructions(without, test_size=3).prompts("test")) == 3
    with pytest.raises(
        DataError, match=r"^system: no prompt can have a system message: .*no system here.*data.system=null"
    ):
        Instructions(without, system="")
    without.chat_template = "{{ messages[0].content }}<think>"
    with pytest.raises(DataError, match=r"^task: no demonstration can be written: a response without the thought"):
        Instructions(without, train_size=3).demonstrations("train")
    without.chat_template = "{% for m in messages %}{{ 'final:' if loop.index0 }}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r'^task: the chat template writes "final:" between its generation prompt and'):
        Instructions(without, train_size=3).demonstrations("train")


def test_a_row_of_another_file_is_a_prompt_as_those_that_were_trained_on(tokenizer):
    task = Instructions(tokenizer, train_size=3)
    text, row = task.prompt_of("ask.jsonl, line 1", {"prompt": "Tell me of rain.", "rules": [{"rule": "no_comma"}]})
    typed = task.typed("Tell me of rain.")
    assert text == "Tell me of rain." and typed["messages"][-1]["content"] == text
    assert row == {**typed, "rules": [{"rule": "no_comma"}]} and row["prompt"] == tokenizer.decode(row["input_ids"])
