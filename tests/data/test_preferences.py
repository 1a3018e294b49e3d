import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tests.tiny_runs import byte_tokenizer
from toolkit.data import Demonstrations, LabelledCollator, Preferences, PromptCollator, pad_rows, sources
from toolkit.data.messages import dialogue_turns
from toolkit.data.rows import Unusable
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
    text = "\n\nHuman: a b\n\nAssistant: c\n\nHuman: d\n\nAssistant: e\n\nf"
    assert dialogue_turns(text, answered=True) == [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e\n\nf"},
    ]
    with pytest.raises(Unusable, match="does not begin"):
        dialogue_turns("Hello", answered=True)
    with pytest.raises(Unusable, match="not the assistant's"):
        dialogue_turns("\n\nHuman: a", answered=True)
    with pytest.raises(Unusable, match="cannot be a prompt: its last turn is the assistant's"):
        dialogue_turns("\n\nHuman: a\n\nAssistant: b", answered=False)
    with pytest.raises(Unusable, match="an empty prompt"):
        dialogue_turns("\n\nAssistant:", answered=False)


SEVERAL = [{"prompt": f"q{n % 8}", "chosen": "abcdefghij"[: n + 1], "rejected": "k"} for n in range(10)]


@pytest.fixture
def making(tmp_path):
    path = write(tmp_path / "pairs.jsonl", SEVERAL)
    return lambda **settings: Preferences(byte_tokenizer(), path, path, **settings)


def parted(pairs):
    """Prompt, better and worse response of each pair, as text with the end."""
    decode = byte_tokenizer().decode
    for pair in pairs:
        sides = [pair[key] for key in ("chosen_ids", "rejected_ids")]
        yield decode(sides[0][: pair["prompt_length"]]), *(decode(ids[pair["prompt_length"] :]) for ids in sides)


def test_pairs_that_a_program_makes(making):
    plain, both = making(), making(made_pairs=["other_prompt", "cut"])
    read, made = list(parted(plain.pairs("train"))), list(parted(both.pairs("train")))
    assert made[:10] == read and len(made) == 20
    said = dict[str, set[str]]()
    for asked, chosen, _ in read:
        said.setdefault(asked, set()).add(chosen)
    for number, (asked, chosen, worse) in enumerate(made[10:]):
        assert (asked, chosen) == read[number][:2]
        if number % 2 == 0:
            assert worse not in said[asked] and any(worse in others for others in said.values())
        else:
            part = worse.removesuffix("</s>")
            assert worse == f"{part}</s>" and 0 < len(part) <= 0.8 * (number + 1) and chosen.startswith(part)
    assert len(made[-1][2].removesuffix("</s>")) < 8  # of ten letters: somewhere, and not at four fifths
    assert list(parted(making(made_pairs=["other_prompt", "cut"]).pairs("train"))) == made
    assert list(parted(making(made_pairs=["other_prompt", "cut"], seed=1).pairs("train"))) != made
    for what in ("pairs", "demonstrations", "prompts"):
        assert getattr(both, what)("validation").to_list() == getattr(plain, what)("validation").to_list()
    assert both.demonstrations("train").to_list() == plain.demonstrations("train").to_list()
    assert both.report() == f"{plain.report()}; 10 pairs more are made of the reward's"


@pytest.mark.parametrize("seed", range(8))
def test_the_response_to_another_prompt_is_that_to_another(seed, making):
    """Two of the prompts have two responses each."""
    pairs = list(parted(making(made_pairs=["other_prompt"], seed=seed).pairs("train")))
    answers = {(asked, chosen) for asked, chosen, _ in pairs[:10]}
    assert len(pairs) == 20 and not {(asked, worse) for asked, _, worse in pairs[10:]} & answers


@pytest.mark.parametrize(("answers", "made"), [(("yes", "no"), 8), (("yes",), 0)])
def test_the_response_to_another_prompt_is_another_response(answers, made, tmp_path):
    rows = [{"prompt": f"q{n}", "chosen": answers[n % len(answers)], "rejected": "k"} for n in range(8)]
    path = write(tmp_path / "few.jsonl", rows)
    pairs = list(parted(Preferences(byte_tokenizer(), path, path, made_pairs=["other_prompt"]).pairs("train")))
    assert [{chosen, worse} for _, chosen, worse in pairs[8:]] == [{"yes</s>", "no</s>"}] * made


