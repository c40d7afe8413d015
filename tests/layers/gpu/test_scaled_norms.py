"""Rows that the kernels of the residual stream scale for products with codes, interpreted: they are those of
`scale_rows`, bitwise, products read them as they are, and a step has no other launch for them.

Dims: N tokens, K experts per token, D hidden, O outputs."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.gpu.test_gpu_codes import Experts, random_halves, random_weight
from layers.test_native_stack_families import layer, random_model
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.expert_tiles import CODE_TILES, choose_tiles, takes_scaled_rows, tiles_for
from routed_experts.layers.gpu.linear import partial_sums
from routed_experts.layers.gpu.moe import slot_outputs
from routed_experts.layers.gpu.operands import MatrixKind
from routed_experts.layers.gpu.residual import add_parts, add_slots, normed_rows
from routed_experts.layers.gpu.scaled_rows import ScaledRows, scale_rows
from routed_experts.layers.kernels import NormedRows, RoutingSize, SlotOutputs, StreamNorm
from routed_experts.models.decoder.coded_arrays import CodedArray
from support.model_steps import PAGE, packed

pytestmark = pytest.mark.usefixtures("fast_in_every_run")

HALF = jnp.bfloat16
ATTENTION = gpu_attention_backend(interpret=True)


def scaled(x, *, interpret=True):
    return jax.jit(functools.partial(scale_rows, interpret=interpret))(x)


def assert_same(actual, expected):
    """Two pytrees, bitwise; None equals None."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def stream_of(num_rows, dim):
    """Rows of all magnitudes; the first ones are zeros, tiny, huge, of one number, and the last one is not finite."""
    rng = np.random.default_rng(num_rows * dim)
    rows = rng.standard_normal((num_rows, dim)) * 2.0 ** rng.integers(-20, 20, (num_rows, dim))
    rows[:3] *= np.array([0.0, 2.0**-110, 2.0**40])[:, None]
    rows[3, 1:], rows[-1, 0] = 0.0, np.inf
    return jnp.asarray(rows, HALF)


def by_parts(x, norm, *, interpret=True):
    parts = jnp.stack([x, -0.5 * x]).astype(jnp.float32)
    return add_parts(x, parts, None, norm, interpret=interpret)


def by_slots(x, norm, *, interpret=True):
    num_rows, top_k = x.shape[0], 2
    slots = jnp.repeat(x, top_k, axis=0)
    weights, valid = jnp.full((num_rows, top_k), 0.25), jnp.arange(num_rows) % 5 != 3
    outputs = SlotOutputs(slots=slots, weights=weights, valid=valid, inputs=x)
    return add_slots(x, outputs, norm, interpret=interpret)


def normed_by(add, x, matrices, *, offset=0.0):
    """The stream and its norm, whose scales are of all magnitudes, before a product with these matrices."""
    powers = 2.0 ** np.random.default_rng(1).integers(-40, 40, (3, x.shape[1]))
    scales, layer_id = jnp.asarray(powers, x.dtype).at[2].set(jnp.nan), jnp.int32(1)

    def run(x, matrices):
        norm = StreamNorm(scales=scales, layer=layer_id, eps=1e-6, offset=offset, next_matrices=matrices)
        return add(x, norm)

    return jax.jit(run)(x, matrices)


def check_scaled_rows(add, num_rows, dim, offset, *, interpret):
    """They are those of the stored norm, and the stream and the norm are those without scaled rows."""
    add = functools.partial(add, interpret=interpret)
    x, weight = stream_of(num_rows, dim), random_weight(jax.random.key(0), 3, dim, 16, 16)
    stream, normed = normed_by(add, x, weight, offset=offset)
    plain_stream, plain_normed = normed_by(add, x, None, offset=offset)
    assert np.isnan(np.asarray(normed.scaled.values[-1])).any()
    stream, plain_stream, plain = stream[:-1], plain_stream[:-1], plain_normed.plain[:-1]
    rows = ScaledRows(normed.scaled.values[:-1], normed.scaled.inverse[:, :-1])
    normed = NormedRows(normed.plain[:-1], rows)
    wide, inverse = np.asarray(normed.plain, np.float32), np.asarray(rows.inverse)[0]
    assert not wide[0].any() and np.isfinite(wide).all() and np.isfinite(inverse).all()
    assert np.log2(inverse.max() / inverse[1:].min()) > 30, "rows of many magnitudes"
    assert_same(normed.scaled, scaled(normed.plain, interpret=interpret))
    assert_same((stream, normed.plain), (plain_stream, plain))


