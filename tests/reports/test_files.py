import errno
import math
import os
from pathlib import Path

import pytest
import trl
from transformers import TrainerControl, TrainerState

from tests.reports.examples import RESULT
from toolkit.errors import ToolkitError
from toolkit.reports import (
    MetricsFile,
    append_jsonl,
    keep_until,
    memory_in_words,
    peak_memory_gb,
    read_jsonl,
    read_result,
    versions,
    write_json,
    write_jsonl,
    write_result,
)


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [{"step": 1, "text": "a line\nand\u2028another, ü"}, {"step": 2, "text": ""}]
    path = tmp_path / "new" / "rows.jsonl"
    append_jsonl(path, rows[:1])
    append_jsonl(path, rows[1:])
    assert read_jsonl(path) == rows
    write_jsonl(path, rows[1:])
    assert read_jsonl(path) == rows[1:]


def test_later_steps_and_half_a_line_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"step": step, "text": "\u2028"} for step in (1, 2, 2, 3)]
    write_jsonl(path, rows)
    with path.open("a") as file:
        file.write('{"step": 1, "te')
    assert read_jsonl(path) == rows
    keep_until(path, 2)
    assert read_jsonl(path) == rows[:3] and path.read_text().endswith("}\n")
    path.write_bytes('{"step": 1}\n{"step": 2, "text": "一'.encode()[:-1])  # cut within a character
    assert read_jsonl(path) == [{"step": 1}]
    keep_until(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n'
    path.write_bytes(b'{"step": 1}\r\n{"step": 2}\r\n{"step": 1}\r\n')  # of Windows
    keep_until(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 1}\n'
    with pytest.MonkeyPatch.context() as patch:  # nothing is to be dropped, and nothing written
        patch.setattr("toolkit.reports.files.write_lines", lambda *_: pytest.fail("written"))
        keep_until(path, 1)
    keep_until(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


def test_result_is_written_aside(tmp_path):
    assert read_result(tmp_path) is None
    write_result(tmp_path, RESULT)
    assert read_result(tmp_path) == RESULT
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_disk_that_is_full_is_one_sentence(tmp_path):
    with pytest.raises(ToolkitError, match=r"^/dev/full: cannot be written \(No space left on device\). Make room"):
        append_jsonl(Path("/dev/full"), [{"step": 1}])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = tmp_path / "kept.jsonl"
    write_jsonl(kept, [{"step": 1}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ToolkitError, match="kept.jsonl: cannot be written"):
            write_jsonl(kept, [{"step": 2}])
    assert kept.read_text() == '{"step": 1}\n'  # the old one, whole
    (tmp_path / "file").write_text("")
    for write in (append_jsonl, write_jsonl, write_json):
        with pytest.raises(ToolkitError, match=r"file/rows: cannot be written \((Not a directory|File exists)\)"):
            write(tmp_path / "file" / "rows", {} if write is write_json else [])


def test_metrics_that_are_no_numbers_are_null(tmp_path):
    """JSON has no name for them, and other tools read no line with one."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    logs = {"loss": float("nan"), "grad_norm": float("inf"), "score": 0.5}
    metrics.on_log(None, TrainerState(), TrainerControl(), logs=logs)
    assert metrics.path.read_text() == '{"step": 0, "loss": null, "grad_norm": null, "score": 0.5}\n'
    assert math.isnan(logs["loss"])  # the trainer's own stay


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    with pytest.raises(ToolkitError, match=r"rows.jsonl, line 2: cannot be read"):
        read_jsonl(path)


def test_memory_and_versions():
    assert 0.05 < peak_memory_gb()["resident"] < 24
    assert memory_in_words({"resident": 1.0, "gpu": 2.346}) == "resident 1.00 GB, gpu 2.35 GB"
    assert versions()["trl"] == trl.__version__ and "python" in versions()


def test_metrics_file_goes_on_behind_a_checkpoint(tmp_path):
    path, state = tmp_path / "sub" / "metrics.jsonl", TrainerState()

    def log(callback, *steps):
        for state.global_step in steps:
            callback.on_log(None, state, TrainerControl(), logs={"score": state.global_step / 2})

    first = MetricsFile(path)
    log(first, 1)
    saved = first.state()["attributes"]
    log(first, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "sc')  # where a kill cut it
    rows = [{"step": 1, "score": 0.5}, {"step": 2, "score": 1.0}]
    assert read_jsonl(path) == rows
    again = MetricsFile(path)
    again.lines = saved["lines"]
    again.on_train_begin(None, state, TrainerControl())
    assert read_jsonl(path) == rows[:1]
    log(again, 2)
    assert read_jsonl(path) == rows and again.state()["attributes"] == {"lines": 2}
    again.lines = 1  # as a loop of one's own reads a checkpoint
    log(again, 5)
    assert read_jsonl(path) == [*rows, {"step": 5, "score": 2.5}]
    assert again.state()["attributes"] == {"lines": 2}
    again.drop_earlier()
    assert read_jsonl(path) == [rows[0], {"step": 5, "score": 2.5}] and again.state()["attributes"] == {"lines": 2}
    again.lines = 7  # of another folder's
    log(again, 6)
    assert again.state()["attributes"] == {"lines": 3}
