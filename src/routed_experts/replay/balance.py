"""Balance statistics of a training forward: slots that each expert ran, and the mean probability its router gave it.

Every token is counted, replayed or not; padding is not. Counts carry no gradient, probabilities do. Dims: M MoE
layers, E experts, K experts per token."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BalanceOn = Literal["executed", "native"]
BALANCE_ON: tuple[BalanceOn, ...] = ("executed", "native")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterBalance:
    """`counts`: slots of each expert, of the executed or of the live router's choice; `probabilities`: the mean over
    tokens of the router's scores as a distribution over all experts, with its gradient; `num_tokens`: tokens that were
    counted."""

    counts: Int[Array, "M E"]
    probabilities: Float[Array, "M E"]
    num_tokens: Int[Array, ""]


def balance_loss(balance: RouterBalance) -> Float[Array, " M"]:
    """The load-balancing loss of each layer, E * sum over experts of (share of slots) * (mean probability): 1 where
    both are even (Fedus et al. 2021, eq. 4; over K slots a token). Multiply by a coefficient and add to the
    objective."""
    counts = balance.counts.astype(jnp.float32)
    shares = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1.0)
    return balance.counts.shape[1] * jnp.sum(shares * balance.probabilities, axis=1)
