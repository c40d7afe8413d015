"""A new file is whole or not there, whatever stood under its name."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import MachineError, WriteError


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def fail(target, error, *, keep=False):
    with atomic_write(target, keep=keep) as part:
        part.write_text("half")
        raise error


def test_what_is_written_takes_the_name_at_the_end(tmp_path):
    target = tmp_path / "a.json"
    with atomic_write(target) as part:
        part.write_text("new")
        assert part.suffix == ".json" and part.parent == tmp_path and not target.exists()
    assert (names(tmp_path), target.read_text()) == (["a.json"], "new")


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    for error in (KeyboardInterrupt, ValueError, OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises((KeyboardInterrupt, ValueError, WriteError)):
            fail(target, error)
        assert (names(tmp_path), target.read_text()) == (["a.json"], "old")


def test_the_error_names_the_file_the_cause_and_the_remedy(tmp_path):
    with pytest.raises(WriteError) as caught:
        fail(tmp_path / "a.json", OSError(errno.ENOSPC, "No space left on device"))
    message = str(caught.value)
    for words in (
        str(tmp_path / "a.json"),
        "No space left on device",
        "4 bytes",
        "nothing is left",
        "free space there",
    ):
        assert words in message
    assert isinstance(caught.value, MachineError) and isinstance(caught.value, OSError)


def test_errors_of_other_files_pass_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_write(tmp_path / "a"):
        (tmp_path / "elsewhere").read_text()
    with (
        pytest.raises(WriteError, match=r"inner could not"),
        atomic_write(tmp_path / "outer"),
        atomic_write(tmp_path / "inner"),
    ):
        raise OSError(errno.EIO, "Input/output error")
    assert names(tmp_path) == []


def test_links_modes_devices_and_folders(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_write(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    with atomic_write(os.devnull) as part:
        part.write_text("gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    (tmp_path / "full").symlink_to("/dev/full")  # a disk that is full: the device, not the link, takes the bytes
    with pytest.raises(WriteError, match="No space left on device"), atomic_write(tmp_path / "full") as part:
        part.write_text("x" * 100_000)
    assert (tmp_path / "full").is_symlink() and stat.S_ISCHR(os.stat("/dev/full").st_mode)
    with pytest.raises(WriteError, match="is a folder"), atomic_write(tmp_path):
        pass
    with pytest.raises(WriteError, match="make the folder"), atomic_write(tmp_path / "no" / "a"):
        pass


@pytest.fixture
def unprivileged():
    """A folder of a user to whom modes apply: root changes its user for the test."""
    with tempfile.TemporaryDirectory() as folder:
        was = os.geteuid()
        if was == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.chmod(folder, 0o700)
            os.seteuid(was)


def refuse_renames(monkeypatch, code=errno.EBUSY):
    def refused(source, target):
        raise OSError(code, os.strerror(code), os.fspath(source), None, os.fspath(target))

    monkeypatch.setattr(os, "replace", refused)


def test_a_file_that_cannot_be_replaced_is_filled(tmp_path, monkeypatch):
    refuse_renames(monkeypatch)  # as for a file that is a mount of its own
    target = tmp_path / "a.json"
    target.write_text("old and longer")
    with atomic_write(target) as part:
        part.write_text("new")
    assert (names(tmp_path), target.read_text()) == (["a.json"], "new")


def test_a_file_that_cannot_be_renamed_stays_and_is_named(tmp_path, monkeypatch):
    refuse_renames(monkeypatch, errno.EACCES)
    with pytest.raises(WriteError) as caught, atomic_write(tmp_path / "a.json") as part:
        part.write_text("new")
    assert f"kept in {part}; move that to its place" in str(caught.value) and "Permission denied" in str(caught.value)
    assert part.read_text() == "new" and not (tmp_path / "a.json").exists()


def test_a_folder_that_takes_no_file_and_a_file_that_takes_no_bytes(unprivileged):
    target = unprivileged / "a.json"
    target.write_text("old")
    unprivileged.chmod(0o500)
    with atomic_write(target) as part:
        part.write_text("new")
    assert target.read_text() == "new"
    with pytest.raises(WriteError, match="make the folder writable"), atomic_write(unprivileged / "b"):
        pass
    unprivileged.chmod(0o700)
    target.chmod(0o444)
    with pytest.raises(WriteError, match="make the file writable"), atomic_write(target):
        raise AssertionError("lent, though it cannot be written")
    assert target.read_text() == "new" and names(unprivileged) == ["a.json"]


def test_a_secret_is_secret_while_it_is_written(tmp_path):
    target = tmp_path / "a.json"
    target.touch(mode=0o600)
    with atomic_write(target) as part:
        assert stat.S_IMODE(part.stat().st_mode) == 0o600


def test_the_suffix_is_that_of_the_given_name(tmp_path):
    (tmp_path / "real.png").touch()
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.png")
    with atomic_write(tmp_path / "link.svg") as part:
        assert part.suffix == ".svg"


def test_a_file_as_a_folder_and_errors_of_others(tmp_path):
    (tmp_path / "x.txt").touch()
    with pytest.raises(WriteError, match="its folder is a file"), atomic_write(tmp_path / "x.txt" / "y.json"):
        pass
    with pytest.raises(TimeoutError), atomic_write(tmp_path / "a"):
        raise TimeoutError(errno.ETIMEDOUT, "a server did not answer")


def test_kept_on_request(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "a", KeyboardInterrupt, keep=True)
    (part,) = tmp_path.iterdir()
    assert part.read_text() == "half" and part.name != "a"
