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


def test_contenders_that_do_not_keep_freed_memory_by_themselves_are_started_so(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
for word; do case "$before" in --output)
echo "[\\"$MALLOC_MMAP_THRESHOLD_\\", \\"$MALLOC_TRIM_THRESHOLD_\\"]" > "$word";; esac
before="$word"; done
""")
    python.chmod(0o755)
    for name in driver.KEEP_FREED_MEMORY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes.sys, "executable", str(python))
    given = {"model": "none", "work": tmp_path / "none", "agilerl": python}
    for name in ("stock-full", "stock-peft", "agilerl"):
        assert driver.step_in_process("time", **given, contender=name) == [str(2**25), str(2**31 - 1)]
    for name in ("ours-separate", "stock-views"):
        assert driver.step_in_process("time", **given, contender=name) == ["", ""]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert driver.step_in_process("time", **given, contender="stock-full") == [str(2**25), "7"]


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
