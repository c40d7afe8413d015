"""A new file is whole or not there, whatever stood under its name."""

import errno
import os
import stat

import pytest

from routed_experts.core.errors import MachineError, WriteError
from routed_experts.core.new_file import new_file


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def fail(target, error):
    with new_file(target) as part:
        part.write_text("half")
        raise error


def test_what_is_written_takes_the_name_at_the_end(tmp_path):
    target = tmp_path / "a.json"
    with new_file(target) as part:
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


def test_the_error_says_what_and_where_and_what_to_do(tmp_path):
    with pytest.raises(WriteError) as caught:
        fail(tmp_path / "a.json", OSError(errno.ENOSPC, "No space left on device"))
    told = str(caught.value)
    for words in (str(tmp_path / "a.json"), "No space left on device", "4 bytes", "nothing is left", "free space there"):
        assert words in told
    assert isinstance(caught.value, MachineError) and isinstance(caught.value, OSError)


def test_errors_of_other_files_pass_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), new_file(tmp_path / "a"):
        (tmp_path / "elsewhere").read_text()
    with pytest.raises(WriteError, match=r"inner could not"), new_file(tmp_path / "outer"), new_file(tmp_path / "inner"):
        raise OSError(errno.EIO, "Input/output error")
    assert names(tmp_path) == []


def test_links_modes_devices_and_folders(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_file(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    with new_file(os.devnull) as part:
        part.write_text("gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    (tmp_path / "full").symlink_to("/dev/full")  # a disk that is full: the device, not the link, takes the bytes
    with pytest.raises(WriteError, match="No space left on device"), new_file(tmp_path / "full") as part:
        part.write_text("x" * 100_000)
    assert (tmp_path / "full").is_symlink() and stat.S_ISCHR(os.stat("/dev/full").st_mode)
    with pytest.raises(WriteError, match="is a folder"), new_file(tmp_path):
        pass
    with pytest.raises(WriteError, match="make the folder"), new_file(tmp_path / "no" / "a"):
        pass
