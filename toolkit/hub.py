"""The hub of models and data sets: whether it can be asked. Where it cannot, its libraries try for minutes."""

import queue
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from datasets import config as datasets_config
from huggingface_hub import constants

from toolkit import phases
from toolkit.errors import ToolkitError

SECONDS = 5.0
"""For a name to be resolved and for a connection to one of its addresses, together."""
_silent: dict[tuple[str, int], bool] = {}


def silent_host() -> str:
    """The host of the hub, or of the proxy before it, if it does not answer; "" if it does, or is not to be asked.

    The libraries are then offline for as long as the process lives: what is in their cache they give at once.

    Raises: ToolkitError: the hub has no address.
    """
    asked = constants.ENDPOINT
    try:
        asked = _proxy_before(asked) or asked
        parts = urlsplit(asked)
        host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        host, port = "", 0
    if (host, port) not in _silent:
        if constants.HF_HUB_OFFLINE:
            return ""
        if not host:
            shown = f"…{asked[asked.rindex('@') :]}" if "@" in asked else asked  # before it may stand a password
            wrong = f"{shown!r} is no address, by which the hub could be asked for models and data."
            raise ToolkitError(wrong, remedy="Mend HF_ENDPOINT, or the variable of the proxy.")
        _silent[host, port] = not _answers(host, port)
        if _silent[host, port]:
            constants.HF_HUB_OFFLINE = datasets_config.HF_HUB_OFFLINE = True
            phases.tell(f"{host} does not answer: of models and data by hub id, those in its cache are taken.")
    return host if _silent[host, port] else ""


def _proxy_before(url: str) -> str:
    """The proxy by which an address is asked, as the environment has it; "" where there is none."""
    parts, proxies = urlsplit(url), getproxies()
    if proxy_bypass(parts.hostname or ""):
        return ""
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _answers(host: str, port: int) -> bool:
    """Whether one of a server's addresses can be connected to in time: one that is dropped holds up no other."""
    first: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def connect(address: tuple[str, int]) -> None:
        with suppress(OSError), socket.create_connection(address, timeout=SECONDS):
            first.put(True)

    def resolve() -> None:  # for which there is no limit of time
        addresses: list[tuple[str, int]] = []
        with suppress(OSError):
            addresses = [(str(entry[4][0]), port) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        tries = [threading.Thread(target=connect, args=(address,), daemon=True) for address in addresses]
        for one in tries:
            one.start()
        for one in tries:
            one.join()
        first.put(False)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        return first.get(timeout=SECONDS)
    except queue.Empty:
        return False