@pytest.mark.parametrize(
    ("add", "num_rows", "dim", "offset"),
    [
        pytest.param(add, *size, offset, marks=pytest.mark.thorough if (row + column + kernel) % 2 else ())
        for kernel, add in enumerate((by_parts, by_slots))
        for row, size in enumerate([(8, 64), (17, 160), (64, 96), (9, 2080)])
        for column, offset in enumerate([0.0, 1.0])
    ],
)
def test_scaled_rows_are_those_of_the_stored_norm_by_the_bit(add, num_rows, dim, offset):
    check_scaled_rows(add, num_rows, dim, offset, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "dim"), [(8, 2048), (17, 160), (64, 2880), (256, 4096)])
@pytest.mark.parametrize("add", [by_parts, by_slots])
def test_compiled_scaled_rows_are_those_of_the_stored_norm_by_the_bit(add, num_rows, dim, offset):
    check_scaled_rows(add, num_rows, dim, offset, interpret=False)


def as_they_are(x, norm):
    return x, normed_rows(x, norm.next_matrices, interpret=True)


@pytest.mark.parametrize("add", [by_parts, by_slots, as_they_are])
def test_rows_are_scaled_for_products_that_take_them_alone(add):
    """Not one row, not float32, and not for numbers or no product."""
    codes = random_weight(jax.random.key(0), 3, 64, 16, 16)
    packed_codes = random_halves(jax.random.key(0), 3, 64, 16, 32, form="int4", run=32)

    def is_scaled(num_rows, dtype, matrices):
        x = jax.ShapeDtypeStruct((num_rows, 64), dtype)
        return jax.eval_shape(lambda x: normed_by(add, x, matrices)[1], x).scaled is not None

    assert is_scaled(2, HALF, codes) and is_scaled(8, HALF, codes) and is_scaled(8, HALF, packed_codes)
    assert not any(is_scaled(*case, codes) for case in ((1, HALF), (8, jnp.float32)))
    assert not any(is_scaled(8, HALF, matrices) for matrices in (jnp.ones((3, 64, 16), HALF), None))


