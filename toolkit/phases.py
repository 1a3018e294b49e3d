"""What a run is doing now, by name, told to those who show it: no part of a run is silent."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from toolkit import processes
from toolkit.errors import printable


class Watcher(Protocol):
    """Shows somebody what a run does."""

    def begun(self, phase: str, total: int | None) -> None:
        """A phase has begun, which has so many parts."""

    def ended(self) -> None:
        """The phase has ended."""

    def told(self, sentence: str) -> None:
        """What a person should know now. May be called from the handler of a signal."""


_watchers: list[Watcher] = []
_running = False


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Inside, a watcher is told."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def phase(name: str, total: int | None = None) -> Iterator[None]:
    """Inside, this is what the run does; a phase inside another is a part of that one, and not told."""
    global _running
    if _running:
        yield
        return
    watchers, _running = list(_watchers), True
    try:
        for watcher in watchers:
            watcher.begun(name, total)
        yield
    finally:
        _running = False
        for watcher in watchers:
            watcher.ended()


def tell(sentence: str) -> None:
    """Let a person know something at once, by Python's logging where nobody watches; from the main process alone."""
    if not processes.is_main():
        return
    for watcher in _watchers:
        watcher.told(sentence)
    if not _watchers:
        logging.getLogger("toolkit").warning(printable(sentence))
