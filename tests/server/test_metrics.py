"""What /metrics counts: every name in API.md, each outcome once, and nothing compiled once the server is ready."""

import contextlib
import re
import threading
import time
from pathlib import Path

import httpx
import pytest

from support.engines import HeldThread, PausedRequests, on_engine_thread, open_engine
from support.http_server import parse_error, running, stream
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

NAMES = """
requests_running requests_waiting requests_accepted_total requests_finished_total prompt_tokens_total
generation_tokens_total kv_pages kv_usage_ratio prefix_cache_query_tokens_total prefix_cache_hit_tokens_total
time_to_first_token_seconds_count inter_token_latency_seconds_count e2e_request_latency_seconds_count
request_queue_time_seconds_count preemptions_total startup_seconds compilations_total compile_cache_hits_total
last_step_age_seconds watchdog_trips_total capture_rows_total capture_missing_rows_total
capture_payload_bytes_total capture_host_bytes weight_version_info weight_updates_total
""".split()
GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"


def metrics(server):
    """Samples of /metrics by name (without our prefix) and labels."""
    lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith("routed_experts_")]
    return {
        name.removeprefix("routed_experts_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)
    }


def outcomes(metrics):
    head = 'requests_finished_total{outcome="'
    return {
        name.removeprefix(head).removesuffix('"}'): value for name, value in metrics.items() if name.startswith(head)
    }


def test_every_name_is_there_and_counts(server):
    body = {
        "input_ids": [5, 6, 7] * 8,
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_routed_experts": True,
    }
    before = metrics(server)
    for _ in range(2):
        assert stream(server, "/generate", body)
    after = metrics(server)
    assert not [name for name in NAMES if not any(sample.split("{")[0] == name for sample in after)]
    for name, grown in (
        ("prefix_cache_query_tokens_total", 48),
        ("prompt_tokens_total", 48),
        ("request_queue_time_seconds_count", 2),
    ):
        assert after[name] == before[name] + grown, name
    hits = after["prefix_cache_hit_tokens_total"] - before["prefix_cache_hit_tokens_total"]
    rows = after["capture_rows_total"] - before["capture_rows_total"]
    assert hits >= 16, "the second call's prompt is known"
    assert 2 * 27 - hits <= rows <= 2 * 28 - hits, (
        "a row for each token that was fed: S - 1, and one more where a step was in flight"
    )
    for name in ("capture_missing_rows_total", "watchdog_trips_total"):  # of a shared engine
        assert after[name] == before[name], name
    assert after["request_queue_time_seconds_sum"] <= after["e2e_request_latency_seconds_sum"]


def compat_metrics(server, prefix):
    """Samples under another server's names, without the label that all have: the model."""
    lines = server.client.get("/metrics").text.splitlines()
    split = [line.rsplit(" ", 1) for line in lines if line.startswith(prefix) and ":spec_" not in line]
    assert all('model_name="tiny"' in name for name, _ in split), split
    return {re.sub(r',?model_name="tiny",?', "", name).replace("{}", ""): float(value) for name, value in split}


def test_every_metric_of_a_server_is_in_the_guide(server):
    guide = GUIDE.read_text(encoding="utf-8")
    documented = {name for name in re.findall(r"`([a-z0-9_]+)(?:\{[a-z_,]+\})?`", guide)}
    text = server.client.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE routed_experts_(\S+) (\w+)$", text, re.MULTILINE))
    assert len(kinds) > 30
    elsewhere = {"deferred_slots_total", "host_experts_seconds_total", "resident_hit_ratio"}  # docs/experts.md
    elsewhere |= {"resident_swaps_total", "resident_swap_failures_total"}
    made = {name for name in kinds if name.endswith("_created")}  # by the Prometheus client
    assert sorted(set(kinds) - made - documented - elsewhere) == []
    assert [outcome for outcome in outcomes(metrics(server)) if f"`{outcome}`" not in guide] == []


def described(server, name):
    """What is said of a metric: its line of HELP, and its row of the guide."""
    (text,) = re.findall(rf"^# HELP routed_experts_{name} (.*)$", server.client.get("/metrics").text, re.MULTILINE)
    rows = [row for row in GUIDE.read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    (row,) = [row for row in rows if f"`{name}`" in row]
    return text.lower(), row.lower()


def test_metrics_of_streamed_requests_alone_say_so(server):
    before = metrics(server)
    assert server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).status_code == 200
    after = metrics(server)
    assert after["e2e_request_latency_seconds_count"] == before["e2e_request_latency_seconds_count"] + 1
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert after[f"{name}_count"] == before[f"{name}_count"]
        assert all("streamed requests alone" in text for text in described(server, name))


def wait_grown(server, before, grown):
    """Until these metrics have grown by so much."""
    end = time.monotonic() + 20
    while (after := metrics(server)) and any(after[name] != before[name] + count for name, count in grown.items()):
        assert time.monotonic() < end, {name: after[name] - before[name] for name in grown}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("outcome", ["abort", "timeout"])
def test_a_call_that_ends_while_it_is_accepted_is_counted_as_any(engine, outcome, streamed):
    body = {
        "input_ids": [5] * 50,
        "sampling_params": {"max_new_tokens": 70, "ignore_eos": True, "n": 2},
        "stream": streamed,
    }
    with running(engine, request_timeout=1.0 if outcome == "timeout" else 60.0) as server:
        before = metrics(server)
        held = HeldThread(engine)
        try:
            with httpx.Client(
                base_url=server.url, timeout=60 if outcome == "timeout" else 0.5, trust_env=False
            ) as client:
                call = held.submit(lambda: client.post("/generate", json=body))
                if outcome == "timeout":
                    assert call.result().status_code == 408
                else:
                    assert isinstance(call.exception(), httpx.TimeoutException)
            server.wait_idle()
        finally:
            held.release()
        ended = f'requests_finished_total{{outcome="{outcome}"}}'
        names = ("e2e_request_latency_seconds_count", "requests_accepted_total", ended)
        wait_grown(server, {ended: 0, **before}, {"prompt_tokens_total": 100, **dict.fromkeys(names, 2)})


def test_a_call_that_ends_before_it_is_refused_is_not_counted(engine):
    with running(engine, request_timeout=1.0) as server, contextlib.ExitStack() as stack:
        names = ("e2e_request_latency_seconds_count", "prompt_tokens_total", "requests_accepted_total")
        body = {"input_ids": [5], "rid": "same", "sampling_params": {"max_new_tokens": 1}}
        before = metrics(server)
        held = HeldThread(engine)
        stack.callback(held.release)
        calls = [held.submit(lambda: server.post("/generate", body)) for _ in range(2)]
        assert [call.result().status_code for call in calls] == [408, 408]
        server.wait_idle()
        stack.close()
        wait_grown(server, before, dict.fromkeys(names, 1))
        for _ in range(3):
            assert (
                server.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).status_code
                == 200
            )
        wait_grown(server, before, dict.fromkeys(names, 4))
        assert not server.state._background, "no call waits for outputs"


