"""A fleet of two answers as one server: references, aborts, pauses, statistics, metrics, keys, through its proxy."""

import concurrent.futures
import json
import re
import threading

import numpy as np
import openai
import pytest

from routed_experts.formats.meta_info import record_from_meta_info
from support.fleet_ids import check_ids
from support.fleet_process import ADMIN, KEY, wait_until
from support.http_server import parse_error

PROMPT = [5, 6, 7, 8, 9]
MADE_ID = re.compile(r"(r\d+)-[0-9a-f]{32}")


def generate(client, **body):
    call = {"input_ids": PROMPT, "max_new_tokens": 6, "sampling_params": {"ignore_eos": True}}
    response = client.post("/generate", json={**call, **body})
    assert response.status_code == 200, response.text
    return response.json()


def by_replica(client, count=2, **body):
    """An answer of each replica, by its tag."""
    answers = {}

    def ask():
        answer = generate(client, **body)
        answers.setdefault(MADE_ID.fullmatch(answer["meta_info"]["id"])[1], answer)
        return len(answers) == count

    wait_until(ask, pause=0.0)
    return answers


def test_the_ready_line_names_the_proxy_and_every_replica_serves(fleet, admin):
    assert fleet.proxy == "HAProxy"
    body = admin.get("/health").json()
    assert body["state"] == "serving" and body["num_replicas"] == 2 and len(body["replicas"]) == 2
    assert {replica["weight_version"] for replica in body["replicas"]} == {body["weight_version"]}
    assert admin.get("/health/live").json().keys() >= {"state", "phase"}, "of the replica"
    assert {entry["proxy"] for entry in admin.get("/get_server_info").json()["replicas"]} == {"HAProxy"}


def test_both_replicas_give_the_answers_of_one_model(client):
    sampling = {"temperature": 0.0}
    answers = by_replica(client, sampling_params=sampling, return_routed_experts=True)
    first, second = answers.values()
    assert first["output_ids"] == second["output_ids"]
    ids = [record_from_meta_info(answer).ids for answer in (first, second)]
    assert np.array_equal(*ids)


def test_samples_without_a_seed_differ_between_replicas(client):
    sampling = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 12}
    samples = {}

    def ask():
        answer = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling}).json()
        tag = MADE_ID.fullmatch(answer["meta_info"]["id"])[1]
        samples.setdefault(tag, []).append(tuple(answer["output_ids"]))
        return len(samples) == 2 and min(map(len, samples.values())) >= 6

    wait_until(ask, pause=0.0)
    drawn = [sample for actual in samples.values() for sample in actual]
    assert len(set(drawn)) == len(drawn)


