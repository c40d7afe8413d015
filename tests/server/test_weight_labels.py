"""Weight versions over HTTP: labels and counts on every surface, with rows and without, streamed and whole, and 32
streams that run while weights come from disk."""

import concurrent.futures
import json

import numpy as np
import pytest

from routed_experts.formats import record_from_response
from routed_experts.formats.archive import decode_record
from routed_experts.formats.meta_info import record_from_meta_info
from support.engines import open_engine
from support.http_server import events, parse_error, running, stream
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

SURFACES = {
    "/generate": {"input_ids": [5, 6, 7] * 8, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}},
    "/v1/completions": {"prompt": [5, 6, 7] * 8, "max_tokens": 5, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 5, "ignore_eos": True},
}
LABEL = "größer \N{FOX FACE} step-4"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        write_tiny_checkpoint(folder / f"seed{seed}", seed=seed)
    return folder


@pytest.fixture(scope="module")
def servers(root):
    """One whose engine records rows, and one whose engine does not."""
    with (
        lazy_compilation(),
        open_engine(root / "seed0", enable_return_routed_experts=True) as capture,
        open_engine(root / "seed0") as plain,
        running(capture, weights_root=str(root)) as recording,
        running(plain, weights_root=str(root)) as other,
    ):
        yield {True: recording, False: other}


@pytest.fixture(params=[True, False], ids=["capture", "plain"])
def server(servers, request):
    return servers[request.param]


def served(server):
    """The label and the count, which all routes tell alike."""
    version = server.client.get("/get_weight_version").json()
    assert version.keys() == {"weight_version", "update_count"}
    for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
        if (response := server.client.get(path)).status_code == 200:
            body = response.json()
            assert {name: body[name] for name in version} == version, path
    (state,) = server.client.get("/get_server_info").json()["internal_states"]
    assert {name: state[name] for name in version} == version
    text = server.client.get("/metrics").text
    assert f"routed_experts_weight_updates_total {float(version['update_count'])}" in text
    assert f'routed_experts_weight_version_info{{weight_version="{version["weight_version"]}"}} 1.0' in text
    return version["weight_version"], version["update_count"]


def answers(server, path, body, streamed):
    """What the answers of a call say of their weights, and for how many tokens: a pair a choice."""
    if path == "/generate":
        whole = stream(server, path, body)[-1] if streamed else server.post(path, body).json()
        return [(whole["meta_info"], whole["meta_info"]["completion_tokens"])]
    if not streamed:
        whole = server.post(path, body).json()
        told = [choice["meta_info"] for choice in whole["choices"]]
        assert whole["metadata"] == texts(told[0])
        return [(fields, 5) for fields in told]
    holders = [chunk for chunk in stream(server, path, body) if "metadata" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in holders] == ["length"] * body.get("n", 1), "the last ones"
    assert all(chunk["metadata"] == texts(chunk["choices"][0]["meta_info"]) for chunk in holders)
    choices = sorted((chunk["choices"][0] for chunk in holders), key=lambda choice: choice["index"])
    return [(choice["meta_info"], 5) for choice in choices]


def texts(told):
    """SGLang's field of a response, whose values are texts."""
    return {name: str(told[name]) for name in ("weight_version", "update_count")}


