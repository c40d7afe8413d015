"""TPU kernels at the shapes of published models, through the real compiler: they fit in VMEM, and read weights and
pools where they lie. Values: the other files of this folder, interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from routed_experts.layers.attention import FusedQKV, LatentQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape, DeltaState
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.routing import LayerRouting, RouterSpec, RoutingBlock
from routed_experts.layers.stack_traits import StackTraits
from routed_experts.layers.tpu.attention import ragged_attention
from routed_experts.layers.tpu.delta_rule import recur
from routed_experts.layers.tpu.experts import fused_experts
from routed_experts.layers.tpu.latent_attention import attend_latent
from routed_experts.layers.tpu.qk_norm_rope import prepare
from routed_experts.layers.tpu.router import fused_router
from routed_experts.memory.kv_pool import tiled_state
from support.tpu_aot import assert_in_place, compile_tpu, tpu_mesh
from support.tpu_programs import kernels, operations, whole_pool_operations

pytestmark = pytest.mark.tpu_aot

MIB = 1 << 20
S = jax.ShapeDtypeStruct


@pytest.mark.parametrize(("chip", "num_tokens"), [("v5e", 1024), ("v6e", 32)])
def test_experts_of_gpt_oss_are_read_in_place(chip, num_tokens):
    """2,880 columns: no multiple of the lanes, and no expert fits twice. 3 layers: 32 x 3 experts are no whole row of
    lanes, else the compiler's own layout of the arrays has the experts innermost."""
    experts, dim, width, top_k = 32, 2880, 2880, 4
    shapes = {
        "gate_up": (3 * experts, dim, 2 * width),
        "down": (3 * experts, width, dim),
        "gate_up_bias": (3 * experts, 2 * width),
        "down_bias": (3 * experts, dim),
        "x": (num_tokens, dim),
    }
    arrays = {name: S(shape, jnp.bfloat16) for name, shape in shapes.items()}
    arrays |= {"ids": S((num_tokens, top_k), jnp.int32), "weights": S((num_tokens, top_k), jnp.float32)}
    arrays |= {"valid": S((num_tokens,), jnp.bool_), "first_expert": S((), jnp.int32)}

    def run(arrays):
        return fused_experts(ExpertCall(**arrays, num_experts=experts, activation="clamped swiglu"))

    program = compile_tpu(run, arrays, mesh=tpu_mesh(chip))
    assert program.memory_analysis().temp_size_in_bytes <= 64 * MIB, "one layer's down matrices are 506 MiB"


def sigmoid_law(num_experts, **fields):
    return RouterSpec(
        num_experts=num_experts, renormalize=True, scoring_func="sigmoid", biased=True, scale=2.5, **fields
    )


ROUTERS = {
    "DeepSeek-V3": sigmoid_law(256, top_k=8, epsilon=1e-20, num_groups=8, topk_group=4, group_score_topk=2),
    "DeepSeek-V2": RouterSpec(num_experts=160, top_k=6, renormalize=False, num_groups=8, topk_group=3, scale=16.0),
    "PhiMoE": RouterSpec(num_experts=16, top_k=2, renormalize=False, scoring_func="sparsemixer", jitter_eps=0.01),
}


# One chip for most: the compiler's time is the test's.
@pytest.mark.parametrize(("chip", "name"), [("v5e", name) for name in ROUTERS] + [("v6e", "DeepSeek-V2")])
def test_routers_compile_with_rows_to_replay_and_write_the_block_in_place(chip, name):
    spec = ROUTERS[name]
    num_tokens, layers = 600, 48
    block, ids = S((layers * spec.top_k, num_tokens), jnp.int32), S((num_tokens, spec.top_k), jnp.uint8)
    logits, valid = S((num_tokens, spec.num_experts), jnp.float32), S((num_tokens,), jnp.bool_)
    bias = S((spec.num_experts,), jnp.float32) if spec.biased else None

    def run(block, logits, ids, valid, bias):
        routed = LayerRouting(ids, valid)
        routing, block = fused_router(logits, routed, block, jnp.asarray(1, jnp.int32), spec, bias)
        return block, (routing.ids, routing.weights)

    both = RoutingBlock(block, S(block.shape, jnp.float32))
    program = compile_tpu(run, both, logits, ids, valid, bias, mesh=tpu_mesh(chip), donate_argnums=0)
    assert program.memory_analysis().alias_size_in_bytes >= 2 * 4 * block.size


def paged_batch(num_tokens, num_requests, *, decode):
    rows, starts = S((num_tokens,), jnp.int32), S((num_requests + 1,), jnp.int32)
    lengths, table = S((num_requests,), jnp.int32), S((num_requests, 64), jnp.int32)
    return PagedBatch(rows, rows, S((num_tokens,), jnp.bool_), starts, lengths, table, decode=decode)


HEADS = {  # query heads, kv heads, head dim; features
    "GPT-OSS": ((64, 8, 64), AttentionFeatures(window=128)),
    "Llama 4": ((40, 8, 128), AttentionFeatures(chunk=8192)),
    "Qwen3-Next": ((16, 2, 256), AttentionFeatures()),
}