def test_the_openai_client_completes_chats_and_streams(fleet):
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        (model,) = client.models.list()
        assert model.id == "w0"
        whole = client.completions.create(model="w0", prompt="The cat", max_tokens=12, temperature=0)
        parts = client.completions.create(model="w0", prompt="The cat", max_tokens=12, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in parts) == whole.choices[0].text
        chat = client.chat.completions.create(model="w0", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        assert re.fullmatch(r"chatcmpl-r\d+-[0-9a-f]{32}", chat.id)


def test_rows_are_fetched_from_whichever_replica_keeps_them(client):
    """50 fetches over connections of their own, which the proxy hands to both."""
    answers = by_replica(client, return_routed_experts=True, routed_experts_format="ref")
    for answer in answers.values():
        url, digest = answer["meta_info"]["routed_experts_ref"], answer["meta_info"]["routed_experts_info"]["sha256"]

        def fetch(_, url=url):
            response = client.get(url, headers={"connection": "close"})
            return response.status_code, response.content, response.headers["etag"]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            actual = set(pool.map(fetch, range(25)))
        ((status, body, etag),) = actual
        assert status == 200 and etag and digest
        parts = [client.get(url, headers={"range": f"bytes={low}-{low + 39}"}) for low in range(0, len(body), 40)]
        assert {part.status_code for part in parts} == {206} and b"".join(part.content for part in parts) == body
        for _ in range(6):
            assert client.get(url, headers={"if-none-match": etag}).status_code == 304
            assert client.head(url).headers["content-length"] == str(len(body))
            assert client.get(url, headers={"range": "bytes=99999-"}).status_code == 416
            assert client.get(url.replace("choice=0", "choice=5")).json()["error"]["param"] == "choice"
        archive = [client.get(f"{url}&format=safetensors").content for _ in range(4)]
        assert len(set(archive)) == 1 and len(archive[0]) > len(body)


def test_rows_belong_to_their_key_on_every_replica(client, admin):
    for answer in by_replica(client, return_routed_experts=True, routed_experts_format="ref").values():
        url = answer["meta_info"]["routed_experts_ref"]
        for _ in range(6):
            parse_error(admin.get(url), 403)
            parse_error(admin.delete(url), 403)
        assert client.get(url).status_code == 200


def test_deleted_rows_are_gone_everywhere(client):
    for answer in by_replica(client, return_routed_experts=True, routed_experts_format="ref").values():
        url = answer["meta_info"]["routed_experts_ref"]
        assert client.delete(url).status_code == 204
        for _ in range(4):
            assert parse_error(client.get(url), 404)["code"] == "routing_not_found"
    assert parse_error(client.get("/v1/routing/r99-" + "0" * 32), 404)["code"] == "routing_gone"
    assert parse_error(client.get("/v1/routing/nobody"), 404)["code"] == "routing_not_found"


def test_rows_of_an_id_of_a_client_that_looks_like_a_replicas_are_found_from_every_replica(client):
    for number, tag in enumerate(("r0", "r1", "r77")):
        name = f"{tag}-{number:032x}"
        generate(client, rid=name, return_routed_experts=True, routed_experts_format="ref")
        for _ in range(4):
            assert client.get(f"/v1/routing/{name}").status_code == 200


def test_rows_of_an_id_that_is_used_again_are_those_of_the_last_request(client, admin):
    """Under two keys, on whichever replica the proxy chooses: the prompts differ in length."""
    for number in range(6):
        name = f"again-{number}"
        for sender, prompt in ((client, PROMPT), (admin, [*PROMPT, *PROMPT])):
            generate(sender, rid=name, input_ids=prompt, return_routed_experts=True, routed_experts_format="ref")
        fetched = [admin.get(f"/v1/routing/{name}") for _ in range(4)]
        infos = [json.loads(response.headers["x-routed-experts-info"]) for response in fetched]
        assert [info["num_prompt_tokens"] for info in infos] == [2 * len(PROMPT)] * 4
        for _ in range(4):
            parse_error(client.get(f"/v1/routing/{name}"), 403)
        assert admin.delete(f"/v1/routing/{name}").status_code == 204
        for _ in range(4):
            assert parse_error(admin.get(f"/v1/routing/{name}"), 404)["code"] == "routing_not_found"


def test_the_rows_of_many_sequences_pass_whole(client):
    prompts = [np.random.default_rng(seed).integers(3, 313, 60).tolist() for seed in range(4)]
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0.0, "n": 8}, "max_new_tokens": 60}
    answers = client.post("/generate", json={**body, "return_routed_experts": True}).json()
    records = [record_from_meta_info(answer) for answer in answers]
    expected = [60 + len(answer["output_ids"]) - 1 for answer in answers]
    assert len(answers) == 32 and [record.num_rows for record in records] == expected


def test_an_abort_by_id_reaches_the_replica_that_runs_it(fleet, client, admin):
    aborted = 0
    for number in range(6):
        rid, started, ended = f"long-{number}", threading.Event(), []

        def read(rid=rid, started=started, ended=ended):
            body = {"input_ids": PROMPT, "rid": rid, "stream": True}
            body["sampling_params"] = {"max_new_tokens": 400, "ignore_eos": True}
            with fleet.client() as own, own.stream("POST", "/generate", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        ended[:] = [json.loads(line.removeprefix("data: "))["meta_info"]["finish_reason"]]
                        started.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(30)
        response = admin.post("/abort_request", json={"rid": rid})
        assert response.status_code == 200 and response.json()["aborted"] in (0, 1), response.text
        thread.join(30)
        assert ended[0]["type"] == ("abort" if response.json()["aborted"] else "length")
        aborted += response.json()["aborted"]
    assert aborted >= 4, "they were long"
    parse_error(client.post("/abort_request", json={"rid": "x"}), 403)
    parse_error(admin.post("/abort_request", json={}), 400)
    assert admin.post("/abort_request", json={"abort_all": True}).json() == {"success": True, "aborted": 0}


def test_a_client_that_leaves_a_stream_frees_its_pages(fleet, client, admin):
    for _ in range(4):
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}}
        with fleet.client() as own, own.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
    wait_until(lambda: gauges(admin, "routed_experts_requests_running") == [0.0, 0.0], seconds=5)
    active = [value for name, value in samples(admin) if 'state="active"' in name]
    assert active == [0.0, 0.0]
    outcomes = {name: value for name, value in samples(admin) if 'outcome="abort"' in name}
    assert sum(outcomes.values()) >= 1


def samples(client):
    lines = [line for line in client.get("/metrics").text.splitlines() if line and not line.startswith("#")]
    return [(line.rpartition(" ")[0], float(line.rpartition(" ")[2])) for line in lines]


