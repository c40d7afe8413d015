"""Runs the programs of a step on several devices: shardings of its arrays, and `shard_map` of one device's program.

Every device runs the same program on its part of the weights and of the pool. On a mesh of one axis, "tensor", what the
host reads or writes is replicated. With data ranks there is an axis "data" before it: each rank has a pool, and in what
the host writes a part, of its own; parts of all ranks are side by side along the first axis, in the order of the ranks,
and what the host reads is gathered. With one device there is no mesh, and programs are unchanged."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from routed_experts.layers.cache_layout import GroupedPages
from routed_experts.memory.kv_pool import HybridPool, KVPoolSpec
from routed_experts.models.base.sharding import AXIS, DATA_AXIS

REPLICATED = PartitionSpec()
# In `in_specs` and `out_specs`: sharded as the mesh says, and a part for each data rank.
WEIGHTS, POOL, BY_RANK = "weights", "pool", "by_rank"
GATHERED = "gathered"  # in `out_specs`: a part for each data rank, of which every device gets all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpecs:
    """Specs of the weights' leaves and of the pool on a mesh; hashable, so that it can be static."""

    mesh: Mesh
    weights: tuple[PartitionSpec, ...]
    pool: Any  # a PartitionSpec, or a GroupedPages or HybridPool of them

    @staticmethod
    def create(mesh: Mesh, weights: Sequence[Array], pool: KVPoolSpec) -> "MeshSpecs":
        """For weights on the mesh (or shapes with shardings) and one device's pool. Heads are sharded; rows shared by
        all heads and states of requests are replicated. Data ranks have pages and states of their own."""
        rank = DATA_AXIS if DATA_AXIS in mesh.axis_names else None
        by_rank, states = (REPLICATED, REPLICATED) if rank is None else (PartitionSpec(rank), PartitionSpec(None, rank))
        by_head = by_rank if pool.latent else PartitionSpec(rank, None, AXIS)
        pages = GroupedPages((by_head,) * (1 + len(pool.others))) if pool.others else by_head
        specs: list[PartitionSpec] = []
        for leaf in weights:
            assert isinstance(leaf.sharding, NamedSharding), leaf.sharding
            specs.append(leaf.sharding.spec)
        return MeshSpecs(
            mesh=mesh, weights=tuple(specs), pool=pages if pool.recurrent is None else HybridPool(pages, states)
        )

    def specs(self, what: Any) -> Any:
        """A tree of names and specs, the names replaced by their specs."""
        named = {WEIGHTS: list(self.weights), POOL: self.pool, BY_RANK: self.by_rank, GATHERED: REPLICATED}
        return jax.tree.map(lambda leaf: named[leaf] if isinstance(leaf, str) else leaf, what, is_leaf=_is_spec)

    @property
    def num_ranks(self) -> int:
        """Data ranks; 1 without that axis."""
        return self.mesh.shape.get(DATA_AXIS, 1)

    @property
    def by_rank(self) -> PartitionSpec:
        """The spec of arrays with a part for each data rank along the first axis."""
        return REPLICATED if self.num_ranks == 1 else PartitionSpec(DATA_AXIS)

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, REPLICATED)

    @property
    def own_part(self) -> NamedSharding:
        """The sharding of arrays with a part for each data rank."""
        return NamedSharding(self.mesh, self.by_rank)


def num_ranks(mesh_specs: MeshSpecs | None) -> int:
    """Data ranks of programs on this mesh, or on one device."""
    return 1 if mesh_specs is None else mesh_specs.num_ranks


def all_ranks(shapes: Any, mesh_specs: MeshSpecs | None) -> Any:
    """Shapes of the parts of all data ranks side by side, from those of one rank."""
    ranks = num_ranks(mesh_specs)
    if ranks == 1:
        return shapes
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ranks * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), shapes)


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
    results: trees of WEIGHTS (a list), POOL, BY_RANK, GATHERED (results alone) and REPLICATED."""
    if mesh_specs is None:
        return program
    return jax.shard_map(
        program if mesh_specs.num_ranks == 1 else _gather_ranks(program, out_specs),
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
    out_shardings: Any = None,
) -> Any:
    """The same, jitted, with arguments and results sharded so. `out_shardings`: of the results on one device, None: in
    its memory; on a mesh `out_specs` alone counts."""
    if mesh_specs is None:
        return jax.jit(program, donate_argnums=donate_argnums, out_shardings=out_shardings)
    mesh = mesh_specs.mesh
    in_shardings, mesh_out_shardings = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), mesh_specs.specs(what), is_leaf=_is_spec)
        for what in (in_specs, out_specs)
    )
    sharded = shard_program(program, mesh_specs, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, in_shardings=in_shardings, out_shardings=mesh_out_shardings, donate_argnums=donate_argnums)


def _gather_ranks(program: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """The program of one device, with the results that are GATHERED of all data ranks."""

    def gather(leaf: Array) -> Array:
        return lax.all_gather(leaf, DATA_AXIS, tiled=True)

    def run(*args: Any) -> Any:
        return jax.tree.map(
            lambda spec, part: jax.tree.map(gather, part) if spec == GATHERED else part,
            out_specs,
            program(*args),
            is_leaf=_is_spec,
        )

    return run


def _global_shape(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    names = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    counts = (1 if name is None else math.prod(mesh.shape[axis] for axis in _axes(name)) for name in names)
    shape = tuple(side * count for side, count in zip(leaf.shape, counts, strict=True))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _axes(name: Any) -> tuple[str, ...]:
    return name if isinstance(name, tuple) else (name,)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)
