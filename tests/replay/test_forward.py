"""The training forward: replay is bitwise where it must be, reaches the router where it should, and agrees with the
engine."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts import Engine, InvalidRequestError, RoutingAlignmentError, extract_routed_experts_from_meta_info
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import RoutedBatch, forward
from support import fast_compile
from support.kernels import MOE
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

LENGTH, LAYERS, MOE_LAYERS, EXPERTS, TOP_K = 12, 3, 2, 16, 4
# One in array code and one in C++. Of the others every run compares the logits of replayed rows, within a tolerance.
BACKENDS = [
    name if name in ("grouped", "native") else pytest.param(name, marks=pytest.mark.thorough) for name in sorted(MOE)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS, tokenizer=False, hidden_size=32
    )


@pytest.fixture(scope="module")
def parts(folder):
    opened = ModelFolder.open(folder)
    return nnx.split(opened.load(opened.dtype("auto")))


@pytest.fixture(scope="module")
def run(parts):
    """The jitted forward; `run.traces` grows with each trace."""
    return jitted(parts)


@pytest.fixture(scope="module")
def quick_run(parts):
    """The same, compiled fast: where logits are compared with a tolerance."""
    return jitted(parts, compiler_options=fast_compile.OPTIONS)


def jitted(parts, **options):
    graphdef, own_state = parts
    traces = []

    @functools.partial(jax.jit, static_argnames=("backend", "remat"), **options)
    def traced(state, tokens, routed, segment_ids, positions, backend, remat):
        traces.append(1)
        kind = MOE[backend]
        options = dict(segment_ids=segment_ids, positions=positions, backend=kind, remat=remat)
        return forward(nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True, **options)

    def call(tokens, routed=None, *, state=own_state, segment_ids=None, positions=None, backend="grouped", remat=False):
        return traced(state, tokens, routed, segment_ids, positions, backend, remat)

    call.traces = traces
    return call


def random_tokens(batch=2, length=LENGTH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB_SIZE, (batch, length)), jnp.int32)


def drifted_ids(tokens, seed=1):
    """Distinct random experts in random order, for every token and MoE layer."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (*tokens.shape, MOE_LAYERS, 1)), axis=-1)[
        ..., :TOP_K
    ]


def routed_batch(ids, valid=True, pad=False):
    """Of ids from the host: those of a program are bound to a device, for which another program is compiled."""
    return RoutedBatch(
        jnp.asarray(np.asarray(ids), jnp.uint8),
        *(jnp.asarray(np.broadcast_to(flags, ids.shape[:2])) for flags in (valid, pad)),
    )


