import json
import os
import re
import shutil
import socket
import subprocess

import pytest
import torch

from benchmarks import records
from toolkit.models import load_base


def test_the_result_says_where_it_ran_and_not_on_whose_machine(result, checkpoint, tmp_path):
    found, _, _ = result
    path = records.write_result(found, tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_cpu_bfloat16\.json", path.name)
    text = path.read_text(encoding="utf-8")
    assert checkpoint not in text and socket.gethostname() not in text
    read = json.loads(text)
    assert read["machine"]["threads"] == torch.get_num_threads() and read["versions"]["torch"]
    assert read["model"]["parameters"] == sum(p.numel() for p in load_base(checkpoint).parameters())
    assert len(read["sizes"]["base"]["rounds"]) == 2


def test_a_day_s_result_keeps_the_arms_and_seeds_that_were_run_before(tmp_path):
    about = {"kind": "some", "date": "2026-01-01"}
    records.add_result({**about, "arms": {"one": {"0": 1, "1": 2}, "two": {"0": 3}}}, tmp_path)
    path = records.add_result({**about, "arms": {"one": {"1": 4, "2": 5}}}, tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["arms"] == {"one": {"0": 1, "1": 4, "2": 5}, "two": {"0": 3}}
    elsewhere = {**about, "commit": "another", "arms": {"one": {"5": 6}}}  # by other code or settings
    assert json.loads(records.add_result(elsewhere, tmp_path).read_text(encoding="utf-8"))["arms"] == elsewhere["arms"]
    other = records.add_result({**about, "date": "2026-01-02", "arms": {"one": {}}}, tmp_path)
    assert json.loads(other.read_text(encoding="utf-8"))["arms"] == {"one": {}}
    records.add_result({**about, "kind": "alone", "seeds": {"0": 1, "1": 2}}, tmp_path)
    path = records.add_result({**about, "kind": "alone", "seeds": {"1": 3}}, tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["seeds"] == {"0": 1, "1": 3}


def test_the_newest_of_a_kind_is_of_no_other_kind_and_names_the_days_of_its_stages(tmp_path):
    about = {"machine": {"processor": "A chip", "cores": 2, "threads": 2, "memory_gb": 8}, "versions": {"torch": "2"}}
    for date, kind in (("2026-01-01", "reward"), ("2026-01-02", "own_reward")):
        records.write_result({**about, "kind": kind, "date": date}, tmp_path)
    found = records.newest("reward", tmp_path)
    assert found["kind"] == "reward" and records.where(found).startswith("2026-01-01, A chip")
    stages = {"0": {"date": "2025-12-30T09:00"}, "1": {"date": "2025-12-31T23:00"}, "2": {"date": "2025-12-30T12:00"}}
    assert records.where({**found, "seeds": stages}).startswith("2025-12-30 and 2025-12-31, A chip")
    assert records.chip_and_day({**found, "arms": {"one": stages}}) == "A chip, 2025-12-30 and 2025-12-31."


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_result_names_its_commit_where_there_is_one(monkeypatch, tmp_path):
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    for name, value in {**own, "GIT_AUTHOR_NAME": "a", "GIT_COMMITTER_NAME": "a", "EMAIL": "a@b.invalid"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "root"
    (root / "toolkit").mkdir(parents=True)
    monkeypatch.setattr(records, "ROOT", root)
    assert "commit" not in records.new_result("one")

    def git(*arguments):
        return subprocess.run(("git", *arguments), cwd=root, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    (root / "notes.md").write_text("no code")
    head = git("rev-parse", "HEAD")
    assert head.startswith(records.new_result("one")["commit"]) and records.new_result("one", commit=1)["commit"] == 1
    sources = records.new_result("one")["sources"]
    (root / "toolkit" / "new.py").write_text("a = 1")
    found = records.new_result("one")
    assert found["commit"].endswith("-dirty") and found["sources"] != sources


def test_committed_results_name_no_folder():
    for path in records.RESULTS.glob("*.json"):
        assert not re.search(r'"(/|[A-Z]:\\|~)', path.read_text(encoding="utf-8")), path
