"""One model on one, two and four devices: the same tokens, routes and logprobs; what each device holds; what is
refused.

The cases are in tests/support/device_cases.py: one process of four devices runs them all, because XLA counts its devices when
it starts."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from support import cheaply

TESTS = Path(__file__).parents[1]
# Four devices of one CPU; programs run a few steps only, so that they are made quickly.
FLAGS = f"--xla_force_host_platform_device_count=4 {cheaply.FLAGS}"
CASES = (
    "deepseek",
    "gpt-oss",
    "olmoe",
    "qwen3-next",
    "dense",
    "refusals",
    "answers",
    "gpu_kernels",
    "prefix_hits",
    "retraction",
    "memory",
    "placement",
    "samplers",
    "replay",
    "new_weights",
)


@functools.cache
def outcomes():
    """What each case came to, None: well."""
    cache = jax.config.jax_compilation_cache_dir
    environment = {
        **os.environ,
        "XLA_FLAGS": FLAGS,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
    }
    if cache is not None:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(TESTS / "device_cases.py")], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_several_devices_are_as_one(name):
    said = outcomes()
    assert set(said) == set(CASES), "a case that is not looked at"
    assert said[name] is None, said[name]
