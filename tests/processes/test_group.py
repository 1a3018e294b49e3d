"""How processes meet, how long they wait for one another, and how they part."""

import re
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.several import Several
from toolkit import processes
from toolkit.__main__ import main
from toolkit.errors import ToolkitError
from toolkit.processes import exchange, group, launcher


@pytest.mark.parametrize(("address", "said", "rank"), [
    ("127.0.0.1", r"timed out|Timed out", "0"),
    ("127.0.0.1", r"timed out|Timed out", "1"),
    ("", "MASTER_ADDR", "0"),
])  # fmt: skip
def test_one_that_never_comes_is_not_waited_for_all_day(address, said, rank, monkeypatch):
    monkeypatch.setattr(group, "MEETING", timedelta(seconds=1))
    port = str(processes.free_port())
    environ = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ToolkitError, match=f"2 processes of WORLD_SIZE have not met at {address}:{port}") as refused:
        processes.join()
    assert re.search(said, str(refused.value)) and not torch.distributed.is_initialized()


@pytest.fixture
def joined(two_cards, monkeypatch):
    """What `join` has made for the second of two processes, the groups of torch kept away."""
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(group, "_meet", lambda: (torch.distributed.HashStore(), 1, 2))
    monkeypatch.setattr(group, "name_interface", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda limit: made.append(limit))

    def new(name, backend, **named):
        made.append((name, backend, named))
        return name

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(torch.distributed, name, partial(new, name))
    processes.join()
    yield made
    exchange.of_cards.clear()


def test_processes_wait_for_one_another_as_long_as_a_rollout_may_take(joined):
    """And minutes alone until it is reached, and in a sum on cards, whose kernel does not notice that another process
    has died."""
    (_, world, named), then, (_, on_cards, of_cards) = joined
    assert (world, on_cards) == ("gloo", "nccl") and (named["rank"], named["world_size"]) == (1, 2)
    assert named["timeout"] <= timedelta(minutes=2) and then >= timedelta(hours=12)
    assert of_cards["timeout"] <= timedelta(minutes=15)


def timeout_here():
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return backend.options._timeout


def test_what_processes_wait_for_one_another_is_not_what_they_wait_to_meet(two):
    assert two(timeout_here) == [group.TIMEOUT] * 2


def test_tensors_of_cards_are_summed_by_the_group_of_cards(joined, monkeypatch):
    class OfACard(torch.Tensor):
        is_cuda = True

    summed = []
    monkeypatch.setattr(exchange, "count", lambda: 2)
    monkeypatch.setattr(exchange, "gather", lambda value: [value])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, group=None: summed.append(group))
    processes.sum_([torch.ones(2).as_subclass(OfACard)])
    processes.sum_([torch.ones(2)])
    assert summed == ["new_group", None]


def test_a_machine_that_is_not_reached_names_the_variable(two_cards, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152]\n Connection refused, remote=[127.0.1.1]")

    monkeypatch.setattr(launcher, "_seen", [])
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(group, "_meet", lambda: (torch.distributed.HashStore(), 1, 2))
    monkeypatch.setattr(group, "name_interface", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    with pytest.raises(ToolkitError, match=r"process 1 of 2 does not reach .*127\.0\.1\.1\].* Set GLOO_SOCKET_IFNAME"):
        processes.join()


def left():
    before = processes.count()
    processes.leave()
    processes.leave()  # where nothing is left
    return before, processes.count()


def ends_last(file):
    """Of several that fail process 0 has more to do."""
    if processes.is_main():
        time.sleep(1)
        file.write_text("what happened")
    processes.leave(failed=True)
    return file.is_file()


def test_a_group_is_ended_where_all_went_well_and_else_process_0_has_the_last_word(tmp_path, monkeypatch):
    """A command that fails leaves it: the others may wait for it still, and torchrun would end process 0 with the first
    of them."""
    several, ended = Several(2), []
    try:
        assert several(ends_last, tmp_path / "said") == [True, True]
        assert several(left) == [(2, 1), (2, 1)]
    finally:
        several.close()
    monkeypatch.setattr(processes, "leave", lambda *, failed: ended.append(failed))
    for code in (1, 0):
        monkeypatch.setattr("toolkit.cli.app", lambda code=code, **_: sys.exit(code))
        with pytest.raises(SystemExit):
            main()
    assert ended == [True, False]


@pytest.mark.parametrize("main", [True, False])
def test_a_group_of_cards_is_broken_off_after_the_last_word(main, monkeypatch):
    """Else torch warns of it in each process, and asks a store again and again that is gone with process 0."""
    done = []

    def abort():
        done.append("aborts")
        raise RuntimeError("CUDA error")

    store = SimpleNamespace(set=lambda *_: done.append("speaks"), wait=lambda *_: done.append("waits"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(group, "is_main", lambda: main)
    monkeypatch.setattr(group, "_met", [store])
    exchange.of_cards.append(SimpleNamespace(abort=abort))
    processes.leave(failed=True)
    assert done == ["speaks" if main else "waits", "aborts"] and not exchange.of_cards
    assert hasattr(torch.distributed.ProcessGroup, "abort")


def test_one_that_finds_no_card_where_others_do_is_told_at_the_start(two_cards, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(group, "_meet", lambda: (torch.distributed.HashStore(), 1, 4))
    monkeypatch.setattr(group, "name_interface", lambda *_: None)
    monkeypatch.setattr(group, "gather", lambda own: [True, own, False, False])
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda limit: None)
    with pytest.raises(ToolkitError, match="processes 2, 3 of 4 find no GPU, and the others .* as their machine has"):
        processes.join()
