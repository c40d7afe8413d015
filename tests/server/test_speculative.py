"""HTTP answers of an engine that drafts: what a choice, its stream, the counters and a refused request say."""

import pytest

from support.engines import open_engine
from support.http_server import parse_error, running, stream
from support.tiny_checkpoint import write_tiny_checkpoint

SPEC = {
    "spec_verify_ct",
    "spec_num_proposed_drafts",
    "spec_num_correct_drafts",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_correct_drafts_histogram",
    "spec_accept_token_num",
    "spec_draft_token_num",
    "spec_accepted_drafts",
    "spec_proposed_drafts",
}
BODY = {"input_ids": [3, 1, 4, 1, 5] * 4, "sampling_params": {"max_new_tokens": 24, "temperature": 0}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    options = dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, speculative_adaptive=False)
    with open_engine(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as server:
        yield server


def spec_fields(meta):
    return {name for name in meta if name.startswith("spec_")}


def test_counts_stand_at_the_end_of_a_choice_and_their_sums_are_the_counters(engine, server):
    before = engine.stats().speculative.requests
    parts = stream(server, "/generate", BODY)
    body = BODY | {"sampling_params": BODY["sampling_params"] | {"n": 2, "temperature": 0.5}}
    metas = [parts[-1]["meta_info"], *(answer["meta_info"] for answer in server.post("/generate", body).json())]
    assert all(not spec_fields(part["meta_info"]) for part in parts if part["meta_info"]["finish_reason"] is None)
    after = engine.stats().speculative.requests
    for meta in metas:
        assert spec_fields(meta) == SPEC
        assert len(meta["spec_correct_drafts_histogram"]) == 4
        correct = [index * count for index, count in enumerate(meta["spec_correct_drafts_histogram"])]
        assert sum(correct) == meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
    for name, total in (
        ("spec_verify_ct", after.verify_steps - before.verify_steps),
        ("spec_num_proposed_drafts", after.proposed - before.proposed),
        ("spec_num_correct_drafts", after.accepted - before.accepted),
    ):
        assert sum(meta[name] for meta in metas) == total
    assert after.verify_steps > before.verify_steps


def test_a_completion_with_drafts_is_the_one_without_them(engine, server):
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "prompt": BODY["input_ids"], "logprobs": 0}
    before = engine.stats().speculative.requests.verify_steps
    plain = server.post("/v1/completions", body | {"speculative": False}).json()
    assert engine.stats().speculative.requests.verify_steps == before
    drafted = server.post("/v1/completions", body).json()
    assert engine.stats().speculative.requests.verify_steps > before
    assert drafted["usage"] == plain["usage"]
    for key in ("text", "finish_reason"):
        assert drafted["choices"][0][key] == plain["choices"][0][key]
    of_tokens, expected = (answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (drafted, plain))
    assert of_tokens == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("value", ["no", 0, 1, 1.0, [True], {}])
def test_a_value_that_is_no_bool_is_refused_and_other_requests_go_on(server, value):
    for path, body in (
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"speculative": value}}),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "speculative": value}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [], "speculative": value}),
    ):
        assert parse_error(server.post(path, body), 400)["param"] == "speculative", (path, value)
    assert server.post("/generate", BODY).status_code == 200


@pytest.mark.parametrize(
    ("compat", "expected"),
    [
        (
            "vllm",
            {
                "vllm:spec_decode_num_drafts_total": "verify_steps",
                "vllm:spec_decode_num_draft_tokens_total": "proposed",
                "vllm:spec_decode_num_accepted_tokens_total": "accepted",
            },
        ),
        ("sglang", {"sglang:spec_accept_length": "accept_length", "sglang:spec_accept_rate": "accept_rate"}),
    ],
)
def test_the_other_servers_names_have_our_values(engine, compat, expected):
    with running(engine, metrics_compat=compat) as server:
        assert server.post("/generate", BODY).status_code == 200
        lines = server.client.get("/metrics").text.splitlines()
        totals = engine.stats().speculative
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(("vllm:spec", "sglang:spec")))
    for name, field in expected.items():
        assert float(found.pop(name)) == getattr(totals.requests, field), name
    by_index = {
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}': n
        for i, n in totals.accepted_at.items()
    }
    assert {name: float(value) for name, value in found.items() if not name.split("{")[0].endswith("_created")} == (
        by_index if compat == "vllm" else {}
    )