def test_a_request_that_is_retracted_for_a_flush_counts_as_preempted(engine):
    with running(engine) as server:
        before = metrics(server)["preemptions_total"]
        sampling = {"max_new_tokens": 12, "ignore_eos": True}
        paused = PausedRequests(engine, [5, 6, 7], [6, 7, 8], sampling_params=sampling)
        engine.flush_cache(retract=True)
        engine.resume()
        assert [len(answer["output_ids"]) for answer in paused.results()] == [12, 12]
        assert metrics(server)["preemptions_total"] == before + 2
        for text in described(server, "preemptions_total"):
            assert "pages ran out" in text and "flush" in text and "memory" in text


def test_names_of_vllm_count_what_vllm_counts(engine):
    """Requests that follow one another: a step a token, and every token of prompts and answers in the sum."""
    body = {"prompt": [5, 6, 7] * 4, "max_tokens": 6, "ignore_eos": True}
    with running(engine, metrics_compat="vllm") as server:
        before = compat_metrics(server, "vllm:")
        for _ in range(3):
            assert server.post("/v1/completions", body).status_code == 200
        assert stream(server, "/v1/completions", body)
        after = compat_metrics(server, "vllm:")
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    for name, value in (
        ("iteration_tokens_total_sum", 4 * 18),
        ("iteration_tokens_total_count", 4 * 6),
        ("prompt_tokens_total", 4 * 12),
        ("generation_tokens_total", 4 * 6),
        ('request_success_total{finished_reason="length"}', 4),
        ("request_prompt_tokens_sum", 4 * 12),
        ("request_generation_tokens_sum", 4 * 6),
        ("request_params_max_tokens_sum", 4 * 6),
        ("request_params_n_count", 4),
        ("request_queue_time_seconds_count", 4),
        ("request_inference_time_seconds_count", 4),
        ("e2e_request_latency_seconds_count", 4),
        ("request_prefill_time_seconds_count", 1),
        ("request_decode_time_seconds_count", 1),
        ("time_to_first_token_seconds_count", 1),
        ("inter_token_latency_seconds_count", 1),
        ("request_num_preemptions_count", 4),
    ):
        assert grown[f"vllm:{name}"] == value, name
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
    total = after["vllm:e2e_request_latency_seconds_sum"]
    assert total >= after["vllm:request_inference_time_seconds_sum"] >= after["vllm:request_prefill_time_seconds_sum"]
    (config,) = [name for name in after if name.startswith("vllm:cache_config_info")]
    assert 'kv_cache_size_tokens="' in config and 'kv_cache_max_concurrency="' in config and 'block_size="' in config


