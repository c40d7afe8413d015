"""Guarantees of the native kernels beyond their registry's contract (test_moe, test_attention): every dtype and odd
size against float64 loops, batch-invariant rows, weights that are read in place, and the error on a machine without a
compiler."""

import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_attention import attend, make_step
from layers.test_moe import oracle, random_call, with_rows
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import ATTENTION, DEFAULT_BACKENDS, KERNELS, BackendRegistry
from routed_experts.layers.attention import FusedQKV, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.ops import (
    native_attention,
    native_exact_linear,
    native_experts,
    native_linear,
    native_qk_norm_rope,
    native_router,
    native_variant,
)
from routed_experts.layers.native.toolchain import Bf16Gains
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import apply_rotary
from routed_experts.layers.routing import LayerRouting, RouterSpec, RoutingBlock, replay_topk
from support.bf16_products import has_tiles, products_as_if
from support.head_angles import head_cos_sin

pytestmark = pytest.mark.usefixtures("fast_compilation")

FIRST, SECOND = Bf16Gains(0.45, 2.5), Bf16Gains(1.7, 0.0)

EXPERTS = jax.jit(native_experts)
LINEAR = jax.jit(native_linear, static_argnames="dtype")
BOUNDS = {
    jnp.float32: 2e-5,
    jnp.float16: 2e-2,
    jnp.bfloat16: 1.2e-1,
}  # of values around 3; half precision rounds x, weights and y


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "shape", [(1, 4, 8, 32, 16), (40, 3, 5, 70, 33), (9, 2, 3, 16, 17), (300, 4, 8, 64, 48), (150, 1, 1, 130, 20)]
)
def test_experts_equal_the_loop_in_every_dtype(dtype, shape):
    call = random_call(11, shape, layers=2, layer=1)
    halves = {name: vars(call)[name].astype(dtype) for name in ("x", "gate_up", "down")}
    call = dataclasses.replace(call, **halves)
    out = EXPERTS(call)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(call), atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("rows", "depth", "cols"),
    [
        (1, 64, 64),
        (3, 7, 5),
        (8, 130, 200),
        (9, 33, 17),
        (200, 96, 300),
        (400, 16, 257),
        (70, 1030, 112),
        (600, 96, 320),
    ],
)
def test_linear_equals_float64_in_every_dtype(dtype, rows, depth, cols):
    rng = np.random.default_rng(12)
    x, weights = (
        jnp.asarray(rng.standard_normal((rows, depth)), dtype),
        jnp.asarray(rng.standard_normal((3, depth, cols)), dtype),
    )
    weights = weights.at[jnp.array([0, 2])].set(jnp.nan)  # the other layers
    expected = np.asarray(x, np.float64) @ np.asarray(weights[1], np.float64)
    for result in (jnp.float32, dtype):
        got = LINEAR(x, weights, 1, dtype=result)
        assert got.dtype == result
        bound = 1e-5 * depth if result == jnp.float32 else BOUNDS[dtype] * depth**0.5
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=bound)
    np.testing.assert_allclose(
        got.astype(jnp.float32), reference_linear(x, weights, 1, dtype).astype(jnp.float32), atol=bound
    )


def test_experts_round_to_bfloat16_between_products_in_pairs_and_in_tiles_alone():
    call = random_call(7, (40, 4, 8, 64, 32))
    halves = {name: vars(call)[name].astype(jnp.bfloat16) for name in ("x", "gate_up", "down")}
    call = dataclasses.replace(call, **halves)
    expected = np.asarray(jnp.asarray(oracle(call), jnp.bfloat16))

    def share_of_equal(pairs, tiles):
        with products_as_if(pairs=pairs, tiles=tiles):
            got = np.asarray(EXPERTS(call))
        np.testing.assert_allclose(got.astype(np.float64), oracle(call), atol=BOUNDS[jnp.bfloat16])
        return np.mean(got == expected)

    in_floats, in_pairs = share_of_equal(0.9, 0.8), share_of_equal(1.1, 1.05)
    assert in_floats > 0.99 > in_pairs
    in_tiles = share_of_equal(0.9, 1.1)
    assert in_tiles < 0.99 if has_tiles() else in_tiles == in_floats