@pytest.mark.parametrize("rows", [False, True], ids=["no rows", "rows"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", SURFACES)
def test_every_surface_tells_label_and_count(server, path, streamed, rows):
    if rows and server.state.engine.capture is None:
        assert parse_error(server.post(path, {**SURFACES[path], "return_routed_experts": True}), 400)
        return
    _, before = served(server)
    body = {**SURFACES[path], **({"return_routed_experts": True} if rows else {})}
    for number, label in enumerate((LABEL, LABEL, "0"), start=1):  # the same one twice, then another
        assert server.post("/update_weight_version", {"new_version": label}).json() == {
            "success": True,
            "message": "updated",
            "new_version": label,
            "weight_version": label,
            "update_count": before + number,
        }
        assert served(server) == (label, before + number)
        ((told, tokens),) = answers(server, path, body, streamed)
        prompt = told["prefill_weight_versions"][0]["end"]
        assert {name: told[name] for name in ("weight_version", "update_count", "weight_versions")} == {
            "weight_version": label,
            "update_count": before + number,
            "weight_versions": [{"version": label, "start": 0, "end": tokens}],
        }
        assert told["prefill_weight_versions"] == [{"version": label, "start": 0, "end": prompt}]
        assert told["version_spans"] == [[0, prompt + tokens - 1, before + number]]
        assert told["version_labels"] == {str(before + number): label}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_choice_of_several_tells_its_own(server, path, streamed):
    label, count = served(server)
    body = {**SURFACES[path], "n": 3, "temperature": 1.0, "seed": 5}
    told = answers(server, path, body, streamed)
    assert [(fields["weight_version"], fields["update_count"]) for fields, _ in told] == [(label, count)] * 3
    if not streamed:
        assert server.post(path, body).json()["metadata"]["weight_version"] == label


def test_an_answer_without_new_tokens_has_the_weights_of_its_prompt(server):
    label, count = served(server)
    body = {**SURFACES["/generate"], "sampling_params": {"max_new_tokens": 0}}
    meta = server.post("/generate", body).json()["meta_info"]
    assert meta["weight_versions"] == [{"version": label, "start": 0, "end": 0}]
    assert meta["version_spans"] == [[0, 24, count]] and meta["weight_version"] == label


@pytest.mark.parametrize("form", ["int32", "npy", "list", "ref"])
def test_a_reader_of_rows_finds_the_label_of_every_count(servers, form):
    server = servers[True]
    server.post("/update_weight_version", {"new_version": LABEL})
    count = served(server)[1]
    body = {**SURFACES["/v1/completions"], "return_routed_experts": True, "routed_experts_format": form}
    response = server.post("/v1/completions", body).json()
    holder = response["choices"][0]
    info = {**holder.get("meta_info", {}), **holder}["routed_experts_info"]
    assert info["version_spans"] == [[0, 28, count]] and info["version_labels"] == {str(count): LABEL}
    if form != "ref":
        assert record_from_response(response).labels == {count: LABEL}
        return
    fetched = server.client.get(holder["meta_info"]["routed_experts_ref"])
    assert json.loads(fetched.headers["x-routed-experts-info"])["version_labels"] == {str(count): LABEL}
    file = server.client.get(holder["meta_info"]["routed_experts_ref"], params={"format": "safetensors"})
    assert decode_record(file.content).labels == {count: LABEL}


def test_updates_from_disk_take_any_label_and_none(server):
    label, count = served(server)
    updates = (
        ("step-4", "step-4"),
        ("step-4", "step-4"),
        (0, "0"),
        (None, "0"),
        ("base-v0", "base-v0"),
        (label, label),
    )
    for number, (given, told) in enumerate(updates, start=1):
        more = {} if given is None else {"weight_version": given}
        body = {"model_path": f"seed{number % 2}", **more}
        assert server.post("/update_weights_from_disk", body).json() == {
            "success": True,
            "message": "updated",
            "weight_version": told,
            "update_count": count + number,
        }
        assert served(server) == (told, count + number)


def test_a_label_that_is_none_is_refused_by_name_and_changes_nothing(server):
    before = served(server)
    for path, body, param in (
        ("/update_weights_from_disk", {"model_path": "seed1", "weight_version": "x" * 257}, "weight_version"),
        ("/update_weight_version", {"new_version": "x" * 257}, "new_version"),
    ):
        error = parse_error(server.post(path, body), 400)
        assert error["param"] == param
        assert error["message"].startswith(f"{param}='xxx") and "has 257 characters, above 256" in error["message"]
    for wrong in (1.5, True, ["a"], {}):
        body = {"model_path": "seed1", "weight_version": wrong}
        assert parse_error(server.post("/update_weights_from_disk", body), 400)["param"] == "weight_version", wrong
        assert parse_error(server.post("/update_weight_version", {"new_version": wrong}), 400)["param"] == "new_version"
    headers = {"Content-Type": "application/json"}
    half = server.client.post("/update_weight_version", content=b'{"new_version": "a\\ud800b"}', headers=headers)
    assert parse_error(half, 400)
    assert served(server) == before


def test_32_streams_that_run_during_a_push_have_no_mixed_row(root):
    """Rows before the update are those of the old weights, rows after it those of the new ones over the same tokens:
    scores of each answer under both are compared, bit for bit."""
    sizes = {"precompile_bs_paddings": (32,), "precompile_token_paddings": (64,), "max_total_tokens": 8192}
    with (
        lazy_compilation(),
        open_engine(root / "seed0", enable_return_routed_experts=True, deterministic=True, **sizes) as engine,
        running(engine, weights_root=str(root)) as server,
        concurrent.futures.ThreadPoolExecutor(32) as pool,
    ):
        prompts = [np.random.default_rng(seed).integers(3, 313, 4 + seed % 9).tolist() for seed in range(32)]

        def read(prompt):
            sampling = {"max_new_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": len(prompt)}
            body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "return_routed_experts": True}
            with server.client.stream("POST", "/generate", json=body) as response:
                assert response.status_code == 200
                return events(response)

        engine.pause(mode="in_place")  # none ends before the last one has begun
        calls = [pool.submit(read, prompt) for prompt in prompts]
        while engine.stats().waiting < 32:
            assert not any(call.done() for call in calls)
        engine.resume()
        while engine.stats().running < 32:
            assert not any(call.done() for call in calls)
        push = {"model_path": "seed1", "weight_version": "step-1"}
        assert server.post("/update_weights_from_disk", push).json()["update_count"] == 1
        ends = [call.result(120)[-1] for call in calls]
        tokens = [prompt + end["output_ids"] for prompt, end in zip(prompts, ends, strict=True)]
        assert [len(end["output_ids"]) for end in ends] == [120] * 32
        new = [score.routed_experts.ids for score in engine.score(tokens)]
        back = {"model_path": "seed0", "weight_version": "default"}  # a rollback
        assert server.post("/update_weights_from_disk", back).json() == {
            "success": True,
            "message": "updated",
            "weight_version": "default",
            "update_count": 2,
        }
        old = [score.routed_experts.ids for score in engine.score(tokens)]
    met_both = 0
    for prompt, end, of_old, of_new in zip(prompts, ends, old, new, strict=True):
        meta, record = end["meta_info"], record_from_meta_info(end)
        assert meta["version_spans"] == [list(span) for span in record.version_spans]
        cut = next((low for low, _, count in record.version_spans if count == 1), record.num_rows)
        assert [count for _, _, count in record.version_spans] in ([0], [0, 1], [1])
        assert np.array_equal(record.ids[:cut], of_old[:cut]) and np.array_equal(record.ids[cut:], of_new[cut:-1])
        assert not np.array_equal(of_old[:-1], of_new[:-1]), "the weights route alike, so this says nothing"
        sampled = cut - (len(prompt) - 1)
        if 0 < sampled < 120:
            met_both += 1
            assert meta["weight_versions"] == [
                {"version": "default", "start": 0, "end": sampled},
                {"version": "step-1", "start": sampled, "end": 120},
            ]
            assert (meta["weight_version"], meta["update_count"]) == ("step-1", 1)
            assert meta["version_labels"] == {"0": "default", "1": "step-1"}
    assert met_both >= 16, "the push came before or after the streams"
