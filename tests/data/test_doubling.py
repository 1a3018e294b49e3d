import pytest

from toolkit.data import Doubling, Rollout, doubling
from toolkit.errors import DataError


def test_the_seeds_examples():
    assert doubling.question(5487, "小写") + doubling.answer(5487, "小写") == "S小写:5487x2=一〇九七四"
    assert doubling.question(3164, "大写") + doubling.answer(3164, "大写") == "S大写:3164x2=陆叁贰捌"
    assert doubling.question(3320) + doubling.answer(3320, "数字") == "S__:3320x2=6640"


def test_one_token_a_character_and_back():
    tokenizer = doubling.tokenizer()
    text = "S大写:3164x2=陆叁贰捌E"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[1:-1]
    assert len(tokenizer) == 42 == len(set(doubling.VOCABULARY))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_splits_share_no_question_and_cover_all():
    task = Doubling(seed=3)
    prompts = {split: task.prompts(split) for split in ("train", "validation", "test")}
    as_set = {split: {tuple(row) for row in data["input_ids"]} for split, data in prompts.items()}
    assert [len(as_set[s]) for s in ("train", "validation", "test")] == [27000 - 1300, 300, 1000]
    assert not as_set["train"] & as_set["test"] and not as_set["train"] & as_set["validation"]
    assert not as_set["test"] & as_set["validation"]
    assert Doubling(seed=3).prompts("test")["answer"] == prompts["test"]["answer"]
    assert Doubling(seed=4).prompts("test")["answer"] != prompts["test"]["answer"]


def test_demonstrations_never_show_a_prefix_and_trains_answers_only():
    task = Doubling()
    row = task.demonstrations("validation")[0]
    text = task.tokenizer.decode(row["input_ids"])
    assert text.startswith("S__:") and text.endswith("E")
    cut = text.index("=") + 1
    assert row["labels"] == [-100] * cut + row["input_ids"][cut:]


def test_metrics_by_hand():
    task = Doubling()
    rollout = Rollout(
        prompts=["", "", "", ""],
        responses=["6640", "6640", "六六四〇", ""],
        prompt_ids=[[1]] * 4,
        response_ids=[[2]] * 4,
        ended=[True, False, True, True],
        columns={"answer": ["6640"] * 4, "style": [0] * 4},
    )
    # right; right but never ended; right number in a wrong style; nothing at all
    assert task.metrics(rollout) == {"exact_match": 0.25, "style_accuracy": 0.5}


def test_sizes_are_checked():
    with pytest.raises(DataError, match="fewer than the 27000 questions"):
        Doubling(test_size=27000)


def test_classes_answers_and_figures_are_of_the_style_that_is_asked_for():
    task, styles = Doubling(), list(doubling.STYLES)
    for row in task.labelled("validation"):
        asked, _, said = task.tokenizer.decode(row["input_ids"]).partition("=")
        number = int(asked.removeprefix("S__:").removesuffix("x2"))  # no prefix, which would give the class away
        assert said == doubling.answer(number, styles[row["labels"]]) + "E"
    rows = task.prompts("validation")
    for row in rows:
        style, _, number = task.tokenizer.decode(row["input_ids"]).removeprefix("S").removesuffix("x2=").partition(":")
        assert (styles[row["style"]], row["answer"]) == (style, doubling.answer(int(number), style))
    columns = {name: rows[name][:] for name in ("answer", "style")}
    right = Rollout([""] * 300, columns["answer"], rows["input_ids"][:], [[2]] * 300, [True] * 300, columns)
    assert task.metrics(right) == {"exact_match": 1.0, "style_accuracy": 1.0}
