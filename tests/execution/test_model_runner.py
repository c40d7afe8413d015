"""The runner against the model in NumPy: results stand at their positions, steps overlap, weights change in between.

The oracle is float64 and knows no pages; the columns of a step are compared with it, so a column that is read as
another is seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.margins import differences
from oracles.testbeds import other_oracle, other_weights, random_prompt
from routed_experts.core.errors import WeightsMismatchError
from routed_experts.core.model_worker_batch import FROM_DEVICE, ForwardMode, SamplingMode
from routed_experts.execution import sampler
from routed_experts.execution.aot_programs import lowerings
from routed_experts.execution.model_runner import PendingStep
from routed_experts.layers.logprobs import MAX_TOP_LOGPROBS
from support.fast_compile import fast_compilation
from support.small_runner import DECODE, EXTEND, VERIFY, Fed, build, build_step, compiled, oracle, read, run
from support.tiny_checkpoint import VOCAB_SIZE

TOLERANCE = {"rtol": 0, "atol": 2e-4}  # float32 against float64
PROMPTS = [
    tuple(random_prompt(np.random.default_rng(seed), length).tolist()) for seed, length in ((1, 13), (2, 6), (3, 9))
]
PAGES = [(1, 5, 2, 9, 20, 21), (7, 3, 30, 31, 32, 33), (11, 10, 4, 34, 35, 36)]  # in no order, 24 places each
PROMPT_PARTS = [
    Fed(slot, pages, ids, prompt_len=len(ids)) for slot, pages, ids in zip((3, 1, 5), PAGES, PROMPTS, strict=True)
]


def assert_rows_are_the_oracles(judged_by, sequences, rows):
    """Rows of whole prompts in one step, against the oracle; a difference must be a near tie."""
    at = 0
    for ids in sequences:
        flips, _ = differences(judged_by, ids, rows[at : at + len(ids)].reshape(len(ids), -1, 4).astype(int))
        assert all(difference.margin < 1e-4 for difference in flips), flips
        at += len(ids)
    assert at == len(rows)


def test_a_greedy_step_returns_tokens_logprobs_and_rows_of_its_real_tokens():
    result = run(compiled(), build_step(*PROMPT_PARTS))
    expected = [oracle().run(ids).logprobs[-1] for ids in PROMPTS]
    assert result.tokens[:3].tolist() == [logprobs.argmax() for logprobs in expected]
    np.testing.assert_allclose(result.logprobs[:3], [logprobs.max() for logprobs in expected], **TOLERANCE)
    assert (result.logprobs.dtype, result.tokens.dtype, result.rows.dtype) == (np.float32, np.int32, np.uint8)
    assert result.rows.shape == (sum(map(len, PROMPTS)), 3 * 4)
    assert_rows_are_the_oracles(oracle(), PROMPTS, result.rows)
    assert all(
        part is None for part in (result.top_ids, result.top_logprobs, result.prompt_logprobs, result.prompt_top_ids)
    )


def test_a_full_step_returns_the_best_tokens_after_penalties_and_bias():
    prompt = PROMPTS[0]
    how = {"presence": 0.5, "frequency": 0.25, "repetition": 1.3}
    parts = [
        Fed(3, PAGES[0], prompt, prompt_len=len(prompt) - 4, sampling=how, bias=((17, 9.0), (300, -2.0))),
        Fed(1, PAGES[1], PROMPTS[1], prompt_len=len(PROMPTS[1])),
    ]
    result = run(compiled(), build_step(*parts, sampling_mode=SamplingMode.FULL))
    counts, in_prompt = np.bincount(prompt[-4:], minlength=313), np.bincount(prompt, minlength=313) > 0
    logits = oracle().run(prompt).logits[-1]
    logits = (
        np.where(in_prompt, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        - 0.25 * counts
        - 0.5 * (counts > 0)
    )
    logits[17] += 9.0
    logits[300] -= 2.0
    for row, raw in enumerate((logits, oracle().run(PROMPTS[1]).logits[-1])):
        logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[:MAX_TOP_LOGPROBS]
        assert result.top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(result.top_logprobs[row], logprobs[best], **TOLERANCE)
        assert result.tokens[row] == best[0] and result.logprobs[row] == result.top_logprobs[row, 0]


def test_a_new_request_in_a_slot_inherits_no_counts():
    heavy = {"presence": 2.0, "frequency": 2.0, "repetition": 5.0}
    first, then = Fed(2, PAGES[0], PROMPTS[0], prompt_len=1, sampling=heavy), Fed(2, PAGES[1], PROMPTS[1], prompt_len=6)
    run(compiled(), build_step(first, sampling_mode=SamplingMode.FULL))
    result = run(compiled(), build_step(then, sampling_mode=SamplingMode.FULL))
    np.testing.assert_allclose(result.top_logprobs[0, 0], oracle().run(PROMPTS[1]).logprobs[-1].max(), **TOLERANCE)
    heavier = Fed(2, PAGES[1], (4,), start=6, prompt_len=6, sampling={"repetition": 5.0})
    result = run(compiled(), build_step(heavier, sampling_mode=SamplingMode.FULL, mode=ForwardMode.DECODE))
    logits, in_prompt = oracle().run((*PROMPTS[1], 4)).logits[-1], np.isin(np.arange(313), (*PROMPTS[1], 4))
    assert result.tokens[0] == np.where(in_prompt, np.where(logits > 0, logits / 5, logits * 5), logits).argmax()


def test_prompt_logprobs_speak_of_the_token_that_follows():
    following = [token for ids in PROMPTS for token in (*ids[1:], 5)]
    result = run(compiled(), build_step(*PROMPT_PARTS, targets=following))
    logprobs = np.concatenate([oracle().run(ids).logprobs for ids in PROMPTS])
    real = len(following)
    np.testing.assert_allclose(result.prompt_logprobs[:real], logprobs[np.arange(real), following], **TOLERANCE)
    best = np.argsort(-logprobs, axis=1, kind="stable")[:, :MAX_TOP_LOGPROBS]
    assert np.array_equal(result.prompt_top_ids[:real], best)
    np.testing.assert_allclose(
        result.prompt_top_logprobs[:real], np.take_along_axis(logprobs, best, axis=1), **TOLERANCE
    )


def test_floats_are_read_bit_for_bit():
    strange = np.array([0, 1 << 31, 1, 0xFF800000, 0x7F800000, 0x7FC00001, 0x7F800001, 0x42280000], np.uint32).view(
        np.int32
    )
    columns = 2 + 2 * MAX_TOP_LOGPROBS
    sampled = np.random.default_rng(0).choice(strange, (4, columns))
    scored = np.random.default_rng(1).choice(strange, (32, columns - 1))
    batch = build_step(*PROMPT_PARTS, sampling_mode=SamplingMode.FULL)
    arrays = (jnp.asarray(sampled), jnp.asarray(scored))
    pending = PendingStep(batches=(batch,), sampled=arrays[0], scored=arrays[1], rows=None, weight_version=7)
    (result,) = compiled().read(pending)
    edge = 2 + MAX_TOP_LOGPROBS
    pairs = [
        (result.tokens, sampled[:, 0]),
        (result.logprobs, sampled[:, 1]),
        (result.top_ids, sampled[:, 2:edge]),
        (result.top_logprobs, sampled[:, edge:]),
        (result.prompt_logprobs, scored[:, 0]),
        (result.prompt_top_ids, scored[:, 1 : edge - 1]),
        (result.prompt_top_logprobs, scored[:, edge - 1 :]),
    ]
    assert all(np.array_equal(np.ascontiguousarray(read).view(np.int32), written) for read, written in pairs)
    assert (result.rows, result.weight_version) == (None, 7)


def decoding(token, position, mode=ForwardMode.DECODE):
    return build_step(Fed(3, PAGES[0], (token,), start=position, prompt_len=len(PROMPTS[0])), mode=mode)


def test_steps_are_dispatched_before_the_last_one_is_read():
    runner, steps, length = compiled(), 6, len(PROMPTS[0])
    pending = [runner.dispatch([build_step(PROMPT_PARTS[0])])]
    for index in range(steps):  # in decode and extend programs in turn; the host knows none of the tokens that it feeds
        mode = (ForwardMode.DECODE, ForwardMode.EXTEND)[index % 2]
        pending.append(runner.dispatch([decoding(FROM_DEVICE, length + index, mode)]))
    results = [read(runner, step) for step in pending]
    tokens = [*PROMPTS[0], *(int(result.tokens[0]) for result in results)]
    judged = oracle().run(tokens[:-1])
    assert tokens[length:] == judged.logits[length - 1 :].argmax(axis=1).tolist()
    rows = np.concatenate([result.rows for result in results])
    assert_rows_are_the_oracles(oracle(), [tokens[:-1]], rows)


def test_what_was_read_is_not_touched_by_later_steps():
    runner = compiled()
    pending = runner.dispatch([build_step(*PROMPT_PARTS)])
    first = read(runner, pending)
    copies = first.rows.copy(), first.tokens.copy()
    for position in range(3):
        runner.dispatch([decoding(FROM_DEVICE, 13 + position)])
    again = read(runner, pending)
    for result in (first, again):
        assert np.array_equal(result.rows, copies[0]) and np.array_equal(result.tokens, copies[1])


@pytest.mark.parametrize("sampling_mode", list(SamplingMode), ids=lambda sampling_mode: sampling_mode.name)
def test_rows_that_come_with_the_tokens_are_those_that_come_alone(sampling_mode):
    telling = build(piggyback={ForwardMode.DECODE})
    telling.compile()
    chunks = [
        Fed(part.slot, part.pages, (17 + at,), start=len(part.ids), prompt_len=len(part.ids))
        for at, part in enumerate(PROMPT_PARTS)
    ]
    results, pendings = [], []
    for runner in (compiled(), telling):
        prompts = run(runner, build_step(*PROMPT_PARTS))
        pending = runner.dispatch([build_step(*chunks, sampling_mode=sampling_mode, mode=ForwardMode.DECODE)])
        next_step = runner.dispatch(
            [build_step(*(dataclasses.replace(part, ids=(5,)) for part in chunks), mode=ForwardMode.DECODE)]
        )
        results.append((prompts, read(runner, pending), read(runner, next_step), read(runner, pending)))
        pendings.append(pending)
    assert pendings[0].rows is not None and pendings[1].rows is None, "an array less"
    for separate, piggybacked in zip(*results, strict=True):
        rows, spec = np.asarray(piggybacked.rows), telling.spec.capture
        if rows.dtype == np.int32:  # packed, the last columns of the table of tokens
            rows = rows[:, -spec.row_words :].copy().view(spec.dtype)[:, : spec.row_ids]
        assert np.array_equal(separate.rows, rows) and separate.rows.shape == rows.shape
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            assert np.array_equal(getattr(separate, name), getattr(piggybacked, name)), name
    assert (results[1][1].top_ids is not None) == (sampling_mode is SamplingMode.FULL)


def test_rows_leave_with_the_tokens_in_the_steps_of_the_given_modes_alone():
    separate, piggybacked = (
        build(shapes=(EXTEND, DECODE, VERIFY), piggyback=modes, num_drafts=3)
        for modes in ((), {ForwardMode.TARGET_VERIFY})
    )
    drafts = Fed(3, PAGES[0], (17, 4, 9), start=len(PROMPTS[0]), prompt_len=len(PROMPTS[0]))
    following = dataclasses.replace(drafts, ids=(5,), start=drafts.start + 3)
    steps = [
        build_step(*PROMPT_PARTS),
        build_step(drafts, mode=ForwardMode.TARGET_VERIFY),
        build_step(following, mode=ForwardMode.DECODE),
    ]
    results = []
    for runner in (separate, piggybacked):
        runner.compile()
        pendings = [runner.dispatch([step]) for step in steps]
        assert [pending.rows is None for pending in pendings] == [False, runner is piggybacked, False]
        results.append([read(runner, pending) for pending in pendings])
    spec = piggybacked.spec.capture
    for expected, own in zip(*results, strict=True):
        rows = own.rows
        if rows.dtype == np.int32:
            rows = rows[:, -spec.row_words :].copy().view(spec.dtype)[:, : spec.row_ids]
        assert np.array_equal(expected.rows, rows) and expected.rows.shape == rows.shape
        assert np.array_equal(expected.tokens, own.tokens) and np.array_equal(expected.accepted, own.accepted)


def test_a_step_with_more_tokens_than_are_sampled_after_has_rows_of_its_own():
    runner = build(piggyback=ForwardMode, num_drafts=2)
    assert runner.spec.sampled_rows(VERIFY) == 12 < VERIFY.num_tokens
    words = [runner.spec.row_words_in(shape) for shape in (EXTEND, DECODE, VERIFY)]
    assert words == [0, runner.spec.capture.row_words, 0]


def test_a_table_in_memory_of_the_host_is_that_of_the_device(monkeypatch):
    shapes = EXTEND, DECODE, VERIFY
    plain = build(shapes=shapes)
    monkeypatch.setattr(sampler, "_HOST_TABLE_PLATFORMS", frozenset({"cpu"}))
    hosted = build(shapes=shapes)
    hosted._needs_d2h = True  # as on a GPU
    with fast_compilation():
        for runner in (hosted, plain):
            runner.compile()
            runner.compile_masked()
            monkeypatch.undo()
    drafts = Fed(3, PAGES[0], (17, 4, 9), start=len(PROMPTS[0]), prompt_len=len(PROMPTS[0]))
    following = dataclasses.replace(drafts, ids=(5,), start=drafts.start + 3)
    mask = np.full((EXTEND.num_requests, -(-VOCAB_SIZE // 32)), 0b1010, np.uint32)
    for sampling_mode in SamplingMode:
        steps = [
            build_step(*PROMPT_PARTS, sampling_mode=sampling_mode),
            build_step(drafts, mode=ForwardMode.TARGET_VERIFY, sampling_mode=sampling_mode),
            build_step(following, mode=ForwardMode.DECODE, sampling_mode=sampling_mode),
        ]
        masked = dataclasses.replace(steps[0], is_masked=True)
        tables = []
        for runner in (hosted, plain):
            tables.append([runner.dispatch([step]).sampled for step in steps])
            tables[-1].append(runner.sample(runner.begin([masked]), mask).sampled)
        for own, expected in zip(*tables, strict=True):
            assert own.sharding.memory_kind == sampler.HOST_MEMORY != expected.sharding.memory_kind
            np.testing.assert_array_equal(own, expected)


def test_the_table_of_programs_is_what_is_compiled():
    runner = compiled()
    jobs = lowerings(runner.state, runner.spec, runner.config)
    assert jobs.keys() == runner._programs.keys()
    shapes = {(name, shape) for name in ("forward", "count") for shape in (EXTEND, DECODE)}
    forms = {("sample", EXTEND.num_requests, 0, sampling_mode) for sampling_mode in SamplingMode}
    assert EXTEND.num_requests == DECODE.num_requests, "steps of as many requests share their samplers"
    assert jobs.keys() == {("score", EXTEND.num_tokens)} | shapes | forms


def test_steps_whose_rows_leave_with_the_tokens_have_samplers_of_their_own():
    runner = build(piggyback={ForwardMode.DECODE})
    keys = {key for key in lowerings(runner.state, runner.spec, runner.config) if key[0] == "sample"}
    assert keys == {
        ("sample", EXTEND.num_requests, row_words, sampling_mode)
        for row_words in (0, runner.spec.row_words_in(DECODE))
        for sampling_mode in SamplingMode
    }
    assert runner.spec.row_words_in(DECODE) > 0


def test_compiling_reports_progress():
    runner, calls = build(shapes=(DECODE,)), []
    count = runner.compile(progress=lambda done, of: calls.append((done, of)))
    assert calls == [(index, count) for index in range(1, count + 1)]
    assert count == len(("forward", "count")) + len(SamplingMode)


def leaves(state):
    return jax.tree.leaves(state)


def test_new_weights_are_taken_as_they_are_and_serve_the_next_step():
    runner, served = compiled(), compiled().state
    version = runner.weight_version
    pending = runner.dispatch([build_step(*PROMPT_PARTS)])
    new = other_weights(7)
    try:
        runner.update_weights(new, version=version + 1)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves(runner.state)]
        assert pointers == [leaf.unsafe_buffer_pointer() for leaf in leaves(new)]
        before, after = read(runner, pending), run(runner, build_step(*PROMPT_PARTS))
    finally:
        runner.update_weights(served, version=version + 2)
    assert (before.weight_version, after.weight_version) == (version, version + 1)
    for result, reference in ((before, oracle()), (after, other_oracle(7))):
        assert result.tokens[:3].tolist() == [reference.run(ids).logits[-1].argmax() for ids in PROMPTS]
        assert_rows_are_the_oracles(reference, PROMPTS, result.rows)
    assert run(runner, build_step(*PROMPT_PARTS)).tokens.tolist() == before.tokens.tolist()


def test_weights_of_the_host_are_copied_once_and_owned():
    runner, served = compiled(), compiled().state
    version = runner.weight_version
    host_weights = jax.tree.map(np.array, other_weights(7))
    try:
        runner.update_weights(host_weights, version=version + 1)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves(runner.state))
        first = run(runner, build_step(*PROMPT_PARTS))
        for leaf in leaves(host_weights):
            leaf[...] = np.nan
        assert np.array_equal(run(runner, build_step(*PROMPT_PARTS)).logprobs, first.logprobs)
    finally:
        runner.update_weights(served, version=version + 2)


def test_donated_weights_are_served_where_they_lie_and_deleted_with_what_follows():
    """Of three exchanges: a donation, another that ends the first one's arrays, and one without that ends the
    second's."""
    runner, served = compiled(), compiled().state
    version, donated = runner.weight_version, [jax.tree.map(jnp.copy, other_weights(seed)) for seed in (7, 8)]
    try:
        for step, (state, seed) in enumerate(zip(donated, (7, 8), strict=True), start=1):
            pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves(state)]
            runner.update_weights(state, version=version + step, donate=True)
            assert [leaf.unsafe_buffer_pointer() for leaf in leaves(runner.state)] == pointers, "nothing was copied"
            result = run(runner, build_step(*PROMPT_PARTS))
            assert result.tokens[:3].tolist() == [other_oracle(seed).run(ids).logits[-1].argmax() for ids in PROMPTS]
            assert [leaf.is_deleted() for leaf in leaves(donated[0])] == [step == 2] * len(pointers)
        runner.update_weights(
            runner.state, version=version + 3
        )  # only a name: the arrays are still served, and still its own
        assert not any(leaf.is_deleted() for leaf in leaves(donated[1]))
    finally:
        runner.update_weights(served, version=version + 4)
    assert all(leaf.is_deleted() for leaf in leaves(donated[1]))
    assert not any(leaf.is_deleted() for leaf in leaves(served)), "what nobody donated is the caller's"
    assert run(runner, build_step(*PROMPT_PARTS)).tokens[:3].tolist() == [
        oracle().run(ids).logits[-1].argmax() for ids in PROMPTS
    ]


