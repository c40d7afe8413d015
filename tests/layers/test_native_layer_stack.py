"""A run of layers as one native kernel against the layers one by one in plain code: streams, pool, ids; padding; what
it refuses; and the native choice of a token against plain code."""

import dataclasses
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_attention import make_step
from layers.test_scoring_funcs import SPECS
from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.aot_programs import lowerings, sampler_key
from routed_experts.layers.attention import ATTENTION_BACKENDS
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.layer_stack import RunRouting, StackOffsets, StackWeights, StepInputs
from routed_experts.layers.logprobs import token_logprobs
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.native.layer_stack import NATIVE_LAYER_STACK, native_layer_stack
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS, native_argmax
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.routing import RouterSpec, RoutingBlock
from routed_experts.layers.sampling import best_token
from support.model_steps import PAGES, drifted_rows, run_steps, tiny_model
from support.routing_blocks import empty_block
from support.small_runner import DECODE, build

pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = Kernels(moe=MOE_BACKENDS["reference"])
BOUNDS = {"float32": 2e-5, "bfloat16": 6e-2}


@functools.cache
def steps(whole, *, dtype="float32", capture=True, renormalize=True):
    model = tiny_model(dtype, renormalize=renormalize)
    if whole:
        return run_steps(model, NATIVE_KERNELS, NATIVE_ATTENTION, capture=capture)
    return run_steps(model, PLAIN, ATTENTION_BACKENDS["reference"], capture=capture)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_pieces_have_the_bits_of_the_stack(dtype):
    """A target whose layers an EAGLE-3 head reads runs in pieces, and samples what the whole stack samples."""
    model = tiny_model(dtype)
    pieces = dataclasses.replace(NATIVE_KERNELS, layer_stack=None)
    found = [run_steps(model, kernels, NATIVE_ATTENTION, capture=True) for kernels in (NATIVE_KERNELS, pieces)]
    for actual, expected in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_run_equals_its_layers_in_plain_code(dtype, renormalize):
    (pool, outs), (expected_pool, expected) = (
        steps(whole, dtype=dtype, renormalize=renormalize) for whole in (True, False)
    )
    for (hidden, rows), (expected_hidden, expected_rows) in zip(outs, expected, strict=True):
        assert np.mean(rows != expected_rows) <= (
            0 if dtype == "float32" else 0.1
        )  # bfloat16 may decide a tie otherwise
        np.testing.assert_allclose(hidden.astype(np.float32), expected_hidden.astype(np.float32), atol=BOUNDS[dtype])
    for layer in range(3):  # page 0 of a layer takes padding in the one and nothing in the other
        actual, plain = (x[layer * PAGES + 1 : (layer + 1) * PAGES] for x in (pool, expected_pool))
        np.testing.assert_allclose(actual, plain, atol=BOUNDS[dtype])


