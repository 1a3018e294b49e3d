from types import SimpleNamespace

import psutil
import pytest

import toolkit.memory
from toolkit.memory import Memory, memory

GB = 10**9
NONE = 9223372036854771712  # what version 1 says where nothing is set


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A machine of 64 GB with 60 free, whose control groups are files in a folder, and what says which is its own."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=60 * GB))
    monkeypatch.setattr(toolkit.memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(toolkit.memory, "_OWN", tmp_path / "own")

    def write(folder, limit, taken, stat, *, first=False):
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        for name, value in zip((*names, "memory.stat"), (limit, taken, stat), strict=True):
            (folder / name).write_text(f"{value}\n")

    def own(*lines):
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))

    return SimpleNamespace(root=tmp_path, write=write, own=own)


def test_where_nothing_is_limited_it_is_the_machine_s(groups):
    machine = Memory(64 * GB, 60 * GB)
    assert memory() == machine  # no control groups: another system than Linux
    groups.own("0::/user.slice")
    assert memory() == machine  # the first group of a machine has no such files
    groups.write(groups.root / "user.slice", "max", 3 * GB, "anon 1")
    assert memory() == machine
    groups.own("5:devices:/", "4:memory:/job")
    groups.write(groups.root / "memory" / "job", NONE, 3 * GB, "cache 1", first=True)
    assert memory() == machine


def test_a_limit_of_version_2_counts_what_was_read_from_files_as_free(groups):
    groups.own("0::/")  # what a container sees of its path
    groups.write(groups.root, 16 * GB, 9 * GB, f"anon {4 * GB}\nfile {5 * GB}\ninactive_file {2 * GB}")
    assert memory() == Memory(16 * GB, 9 * GB)


def test_the_least_of_a_group_and_those_around_it_is_the_limit(groups):
    groups.own("0::/slurm/job/step")
    groups.write(groups.root / "slurm" / "job", 8 * GB, 7 * GB, "inactive_file 0")
    groups.write(groups.root / "slurm" / "job" / "step", 20 * GB, 1 * GB, "inactive_file 0")
    assert memory() == Memory(8 * GB, 1 * GB)
    groups.write(groups.root / "slurm" / "job", 8 * GB, 9 * GB, "inactive_file 0")  # set lower than what it had taken
    assert memory().available == 0


def test_a_container_of_version_1_sees_its_files_at_the_root(groups):
    groups.own("11:cpu,cpuacct:/docker/0a1b", "4:memory:/docker/0a1b", "0::/docker/0a1b")
    stat = f"inactive_file {GB}\ntotal_inactive_file {3 * GB}"
    groups.write(groups.root / "memory", 12 * GB, 5 * GB, stat, first=True)
    assert memory() == Memory(12 * GB, 10 * GB)


def test_a_limit_beyond_what_the_machine_has_changes_nothing(groups):
    groups.own("0::/")
    groups.write(groups.root, 128 * GB, 1 * GB, "inactive_file 0")
    assert memory() == Memory(64 * GB, 60 * GB)
