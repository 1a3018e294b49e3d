"""Splits that a source names itself, and folders of data sets of the hub, as datasets finds its way in them."""

import gzip
import json
import os
import re
import shutil
import socket
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from datasets import config as datasets_config
from huggingface_hub import constants

from tests.data.test_sources import file, read
from tests.tiny_runs import byte_tokenizer
from toolkit import recipes
from toolkit.data import Demonstrations, Preferences, Prompts, RatedResponses, sources
from toolkit.data.source_kinds import has_splits
from toolkit.errors import DataError, RecipeError

CARD = "---\nlicense: mit\n---\n# Prompts\n"
SPLITS = ("train_prefs", "test_prefs", "train_sft", "test_sft")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """datasets' own, and no network."""
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asks the network"))
    return tmp_path / "cache"


def data_of(*splits, of=""):
    """A prompt in each split, which says where it is from."""
    return DatasetDict({split: Dataset.from_dict({"prompt": [f"{of}{split}"]}) for split in splits})


def saved(folder, *splits):
    data_of(*splits).save_to_disk(folder)
    return str(folder)


def downloaded(folder):
    """What `hf download --local-dir` writes of HuggingFaceH4/ultrafeedback_binarized, on a small scale."""
    file(folder / "README.md", CARD)
    for split in SPLITS:
        (folder / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table({"prompt": [split]}), folder / "data" / f"{split}-00000-of-00001.parquet")
    mark = folder / ".cache" / "huggingface" / "download" / "data"
    mark.mkdir(parents=True)
    file(mark / "train_prefs-00000-of-00001.parquet.metadata", "5f1\n0a\n1.5\n")
    return str(folder)


@pytest.fixture(params=["hub", "saved", "downloaded"])
def source(request, tmp_path, monkeypatch):
    """Each kind of source that has splits, with splits of the same names."""
    if request.param == "hub":
        monkeypatch.setattr(sources, "load_dataset", lambda *_, **__: data_of(*SPLITS))
        monkeypatch.setattr(sources.hub, "silent_host", lambda: "")
        return "some/prompts"
    return {"saved": lambda to: saved(to, *SPLITS), "downloaded": downloaded}[request.param](tmp_path / "x")


def texts(source, **arguments):
    return [row["prompt"] for _, row in read(source, **arguments)]


def prompts_of(task):
    """The text of each prompt, by split."""
    texts = {split: task.prompts(split)["prompt"][:] for split in ("train", "test")}
    return {split: [text.removeprefix("<s>").removesuffix("</s><s>") for text in of] for split, of in texts.items()}


# ---------------------------------------------------------------------- splits of other names


def test_a_split_by_its_own_name(source):
    assert texts(source, own_split="train_sft") == ["train_sft"]
    assert texts(source, split="validation", own_split="test_prefs") == ["test_prefs"]
    assert has_splits(source)
    ((place, _),) = read(source, own_split="train_sft")
    assert "train_sft" in place and "train_prefs" not in place


def test_a_split_that_is_not_there(source):
    there = set(SPLITS)
    with pytest.raises(
        DataError, match="^train: .* has no split train; it has .* Give one of these as split, or"
    ) as it:
        read(source)
    assert all(name in str(it.value) for name in there)
    held_out = "no split test or validation; it has .*size, give one of these as validation_split, or name"
    with pytest.raises(DataError, match=held_out) as it:
        read(source, split="validation")
    assert all(name in str(it.value) for name in there)
    for split, setting in (("train", "split"), ("validation", "validation_split")):
        with pytest.raises(
            DataError, match=rf"has no split tarin; it has .*\. Give one of these as {setting}\.$"
        ) as it:
            read(source, split=split, own_split="tarin")
        assert all(name in str(it.value) for name in there)


def test_usual_names_give_way_to_one_that_is_given(tmp_path):
    usual = saved(tmp_path / "x", "train", "test", "validation")
    assert texts(usual) == ["train"] and texts(usual, split="validation") == ["test"]
    assert texts(usual, split="validation", own_split="validation") == ["validation"]
    assert texts(usual, own_split="test") == ["test"]


