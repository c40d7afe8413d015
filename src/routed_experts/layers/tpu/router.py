"""The router as one TPU kernel: scores, choice, weights, and the executed ids written into the step's block in place.
It decides as layers.routing.replay_topk does by every law of RouterSpec, ties and replayed rows included.

Everything is token-minor, [K, N]: a token is a lane, so the choice runs over sublanes and the rows of a layer in the
block [M*K, N] are whole tiles. The block is aliased to the output, and a layer's write is part of the kernel:
capture adds no operation to a layer. A window of rows is a tile of 8 where K divides 8, and whole tiles where 8
divides K; for any other K the ids are written by an operation of its own. Scores are compared as whole numbers in the
same order, both zeros as one and NaN as the greatest, so a row of NaN still names K experts. Dims: N tokens, E experts,
M MoE layers, K experts per token, G groups, T tokens of a tile."""

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

from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, RoutingBlock

TOKEN_TILE = 512
SUBLANES = 8
LEAST, GREATEST = -(2**31), 2**31 - 1  # below and above the ranks of all numbers


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
    block: RoutingBlock | None,
    layer: Int[Array, ""],
    spec: RouterSpec,
    bias: Float[Array, " E"] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Routing, RoutingBlock | None]:
    """Choose K experts a token, `bias` added to what they are chosen by, and record them at MoE layer `layer` of the
    block; recorded weights are written by an operation of their own."""
    assert (bias is not None) == spec.biased, "a selection bias and RouterSpec.biased belong together"
    num_tokens, top_k = logits.shape[0], spec.top_k
    layer = jnp.asarray(layer, jnp.int32)
    in_kernel = block is not None and window_rows(block.ids.shape[0], top_k) > 0
    operands = [layer.reshape(1), logits.T]
    if bias is not None:
        operands.append(bias.astype(jnp.float32)[:, None])
    if routed is not None:
        operands += [routed.ids.T.astype(jnp.int32), routed.valid[None].astype(jnp.int32)]
    form = _Form(spec=spec, num_tokens=num_tokens, replays=routed is not None, block_rows=0)
    if block is not None and in_kernel:
        operands, form = [*operands, block.ids], dataclasses.replace(form, block_rows=block.ids.shape[0])
    weights, ids, *rest = _call(form, interpret)(*operands)
    native = ids if routed is None else rest.pop(0)
    if block is not None:
        row = layer * top_k  # as in the plain cache: no negative indices
        written = (
            rest[0]
            if in_kernel
            else lax.dynamic_update_slice_in_dim(block.ids, ids, row, axis=0, allow_negative_indices=False)
        )
        block = dataclasses.replace(block, ids=written).write_weights(layer, weights.T)
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
    bias = [pl.BlockSpec((spec.num_experts, 1), lambda index, _: (0, 0))] if spec.biased else []
    replay = [columns(top_k), columns(1)] if form.replays else []
    native = [columns(top_k)] if form.replays else []
    chosen = jax.ShapeDtypeStruct((top_k, num_tokens), jnp.int32)
    block_shape = jax.ShapeDtypeStruct((form.block_rows, num_tokens), jnp.int32)
    in_specs = [columns(spec.num_experts), *bias, *replay, *([in_block] if window else [])]
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
            *([block_shape] if window else []),
        ],
        input_output_aliases={len(in_specs): outputs} if window else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="fused_router",
    )


def _kernel(layer_ref: Any, logits_ref: Any, *refs: Any, form: _Form) -> None:
    """One tile of tokens. Refs: the selection bias; replayed ids and their rows' validity; the block; weights, ids,
    native ids, the block."""
    spec, rest = form.spec, list(refs)
    bias = rest.pop(0) if spec.biased else None
    replay = [rest.pop(0), rest.pop(0)] if form.replays else None
    before = rest.pop(0) if form.block_rows else None
    logits = logits_ref[...].astype(jnp.float32)
    scores = _scores(logits, spec)
    choice = scores if bias is None else scores + bias[...]
    ids = native = _choose(_keep_groups(choice, spec), spec.top_k)
    if replay is not None:
        ids = jnp.where(replay[1][...] != 0, replay[0][...], native)
    weights = _weights(logits, scores, ids, spec)
    if replay is not None:  # a replayed id that is no expert
        weights = jnp.where((ids < 0) | (ids >= spec.num_experts), jnp.nan, weights)
    rest[0][...], rest[1][...] = weights, ids
    if replay is not None:
        rest[2][...] = native
    if before is not None:
        _write(before, rest[-1], ids, layer_ref[0])


def _scores(logits: Float[Array, "E T"], spec: RouterSpec) -> Float[Array, "E T"]:
    if spec.scoring_func == "softmax":
        return _softmax(logits)
    return jax.nn.sigmoid(logits) if spec.scoring_func == "sigmoid" else logits


def _softmax(logits: Float[Array, "X T"]) -> Float[Array, "X T"]:
    exponents = jnp.exp(logits - jnp.max(logits, axis=0, keepdims=True))
    return exponents / jnp.sum(exponents, axis=0, keepdims=True)


