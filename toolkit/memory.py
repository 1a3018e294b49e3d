"""Memory beside a CPU that this process may take: containers and job schedulers may allow less than the machine has."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_OWN = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# By the controllers that a line of the first names: where its groups lie, and their files of the limit, of what is
# taken, and of what is in that, with the entry of what was read from files and can be dropped.
_VERSIONS = {
    "": (".", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Memory:
    """In bytes: all that there is, and what is free of it."""

    total: int
    available: int


def memory() -> Memory:
    """Of the machine, as psutil says, or of this process's control group on Linux, where one has less.

    psutil says of a container what its machine has (giampaolo/psutil#2100).
    """
    machine = psutil.virtual_memory()
    limits = [*_limits()]
    total = min([machine.total, *(limit for limit, _ in limits)])
    return Memory(total, min([machine.available, *(free for _, free in limits)]))


def _limits() -> Iterator[tuple[int, int]]:
    """Of each control group that this process is in and that has a limit: the limit and what is free of it."""
    lines: list[str] = []
    with suppress(OSError):  # no Linux
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in _VERSIONS:
            continue
        place, limit_file, taken_file, dropped = _VERSIONS[controllers]
        root = _GROUPS / place
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a container sees the end of its path alone; "max" is no limit
                limit = int((folder / limit_file).read_text(encoding="utf-8"))
                taken = int((folder / taken_file).read_text(encoding="utf-8"))
                counts = dict(entry.split() for entry in (folder / "memory.stat").read_text("utf-8").splitlines())
                yield limit, max(limit - taken + int(counts.get(dropped, 0)), 0)
            if folder == root:
                break
