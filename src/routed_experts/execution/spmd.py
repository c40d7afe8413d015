"""Runs the programs of a step on several devices: shardings of its arrays, and `shard_map` of one device's program.

Every device runs the same program on its part of the weights and of the pool, over a mesh of one axis; what the host
reads or writes is replicated. With one device there is no mesh, and programs are unchanged."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from routed_experts.layers.cache_layout import GroupedPages
from routed_experts.memory.kv_pool import HybridPool, KVPoolSpec

REPLICATED = PartitionSpec()
WEIGHTS, POOL = "weights", "pool"  # in `in_specs` and `out_specs`: sharded as the mesh says


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpecs:
    """Specs of the weights' leaves and of the pool on a mesh of one axis; hashable, so that it can be static."""

    mesh: Mesh
    weights: tuple[PartitionSpec, ...]
    pool: Any  # a PartitionSpec, or a GroupedPages or HybridPool of them

    @staticmethod
    def create(mesh: Mesh, weights: Sequence[Array], pool: KVPoolSpec) -> "MeshSpecs":
        """For weights on the mesh (or shapes with shardings) and one device's pool. Heads are sharded; rows shared by
        all heads and states of requests are replicated."""
        by_head = REPLICATED if pool.latent else PartitionSpec(None, None, mesh.axis_names[0])
        pages = GroupedPages((by_head,) * (1 + len(pool.others))) if pool.others else by_head
        specs: list[PartitionSpec] = []
        for leaf in weights:
            assert isinstance(leaf.sharding, NamedSharding), leaf.sharding
            specs.append(leaf.sharding.spec)
        return MeshSpecs(
            mesh=mesh, weights=tuple(specs), pool=pages if pool.recurrent is None else HybridPool(pages, REPLICATED)
        )

    def specs(self, what: Any) -> Any:
        """WEIGHTS and POOL replaced by their specs."""
        if isinstance(what, tuple):
            return tuple(self.specs(part) for part in what)
        return {WEIGHTS: list(self.weights), POOL: self.pool}[what] if isinstance(what, str) else what

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, REPLICATED)


def sharded_zeros(shapes: Any, mesh_specs: MeshSpecs | None, specs: Any = REPLICATED) -> Any:
    """Zeroed arrays of one device's `shapes`, on every device."""
    if mesh_specs is None:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    shapes = global_shapes(shapes, mesh_specs, specs)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)


def global_shapes(shapes: Any, mesh_specs: MeshSpecs | None, specs: Any = REPLICATED) -> Any:
    """Global shapes, with shardings, of arrays of which each device holds `shapes`; unchanged without a mesh."""
    if mesh_specs is None:
        return shapes

    def to_global(spec: PartitionSpec, leaves: Any) -> Any:
        return jax.tree.map(lambda leaf: _global_shape(leaf, mesh_specs.mesh, spec), leaves)

    return jax.tree.map(to_global, specs, shapes, is_leaf=_is_spec)


def shard_program(
    program: Callable[..., Any], mesh_specs: MeshSpecs | None, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """The program of all devices, from that of one. `in_specs` and `out_specs` are the specs of its arguments and
    results: the list of WEIGHTS, the POOL, or REPLICATED."""
    if mesh_specs is None:
        return program
    return jax.shard_map(
        program,
        mesh=mesh_specs.mesh,
        in_specs=mesh_specs.specs(in_specs),
        out_specs=mesh_specs.specs(out_specs),
        check_vma=False,
    )


def jit_sharded(
    program: Callable[..., Any],
    mesh_specs: MeshSpecs | None,
    *,
    in_specs: Any,
    out_specs: Any,
    donate_argnums: tuple[int, ...] = (),
) -> Any:
    """The same, jitted, with arguments and results sharded so."""
    if mesh_specs is None:
        return jax.jit(program, donate_argnums=donate_argnums)
    mesh = mesh_specs.mesh
    in_shardings, out_shardings = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), mesh_specs.specs(what), is_leaf=_is_spec)
        for what in (in_specs, out_specs)
    )
    sharded = shard_program(program, mesh_specs, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate_argnums)


def _global_shape(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    names = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    shape = tuple(side if name is None else side * mesh.size for side, name in zip(leaf.shape, names, strict=True))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)
