import errno
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests import FSYNC
from toolkit import disk
from toolkit.disk import (
    as_the_umask_says,
    check_file,
    copy_contents,
    is_full,
    takes_no_more,
    unfinished_in,
    write_output,
    write_whole,
    writing,
)
from toolkit.errors import ToolkitError


@pytest.fixture(autouse=True)
def disk_that_is_waited_for(monkeypatch):
    monkeypatch.setattr(os, "fsync", FSYNC)


def test_what_is_written_whole_touches_no_file_beside_it(tmp_path):
    (tmp_path / "page.html.partial").write_text("mine")
    assert write_whole(tmp_path / "page.html", "é\n") == tmp_path / "page.html"
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        "page.html.partial": "mine",
        "page.html": "é\n",
    }
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "page.html").stat().st_mode == plain.stat().st_mode  # others may read it as any new file


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(error, tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("old")

    def fails(path):
        raise error

    monkeypatch.setattr(disk, "sync", fails)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "page.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"


@pytest.mark.parametrize("step", ["open", "replace"])
def test_a_user_s_file_that_nothing_may_stand_beside_or_replace_is_written_in_place(step, tmp_path, monkeypatch):
    file, plain, number = tmp_path / "page.html", getattr(Path, step), errno.EACCES

    def refuses(path, *arguments, **named):
        if path.name.endswith(".partial"):
            raise OSError(number, os.strerror(number))
        return plain(path, *arguments, **named)

    monkeypatch.setattr(Path, step, refuses)
    with pytest.raises(ToolkitError, match="page.html: cannot be written"):
        write_output(file, "new")
    file.write_text("old")
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(file, "new")  # a file of a run, which is never half of one
    assert file.read_text() == "old"
    write_output(file, "é\n")
    assert file.read_text(encoding="utf-8") == "é\n" and list(tmp_path.iterdir()) == [file]
    number = errno.ENOSPC
    with pytest.raises(ToolkitError, match="page.html: cannot be written"):
        write_output(file, "new")
    assert file.read_text(encoding="utf-8") == "é\n"


@pytest.mark.parametrize(
    ("error", "full", "no_more"),
    [
        (OSError(errno.ENOSPC, "x"), True, True),
        (OSError(errno.EDQUOT, "x"), True, True),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), True, True),
        (Exception("No space left on device (os error 28)"), True, True),
        (OSError(errno.EIO, "x"), False, True),
        (OSError(errno.EROFS, "x"), False, True),
        (OSError(errno.EACCES, "x"), False, False),
        (ValueError("x"), False, False),
        (None, False, False),
    ],
)
def test_a_disk_that_is_full_or_takes_no_more(error, full, no_more):
    assert (is_full(error), takes_no_more(error)) == (full, no_more)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_tokenizer_that_a_disk_refuses_is_an_error_of_the_disk():
    with pytest.raises(ToolkitError, match=r"^here: cannot be written \(No space left on device"), writing("here"):
        Tokenizer(BPE()).save("/dev/full")
    with pytest.raises(Exception, match="^anything else$"), writing("here"):
        raise Exception("anything else")


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_user_s_file_stays_as_private_or_as_shared_as_it_was(mode, tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text("old")
    file.chmod(mode)
    write_output(file, "new")
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_kill_leaves_of_a_write_is_known(tmp_path, monkeypatch):
    (tmp_path / ".toolkit-notes.partial").write_text("mine")
    monkeypatch.setattr(disk, "sync", lambda path: os._exit(0))
    if (child := os.fork()) == 0:
        write_whole(tmp_path / "page.html", "new")
    os.waitpid(child, 0)
    (left,) = unfinished_in(tmp_path)
    assert left.read_text() == "new" and left.name != ".toolkit-notes.partial"


def test_a_file_system_that_syncs_no_folder_is_written_to(tmp_path, monkeypatch):
    plain, refused = os.fsync, [stat.S_ISDIR]

    def some(handle):
        if any(of(os.fstat(handle).st_mode) for of in refused):
            raise OSError(errno.EINVAL, "Invalid argument")
        plain(handle)

    monkeypatch.setattr("os.fsync", some)
    assert disk.write_whole(tmp_path / "file", "text").read_text() == "text"
    refused.append(stat.S_ISREG)
    with pytest.raises(OSError, match="Invalid argument"):
        disk.write_whole(tmp_path / "other", "text")


def test_a_link_that_leads_nowhere_yet_is_written_through(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    try:
        link.symlink_to(target)
    except OSError:
        pytest.skip("no links can be made here")
    check_file(link)
    assert link.is_symlink() and not target.exists()
    target.write_text("kept")
    check_file(link)
    assert target.read_text() == "kept"


def test_what_was_made_for_its_owner_alone_is_as_a_new_file(tmp_path):
    """As safetensors makes its files; what has another mode has been given it."""
    made, given = tmp_path / "made", tmp_path / "given"
    for path, mode in ((made, 0o600), (given, 0o640)):
        path.touch()
        path.chmod(mode)
    before = os.umask(0o027)
    try:
        as_the_umask_says([made, given])
        assert os.umask(0o027) == 0o027  # as it was
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, given)] == [0o640, 0o640]


def test_what_a_stage_lists_as_its_own_is_as_a_new_file(tmp_path):
    for name in ("made", "new"):
        (tmp_path / name).touch()
    (tmp_path / "made").chmod(0o600)
    disk.seal(tmp_path, [tmp_path / "made"])
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_copy_of_what_is_kept_from_writing_can_be_written(tmp_path):
    (folder := tmp_path / "run" / "within").mkdir(parents=True)
    (folder / "file").write_text("x")
    (tmp_path / "run" / "left").touch()
    for path in (folder / "file", folder, folder.parent):
        path.chmod(0o555)
    try:
        copy_contents(tmp_path / "run", tmp_path / "copy", leaving=lambda path: path.name == "left")
    finally:
        for path in (folder.parent, folder):
            path.chmod(0o755)
    assert [path.name for path in (tmp_path / "copy").rglob("*")] == ["within", "file"]
    copy_contents(tmp_path / "copy", tmp_path / "copy" / "own")  # a copy within what is copied ends
    assert sorted(path.name for path in (tmp_path / "copy" / "own").iterdir()) == ["within"]
    for path in (tmp_path / "copy").rglob("*"):
        assert path.stat().st_mode & stat.S_IWUSR


def test_what_a_kill_has_left_of_weights_is_no_file_of_a_copy(tmp_path):
    source = tmp_path / "policy"
    source.mkdir()
    for name in ("adapter_model.safetensors", ".tmpAb3xYz", ".tmpfile", "notes.tmp"):
        (source / name).write_text("x")
    copy_contents(source, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        ".tmpfile", "adapter_model.safetensors", "notes.tmp",
    ]  # fmt: skip
