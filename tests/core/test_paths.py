"""Paths that users give: what is no folder, and what the system does not let this process know."""

from routed_experts.core.paths import is_folder
from support.file_permissions import run_under_permissions

ASK = """
import sys
from routed_experts.core.paths import is_folder
try:
    print(is_folder(sys.argv[1]))
except PermissionError as error:
    print(error.filename)
"""


def test_a_folder_is_one_and_an_impossible_path_is_none(tmp_path):
    (file := tmp_path / "file").write_text("")
    (loop := tmp_path / "loop").symlink_to(loop)
    (link := tmp_path / "link").symlink_to(tmp_path)
    assert is_folder(tmp_path) and is_folder(str(tmp_path)) and is_folder(link)
    paths = (file, file / "below", tmp_path / "absent", loop, loop / "below", "x" * 5000, "zero\0byte")
    assert [path for path in paths if is_folder(path)] == []


def test_a_folder_that_this_user_may_not_reach_is_not_taken_for_an_absent_one(tmp_path):
    (folder := tmp_path / "locked" / "model").mkdir(parents=True)
    folder.parent.chmod(0)
    try:
        done = run_under_permissions(ASK, str(folder))
    finally:
        folder.parent.chmod(0o700)
    assert (done.stdout.strip(), done.stderr) == (str(folder), "")
