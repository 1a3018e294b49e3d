"""Files that are damaged, enormous or none at all: each is read, or is one line that names it, and none hangs."""

import json
import os
import random
import shutil
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tests.data.test_sources import file, read
from tests.tiny_runs import byte_tokenizer
from toolkit.data import Demonstrations, Preferences, Prompts, RatedResponses, chat_template, data_digest, sources
from toolkit.data.rows import as_dataset
from toolkit.data.source_kinds import has_splits, is_hub_id
from toolkit.errors import DataError
from toolkit.time_limit import time_limit

ENDINGS = ("jsonl", "json", "csv", "parquet", "txt")


def saved(folder):
    """A `DatasetDict` on disk."""
    rows = Dataset.from_dict({"prompt": ["a", "b", "c"]})
    DatasetDict(train=rows, test=rows).save_to_disk(folder)
    return folder


def refusal(source, **arguments):
    """What reading says, which is one line of a bearable length without control characters."""
    with pytest.raises(DataError) as error:
        read(source, **arguments)
    text = str(error.value)
    assert text.startswith("train: ") and text.isprintable() and len(text) < 1500
    return text


def test_a_column_that_is_there_twice_is_not_read_once(tmp_path):
    table = pa.table([["a"], ["b"]], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "x.parquet")
    assert 'column "prompt" is there 2 times' in refusal(tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}\n')
    assert 'line 2: not valid JSON ("prompt" is there twice)' in refusal(tmp_path / "x.jsonl")
    # Of very many, the last is found in one pass, not in one for each of them.
    many = ", ".join(f'"{number}": 1' for number in (*range(100_000), 99_999))
    (tmp_path / "x.jsonl").write_text(f"{{{many}}}")
    assert '("99999" is there twice)' in refusal(tmp_path / "x.jsonl")


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pipe_is_not_waited_for(ending, tmp_path):
    os.mkfifo(tmp_path / f"x.{ending}")
    assert "but a pipe or a device. Save it as a file" in refusal(tmp_path / f"x.{ending}")


@pytest.mark.parametrize(
    "name", ["dataset_dict.json", "train/dataset_info.json", "train/state.json", "train/data-00000-of-00001.arrow"]
)
def test_nor_is_one_in_a_folder(name, tmp_path):
    pipe = saved(tmp_path / "x") / name
    pipe.unlink()
    os.mkfifo(pipe)
    assert f"{pipe}: neither a file nor a folder" in refusal(tmp_path / "x")
    assert name != "dataset_dict.json" or has_splits(str(tmp_path / "x"))  # and is read, not said to be missing


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, "xxx … (5000 characters): cannot be opened (File name too long). Check its name"),
        ("x" * 5000 + ".jsonl", "characters): cannot be opened (File name too long)"),
        ("a\0b.jsonl", r"a\x00b.jsonl: cannot be opened (embedded null byte)"),
        ("a\0b", r"a\x00b: cannot be opened (embedded null byte)"),
        ("a\nb\x1b[31m.jsonl", r"a\nb\x1b[31m.jsonl: there is no such file"),
        ("~nouser/x.jsonl", "~nouser/x.jsonl: there is no such file. Check the path"),
        ("~nouser", 'there is no "~nouser". Name a .jsonl'),
        ("good.jsonl/x.jsonl", "good.jsonl/x.jsonl: there is no such file. Check the path"),
        ("loop.jsonl", "loop.jsonl: cannot be opened (Too many levels of symbolic links)"),
    ],
)
def test_names_that_no_file_can_have(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = str(file(tmp_path / "good.jsonl", '{"prompt": "a"}\n'))
    os.symlink("loop.jsonl", "loop.jsonl")
    assert message in refusal(name)
    # Nor do the questions that are asked before anything is read end in an error of their own.
    assert has_splits(name) == is_hub_id(name) == (name == "x" * 5000)
    if name != "x" * 5000:
        with pytest.raises(DataError, match="^subset: subset would have no effect"):
            Prompts(byte_tokenizer(), name, subset="a")
    with pytest.raises(DataError, match="^validation: "):
        Prompts(byte_tokenizer(), good, name).prompts("validation")


def test_folders_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    saved(tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        assert "/x: cannot be read (Permission denied). Check its permissions" in refusal(tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        assert "there is no such file. Check the path" in refusal(tmp_path / "y.jsonl")
    monkeypatch.setattr(Path, "stat", refuse)
    assert "y.jsonl: cannot be opened (Permission denied). Check its name and permissions" in refusal("y.jsonl")


# ---------------------------------------------------------------------- contents


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2**62] * 2, pa.duration("s")),
        pa.array([2**40] * 2, pa.timestamp("s")),
        pa.array([2**30] * 2, pa.date32()),
        pa.array([1, 2], pa.timestamp("s", "Mars/Base")),
    ],
    ids=["duration", "timestamp", "date", "zone"],
)
def test_values_that_python_has_not_are_a_column_s(values, tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "when": values}), path)
    assert f'{path}: column "when" holds a value that Python has not (' in refusal(path)
    assert refusal(path).endswith("Write the column as text, or take it out.")


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"features": 3}', '{"features": {"a": {"_type": "No"}}}', "{"])
@pytest.mark.parametrize("name", ["dataset_dict.json", "train/dataset_info.json", "train/state.json"])
def test_a_saved_folder_whose_json_is_something_else(name, content, tmp_path):
    file(saved(tmp_path / "x") / name, content)
    is_object = content.startswith("{") and content != "{"
    wanted = "x is no folder that datasets can read (" if is_object else f"{name}: not a JSON object, which save"
    assert wanted in refusal(tmp_path / "x") and "or one of its files" not in refusal(tmp_path / "x")


