"""One process at a time in a run folder."""

import json
import multiprocessing
import os
import socket
import sys
import time
from contextlib import contextmanager
from multiprocessing.connection import wait

import psutil
import pytest

from toolkit.errors import RecipeError, ToolkitError
from toolkit.runs.lock import LOCK_FILE, _host, acquire, at_work, owner_of, release, works_for_us
from toolkit.runs.process import run_stage

# Children of this very process, as a stage is of its command, and not of a server. An interpreter of its own, which
# takes seconds, has the lock in tests/runs/test_resume.py.
CONTEXT = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")


def _holds(run, here, there):
    here.close()  # which would else hold the pipe open
    with at_work(run) as ours:
        there.send(ours)
        there.poll(None)


def _holds_by_another_name(run, here, there):
    socket.gethostname = lambda: "laptop.office"
    _host.cache_clear()  # what the parent knew
    _holds(run, here, there)


def _starts(run, here, there):
    """A command, with its stage at work in the same folder."""
    os.environ.update(works_for_us())
    with at_work(run):
        stage = CONTEXT.Process(target=_holds, args=(run, here, there))
        stage.start()
        here.close()
        there.close()
        stage.join()


def _is_refused(run, here, there):
    try:
        acquire(run)
    except RecipeError as error:
        there.send(str(error))


