"""What every decoder of models/ offers, and what callers hand it. Knows no architecture.
Dims: N tokens, M MoE layers, K experts per token, H query heads, G kv heads, C head dim, D hidden, V vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jaxtyping import Array, Bool, Float, Int, UInt

from routed_experts.capture.device_cache import _RoutedExpertsDeviceCache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend

# (queries [N H C], keys [N G C], values [N G C], cache, layer) -> (mixed values [N H C], cache); the cache is the caller's own pytree
Attend = Callable[[Array, Array, Array, Any, Array], tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRouting:
    """Ids to replay in all MoE layers; rows that are not valid go to the live router."""

    ids: UInt[Array, "N M K"] | Int[Array, "N M K"]
    valid: Bool[Array, " N"]


class DecoderConfig(Protocol):
    """Shapes that pools and programs are sized by."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def capture_spec(self) -> CaptureSpec | None: ...


class Decoder(Protocol):
    """A model that serves and trains: `__call__` gives hidden states, `logits` the scores of the vocabulary."""

    @property
    def config(self) -> DecoderConfig: ...

    def __call__(
        self,
        tokens: Int[Array, " N"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: Attend,
        cache: Any,
        capture: _RoutedExpertsDeviceCache | None,
        *,
        kernels: Kernels,
        routed: TokenRouting | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "N D"], Any, _RoutedExpertsDeviceCache | None]: ...

    def logits(self, hidden: Float[Array, "N D"], *, linear: LinearBackend = REFERENCE_LINEAR) -> Float[Array, "N V"]: ...

    def unembedding(self) -> Float[Array, "D V"]: ...
