"""Cases for the GPU kernels: small ones that a CPU interprets and large ones for a GPU.

A case builds random inputs, runs a kernel and its oracle, and returns what differs. Inputs that a kernel must not read
are NaN."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from routed_experts.layers.attention import FusedQKV, PagedBatch, reference_attention, write_kv
from routed_experts.layers.gpu.attention import decode_attention, extend_attention
from routed_experts.layers.gpu.linear import LinearTile, linear_in_place
from routed_experts.layers.gpu.moe import TILES, MoeTiles, Tile, slot_outputs
from routed_experts.layers.gpu.qk_norm_rope import prepare
from routed_experts.layers.gpu.residual import add_parts, add_slots
from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.moe import ExpertCall, combine, reference_experts
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import apply_rotary, rotary_cos_sin
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk


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


def moe_case(seed, shape, kind, tiles: MoeTiles, dtype) -> Case:
    """Three layers; the two others are NaN, and so are the rows of padding."""
    rows, top_k, experts, dim, width = shape

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        keys = jax.random.split(jax.random.key(seed), 3)
        valid = rng.random(rows) < (0.7 if kind == "padding" else 2)
        valid[0] = True
        ids = random_ids(rng, rows, experts, top_k, kind)
        x = jax.random.normal(keys[0], (rows, dim), dtype)
        layers = jnp.repeat(jnp.array([jnp.nan, 1, jnp.nan], dtype), experts)[:, None, None]
        weights = jnp.asarray(rng.random((rows, top_k)), jnp.float32)
        call = ExpertCall(
            x=jnp.where(jnp.asarray(valid)[:, None], x, jnp.nan),
            ids=jnp.asarray(np.where(valid[:, None], ids, 7 * experts), jnp.int32),
            weights=weights / jnp.sum(weights, axis=1, keepdims=True),
            valid=jnp.asarray(valid),
            gate_up=layers
            * jnp.tile(jax.random.normal(keys[1], (experts, dim, 2 * width), dtype) * dim**-0.5, (3, 1, 1)).astype(
                dtype
            ),
            down=layers
            * jnp.tile(jax.random.normal(keys[2], (experts, width, dim), dtype) * width**-0.5, (3, 1, 1)).astype(dtype),
            first_expert=jnp.asarray(experts, jnp.int32),
            num_experts=experts,
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
    return Case(kernel="moe", name=f"N,K,E,D,F={shape} {kind}, {sorted_slots}, tile {tiles.gate_up.rows}", run=run)


def router_case(seed, rows, experts, top_k, flags) -> Case:
    """Flags: 1 renormalised, 2 captured, 4 with ties, 8 half of the rows replayed."""
    renormalize, captured, ties, replays = (bool(flags & bit) for bit in (1, 2, 4, 8))
    spec = RouterSpec(num_experts=experts, top_k=top_k, renormalize=renormalize)

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((rows, experts)) * 3
        logits = jnp.asarray(np.round(logits) if ties else logits, jnp.float32)
        block = jnp.full((3 * top_k, rows), -1, jnp.int32) if captured else None
        replayed_ids = random_ids(rng, rows, experts, top_k, "").astype(np.uint16)
        routed = LayerRouting(jnp.asarray(replayed_ids), jnp.asarray(rng.random(rows) < 0.5)) if replays else None
        expected = jax.jit(lambda z: replay_topk(z, routed, spec=spec))(logits)
        actual, block = jax.jit(lambda z, b: route_rows(z, routed, b, jnp.int32(1), spec, interpret=interpret))(
            logits, block
        )
        wrong = sum(
            int(np.sum(np.asarray(a) != b))
            for a, b in ((actual.ids, expected.ids), (actual.native_ids, expected.native_ids))
        )
        if block is not None:
            whole = np.full((3 * top_k, rows), -1)
            whole[top_k : 2 * top_k] = np.asarray(expected.ids).T
            wrong += int(np.sum(np.asarray(block) != whole))
        return Outcome(distance=distance(actual.weights, expected.weights), wrong_ids=wrong, bound=1e-6)

    features = {"renormalised": renormalize, "ties": ties, "captured": captured, "replayed": replays}
    words = [word for word, enabled in features.items() if enabled]
    return Case(kernel="router", name=f"N={rows} E={experts} K={top_k} {', '.join(words)}", run=run)


def linear_case(seed, rows, dim, outputs, tile: LinearTile | None, dtype) -> Case:
    def run(interpret: bool) -> Outcome:
        keys = jax.random.split(jax.random.key(seed), 2)
        x = jax.random.normal(keys[0], (rows, dim), dtype)
        weights = (
            jax.random.normal(keys[1], (3, dim, outputs), dtype)
            * jnp.array([jnp.nan, 1, jnp.nan], dtype)[:, None, None]
        )
        actual = jax.jit(lambda x, w: linear_in_place(x, w, jnp.int32(1), jnp.float32, tile=tile, interpret=interpret))(
            x, weights
        )
        expected = reference_linear(x, weights, 1, jnp.float32)
        return Outcome(
            distance=distance(actual, expected),
            wrong_ids=0,
            bound=bound(dtype) / 10 if dtype == jnp.bfloat16 else bound(dtype),
        )

    return Case(kernel="linear", name=f"N={rows} D={dim} O={outputs}", run=run)


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


def attention_case(seed, seqs: Sequences, *, decode, splits=None, dtype=jnp.float32) -> Case:
    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=decode, dtype=dtype)
        queries = jnp.asarray(rng.standard_normal((batch.positions.shape[0], seqs.heads, seqs.head_dim)), dtype)
        if decode:
            actual = jax.jit(lambda q, p, b: decode_attention(q, p, first, b, splits=splits, interpret=interpret))(
                queries, pool, batch
            )
        else:
            actual = jax.jit(lambda q, p, b: extend_attention(q, p, first, b, interpret=interpret))(
                queries, pool, batch
            )
        expected = jax.jit(lambda q, p, b: reference_attention(q, p, first, b))(queries, pool, batch)
        return Outcome(distance=distance(actual[:num_tokens], expected[:num_tokens]), wrong_ids=0, bound=bound(dtype))

    kind = f"decode, splits {splits or 'chosen'}" if decode else "extend"
    return Case(
        kernel="attention",
        name=f"{kind}, {len(seqs.spans)}+{seqs.empty} requests, {seqs.heads}/{seqs.groups} heads of {seqs.head_dim}",
        run=run,
    )


def prepare_case(seed, seqs: Sequences, *, decode, dtype=jnp.float32) -> Case:
    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=decode, dtype=dtype)
        rows, parts = batch.positions.shape[0], seqs.heads + 2 * seqs.groups
        cos, sin = rotary_cos_sin(batch.positions, head_dim=seqs.head_dim, theta=1e4)
        qkv = jnp.asarray(rng.standard_normal((rows, parts * seqs.head_dim)), dtype)
        norms = [jnp.asarray(rng.random((3, seqs.head_dim)) + 0.5, dtype) for _ in range(2)]
        projected = FusedQKV(qkv=qkv, q_norm=norms[0], k_norm=norms[1], layer=jnp.int32(1), cos=cos, sin=sin, eps=1e-6)
        fields = (qkv, *norms, cos, sin, pool)

        def run_kernel(qkv, q_norm, k_norm, cos, sin, pool):
            cast = dataclasses.replace(projected, qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin)
            return prepare(cast, pool, first, batch, interpret=interpret)

        def plain(qkv, q_norm, k_norm, cos, sin, pool):
            mixed = qkv.reshape(rows, parts, seqs.head_dim)
            queries, keys, values = jnp.split(mixed, (seqs.heads, seqs.heads + seqs.groups), axis=1)
            queries, keys = (
                apply_rotary(rms_norm(x, n[1], eps=1e-6), cos, sin) for x, n in ((queries, q_norm), (keys, k_norm))
            )
            return queries, write_kv(pool, keys, values, first, batch)

        (actual, pool), (expected, expected_pool) = jax.jit(run_kernel)(*fields), jax.jit(plain)(*fields)
        untouched = np.isnan(np.asarray(pool, np.float32)) != np.isnan(np.asarray(expected_pool, np.float32))
        untouched[int(first)] = False  # padding goes to this page in the one, nowhere in the other
        both = [np.nan_to_num(np.delete(np.asarray(x, np.float32), int(first), axis=0)) for x in (pool, expected_pool)]
        far = max(distance(actual[:num_tokens], expected[:num_tokens]), distance(*both))
        return Outcome(distance=far, wrong_ids=int(untouched.sum()), bound=bound(dtype))

    return Case(
        kernel="prepare",
        name=f"{'decode' if decode else 'extend'}, {len(seqs.spans)} requests, {seqs.heads}/{seqs.groups} heads",
        run=run,
    )


def residual_case(seed, rows, dim, *, parts, top_k, dtype=jnp.float32) -> Case:
    """Both kernels of the residual stream; slots of padding rows are NaN."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        x, sums = (
            jnp.asarray(rng.standard_normal(size), kind)
            for size, kind in (((rows, dim), dtype), ((parts, rows, dim), jnp.float32))
        )
        scales, valid = jnp.asarray(rng.random((3, dim)) + 0.5, dtype), jnp.asarray(rng.random(rows) < 0.7)
        slots = jnp.where(valid[:, None, None], jnp.asarray(rng.standard_normal((rows, top_k, dim)), dtype), jnp.nan)
        weights = jnp.asarray(rng.random((rows, top_k)), jnp.float32)
        actual = jax.jit(lambda x, p: add_parts(x, p, scales, jnp.int32(1), eps=1e-6, interpret=interpret))(x, sums)
        flat = slots.reshape(-1, dim)
        actual += jax.jit(
            lambda x, s: add_slots(x, s, weights, valid, scales, jnp.int32(1), eps=1e-6, interpret=interpret)
        )(x, flat)
        expected = []
        for addend in (jnp.sum(sums, axis=0).astype(dtype), combine(slots, weights, valid)):
            expected += [x + addend, rms_norm(x + addend, scales[1], eps=1e-6)]
        return Outcome(distance=max(map(distance, actual, expected)), wrong_ids=0, bound=bound(dtype))

    return Case(kernel="residual", name=f"N={rows} D={dim} S={parts} K={top_k}", run=run)


