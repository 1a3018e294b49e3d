"""A limit of time and memory for Python code that does not end by itself."""

import re
import signal
import sys
import threading
import time

import pytest

from toolkit.time_limit import time_limit

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such timers")


@pytest.mark.parametrize("endless", [lambda: sum(1 for _ in iter(int, 1)), lambda: re.match(r"(a+)+$", "a" * 40 + "!")])
def test_what_does_not_end_is_ended(endless):
    with pytest.raises(TimeoutError, match="it takes more than 0 s"), time_limit(0.1):
        endless()  # for hours
    with time_limit(0.1):
        pass
    time.sleep(0.15)  # nothing is left of either


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.parametrize(
    # A megabyte each: with many small ones, what earlier tests have left free is used up for seconds first.
    "much",
    [lambda: "x" * 10**10, lambda: ["x" * 2**20 for _ in range(10**5)], lambda: "x".ljust(10**10)],
)
def test_what_takes_gigabytes_is_ended(much):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError, match="it takes more than 64 MB of memory"), time_limit(10, 64):
        much()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with time_limit(10, 64):
        assert len(bytes(2**24)) == 2**24  # what is less may be had
    assert len(bytes(2**27)) == 2**27


def test_another_s_timer_goes_on():
    def ring(*_):
        raise AssertionError("an hour has not gone by")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3600)
        with time_limit(5):
            time.sleep(0.05)
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 5
        assert 5 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600 - 0.05
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_have_no_limit():
    done = []

    def slow():
        with time_limit(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=slow)
    thread.start()
    thread.join()
    assert done == [True]
