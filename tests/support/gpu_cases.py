"""Cases for the GPU kernels: small ones that a CPU interprets and large ones for a GPU.

A case builds random inputs, runs a kernel and its oracle, and returns what differs. Inputs that a kernel must not read
are NaN."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from routed_experts.layers.attention import FusedQKV, PagedBatch, reference_attention, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import reference_variant, write_latent
from routed_experts.layers.gpu.attention import gpu_attention
from routed_experts.layers.gpu.expert_tiles import MoeTiles, Tile, choose_tiles
from routed_experts.layers.gpu.kv_write import gpu_write
from routed_experts.layers.gpu.linear import LinearTile, linear_in_place
from routed_experts.layers.gpu.moe import slot_outputs
from routed_experts.layers.gpu.qk_norm_rope import prepare
from routed_experts.layers.gpu.residual import add_parts, add_parts_and_multiply, add_slots
from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.gpu.split_attention import decode_attention, verify_attention
from routed_experts.layers.kernels import RouterBiases, SharedExperts, SlotOutputs, StreamNorm
from routed_experts.layers.kv_format import KV_CODES, KVScales, from_stored, to_stored
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.moe import ACTIVATIONS, ExpertCall, combine, gated, reference_experts
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import RotarySpec
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from routed_experts.layers.stack_traits import PLAIN_TRAITS, StackTraits
from support.routing_blocks import empty_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Relative distance of values in the 2-norm, how many integers differ, and what is allowed of the first."""

    distance: float
    wrong_ids: int
    bound: float

    @property
    def is_good(self) -> bool:
        return self.wrong_ids == 0 and self.distance <= self.bound  # NaN is not good


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    kernel: str
    name: str
    run: Callable[[bool], Outcome]  # interpreted or not


def distance(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def bound(dtype) -> float:
    return 1e-2 if dtype == jnp.bfloat16 else 3e-6


def random_ids(rng, rows, experts, top_k, kind) -> np.ndarray:
    if kind == "one hot expert":
        others = np.stack([1 + rng.permutation(experts - 1)[: top_k - 1] for _ in range(rows)])
        return np.concatenate([np.zeros((rows, 1), np.int64), others], axis=1)
    if kind == "few experts":
        return np.stack([rng.permutation(top_k) for _ in range(rows)]) + experts - top_k
    return np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)])


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))  # one program, not one of each operation
def middle_stack(key, count, inputs, outputs, dtype):
    """Matrices of three layers, of which the two others are NaN."""
    layers = jnp.repeat(jnp.array([jnp.nan, 1, jnp.nan], dtype), count)[:, None, None]
    made = jax.random.normal(key, (count, inputs, outputs), dtype) * inputs**-0.5
    return layers * jnp.tile(made.astype(dtype), (3, 1, 1))


def moe_case(seed, shape, kind, tiles: MoeTiles, dtype, *, activation="silu", biased=False) -> Case:
    """Three layers; the two others are NaN, and so are the rows of padding. Inputs of a clamped activation reach its
    bounds."""
    rows, top_k, experts, dim, width = shape

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        keys = jax.random.split(jax.random.key(seed), 5)
        valid = rng.random(rows) < (0.7 if kind == "padding" else 2)
        valid[0] = True
        ids = random_ids(rng, rows, experts, top_k, kind)
        x = jax.random.normal(keys[0], (rows, dim), dtype) * (1 if activation == "silu" else 5)
        layers = jnp.repeat(jnp.array([jnp.nan, 1, jnp.nan], dtype), experts)[:, None]
        weights = jnp.asarray(rng.random((rows, top_k)), jnp.float32)
        call = ExpertCall(
            x=jnp.where(jnp.asarray(valid)[:, None], x, jnp.nan),
            ids=jnp.asarray(np.where(valid[:, None], ids, 7 * experts), jnp.int32),
            weights=weights / jnp.sum(weights, axis=1, keepdims=True),
            valid=jnp.asarray(valid),
            gate_up=middle_stack(keys[1], experts, dim, 2 * width, dtype),
            down=middle_stack(keys[2], experts, width, dim, dtype),
            first_expert=jnp.asarray(experts, jnp.int32),
            num_experts=experts,
            gate_up_bias=layers * jax.random.normal(keys[3], (3 * experts, 2 * width), dtype) if biased else None,
            down_bias=layers * jax.random.normal(keys[4], (3 * experts, dim), dtype) if biased else None,
            activation=activation,
        )
        outputs = jax.jit(lambda call: slot_outputs(call, tiles, interpret=interpret))(call).reshape(rows, top_k, dim)
        actual = combine(outputs, call.weights, call.valid)
        wide = dataclasses.replace(call, x=x, ids=jnp.asarray(ids, jnp.int32))
        parts = [
            dataclasses.replace(wide, **{n: vars(wide)[n][i : i + 256] for n in ("x", "ids", "weights", "valid")})
            for i in range(0, rows, 256)
        ]
        expected = np.concatenate([np.asarray(jax.jit(reference_experts)(part), np.float64) for part in parts])
        return Outcome(distance=distance(actual, expected), wrong_ids=0, bound=bound(dtype))

    sorted_slots = "lists" if tiles.sorted_slots else "slots"
    what = f"{activation}{', biased' if biased else ''}, {jnp.dtype(dtype)}"
    name = f"N,K,E,D,F={shape} {kind}, {sorted_slots}, tile {tiles.gate_up.rows}, {what}"
    return Case(kernel="moe", name=name, run=run)


