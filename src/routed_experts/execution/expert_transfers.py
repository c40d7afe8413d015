"""Experts moved from device to device: which go where, and the program that carries them, a layer at a time. Knows no
model.

In a turn every device shows one of its experts to all, and each keeps what it wants of them; so the memory that a move
takes is one layer's part of a device, and an expert of each device. Which experts are shown and kept are arguments: one
program for all plans. Dims: I instances of a layer, V devices, L instances of a layer on one device, R layers of a run,
T turns at most."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32, Shaped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Turns of one layer. In turn t device v shows its instance `shown[t, v]` and puts what device `taken[t, v]` shows
    (-1: nothing) in its place `put[t, v]`. `num_copied`: instances that come from another device."""

    num_rounds: int
    shown: Int32[np.ndarray, "T V"]
    taken: Int32[np.ndarray, "T V"]
    put: Int32[np.ndarray, "T V"]
    num_copied: int


def plan_moves(old: Int[np.ndarray, " I"], new: Int[np.ndarray, " I"], *, num_devices: int) -> Moves:
    """Turns after which each instance holds the expert of `new`, where it held that of `old`. An expert that a device
    has already is not fetched from another; otherwise the device with the fewest to show shows it."""
    own = len(old) // num_devices
    wanted = [[at for at in range(v * own, (v + 1) * own) if old[at] != new[at]] for v in range(num_devices)]
    sources = {int(expert): [int(at) for at in np.flatnonzero(old == expert)] for expert in np.unique(old)}
    turns: list[tuple[list[int], list[int], list[int]]] = []
    copied, busy = 0, np.zeros(num_devices, np.int64)
    needs: list[tuple[int, int, int]] = []  # (source instance, device, place)
    for device, places in enumerate(wanted):
        for place in places:
            found = sources[int(new[place])]
            source = min(found, key=lambda at: (at // own != device, busy[at // own], at))
            busy[source // own] += 1
            copied += source // own != device
            needs.append((source, device, place - device * own))
    while needs:
        shown, taken, put = [-1] * num_devices, [-1] * num_devices, [0] * num_devices
        left: list[tuple[int, int, int]] = []
        for source, device, place in needs:
            at, slot = divmod(source, own)
            if taken[device] == -1 and shown[at] in (-1, slot):
                shown[at], taken[device], put[device] = slot, at, place
            else:
                left.append((source, device, place))
        turns.append(([max(slot, 0) for slot in shown], taken, put))
        needs = left
    padded = [*turns, *[([0] * num_devices, [-1] * num_devices, [0] * num_devices)] * (len(old) - len(turns))]
    arrays = (np.array([turn[part] for turn in padded], np.int32) for part in range(3))
    shown_all, taken_all, put_all = arrays
    return Moves(num_rounds=len(turns), shown=shown_all, taken=taken_all, put=put_all, num_copied=copied)


def move_experts(
    tables: list[Shaped[Array, "RL ..."]],
    row: Int32[Array, ""],
    num_rounds: Int32[Array, ""],
    shown: Int32[Array, "T V"],
    taken: Int32[Array, "T V"],
    put: Int32[Array, "T V"],
    *,
    own: int,
    axis: str,
) -> list[Shaped[Array, "RL ..."]]:
    """One device's part of the moves of layer `row`, in every array of experts; inside a `shard_map` over `axis`."""
    rank = lax.axis_index(axis)

    def moved(table: Array) -> Array:
        before = lax.dynamic_slice_in_dim(table, row * own, own)

        def turn(index: Array, after: Array) -> Array:
            mine = lax.dynamic_index_in_dim(before, shown[index, rank], keepdims=False)
            source, place = taken[index, rank], put[index, rank]
            came = lax.dynamic_index_in_dim(lax.all_gather(mine, axis), jnp.maximum(source, 0), keepdims=False)
            kept = lax.dynamic_index_in_dim(after, place, keepdims=False)
            return lax.dynamic_update_index_in_dim(after, jnp.where(source >= 0, came, kept), place, axis=0)

        return lax.dynamic_update_slice_in_dim(table, lax.fori_loop(0, num_rounds, turn, before), row * own, axis=0)

    return jax.tree.map(moved, tables)


def abstract_moves(num_instances: int, num_devices: int) -> tuple[Any, ...]:
    """Shapes of what follows the tables among the arguments of `move_experts`."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return number, number, *(jax.ShapeDtypeStruct((num_instances, num_devices), jnp.int32),) * 3
