"""Responses with a class each, from a file."""

import json
import re
from pathlib import Path

import pytest

from tests.tiny_runs import byte_tokenizer
from toolkit.data import Demonstrations, Labelled
from toolkit.errors import DataError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SAID = [{"role": "user", "content": "River?"}, {"role": "assistant", "content": "Loire."}]
FORMS = [{"messages": SAID}, {"prompt": "River?", "completion": "Loire."}, {"text": "A river: Loire."}]


def test_a_row_is_that_of_a_demonstration_with_its_class(tmp_path):
    tokenizer = byte_tokenizer()
    rows = [{**row, "label": label} for row, label in zip(FORMS, (2, True, 0.0), strict=True)]
    path = write(tmp_path / "x.jsonl", rows)
    task = Labelled(tokenizer, path, path)
    expected = Demonstrations(tokenizer, path, path).demonstrations("train")["input_ids"][:]
    found = task.labelled("train")
    assert found["input_ids"][:] == expected and found["labels"][:] == [2, 1, 0]
    assert [ids[-1] for ids in expected] == [tokenizer.eos_token_id] * 3  # where a reward reads
    assert task.report().startswith(
        "train: 3 labelled responses | validation: 3 labelled responses; 3 of these have a "
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label": None}, "no label"),
        ({"label": ""}, "no label"),
        ({"label": "good"}, "a label that is no whole number from 0"),
        ({"label": -1}, "a label that is no whole number from 0"),
        ({"label": 0.5}, "a label that is no whole number from 0"),
        ({"label": float("nan")}, "a label that is no whole number from 0"),
        ({"label": 10**30}, "a label that is no whole number from 0"),
        ({"label": [1]}, "a label that is no whole number from 0"),
        ({"completion": " "}, "an empty response"),
        ({"completion": "a" * 90}, "a row over 64 tokens"),
    ],
)
def test_what_is_left_out(changes, reason, tmp_path):
    good = {"prompt": "River?", "completion": "Loire.", "label": "1"}  # as CSV has numbers
    path = write(tmp_path / "x.jsonl", [good, {**good, **changes}])
    task = Labelled(byte_tokenizer(), path, path, max_length=64)
    with pytest.raises(
        DataError, match="^task: .* has no pairs data, .* Or set reward_head.num_labels to the number of"
    ):
        task.pairs("train")
    assert task.labelled("train")["labels"][:] == [1] and task.left_out["train"] == {reason: 1}


def test_a_csv_file_has_labels_as_text(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("prompt,completion,label\n" + "".join(f"River?,Loire {n}.,{n}\n" for n in ("True", " false", "3")))
    assert Labelled(byte_tokenizer(), str(path), str(path)).labelled("train")["labels"][:] == [1, 0, 3]
    path.write_text("prompt,completion,class\nRiver?,Loire.,1\n")
    with pytest.raises(DataError, match='line 2: a class is in the column "label"; present: prompt, completion, class'):
        Labelled(byte_tokenizer(), str(path), str(path)).labelled("train")


def test_no_row_is_cut(tmp_path):
    path = write(tmp_path / "x.jsonl", [{**FORMS[1], "label": 1}])
    with pytest.raises(
        DataError, match="^on_long: labelled responses are not cut here. Take it out: what is over max_"
    ):
        Labelled(byte_tokenizer(), path, path, on_long="cut")
    with pytest.raises(DataError, match="^max_length: a number from 1 is needed, got 0"):
        Labelled(byte_tokenizer(), path, path, max_length=0)


def test_the_example():
    path = str(Path(__file__).parents[2] / "data" / "labelled.jsonl")
    task = Labelled(byte_tokenizer(), path, validation_size=4)
    assert sorted(task.labelled("train")["labels"][:]) == [0] * 6 + [1] * 6 and not task.left_out["train"]


def test_all_responses_to_a_prompt_are_held_out_together(tmp_path):
    rows = [
        {"prompt": f"Why {i}?", "completion": f"{answer}.", "label": number}
        for i in range(8) for number, answer in enumerate(("So", "Who knows"))
    ]  # fmt: skip
    tokenizer = byte_tokenizer()
    task = Labelled(tokenizer, write(tmp_path / "x.jsonl", rows), validation_size=4)
    trained, held_out = (
        [re.search(r"Why \d", tokenizer.decode(ids))[0] for ids in task.labelled(split)["input_ids"]]
        for split in ("train", "validation")
    )
    assert (len(trained), len(held_out)) == (12, 4) and not set(trained) & set(held_out)