def test_what_cannot_be_made_is_not(tmp_path, making):
    assert len(making(made_pairs=["cut"]).pairs("train")) == 19  # one has a letter alone
    path = write(tmp_path / "one.jsonl", SEVERAL[:1])
    assert len(Preferences(byte_tokenizer(), path, path, made_pairs=["other_prompt"]).pairs("train")) == 1
    with pytest.raises(DataError, match="made_pairs: it names no kind"):
        making(made_pairs=[])


def test_what_is_made_of_a_response_that_was_cut_ends_there(making):
    pairs = list(parted(making(made_pairs=["cut"], on_long="cut", max_response_length=5).pairs("train")))
    cut = [(chosen, worse) for _, chosen, worse in pairs[10:] if not chosen.endswith("</s>")]
    assert len(cut) == 6 and all(worse.endswith("</s>") for _, worse in cut)
    assert all(chosen.startswith(part) and 1 <= len(part) <= 4 for chosen, worse in cut
               if (part := worse.removesuffix("</s>")))  # fmt: skip


def test_made_pairs_are_of_the_reward_s_part_and_have_no_margin(tmp_path):
    rows = [{**row, "margin": 2.0} for row in SEVERAL]
    path = write(tmp_path / "pairs.jsonl", rows)
    task = Preferences(byte_tokenizer(), path, path, parts={"reward": 4}, made_pairs=["cut"])
    pairs = task.pairs("train")
    number = list(pairs["margin"]).count(2.0)  # one more where pairs of one prompt stay together
    assert number in (4, 5) and list(pairs["margin"]) == [2.0] * number + [0.0] * (len(pairs) - number)
    assert len(pairs) >= 2 * number - 1
    read = {tuple(row["chosen_ids"]) for row in pairs.select(range(number)).to_list()}
    assert {tuple(row["chosen_ids"]) for row in pairs.to_list()} == read
    shown = {tuple(row["input_ids"]) for row in task.demonstrations("train").to_list()}
    assert len(read) == number and not read & shown


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
        {"chosen": "\n\nHuman: 1", "rejected": "nonsense"},
        "\n",
        {"chosen": "\n\nAssistant: 1", "rejected": "\n\nAssistant: 2"},
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
        "not a dialogue: its last turn is not the assistant's": 1,
        "an empty prompt": 1,
    }
    equal = f"1 × chosen and rejected are equal (first: {path}, line 2), 1 × "
    assert task.report().startswith(f"train: 1 pairs; 7 left out: {equal}")
    out = task.left_out_rows()
    assert out[0] == {"split": "train", "place": f"{path}, line 2", "reason": "chosen and rejected are equal"}
    assert [row["place"].rpartition(" ")[2] for row in out] == ["2", "3", "4", "5", "6", "7", "9"] * 2
    assert [row["split"] for row in out] == ["train"] * 7 + ["validation"] * 7


def test_the_first_place_of_each_reason(tmp_path, chat_tokenizer):
    empty = {"chosen": "\n\nHuman: 1\n\nAssistant:", "rejected": "\n\nHuman: 1\n\nAssistant: 3"}
    path = write(tmp_path / "pairs.jsonl", [PAIR, empty, PAIR, {**PAIR, "rejected": PAIR["chosen"]}, empty])
    good = write(tmp_path / "good.jsonl", [PAIR])
    assert Preferences(chat_tokenizer, path, good).report() == (
        f"train: 2 pairs; 3 left out: 2 × an empty response (first: {path}, line 2), "
        f"1 × chosen and rejected are equal (first: {path}, line 4) | validation: 1 pairs; "
        "1 of these have a prompt that is trained on, too"
    )