def some_rows(tokens, seed=2):
    return np.random.default_rng(seed).random(tokens.shape) < 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_valid_row_is_live_by_the_bit_whatever_the_rows_hold(run, backend):
    tokens = random_tokens()
    live = run(tokens, backend=backend)
    assert live.ids.dtype == jnp.uint8 and live.ids.shape == (*tokens.shape, MOE_LAYERS, TOP_K)
    for filler in (0, 255):
        ids = np.full(live.ids.shape, filler)
        replayed = run(tokens, routed_batch(ids, valid=False), backend=backend)
        assert np.array_equal(replayed.logits, live.logits)
        assert np.array_equal(replayed.ids, live.ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replay_of_its_own_ids_is_the_same_by_the_bit(run, backend):
    tokens = random_tokens(seed=3)
    live = run(tokens, backend=backend)
    for valid in (True, some_rows(tokens)):
        again = run(tokens, routed_batch(live.ids, valid=valid), backend=backend)
        assert np.array_equal(again.logits, live.logits) and np.array_equal(again.ids, live.ids)


def test_valid_rows_run_what_they_were_given_in_their_order(run):
    tokens = random_tokens(seed=4)
    ids, valid = drifted_ids(tokens), some_rows(tokens)
    executed, live = np.asarray(run(tokens, routed_batch(ids, valid=valid)).ids), np.asarray(run(tokens).ids)
    assert np.array_equal(executed[valid], ids[valid])
    assert np.array_equal(executed[~valid][:, 0], live[~valid][:, 0])  # before the first MoE layer nothing was forced
    assert not np.array_equal(executed[~valid][:, 0], ids[~valid][:, 0])


def test_other_ids_give_other_logits_and_backends_agree_on_them(quick_run):
    tokens = random_tokens(seed=5)
    batch = routed_batch(drifted_ids(tokens))
    replayed = {backend: quick_run(tokens, batch, backend=backend) for backend in MOE}
    assert np.max(np.abs(replayed["grouped"].logits - quick_run(tokens).logits)) > 0.1
    for backend, result in replayed.items():
        np.testing.assert_allclose(result.logits, replayed["reference"].logits, atol=1e-4, err_msg=backend)


def test_an_id_that_is_no_expert_is_refused_where_ids_can_be_read(parts):
    """Outside jit; ids of rows that are not valid are never read."""
    model, tokens = nnx.merge(*parts), jnp.zeros((2, 5), jnp.int32)
    ids = np.tile(np.arange(TOP_K, dtype=np.uint8), (2, 5, MOE_LAYERS, 1))
    ids[1, 3, 1, 2] = 77
    valid, pad = np.ones((2, 5), bool), np.zeros((2, 5), bool)
    for array in (np.asarray, jnp.asarray):
        with pytest.raises(RoutingAlignmentError, match="row 1, position 3, hidden layer 2, slot 2: id 77; expected 0"):
            forward(model, tokens, routed=RoutedBatch(array(ids), array(valid), array(pad)))
    valid[1, 3] = False
    RoutedBatch(ids, valid, pad).check(model.config.capture_spec)


def test_a_place_with_a_row_and_no_token_and_an_expert_twice_are_refused_where_they_can_be_read(parts):
    model, tokens = nnx.merge(*parts), jnp.zeros((2, 5), jnp.int32)
    ids = np.tile(np.arange(TOP_K, dtype=np.uint8), (2, 5, MOE_LAYERS, 1))
    valid, pad = np.ones((2, 5), bool), np.zeros((2, 5), bool)
    pad[0, 4] = True
    with pytest.raises(RoutingAlignmentError, match="row 0, position 4 is valid and pad"):
        forward(model, tokens, routed=RoutedBatch(ids, valid, pad))
    ids[1, 2, 0, 3] = ids[1, 2, 0, 0]
    with pytest.raises(RoutingAlignmentError, match=r"row 1, position 2, hidden layer 1: experts \[0, 1, 2, 0\]"):
        forward(model, tokens, routed=RoutedBatch(ids, valid, np.zeros((2, 5), bool)))


@pytest.mark.parametrize("weights", [False, True], ids=["ids", "ids and weights"])
def test_under_jit_a_valid_id_that_is_no_expert_gives_nan_in_its_sequence_alone(parts, weights):
    graphdef, state = parts
    tokens, ids = random_tokens(seed=14), drifted_ids(random_tokens(seed=14)).astype(np.int32)
    given = jnp.full(ids.shape, 0.25, jnp.float32) if weights else None

    @functools.partial(jax.jit, compiler_options=fast_compile.OPTIONS)
    def run(state, routed):
        return forward(nnx.merge(graphdef, state), tokens, routed=routed).logits

    for bad in (-1, -2, -EXPERTS, -EXPERTS - 1, EXPERTS, 255):
        ids[1, 3, 1, 2] = bad
        flags = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, bool)
        logits = np.asarray(run(state, RoutedBatch(jnp.asarray(ids), *flags, given)))
        assert np.isnan(logits[1, 3]).all(), bad
        assert np.isfinite(logits[0]).all() and np.isfinite(logits[1, :3]).all(), bad
        valid = flags[0].at[1, 3].set(False)
        assert np.isfinite(run(state, RoutedBatch(jnp.asarray(ids), valid, flags[1], given))).all(), bad


