"""Commands in processes of their own: how each kind of end is told."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import toolkit
from toolkit.checkpoints import STOPS
from toolkit.errors import RunInterrupted, ToolkitError
from toolkit.runs import process

pytestmark = pytest.mark.usefixtures("as_of_a_terminal")


def script(text):
    return [sys.executable, "-c", f"import os, signal, sys, time; rank = int(os.environ.get('RANK', 0)); {text}"]


def test_a_stage_that_was_killed_is_told_from_one_that_failed():
    process.run_stage(script("pass"), "sft", "ppo")
    with pytest.raises(ToolkitError, match='"sft", which "ppo" needs, failed; its message is above'):
        process.run_stage(script("sys.exit(1)"), "sft", "ppo")
    with pytest.raises(ToolkitError, match=r"was killed by SIGKILL.*memory"):
        process.run_stage(script("os.kill(os.getpid(), signal.SIGKILL)"), "sft", "ppo")
    for code in (129, 130, 143):
        with pytest.raises(RunInterrupted, match="was stopped"):
            process.run_stage(script(f"sys.exit({code})"), "sft", "ppo")
    with pytest.raises(BrokenPipeError) as closed:
        process.run_stage(script("sys.exit(141)"), "sft", "ppo")
    assert closed.value.errno == errno.EPIPE and closed.value.filename is None  # as the system's own


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes otherwise")
@pytest.mark.parametrize("number", STOPS)
def test_a_stage_that_was_stopped_before_it_began_is_not_told_as_a_failure(number):
    dies = f"signal.signal({int(number)}, signal.SIG_DFL); os.kill(os.getpid(), {int(number)})"
    with pytest.raises(RunInterrupted, match='"sft", which "ppo" needs, was stopped[.]') as raised:
        process.run_stage(script(dies), "sft", "ppo")
    assert raised.value.signal_number == number
    with pytest.raises(RunInterrupted, match="2 processes were stopped") as raised:
        process.run_in_processes(script(dies), 2)
    assert raised.value.signal_number == number


def test_each_of_several_processes_knows_its_number(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of a cluster; they are all on this machine
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    told = "[os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')]"
    told += " + [os.environ.get('GLOO_SOCKET_IFNAME', '')]"  # which would take the address of the machine's name
    told += " + [name for name in os.environ if name.startswith('TORCHELASTIC')]"
    write = script(f"open(r'{tmp_path}/' + str(rank), 'w').write(' '.join({told}))")
    assert process.run_in_processes(write, 3) == 0
    lo = "lo" if sys.platform == "linux" else ""
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == [f"{i} {i} 3 127.0.0.1 {lo}" for i in range(3)]


def test_one_that_ends_badly_ends_the_others(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.3)
    began = time.monotonic()
    waits = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"  # as in a collective
    assert process.run_in_processes(script(f"exec('sys.exit(1)' if rank == 1 else {waits!r})"), 3) == 1
    with pytest.raises(ToolkitError, match="process 2 of 3 was killed by SIGKILL, probably since memory ran out; the"):
        process.run_in_processes(script(f"exec('os.kill(os.getpid(), 9)' if rank == 2 else {waits!r})"), 3)
    assert time.monotonic() - began < 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes otherwise")
def test_one_of_several_that_torch_ends_says_what_may_help():
    """Its watchdog does so where a sum on cards has not ended, as between those that cannot copy to one another."""
    with pytest.raises(ToolkitError, match=r"^process 0 of 2 was killed by SIGABRT; .* 10 minutes.*NCCL_P2P_DISABLE=1"):
        process.run_in_processes(script("os.abort()"), 2)
    with pytest.raises(ToolkitError, match=r"killed by SIGABRT\.$"):  # one alone sums with nobody
        process.run_stage(script("os.abort()"), "sft", "ppo")


STARTS = """
import os, pathlib, subprocess, sys, time
told = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    told.write_text(str(started.pid))
    started.wait()
while not told.exists():
    time.sleep(0.05)
