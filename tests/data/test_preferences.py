import json

import pytest

from toolkit.data import LabelledCollator, Preferences, PromptCollator, doubling, pad_rows
from toolkit.data.preferences import parse_dialogue
from toolkit.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}={% endfor %}{% if add_generation_prompt %}x:{% endif %}"
)
PAIR = {
    "chosen": "\n\nHuman: 12\n\nAssistant: 3\n\nHuman: 45\n\nAssistant: 67",
    "rejected": "\n\nHuman: 12\n\nAssistant: 3\n\nHuman: 45\n\nAssistant: 8",
}


@pytest.fixture
def chat_tokenizer(tokenizer):
    # Letters outside the vocabulary would be an error of the character tokenizer.
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.role[0] }}", "{{ '_' if m.role == 'user' else '小' if m.role == 'assistant' else '大' }}"
    )
    return tokenizer


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_dialogues():
    assert parse_dialogue("\n\nHuman: a b\n\nAssistant: c\n\nHuman: d\n\nAssistant: e\n\nf") == [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e\n\nf"},
    ]
    with pytest.raises(ValueError, match="does not begin"):
        parse_dialogue("Hello")
    with pytest.raises(ValueError, match="not the assistant's"):
        parse_dialogue("\n\nHuman: a")


def test_a_pair_is_tokenised_as_a_rollout_would_be(tmp_path, chat_tokenizer):
    path = write(tmp_path / "pairs.jsonl", [PAIR])
    task = Preferences(chat_tokenizer, path, path)
    prompt = task.prompts("train")[0]
    assert prompt["prompt"] == "_:12=小:3=_:45=x:"
    pair = task.pairs("train")[0]
    assert pair["chosen_ids"] == prompt["input_ids"] + chat_tokenizer.encode("67E")
    assert pair["rejected_ids"] == prompt["input_ids"] + chat_tokenizer.encode("8E")
    shown = task.demonstrations("train")[0]
    assert shown["input_ids"] == pair["chosen_ids"]
    assert shown["labels"] == [-100] * len(prompt["input_ids"]) + chat_tokenizer.encode("67E")
    system = Preferences(chat_tokenizer, path, path, system="0")
    assert system.prompts("validation")[0]["prompt"] == "大:0=_:12=小:3=_:45=x:"


def test_rows_left_out_are_counted_by_reason(tmp_path, chat_tokenizer):
    long = "\n\nHuman: " + "1" * 50 + "\n\nAssistant: "
    rows = [
        PAIR,
        {**PAIR, "rejected": PAIR["chosen"]},
        {"chosen": long + "2", "rejected": long + "3"},
        {"chosen": "\n\nHuman: 1\n\nAssistant: " + "5" * 40, "rejected": "\n\nHuman: 1\n\nAssistant: 3"},
        {"chosen": "\n\nHuman: 1\n\nAssistant: 2", "rejected": "\n\nHuman: 9\n\nAssistant: 3"},
        {"chosen": "\n\nHuman: 1\n\nAssistant:", "rejected": "\n\nHuman: 1\n\nAssistant: 3"},
        {"chosen": "nonsense", "rejected": "nonsense"},
        "\n",
    ]
    path = write(tmp_path / "pairs.jsonl", rows)
    task = Preferences(chat_tokenizer, path, path, max_prompt_length=30, max_response_length=20)
    assert len(task.pairs("train")) == 1
    assert dict(task.left_out["train"]) == {
        "chosen and rejected are equal": 1,
        "a prompt over 30 tokens": 1,
        "a response over 20 tokens": 1,
        "chosen and rejected have different prompts": 1,
        "an empty response": 1,
        'not a dialogue: it does not begin with "\\n\\nHuman: "': 1,
    }
    assert task.report().startswith("train: 1 pairs; 6 left out: 1 × ")


def test_limits_on_rows_and_unique_prompts(tmp_path, chat_tokenizer):
    other = {"chosen": "\n\nHuman: 7\n\nAssistant: 8", "rejected": "\n\nHuman: 7\n\nAssistant: 9"}
    path = write(tmp_path / "pairs.jsonl", [PAIR, PAIR, other])
    task = Preferences(chat_tokenizer, path, path, max_train_rows=2)
    assert len(task.pairs("train")) == 2 and len(task.prompts("train")) == 1
    assert len(task.pairs("validation")) == 3 and len(task.prompts("test")) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([PAIR, '{"chosen": \n'], r"pairs.jsonl, line 2: not valid JSON"),
        (["[1]\n"], r"line 1: a JSON object is needed, this is a list"),
        ([{"chosen": "x"}], r'line 1: column "rejected" is missing or no text; present: chosen'),
        ([], r"data.train: no row can be used \(the file is empty\)"),
        ([{"chosen": "a", "rejected": "a"}], r"no row can be used \(1 × not a dialogue"),
    ],
)
def test_bad_files(rows, message, tmp_path, chat_tokenizer):
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(DataError, match=message):
        Preferences(chat_tokenizer, path, path).pairs("train")


def test_other_bad_sources(tmp_path, chat_tokenizer, tokenizer):
    good = write(tmp_path / "pairs.jsonl", [PAIR])
    with pytest.raises(DataError, match="there is no such file"):
        Preferences(chat_tokenizer, str(tmp_path / "no.jsonl"), good).pairs("train")
    with pytest.raises(DataError, match="data.validation is missing"):
        Preferences(chat_tokenizer, good).pairs("train")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"chosen": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"not UTF-8 \(byte 12\)"):
        Preferences(chat_tokenizer, str(latin), good).pairs("train")
    with pytest.raises(DataError, match="is no file, and the hub did not give it"):
        Preferences(chat_tokenizer, "nobody/nothing-of-the-kind", good).pairs("train")
    with pytest.raises(DataError, match="has no chat template"):
        Preferences(doubling.tokenizer(), good, good)


def test_real_pairs(shared_data, chat_tokenizer):
    for line in (shared_data / "validation.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chosen, rejected = parse_dialogue(row["chosen"]), parse_dialogue(row["rejected"])
        assert chosen[-1]["role"] == rejected[-1]["role"] == "assistant"


def test_padding_and_masks_come_from_lengths():
    ids, mask = pad_rows([[2, 2], [5, 6, 2]], pad_token_id=2, side="left")
    assert ids.tolist() == [[2, 2, 2], [5, 6, 2]] and mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    ids, mask = pad_rows([[2, 2], [5, 6, 2]], pad_token_id=2, side="right")
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    batch = PromptCollator(0)([{"input_ids": [5], "a": "x"}, {"input_ids": [5, 6], "a": "y"}])
    assert batch["input_ids"].tolist() == [[0, 5], [5, 6]] and batch["columns"] == {"a": ["x", "y"]}
    assert batch["prompt_ids"] == [[5], [5, 6]]
    batch = LabelledCollator(0)([{"input_ids": [5], "labels": 1}, {"input_ids": [5, 6], "labels": 0}])
    assert batch["input_ids"].tolist() == [[5, 0], [5, 6]] and batch["labels"].tolist() == [1, 0]
