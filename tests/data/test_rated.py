"""Responses with rewards: what a row may look like, and what is left out."""

import json

import pytest
import torch
from datasets import Dataset

from tests.data.test_prompts import TEMPLATE, ids, user, write
from toolkit.data import RatedCollator, RatedResponses, check_rated
from toolkit.errors import DataError

ROW = {"prompt_ids": [1, 5], "response_ids": [7, 8, 2], "rewards": [None, -1, 0.5], "ended": True}


def rated(tmp_path, tokenizer, rows, **arguments):
    return RatedResponses(tokenizer, write(tmp_path / "x.jsonl", rows), **{"chat": False, **arguments})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ROW),
        ({"ended": None}, ROW),  # the last token is the end of sequence
        ({"ended": None, "response_ids": [7, 8, 9]}, {**ROW, "response_ids": [7, 8, 9], "ended": False}),
        ({"ended": False}, {**ROW, "ended": False}),
        ({"response_ids": [7, 8, 0]}, {**ROW, "response_ids": [7, 8, 0]}),  # a stop of the checkpoint's that pads
        ({"rewards": 2}, {**ROW, "rewards": [None, None, 2.0]}),
        ({"rewards": [0, None, None]}, {**ROW, "rewards": [0.0, None, None]}),
        ({"prompt_ids": None, "prompt": "S23"}, {**ROW, "prompt_ids": ids("S23")}),
        ({"response_ids": None, "response": "45", "rewards": 1, "ended": None},
         {**ROW, "response_ids": [*ids("45"), 2], "rewards": [None, None, 1.0]}),
        ({"response_ids": None, "response": "45", "rewards": 1, "ended": False},
         {**ROW, "response_ids": ids("45"), "rewards": [None, 1.0], "ended": False}),
        ({"whatever": "else"}, ROW),
    ],
)  # fmt: skip
def test_rows(tmp_path, tokenizer, changes, expected):
    row = {key: value for key, value in {**ROW, **changes}.items() if value is not None}
    assert rated(tmp_path, tokenizer, [row]).rated("train")[0] == expected


def test_a_reward_in_csv_is_a_number(tmp_path, tokenizer):
    path = tmp_path / "x.csv"
    rows = ("-0.5,False", "1e1,", "2,true", "much,", ",", "nan,", "1_0,")
    path.write_text("prompt,response,rewards,ended\n" + "".join(f"S23,45,{row}\n" for row in rows))
    task = RatedResponses(tokenizer, str(path), chat=False)
    read = [(row["rewards"][-1], row["ended"]) for row in task.rated("train")]
    assert read == [(-0.5, False), (10.0, True), (2.0, True)]
    reasons = {"rewards that are no numbers": 2, "no reward": 1, "rewards that are not finite": 1}
    assert task.left_out["train"] == reasons


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rewards": [1.0]}, "rewards that are not as many as response_ids"),
        ({"rewards": [None, "much", None]}, "rewards that are no numbers"),
        ({"rewards": [None, True, None]}, "rewards that are no numbers"),
        ({"rewards": [None, float("nan"), None]}, "rewards that are not finite"),
        ({"rewards": [None, 1e300, None]}, "rewards that are not finite"),  # as float32
        ({"rewards": None}, "no reward"),
        ({"response_ids": []}, "an empty response"),
        ({"response_ids": None}, "an empty response"),
        ({"response_ids": None, "response": None, "rewards": 1}, "an empty response"),
        ({"response_ids": None, "response": " ", "rewards": 1}, "an empty response"),
        ({"response_ids": [7, "8", 2]}, "response_ids that are no list of whole numbers"),
        ({"response_ids": [7, 8000, 2]}, "ids that are not in the vocabulary"),
        ({"prompt_ids": []}, "an empty prompt"),
        ({"prompt_ids": [7, 8, 0, 0]}, "prompt_ids with padding (P)"),
        ({"prompt_ids": "1 5"}, "prompt_ids that are no list of whole numbers"),
        ({"ended": "yes"}, "ended that is neither true nor false"),
        ({"response_ids": [7] * 9, "rewards": 0}, "a response over 8 tokens"),
        ({"prompt_ids": [7] * 9}, "a prompt over 8 tokens"),
    ],
)
def test_what_cannot_be_used_is_left_out_with_file_line_and_reason(tmp_path, tokenizer, changes, reason):
    task = rated(tmp_path, tokenizer, [ROW, {**ROW, **changes}], max_prompt_length=8, max_response_length=8)
    assert len(task.rated("train")) == 1
    assert task.left_out_rows() == [{"split": "train", "place": f"{tmp_path}/x.jsonl, line 2", "reason": reason}]
    assert task.report() == f"train: 1 rated responses; 1 left out: 1 × {reason} (first: {tmp_path}/x.jsonl, line 2)"


