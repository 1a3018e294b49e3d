import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from toolkit.checkpoints import stop_requests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
        os.kill(worker.pid, signal.SIGINT)  # as a terminal's Ctrl-C: the one that has forked it needs it to go on
        worker.join(0.5)
        assert worker.is_alive()
        worker.terminate()
        worker.join(30)
    assert (worker.exitcode, request.received) == (-signal.SIGTERM, None)
    assert capfd.readouterr() == ("", "")