def launches(function, *args):
    """Kernels that a program launches, by name."""
    names = collections.Counter()

    def visit(jaxpr, times):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                names[equation.params["name"]] += times
                continue
            repeats = times * equation.params["length"] if equation.primitive.name == "scan" else times
            assert equation.primitive.name not in ("cond", "while"), "the number of launches is not known"
            for param in equation.params.values():
                if isinstance(param, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                    visit(getattr(param, "jaxpr", param), repeats)

    visit(jax.make_jaxpr(function)(*args).jaxpr, 1)
    return names


@pytest.mark.parametrize("num_rows", [2, 16, 40])
def test_a_projection_of_scaled_rows_scales_none(num_rows):
    weight = random_weight(jax.random.key(1), 3, 160, 48, 32, real=slice(1, 2))
    x = jax.random.normal(jax.random.key(2), (num_rows, 160), HALF)
    product = gpu_kernels(interpret=True).fused_layer.product
    rows, layer_id = normed_rows(x, weight, interpret=True), jnp.int32(1)
    assert launches(product, rows, weight, layer_id) == {"linear": 1}
    expected = jax.jit(functools.partial(partial_sums, dtype=HALF, interpret=True))(x, weight, layer_id)
    assert expected.dtype == (HALF if expected.shape[0] == 1 else jnp.float32)
    assert_same(jax.jit(product)(rows, weight, layer_id), expected)


@pytest.mark.parametrize("shared_width", [pytest.param(0, marks=pytest.mark.thorough), 24])
def test_experts_of_many_rows_take_scaled_rows(shared_width):
    """They read no others."""
    case = Experts(sizes=(40, 4, 16, 64, 40), groups=(32, 16), dtype=HALF, shared_width=shared_width)
    call, shared = case.call, case.shared
    tiles = tiles_for(call, shared)
    assert tiles.scaled
    run = functools.partial(slot_outputs, shared=shared, stride=call.num_experts, interpret=True)
    no_numbers, rows = dataclasses.replace(call, x=jnp.full_like(call.x, jnp.nan)), scaled(call.x)
    names = launches(lambda: run(no_numbers, tiles, scaled_x=rows))
    assert names["scale_rows"] == launches(lambda: run(call, tiles))["scale_rows"] - 1
    assert_same(jax.jit(lambda: run(no_numbers, tiles, scaled_x=rows))(), jax.jit(lambda: run(call, tiles))())


def test_a_norm_scales_rows_for_experts_that_take_them():
    """Where a tile has rows of one expert, which those of few slots have not."""
    assert all(tiles.scaled for tiles in CODE_TILES)
    codes, x = random_weight(jax.random.key(0), 3, 64, 16, 16), jax.ShapeDtypeStruct((32, 64), HALF)
    for counts, is_scaled in ((None, True), ((32, 9), True), ((128, 8), True), ((4, 1), False)):

        def normed(x, counts=counts):
            norm = StreamNorm(scales=jnp.ones((1, 64), HALF), layer=jnp.int32(0), eps=1e-6, next_matrices=codes)
            return by_parts(x, dataclasses.replace(norm, experts=counts and RoutingSize(*counts)))[1]

        assert (jax.eval_shape(normed, x).scaled is not None) == is_scaled, counts


@pytest.mark.parametrize("form", ["e4m3", "int4", "e2m1"])
def test_scaled_rows_are_taken_where_the_tiles_of_a_format_read_them(form):
    """Of experts; of other matrices always. Codes of e2m1 with more rows are multiplied by their scales instead."""
    key, kind = jax.random.key(0), MatrixKind(form)
    halves = None if form == "e4m3" else random_halves(key, 2, 64, 16, 32, form=form, run=32)
    weight = random_weight(key, 2, 64, 16, 16) if halves is None else halves
    assert takes_scaled_rows(2, HALF, weight)
    assert not takes_scaled_rows(1, HALF, weight) and not takes_scaled_rows(16, jnp.float32, weight)
    actual = set()
    counts = itertools.product((8, 32, 128, 384), (1, 2, 8), (1, 2, 8, 16, 24, 64, 256, 4096))
    for num_experts, top_k, num_rows in counts:
        tiles = choose_tiles(num_rows * top_k, num_experts, 64, 64, kind)
        reads = num_rows > 1 and tiles.sorted_slots and tiles.scaled and tiles.gate_up.rows >= 8
        assert takes_scaled_rows(num_rows, HALF, weight, RoutingSize(num_experts, top_k)) == reads
        actual |= {(reads, tiles.sorted_slots)}
    assert actual == {(False, False), (False, True), (True, True)} - ({(False, True)} if form == "e4m3" else set())
    assert not takes_scaled_rows(16, HALF, jnp.zeros((2, 64, 16), HALF))


def test_experts_of_few_slots_take_rows_as_they_are():
    """Their blocks multiply one row, without the tensor cores."""
    call = Experts(sizes=(8, 2, 6, 64, 40), groups=(32, 16), dtype=HALF).call
    tiles = tiles_for(call)
    assert tiles.gate_up.rows == 1
    no_numbers = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), scaled(call.x))
    by_rows, by_scaled = (
        jax.jit(lambda rows=rows: slot_outputs(call, tiles, scaled_x=rows, stride=call.num_experts, interpret=True))()
        for rows in (None, no_numbers)
    )
    assert np.isfinite(np.asarray(by_rows[: call.ids.size], np.float32)).all()
    assert_same(by_scaled, by_rows)


CODED = (
    CodedArray(name="qkv", group=32, segments=(32, 16, 16), outputs_first=True),
    CodedArray(name="out", group=32, segments=(32,), outputs_first=True),
    CodedArray(name="gate_up", group=32, segments=(16, 16), outputs_first=True),
    CodedArray(name="down", group=16, segments=(32,), outputs_first=True),
)


FUSED, IN_PIECES = (  # no attention kernel clips projections
    dataclasses.replace(layer(mixer, router=dict(num_experts=32)), coded=CODED) for mixer in ({}, dict(clip=2.0))
)
_QKV = dataclasses.replace(CODED[0], segments=(256, 128, 128))
_ROTARY = dataclasses.replace(FUSED.mixer.rotary, inverse=tuple(1e4 ** -(np.arange(32) / 32)))
WIDE_HEADS = dataclasses.replace(
    FUSED, mixer=dataclasses.replace(FUSED.mixer, head_dim=64, rotary=_ROTARY), coded=(_QKV, *CODED[1:])
)
LAYERS = {
    "one kind": [FUSED] * 3,
    "wide heads": [WIDE_HEADS] * 2,
    "in pieces first": [IN_PIECES, FUSED] * 2,
    "in pieces last": [FUSED, IN_PIECES] * 2,
}


@functools.cache
def coded_model(name):
    """These layers, with matrices of codes."""
    return random_model(LAYERS[name], "bfloat16")


