"""SlotState: where each request stands, on the device, so that a verify step can follow one that the host has not read.

How far a verify step brings a request depends on the drafts that it accepts. The host then knows bounds alone: it sends
positions that count from where the request's slot stands (ModelWorkerBatch.is_ahead), and a program adds those on the
device, before any other program of the step: `locate` where a model has drafted, `locate_text` where the host has.
Dims: N padded tokens, B padded requests, R request slots, C tokens of a continuation, C1 = C + 1 (column 0 is the
position of the first one), k drafts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from routed_experts.execution.forward_batch import BatchShape, pack_words, unpack, unpack_words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotState:
    """By request slot, after its last verify step: the position of the token that it feeds next, and the drafts that
    follow this token (negative: none from there on)."""

    positions: Int32[Array, " R"]
    drafts: Int32[Array, "R k"]

    @classmethod
    def abstract(cls, num_request_slots: int, num_drafts: int) -> "SlotState":
        """Shapes and dtypes."""
        positions = jax.ShapeDtypeStruct((num_request_slots,), jnp.int32)
        drafts = jax.ShapeDtypeStruct((num_request_slots, num_drafts), jnp.int32)
        return cls(positions=positions, drafts=drafts)  # pyright: ignore[reportArgumentType]  # shapes for lowering


def locate(packed: Int32[Array, " words"], state: SlotState, *, shape: BatchShape) -> Int32[Array, " words"]:
    """Return the packed form of a batch that is ahead, with the positions and drafts of its slots. The first token of
    each request stays FROM_DEVICE. A draft that does not exist is id 0, which is accepted if the model samples it."""
    parts = unpack_words(packed, shape)
    rows, offsets = parts["token_rows"], parts["positions"]
    drafts = state.drafts[parts["request_slots"][rows], jnp.clip(offsets - 1, 0, state.drafts.shape[1] - 1)]
    return _complete(parts, _starts(parts, state.positions), drafts, shape=shape)


def locate_text(
    packed: Int32[Array, " words"],
    positions: Int32[Array, " R"],
    continuations: Int32[Array, "B C1"],
    *,
    shape: BatchShape,
) -> Int32[Array, " words"]:
    """As `locate`, with the drafts from a text. `positions`: those of a SlotState; `continuations`: of each request the
    position of the first token of its text, then C tokens; the text has the draft of each position, where it reaches
    it (negative: no further)."""
    parts = unpack_words(packed, shape)
    rows, offsets = parts["token_rows"], parts["positions"]
    start, num_tokens = _starts(parts, positions), continuations.shape[1] - 1
    index = start[rows] + offsets - continuations[rows, 0]
    drafts = continuations[rows, 1 + jnp.clip(index, 0, num_tokens - 1)]
    return _complete(parts, start, jnp.where((index >= 0) & (index < num_tokens), drafts, -1), shape=shape)


def _starts(parts: Mapping[str, Array], positions: Int32[Array, " R"]) -> Int32[Array, " B"]:
    """The position of the first token of each request, 0 of padding."""
    return jnp.where(parts["seq_lens"] > 0, positions[parts["request_slots"]], 0)


def _complete(
    parts: Mapping[str, Array], start: Int32[Array, " B"], drafts: Int32[Array, " N"], *, shape: BatchShape
) -> Int32[Array, " words"]:
    """The packed form with positions that count from `start`, and the draft of each token but the first of a
    request."""
    rows, offsets = parts["token_rows"], parts["positions"]
    is_real = jnp.arange(shape.num_tokens) < parts["num_tokens"]
    return pack_words(
        dict(parts)
        | {
            "positions": jnp.where(is_real, offsets + start[rows], 0),
            "token_ids": jnp.where(is_real & (offsets > 0), jnp.maximum(drafts, 0), parts["token_ids"]),
            "seq_lens": parts["seq_lens"] + start,
            "position": parts["position"] + start,
        }
    )


def advance(
    state: SlotState,
    packed: Int32[Array, " words"],
    accepted: Int[Array, " B"],
    proposed: Int32[Array, "B 2k"],
    *,
    shape: BatchShape,
) -> SlotState:
    """Return the state after a verify step: behind the accepted drafts, with what is proposed then. `packed`: as
    `locate` returns it, or of a batch that is not ahead; the padding slot takes what padding rows have."""
    slots = unpack(packed, shape).request_slots
    return SlotState(
        positions=advance_positions(state.positions, packed, accepted, shape=shape),
        drafts=state.drafts.at[slots].set(proposed[:, : state.drafts.shape[1]]),
    )


def advance_positions(
    positions: Int32[Array, " R"], words: Int32[Array, " words"], accepted: Int[Array, " B"], *, shape: BatchShape
) -> Int32[Array, " R"]:
    """As `advance`, of positions alone. `words`: the packed form, which rows of experts may follow."""
    batch = unpack(words, shape)
    first = batch.paged.positions[batch.paged.query_starts[:-1]]
    return positions.at[batch.request_slots].set(first + 1 + accepted)


@functools.lru_cache(maxsize=256)
def locate_program(shape: BatchShape) -> Any:
    """`locate`, jitted and cached; all engines of a process share its traces."""
    return _jitted(locate, shape)


@functools.lru_cache(maxsize=256)
def advance_program(shape: BatchShape) -> Any:
    """`advance`, jitted in the same way."""
    return _jitted(advance, shape, donate_argnums=(0,))


@functools.lru_cache(maxsize=256)
def locate_text_program(shape: BatchShape) -> Any:
    """`locate_text`, jitted in the same way."""
    return _jitted(locate_text, shape)


@functools.lru_cache(maxsize=256)
def advance_positions_program(shape: BatchShape) -> Any:
    """`advance_positions`, jitted in the same way."""
    return _jitted(advance_positions, shape, donate_argnums=(0,))


def _jitted(function: Callable[..., Any], shape: BatchShape, **options: Any) -> Any:
    """The program of a function, by its name."""
    return jax.jit(functools.wraps(function)(functools.partial(function, shape=shape)), **options)
