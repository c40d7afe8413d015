"""Score: judged by the NumPy oracle, live and on routes that are given; it leaves pages, cache and requests alone."""

import dataclasses

import numpy as np
import pytest

from oracles.full_sequence import FullSequence
from oracles.margins import assert_margin_rule
from routed_experts import (
    CaptureDisabledError,
    Engine,
    InvalidRequestError,
    PromptTooLongError,
    RoutedExperts,
    RoutingAlignmentError,
)
from routed_experts.formats.meta_info import record_from_meta_info
from support.engines import SMALL, on_engine_thread
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_checkpoint

GREEDY = {"temperature": 0.0, "ignore_eos": True}
ORACLE = FullSequence(tiny_config(), tiny_tensors(tiny_config()))
EXPERTS, TOP_K, MOE_LAYERS = 16, 4, (1, 2, 3)


def random_tokens(length, seed=0):
    return np.random.default_rng(seed).integers(0, 313, length).tolist()


def drifted(num_tokens, seed=1, *, rows=None, start=0, valid=None):
    """A record of random routes, which no router would take."""
    rng = np.random.default_rng(seed)
    rows = num_tokens - 1 - start if rows is None else rows
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (rows, 3, 1)), axis=-1)[..., :TOP_K].copy()
    return RoutedExperts(
        ids=ids,
        start=start,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        layer_ids=MOE_LAYERS,
        num_hidden_layers=4,
        num_experts=EXPERTS,
        version_spans=((start, start + rows, 0),) if rows else (),
        valid=valid,
    )


def token_logprobs(judged, tokens):
    return judged.logprobs[np.arange(len(tokens) - 1), tokens[1:]]


LENGTHS = (1, 2, 17, 33, 512, 70, 5, 64, 16)


def test_live_scores_and_rows_are_the_oracles(engine):
    """More sequences than run at once, cut into chunks, up to the whole context."""
    sequences = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    outputs = engine.score(sequences)
    assert_margin_rule(ORACLE, [(out.token_ids, out.routed_experts.ids) for out in outputs])
    for tokens, out in zip(sequences, outputs, strict=True):
        record = out.routed_experts
        record.validate()
        assert (
            out.token_ids.tolist() == tokens
            and out.logprobs.dtype == np.float32
            and out.logprobs.shape == (len(tokens) - 1,)
        )
        assert (record.num_rows, record.start, record.num_tokens, record.valid) == (len(tokens), 0, len(tokens), None)
        assert record.version_spans == ((0, len(tokens), out.update_count),)
        np.testing.assert_allclose(out.logprobs, token_logprobs(ORACLE.run(tokens, record.ids), tokens), atol=1e-4)


