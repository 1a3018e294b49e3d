"""One process at a time in a run folder."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from toolkit.errors import RecipeError, ToolkitError
from toolkit.runs.lock import LOCK_FILE, acquire, at_work, owner_of, release

HOLD = """
import sys
from pathlib import Path
from toolkit.runs.lock import at_work
with at_work(Path(sys.argv[1])) as ours:
    print(ours, flush=True)
    sys.stdin.readline()
"""


def holding(run):
    """Another process at work in the folder, once it is."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], **pipes)
    assert process.stdout.readline() == "True\n"
    return process


def test_a_second_process_is_told_which_one_is_at_work(tmp_path):
    other = holding(tmp_path)
    assert owner_of(tmp_path)["pid"] == other.pid
    with pytest.raises(RecipeError, match=rf"is in use: process {other.pid} is at work in it. Wait .*run=\"name\""):
        acquire(tmp_path)
    other.communicate("\n")
    with at_work(tmp_path) as ours:
        assert ours and owner_of(tmp_path)["pid"] == os.getpid()
    assert owner_of(tmp_path) is None


def test_a_clock_that_is_set_changes_no_owner(tmp_path, monkeypatch):
    """Linux tells when a process began in ticks since its own start, which a clock that is set makes another date."""
    other = holding(tmp_path)
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: began(self) + (sys.platform == "linux"))
    assert owner_of(tmp_path)["pid"] == other.pid
    with pytest.raises(RecipeError, match="is in use"):
        acquire(tmp_path)
    other.communicate("\n")


def test_a_lock_whose_process_was_killed_is_stale(tmp_path):
    other = holding(tmp_path)
    other.kill()
    while other.stdout.readline():
        pass
    time.sleep(0.05)
    assert (tmp_path / LOCK_FILE).exists() and owner_of(tmp_path) is None  # killed, and not yet waited for
    with at_work(tmp_path) as ours:
        assert ours
    other.communicate()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "host": "HERE", "started": 1}',
                                  '{"pid": 1, "host": "HERE", "started": 1}', "[" * 5000,
                                  f'{{"pid": {10**30}, "host": "HERE", "started": 1}}'])  # fmt: skip
def test_a_lock_that_is_damaged_or_of_a_process_with_a_number_that_was_given_again(text, tmp_path):
    lock = tmp_path / LOCK_FILE
    lock.write_text(text.replace("HERE", socket.gethostname()))
    os.utime(lock, (0, 0))
    with at_work(tmp_path) as ours:
        assert ours and json.loads(lock.read_text())["pid"] == os.getpid()


def test_of_another_machine_it_is_not_known_whether_the_process_has_ended(tmp_path):
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 1}))
    with pytest.raises(RecipeError, match=rf"process 1 on elsewhere is at work in it. .* delete {tmp_path}/.lock"):
        acquire(tmp_path)


def test_a_stage_in_a_process_of_its_own_belongs_to_the_command_that_runs_it(tmp_path):
    with at_work(tmp_path):
        script = HOLD.replace("sys.stdin.readline()", "")
        child = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert child.stdout == "False\n" and owner_of(tmp_path)["pid"] == os.getpid()


STARTS = """
import subprocess, sys
from pathlib import Path
from toolkit.runs.lock import at_work
with at_work(Path(sys.argv[1])):
    subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""


def test_a_stage_whose_command_was_killed_is_still_at_work(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path), HOLD], **pipes)
    assert command.stdout.readline() == "False\n"
    stage = owner_of(tmp_path)["pid"]
    assert stage != command.pid
    command.kill()
    command.wait()
    with pytest.raises(RecipeError, match=rf"is in use: process {stage} is at work in it"):
        acquire(tmp_path)
    command.communicate("\n")  # which the stage reads
    began = time.monotonic()
    while psutil.pid_exists(stage) and psutil.Process(stage).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    with at_work(tmp_path) as ours:
        assert ours


def test_a_machine_that_changes_its_name_keeps_no_one_out_of_his_own_run(tmp_path, monkeypatch):
    with at_work(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "laptop.office")
        assert acquire(tmp_path)
        release(tmp_path)
        renamed = "import socket; socket.gethostname = lambda: 'laptop.office'\n" + HOLD
        script = renamed.replace("sys.stdin.readline()", "")
        child = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert child.stdout == "False\n"
    assert not (tmp_path / LOCK_FILE).exists()


def test_it_is_given_back_as_often_as_it_was_taken(tmp_path):
    run = tmp_path / "run"
    assert acquire(run) and acquire(run)
    release(run)
    assert owner_of(run)["pid"] == os.getpid()
    release(run)
    assert not run.exists()  # nothing was written there


def test_no_lock_is_written_through_a_link(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "outside")
    with pytest.raises(ToolkitError, match="is a link to"):
        acquire(tmp_path / "run")
    assert list((tmp_path / "outside").iterdir()) == []


def _take(run, together, taken):
    together.wait()
    try:
        with at_work(run):
            taken.put("taken")
            time.sleep(1)
    except RecipeError:
        taken.put("refused")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts quickly where there is fork")
def test_of_many_at_once_one_takes_a_stale_lock(tmp_path):
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "started": 1}))
    context = multiprocessing.get_context("fork")
    together, taken = context.Barrier(8), context.Queue()
    processes = [context.Process(target=_take, args=(tmp_path, together, taken)) for _ in range(8)]
    for process in processes:
        process.start()
    outcomes = sorted(taken.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert outcomes == ["refused"] * 7 + ["taken"]
