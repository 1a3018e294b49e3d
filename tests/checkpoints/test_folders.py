"""A process can be killed between any two instructions of a write; what is read afterwards is always whole."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from toolkit import disk
from toolkit.checkpoints import checkpoint_folders, folders, newest_whole, problem_of, rotate, whole_folder
from toolkit.checkpoints.folders import MANIFEST
from toolkit.errors import CheckpointError


def write(output: Path, step: int, text: str) -> Path:
    folder = output / f"checkpoint-{step}"
    with whole_folder(folder) as aside:
        (aside / "policy").mkdir()
        (aside / "policy" / "weights").write_text(text)
        (aside / "state").write_text(text * 2)
    return folder


def silent(sentence: str) -> None:
    raise AssertionError(sentence)


def test_a_checkpoint_appears_at_once_and_whole(tmp_path):
    folder = tmp_path / "checkpoint-3"
    with whole_folder(folder) as aside:
        (aside / "state").write_text("x")
        assert not folder.exists()
    assert {p.name for p in folder.iterdir()} == {"state", MANIFEST}
    assert problem_of(folder) is None and [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_what_a_manifest_lists_is_on_the_disk_before_it(tmp_path, monkeypatch):
    """Else a power cut could leave a sealed checkpoint whose files are empty."""
    done, sync, replace = [], disk.sync, Path.replace
    monkeypatch.setattr(disk, "sync", lambda path: done.append(path) or sync(path))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append(to) or replace(path, to))
    aside = write(tmp_path, 1, "x").with_name("checkpoint-1.partial")
    before = done[: done.index(aside / MANIFEST)]
    assert {aside, aside / "state", aside / "policy", aside / "policy" / "weights"} <= set(before)


def test_what_fails_leaves_the_earlier_ones(tmp_path):
    old = write(tmp_path, 1, "old")
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "checkpoint-1") as aside:
        (aside / "state").write_text("new")
        1 / 0  # noqa: B018
    assert problem_of(old) is None and (old / "state").read_text() == "oldold"
    of_python, of_tokenizers = (
        OSError(errno.ENOSPC, "No space left"),
        Exception("No space left on device (os error 28)"),
    )
    for error in (of_python, SafetensorError("No space left on device"), of_tokenizers):
        with pytest.raises(CheckpointError, match="cannot be written.*No space left.*Earlier ones are untouched"):  # noqa: SIM117
            with whole_folder(tmp_path / "checkpoint-2") as aside:
                (aside / "state").write_text("half of it")
                raise error
        assert not (tmp_path / "checkpoint-2.partial").exists()  # room again
    assert newest_whole(tmp_path, say=silent) == old


def test_those_of_another_course_stay_where_no_new_one_can_be_written(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        write(tmp_path, step, "old")

    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    def go_on():
        with whole_folder(tmp_path / "checkpoint-2", goes_on_from=1) as aside:
            (aside / "state").write_text("new")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "seal", full)
        with pytest.raises(CheckpointError, match="Earlier ones are untouched"):
            go_on()
    assert len(checkpoint_folders(tmp_path)) == 3
    go_on()
    names = ["abandoned-checkpoint-2", "abandoned-checkpoint-3", "checkpoint-1", "checkpoint-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "abandoned-checkpoint-2" / "state").read_text() == "oldold"


class Killed(BaseException):
    """What no handler catches, as SIGKILL."""


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_at_any_point_of_a_write_loses_nothing(tmp_path, monkeypatch, step):
    """The write is cut before each of its effects in turn; step 1 replaces the only other checkpoint."""
    effects = [(folders, "sync"), (disk, "sync"), (Path, "replace"), (Path, "rename"), (Path, "write_text"),
               (Path, "mkdir"), (Path, "unlink"), (os, "rmdir"), (shutil, "rmtree")]  # fmt: skip
    cut, seen = 0, set()
    while True:
        output = tmp_path / f"{step}-{cut}"
        write(output, 1, "old")
        left = cut
        with monkeypatch.context() as patch:
            for owner, name in effects:
                original = getattr(owner, name)

                def counted(*arguments, original=original, **named):
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return original(*arguments, **named)

                patch.setattr(owner, name, counted)
            try:
                write(output, step, "new")
                finished = True
            except Killed:
                finished = False
        said: list[str] = []
        found = newest_whole(output, say=said.append)
        assert found is not None and problem_of(found) is None, cut
        text = (found / "policy" / "weights").read_text()
        assert (text == "old" and found.name == "checkpoint-1") or (
            text == "new" and found.name == f"checkpoint-{step}"
        )
        assert not list(output.glob("*.partial"))
        seen.add(text)
        if finished:
            assert text == "new"
            break
        cut += 1
    assert cut > 10 and seen == {"old", "new"}


def test_damage_is_recognised_and_said(tmp_path):
    write(tmp_path, 1, "good")
    damages = {
        2: (lambda f: (f / MANIFEST).unlink(), "it has no manifest.json, so it was never finished"),
        3: (lambda f: (f / "state").unlink(), "state is missing"),
        4: (lambda f: (f / "state").write_text("x"), "state has 1 bytes, and had 8"),
        5: (lambda f: (f / "policy" / "weights").write_text("goof"), "policy/weights is damaged: its SHA-256"),
        6: (lambda f: (f / MANIFEST).write_text("{"), "its manifest.json cannot be read"),
        7: (lambda f: (f / MANIFEST).write_text("[]"), "its manifest.json cannot be read"),
    }
    for step, (damage, _) in damages.items():
        damage(write(tmp_path, step, "good"))
    said: list[str] = []
    assert newest_whole(tmp_path, say=said.append) == tmp_path / "checkpoint-1"
    for sentence, (step, (_, problem)) in zip(said, sorted(damages.items(), reverse=True), strict=True):
        assert f"checkpoint-{step} is skipped: {problem}" in sentence
    assert newest_whole(tmp_path / "nowhere", say=silent) is None


def test_folders_are_ordered_by_step_and_others_left_alone(tmp_path):
    for step in (2, 10, 9):
        write(tmp_path, step, "x")
    for name in ("best", "²", "٣", "-5", "1_0", " 4"):  # of which int() takes some, and str.isdigit() others
        (tmp_path / f"checkpoint-{name}").mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]


def test_a_folder_that_is_deleted_while_it_is_read_has_none(tmp_path, monkeypatch):
    """As the stage's folder of a run is that begins while another command looks at it."""
    reading = os.scandir

    def deleted_first(path):
        (tmp_path / "sft").rename(tmp_path / "gone")
        return reading(path)

    write(tmp_path / "sft", 1, "x")
    monkeypatch.setattr(os, "scandir", deleted_first)
    assert checkpoint_folders(tmp_path / "sft") == [] and not (tmp_path / "sft").exists()


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [5], [1, 2, 3, 4, 5]),
        (0, [5], [1, 2, 3, 4, 5]),
        (2, [5], [4, 5]),
        (1, [5, 2], [2, 5]),
        (1, [3], [3, 5]),
        (2, [5, 1], [1, 5]),
    ],
)
def test_rotation(tmp_path, limit, keep, left):
    for step in range(1, 6):
        write(tmp_path, step, "x")
    rotate(tmp_path, limit, keep={tmp_path / f"checkpoint-{step}" for step in keep})
    assert [p.name for p in checkpoint_folders(tmp_path)] == [f"checkpoint-{step}" for step in left]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch):
    for step in (1, 2):
        write(tmp_path, step, "x")

    def busy(folder):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(folders, "delete_written", busy)
    rotate(tmp_path, 1, keep=[tmp_path / "checkpoint-2"])
    assert len(checkpoint_folders(tmp_path)) == 2


