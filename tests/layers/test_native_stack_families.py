"""What families add to a run of layers, as one native kernel, against the layers one by one in plain code: outputs,
pool and ids of a prefill and a decode. A row's bits do not depend on the step that it is in."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.test_native_batch_invariance import bits
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.feed_forward import Dense
from routed_experts.models.decoder.fused_path import block_kernel
from support.model_steps import PAGES, packed, run_steps, tiny_model

pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = Kernels(moe=MOE_BACKENDS["reference"])
# bfloat16: against float32 on the same weights. Half a unit in the last place of a result below 4 is 2^-7: one for the
# result, and up to seven for what is rounded on the way, inputs of products and stored keys and values.
BOUNDS = {"float32": 5e-5, "bfloat16": 8 * 2.0**-7}
MEANS = {"float32": 1e-5, "bfloat16": 2.0**-7}
PIECES = dataclasses.replace(NATIVE_KERNELS, layer_stack=None)
# Of keys and values around 1, a tenth of the mean error of one rounding of a stream around 1, which is 2^-10 in
# bfloat16 and 2^-13 in float16. Measured: 2.3e-5 and 2e-8 at most; where streams are rounded, 8e-4 and 1e-4 at least.
IN_PIECES = {"bfloat16": 2.0**-10 / 10, "float16": 2.0**-13 / 10}
SAME_ROWS = {"float32": 1.0, "bfloat16": 0.9}  # bfloat16 may decide a near tie otherwise
MOE = tiny_model().config.layers[1]
ROTARY = MOE.mixer.rotary
DENSE = dataclasses.replace(MOE, feed=Dense(width=20))
PARTIAL = dataclasses.replace(ROTARY, inverse=ROTARY.inverse[:3])


def layer(mixer=None, feed=None, router=None):
    """A MoE layer of the tiny model, changed so."""
    router = dataclasses.replace(MOE.feed.router, **(router or {}))
    return dataclasses.replace(
        MOE,
        mixer=dataclasses.replace(MOE.mixer, **(mixer or {})),
        feed=dataclasses.replace(MOE.feed, router=router, **(feed or {})),
    )


GPT_OSS = dict(qk_norm="", bias_in=True, bias_out=True, sinks=True)
GPT_OSS_FEED = dict(router_bias=True, biased=True, activation="clamped swiglu")
SIGMOID = dict(scoring_func="sigmoid", epsilon=1e-20, scale=2.5, biased=True)
DENSE_BETWEEN = "every other layer dense"
CASES = {  # layers, and changes of the config
    "GPT-OSS": (
        [layer(GPT_OSS | dict(window=window), GPT_OSS_FEED, dict(scoring_func="logits")) for window in (3, 0)] * 2,
        {},
    ),
    "GLM-4.5": (
        [layer(dict(rotary=PARTIAL, bias_in=True), dict(shared_width=12, wide_router=True), SIGMOID)] * 2,
        {},
    ),
    "groups": ([layer(router=SIGMOID | dict(num_groups=3, topk_group=2, group_score_topk=2))] * 2, {}),
    "HunYuan": ([layer(dict(norm_after_rope=True), dict(shared_width=12, wide_router=True))] * 2, {}),
    "MiniMax-M2": ([layer(dict(qk_norm="whole", rotary=PARTIAL), router=SIGMOID)] * 2, {}),
    "Qwen2-MoE": ([layer(dict(qk_norm="", bias_in=True), dict(shared_width=20, shared_gated=True))] * 2, {}),
    "gated heads, offset norms": (
        [layer(dict(gated=True, norm_offset=1.0, rotary=dataclasses.replace(PARTIAL, interleaved=True)))] * 2,
        dict(norm_offset=1.0),
    ),
    "Granite": ([layer(dict(qk_norm="", scale=0.3), router=dict(scoring_func="logits"))] * 2, dict(residual_scale=0.4)),
    "chunks, and all without positions": (
        [layer(dict(chunk=3, qk_norm="")), layer(dict(rotary=None, qk_norm=""))] * 2,
        {},
    ),
    DENSE_BETWEEN: ([DENSE, layer(feed=dict(shared_width=12, shared_gated=True))] * 2, {}),
    "a pattern behind dense layers": ([DENSE] * 2 + [layer(dict(window=window)) for window in (3, 0)] * 2, {}),
}
# What a feature does is compared in one of three ways in every run: with plain code, live or on rows that are given, or
# with the layers in pieces (test_native_pieces.py), whose kernels test_native_features.py compares with plain code.
EQUAL_PLAIN = {("GPT-OSS", "bfloat16")} | {
    (name, "float32") for name in ("MiniMax-M2", "Granite", "chunks, and all without positions")
}


def thorough_but(in_every_run, cases):
    """Cases, of which scripts/thorough alone has those that are not in `in_every_run`."""
    return [pytest.param(*case, marks=[] if case in in_every_run else pytest.mark.thorough) for case in cases]


def build_model(name, dtype) -> FamilyDecoder:
    """Random weights, of biases and norms too."""
    layers, changes = CASES[name]
    return random_model(layers, dtype, **changes)


def random_model(layers, dtype, **changes) -> FamilyDecoder:
    """The tiny model with these layers."""
    config: FamilyConfig = dataclasses.replace(tiny_model().config, layers=tuple(layers), **changes)
    model = FamilyDecoder(config, rngs=nnx.Rngs(2), dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(3)
    graphdef, state = nnx.split(model)
    shaken = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype), state)
    return nnx.merge(graphdef, shaken)


def differences(name, dtype, kernels):
    """Of layers in pieces by `kernels` from one kernel: the mean one of keys and values, which are stored in float32;
    the share of normalised streams that is rounded otherwise; and whether ids are equal."""
    model = build_model(name, dtype)
    assert block_kernel(model.config, model.config.blocks[0], kernels, NATIVE_ATTENTION) is None
    (stored, outs), (pool, others) = (
        run_steps(model, each, NATIVE_ATTENTION, capture=True) for each in (NATIVE_KERNELS, kernels)
    )
    pairs = [(*out, *other) for out, other in zip(outs, others, strict=True)]
    assert all(hidden.dtype == other.dtype == jnp.dtype(dtype) for hidden, _, other, _ in pairs)
    rounded = np.mean(np.concatenate([hidden != other for hidden, _, other, _ in pairs]))
    return np.nanmean(np.abs(pool - stored)), rounded, all(np.array_equal(ids, own) for _, ids, _, own in pairs)


@pytest.mark.parametrize(("name", "dtype"), [("GLM-4.5", "bfloat16"), ("GPT-OSS", "float16")])
def test_pieces_whose_stream_has_the_dtype_of_the_weights_are_told_apart(name, dtype):
    """Others have the bits of one kernel: test_native_pieces.py."""
    difference, rounded, _ = differences(name, dtype, dataclasses.replace(PIECES, stream_dtype=None))
    assert difference > 4 * IN_PIECES[dtype] and rounded > 0.5


@pytest.mark.parametrize(
    ("name", "dtype"),
    thorough_but(
        EQUAL_PLAIN,
        [
            *((name, "float32") for name in CASES),
            ("GPT-OSS", "bfloat16"),
            ("GLM-4.5", "bfloat16"),
            (DENSE_BETWEEN, "bfloat16"),
        ],
    ),
)
def test_layers_of_a_family_in_one_kernel_equal_plain_code(name, dtype):
    model = build_model(name, dtype)
    for block in model.config.blocks:
        assert block_kernel(model.config, block, NATIVE_KERNELS, NATIVE_ATTENTION) is NATIVE_KERNELS.layer_stack
    pool, outs = run_steps(model, NATIVE_KERNELS, NATIVE_ATTENTION, capture=True)
    graphdef, state = nnx.split(model)
    wide = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state))
    plain_pool, expected = run_steps(wide, PLAIN, ATTENTION_BACKENDS["reference"], capture=True)
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        same = np.all(rows == plain_rows, axis=1)
        assert np.mean(same) >= SAME_ROWS[dtype] and np.max(np.abs(plain_hidden)) < 4
        difference = np.abs(hidden.astype(np.float32) - plain_hidden)[same]
        assert np.max(difference) < BOUNDS[dtype] and np.mean(difference) < MEANS[dtype]
    for index in range(model.config.num_layers if dtype == "float32" else 0):  # page 0 of a layer takes padding
        np.testing.assert_allclose(
            *(x[index * PAGES + 1 : (index + 1) * PAGES] for x in (pool, plain_pool)), atol=BOUNDS[dtype]
        )


def test_attention_layers_of_a_model_with_states_run_in_one_kernel_on_its_pages():
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6, width=4)
    delta = dataclasses.replace(MOE, mixer=DeltaAttention(shape=shape, eps=1e-6, layout="key heads"))
    model = random_model([delta, MOE, MOE, MOE], "float32")
    paths = [block_kernel(model.config, block, NATIVE_KERNELS, NATIVE_ATTENTION) for block in model.config.blocks]
    assert paths == [None, NATIVE_KERNELS.layer_stack]
    (pool, outs), (plain_pool, expected) = (
        run_steps(model, *kernels, capture=True)
        for kernels in ((NATIVE_KERNELS, NATIVE_ATTENTION), (PLAIN, ATTENTION_BACKENDS["reference"]))
    )
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        np.testing.assert_allclose(hidden, plain_hidden, atol=BOUNDS["float32"])
    for index in range(3):  # page 0 of a layer takes padding
        own = (each.pages[index * PAGES + 1 : (index + 1) * PAGES] for each in (pool, plain_pool))
        np.testing.assert_allclose(*own, atol=BOUNDS["float32"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("GPT-OSS", marks=pytest.mark.thorough),
        "groups",
        DENSE_BETWEEN,
        "a pattern behind dense layers",
    ],
)
def test_rows_that_are_given_run_as_in_plain_code(name):
    model = build_model(name, "float32")
    num_moe, rng = model.config.capture_spec.num_moe_layers, np.random.default_rng(4)
    ids = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (16, num_moe, 1)), axis=-1)[..., :2]
    ids[1::2] = 255  # of rows that are not played back
    routed = ids, np.arange(16) % 2 == 0
    (_, outs), (_, expected) = (
        run_steps(model, *kernels, capture=True, routed=[routed] * 2)
        for kernels in ((NATIVE_KERNELS, NATIVE_ATTENTION), (PLAIN, ATTENTION_BACKENDS["reference"]))
    )
    for (hidden, rows), (plain_hidden, plain_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, plain_rows)
        np.testing.assert_allclose(hidden, plain_hidden, atol=BOUNDS["float32"])


class Prompts:
    """Requests of up to 40 tokens with pages of their own, and a step that takes any tokens of them."""

    PAGE, WIDTH, REQUESTS, TOKENS = 4, 10, 3, 64

    def __init__(self, name, dtype):
        self.model = build_model(name, dtype)
        config, self.num_pages = self.model.config, 1 + self.REQUESTS * self.WIDTH
        graphdef, self.state = nnx.split(self.model)
        spec = ProgramSpec(
            graphdef=graphdef,
            capture=config.capture_spec,
            kernels=NATIVE_KERNELS,
            attention=NATIVE_ATTENTION,
            num_pages=self.num_pages,
            raw_logprobs=False,
        )
        self.shape = BatchShape(
            mode=ForwardMode.EXTEND, num_tokens=self.TOKENS, num_requests=self.REQUESTS, table_width=self.WIDTH
        )
        self.table = 1 + np.arange(self.REQUESTS * self.WIDTH).reshape(self.REQUESTS, self.WIDTH)
        self.tokens = np.random.default_rng(5).integers(0, 50, (self.REQUESTS, 40))
        self.pool = jnp.full((config.num_layers * self.num_pages, self.PAGE, 4, 8), jnp.nan)
        self.run = jax.jit(functools.partial(forward, spec=spec, shape=self.shape))

    def step(self, chunks, pool):
        """Hidden states and rows of each (request, first position, tokens), and the pool."""
        counts = [count for _, _, count in chunks]
        ends = np.cumsum([0, *counts, *[0] * (self.REQUESTS - len(chunks))])
        words = packed(
            self.shape,
            num_tokens=ends[-1],
            token_ids=np.concatenate([self.tokens[row, start : start + count] for row, start, count in chunks]),
            positions=np.concatenate([np.arange(start, start + count) for _, start, count in chunks]),
            token_rows=np.repeat(np.arange(len(chunks)), counts),
            query_starts=ends,
            seq_lens=[start + count for _, start, count in chunks],
            page_table=self.table[[row for row, _, _ in chunks]],
        )
        pool, out = self.run(self.state, pool, jnp.zeros(4, jnp.int32), words)
        columns = (bits(out.hidden), np.asarray(out.rows))
        return [
            [column[begin:end] for column in columns] for begin, end in itertools.pairwise(ends[: len(chunks) + 1])
        ], pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["GPT-OSS", "GLM-4.5", "gated heads, offset norms"])
def test_how_a_prompt_is_cut_and_what_is_beside_it_changes_no_bit(name, dtype):
    case = Prompts(name, dtype)
    ([whole], _) = case.step([(1, 0, 33)], case.pool)
    for cuts in ((1,) * 3 + (30,), (20, 13), (32, 1), (9, 2, 22)):
        pool, start, parts = case.pool, 0, []
        for count in cuts:
            outs, pool = case.step([(2, start, 5), (1, start, count), (0, start, 1)], pool)
            parts.append(outs[1])
            start += count
        for actual, expected in zip(zip(*parts, strict=True), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(actual), expected)