@pytest.mark.parametrize("renormalize", [True, False])
def test_rows_that_are_given_run_as_in_plain_code(renormalize):
    """Of half of the tokens, in all MoE layers, in an order that no router gives."""
    ids, valid = drifted_rows()
    model, replay = tiny_model(renormalize=renormalize), {"capture": True, "routed": [(ids, valid)] * 2}
    (_, outs), (_, expected) = (
        run_steps(model, *kernels, **replay)
        for kernels in ((NATIVE_KERNELS, NATIVE_ATTENTION), (PLAIN, ATTENTION_BACKENDS["reference"]))
    )
    for (hidden, rows), (expected_hidden, expected_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_array_equal(
            rows[valid[: len(rows)]], ids[: len(rows)].reshape(len(rows), -1)[valid[: len(rows)]]
        )
        np.testing.assert_allclose(hidden, expected_hidden, atol=BOUNDS["float32"])
    assert not np.array_equal(outs[0][1], steps(True, renormalize=renormalize)[1][0][1])


def test_capture_changes_no_bit():
    (pool_on, on), (pool_off, off) = steps(True, capture=True), steps(True, capture=False)
    np.testing.assert_array_equal(pool_on, pool_off)
    for (hidden_on, rows_on), (hidden_off, rows_off) in zip(on, off, strict=True):
        assert rows_on is not None and rows_off is None
        np.testing.assert_array_equal(hidden_on, hidden_off)


@dataclasses.dataclass(frozen=True)
class StackCase:
    """What a run takes, of a step and of random weights."""

    x: jax.Array
    arrays: StackWeights
    step: StepInputs
    attend: PagedAttend
    pool: jax.Array
    block: RoutingBlock | None
    spec: RouterSpec
    routed: RunRouting | None = None

    def call(self, x, pool, block):
        """Stream, norm, pool, and what is recorded: ids and weights."""
        offsets = StackOffsets(first_layer=0, first_moe_layer=1)
        out = native_layer_stack(x, self.arrays, self.step, self.attend, pool, block, self.routed, offsets, self.spec)
        return (*out[:3], *jax.tree.leaves(out[3]))

    def run(self, **changes):
        case = dataclasses.replace(self, **changes)
        return jax.block_until_ready(jax.jit(case.call)(case.x, case.pool, case.block))


def build_case(
    *, dtype=jnp.float32, layers=2, experts=5, top_k=2, hidden=40, width=24, dim=8, num_tokens=24, num_requests=5
):
    """Two requests in a padded step, over the pool of two layers."""
    rng, heads, groups = np.random.default_rng(5), 4, 2
    made = make_step(
        [(3, 7), (20, 1)], page_size=8, heads=heads, groups=groups, num_tokens=num_tokens, num_requests=num_requests
    )

    def weights(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), dtype)

    sizes = {"input_norm": hidden, "post_norm": hidden, "q_norm": dim, "k_norm": dim}
    norms = {name: jnp.ones((layers, size), dtype) for name, size in sizes.items()}
    arrays = StackWeights(
        **norms,
        next_norm=jnp.ones(hidden, dtype),
        qkv=weights(layers, hidden, (heads + 2 * groups) * dim),
        out=weights(layers, heads * dim, hidden),
        router=weights(layers, hidden, experts) * 3,
        gate_up=weights(layers * experts, hidden, 2 * width),
        down=weights(layers * experts, width, hidden),
        eps=1e-6,
    )
    pages = 20
    pool = jnp.asarray(rng.standard_normal((layers * pages, 8, 2 * groups, dim)), jnp.float32)
    table = jnp.asarray(
        np.arange(num_requests * made.batch.page_table.shape[1]).reshape(num_requests, -1) % pages, jnp.int32
    )
    batch = dataclasses.replace(made.batch, page_table=table)
    angles = jnp.asarray(rng.standard_normal((2, num_tokens, dim)), jnp.float32)
    return StackCase(
        x=jnp.asarray(rng.standard_normal((num_tokens, hidden)), dtype),
        arrays=arrays,
        step=StepInputs(cos=angles[0], sin=angles[1], valid=batch.valid),
        attend=PagedAttend(backend=NATIVE_ATTENTION, batch=batch, num_pages=pages),
        pool=pool,
        block=empty_block((layers + 1) * top_k, num_tokens),
        spec=RouterSpec(num_experts=experts, top_k=top_k, renormalize=True),
    )


def test_padding_is_left_out_and_changes_nothing():
    case = build_case()
    real = int(np.sum(case.step.valid))
    assert real == 8
    stream, normed, pool, ids, weights = (np.asarray(array) for array in case.run())
    noisy = case.run(x=case.x.at[real:].set(jnp.nan))
    for got, expected in zip(noisy, (stream, normed, pool, ids, weights), strict=True):
        np.testing.assert_array_equal(
            got[:real] if got is noisy[0] else got, expected[:real] if got is noisy[0] else expected
        )
    assert not np.any(normed[real:]) and np.all(np.isfinite(normed))
    np.testing.assert_array_equal(stream[real:], case.x[real:])
    for recorded in (ids, weights):
        assert np.all(recorded[:2] == -7) and np.all(recorded[2:, real:] == -7), "columns of other layers, of padding"
    assert np.all((ids[2:, :real] >= 0) & (ids[2:, :real] < 5))
    np.testing.assert_allclose(weights[2:, :real].reshape(2, 2, real).sum(axis=1), 1.0, atol=1e-6)


