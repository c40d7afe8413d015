"""The example, the page and the notebook of Tunix run, the latter in a small form."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fast_compilation", "lazy_compilation"),
]
ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_in_order(sources, folder, monkeypatch):
    """Run sources in one namespace and another folder; a figure needs no display."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {"__name__": "__main__"}
    for number, source in enumerate(sources, start=1):
        exec(compile(source, f"snippet {number}", "exec"), names)


def test_the_example_trains_on_each_kind_of_rows(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("grpo_tunix", ROOT / "examples" / "grpo_tunix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_tunix"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert module.main(["--steps", "2", "--out", str(tmp_path)]) == 0
    del sys.modules["grpo_tunix"]
    runs = json.loads((tmp_path / "grpo.json").read_text())
    on, off, shifted = (runs[rows][0] for rows in ("on", "off", "shifted"))
    assert [len(logs) for logs in (on, off, shifted)] == [2, 2, 2]
    assert on[0]["reward"] == off[0]["reward"] == shifted[0]["reward"], "the first rollouts are the same"
    assert on[0]["k3"] < 1e-3 and on[0]["canary"] < 0.05 and on[0]["valid"] > 0.9
    assert off[0]["k3"] == off[0]["k3_live"] and off[0]["valid"] == 0.0
    assert shifted[0]["canary"] > 0.3 and shifted[0]["k3"] > 100 * on[0]["k3"]
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")
    assert "rows on      reward rises by" in capsys.readouterr().out


def test_the_snippets_of_the_page_run_in_order(tmp_path, monkeypatch):
    page = ROOT / "docs" / "frameworks" / "tunix.md"
    run_in_order(FENCE.findall(page.read_text(encoding="utf-8")), tmp_path, monkeypatch)


def test_the_notebook_runs_in_order(tmp_path, monkeypatch):
    notebook = json.loads((ROOT / "docs" / "notebooks" / "grpo_with_tunix.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum("STEPS = " in source for source in code) == 1
    run_in_order(
        [re.sub(r"^STEPS = \d+$", "STEPS = 1", source, flags=re.MULTILINE) for source in code], tmp_path, monkeypatch
    )