SMALL_TILE = Tile(rows=16, out=16, inner=16, warps=4, stages=2)
LISTS = MoeTiles(slots=2**31, gate_up=SMALL_TILE, down=SMALL_TILE)
SLOTS = dataclasses.replace(LISTS, sorted_slots=False)
KINDS = ("spread", "padding", "one hot expert", "few experts")


def small_cases() -> Iterator[Case]:
    """Cases that a CPU interprets in seconds."""
    f32 = jnp.float32
    for kind in KINDS:
        yield moe_case(1, (13, 3, 11, 20, 9), kind, LISTS, f32)
    for kind in ("spread", "padding"):
        yield moe_case(2, (5, 3, 8, 20, 9), kind, SLOTS, f32)
    yield moe_case(3, (70, 1, 1, 16, 16), "padding", LISTS, f32)
    yield moe_case(4, (1, 2, 3, 16, 4), "spread", SLOTS, f32)
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
    for rows, dim, outputs, splits in ((1, 16, 16, 1), (5, 40, 23, 2), (19, 64, 48, 4)):
        yield linear_case(
            6, rows, dim, outputs, LinearTile(rows=16, out=16, inner=16, warps=4, stages=2, splits=splits), f32
        )
    for rows, dim, parts, top_k in ((1, 16, 1, 1), (5, 24, 3, 4)):
        yield residual_case(15, rows, dim, parts=parts, top_k=top_k)
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


