"""Every source by its rows and places, and every way in which one can be wrong by its message."""

import csv
import errno
import gzip
import json
import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from datasets import config as datasets_config
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError

from toolkit.data import read_rows, sources
from toolkit.data.messages import messages_of_row
from toolkit.data.source_kinds import check_part_settings, has_splits, is_hub_id, source_digest
from toolkit.errors import DataError


def read(path, **arguments):
    return list(read_rows(str(path), field="train", **arguments))


def file(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


# ---------------------------------------------------------------------- what is read


def test_json_lines_keep_their_line_numbers(tmp_path):
    path = file(tmp_path / "x.jsonl", '{"a": 1}\r\n\n  {"a": "two"}')
    assert read(path) == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"a": "two"})]


def test_a_json_file_is_an_array_or_json_lines(tmp_path):
    array = file(tmp_path / "array.json", '\n[\n {"a": 1},\n {"a":\n 2}]')
    assert read(array) == [(f"{array}, row 1", {"a": 1}), (f"{array}, row 2", {"a": 2})]
    lines = file(tmp_path / "lines.json", '{"a": 1}\n{"a": 2}\n')
    assert read(lines) == [(f"{lines}, line 1", {"a": 1}), (f"{lines}, line 2", {"a": 2})]


@pytest.mark.parametrize(
    ("name", "text", "row"),
    [
        ("x.jsonl", '{"a": "ä"}\n', {"a": "ä"}),
        ("x.json", '[{"a": "ä"}]', {"a": "ä"}),
        ("x.csv", "a\nä\n", {"a": "ä"}),
        ("x.txt", "ä\n", {"prompt": "ä"}),
        ("X.TXT", "ä", {"prompt": "ä"}),
    ],
)
def test_utf8_with_and_without_byte_order_mark(name, text, row, tmp_path):
    for start in (b"", b"\xef\xbb\xbf"):
        ((_, seen),) = read(file(tmp_path / name, start + text.encode("utf-8")))
        assert seen == row


def test_only_line_ends_end_a_line(tmp_path):
    """U+2028, a form feed and U+0085 may stand in text; `str.splitlines` would cut there."""
    text = "a\u2028b\x0cc\x85d"
    assert [row for _, row in read(file(tmp_path / "x.txt", f"{text}\r\ne"))] == [{"prompt": text}, {"prompt": "e"}]
    path = file(tmp_path / "x.jsonl", json.dumps({"a": "a\u2028b"}, ensure_ascii=False))
    assert [row for _, row in read(path)] == [{"a": "a\u2028b"}]


def test_a_text_file_has_a_prompt_on_every_line_also_an_empty_one(tmp_path):
    path = file(tmp_path / "x.txt", " one\n\ntwo\n")
    assert read(path) == [
        (f"{path}, line 1", {"prompt": " one"}),
        (f"{path}, line 2", {"prompt": ""}),
        (f"{path}, line 3", {"prompt": "two"}),
    ]


def test_csv_places_are_real_lines(tmp_path):
    path = tmp_path / "x.csv"
    with path.open("w", encoding="utf-8", newline="") as out:
        out.write(" question ,topic\r\n")
        csv.writer(out).writerows([['of "two"\nlines, so', "a"], ["next", "b"]])
        out.write("\r\nlast,c")
    assert read(path) == [
        (f"{path}, line 2", {"question": 'of "two"\nlines, so', "topic": "a"}),
        (f"{path}, line 4", {"question": "next", "topic": "b"}),
        (f"{path}, line 6", {"question": "last", "topic": "c"}),
    ]


def test_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["a", None], "ids": [[1, 2], []]}), path, row_group_size=1)
    assert read(path) == [
        (f"{path}, row 1", {"prompt": "a", "ids": [1, 2]}),
        (f"{path}, row 2", {"prompt": None, "ids": []}),
    ]


