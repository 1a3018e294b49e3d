"""What is freed is kept for what comes, and given back where it piles up."""

import platform

import psutil
import pytest
import torch

from toolkit.models import FreedMemory, keep_freed_memory
from toolkit.models import freed_memory as module

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
MIB = 2**20


def test_freed_memory_is_kept_for_what_comes():
    """Each page that the system gives is a fault; what is freed may come to lie in several places."""
    resource = pytest.importorskip("resource")
    keep_freed_memory()
    before, pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 3 * 30 * MIB // resource.getpagesize()
    for _ in range(12):
        [torch.ones(30 * 2**18) for _ in range(3)]  # 30 MiB each
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5 * pages


def test_who_has_set_a_threshold_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("asked for"))
    assert keep_freed_memory.__wrapped__() is None
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(psutil, "Process", lambda: pytest.fail("asked for"))
    FreedMemory().after_step()


def test_pieces_between_what_stays_are_given_back():
    keep_freed_memory().malloc_trim(0)
    process, freed = psutil.Process(), FreedMemory()
    freed.after_step()
    usual = process.memory_info().rss
    between = [torch.ones(2**18) for _ in range(usual // MIB)]  # twice the process, in pieces of 1 MiB
    stays = [between[i].clone() for i in range(0, len(between), 64)]
    grown = process.memory_info().rss
    assert grown > 1.8 * usual
    del between
    assert process.memory_info().rss > 0.95 * grown  # kept
    freed.after_step()
    assert process.memory_info().rss < usual + 2 * MIB * len(stays) + 0.1 * usual


def test_it_is_measured_anew_after_giving_back_and_a_quarter_is_passed_over(monkeypatch):
    sizes, trimmed = iter([100, 124, 126, 90, 112, 113]), []

    class Libc:
        def malloc_trim(self, pad):
            trimmed.append(pad)

    class Process:
        def memory_info(self):
            return type("Memory", (), {"rss": next(sizes)})

    monkeypatch.setattr(module, "keep_freed_memory", Libc)
    monkeypatch.setattr(psutil, "Process", Process)
    freed, after = FreedMemory(), []
    for _ in range(6):
        freed.after_step()
        after.append(len(trimmed))
    assert after == [0, 0, 1, 1, 1, 2]
