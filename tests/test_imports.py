"""What importing the package costs: no device, no optional library, and no JAX to read a record."""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
OPTIONAL = [
    "starlette",
    "uvicorn",
    "msgspec",
    "prometheus_client",
    "tokenizers",
    "jinja2",
    "transformers",
    "huggingface_hub",
]
OPTIONAL += ["matplotlib", "torch", "llguidance", "ray", "tunix", "optax"]
DEVICE_LIBRARIES = ["jax", "jaxlib", "flax"]

BLOCK = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, *, blocked: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own, where `blocked` libraries cannot be imported and warnings are errors."""
    preamble = f"import sys\nsys.path.insert(0, {str(SRC)!r})\n" + (BLOCK.format(blocked=blocked) if blocked else "")
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", preamble + code], capture_output=True, text=True, timeout=120, check=False
    )


def assert_runs(code: str, *, blocked: list[str] | None = None) -> str:
    done = run_python(code, blocked=blocked)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_names(room: str) -> list[str]:
    folder = SRC / "routed_experts" / room
    return [
        ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(folder.rglob("*.py"))
    ]


def test_the_blocker_blocks():
    done = run_python("import jax", blocked=DEVICE_LIBRARIES)
    assert done.returncode == 1
    assert "blocked: jax" in done.stderr


def test_importing_the_package_starts_no_device():
    code = """
import routed_experts
if "jax" in sys.modules:
    from jax._src import xla_bridge
    print(xla_bridge.backends_are_initialized())
"""
    assert "True" not in assert_runs(code)
    assert "True" in assert_runs("import jax\njax.devices()\n" + code), "the question itself must be able to say yes"


def test_importing_the_package_needs_no_optional_library():
    assert_runs("import routed_experts", blocked=OPTIONAL)
    loaded = assert_runs(f"import routed_experts\nprint(sorted(set({OPTIONAL!r}) & set(sys.modules)))")
    assert loaded.strip() == "[]"


@pytest.fixture(scope="module")
def imported():
    """Without Ray, in one process: every public name, and then what one server imports; the lines that it printed."""
    code = """
import importlib, sys
import routed_experts as r
print(len([getattr(r, name) for name in r.__all__]), set(r.__all__) <= set(dir(r)))
fleet = ("settings", "spec", "coordinator", "fleet_routes")
for name in ("cli", *("fleet." + name for name in fleet), "server.run", "engine.engine"):
    importlib.import_module("routed_experts." + name)
print("ray" in sys.modules, "routed_experts.fleet.start" in sys.modules, "routed_experts.fleet.replica" in sys.modules)
"""
    return assert_runs(code, blocked=["ray"]).splitlines()


def test_one_server_never_imports_the_fleets_ray(imported):
    """The command line knows a fleet's settings; what one engine serves with is imported without Ray (K9)."""
    assert imported[1] == "False False False"
    assert "ray" in (SRC / "routed_experts" / "fleet" / "ray_runtime.py").read_text(encoding="utf-8")


def test_every_public_name_resolves(imported):
    count, are_listed = imported[0].split()
    assert int(count) > 0 and are_listed == "True"


def test_an_unknown_name_is_an_attribute_error():
    done = run_python("import routed_experts\nroutedexperts = routed_experts.RoutedExpertz")
    assert done.returncode == 1
    assert "AttributeError" in done.stderr


def test_a_record_is_read_without_jax():
    # The example of the wire format: L = 3 with layer 0 dense, K = 2, two rows.
    code = """
import numpy as np
from routed_experts import extract_routed_experts_from_meta_info
payload = "//////////8BAAAAAAAAAAcAAAADAAAA//////////8EAAAAAgAAAAUAAAABAAAA"
ids = extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": payload}})
assert ids.dtype == np.int32 and ids.ndim == 1 and ids.flags.writeable, (ids.dtype, ids.shape)
assert ids.reshape(-1, 3, 2).tolist() == [[[-1, -1], [1, 0], [7, 3]], [[-1, -1], [4, 2], [5, 1]]]
assert not {"jax", "jaxlib", "flax"} & set(sys.modules)
"""
    assert_runs(code, blocked=[*DEVICE_LIBRARIES, *OPTIONAL])


@pytest.mark.parametrize("room", ["core", "scheduling"])
def test_a_host_room_imports_without_jax(room):
    names = module_names(room)
    assert names
    assert_runs("".join(f"import {name}\n" for name in names), blocked=[*DEVICE_LIBRARIES, *OPTIONAL])


@pytest.mark.parametrize("module", ["routed_experts.formats.wire", "routed_experts.capture.host_cache"])
def test_the_codec_and_the_host_cache_import_without_jax(module):
    assert_runs(f"import {module}", blocked=DEVICE_LIBRARIES)
