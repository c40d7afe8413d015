"""How capture fails elsewhere, and the tests that keep it out (RELIABILITY section 7), on poisoned stores.

Rows are compared with the MoE probe (what the experts were given) or with NumPy (what they should have been given)."""

import concurrent.futures
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles.driver import assert_all_faithful, request
from oracles.full_sequence import FullSequence
from oracles.margins import assert_margin_rule
from oracles.testbeds import SIZES, build_model, other_oracle, other_weights, random_prompt, tiny_testbed
from routed_experts import Engine, extract_routed_experts_from_meta_info
from routed_experts.core.errors import (
    CaptureDisabledError,
    CaptureUnsupportedError,
    InvalidRequestError,
    PromptTooLongError,
    RoutingIncompleteError,
)
from routed_experts.engine.build.backends import KERNELS, BackendRegistry
from routed_experts.formats import encode_routed_experts, record_from_meta_info, record_from_npy
from routed_experts.formats.archive import decode_record, encode_record
from routed_experts.formats.metadata import to_metadata
from routed_experts.formats.wire import npy_bytes
from routed_experts.layers.moe import MoeBackend, reference_experts
from routed_experts.replay.forward import RoutedBatch, forward
from support.backends import with_moe
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_tokenizer

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def testbed():
    return tiny_testbed(moe_backend="probed", deterministic=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def new_engine(tokenizer, *, capture=True, **args):
    model = build_model(tiny_config(), tiny_tensors(tiny_config()))
    return Engine(model=model, tokenizer_path=tokenizer, enable_return_routed_experts=capture, **{**SIZES, **args})


@pytest.fixture(scope="module")
def engine(tokenizer):
    with new_engine(tokenizer) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle():
    return FullSequence(tiny_config(), tiny_tensors(tiny_config()))


def make_rng(seed):
    return np.random.default_rng(seed)


# --- all-zero rows: the kernel hides its ids; the buffer starts at 0


def test_a_backend_that_hides_its_ids_is_refused_at_build(tokenizer):
    hidden = with_moe(BackendRegistry(), MoeBackend(name="sealed", run=reference_experts, reveals_ids=False))
    with pytest.raises(CaptureUnsupportedError, match="'sealed' hides the ids"):
        new_engine(tokenizer, registry=hidden, moe_backend="sealed")
    with new_engine(tokenizer, registry=hidden, moe_backend="sealed", capture=False) as engine:
        assert len(engine.generate("experts", GREEDY)["output_ids"]) == 12


@pytest.mark.parametrize("backend", sorted(name for name, offer in KERNELS.items() if offer.platform in (None, "cpu")))
def test_every_registered_backend_fills_every_row(backend):
    testbed, rng = tiny_testbed(moe_backend=backend), make_rng(1)
    drive = testbed.drive()
    reqs = [
        request(f"r{i}", random_prompt(rng, n), 10, temperature=1.0, seed=i) for i, n in enumerate((1, 7, 25, 40, 18))
    ]
    drive.run(*reqs)
    for output in drive.outputs.values():
        output.end.routed_experts.validate()
    assert_margin_rule(testbed.oracle, [(req.tokens, drive.outputs[req.rid].end.routed_experts.ids) for req in reqs])


# --- stale rows on slot reuse: rows keyed by slot, never cleared


def test_reused_slot_never_shows_rows_of_the_request_before(testbed):
    drive, rng = testbed.drive(pages=int(2.3 * 10)), make_rng(2)  # sequences of up to 40 tokens, pages of 4
    reqs = [
        request(f"r{i}", random_prompt(rng, rng.integers(1, 37)), int(rng.integers(1, 5)), temperature=1.0, seed=i)
        for i in range(200)
    ]
    drive.run(*reqs)
    assert assert_all_faithful(drive) == sum(req.num_known - 1 for req in reqs)


# --- preemption rewrites history: re-prefill overwrites


def test_first_writer_wins_over_reprefill(testbed):
    """The request keeps the rows of its first pass; the page carries those of the second, for its next reader."""
    drive, prompt = testbed.drive(), random_prompt(make_rng(3), 24)
    drive.add(request("first", prompt, 12))
    while drive.reqs["first"].num_output < 4:
        drive.step()
    drive.drain()
    drive.core.retract(drive.reqs["first"])
    num_written = drive.reqs["first"].num_known - 1
    old, new = drive.core.runner.weight_version, drive.update_weights(other_weights(1), cache="flush")
    drive.run()
    drive.run(request("second", np.append(prompt, 0), 4))
    assert_all_faithful(drive)
    first, second = (drive.outputs[rid].end for rid in ("first", "second"))
    assert first.routed_experts.version_spans == ((0, num_written, old), (num_written, 35, new))
    assert second.cached_tokens == 24
    assert second.routed_experts.version_spans == ((0, 28, new),)
    assert_margin_rule(testbed.oracle, [(prompt, first.routed_experts[:24].ids)])
    assert_margin_rule(other_oracle(1), [(prompt, second.routed_experts[:24].ids)])
    assert (first.routed_experts[:24].ids != second.routed_experts[:24].ids).any(axis=(1, 2)).all()


# --- rows lost on retraction, abort, continue: the record is cleared with the pages


def test_retracted_and_aborted_requests_keep_their_rows(testbed):
    drive, rng = testbed.drive(), make_rng(4)
    reqs = [request(f"r{i}", random_prompt(rng, 20), 20, temperature=1.0, seed=i) for i in range(4)]
    drive.add(*reqs)
    drive.steps(8)
    assert drive.retract_victim()
    assert drive.core.abort("r3")  # in the queue, without a page
    assert drive.core.abort("r0")  # running
    drive.run()
    assert [drive.outputs[f"r{i}"].end.finish_reason.type for i in range(4)] == ["abort", "length", "length", "abort"]
    assert drive.outputs["r3"].end.routed_experts.num_rows >= 20 + 4
    so_far = reqs[0].tokens[: reqs[0].num_known]
    drive.run(request("continued", so_far, 5, temperature=1.0, seed=0))
    assert_all_faithful(drive)
    continued = drive.outputs["continued"].end.routed_experts
    np.testing.assert_array_equal(continued.ids[: so_far.size - 1], drive.outputs["r0"].end.routed_experts.ids)


# --- prefix hit without rows: keys and values are known, rows are not


def test_a_reader_may_request_rows_when_the_writer_did_not(testbed):
    drive, prompt = testbed.drive(), random_prompt(make_rng(5), 40)
    drive.run(request("writer", prompt, 8, asks=False))
    drive.run(request("reader", prompt, 8))
    assert drive.outputs["reader"].end.cached_tokens == 36
    assert_all_faithful(drive)
    assert_margin_rule(testbed.oracle, [(drive.reqs["reader"].tokens, drive.outputs["reader"].end.routed_experts.ids)])


# --- layer shift, dense-first: columns counted over MoE layers, read over all


@pytest.mark.parametrize(("dense", "columns"), [((0,), (1, 2, 3)), ((2,), (0, 1, 3)), ((0, 1, 3), (2,))])
def test_layer_ids_name_the_hidden_layer(dense, columns):
    testbed = tiny_testbed(config=(("mlp_only_layers", dense),), deterministic=True)
    drive, reqs = testbed.drive(), [request(f"r{n}", random_prompt(make_rng(n), n), 8) for n in (5, 30)]
    drive.run(*reqs)
    assert testbed.oracle.moe_layers == columns
    for req in reqs:
        record = drive.outputs[req.rid].end.routed_experts
        record.validate()
        assert (record.layer_ids, record.num_hidden_layers) == (columns, 4)
        assert_margin_rule(testbed.oracle, [(req.tokens, record.ids)])


# --- flag off, rows requested: the server ends


@pytest.mark.parametrize("stream", [False, True])
def test_asking_without_the_flag_is_a_typed_error_and_the_engine_lives(tokenizer, stream):
    with new_engine(tokenizer, capture=False, deterministic=True) as engine:
        for kwargs in (dict(return_routed_experts=True), dict(sampling_params={"return_routed_experts": True})):
            with pytest.raises(CaptureDisabledError, match="enable_return_routed_experts=True"):
                engine.generate("one two three", max_new_tokens=4, stream=stream, **kwargs)
        assert extract_routed_experts_from_meta_info(engine.generate("one two three", max_new_tokens=4)) is None
        assert engine.check_integrity() == []


# --- busy wait, unbounded queue, thread lag: the reader polls a copying thread


def test_late_read_back_delays_only_its_request(engine, oracle):
    """A caller that does not read its outputs (its thread waits on an event) blocks no other caller and loses
    nothing."""
    started, may_continue = threading.Event(), threading.Event()

    def slow_reader():
        stream = engine.generate("The router scores", GREEDY, stream=True, return_routed_experts=True)
        next(stream)
        started.set()
        assert may_continue.wait(60)
        return list(stream)[-1]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        late = pool.submit(slow_reader)
        assert started.wait(60)
        prompt_results = engine.generate([f"expert {i}" for i in range(10)], GREEDY, return_routed_experts=True)
        assert not late.done()
        may_continue.set()
        results = [*prompt_results, late.result()]
    texts = [*(f"expert {i}" for i in range(10)), "The router scores"]
    assert_margin_rule(
        oracle, [tokens_and_rows(engine, text, result) for text, result in zip(texts, results, strict=True)]
    )


def tokens_and_rows(engine, text, result):
    record = record_from_meta_info(result)
    record.validate()
    tokens = [*engine.tokenizer.encode(text), *result["output_ids"]]
    assert (record.start, record.num_rows, record.num_tokens) == (0, len(tokens) - 1, len(tokens))
    return tokens, record.ids


# --- first choice only at n > 1: a response-level field


@pytest.mark.parametrize("form", ["int32", "npy"])
@pytest.mark.parametrize("layers", ["all", "moe"])
def test_every_choice_has_its_own_rows(engine, oracle, form, layers):
    sampling = dict(n=4, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    kwargs = dict(return_routed_experts=True, routed_experts_format=form, routed_experts_layers=layers)
    text = "A mixture of experts has many small networks and a router."
    at_once = engine.generate(text, sampling, **kwargs)
    assert len({tuple(choice["output_ids"]) for choice in at_once}) == 4
    assert_margin_rule(oracle, [tokens_and_rows(engine, text, choice) for choice in at_once])
    last = {}
    for event in engine.generate(text, sampling, stream=True, **kwargs):
        last[event["index"]] = event
    for choice, event in sorted(last.items()):
        assert event["output_ids"] == at_once[choice]["output_ids"]
        assert record_from_meta_info(event) == record_from_meta_info(at_once[choice])
        flat = extract_routed_experts_from_meta_info(event).reshape(-1, 4, 4)
        assert (flat[:, 0] == -1).all()
        np.testing.assert_array_equal(flat[:, 1:], record_from_meta_info(event).ids)


# --- long unchunked prefill overflows: a buffer sized for decode


@pytest.mark.parametrize("length", [33, 64, 65, 90])
def test_prefill_longer_than_any_bucket_is_captured(testbed, length):
    drive = testbed.drive()  # buckets of 8 and of 32
    drive.run(
        request("long", random_prompt(make_rng(length), length), 4),
        request("neighbour", random_prompt(make_rng(0), 5), 4),
    )
    assert assert_all_faithful(drive) == length + 3 + 8


def test_prefill_longer_than_the_context_is_refused_by_validation(engine):
    with pytest.raises(PromptTooLongError, match="96"):
        engine.generate(input_ids=[1] * 96, return_routed_experts=True)
    with pytest.raises(PromptTooLongError, match="at most 6"):
        engine.generate(input_ids=[1] * 90, max_new_tokens=7, return_routed_experts=True)
    result = engine.generate(
        input_ids=[1] * 90, sampling_params={**GREEDY, "max_tokens": 6}, return_routed_experts=True
    )
    assert record_from_meta_info(result).num_rows == 95


# --- dtype wraps: uint8 with more than 256 experts


def test_expert_256_survives(tokenizer):
    config = tiny_config(num_experts=257, moe_intermediate_size=8)
    tensors = tiny_tensors(config)
    for layer in (1, 2, 3):
        tensors[f"model.layers.{layer}.mlp.gate.weight"][256] *= 3  # so that it is often among the best, and often not
    oracle, prompt = FullSequence(config, tensors), random_prompt(make_rng(6), 40).tolist()
    with Engine(
        model=build_model(config, tensors), tokenizer_path=tokenizer, enable_return_routed_experts=True, **SIZES
    ) as engine:
        for form in ("int32", "npy"):
            result = engine.generate(
                input_ids=prompt, sampling_params=GREEDY, return_routed_experts=True, routed_experts_format=form
            )
            record = record_from_meta_info(result)
            assert record.ids.dtype == np.uint16
            assert 0.05 < (record.ids == 256).any(-1).mean() < 0.95
            assert_margin_rule(oracle, [([*prompt, *result["output_ids"]], record.ids)])
            assert (extract_routed_experts_from_meta_info(result) == 256).sum() == (record.ids == 256).sum()
    assert decode_record(encode_record(record)) == record
    for form, layers in (("npy", "moe"), ("npy", "all"), ("int32", "all"), ("int32", "moe")):
        assert record_from_meta_info(encode_routed_experts(record, payload_format=form, layers=layers)) == record
    assert record_from_npy(npy_bytes(record.ids), to_metadata(record, payload_format="ref").to_json()) == record
    listed = {"prompt_routed_experts": record.prompt.ids.tolist(), "routed_experts": record.generated.ids.tolist()}
    assert (
        record_from_meta_info(listed | {"routed_experts_info": to_metadata(record, payload_format="list").to_json()})
        == record
    )


# --- rows off by one; surplus after stop: S rows for S-1 forwards


@pytest.mark.parametrize("at_end", [False, True])
def test_a_stop_string_across_tokens_leaves_a_row_for_every_token_but_the_last(engine, oracle, at_end):
    text = "Keeping the choice is cheap"
    free = engine.generate(text, GREEDY)
    pieces = [engine.tokenizer.decode([token]) for token in free["output_ids"]]
    position = next(
        i
        for i in range(2, 11)
        if pieces[i - 1].isascii() and pieces[i].isascii() and pieces[i - 1].strip() and pieces[i].strip()
    )
    stop = pieces[position - 1][-1] + pieces[position][0]
    prompt_len = len(engine.tokenizer.encode(text))
    start = prompt_len if at_end else 0
    result = engine.generate(
        text, {**GREEDY, "stop": [stop]}, return_routed_experts=True, routed_experts_start_len=start
    )
    assert result["meta_info"]["finish_reason"]["matched"] == stop
    assert result["output_ids"] == free["output_ids"][: len(result["output_ids"])]
    record, tokens = record_from_meta_info(result), [*engine.tokenizer.encode(text), *result["output_ids"]]
    assert (record.start, record.num_rows) == (start, len(tokens) - 1 - start)
    expected = oracle.run(tokens[:-1])
    np.testing.assert_array_equal(record.ids, expected.ids[start:])


@pytest.mark.parametrize("streamed", [False, True])
def test_stopped_at_the_first_token_there_is_a_row_for_each_prompt_token(engine, oracle, streamed):
    text = "The cat sat on the mat"
    prompt = engine.tokenizer.encode(text)
    first = engine.generate(text, GREEDY)["output_ids"][0]

    def ask(start):
        kwargs = dict(return_routed_experts=True, routed_experts_start_len=start, stream=streamed)
        result = engine.generate(text, {**GREEDY, "stop_token_ids": [first]}, **kwargs)
        return list(result)[-1] if streamed else result

    for start in (0, 1, len(prompt)):
        result = ask(start)
        assert (result["output_ids"], result["meta_info"]["finish_reason"]) == (
            [first],
            {"type": "stop", "matched": first},
        )
        record = record_from_meta_info(result)
        assert (record.start, record.ids.shape) == (start, (len(prompt) - start, 3, 4))
        np.testing.assert_array_equal(record.ids, oracle.run(prompt).ids[start:])
    for start in (len(prompt) + 1, -1, 2**63):
        with pytest.raises(InvalidRequestError, match="routed_experts_start_len"):
            ask(start)


# --- a gap is swallowed: except-pass around the attach


def test_missing_row_fails_the_request_with_its_position(testbed):
    drive, rng = testbed.drive(disable_radix_cache=True), make_rng(8)
    drive.add(
        *(request(rid, random_prompt(rng, 30), 10, asks=rid != "quiet") for rid in ("hurt", "quiet", "neighbour"))
    )
    drive.steps(6)
    for rid in ("hurt", "quiet"):
        drive.core.capturers[0].host_cache.clear(drive.core.ranks[0].pages.kv_slots(drive.reqs[rid], 17, 18))
    drive.run()
    with pytest.raises(RoutingIncompleteError, match=r"token 17 is not known; expected all \d+ rows"):
        raise drive.outputs["hurt"].end.error
    assert drive.outputs["hurt"].end.routed_experts is None
    assert len(drive.outputs["hurt"].tokens) == 10
    assert drive.core.request_table.finished == {"error": 1, "length": 2}
    for rid in ("quiet", "neighbour"):
        assert drive.outputs[rid].end.error is None
    drive.run(request("next", random_prompt(rng, 30), 10))
    np.testing.assert_array_equal(drive.outputs["next"].end.routed_experts.valid, None)


def test_missing_row_is_raised_at_the_caller_and_the_engine_lives(tokenizer):
    with new_engine(tokenizer, deterministic=True) as engine:
        core = engine.components.core
        long = GREEDY | {"max_tokens": 69}  # as many as fit the context
        stream = engine.generate(
            input_ids=list(range(3, 30)), sampling_params=long, stream=True, return_routed_experts=True
        )
        next(stream)
        engine.thread.run_between_steps(
            lambda: core.capturers[0].host_cache.clear(np.arange(core.runner.config.pool.num_slots))
        )
        with pytest.raises(RoutingIncompleteError, match="token 0 is not known"):
            list(stream)
        engine.flush_cache()
        result = engine.generate("one two three four", GREEDY, return_routed_experts=True)
        record_from_meta_info(result).validate()
        assert engine.check_integrity() == []


# --- old policy's rows after a weight update: the cache outlives the weights


@pytest.mark.parametrize("cache", ["flush", "keep"])
def test_pages_of_an_old_version_do_not_match(testbed, cache):
    drive, prompt = testbed.drive(), random_prompt(make_rng(9), 40)
    drive.run(request("old", prompt, 8))
    drive.run(request("old again", prompt, 8))
    drive.add(request("across", prompt, 20))
    drive.steps(6)
    version = drive.update_weights(other_weights(1), cache=cache)
    assert drive.core.ranks[0].pages.cache.num_cached == 0  # the pages that "across" still reads are its own
    drive.run(request("new", prompt, 8))
    assert drive.core.ranks[0].namespace(drive.reqs["new"]) != drive.core.ranks[0].namespace(drive.reqs["old"])
    drive.run(request("new again", prompt, 8))
    assert_all_faithful(drive)
    ends = {rid: ends.end for rid, ends in drive.outputs.items()}
    assert [ends[rid].cached_tokens for rid in ("old", "old again", "across", "new", "new again")] == [0, 36, 36, 0, 36]
    assert ends["new"].routed_experts.version_spans == ((0, 47, version),)
    assert ends["new again"].routed_experts.version_spans == ((0, 47, version),)
    (low, cut, before), (_, high, after) = ends["across"].routed_experts.version_spans
    assert (low, high, before, after) == (0, 59, version - 1, version)
    assert 40 <= cut < 50
    assert_margin_rule(other_oracle(1), [(drive.reqs["new"].tokens, ends["new"].routed_experts.ids)])


# --- the full history is sent every turn


def test_turns_send_only_new_rows(testbed):
    drive, rng, history, rows, record_ids = testbed.drive(), make_rng(10), np.zeros(0, np.int32), 0, []
    for turn in range(20):
        prompt = np.concatenate([history, random_prompt(rng, 2)])
        drive.run(request(f"turn{turn}", prompt, 2, start=len(record_ids)))
        record = drive.outputs[f"turn{turn}"].end.routed_experts
        assert record.start == len(record_ids)
        record_ids += list(record.ids)
        rows += record.num_rows
        history = np.concatenate([prompt, drive.outputs[f"turn{turn}"].tokens]).astype(np.int32)
    assert rows == history.size - 1
    assert_all_faithful(drive)
    assert_margin_rule(testbed.oracle, [(history, np.stack(record_ids))])


# --- another forward replays by accident; missing rows are replayed as expert 0


@pytest.fixture(scope="module")
def score():
    """The training forward, jitted: (tokens, routed or None) -> logits and executed ids."""
    model = build_model(tiny_config(), tiny_tensors(tiny_config()))
    return jax.jit(lambda tokens, routed: forward(model, tokens, routed=routed, return_routed=True))


TOKENS = np.stack([random_prompt(make_rng(seed), 20) for seed in (11, 12)])


def routed_batch(ids, valid):
    return RoutedBatch(jnp.asarray(ids), jnp.asarray(valid), jnp.zeros(np.shape(valid), bool))


def test_two_forwards_in_one_process_do_not_see_each_other(score):
    live = score(TOKENS, None)
    other_ids = (np.asarray(live.ids) + 5) % 16
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        replayed = [pool.submit(score, TOKENS, routed_batch(other_ids, np.ones(TOKENS.shape, bool))) for _ in range(4)]
        live_runs = [pool.submit(score, TOKENS, None) for _ in range(4)]
    for result in replayed:
        np.testing.assert_array_equal(result.result().ids, other_ids)
        assert (np.asarray(result.result().logits) != np.asarray(live.logits)).any(axis=(1, 2)).all()
    for result in (*(future.result() for future in live_runs), score(TOKENS, None)):
        np.testing.assert_array_equal(result.ids, live.ids)
        np.testing.assert_array_equal(result.logits, live.logits)


@pytest.mark.parametrize("filler", [0, 15, 255])
def test_invalid_rows_use_the_live_router(score, filler):
    """Invalid rows change no bit, whatever they hold. Replay of the live router's own choice changes no bit either."""
    live, valid = score(TOKENS, None), np.arange(TOKENS.size).reshape(TOKENS.shape) % 3 > 0
    live_ids = np.asarray(live.ids)
    all_valid = score(TOKENS, routed_batch(live_ids, np.ones_like(valid)))
    some_valid = score(TOKENS, routed_batch(np.where(valid[..., None, None], live_ids, np.uint8(filler)), valid))
    none_valid = score(TOKENS, routed_batch(np.full_like(live_ids, filler), np.zeros_like(valid)))
    for out in (all_valid, some_valid, none_valid):
        np.testing.assert_array_equal(out.ids, live.ids)
        np.testing.assert_array_equal(out.logits, live.logits)


def test_a_row_of_one_expert_repeated_is_no_record(testbed):
    drive = testbed.drive()
    drive.run(request("r", random_prompt(make_rng(13), 10), 4))
    record = drive.outputs["r"].end.routed_experts
    ids = record.ids.copy()
    ids[5] = 0
    with pytest.raises(ValueError, match="token 5, hidden layer 1, slot 1: expert 0 is repeated"):
        dataclasses.replace(record, ids=ids).validate()