def shared_case(seed, shape, shared_width, kind, tiles: MoeTiles, dtype) -> Case:
    """Shared experts beside the routed ones, in the second of three layers; the two others are NaN."""
    rows, top_k, experts, dim, width = shape

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        keys = jax.random.split(jax.random.key(seed), 5)

        def stack(key, count, inputs, outputs):
            return middle_stack(key, count, inputs, outputs, dtype)

        valid = jnp.asarray(rng.random(rows) < (0.7 if kind == "padding" else 2)).at[0].set(True)
        call = ExpertCall(
            x=jax.random.normal(keys[0], (rows, dim), dtype),
            ids=jnp.asarray(random_ids(rng, rows, experts, top_k, kind), jnp.int32),
            weights=jnp.ones((rows, top_k), jnp.float32),
            valid=valid,
            gate_up=stack(keys[1], experts, dim, 2 * width),
            down=stack(keys[2], experts, width, dim),
            first_expert=jnp.int32(1),
            num_experts=experts,
        )
        shared = SharedExperts(
            gate_up=stack(keys[3], 1, dim, 2 * shared_width), down=stack(keys[4], 1, shared_width, dim)
        )

        def kernel(call, gate_up, down):
            own = SharedExperts(gate_up=gate_up, down=down)
            return slot_outputs(call, tiles, own, stride=experts, interpret=interpret)

        outputs = jax.jit(kernel)(call, shared.gate_up, shared.down)
        routed = combine(outputs[: rows * top_k].reshape(rows, top_k, dim), call.weights, valid)
        wide = dataclasses.replace(call, first_expert=jnp.int32(experts))
        expected = (
            jax.jit(reference_experts)(wide),
            jax.jit(lambda x: gated(x @ shared.gate_up[1]) @ shared.down[1])(call.x),
        )
        far = max(distance(routed, expected[0]), distance(outputs[rows * top_k :], expected[1]))
        return Outcome(distance=far, wrong_ids=0, bound=bound(dtype))

    lists = "lists" if tiles.sorted_slots else "slots"
    name = f"N,K,E,D,F={shape} {kind}, {lists}, {jnp.dtype(dtype)}, shared experts of {shared_width}"
    return Case(kernel="moe", name=name, run=run)


# One law of each kind: what families have, and groups of another size and number.
ROUTER_LAWS = {
    "softmax": {},
    "sigmoid": dict(scoring_func="sigmoid", epsilon=1e-20),
    "logits": dict(scoring_func="logits"),
    "sparsemixer": dict(scoring_func="sparsemixer", jitter_eps=0.01),
    "softmax, biased": dict(biased=True, epsilon=1e-12),
    "softmax, best of 3 groups, scaled": dict(num_groups=3, topk_group=2, scale=16.0),
    "sigmoid, biased, 2 of 4 groups by the best two, scaled": dict(
        scoring_func="sigmoid", biased=True, num_groups=4, topk_group=2, group_score_topk=2, scale=2.5, epsilon=1e-20
    ),
}


def router_case(seed, rows, experts, top_k, flags, law="softmax") -> Case:
    """Flags: 1 renormalised, 2 captured, 4 with ties, 8 half of the rows replayed, 16 a bias of the logits."""
    renormalize, captured, ties, replays, shifted = (bool(flags & bit) for bit in (1, 2, 4, 8, 16))
    spec = RouterSpec(num_experts=experts, top_k=top_k, renormalize=renormalize, **ROUTER_LAWS[law])

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((rows, experts)) * 3
        if ties:  # most choices are zeros of either sign
            logits = np.minimum(np.round(logits), 0)
            logits[logits == 0] = rng.choice([-0.0, 0.0], np.count_nonzero(logits == 0))
        logits = jnp.asarray(logits, jnp.float32)
        block = empty_block(3 * top_k, rows) if captured else None
        replayed_ids = random_ids(rng, rows, experts, top_k, "").astype(np.uint16)
        routed = LayerRouting(jnp.asarray(replayed_ids), jnp.asarray(rng.random(rows) < 0.5)) if replays else None
        added = jnp.asarray(np.round(rng.standard_normal((3, experts)) * 4) / 4, jnp.bfloat16)
        chooses = jnp.asarray(np.round(rng.standard_normal((3, experts)) * 4) / 8, jnp.float32)
        biases = RouterBiases(
            logits=added if shifted else None, selection=chooses if spec.biased else None, layer=jnp.int32(2)
        )
        bias = chooses[2] if spec.biased else None
        shift = added[2].astype(jnp.float32) if shifted else 0.0
        expected = jax.jit(lambda z: replay_topk(z + shift, routed, spec=spec, bias=bias))(logits)
        actual, block = jax.jit(lambda z, b: route_rows(z, routed, b, jnp.int32(1), spec, biases, interpret=interpret))(
            logits, block
        )
        wrong = sum(
            int(np.sum(np.asarray(a) != b))
            for a, b in ((actual.ids, expected.ids), (actual.native_ids, expected.native_ids))
        )
        if block is not None:
            for written, of_layer in ((block.ids, expected.ids), (block.weights, actual.weights)):
                whole = np.full((3 * top_k, rows), -7, written.dtype)
                whole[top_k : 2 * top_k] = np.asarray(of_layer).T
                wrong += int(np.sum(np.asarray(written) != whole))
        return Outcome(distance=distance(actual.weights, expected.weights), wrong_ids=wrong, bound=1e-6)

    features = {
        "renormalised": renormalize,
        "ties": ties,
        "captured": captured,
        "replayed": replays,
        "shifted": shifted,
    }
    words = [law, *(word for word, enabled in features.items() if enabled)]
    return Case(kernel="router", name=f"N={rows} E={experts} K={top_k} {', '.join(words)}", run=run)


