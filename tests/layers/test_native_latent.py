"""Latent attention between its projections, as one native kernel, against the steps of the model in array code; a row's
bits do not depend on the step that it is in."""

import copy
import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_native_batch_invariance import bits
from routed_experts.layers.attention import LatentQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import reference_variant, write_latent
from routed_experts.layers.native.ops import native_latent
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import RotarySpec

pytestmark = pytest.mark.usefixtures("fast_compilation")

PAGE, WIDTH, REQUESTS, LAYER, EPS = 8, 12, 5, 1, 1e-6
PAGES = 1 + REQUESTS * WIDTH


@dataclasses.dataclass(frozen=True)
class Sizes:
    heads: int = 4
    rank: int = 21
    key_dim: int = 10
    value_dim: int = 12
    rotary: int = 6


SIZES = {"odd": Sizes(), "whole vectors": Sizes(3, 96, 32, 16, 32), "many heads": Sizes(24, 70, 17, 33, 4)}
IN_EVERY_RUN = {  # each size with each of the other values, in either test
    ("odd", "float32", False),
    ("odd", "bfloat16", True),
    ("whole vectors", "float32", True),
    ("many heads", "bfloat16", False),
}
CUT_IN_EVERY_RUN = {("odd", "bfloat16"), ("whole vectors", "bfloat16"), ("many heads", "float32")}


class Case:
    """Projections of every token of some requests, and the pool before."""

    def __init__(self, sizes, dtype, *, interleaved=True):
        rng = np.random.default_rng(41)
        length, s = PAGE * WIDTH, sizes
        self.sizes, self.dtype = sizes, dtype
        self.rotary = RotarySpec(
            inverse=tuple(1.0 / 100.0 ** (np.arange(s.rotary // 2) * 2 / s.rotary)), interleaved=interleaved
        )

        def random(*shape):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        # On the host, where rows of any number are taken without a program for it.
        self.queries = np.asarray(random(REQUESTS, length, s.heads, s.key_dim + s.rotary))
        self.compressed = np.asarray(random(REQUESTS, length, s.rank + s.rotary))
        self.angles = jax.jit(self.rotary.cos_sin)
        self.norm, self.up = random(s.rank), random(s.rank, s.heads * (s.key_dim + s.value_dim)) / 4
        self.table = 1 + rng.permutation(PAGES - 1).reshape(REQUESTS, WIDTH).astype(np.int32)
        self.pool = jnp.full((2 * PAGES, PAGE, 1, s.rank + s.rotary), jnp.nan, dtype)

    def widened(self):
        """The same numbers in float32, over a pool of the same dtype."""
        wide = copy.copy(self)
        for name in ("queries", "compressed", "norm", "up"):
            setattr(wide, name, getattr(self, name).astype(jnp.float32))
        return wide

    def inputs(self, chunks, padding=0):
        """What the layer is given for (request, first position, tokens), with padding tokens and one padding
        request."""
        counts = [count for _, _, count in chunks]
        requests = np.repeat([request for request, _, _ in chunks] + [0], [*counts, padding])
        starts = [np.arange(start, start + count) for _, start, count in chunks]
        positions = np.concatenate([*starts, np.zeros(padding, np.int64)])
        ends = np.cumsum([0, *counts])
        batch = PagedBatch(
            positions=jnp.asarray(positions, jnp.int32),
            token_rows=jnp.asarray(np.repeat(np.arange(len(chunks) + 1), [*counts, padding]), jnp.int32),
            valid=jnp.asarray(np.arange(len(positions)) < ends[-1]),
            query_starts=jnp.asarray([*ends, ends[-1]], jnp.int32),
            seq_lens=jnp.asarray([*(start + count for _, start, count in chunks), 0], jnp.int32),
            page_table=jnp.asarray(self.table[[*(request for request, _, _ in chunks), 0]]),
            decode=False,
        )
        projected = LatentQKV(
            queries=jnp.asarray(self.queries[requests, positions]),
            compressed=jnp.asarray(self.compressed[requests, positions]),
            norm=self.norm,
            up=self.up,
            angles=self.angles(batch.positions),
            interleaved=self.rotary.interleaved,
            scale=0.3,
            eps=EPS,
        )
        return projected, batch, ends

    def run(self, chunks, pool=None, *, plain=False, padding=0):
        """Values of each chunk, and the pool."""
        projected, batch, ends = self.inputs(chunks, padding)
        pool = self.pool if pool is None else pool

        def native(pool, queries, compressed):
            given = dataclasses.replace(projected, queries=queries, compressed=compressed)
            return native_latent(given, pool, jnp.int32(LAYER), batch, PAGES)

        def array_code(pool, queries, compressed):
            s = self.sizes
            row = rms_norm(compressed[:, : s.rank], self.norm, eps=EPS)
            rotated = self.rotary.apply(compressed[:, None, s.rank :], projected.angles)
            up = self.up.reshape(s.rank, s.heads, -1)
            absorbed = jnp.einsum("nhc,rhc->nhr", queries[..., : s.key_dim], up[..., : s.key_dim])
            wide = jnp.concatenate([absorbed, self.rotary.apply(queries[..., s.key_dim :], projected.angles)], axis=-1)
            first = jnp.int32(LAYER * PAGES)
            pool = write_latent(pool, jnp.concatenate([row[:, None], rotated], axis=-1), first, batch)
            features = AttentionFeatures(latent=s.rank, scale=0.3)
            mixed = reference_variant(wide, pool, first, batch, features)
            return jnp.einsum("nhr,rhv->nhv", mixed, up[..., s.key_dim :]), pool

        out, pool = jax.jit(array_code if plain else native)(pool, projected.queries, projected.compressed)
        out = np.asarray(out)
        assert not np.any(out[ends[-1] :]) or plain
        return np.split(out, ends[1:])[: len(chunks)], pool


@pytest.mark.parametrize(
    ("name", "dtype", "interleaved"),
    [
        pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.thorough)
        for case in itertools.product(SIZES, ["float32", "bfloat16"], [True, False])
    ],
)
def test_prompts_and_further_tokens_equal_array_code(name, dtype, interleaved):
    """Array code in float32: in bfloat16 it rounds between its products, and is twice as far off as native code."""
    case = Case(SIZES[name], dtype, interleaved=interleaved)
    cases, pools = {True: case.widened(), False: case}, {True: None, False: None}
    for chunks in ([(3, 0, 40), (1, 0, 1), (4, 0, 70)], [(1, 1, 20), (3, 40, 1), (4, 70, 3)], [(3, 41, 1), (1, 21, 1)]):
        outs = {}
        for plain, pool in pools.items():
            outs[plain], pools[plain] = cases[plain].run(chunks, pool, plain=plain, padding=3)
        bound = 2e-4 if dtype == "float32" else 0.1  # of values up to 10
        for actual, expected in zip(outs[False], outs[True], strict=True):
            np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), atol=bound)
    pages = [np.delete(np.asarray(pool, np.float32), PAGES * LAYER, axis=0) for pool in pools.values()]
    np.testing.assert_allclose(
        *pages, rtol=0 if dtype == "float32" else 1e-2, atol=1e-5 if dtype == "float32" else 4e-2
    )  # NaN where nothing was written


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=[] if case in CUT_IN_EVERY_RUN else pytest.mark.thorough)
        for case in itertools.product(SIZES, ["float32", "bfloat16"])
    ],
)
def test_how_a_prompt_is_cut_and_what_is_beside_it_changes_no_bit(name, dtype):
    case, length = Case(SIZES[name], dtype), 90
    (whole,), pool = case.run([(2, 0, length)])
    pages = bits(pool)[PAGES + case.table[2]]
    for cuts in ((45, 45), (1, 89), (89, 1), (2, 3, 4, 5, 6, 70)):
        start, parts, pool = 0, [], None
        for count in cuts:
            outs, pool = case.run([(4, 0, 11), (2, start, count), (0, 0, 20)], pool, padding=count % 3)
            parts.append(outs[1])
            start += count
        np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(whole))
        np.testing.assert_array_equal(bits(pool)[PAGES + case.table[2]], pages)


