"""A GPU that is not there, for programs that are lowered for it."""

from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def hopper_mesh(count: int = 1) -> AbstractMesh:
    """So many H200s along axis "x". The lowering of a Pallas kernel asks JAX 0.11 which GPU it is for."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    return AbstractMesh((count,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