def test_folders_of_save_to_disk(tmp_path):
    single, both, other = tmp_path / "single", tmp_path / "both", tmp_path / "other"
    Dataset.from_dict({"a": [1, 2]}).save_to_disk(single)
    assert read(single) == [(f"{single}, row 1", {"a": 1}), (f"{single}, row 2", {"a": 2})]
    train, test, validation = (Dataset.from_dict({"a": [n]}) for n in (1, 2, 3))
    DatasetDict(train=train, test=test, validation=validation).save_to_disk(both)
    assert read(both) == [(f"{both}/train, row 1", {"a": 1})]
    assert read(both, split="validation") == [(f"{both}/test, row 1", {"a": 2})]
    DatasetDict(train=train, validation=validation).save_to_disk(other)
    assert read(other, split="validation") == [(f"{other}/validation, row 1", {"a": 3})]
    assert has_splits(str(both)) and not has_splits(str(single))


def test_a_digest_is_that_of_what_a_source_holds(tmp_path):
    file, saved = tmp_path / "rows.jsonl", tmp_path / "saved"

    def digests():
        return source_digest(str(file)), source_digest(str(saved))

    def save(*numbers):
        shutil.rmtree(saved, ignore_errors=True)
        DatasetDict(train=Dataset.from_dict({"a": numbers})).save_to_disk(saved)

    assert digests() == (None, None) and source_digest("nobody/pairs") is None
    if hasattr(os, "mkfifo"):  # which would be waited for without end
        os.mkfifo(tmp_path / "pipe.jsonl")
        assert source_digest(str(tmp_path / "pipe.jsonl")) is source_digest(str(tmp_path)) is None
    file.write_text('{"a": 1}')
    save(1, 2)
    before = digests()
    assert all(before) and source_digest(str(shutil.copy(file, tmp_path / "copy.jsonl"))) == before[0]
    (saved / "train" / "cache-1a2b.arrow").write_text("what map has made of them")
    (saved / ".cache").mkdir()
    (saved / ".cache" / "rows.jsonl").write_text("of the hub")
    file.touch()
    assert digests() == before
    file.write_text('{"a": 2}')
    save(1, 3)
    assert all(now not in (None, then) for now, then in zip(digests(), before, strict=True))


def test_values_of_several_types_come_as_they_were_given(tmp_path):
    """datasets writes them as JSON, in columns, lists and objects."""
    rows = [
        {"a": "x", "messages": [{"r": 1}, {"s": 2}], "n": {"k": [{"p": 1}, {"q": "z"}]}, "b": "4"},
        {"a": 4, "messages": [{"r": 1}], "n": None, "b": None},
    ]
    Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(tmp_path / "mixed")
    assert [row for _, row in read(tmp_path / "mixed")] == rows


