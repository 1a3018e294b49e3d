import pytest

from benchmarks import processes
from benchmarks import run as driver
from benchmarks.errors import BenchmarkError, KilledError
from benchmarks.work import PHASES


def test_a_step_runs_in_a_process_of_its_own(checkpoint, work, tmp_path):
    work.write(tmp_path / "work.json")
    given = {"model": checkpoint, "work": tmp_path / "work.json"}
    found = driver.step_in_process("time", **given, contender="ours-separate", dtype="float32", updates=1)
    assert set(found["updates"][0]) == set(PHASES)


def test_a_step_that_fails_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "false")
    with pytest.raises(BenchmarkError, match='the step "time" of stock-peft failed: nothing was said'):
        driver.step_in_process("time", model="none", work=tmp_path / "none", contender="stock-peft")


def test_a_step_that_the_system_kills_is_told_from_one_that_fails(tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n", encoding="utf-8")
    killed.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(killed))
    with pytest.raises(KilledError, match='the step "time" of stock-full was killed, as where memory runs out'):
        driver.step_in_process("time", model="none", work=tmp_path / "none", contender="stock-full")