def linear_case(seed, rows, dim, outputs, tile: LinearTile | None, dtype, *, matrix_dtype=None) -> Case:
    """`matrix_dtype`: a wider one than that of the rows, which is exact."""

    def run(interpret: bool) -> Outcome:
        keys = jax.random.split(jax.random.key(seed), 2)
        x = jax.random.normal(keys[0], (rows, dim), dtype)
        weights = (
            jax.random.normal(keys[1], (3, dim, outputs), matrix_dtype or dtype)
            * jnp.array([jnp.nan, 1, jnp.nan], matrix_dtype or dtype)[:, None, None]
        )
        actual = jax.jit(lambda x, w: linear_in_place(x, w, jnp.int32(1), jnp.float32, tile=tile, interpret=interpret))(
            x, weights
        )
        expected = reference_linear(x.astype(weights.dtype), weights, 1, jnp.float32)
        return Outcome(
            distance=distance(actual, expected),
            wrong_ids=0,
            bound=bound(dtype) / 10 if weights.dtype == jnp.bfloat16 else bound(weights.dtype),
        )

    name = f"N={rows} D={dim} O={outputs}{f', {jnp.dtype(dtype)} by {jnp.dtype(matrix_dtype)}' if matrix_dtype else ''}"
    return Case(kernel="linear", name=name, run=run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Requests of a step: (keys in the pool before it, new tokens) each. Pages are scattered; slots without an owner
    are NaN."""

    spans: tuple[tuple[int, int], ...]
    padding: int = 0  # more tokens, of no request
    empty: int = 0  # more requests, of no token
    heads: int = 8
    groups: int = 2
    head_dim: int = 16
    page: int = 4


def attention_inputs(rng, seqs: Sequences, *, decode: bool, dtype):
    lengths = [before + new for before, new in seqs.spans] + [0] * seqs.empty
    width = max(-(-length // seqs.page) for length in lengths) + 1
    pages = [-(-length // seqs.page) for length in lengths]
    num_pages = sum(pages) + 3
    free, table = list(1 + rng.permutation(num_pages - 1)), np.zeros((len(lengths), width), np.int32)
    owned = np.zeros((num_pages, seqs.page), bool)
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = [free.pop() for _ in range(pages[row])]
        for at in range(length):
            owned[table[row, at // seqs.page], at % seqs.page] = True
    positions = [at for before, new in seqs.spans for at in range(before, before + new)]
    rows = [row for row, (_, new) in enumerate(seqs.spans) for _ in range(new)]
    num_tokens, more = len(rows), seqs.empty if decode else seqs.padding
    pad = lambda values: jnp.asarray(np.array([*values, *[0] * more], np.int32))  # noqa: E731
    batch = PagedBatch(
        positions=pad(positions),
        token_rows=jnp.arange(num_tokens + more, dtype=jnp.int32) if decode else pad(rows),
        valid=jnp.arange(num_tokens + more) < num_tokens,
        query_starts=jnp.asarray(np.cumsum([0, *(new for _, new in seqs.spans), *[0] * seqs.empty]), jnp.int32),
        seq_lens=jnp.asarray(lengths, jnp.int32),
        page_table=jnp.asarray(table),
        decode=decode,
    )
    pool = rng.standard_normal((2, num_pages, seqs.page, 2 * seqs.groups, seqs.head_dim))
    pool[0], pool[1][~owned] = np.nan, np.nan
    return jnp.asarray(pool.reshape(2 * num_pages, *pool.shape[2:]), dtype), jnp.int32(num_pages), batch, num_tokens


KV_SCALES = ((40.0, 50.0), (0.3, 2.7), (60.0, 70.0))  # of keys and values of three layers; the second one attends


def kv_scales() -> KVScales:
    return KVScales(jnp.asarray(KV_SCALES, jnp.float32), jnp.int32(1))


def by_row(seqs: Sequences):
    """The scale of each row of a slot."""
    return jnp.tile(jnp.asarray(KV_SCALES[1], jnp.float32), seqs.groups)[:, None]


def attention_case(
    seed,
    seqs: Sequences,
    *,
    decode,
    splits=None,
    dtype=jnp.float32,
    features=None,
    sinks=False,
    stacked=False,
    max_queries=0,
    codes=False,
    scaled=False,
) -> Case:
    """`features`: an AttentionFeatures without sinks, or none; `sinks`: random ones, of a stack of layers where
    `stacked`; `max_queries`: the kernel of verify steps; `codes`: in the pool, whose numbers the oracle reads; `scaled`
    codes: times KV_SCALES."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=decode, dtype=dtype)
        stored = to_stored(pool, KV_CODES) if codes else pool
        pool = from_stored(stored, jnp.float32) * by_row(seqs) if scaled else from_stored(stored, dtype)
        queries = jnp.asarray(rng.standard_normal((batch.positions.shape[0], seqs.heads, seqs.head_dim)), dtype)
        batch = dataclasses.replace(batch, max_queries=max_queries)
        kernel = decode_attention if decode else verify_attention
        attend = gpu_attention if splits is None else functools.partial(kernel, splits=splits)
        own, stack = features or AttentionFeatures(), jnp.asarray(2 * rng.standard_normal((3, seqs.heads)), dtype)
        expected = dataclasses.replace(own, sinks=stack[1]) if sinks else own
        if sinks and not stacked:
            own = expected
        own = dataclasses.replace(own, kv_scales=kv_scales()) if scaled else own
        extra = {"sinks": (stack, jnp.int32(1))} if sinks and stacked else {}
        actual = jax.jit(lambda q, p, b: attend(q, p, first, b, own, **extra, interpret=interpret))(
            queries, stored, batch
        )
        if features is None and not sinks:
            plain = jax.jit(lambda q, p, b: reference_attention(q, p, first, b))(queries, pool, batch)
        else:
            plain = jax.jit(lambda q, p, b: reference_variant(q, p, first, b, expected))(queries, pool, batch)
        return Outcome(distance=distance(actual[:num_tokens], plain[:num_tokens]), wrong_ids=0, bound=bound(dtype))

    kind = "decode" if decode else f"verify of {max_queries}" if max_queries else "extend"
    kind += f", splits {splits or 'chosen'}" if decode or max_queries else ""
    sizes = f"{len(seqs.spans)}+{seqs.empty} requests, {seqs.heads}/{seqs.groups} heads of {seqs.head_dim}"
    own = "" if features is None else f", window {features.window}, chunk {features.chunk}, scale {features.scale}"
    rest = f"{own}{', sinks' if sinks else ''}{', stacked' if stacked else ''}, page {seqs.page}, {jnp.dtype(dtype)}"
    rest += ", scaled codes" if scaled else ", codes" if codes else ""
    return Case(kernel="attention", name=f"{kind}, {sizes}{rest}", run=run)


def prepare_case(
    seed,
    seqs: Sequences,
    *,
    decode,
    dtype=jnp.float32,
    traits=PLAIN_TRAITS,
    frequencies=None,
    biased=False,
    parts=0,
    codes=False,
    scaled=False,
) -> Case:
    """`frequencies`: of the rotary positions where they are not of whole heads; `biased` projections; `parts` of the
    projection's sums, or the projection itself; `codes`: in the pool, with KV_SCALES where they are `scaled`."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=decode, dtype=dtype)
        pool = to_stored(pool, KV_CODES) if codes else pool
        rows, counts, dim = batch.positions.shape[0], (seqs.heads, seqs.groups, seqs.groups), seqs.head_dim
        rotary = RotarySpec(
            inverse=tuple(1e4 ** -(np.arange(frequencies or dim // 2) / dim)), interleaved=traits.interleaved
        )
        angles = rotary.cos_sin(batch.positions)
        cos, sin = angles if frequencies or traits.interleaved else (jnp.tile(part, (1, 2)) for part in angles)
        columns = sum(counts) * dim
        qkv = jnp.asarray(rng.standard_normal((parts or 1, rows, columns)), jnp.float32 if parts else dtype)
        bias = jnp.asarray(rng.standard_normal((3, columns)), dtype) if biased else None
        widths = [count * dim if traits.qk_norm == "whole" else dim for count in counts[:2]]
        has_scales = traits.qk_norm in ("head", "whole")
        norms = [jnp.asarray(rng.random((3, width)) + 0.5, dtype) if has_scales else None for width in widths]
        projected = FusedQKV(
            qkv=qkv if parts else qkv[0],
            q_norm=norms[0],
            k_norm=norms[1],
            layer=jnp.int32(1),
            cos=cos,
            sin=sin,
            eps=1e-6,
            bias=bias,
            traits=traits,
            dtype=jnp.dtype(dtype),
            kv_scales=kv_scales() if scaled else None,
        )

        def normed(x, scales):
            flat = x.reshape(rows, -1) if traits.qk_norm == "whole" else x
            scale = jnp.ones(dim, dtype) if scales is None else scales[1]
            return rms_norm(flat, scale, eps=1e-6, offset=traits.qk_norm_offset).reshape(x.shape)

        def rotated(x, _):
            return rotary.apply(x, angles)

        def plain(projected, pool):
            mixed = jnp.sum(qkv, axis=0).astype(dtype)
            mixed = (mixed if bias is None else mixed + bias[1]).reshape(rows, -1, dim)
            queries, keys, values = jnp.split(mixed, np.cumsum(counts)[:2], axis=1)
            steps = [normed if traits.qk_norm else None, rotated if traits.rotary else None]
            for step in filter(None, reversed(steps) if traits.norm_after_rope else steps):
                queries, keys = step(queries, norms[0]), step(keys, norms[1])
            if scaled:
                keys, values = (x.astype(jnp.float32) / s for x, s in zip((keys, values), KV_SCALES[1], strict=True))
            return queries, write_kv(pool, keys, values, first, batch)

        run_kernel = lambda projected, pool: prepare(projected, pool, first, batch, interpret=interpret)  # noqa: E731
        outputs, plain_outputs = (jax.jit(program)(projected, pool) for program in (run_kernel, plain))
        (actual, pool), (expected, expected_pool) = outputs, plain_outputs
        assert actual.dtype == dtype
        pool, expected_pool = (from_stored(x, jnp.float32) for x in (pool, expected_pool))
        untouched = np.isnan(np.asarray(pool, np.float32)) != np.isnan(np.asarray(expected_pool, np.float32))
        untouched[int(first)] = False  # padding goes to this page in the one, nowhere in the other
        both = [np.nan_to_num(np.delete(np.asarray(x, np.float32), int(first), axis=0)) for x in (pool, expected_pool)]
        far = max(distance(actual[:num_tokens], expected[:num_tokens]), distance(*both))
        allowed = max(bound(dtype), 1e-3) if codes else bound(dtype)  # one of two neighbours, for a number between them
        return Outcome(distance=far, wrong_ids=int(untouched.sum()), bound=allowed)

    changed = [f"{n} {v}" for n, v in dataclasses.asdict(traits).items() if v != getattr(PLAIN_TRAITS, n)]
    words = [
        *changed,
        f"{frequencies} frequencies" if frequencies else "",
        "biased" if biased else "",
        f"{parts} parts",
        "scaled codes" if scaled else "codes" if codes else "",
    ]
    sizes = f"{len(seqs.spans)} requests, {seqs.heads}/{seqs.groups} heads"
    kind = f"{'decode' if decode else 'extend'}, {sizes}, {jnp.dtype(dtype)}"
    return Case(kernel="prepare", name=", ".join([kind, *filter(None, words)]), run=run)


def write_case(seed, seqs: Sequences, *, latent, dtype=jnp.float32, codes=False) -> Case:
    """Keys and values, or latent rows, to their slots; what has no slot here keeps its bits. `codes`: of numbers of all
    sizes."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        pool, first, batch, _ = attention_inputs(rng, seqs, decode=False, dtype=dtype)
        pool = pool[:, :, :1] if latent else pool
        pool = to_stored(pool, KV_CODES) if codes else pool
        shape = (batch.positions.shape[0], seqs.groups, seqs.head_dim)
        sizes = (np.exp2(rng.uniform(-12, 12, shape)) if codes else 1.0 for _ in range(2))
        keys, values = (jnp.asarray(rng.standard_normal(shape) * size, dtype) for size in sizes)
        new = (keys[:, :1], None) if latent else (keys, values)
        actual = jax.jit(lambda *args: gpu_write(*args, first, batch, interpret=interpret))(pool, *new)
        expected = write_latent(pool, new[0], first, batch) if latent else write_kv(pool, *new, first, batch)
        same = np.asarray(actual, np.float32) == np.asarray(expected, np.float32)
        same |= np.isnan(np.asarray(actual, np.float32)) & np.isnan(np.asarray(expected, np.float32))
        return Outcome(distance=0.0, wrong_ids=int(np.sum(~np.delete(same, int(first), axis=0))), bound=0.0)

    return Case(
        kernel="write",
        name=f"{'latent rows' if latent else 'keys and values'}, {jnp.dtype(dtype)}{', codes' if codes else ''}",
        run=run,
    )


def residual_case(seed, rows, dim, *, parts, top_k, dtype=jnp.float32, features=False) -> Case:
    """Both kernels of the residual stream; slots of padding rows are NaN. `features`: a bias, shared experts with a
    gate, an offset of the norm and a scale of what is added."""
    offset, scale = (1.0, 0.22) if features else (0.0, 1.0)

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        x, inputs, shared = (jnp.asarray(rng.standard_normal((rows, dim)), dtype) for _ in range(3))
        sums = jnp.asarray(rng.standard_normal((parts, rows, dim)), jnp.float32)
        scales, valid = jnp.asarray(rng.random((3, dim)) + 0.5, dtype), jnp.asarray(rng.random(rows) < 0.7)
        biases, gates = (jnp.asarray(rng.standard_normal(size), dtype) for size in ((3, dim), (3, dim, 1)))
        slots = jnp.where(valid[:, None, None], jnp.asarray(rng.standard_normal((rows, top_k, dim)), dtype), jnp.nan)
        weights = jnp.asarray(rng.random((rows, top_k)), jnp.float32)
        norm = StreamNorm(scales=scales, layer=jnp.int32(1), eps=1e-6, offset=offset, residual_scale=scale)
        own = biases if features else None
        stream, normed = jax.jit(lambda x, p: add_parts(x, p, own, norm, interpret=interpret))(x, sums)
        actual = [stream, normed.plain]
        flat, experts = slots.reshape(-1, dim), None
        if features:
            flat = jnp.concatenate([flat, shared])
            experts = SharedExperts(gate_up=jnp.zeros(0), down=jnp.zeros(0), gate=gates)

        def add(x, flat):
            outputs = SlotOutputs(slots=flat, weights=weights, valid=valid, inputs=inputs, shared=experts)
            return add_slots(x, outputs, norm, interpret=interpret)

        stream, normed = jax.jit(add)(x, flat)
        actual += [stream, normed.plain]
        addends = [jnp.sum(sums, axis=0).astype(dtype), combine(slots, weights, valid)]
        if features:
            addends[0] += biases[1]
            addends[1] += jax.nn.sigmoid(inputs @ gates[1]) * shared
        expected = []
        for addend in addends:
            expected += [x + addend * scale, rms_norm(x + addend * scale, scales[1], eps=1e-6, offset=offset)]
        return Outcome(distance=max(map(distance, actual, expected)), wrong_ids=0, bound=bound(dtype))

    name = f"N={rows} D={dim} S={parts} K={top_k} {jnp.dtype(dtype)}{', features' if features else ''}"
    return Case(kernel="residual", name=name, run=run)


def residual_product_case(seed, dim, outputs, *, parts, dtype, features=False) -> Case:
    """The sum of one row's parts, its norm and the norm's product by a matrix, which may be float32."""
    offset, scale = (1.0, 0.22) if features else (0.0, 1.0)

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal((1, dim)), dtype)
        sums = jnp.asarray(rng.standard_normal((parts, 1, dim)), jnp.float32)
        scales, biases = (jnp.asarray(rng.random((3, dim)) + 0.5, dtype) for _ in range(2))
        matrices = jnp.asarray(rng.standard_normal((3, dim, outputs)), jnp.float32 if features else dtype)
        matrices = matrices.at[jnp.array([0, 2])].set(jnp.nan)
        own = biases if features else None
        norm = StreamNorm(scales=scales, layer=jnp.int32(1), eps=1e-6, offset=offset, residual_scale=scale)
        run = jax.jit(lambda *a: add_parts_and_multiply(*a, own, norm, matrices, interpret=interpret))
        stream, normed, logits = run(x, sums)
        actual = stream, normed.plain, jnp.sum(logits, axis=0)
        addend = jnp.sum(sums, axis=0).astype(dtype) + (biases[1] if features else 0)
        stream = x + addend * scale
        normed = rms_norm(stream, scales[1], eps=1e-6, offset=offset)
        logits = jnp.dot(normed.astype(matrices.dtype), matrices[1], preferred_element_type=jnp.float32)
        expected = stream, normed, logits
        return Outcome(distance=max(map(distance, actual, expected)), wrong_ids=0, bound=bound(dtype))

    name = f"one row, D={dim} O={outputs} S={parts} {jnp.dtype(dtype)}{', features' if features else ''}"
    return Case(kernel="residual", name=name, run=run)


