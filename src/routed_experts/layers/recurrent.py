"""What every layer with a state of fixed size has in common: the delta rule (delta_rule.py) and short convolutions
(short_conv.py). A state is a pytree whose leaves begin with the sequences. Dims: N tokens, B sequences, S tokens of a
sequence."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class RecurrentShape(Protocol):
    """Sizes of a layer; static."""

    def zeros(self, count: int, dtype: jnp.dtype) -> Any: ...  # the initial states of `count` sequences

    def no_inputs(self, num_tokens: int, dtype: jnp.dtype) -> "RecurrentInputs":
        """Zeroed inputs of `num_tokens` tokens, as `RecurrentInputs.of_states` has them. `dtype`: of states."""
        ...


class RecurrentInputs(Protocol):
    """Per-token values of a layer, before tokens are mixed."""

    @property
    def mixed(self) -> Float[Array, "N Q"]: ...  # before the convolution
    @property
    def shape(self) -> RecurrentShape: ...

    def of_states(self, rows: Int[Array, " M"] | slice) -> "RecurrentInputs":
        """These tokens, without what only outputs need."""
        ...

    def ragged(self, state: Any, query_starts: Int[Array, " B1"]) -> tuple[Float[Array, "N ..."], Any]:
        """Tokens of B sequences that go on from `state`, neighbours in order; and the states after them. Sequences
        without a token keep their state; rows of no sequence give 0."""
        ...

    def sequences(self, segment_ids: Int[Array, "B S"] | None, count: int) -> Float[Array, "N ..."]:
        """`count` whole sequences from the initial state; where the segment changes, a sequence starts anew.
        Differentiable."""
        ...


def select_states(keep: Bool[Array, " B"], states: Any, others: Any) -> Any:
    """`states` where `keep`, the others elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, b), states, others)
