"""What a GPU's compute capability lets kernels do."""

from collections.abc import Sequence
from typing import Any

import jax

_E4M3 = (8, 9)  # the first that converts e4m3 by an instruction; Triton has no other way


def converts_e4m3(devices: Sequence[Any] | None = None) -> bool:
    """Whether all GPUs among `devices`, by default those of this process, have compute capability 8.9 or more, which
    e4m3 needs. True without GPUs, as in a compilation ahead of time."""
    gpus = [device for device in devices or jax.local_devices() if device.platform == "gpu"]
    return all(_has_e4m3(device.compute_capability) for device in gpus)


def _has_e4m3(capability: str) -> bool:
    """Whether a compute capability has that instruction. The names of AMD's GPUs, as gfx942, are none."""
    major, _, minor = capability.partition(".")
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) >= _E4M3