SMALL_TILE = Tile(rows=16, out=16, inner=16, warps=4, stages=2)
LISTS = MoeTiles(rows=2**31, gate_up=SMALL_TILE, down=SMALL_TILE)
SLOTS = dataclasses.replace(LISTS, sorted_slots=False)
KINDS = ("spread", "padding", "one hot expert", "few experts")


def small_moe_cases() -> Iterator[Case]:
    """Experts, routed and shared, that a CPU interprets."""
    f32 = jnp.float32
    for kind in KINDS:
        yield moe_case(1, (13, 3, 11, 20, 9), kind, LISTS, f32)
    for kind in ("spread", "padding"):
        yield moe_case(2, (5, 3, 8, 20, 9), kind, SLOTS, f32)
    yield moe_case(3, (70, 1, 1, 16, 16), "padding", LISTS, f32)
    yield moe_case(4, (1, 2, 3, 16, 4), "spread", SLOTS, f32)
    for activation in ACTIVATIONS:
        for tiles, dtype in ((LISTS, f32), (SLOTS, jnp.bfloat16)):
            yield moe_case(5, (6, 3, 8, 20, 9), "padding", tiles, dtype, activation=activation, biased=True)
    for tiles, dtype, kind in ((LISTS, f32, "padding"), (SLOTS, f32, "spread"), (LISTS, jnp.bfloat16, "spread")):
        yield shared_case(18, (6, 3, 8, 20, 9), 22, kind, tiles, dtype)


