"""How the slots of a recorded step choose among the instances of their expert. Knows no trace.

"even": every instance takes the same share of its expert's slots, as over many steps. "waterfill": by the load that this step brings to
the devices, with the serving operator; no token's experts change. "reroute": each instance has room for 1.25 times its mean share, and
a slot that finds no instance of its expert with room goes to another expert, which changes the model. A record does not say which
expert was next: such slots are counted, and sent nowhere.
Dims: N tokens of a step, M MoE layers, E experts, J replica positions, K experts per token, I instances, V devices."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Array, Float, Float64, Int, Int64, UInt

from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import Placement
from routed_experts.placement.balance import device_load

CAPACITY_FACTOR = 1.25
Dispatch = Literal["even", "waterfill", "reroute"]
DISPATCHES: tuple[str, ...] = get_args(Dispatch)
Sent = tuple[Float64[np.ndarray, "M V"], Int64[np.ndarray, " M"]]
Send = Callable[[UInt[np.ndarray, "N M K"]], Sent]


def dispatcher(placement: Placement, dispatch: Dispatch, *, step_tokens: int) -> Send:
    """The function that gives, for a step of at most `step_tokens` tokens, the slots on each device and how many of each layer found
    no room. Raises PlacementError for a way that there is not."""
    if dispatch not in DISPATCHES:
        raise PlacementError(f"dispatch={dispatch!r}; choose one of {', '.join(DISPATCHES)}")
    none = np.zeros(placement.num_layers, np.int64)
    if dispatch == "even":
        return lambda rows: (device_load(count_experts(rows, placement.num_experts), placement), none)
    choose = _choose_by_load(placement) if dispatch == "waterfill" else _choose_with_room(placement)

    def send(rows: UInt[np.ndarray, "N M K"]) -> Sent:
        padded = np.full((step_tokens, *rows.shape[1:]), -1, np.int32)  # one shape, so one program
        padded[: len(rows)] = rows
        instances = choose(padded.transpose(1, 0, 2), len(rows))[:, : len(rows)].reshape(placement.num_layers, -1)  # [M, N * K]
        counts = count_experts(instances[:, :, None].transpose(1, 0, 2) + 1, placement.num_instances + 1)  # the first: not sent
        devices = counts[:, 1:].reshape(placement.num_layers, placement.num_devices, -1).sum(axis=2)
        return devices.astype(np.float64), counts[:, 0]

    return send


def count_experts(rows: Int[np.ndarray, "N M K"], num_experts: int) -> Int64[np.ndarray, "M E"]:
    """How often each layer's rows name each expert."""
    num_layers = rows.shape[1]
    keys = rows + (np.arange(num_layers) * num_experts)[:, None]
    return np.bincount(keys.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def _choose_by_load(placement: Placement) -> Callable[[Int[np.ndarray, "M N K"], int], Int[np.ndarray, "M N K"]]:
    import jax

    from routed_experts.layers.waterfill import waterfill_replicas

    def layer(ids: Int[Array, "N K"], order: Int[Array, "E J"]) -> Int[Array, "N K"]:
        return waterfill_replicas(ids, order, num_devices=placement.num_devices, num_instances=placement.num_instances)

    choose = jax.jit(jax.vmap(layer))
    return lambda ids, _: np.asarray(choose(ids, placement.logical_to_physical_map))


def _choose_with_room(placement: Placement) -> Callable[[Int[np.ndarray, "M N K"], int], Int[np.ndarray, "M N K"]]:
    import jax
    import jax.numpy as jnp

    from routed_experts.layers.selection import balanced_expert_selection
    from routed_experts.layers.selection_checks import expert_capacity

    def layer(inputs: tuple[Int[Array, "N K"], Int[Array, "E J"]], capacity: Int[Array, " I"]) -> Int[Array, "N K"]:
        ids, order = inputs
        tokens, ranks = jnp.arange(len(ids))[:, None], jnp.arange(ids.shape[1], 0, -1, dtype=jnp.float32)
        unknown: Float[Array, "N E"] = jnp.full((len(ids), order.shape[0]), -jnp.inf, jnp.float32)
        scores = unknown.at[tokens, jnp.maximum(ids, 0)].set(ranks)
        picked = balanced_expert_selection(
            scores, scores, order, capacity, k=ids.shape[1], valid=ids[:, 0] >= 0, mode="reroute", on_exhausted="drop", impl="lists"
        )  # fmt: skip
        return picked.instance_ids

    @jax.jit
    def choose(ids: Any, orders: Any, capacity: Any) -> Any:
        return jax.lax.map(lambda inputs: layer(inputs, capacity), (ids, orders))

    def chosen(ids: Int[np.ndarray, "M N K"], num_tokens: int) -> Int[np.ndarray, "M N K"]:
        capacity = expert_capacity(num_tokens, ids.shape[2], placement.num_instances, CAPACITY_FACTOR)
        return np.asarray(choose(ids, placement.logical_to_physical_map, capacity))

    return chosen