def test_a_donation_that_does_not_fit_deletes_nothing():
    runner = compiled()
    state = other_weights(7)
    with pytest.raises(WeightsMismatchError, match="must be an integer above"):
        runner.update_weights(state, version=runner.weight_version, donate=True)
    short, _ = changed(state, lambda leaf: leaf[:-1])
    with pytest.raises(WeightsMismatchError, match="differ from the served weights"):
        runner.update_weights(short, version=runner.weight_version + 1, donate=True)
    assert not any(leaf.is_deleted() for leaf in leaves(state))


def changed(state, change):
    """The state with its embedding changed, and the name of that leaf."""
    entries, tree = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in entries]
    (name,) = (name for name in names if "embed" in name)
    arrays = [change(leaf) if each == name else leaf for each, (_, leaf) in zip(names, entries, strict=True)]
    return jax.tree.unflatten(tree, arrays), name


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda leaf: leaf[:-1], r"float32\[312, 64\] for float32\[313, 64\]"),
        (lambda leaf: leaf.astype(jnp.bfloat16), r"bfloat16\[313, 64\] for float32\[313, 64\]"),
        (lambda leaf: leaf.T, r"float32\[64, 313\] for float32\[313, 64\]"),
    ],
    ids=["shape", "dtype", "transposed"],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, match):
    runner, served = compiled(), compiled().state
    version = runner.weight_version
    wrong, name = changed(served, change)
    with pytest.raises(WeightsMismatchError, match="1 arrays differ") as caught:
        runner.update_weights(wrong, version=version + 1)
    assert name in str(caught.value) and caught.match(match) and caught.value.param == "state"
    assert runner.weight_version == version
    assert all(now is then for now, then in zip(leaves(runner.state), leaves(served), strict=True))


