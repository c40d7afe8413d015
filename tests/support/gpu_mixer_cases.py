"""Cases for the GPU kernels that mix tokens by other means than keys and values by head: latent attention and the
delta rule. Dims as in layers/gpu/latent.py and layers/delta_rule.py."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from routed_experts.layers.attention import LatentQKV
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import reference_variant, write_latent
from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape, DeltaState, delta_ragged
from routed_experts.layers.gpu.delta_chunks import CHUNK
from routed_experts.layers.gpu.delta_rule import gpu_delta
from routed_experts.layers.gpu.latent import gpu_latent, latent_attention
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.recurrent import select_states
from routed_experts.layers.rotary import RotarySpec
from support.gpu_cases import Case, Outcome, Sequences, attention_inputs, bound, distance


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSizes:
    heads: int = 4
    rank: int = 12
    key_dim: int = 10
    value_dim: int = 6
    rotary: int = 4


def plain_latent(projected: LatentQKV, rotary: RotarySpec, pool, first, batch):
    """The steps of the model in array code; values and the pool."""
    heads, rank, rows = projected.queries.shape[1], projected.norm.shape[0], projected.compressed
    key_dim = projected.queries.shape[2] - (rows.shape[1] - rank)
    row = rms_norm(rows[:, :rank], projected.norm, eps=projected.eps)
    rotated = rotary.apply(rows[:, None, rank:], projected.angles)
    pool = write_latent(pool, jnp.concatenate([row[:, None], rotated], axis=-1), first, batch)
    up = projected.up.reshape(rank, heads, -1)
    absorbed = jnp.einsum("nhc,rhc->nhr", projected.queries[..., :key_dim], up[..., :key_dim])
    rotated = rotary.apply(projected.queries[..., key_dim:], projected.angles)
    queries = jnp.concatenate([absorbed, rotated], axis=-1)
    features = AttentionFeatures(latent=rank, scale=projected.scale)
    mixed = reference_variant(queries, pool, first, batch, features)
    return jnp.einsum("nhr,rhv->nhv", mixed, up[..., key_dim:]), pool


def latent_case(seed, seqs: Sequences, sizes: LatentSizes, *, decode, interleaved=True, dtype=jnp.float32) -> Case:
    """From the projections to values and the pool; other layers' matrices are NaN."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        wide = dataclasses.replace(seqs, groups=1, head_dim=sizes.rank + sizes.rotary)
        pool, first, batch, num_tokens = attention_inputs(rng, wide, decode=decode, dtype=dtype)
        pool, rows = pool[:, :, :1], batch.positions.shape[0]
        rotary = RotarySpec(
            inverse=tuple(1e2 ** -(2 * np.arange(sizes.rotary // 2) / sizes.rotary)), interleaved=interleaved
        )

        def random(*shape):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        up = random(sizes.rank, sizes.heads * (sizes.key_dim + sizes.value_dim)) * sizes.rank**-0.5
        arrays = {
            "queries": random(rows, sizes.heads, sizes.key_dim + sizes.rotary),
            "compressed": random(rows, sizes.rank + sizes.rotary),
            "norm": random(sizes.rank),
            "up": up,
            "angles": rotary.cos_sin(batch.positions),
            "stacked_up": jnp.stack([jnp.full_like(up, jnp.nan), up]),
        }

        def project(arrays):
            rest = {"interleaved": interleaved, "scale": 0.3, "eps": 1e-6, "layer": jnp.int32(1)}
            return LatentQKV(**arrays, **rest)

        num_pages = pool.shape[0] // 2
        kernel = jax.jit(
            lambda arrays, pool: gpu_latent(project(arrays), pool, jnp.int32(1), batch, num_pages, interpret=interpret)
        )
        plain = jax.jit(lambda arrays, pool: plain_latent(project(arrays), rotary, pool, first, batch))
        (actual, pool), (expected, expected_pool) = kernel(arrays, pool), plain(arrays, pool)
        untouched = np.isnan(np.asarray(pool, np.float32)) != np.isnan(np.asarray(expected_pool, np.float32))
        untouched[int(first)] = False  # padding goes to this page in the one, nowhere in the other
        both = [np.nan_to_num(np.delete(np.asarray(x, np.float32), int(first), axis=0)) for x in (pool, expected_pool)]
        far = max(distance(actual[:num_tokens], expected[:num_tokens]), distance(*both))
        return Outcome(distance=far, wrong_ids=int(untouched.sum()), bound=bound(dtype))

    shape = f"{sizes.heads} heads, rank {sizes.rank} + {sizes.rotary}"
    kind = f"{'decode' if decode else 'extend'}, {len(seqs.spans)}+{seqs.empty} requests"
    pairs = "pairs" if interleaved else "halves"
    return Case(kernel="latent", name=f"{kind}, {shape}, {pairs}, page {seqs.page}, {jnp.dtype(dtype)}", run=run)


def latent_splits_case(seed, seqs: Sequences, splits: int) -> Case:
    """Queries of many heads, absorbed already, whose rows are divided."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=True, dtype=jnp.float32)
        pool, features = pool[:, :, :1], AttentionFeatures(latent=seqs.head_dim - 5, scale=0.2)
        queries = jnp.asarray(rng.standard_normal((batch.positions.shape[0], seqs.heads, seqs.head_dim)), jnp.float32)
        actual = jax.jit(
            lambda q, p: latent_attention(q, p, first, batch, features, splits=splits, interpret=interpret)
        )(queries, pool)
        expected = jax.jit(lambda q, p: reference_variant(q, p, first, batch, features))(queries, pool)
        far = distance(actual[:num_tokens], expected[:num_tokens])
        return Outcome(distance=far, wrong_ids=0, bound=bound(jnp.float32))

    return Case(kernel="latent", name=f"decode, {seqs.heads} heads, {splits} splits", run=run)


def delta_inputs(rng, shape: DeltaShape, lengths, *, padding=0, layers=2, dtype=jnp.float32, like=0.0, forgets=0.3):
    """Random tokens of requests that have so many each, states of two more slots in every layer, and the slots. `like`:
    how much the keys of a request resemble each other. `forgets`: the largest decay."""
    count, heads = sum(lengths) + padding, shape.value_heads
    channels, bound = shape.channels, 2 * shape.key_heads * shape.key_dim
    mixed = rng.standard_normal((count, channels))
    mixed[:, :bound] = (1 - like) * mixed[:, :bound] + 3 * like * rng.standard_normal(bound)
    inputs = DeltaInputs(
        mixed=jnp.asarray(mixed, dtype),
        decay=jnp.asarray(-rng.random((count, shape.num_decays)) * forgets * (1 - like), jnp.float32),
        beta=jnp.asarray(rng.random((count, heads)) ** (1 - like), jnp.float32),
        kernel=jnp.asarray(rng.standard_normal((channels, shape.width)), dtype),
        shape=shape,
    )
    slots = len(lengths) + 2
    sizes = heads, shape.key_dim, shape.value_dim
    states = DeltaState(
        jnp.asarray(rng.standard_normal((layers, slots, shape.width - 1, channels)), dtype),
        jnp.asarray(rng.standard_normal((layers, slots, *sizes)), jnp.float32),
    )
    starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    return inputs, states, jnp.asarray(rng.permutation(slots)[: len(lengths)], jnp.int32), starts


def plain_delta(inputs, states, layer, slots, fresh, starts):
    """`delta_ragged` on the states of some slots, as `hybrid_ops` runs it."""
    old = jax.tree.map(lambda leaf: leaf[layer, slots], states)
    empty = inputs.shape.zeros(slots.shape[0], old.conv.dtype)
    read, new = delta_ragged(inputs, select_states(fresh, empty, old), starts)
    return read, jax.tree.map(lambda leaf, rows: leaf.at[layer, slots].set(rows), states, new)


def delta_case(
    seed, shape: DeltaShape, lengths, *, padding=0, chunk=CHUNK, like=0.0, forgets=0.3, dtype=jnp.float32
) -> Case:
    """Half of the requests start anew, and their slots are NaN; the states of requests without a token, of other slots
    and of the other layer keep their bits."""

    def run(interpret: bool) -> Outcome:
        rng = np.random.default_rng(seed)
        inputs, states, slots, starts = delta_inputs(
            rng, shape, lengths, padding=padding, dtype=dtype, like=like, forgets=forgets
        )
        fresh = jnp.asarray((np.arange(len(lengths)) % 2 == 0) & (np.array(lengths) > 0))
        broken = jax.tree.map(lambda leaf: leaf.at[1, slots[fresh]].set(jnp.nan), states)
        args = jnp.int32(1), slots, fresh, starts
        kernel = jax.jit(lambda *args: gpu_delta(*args, chunk=chunk, interpret=interpret))
        read, new = kernel(inputs, broken, *args)
        expected, expected_new = jax.jit(plain_delta)(inputs, states, *args)
        count, idle = sum(lengths), np.setdiff1d(np.arange(len(lengths) + 2), slots[np.array(lengths) > 0])
        wrong = sum(
            int(np.sum(np.asarray(now)[rows] != np.asarray(then)[rows]))
            for now, then in zip(jax.tree.leaves(new), jax.tree.leaves(states), strict=True)
            for rows in (0, (1, idle))
        )
        busy = slots[np.array(lengths) > 0]
        pairs = [(read[:count], expected[:count])]
        leaves = zip(jax.tree.leaves(new), jax.tree.leaves(expected_new), strict=True)
        pairs += [(now[1, busy], then[1, busy]) for now, then in leaves]
        far = max(distance(*(np.asarray(x, np.float32) for x in pair)) for pair in pairs)
        return Outcome(distance=far, wrong_ids=wrong, bound=2e-5)

    sizes = f"{shape.key_heads}/{shape.value_heads} heads of {shape.key_dim}, {shape.value_dim}"
    alike = ", like keys" if like else ""
    decays = f", a decay of each channel up to {forgets}" if shape.by_channel else ""
    name = f"{len(lengths)} requests, {sizes}, chunk {chunk}{alike}{decays}, {jnp.dtype(dtype)}"
    return Case(kernel="delta", name=name, run=run)


RAGGED = Sequences(spans=((0, 5), (37, 1), (0, 1), (61, 9), (3, 2)), padding=4, empty=2, page=8)
SPREAD = Sequences(spans=((3, 1), (0, 1), (90, 1), (17, 1)), empty=1)


def small_mixer_cases() -> Iterator[Case]:
    """Cases that a CPU interprets in seconds."""
    odd, half = LatentSizes(heads=20, rank=70, key_dim=17, value_dim=33, rotary=6), jnp.bfloat16
    yield latent_case(1, RAGGED, LatentSizes(), decode=False)
    yield latent_case(2, RAGGED, odd, decode=False, interleaved=False, dtype=half)
    yield latent_case(3, SPREAD, odd, decode=True)
    yield latent_case(4, SPREAD, LatentSizes(), decode=True, interleaved=False, dtype=half)
    yield latent_splits_case(5, dataclasses.replace(SPREAD, heads=70, groups=1, head_dim=21), 1)
    yield latent_splits_case(6, dataclasses.replace(SPREAD, heads=3, groups=1, head_dim=140), 4)
    shape, narrow = (
        DeltaShape(key_heads=2, value_heads=4, key_dim=k, value_dim=v, width=4) for k, v in ((8, 6), (5, 40))
    )
    yield delta_case(7, shape, (1, 1, 0, 1, 1), padding=1)
    yield delta_case(8, narrow, (2, 0, 1), padding=0)
    yield delta_case(9, shape, (37, 1, 2, 0, 16, 3), padding=3, chunk=16)
    wide = DeltaShape(key_heads=1, value_heads=2, key_dim=72, value_dim=6, width=4)  # several parts, the last ragged
    yield delta_case(15, wide, (37, 1, 2), padding=3, chunk=16)
    yield delta_case(10, narrow, (64, 33), padding=5, chunk=64, like=0.95, dtype=half)
    shape, narrow, wide = (dataclasses.replace(own, by_channel=True) for own in (shape, narrow, wide))
    yield delta_case(16, shape, (1, 1, 0, 1, 1), padding=1)
    yield delta_case(17, narrow, (2, 0, 1), padding=0)
    yield delta_case(18, wide, (37, 1, 2, 0, 16, 3), padding=3, chunk=16, forgets=5.0)
    yield delta_case(19, shape, (70, 33), padding=2, forgets=40.0)
    yield delta_case(20, narrow, (64, 33), padding=5, chunk=64, like=0.95, dtype=half)


def large_mixer_cases() -> Iterator[Case]:
    """DeepSeek-V2-Lite, DeepSeek-V3, GLM-4.7-Flash, Qwen3-Next and Ling 3.0."""
    half, rng = jnp.bfloat16, np.random.default_rng(0)
    decoded = tuple((int(before), 1) for before in rng.integers(0, 900, 20))
    prompts = ((0, 300), (200, 65), (0, 1), (90, 40))
    for heads, key_dim, value_dim in ((16, 128, 128), (128, 128, 128), (20, 192, 256)):
        sizes = LatentSizes(heads=heads, rank=512, key_dim=key_dim, value_dim=value_dim, rotary=64)
        for spans, decode in ((decoded, True), (prompts, False)):
            yield latent_case(7, Sequences(spans=spans, empty=3, page=16), sizes, decode=decode, dtype=half)
    shape = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)
    yield delta_case(12, shape, (1,) * 20, dtype=half)
    yield delta_case(13, shape, (300, 1, 64, 0, 129, 2), padding=16, dtype=half)
    yield delta_case(14, shape, (200, 65), like=0.9)
    shape = DeltaShape(key_heads=32, value_heads=32, key_dim=128, value_dim=128, width=4, by_channel=True)
    yield delta_case(21, shape, (1,) * 20, dtype=half, forgets=5.0)
    yield delta_case(22, shape, (300, 1, 64, 0, 129, 2), padding=16, dtype=half, forgets=5.0)
    yield delta_case(23, shape, (200, 65), like=0.9, forgets=40.0)
