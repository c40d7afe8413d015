"""Experts placed on two devices: runs placed_devices.py, in a process to which JAX shows two devices of the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support import cheaply

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_placed_experts_are_served_on_two_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 {cheaply.FLAGS}".strip()
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(HERE / "placed_devices.py"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    written = sum(
        line.startswith("def test_") for line in (HERE / "placed_devices.py").read_text(encoding="utf-8").splitlines()
    )
    passed = re.search(r"(\d+) passed in", done.stdout)
    assert done.returncode == 0 and passed is not None, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(passed[1]) >= written  # none was skipped, none left out
