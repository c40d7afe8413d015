"""Every program that an engine runs, through the real TPU compiler: pools are updated in place, temporaries are
bounded, and what capture adds is counted. Proves no value and no time; sizes and what counts as an operation:
tests/support/tpu_programs.py.

The backends are those that an engine picks by itself on a TPU, layers/tpu/; the plain ones stand beside them for
comparison. The full report, with Qwen3-30B-A3B on a v5p: benchmarks/compiled.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from routed_experts.layers.attention import FusedQKV, PagedBatch, write_kv
from routed_experts.layers.routing import LayerRouting, RouterSpec, RoutingBlock
from routed_experts.layers.tpu.attention import ragged_attention
from routed_experts.layers.tpu.linear import layered_linear
from routed_experts.layers.tpu.qk_norm_rope import prepare
from routed_experts.layers.tpu.router import fused_router
from support.tpu_aot import assert_in_place, compile_tpu, pool_copies, tpu_mesh
from support.tpu_programs import (
    SMALL,
    Operations,
    compiled,
    jobs,
    lowered,
    operations,
    program_name,
    whole_pool_operations,
)

pytestmark = pytest.mark.tpu_aot

V6E = pytest.param("v6e", marks=pytest.mark.thorough)  # programs of families are compiled for it in every run
CHIPS = ["v5e", V6E]
KIB, MIB = 1 << 10, 1 << 20
VMEM = 128 * MIB
# Most temporary bytes in HBM. Measured, in KiB: forward 0 to 1,764; full 0 to 1,719; count 0 to 760; the others 0. No
# pool, no layer's
# experts (96 MiB) and no [tokens, vocabulary] array (extend: 12 MiB) is among them.
MAX_TEMP_BYTES = {
    "forward decode": 3 * MIB,
    "forward extend": 3 * MIB,
    "sample greedy": MIB,
    "sample random": MIB,
    "sample filtered": MIB,
    "sample full": 3 * MIB,
    "count decode": MIB,
    "count extend": MIB,
    "score": MIB,
}
FORWARD = {f"forward {shape.mode.value}": shape for shape in SMALL.runner.shapes}


def names(table):
    return {program_name(key) for key in table}


def test_the_table_of_programs_is_the_one_that_is_compiled_here():
    for capture in (False, True):
        assert names(jobs("v5e", capture=capture)) == MAX_TEMP_BYTES.keys()


def test_a_program_that_is_not_compiled_is_detected():
    table = {**jobs("v5e", capture=True), ("evict", SMALL.runner.shapes[0]): None}
    assert names(table) - MAX_TEMP_BYTES.keys() == {"evict decode"}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", MAX_TEMP_BYTES)
def test_temporaries_are_bounded(chip, name):
    temp = compiled(chip, name, capture=True).memory_analysis().temp_size_in_bytes
    assert temp <= MAX_TEMP_BYTES[name], (
        f"{name} takes {temp} bytes beside its inputs and outputs, at most {MAX_TEMP_BYTES[name]} expected"
    )


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FORWARD)
def test_the_kv_pool_is_updated_in_place(chip, name):
    program = compiled(chip, name, capture=True)
    assert SMALL.pool.size * SMALL.pool.dtype.itemsize > VMEM
    assert_in_place(program, SMALL.pool, max_temp_bytes=MAX_TEMP_BYTES[name])
    assert whole_pool_operations(program, SMALL.pool) == []


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FORWARD)
def test_no_layer_of_experts_is_copied(chip, name):
    config = SMALL.config
    one_layer = jax.ShapeDtypeStruct((config.capture_spec.num_experts, 1024, config.hidden_size), jnp.bfloat16)
    assert 3 * 2 * one_layer.size * 3 > 2 * VMEM, "experts that fit in VMEM may be fetched whole"
    assert whole_pool_operations(compiled(chip, name, capture=True), one_layer) == []


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["count decode", "count extend"])
def test_the_counts_of_penalties_are_updated_in_place(chip, name):
    program = compiled(chip, name, capture=True)
    sizes = {leaf: leaf.size * leaf.dtype.itemsize for leaf in (SMALL.counts.generated, SMALL.counts.prompt)}
    assert min(sizes.values()) > VMEM
    for leaf in sizes:
        assert_in_place(program, leaf, max_temp_bytes=MAX_TEMP_BYTES[name])
        assert whole_pool_operations(program, leaf) == []
    assert program.memory_analysis().alias_size_in_bytes >= sum(sizes.values())


@pytest.mark.parametrize("name", sorted(MAX_TEMP_BYTES.keys() - FORWARD.keys()))
def test_programs_after_the_forward_pass_are_the_same_with_and_without_capture(name):
    assert lowered("v5e", name, capture=True).as_text() == lowered("v5e", name, capture=False).as_text()


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("v5e", "forward decode"),
        pytest.param("v5e", "forward extend", marks=pytest.mark.thorough),
        pytest.param("v6e", "forward decode", marks=pytest.mark.thorough),
    ],
)
def test_capture_adds_no_operation_to_a_layer_and_four_to_a_step(chip, name):
    on, off = (compiled(chip, name, capture=capture) for capture in (True, False))
    added = operations(on) - operations(off)
    # A step: the carry is made, the ids are narrowed and transposed, and may be copied to where the host reads them.
    assert added.once <= 4 and added.in_loops <= 0 and added.scalar <= 0, added
    memory_on, memory_off = on.memory_analysis(), off.memory_analysis()
    added_temp = memory_on.temp_size_in_bytes - memory_off.temp_size_in_bytes
    assert added_temp <= 64 * KIB, added_temp
    added_output, rows = memory_on.output_size_in_bytes - memory_off.output_size_in_bytes, FORWARD[name].num_tokens
    assert SMALL.config.capture_spec.row_bytes * rows <= added_output <= 128 * rows, (
        added_output,
        rows,
    )  # one row is at most 128 lanes
    print(f"{chip} {name}: {added}, {added_temp} temporary bytes, {added_output} bytes of output")


def test_a_layer_has_a_fifth_of_the_operations_of_the_plain_backends():
    own, plain = (operations(compiled("v5e", "forward decode", capture=True, plain=plain)) for plain in (False, True))
    assert own.in_loops * 5 <= plain.in_loops and own.scalar <= plain.scalar, (own, plain)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", [(1, 128, 8), (700, 512, 8), (17, 60, 4), (16, 64, 6)], ids=str)  # N, E, K
def test_the_router_compiles_for_any_size_with_rows_to_replay(chip, shape):
    num_tokens, num_experts, top_k = shape
    spec = RouterSpec(num_experts=num_experts, top_k=top_k, renormalize=False)

    def run(block, logits, ids, valid):
        block, layer = RoutingBlock(block), jnp.asarray(1, jnp.int32)
        routing, block = fused_router(logits, LayerRouting(ids, valid), block, layer, spec)
        return block, (routing.ids, routing.weights)

    block, ids = (jax.ShapeDtypeStruct(size, jnp.int32) for size in ((48 * top_k, num_tokens), (num_tokens, top_k)))
    logits, valid = (
        jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.bool_),
    )
    program = compile_tpu(run, block, logits, ids, valid, mesh=tpu_mesh(chip), donate_argnums=0)
    assert program.memory_analysis().alias_size_in_bytes >= 4 * block.size


@pytest.mark.parametrize("chip", CHIPS)
def test_the_projections_of_a_run_are_read_where_they_lie(chip):
    """160 MiB of matrices, of which XLA alone makes a transposed copy."""
    weights, x = jax.ShapeDtypeStruct((8, 2048, 5120), jnp.bfloat16), jax.ShapeDtypeStruct((16, 2048), jnp.bfloat16)

    def run(x, weights):
        def layer(x, index):
            qkv = layered_linear(x, weights, index, x.dtype).reshape(-1, 40, 128)
            return x + qkv[:, :16].reshape(x.shape), None

        return lax.scan(layer, x, jnp.arange(8))[0]

    program = compile_tpu(run, x, weights, mesh=tpu_mesh(chip))
    assert whole_pool_operations(program, jax.ShapeDtypeStruct((2048, 5120), jnp.bfloat16)) == []
    assert program.memory_analysis().temp_size_in_bytes <= MIB


def scanned_writes(pool, keys, values, batch, *, num_pages):
    def layer(pool, first_page):
        if keys.shape[2] != pool.shape[3]:
            pool = write_kv(pool, keys, values, first_page, batch)
            return pool, ragged_attention(jnp.repeat(keys, 2, axis=1), pool, first_page, batch).sum()
        heads = jnp.concatenate([keys, keys, keys, values], axis=1).reshape(keys.shape[0], -1)
        norms, angles = jnp.ones((4, keys.shape[2]), keys.dtype), jnp.ones((keys.shape[0], keys.shape[2]), jnp.float32)
        layer_id = lax.div(first_page, num_pages)
        projected = FusedQKV(qkv=heads, q_norm=norms, k_norm=norms, layer=layer_id, cos=angles, sin=angles, eps=1e-6)
        queries, pool = prepare(projected, pool, first_page, batch)
        return pool, ragged_attention(queries, pool, first_page, batch).sum()

    return lax.scan(layer, pool, jnp.arange(4) * num_pages)


def compile_writes(chip, num_kv_heads, *, head_dim=128, lanes=128, decode=True, num_rows=16):
    """A write and a read of the pool in each of four layers, and the pool; 160 MiB in pages of 64 tokens."""
    num_pages = 160 * MIB // (4 * 64 * 2 * num_kv_heads * lanes * 2)
    pool = dataclasses.replace(
        SMALL.runner.pool, num_layers=4, num_pages=num_pages, num_kv_heads=num_kv_heads, head_dim=lanes
    ).abstract
    vector = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    valid = jax.ShapeDtypeStruct((num_rows,), jnp.bool_)
    rows, starts, table = vector((num_rows,)), vector((num_rows + 1,)), vector((num_rows, 64))
    batch = PagedBatch(rows, rows, valid, starts, rows, table, decode=decode)
    keys = jax.ShapeDtypeStruct((num_rows, num_kv_heads, head_dim), jnp.bfloat16)
    program = functools.partial(scanned_writes, num_pages=num_pages)
    return compile_tpu(program, pool, keys, keys, batch, mesh=tpu_mesh(chip), donate_argnums=0), pool


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("decode", [False, True], ids=["extend", "decode"])
def test_the_pool_is_in_place_for_any_number_of_kv_heads(chip, num_kv_heads, decode):
    program, pool = compile_writes(chip, num_kv_heads, decode=decode)
    assert_in_place(program, pool, max_temp_bytes=MIB)
    assert whole_pool_operations(program, pool) == []


@pytest.mark.parametrize("decode", [False, True], ids=["extend", "decode"])
def test_the_pool_of_heads_of_64_is_in_place_with_zeros_beside_them(decode):
    program, pool = compile_writes("v5e", 4, head_dim=64, decode=decode)
    assert_in_place(program, pool, max_temp_bytes=MIB)
    assert whole_pool_operations(program, pool) == []


def test_a_pool_narrower_than_a_row_of_lanes_is_copied():
    """Why an engine widens it: what is here whole, twice, would be so in every layer."""
    program, pool = compile_writes("v5e", 4, head_dim=64, lanes=64)
    assert pool_copies(program, pool)


def test_operations_are_counted_once_and_those_of_one_number_apart():
    def program(x):
        return (
            lax.fori_loop(
                0, x.shape[0], lambda i, y: lax.dynamic_update_slice_in_dim(y, jnp.sort(y[:128]), i, axis=0), x
            )
            @ x
        )

    counted = operations(compile_tpu(program, jax.ShapeDtypeStruct((512,), jnp.float32), mesh=tpu_mesh("v5e")))
    assert counted.in_loops >= 1 and counted.once >= 1, counted
    assert operations(
        compile_tpu(lambda x: x + 1, jax.ShapeDtypeStruct((512,), jnp.float32), mesh=tpu_mesh("v5e"))
    ) == Operations(1, 0, 0)


def test_a_kernel_that_makes_another_pool_is_detected_and_one_that_writes_into_it_is_not():
    pool = jax.ShapeDtypeStruct((4096, 64, 512), jnp.bfloat16)

    def kernel(pool_ref, _, out_ref):
        pltpu.sync_copy(pool_ref.at[1], out_ref.at[0])

    def run(pool, other, *, in_place):
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        aliases = {0: 0} if in_place else {}
        call = pl.pallas_call(
            kernel, in_specs=[anywhere] * 2, out_specs=anywhere, out_shape=pool, input_output_aliases=aliases
        )
        return call(pool, other)

    other = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    for in_place in (True, False):
        program = compile_tpu(
            functools.partial(run, in_place=in_place), pool, other, mesh=tpu_mesh("v5e"), donate_argnums=0
        )
        assert bool(whole_pool_operations(program, pool)) is not in_place


def test_a_pool_that_is_converted_or_transposed_is_detected():
    pool = jax.ShapeDtypeStruct((4096, 64, 512), jnp.bfloat16)
    for program in (lambda x: x.astype(jnp.float32), lambda x: jnp.swapaxes(x, 0, 1).reshape(-1)):
        assert whole_pool_operations(compile_tpu(program, pool, mesh=tpu_mesh("v5e")), pool)
