"""A machine without a TPU starts silently with libtpu installed; a TPU is never hidden."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import routed_experts
from routed_experts.execution import absent_tpu
from routed_experts.execution.absent_tpu import has_tpu, skip_absent_tpu

SRC = Path(routed_experts.__file__).parents[1]
COMMAND = "from routed_experts.cli.bootstrap import start_jax; start_jax(default_platform=None)"
LIBRARY = "from routed_experts.execution.absent_tpu import skip_absent_tpu as skip; skip(); import jax; jax.devices()"


def pci_device(root, name, vendor, kind):
    folder = root / "sys" / "bus" / "pci" / "devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def device_file(root, name):
    file = root / "dev" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


@pytest.mark.parametrize("name", ["accel0", "vfio/0", "vfio/12"])
def test_a_device_file_shows_a_tpu(tmp_path, name):
    device_file(tmp_path, "vfio/vfio")
    assert not has_tpu(tmp_path)
    device_file(tmp_path, name)
    assert has_tpu(tmp_path)


def test_a_pci_device_of_google_shows_a_tpu_unless_it_is_a_disk_or_a_network_card(tmp_path):
    pci_device(tmp_path, "0000:00:01.0", "0x8086", "0x120000")
    pci_device(tmp_path, "0000:00:02.0", "0x1ae0", "0x020000")
    pci_device(tmp_path, "0000:00:03.0", "0x1ae0", "0x010802")
    assert not has_tpu(tmp_path)
    pci_device(tmp_path, "0000:00:04.0", "0x1ae0", "0x00ff00")
    assert has_tpu(tmp_path)


@pytest.fixture
def platforms(monkeypatch):
    """No platform is chosen; libtpu is installed and no plugin is. Gives the chosen ones."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    installed = {"libtpu"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    yield lambda: jax.config.jax_platforms
    jax.config.update("jax_platforms", before)


def test_the_cpu_is_taken_at_once_where_there_is_nothing_else(tmp_path, platforms):
    skip_absent_tpu(tmp_path)
    assert platforms() == "cpu"


@pytest.mark.parametrize("name", ["accel0", "nvidia0", "nvidiactl", "kfd", "dxg"])
def test_a_machine_with_an_accelerator_is_left_alone(tmp_path, platforms, name):
    device_file(tmp_path, name)
    skip_absent_tpu(tmp_path)
    assert platforms() is None


def test_a_chosen_platform_and_a_plugin_are_left_alone(tmp_path, platforms, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (group,))
    skip_absent_tpu(tmp_path)
    assert platforms() is None
    jax.config.update("jax_platforms", "cuda,cpu")
    skip_absent_tpu(tmp_path)
    assert platforms() == "cuda,cpu"


@pytest.mark.skipif(absent_tpu.has_tpu(), reason="this machine has a TPU")
@pytest.mark.parametrize("code", [COMMAND, LIBRARY])
def test_a_start_prints_nothing(tmp_path, code):
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS" and not name.startswith("TPU_")}
    env |= {"PYTHONPATH": str(SRC), "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, timeout=300)
    assert run.stdout + run.stderr == ""