@pytest.mark.parametrize(
    ("named", "match"),
    [
        (dict(tokens=[[1, 2]]), "tokens is list"),
        (dict(tokens=np.zeros(5, np.int32)), r"tokens is int32\[5\]"),
        (dict(tokens=np.zeros((2, 5), np.float32)), r"tokens is float32\[2, 5\]"),
        (dict(tokens=np.zeros((0, 5), np.int32)), r"tokens is int32\[0, 5\]"),
        (dict(tokens=np.zeros((0, 5), int), positions=np.zeros((0, 5), int)), r"tokens is int64\[0, 5\]"),
        (dict(tokens=np.full((2, 5), -1)), r"tokens\[0, 0\] is -1"),
        (dict(tokens=np.full((2, 5), VOCAB_SIZE)), rf"give ids of 0 to {VOCAB_SIZE - 1}"),
        (dict(positions=np.zeros((5, 2), np.int32)), r"positions is int32\[5, 2\]; give an array of integers \[2, 5\]"),
        (dict(positions=np.zeros(5, np.int32)), r"positions is int32\[5\]"),
        (dict(segment_ids=np.zeros((5, 2), np.int32)), r"segment_ids is int32\[5, 2\]"),
        (dict(segment_ids=np.zeros((2, 5), bool)), r"segment_ids is bool\[2, 5\]"),
        (dict(positions=np.full((2, 5), -1)), r"positions\[0, 0\] is -1; give positions of 0 to 2147483647"),
        (dict(positions=np.full((2, 5), 1 << 32)), r"positions\[0, 0\] is 4294967296; give positions of 0 to"),
        (dict(positions=np.full((2, 5), 1 << 31, np.uint32)), r"positions\[0, 0\] is 2147483648; give positions"),
        (dict(segment_ids=np.full((2, 5), 1 << 32)), r"segment_ids\[0, 0\] is 4294967296; give ids of -2147483647 to"),
        (dict(segment_ids=np.full((2, 5), 1 << 63, np.uint64)), r"segment_ids\[0, 0\] is 9223372036854775808; give"),
        (dict(segment_ids=jnp.full((2, 5), -(1 << 31))), r"segment_ids\[0, 0\] is -2147483648; give ids of"),
        (
            dict(backend="grouped"),
            "backend='grouped' is no MoeBackend; give one of MOE_BACKENDS: 'reference', 'grouped' or, without "
            "gradients, 'tiled'",
        ),
    ],
)
def test_arrays_that_are_no_sequences_are_refused_by_name(parts, named, match):
    with pytest.raises(InvalidRequestError, match=match) as refused:
        forward(nnx.merge(*parts), **({"tokens": np.zeros((2, 5), np.int32)} | named))
    assert refused.value.param == next(iter(named))


LIMIT = 6  # tokens
HALVES = np.repeat(np.arange(2), LIMIT)[None]
TOO_LONG = {  # arrays for 12 tokens, and what the refusal names
    "one sequence": ({}, "tokens"),
    "a segment": (dict(segment_ids=np.repeat(np.arange(2), (LIMIT - 1, LIMIT + 1))[None]), "tokens"),
    "positions": (dict(positions=np.arange(LENGTH)[None] % LIMIT + 1), "positions"),
    "padding that is too short": (dict(pad=np.arange(LENGTH)[None] < LIMIT - 1), "tokens"),
}
SHORT_ENOUGH = {
    "segments": dict(segment_ids=HALVES),
    "positions": dict(positions=np.arange(LENGTH)[None] % LIMIT),
    "padding": dict(pad=np.arange(LENGTH)[None] < LIMIT),
    "padding has any position": dict(pad=np.arange(LENGTH)[None] < LIMIT, positions=np.arange(LENGTH)[None][:, ::-1]),
}


def limited_forward(parts, tokens, *, pad=None, **arrays):
    """A forward of a model whose positions hold for LIMIT tokens."""
    model = nnx.merge(*parts)
    model.config = dataclasses.replace(model.config, position_limit=LIMIT)
    routed = None if pad is None else routed_batch(drifted_ids(tokens), valid=~pad, pad=pad)
    return forward(model, tokens, routed=routed, **arrays).logits


@pytest.mark.parametrize("case", TOO_LONG)
def test_sequences_are_refused_above_the_length_up_to_which_positions_hold(parts, case):
    arrays, param = TOO_LONG[case]
    too_long = rf"sequence of \d+ tokens, above the {LIMIT} that"
    expected = f"positions hold {LIMIT}, and this model computes positions of 0 to {LIMIT - 1}"
    with pytest.raises(InvalidRequestError, match=expected if param == "positions" else too_long) as refused:
        limited_forward(parts, random_tokens(1), **arrays)
    assert refused.value.param == param


def test_the_length_of_a_sequence_is_refused_under_jit_too(parts):
    tokens = random_tokens(1)
    with pytest.raises(InvalidRequestError, match=f"sequence of {LENGTH} tokens, above the {LIMIT} that"):
        jax.eval_shape(functools.partial(limited_forward, parts), tokens)
    assert jax.eval_shape(functools.partial(limited_forward, parts), tokens[:, :LIMIT]).shape[1] == LIMIT


