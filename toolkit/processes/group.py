"""How processes that were started find one another, and what they give those that they start themselves."""

import ipaddress
import logging
import os
import socket
from contextlib import suppress
from datetime import timedelta

import psutil
from torch import distributed as dist

from toolkit.errors import ToolkitError
from toolkit.processes.exchange import by_main, count, gather, is_main, of_cards
from toolkit.processes.launcher import (
    as_launched,
    check_card,
    check_launcher,
    launched,
    take_card,
    take_from_environment,
)

INTERFACE = "GLOO_SOCKET_IFNAME"
_MEETS_IN = "TOOLKIT_MEETS_IN"  # seconds, of processes that are started together
TIMEOUT = timedelta(hours=12)
"""How long a process waits for another: a rollout, or a reward's server, may take long; one that dies ends the others
by its broken connection and by whoever started them."""
ON_CARDS = timedelta(minutes=10)
"""How long a sum of tensors may take on cards. NCCL does not notice that another process of this machine has died, and
its kernel would wait for it; a sum directly follows an exchange over gloo, so that nobody comes to it late."""
BY_MEMORY = "Where GPUs cannot copy to one another, NCCL_P2P_DISABLE=1 sends by way of the machine's memory."
"""The remedy where a sum on cards is wrong, or does not end."""
REACHING = timedelta(minutes=1)
"""How long processes that have met through the store try to reach one another; gloo waits five times as long for one
that does not come."""
MEETING = timedelta(minutes=30)
"""How long those that have started wait for one that has not, as torch's own default is."""
TOGETHER = 300
"""The same in seconds of those that several processes start together, for an earlier stage."""
LAST_WORDS = timedelta(seconds=20)
"""How long those that have failed wait for process 0, which may still write and say what happened."""
_SPOKEN = "process 0 has spoken"
_met: list[dist.Store] = []  # by which the processes found each other


def join() -> None:
    """Become one of the processes that torchrun, `accelerate launch` or `toolkit --processes` started, if they did.

    The environment says which, in torch's variables. Each sees the GPU of its local rank alone (`take_card`).

    Raises:
        ToolkitError: there are more processes on this machine than GPUs, or GPUs are named that CUDA does not find, or
            some find GPUs and others none;
            they have not met within `MEETING`, or do not reach one another; MPI has started them, or accelerate was
            asked for what it would do to a model of its own.
    """
    check_launcher()
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    if launched() == 1:
        take_from_environment()
        return
    if on_cards := take_card():
        check_card()
    store, rank, number = _meet()
    try:
        name_interface(store, rank, number)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=REACHING)
    except RuntimeError as error:
        wrong = f"process {rank} of {number} does not reach another one: {' '.join(str(error).split())}."
        remedy = f"Set {INTERFACE}, and NCCL_SOCKET_IFNAME for GPUs, to the network interface by which the machines "
        remedy += "reach each other (see `ip addr`), and let them accept each other's traffic on all ports."
        raise ToolkitError(wrong, remedy=remedy) from error
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    _met[:] = [store]
    if not all(found := gather(on_cards)) and any(found):
        without = ", ".join(str(one) for one, has in enumerate(found) if not has)
        wrong = f"processes {without} of {number} find no GPU, and the others have one each."
        remedy = "Start as many processes as their machine has GPUs (see nvidia-smi there), or hide the GPUs of all."
        raise ToolkitError(wrong, remedy=remedy)
    if on_cards and dist.is_nccl_available():  # else gloo sums through the memory of the machine
        of_cards.append(dist.new_group(backend="nccl", timeout=ON_CARDS))
    # transformers' arguments warn of a group that they did not make, at each of their calls.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.msg)
    take_from_environment()


def leave(*, failed: bool = False) -> None:
    """End what `join` began: torch warns of a group of NCCL that is still there at the end, again and again where the
    store has gone with process 0.

    Where all has not gone well, process 0 goes last: torchrun ends all as soon as one has failed, and what process 0
    still says, and the state in which it leaves the run, would be lost. A sum that others do not come to is broken off.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if not failed:
        dist.destroy_process_group()
        of_cards.clear()
    elif _met:
        with suppress(RuntimeError):  # it is gone, or has more to do
            if is_main():
                _met[0].set(_SPOKEN, "")
            else:
                _met[0].wait([_SPOKEN], LAST_WORDS)
        for group in of_cards:
            with suppress(RuntimeError):  # its card may have failed
                group.abort()
        of_cards.clear()


def _meet() -> tuple[dist.Store, int, int]:
    """The store by which the processes found each other, with this one's rank and their number."""
    seconds = os.environ.pop(_MEETS_IN, "")
    timeout = timedelta(seconds=float(seconds)) if seconds else MEETING
    try:
        store, rank, number = next(dist.rendezvous("env://", timeout=timeout))
    except (RuntimeError, ValueError) as error:  # one has not come; a variable is missing or no port
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"
        first = str(error).splitlines()[0]
        wrong = f"the {os.environ['WORLD_SIZE']} processes of WORLD_SIZE have not met at {where}: {first}"
        remedy = "Start all of them, with the same MASTER_ADDR and MASTER_PORT; for one process unset RANK, WORLD_SIZE."
        raise ToolkitError(wrong, remedy=remedy) from error
    return dist.PrefixStore("toolkit", store), rank, number


def environment() -> dict[str, str]:
    """What the process that each of several starts is given, so that these join one another."""
    if count() == 1:
        return dict(os.environ)
    port = str(by_main(free_port))
    return as_launched() | {"MASTER_PORT": port, _MEETS_IN: str(TOGETHER)}


def name_interface(store: dist.Store, rank: int, number: int) -> None:
    """Say to gloo at which interface processes of other machines reach this one, where it would not see it: it takes
    the address of the machine's name, which Debian and others have at 127.0.1.1."""
    own = _address_towards(os.environ.get("MASTER_ADDR", ""))
    store.set(f"address {rank}", own)
    others = [store.get(f"address {i}").decode() for i in range(number)]
    if not own:  # the first machine, which knows itself by its name
        own = next(filter(None, map(_address_towards, filter(None, others))), "")
    of_interface = {
        address.address.partition("%")[0]: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
    }
    taken = next((one for one in _addresses(socket.gethostname()) if one in of_interface), "127.0.1.1")
    if ipaddress.ip_address(taken).is_loopback and own in of_interface:
        os.environ.setdefault(INTERFACE, of_interface[own])


def _addresses(host: str) -> list[str]:
    """Those that a name stands for; none where that is not known."""
    with suppress(OSError, UnicodeError):
        return [str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)]
    return []


def _address_towards(host: str) -> str:
    """This machine's address on the way to another one; "" for itself, or where there is no way. Nothing is sent."""
    for address in _addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((address, 9))
            own = str(way.getsockname()[0]).partition("%")[0]
            if not ipaddress.ip_address(own).is_loopback:
                return own
    return ""


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
