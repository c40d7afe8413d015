"""Where JAX has several processes, an engine that is not told of them is refused before a weight is read."""

import os
import socket
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
BUILD = """
import sys
import jax
jax.distributed.initialize(coordinator_address=sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))
assert jax.process_count() == 2
from routed_experts import ConfigError, Engine
from routed_experts.demo import demo_model_path
try:
    Engine(str(demo_model_path()), enable_return_routed_experts=True)
except ConfigError as error:
    print(error)
    assert not [array for array in jax.live_arrays() if array.size > 1000]
"""


def test_an_engine_in_one_of_two_processes_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", BUILD]
    both = [
        subprocess.Popen(
            [*command, str(rank), address], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(both):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        assert out.startswith(
            f"this is process {rank} of 2 (jax.distributed), and this engine is built without dist="
        ), (
            out,
            err[-3000:],
        )
