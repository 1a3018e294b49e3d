"""What several processes tell each other, and how items are divided among them."""

import os
import re
import signal
import socket
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from tests.several import Several
from toolkit import processes
from toolkit.__main__ import main
from toolkit.cli import app
from toolkit.errors import PeerError, RecipeError, RewardError, ToolkitError
from toolkit.recipes import Recipe
from toolkit.runs.said import say


def shares(weights):
    return processes.own(weights), processes.count(), processes.rank(), processes.is_main()


def test_alone_everything_is_ones_own():
    assert shares([3.0, 1.0, 2.0]) == ([0, 1, 2], 1, 0, True)
    assert processes.gather("x") == ["x"] and processes.by_main(lambda: 3) == 3
    tensor = torch.ones(2)
    processes.sum_([tensor])
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="mine"), processes.agreed():
        raise ValueError("mine")


def test_items_are_divided_by_weight_and_none_is_lost(two, monkeypatch):
    for weights in ([1.0] * 7, [10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0], [4.0], []):
        (first, *_, main), (second, number, rank, other) = two(shares, weights)
        assert sorted([*first, *second]) == list(range(len(weights))) and (number, rank, main, other) == (
            2,
            1,
            True,
            False,
        )
        loads = [sum(weights[i] for i in share) for share in (first, second)]
        assert max(loads) - min(loads) <= max(weights, default=0.0)
    for items, number in ((8, 4), (4, 4), (3, 4), (7, 3)):  # whole runs in order, of equal size up to one
        monkeypatch.setattr(processes, "count", lambda number=number: number)
        owners = [processes.owner(item, items) for item in range(items)]
        sizes = [owners.count(rank) for rank in range(number)]
        assert owners == sorted(owners) and sum(sizes) == items and max(sizes) - min(sizes) <= 1
    long, rest = two(shares, [10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0])
    assert long[0] == [0] and len(rest[0]) == 6  # one response that is as long as all others together


def summed():
    rank = processes.rank()
    tensors = [torch.tensor([[1.0, rank]]), torch.tensor([rank + 1], dtype=torch.float64), torch.tensor(2.0)]
    processes.sum_(tensors)
    return [tensor.tolist() for tensor in tensors], [str(tensor.dtype) for tensor in tensors]


def test_tensors_are_added_up_whatever_their_dtype(two):
    expected = [[[2.0, 1.0]], [3.0], 4.0], ["torch.float32", "torch.float64", "torch.float32"]
    assert two(summed) == [expected, expected]


def fails_on(rank, error):
    def call():
        if processes.rank() == rank:
            raise error
        return "well"

    try:
        with processes.agreed():
            call()
    except ToolkitError as found:
        return type(found).__name__, str(found)
    return None


def fails_in_all():
    try:
        with processes.agreed():
            raise RewardError("no answer")
    except ToolkitError as found:
        return type(found).__name__, str(found)


def hears_later(rank):
    """Of an error that one process meets where the others do not wait."""
    heard = []
    try:
        for part in range(3):
            with processes.agreed(now=part == 2):
                heard.append(part)
                if processes.rank() == rank and part == 1:
                    raise RewardError("no answer")
    except ToolkitError as found:
        return heard, type(found).__name__


def fails_further_out(rank):
    """Of an error of one process where the others have gone further in; what they do next still meets."""
    try:
        with processes.agreed():
            if processes.rank() == rank:
                raise RewardError("no answer")
            with processes.agreed():
                pass
    except ToolkitError as found:
        return type(found).__name__, getattr(found, "of", ""), processes.gather(processes.rank())


def fails_in_main():
    def call():
        raise RewardError("no answer")

    try:
        processes.by_main(call)
    except ToolkitError as found:
        return type(found).__name__, str(found)


def test_an_error_of_one_is_raised_by_all(two):
    mine, others = two(fails_on, 0, RewardError("no answer"))
    assert mine == ("RewardError", "no answer") and others == ("PeerError", "process 0 of 2: RewardError: no answer")
    assert two(fails_in_main) == [mine, others]
    assert two(fails_on, 5, RewardError("never")) == [None, None]
    assert two(fails_in_all) == [mine, others]  # said by one of them
    assert two(hears_later, 1) == [([0, 1, 2], "PeerError"), ([0, 1], "RewardError")]
    assert two(hears_later, None) == [None, None]
    assert two(fails_further_out, 1) == [("PeerError", "RewardError", [0, 1]), ("RewardError", "", [0, 1])]


def begins(*failing):
    """How often a stage's command reads its recipe, its exit code and what it says, where that fails in some."""
    read = []

    def load(*_, **__):
        read.append(1)
        if processes.rank() in failing:
            raise RecipeError("no such recipe.")
        return Recipe("x", {}, "x", Path())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.recipes.load", load)
        patch.setattr("toolkit.runs.stages.run", lambda *_, **__: None)
        patch.setattr("toolkit.cli.stages.join", lambda number: None)  # these have, and keep their output
        done = CliRunner().invoke(app, ["ppo", "doubling"])
    return len(read), done.exit_code, done.stderr