def small_router_cases() -> Iterator[Case]:
    """Routers that a CPU interprets."""
    for rows, experts, top_k, flags in (
        (1, 8, 2, 0),
        (5, 11, 3, 1),
        (13, 128, 8, 3),
        (6, 16, 16, 7),
        (7, 32, 4, 5),
        (9, 60, 4, 6),
    ):
        yield router_case(5, rows, experts, top_k, flags)
    for rows, experts, top_k, flags in ((1, 8, 2, 8), (13, 128, 8, 11), (9, 60, 3, 14), (6, 16, 4, 9)):
        yield router_case(8, rows, experts, top_k, flags)
    for law in ROUTER_LAWS:
        for rows, experts, top_k, flags in ((5, 24, 3, 3), (6, 12, 2, 31)):
            yield router_case(9, rows, experts, top_k, flags, law)


def small_cases() -> Iterator[Case]:
    """Cases that a CPU interprets in seconds."""
    f32 = jnp.float32
    yield from small_moe_cases()
    yield from small_router_cases()
    for rows, dim, outputs, splits in ((1, 16, 16, 1), (5, 40, 23, 2), (19, 64, 48, 4)):
        yield linear_case(
            6, rows, dim, outputs, LinearTile(rows=16, out=16, inner=16, warps=4, stages=2, splits=splits), f32
        )
    tile = LinearTile(rows=16, out=16, inner=16, warps=4, stages=2, splits=2)
    for dtype in (jnp.bfloat16, jnp.float16):
        yield linear_case(7, 5, 40, 23, tile, dtype, matrix_dtype=f32)
    for rows, dim, parts, top_k in ((1, 16, 1, 1), (5, 24, 3, 4)):
        yield residual_case(15, rows, dim, parts=parts, top_k=top_k)
    yield residual_case(16, 5, 24, parts=3, top_k=2, features=True)
    yield residual_product_case(18, 40, 23, parts=3, dtype=f32)
    yield residual_product_case(19, 256, 40, parts=2, dtype=jnp.bfloat16, features=True)
    yield residual_case(17, 3, 40, parts=1, top_k=2, features=True, dtype=jnp.bfloat16)
    ragged = Sequences(spans=((0, 5), (7, 1), (0, 1), (13, 9), (3, 2)), padding=4, empty=2)
    spread = Sequences(spans=((3, 1), (0, 1), (90, 1), (17, 1)), empty=1)
    odd = {"heads": 6, "groups": 2, "head_dim": 12}
    for splits in (1, 4):
        yield attention_case(7, spread, decode=True, splits=splits)
    yield attention_case(8, dataclasses.replace(spread, **odd), decode=True, splits=2)
    yield attention_case(9, ragged, decode=False)
    yield attention_case(10, dataclasses.replace(ragged, **odd), decode=False)
    yield attention_case(11, Sequences(spans=((0, 70), (70, 10)), head_dim=8, heads=2, groups=1), decode=False)
    yield prepare_case(12, ragged, decode=False)
    yield prepare_case(13, spread, decode=True)
    yield prepare_case(14, dataclasses.replace(ragged, **odd), decode=False)
    yield from halved_cases()
    yield from family_cases(ragged, spread)
    yield from verify_cases()
    yield from kv_code_cases(ragged, spread)


