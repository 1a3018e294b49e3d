"""The hub of models and data sets: whether it can be asked. Where it cannot, its libraries try for minutes."""

import errno
import queue
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from datasets import config as datasets_config
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from toolkit import phases
from toolkit.disk import is_full
from toolkit.errors import ToolkitError

SECONDS = 5.0
"""For a name to be resolved and for a connection to one of its addresses, together."""
_KEPT_SHUT = (errno.EACCES, errno.EPERM, errno.EROFS)
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
            wrong = f"{shown!r} is not an address at which the hub (or its proxy) can be reached."
            raise ToolkitError(wrong, remedy="Correct HF_ENDPOINT, or your proxy variable.")
        _silent[host, port] = not _answers(host, port)
        if _silent[host, port]:
            constants.HF_HUB_OFFLINE = datasets_config.HF_HUB_OFFLINE = True
            phases.tell(f"{host} does not answer: models and data by hub id come from the local cache alone.")
    return host if _silent[host, port] else ""


def is_offline(*, of_data: bool = False) -> bool:
    """Whether the environment, or a silent hub, keeps the libraries from asking. datasets has a variable of its own,
    HF_DATASETS_OFFLINE."""
    return constants.HF_HUB_OFFLINE or (of_data and datasets_config.HF_HUB_OFFLINE)


def way_to(name: str, error: BaseException, *, otherwise: str, of_data: bool = False) -> str:
    """What to do for a model or data set that the hub does not give to everybody, that is not whole in its cache, or
    for which there is no room."""
    causes = causes_of(error)  # which datasets cuts off, of what it says itself
    if any(isinstance(cause, GatedRepoError) or "is a gated" in str(cause) for cause in causes):
        return f"Ask for access at {constants.ENDPOINT}/{'datasets/' * of_data}{name}, then log in: hf auth login."
    if any(isinstance(cause, RepositoryNotFoundError) or "cannot be accessed" in str(cause) for cause in causes):
        return f"{otherwise if of_data else 'Check the name.'} If it is a private one, log in: hf auth login."
    if remedy := way_to_cache(error):
        return remedy
    if is_offline(of_data=of_data):
        command = f"hf download {'--repo-type dataset ' * of_data}{name}"
        return f"{otherwise} Offline mode: with a network, {command} gets what the cache lacks."
    return otherwise


def way_to_cache(error: BaseException) -> str:
    """What to do where the cache has no room, or may not be written and read; "" where it is nothing of that."""
    causes = causes_of(error)
    if any(is_full(cause) for cause in causes):
        return f"Make room for the hub's cache ({constants.HF_HOME}), or set HF_HOME to a folder elsewhere."
    if any(getattr(cause, "errno", None) in _KEPT_SHUT and getattr(cause, "filename", None) for cause in causes):
        return f"Let the hub's cache ({constants.HF_HOME}) be written and read, or set HF_HOME to a folder elsewhere."
    return ""


def causes_of(error: BaseException) -> list[BaseException]:
    """An error, and what it came from, one after the other."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return causes


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