def _weights(
    logits: Float[Array, "E T"], scores: Float[Array, "E T"], ids: Int[Array, "K T"], spec: RouterSpec
) -> Float[Array, "K T"]:
    """Weights at ids, by the law of the spec."""
    if spec.scoring_func == "sparsemixer":
        weights = _sparsemixer_weights(logits, ids, spec.jitter_eps)
    elif spec.scoring_func == "logits" or (spec.scoring_func == "softmax" and spec.renormalize):
        weights = _softmax(_gather(logits, ids))
    else:
        weights = _gather(scores, ids)
        if spec.renormalize:
            weights = weights / (jnp.sum(weights, axis=0, keepdims=True) + spec.epsilon)
    return weights * spec.scale if spec.scale != 1.0 else weights


def _sparsemixer_weights(logits: Float[Array, "E T"], ids: Int[Array, "K T"], jitter_eps: float) -> Float[Array, "K T"]:
    """As layers.routing.sparsemixer_weights."""
    experts = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    left, weights = logits, []
    for slot in range(ids.shape[0]):
        chosen = experts == ids[slot : slot + 1]
        best = jnp.max(left, axis=0, keepdims=True)
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter_eps
        near = _softmax(jnp.where(is_far & jnp.logical_not(chosen), -jnp.inf, left))
        weights.append(jnp.sum(jnp.where(chosen, near, 0.0), axis=0, keepdims=True))
        left = jnp.where(chosen, -jnp.inf, left)
    return jnp.concatenate(weights, axis=0)


def _ranks(values: Float[Array, "X T"]) -> Int[Array, "X T"]:
    """Whole numbers in the order of the values; both zeros are equal, NaN is the greatest."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ GREATEST, bits)
    return jnp.where(jnp.isnan(values), GREATEST, ordered)


def _first_best(ranks: Int[Array, "X T"]) -> Int[Array, "1 T"]:
    """The row of the greatest rank, the first where several are equal."""
    rows, best = lax.broadcasted_iota(jnp.int32, ranks.shape, 0), jnp.max(ranks, axis=0, keepdims=True)
    return jnp.min(jnp.where(ranks == best, rows, ranks.shape[0]), axis=0, keepdims=True)


def _choose(values: Float[Array, "X T"], count: int) -> Int[Array, "K T"]:
    """`count` passes for the greatest value, the lower row first where values are equal."""
    rows, left, chosen = lax.broadcasted_iota(jnp.int32, values.shape, 0), _ranks(values), []
    for _ in range(count):
        chosen.append(_first_best(left))
        left = jnp.where(rows == chosen[-1], LEAST, left)
    return jnp.concatenate(chosen, axis=0)


def _keep_groups(choice: Float[Array, "E T"], spec: RouterSpec) -> Float[Array, "E T"]:
    """Put the experts of all but the best groups at -inf. By masks: a group need not be whole tiles of rows."""
    if spec.num_groups == spec.topk_group:
        return choice
    size, experts = spec.num_experts // spec.num_groups, lax.broadcasted_iota(jnp.int32, choice.shape, 0)
    ranks, sums = _ranks(choice), []
    members = [(experts >= group * size) & (experts < (group + 1) * size) for group in range(spec.num_groups)]
    for member in members:
        left, total = jnp.where(member, ranks, LEAST), jnp.zeros((1, choice.shape[1]), jnp.float32)
        for _ in range(spec.group_score_topk):
            best = _first_best(left)
            total = total + jnp.sum(jnp.where(experts == best, choice, 0.0), axis=0, keepdims=True)
            left = jnp.where(experts == best, LEAST, left)
        sums.append(total)
    best_groups = _choose(jnp.concatenate(sums, axis=0), spec.topk_group)
    for group, member in enumerate(members):
        is_best = jnp.sum(jnp.where(best_groups == group, 1, 0), axis=0, keepdims=True) > 0
        choice = jnp.where(member & jnp.logical_not(is_best), -jnp.inf, choice)
    return choice


def _gather(values: Float[Array, "E T"], ids: Int[Array, "K T"]) -> Float[Array, "K T"]:
    """Return the values at the ids of each token."""
    experts = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    rows = [
        jnp.sum(jnp.where(experts == ids[k : k + 1], values, 0.0), axis=0, keepdims=True) for k in range(ids.shape[0])
    ]
    return jnp.concatenate(rows, axis=0)


def _write(before_ref: Any, after_ref: Any, ids: Int[Array, "K T"], layer: Int[Array, ""]) -> None:
    """Write a layer's ids at its rows of the window; the window's other rows belong to its neighbours."""
    window, top_k = after_ref.shape[0], ids.shape[0]
    if window == top_k:
        after_ref[...] = ids
        return
    index = lax.rem(layer, window // top_k)
    rows = lax.broadcasted_iota(jnp.int32, after_ref.shape, 0)
    wide = jnp.concatenate([ids] * (window // top_k), axis=0)
    after_ref[...] = jnp.where((rows >= index * top_k) & (rows < (index + 1) * top_k), wide, before_ref[...])