sys.exit(1)
"""


def test_a_stage_that_one_had_started_ends_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "GRACE", 1.0)
    assert process.run_in_processes([sys.executable, "-c", STARTS, str(tmp_path / "pid")], 2) == 1
    began, started = time.monotonic(), int((tmp_path / "pid").read_text())
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 10
        time.sleep(0.05)


def test_all_have_time_to_save_where_all_were_asked_to_stop():
    assert process.run_in_processes(script("time.sleep(0.5 * rank); sys.exit(143)"), 2) == 143


def test_one_that_was_stopped_waits_longer_for_the_others(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.1)
    assert process.run_in_processes(script("rank or time.sleep(0.5); sys.exit(130)"), 2) == 130
    began = time.monotonic()
    with pytest.raises(RunInterrupted):  # not where the signal itself has ended one, which has saved nothing
        process.run_in_processes(script("rank and os.kill(os.getpid(), 15); time.sleep(60)"), 2)
    monkeypatch.setattr(process, "_GRACE_OF_A_STOP", 0.2)
    assert process.run_in_processes(script("rank or time.sleep(60); sys.exit(130)"), 2) == 1
    assert time.monotonic() - began < 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes otherwise")
@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_passed_on(number):
    """To a launcher of two, whose children say that they have saved, and which no terminal sends Ctrl-C to."""
    children = script("signal.signal(15, lambda *_: sys.exit(143)); os.write(1, b'ready\\n'); time.sleep(60)")
    said, ours = os.pipe()

    def launch():
        os.setsid()
        os.dup2(ours, 1)
        os._exit(process.run_in_processes(children, 2))

    started = multiprocessing.get_context("fork").Process(target=launch)
    started.start()
    os.close(ours)
    with os.fdopen(said) as lines:
        assert [lines.readline() for _ in range(2)] == ["ready\n"] * 2
        os.kill(started.pid, number)
        started.join(30)
    assert started.exitcode == 143


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes otherwise")
@pytest.mark.parametrize("number", STOPS)
def test_a_signal_while_they_are_started_reaches_all(number, monkeypatch):
    started, sends = [], iter((number, None))

    def starts(*arguments, **named):
        if (signal_ := next(sends)) is not None:  # before there is a first one
            os.kill(os.getpid(), signal_)
        started.append(popen(*arguments, **named))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(process.subprocess, "Popen", starts)
    with pytest.raises(RunInterrupted):
        process.run_in_processes(script("time.sleep(60)"), 2)
    assert [child.returncode for child in started] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize(("foreground", "passed_on"), [(5, False), (6, True)])
def test_a_command_in_a_terminal_s_background_passes_sigint_on(foreground, passed_on, monkeypatch):
    """To which the terminal sends none."""
    answers = {"open": lambda *_: 7, "close": lambda _: None, "tcgetpgrp": lambda _: foreground, "getpgrp": lambda: 5}
    monkeypatch.setattr(process, "os", SimpleNamespace(name="posix", O_RDONLY=0, **answers))
    assert process._of_a_terminal() != passed_on


def test_a_file_in_the_current_folder_stands_in_for_no_module(tmp_path, monkeypatch):
    (tmp_path / "typer.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    said = subprocess.run(process.this_toolkit("--version"), capture_output=True, text=True, check=False)
    assert said.returncode == 0 and said.stdout.strip()
    monkeypatch.chdir(Path(toolkit.__file__).parents[1])  # a checkout that is not installed is found by where it is
    assert process.this_toolkit("--version")[1:] == ["-m", "toolkit", "--version"]


def test_an_earlier_stage_finds_a_package_that_is_not_installed(tmp_path, monkeypatch):
    """As a clone that a notebook in another folder has added to its path."""
    package, beside = tmp_path / "clone" / "toolkit", tmp_path / "beside"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import os; open('found', 'w').write(os.environ['PYTHONPATH'])")
    beside.mkdir()
    monkeypatch.chdir(beside)
    monkeypatch.setattr(toolkit, "__file__", str(package / "__init__.py"))
    monkeypatch.setenv("PYTHONPATH", "theirs")
    process.run_stage(process.this_toolkit("sft"), "sft", "ppo")
    assert (beside / "found").read_text() == os.pathsep.join([str(tmp_path / "clone"), "theirs"])
    monkeypatch.setattr(process.site, "getsitepackages", lambda: [str(tmp_path / "clone")])
    assert process._environment()["PYTHONPATH"] == "theirs"


@pytest.mark.parametrize(("given", "threads"), [(None, "2"), ("5", "5")])
def test_processes_share_the_cores_unless_a_user_says_otherwise(given, threads, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(7)), raising=False)  # of a scheduler
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    write = script(f"open(r'{tmp_path}/' + str(rank), 'w').write(os.environ['OMP_NUM_THREADS'])")
    assert process.run_in_processes(write, 3) == 0
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == [threads] * 3