@pytest.mark.parametrize("depth", [21, 900, 5000])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_nested_without_end(ending, depth, tmp_path):
    row = '{"a": ' + "[" * depth + "]" * depth + "}"
    path = file(tmp_path / f"x.{ending}", f"[{row}]" if ending == "json" else row)
    assert ("nested over 20 deep. Mend" if depth < 990 else "not valid JSON (maximum recursion") in refusal(path)
    row = '{"prompt": "a", "a": ' + "[" * 19 + "]" * 19 + "}"
    path = file(tmp_path / f"x.{ending}", f"[{row}]" if ending == "json" else row)
    assert len(Prompts(byte_tokenizer(), str(path), str(path)).prompts("train")) == 1


def jsonl(path, *rows):
    return str(file(path, "".join(json.dumps(row) + "\n" for row in rows)))


def test_numbers_of_400_digits(tmp_path):
    large = 10**400
    path = jsonl(tmp_path / "x.jsonl", {"prompt": "a", "n": large}, {"prompt": "b", "n": 1})
    with pytest.raises(
        DataError, match='^train: .*x.jsonl: column "n" holds a number of over 64 bits; in .*, line 1 it is .* Mend or'
    ):
        Prompts(byte_tokenizer(), path, path).prompts("train")
    for row in ({"input_ids": [large]}, {"input_ids": [5, large]}):
        path = jsonl(tmp_path / "x.jsonl", {"input_ids": [5]}, row)
        assert Prompts(byte_tokenizer(), path, path).left_out["train"] == {"ids that are not in the vocabulary": 1}
    rated = {"prompt_ids": [5], "response_ids": [5], "rewards": 1}
    path = jsonl(tmp_path / "x.jsonl", rated, {**rated, "rewards": large}, {**rated, "rewards": [-large]})
    assert RatedResponses(byte_tokenizer(), path).left_out["train"] == {"rewards that are not finite": 2}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = jsonl(tmp_path / "x.jsonl", pair, {**pair, "margin": large})
    task = Preferences(byte_tokenizer(), path, path)
    assert task.left_out["train"] == {"a margin that is no finite number": 1}
    assert "not valid JSON (Exceeds the limit" in refusal(file(tmp_path / "x.jsonl", '{"n": ' + "1" * 5000 + "}"))


