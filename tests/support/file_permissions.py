"""Processes that file permissions apply to, also where the tests run as root."""

import os
import subprocess
import sys
from pathlib import Path

import routed_experts

SRC = Path(routed_experts.__file__).parents[1]
_DROP = """
import ctypes
libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable capabilities, low words first
assert libc.capget(header, sets) == 0, ctypes.get_errno()
for number in range(3):
    sets[number] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
assert libc.capset(header, sets) == 0, ctypes.get_errno()
"""


def run_under_permissions(code, *argv, env=None):
    """Run Python code in a process without the capabilities of root to read and enter what it has no permission for."""
    command = [sys.executable, "-W", "error", "-c", _DROP + code, *argv]
    env = {**os.environ, "PYTHONPATH": str(SRC), **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
