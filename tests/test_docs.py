"""Every snippet and notebook of the pages runs, and every file, flag and extra that they name exists."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from routed_experts.cli import main, make_parser

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OTHERS = ("index", "records", "routes", "tunix")  # in docs/frameworks: not one framework behind HTTP or an array
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
FRAMEWORKS = sorted(page for page in (DOCS / "frameworks").glob("*.md") if page.stem not in OTHERS)
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
# What needs Tunix runs where that is installed: tests/integrations/test_tunix_pages.py.
WITH_TUNIX = {DOCS / "frameworks" / "tunix.md", DOCS / "notebooks" / "grpo_with_tunix.ipynb"}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
HERE_DOCUMENT = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2\n", re.MULTILINE | re.DOTALL)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def named(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return [body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def run_in_order(page, bodies, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"}
    for number, body in enumerate(bodies, start=1):
        exec(compile(body, f"{page.name}, snippet {number}", "exec"), names)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in WITH_TUNIX], ids=named
)
def test_python_snippets_run_in_order(page, tmp_path, monkeypatch):
    run_in_order(page, blocks(page, "python"), tmp_path, monkeypatch)


@pytest.mark.parametrize("notebook", [page for page in NOTEBOOKS if page not in WITH_TUNIX], ids=named)
def test_notebooks_run_in_order(notebook, tmp_path, monkeypatch):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = [re.sub(r"^STEPS = \d+$", "STEPS = 1", source, flags=re.MULTILINE) for source in code]  # of training
    run_in_order(notebook, code, tmp_path, monkeypatch)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=named)
def test_notebooks_hold_the_outputs_of_a_whole_run_and_a_picture(notebook):
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        "run scripts/docs --execute, or scripts/tunix --notebook"
    )
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=named)
def test_commands_name_scripts_that_are_there_and_flags_that_are_known(page):
    for line in HERE_DOCUMENT.sub("", "".join(blocks(page, "sh"))).splitlines():
        check_command(line)


def test_the_commands_of_the_quickstart_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [body for body in blocks(DOCS / "quickstart.md", "sh") if HERE_DOCUMENT.search(body)]
    for name, _, text in HERE_DOCUMENT.findall(block):
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = [shlex.split(line, comments=True) for line in HERE_DOCUMENT.sub("", block).splitlines()]
    assert len(commands) == 6
    for program, *arguments in commands:
        assert program == "routed-experts" and main(arguments) == 0, arguments
    assert len((tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    written = {file.name for file in tmp_path.iterdir()}
    assert {"routing.png", "routing.html", "record.safetensors", "rows.npy"} <= written


def test_what_needs_tunix_is_run_by_its_own_tests():
    text = (ROOT / "tests" / "integrations" / "test_tunix_pages.py").read_text(encoding="utf-8")
    assert all(page.is_file() and page.name in text for page in WITH_TUNIX)


def check_command(line):
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words or words[0] in ("git", "cd", "rm"):
        return
    program = words[0].removeprefix(".venv/bin/")
    if words[:2] == ["source", ".venv/bin/activate"]:
        return
    if program == "python" and words[1:3] == ["-m", "pip"]:
        assert words[3] == "install", line
        expected = re.fullmatch(r"\.\[([\w,-]+)\]", words[-1])
        assert words[-2] == "-e" and expected and set(expected[1].split(",")) <= set(EXTRAS), line
    elif program == "python":
        check_script(words[1:], line)
    elif program == "routed-experts":
        make_parser().parse_args(words[1:])  # exits on what it does not know
    else:
        script = ROOT / words[0]
        assert script.is_file(), line
        assert script.stat().st_mode & 0o111, line


def check_script(words, line):
    """The script is there, and its source has every flag."""
    source = (ROOT / words[0]).read_text(encoding="utf-8") if (ROOT / words[0]).is_file() else ""
    assert source, line
    for flag in (word for word in words[1:] if word.startswith("--")):
        assert flag in source or f'"{flag.removeprefix("--")}"' in source, f"{line}: {flag}"


@pytest.mark.parametrize(
    "line",
    [
        "routed-experts serve MODEL --no-such-flag",
        "scripts/no_such_script",
        "python scripts/no_such_script.py",
        "python benchmarks/capture.py --no-such-flag",
        ".venv/bin/python -m pip install routed-experts[serve]",
        '.venv/bin/python -m pip install -e ".[no-such-extra]"',
        "pip install something",
    ],
)
def test_a_command_that_does_not_work_is_found(line):
    with pytest.raises((AssertionError, SystemExit)):
        check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_named_source_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), target
    rooms = "|".join(sorted(path.name for path in (ROOT / "src" / "routed_experts").iterdir() if path.is_dir()))
    for name in re.findall(rf"`((?:{rooms})/[\w/]*(?:\.\w+)?)`", text):
        assert (ROOT / "src" / "routed_experts" / name).exists(), name
    for name in re.findall(r"`((?:tests|scripts|benchmarks|examples|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(?:benchmarks/results/)?(\w+\.json)`", text):
        if re.search(r"_(cpu|h200)\.json|compiled_\w+\.json", name):
            assert (ROOT / "benchmarks" / "results" / name).is_file(), name


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=named)
def test_every_page_is_in_the_navigation(page):
    assert f": {page.relative_to(DOCS).as_posix()}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", FRAMEWORKS, ids=named)
def test_pages_of_frameworks_are_short_and_name_their_sources(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 500
    assert re.search(r"^\| sources read \| .*(?:\d+\.\d+\.\d+|`[0-9a-f]{7}` of 20\d\d-\d\d-\d\d)", text, re.MULTILINE)
    for title in ("works", "does not work", "tried here"):
        assert f"\n| {title} | " in text, title


def test_every_reference_names_a_public_object():
    import importlib

    for page in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_pages_ask_for_extras_by_the_command_that_works_in_a_clone():
    for page in PAGES:
        assert not re.search(r"pip install (?!-e|ziglang|openai|anthropic)", page.read_text(encoding="utf-8")), page
