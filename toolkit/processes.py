"""Several processes that do one run: which rows are whose, and what they tell each other. Knows no model.

Every process holds the whole base and takes the same decisions from the same numbers; only forward passes are divided.
Libraries see one process: with their own division of rows and wrappers of modules, adapters that are switched would not
work. Alone, which is without a process group, each function here is what it says of one process, and costs nothing.
"""

import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.errors import PeerError, RunInterrupted, ToolkitError

T = TypeVar("T")


_VISIBLE = "CUDA_VISIBLE_DEVICES"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LAUNCHED = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), "")  # as `join` found them
_visible: list[str | None] = []  # as `take_card` found it
_cards: list[dist.ProcessGroup] = []  # the group that sums tensors of cards, where there are cards
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # by which accelerate would divide on a CPU, too
_MEETS_IN = "TOOLKIT_MEETS_IN"  # seconds, of processes that are started together
TIMEOUT = timedelta(hours=12)
"""How long a process waits for another: a rollout, or a reward's server, may take long; one that dies ends the others
by its broken connection and by whoever started them."""
ON_CARDS = timedelta(minutes=10)
"""How long a sum of tensors may take on cards. NCCL does not notice that another process of this machine has died, and
its kernel would wait for it; a sum directly follows an exchange over gloo, so that nobody comes to it late."""
REACHING = timedelta(minutes=1)
"""How long processes that have met through the store try to reach one another; gloo waits five times as long for one
that does not come."""
MEETING = timedelta(minutes=30)
"""How long those that have started wait for one that has not, as torch's own default is."""
TOGETHER = 300
"""The same in seconds of those that several processes start together, for an earlier stage."""


@dataclass
class _Place:
    """Where this process is: in how many `alone`, and in how many `agreed`."""

    alone: int = 0
    agreed: int = 0


_place = _Place()


def launched() -> int:
    """How many processes a launcher has started, as torch's variables say; 1 where none has.

    Raises:
        ToolkitError: no launcher sets them so.
    """
    number = os.environ.get("WORLD_SIZE", "1")
    lacking = [name for name in ("RANK", "MASTER_PORT") if not os.environ.get(name, "").isdecimal()]
    if not number.isdecimal() or number == "0" or (number != "1" and lacking):
        why = f"{lacking[0]} is no number" if number.isdecimal() and lacking else "that is no number of processes"
        wrong = f"WORLD_SIZE is {number!r} in the environment, and {why}."
        raise ToolkitError(wrong, remedy="Unset it, or start with torchrun or --processes.")
    if number != "1" and int(os.environ["RANK"]) >= int(number):
        wrong = f"RANK is {os.environ['RANK']} of WORLD_SIZE {number}, and ranks begin with 0: all would wait."
        raise ToolkitError(wrong, remedy="Start with torchrun or --processes.")
    if not os.environ.get("LOCAL_RANK", "0").isdecimal():
        wrong = f"LOCAL_RANK is {os.environ['LOCAL_RANK']!r} in the environment, which is no number."
        raise ToolkitError(wrong, remedy="Unset it, or start with torchrun or --processes.")
    return int(number)


def take_card() -> None:
    """See the GPU of the local rank alone, if a launcher started several processes and there are GPUs.

    Before anything asks CUDA, which reads the variable once: bitsandbytes asks when it is imported.

    Raises:
        ToolkitError: there are more processes on this machine than GPUs.
    """
    if launched() == 1 or _visible:
        return
    local, visible = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), os.environ.get(_VISIBLE)
    # A negative number ends the list, as in CUDA.
    named = takewhile(lambda one: one and not one.startswith("-"), map(str.strip, (visible or "").split(",")))
    gpus = [*map(str, range(torch.cuda.device_count()))] if visible is None else [*named]
    if (torch.version.cuda or torch.version.hip) and gpus:
        if local >= len(gpus):
            wrong = f"process {local} of this machine has no GPU of its own: {len(gpus)} are visible."
            raise ToolkitError(wrong, remedy="Start as many processes as there are GPUs.")
        _visible.append(visible)
        os.environ[_VISIBLE] = gpus[local]