def test_a_recipe_is_read_once_and_its_errors_are_told_once(two):
    said = "RecipeError: no such recipe.\n"
    assert two(begins) == [(1, 0, ""), (1, 0, "")]
    assert two(begins, 0, 1) == [(1, 1, said), (1, 1, "")]
    assert two(begins, 1) == [(1, 1, ""), (1, 1, said)]  # a file that one machine lacks


def told():
    with redirect_stdout(StringIO()) as printed:
        say("a sentence")
    return printed.getvalue()


def test_one_process_says_what_concerns_all(two):
    """Of a script of one's own, too, where nobody silences the others."""
    assert two(told) == ["a sentence\n", ""]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, "accelerate is set to FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate is set to DEEPSPEED"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "starts one process on a CPU"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "29500"}, "RANK is 2 of WORLD_SIZE 2, and ranks begin with 0"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_what_accelerate_cannot_do_here_is_refused(environ, said, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ToolkitError, match=said):
        processes.join()


def test_one_process_that_was_launched_is_as_one_that_was_not(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert processes.count() == 1 and not {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & processes.environment().keys()


@pytest.mark.parametrize(("address", "said", "rank"), [
    ("127.0.0.1", r"timed out|Timed out", "0"),
    ("127.0.0.1", r"timed out|Timed out", "1"),
    ("", "MASTER_ADDR", "0"),
])  # fmt: skip
def test_one_that_never_comes_is_not_waited_for_all_day(address, said, rank, monkeypatch):
    monkeypatch.setattr(processes, "MEETING", timedelta(seconds=1))
    port = str(processes.free_port())
    environ = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ToolkitError, match=f"2 processes of WORLD_SIZE have not met at {address}:{port}") as refused:
        processes.join()
    assert re.search(said, str(refused.value)) and not torch.distributed.is_initialized()


@pytest.fixture
def two_cards(monkeypatch):
    """The second of two processes of a machine with a build for CUDA and two cards."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(processes, "_visible", [])
    monkeypatch.setattr(processes, "_LAUNCHED", dict(processes._LAUNCHED))
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_command_takes_its_card_before_a_library_asks_for_it(two_cards, monkeypatch):
    """bitsandbytes asks CUDA when it is imported, and CUDA reads the variable once."""

    def imports():
        raise ToolkitError(f"imported with {os.environ.get('CUDA_VISIBLE_DEVICES')}")

    monkeypatch.setattr("toolkit.cli.command._import_quietly", imports)
    assert "imported with 1" in CliRunner().invoke(app, ["ppo", "doubling"]).stderr
    assert "imported with 1" in CliRunner().invoke(app, ["runs"]).stderr  # as it was left


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("4, 7", "7"), ("GPU-a,GPU-b", "GPU-b"), ("-1", None),
                                               ("", None), ("3,-1,5", "refused"), ("3", "refused")])  # fmt: skip
def test_each_process_sees_one_card_and_gives_its_stage_all_of_them(visible, seen, two_cards, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible is None:  # a build for ROCm reads the same variable
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", "6.4")
    if seen == "refused":
        with pytest.raises(ToolkitError, match="process 1 of this machine has no GPU of its own: 1 are visible"):
            processes.take_card()
        return
    processes.take_card()
    processes.take_card()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == (visible if seen is None else seen)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "by_main", lambda call: call())
    processes._LAUNCHED.update(processes._take_from_environment())
    given = processes.environment()
    assert given.get("CUDA_VISIBLE_DEVICES") == visible
    assert {name: given[name] for name in processes._LAUNCHED} == {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


def test_whoever_joins_after_cuda_was_asked_is_told(two_cards, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2, raising=False)
    with pytest.raises(ToolkitError, match=r"Call toolkit.processes.join\(\) before anything else is imported"):
        processes.join()


def test_accelerates_own_variables_are_let_pass(monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert processes.count() == 1


def test_a_broken_connection_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda told: pytest.fail("asked those who are not there"))
    with pytest.raises(PeerError, match="broken"), processes.agreed():
        raise PeerError("the connection is broken")


def of_main():
    return processes.by_main(lambda: {"rank": processes.rank(), "text": "ü"}), processes.gather(processes.rank())


def test_what_the_main_process_found_is_known_to_all(two):
    assert two(of_main) == [({"rank": 0, "text": "ü"}, [0, 1])] * 2


def interrupted_between(rank):
    """Ctrl-C comes to one that waits for the others in an exchange within another; they have had it, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background does without
    pids = processes.gather(os.getpid())
    try:
        with processes.agreed(), processes.agreed():
            if processes.rank() == rank:
                time.sleep(1.0)  # the other has long come to the exchange
                os.kill(pids[1 - rank], signal.SIGINT)
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        return "KeyboardInterrupt", processes.gather(processes.rank())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal for one process")
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_is_met_after_an_exchange(rank, two):
    assert two(interrupted_between, rank) == [("KeyboardInterrupt", [0, 1])] * 2


def test_what_mpi_says_is_no_number_of_processes(monkeypatch):
    """accelerate would divide by it on a CPU, and the toolkit once more."""
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ToolkitError, match="PMI_SIZE says that MPI has started several.*Start them with torchrun"):
        processes.join()
    monkeypatch.setenv("PMI_SIZE", "2")
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():  # which torchrun has started there
        monkeypatch.setenv(name, value)
    processes.join()
    assert "PMI_SIZE" not in os.environ