@pytest.mark.parametrize("case", SHORT_ENOUGH)
def test_longer_rows_of_short_sequences_are_computed(parts, case):
    tokens = random_tokens(1)
    assert limited_forward(parts, tokens, **SHORT_ENOUGH[case]).shape[1] == LENGTH


def test_rows_in_another_container_are_refused(parts):
    with pytest.raises(RoutingAlignmentError, match="routed is tuple; give a RoutedBatch"):
        forward(nnx.merge(*parts), np.zeros((2, 5), np.int32), routed=(1, 2))


@pytest.mark.parametrize("name", ["ids", "valid", "pad", "weights"])
def test_rows_that_are_no_arrays_are_refused_by_name(parts, name):
    tokens = random_tokens(1, 3)
    batch = routed_batch(drifted_ids(tokens))
    for value in ([0.5], None if name != "weights" else [1]):
        with pytest.raises(RoutingAlignmentError, match=rf"routed.{name} is (None|a list of 1); expected"):
            forward(nnx.merge(*parts), tokens, routed=dataclasses.replace(batch, **{name: value}))


def test_arrays_of_the_host_may_have_another_byte_order(parts):
    """The logits are those of the same values in the machine's order, by the bit."""
    model, tokens = nnx.merge(*parts), np.asarray(random_tokens(1, 6, seed=19))
    order = "<" if sys.byteorder == "big" else ">"
    ids = drifted_ids(tokens)
    valid, pad = np.arange(6)[None] > 2, np.arange(6)[None] == 0
    weights = np.random.default_rng(2).random(ids.shape, np.float32)
    arrays = dict(positions=np.arange(6)[None] + 2, segment_ids=np.arange(6)[None] // 3)
    usual = forward(model, tokens, routed=RoutedBatch(ids, valid, pad, weights), return_routed=True, **arrays)
    swapped = {name: array.astype(f"{order}i4") for name, array in arrays.items()}
    for dtype in ("u2", "i4"):
        rows = RoutedBatch(ids.astype(f"{order}{dtype}"), valid, pad, weights.astype(f"{order}f4"))
        output = forward(model, tokens.astype(f"{order}i4"), routed=rows, return_routed=True, **swapped)
        assert np.array_equal(output.logits, usual.logits) and np.array_equal(output.ids, usual.ids)


def test_segments_are_distinct_up_to_the_ends_of_int32(parts):
    model, tokens = nnx.merge(*parts), random_tokens(1, 6, seed=20)
    halves = np.arange(6)[None] // 3
    usual = forward(model, tokens, segment_ids=halves).logits
    for ids in (1 - (1 << 31), (1 << 31) - 1):
        wide = np.where(halves == 0, ids, 5)
        assert np.array_equal(forward(model, tokens, segment_ids=wide).logits, usual)


def test_positions_and_segments_of_padding_are_not_read(parts):
    model, tokens = nnx.merge(*parts), random_tokens(1, 6, seed=21)
    pad = np.arange(6)[None] < 2
    batch = routed_batch(drifted_ids(tokens), valid=~pad, pad=pad)
    usual = forward(model, tokens, routed=batch, positions=np.arange(6)[None], segment_ids=np.zeros((1, 6), int))
    for filler in (-1, -(1 << 31)):
        arrays = dict(positions=np.where(pad, filler, np.arange(6)), segment_ids=np.where(pad, filler, 0))
        output = forward(model, tokens, routed=batch, **arrays)
        assert np.array_equal(output.logits[:, 2:], usual.logits[:, 2:])


def test_what_stands_where_there_is_no_token_is_not_read(parts):
    tokens = np.zeros((2, 5), np.int32)
    tokens[:, 0] = -100
    ids = np.tile(np.arange(TOP_K, dtype=np.uint8), (2, 5, MOE_LAYERS, 1))
    pad = np.zeros((2, 5), bool)
    pad[:, 0] = True
    (graphdef, state), tokens = parts, jnp.asarray(tokens)

    @functools.partial(jax.jit, compiler_options=fast_compile.OPTIONS)
    def run(state):  # tokens and rows can be read: they are no arguments
        return forward(nnx.merge(graphdef, state), tokens, routed=RoutedBatch(ids, ~pad, pad)).logits

    assert np.isfinite(run(state)[:, 1:]).all()


def test_new_ids_and_new_flags_trace_nothing(run):
    tokens = random_tokens(seed=6)
    run(tokens, routed_batch(drifted_ids(tokens)))
    before = len(run.traces)
    for seed in range(3):
        flags = dict(valid=some_rows(tokens, seed), pad=np.arange(LENGTH) > 9 + seed)
        run(random_tokens(seed=seed), routed_batch(drifted_ids(tokens, seed), **flags))
    assert len(run.traces) == before


@pytest.fixture(scope="module")
def value_and_grad(parts):
    """The mean negative log probability of each next token, and its gradient in all weights; one program for each
    form, for all tests."""

    @functools.partial(
        jax.jit, static_argnames="remat", compiler_options=fast_compile.OPTIONS
    )  # gradients are compared with a tolerance
    def compute(state, tokens, routed, remat):
        def loss(state):
            logits = forward(nnx.merge(parts[0], state), tokens, routed=routed, remat=remat).logits[:, :-1]
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))

        return jax.value_and_grad(loss)(state)

    return lambda state, tokens, routed=None, remat=False: compute(state, tokens, routed, remat=remat)


