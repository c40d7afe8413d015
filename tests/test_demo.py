"""`routed-experts demo` from beginning to end, with warnings as errors: on the tiny checkpoint in a process of its own,
and on the demo model of the package, which scripts/thorough runs in a process, too. What it prints is checked against
its own pictures and promises, not against a golden."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import routed_experts
from routed_experts.analysis.colormaps import text_color
from routed_experts.demo import demo_model_path
from routed_experts.demo.run import DemoOptions, run_demo
from support.fast_compile import fast_compilation
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint
from support.xla_options import FAST_FLAGS

SRC = Path(routed_experts.__file__).parents[1]
PACKAGED = Path(routed_experts.__file__).parent / "demo_model"
MODELS = ["tiny", "packaged"] if PACKAGED.exists() else ["tiny"]


def run_command(folder, *flags, **environ):
    """Programs are compiled fast, and cached where those of the other tests are."""
    cache = jax.config.jax_compilation_cache_dir or str(folder / "jax")
    env = {
        **os.environ,
        "PYTHONPATH": str(SRC),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "PYTHONIOENCODING": "utf-8",
        "XLA_FLAGS": FAST_FLAGS,
        **environ,
    }
    command = [sys.executable, "-W", "error", "-m", "routed_experts", "demo", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=600, check=False, env=env, cwd=folder
    )


@pytest.fixture(scope="module", params=MODELS)
def shown(request, tmp_path_factory, is_thorough):
    """A demo that was run: (folder it ran in, what it printed)."""
    folder = tmp_path_factory.mktemp("demo")
    if request.param == "packaged" and not is_thorough:
        return folder, run_here(folder)
    flags = ["--model", str(write_tiny_checkpoint(folder / "model"))] if request.param == "tiny" else []
    done = run_command(folder, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder, done.stdout


def run_here(folder):
    """The demo of the package's model in this process; its two engines compile fast, and only what they run."""
    now, shown = time.perf_counter(), io.StringIO()
    output = folder / "demo-output"
    options = DemoOptions(model=demo_model_path(), output=output, start_time=now, imported=now, version="", cache=None)
    with fast_compilation(), lazy_compilation():
        assert run_demo(options, shown) == 0, shown.getvalue()
    return shown.getvalue()


# The packaged demo that runs in this process is no start: scripts/demo, which CI runs, and scripts/thorough have one.
of_a_command = pytest.mark.parametrize(
    "shown",
    [name if name == "tiny" else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS],
    indirect=True,
)


@of_a_command
def test_every_phase_of_start_up_is_timed(shown):
    for phase in ("import", "kernels", "config", "load", "plan", "allocate", "compile", "ready"):
        assert re.search(rf"^  {phase} +\d+\.\d\d s  ", shown[1], re.MULTILINE), phase
    pattern = r"trace N\.N · lower N\.N · XLA N\.N · read cache N\.N s \(N programs from the cache, N compiled\)"
    assert re.search(pattern.replace("N", r"\d+"), shown[1])


def test_the_second_prompt_is_a_cache_hit_of_whole_pages(shown):
    cached = [int(count) for count in re.findall(r"tokens of prompt, (\d+) of them from the prefix cache", shown[1])]
    assert cached[0] == 0
    assert cached[1] >= 16
    assert cached[1] % 16 == 0
    assert re.search(rf"cached_tokens = {cached[1]}  ok$", shown[1], re.MULTILINE)


def test_shapes_follow_the_row_law(shown):
    tokens = re.findall(r"(\d+) tokens of prompt.*; (\d+) generated", shown[1])
    wire = re.findall(r"routed_experts \((\d+), (\d+), (\d+)\) int32", shown[1])
    record = re.findall(r"record.ids \((\d+), (\d+), (\d+)\) uint8", shown[1])
    assert len(tokens) == len(wire) == len(record) == 3
    for (prompt, generated), (rows, layers, top_k), recorded in zip(tokens, wire, record, strict=True):
        assert int(rows) == int(prompt) + int(generated) - 1
        assert recorded == (rows, str(int(layers) - 1), top_k)


def test_the_replay_equals_the_engines_output_and_the_check_can_fail(shown):
    gap = re.search(r"replay max \|Δ logprob\| = (\S+) .* ok$", shown[1], re.MULTILINE)
    shifted = re.search(r"rows shifted by one token: max \|Δ logprob\| = (\S+) .* ok$", shown[1], re.MULTILINE)
    assert float(gap[1]) < 1e-4
    assert float(shifted[1]) > 100 * float(gap[1])
    assert re.search(r"executed == captured: 100 %.* ok$", shown[1], re.MULTILINE)
    assert re.search(r"live against replay max \|Δ logit\| = 0.0 .* ok$", shown[1], re.MULTILINE)
    assert "all checks passed" in shown[1]


def test_every_moe_layer_has_a_line_of_load_with_a_bar_for_each_expert(shown):
    data = read_page(shown[0])[1]
    lines = re.findall(r"^ +(\d+) +\d+\.\d\d +[01]\.\d{3} +0\.\d\d +\d+ +([▁▂▃▄▅▆▇█·]+) *$", shown[1], re.MULTILINE)
    assert [int(layer) for layer, _ in lines] == data["layers"]
    assert {len(bars) for _, bars in lines} == {len(data["palette"])}
    assert any("█" in bars for _, bars in lines)


def read_page(folder):
    source = (folder / "demo-output" / "routing.html").read_text(encoding="utf-8")
    return source, json.loads(re.search(r'id="routing">(.*?)</script>', source)[1])


def test_pictures_are_written_and_the_page_fetches_nothing(shown):
    source, data = read_page(shown[0])
    assert not re.search(r"https?:|//[\w.]+\.", source)
    assert data["inks"] == [text_color(colour) for colour in data["palette"]]
    assert [text["rows"] for text in data["texts"]] == [
        int(rows) for rows in re.findall(r"routed_experts \((\d+),", shown[1])
    ]
    assert (shown[0] / "demo-output" / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_plain_text_goes_to_a_pipe(shown):
    assert "\x1b" not in shown[1]


@of_a_command
def test_a_second_start_compiles_nothing(shown, tmp_path):
    folder = [] if not (shown[0] / "model").exists() else ["--model", str(shown[0] / "model")]
    done = run_command(tmp_path, *folder, "--output", "elsewhere")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\(\d+ programs from the cache, 0 compiled\)", done.stdout)
    assert (tmp_path / "elsewhere" / "routing.html").exists()


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    done = run_command(tmp_path, "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith("routed-experts demo: error: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr
    assert not (tmp_path / "demo-output").exists()
