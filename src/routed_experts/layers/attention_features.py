"""What an attention layer does beyond plain causal softmax attention. Dims: H query heads."""

import dataclasses

import jax
from jaxtyping import Array, Float

from routed_experts.layers.kv_format import KVScales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionFeatures:
    """None, 0 and 0.0 are the plain case. `window`: tokens seen, itself included. `chunk`: only tokens of the own chunk
    are seen. `latent`: keys are rows that all heads share, and their first `latent` numbers are the values. `scale`: of
    the scores. `kv_scales`: of the pool's codes, for backends that take them (AttentionBackend)."""

    sinks: Float[Array, " H"] | None = None
    kv_scales: KVScales | None = None
    window: int = dataclasses.field(default=0, metadata={"static": True})
    chunk: int = dataclasses.field(default=0, metadata={"static": True})
    latent: int = dataclasses.field(default=0, metadata={"static": True})
    scale: float = dataclasses.field(default=0.0, metadata={"static": True})
