"""A step on several devices: where its arrays lie, and the program of one device made the program of all. Knows no
model.

Every device runs the same program on its part of the weights and of the pool (`shard_map`, over a mesh of one axis);
what a host reads or writes is the same on all. With one device there is no mesh, and a program is what it is."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from routed_experts.memory.kv_pool import HybridPool, KVPoolSpec

REPLICATED = PartitionSpec()
WEIGHTS, POOL = "weights", "pool"  # in `takes` and `gives`: what stands where the mesh says


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpecs:
    """Specs of the weights' leaves and of the pool on a mesh of one axis; hashable, so that it can be static."""

    mesh: Mesh
    weights: tuple[PartitionSpec, ...]
    pool: Any  # a PartitionSpec, or a HybridPool of them

    @staticmethod
    def of(mesh: Mesh, weights: Sequence[Array], pool: KVPoolSpec) -> "MeshSpecs":
        """For weights that lie on the mesh (or shapes with shardings) and one device's pool: heads are dealt out, rows
        that all heads share and states of requests are not."""
        pages = REPLICATED if pool.latent else PartitionSpec(None, None, mesh.axis_names[0])
        specs: list[PartitionSpec] = []
        for leaf in weights:
            assert isinstance(leaf.sharding, NamedSharding), leaf.sharding
            specs.append(leaf.sharding.spec)
        return MeshSpecs(
            mesh=mesh, weights=tuple(specs), pool=pages if pool.recurrent is None else HybridPool(pages, REPLICATED)
        )

    def specs(self, what: Any) -> Any:
        """WEIGHTS and POOL by the specs that they stand for."""
        if isinstance(what, tuple):
            return tuple(self.specs(part) for part in what)
        return {WEIGHTS: list(self.weights), POOL: self.pool}[what] if isinstance(what, str) else what

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of what all devices hold alike."""
        return NamedSharding(self.mesh, REPLICATED)


def zeros(shapes: Any, on: MeshSpecs | None, specs: Any = REPLICATED) -> Any:
    """Zeroed arrays of one device's `shapes`, on every device."""
    if on is None:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    placed = whole(shapes, on, specs)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), placed)


def whole(shapes: Any, on: MeshSpecs | None, specs: Any = REPLICATED) -> Any:
    """Global shapes of what each device holds `shapes` of, with their shardings; the same shapes without a mesh."""
    if on is None:
        return shapes

    def one(spec: PartitionSpec, leaves: Any) -> Any:
        return jax.tree.map(lambda leaf: _whole(leaf, on.mesh, spec), leaves)

    return jax.tree.map(one, specs, shapes, is_leaf=_is_spec)


def shard_program(program: Callable[..., Any], on: MeshSpecs | None, *, takes: Any, gives: Any) -> Callable[..., Any]:
    """The program of all devices, from that of one. `takes` and `gives` say of its arguments and results whether they
    are the list of WEIGHTS, the POOL, or the same EVERYWHERE."""
    if on is None:
        return program
    return jax.shard_map(program, mesh=on.mesh, in_specs=on.specs(takes), out_specs=on.specs(gives), check_vma=False)


def jit_sharded(
    program: Callable[..., Any], on: MeshSpecs | None, *, takes: Any, gives: Any, donate_argnums: tuple[int, ...] = ()
) -> Any:
    """The same, jitted, its arguments and results where that says."""
    if on is None:
        return jax.jit(program, donate_argnums=donate_argnums)
    mesh = on.mesh
    arriving, leaving = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), on.specs(what), is_leaf=_is_spec)
        for what in (takes, gives)
    )
    spread = shard_program(program, on, takes=takes, gives=gives)
    return jax.jit(spread, in_shardings=arriving, out_shardings=leaving, donate_argnums=donate_argnums)


def _whole(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    names = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    shape = tuple(side if name is None else side * mesh.size for side, name in zip(leaf.shape, names, strict=True))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)
