import json
import re
import socket

import torch

from benchmarks import records
from toolkit.models import load_base


def test_the_result_says_where_it_ran_and_not_on_whose_machine(result, checkpoint, tmp_path):
    found, _, _ = result
    path = records.write_result(found, tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_cpu\.json", path.name)
    text = path.read_text(encoding="utf-8")
    assert checkpoint not in text and socket.gethostname() not in text
    read = json.loads(text)
    assert read["machine"]["threads"] == torch.get_num_threads() and read["versions"]["torch"]
    assert read["model"]["parameters"] == sum(p.numel() for p in load_base(checkpoint).parameters())
    assert len(read["sizes"]["base"]["rounds"]) == 2


def test_sizes_can_be_run_one_by_one(result, tmp_path):
    found, _, _ = result
    records.write_result(found, tmp_path)
    large = {**found, "sizes": {"large": found["sizes"]["base"]}}
    read = json.loads(records.write_result(large, tmp_path).read_text(encoding="utf-8"))
    assert list(read["sizes"]) == ["base", "large"]
    other = {**large, "machine": {**found["machine"], "cores": 99}}
    read = json.loads(records.write_result(other, tmp_path).read_text(encoding="utf-8"))
    assert list(read["sizes"]) == ["large"]


def test_committed_results_name_no_folder():
    for path in records.RESULTS.glob("*.json"):
        assert not re.search(r'"(/|[A-Z]:\\|~)', path.read_text(encoding="utf-8")), path