def test_a_table_of_10_000_columns(tmp_path):
    names = [f"c{n}" for n in range(10_000)]
    short = jsonl(tmp_path / "short.jsonl", {"prompt": "a"})
    path = str(file(tmp_path / "x.csv", ",".join([*names[:2000], "prompt"]) + "\n" + ",".join(["1"] * 2001)))
    prompts = Prompts(byte_tokenizer(), path, short).prompts("train")
    assert len(prompts) == 1 and len(prompts.column_names) == 2003  # with messages and input_ids
    path = str(file(tmp_path / "x.csv", ",".join(names) + "\n" + ",".join(names)))
    for task in (Prompts, Demonstrations, RatedResponses):
        with pytest.raises(DataError, match=r"line 2: .* present: c0, c1, .*, c19, and 9980 more\.") as error:
            held_out = {} if task is RatedResponses else {"validation": short}
            task(byte_tokenizer(), path, **held_out).report()
        assert len(str(error.value)) < 600
    assert "2 fields where the header has 10000 (c0, c1" in refusal(file(tmp_path / "x.csv", ",".join(names) + "\na,b"))
    twice = refusal(file(tmp_path / "x.csv", ",".join([*names, "c0"])))
    assert 'column 10001 of the header is "c0" again' in twice


def test_a_field_of_csv_that_is_too_long(tmp_path):
    path = file(tmp_path / "x.csv", f"prompt,n\nshort,1\n{'x' * 131_073},2\n")
    assert "line 3: not valid CSV (field larger than field limit (131072)). Close its quote, or keep" in refusal(path)