def test_the_gains_of_bfloat16_are_measured_once_for_a_processor(tmp_path, monkeypatch):
    gains = iter([FIRST, SECOND])
    library, measure = tmp_path / "made.so", lambda: next(gains)
    assert [toolchain.bf16_gains(library, measure) for _ in range(2)] == [FIRST, FIRST]
    assert len(list(tmp_path.iterdir())) == 1

    def measured_second():
        """Another process keeps its figure while this one measures."""
        monkeypatch.setattr(toolchain, "_processor_name", lambda: "two at once")
        assert toolchain.bf16_gains(library, measure) == SECOND
        return FIRST

    monkeypatch.setattr(toolchain, "_processor_name", lambda: "two at once")
    assert toolchain.bf16_gains(library, measured_second) == SECOND
    monkeypatch.setattr(toolchain, "_processor_name", lambda: "another")
    with pytest.raises(StopIteration):
        toolchain.bf16_gains(library, measure)


@pytest.mark.parametrize("processor", ["znver2", "znver3"] if platform.machine() == "x86_64" else ["native"])
def test_a_chain_of_fused_sums_is_not_split_where_the_compiler_takes_that_to_be_faster(tmp_path, processor):
    """GCC would split this one on AMD's Zen 2 and 3, and not in other functions that add up the same numbers."""
    source, made = tmp_path / "sum.cpp", tmp_path / "sum.s"
    source.write_text(
        "typedef float vf __attribute__((vector_size(32)));"
        "vf sum(const vf* x, int n) { vf s = {}; for (int i = 0; i < n; i++) s += x[i] * x[i]; return s; }"
    )
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in toolchain.FLAGS]
    subprocess.run([*toolchain.compiler(), *flags, "-S", str(source), "-o", str(made)], check=True, timeout=60)
    assert re.search(r"\bvfmadd|\bfmla", made.read_text()) and not re.search(r"\bvmulps|\bfmul", made.read_text())


REFUSED = """
import ctypes, logging, sys
logging.basicConfig(level=logging.WARNING)
class Stack(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)  # too small for a signal's frame with tiles: the system refuses them
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
from routed_experts.layers.native import toolchain
toolchain.library()
"""


