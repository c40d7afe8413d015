"""Keeps JAX from starting the TPU runtime where libtpu is installed but the machine has no TPU.

The runtime would fail quietly for JAX, but not for the reader: it prints a dozen lines to standard error first."""

import importlib.metadata
import importlib.util
from pathlib import Path

import jax

_GOOGLE = "0x1ae0"  # PCI vendor
_NOT_ACCELERATORS = ("0x01", "0x02")  # PCI classes of Google's virtual disks and network cards
_GPUS = ("nvidia*", "kfd", "dxg")  # of NVIDIA, AMD and WSL, in /dev


def has_tpu(root: Path = Path("/")) -> bool:
    """Whether the machine shows a TPU: /dev/accelN, /dev/vfio/N, or a PCI device of Google."""
    if any(root.glob("dev/accel*")) or any(root.glob("dev/vfio/[0-9]*")):
        return True
    devices = [file.parent for file in root.glob("sys/bus/pci/devices/*/vendor") if _read(file) == _GOOGLE]
    return not all(_read(device / "class").startswith(_NOT_ACCELERATORS) for device in devices)


def skip_absent_tpu(root: Path = Path("/")) -> None:
    """Let JAX take the CPU at once, where it would end up there anyway.

    Changes nothing where platforms are chosen, where libtpu is not installed, or beside a TPU, a GPU or a plugin."""
    if jax.config.values["jax_platforms"] or importlib.util.find_spec("libtpu") is None or has_tpu(root):
        return
    has_gpu = any(any(root.glob(f"dev/{name}")) for name in _GPUS)
    has_plugin = importlib.util.find_spec("jax_plugins") is not None or importlib.metadata.entry_points(
        group="jax_plugins"
    )
    if not has_gpu and not has_plugin:
        jax.config.update("jax_platforms", "cpu")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:  # a device that has just gone
        return ""