def join() -> None:
    """Become one of the processes that torchrun, `accelerate launch` or `toolkit --processes` started, if they did.

    The environment says which, in torch's variables. Each sees the GPU of its local rank alone (`take_card`).

    Raises:
        ToolkitError: there are more processes on this machine than GPUs, or GPUs are named that CUDA does not find;
            they have not met within `MEETING`, or do not reach one another; MPI has started them, or accelerate was
            asked for what it would do to a model of its own.
    """
    _check_accelerate(os.environ)
    for name in _OF_MPI:
        if os.environ.pop(name, "1") != "1" and "WORLD_SIZE" not in os.environ:
            wrong = f"{name} says that MPI has started several processes, which would each do the whole run."
            raise ToolkitError(wrong, remedy="Start them with torchrun or --processes, or one alone.")
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    if launched() == 1:
        _take_from_environment()
        return
    take_card()
    if _visible:
        _check_card()
    store, rank, number = _meet()
    try:
        _name_interface(store, rank, number)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=REACHING)
    except RuntimeError as error:
        wrong = f"process {rank} of {number} does not reach another one: {' '.join(str(error).split())}."
        remedy = f"Set {_INTERFACE}, and NCCL_SOCKET_IFNAME for cards, to the network interface by which the machines "
        remedy += "reach each other (see `ip addr`), and let them accept each other's traffic on all ports."
        raise ToolkitError(wrong, remedy=remedy) from error
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    if _visible and dist.is_nccl_available():  # else gloo sums through the memory of the machine
        _cards.append(dist.new_group(backend="nccl", timeout=ON_CARDS))
    # transformers' arguments warn of a group that they did not make, at each of their calls.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.msg)
    _LAUNCHED.update(_take_from_environment())


def _check_card() -> None:
    """Nothing, if CUDA finds the card that this process has taken, and no other, else a ToolkitError."""
    if not torch.cuda.is_available():
        wrong = f"CUDA finds no GPU {os.environ[_VISIBLE]}"
        named = f" of {_VISIBLE}={_visible[0]}" if _visible[0] else ""
        remedy = f"Set {_VISIBLE} to GPUs that nvidia-smi lists, or to nothing for the CPU."
        raise ToolkitError(f"{wrong}{named}.", remedy=remedy)
    if torch._C._cuda_getDeviceCount() > 1:
        wrong = "CUDA was initialised before each process had its own GPU: all would take the first one."
        raise ToolkitError(wrong, remedy="Call toolkit.processes.join() before anything else is imported.")


def leave() -> None:
    """End what `join` began, where all has gone well: torch warns of a group of NCCL that is still there at the end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        _cards.clear()


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


def _name_interface(store: dist.Store, rank: int, number: int) -> None:
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
        os.environ.setdefault(_INTERFACE, of_interface[own])


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


def _take_from_environment() -> dict[str, str]:
    """What accelerate would divide by, in this process and in what it starts, which meets elsewhere."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return {name: os.environ.pop(name, "") for name in _LAUNCHED}


def _check_accelerate(environ: Mapping[str, str]) -> None:
    """Refuse what the settings of `accelerate launch` ask for in vain."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            wrong = f"accelerate is set to {name}, which shards a model's weights; here each process holds the whole "
            remedy = "Launch with --multi_gpu, or take a base that fits on one card."
            raise ToolkitError(f"{wrong}base, whose 4-bit weights cannot be sharded yet.", remedy=remedy)
    if "ACCELERATE_USE_CPU" in environ and "MASTER_PORT" in environ and "WORLD_SIZE" not in environ:
        wrong = "accelerate launch starts one process on a CPU, whatever number it is given."
        raise ToolkitError(wrong, remedy="Take torchrun, or --multi_gpu, which needs no GPU.")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def environment() -> dict[str, str]:
    """What the process that each of several starts is given, so that these join one another."""
    if count() == 1:
        return dict(os.environ)
    port = str(by_main(free_port))
    found = {**_LAUNCHED, _VISIBLE: _visible[0] or ""} if _visible else _LAUNCHED
    left = {name: value for name, value in os.environ.items() if name not in found}
    given = {"MASTER_PORT": port, _MEETS_IN: str(TOGETHER)}
    return left | {name: value for name, value in found.items() if value} | given


def count() -> int:
    """Processes of this run; 1 in what one does `alone`."""
    together = dist.is_available() and dist.is_initialized() and not _place.alone
    return dist.get_world_size() if together else 1


def count_here() -> int:
    """Those of them that are on this machine, as launchers say; all where none does."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(count(), int(number)) if number.isdecimal() and int(number) else count()


