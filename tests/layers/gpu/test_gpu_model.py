"""A whole step on the GPU's kernels, interpreted, against the plain code: the fused run of layers, the capture, the
pool."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.test_native_stack_families import BOUNDS, MOE, PARTIAL, SAME_ROWS, build_model, random_model
from layers.test_native_stack_families import layer as moe_layer
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.rotary import RotarySpec
from routed_experts.layers.short_conv import ConvShape
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.fused_path import block_kernel
from routed_experts.models.decoder.latent_attention import LatentAttention
from routed_experts.models.decoder.short_convolution import ShortConvolution
from support.model_steps import PAGES, drifted_rows, packed, run_steps, tiny_model

pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = Kernels(moe=MOE_BACKENDS["reference"])


@functools.cache
def on_gpu_kernels(*, capture: bool):
    return run_steps(tiny_model(), gpu_kernels(interpret=True), gpu_attention_backend(interpret=True), capture=capture)


def test_a_step_equals_plain_code():
    pool, outs = on_gpu_kernels(capture=True)
    expected_pool, expected = run_steps(tiny_model(), PLAIN, ATTENTION_BACKENDS["reference"], capture=True)
    for (hidden, rows), (expected_hidden, expected_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_allclose(hidden, expected_hidden, rtol=2e-4, atol=2e-5)
    for layer in range(3):  # page 0 of a layer takes padding in the one and nothing in the other
        actual, plain_pages = (x[layer * PAGES + 1 : (layer + 1) * PAGES] for x in (pool, expected_pool))
        np.testing.assert_allclose(actual, plain_pages, rtol=2e-4, atol=2e-5)


def test_rows_that_are_given_run_as_in_plain_code():
    """By the same few kernels: of half of the tokens, in an order that no router gives."""
    ids, valid = drifted_rows()
    gpu, plain = (
        (gpu_kernels(interpret=True), gpu_attention_backend(interpret=True)),
        (PLAIN, ATTENTION_BACKENDS["reference"]),
    )
    (_, outs), (_, expected) = (
        run_steps(tiny_model(), *kernels, capture=True, routed=[(ids, valid)] * 2) for kernels in (gpu, plain)
    )
    for (hidden, rows), (expected_hidden, expected_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_array_equal(
            rows[valid[: len(rows)]], ids[: len(rows)].reshape(len(rows), -1)[valid[: len(rows)]]
        )
        np.testing.assert_allclose(hidden, expected_hidden, rtol=2e-4, atol=2e-5)


def test_no_rows_that_are_valid_are_the_live_step_by_a_bit():
    pool, outs = on_gpu_kernels(capture=True)
    nothing = (np.full((16, 2, 2), 255, np.uint8), np.zeros(16, bool))
    kernels = (gpu_kernels(interpret=True), gpu_attention_backend(interpret=True))
    pool_given, replayed = run_steps(tiny_model(), *kernels, capture=True, routed=[nothing] * 2)
    np.testing.assert_array_equal(pool, pool_given)
    for (hidden, rows), (hidden_given, rows_given) in zip(outs, replayed, strict=True):
        np.testing.assert_array_equal(rows, rows_given)
        np.testing.assert_array_equal(hidden, hidden_given)


def test_capture_changes_no_value():
    (pool_on, on), (pool_off, off) = on_gpu_kernels(capture=True), on_gpu_kernels(capture=False)
    np.testing.assert_array_equal(pool_on, pool_off)
    for (hidden_on, rows_on), (hidden_off, rows_off) in zip(on, off, strict=True):
        assert rows_on is not None and rows_off is None
        np.testing.assert_array_equal(hidden_on, hidden_off)


LATENT = LatentAttention(
    num_heads=4,
    query_rank=0,
    rank=12,
    key_dim=8,
    value_dim=6,
    rotary_dim=4,
    rotary=RotarySpec(inverse=(1.0, 0.1), interleaved=True),
    scale=0.3,
)
LATENT_LAYERS = [
    dataclasses.replace(MOE, mixer=mixer) for mixer in (LATENT, LATENT, dataclasses.replace(LATENT, query_rank=8))
]


@pytest.mark.parametrize(
    "name", ["GPT-OSS", pytest.param("DeepSeek", marks=pytest.mark.thorough)]
)  # as latent rows below
def test_attention_of_a_family_equals_plain_code(name):
    """Layer by layer: windows and sinks; latent rows, of queries with a rank and without."""
    attention = gpu_attention_backend(interpret=True)
    model = random_model(LATENT_LAYERS, "float32") if name == "DeepSeek" else build_model(name, "float32")
    assert name == "DeepSeek" or all(layer.mixer.is_fused_by(attention) for layer in model.config.layers)
    (pool, outs), (plain_pool, expected) = (
        run_steps(model, PLAIN, backend, capture=True) for backend in (attention, ATTENTION_BACKENDS["reference"])
    )
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        np.testing.assert_allclose(hidden, plain_hidden, rtol=2e-4, atol=2e-5)
    for layer in range(model.config.num_layers):
        actual, plain_pages = (x[layer * PAGES + 1 : (layer + 1) * PAGES] for x in (pool, plain_pool))
        np.testing.assert_allclose(actual, plain_pages, rtol=2e-4, atol=2e-5)


GPU = gpu_kernels(interpret=True), gpu_attention_backend(interpret=True)
PLAIN_STEP = PLAIN, ATTENTION_BACKENDS["reference"]
FUSED = {  # whether the prefill runs in few kernels, too, and not the decode step alone, in every run
    "GPT-OSS": True,
    "GLM-4.5": True,
    "HunYuan": False,
    "MiniMax-M2": False,
    "Qwen2-MoE": False,
}


@pytest.mark.parametrize(
    ("name", "prefills"),
    [
        *FUSED.items(),
        *(pytest.param(name, True, marks=pytest.mark.thorough) for name, prefills in FUSED.items() if not prefills),
    ],
)
def test_layers_of_a_family_in_few_kernels_equal_plain_code(name, prefills):
    model = build_model(name, "float32")
    assert [block_kernel(model.config, block, *GPU) for block in model.config.blocks] == [GPU[0].fused_layer]
    pool, outs = run_steps(model, *GPU, capture=True, prefill=None if prefills else PLAIN_STEP)
    plain_pool, expected = run_steps(model, *PLAIN_STEP, capture=True)
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        difference = np.abs(hidden - plain_hidden)
        assert np.max(difference) < BOUNDS["float32"] and np.mean(difference) < BOUNDS["float32"] / 4
    for index in range(model.config.num_layers):  # page 0 of a layer takes padding
        np.testing.assert_allclose(
            *(x[index * PAGES + 1 : (index + 1) * PAGES] for x in (pool, plain_pool)), atol=BOUNDS["float32"]
        )


@pytest.mark.parametrize("name", [pytest.param("GPT-OSS", marks=pytest.mark.thorough), "GLM-4.5"])
def test_bfloat16_in_few_kernels_errs_as_little_as_in_plain_code(name):
    """Against float32 on the same weights, all rows on the ids that the kernels chose: bfloat16 may decide a near tie
    otherwise. The kernels round in other places, so their error may be twice that of plain code."""
    model, plain = build_model(name, "bfloat16"), (PLAIN, ATTENTION_BACKENDS["reference"])
    graphdef, state = nnx.split(model)
    wide = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state))
    _, outs = run_steps(model, *GPU, capture=True, pool_dtype="bfloat16")
    _, live = run_steps(wide, *plain, capture=True)
    chosen = [as_given(rows, model.config) for _, rows in outs]
    _, plain_outs = run_steps(model, *plain, capture=True, pool_dtype="bfloat16", routed=chosen)
    _, expected = run_steps(wide, *plain, capture=True, routed=chosen)
    for (hidden, rows), (plain_hidden, _), (wide_hidden, wide_rows), (_, live_rows) in zip(
        outs, plain_outs, expected, live, strict=True
    ):
        np.testing.assert_array_equal(rows, wide_rows)
        assert np.mean(np.all(rows == live_rows, axis=1)) >= SAME_ROWS["bfloat16"]
        error, plain_error = (np.abs(x.astype(np.float32) - wide_hidden) for x in (hidden, plain_hidden))
        assert np.max(error) < min(2 * np.max(plain_error), BOUNDS["bfloat16"])
        assert np.mean(error) < 2 * np.mean(plain_error)


def as_given(rows, config):
    """The captured rows of a step, to run again."""
    spec = config.capture_spec
    ids = np.zeros((16, spec.num_moe_layers, spec.top_k), np.uint8)
    ids[: len(rows)] = rows.reshape(len(rows), spec.num_moe_layers, -1)
    return ids, np.arange(16) < len(rows)


@pytest.mark.thorough
def test_rows_that_are_given_run_in_a_pattern_of_layers():
    model = build_model("GPT-OSS", "float32")
    rng = np.random.default_rng(4)
    ids = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (16, 4, 1)), axis=-1)[..., :2]
    ids[1::2] = 255  # of rows that are not played back
    routed = ids, np.arange(16) % 2 == 0
    (_, outs), (_, expected) = (
        run_steps(model, *kernels, capture=True, routed=[routed] * 2)
        for kernels in (GPU, (PLAIN, ATTENTION_BACKENDS["reference"]))
    )
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        np.testing.assert_allclose(hidden, plain_hidden, atol=BOUNDS["float32"])


def states_model():
    """As Qwen3-Next: the delta rule, and gated attention with offset norms and partial positions."""
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6, width=4)
    delta = dataclasses.replace(MOE, mixer=DeltaAttention(shape=shape, eps=1e-6, layout="key heads"))
    gated = moe_layer(dict(gated=True, norm_offset=1.0, rotary=PARTIAL))
    return random_model([delta, gated, delta, gated], "float32", norm_offset=1.0)


def convolution_model():
    """As LFM2: a short convolution before attention."""
    conv = dataclasses.replace(
        MOE, mixer=ShortConvolution(shape=ConvShape(channels=tiny_model().config.hidden_size, width=3))
    )
    return random_model([conv, MOE], "float32")


MIXERS_IN_PIECES = {
    "latent rows": lambda: random_model(LATENT_LAYERS, "float32"),
    "states": states_model,
    "a convolution": convolution_model,
}


@pytest.mark.parametrize(
    ("replayed", "name"),
    [
        (False, "latent rows"),
        (False, "states"),
        pytest.param(False, "a convolution", marks=pytest.mark.thorough),  # a third of the rows that follow is live
        (True, "a convolution"),
        *(pytest.param(True, name, marks=pytest.mark.thorough) for name in ("latent rows", "states")),
    ],
)
def test_few_kernels_behind_a_mixer_in_pieces_equal_plain_code(name, replayed):
    model, traced, fused = MIXERS_IN_PIECES[name](), [], GPU[0].fused_layer

    def add_slots(*args):
        traced.append(args)
        return fused.add_slots(*args)

    kernels = dataclasses.replace(GPU[0], fused_layer=dataclasses.replace(fused, add_slots=add_slots))
    num_moe, rng = model.config.capture_spec.num_moe_layers, np.random.default_rng(5)
    ids = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (16, num_moe, 1)), axis=-1)[..., :2]
    routed = [(ids, np.arange(16) % 3 > 0)] * 2 if replayed else ()
    (pool, outs), (plain_pool, expected) = (
        run_steps(model, *backends, capture=True, routed=routed)
        for backends in ((kernels, GPU[1]), (PLAIN, ATTENTION_BACKENDS["reference"]))
    )
    patterns = sum(len(block.pattern) for block in model.config.blocks)
    assert len(traced) == 2 * patterns, "both steps run all layers in few kernels"
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        np.testing.assert_allclose(hidden, plain_hidden, rtol=2e-4, atol=BOUNDS["float32"])
    if model.config.cache.num_recurrent:
        for states, plain_states in zip(jax.tree.leaves(pool.states), jax.tree.leaves(plain_pool.states), strict=True):
            np.testing.assert_allclose(states[:, 1:3], plain_states[:, 1:3], rtol=2e-4, atol=2e-5)


def test_several_layers_in_the_body_of_the_loop_and_those_left_over_equal_plain_code():
    """Of a decode step; the loop is the same in every step."""
    model = random_model([MOE] * 3, "float32")
    kernels = dataclasses.replace(GPU[0], fused_layer=dataclasses.replace(GPU[0].fused_layer, unrolled=2))
    _, outs = run_steps(model, kernels, GPU[1], capture=True, prefill=PLAIN_STEP)
    _, expected = run_steps(model, *PLAIN_STEP, capture=True)
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        np.testing.assert_allclose(hidden, plain_hidden, atol=BOUNDS["float32"])


def test_a_step_of_one_token_equals_plain_code():
    """Its router's product is part of the kernel that adds the attention's output."""
    model = build_model("GPT-OSS", "float32")
    shape = BatchShape(mode=ForwardMode.EXTEND, num_tokens=1, num_requests=1, table_width=1)
    words = packed(shape, num_tokens=1, token_ids=[7], query_starts=[0, 1], seq_lens=[1], page_table=[[1]])
    graphdef, state = nnx.split(model)
    pool, last = jnp.zeros((model.config.num_layers * 2, 4, 4, 8)), jnp.zeros(2, jnp.int32)
    outs = []
    for kernels, attention in (GPU, (PLAIN, ATTENTION_BACKENDS["reference"])):
        spec = ProgramSpec(
            graphdef=graphdef,
            capture=model.config.capture_spec,
            kernels=kernels,
            attention=attention,
            num_pages=2,
            raw_logprobs=False,
        )
        outs.append(jax.jit(functools.partial(forward, spec=spec, shape=shape))(state, pool, last, words)[1])
    np.testing.assert_array_equal(outs[0].rows, outs[1].rows)
    np.testing.assert_allclose(outs[0].hidden, outs[1].hidden, atol=BOUNDS["float32"])