def assert_close(actual, other, atol):
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, leaf), expected in zip(leaves, jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("replay", [True, False])
def test_gradients_with_and_without_remat_agree(parts, value_and_grad, replay):
    tokens = random_tokens(seed=7)
    routed = routed_batch(drifted_ids(tokens), valid=some_rows(tokens)) if replay else None
    (plain_loss, plain), (remat_loss, remat) = (
        value_and_grad(parts[1], tokens, routed, remat=remat) for remat in (False, True)
    )
    assert float(plain_loss) == pytest.approx(float(remat_loss), abs=1e-6)
    assert_close(plain, remat, 1e-6)


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_gradient_through_the_tiled_backend_is_refused_with_those_that_have_one(parts, remat):
    tokens = random_tokens(seed=7)

    def loss(scale, **options):
        state = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), parts[1])
        options = dict(backend=MOE["tiled"], remat=remat, balance_on="executed", **options)
        output = forward(nnx.merge(parts[0], state), tokens, **options)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(output) if jnp.issubdtype(leaf.dtype, jnp.floating))

    one = jnp.float32(1)
    for gradient in (jax.grad(loss), jax.jit(jax.value_and_grad(loss))):
        with pytest.raises(InvalidRequestError, match=r"'tiled' has no gradients.*'reference', 'grouped'") as caught:
            gradient(one)
        assert caught.value.param == "backend"
    value, slope = jax.jit(lambda scale: jax.jvp(loss, (scale,), (one,)))(one)
    assert np.isfinite(value) and np.isfinite(slope), "forward mode has no limit"


def test_self_replay_leaves_loss_and_gradients_as_they_are(parts, run, value_and_grad):
    tokens = random_tokens(seed=8)
    live_loss, live = value_and_grad(parts[1], tokens)
    replayed_loss, replayed = value_and_grad(parts[1], tokens, routed_batch(run(tokens).ids))
    assert float(live_loss) == pytest.approx(float(replayed_loss), abs=1e-6)
    assert_close(live, replayed, 1e-6)


def test_drifted_ids_give_every_router_a_gradient_that_is_a_finite_difference(parts, value_and_grad):
    """With the ids held, the loss is smooth in the weights: no choice can flip between the two ends."""
    tokens = random_tokens(seed=9)
    routed = routed_batch(drifted_ids(tokens))
    gradient = value_and_grad(parts[1], tokens, routed)[1]
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    arrays = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradient)}
    routers = [array for name, array in arrays.items() if name.endswith("router")]
    assert sum(len(array) for array in routers) == MOE_LAYERS
    assert all(np.all(np.any(array != 0, axis=(1, 2))) for array in routers)
    kinds = {name.rpartition(".")[2] for name in arrays}
    assert {"router", "gate_up", "down", "qkv", "out", "embed", "head"} <= kinds
    for kind in sorted(kinds):
        moved = {name: array * (name.rpartition(".")[2] == kind) for name, array in arrays.items()}
        length, step = float(np.sqrt(sum(np.sum(array**2) for array in moved.values()))), 2e-2
        assert length > 1e-4, kind
        losses = []
        for sign in (1.0, -1.0):
            flat = [
                (path, leaf.replace(leaf[...] + np.float32(sign * step / length) * moved[".".join(map(str, path))]))
                for path, leaf in nnx.to_flat_state(parts[1])
            ]
            losses.append(float(value_and_grad(nnx.from_flat_state(flat), tokens, routed)[0]))
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length, rel=0.03, abs=2e-4), kind


