"""Expert- and tensor-parallel MoE, by any backend: each device runs its shard and returns a partial sum. Expert ids
are logical, and the same on all devices.

Experts are shared by the devices of all data ranks. The rows of a layer and the choices of their routers are gathered
from all ranks, every device runs its shard for all of them, and each rank gets the sum of its own rows:

    rank 0   route N rows  |           |  its experts, R*N rows  |            |  N rows, summed over "data"
    rank 1   route N rows  |  gather   |  its experts, R*N rows  |  sum, own  |  N rows, summed over "data"
The sum over the devices of a rank is the caller's, as it is without data ranks.

A shard is either a slice of every expert's width, or whole experts. Slots of experts on other devices are padding to
the backend, so each slot is a row of its own there. Where an expert has several instances, slots are spread over
them by water-filling, unless the router has chosen them. Instances hold the same numbers, so no output depends on
which one runs. Dims: N tokens, K experts per token, E experts of a layer, R data ranks, V devices, D hidden."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas
from routed_experts.layers.moe import ExpertCall, MoeBackend, combine
from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup


def parallel_moe(backend: MoeBackend, group: AxisGroup, ranks: AxisGroup = SINGLE_DEVICE) -> MoeBackend:
    """The backend on one device's share of the experts, which `group` shares; results are partial sums over the devices
    of a data rank. `ranks`: the devices with this one's place in all data ranks."""
    run_share = _run_replicated if group.expert_parallel else _run_slice

    def run(call: ExpertCall) -> Float[Array, "N D"]:
        return ranks.sum_own_rows(run_share(_gather_call(call, ranks), backend, group))

    return dataclasses.replace(backend, run=run)


def _gather_call(call: ExpertCall, ranks: AxisGroup) -> ExpertCall:
    """The call with the rows of all data ranks, by one collective."""
    if ranks.count == 1:
        return call
    assert call.instances is None, "with data ranks instances have no capacities"
    top_k, flags = call.ids.shape[1], call.valid.astype(jnp.int32)[:, None]
    parts = [_to_words(call.x), call.ids.astype(jnp.int32), _to_words(call.weights.astype(jnp.float32)), flags]
    words = ranks.gather_rows(jnp.concatenate(parts, axis=1))
    width = parts[0].shape[1]
    x, ids, weights, valid = jnp.split(words, (width, width + top_k, width + 2 * top_k), axis=1)
    return dataclasses.replace(
        call,
        x=_from_words(x, call.x),
        ids=ids.astype(call.ids.dtype),
        weights=lax.bitcast_convert_type(weights, jnp.float32).astype(call.weights.dtype),
        valid=valid[:, 0] != 0,
    )


def _to_words(x: Float[Array, "N D"]) -> Int32[Array, "N W"]:
    """The bits of rows, as int32."""
    per_word = 4 // x.dtype.itemsize
    pairs = x if per_word == 1 else x.reshape(x.shape[0], -1, per_word)
    return lax.bitcast_convert_type(pairs, jnp.int32)


def _from_words(words: Int32[Array, "M W"], like: Float[Array, "N D"]) -> Float[Array, "M D"]:
    """Rows of the dtype of `like` from their bits."""
    return lax.bitcast_convert_type(words, like.dtype).reshape(words.shape[0], like.shape[1])


def _run_slice(call: ExpertCall, backend: MoeBackend, group: AxisGroup) -> Float[Array, "N D"]:
    """All slots on F / V columns of their experts. The bias of the sum comes from the first device alone."""
    if call.down_bias is None:
        return backend.run(call)
    return backend.run(
        dataclasses.replace(call, down_bias=jnp.where(group.rank == 0, call.down_bias, jnp.zeros_like(call.down_bias)))
    )


def _run_replicated(call: ExpertCall, backend: MoeBackend, group: AxisGroup) -> Float[Array, "N D"]:
    """The slots whose experts are among this device's E / V, each as a row with one expert of weight 1; then weighed
    and summed as on one device."""
    (num_rows, top_k), share = call.ids.shape, (group.instances or call.num_experts) // group.count
    ids = jnp.where(call.valid[:, None], call.ids if call.instances is None else call.instances, -1)
    if call.replicas is not None and call.instances is None:
        ids = waterfill_replicas(ids, call.replicas, num_devices=group.count, num_instances=group.instances)
    local_experts = (ids >= group.rank * share) & (ids < (group.rank + 1) * share)
    ids = ids - group.rank * share
    outputs = backend.run(
        dataclasses.replace(
            call,
            x=jnp.repeat(call.x, top_k, axis=0),
            ids=jnp.where(local_experts, ids, 0).reshape(-1, 1),
            weights=jnp.ones((num_rows * top_k, 1), call.weights.dtype),
            valid=local_experts.reshape(-1),
            first_expert=call.first_expert
            // call.num_experts
            * share,  # counted in the experts of each layer that are here
            num_experts=share,
            devices=group.count,
            replicas=None,
            instances=None,
        )
    )
    return combine(outputs.reshape(num_rows, top_k, -1), call.weights, call.valid)