def halved_cases() -> Iterator[Case]:
    """Heads in halves, in steps whose blocks have several tokens, the last one not full or with padding alone; from
    2,048 tokens on blocks are larger."""
    half, seqs = jnp.bfloat16, Sequences(spans=((0, 70), (5, 9), (0, 1)), padding=3)
    long = Sequences(spans=((0, 1900), (60, 140)), padding=20, page=16, head_dim=8)
    for heads, groups in ((6, 2), (3, 1), (4, 4)):
        yield prepare_case(81, dataclasses.replace(seqs, heads=heads, groups=groups), decode=False)
    yield prepare_case(84, dataclasses.replace(long, heads=3, groups=1), decode=False, dtype=half)
    yield prepare_case(85, dataclasses.replace(seqs, padding=16), decode=False)
    yield prepare_case(86, dataclasses.replace(long, padding=24), decode=False)
    traits = {"qk_norm": "whole"}, {"qk_norm": "bare"}, {"qk_norm": ""}, {"qk_norm_offset": 1.0}
    for own in (*traits, {"norm_after_rope": True}, {"norm_after_rope": True, "qk_norm": "bare"}):
        yield prepare_case(82, seqs, decode=False, traits=StackTraits(**own), biased=True, parts=2, dtype=half)
    for scaled in (False, True):
        yield prepare_case(83, seqs, decode=False, dtype=half, codes=True, scaled=scaled)


def verify_cases() -> Iterator[Case]:
    """Attention of verify steps: up to 5 tokens a request, some at the start of their sequence, some without any."""
    seqs = Sequences(spans=((3, 4), (0, 1), (90, 5), (17, 2), (40, 3)), padding=3, empty=2)
    odd = dataclasses.replace(seqs, heads=6, groups=2, head_dim=12)
    for splits in (1, 4):
        yield attention_case(31, seqs, decode=False, max_queries=5, splits=splits)
    yield attention_case(32, dataclasses.replace(odd, page=16), decode=False, max_queries=8)
    for features in (AttentionFeatures(window=21, scale=0.3), AttentionFeatures(window=3), AttentionFeatures(chunk=20)):
        yield attention_case(33, odd, decode=False, max_queries=5, features=features, splits=2)
    yield attention_case(34, seqs, decode=False, max_queries=5, sinks=True, stacked=True, splits=4)
    yield attention_case(37, seqs, decode=False, max_queries=5, sinks=True, dtype=jnp.bfloat16)


