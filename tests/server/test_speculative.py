"""HTTP answers of an engine that drafts: what a choice, its stream, the counters and a refused request say."""

import pytest

from support.engines import on_engine_thread, open_engine
from support.http_server import parse_error, running, stream
from support.lazy_compile import lazy_compilation
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
    with lazy_compilation(), open_engine(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), **options) as engine:
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
        ("/v1/messages", DIALECTS["/v1/messages"] | {"speculative": value}),
        ("/v1/responses", DIALECTS["/v1/responses"] | {"speculative": value}),
    ):
        assert parse_error(server.post(path, body), 400)["param"] == "speculative", (path, value)
    assert server.post("/generate", BODY).status_code == 200


def chat(server, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0}
    return server.post("/v1/chat/completions", body | fields)


def test_a_prediction_of_a_chat_is_drafted_and_counted(engine, server):
    plain = chat(server, ignore_eos=True).json()
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]):
        before = engine.stats().speculative.accepted_by["prediction"]
        answer = chat(server, ignore_eos=True, prediction={"type": "content", "content": content}).json()
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == engine.stats().speculative.accepted_by["prediction"] - before
        assert details["rejected_prediction_tokens"] >= 0
    wrong = chat(server, ignore_eos=True, prediction={"type": "content", "content": "x y z"}).json()
    assert wrong["choices"][0]["message"] == plain["choices"][0]["message"]
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"content": "a"},
        {"type": "tokens", "content": "a"},
        {"type": "content"},
        {"type": "content", "content": 3},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "content", "content": "a", "more": 1},
        {"type": "content", "content": "ab " * 9999},
    ],
)
def test_a_wrong_prediction_is_refused_and_other_requests_go_on(server, prediction):
    assert parse_error(chat(server, prediction=prediction), 400)["param"] == "prediction"
    assert chat(server).status_code == 200


def test_generate_takes_a_prediction_as_text_or_ids(engine, server):
    plain = server.post("/generate", BODY).json()
    for prediction in (plain["output_ids"], plain["text"]):
        before = engine.stats().speculative.proposed_by["prediction"]
        assert server.post("/generate", BODY | {"prediction": prediction}).json()["output_ids"] == plain["output_ids"]
        assert engine.stats().speculative.proposed_by["prediction"] > before
    body = BODY | {"input_ids": [[1], [2]], "prediction": [1]}
    assert parse_error(server.post("/generate", body), 400)["param"] == "prediction"


def test_answers_are_handed_in_and_forgotten_over_http(engine, server, tmp_path):
    rollout = {"prompt_ids": BODY["input_ids"], "output_ids": [1, 2]}
    assert parse_error(server.post("/remember_rollouts", rollout), 400)["param"] == "speculative_scope"
    options = dict(speculative_algorithm="NGRAM", speculative_scope="namespace", speculative_adaptive=False)
    folder = write_tiny_checkpoint(tmp_path)
    with lazy_compilation(), open_engine(folder, **options) as other, running(other) as sharing:
        answer = sharing.post("/generate", BODY).json()["output_ids"]
        rollout["output_ids"] = answer
        assert sharing.post("/remember_rollouts", rollout).json() == {"success": True}
        again = sharing.post("/generate", BODY).json()
        assert again["output_ids"] == answer and again["meta_info"]["spec_accept_rate"] == 1.0
        assert other.stats().speculative.accepted_by["rollout"] > 10
        lines = sharing.client.get("/metrics").text.splitlines()
        assert any(
            line.startswith('routed_experts_spec_decode_accepted_tokens_by_source_total{source="rollout"}')
            for line in lines
        )
        assert parse_error(sharing.post("/flush_cache?drafts=yes", None), 400)["param"] == "drafts"
        assert sharing.post("/flush_cache?drafts=true", None).status_code == 200
        before = other.stats().speculative.proposed_by["rollout"]
        assert sharing.post("/generate", BODY).json()["output_ids"] == answer
        assert other.stats().speculative.proposed_by["rollout"] == before
        assert parse_error(sharing.post("/remember_rollouts", rollout | {"seed": "a"}), 400)["param"] == "seed"


MESSAGES = [{"role": "user", "content": "hello"}]
DIALECTS = {
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}},
    "/inference/v1/generate": {"token_ids": [5, 9, 3], "sampling_params": {"max_tokens": 2, "ignore_eos": True}},
}


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    options = dict(speculative_algorithm="NGRAM", speculative_scope="namespace", speculative_remember=True)
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    with lazy_compilation(), open_engine(folder, **options) as engine, running(engine) as server:
        yield engine, server