def gauges(client, name):
    return [value for sample, value in samples(client) if sample.startswith(f"{name}{{")]


def test_metrics_have_every_series_once_a_replica(admin):
    names = [name for name, _ in samples(admin)]
    assert len(names) == len(set(names))
    tags = {re.search(r'replica="(r\d+)"', name)[1] for name in names if "replica=" in name}
    assert len(tags) == 2
    per_tag = [sorted(name.replace(tag, "r") for name in names if f'"{tag}"' in name) for tag in tags]
    assert len(per_tag[0]) > 50 and {line.partition("{")[0] for line in per_tag[0]} == {
        line.partition("{")[0] for line in per_tag[1]
    }
    values = dict(samples(admin))
    assert values['routed_experts_fleet_replicas{state="serving"}'] == 2.0
    assert {"routed_experts_fleet_weight_version", "routed_experts_replica_deaths_total"} <= values.keys()
    text = admin.get("/metrics").text
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


def test_expert_counts_are_summed_and_reset_on_all(client, admin):
    assert admin.post("/v1/routing/reset").json() == {"success": True}
    answers = [generate(client, return_routed_experts=True) for _ in range(8)]
    tokens = sum(record_from_meta_info(answer).num_rows - answer["meta_info"]["cached_tokens"] for answer in answers)
    for _ in range(3):
        stats = client.get("/v1/routing/stats")
        assert sum(stats.json()["num_tokens"].values()) == tokens
        assert np.sum(stats.json()["counts"]["prompt"]) + np.sum(stats.json()["counts"]["generated"]) == tokens * 4
        assert client.get("/v1/routing/stats", headers={"if-none-match": stats.headers["etag"]}).status_code == 304
    admin.post("/v1/routing/reset")
    assert sum(client.get("/v1/routing/stats").json()["num_tokens"].values()) == 0


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait"])
def test_a_pause_holds_all_replicas_until_all_continue(fleet, client, admin, mode):
    assert admin.post("/pause_generation", json={"mode": mode}).json()["mode"] == mode
    assert admin.get("/ready").status_code == 503 and admin.get("/health").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(generate, client) for _ in range(6)]
        waiting = wait_until(lambda: sum(gauges(admin, "routed_experts_requests_waiting")) == 6.0, seconds=10)
        assert waiting and not any(answer.done() for answer in answers)
        parse_error(admin.post("/flush_cache"), 400)
        assert admin.post("/continue_generation").status_code == 200
        assert all(len(answer.result()["output_ids"]) == 6 for answer in answers)
    assert admin.get("/ready").status_code == 200


def test_a_wrong_mode_is_refused_by_all_alike(admin):
    error = parse_error(admin.post("/pause_generation", json={"mode": "nap"}), 400)
    assert error["param"] == "mode" and admin.get("/ready").status_code == 200


def test_a_flush_empties_the_caches_of_all(client, admin):
    by_replica(client)
    assert admin.post("/flush_cache").json()["success"] is True
    cached = [value for name, value in samples(admin) if 'state="cached"' in name]
    assert cached == [0.0, 0.0]
    assert {
        answer["meta_info"]["cached_tokens"] for answer in by_replica(client, input_ids=list(range(40, 60))).values()
    } == {0}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/v1/routing/x"),
        ("GET", "/get_server_info"),
        ("POST", "/generate"),
        ("POST", "/flush_cache"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/abort_request"),
    ],
)
def test_every_replica_checks_the_key(fleet, client, method, path):
    with fleet.client(key=None) as stranger, fleet.client(key="not-a-key-of-it") as guesser:
        for _ in range(4):
            assert parse_error(stranger.request(method, path), 401)["code"] == "missing_api_key"
            assert parse_error(guesser.request(method, path), 401)["code"] == "invalid_api_key"
        assert stranger.get("/health").status_code == stranger.get("/ready").status_code == 200
    if path in ("/flush_cache", "/update_weights_from_disk", "/abort_request"):
        assert parse_error(client.request(method, path, json={}), 403)["code"] == "admin_key_required"


def test_an_answer_has_the_id_of_its_request(client):
    check_ids(client)


def test_errors_keep_their_form_through_the_proxy(client):
    parse_error(client.get("/nowhere"), 404)
    parse_error(client.get("/generate"), 405)
    parse_error(client.post("/generate", json={"input_ids": [1], "max_new_tokens": -1}), 400)
    parse_error(client.post("/generate", content=b"{", headers={"content-type": "application/json"}), 400)
    assert ADMIN not in client.get("/metrics").text
