"""The training forward: whole sequences through the module that also serves, with live or replayed routing.
Knows nothing of losses or optimisers. Differentiable; ids are inputs, so scan, remat and sharding see the same ids.
Live is a replay in which no row is valid: one graph for both, so that a compiler fuses and rounds them alike.
Dims: B sequences, S tokens of a sequence, M MoE layers, K experts per token, V vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt, UInt8

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import InvalidRequestError, RoutingAlignmentError
from routed_experts.layers.attention import causal_attention
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import causal_variant
from routed_experts.layers.delta_rule import DeltaInputs, delta_sequence
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS, MoeBackend
from routed_experts.models.base.interface import Decoder, SequenceOps, TokenRouting
from routed_experts.replay.balance import BALANCE_ON, BalanceOn, RouterBalance
from routed_experts.replay.batch import RoutedBatch
from routed_experts.replay.recorder import BalanceRecorder, RoutingRecorder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """Logits float32, the executed ids when they were asked for (logical, in executed order), and slot misses: how many
    of the K experts of a row the live router of that layer would not have chosen; 0 where nothing is replayed, None
    without MoE layers. `balance`: how evenly experts are used, where it was asked for."""

    logits: Float[Array, "B S V"]
    ids: UInt[Array, "B S M K"] | None
    slot_miss: UInt8[Array, "B S M"] | None
    balance: RouterBalance | None = None


def forward(
    model: Decoder,
    tokens: Int[Array, "B S"],
    *,
    positions: Int[Array, "B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    routed: RoutedBatch | None = None,
    return_routed: bool = False,
    balance_on: BalanceOn | None = None,
    backend: MoeBackend = MOE_BACKENDS["grouped"],
    remat: bool = False,
) -> Forward:
    """Score whole sequences causally. `routed=None` is another trace of the same graph; new ids or a new `valid` never
    retrace.

    `segment_ids` separate packed sequences (positions count anew in each); `remat` computes layers again in the
    backward pass, but never the choice of experts. `balance_on` counts slots and probabilities of the experts by layer
    (`Forward.balance`), of what was "executed" or of what the live router chose ("native"); padding is left out.
    Raises, at trace time, RoutingAlignmentError for a `routed` of other shapes than the tokens', InvalidRequestError
    for another `balance_on`."""
    if balance_on is not None and balance_on not in BALANCE_ON:
        raise InvalidRequestError(
            f"balance_on={balance_on!r} is unknown; choose {', '.join(BALANCE_ON)} or None", param="balance_on"
        )
    (batch, length), spec = tokens.shape, model.config.capture_spec
    if routed is None and spec is not None:
        routed = _nothing_known(batch, length, spec)
    segments = segment_ids
    if routed is not None:  # a place without a token is a segment of its own: padding may stand on either side
        segments = jnp.where(routed.pad, -1, 0 if segment_ids is None else segment_ids)
    where = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)) if positions is None else positions

    def attend(
        queries: Float[Array, "N H C"],
        keys: Float[Array, "N G C"],
        values: Float[Array, "N G V"] | None,
        cache: None,
        layer: Int[Array, ""],
        features: AttentionFeatures | None = None,
    ) -> tuple[Float[Array, "N H V"], None]:
        q, k = (x.reshape(batch, length, *x.shape[1:]) for x in (queries, keys))
        v = None if values is None else values.reshape(batch, length, *values.shape[1:])
        if features is None:
            assert v is not None, "rows without values are latent, and say so in their features"
            return causal_attention(q, k, v, segments).reshape(queries.shape), cache
        return causal_variant(q, k, v, segments, features).reshape(*queries.shape[:2], -1), cache

    def recur(inputs: DeltaInputs, cache: None, layer: Int[Array, ""]) -> tuple[Float[Array, "N H V"], None]:
        return delta_sequence(inputs, segments, batch), cache

    replay = None if routed is None else _token_routing(routed, tokens.shape, spec)
    valid = jnp.ones(tokens.size, bool) if routed is None else ~routed.pad.reshape(-1)
    tape = balance = None
    if spec is not None:
        tape = RoutingRecorder.start(
            tokens.size, spec, None if balance_on is None else BalanceRecorder.start(valid, spec, balance_on)
        )
    kernels = Kernels(moe=backend)
    ops = attend if model.config.cache.recurrent is None else SequenceOps(attend, recur)
    hidden, _, told = model(
        tokens.reshape(-1), where.reshape(-1), valid, ops, None, tape, kernels=kernels, routed=replay, remat=remat
    )
    ids = slot_miss = None
    if isinstance(told, RoutingRecorder) and told.slot_miss is not None:
        ids = told.rows().reshape(batch, length, -1, told.spec.top_k) if return_routed else None
        slot_miss = told.slot_miss.T.reshape(batch, length, -1)
        balance = None if told.balance is None else told.balance.told()
    return Forward(model.logits(hidden).reshape(batch, length, -1), ids, slot_miss, balance)


def _nothing_known(batch: int, length: int, spec: CaptureSpec) -> RoutedBatch:
    """A replay in which every place is a token and no row is valid. The barrier keeps a compiler from seeing that: it
    would leave out what a replay needs, fuse otherwise, and round otherwise where fused operations round otherwise
    (GPU, TPU)."""
    nowhere = jnp.zeros((batch, length), bool)
    ids = jnp.zeros((batch, length, spec.num_moe_layers, spec.top_k), spec.dtype)
    return lax.optimization_barrier(RoutedBatch(ids, nowhere, nowhere))


def _token_routing(routed: RoutedBatch, shape: tuple[int, ...], spec: CaptureSpec | None) -> TokenRouting:
    """The batch by token; refuses one that is not of these tokens and this model."""
    if spec is None:
        raise RoutingAlignmentError("routed is given, but this model has no MoE layer; leave it out")
    rows = (*shape, spec.num_moe_layers, spec.top_k)
    for name, array, expected, kinds in (
        ("ids", routed.ids, rows, "iu"),
        ("valid", routed.valid, shape, "b"),
        ("pad", routed.pad, shape, "b"),
        ("weights", routed.weights, rows, "f"),
    ):
        if array is not None and (array.shape != expected or np.dtype(array.dtype).kind not in kinds):
            word = {"iu": "integers", "b": "booleans", "f": "floats"}[kinds]
            came = f"{array.dtype}{list(array.shape)}"
            raise RoutingAlignmentError(
                f"routed.{name} is {came}; expected {word} {list(expected)}: [B, S] of tokens and [M, K] of this model"
            )
    weights = None if routed.weights is None else routed.weights.reshape(-1, *rows[2:])
    return TokenRouting(routed.ids.reshape(-1, *rows[2:]), routed.valid.reshape(-1), weights)