def test_packed_segments_are_the_sequences_on_their_own(quick_run):
    first, second = random_tokens(1, 6, seed=10), random_tokens(1, 6, seed=11)
    ids = [drifted_ids(tokens, seed) for seed, tokens in enumerate((first, second))]
    valid = [some_rows(tokens, seed) for seed, tokens in enumerate((first, second))]
    apart = [
        quick_run(tokens, routed_batch(i, valid=v)) for tokens, i, v in zip((first, second), ids, valid, strict=True)
    ]
    segments, positions = (jnp.asarray([row], jnp.int32) for row in ([*[0] * 6, *[1] * 6], [*range(6), *range(6)]))
    packed_batch = routed_batch(np.concatenate(ids, axis=1), valid=np.concatenate(valid, axis=1))
    packed = quick_run(
        jnp.concatenate([first, second], axis=1), packed_batch, segment_ids=segments, positions=positions
    )
    np.testing.assert_allclose(packed.logits, np.concatenate([part.logits for part in apart], axis=1), atol=1e-4)
    assert np.array_equal(packed.ids, np.concatenate([part.ids for part in apart], axis=1))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_segments_of_few_bits_are_not_padding(quick_run, dtype):
    """Not that of id 0 either."""
    tokens = random_tokens(1, 6, seed=15)
    ids = drifted_ids(tokens)
    wide = jnp.pad(tokens, ((0, 0), (4, 0)))
    batch = routed_batch(np.pad(ids, ((0, 0), (4, 0), (0, 0), (0, 0))), valid=np.arange(10) >= 4, pad=np.arange(10) < 4)
    alone = quick_run(tokens, routed_batch(ids)).logits
    padded = quick_run(wide, batch, segment_ids=jnp.zeros((1, 10), dtype)).logits
    np.testing.assert_allclose(padded[:, 4:], alone, atol=1e-4)


@pytest.mark.parametrize("filler", [VOCAB_SIZE, VOCAB_SIZE + 100, -VOCAB_SIZE - 1])
def test_gradients_do_not_depend_on_the_ids_of_padding(parts, filler):
    tokens = random_tokens(1, 6, seed=16)
    ids = np.pad(drifted_ids(tokens), ((0, 0), (4, 0), (0, 0), (0, 0)))
    batch = routed_batch(ids, valid=np.arange(10) >= 4, pad=np.arange(10) < 4)

    @functools.partial(jax.jit, compiler_options=fast_compile.OPTIONS)
    def gradient(state, tokens):
        def loss(state):
            logits = forward(nnx.merge(parts[0], state), tokens, routed=batch).logits[:, 4:-1]
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 5:, None], axis=-1))

        return jax.grad(loss)(state)

    usual, other = (gradient(parts[1], jnp.pad(tokens, ((0, 0), (4, 0)), constant_values=fill)) for fill in (7, filler))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(other))
    assert_close(usual, other, 1e-7)


def test_weights_of_bfloat16_are_floats(parts):
    tokens = random_tokens(1, 6, seed=17)
    batch = routed_batch(drifted_ids(tokens))
    weights = jnp.full((*tokens.shape, MOE_LAYERS, TOP_K), 0.25, jnp.bfloat16)
    model = nnx.merge(*parts)
    short, wide = (
        forward(model, tokens, routed=dataclasses.replace(batch, weights=own)).logits
        for own in (weights, weights.astype(jnp.float32))
    )
    np.testing.assert_allclose(short, wide, atol=1e-2)