@pytest.mark.parametrize("how", ["rotated", "written anew"])
def test_what_a_user_keeps_in_a_checkpoint_stays(how, tmp_path):
    """Files by any name, and links, wherever in the folder; what the manifest lists goes."""
    folder = write(tmp_path, 1, "old")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("elsewhere")
    (folder / "mine").mkdir()
    for name in ("notes.md", "policy/my.safetensors", "mine/state.json"):
        (folder / name).write_text("mine")
    (folder / "mine" / "link").symlink_to(elsewhere)
    if how == "rotated":
        write(tmp_path, 2, "new")
        rotate(tmp_path, 1, keep=[tmp_path / "checkpoint-2"])
        assert not (folder / "state").exists() and not (folder / MANIFEST).exists()
        assert newest_whole(tmp_path, say=silent) == tmp_path / "checkpoint-2"
    else:
        write(tmp_path, 1, "new")
        assert problem_of(folder) is None and (folder / "state").read_text() == "newnew"
    for name in ("notes.md", "policy/my.safetensors", "mine/state.json"):
        assert (folder / name).read_text() == "mine"
    assert (folder / "mine" / "link").read_text() == elsewhere.read_text() == "elsewhere"


def test_a_manifest_that_lists_files_elsewhere_deletes_none(tmp_path):
    folder, mine = write(tmp_path, 1, "old"), tmp_path / "mine"
    mine.write_text("mine")
    listed = json.loads((folder / MANIFEST).read_text())
    listed["files"] |= {name: {"bytes": 4, "sha256": ""} for name in ("../mine", str(mine))}
    (folder / MANIFEST).write_text(json.dumps(listed))
    write(tmp_path, 2, "new")
    rotate(tmp_path, 1, keep=[tmp_path / "checkpoint-2"])
    assert mine.read_text() == "mine" and not folder.exists()


def test_a_checkpoint_that_is_a_link_stays_whole_where_it_is(tmp_path):
    """As one that was moved to another disk."""
    moved = write(tmp_path, 1, "old").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to(moved)
    write(tmp_path, 2, "new")
    rotate(tmp_path, 1, keep=[tmp_path / "checkpoint-2"])
    assert problem_of(moved) is None and problem_of(tmp_path / "checkpoint-1") is None


@pytest.mark.parametrize("there", [False, True])
def test_a_link_gives_way_to_the_checkpoint_of_its_step(there, tmp_path):
    if there:
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / "notes.md").write_text("mine")
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "disk")
    folder = write(tmp_path, 2, "new")
    assert newest_whole(tmp_path, say=silent) == folder and not folder.is_symlink()
    assert not there or [path.name for path in (tmp_path / "disk").iterdir()] == ["notes.md"]


def test_a_damaged_checkpoint_is_not_deleted(tmp_path):
    (write(tmp_path, 1, "old") / MANIFEST).write_text("{")
    write(tmp_path, 2, "new")
    rotate(tmp_path, 1, keep=[tmp_path / "checkpoint-2"])
    assert (tmp_path / "checkpoint-1" / "state").read_text() == "oldold"


def test_what_is_sealed_stays_where_it_cannot_get_its_name(tmp_path, monkeypatch):
    """By then the one that it replaces is gone."""
    write(tmp_path, 1, "old")

    def refused(path, to):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="cannot be written"):
        patch.setattr(Path, "rename", refused)
        write(tmp_path, 1, "new")
    found = newest_whole(tmp_path, say=silent)
    assert found == tmp_path / "checkpoint-1" and (found / "state").read_text() == "newnew"