def test_a_hub_id(monkeypatch):
    seen = []

    def load_dataset(*arguments, **named):
        seen.append((arguments, named))
        return DatasetDict(train=Dataset.from_dict({"a": [1, 2]}), test=Dataset.from_dict({"a": [3]}))

    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    assert read("some/pairs", subset="part") == [
        ("some/pairs/part (train), row 1", {"a": 1}),
        ("some/pairs/part (train), row 2", {"a": 2}),
    ]
    assert read("some/pairs", split="validation", name="main") == [("some/pairs (test), row 1", {"a": 3})]
    assert seen == [(("some/pairs", None), {"data_dir": "part"}), (("some/pairs", "main"), {"data_dir": None})]
    both = read("some/pairs", split="validation", subset=["one", "two"])
    assert both == [("some/pairs/one (test), row 1", {"a": 3}), ("some/pairs/two (test), row 1", {"a": 3})]
    assert [named["data_dir"] for _, named in seen[2:]] == ["one", "two"]
    assert has_splits("some/pairs") and not has_splits("some/pairs.jsonl") and not has_splits("/no/where")


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.jsonl",
            '{"a": 1}\n{"a": \n',
            r"x.jsonl, line 2: not valid JSON \(Expecting value, column 7\). Mend or rem",
        ),
        (
            "x.jsonl",
            "[1]\n",
            r"line 1: a JSON object is needed, this is an array. An array of objects belongs in a .json",
        ),
        ("x.jsonl", "[" * 100_000, r"line 1: not valid JSON \(maximum recursion"),
        ("x.jsonl", '{"a": "\\ud83d"}', r"line 1: not valid Unicode \(\\ud83d alone\). Mend or remove the row"),
        ("x.json", '{\n"a": 1}', r"x.json, line 1: not valid JSON .* holds an array of objects, or one object a line"),
        ("x.json", '[{"a": 1},\n{"a" 2}]', r"x.json, line 2: not valid JSON \(Expecting ':' delimiter, column 6\)"),
        ("x.json", '[{"a": 1}, 2]', r"x.json, row 2: a JSON object is needed, this is a number. Remove it"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xe9"}', r"x.jsonl, line 2: not UTF-8 \(byte 16\). Save it as UTF-8"),
        ("x.jsonl", gzip.compress(b'{"a": 1}', mtime=0), "x.jsonl: it is compressed, by gzip. Unpack it: gunzip"),
        ("x.txt", "ä".encode("utf-16"), r"x.txt, line 1: not UTF-8 \(byte 0\)"),
        ("x.csv", "", "x.csv: no header. The first line of a CSV file names its columns"),
        ("x.csv", "a,,c\n", "x.csv, line 1: column 2 of the header has no name. Give every column"),
        ("x.csv", "a,b,a\n", 'x.csv, line 1: column 3 of the header is "a" again'),
        ("x.csv", 'a,b\n"1\n2",3\n4,5,6\n', r"x.csv, line 4: 3 fields where the header has 2 \(a, b\). Put a field"),
        ("x.csv", "a,b\n1\n", "x.csv, line 2: 1 fields where the header has 2"),
        ("x.csv", "a;b\n1,5;2\n", r"x.csv, line 1: the header has semicolons and no comma \(a;b\). Save the file with"),
        ("x.csv", "a\tb\n1\t2\n", r"the header has tabs and no comma"),
        (
            "x.csv",
            'a,b\n1,2\n"3,4\n5,6\n',
            "x.csv, line 3: not valid CSV .* Mend the row: a quote in a field is doubled",
        ),
        ("x.parquet", "no", "x.parquet: not a readable parquet file .* Write it anew"),
        (
            "x.tsv",
            "a\tb\n",
            r'train: .*x.tsv ends in ".tsv", which is not read. Name a .jsonl, .json, .csv, .parq',
        ),
        ("x.pkl", b"\x80\x04N.", "which is not read. .*a folder that save_to_disk or hf download wrote, or a hub id"),
    ],
)
def test_damaged_files(name, content, message, tmp_path):
    with pytest.raises(DataError, match=message) as error:
        read(file(tmp_path / name, content))
    assert "\n" not in str(error.value)


def test_what_comes_before_the_damage_is_read(tmp_path):
    rows = read_rows(str(file(tmp_path / "x.jsonl", '{"a": 1}\n{')), field="train")
    assert next(rows)[1] == {"a": 1}
    with pytest.raises(DataError, match="line 2"):
        next(rows)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_missing_file_names_the_nearest(ending, tmp_path):
    file(tmp_path / f"queries.{ending}", "")
    with pytest.raises(DataError, match=rf"querys.{ending}: there is no such file. Did you mean .*queries.{ending}\?"):
        read(tmp_path / f"querys.{ending}")
    with pytest.raises(DataError, match="there is no such file. Check the path"):
        read(tmp_path / "nowhere" / f"queries.{ending}")


def test_names_that_can_be_nothing(tmp_path):
    (tmp_path / "prompts").mkdir()
    with pytest.raises(DataError, match=r'train: there is no ".*/prompt". Did you mean .*/prompts\? Name a .jsonl'):
        read(tmp_path / "prompt")
    with pytest.raises(DataError, match=r'train: there is no "".* Name a .jsonl, .json'):
        read("")