def test_hash_routed_layers_may_name_an_expert_twice(parts):
    tokens, model = random_tokens(1, 4, seed=18), nnx.merge(*parts)
    ids = drifted_ids(tokens).copy()
    ids[0, 1, 0] = 3
    layer = model.config.capture_spec.layer_ids[0]
    with pytest.raises(RoutingAlignmentError, match=f"hidden layer {layer}: experts .* once at most"):
        forward(model, tokens, routed=routed_batch(ids))
    out = forward(model, tokens, routed=routed_batch(ids), repeats_in_layers=[layer], return_routed=True)
    assert np.isfinite(out.logits).all() and np.asarray(out.ids)[0, 1, 0].tolist() == [3] * TOP_K


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_places_without_a_token_change_no_token(quick_run, side):
    """Whatever id stands there, and whatever its rows hold; logits of the tokens are those of the sequence alone."""
    tokens = random_tokens(1, 6, seed=12)
    ids, valid = drifted_ids(tokens), some_rows(tokens)
    alone = quick_run(tokens, routed_batch(ids, valid=valid))
    before, after = {"left": (6, 0), "right": (0, 6), "both": (2, 4)}[side]
    pad = np.ones((1, 12), bool)
    pad[:, before : 12 - after] = False
    wide_ids = np.full((1, 12, MOE_LAYERS, TOP_K), 255)
    wide_ids[:, before : 12 - after] = ids
    wide_valid = np.zeros((1, 12), bool)
    wide_valid[:, before : 12 - after] = valid
    for filler in (0, 77):
        wide = jnp.full((1, 12), filler, jnp.int32).at[:, before : 12 - after].set(tokens)
        padded = quick_run(
            wide,
            routed_batch(wide_ids, valid=wide_valid, pad=pad),
            positions=jnp.arange(12, dtype=jnp.int32)[None] - before,
        )
        np.testing.assert_allclose(padded.logits[:, before : 12 - after], alone.logits, atol=1e-4)
        assert np.array_equal(padded.ids[:, before : 12 - after], alone.ids)
        assert np.all(np.isfinite(padded.logits))


def test_a_sequence_does_not_see_the_others_of_its_batch_nor_what_comes_later(quick_run):
    tokens = random_tokens(seed=13)
    base = np.asarray(quick_run(tokens).logits)
    other = np.asarray(quick_run(tokens.at[1].set(5)).logits)
    np.testing.assert_allclose(other[0], base[0], atol=1e-4)
    later = np.asarray(quick_run(tokens.at[0, 8].add(1)).logits)
    np.testing.assert_allclose(later[0, :8], base[0, :8], atol=1e-4)
    assert np.max(np.abs(later[0, 8] - base[0, 8])) > 0.1


def test_the_engine_and_the_forward_give_the_same_logprobs_and_rows(folder, quick_run):
    prompts = [
        np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
        for seed, length in ((0, 3), (1, 21), (2, 40))
    ]
    sizes = dict(
        precompile_bs_paddings=(4,),
        precompile_token_paddings=(32,),
        page_size=8,
        max_total_tokens=256,
        context_length=64,
    )
    with Engine(str(folder), skip_tokenizer_init=True, enable_return_routed_experts=True, **sizes) as engine:
        kwargs = dict(return_logprob=True, logprob_start_len=0, return_routed_experts=True)
        sampling = {"temperature": 0.9, "seed": 7, "max_tokens": 8, "ignore_eos": True}
        results = engine.generate(input_ids=prompts, sampling_params=sampling, **kwargs)
    processed = []
    for prompt, result in zip(prompts, results, strict=True):
        meta, tokens = result["meta_info"], [*prompt, *result["output_ids"]]
        rows = extract_routed_experts_from_meta_info(result).reshape(-1, LAYERS, TOP_K)[:, 1:]
        assert len(rows) == len(tokens) - 1
        ids, valid, pad = (
            np.full((1, 48, *rows.shape[1:]), 255),
            np.arange(48)[None] < len(rows),
            np.arange(48)[None] >= len(tokens),
        )
        ids[0, : len(rows)] = rows
        padded = jnp.zeros((1, 48), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens, jnp.int32))
        trained = quick_run(padded, routed_batch(ids, valid=valid, pad=pad))
        assert np.array_equal(np.asarray(trained.ids)[0, : len(rows)], rows)
        live = quick_run(padded)
        assert np.mean(np.asarray(live.ids)[0, : len(rows)] == rows) > 0.98  # the same weights, but for near ties
        prompt_logprobs = jax.nn.log_softmax(trained.logits[0])
        for index, (value, token, _) in enumerate(meta["input_token_logprobs"][1:]):
            assert value == pytest.approx(float(prompt_logprobs[index, token]), abs=1e-4)
        sampled = jax.nn.log_softmax(trained.logits[0] / 0.9)
        for index, (value, token, _) in enumerate(meta["output_token_logprobs"], start=len(prompt) - 1):
            assert value == pytest.approx(float(sampled[index, token]), abs=1e-4)
            processed.append(value)
    assert len(processed) == 24 and meta["logprobs_mode"] == "processed"