def test_each_part_has_its_split(monkeypatch):
    monkeypatch.setattr(sources.hub, "silent_host", lambda: "")
    monkeypatch.setattr(sources, "load_dataset", lambda *_, data_dir: data_of("a", *["b"] * (data_dir == "one")))
    assert [place for place, _ in read("some/pairs", subset=["one", "two"], own_split="a")] == [
        "some/pairs/one (a), row 1", "some/pairs/two (a), row 1",
    ]  # fmt: skip
    with pytest.raises(DataError, match="^train: some/pairs/two has no split b; it has a. Give one of these as split"):
        read("some/pairs", subset=["one", "two"], own_split="b")


def test_the_splits_of_a_task(source, tmp_path):
    both = Prompts(byte_tokenizer(), source, split="train_prefs", validation_split="test_prefs")
    assert prompts_of(both) == {"train": ["train_prefs"], "test": ["test_prefs"]}  # and no 100 rows held out
    own = str(file(tmp_path / "own.txt", "mine\n"))
    assert prompts_of(Prompts(byte_tokenizer(), own, source, validation_split="test_sft")) == {
        "train": ["mine"], "test": ["test_sft"],
    }  # fmt: skip
    assert prompts_of(Prompts(byte_tokenizer(), source, own, split="test_sft")) == {
        "train": ["test_sft"], "test": ["mine"],
    }  # fmt: skip
    beside = Prompts(byte_tokenizer(), [own, source], source, split="train_sft", validation_split="test_sft")
    assert prompts_of(beside) == {"train": ["mine", "train_sft"], "test": ["test_sft"]}
    with pytest.raises(DataError, match="^train: .* has no split test or val.* give one of these as validation_split"):
        Demonstrations(byte_tokenizer(), source, split="train_sft").demonstrations("train")


def test_rows_are_held_out_of_the_split_that_is_named(tmp_path):
    many = {f"all_{n}": Dataset.from_dict({"prompt": [f"{n}{letter}" for letter in "abcdef"]}) for n in (1, 2)}
    DatasetDict(many).save_to_disk(tmp_path / "x")
    task = Prompts(byte_tokenizer(), str(tmp_path / "x"), split="all_2", validation_size=2)
    of = prompts_of(task)
    assert len(of["test"]) == 2 and sorted(of["train"] + of["test"]) == [f"2{letter}" for letter in "abcdef"]


def test_rated_responses_have_a_split_for_training_alone(tmp_path):
    row = {"prompt": ["a"], "response": ["b"], "rewards": [1.0]}
    DatasetDict(mine=Dataset.from_dict(row)).save_to_disk(tmp_path / "x")
    assert len(RatedResponses(byte_tokenizer(), str(tmp_path / "x"), split="mine").rated("train")) == 1
    with pytest.raises(TypeError, match="validation_split"):
        RatedResponses(byte_tokenizer(), str(tmp_path / "x"), validation_split="mine")


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "txt"])
def test_a_file_has_no_splits(ending, tmp_path):
    path, folder = str(file(tmp_path / f"x.{ending}", "")), saved(tmp_path / "saved", "a")
    told = rf"would have no effect: only a hub id or a DatasetDict has splits, and \S*{ending} is none. Remove it.$"
    for arguments in ({"train": path}, {"train": path, "validation": folder}, {"train": [path, f"{folder}/a"]}):
        with pytest.raises(DataError, match=r"^split: split would have no effect: only .* is none. Remove it.$"):
            Prompts(byte_tokenizer(), **arguments, split="a")
    for arguments in ({"train": path}, {"train": folder, "validation": path}):
        with pytest.raises(DataError, match=f"^validation_split: validation_split {told}"):
            Prompts(byte_tokenizer(), **arguments, validation_split="a")
    with pytest.raises(DataError, match=f"^split: split and validation_split {told}"):
        Prompts(byte_tokenizer(), path, split="a", validation_split="a")
    with pytest.raises(DataError, match="^subset: subset would have no effect: only a hub id has that"):
        Prompts(byte_tokenizer(), folder, subset="a", split="a")


def test_rows_are_not_held_out_twice(tmp_path):
    folder = saved(tmp_path / "x", "a", "b")
    for task in (Preferences, Demonstrations):
        with pytest.raises(DataError, match="^validation_size: it has no effect with validation_split. Remove one"):
            task(byte_tokenizer(), folder, split="a", validation_split="b", validation_size=3)
    mixed = Demonstrations(byte_tokenizer(), [folder, "x.jsonl"], split="a", validation_split="b")
    with pytest.raises(DataError, match="^validation: it is missing."):  # for the file has no split b
        mixed.demonstrations("validation")


