"""What a GPU's compute capability lets kernels do."""

from collections.abc import Sequence
from typing import Any

import jax

_E4M3 = (8, 9)  # the first that converts e4m3 by an instruction; Triton has no other way


def converts_e4m3(devices: Sequence[Any] | None = None) -> bool:
    """Whether all GPUs among `devices`, by default those of this process, have compute capability 8.9 or more, which
    e4m3 needs. True without GPUs, as in a compilation ahead of time."""
    gpus = [device for device in devices or jax.local_devices() if device.platform == "gpu"]
    return all(tuple(map(int, device.compute_capability.split("."))) >= _E4M3 for device in gpus)