def family_cases(ragged: Sequences, spread: Sequences) -> Iterator[Case]:
    """What families add to attention."""
    half, long = jnp.bfloat16, dataclasses.replace(ragged, spans=((0, 90), (130, 21), (0, 1), (37, 9)), page=16)
    odd = {"heads": 6, "groups": 2, "head_dim": 12}
    windows = [AttentionFeatures(window=window, scale=scale) for window, scale in ((3, 0.0), (21, 0.3))]
    for features in (windows[1], AttentionFeatures(chunk=20)):
        yield attention_case(15, spread, decode=True, features=features, splits=2)
        yield attention_case(16, dataclasses.replace(long, **odd), decode=False, features=features)
    yield attention_case(17, spread, decode=True, splits=1, features=windows[0], sinks=True, dtype=half)
    yield attention_case(18, dataclasses.replace(spread, page=16), decode=True, splits=4, sinks=True, stacked=True)
    yield attention_case(19, long, decode=False, features=windows[0], sinks=True, stacked=True)
    yield attention_case(20, long, decode=False, sinks=True, dtype=half)
    whole = StackTraits(qk_norm="whole")
    yield prepare_case(22, dataclasses.replace(ragged, **odd), decode=False, traits=whole, frequencies=2, biased=True)
    yield prepare_case(24, spread, decode=True, traits=whole, parts=3, dtype=half)
    yield prepare_case(25, ragged, decode=False, traits=StackTraits(qk_norm_offset=1.0), frequencies=5, dtype=half)
    pairs, after = StackTraits(qk_norm="", interleaved=True), StackTraits(norm_after_rope=True)
    yield prepare_case(26, spread, decode=True, traits=pairs, frequencies=3, biased=True)
    yield prepare_case(27, ragged, decode=False, traits=StackTraits(interleaved=True), biased=True, dtype=half)
    yield prepare_case(28, ragged, decode=False, traits=StackTraits(qk_norm="", rotary=False), parts=2)
    yield prepare_case(35, spread, decode=True, traits=after, dtype=half)
    bare = dataclasses.replace(after, qk_norm="bare", interleaved=True)
    yield prepare_case(36, dataclasses.replace(ragged, **odd), decode=False, traits=bare)
    for latent in (False, True):
        yield write_case(29, dataclasses.replace(long, **odd), latent=latent)
        yield write_case(30, ragged, latent=latent, dtype=half)


def kv_code_cases(ragged: Sequences, spread: Sequences) -> Iterator[Case]:
    """Pools of codes."""
    half, odd = jnp.bfloat16, {"heads": 6, "groups": 2, "head_dim": 12}
    for dtype, splits in ((jnp.float32, 1), (half, 4)):
        yield attention_case(41, spread, decode=True, splits=splits, dtype=dtype, codes=True)
        yield attention_case(42, dataclasses.replace(ragged, **odd), decode=False, dtype=dtype, codes=True)
        yield prepare_case(43, dataclasses.replace(ragged, **odd), decode=False, dtype=dtype, codes=True)
        yield write_case(44, dataclasses.replace(ragged, **odd), latent=False, dtype=dtype, codes=True)
    verified = Sequences(spans=((3, 4), (0, 1), (90, 5), (17, 2), (40, 3)), padding=3, empty=2)
    yield attention_case(45, verified, decode=False, max_queries=5, splits=2, dtype=half, codes=True)
    features = AttentionFeatures(window=21)
    yield attention_case(46, ragged, decode=False, features=features, sinks=True, dtype=half, codes=True)
    plain = StackTraits(qk_norm="", rotary=False)
    yield prepare_case(47, spread, decode=True, traits=plain, parts=2, dtype=half, codes=True)
    for dtype, splits in ((jnp.float32, 1), (half, 4)):
        scaled = {"dtype": dtype, "codes": True, "scaled": True}
        yield attention_case(61, spread, decode=True, splits=splits, **scaled)
        yield attention_case(62, dataclasses.replace(ragged, **odd), decode=False, **scaled)
        yield attention_case(65, verified, decode=False, max_queries=5, splits=splits, **scaled)
        yield prepare_case(63, dataclasses.replace(ragged, **odd), decode=False, **scaled)
    yield attention_case(66, ragged, decode=False, features=features, sinks=True, **scaled)
    yield attention_case(68, spread, decode=True, splits=4, sinks=True, stacked=True, **scaled)
    yield prepare_case(67, spread, decode=True, traits=plain, parts=2, **scaled)


def large_router_cases() -> Iterator[Case]:
    """Routers of published sizes."""
    for rows, flags in itertools.product((1, 5, 64, 256, 1023), (0, 3, 5, 7, 8, 11)):
        yield router_case(rows, rows, 128, 8, flags)
    yield router_case(1, 77, 60, 4, 7)
    for law, (rows, flags) in itertools.product(ROUTER_LAWS, ((1, 3), (256, 27))):
        yield router_case(rows, rows, 240, 8, flags, law)


