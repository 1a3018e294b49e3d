"""Where the processes of several machines reach one another."""

import ipaddress
import os
import socket
from contextlib import suppress

import psutil
from torch import distributed as dist

INTERFACE = "GLOO_SOCKET_IFNAME"


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