def test_weights_are_recorded_beside_the_same_ids():
    """Without a block of weights, the same kernel gives the same bits in all else."""
    case = build_case()
    both = case.run()
    alone = case.run(block=dataclasses.replace(case.block, weights=None))
    assert len(alone) == 4
    for got, expected in zip(alone, both[:4], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_same_tokens_in_a_wider_step_are_the_same_by_a_bit():
    narrow, wide = build_case(num_tokens=8, num_requests=2), build_case(num_tokens=40, num_requests=6)
    shared = {"arrays": narrow.arrays, "pool": narrow.pool, "x": wide.x.at[:8].set(narrow.x)}
    table = wide.attend.batch.page_table.at[:2].set(narrow.attend.batch.page_table)
    attend = dataclasses.replace(wide.attend, batch=dataclasses.replace(wide.attend.batch, page_table=table))
    angles = {name: getattr(wide.step, name).at[:8].set(getattr(narrow.step, name)) for name in ("cos", "sin")}
    a, b = narrow.run(), wide.run(**shared, attend=attend, step=dataclasses.replace(wide.step, **angles))
    np.testing.assert_array_equal(a[1], b[1][:8])
    np.testing.assert_array_equal(a[2], b[2])
    np.testing.assert_array_equal(a[3], b[3][:, :8])
    np.testing.assert_array_equal(a[4], b[4][:, :8])


def test_a_run_is_updated_in_place():
    """The pool is neither copied nor held twice: its output is its input, and temporaries are smaller than it."""
    case = build_case()
    pool = jnp.tile(case.pool, (20, 1, 1, 1))
    compiled = jax.jit(case.call, donate_argnums=(0, 1, 2)).lower(case.x, pool, case.block).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes // 4


def routing(case, ids, valid=True):
    num_tokens = case.x.shape[0]
    return RunRouting(jnp.asarray(ids), jnp.asarray(np.broadcast_to(valid, num_tokens)))


@pytest.mark.parametrize("renormalize", [True, False])
def test_its_own_rows_and_no_rows_give_the_live_run_by_a_bit(renormalize):
    case = build_case()
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, renormalize=renormalize))
    live = case.run()
    own = np.asarray(live[3])[2:].reshape(2, 2, -1).swapaxes(1, 2)  # [layers, N, K]; padding holds what no router gives
    half = np.arange(case.x.shape[0]) % 2 == 0
    for ids, valid in (
        (own, own[0, :, 0] >= 0),
        (np.where(half[:, None], own, 99), half & (own[0, :, 0] >= 0)),
        (own * 0 + 99, False),
    ):
        for got, expected in zip(case.run(routed=routing(case, ids, valid)), live, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_what_does_not_name_an_expert_is_an_error_where_it_would_run():
    case = build_case()
    wrong = np.zeros((2, case.x.shape[0], 2), np.uint8) + np.array([0, 5], np.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="names an expert that does not exist"):
        case.run(routed=routing(case, wrong))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape("rows to replay are [M, N, K], and [N]")):
        case.run(routed=routing(case, wrong[:1], False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrays": {"gate_up": jnp.bfloat16}}, "the weights of a stack have one dtype"),
        ({"x": jnp.bfloat16}, "the stream is float32, or has the dtype of the weights"),
        ({"positions": 10_000}, "query_starts or positions are outside the step or its page table"),
        ({"token_rows": 3}, "query_starts or positions are outside the step or its page table"),
        ({"page_table": 10_000}, "query_starts or positions are outside the step or its page table"),
        ({"num_pages": 21}, "the pool has the pages of all layers"),
        ({"block": slice(0, 4)}, "the block of ids has the rows of the stack"),
        ({"weights": slice(0, 4)}, "the block of combine weights has the shape of that of the ids"),
        ({"arrays": {"down": slice(0, 5)}}, r"down of layer 0 of the pattern is \[5, 24, 40\], not \[10, 24, 40\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_an_error_and_not_a_crash(change, message):
    case = build_case()
    attend, case = case.attend, dataclasses.replace(case, x=case.x.astype(change.get("x", case.x.dtype)))
    for name, new in change.get("arrays", {}).items():
        old = getattr(case.arrays, name)
        changed = old[new] if isinstance(new, slice) else old.astype(new)
        case = dataclasses.replace(case, arrays=dataclasses.replace(case.arrays, **{name: changed}))
    if "num_pages" in change:
        attend = dataclasses.replace(attend, num_pages=change["num_pages"])
    for name in change.keys() & {"positions", "token_rows", "page_table"}:
        array = getattr(attend.batch, name).at[0 if name == "page_table" else 2].set(change[name])
        attend = dataclasses.replace(attend, batch=dataclasses.replace(attend.batch, **{name: array}))
    if "block" in change:
        case = dataclasses.replace(case, block=RoutingBlock(case.block.ids[change["block"]]))
    if "weights" in change:
        weights = case.block.weights[change["weights"]]
        case = dataclasses.replace(case, block=dataclasses.replace(case.block, weights=weights))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        case.run(attend=attend)


def test_it_knows_every_law():
    assert all(NATIVE_LAYER_STACK.supports(spec) for spec in SPECS.values())


def test_many_runs_one_after_another_are_all_the_same():
    """Helpers come late, leave late and meet loops of every length: whatever they do, each item is run once."""
    case = build_case(num_tokens=24)
    first = case.run()
    run = jax.jit(case.call)
    for _ in range(300):
        for got, expected in zip(run(case.x, case.pool, case.block), first, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_what_lies_between_its_loops_is_not_borrowed_anew_for_every_step():
    case = build_case(num_tokens=512)
    memory = (
        jax.jit(case.call, donate_argnums=(0, 1, 2)).lower(case.x, case.pool, case.block).compile().memory_analysis()
    )
    assert memory.temp_size_in_bytes < case.x.nbytes


def test_runs_at_once_have_memory_of_their_own():
    cases = [build_case(num_tokens=size, hidden=hidden) for size, hidden in ((24, 40), (400, 40), (24, 56), (100, 24))]
    expected = [case.run() for case in cases]

    def many(case, expected_outs):
        run = jax.jit(case.call)
        for _ in range(100):
            for got, alone in zip(run(case.x, case.pool, case.block), expected_outs, strict=True):
                np.testing.assert_array_equal(got, alone)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(many, cases, expected))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 7), (8, 16), (5, 313), (2, 8192)])