def large_cases() -> Iterator[Case]:
    """Cases for a GPU: Qwen3-30B-A3B's shapes and odd ones, bfloat16."""
    half = jnp.bfloat16
    for rows in (1, 2, 7, 16, 37, 129, 256, 777, 2048):
        for kind in KINDS:
            yield moe_case(rows, (rows, 8, 128, 2048, 768), kind, choose_tiles(rows * 8, 128, 2048, 768), half)
    yield moe_case(1, (300, 3, 60, 1000, 72), "padding", choose_tiles(900, 60, 1000, 72), half)
    for rows in (64, 256, 1024):  # Mixtral, narrower
        yield moe_case(rows, (rows, 2, 8, 4096, 1792), "spread", choose_tiles(rows * 2, 8, 4096, 1792), half)
    for rows in (1, 7, 64, 256, 2048):  # GPT-OSS-20b
        tiles, shape = choose_tiles(rows * 4, 32, 2880, 2880), (rows, 4, 32, 2880, 2880)
        yield moe_case(rows, shape, "padding", tiles, half, activation="clamped swiglu", biased=True)
    yield from large_router_cases()
    for rows in (1, 7, 16, 33, 64, 100, 256, 511):
        for dim, outputs in ((2048, 5120), (4096, 2048), (2048, 128), (1000, 200)):
            yield linear_case(rows, rows, dim, outputs, None, half)
    for dim, outputs, parts in ((2048, 128, 8), (2880, 32, 4), (4096, 128, 8)):
        yield residual_product_case(dim, dim, outputs, parts=parts, dtype=half, features=dim == 4096)
    yield linear_case(7, 64, 2560, 64, None, half, matrix_dtype=jnp.float32)  # Ernie 4.5's router
    for rows, dim, parts, top_k in ((1, 2048, 8, 8), (64, 2048, 4, 8), (37, 2880, 2, 4)):
        yield residual_case(15, rows, dim, parts=parts, top_k=top_k, dtype=half, features=rows == 37)
    for rows, shape, width in (
        (1, (6, 64, 2048, 1408), 2816),
        (16, (10, 512, 2048, 512), 512),
        (100, (8, 128, 4096, 1408), 1408),
    ):  # DeepSeek-V2-Lite, Qwen3-Next, GLM-4.5-Air
        tiles = choose_tiles(rows * shape[0], *shape[1:])
        yield shared_case(rows, (rows, *shape), width, "padding", tiles, half)
    shape = {"heads": 32, "groups": 4, "head_dim": 128, "page": 16}
    rng = np.random.default_rng(0)
    for requests, longest in ((1, 130), (1, 3000), (16, 1100), (64, 1100), (200, 600)):
        spans = tuple((int(before), 1) for before in rng.integers(0, longest, requests))
        seqs = Sequences(spans=spans, empty=3, **shape)
        yield attention_case(requests, seqs, decode=True, dtype=half)
        yield prepare_case(requests, seqs, decode=True, dtype=half)
    for requests, longest in ((1, 1024), (7, 300), (40, 60)):
        spans = tuple(
            (int(before), int(new))
            for before, new in zip(rng.integers(0, longest, requests), rng.integers(1, longest, requests), strict=True)
        )
        seqs = Sequences(spans=spans, empty=5, padding=37, **shape)
        yield attention_case(requests, seqs, decode=False, dtype=half)
        yield prepare_case(requests, seqs, decode=False, dtype=half)
    yield attention_case(
        3,
        Sequences(spans=((5, 40), (0, 33)), padding=3, heads=6, groups=2, head_dim=64, page=16),
        decode=False,
        dtype=half,
    )
    yield from large_verify_cases()
    yield from large_family_cases()
    yield from large_kv_code_cases()


def large_kv_code_cases() -> Iterator[Case]:
    """Pools of codes of Qwen3-30B-A3B, GPT-OSS-20b and Qwen3-Next, at decode, extend and verify."""
    half, rng = jnp.bfloat16, np.random.default_rng(0)
    decoded = tuple((int(before), 1) for before in rng.integers(0, 1100, 40))
    prompts = ((0, 700), (300, 129), (0, 1), (90, 40))
    drafted = tuple((int(before), int(rng.integers(1, 9))) for before in rng.integers(0, 1100, 16))
    for heads, groups, head_dim in ((32, 4, 128), (64, 8, 64), (16, 2, 256)):
        sizes = {"heads": heads, "groups": groups, "head_dim": head_dim, "page": 16, "empty": 3}
        for spans, decode in ((decoded, True), (prompts, False)):
            seqs = Sequences(spans=spans, **sizes)
            yield attention_case(51, seqs, decode=decode, dtype=half, codes=True)
            yield prepare_case(52, seqs, decode=decode, dtype=half, codes=True)
            yield attention_case(55, seqs, decode=decode, dtype=half, codes=True, scaled=True)
            yield prepare_case(56, seqs, decode=decode, dtype=half, codes=True, scaled=True)
        seqs = Sequences(spans=drafted, **sizes)
        yield attention_case(53, seqs, decode=False, max_queries=8, dtype=half, codes=True)
        yield attention_case(57, seqs, decode=False, max_queries=8, dtype=half, codes=True, scaled=True)
        yield write_case(54, Sequences(spans=prompts, **sizes), latent=False, dtype=half, codes=True)


def large_verify_cases() -> Iterator[Case]:
    """Verify steps of Qwen3-30B-A3B's and Qwen3-Next's attention."""
    rng = np.random.default_rng(0)
    for heads, groups, head_dim in ((32, 4, 128), (16, 2, 256)):
        for requests, longest in ((1, 3000), (16, 1100), (64, 600)):
            spans = tuple((int(before), int(rng.integers(1, 9))) for before in rng.integers(0, longest, requests))
            sizes = {"heads": heads, "groups": groups, "head_dim": head_dim, "page": 16}
            seqs = Sequences(spans=spans, empty=2, padding=9, **sizes)
            yield attention_case(requests, seqs, decode=False, max_queries=8, dtype=jnp.bfloat16)


def large_family_cases() -> Iterator[Case]:
    """Attention of GPT-OSS-20b, Qwen3-Next, MiniMax-M2 and Gemma 4."""
    half, rng = jnp.bfloat16, np.random.default_rng(0)
    gpt, qwen, minimax, gemma = (
        {"heads": heads, "groups": groups, "head_dim": head_dim, "page": 16}
        for heads, groups, head_dim in ((64, 8, 64), (16, 2, 256), (48, 8, 128), (16, 2, 512))
    )
    decoded = tuple((int(before), 1) for before in rng.integers(0, 1100, 40))
    prompts = ((0, 700), (300, 129), (0, 1), (90, 40))
    for spans, decode in ((decoded, True), (prompts, False)):
        for window in (0, 128):
            features = AttentionFeatures(window=window)
            seqs = Sequences(spans=spans, empty=3, **gpt)
            yield attention_case(31, seqs, decode=decode, features=features, sinks=True, stacked=True, dtype=half)
        for shape in (qwen, gemma):
            yield attention_case(32, Sequences(spans=spans, empty=3, **shape), decode=decode, dtype=half)
        for shape, traits in (
            (minimax, StackTraits(qk_norm="whole")),
            (gpt, StackTraits(qk_norm="", interleaved=True)),
        ):
            seqs = Sequences(spans=spans, empty=3, **shape)
            yield prepare_case(33, seqs, decode=decode, traits=traits, frequencies=32, biased=True, dtype=half)
        yield write_case(34, Sequences(spans=spans, empty=3, **minimax), latent=False, dtype=half)
