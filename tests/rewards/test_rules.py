import re
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from toolkit.data import Rollout
from toolkit.errors import ConfigError, RewardError, ToolkitError
from toolkit.rewards import KeptRules, Prompts, ScorerContext, WeightedSum, code_digests, score_with, scorer_of
from toolkit.rewards.rules import plain_words, right_answer, sentiment


def rollout(*responses: str, ended: bool = True, **columns: list) -> Rollout:
    number = len(responses)
    return Rollout(["?"] * number, list(responses), [[1]] * number, [[5, 6]] * number, [ended] * number, columns)


def test_a_right_answer_is_the_whole_text_and_ended():
    assert right_answer(rollout("12", "12 ", "1", answer=["12", "12", "12"])) == [1.0, 0.0, 0.0]
    assert right_answer(rollout("12", ended=False, answer=["12"])) == [0.0]
    with pytest.raises(RewardError, match="the column answer holds 12, which no response could be: text is needed"):
        right_answer(rollout("12", answer=[12]))
    with pytest.raises(RewardError, match='the prompts have no column "answer"; present: solution'):
        right_answer(rollout("12", solution=["12"]))


def test_a_run_knows_the_rules_that_it_is_scored_by():
    short, long = ([{"rule": "at_most_words", "number": number}] for number in (5, 9))
    one, same, other = (code_digests(KeptRules(rules)) for rules in (short, [dict(short[0])], long))
    assert one == same and one.keys() == other.keys() == {"the rules"} and one != other
    both = code_digests(WeightedSum({"a": KeptRules(short), "b": KeptRules(long)}, {"a": 1.0, "b": 1.0}))
    assert both == {**one, "the rules of b": other["the rules"]}


def test_sentiment_counts_different_words_up_to_three():
    said = rollout("Great! A great, LOVELY place.", "not bad", "awful, but great", "", "a greatest goodness")
    assert sentiment(said) == [2.0, -1.0, 0.0, 0.0, 0.0]
    assert sentiment(rollout("nice kind warm sweet", "dull sad ugly weak old")) == [3.0, -3.0]


def test_plain_words_cost_nothing_and_the_others_where_they_end():
    responses = ("The kitten sat.", "Neverthless, I’m concerned; x1234567 pumpkin_", "größere Größen", "")
    #             kitten has 6       11 letters      9                    7         7        6
    scores = score_with(plain_words, rollout(*responses))
    assert scores.spans == [[], [(0, 11, -1.0), (17, 26, -1.0), (37, 44, -1.0)], [(0, 7, -1.0)], []]
    assert torch.equal(scores.total, torch.tensor([0.0, -3.0, -1.0, 0.0]))


def test_the_share_of_rules_kept_those_for_all_and_those_of_a_row():
    short, comma = {"rule": "at_most_words", "number": 2}, {"rule": "no_comma", "number": None, "words": None}
    said = rollout("a b", "a, b", "a, b c", rules=[[short], [comma], [short]])
    assert KeptRules(column="rules")(said) == [1.0, 0.0, 0.0]
    assert KeptRules([comma], "rules")(said) == [1.0, 0.0, 0.0]
    assert KeptRules([short, comma])(said) == [1.0, 0.5, 0.0]
    assert KeptRules([short, comma], "rules")(said) == pytest.approx([1.0, 1 / 3, 0.0])


@pytest.mark.parametrize("prompt", ["Q<think>\n", "Q<think>"])
def test_a_thought_that_the_prompt_opens_is_no_part_of_a_response(prompt):
    """One that is not finished has said nothing."""
    said = rollout("no commas in here at all", "hm</think>yes", "hm,</think>yes", "a, b</think>a, b")
    said = replace(said, prompts=[prompt] * 4)
    assert KeptRules([{"rule": "no_comma"}])(said) == [0.0, 1.0, 1.0, 0.0]
    assert KeptRules([{"rule": "no_comma"}])(replace(said, prompts=["Q<think></think>"] * 4)) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "columns", "said"),
    [
        (KeptRules(column="rules"), {"rule": [[]]}, 'no column "rules"; present: rule.'),
        (KeptRules(column="rules"), {"rules": [[]]}, 'row 1 of the batch has no rule in "rules"'),
        (
            KeptRules(column="rules"),
            {"rules": [[{"rule": "short"}]]},
            "row 1 of the batch, column \"rules\": {'rule': 'short'} names no rule",
        ),
    ],
)
def test_rows_without_rules_are_said(reward, columns, said):
    with pytest.raises(ToolkitError, match=re.escape(said)):
        score_with(reward, rollout("a", **columns))


def test_what_a_recipe_says_of_rules():
    rule = {"rule": "no_comma"}
    prompts = Dataset.from_list([{"prompt": "a", "rules": [rule]}, {"prompt": "b", "rules": [rule]}])
    trained_on = Prompts(prompts, ["a.jsonl, line 3", "a.jsonl, line 7"])
    context = ScorerContext(roles=None, tokenizer=None, prompts=lambda: [trained_on])
    assert scorer_of({"kind": "rules", "rules": [rule]}).build(context)(rollout("a,", "b")) == [0.0, 1.0]
    assert not scorer_of({"kind": "rules", "column": "rules"}).check(context)
    (problem,) = scorer_of({"kind": "rules", "column": "rule"}).check(context)
    assert problem.field == "column" and 'no column "rule"; present: prompt, rules.' in problem.wrong
    for of_row, said in (
        ([{"rule": "no_commas"}], 'b.jsonl, line 9, column "rules"'),
        ([], "b.jsonl, line 9 has"),
    ):
        rows = Dataset.from_list([{"rules": [rule]}, {"rules": of_row}])
        held_out = Prompts(rows, ["b.jsonl, line 1", "b.jsonl, line 9"])
        other = replace(context, prompts=lambda held_out=held_out: [*context.prompts(), held_out])
        (problem,) = scorer_of({"kind": "rules", "column": "rules"}).check(other)
        assert problem.wrong.startswith(said)
        assert (not of_row) == (not scorer_of({"kind": "rules", "column": "rules", "rules": [rule]}).check(other))
    for values, said in ({}, "rules or column is needed"), ({"rules": [{"rule": "x"}]}, "names no rule"):
        with pytest.raises(ConfigError, match=said):
            scorer_of({"kind": "rules", **values})
