"""Which models use the GPU kernels, and that no other model loads them."""

import subprocess
import sys
from pathlib import Path

import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS

SRC = Path(__file__).resolve().parents[2] / "src"
IMPORTS = f"""
import sys
sys.path.insert(0, {str(SRC)!r})
import routed_experts.engine.engine
print([name for name in sys.modules if "layers.gpu" in name or "pallas.triton" in name])
"""


def test_auto_is_gpu_where_the_device_is_one():
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(enable_return_routed_experts=True), platform="gpu")
    assert (kernels.moe.name, attention.name) == ("gpu", "gpu")
    assert kernels.moe.reveals_ids and kernels.router is not None and attention.fused is not None


def test_deterministic_mode_stays_on_reference_there():
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(deterministic=True), platform="gpu")
    assert (kernels.moe.name, attention.name) == ("reference", "reference")


@pytest.mark.parametrize("field", ["moe_backend", "attention_backend"])
def test_a_machine_without_a_gpu_refuses_it(field):
    with pytest.raises(
        ConfigError, match=f"{field}='gpu' cannot run here: it runs on gpu, and this machine's default device is a cpu"
    ):
        DEFAULT_BACKENDS.choose(ServerArgs(**{field: "gpu"}), platform="cpu")


def test_importing_the_engine_loads_no_gpu_code():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
