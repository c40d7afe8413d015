"""The training forward: whole sequences through the serving module, with live or replayed routing.

Differentiable, but for backends of NO_GRADIENT; ids are inputs, so scan, remat and sharding see the same ids. Live
routing is a replay in which no row is valid: one graph for both, so that a compiler fuses and rounds them alike.
Dims: B sequences, S tokens of a sequence, M MoE layers, K experts per token, V vocabulary."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import linear_call
from jaxtyping import Array, Float, Int, UInt, UInt8

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
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
from routed_experts.replay.check import layers_with_repeats
from routed_experts.replay.recorder import BalanceRecorder, RoutingRecorder

NO_GRADIENT = ("tiled",)  # names of backends whose loop has no gradient in reverse mode
_OF_PADDING = int(np.iinfo(np.int32).min)  # the segment of places without a token
_LARGEST = int(np.iinfo(np.int32).max)  # JAX computes with int32


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
    repeats_in_layers: Iterable[int] = (),
) -> ForwardOutput:
    """Score whole sequences causally. `routed=None` is another trace of the same graph; new ids or a new `valid` never
    retrace.

    `segment_ids` separate packed sequences; `positions` are those of tokens in their sequences, by
    default counted from the first token of each segment behind its padding. `remat` computes layers again in the
    backward pass, but never the choice of experts. `balance_on` counts slots and probabilities of the experts by layer
    (`ForwardOutput.balance`), of what was "executed" or of what the live router chose ("native"); padding is left out.
    `backend` runs the experts: "grouped" and "reference" of MOE_BACKENDS, and PERMUTED of layers/permuted_moe.py, are
    differentiable; "tiled" is for a forward without gradients.
    `repeats_in_layers`: hidden-layer indices of hash-routed layers, as in `align`.
    Sequences may be longer than the context of config.json, but not where the model computes something else there:
    dynamic positions past `max_position_embeddings`, longrope past `original_max_position_embeddings`, and a
    sliding window or chunk as wide as the context, past its end (`model.config.position_limit`).
    Raises, at trace time, InvalidRequestError for tokens, positions or segments that are no integers [B, S], for
    sequences above that limit, for another `balance_on` or `backend`, and for a gradient through "tiled", and
    RoutingAlignmentError for a `routed` of other shapes than the tokens'; outside jit also for tokens, positions,
    segments and rows out of range: positions are 0 to 2**31 - 1, and segments fit int32, whose least value marks the
    segment of padding.
    Under jit positions, segments and padding cannot be read: with any of them the caller keeps sequences within the
    limit."""
    _check_choices(balance_on, backend)
    _check_shapes(tokens, positions, segment_ids)
    tokens, positions, segment_ids = map(_in_native_order, (tokens, positions, segment_ids))
    (batch, length), spec, replays = tokens.shape, model.config.capture_spec, routed is not None
    if routed is None and spec is not None:
        routed = _no_valid_rows(batch, length, spec)
    repeats = layers_with_repeats(repeats_in_layers)
    replay = None
    if routed is not None:
        routed = _checked_batch(routed, tokens.shape, spec, repeats, check_ids=replays)
        replay = _token_routing(routed)
    pad = routed.pad if replays and routed is not None else None
    _check_values("tokens", tokens, pad, "ids", 0, model.config.vocab_size - 1)
    _check_values("positions", positions, pad, "positions", 0, _LARGEST)
    _check_values("segment_ids", segment_ids, pad, "ids", _OF_PADDING + 1, _LARGEST)
    segments = segment_ids
    if routed is not None:  # padding, which may be on either side, is a segment of its own
        own = 0 if segment_ids is None else jnp.asarray(segment_ids).astype(jnp.int32)  # fewer bits have no _OF_PADDING
        segments = jnp.where(routed.pad, _OF_PADDING, own)
        tokens = jnp.where(routed.pad, 0, tokens)  # the embedding of no id is NaN, and so are gradients
    token_positions = _default_positions(batch, length, segments) if positions is None else positions
    if model.config.position_limit is not None:
        is_plain = positions is None and segment_ids is None and pad is None
        largest = length - 1 if is_plain else _largest_position(token_positions, pad)
        _check_position(largest, model.config.position_limit, is_given=positions is not None)

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
        out = causal_variant(q, k, v, segments, features, positions=token_positions)
        return out.reshape(*queries.shape[:2], -1), cache

    def recur(inputs: RecurrentInputs, cache: None, layer: Int[Array, ""]) -> tuple[Float[Array, "N ..."], None]:
        return inputs.sequences(segments, batch), cache

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
    output = ForwardOutput(model.logits(hidden).reshape(batch, length, -1), ids, slot_miss, balance)
    if spec is None or backend.name not in NO_GRADIENT:
        return output
    return jax.tree.map(lambda x: _without_gradient(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, output)


@jax.custom_jvp
def _without_gradient(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x`. Its gradient in reverse mode is refused before JAX meets the loop."""
    return x


