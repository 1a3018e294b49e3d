import json

import pytest
import torch

from benchmarks import gpu, table
from benchmarks.errors import BenchmarkError
from benchmarks.work import PHASES


def test_bench_gpu_runs_small_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--small", "--output", str(tmp_path)])
    assert gpu.main() == 0
    (path,) = tmp_path.glob("*_small.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    forms = [(False, "eager"), (True, "eager"), (False, "merged")]
    assert [(row["value"], row["gradient_checkpointing"], row["generation"]) for row in found["rows"]] == [
        (value, *form) for value in ("separate", "shared") for form in forms
    ]
    for row in found["rows"]:
        assert set(row["seconds"]) == set(row["peak_gb"]) == set(PHASES)
        assert row["over_floor"] > 0
    assert "random weights" in capsys.readouterr().out
    text = table.section("gpu", found)
    assert "| separate | off | merged |" in text and "random weights" in text


def test_a_row_that_ran_out_of_memory_says_where():
    row = {"value": "separate", "gradient_checkpointing": False, "generation": "eager", "out_of_memory": "update"}
    _, rows = table.gpu_rows({"rows": [row]})
    assert rows[0][:4] == ["separate", "off", "eager", "out of memory in update"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_gpu_without_a_gpu_says_so():
    with pytest.raises(BenchmarkError, match="bench-gpu needs a CUDA device"):
        gpu.settings(small=False, updates=1, rollouts=8)