def test_a_process_that_is_refused_tiles_says_so_and_stores_no_gains(tmp_path):
    """Also where another process has stored that they gain. A processor without tiles is refused nothing."""
    folder = tmp_path / ".cache" / "routed-experts" / "native"
    folder.mkdir(parents=True)
    toolchain.library()
    library = toolchain.library_file(toolchain.compiler())
    shutil.copy(library, folder)
    for is_stored in (False, True):
        if is_stored:
            for file in library.parent.glob(f"{library.stem}*.gains"):
                shutil.copy(file, folder)
        before = list(folder.glob("*.gains"))
        environment = dict(os.environ, HOME=str(tmp_path))
        done = subprocess.run(
            [sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert ("refuses this process the AMX tiles" in done.stderr) == has_tiles()
        if has_tiles():
            assert list(folder.glob("*.gains")) == before


class RefusingLibrary:
    """Stands for a library whose tiles the system refuses."""

    def __init__(self):
        self.asked = []

    @property
    def RexUseBf16(self):
        def use(pairs, tiles):
            self.asked.append((pairs.value, tiles.value))
            return False

        return use


@pytest.mark.parametrize(
    ("gains", "asked", "warns"),
    [
        (Bf16Gains(0.5, 3.0), (False, True), True),
        (Bf16Gains(1.5, float("nan")), (True, False), True),
        (Bf16Gains(1.5, 0.0), (True, False), False),
    ],
)
def test_tiles_that_are_refused_are_warned_of(caplog, gains, asked, warns):
    library = RefusingLibrary()
    toolchain.use_bf16(library, gains)
    assert library.asked == [asked]
    assert ("refuses" in caplog.text) == warns


def test_gains_of_a_process_that_is_refused_tiles_are_not_stored(tmp_path):
    refused = Bf16Gains(0.5, float("nan"))
    assert toolchain.bf16_gains(tmp_path / "made.so", lambda: refused) is refused
    assert toolchain.bf16_gains(tmp_path / "made.so", lambda: FIRST) == FIRST


@pytest.mark.parametrize("dtype", BOUNDS)
def test_attention_reads_a_pool_of_every_dtype(dtype):
    step = make_step([(0, 20), (130, 1), (9, 1), (0, 70)], page_size=16, heads=6, groups=3)
    pool = jnp.where(jnp.isfinite(step.pool) & (step.pool < 1e4), step.pool, 0).astype(
        dtype
    )  # so that rounding is the same for both
    step.pool[:] = np.asarray(pool, np.float32)
    step.new_keys[:], step.new_values[:] = (
        np.asarray(jnp.asarray(new, dtype), np.float32) for new in (step.new_keys, step.new_values)
    )
    step.queries[:] = np.asarray(jnp.asarray(step.queries, dtype), np.float32)
    np.testing.assert_allclose(
        attend("native", step, dtype=dtype), attend("reference", step, dtype=dtype), atol=BOUNDS[dtype]
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (8, 1)])
def test_prepare_equals_norm_rotary_and_write(dtype, heads, groups):
    """Queries and the whole pool, every other slot of it untouched; half precision rounds where the plain code does."""
    rng = np.random.default_rng(21)
    step = make_step(
        [(0, 20), (45, 1), (9, 1), (0, 3)], page_size=16, heads=heads, groups=groups, num_tokens=31, num_requests=6
    )
    tokens, dim = step.queries.shape[0], step.queries.shape[2]
    qkv = jnp.asarray(rng.standard_normal((tokens, (heads + 2 * groups) * dim)), dtype)
    norms = jnp.asarray(rng.standard_normal((2, 3, dim)), dtype)
    cos, sin = head_cos_sin(step.batch.positions, head_dim=dim, theta=1e4)
    pool, first = jnp.asarray(step.pool), jnp.int32(step.first_page)
    projected = FusedQKV(qkv=qkv, q_norm=norms[0], k_norm=norms[1], layer=jnp.int32(2), cos=cos, sin=sin, eps=1e-6)
    queries, written = jax.jit(
        lambda qkv, pool: native_qk_norm_rope(dataclasses.replace(projected, qkv=qkv), pool, first, step.batch)
    )(qkv, pool)

    mixed = qkv.reshape(tokens, heads + 2 * groups, dim)
    turned = [
        apply_rotary(rms_norm(part, norm, eps=1e-6), cos, sin)
        for part, norm in ((mixed[:, :heads], norms[0, 2]), (mixed[:, heads:-groups], norms[1, 2]))
    ]
    plain = np.array(write_kv(pool, turned[1], mixed[:, -groups:], first, step.batch))
    plain[step.first_page] = step.pool[step.first_page]  # page 0 of the layer takes padding there, and nothing here
    bound = {jnp.float32: 2e-6, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}[dtype]  # one rounding of values around 4
    np.testing.assert_allclose(np.asarray(queries, np.float32), np.asarray(turned[0], np.float32), atol=bound)
    np.testing.assert_allclose(written, plain, atol=bound)
    untouched = plain == step.pool
    assert np.array_equal(np.asarray(written)[untouched], step.pool[untouched])


def route(logits, *, top_k, renormalize, ids=None, layer=0, routed=None):
    """The routing, the block of ids after it, and that of weights, which was zeros; None without `ids`."""
    spec = RouterSpec(num_experts=logits.shape[1], top_k=top_k, renormalize=renormalize)
    block = None if ids is None else RoutingBlock(ids, jnp.zeros(ids.shape, jnp.float32))
    routing, block = jax.jit(native_router, static_argnames="spec")(
        jnp.asarray(logits), routed, block, jnp.int32(layer), spec=spec
    )
    return (routing, None, None) if block is None else (routing, block.ids, block.weights)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 1, 1), (7, 5, 5), (40, 32, 4), (9, 257, 8), (3, 17, 16)])