def test_so_is_a_text_with_a_part_of_its_prompt_elsewhere(tmp_path, tokenizer):
    row = {"prompt": "S2", "response": "45", "rewards": 1}
    task = rated(tmp_path, tokenizer, [row, {**row, "system": "In French."}, {**row, "tools": [{"name": "clock"}]}])
    assert len(task.rated("train")) == 1
    reasons = [left["reason"] for left in task.left_out_rows()]
    assert reasons[0].startswith('a column "system", which is not read') and reasons[1] == "tools, which are not read"
    ids = [{**ROW, "system": "of the ids, too"}]  # which are all of a prompt
    assert len(rated(tmp_path, tokenizer, ids).rated("train")) == 1


def test_rewards_a_token_need_the_tokens(tmp_path, tokenizer):
    row = {"prompt_ids": [1], "response": "45", "rewards": [1, 2, 3]}
    for more in ({}, {"response_ids": None}):  # as Parquet has it
        with pytest.raises(DataError, match=r"no row can be used \(1 × rewards per token for a response given as text"):
            rated(tmp_path, tokenizer, [row | more]).rated("train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt_ids": [1], "rewards": 1},
            'line 1: a response is in the column "response_ids" or, as text,',
        ),
        ({"prompt_ids": [1], "response": "45"}, 'line 1: no column "rewards"; present: prompt_ids, response'),
        ({"response_ids": [1], "rewards": 1}, "line 1: a prompt is in the column"),
    ],
)
def test_columns_that_are_missing(tmp_path, tokenizer, row, message):
    with pytest.raises(DataError, match=message) as error:
        rated(tmp_path, tokenizer, [row]).rated("train")
    assert "columns.prompt" not in str(error.value)  # a setting of other tasks


def test_a_prompt_that_is_typed(tokenizer):
    tokenizer.chat_template = TEMPLATE
    talk = [user("1"), {"role": "assistant", "content": "2"}, user("3")]
    task = RatedResponses(tokenizer, "x.jsonl")
    assert task.chats and task.prompt_ids(talk) == ids("_:1=小:2=_:3=x:")
    plain = RatedResponses(tokenizer, "x.jsonl", chat=False)
    assert not plain.chats and plain.prompt_ids(talk) == ids("3")
    # Rows of token ids need no template, and what is typed is then text.
    tokenizer.chat_template = None
    assert not task.chats and task.prompt_ids(talk) == ids("3")


def test_limits(tmp_path, tokenizer):
    assert len(rated(tmp_path, tokenizer, [ROW] * 5, max_train_rows=2).rated("train")) == 2
    with pytest.raises(DataError, match="^max_train_rows: a number from 1 is needed, got 0"):
        rated(tmp_path, tokenizer, [ROW], max_train_rows=0)


def test_the_collator_pads_and_tells_a_zero_from_none():
    short = {"prompt_ids": [1], "response_ids": [9], "rewards": [0.0], "ended": False}
    batch = RatedCollator(0, multiple=4)([ROW, short])
    assert batch["input_ids"].tolist() == [[1, 5, 7, 8, 2, 0, 0, 0], [1, 9, 0, 0, 0, 0, 0, 0]]
    assert batch["prompt_lengths"].tolist() == [2, 1] and batch["response_lengths"].tolist() == [3, 1]
    assert batch["ended"].tolist() == [True, False]
    assert torch.equal(batch["rewards"], torch.tensor([[0.0, -1.0, 0.5], [0.0, 0.0, 0.0]]))
    assert batch["reward_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["labels"].tolist() == [[7, 8, 2], [9, -100, -100]]


def test_a_data_set_of_ones_own_is_checked():
    check_rated(Dataset.from_list([ROW]))
    with pytest.raises(DataError, match="row 1 of the rated responses: prompt and response need a token at least"):
        check_rated(Dataset.from_list([ROW, {**ROW, "response_ids": []}]))
    with pytest.raises(
        DataError, match="row 1 of the rated responses: 1 rewards for 3 tokens; one per token is needed"
    ):
        check_rated(Dataset.from_list([ROW, {**ROW, "rewards": [1.0]}]))
    for odd in (float("nan"), float("-inf"), 1e39):
        with pytest.raises(DataError, match="^row 1 of the rated responses: a reward is .*finite numbers of 32 bits"):
            check_rated(Dataset.from_list([ROW, {**ROW, "rewards": [*[None] * (len(ROW["response_ids"]) - 1), odd]}]))
    with pytest.raises(
        DataError, match="needs the columns prompt_ids, response_ids, rewards, ended; present: prompt_ids."
    ):
        check_rated(Dataset.from_list([{"prompt_ids": [1]}]))
    assert json.dumps(ROW)  # the form in which the collect stage writes them


def test_of_rows_over_a_limit_the_prompt_alone_is_cut(tmp_path, tokenizer):
    rows = [{**ROW, "prompt_ids": [1, 5, 6, 7]}, {**ROW, "response_ids": [7] * 4, "rewards": 0}]
    task = rated(tmp_path, tokenizer, rows, on_long="cut", max_prompt_length=2, max_response_length=3)
    assert task.rated("train")["prompt_ids"][:] == [[6, 7]]
    assert task.left_out["train"] == {"a response over 3 tokens": 1}