@pytest.fixture
def joined(two_cards, monkeypatch):
    """What `join` has made for the second of two processes, the groups of torch kept away."""
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(processes, "_meet", lambda: (torch.distributed.HashStore(), 1, 2))
    monkeypatch.setattr(processes, "_name_interface", lambda *_: None)
    monkeypatch.setattr(processes, "_cards", [])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda limit: made.append(limit))

    def group(name, backend, **named):
        made.append((name, backend, named))
        return name

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(torch.distributed, name, partial(group, name))
    processes.join()
    return made


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
    assert two(timeout_here) == [processes.TIMEOUT] * 2


def test_tensors_of_cards_are_summed_by_the_group_of_cards(joined, monkeypatch):
    class OfACard(torch.Tensor):
        is_cuda = True

    summed = []
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda value: [value])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, group=None: summed.append(group))
    processes.sum_([torch.ones(2).as_subclass(OfACard)])
    processes.sum_([torch.ones(2)])
    assert summed == ["new_group", None]


@pytest.mark.parametrize("visible", ["0,1", None])
def test_a_card_that_cuda_does_not_find_is_named(visible, two_cards, monkeypatch):
    """As on a login node, or where a driver is missing: all would end in a traceback of NCCL's."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    named = " of CUDA_VISIBLE_DEVICES=0,1" if visible else ""
    with pytest.raises(ToolkitError, match=rf"CUDA finds no GPU 1{named}\. Set CUDA_VISIBLE_DEVICES to GPUs that"):
        processes.join()


@pytest.mark.parametrize(
    ("rank", "of_other", "own"), [(0, "192.0.2.7", {"192.0.2.7": "192.0.2.1"}), (1, "", {"node1": "192.0.2.7"})]
)
def test_a_machine_is_reached_whose_name_is_at_a_loopback_address(rank, of_other, own, monkeypatch):
    """As on Debian, where gloo would listen at 127.0.1.1; the first machine knows itself by its name, and finds its
    address on the way to another one."""
    store = torch.distributed.HashStore()
    store.set(f"address {1 - rank}", of_other)
    (address,) = own.values()
    found = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth1": [SimpleNamespace(address=address)]}
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(processes, "_address_towards", lambda host: own.get(host, ""))
    monkeypatch.setattr(processes, "_addresses", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(processes.psutil, "net_if_addrs", lambda: found)
    processes._name_interface(store, rank, 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # the user's own
    processes._name_interface(store, rank, 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for names, interface in ((["198.51.100.1", "127.0.1.1"], "eth1"), ([], "eth1"), ([address], None)):
        monkeypatch.setattr(processes, "_addresses", lambda name, names=names: names)  # of a stale entry, of none
        processes._name_interface(store, rank, 2)
        assert os.environ.pop("GLOO_SOCKET_IFNAME", None) == interface  # gloo finds the last by itself


def test_this_machine_s_address_on_the_way_to_another():
    assert processes._address_towards("127.0.0.1") == processes._address_towards("no such name") == ""
    own = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    for address in own:
        assert processes._address_towards(address) == ("" if address.startswith("127.") else address)


def test_processes_of_one_machine_leave_gloo_as_it_is(monkeypatch):
    store = torch.distributed.HashStore()
    store.set("address 1", "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    processes._name_interface(store, 0, 2)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_machine_that_is_not_reached_names_the_variable(two_cards, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152]\n Connection refused, remote=[127.0.1.1]")

    monkeypatch.setattr(processes, "_visible", [])
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(processes, "_meet", lambda: (torch.distributed.HashStore(), 1, 2))
    monkeypatch.setattr(processes, "_name_interface", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    with pytest.raises(ToolkitError, match=r"process 1 of 2 does not reach .*127\.0\.1\.1\].* Set GLOO_SOCKET_IFNAME"):
        processes.join()


def test_a_connection_that_breaks_is_told_in_a_line(monkeypatch):
    def broken(*_):
        raise RuntimeError("Connection closed\n by peer")

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", broken)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(PeerError, match="of process 1 of 2 to another is broken: Connection closed by peer"):
        processes.gather(1)
    assert signal.getsignal(signal.SIGINT) is before


def left():
    before = processes.count()
    processes.leave()
    processes.leave()  # where nothing is left
    return before, processes.count()


def test_a_group_is_ended_where_all_went_well(monkeypatch):
    """A command that fails ends alone: the others may wait for it still."""
    several, ended = Several(2), []
    try:
        assert several(left) == [(2, 1), (2, 1)]
    finally:
        several.close()
    monkeypatch.setattr(processes, "leave", lambda: ended.append(code))
    for code in (1, 0):
        monkeypatch.setattr("toolkit.cli.app", lambda code=code, **_: sys.exit(code))
        with pytest.raises(SystemExit):
            main()
    assert ended == [0]