def test_router_decides_as_the_plain_one(rows, experts, top_k, renormalize):
    rng = np.random.default_rng(18)
    logits = rng.standard_normal((rows, experts)).astype(np.float32) * 3
    logits[::3] = np.round(logits[::3])  # many ties: they go to the lower id
    block = jnp.full((3 * top_k, rows), -7, jnp.int32)
    plain = replay_topk(
        jnp.asarray(logits), None, spec=RouterSpec(num_experts=experts, top_k=top_k, renormalize=renormalize)
    )
    (routing, none, _), (recorded, written, weights) = (
        route(logits, top_k=top_k, renormalize=renormalize, ids=ids, layer=1) for ids in (None, block)
    )
    assert none is None
    for got in (routing, recorded):
        assert (
            np.array_equal(got.ids, plain.ids)
            and np.array_equal(got.native_ids, plain.ids)
            and not np.any(got.replaced)
        )
        np.testing.assert_allclose(got.weights, plain.weights, atol=2e-6)
    expected = np.array(block)
    expected[top_k : 2 * top_k] = np.asarray(plain.ids).T
    assert np.array_equal(written, expected)
    assert np.array_equal(weights[top_k : 2 * top_k], recorded.weights.T)
    assert not np.any(weights[:top_k]) and not np.any(weights[2 * top_k :])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_of_router_that_is_not_finite_has_ids_that_exist_and_stays_alone(poison):
    logits = np.random.default_rng(19).standard_normal((4, 9)).astype(np.float32)
    clean = route(logits, top_k=3, renormalize=True)[0]
    logits[2] = poison
    routing = route(logits, top_k=3, renormalize=True)[0]
    assert len(set(np.asarray(routing.ids[2]))) == 3 and np.all((routing.ids[2] >= 0) & (routing.ids[2] < 9))
    for got, expected in ((routing.ids, clean.ids), (routing.weights, clean.weights)):
        assert np.array_equal(np.delete(got, 2, axis=0), np.delete(expected, 2, axis=0))


def test_a_logit_of_minus_infinity_only_loses():
    logits = np.random.default_rng(22).standard_normal((5, 8)).astype(np.float32)
    logits[np.arange(5), [0, 7, 3, 3, 1]] = -np.inf
    plain = replay_topk(jnp.asarray(logits), None, spec=RouterSpec(num_experts=8, top_k=3, renormalize=True))
    routing = route(logits, top_k=3, renormalize=True)[0]
    assert np.array_equal(routing.ids, plain.ids)
    np.testing.assert_allclose(routing.weights, plain.weights, atol=2e-6)


