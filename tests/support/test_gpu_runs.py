"""A run of the tests marked gpu on a machine without a GPU ends with one sentence, before any test."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_the_run_ends_with_one_sentence():
    env = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/layers/gpu"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 4, (run.stdout, run.stderr)
    assert "need a GPU, and JAX finds none (JAX_PLATFORMS=cuda" in run.stderr
    assert "Traceback" not in run.stdout + run.stderr