def rank() -> int:
    """Which of them this is, from 0, which is the main one: it alone writes files and speaks to the user."""
    return dist.get_rank() if count() > 1 else 0


def is_main() -> bool:
    return rank() == 0


def own(weights: Sequence[float]) -> list[int]:
    """The items that fall to this process, so that the sums of their weights are close: indices in ascending order.

    The heaviest first, each to the process with the least so far (Graham 1969, longest processing time first).
    """
    loads, mine = [0.0] * count(), []
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        least = min(range(len(loads)), key=loads.__getitem__)
        loads[least] += weights[i]
        if least == rank():
            mine.append(i)
    return sorted(mine)


def owner(item: int, of: int) -> int:
    """The process to which one of so many equal items falls that stand in order: each has a run of them."""
    return item * count() // of


def gather(value: T) -> list[T]:
    """The value of each process, in order of rank; it is copied through pickle, between processes of one run."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    with _connected():
        dist.all_gather_object(values, value)
    return values


def first(value: T | None) -> T | None:
    """The value of the first process that has one."""
    return next((one for one in gather(value) if one is not None), None)


@contextmanager
def _connected() -> Iterator[None]:
    """Inside is one exchange, which may be of several messages: Ctrl-C is met after the last of them, since who left
    between two would leave the others out of step. While it waits for a message a process does not meet it anyway."""
    held: list[int] = []
    is_met = threading.current_thread() is threading.main_thread()
    usual = signal.signal(signal.SIGINT, lambda number, frame: held.append(number)) if is_met else None
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())  # NCCL's is of several lines
        raise PeerError(f"the connection of process {rank()} of {count()} to another is broken: {why}") from error
    finally:
        if is_met:
            signal.signal(signal.SIGINT, usual)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def agreed(*, now: bool = True) -> Iterator[None]:
    """An error that one process raises inside is raised by all at the end, so that none waits for it for ever.

    Where not `now`, nobody waits for the others: they hear of an error in the `agreed` that they come to next.

    Raises:
        PeerError: another process has failed; its message, and which it was. Of several that raise one `ToolkitError`
            all but the first raise this, so that it is told once.
    """
    error: BaseException | None = None
    within = _place.agreed
    _place.agreed += 1
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _place.agreed = within
        heard = error if isinstance(error, PeerError) else None
        # Of a broken connection nobody could be told; and those who have failed further out wait there no more.
        over = heard is not None and (not heard.of or within >= heard.met)
        if count() > 1 and (now or error is not None) and not over:
            told = None if error is None else (type(error).__name__, str(error))
            places, of_all = zip(*gather((within, told)), strict=True)
            met = min(places)
            failed = [i for i, one in enumerate(of_all) if one is not None]
            # Whoever failed says it last, perhaps in other words than where the others heard of it.
            names = [one[0] for one in of_all if one is not None]
            of = next((name for name in names if name != PeerError.__name__), "" if heard is None else heard.of)
            if heard is not None:
                heard.of, heard.met = of, met
            mendable = isinstance(error, ToolkitError) and not isinstance(error, RunInterrupted | PeerError)
            if failed and (error is None or (mendable and failed[0] < rank() and of_all[failed[0]] == told)):
                name, text = of_all[failed[0]] or ("", "")
                peer = PeerError(f"process {failed[0]} of {count()}: {name}: {text}")
                peer.of, peer.met = of or name, met
                raise peer from error


def by_main(call: Callable[[], T]) -> T:
    """What the main process gets by a call that it alone makes; an error of it is raised by all."""
    result: list[Any] = [None]
    with agreed():
        if is_main():
            result[0] = call()
    if count() > 1:
        with _connected():
            dist.broadcast_object_list(result, src=0)
    return result[0]


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process does by itself what all would divide: the others are elsewhere, and would not answer."""
    _place.alone += 1
    try:
        yield
    finally:
        _place.alone -= 1


def sum_(tensors: Iterable[Tensor]) -> None:
    """Add up each tensor over the processes, in place and in one message for each dtype; they are on one device."""
    if count() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        with agreed():  # before anybody waits: the copy may not fit on one of the cards
            flat = torch.cat([tensor.flatten() for tensor in same])
        with _connected():
            dist.all_reduce(flat, group=_cards[0] if flat.is_cuda and _cards else None)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