WIDE = Sizes(heads=800, rank=64, key_dim=8, value_dim=8, rotary=4)  # 461 KB of queries and mixed rows a token
SCRATCH = """
import ctypes
import jax
from layers.test_native_latent import WIDE, Case
from routed_experts.layers.native import toolchain
case = Case(WIDE, "bfloat16")
jax.block_until_ready(case.run([(request, 0, 96) for request in range(3)])[1])
count = toolchain.library().RexScratchBytes
count.restype = ctypes.c_int64
print(count())
"""


def test_blocks_of_tokens_change_no_bit():
    """A prompt that is more than a block, and the same in steps that are less."""
    case = Case(WIDE, "bfloat16")
    (whole,), pool = case.run([(2, 0, 96)])
    start, parts, cut_pool = 0, [], None
    for count in (40, 40, 16):
        outs, cut_pool = case.run([(2, start, count)], cut_pool)
        parts.append(outs[0])
        start += count
    np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(whole))
    np.testing.assert_array_equal(bits(cut_pool)[PAGES + case.table[2]], bits(pool)[PAGES + case.table[2]])


def test_scratch_is_bounded_whatever_the_step():
    """288 tokens, of 133 MB."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", SCRATCH], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert 16 << 20 < int(done.stdout) <= 32 << 20


def test_the_pool_is_updated_in_place():
    case = Case(SIZES["odd"], "float32")
    projected, batch, _ = case.inputs([(3, 0, 40)])
    pool = jnp.tile(case.pool, (40, 1, 1, 1))

    def run(pool, queries):
        return native_latent(dataclasses.replace(projected, queries=queries), pool, jnp.int32(LAYER), batch, PAGES)

    memory = jax.jit(run, donate_argnums=0).lower(pool, projected.queries).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes and memory.temp_size_in_bytes < pool.nbytes // 4


def test_what_does_not_fit_is_an_error_and_not_a_crash():
    case = Case(SIZES["odd"], "float32")
    projected, batch, _ = case.inputs([(3, 0, 40)])
    for change, message in (
        ({"up": case.up[:, :-1]}, "dtypes or shapes differ"),
        ({"compressed": projected.compressed.astype(jnp.bfloat16)}, "dtypes or shapes differ"),
    ):
        changed = dataclasses.replace(projected, **change)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(lambda pool, c=changed: native_latent(c, pool, 1, batch, PAGES))(case.pool))
    far = dataclasses.replace(batch, positions=batch.positions.at[-1].set(10_000))
    with pytest.raises(jax.errors.JaxRuntimeError, match="query_starts or positions are outside"):
        jax.block_until_ready(jax.jit(lambda pool: native_latent(projected, pool, 1, far, PAGES))(case.pool))