@pytest.mark.parametrize("name", ["json", "csv", "text", "parquet"])
def test_a_reader_of_datasets_is_no_hub_id(name, tmp_path, monkeypatch):
    """It would read all files of the current folder."""
    (tmp_path / "mine.json").write_text('[{"prompt": "a"}]')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f'train: there is no "{name}".'):
        next(read_rows(name, field="train"))


def test_folders_that_datasets_cannot_read(tmp_path):
    with pytest.raises(
        DataError, match="is no folder that datasets can read .* Name one that save_to_disk or hf download wrote.$"
    ):
        read(tmp_path)
    file(tmp_path / "x.csv", "a\n")
    with pytest.raises(DataError, match="that save_to_disk or hf download wrote, or one of its files: x.csv.$"):
        read(tmp_path)
    broken = tmp_path / "broken"
    Dataset.from_dict({"a": [1]}).save_to_disk(broken)
    for name in ("data-00000-of-00001.arrow", "state.json"):
        file(broken / name, "{}")
        with pytest.raises(DataError, match="train: .*broken is no folder that datasets can read"):
            read(broken)
    odd = tmp_path / "odd"
    DatasetDict(first=Dataset.from_dict({"a": [1]})).save_to_disk(odd)
    with pytest.raises(
        DataError,
        match=r"^train: \S*odd has no split train; it has first. Give one of these as split, or name its own folder: ",
    ):
        read(odd)
    with pytest.raises(
        DataError,
        match=r"^train: \S*odd has no split test or validation; it has first. Hold some of "
        r"train out with validation_size, give one of these as validation_split, or name its own folder: .*odd/first.$",
    ):
        read(odd, split="validation")
    assert read(odd / "first") == [(f"{odd}/first, row 1", {"a": 1})]


def test_hub_ids_that_give_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file(tmp_path / "prompts", "")
    with pytest.raises(DataError, match=r'train: "promts" is no file, and the hub did not give it \(.*\). Did you me'):
        read("promts")
    with pytest.raises(DataError, match=r"did not give it \(.+\). Name files in its place"):
        read("nobody/nothing-of-the-kind")
    with pytest.raises(DataError, match="in its place.* Set subset and name to null, if that is of another data set"):
        read("nobody/nothing-of-the-kind", subset="part", name="main")
    monkeypatch.setattr(sources, "load_dataset", lambda *_, **__: DatasetDict(dev=Dataset.from_dict({"a": [1]})))
    with pytest.raises(
        DataError,
        match="train: some/pairs has no split train; it has dev. Give one of these as split, or name another source",
    ):
        read("some/pairs")


@pytest.mark.parametrize(("cause", "offline", "said"), [
    (OSError(errno.ENOSPC, "No space left on device"), False, r"device\)\. Make room for the hub's cache \(.*HF_HOME"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), False, r"exceeded\)\. Make room for the hub's cache \(.*HF_HOME"),
    (RuntimeError("Disk quota exceeded (os error 122)"), False, r"Make room for the hub's cache \(.*HF_HOME"),
    (OSError(errno.EROFS, "Read-only file system", "/cache/x"), False, r"Let the hub's cache \(.* be written and read"),
    (ValueError("Dataset 'a/b' is a gated dataset"), False, "Ask for access at .*/datasets/me/pairs, then log in"),
    (ConnectionError("Couldn't reach"), True, "hf download --repo-type dataset me/pairs gets what the cache lacks"),
    (RepositoryNotFoundError.__new__(RepositoryNotFoundError), False, "in its place. If it is a private one, log in"),
    (FileNotFoundError("me/pairs cannot be accessed"), False, "in its place. If it is a private one, log in"),
])  # fmt: skip
def test_what_the_hub_does_not_give_has_its_own_way_on(cause, offline, said, monkeypatch):
    def fails(*_, **__):
        raise DatasetGenerationError("An error occurred while generating the dataset") from cause

    monkeypatch.setattr(sources, "load_dataset", fails)
    monkeypatch.setattr(sources.hub, "silent_host", lambda: "")
    for of in (constants, datasets_config):
        monkeypatch.setattr(of, "HF_HUB_OFFLINE", offline)
    with pytest.raises(DataError, match=said):
        read("me/pairs")