def large_cases() -> Iterator[Case]:
    """Cases for a GPU: Qwen3-30B-A3B's shapes and odd ones, bfloat16."""
    half = jnp.bfloat16
    for rows in (1, 2, 7, 16, 37, 129, 256, 777, 2048):
        for kind in KINDS:
            tiles = next(tiles for tiles in TILES if rows * 8 <= tiles.slots)
            yield moe_case(rows, (rows, 8, 128, 2048, 768), kind, tiles, half)
    yield moe_case(1, (300, 3, 60, 1000, 72), "padding", next(tiles for tiles in TILES if tiles.slots >= 900), half)
    for rows in (1, 5, 64, 256, 1023):
        for flags in (0, 3, 5, 7, 8, 11):
            yield router_case(rows, rows, 128, 8, flags)
    yield router_case(1, 77, 60, 4, 7)
    for rows in (1, 7, 16, 33, 64, 100, 256, 511):
        for dim, outputs in ((2048, 5120), (4096, 2048), (2048, 128), (1000, 200)):
            yield linear_case(rows, rows, dim, outputs, None, half)
    for rows, dim, parts, top_k in ((1, 2048, 8, 8), (64, 2048, 4, 8), (37, 2880, 2, 4)):
        yield residual_case(15, rows, dim, parts=parts, top_k=top_k, dtype=half)
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