def test_choice_equals_plain_code(rows, vocabulary):
    logits = np.random.default_rng(3).standard_normal((rows, vocabulary)).astype(np.float32) * 4
    logits[0] = np.round(logits[0])  # ties go to the lower id
    tokens, logprobs = jax.jit(native_argmax)(jnp.asarray(logits))
    assert np.array_equal(tokens, best_token(jnp.asarray(logits)))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_allclose(logprobs, token_logprobs(jnp.asarray(logits), tokens), atol=3e-6)


def test_choice_among_scores_that_are_not_numbers():
    logits = np.random.default_rng(4).standard_normal((5, 40)).astype(np.float32)
    logits[0, 3], logits[1, :20], logits[2], logits[3, 39] = np.nan, -np.inf, -np.inf, np.inf
    tokens, logprobs = jax.jit(native_argmax)(jnp.asarray(logits))
    plain = best_token(jnp.asarray(logits))
    np.testing.assert_array_equal(tokens, plain)
    expected = token_logprobs(jnp.asarray(logits), plain)
    np.testing.assert_array_equal(np.isnan(logprobs), np.isnan(expected))
    np.testing.assert_allclose(np.asarray(logprobs)[[1, 4]], np.asarray(expected)[[1, 4]], atol=3e-6)


def test_an_engine_on_cpu_takes_both():
    """One kernel for each block of layers of the tiny model, dense and MoE; none for their parts, one for the greedy
    choice."""
    runner = build()
    jobs = lowerings(runner.state, runner.spec, runner.config)
    forward, greedy = (
        jobs["forward", DECODE]().as_text(),
        jobs[sampler_key(runner.spec, DECODE, SamplingMode.GREEDY)]().as_text(),
    )
    assert forward.count("@RexLayerStack") == 2 and not re.search(r"@Rex(Experts|Router|RecordingRouter)\b", forward)
    assert greedy.count("@RexArgmax") == 1
