"""The router as one TPU kernel: scores, top-k, weights, and the executed ids written into the step's block in place.
It decides as layers.routing.replay_topk does, ties and replayed rows included.

Everything is token-minor, [K, N]: a token is a lane, so the choice runs over sublanes and the rows of a layer in the
block [M*K, N] are whole tiles. The block is aliased to the output, and a layer's write is part of the kernel:
capture adds no operation to a layer. A window of rows is a tile of 8 where K divides 8, and whole tiles where 8
divides K; for any other K the ids are written by an operation of its own. A score that is NaN counts as the
greatest, as in lax.top_k, so a row of NaN still names K experts. Dims: N tokens, E experts, M MoE layers, K experts
per token, T tokens of a tile."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing

TOKEN_TILE = 512
SUBLANES = 8
NAN_SCORE = 2.0  # above every score; what was taken is -1, below every score


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What is static in one build of the kernel; `block_rows` is M*K, or 0 without a block to write."""

    spec: RouterSpec
    num_tokens: int
    replays: bool
    block_rows: int


def fused_router(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    block: Int[Array, "MK N"] | None,
    layer: Int[Array, ""],
    spec: RouterSpec,
    *,
    interpret: Any = False,
) -> tuple[Routing, Int[Array, "MK N"] | None]:
    """Choose K experts a token and record them at MoE layer `layer` of the block."""
    num_tokens, top_k = logits.shape[0], spec.top_k
    layer = jnp.asarray(layer, jnp.int32)
    in_kernel = block is not None and window_rows(block.shape[0], top_k) > 0
    operands = [layer.reshape(1), logits.T]
    if routed is not None:
        operands += [routed.ids.T.astype(jnp.int32), routed.valid[None].astype(jnp.int32)]
    form = _Form(spec=spec, num_tokens=num_tokens, replays=routed is not None, block_rows=0)
    if block is not None and in_kernel:
        operands, form = [*operands, block], dataclasses.replace(form, block_rows=block.shape[0])
    weights, ids, *rest = _call(form, interpret)(*operands)
    native = ids if routed is None else rest.pop(0)
    if block is not None:
        row = layer * top_k  # as in the plain cache: no negative indices
        block = (
            rest[0]
            if in_kernel
            else lax.dynamic_update_slice_in_dim(block, ids, row, axis=0, allow_negative_indices=False)
        )
    replaced = jnp.zeros(num_tokens, bool) if routed is None else routed.valid
    return Routing(weights=weights.T, ids=ids.T, native_ids=native.T, replaced=replaced), block


def window_rows(block_rows: int, top_k: int) -> int:
    """Rows of the block that the kernel writes as one: whole tiles that hold a layer's ids, or 0 where no such window
    exists."""
    if top_k % SUBLANES == 0:
        return top_k
    return min(SUBLANES, block_rows) if SUBLANES % top_k == 0 else 0


def _call(form: _Form, interpret: Any) -> Callable[..., tuple[Array, ...]]:
    """Build the kernel: one pass over tiles of T tokens."""
    spec, num_tokens = form.spec, form.num_tokens
    tile, top_k = min(TOKEN_TILE, num_tokens), spec.top_k
    window = window_rows(form.block_rows, top_k) if form.block_rows else 0

    def columns(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, tile), lambda index, _: (0, index))

    in_block = pl.BlockSpec((window, tile), lambda index, layer: (layer[0] * top_k // window, index))
    replay = [columns(top_k), columns(1)] if form.replays else []
    native = [columns(top_k)] if form.replays else []
    chosen = jax.ShapeDtypeStruct((top_k, num_tokens), jnp.int32)
    written = jax.ShapeDtypeStruct((form.block_rows, num_tokens), jnp.int32)
    in_specs = [columns(spec.num_experts), *replay, *([in_block] if window else [])]
    outputs = 2 + len(native)
    return pl.pallas_call(
        functools.partial(_kernel, form=form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=in_specs,
            out_specs=[columns(top_k), columns(top_k), *native, *([in_block] if window else [])],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((top_k, num_tokens), jnp.float32),
            chosen,
            *([chosen] if native else []),
            *([written] if window else []),
        ],
        input_output_aliases={len(in_specs): outputs} if window else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="fused_router",
    )


def _kernel(layer_ref: Any, logits_ref: Any, *refs: Any, form: _Form) -> None:
    """One tile of tokens. Refs: replayed ids and their rows' validity, the block; weights, ids, native ids, the
    block."""
    spec, rest = form.spec, list(refs)
    replay = [rest.pop(0), rest.pop(0)] if form.replays else None
    before = rest.pop(0) if form.block_rows else None
    logits = logits_ref[...].astype(jnp.float32)
    exponents = jnp.exp(logits - jnp.max(logits, axis=0, keepdims=True))
    scores = exponents / jnp.sum(exponents, axis=0, keepdims=True)
    ids = native = _choose(scores, spec.top_k)
    if replay is not None:
        ids = jnp.where(replay[1][...] != 0, replay[0][...], native)
    weights = _gather(logits if spec.renormalize else scores, ids)
    if spec.renormalize:
        weights = jnp.exp(weights - jnp.max(weights, axis=0, keepdims=True))
        weights = weights / jnp.sum(weights, axis=0, keepdims=True)
    rest[0][...], rest[1][...] = weights, ids
    if replay is not None:
        rest[2][...] = native
    if before is not None:
        _write(before, rest[-1], ids, layer_ref[0])


def _choose(scores: Float[Array, "E T"], top_k: int) -> Int[Array, "K T"]:
    """K passes for the greatest score, the lower id first where scores are equal."""
    places = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    left, chosen = jnp.where(jnp.isnan(scores), NAN_SCORE, scores), []
    for _ in range(top_k):
        best = jnp.max(left, axis=0, keepdims=True)
        place = jnp.min(jnp.where(left == best, places, scores.shape[0]), axis=0, keepdims=True)
        left = jnp.where(places == place, -1.0, left)
        chosen.append(place)
    return jnp.concatenate(chosen, axis=0)


def _gather(values: Float[Array, "E T"], ids: Int[Array, "K T"]) -> Float[Array, "K T"]:
    """Return the values at the ids of each token."""
    places = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    rows = [
        jnp.sum(jnp.where(places == ids[k : k + 1], values, 0.0), axis=0, keepdims=True) for k in range(ids.shape[0])
    ]
    return jnp.concatenate(rows, axis=0)


def _write(before_ref: Any, after_ref: Any, ids: Int[Array, "K T"], layer: Int[Array, ""]) -> None:
    """Write a layer's ids at its rows of the window; the window's other rows belong to its neighbours."""
    window, top_k = after_ref.shape[0], ids.shape[0]
    if window == top_k:
        after_ref[...] = ids
        return
    place = lax.rem(layer, window // top_k)
    rows = lax.broadcasted_iota(jnp.int32, after_ref.shape, 0)
    wide = jnp.concatenate([ids] * (window // top_k), axis=0)
    after_ref[...] = jnp.where((rows >= place * top_k) & (rows < (place + 1) * top_k), wide, before_ref[...])
