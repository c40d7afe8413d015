"""The head of a model: hidden states to scores of the vocabulary.

Where embeddings are tied, the matrix is the table of the embeddings, whose rows are tokens. A kernel that reads it in
place spares the transposed copy that XLA makes on a CPU in each step. Dims: N tokens, D hidden, V vocabulary."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend

TiedLinear = Callable[[Float[Array, "N D"], Float[Array, "V D"]], Float[Array, "N V"]]  # float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadProduct:
    """The product with the matrix of the vocabulary, accumulated in float32. `tied` reads a table of embeddings in
    place; None: `linear` takes its transpose."""

    linear: LinearBackend = REFERENCE_LINEAR
    tied: TiedLinear | None = None

    def run(self, hidden: Float[Array, "N D"], head: "LmHead") -> Float[Array, "N V"]:
        """Scores without bias and softcap."""
        hidden = hidden.astype(head.matrix.dtype)
        if head.tied and self.tied is not None:
            return self.tied(hidden, head.matrix)
        return self.linear.run(hidden, head.columns[None], 0, jnp.float32)


REFERENCE_HEAD = HeadProduct()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LmHead:
    """The weights of a head. `tied`: the matrix is the table of the embeddings. `softcap`: c of c tanh(scores / c), 0
    for none."""

    matrix: Float[Array, "D V"] | Float[Array, "V D"]
    bias: Float[Array, " V"] | None = None
    tied: bool = dataclasses.field(default=False, metadata={"static": True})
    softcap: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def columns(self) -> Float[Array, "D V"]:
        """The matrix, one column a token."""
        return self.matrix.T if self.tied else self.matrix

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.matrix.shape[0 if self.tied else 1]

    def logits(self, hidden: Float[Array, "N D"], product: HeadProduct = REFERENCE_HEAD) -> Float[Array, "N V"]:
        """Scores of the vocabulary, float32."""
        scores = product.run(hidden, self)
        scores = scores if self.bias is None else scores + self.bias.astype(jnp.float32)
        return cap_logits(scores, self.softcap)


def cap_logits(logits: Float[Array, "N V"], softcap: float) -> Float[Array, "N V"]:
    """c tanh(logits / c) for a softcap c, which bounds them (Gemma 2, section 2); 0 for none."""
    return jnp.tanh(logits / softcap) * softcap if softcap else logits