@pytest.mark.parametrize("name", [None, "mian"])
def test_a_configuration_that_is_missing_or_unknown(name, tmp_path, monkeypatch):
    """A folder with two of them, loaded by datasets itself: its words are what is read."""
    for part in ("main", "socratic"):
        file(tmp_path / part / "train.jsonl", '{"a": 1}\n')
    listed = "".join(f"- config_name: {part}\n  data_files: {part}/train.jsonl\n" for part in ("main", "socratic"))
    file(tmp_path / "README.md", f"---\nconfigs:\n{listed}---\n")
    load = sources.load_dataset
    monkeypatch.setattr(sources, "load_dataset", lambda _, *names, data_dir: load(str(tmp_path), *names))
    seen = "none is named" if name is None else '"mian" is none of them'
    message = f"train: some/sums has the configurations 'main', 'socratic', and {seen}. Give one as name."
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read("some/sums", name=name)
    assert read("some/sums", name="socratic") == [("some/sums (train), row 1", {"a": 1})]


def test_settings_of_a_hub_id_need_one(tmp_path):
    path = str(file(tmp_path / "x.jsonl", '{"a": 1}'))
    for sources_ in ([path], [path, path], [str(tmp_path)]):
        check_part_settings({"train": sources_, "subset": None, "name": None, "split": None, "validation_split": None})
        for settings in ({"subset": "a"}, {"name": "a", "subset": None}):
            with pytest.raises(
                DataError, match="would have no effect: only a hub id has that, and .* is none. Remove it"
            ):
                check_part_settings({"train": sources_, **settings})
    for sources_ in (["some/pairs"], ["some/pairs", path], [path, "some/pairs"]):
        check_part_settings({"train": sources_, "subset": "a", "name": "a", "split": "a", "validation_split": "a"})
        check_part_settings(
            {"train": path, "validation": sources_, "subset": "a", "name": "a", "validation_split": "a"}
        )
    assert is_hub_id("some/pairs") and is_hub_id("squad")
    assert not any(map(is_hub_id, ("", "some/pairs.jsonl", "/no/where", path, str(tmp_path))))


def test_permissions_are_a_data_error(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    paths = [file(tmp_path / f"x.{ending}", "{}") for ending in ("jsonl", "json", "csv", "txt", "parquet")]
    folder = tmp_path / "saved"
    Dataset.from_dict({"a": [1]}).save_to_disk(folder)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    monkeypatch.setattr("toolkit.data.sources.load_from_disk", refuse)
    with pytest.raises(DataError, match=r"saved: cannot be read \(Permission denied\). Check its permissions"):
        read(folder)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    for path in paths:
        with pytest.raises(
            DataError, match=rf"{path.name}: cannot be read \(Permission denied\). Check its permissions"
        ):
            read(path)


# ---------------------------------------------------------------------- the conversation of a row


def test_the_messages_of_a_row():
    asked = [{"role": "user", "content": "a"}]
    for row in ({"query": "a"}, {"prompt": "a", "query": "b"}, {"prompt": asked}, {"messages": asked, "prompt": "b"}):
        assert messages_of_row("x.jsonl, line 1", row) == asked
    # Tables give every message the keys of all; a template must not see those that a message does not have.
    assert messages_of_row("x.parquet, row 1", {"messages": [{**asked[0], "name": None}]}) == asked
    with pytest.raises(DataError, match="line 1: no column messages, prompt or query; present: input_ids. Rename"):
        messages_of_row("x.jsonl, line 1", {"input_ids": [1]})
    with pytest.raises(DataError, match='line 1, column "query": an empty prompt. Mend or remove the row'):
        messages_of_row("x.jsonl, line 1", {"query": " "})
    with pytest.raises(DataError, match='column "prompt": messages that are no list'):
        messages_of_row("x.jsonl, line 1", {"prompt": 5})
