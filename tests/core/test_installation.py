"""The command that adds an extra works for how the package was installed."""

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from routed_experts.core import installation
from routed_experts.core.errors import ConfigError
from routed_experts.core.installation import import_optional, install_command


class Installed:
    """A distribution that came from this direct URL, or from an index."""

    def __init__(self, direct_url):
        self._direct_url = direct_url

    def read_text(self, name):
        assert name == "direct_url.json"
        return None if self._direct_url is None else json.dumps(self._direct_url)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with its own environment; the working folder is the clone."""
    root = tmp_path / "routed experts"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "executable", str(root / ".venv" / "bin" / "python"))
    return root


def installed_from(monkeypatch, direct_url):
    monkeypatch.setattr(installation, "__file__", "/site-packages/routed_experts/core/installation.py")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(direct_url))


@pytest.mark.parametrize("editable", [True, False])
def test_a_clone_is_named_by_its_folder(clone, monkeypatch, editable):
    installed_from(monkeypatch, {"url": clone.as_uri(), "dir_info": {"editable": editable}})
    flag = "-e " if editable else ""
    assert install_command("serve") == f'.venv/bin/python -m pip install {flag}".[serve]"'
    monkeypatch.chdir(clone.parent.parent)
    assert install_command("serve").endswith(f'install {flag}"{clone.parent.name}/routed experts[serve]"')
    (clone / "src").mkdir()
    monkeypatch.chdir(clone / "src")
    assert install_command("serve") == f'{clone}/.venv/bin/python -m pip install {flag}"{clone}[serve]"'


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, '-e ".[hf]" in a clone of routed-experts'),
        (
            {"url": "file:///dist/routed_experts-0.1.0-py3-none-any.whl", "archive_info": {}},
            '"routed-experts[hf] @ file:///dist/routed_experts-0.1.0-py3-none-any.whl"',
        ),
        (
            {
                "url": "https://host/routed.git",
                "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "v1"},
            },
            '"routed-experts[hf] @ git+https://host/routed.git@abc"',
        ),
    ],
)
def test_other_sources_are_named_as_they_are(clone, monkeypatch, direct_url, requirement):
    installed_from(monkeypatch, direct_url)
    assert install_command("hf") == f".venv/bin/python -m pip install {requirement}"


def test_a_source_tree_that_is_not_installed_is_installed_from_its_root(clone, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "__file__", str(clone / "src" / "routed_experts" / "core" / "installation.py"))
    assert install_command("plot") == '.venv/bin/python -m pip install -e ".[plot]"'


def test_a_source_tree_is_named_where_the_installation_tells_nothing(clone, monkeypatch):
    """An index may have another project under this name."""
    installed_from(monkeypatch, None)
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "__file__", str(clone / "src" / "routed_experts" / "core" / "installation.py"))
    assert install_command("serve") == '.venv/bin/python -m pip install -e ".[serve]"'


def test_no_text_tells_anybody_to_install_the_name_alone():
    """`pip install routed-experts[serve]` fetches what a public index has under that name."""
    root = Path(__file__).parents[2]
    files = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    files += [*(root / "src").rglob("*.py"), *(root / "examples").rglob("*.py"), *(root / "scripts").iterdir()]
    wrong = re.compile(r"install\s+(?:-\S+\s+)*[\"']?routed[-_]experts\b")
    texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()}
    assert len(texts) > 300
    assert [str(file) for file, text in texts.items() if wrong.search(text)] == []


def test_an_environment_without_pip_is_served_by_uv(clone, monkeypatch):
    installed_from(monkeypatch, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        install_command("plot") == 'uv pip install --python .venv/bin/python -e ".[plot]" in a clone of routed-experts'
    )


def test_the_error_names_purpose_library_command_and_what_else_helps(clone, monkeypatch):
    installed_from(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as error:
        import_optional("matplotlib.figure", purpose="pictures", extra="plot", otherwise="use --json")
    command = '.venv/bin/python -m pip install -e ".[plot]" in a clone of routed-experts'
    assert str(error.value) == f"pictures: matplotlib is not installed; run {command}, or use --json"
