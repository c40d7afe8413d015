"""The interface of every decoder: what it offers, and what callers pass in. Dims: N tokens, M MoE layers, K experts
per token, H query heads, G kv heads, C head dim, D hidden, V vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.lm_head import REFERENCE_HEAD, HeadProduct, LmHead
from routed_experts.layers.recurrent import RecurrentInputs
from routed_experts.layers.routing import ROUTED_IDS
from routed_experts.models.base.partitioning import AxisPartition, ParallelConfig

# (queries [N H C], keys [N G C], values [N G C], cache, layer) -> (mixed values [N H C], cache); the cache is the
# caller's own pytree. A layer that is not plain adds AttentionFeatures; a latent one passes rows [N 1 C] as keys, and
# None as values. `layer` counts attention layers only.
AttentionFn = Callable[..., tuple[Array, Any]]

# (inputs of a recurrent layer, cache, layer) -> (what was read [N ...], cache); `layer` counts those layers that keep a
# state
RecurrentFn = Callable[[RecurrentInputs, Any, Array], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceOps:
    """The operations that mix tokens of a sequence. A caller whose models keep no states may pass `attend`
    alone."""

    attend: AttentionFn
    recur: RecurrentFn | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRouting:
    """Ids to replay in all MoE layers, and weights where those are replayed too; rows that are not valid go to the live
    router."""

    ids: UInt[Array, "N M K"] | Int[Array, "N M K"]
    valid: Bool[Array, " N"]
    weights: Float[Array, "N M K"] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequiredFeatures:
    """What kernels must support besides the plain case, in words for an error: of experts (`MoeBackend.features`)
    and of attention (any word needs `AttentionBackend.run_with_features`)."""

    experts: frozenset[str] = frozenset()
    attention: frozenset[str] = frozenset()


PLAIN = RequiredFeatures()


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
    def position_limit(self) -> int | None: ...  # tokens of a sequence that it computes; None for any number
    @property
    def capture_spec(self) -> CaptureSpec | None: ...
    @property
    def logit_softcap(self) -> float: ...  # c of c tanh(scores / c), 0 for none
    @property
    def cache(self) -> CacheLayout: ...
    @property
    def needs(self) -> RequiredFeatures: ...
    def shard(self, parallel: ParallelConfig) -> "DecoderConfig": ...  # as one of several devices runs it
    def partitions(self, *, by_expert: bool) -> dict[str, AxisPartition]: ...  # how arrays are sharded, by dotted path


class Decoder(Protocol):
    """A model that serves and trains: `__call__` returns hidden states, `logits` the scores of the vocabulary."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def head_bias(self) -> nnx.Param[Array] | None: ...  # [V], added to the scores of the vocabulary

    def __call__(
        self,
        tokens: Int[Array, " N"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: Any,  # AttentionFn, or SequenceOps where the model keeps states
        cache: Any,
        capture: RoutedExpertsDeviceCache | None,
        *,
        kernels: Kernels,
        routed: TokenRouting | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]: ...

    def logits(self, hidden: Float[Array, "N D"], *, product: HeadProduct = REFERENCE_HEAD) -> Float[Array, "N V"]: ...

    def lm_head(self) -> LmHead: ...


def slice_layers(routed: TokenRouting | None, first: int, count: int) -> tuple[Array, Array | None] | None:
    """Ids and weights to replay in `count` MoE layers from `first` on, layer axis first, as a scan takes them."""
    if routed is None:
        return None
    ids, weights = (
        None if rows is None else jnp.swapaxes(rows[:, first : first + count], 0, 1)
        for rows in (routed.ids, routed.weights)
    )
    assert ids is not None
    return ids, weights


def checkpointed(body: Callable[..., Any]) -> Callable[..., Any]:
    """A scan's body that is computed again in the backward pass, but for the choice of experts, which is saved."""
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(ROUTED_IDS))
