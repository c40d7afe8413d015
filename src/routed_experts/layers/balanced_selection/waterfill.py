"""Spread the slots of each expert over its replicas so that the fullest device has the least load; no token's experts
change.

Water-filling: a replica's share p of its expert becomes p * (mean / load of its device) ^ 1.5, renormalised, a few
times, and the shares of the lowest maximum are retained. The power 1.5 goes further in a step than 1, and where 2
would swing for ever it halves the error. A slot is assigned by its rank among its expert's slots, so the result is a
function of the ids alone. Instance i lives on device i // (I / devices). Dims: N tokens, K experts per token, E
experts, J replica positions, I instances."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.core.errors import ConfigError
from routed_experts.layers.balanced_selection.admission import count_requests, rank_in_expert

ITERATIONS = 16
LEAST_LOAD = 1e-3  # of the mean: what an idle device counts as, so that its pull stays finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Shares:
    """Shares of the instances, and the best so far by the load of its fullest device."""

    shares: Float[Array, " I"]
    best: Float[Array, " I"]
    lowest: Float[Array, ""]


def waterfill_replicas(
    ids: Int[Array, "N K"],
    replica_order: Int[Array, "E J"],
    *,
    num_devices: int,
    num_instances: int,
    iterations: int = ITERATIONS,
    axis_name: str | None = None,
) -> Int[Array, "N K"]:
    """Choose the instance, int32, of every slot; -1 stays -1.

    `ids` int32, -1 for padding; `replica_order` int32, -1 at the tail, as `check_replica_order` passes it. Inside
    `shard_map` with the tokens cut along the mesh axis `axis_name`, loads and ranks are those of the whole group
    (one all-gather of E counts), and the result is the one that the uncut batch has. Raises ConfigError for shapes that
    do not fit."""
    _check(ids, replica_order, num_devices, num_instances, iterations)
    num_experts, width = replica_order.shape
    flat = jnp.where(ids < 0, num_experts, ids).reshape(-1)
    rank, counts = rank_in_expert(flat, num_experts), count_requests(flat, num_experts)
    if axis_name is not None:
        every = lax.all_gather(counts, axis_name)  # [devices, E]
        earlier = jnp.arange(every.shape[0]) < lax.axis_index(axis_name)
        before = jnp.sum(jnp.where(earlier[:, None], every, 0), axis=0, dtype=jnp.int32)
        rank, counts = rank + jnp.append(before, 0)[flat], jnp.sum(every, axis=0, dtype=jnp.int32)
    shares = _level(counts, replica_order, num_devices, num_instances, iterations)
    ends = jnp.cumsum(jnp.where(replica_order >= 0, shares[replica_order], 0), axis=1)
    cuts = jnp.floor(counts[:, None].astype(jnp.float32) * ends + 0.5).astype(jnp.int32)
    is_last = jnp.arange(width) >= jnp.sum(replica_order >= 0, axis=1, keepdims=True) - 1
    cuts = jnp.where(is_last, jnp.iinfo(jnp.int32).max, cuts)
    position = jnp.sum((cuts[flat] <= rank[:, None]).astype(jnp.int32), axis=1)
    return jnp.where(ids < 0, -1, replica_order[flat, position].reshape(ids.shape))


def _level(
    counts: Int[Array, " E"], replica_order: Int[Array, "E J"], num_devices: int, num_instances: int, iterations: int
) -> Float[Array, " I"]:
    """Find the shares. Sums run over fixed positions in a fixed order: every device of a group computes the same."""
    is_replica = replica_order >= 0
    experts = jnp.broadcast_to(jnp.arange(replica_order.shape[0], dtype=jnp.int32)[:, None], replica_order.shape)
    owner = (
        jnp.zeros(num_instances, jnp.int32)
        .at[jnp.where(is_replica, replica_order, num_instances)]
        .set(experts, mode="drop")
    )
    counts_by_instance = counts.astype(jnp.float32)[owner]

    def loads(shares: Float[Array, " I"]) -> Float[Array, " V"]:
        return jnp.sum((counts_by_instance * shares).reshape(num_devices, -1), axis=1)

    def step(_: Int[Array, ""], state: _Shares) -> _Shares:
        load = loads(state.shares)
        highest, mean = jnp.max(load), jnp.mean(load)
        best = jnp.where(highest < state.lowest, state.shares, state.best)
        pull = mean / jnp.maximum(load, jnp.maximum(LEAST_LOAD * mean, 1e-20))
        moved = state.shares * jnp.repeat(pull * jnp.sqrt(pull), num_instances // num_devices)
        total = jnp.sum(jnp.where(is_replica, moved[replica_order], 0), axis=1)
        moved = moved / jnp.maximum(total, 1e-20)[owner]
        return _Shares(moved, best, jnp.minimum(highest, state.lowest))

    even = 1 / jnp.sum(is_replica, axis=1).astype(jnp.float32)[owner]
    return lax.fori_loop(0, iterations, step, _Shares(even, even, jnp.float32(jnp.inf))).best


def _check(
    ids: Int[Array, "N K"], replica_order: Int[Array, "E J"], num_devices: int, num_instances: int, iterations: int
) -> None:
    """Refuse wrong shapes and dtypes; values are checked on the host (checks.py)."""
    for name, array in (("ids", ids), ("replica_order", replica_order)):
        if array.ndim != 2 or array.dtype != jnp.int32:
            raise ConfigError(
                f"{name} is {array.dtype}{list(array.shape)}; it must be int32 of two axes: cast it, or drop an axis"
            )
    if ids.size == 0 or (replica_order.shape[0] + 1) * ids.size > jnp.iinfo(jnp.int32).max:
        raise ConfigError(
            f"ids are {list(ids.shape)} of {replica_order.shape[0]} experts; at least one, and counted in int32: use "
            "smaller batches"
        )
    if num_devices < 1 or num_instances < 1 or num_instances % num_devices:
        raise ConfigError(
            f"num_instances={num_instances} does not divide into num_devices={num_devices}: every device holds equally "
            "many, at least one"
        )
    if iterations < 1:
        raise ConfigError(
            f"iterations={iterations}; at least 1 is needed (1 is the even split, {ITERATIONS} is the default)"
        )
