"""House rules that a program can check in the source.

Every rule carries a snippet that trips it, so that a rule that no longer looks cannot pass for one that finds
nothing."""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
HOST_ONLY = ("core/", "scheduling/", "speculation/")
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "torch", "transformers"}
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    path: str  # below the package: "core/errors.py"
    text: str
    tree: ast.Module

    @functools.cached_property
    def _by_kind(self) -> dict[type, list[ast.AST]]:
        nodes: dict[type, list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            nodes.setdefault(type(node), []).append(node)
        return nodes

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        return (node for kind, nodes in self._by_kind.items() if issubclass(kind, kinds) for node in nodes)


@dataclass(frozen=True)
class Rule:
    find: Callable[[Source], Iterator[tuple[int, str]]]
    trips: tuple[str, ...]  # each of these snippets breaks the rule
    path: str = "layers/example.py"


def parse(text: str, path: str) -> Source:
    return Source(path, text, ast.parse(text))


@functools.cache
def read_package() -> list[Source]:
    package = ROOT / "src" / "routed_experts"
    return [
        parse(file.read_text(encoding="utf-8"), file.relative_to(package).as_posix())
        for file in sorted(package.rglob("*.py"))
    ]


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def called_names(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(ast.Call):
        yield node.lineno, ast.unparse(node.func)


def find_undescribed_modules(source: Source) -> Iterator[tuple[int, str]]:
    docstring = ast.get_docstring(source.tree, clean=False)
    if source.tree.body and not (docstring or "").split("\n")[0].strip():  # an empty __init__.py needs no docstring
        yield 1, "the first line of the module's docstring says what the file is for"


def find_pickles(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in imported_modules(source):
        if name.split(".")[0] in PICKLES:
            yield line, f"imports {name}: a file that runs code when it is read"
    for node in source.nodes(ast.keyword):
        if node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allow_pickle must be False"


def find_banned_calls(source: Source) -> Iterator[tuple[int, str]]:
    banned = {"eval", "exec", "yaml.load", "torch.load", "time.sleep", "object.__setattr__", "__import__", "os.system"}
    for line, name in called_names(source):
        if name in banned:
            yield line, f"calls {name}"
    for line, name in imported_modules(source):
        if name in banned:
            yield line, f"imports {name}"


def find_globals(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(ast.Global):
        yield node.lineno, "global: pass it, or return it"


def find_swallowed_errors(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(ast.ExceptHandler):
        if node.type is None:
            yield node.lineno, "bare except"
        if all(
            isinstance(item, ast.Pass) or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
            for item in node.body
        ):
            yield node.lineno, "an error is caught and passed over"


def find_environment_reads(source: Source) -> Iterator[tuple[int, str]]:
    if source.path == "cli.py" or source.path.startswith("cli/"):
        return
    readers = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    for node in source.nodes(ast.Attribute):
        if ast.unparse(node) in readers:
            yield node.lineno, "the environment is read in cli alone: take an argument"
    for line, name in imported_modules(source):
        if name in readers:
            yield line, "the environment is read in cli alone: take an argument"


def find_device_imports(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in imported_modules(source):
        if source.path.startswith(HOST_ONLY) and name.split(".")[0] in DEVICE_LIBRARIES:
            yield line, f"imports {name}: this room is NumPy only"


def find_unfinished_code(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(ast.Raise):
        if node.exc is not None and ast.unparse(node.exc).startswith("NotImplemented"):
            yield node.lineno, "refuse by name where it is built, or write it"
    for line, text in enumerate(source.text.splitlines(), start=1):
        if any(f"# {word}" in text for word in ("TODO", "FIXME", "XXX")):
            yield line, "unfinished: mend it or open an issue"


def find_foreign_forms(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in imported_modules(source):
        if name == "__future__.annotations":
            yield line, "no `annotations` future: jaxtyping reads annotations at run time"
        if name in {"typing.Self", "typing_extensions.Self"}:
            yield line, "quote the class instead of Self"


def find_sleeps_and_mocks(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in [*imported_modules(source), *called_names(source)]:
        if name == "time.sleep" or name.startswith(("unittest.mock", "mock.")):
            yield line, f"{name}: a test waits for an event, and runs the real code"


RULES = {
    "module docstring": Rule(find_undescribed_modules, ("x = 1\n", '"""\nToo late."""\n')),
    "no pickle": Rule(
        find_pickles,
        (
            "import pickle\n",
            "from dill import loads\n",
            "def f():\n    import cloudpickle as c\n",
            "np.load(p, allow_pickle=True)\n",
        ),
    ),
    "banned calls": Rule(
        find_banned_calls,
        (
            "eval('1')\n",
            "exec(s)\n",
            "yaml.load(s)\n",
            "torch.load(p)\n",
            "time.sleep(1)\n",
            "from time import sleep\n",
            "object.__setattr__(self, 'x', 1)\n",
            "__import__('x')\n",
            "os.system('x')\n",
        ),
    ),
    "no global": Rule(find_globals, ("def f():\n    global x\n    x = 1\n",)),
    "no swallowed error": Rule(
        find_swallowed_errors,
        (
            "try:\n    f()\nexcept:\n    raise\n",
            "try:\n    f()\nexcept ValueError:\n    pass\n",
            "try:\n    f()\nexcept E:\n    ...\n",
        ),
    ),
    "environment": Rule(
        find_environment_reads, ("x = os.environ['X']\n", "x = os.getenv('X')\n", "from os import environ\n")
    ),
    "core without JAX": Rule(
        find_device_imports,
        ("import jax.numpy as jnp\n", "def f():\n    from flax import nnx\n"),
        path="core/example.py",
    ),
    "scheduling without JAX": Rule(find_device_imports, ("from jax import Array\n",), path="scheduling/example.py"),
    "speculation without JAX": Rule(find_device_imports, ("import jaxlib\n",), path="speculation/example.py"),
    "nothing unfinished": Rule(
        find_unfinished_code,
        ("raise NotImplementedError\n", "raise NotImplementedError('x')\n", "x = 1  # TO" + "DO: y\n"),
    ),
    "foreign forms": Rule(
        find_foreign_forms, ("from __future__ import annotations\n", "from typing import Any, Self\n")
    ),
}

TEST_RULE = Rule(
    find_sleeps_and_mocks,
    ("import unittest.mock\n", "from unittest import mock\n", "time.sleep(1)\n", "from time import sleep\n"),
)

HONEST = '''"""A module that keeps every rule."""

import contextlib
import logging

import numpy as np

logger = logging.getLogger(__name__)


def load(path):
    """Load an array; a model.eval() or a word such as pickle in text is no offence."""
    with contextlib.suppress(FileNotFoundError):
        return np.load(path, allow_pickle=False)
    try:
        model.eval()
    except ValueError as error:
        raise KeyError(path) from error
'''


def findings(rule: Rule, sources: list[Source]) -> list[str]:
    return [f"{source.path}:{line}: {words}" for source in sources for line, words in rule.find(source)]


@pytest.mark.parametrize("name", RULES)
def test_the_package_keeps_the_rule(name):
    broken = findings(RULES[name], read_package())
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("name", "snippet"), [(name, snippet) for name, rule in RULES.items() for snippet in rule.trips]
)
def test_the_rule_finds_what_breaks_it(name, snippet):
    assert findings(RULES[name], [parse(snippet, RULES[name].path)])


@pytest.mark.parametrize("name", RULES)
def test_the_rule_lets_honest_code_pass(name):
    assert findings(RULES[name], [parse(HONEST, RULES[name].path)]) == []
    assert findings(RULES[name], [parse("", "core/__init__.py")]) == []


def test_the_environment_may_be_read_in_cli_and_jax_imported_elsewhere():
    assert (
        findings(RULES["environment"], [parse("x = os.environ['X']\n", path) for path in ("cli.py", "cli/serve.py")])
        == []
    )
    assert findings(RULES["core without JAX"], [parse("import jax\n", "memory/kv_pool.py")]) == []


def test_the_package_was_read():
    assert {"core/errors.py"} <= {source.path for source in read_package()}


def test_tests_do_not_sleep_or_mock():
    files = sorted((ROOT / "tests").rglob("*.py"))
    texts = ((file.name, file.read_text(encoding="utf-8")) for file in files)
    sources = [parse(text, name) for name, text in texts if "sleep" in text or "mock" in text]
    assert "test_style.py" in {source.path for source in sources}
    assert not findings(TEST_RULE, sources)


@pytest.mark.parametrize("snippet", TEST_RULE.trips)
def test_a_sleep_or_a_mock_in_a_test_is_detected(snippet):
    assert findings(TEST_RULE, [parse(snippet, "test_example.py")])
