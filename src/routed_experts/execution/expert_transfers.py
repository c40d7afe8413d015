"""Moves experts between devices: plans the transfers of one layer, and the program that runs them.

In each round every device sends one of its experts to all, and each keeps the one it needs. So a move takes the memory
of one layer's part of a device and of one expert of each device. The experts to send and keep are arguments: one
program for all plans. Dims: I instances of a layer, V devices, L instances of a layer on one device, R layers of a
block, T rounds at most."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32, Shaped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTransfers:
    """Rounds of one layer. In round t device v sends its instance `sent[t, v]`, and writes what device `received[t, v]`
    sends (-1: nothing) at its index `written[t, v]`. `num_copied`: instances that come from another device."""

    num_rounds: int
    sent: Int32[np.ndarray, "T V"]
    received: Int32[np.ndarray, "T V"]
    written: Int32[np.ndarray, "T V"]
    num_copied: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    source: int  # device
    sent: int  # index on it
    target: int  # device
    written: int  # index on it


def plan_transfers(old: Int[np.ndarray, " I"], new: Int[np.ndarray, " I"], *, num_devices: int) -> ExpertTransfers:
    """Rounds after which each instance holds the expert of `new` instead of that of `old`.

    An expert that a device already holds is not fetched from another; otherwise the device that sends least sends
    it."""
    pending = _transfers(old, new, num_devices)
    num_copied = sum(transfer.source != transfer.target for transfer in pending)
    rounds: list[tuple[list[int], list[int], list[int]]] = []
    while pending:
        sent, received, written = [-1] * num_devices, [-1] * num_devices, [0] * num_devices
        postponed: list[_Transfer] = []
        for transfer in pending:
            if received[transfer.target] == -1 and sent[transfer.source] in (-1, transfer.sent):
                sent[transfer.source] = transfer.sent
                received[transfer.target], written[transfer.target] = transfer.source, transfer.written
            else:
                postponed.append(transfer)
        rounds.append(([max(index, 0) for index in sent], received, written))
        pending = postponed
    idle = ([0] * num_devices, [-1] * num_devices, [0] * num_devices)
    padded = np.array([*rounds, *[idle] * (len(old) - len(rounds))], np.int32)  # [T, 3, V]
    return ExpertTransfers(
        num_rounds=len(rounds), sent=padded[:, 0], received=padded[:, 1], written=padded[:, 2], num_copied=num_copied
    )


def _transfers(old: Int[np.ndarray, " I"], new: Int[np.ndarray, " I"], num_devices: int) -> list[_Transfer]:
    """A transfer for each instance whose expert changes."""
    per_device = len(old) // num_devices
    holders = {int(expert): [int(index) for index in np.flatnonzero(old == expert)] for expert in np.unique(old)}
    transfers: list[_Transfer] = []
    num_sent = np.zeros(num_devices, np.int64)
    for target in range(num_devices):
        for index in range(target * per_device, (target + 1) * per_device):
            if old[index] == new[index]:
                continue

            def cost(holder: int, target: int = target) -> tuple[bool, int, int]:
                device = holder // per_device
                return device != target, int(num_sent[device]), holder

            source, sent = divmod(min(holders[int(new[index])], key=cost), per_device)
            num_sent[source] += 1
            transfers.append(_Transfer(source, sent, target, index - target * per_device))
    return transfers


def move_experts(
    tables: list[Shaped[Array, "RL ..."]],
    row: Int32[Array, ""],
    num_rounds: Int32[Array, ""],
    sent: Int32[Array, "T V"],
    received: Int32[Array, "T V"],
    written: Int32[Array, "T V"],
    *,
    per_device: int,
    axis: str | tuple[str, ...],
) -> list[Shaped[Array, "RL ..."]]:
    """Run one device's part of the transfers of layer `row`, in every array of experts, in a `shard_map` of `axis`."""
    rank = lax.axis_index(axis)

    def move(table: Array) -> Array:
        before = lax.dynamic_slice_in_dim(table, row * per_device, per_device)

        def run_round(index: Array, after: Array) -> Array:
            expert = lax.dynamic_index_in_dim(before, sent[index, rank], keepdims=False)
            source, target = received[index, rank], written[index, rank]
            arriving = lax.dynamic_index_in_dim(lax.all_gather(expert, axis), jnp.maximum(source, 0), keepdims=False)
            present = lax.dynamic_index_in_dim(after, target, keepdims=False)
            return lax.dynamic_update_index_in_dim(after, jnp.where(source >= 0, arriving, present), target, axis=0)

        moved = lax.fori_loop(0, num_rounds, run_round, before)
        return lax.dynamic_update_slice_in_dim(table, moved, row * per_device, axis=0)

    return jax.tree.map(move, tables)


def abstract_transfers(num_instances: int, num_devices: int) -> tuple[Any, ...]:
    """Shapes of the arguments of `move_experts` after the tables."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return number, number, *(jax.ShapeDtypeStruct((num_instances, num_devices), jnp.int32),) * 3
