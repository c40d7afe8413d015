"""The training forward: whole sequences through the serving module, with live or replayed routing.

Differentiable; ids are inputs, so scan, remat and sharding see the same ids. Live routing is a replay in which no
row is valid: one graph for both, so that a compiler fuses and rounds them alike. Dims: B sequences, S tokens of a
sequence, M MoE layers, K experts per token, V vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, UInt, UInt8

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import InvalidRequestError, RoutingAlignmentError
from routed_experts.layers.attention import causal_attention
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import causal_variant
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS, MoeBackend
from routed_experts.layers.recurrent import RecurrentInputs
from routed_experts.models.base.interface import Decoder, SequenceOps, TokenRouting
from routed_experts.replay.balance import BALANCE_ON, BalanceOn, RouterBalance
from routed_experts.replay.batch import RoutedBatch
from routed_experts.replay.recorder import BalanceRecorder, RoutingRecorder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """Logits float32, the executed ids on request (logical, in executed order), and slot misses: how many of the K
    experts of a row the live router of that layer would not have chosen; 0 without replay, None without MoE
    layers. `balance`: how evenly experts are used, on request."""

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
) -> ForwardOutput:
    """Score whole sequences causally. `routed=None` is another trace of the same graph; new ids or a new `valid` never
    retrace.

    `segment_ids` separate packed sequences (positions restart in each); `remat` computes layers again in the
    backward pass, but never the choice of experts. `balance_on` counts slots and probabilities of the experts by layer
    (`ForwardOutput.balance`), of what was "executed" or of what the live router chose ("native"); padding is left out.
    Raises, at trace time, RoutingAlignmentError for a `routed` of other shapes than the tokens' (outside jit also for
    ids that are no experts), InvalidRequestError for another `balance_on`."""
    if balance_on is not None and balance_on not in BALANCE_ON:
        raise InvalidRequestError(
            f"balance_on={balance_on!r} is unknown; choose {', '.join(BALANCE_ON)} or None", param="balance_on"
        )
    (batch, length), spec, replays = tokens.shape, model.config.capture_spec, routed is not None
    if routed is None and spec is not None:
        routed = _no_valid_rows(batch, length, spec)
    segments = segment_ids
    if routed is not None:  # padding, which may be on either side, is a segment of its own
        segments = jnp.where(routed.pad, -1, 0 if segment_ids is None else segment_ids)
    token_positions = (
        jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)) if positions is None else positions
    )

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
            assert v is not None, "a cache without values is latent and has features"
            return causal_attention(q, k, v, segments).reshape(queries.shape), cache
        return causal_variant(q, k, v, segments, features).reshape(*queries.shape[:2], -1), cache

    def recur(inputs: RecurrentInputs, cache: None, layer: Int[Array, ""]) -> tuple[Float[Array, "N ..."], None]:
        return inputs.sequences(segments, batch), cache

    replay = None if routed is None else _token_routing(routed, tokens.shape, spec, check_ids=replays)
    valid = jnp.ones(tokens.size, bool) if routed is None else ~routed.pad.reshape(-1)
    recorder = balance = None
    if spec is not None:
        recorder = RoutingRecorder.start(
            tokens.size, spec, None if balance_on is None else BalanceRecorder.start(valid, spec, balance_on)
        )
    kernels = Kernels(moe=backend)
    ops = attend if model.config.cache.recurrent is None else SequenceOps(attend, recur)
    hidden, _, recorded = model(
        tokens.reshape(-1),
        token_positions.reshape(-1),
        valid,
        ops,
        None,
        recorder,
        kernels=kernels,
        routed=replay,
        remat=remat,
    )
    ids = slot_miss = None
    if isinstance(recorded, RoutingRecorder) and recorded.slot_miss is not None:
        ids = recorded.rows().reshape(batch, length, -1, recorded.spec.top_k) if return_routed else None
        slot_miss = recorded.slot_miss.T.reshape(batch, length, -1)
        balance = None if recorded.balance is None else recorded.balance.result()
    return ForwardOutput(model.logits(hidden).reshape(batch, length, -1), ids, slot_miss, balance)


def _no_valid_rows(batch: int, length: int, spec: CaptureSpec) -> RoutedBatch:
    """Return a replay in which every position is a token and no row is valid. The barrier hides this from the compiler,
    which would otherwise drop the replay's operations, fuse differently, and round differently (GPU, TPU)."""
    no = jnp.zeros((batch, length), bool)
    ids = jnp.zeros((batch, length, spec.num_moe_layers, spec.top_k), spec.dtype)
    return lax.optimization_barrier(RoutedBatch(ids, no, no))


def _token_routing(
    routed: RoutedBatch, shape: tuple[int, ...], spec: CaptureSpec | None, *, check_ids: bool
) -> TokenRouting:
    """Flatten the batch to tokens. Raises RoutingAlignmentError for shapes other than the tokens' and the model's, and
    for ids that are no experts where they can be read: outside jit."""
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
            received = f"{array.dtype}{list(array.shape)}"
            raise RoutingAlignmentError(
                f"routed.{name} is {received}; expected {word} {list(expected)}: [B, S] of tokens and [M, K] of this "
                "model"
            )
    if check_ids and _is_readable(routed.ids) and _is_readable(routed.valid):
        routed.check_ids(spec)
    weights = None if routed.weights is None else routed.weights.reshape(-1, *rows[2:])
    return TokenRouting(routed.ids.reshape(-1, *rows[2:]), routed.valid.reshape(-1), weights)


def _is_readable(array: object) -> bool:
    """Whether this process holds all values of an array."""
    return not isinstance(array, Tracer) and (not isinstance(array, jax.Array) or array.is_fully_addressable)