def num_namespaces(engine, server, path, bodies):
    """Of these calls with one prompt."""
    engine.flush_cache(drafts=True)
    for body in bodies:
        response = server.post(path, body)
        assert response.status_code == 200, response.text
    return on_engine_thread(engine, lambda core: len(core.speculation._drafter.inner._store._prompts))


@pytest.mark.parametrize("path", DIALECTS)
def test_two_salts_with_one_extra_key_share_nothing(remembering, path):
    engine, server = remembering
    keys = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "ab", "extra_key": "c"},
        {"cache_salt": "a", "extra_key": "bc"},
        {"cache_salt": "c", "extra_key": "bc"},
        {"extra_key": "bc"},
    ]
    bodies = [DIALECTS[path] | {"ignore_eos": True} | key for key in keys]
    assert num_namespaces(engine, server, path, bodies * 2) == len(keys)
    same = [{"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": ""}]
    assert num_namespaces(engine, server, path, [DIALECTS[path] | {"ignore_eos": True} | key for key in same]) == 1
    for key, param in (
        ({"extra_key": "x" * 4097}, "extra_key"),
        ({"cache_salt": "x" * 4097}, "cache_salt"),
        ({"cache_salt": "x" * 4097, "extra_key": "x"}, "cache_salt"),
        ({"cache_salt": "x" * 4000, "extra_key": "x" * 4000}, "extra_key"),
    ):
        response = server.post(path, DIALECTS[path] | key)
        error = response.json()["error"]
        assert (response.status_code, "above the limit of 4096" in error["message"]) == (400, True)
        assert error["param"] == param


@pytest.mark.parametrize("path", [path for path in DIALECTS if path.startswith("/v1/")])
def test_a_call_without_drafts_is_no_draft_of_another(remembering, path):
    engine, server = remembering
    body = DIALECTS[path] | {"ignore_eos": True}
    assert num_namespaces(engine, server, path, [body | {"speculative": False}]) == 0
    assert num_namespaces(engine, server, path, [body | {"speculative": True}]) == 1


def test_an_answer_is_handed_in_for_the_salt_of_calls(remembering):
    """Two names of one key; a field that is not known may have meant the namespace."""
    engine, server = remembering
    rollout = {"prompt_ids": [5, 9, 3], "output_ids": [1, 2, 4]}
    assert num_namespaces(engine, server, "/remember_rollouts", [rollout | {"cache_salt": "a"}] * 2) == 1
    assert num_namespaces(engine, server, "/remember_rollouts", [rollout, rollout | {"cache_salt": "a"}]) == 2
    same = [{"cache_salt": "a"}, {"extra_key": "a"}]
    assert num_namespaces(engine, server, "/remember_rollouts", [rollout | key for key in same]) == 1
    error = parse_error(server.post("/remember_rollouts", rollout | {"user": "a"}), 400)
    assert (error["param"], error["code"]) == ("user", "unknown_field")


def test_the_salt_of_a_call_is_of_all_its_prompts(remembering):
    engine, server = remembering
    body = {"text": ["hello"] * 2, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    keys = [{}, {"cache_salt": "ab"}, {"cache_salt": "ab", "extra_key": ["c", None]}, {"extra_key": ["2:abc", "ab"]}]
    assert num_namespaces(engine, server, "/generate", [body | key for key in keys]) == 3
    error = parse_error(server.post("/generate", body | {"cache_salt": "x" * 4097}), 400)
    assert error["param"] == "cache_salt"


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
    actual = dict(line.rsplit(" ", 1) for line in lines if line.startswith(("vllm:spec", "sglang:spec")))
    for name, field in expected.items():
        assert float(actual.pop(name)) == getattr(totals.requests, field), name
    by_index = {
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}': n
        for i, n in totals.accepted_at.items()
    }
    assert {name: float(value) for name, value in actual.items() if not name.split("{")[0].endswith("_created")} == (
        by_index if compat == "vllm" else {}
    )


def test_logprobs_of_named_ids_are_refused(server):
    body = BODY | {"return_logprob": True, "token_ids_logprob": [3]}
    error = parse_error(server.post("/generate", body), 400)
    assert error["param"] == "token_ids_logprob" and "it speculates" in error["message"]