def test_routes_that_are_given_are_executed_where_they_are_valid(engine):
    cases = {
        "all rows": lambda n: drifted(n, 1),
        "S rows": lambda n: drifted(n, 2, rows=n),
        "from the middle": lambda n: drifted(n, 3, start=n // 2),
        "some rows": lambda n: drifted(n, 4, valid=np.random.default_rng(4).random(n - 1) < 0.5),
        "none": lambda n: None,
    }
    sequences = [random_tokens(length, seed) for seed, length in enumerate((40, 77, 33, 61, 50))]
    records = [make(len(tokens)) for make, tokens in zip(cases.values(), sequences, strict=True)]
    for tokens, record, out in zip(sequences, records, engine.score(sequences, routed=records), strict=True):
        executed = out.routed_experts.ids
        np.testing.assert_allclose(out.logprobs, token_logprobs(ORACLE.run(tokens, executed), tokens), atol=1e-4)
        if record is not None:
            valid = np.ones(record.num_rows, bool) if record.valid is None else record.valid
            assert np.array_equal(executed[record.start : record.start + record.num_rows][valid], record.ids[valid])
            assert not np.array_equal(executed, ORACLE.run(tokens).ids)


def test_rows_of_a_rollout_give_back_its_logprobs(engine):
    result = engine.generate(
        input_ids=random_tokens(30),
        sampling_params={"temperature": 1.0, "seed": 4, "max_tokens": 40, "ignore_eos": True},
        return_logprob=True,
        return_routed_experts=True,
    )
    tokens = [*random_tokens(30), *result["output_ids"]]
    out = engine.score(tokens, routed=record_from_meta_info(result))
    returned = [value for value, _, _ in result["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(out.logprobs[29:], returned, atol=1e-4)


def test_scoring_leaves_pages_prefixes_and_requests_alone(engine):
    """Routes that no router takes must not reach a request through the cache."""
    tokens = random_tokens(60, 9)
    ask = dict(input_ids=tokens, sampling_params=GREEDY | {"max_tokens": 8}, return_routed_experts=True)
    engine.flush_cache()
    before = engine.generate(**ask)
    engine.flush_cache()
    stream = engine.generate(**ask | {"sampling_params": GREEDY | {"max_tokens": 60}, "stream": True})
    next(stream)
    engine.score([tokens, tokens], routed=[drifted(60), None])
    assert [*stream][-1]["output_ids"][:8] == before["output_ids"]
    engine.flush_cache()
    pages = on_engine_thread(engine, lambda core: core.ranks[0].pages.num_available)
    engine.score(tokens, routed=drifted(60))
    assert on_engine_thread(engine, lambda core: core.ranks[0].pages.num_available) == pages
    after = engine.generate(**ask)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"] == before["output_ids"] and record_from_meta_info(after) == record_from_meta_info(before)


def test_one_token_has_a_row_and_no_logprob(engine):
    out = engine.score([7])
    assert out.logprobs.shape == (0,) and out.routed_experts.num_rows == 1
    assert np.array_equal(out.routed_experts.ids, ORACLE.run([7]).ids)


@pytest.mark.parametrize(
    "ids", [[], [[]], "text", [1.0], [True], None, [[1], "x"], [313], [-1], [1 << 70], 5, {1: 2}, np.array(3)]
)
def test_what_is_no_tokens_is_refused(engine, ids):
    with pytest.raises(InvalidRequestError, match="token_ids") as caught:
        engine.score(ids)
    assert caught.value.param == "token_ids"


def test_too_long_a_sequence_is_refused(engine):
    with pytest.raises(PromptTooLongError, match="513 tokens, above the context of 512"):
        engine.score(random_tokens(513))


def with_ids(index, ids):
    record = drifted(40)
    copied = record.ids.copy()
    copied[index] = ids
    return dataclasses.replace(record, ids=copied)


MISFITS = {
    "another length": (
        lambda: drifted(41),
        "sample 1: 40 rows of tokens .* the sample has 40 tokens, so expected 39 rows",
    ),
    "too few rows": (lambda: drifted(40, rows=30), "sample 1: 30 rows"),
    "no record": (lambda: [1, 2], "sample 1: record is a list"),
    "an expert twice": (lambda: with_ids((7, 1), [3, 5, 3, 6]), "sample 1, token 7, hidden layer 2: .*repeat"),
    "zeros": (lambda: with_ids(12, 0), "sample 1, token 12, hidden layer 1: ids .0, 0, 0, 0. repeat"),
    "no such expert": (lambda: with_ids((3, 2, 1), 16), "sample 1, token 3, hidden layer 3, slot 1: id 16"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_routes_that_do_not_fit_name_sample_row_and_layer(engine, kind):
    make, match = MISFITS[kind]
    with pytest.raises(RoutingAlignmentError, match=match):
        engine.score([random_tokens(40), random_tokens(40)], routed=[None, make()])


def test_as_many_records_as_sequences_are_required(engine):
    with pytest.raises(RoutingAlignmentError, match="1 records for 2 sequences"):
        engine.score([[1, 2], [3, 4]], routed=[None])


def test_records_may_be_an_iterator(engine):
    sequences = [random_tokens(40), random_tokens(33)]
    records = [drifted(40), None]
    expected = engine.score(sequences, routed=records)
    for out, other in zip(engine.score(sequences, routed=iter(records)), expected, strict=True):
        assert np.array_equal(out.logprobs, other.logprobs) and out.routed_experts == other.routed_experts


def test_rows_are_left_out_on_request(engine):
    """The logprobs are the same, also on given routes."""
    tokens = random_tokens(40)
    for routed in (None, drifted(40)):
        alone = engine.score(tokens, routed=routed, return_routed_experts=False)
        for choice in (True, None):
            both = engine.score(tokens, routed=routed, return_routed_experts=choice)
            assert np.array_equal(alone.logprobs, both.logprobs)
            assert alone.routed_experts is None and both.routed_experts.num_rows == 40
    for value in ("x", 1, [True]):
        with pytest.raises(InvalidRequestError, match="must be True, False or None") as caught:
            engine.score(tokens, return_routed_experts=value)
        assert caught.value.param == "return_routed_experts"


def test_without_capture_there_are_scores_and_no_rows(tmp_path):
    with Engine(str(write_tiny_checkpoint(tmp_path)), **SMALL) as engine:
        tokens = random_tokens(20)
        out = engine.score(tokens)
        assert out.routed_experts is None
        np.testing.assert_allclose(out.logprobs, token_logprobs(ORACLE.run(tokens), tokens), atol=1e-4)
        for kwargs in ({"return_routed_experts": True}, {"routed": drifted(20)}):
            with pytest.raises(CaptureDisabledError, match="enable_return_routed_experts=True"):
                engine.score(tokens, **kwargs)
