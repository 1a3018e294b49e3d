import json
import re
import socket
import subprocess

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


def test_a_result_names_its_commit_where_there_is_one(monkeypatch, tmp_path):
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.invalid")
    monkeypatch.setattr(records, "DOCS", tmp_path)
    assert "commit" not in records.new_result("one")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert head.startswith(records.new_result("one")["commit"]) and records.new_result("one", commit=1)["commit"] == 1


def test_committed_results_name_no_folder():
    for path in records.RESULTS.glob("*.json"):
        assert not re.search(r'"(/|[A-Z]:\\|~)', path.read_text(encoding="utf-8")), path