@pytest.mark.parametrize(
    ("chip", "name", "decode"),
    [
        ("v6e", "GPT-OSS", False),
        ("v5e", "Qwen3-Next", False),
        ("v6e", "Llama 4", True),
    ],
)
def test_attention_reads_the_pool_where_it_lies(chip, name, decode):
    (heads, groups, head_dim), features = HEADS[name]
    num_tokens = 32 if decode else 256
    pool = S((2 * 160, 64, 2 * groups, max(128, head_dim)), jnp.bfloat16)
    queries = S((num_tokens, heads, head_dim), jnp.bfloat16)
    sinks = S((heads,), jnp.bfloat16) if name == "GPT-OSS" else None

    def run(queries, pool, batch, sinks):
        own = dataclasses.replace(features, sinks=sinks)
        return ragged_attention(queries, pool, jnp.asarray(160, jnp.int32), batch, own)

    program = compile_tpu(run, queries, pool, paged_batch(num_tokens, 16, decode=decode), sinks, mesh=tpu_mesh(chip))
    assert program.memory_analysis().temp_size_in_bytes <= MIB


# Query heads, kv heads, head dim; numbers of a row of angles; widths of the norms; traits
PREPARED = {
    "MiniMax-M2": ((48, 8, 128), 32, (48 * 128, 8 * 128), dict(qk_norm="whole")),
    "Ernie 4.5": ((20, 4, 128), 64, None, dict(qk_norm="", interleaved=True)),
    "Granite": ((24, 8, 64), 64, None, dict(qk_norm="")),
}


@pytest.mark.parametrize(("chip", "name"), [("v6e", name) for name in PREPARED] + [("v5e", "Granite")])
def test_norms_positions_and_the_write_leave_the_pool_where_it_lies(chip, name):
    (heads, groups, head_dim), angles, norms, traits = PREPARED[name]
    num_tokens, layers, half = 32, 4, jnp.bfloat16
    num_pages = 160 * MIB // (layers * 64 * 2 * groups * 128 * 2)
    pool = S((layers * num_pages, 64, 2 * groups, 128), half)
    q_norm, k_norm = (None, None) if norms is None else (S((layers, size), half) for size in norms)
    projected = FusedQKV(
        qkv=S((num_tokens, (heads + 2 * groups) * head_dim), half),
        q_norm=q_norm,
        k_norm=k_norm,
        layer=S((), jnp.int32),
        cos=S((num_tokens, angles), jnp.float32),
        sin=S((num_tokens, angles), jnp.float32),
        eps=1e-6,
        head_dim=head_dim,
        traits=StackTraits(**traits),
    )

    def run(pool, projected, batch):
        queries, pool = prepare(projected, pool, projected.layer * num_pages, batch)
        return pool, queries

    batch = paged_batch(num_tokens, 16, decode=False)
    program = compile_tpu(run, pool, projected, batch, mesh=tpu_mesh(chip), donate_argnums=0)
    assert_in_place(program, pool, max_temp_bytes=MIB)


# Heads; DeepSeek-V3's and V2-Lite's rows are alike: 512 numbers and 64 with positions, in a pool of 640
@pytest.mark.parametrize(("chip", "heads", "decode"), [("v5e", 16, False)], ids=str)
def test_latent_attention_leaves_the_pool_where_it_lies(chip, heads, decode):
    num_tokens, layers, half = 16 if decode else 256, 2, jnp.bfloat16
    num_pages = 160 * MIB // (layers * 64 * 640 * 2)
    pool = S((layers * num_pages, 64, 1, 640), half)
    arrays = {
        "queries": S((num_tokens, heads, 192), half),
        "compressed": S((num_tokens, 576), half),
        "norm": S((512,), half),
        "up": S((512, heads * 256), half),
        "angles": (S((num_tokens, 32), jnp.float32),) * 2,
    }

    def run(pool, arrays, batch):
        projected = LatentQKV(**arrays, interleaved=True, scale=0.1, eps=1e-6)

        def layer(pool, index):
            values, pool = attend_latent(projected, pool, index, batch, num_pages)
            return pool, values

        return lax.scan(layer, pool, jnp.arange(layers))

    program = compile_tpu(
        run, pool, arrays, paged_batch(num_tokens, 16, decode=decode), mesh=tpu_mesh(chip), donate_argnums=0
    )
    assert_in_place(program, pool, max_temp_bytes=16 * MIB)
    assert whole_pool_operations(program, pool) == []


DELTA = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
def test_prompts_of_qwen3_next_run_one_kernel_and_leave_the_states_where_they_lie(chip):
    num_tokens, requests, half, heads = 512, 16, jnp.bfloat16, DELTA.value_heads
    conv = S((9, 321, *tiled_state((3, DELTA.channels))), half)  # 135 MiB
    recurrent = S((9, 321, heads, 128, 128), jnp.float32)
    gates = S((num_tokens, heads), jnp.float32)
    inputs = DeltaInputs(S((num_tokens, DELTA.channels), half), gates, gates, S((DELTA.channels, 4), half), DELTA)
    slots, fresh, starts = S((requests,), jnp.int32), S((requests,), jnp.bool_), S((requests + 1,), jnp.int32)

    def run(states, inputs, layer, slots, fresh, starts):
        read, states = recur(inputs, states, layer, slots, fresh, starts)
        return states, read

    program = compile_tpu(
        run,
        DeltaState(conv, recurrent),
        inputs,
        S((), jnp.int32),
        slots,
        fresh,
        starts,
        mesh=tpu_mesh(chip),
        donate_argnums=0,
    )
    for states in (conv, recurrent):
        assert_in_place(program, states, max_temp_bytes=16 * MIB)
        assert whole_pool_operations(program, states) == []
    assert kernels(program) == {"delta_step": 1, "delta_chunks": 1}
    assert operations(program).in_loops == 0, "chunks run one by one outside of the kernel"