# ---------------------------------------------------------------------- a recipe whose sources are replaced

OF_THE_HUB = {"task": "prompts", "train": "some/prompts", "split": "train_prefs", "validation_split": "test_prefs"}


def loaded(data, *overrides):
    """The data of a recipe with overrides, without what is no key of splits."""
    base = {"model": "some/model"}
    policy = {"r": 4, "target_modules": "all-linear"}
    values = {"base": base, "data": data, "adapters": {"policy": policy}, "scorer": {"kind": "adapter"}}
    given = recipes.load(values, *overrides, run="x").values["data"]
    return {key: value for key, value in given.items() if key not in ("task", "train", "validation")}


def test_another_source_takes_the_names_of_splits_away():
    both = {"split": "train_prefs", "validation_split": "test_prefs"}
    assert loaded(OF_THE_HUB) == both
    assert loaded(OF_THE_HUB, "data.train=x.jsonl") == {}
    assert loaded(OF_THE_HUB, "data.train=other/prompts") == {}
    assert loaded(OF_THE_HUB, "data.train=some/prompts") == both
    assert loaded(OF_THE_HUB, "data.train=[x.jsonl,some/prompts]") == both
    assert loaded(OF_THE_HUB, "data.validation=unseen.txt") == {"split": "train_prefs"}
    assert loaded(OF_THE_HUB, "data.validation=some/prompts") == both
    assert loaded(OF_THE_HUB, "data.train=other/prompts", "data.split=a") == {"split": "a"}
    twice = {**OF_THE_HUB, "validation": "some/prompts"}
    assert loaded(twice, "data.train=x.jsonl") == {"validation_split": "test_prefs"}
    assert loaded(twice, "data.validation=y.jsonl") == {"split": "train_prefs"}
    # One that has no splits is refused with the data, and not mended by what is said of another.
    mistaken = {"task": "prompts", "train": "x.jsonl", "split": "a"}
    assert loaded(mistaken, "data.validation=y.jsonl") == {"split": "a"}


def test_so_does_a_folder_unless_it_has_been_there(tmp_path):
    folder, other = saved(tmp_path / "x", "a"), saved(tmp_path / "y", "a")
    data = {"task": "prompts", "train": folder, "split": "a"}
    assert loaded(data, f"data.train=[{folder},x.jsonl]") == {"split": "a"}
    assert loaded(data, f"data.train={other}") == {}


def test_held_out_rows_are_those_of_the_key_that_is_given():
    assert loaded(OF_THE_HUB, "data.validation_size=9") == {"split": "train_prefs", "validation_size": 9}
    drawn = {"task": "prompts", "train": "some/prompts", "validation_size": 9}
    assert loaded(drawn, "data.validation_split=b") == {"validation_split": "b"}
    assert loaded(OF_THE_HUB, "data.split=b") == {"split": "b", "validation_split": "test_prefs"}
    with pytest.raises(RecipeError, match=r"data.split — text or null is needed, got \['a'\]"):
        loaded(OF_THE_HUB, "data.split=[a]")
    with pytest.raises(RecipeError, match="data.validation_split — .* has no such field"):
        loaded({"task": "rated", "train": "some/prompts"}, "data.validation_split=b")


# ---------------------------------------------------------------------- folders of hf download


def contents(folder):
    return {(str(one), one.stat().st_mtime_ns, one.is_file() and one.read_bytes()) for one in folder.rglob("*")}