def test_missing_and_unknown_weights_are_named():
    runner = compiled()
    flat = dict(nnx.to_flat_state(runner.state))
    norm = flat.pop(("norm",))
    with pytest.raises(WeightsMismatchError, match=r"norm.*nothing for float32\[64\]"):
        runner.update_weights(nnx.from_flat_state(flat), version=runner.weight_version + 1)
    more = nnx.from_flat_state({**flat, ("norm",): norm, ("extra",): norm})
    with pytest.raises(WeightsMismatchError, match=r"extra.*is not in the model"):
        runner.update_weights(more, version=runner.weight_version + 1)


@pytest.mark.parametrize("step", [0, -1])
def test_a_version_that_does_not_rise_is_refused(step):
    runner = compiled()
    with pytest.raises(WeightsMismatchError, match=f"must be an integer above {runner.weight_version}") as caught:
        runner.update_weights(runner.state, version=runner.weight_version + step)
    assert caught.value.param == "update_count"


@pytest.mark.parametrize("version", [True, 1e9, "9", None, 2**31, 1_720_000_000_000])
def test_a_version_that_rows_cannot_keep_is_refused(version):
    runner = compiled()
    served = runner.weight_version
    with pytest.raises(WeightsMismatchError, match="and at most 2147483647") as caught:
        runner.update_weights(runner.state, version=version)
    assert (caught.value.param, runner.weight_version) == ("update_count", served)
