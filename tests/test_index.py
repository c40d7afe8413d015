"""The index in tests/README.md names files and tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ENTRY = re.compile(r"`((?:[\w-]+/)*test_\w+\.py)(?:::(\w+))?`")


def names_in(text):
    """(file, test or None) of every entry of the index."""
    return [(file.removeprefix("tests/"), test or None) for file, test in ENTRY.findall(text)]


def missing(entries):
    """Entries whose file is absent, or has no test of that name at its top level."""
    return [f"{file}::{test}" for file, test in entries if not _exists(file, test)]


def _exists(file, test):
    path = TESTS / file
    if not path.exists():
        return False
    tops = ast.parse(path.read_text(encoding="utf-8")).body
    defined = {node.name for node in tops if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {t.id for node in tops if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    return test is None or (test.lower().startswith("test") and test in defined)


def test_every_entry_of_the_index_exists():
    entries = names_in((TESTS / "README.md").read_text(encoding="utf-8"))
    assert len(entries) > 50
    assert missing(entries) == []


@pytest.mark.parametrize(
    "entry", ["memory/test_no_such_file.py", "test_index.py::test_no_such_test", "test_index.py::missing"]
)
def test_an_entry_that_names_nothing_is_detected(entry):
    assert missing(names_in(f"| x | `{entry}` |")) != []