def test_names_of_sglang_count_what_sglang_counts(engine):
    body = {"input_ids": [5, 6, 7] * 12, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    with running(engine, metrics_compat="sglang") as server:
        engine.pause(mode="in_place")
        try:
            waiting = threading.Thread(target=lambda: server.post("/generate", body))
            waiting.start()
            deadline = time.monotonic() + 20
            while compat_metrics(server, "sglang:")["sglang:num_queue_reqs"] < 1:
                assert time.monotonic() < deadline
        finally:
            engine.resume()
        waiting.join()
        assert server.post("/generate", body).status_code == 200
        after = compat_metrics(server, "sglang:")
    assert after["sglang:num_used_tokens"] == 0 < after["sglang:max_total_num_tokens"]
    assert after["sglang:prompt_tokens_total"] == 72 and after["sglang:generation_tokens_total"] == 8
    assert after["sglang:num_requests_total"] == after["sglang:e2e_request_latency_seconds_count"] == 2
    assert after["sglang:cached_tokens_total"] >= 32 and 0 < after["sglang:cache_hit_rate"] <= 1


def test_nothing_is_compiled_for_requests(server):
    before = metrics(server)
    assert before['compilations_total{phase="startup"}'] > 0
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.7,
    }
    assert server.post("/v1/chat/completions", body).status_code == 200
    after = metrics(server)
    assert after['compilations_total{phase="serving"}'] == before['compilations_total{phase="serving"}']


def test_what_takes_too_long_ends_as_timeout(engine):
    with running(engine, request_timeout=0.2) as server:
        before = metrics(server)
        engine.pause(mode="in_place")
        try:
            assert parse_error(server.post("/generate", {"text": "a"}), 408)["code"] == "request_timeout"
            with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
                lines = [line for line in response.iter_lines() if line]
            assert "request_timeout" in lines[-2] and lines[-1] == "data: [DONE]"
        finally:
            engine.resume()
        server.wait_idle()
        on_engine_thread(engine, lambda core: None)  # the abort came before it
        after = metrics(server)
        changes = {name: value - outcomes(before)[name] for name, value in outcomes(after).items()}
        assert changes == {"stop": 0, "length": 0, "abort": 0, "timeout": 2, "rejected": 0, "error": 0}
        assert after["requests_accepted_total"] == sum(outcomes(after).values())