@contextmanager
def another(target, run):
    """Another process, and what it says of the folder: whether it is its own. It ends with the block."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(run, here, there))
    process.start()
    there.close()
    try:
        yield process, here.recv()
    finally:
        here.close()
        process.join()


@contextmanager
def holding(run):
    """Another process at work in the folder."""
    with another(_holds, run) as (process, ours):
        assert ours
        yield process


def test_a_second_process_is_told_which_one_is_at_work(tmp_path):
    with holding(tmp_path) as other:
        assert owner_of(tmp_path)["pid"] == other.pid
        with pytest.raises(RecipeError, match=rf"is in use: process {other.pid} is at work in it. Wait .*run=\"name\""):
            acquire(tmp_path)
    with at_work(tmp_path) as ours:
        assert ours and owner_of(tmp_path)["pid"] == os.getpid()
    assert owner_of(tmp_path) is None


def test_a_clock_that_is_set_changes_no_owner(tmp_path, monkeypatch):
    """Linux tells when a process began in ticks since its own start, which a clock that is set makes another date."""
    with holding(tmp_path) as other:
        began = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: began(self) + (sys.platform == "linux"))
        assert owner_of(tmp_path)["pid"] == other.pid
        with pytest.raises(RecipeError, match="is in use"):
            acquire(tmp_path)


def test_a_lock_whose_process_was_killed_is_stale(tmp_path):
    with holding(tmp_path) as other:
        other.kill()
        wait([other.sentinel])  # for its end, of which nobody asks the system
        time.sleep(0.05)
        assert (tmp_path / LOCK_FILE).exists() and owner_of(tmp_path) is None  # killed, and not yet waited for
        with at_work(tmp_path) as ours:
            assert ours


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "host": "HERE", "started": 1}',
                                  '{"pid": 1, "host": "HERE", "started": 1}', "[" * 5000,
                                  f'{{"pid": {10**30}, "host": "HERE", "started": 1}}'])  # fmt: skip
def test_a_lock_that_is_damaged_or_of_a_process_with_a_number_that_was_given_again(text, tmp_path):
    lock = tmp_path / LOCK_FILE
    lock.write_text(text.replace("HERE", socket.gethostname()))
    os.utime(lock, (0, 0))
    with at_work(tmp_path) as ours:
        assert ours and json.loads(lock.read_text())["pid"] == os.getpid()


def _takes(run, here, there):
    with at_work(run) as ours:
        there.send(ours)


@pytest.mark.parametrize("name", [LOCK_FILE, f"{LOCK_FILE}.taking"])
def test_a_file_of_the_future_is_of_a_clock_that_was_set_back_and_of_no_process(name, tmp_path):
    for path, text in ((tmp_path / LOCK_FILE, '{"pid": 1, "host": "HERE", "started": 1}'), (tmp_path / name, "")):
        path.write_text(text.replace("HERE", socket.gethostname()))
        os.utime(path, (time.time() + 3600,) * 2)
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_takes, args=(tmp_path, here, there))  # which may never end
    process.start()
    there.close()
    try:
        assert here.poll(30) and here.recv()
    finally:
        process.kill()
        process.join()


def test_of_another_machine_it_is_not_known_whether_the_process_has_ended(tmp_path):
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 1}))
    with pytest.raises(RecipeError, match=rf"process 1 on elsewhere is at work in it. .* delete {tmp_path}/.lock"):
        acquire(tmp_path)


def test_a_stage_in_a_process_of_its_own_belongs_to_the_command_that_runs_it(tmp_path, monkeypatch):
    with at_work(tmp_path):
        monkeypatch.setattr(os, "environ", {**os.environ, **works_for_us()})
        with another(_holds, tmp_path) as (stage, ours):
            assert not ours
        assert stage.exitcode == 0 and owner_of(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("of_another", [False, True])
def test_a_command_that_a_notebook_starts_while_it_has_a_trainer_is_no_stage_of_it(of_another, tmp_path, monkeypatch):
    """As `!toolkit ppo` in a cell; a stage that has asked for another run to be trained starts it as one, too."""
    if of_another:
        monkeypatch.setenv(*{name: f"1{value}" for name, value in works_for_us().items()}.popitem())
    with at_work(tmp_path), another(_is_refused, tmp_path) as (_, said):
        assert f"is in use: process {os.getpid()} is at work in it" in said


def test_folders_that_were_made_for_nothing_go(tmp_path):
    run = tmp_path / "own" / "runs" / "run"
    with at_work(run), at_work(run):
        assert run.is_dir()
    assert not any(tmp_path.iterdir())
    run.parent.mkdir(parents=True)
    with at_work(run):
        pass
    assert run.parent.is_dir() and not run.exists()  # which was there before
    run.parent.rmdir()
    with at_work(run):
        (run.parent / "other").mkdir()
    assert [path.name for path in run.parent.iterdir()] == ["other"]


def test_what_runs_an_earlier_stage_says_for_whom(tmp_path):
    """By the environment of a real one; whether it is let in, see above."""
    says = f"import os; open(r'{tmp_path}/said', 'w').write(os.environ['TOOLKIT_WORKS_FOR'])"
    run_stage([sys.executable, "-c", says], "sft", "ppo")
    pid, started = (tmp_path / "said").read_text().split()
    with at_work(tmp_path / "run"):
        written = json.loads((tmp_path / "run" / LOCK_FILE).read_text())
    assert (int(pid), float(started)) == (os.getpid(), written["started"])


def test_a_stage_whose_command_was_killed_is_still_at_work(tmp_path):
    with another(_starts, tmp_path) as (command, ours):
        stage = owner_of(tmp_path)["pid"]
        assert not ours and stage != command.pid
        command.kill()
        command.join()
        with pytest.raises(RecipeError, match=rf"is in use: process {stage} is at work in it"):
            acquire(tmp_path)
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
        monkeypatch.setattr(os, "environ", {**os.environ, **works_for_us()})
        with another(_holds_by_another_name, tmp_path) as (stage, ours):
            assert not ours
        assert stage.exitcode == 0
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


def _take(run, together, taken, all_tried):
    together.wait()
    try:
        with at_work(run):
            taken.put("taken")
            all_tried.wait(60)
    except RecipeError:
        taken.put("refused")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts quickly where there is fork")
def test_of_many_at_once_one_takes_a_stale_lock(tmp_path):
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "started": 1}))
    together, taken, all_tried = CONTEXT.Barrier(8), CONTEXT.Queue(), CONTEXT.Event()
    processes = [CONTEXT.Process(target=_take, args=(tmp_path, together, taken, all_tried)) for _ in range(8)]
    for process in processes:
        process.start()
    outcomes = sorted(taken.get(timeout=60) for _ in processes)
    all_tried.set()
    for process in processes:
        process.join()
    assert outcomes == ["refused"] * 7 + ["taken"]