def test_what_is_shown_of_a_value_is_short(tmp_path):
    long = {"messages": [{"role": "x\x1b" * 9999, "content": "a"}]}
    path = jsonl(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": "a"}]}, long)
    (reason,) = Prompts(byte_tokenizer(), path, path).left_out["train"]
    assert reason.startswith(r"messages without a turn of the user (roles: x\x1bx\x1b") and len(reason) < 500
    path = jsonl(tmp_path / "x.jsonl", {"y" * 9999: "a"})
    with pytest.raises(DataError, match=r"present: y{150} … \(9999 characters\)\. Rename"):
        Prompts(byte_tokenizer(), path, path).prompts("train")


def test_templates_and_tokenizers_that_raise(tmp_path, tokenizer):
    """The tokenizer has no token for what it does not know."""
    text = "messages[0].content"
    tokenizer.chat_template = f"{{% if 1 // ({text} | length - 2) %}}{{% endif %}}{{{{ {text} }}}}"
    path = jsonl(tmp_path / "x.jsonl", {"prompt": "1"}, {"prompt": "22"}, {"prompt": "abc"})
    task = Prompts(tokenizer, path, path)
    assert len(task.prompts("train")) == 1
    template, unknown = task.left_out["train"]
    assert template.startswith("the chat template refuses it: ") and "zero" in template
    assert unknown.startswith("the tokenizer refuses it: ")
    with pytest.raises(DataError, match='^the prompt "abc": the tokenizer refuses it: .* Ask in another way'):
        Prompts(tokenizer, path, path, chat=False).prompt_ids([{"role": "user", "content": "abc"}])
    row = {"prompt_ids": [5], "response": "1", "rewards": 1}
    path = jsonl(tmp_path / "y.jsonl", row, {**row, "response": "abc"})
    assert list(RatedResponses(tokenizer, path).left_out["train"]) == [unknown]
    path = jsonl(tmp_path / "z.jsonl", {"text": "1"}, {"text": "abc"}, {"prompt": "1", "completion": "abc"})
    assert Demonstrations(tokenizer, path, path).left_out["train"] == {unknown: 2}


def test_any_damage_at_all_is_one_line(tmp_path):
    """Bytes of good files changed, cut and doubled at random."""
    folder = Path(__file__).parents[2] / "data"
    whole = {f".{ending}": (folder / f"prompts.{ending}").read_bytes() for ending in ("json", "parquet", "txt")}
    whole |= {".jsonl": (folder / "queries.jsonl").read_bytes(), ".csv": (folder / "questions.csv").read_bytes()}
    saved(tmp_path / "whole")
    names = [str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    draw, refused = random.Random(0), 0

    def damaged(content):
        content = bytearray(content)
        for _ in range(draw.choice((1, 3, 20))):
            content[draw.randrange(len(content))] = draw.choice((0, 10, 34, 44, 92, 255, draw.randrange(256)))
        start, end = sorted(draw.randrange(len(content)) for _ in range(2))
        return draw.choice((content, content[:end], content[start:], content + content[start:end]))

    for trial in range(200):
        if trial % 4:
            ending = draw.choice(sorted(whole))
            source = file(tmp_path / f"x{ending}", bytes(damaged(whole[ending])))
        else:
            source = tmp_path / "x"
            shutil.rmtree(source, ignore_errors=True)
            shutil.copytree(tmp_path / "whole", source)
            name = draw.choice(names)
            file(source / name, bytes(damaged((source / name).read_bytes())))
        try:
            read(source)
        except DataError:
            refused += refusal(source) != ""
    assert refused > 100


# ---------------------------------------------------------------------- several sources


def test_several_files_are_read_one_after_the_other(tmp_path):
    first = jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": ""})
    second = str(file(tmp_path / "b.csv", "prompt,n\nb,1\n"))
    task = Prompts(byte_tokenizer(), [first, second], [second])
    assert task.prompts("train")["prompt"][:] == ["<s>a</s><s>", "<s>b</s><s>"] and len(task.prompts("test")) == 1
    assert task.row_places("ppo") == [
        {"split": "train", "place": f"{first}, line 1"},
        {"split": "train", "place": f"{second}, line 2"},
        {"split": "validation", "place": f"{second}, line 2"},
    ]
    assert task.report().startswith(f"train: 2 prompts; 1 left out: 1 × an empty prompt (first: {first}, line 2)")
    limited = Prompts(byte_tokenizer(), [first, "never read"], second, max_train_rows=1)
    assert len(limited.prompts("train")) == 1
    # Each source has the prompt in a column of its own; lines of a text file are prompts whatever `columns` says.
    third, lines = jsonl(tmp_path / "c.jsonl", {"query": "c"}), str(file(tmp_path / "d.txt", "d\n"))
    assert Prompts(byte_tokenizer(), [third, second], second).prompts("train")["prompt"][:] == [
        "<s>c</s><s>", "<s>b</s><s>",
    ]  # fmt: skip
    for several in ([third, lines], [lines, third]):
        named = Prompts(byte_tokenizer(), several, second, columns={"prompt": "query"})
        assert sorted(named.prompts("train")["prompt"][:]) == ["<s>c</s><s>", "<s>d</s><s>"]
    with pytest.raises(DataError, match=r'c.jsonl, line 2: no column "query", which the first row has'):
        mixed = jsonl(tmp_path / "c.jsonl", {"query": "a"}, {"prompt": "b"})
        Prompts(byte_tokenizer(), [mixed, second], second).prompts("train")
    for field in ("train", "validation"):
        with pytest.raises(DataError, match=f"^{field}: it names no source. Name a file"):
            Prompts(byte_tokenizer(), **{"train": first, field: []})


def test_several_sources_of_the_hub_or_of_folders(tmp_path, monkeypatch):
    folder = str(saved(tmp_path / "x"))
    monkeypatch.setattr(
        sources, "load_dataset", lambda *_, **__: DatasetDict(test=Dataset.from_dict({"prompt": ["hub"]}))
    )
    task = Demonstrations(byte_tokenizer(), [folder, folder])
    assert has_splits([folder, "some/pairs"]) and not has_splits([folder, "x.jsonl"])
    with pytest.raises(DataError, match="/x/test, row 1: a demonstration is"):  # and not "it is missing"
        task.demonstrations("train")
    both = Prompts(byte_tokenizer(), folder, [folder, "some/pairs"], name="main")
    assert both.prompts("validation")["prompt"][:] == [f"<s>{text}</s><s>" for text in ("a", "b", "c", "hub")]


# ---------------------------------------------------------------------- many rows


def test_rated_rows_are_kept_as_a_table_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.data.rows._AT_ONCE", 3)
    rows = [
        {
            "prompt_ids": [5 + n],
            "response_ids": [6, 7],
            "rewards": [None, None if n < 4 else n / 2],
            "ended": n % 2 == 0,
        }
        for n in range(10)
    ]
    path = jsonl(tmp_path / "x.jsonl", *rows[:5], {**rows[0], "response_ids": []}, *rows[5:])
    task = RatedResponses(byte_tokenizer(), path)
    assert task.rated("train").to_list() == rows and task.left_out["train"] == {"an empty response": 1}
    assert [row["place"] for row in task.row_places("q")] == [f"{path}, line {n}" for n in range(1, 12) if n != 6]
    whole = Dataset.from_list(rows)
    assert task.rated("train").features == whole.features
    assert len(RatedResponses(byte_tokenizer(), path, max_train_rows=4).rated("train")) == 4
    assert RatedResponses(byte_tokenizer(), path, max_train_rows=3).rated("train").to_list() == rows[:3]


def test_encoded_rows_are_kept_as_a_table(tmp_path, monkeypatch):
    rows = [{"prompt": f"ask {n}", "completion": "a" * (n % 5 + 1)} for n in range(9)]
    path = jsonl(tmp_path / "x.jsonl", *rows, {"text": "whole"})
    pairs = jsonl(
        tmp_path / "y.jsonl", *({"prompt": r["prompt"], "chosen": r["completion"], "rejected": "b"} for r in rows)
    )
    found = []
    for at_once in (3, 1000):  # how many are packed at once decides nothing
        monkeypatch.setattr("toolkit.data.rows._AT_ONCE", at_once)
        shown = Demonstrations(byte_tokenizer(), path, validation_size=2)
        preferred = Preferences(byte_tokenizer(), pairs, validation_size=2, made_pairs=["cut", "other_prompt"])
        for task in (shown, preferred):
            assert all(isinstance(part.rows, Dataset) for part in task._splits.values())
        assert shown.demonstrations("train") is shown.demonstrations("train")
        kinds = preferred.demonstrations, preferred.pairs, preferred.prompts
        found.append([data_digest(kind("train")) for kind in (shown.demonstrations, *kinds)])
        rest = shown.demonstrations("train")
        assert found[-1][0] == data_digest(Dataset.from_list(rest.to_list()))
    assert found[0] == found[1]


def test_the_digest_of_demonstrations_is_that_of_their_list(tmp_path):
    """Resumed runs compare it; 1,000 rows are of one batch, and the tokens of these are odd in number."""
    path = jsonl(tmp_path / "x.jsonl", *({"text": "a" * (n % 3 + 1)} for n in range(1005)))
    rows = Demonstrations(byte_tokenizer(), path, path).demonstrations("train")
    assert sum(map(len, rows["input_ids"][:1000])) % 2
    for size in (1, 2, 3):  # a split that is a part of what was read
        parted = Demonstrations(byte_tokenizer(), path, max_train_rows=size, validation_size=size, seed=size)
        for part in (rows, *map(parted.demonstrations, ("train", "validation"))):
            assert data_digest(part) == data_digest(Dataset.from_list(part.to_list()))


def test_a_column_of_over_2_gib_is_not_hashed(monkeypatch):
    def overflows(dataset):
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", overflows)
    assert as_dataset({"prompt": ["a"]}, place="x", field="train").to_list() == [{"prompt": "a"}]


def test_of_many_reasons_the_commonest_are_said(tmp_path):
    speakers = ["bot", "bot", *(f"person {n}" for n in range(200))]
    rows = [{"messages": [{"from": speaker, "value": "a"}]} for speaker in speakers]
    path = jsonl(tmp_path / "x.jsonl", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, *rows)
    task = Prompts(byte_tokenizer(), path, path)
    commonest = f'2 × a message from "bot", a speaker that is not known (first: {path}, line 2)'
    assert task.report("train").startswith(f"train: 1 prompts; 202 left out: {commonest}, 1 × ")
    assert task.report("train").endswith(", 192 × one of 192 other reasons")
    assert len(task.left_out["train"]) == 10 and task.left_out["train"].total() == 202
    assert len({row["reason"] for row in task.left_out_rows()}) == 201


def test_what_was_left_out_is_said_where_too_few_are_left(tmp_path):
    rows = [{"prompt": str(n), "chosen": "b", "rejected": "c"} for n in range(3)]
    path = jsonl(tmp_path / "x.jsonl", *rows, {"prompt": "", "chosen": "b", "rejected": "c"})
    left_out = r"without 1 × an empty prompt \(first: .*x.jsonl, line 4\)\."
    with pytest.raises(DataError, match=rf"has 3 that can be used, {left_out} Lower it, or name"):
        Prompts(byte_tokenizer(), path, validation_size=3).prompts("train")
    with pytest.raises(DataError, match=rf"^parts.ppo: 9 pairs .* stay together, and {left_out} Lower it"):
        Preferences(byte_tokenizer(), path, path, parts={"ppo": 9}).prompts("train")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 0 s"),
        ("{{ messages[0].content * 3000000 }}", "it makes 3,000,000 characters of a conversation"),
        ("{{ messages[0].content * 3000000000 }}", "it takes more than 64 MB of memory"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * (9999 + j) }}{% endfor %}{% endfor %}",
            "it takes more than 64 MB of memory",
        ),
    ],
    ids=["loops", "multiplies", "multiplies to gigabytes", "writes gigabytes"],
)
def test_a_template_that_loops_or_multiplies_ends_the_reading(template, said, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "time_limit", partial(time_limit, 0.2 if "0 s" in said else 10, 64))
    if "64 MB" in said and sys.platform != "linux":
        pytest.skip("the limit of memory is Linux's")
    made = byte_tokenizer()
    made.chat_template, made.name_or_path = template, "some/model"
    path = jsonl(tmp_path / "x.jsonl", *({"prompt": "a"} for _ in range(1000)))
    with pytest.raises(DataError, match=f'^chat: the chat template of "some/model" cannot be used: {said}. Mend its'):
        Prompts(made, path, path).prompts("train")


def test_pairs_of_a_part_are_in_one_piece_and_messages_keep_their_values(tmp_path):
    """A piece for each row would be a million objects; a date in a message decides the digest of the prompts."""
    said = datetime(2024, 5, 1, 12, tzinfo=UTC)
    rows = [
        {"prompt": [{"role": "user", "content": f"ask {n}", "at": said}], "chosen": "yes", "rejected": "no"}
        for n in range(30)
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    task = Preferences(
        byte_tokenizer(), str(tmp_path / "x.parquet"), validation_size=5, parts={"reward": 10, "ppo": 10}
    )
    assert task.pairs("train").data["chosen_ids"].num_chunks == 1
    assert {message["at"] for row in task.prompts("train")["messages"] for message in row} == {said}


def test_a_text_with_a_part_that_is_not_read_is_left_out(tmp_path):
    rows = ({"text": "a"}, {"text": "b", "system": "Be brief"}, {"text": "c", "chat_template_kwargs": {"a": 1}})
    path = jsonl(tmp_path / "x.jsonl", *rows)
    task = Demonstrations(byte_tokenizer(), path, path)
    assert len(task.demonstrations("train")) == 1 and sum(task.left_out["train"].values()) == 2
