import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from toolkit.checkpoints import STOPS, stop, stop_requests

pytestmark = pytest.mark.usefixtures("as_of_a_terminal")


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with stop_requests(lambda: "step 3 is finished.") as request:
        assert request.received is None
        os.kill(os.getpid(), number)
        assert request.received == number
        os.kill(os.getpid(), signal.SIGTERM)  # a second SIGTERM changes nothing
        assert request.received == number
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_it_at_once():
    before = signal.getsignal(signal.SIGINT)  # not always Python's own: a shell's background jobs ignore it
    with pytest.raises(KeyboardInterrupt), stop_requests(lambda: "step 3 is finished."):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_one_ctrl_c_may_reach_a_stage_behind_the_sigterm_that_its_command_passes_on():
    with stop_requests(lambda: "step 3 is finished.") as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_changed():
    seen = []

    def work():
        with stop_requests(lambda: "step 3 is finished.") as request:
            seen.append((request.received, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows forks no process")
def test_a_worker_that_was_forked_ends_by_the_signal_and_says_nothing(capfd):
    with stop_requests(lambda: "step 3 is finished.") as request:
        forked = multiprocessing.get_context("fork")
        there = forked.Event()
        worker = forked.Process(target=lambda: (there.set(), time.sleep(60)))
        worker.start()
        assert there.wait(30)  # Python forgets a signal that comes while it forks
        for number in (signal.SIGINT, signal.SIGHUP):  # as of a terminal: the one that has forked it needs it to go on
            os.kill(worker.pid, number)
        worker.join(0.5)
        assert worker.is_alive()
        worker.terminate()
        worker.join(30)
    assert (worker.exitcode, request.received) == (-signal.SIGTERM, None)
    assert capfd.readouterr() == ("", "")


IN_A_TERMINAL = """
import sys, time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("stop", sys.argv[2])  # by itself, without the libraries beside it
spec.loader.exec_module(stop := module_from_spec(spec))
with stop.stop_requests(lambda: "the step is finished.") as request:
    print("begun", flush=True)
    while request.received is None:
        time.sleep(0.01)
    print("what nobody reads", flush=True)
    print("nor this", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text(f"saved after {request.received}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_the_end_of_a_terminal_is_met_like_any_other(tmp_path):
    """What the run prints from then on, which would be an error, is not what ends it."""
    import fcntl
    import termios

    try:
        ours, its = os.openpty()
    except OSError:
        pytest.skip("this machine gives no pseudo-terminal")
    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "saved"), stop.__file__]

    def take_terminal():
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=take_terminal, **streams)
    os.close(its)
    assert b"begun" in os.read(ours, 100)
    os.close(ours)
    assert child.wait(30) == 0
    assert (tmp_path / "saved").read_text() == "saved after 1"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_what_was_started_to_outlive_its_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests(lambda: "step 3 is finished.") as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