def test_what_finds_the_queue_full_ends_as_rejected(engine):
    with running(engine) as server:
        before = metrics(server)
        engine.pause(mode="in_place")
        full = {"input_ids": [[5]] * 256, "sampling_params": {"max_new_tokens": 1, "n": 4}, "rid": "full"}
        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(httpx.post(server.url + "/generate", json=full, trust_env=False))
        )
        waiting.start()
        try:
            while on_engine_thread(engine, lambda core: core.request_table.num_live) < 1024:
                assert waiting.is_alive()
            response = server.post("/v1/completions", {"prompt": ["a", "b"]})
            assert parse_error(response, 429)["code"] == "queue_full" and response.headers["retry-after"]
            assert engine.abort(rid="full") == 1024
        finally:
            engine.resume()
            waiting.join(30)
        server.wait_idle()
        after = metrics(server)
        changes = {name: value - outcomes(before)[name] for name, value in outcomes(after).items()}
        assert changes["rejected"] == 2 and changes["abort"] == 1024
        assert after["requests_accepted_total"] == sum(outcomes(after).values())
        assert answers[0].status_code == 200 and len(answers[0].json()) == 1024


def test_a_stall_is_counted_once(engine):
    release, stuck, live = threading.Event(), threading.Event(), []

    def block(core):
        live.append(core.request_table.num_live)
        stuck.set()
        release.wait(30)

    with running(engine, stall_timeout=0.1) as server:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}, "stream": True}
        with server.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            blocker = threading.Thread(target=on_engine_thread, args=(engine, block))
            blocker.start()
            try:
                assert stuck.wait(10) and live == [1], "the request has not ended before the thread was stuck"
                with httpx.Client(base_url=server.url, trust_env=False) as other:
                    while other.get("/health").status_code == 200:
                        continue
                    assert {other.get("/health").json()["state"] for _ in range(3)} == {"stalled"}
            finally:
                release.set()
                blocker.join()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert metrics(server)["watchdog_trips_total"] == 1


def test_drafts_are_counted_under_our_names_and_the_other_servers(tmp_path):
    folder = write_tiny_checkpoint(tmp_path)
    body = {"input_ids": [3, 1, 4, 1, 5] * 4, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    options = dict(speculative_algorithm="NGRAM", speculative_adaptive=False)
    with lazy_compilation(), open_engine(folder, **options) as engine:
        for compat, name in (("vllm", "vllm:spec_decode_num_drafts_total"), ("sglang", "sglang:spec_accept_length")):
            with running(engine, metrics_compat=compat) as server:
                meta = server.post("/generate", body).json()["meta_info"]
                actual, text = metrics(server), server.client.get("/metrics").text
                info = server.client.get("/get_server_info").json()
                assert name in text
        totals = engine.stats().speculative
    assert actual["spec_decode_num_drafts_total"] == totals.requests.verify_steps == 2 * meta["spec_verify_ct"] > 0
    assert actual["spec_decode_num_draft_tokens_total"] == totals.requests.proposed
    assert actual["spec_decode_num_accepted_tokens_total"] == totals.requests.accepted
    by_index = 'spec_decode_num_accepted_tokens_per_pos_total{position="'
    assert sum(value for key, value in actual.items() if key.startswith(by_index)) == totals.requests.accepted
    assert actual["spec_decode_verify_steps_total"] == totals.steps
    assert actual["spec_accept_length"] == totals.requests.accept_length >= 1.0
    assert info["internal_states"][0]["avg_spec_accept_length"] == totals.requests.accept_length


def test_an_engine_without_drafts_has_no_metrics_of_them(server):
    assert not [name for name in metrics(server) if name.startswith("spec_")]


def test_a_request_says_whether_it_has_drafts_and_a_wrong_type_is_refused(server):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", chat | {"speculative": False}).status_code == 200
    assert server.post("/generate", {"input_ids": [1], "sampling_params": {"speculative": False}}).status_code == 200
    for path, body in (
        ("/v1/chat/completions", chat | {"speculative": "no"}),
        ("/generate", {"input_ids": [1], "sampling_params": {"speculative": 0}}),
    ):
        assert "speculative" in parse_error(server.post(path, body), 400)["param"]
