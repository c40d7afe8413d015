"""Every script of benchmarks/ starts: all print their help, and those that are fast run in their smallest form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in file.read_text())
SMALLEST = {
    "bf16_ways": ["--small"],
    "capture": ["--small"],
    "cluster_host_time": [
        "--batch",
        "4",
        "--steps",
        "20",
        "--rounds",
        "1",
        "--followers",
        "0",
        "1",
        "--device-ms",
        "0",
        "1",
    ],
    "cluster_model": [],
    "cpu_parts": ["--small"],
    "data_ranks": ["--host", "--rounds", "1", "--new", "20"],
    "devices": ["--small"],
    "draft_models": ["--small"],
    "drafting": ["--small"],
    "expert_offload": ["--small", "--batches", "1", "--fractions", "0.5", "--new", "8", "--rounds", "1"],
    "families_gpu": ["--small"],
    "prompts_gpu": ["--small"],
    "host_work": ["--batch", "2", "--new", "8"],
    "http_overhead": ["--small"],
    "launches": ["--small"],
    "moves": ["--small"],
    "quantized_layers": ["--small"],
    "quantized_product": ["--small"],
    "quantized_rollouts": ["--small"],
    "quantized_step": ["--small"],
    "replay": ["--small"],
    "residency": ["--small"],
    "selection": ["--repeats", "1"],
    "speculative": ["--small", "--loads", "old rollouts", "device", "adversary"],
    "speculative_crossing": ["--small"],
    "step": ["--small"],
    "structured": ["--small"],
}
LONG = {  # 10 s or more, also in their smallest form
    *(
        "bf16_ways",
        "capture",
        "cpu_parts",
        "draft_models",
        "expert_offload",
        "families_gpu",
        "host_work",
        "http_overhead",
        "launches",
        "moves",
        "devices",
    ),
    *("quantized_layers", "quantized_product", "quantized_rollouts", "quantized_step"),
    *("prompts_gpu", "replay", "residency", "selection", "speculative", "speculative_crossing", "step"),
}
NOT_RUN = {
    "cluster_speed": "starts four processes of engines; test_process_group_serving.py compares their answers",
    "compiled": "compiles for minutes",
    "expert_offload_latency": "needs a GPU and 64 experts of full size",
    "families": "needs transformers in a process of its own, for minutes",
    "faults": "starts and ends servers for minutes",
    "fleet": "needs Ray, and starts four servers; tests/fleet/with_ray has their answers",
    "mismatch": "`trained` trains a model; `demo` is run below",
    "peers": "needs other engines",
    "placement": "draws a picture of the pages",
    "plots": "draws pictures of the pages",
    "tunix_grpo": "needs Tunix; tests/integrations has its answers",
    "soak": "builds four engines with drafts for a run of half an hour",
    "startup": "starts engines in processes of their own, for minutes",
}
# One process imports JAX once and prints the help of all.
PRINT_HELP = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
printed = {}
for name in sys.argv[2:]:
    sys.argv = [f"{name}.py", "--help"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_path(f"{sys.path[0]}/{name}.py", run_name="__main__")
    printed[name] = output.getvalue()
print(json.dumps(printed))
"""
# Results go to another folder: those that are committed stay as they are.
RUN = """
import pathlib, runpy, sys
results, script, *arguments = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(script).parent))
import common
common.RESULTS = pathlib.Path(results)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def run(program, *arguments):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    if jax.config.jax_compilation_cache_dir is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = str(jax.config.jax_compilation_cache_dir)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=900, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_script_is_run_or_says_why_not():
    assert sorted([*SMALLEST, *NOT_RUN]) == SCRIPTS


def test_every_script_prints_its_help():
    printed = json.loads(run(PRINT_HELP, str(FOLDER), *SCRIPTS))
    assert [name for name, text in printed.items() if not text.startswith(f"usage: {name}.py")] == []


def test_every_script_is_in_the_table():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"`{name}.py" not in table] == []


SHOW_SMALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
import families, peers
one = {"prefill": 5.0, "tokens": [[1, 2]]}
ours, theirs = peers.Timing(decode=-2561.0, **one), peers.Timing(decode=44.0, **one)
rows = [{"family": "Glm4Moe", **row} for row in peers.table(2, [ours], {"transformers": [theirs]})]
print(json.dumps(families.without_rates(rows)))
"""


def test_a_small_run_of_families_shows_no_rate():
    """Its decode phase takes no measurable time: rates and ratios would be negative."""
    same = {"family": "Glm4Moe", "batch": 2, "peer": "transformers", "same": 1.0}
    expected = [same | {"phase": phase} for phase in ("prefill", "decode")]
    assert json.loads(run(SHOW_SMALL, str(FOLDER))) == expected


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(
            pytest.param(name, arguments, id=name, marks=pytest.mark.thorough if name in LONG else ())
            for name, arguments in SMALLEST.items()
        ),
        pytest.param("data_ranks", ["--small"], id="data_ranks, devices", marks=pytest.mark.thorough),
        pytest.param("mismatch", ["demo", "--small"], id="mismatch, demo", marks=pytest.mark.thorough),
    ],
)
def test_the_smallest_form_runs(name, arguments, tmp_path):
    output = run(RUN, str(tmp_path), str(FOLDER / f"{name}.py"), *arguments)
    if "--small" in arguments:
        assert "no result is written" in output and list(tmp_path.iterdir()) == []
    else:
        (file,) = tmp_path.iterdir()
        assert json.loads(file.read_text())["rows"]