def test_pairs_from_other_sources(tmp_path, chat_tokenizer, monkeypatch):
    expected = Preferences(chat_tokenizer, good := write(tmp_path / "x.jsonl", [PAIR]), good).pairs("train")[:]
    table = {column: [PAIR[column]] for column in PAIR}
    swapped = {"chosen": table["rejected"], "rejected": table["chosen"]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    data = DatasetDict(train=Dataset.from_dict(table), test=Dataset.from_dict(swapped))
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "x.csv").write_text("chosen,rejected\n" + ",".join(f'"{PAIR[column]}"' for column in PAIR))
    (tmp_path / "x.json").write_text(json.dumps([PAIR]))
    for name in ("x.parquet", "x.csv", "x.json"):
        source = str(tmp_path / name)
        assert Preferences(chat_tokenizer, source, source).pairs("train")[:] == expected, name
    seen = []
    monkeypatch.setattr(
        sources, "load_dataset", lambda path, name, data_dir: seen.append((path, name, data_dir)) or data
    )
    for source, settings in (("some/pairs", {"subset": "part", "name": "main"}), (str(tmp_path / "saved"), {})):
        task = Preferences(chat_tokenizer, source, **settings)  # each has a test split for validation
        assert task.pairs("train")[:] == expected
        assert task.pairs("validation")["chosen_ids"][:] == expected["rejected_ids"]
    assert seen == [("some/pairs", "main", "part")] * 2


def test_a_template_that_refuses_a_system_message(tmp_path, chat_tokenizer):
    refuse = "{{ raise_exception('no system here') if messages[0].role == 'system' }}"
    chat_tokenizer.chat_template = refuse + "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write(tmp_path / "pairs.jsonl", [PAIR])
    assert len(Preferences(chat_tokenizer, path, path).pairs("train")) == 1
    with pytest.raises(DataError, match=r"^system: no prompt can have a system message: .*no system here.*system=null"):
        Preferences(chat_tokenizer, path, path, system="0")


@pytest.mark.parametrize("ids, wrong", [([2**65], "a number of over 64 bits"), ([1, "x"], "values of one type")])
def test_messages_that_no_table_holds(ids, wrong, tmp_path, chat_tokenizer):
    asked = [{"prompt": [{"role": "user", "content": str(n), "id": one}]} for n, one in enumerate(ids)]
    path = write(tmp_path / "pairs.jsonl", [{**row, "chosen": "3", "rejected": "4"} for row in asked])
    told = f'^train: the prompts of train: column "messages" (holds|does not hold) {wrong}; in .*, line {len(ids)} it'
    with pytest.raises(DataError, match=told):
        Preferences(chat_tokenizer, path, path).prompts("train")


def test_a_prompt_that_is_typed(tmp_path, chat_tokenizer):
    task = Preferences(chat_tokenizer, "x.jsonl", system="0")
    asked = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    assert task.chats and chat_tokenizer.decode(task.prompt_ids(asked)) == "大:0=_:1=小:2=_:3=x:"


def test_the_example_in_data():
    path = str(Path(__file__).parents[2] / "data" / "preferences_example.jsonl")
    task = Preferences(byte_tokenizer(), path, path)
    assert len(task.pairs("train")) == 24 and task.left_out_rows() == []


def test_pairs_held_out_and_columns_of_other_names(tmp_path):
    rows = [{"question": f"Ask {i // 2}", "good": f"yes {i}", "bad": f"no {i}"} for i in range(20)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}

    def made(**changes):
        return Preferences(byte_tokenizer(), str(path), **{"columns": columns, "validation_size": 5, **changes})

    task = made()
    train, held_out = task.pairs("train"), task.pairs("validation")
    assert (len(train), len(held_out)) == (14, 6)  # a question's two pairs stay together
    prompts = [set(task.prompts(split)["prompt"]) for split in ("train", "test")]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 10
    fewer = made(max_train_rows=3, max_validation_rows=2)
    assert fewer.pairs("validation")[:] == held_out[:2] and fewer.pairs("train")[:] == train[:3]
    assert made(seed=1).pairs("validation")[:] != held_out[:]
    assert len(task.row_places("reward")) == 20 and "train: 14 pairs | validation: 6 pairs" in task.report()
    for changes, message in (
        ({"validation": str(path)}, "^validation_size: it has no effect with validation"),
        ({"validation_size": 0}, "^validation_size: a number from 1 is needed, got 0"),
        ({"columns": {"promt": "question"}}, '^columns: the task has no column "promt". Did you mean prompt?'),
    ):
        with pytest.raises(DataError, match=message):
            made(**changes)
    with pytest.raises(DataError, match="^validation_size: 99 leaves no training rows"):
        made(validation_size=99).pairs("train")
    with pytest.raises(DataError, match='^columns.prompt: .*line 1: no column "ask"; present: question, good'):
        made(columns={"prompt": "ask"}).pairs("train")