@_without_gradient.defjvp
def _refuse_gradient(
    primals: tuple[Float[Array, "..."]], tangents: tuple[Float[Array, "..."]]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    def transpose(residuals: tuple[()], cotangent: Float[Array, "..."]) -> Float[Array, "..."]:
        text = f"backend={NO_GRADIENT[0]!r} has no gradients: its loop over tiles has no reverse mode"
        raise InvalidRequestError(f"{text}; give one of MOE_BACKENDS: {_listed_backends()}", param="backend")

    return primals[0], linear_call(lambda residuals, tangent: tangent, transpose, (), tangents[0])


def _listed_backends() -> str:
    differentiable = [repr(name) for name in MOE_BACKENDS if name not in NO_GRADIENT]
    return f"{', '.join(differentiable)} or, without gradients, {', '.join(map(repr, NO_GRADIENT))}"


def _check_choices(balance_on: object, backend: object) -> None:
    """Raise InvalidRequestError for an unknown balance, or what is no backend."""
    if balance_on is not None and balance_on not in BALANCE_ON:
        raise InvalidRequestError(
            f"balance_on={balance_on!r} is unknown; choose {', '.join(BALANCE_ON)} or None", param="balance_on"
        )
    if not isinstance(backend, MoeBackend):
        raise InvalidRequestError(
            f"backend={backend!r} is no MoeBackend; give one of MOE_BACKENDS: {_listed_backends()}", param="backend"
        )


def _check_shapes(tokens: Any, positions: Any, segment_ids: Any) -> None:
    """Raise InvalidRequestError for arrays that are no integers [B, S] of one shape."""
    for name, array in (("tokens", tokens), ("positions", positions), ("segment_ids", segment_ids)):
        if array is None and name != "tokens":
            continue
        shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
        is_integer = dtype is not None and np.dtype(dtype).kind in "iu"
        is_like_tokens = name == "tokens" or shape == tokens.shape
        if shape is None or len(shape) != 2 or 0 in shape or not is_integer or not is_like_tokens:
            received = type(array).__name__ if shape is None else f"{dtype}{list(shape)}"
            expected = "[B, S], at least [1, 1]" if name == "tokens" else f"{list(tokens.shape)}, as tokens has"
            raise InvalidRequestError(f"{name} is {received}; give an array of integers {expected}", param=name)


def _check_values(name: str, array: Any, pad: Any, noun: str, lowest: int, largest: int) -> None:
    """Raise InvalidRequestError for the first value, of those that can be read and are not of `pad`, that is outside
    `lowest` to `largest`."""
    if array is None or not _is_readable(array) or not (pad is None or _is_readable(pad)):
        return
    values = np.asarray(array)
    outside = (values < lowest) | (values > largest)
    outside = outside if pad is None else outside & ~np.asarray(pad)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise InvalidRequestError(
            f"{name}[{row}, {column}] is {values[row, column]}; give {noun} of {lowest} to {largest}, and mark places "
            "without a token in routed.pad",
            param=name,
        )


def _largest_position(positions: Any, pad: Any) -> int:
    """The largest position of a token that is not `pad`; 0 where positions cannot be read."""
    if not _is_readable(positions) or (pad is not None and not _is_readable(pad)):
        return 0
    values = np.asarray(positions)
    return int(values.max() if pad is None else np.where(np.asarray(pad), 0, values).max())


def _check_position(largest: int, limit: int, *, is_given: bool) -> None:
    """Raise InvalidRequestError for a position that is not below the limit. `is_given`: by the caller, so that it says
    nothing of the number of tokens."""
    if largest < limit:
        return
    reason = "its rotary frequencies change (dynamic, longrope), or a window ends that is left out"
    if is_given:
        text = f"positions hold {largest}, and this model computes positions of 0 to {limit - 1}: past them {reason}"
        raise InvalidRequestError(
            f"{text}; give smaller positions, and cut sequences to {limit} tokens", param="positions"
        )
    text = f"tokens have a sequence of {largest + 1} tokens, above the {limit} that this model computes"
    raise InvalidRequestError(f"{text}: past them {reason}; cut sequences to {limit} tokens", param="tokens")


def _default_positions(batch: int, length: int, segments: Int[Array, "B S"] | None) -> Int[Array, "B S"]:
    """Positions of tokens in their segments, counted from where each begins."""
    columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segments is None:
        return columns
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return columns - lax.cummax(jnp.where(begins, columns, 0), axis=1)


def _no_valid_rows(batch: int, length: int, spec: CaptureSpec) -> RoutedBatch:
    """Return a replay in which every position is a token and no row is valid. The barrier hides this from the compiler,
    which would otherwise drop the replay's operations, fuse differently, and round differently (GPU, TPU)."""
    no = jnp.zeros((batch, length), bool)
    ids = jnp.zeros((batch, length, spec.num_moe_layers, spec.top_k), spec.dtype)
    return lax.optimization_barrier(RoutedBatch(ids, no, no))


def _checked_batch(
    routed: RoutedBatch,
    shape: tuple[int, ...],
    spec: CaptureSpec | None,
    repeats_in_layers: tuple[int, ...],
    *,
    check_ids: bool,
) -> RoutedBatch:
    """Return the batch with all arrays in the machine's byte order. Raises RoutingAlignmentError for what is no array,
    for shapes other than the tokens' and the model's, and for ids that are no experts where they can be read: outside
    jit."""
    if spec is None:
        raise RoutingAlignmentError("routed is given, but this model has no MoE layer; leave it out")
    if not isinstance(routed, RoutedBatch):
        raise RoutingAlignmentError(f"routed is {type(routed).__name__}; give a RoutedBatch, as align returns it")
    rows = (*shape, spec.num_moe_layers, spec.top_k)
    for name, array, expected, kind in (
        ("ids", routed.ids, rows, np.integer),
        ("valid", routed.valid, shape, np.bool_),
        ("pad", routed.pad, shape, np.bool_),
        ("weights", routed.weights, rows, np.floating),
    ):
        if array is None and name == "weights":
            continue
        is_array = isinstance(array, np.ndarray | jax.Array)
        if not is_array or array.shape != expected or not jnp.issubdtype(array.dtype, kind):
            word = {np.integer: "integers", np.bool_: "booleans", np.floating: "floats"}[kind]
            received = f"{array.dtype}{list(array.shape)}" if is_array else short_repr(array)
            raise RoutingAlignmentError(
                f"routed.{name} is {received}; expected {word} {list(expected)}: [B, S] of tokens and [M, K] of this "
                "model"
            )
    if check_ids and all(map(_is_readable, (routed.ids, routed.valid, routed.pad))):
        routed.check(spec, repeats_in_layers=repeats_in_layers)
    return jax.tree.map(_in_native_order, routed)


def _token_routing(routed: RoutedBatch) -> TokenRouting:
    """Flatten the batch to tokens."""
    row = routed.ids.shape[2:]
    weights = None if routed.weights is None else routed.weights.reshape(-1, *row)
    return TokenRouting(routed.ids.reshape(-1, *row), routed.valid.reshape(-1), weights)


def _in_native_order(array: Any) -> Any:
    """A host array of another byte order in the machine's: JAX takes the bytes of the other for native ones."""
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def _is_readable(array: object) -> bool:
    """Whether this process holds all values of an array."""
    return not isinstance(array, Tracer) and (not isinstance(array, jax.Array) or array.is_fully_addressable)
