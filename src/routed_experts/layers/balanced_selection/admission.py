"""Who comes first: takers counted and numbered, and the cutoff after the last one that fits. Knows nothing of experts
or tokens.

A choice is a number below `num_targets`, or `num_targets` itself for none; agents come first by their place in the
array. All is integer arithmetic on one packed sort, so equal on every device. Dims: A agents, X targets."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def count_takers(choice: Int[Array, " A"], num_targets: int) -> Int[Array, " X"]:
    """Count the agents of each target."""
    return jnp.zeros(num_targets, jnp.int32).at[choice].add(1, mode="drop")


def admission_cutoff(choice: Int[Array, " A"], takers: Int[Array, " X"], room: Int[Array, " X"]) -> Int[Array, " X"]:
    """Give the place after each target's `room`-th taker; what it says where `takers` <= `room`, or `room` is 0, has no
    meaning."""
    agents = choice.shape[0]
    last = jnp.cumsum(takers, dtype=jnp.int32) - takers + room - 1
    return _packed(choice)[jnp.clip(last, 0, agents - 1)] % agents + 1


def rank_in_expert(choice: Int[Array, " A"], num_targets: int) -> Int[Array, " A"]:
    """Number the agents of each target from 0 on."""
    agents, takers = choice.shape[0], count_takers(choice, num_targets)
    packed, before = _packed(choice), jnp.cumsum(takers, dtype=jnp.int32) - takers
    number = (
        jnp.arange(agents, dtype=jnp.int32) - jnp.append(before, jnp.sum(takers, dtype=jnp.int32))[packed // agents]
    )
    return jnp.zeros(agents, jnp.int32).at[packed % agents].set(number, unique_indices=True)


def _packed(choice: Int[Array, " A"]) -> Int[Array, " A"]:
    """Sort agents by target, then by place, as target * A + place."""
    agents = choice.shape[0]
    return jnp.sort(choice * agents + jnp.arange(agents, dtype=jnp.int32))