def test_limits_on_rows_and_unique_prompts(tmp_path, chat_tokenizer):
    other = {"chosen": "\n\nHuman: 7\n\nAssistant: 8", "rejected": "\n\nHuman: 7\n\nAssistant: 9"}
    path = write(tmp_path / "pairs.jsonl", [PAIR, PAIR, other])
    task = Preferences(chat_tokenizer, path, path, max_train_rows=2)
    assert len(task.pairs("train")) == 2 and len(task.prompts("train")) == 1
    assert len(task.pairs("validation")) == 3 and len(task.prompts("test")) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"chosen": "x"}], r'line 1: column "rejected" is missing; present: chosen'),
        ([], r"^train: no row can be used \(the file is empty\). Mend .*pairs.jsonl, or name another source"),
        ([{"chosen": "a", "rejected": "a"}], r"no row can be used \(1 × chosen and rejected are equal"),
    ],
)
def test_bad_files(rows, message, tmp_path, chat_tokenizer):
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(DataError, match=message):
        Preferences(chat_tokenizer, path, path).pairs("train")


def test_held_out_pairs_have_to_come_from_somewhere(tmp_path, chat_tokenizer):
    good = write(tmp_path / "pairs.jsonl", [PAIR])
    with pytest.raises(DataError, match="^validation: it is missing. Name a source of held-out pairs, or hold some"):
        Preferences(chat_tokenizer, good).pairs("train")


def test_real_pairs(shared_data, chat_tokenizer):
    for line in (shared_data / "validation.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chosen, rejected = (dialogue_turns(row[side], answered=True) for side in ("chosen", "rejected"))
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


def test_long_responses_are_cut_where_that_is_asked_for(tmp_path, chat_tokenizer):
    rows = [PAIR, {**PAIR, "chosen": PAIR["chosen"] + "9999", "rejected": PAIR["rejected"] + "1111"}]
    path = write(tmp_path / "pairs.jsonl", rows)
    limits = {"max_response_length": 3}
    assert len(Preferences(chat_tokenizer, path, path, **limits).pairs("train")) == 1
    task = Preferences(chat_tokenizer, path, path, on_long="cut", **limits)
    whole, cut = task.pairs("train")
    assert whole["chosen_ids"][-1] == chat_tokenizer.eos_token_id
    prompt = cut["chosen_ids"][: cut["prompt_length"]]
    assert cut["chosen_ids"] == prompt + chat_tokenizer.encode("679")  # without an end, which was not there
    same = write(
        tmp_path / "same.jsonl",
        [PAIR, {**PAIR, "chosen": "\n\nHuman: 12\n\nAssistant: 777", "rejected": "\n\nHuman: 12\n\nAssistant: 778"}],
    )
    one = Preferences(chat_tokenizer, same, same, on_long="cut", max_response_length=2)
    assert one.left_out["train"]["chosen and rejected are equal once cut"] == 1


def test_what_has_no_limit_is_not_cut(tmp_path, chat_tokenizer):
    path = write(tmp_path / "x.jsonl", [{"prompt": "1", "completion": "2"}])
    with pytest.raises(DataError, match="on_long: demonstrations are not cut here. Take it out: the sft stage cuts"):
        Demonstrations(chat_tokenizer, path, validation=path, on_long="cut")