def test_nothing_is_written_to_a_folder_and_none_of_its_code_is_run(tmp_path, cache, monkeypatch):
    folder, ran = tmp_path / "prompts", tmp_path / "ran"
    downloaded(folder)
    code = f"open({str(ran)!r}, 'w').close()\n"
    for name in ("data.py", "README.py", "data/train.py", "setup.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        file(folder / name, code)
    monkeypatch.chdir(folder)  # from which Python would import
    before = contents(folder)
    assert read(folder, own_split="train_sft") == [(f"{folder} (train_sft), row 1", {"prompt": "train_sft"})]
    assert contents(folder) == before and not ran.exists()
    assert [*cache.rglob("*.arrow")]
    file(folder / "prompts.py", code)  # the name of a script, which older versions would have run
    with pytest.raises(
        DataError, match=r"/prompts is no folder that datasets can read \(Dataset scripts are no longer"
    ):
        read(folder, own_split="train_sft")
    assert not ran.exists()
    (folder / "prompts.py").unlink()
    file(folder / "README.md", f"---\nconfigs: !!python/object/apply:os.system ['touch {ran}']\n---\n")
    with pytest.raises(DataError, match="is no folder that datasets can read"):
        read(folder, own_split="train_sft")
    assert not ran.exists()


def in_folders(folder):
    """The folders of Anthropic/hh-rlhf, on a small scale."""
    file(folder / "README.md", CARD)
    for part in ("helpful-base", "harmless-base"):
        for split in ("train", "test"):
            row = json.dumps({"prompt": f"{part} {split}"}).encode()
            file(folder / part / f"{split}.jsonl.gz", gzip.compress(row, mtime=0))
    return folder


def test_subsets_are_folders(tmp_path):
    folder = in_folders(tmp_path / "x")
    place = f"{folder}/helpful-base (train), row 1"
    assert read(folder, subset="helpful-base") == [(place, {"prompt": "helpful-base train"})]
    task = Prompts(byte_tokenizer(), str(folder), str(folder), subset=["helpful-base", "harmless-base"])
    assert prompts_of(task) == {
        "train": ["helpful-base train", "harmless-base train"], "test": ["helpful-base test", "harmless-base test"],
    }  # fmt: skip
    assert sorted(texts(folder)) == ["harmless-base train", "helpful-base train"]
    with pytest.raises(DataError, match=r"can read \(The directory at .*nope doesn't.*Set subset to null, if that is"):
        read(folder, subset="nope")


@pytest.fixture
def in_hub_cache(tmp_path, monkeypatch):
    """The folder of a commit in the hub's cache, and the file that lists all of its files; without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", True)
    stored, commit = tmp_path / "hub" / "datasets--me--pairs", "0a" * 20
    for name in ("refs", "snapshots", "trees", "blobs"):
        (stored / name).mkdir(parents=True)
    file(stored / "refs" / "main", commit)
    folder = in_folders(stored / "snapshots" / commit)
    for number, one in enumerate([one for one in folder.rglob("*") if one.is_file()]):
        shutil.move(one, stored / "blobs" / str(number))
        one.symlink_to(stored / "blobs" / str(number))
    return folder, stored / "trees" / f"{commit}.json"


def test_offline_a_hub_id_is_read_from_the_files_in_the_cache(in_hub_cache, cache, monkeypatch):
    folder, tree = in_hub_cache
    rows = [("me/pairs/helpful-base (train), row 1", {"prompt": "helpful-base train"})]
    # As datasets leaves it: what it has read to the end is there whole, and nothing is known of the others.
    with pytest.raises(DataError, match="with a network, hf download --repo-type dataset me/pairs gets what the cache"):
        read("me/pairs", subset="helpful-base")
    size = sum(len(one.read_bytes()) for one in (folder / "helpful-base").iterdir())
    made = cache / "me___pairs" / "default-0123456789abcdef" / "0.0.0" / folder.name
    made.mkdir(parents=True)
    file(made / "dataset_info.json", json.dumps({"config_name": "default", "download_size": size}))
    assert read("me/pairs", subset="helpful-base") == rows
    shutil.rmtree(cache / "me___pairs")
    file(made.parents[3] / "kept", "")
    with pytest.raises(DataError, match="gets what the cache lacks"):
        read("me/pairs")
    # As hf download leaves it, with a list of all files.
    names = [str(one.relative_to(folder)) for one in folder.rglob("*.*")]
    file(tree, json.dumps({"format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in names}}))
    assert read("me/pairs", subset="helpful-base") == rows
    assert [row["prompt"] for _, row in read("me/pairs")] == ["harmless-base train", "helpful-base train"]
    with pytest.raises(DataError, match="nope doesn't.*Set subset to null, if that is of another data set"):
        read("me/pairs", subset="nope")
    # It is there, and damaged: a hub that does not answer is not the reason.
    monkeypatch.setattr(sources.hub, "silent_host", lambda: "huggingface.co")
    part = folder / "harmless-base" / "train.jsonl.gz"
    whole = part.read_bytes()
    part.write_bytes(gzip.compress(b"{", mtime=0))
    there = (
        r'^train: "me/pairs" is in the cache of the hub, and cannot be read from there \(.*\)\. If a file is damaged'
    )
    with pytest.raises(DataError, match=f"{there}, hf download --repo-type dataset me/pairs --force-download"):
        read("me/pairs", subset="harmless-base")
    part.write_bytes(whole)
    # datasets has a variable of its own.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert read("me/pairs", subset="helpful-base") == rows
    (folder / "harmless-base" / "test.jsonl.gz").unlink()
    assert read("me/pairs", subset="helpful-base") == rows
    with pytest.raises(DataError, match="gets what the cache lacks"):
        read("me/pairs")


def test_a_card_names_no_files_elsewhere(tmp_path):
    private, folder = file(tmp_path / "private.jsonl", '{"prompt": "secret"}'), tmp_path / "x"
    file(folder / "a.jsonl", '{"prompt": "a"}')
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    for named in (str(private), "../private.jsonl", "a.jsonl"):
        file(folder / "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")
        if named == "a.jsonl":
            assert texts(folder) == ["a"]
            continue
        with pytest.raises(DataError, match="^train: .*/x: its configs name .*/private.jsonl, which is none of"):
            read(folder)
    with zipfile.ZipFile(tmp_path / "private.zip", "w") as archive:
        archive.write(private, "a.jsonl")
    for named in (f"zip://a.jsonl::{tmp_path}/private.zip", f"local://{private}"):
        file(folder / "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")
        with pytest.raises(DataError, match=f": its configs name {re.escape(named)}, which is none of its own files"):
            read(folder)


def test_a_card_names_files_of_a_folder_that_a_path_leads_to_by_a_link(tmp_path, monkeypatch):
    """As /home of many clusters is one, and /tmp of macOS."""
    folder = tmp_path / "disk" / "x"
    folder.mkdir(parents=True)
    file(folder / "a.jsonl", '{"prompt": "a"}')
    file(folder / "b" / "train.jsonl", '{"prompt": "b"}')
    file(folder / "README.md", "---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    for way in (tmp_path / "home" / "x", "home/x", f"{tmp_path}/home/../home/x/"):
        assert texts(way) == ["a"] and texts(way, subset="b") == ["b"]
    file(tmp_path / "disk" / "x.jsonl", '{"prompt": "secret"}')
    file(folder / "README.md", "---\nconfigs:\n- config_name: default\n  data_files: ../x.jsonl\n---\n")
    with pytest.raises(DataError, match="/x.jsonl, which is none of its own files"):
        read(tmp_path / "home" / "x")


def test_configurations_are_those_of_the_card(tmp_path):
    listed = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: {name}_train\n    path: {name}/a.jsonl\n" for name in "xy"
    )
    file(tmp_path / "card" / "README.md", f"---\nconfigs:\n{listed}---\n")
    for name in "xy":
        file(tmp_path / "card" / name / "a.jsonl", json.dumps({"prompt": name}))
    task = Prompts(byte_tokenizer(), str(tmp_path / "card"), name="y", split="y_train", validation_split="y_train")
    assert prompts_of(task) == {"train": ["y"], "test": ["y"]}
    with pytest.raises(DataError, match="/card has the configurations 'x', 'y', and none is named. Give one as name"):
        read(tmp_path / "card")


def test_which_folders_are_read_so(tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    file(bare / "train.jsonl", '{"prompt": "a"}\n')
    moved = tmp_path / "json"  # which is one of datasets' own readers
    moved.mkdir()
    shutil.move(bare, moved / "data")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").mkdir()
    file(tmp_path / "beside" / "train.jsonl", '{"prompt": "b"}\n')
    assert read("json") == [("json (train), row 1", {"prompt": "a"})]
    file(moved / "dataset_infos.json", "{}")
    assert texts(moved) == ["a"]
    # A file that could be named is not passed over, unless it came with the others.
    file(moved / "more.csv", "prompt\nb\n")
    with pytest.raises(DataError, match="json is no folder that .* or one of its files: more.csv.$"):
        read(moved)
    assert not has_splits(str(moved))
    with pytest.raises(DataError, match="^split: split would have no effect"):
        Prompts(byte_tokenizer(), str(moved), split="train")
    (moved / "more.csv").unlink()
    file(moved / "test.jsonl", '{"prompt": "c"}\n')
    (moved / ".cache" / "huggingface").mkdir(parents=True)
    assert texts(moved, split="validation") == ["c"]


def test_files_that_datasets_passes_over_are_told_of(tmp_path, caplog):
    for name in ("mine/train/a.jsonl", "mine/train/b.jsonl", "two/data/train.jsonl", "two/data/extra.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file(tmp_path / name, '{"prompt": "a"}\n')
    file(tmp_path / "mine" / "train" / "c.csv", "prompt\nb\n")
    file(tmp_path / "two" / "data" / ".hidden.jsonl", "{}")
    for folder, unread, rows in (("mine", "train/c.csv", 2), ("two", "data/extra.jsonl", 1)):
        caplog.clear()
        assert len(read(tmp_path / folder)) == rows
        assert f"{tmp_path / folder}: {unread} is not read: datasets passes over" in caplog.text
    caplog.clear()
    (tmp_path / "two" / ".cache" / "huggingface").mkdir(parents=True)  # as its author means it
    assert len(read(tmp_path / "two")) == 1 and "not read" not in caplog.text
    assert len(read(in_folders(tmp_path / "x"), subset="helpful-base")) == 1 and "not read" not in caplog.text
    # datasets finds its way by the folder that a link is to, and passes over what is of a model.
    file(tmp_path / "mine" / "train" / "config.json", "{}")
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "itself").symlink_to("itself")
    assert len(read(tmp_path / "linked")) == 2
    assert f"{tmp_path / 'linked'}: train/c.csv is not read: datasets passes over" in caplog.text
    caplog.clear()
    card = "---\nconfigs:\n- config_name: default\n  data_files: train/a.jsonl\n---\n"
    file(tmp_path / "mine" / "README.md", card)
    for folder in ("mine", "linked"):
        assert len(read(tmp_path / folder)) == 1 and "not read" not in caplog.text


def test_a_damaged_folder_of_save_to_disk_is_still_one(tmp_path):
    folder = tmp_path / "x"
    saved(folder, "train")
    file(folder / "train" / "state.json", "{}")
    with pytest.raises(DataError, match="is no folder that datasets can read"):
        read(folder)
    with pytest.raises(DataError, match="is no folder that datasets can read"):
        read(folder / "train")


@pytest.mark.parametrize(("files", "message"), [
    ({"data/train.jsonl": '{"a": 1}\n{'}, r"JSON parse error.*\). Name .* one of its files: data/train.jsonl.$"),
    ({"data/train-00000-of-00001.parquet": "no"}, r"Parquet file size is 2 bytes.* one of its files: data/train-0"),
    ({"data/train.jsonl": "{}", "data/test.csv": "a\n1\n"}, "Couldn't infer the same .*: data/test.csv, data/train"),
    ({"README.md": "---\na: [\n---\n", "data/train.jsonl": "{}"}, r"while parsing a flow node\)"),
    ({"README.md": CARD, "code.py": "x = 1"}, r"No \(supported\) data files found.*hf download wrote.$"),
    ({"README.md": CARD, "x.py": "x = 1"}, "Dataset scripts are no longer supported, but found x.py"),
])  # fmt: skip
def test_folders_that_are_damaged(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        file(tmp_path / "x" / name, text)
    with pytest.raises(DataError, match=f"^train: .*/x is no folder that datasets can read .{message}") as error:
        read(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    file(tmp_path / "x" / "README.md", CARD)
    (tmp_path / "x" / "data").mkdir()
    os.mkfifo(tmp_path / "x" / "data" / "train.jsonl")
    with pytest.raises(DataError, match="is no folder that datasets can read"):
        read(tmp_path / "x")


def test_a_cache_without_room_or_rights(tmp_path, monkeypatch):
    folder = downloaded(tmp_path / "x")
    told = {
        OSError(28, "No space left on device"): "x cannot be read .* Make room for the hub's cache",
        PermissionError(13, "Permission denied", "/cache/y"): "x cannot be read .* Let the hub's cache .* be written",
        PermissionError(13, "Permission denied", f"{folder}/data/y"): r"denied: \S*data/y\). Check its permissions.$",
    }
    for error, message in told.items():

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr(sources, "load_dataset", fails)
        with pytest.raises(DataError, match=message):
            read(folder)
