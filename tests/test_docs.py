"""Every snippet of the README and of docs/ runs, and every file that they name is there."""

import re
import shlex
from pathlib import Path

import pytest

from routed_experts.cli import make_parser

pytestmark = pytest.mark.usefixtures("compiled_cheaply", "compiled_at_first_use")

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_snippets_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, body in enumerate(blocks(page, "python"), start=1):
        exec(compile(body, f"{page.name}, snippet {number}", "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=lambda page: page.name)
def test_commands_name_scripts_that_are_there_and_flags_that_are_known(page):
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if not words or words[0] in ("git", "cd", "pip", "rm"):
            continue
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), line
        elif words[0] in ("routed-experts", "rex"):
            make_parser().parse_args(words[1:])  # exits on what it does not know
        else:
            script = ROOT / words[0]
            assert script.is_file(), line
            assert script.stat().st_mode & 0o111, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_source_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), target
    rooms = "core|capture|layers|memory|models|scheduling|execution|replay|placement|engine|analysis|demo|server|cli"
    for name in re.findall(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`", text):
        assert (ROOT / "src" / "routed_experts" / name).exists(), name
