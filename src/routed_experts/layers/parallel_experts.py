"""Expert- and tensor-parallel MoE, by any backend: each device runs its shard and returns a partial sum. Expert ids
are logical, and the same on all devices.

A shard is either a slice of every expert's width, or whole experts. Slots of experts on other devices are padding to
the backend, so each slot is a row of its own there. Where an expert has several instances, slots are spread over
them by water-filling, unless the router has chosen them. Instances hold the same numbers, so no output depends on
which one runs. Dims: N tokens, K experts per token, E experts of a layer, R layers of the stack, V devices, D
hidden, F expert width."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas
from routed_experts.layers.moe import ExpertCall, MoeBackend, combine
from routed_experts.layers.parallel import AxisGroup


def parallel_moe(backend: MoeBackend, group: AxisGroup) -> MoeBackend:
    """The backend on one device's share; results are partial sums over `group`."""
    run_share = _run_replicated if group.expert_parallel else _run_slice

    def run(call: ExpertCall) -> Float[Array, "N D"]:
        return run_share(call, backend, group)

    return dataclasses.replace(backend, run=run)


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
            replicas=None,
            instances=None,
        )
    )
    return combine(outputs.reshape(num_rows, top_k, -1), call.weights, call.valid)
