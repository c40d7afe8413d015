"""SlotState: where each request stands, on the device, so that a verify step can follow one that the host has not read.

How far a verify step brings a request depends on the drafts that it accepts. The host then knows bounds alone: it sends
positions that count from where the request's slot stands (ModelWorkerBatch.is_ahead), and `locate` adds those on the
device, before any other program of the step. Dims: N padded tokens, B padded requests, R request slots, k drafts."""

import dataclasses
import functools
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
    slots, rows, places = parts["request_slots"], parts["token_rows"], parts["positions"]
    start = jnp.where(parts["seq_lens"] > 0, state.positions[slots], 0)
    is_real = jnp.arange(shape.num_tokens) < parts["num_tokens"]
    drafts = state.drafts[slots[rows], jnp.clip(places - 1, 0, state.drafts.shape[1] - 1)]
    return pack_words(
        parts
        | {
            "positions": jnp.where(is_real, places + start[rows], 0),
            "token_ids": jnp.where(is_real & (places > 0), jnp.maximum(drafts, 0), parts["token_ids"]),
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
    batch = unpack(packed, shape)
    slots, first = batch.request_slots, batch.paged.positions[batch.paged.query_starts[:-1]]
    return SlotState(
        positions=state.positions.at[slots].set(first + 1 + accepted),
        drafts=state.drafts.at[slots].set(proposed[:, : state.drafts.shape[1]]),
    )


@functools.lru_cache(maxsize=256)
def locate_program(shape: BatchShape) -> Any:
    """`locate`, jitted and cached; all engines of a process share its traces."""
    return jax.jit(functools.wraps(locate)(functools.partial(locate, shape=shape)))


@functools.lru_cache(maxsize=256)
def advance_program(shape: BatchShape) -> Any:
    """`advance`, jitted in the same way."""
    return jax.jit(functools.wraps(advance)(functools.partial(advance, shape=shape)), donate_argnums=(0,))