def without_scaled_norms(kernels):
    """The bundle, whose norms are as they were for numbers."""
    fused = kernels.fused_layer

    def plain(norm):
        return dataclasses.replace(norm, next_matrices=None)

    steps = dataclasses.replace(
        fused,
        normed_rows=lambda normed, _: fused.normed_rows(normed, None),
        add_parts=lambda x, parts, biases, norm, router: fused.add_parts(x, parts, biases, plain(norm), router),
        add_slots=lambda x, outputs, norm: fused.add_slots(x, outputs, plain(norm)),
    )
    return dataclasses.replace(kernels, fused_layer=steps)


def without_scaled_heads(attention):
    """The backend, whose values are as they were for numbers."""
    fused = attention.fused
    plain = lambda projected, *args: fused(dataclasses.replace(projected, next_matrices=None), *args)  # noqa: E731
    return dataclasses.replace(attention, fused=plain)


def decode_program(name, kernels, num_rows, attention=ATTENTION):
    """A decode step of many requests with one page each, the last one padding, and its arguments."""
    (graphdef, state), config = nnx.split(coded_model(name)), coded_model(name).config
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec,
        kernels=kernels,
        attention=attention,
        num_pages=num_rows + 1,
        raw_logprobs=False,
    )
    shape = BatchShape(mode=ForwardMode.DECODE, num_tokens=num_rows, num_requests=num_rows, table_width=1)
    numbers = np.arange(num_rows)
    words = packed(
        shape,
        num_tokens=num_rows - 1,
        token_ids=numbers % 50,
        positions=np.zeros(num_rows),
        token_rows=numbers,
        query_starts=[*numbers, num_rows - 1],
        seq_lens=np.ones(num_rows - 1),
        page_table=numbers[:, None] + 1,
        request_slots=numbers + 1,
    )
    cache = config.cache
    pool = jnp.zeros((cache.num_layers * (num_rows + 1), PAGE, cache.rows, cache.head_dim), HALF)
    return functools.partial(forward, spec=spec, shape=shape), (state, pool, jnp.zeros(num_rows + 2, jnp.int32), words)


@pytest.mark.parametrize(
    ("name", "scalings", "without"),
    [
        # attention's output, what the second product of experts reads, and the first norm; without, each norm
        ("one kind", 2 * 3 + 1, 4 * 3),
        ("wide heads", 2 + 1, 3 * 2),  # whose attention scales its output
        # and the first projections in pieces
        pytest.param("in pieces first", 2 * 4 + 2, 2 * 4 + 2 + 2 + 4, marks=pytest.mark.thorough),
        ("in pieces last", 2 * 4 + 2 + 1, 2 * 4 + 2 + 2 + 4),
    ],
)
def test_a_step_scales_no_norm_by_a_launch(name, scalings, without):
    """But for the norm before the first layer. What is scaled by one is the output of attention with narrow heads, and
    what the second product of experts reads."""
    kernels, num_layers = gpu_kernels(interpret=True), len(LAYERS[name])
    step, args = decode_program(name, kernels, 32)
    names = launches(step, *args)
    assert names["add_slots"] == names["add_parts"] == num_layers and names["scale_rows"] == scalings
    step, args = decode_program(name, without_scaled_norms(kernels), 32)
    assert launches(step, *args) == names | {"scale_rows": without}


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        ("one kind", 8),
        *(
            pytest.param(name, 32, marks=pytest.mark.thorough if name in ("one kind", "in pieces last") else ())
            for name in LAYERS
        ),
    ],
)
def test_a_step_with_scaled_norms_equals_one_without(name, num_rows):
    kernels = gpu_kernels(interpret=True)
    outs = []
    for bundle in (kernels, without_scaled_norms(kernels)):
        step, args = decode_program(name, bundle, num_rows)
        pool, out = jax.jit(step)(*args)
        outs.append((pool, out.hidden[: num_rows - 1], out.rows[: num_rows - 1]))
    assert np.isfinite(np.asarray(outs[0][1], np.float32)).all()
    assert_same(*outs)


def test_a_step_with_scaled_heads_equals_one_without():
    """Groups of 32 inputs are parts of a head of 64, so that both add up the same sums."""
    kernels, outs = gpu_kernels(interpret=True), []
    for attention in (ATTENTION, without_scaled_heads(ATTENTION)):
        step, args = decode_program("wide heads", kernels, 32, attention)
        assert launches(step, *args)["scale_rows"] == (3 if attention is ATTENTION else 2 * 2 + 1)
        pool, out = jax.jit(step)(*args)
        outs.append((pool, out.hidden[:31], out.rows[:31]))
    assert np.isfinite(np.asarray(outs[0][1], np.float32)).all()
    assert_same(*outs)