def test_inputs_of_two_dtypes_are_an_error_and_not_read_as_one():
    call = random_call(23, (4, 2, 3, 16, 8), valid=np.ones(4, bool))
    with pytest.raises(jax.errors.JaxRuntimeError, match="dtypes or shapes differ"):
        jax.block_until_ready(EXPERTS(dataclasses.replace(call, x=call.x.astype(jnp.bfloat16))))
    for x, weights in ((jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="dtypes or shapes differ"):
            jax.block_until_ready(LINEAR(call.x.astype(x), jnp.zeros((1, 16, 8), weights), 0, dtype=jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_of_float32_meet_weights_of_half_precision(dtype):
    """An exact product does not round them; the others may, to bfloat16, before they multiply."""
    rng, rounding = np.random.default_rng(31), 2.0**-8
    x, weights = rng.standard_normal((5, 64)).astype(np.float32), jnp.asarray(rng.standard_normal((2, 64, 32)), dtype)
    expected = x.astype(np.float64) @ np.asarray(weights[1], np.float64)
    size = np.abs(x) @ np.abs(np.asarray(weights[1], np.float32))
    exact = jax.jit(native_exact_linear, static_argnames="dtype")(x, weights, 1, dtype=jnp.float32)
    assert np.max(np.abs(exact - expected) / size) < 1e-6
    assert np.max(np.abs(LINEAR(x, weights, 1, dtype=jnp.float32) - expected) / size) < rounding
    call = random_call(32, (9, 2, 4, 64, 32), valid=np.ones(9, bool))
    wide = dataclasses.replace(call, gate_up=call.gate_up.astype(dtype), down=call.down.astype(dtype))
    narrow = dataclasses.replace(wide, x=wide.x.astype(dtype))
    retained, rounded = EXPERTS(wide), EXPERTS(narrow)
    assert retained.dtype == jnp.float32 and rounded.dtype == dtype
    errors = [np.abs(np.asarray(y, np.float64) - oracle(wide)) for y in (retained, rounded)]
    assert np.max(errors[0]) < BOUNDS[dtype] and np.mean(errors[0]) < np.mean(errors[1])


def test_steps_that_cannot_be_are_an_error_and_not_a_crash():
    step = make_step([(0, 3)], page_size=16)
    batch = dataclasses.replace(step.batch, query_starts=jnp.array([0, 20], jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="query_starts or positions are outside"):
        jax.block_until_ready(
            jax.jit(native_attention)(jnp.asarray(step.queries), jnp.asarray(step.pool), jnp.int32(0), batch)
        )


@pytest.mark.parametrize("page", [10_000, -10_000])
def test_a_page_outside_the_pool_is_an_error_where_it_is_read_and_not_before_a_window(page):
    step = make_step([(40, 3)], page_size=16, heads=4)
    strange = dataclasses.replace(step.batch, page_table=jnp.asarray(step.batch.page_table).at[0, 0].set(page))

    def attend_to(batch, window):
        arrays = jnp.asarray(step.queries), jnp.asarray(step.pool), jnp.int32(step.first_page)
        return native_variant(*arrays, batch, AttentionFeatures(window=window))

    with pytest.raises(jax.errors.JaxRuntimeError, match="a page outside the pool"):
        jax.block_until_ready(attend_to(strange, 0))
    np.testing.assert_array_equal(attend_to(strange, 8), attend_to(step.batch, 8))


def test_deterministic_mode_uses_all_of_it():
    """Its greedy choice, too: greedy rows are rounded alike in greedy steps and beside sampled rows."""
    for named in ({}, {"moe_backend": "native", "attention_backend": "native"}):
        kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(deterministic=True, **named))
        assert (kernels.moe.name, attention.name) == ("native", "native")
        assert kernels.layer_stack is not None and kernels.argmax is not None


@pytest.mark.parametrize(
    ("field", "name"), [("moe_backend", "tiled"), ("moe_backend", "grouped"), ("attention_backend", "paged")]
)
def test_deterministic_mode_refuses_what_is_not_batch_invariant_by_name(field, name):
    with pytest.raises(
        ConfigError, match=f"{field}='{name}' with deterministic=True: its rows may depend on the batch"
    ):
        DEFAULT_BACKENDS.choose(ServerArgs(deterministic=True, **{field: name}))


@pytest.mark.parametrize("deterministic", [False, True])
def test_backends_that_are_named_load_no_other(monkeypatch, deterministic):
    loads = []

    def watched(entries):
        load = entries["native"].load
        entry = dataclasses.replace(
            entries["native"],
            load=lambda: loads.append("module") or load(),
            unavailable_reason=lambda: loads.append("library"),
        )
        return {**entries, "native": entry}

    registry = BackendRegistry(moe=watched(KERNELS), attention=watched(ATTENTION))
    registry.choose(ServerArgs(deterministic=deterministic, moe_backend="reference", attention_backend="reference"))
    assert loads == []
    registry.choose(ServerArgs(deterministic=deterministic, moe_backend="reference"))
    assert loads == ["library", "module"]


def test_router_replays_given_ids_and_records_them():
    rng = np.random.default_rng(20)
    logits = rng.standard_normal((6, 8)).astype(np.float32)
    replayed_ids = np.stack([rng.permutation(8)[:2] for _ in range(6)]).astype(np.int32)
    valid = np.array([True, False] * 3)
    replayed = LayerRouting(jnp.asarray(replayed_ids), jnp.asarray(valid))
    plain = replay_topk(jnp.asarray(logits), replayed, spec=RouterSpec(num_experts=8, top_k=2, renormalize=True))
    zeros = jnp.zeros((4, 6), jnp.int32)
    routing, block, weights = route(logits, top_k=2, renormalize=True, ids=zeros, layer=1, routed=replayed)
    assert np.array_equal(weights[2:], routing.weights.T)
    assert np.array_equal(routing.ids, plain.ids) and np.array_equal(
        np.asarray(routing.ids)[valid], replayed_ids[valid]
    )
    assert np.array_equal(block[2:], plain.ids.T) and not np.any(block[:2])


@pytest.mark.parametrize("others", [0, 1, 7, 8, 9, 60, 300])
def test_a_row_of_experts_does_not_depend_on_the_others_by_a_bit(others):
    """Few rows of an expert are streamed and many are tiled, and the sums are the same."""
    shape = (others + 1, 2, 3, 40, 24)
    alone = random_call(13, (1, 2, 3, 40, 24), valid=np.ones(1, bool))
    crowd = dataclasses.replace(
        random_call(14, shape, valid=np.ones(others + 1, bool)), gate_up=alone.gate_up, down=alone.down
    )
    rows = {name: np.concatenate([vars(crowd)[name][:others], vars(alone)[name]]) for name in ("x", "ids", "weights")}
    assert np.array_equal(EXPERTS(with_rows(crowd, **rows))[-1], EXPERTS(alone)[0])


@pytest.mark.parametrize("others", [1, 7, 8, 9, 250])
def test_a_row_of_linear_does_not_depend_on_the_others_by_a_bit(others):
    rng = np.random.default_rng(15)
    x, weights = (
        rng.standard_normal((others + 1, 70)).astype(np.float32),
        rng.standard_normal((1, 70, 90)).astype(np.float32),
    )
    together, alone = (LINEAR(jnp.asarray(rows), jnp.asarray(weights), 0, dtype=jnp.float32) for rows in (x, x[-1:]))
    assert np.array_equal(together[-1], alone[0])


def test_an_id_that_no_expert_has_is_an_error_and_not_a_crash():
    call = random_call(16, (4, 2, 3, 16, 8), valid=np.ones(4, bool))
    for wrong in (-1, 3, 2**30):
        ids = np.array(call.ids)
        ids[2, 1] = wrong
        with pytest.raises(jax.errors.JaxRuntimeError, match="an expert id is outside"):
            jax.block_until_ready(EXPERTS(with_rows(call, ids=ids)))
        hidden = with_rows(call, ids=ids, valid=np.array([True, True, False, True]))  # ids of padding are never read
        assert np.all(np.isfinite(EXPERTS(hidden)))


def test_weights_are_read_in_place():
    """Nothing in the compiled program but its parameters has the shape of the experts, of a run's or of a layer's."""
    call = random_call(17, (8, 2, 4, 64, 32), layers=3, layer=2)
    compiled = EXPERTS.lower(call).compile()
    made = re.findall(r"= f32\[(?:4|12),(?:64|32),64\]\S* (\w+)", compiled.as_text())
    assert made == ["parameter", "parameter"]
    assert compiled.memory_analysis().temp_size_in_bytes < call.down.nbytes // 3


def test_without_a_compiler_auto_takes_plain_kernels_and_a_name_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "unavailable_reason", lambda: "no C++ compiler was found")
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs())
    assert (kernels.moe.name, attention.name) == ("tiled", "paged")
    for field in ("moe_backend", "attention_backend"):
        with pytest.raises(
            ConfigError, match=f"{field}='native' cannot run here: no C\\+\\+ compiler was found; or choose auto"
        ):
            DEFAULT_BACKENDS.choose(ServerArgs(**{field: "native"}))


def test_a_backend_of_another_platform_is_refused():
    with pytest.raises(ConfigError, match=r"moe_backend='native' cannot run here: it runs on cpu, and .* is a gpu"):
        DEFAULT_BACKENDS.choose(ServerArgs(moe_backend="native"), platform="gpu")


def test_a_compiler_that_fails_is_quoted(tmp_path):
    wrong = tmp_path / "false-compiler"
    wrong.write_text("#!/bin/sh\necho 'kernels.cpp:1: no such dialect' >&2\nexit 1\n")
    wrong.chmod(0o755)
    with pytest.raises(OSError, match=r"could not compile the native kernels: kernels\.cpp:1: no such dialect"):
        toolchain.compile_library((str(wrong),), tmp_path / "library.so")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["false-compiler"]


def test_processes_that_start_at_once_compile_once(tmp_path):
    compiler, calls, library = tmp_path / "compiler", tmp_path / "calls", tmp_path / "library.so"
    compiler.write_text(f"#!/bin/sh\necho called >> {calls}\nfor made; do :; done\necho library > $made\n")
    compiler.chmod(0o755)
    together = threading.Barrier(4)

    def start(_):
        together.wait()
        toolchain.compile_once((str(compiler),), library)  # each opens the lock, as processes do
        return library.read_text()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(start, range(4))) == ["library\n"] * 4
    assert calls.read_text().split() == ["called"]


@pytest.mark.parametrize("missing", ["module", "file"])
def test_without_locks_each_process_compiles(tmp_path, monkeypatch, missing):
    compiler, library = tmp_path / "compiler", tmp_path / "library.so"
    compiler.write_text("#!/bin/sh\nfor made; do :; done\necho library > $made\n")
    compiler.chmod(0o755)
    if missing == "module":
        monkeypatch.setitem(sys.modules, "fcntl", None)  # its import fails
    else:
        library.with_suffix(".lock").mkdir()  # it cannot be opened for writing
    toolchain.compile_once((str(compiler),), library)
    assert library.read_text() == "library\n"


def test_a_missing_compiler_is_reported_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert toolchain.compiler() is None
    with pytest.raises(OSError, match=r"no C\+\+ compiler was found .*; install one, or `pip install ziglang`"):
        toolchain.library.__wrapped__()
