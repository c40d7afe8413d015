"""Control routes of trainers: vLLM's pause, update and sleep, SGLang's memory routes, and what is refused by name.

The last test pushes weights from disk while 32 streams run: every row is one of the weights that its span names."""

import concurrent.futures
import json
import threading

import numpy as np
import pytest

from routed_experts.core.errors import InvalidRequestError
from routed_experts.formats import record_from_response
from routed_experts.server.admin.refused_routes import REFUSED
from routed_experts.server.app import TABLE
from routed_experts.server.errors import OWN_PATHS, to_response
from support.engines import assert_idle, on_engine_thread, open_engine
from support.http_server import parse_error, running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

IDS = [5, 9, 3, 7, 11, 40, 41]
ROUTE = "/inference/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        write_tiny_checkpoint(folder / f"seed{seed}", seed=seed)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def engine(root):
    options = dict(enable_return_routed_experts=True, precompile_bs_paddings=(32,))
    with lazy_compilation(), open_engine(root / "seed0", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine, root):
    with running(engine, weights_root=str(root)) as server:
        yield server


@pytest.fixture(autouse=True)
def whole(server, engine, root):
    """After each test: awake, not paused, served, idle, nothing leaked."""
    yield
    if "weights" in engine.released:
        server.post("/update_weights", {"weight_dir": str(root / "seed0")})
    assert server.client.post("/wake_up").status_code == 200
    assert server.client.post("/resume").json() == {"status": "resumed"}
    assert len(generate(server, max_tokens=2)["choices"][0]["token_ids"]) == 2
    server.wait_idle()
    assert_idle(engine)


def generate(server, *, max_tokens=60, **fields):
    body = {"token_ids": IDS, "sampling_params": {**GREEDY, "max_tokens": max_tokens}, **fields}
    response = server.post(ROUTE, body)
    assert response.status_code == 200, response.text
    return response.json()


class Started:
    """Calls in threads of their own; they have some tokens when this is made, and hold still until `go_on`."""

    def __init__(self, server, engine, count, *, num_tokens=3, **fields):
        self.pool = concurrent.futures.ThreadPoolExecutor(count)
        self.streams = [[] for _ in range(count)]
        begun = [threading.Event() for _ in range(count)]

        def run(index):
            body = {"token_ids": IDS, "sampling_params": GREEDY, "stream": True, "request_id": f"run{index}", **fields}
            with server.client.stream("POST", ROUTE, json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.streams[index].append(json.loads(line.removeprefix("data: ")))
                        assert "error" not in self.streams[index][-1], self.streams[index][-1]
                        if sum(len(event["choices"][0]["token_ids"]) for event in self.streams[index]) >= num_tokens:
                            begun[index].set()

        self.futures = [self.pool.submit(run, index) for index in range(count)]
        self.pool.shutdown(wait=False)
        for event in begun:
            assert event.wait(60)

    def choices(self):
        """Each whole choice, after the end of all."""
        for future in self.futures:
            future.result(120)
        return [
            {
                **stream[-1]["choices"][0],
                "token_ids": [token for event in stream for token in event["choices"][0]["token_ids"]],
            }
            for stream in self.streams
        ]


LONG = {"sampling_params": {**GREEDY, "max_tokens": 400}}


def test_keep_freezes_and_resume_goes_on_as_if_nothing_had_been(server, engine):
    whole = generate(server, **LONG)["choices"][0]
    calls = Started(server, engine, 4, **LONG)
    response = server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})  # as prime-rl sends it
    assert response.json() == {"status": "paused", "mode": "in_place"}
    assert server.client.get("/is_paused").json() == {"is_paused": True, "mode": "in_place"}
    assert not any(future.done() for future in calls.futures)
    assert server.client.post("/resume").json() == {"status": "resumed"}
    assert server.client.get("/is_paused").json() == {"is_paused": False, "mode": None}
    for choice in calls.choices():
        assert choice["token_ids"] == whole["token_ids"] and choice["finish_reason"] == "length"
        assert np.array_equal(rows(choice).ids, rows(whole).ids)


def rows(choice):
    return record_from_response({"choices": [{**choice, "index": 0}]})


def test_the_default_ends_what_runs_and_drops_prefixes(server, engine):
    generate(server, max_tokens=30)
    calls = Started(server, engine, 2, **LONG)
    assert server.client.post("/pause").json()["mode"] == "abort"
    for choice in calls.choices():
        assert choice["finish_reason"] == "abort" and 3 <= len(choice["token_ids"]) < 400
        assert rows(choice).num_rows == len(IDS) + len(choice["token_ids"]) - 1
    server.client.post("/resume")
    assert generate(server)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for mode, cached in (("abort", False), ("wait", False), ("keep", True)):
        assert server.client.post(f"/pause?mode={mode}").status_code == 200
        server.client.post("/resume")
        assert bool(engine.stats().cached_pages) is cached, mode
        generate(server)
    assert server.client.post("/pause?mode=abort&clear_cache=false").status_code == 200
    assert engine.stats().cached_pages > 0


def test_wait_lets_what_runs_finish(server, engine):
    calls = Started(server, engine, 2, **LONG)
    assert server.post("/pause", {"mode": "wait"}).json()["status"] == "paused"  # in a body, too
    assert {(choice["finish_reason"], len(choice["token_ids"])) for choice in calls.choices()} == {("length", 400)}
    server.client.post("/resume")
    assert server.client.post("/pause?wait_for_inflight_requests=true").json()["mode"] == "wait"


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("mode=nap", None, "mode"),
        ("", {"mode": "in_place"}, "mode"),
        ("mode=keep", {"mode": "abort"}, "mode"),
        ("clear_cache=perhaps", None, "clear_cache"),
        ("mode=keep&wait_for_inflight_requests=1", None, "mode"),
    ],
)
def test_a_pause_that_is_not_clear_pauses_nothing(server, query, body, param):
    response = server.client.post(f"/pause?{query}", **({} if body is None else {"json": body}))
    assert parse_error(response, 400)["param"] == param
    assert server.client.get("/is_paused").json()["is_paused"] is False


def test_the_answers_of_sglangs_names_say_ok(server):
    paused = server.post("/pause_generation", {"mode": "in_place"}).json()
    assert (paused["status"], paused["success"], paused["mode"]) == ("ok", True, "in_place")
    assert server.post("/continue_generation", {}).json()["status"] == "ok"


def test_a_push_under_keep_is_seen_by_what_runs(server, engine, root):
    before = server.client.get("/get_weight_version").json()["update_count"]
    calls = Started(server, engine, 3, **LONG)
    server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    output = server.post("/update_weights", {"weight_dir": (root / "seed1").as_posix()}).json()
    assert output["status"] == "ok" and output["update_count"] == before + 1
    server.client.post("/resume")
    for choice in calls.choices():
        spans = rows(choice).version_spans
        assert [version for _, _, version in spans] == [before, before + 1] and spans[-1][1] == len(IDS) + 399
    server.post("/update_weights", {"weight_dir": "seed0"})  # a name below the root does, too


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk"])
def test_folders_outside_the_root_and_other_ways_are_refused(server, root, engine, path):
    field = "weight_dir" if path == "/update_weights" else "model_path"
    version = server.client.get("/get_weight_version").json()
    for folder in ("/etc", "../", "nowhere", "a\0b", "x" * 2000):
        assert parse_error(server.post(path, {field: folder}), 400)["param"] == field, folder
    assert parse_error(server.post(path, {field: "empty"}), 400)["code"] == "checkpoint_error"
    assert parse_error(server.post(path, {}), 400)["param"] == field
    if path == "/update_weights":
        refused = parse_error(server.post(path, {"update_info": {"names": []}}), 400)
        assert (refused["param"], "weight_dir" in refused["message"]) == ("update_info", True)
        assert parse_error(server.post(path, {"weight_dir": None}), 400)["param"] == field
    else:
        for name, value in (("load_format", "flash_rl"), ("is_async", True)):
            refused = parse_error(server.post(path, {field: "seed0", name: value}), 400)
            assert (refused["param"], refused["code"]) == (name, "unsupported_parameter")
    with running(engine) as without_root:
        assert parse_error(without_root.post(path, {field: "seed0"}), 403)["code"] == "weights_root_unset"
    assert server.client.get("/get_weight_version").json() == version


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk"])
def test_a_misspelt_folder_is_shown_as_it_was_sent_and_no_other_path_is(server, root, path):
    field = "weight_dir" if path == "/update_weights" else "model_path"
    for sent in (f"{root}/sed1", "/mnt/a/b  c/step_8", f"{'x' * 80}/y/z/sed1", "it's/a/b", "../a/b"):
        message = parse_error(server.post(path, {field: sent}), 400)["message"]
        assert message == f"{field}={' '.join(repr(sent).split())} is no folder under --weights-root"
    for sent in ("sed1", "x" * 2000):
        assert str(root) not in parse_error(server.post(path, {field: sent}), 400)["message"]
    for sent in ("empty", "", "."):
        error = parse_error(server.post(path, {field: sent}), 400)
        assert error["message"].startswith(f"{field}={sent!r}: <path>"), "a path of the server"
        assert error["param"] == field


def test_an_error_shows_the_routes_that_a_hint_names():
    """Of more than one part, and without a parameter; all other paths are the machine's."""
    assert {entry.path for entry in TABLE if entry.path.count("/") > 1 and "{" not in entry.path} == OWN_PATHS
    text = "send it to POST /v1/score, /v1/models or /v1/chat/completions."
    assert to_response(InvalidRequestError(text)).body["error"]["message"] == text
    text = "/v1/score/secret and /srv/v1/score are files"
    assert to_response(InvalidRequestError(text)).body["error"]["message"] == "<path> and <path> are files"


def test_an_error_shows_only_the_path_that_is_said_to_be_the_clients():
    text = "'/a/b' is not /srv/a/b, nor '/srv/a' at 0x7f0123456789"
    for error, shown in (
        (InvalidRequestError(text, sent="'/a/b'"), "'/a/b' is not <path>, nor '<path>' at <address>"),
        (InvalidRequestError(text), "'<path>' is not <path>, nor '<path>' at <address>"),
        (InvalidRequestError(text, sent=""), "'<path>' is not <path>, nor '<path>' at <address>"),
    ):
        assert to_response(error).body["error"]["message"] == to_response(error.renamed("x")).body["error"]["message"]
        assert to_response(error).body["error"]["message"] == shown


def test_an_update_may_end_what_runs_but_a_wrong_folder_ends_nothing(server, engine):
    calls = Started(server, engine, 2, **LONG)
    server.client.post("/pause?mode=keep")
    body = {"abort_all_requests": True, "load_format": "auto", "is_async": False}
    assert parse_error(server.post("/update_weights_from_disk", {"model_path": "nowhere", **body}), 400)
    assert engine.stats().running + engine.stats().waiting == 2
    assert server.post("/update_weights_from_disk", {"model_path": "seed0", **body}).status_code == 200
    assert {choice["finish_reason"] for choice in calls.choices()} == {"abort"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/update_weights_from_disk", {"model_path": "seed0"}), ("/update_weight_version", {"new_version": "next"})],
)
def test_what_an_update_ends_says_so(server, engine, path, body):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        sampling = {"max_new_tokens": 400, "ignore_eos": True}
        call = pool.submit(server.post, "/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})
        while not on_engine_thread(engine, lambda core: core.request_table.num_live):
            assert not call.done()
        assert server.post(path, {**body, "abort_all_requests": True}).status_code == 200
        reason = call.result(60).json()["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and "abort_all_requests" in reason["message"]


@pytest.mark.parametrize("path", ["/sleep?level=1", "/release_memory_occupation"])
def test_what_runs_and_what_comes_wait_for_the_end_of_sleep(server, engine, path):
    whole = generate(server, **LONG)["choices"][0]
    calls = Started(server, engine, 3, **LONG)
    body = {"json": {"tags": ["kv_cache"]}} if path.startswith("/release") else {}
    assert server.client.post(path, **body).json()["released"] == ["kv_cache"]
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": True, "released": ["kv_cache"]}
    assert server.client.post(path, **body).status_code == 200, "again"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        late = pool.submit(generate, server, **LONG)
        while on_engine_thread(engine, lambda core: core.request_table.num_live) < 4:
            assert not late.done()
        assert server.client.get("/health").status_code == 200
        if path.startswith("/release"):
            assert server.post("/resume_memory_occupation", {"tags": None}).json()["released"] == []
        else:
            assert server.client.post("/wake_up").json() == {"status": "awake", "released": []}
        for choice in [*calls.choices(), late.result(60)["choices"][0]]:
            assert choice["token_ids"] == whole["token_ids"] and np.array_equal(rows(choice).ids, rows(whole).ids)
    assert server.client.get("/is_sleeping").json()["is_sleeping"] is False


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_released_weights_come_back_by_an_update_alone(server, engine, root, dialect):
    """The order of colocated trainers: all away, weights, update, KV pages."""
    calls = Started(server, engine, 2, **LONG)
    version = server.client.get("/get_weight_version").json()["update_count"]

    def resume(*tags):
        if dialect == "sglang":
            return server.post("/resume_memory_occupation", {"tags": list(tags) or None})
        return server.client.post("/wake_up", params={"tags": list(tags)})

    if dialect == "sglang":
        released = server.post("/release_memory_occupation", {})
    else:
        released = server.client.post("/sleep", params={"level": "2"})
    assert released.json()["released"] == ["kv_cache", "weights"]
    for tags in ((), ("kv_cache",), ("kv_cache", "weights")):
        assert parse_error(resume(*tags), 409)["code"] == "weights_released"
    refused = parse_error(server.post("/update_weight_version", {"new_version": version + 1}), 409)
    assert refused["code"] == "memory_released"
    assert resume("weights").json()["released"] == ["kv_cache", "weights"]
    folder = {"model_path": "seed1"} if dialect == "sglang" else {"weight_dir": "seed1"}
    path = "/update_weights_from_disk" if dialect == "sglang" else "/update_weights"
    assert server.post(path, folder).status_code == 200
    assert server.client.get("/is_sleeping").json()["released"] == ["kv_cache"]
    assert resume("kv_cache", "cuda_graph").json()["released"] == []
    for choice in calls.choices():
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 400), "nothing is lost"
        assert [span[2] for span in rows(choice).version_spans] == [version, version + 1]


def test_the_tag_that_is_unknown_is_named(server):
    body = {"tags": ["kv_cache", "wights"]}
    for path in ("/release_memory_occupation", "/wake_up"):
        assert "tags has 'wights'" in parse_error(server.post(path, body), 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=0", None, "level"),
        ("/sleep?level=deep", None, "level"),
        ("/sleep?mode=nap", None, "mode"),
        ("/sleep?tags=gradients", None, "tags"),
        ("/wake_up?tags=gradients", None, "tags"),
        ("/sleep", {"level": 3}, "level"),
        ("/sleep", {"level": "deep"}, "level"),
        ("/sleep", {"mode": "nap"}, "mode"),
        ("/sleep", {"tags": ["gradients"]}, "tags"),
        ("/sleep", {"levle": 1}, "levle"),
        ("/sleep?level=1", {"level": 2}, "level"),
        ("/sleep?level=1", {"level": "2"}, "level"),
        ("/sleep?level=deep", {"level": "deep"}, "level"),
        ("/sleep?tags=kv_cache", {"tags": ["weights"]}, "tags"),
        ("/wake_up", {"tags": ["gradients"]}, "tags"),
        ("/pause?mod=keep", None, "mod"),
        ("/sleep?levle=2", None, "levle"),
        ("/flush_cache?draft=true", None, "draft"),
        ("/release_memory_occupation", {"tags": []}, "tags"),
        ("/release_memory_occupation", {"tags": ["kv"]}, "tags"),
        ("/resume_memory_occupation", {"tags": ["kv"]}, "tags"),
        ("/resume_memory_occupation", {"tags": "weights"}, "tags"),
        ("/reset_prefix_cache?reset_running_requests=7", None, "reset_running_requests"),
        ("/abort_requests", {"request_ids": "all"}, "request_ids"),
        ("/abort_requests", {"request_ids": [str(number) for number in range(1025)]}, "request_ids"),
    ],
)
def test_bad_options_change_nothing(server, engine, path, body, param):
    response = server.client.post(path, **({} if body is None else {"json": body}))
    assert parse_error(response, 400)["param"] == param
    assert engine.released == () and engine.paused is None


@pytest.mark.parametrize("level", [1, "1", None])
@pytest.mark.parametrize("query", ["", "?level=1&mode=abort&tags=kv_cache"])
def test_sleep_may_end_what_runs(server, engine, query, level):
    calls = Started(server, engine, 2, **LONG)
    body = {"json": {"level": level, "mode": "abort", "tags": ["kv_cache"]}}
    assert server.client.post(f"/sleep{query}", **body).json()["status"] == "sleeping"
    assert server.post("/wake_up", {"tags": ["weights"]}).json() == {"status": "sleeping", "released": ["kv_cache"]}
    assert {choice["finish_reason"] for choice in calls.choices()} == {"abort"}


@pytest.mark.parametrize("resets", [False, True])
def test_prefixes_are_dropped_while_requests_run(server, engine, resets):
    whole = generate(server, **LONG)["choices"][0]
    calls = Started(server, engine, 3, **LONG)
    body = {"json": {"reset_running_requests": True}} if resets else {}  # as SkyRL sends it
    before = engine.stats().preemptions
    output = server.client.post("/reset_prefix_cache", **body).json()
    assert output["success"] is True and output["freed_pages"] >= 0
    assert (engine.stats().preemptions > before) is resets
    assert on_engine_thread(engine, lambda core: core.pause_mode) is None
    for choice in calls.choices():
        assert choice["token_ids"] == whole["token_ids"] and np.array_equal(rows(choice).ids, rows(whole).ids)


PAUSED = {"is_paused": True, "mode": "in_place"}


@pytest.mark.parametrize("path", ["/reset_prefix_cache?reset_running_requests=true", "/sleep?mode=wait", "/sleep"])
def test_the_pause_of_another_client_stays_and_holds(server, engine, path):
    """What runs is retracted, or held: none of it goes on, and the pause keeps its mode."""
    calls = Started(server, engine, 3, **LONG)
    server.client.post("/pause?mode=keep")
    assert server.client.post(path).status_code == 200
    assert server.client.get("/is_paused").json() == PAUSED
    assert server.client.post("/wake_up").status_code == 200
    assert engine.stats().running + engine.stats().waiting == 3, "nothing has ended"
    server.client.post("/resume")
    assert [len(choice["token_ids"]) for choice in calls.choices()] == [400] * 3


def test_some_requests_or_all_are_aborted(server, engine):
    calls = Started(server, engine, 4, **LONG)
    server.client.post("/pause?mode=keep")
    body = {"request_ids": ["run1", "run3", "nobody", "run1"]}
    assert server.post("/abort_requests", body).json() == {"status": "aborted", "aborted": 2}
    assert server.post("/abort_requests", {}).json() == {"status": "aborted", "aborted": 2}
    assert {choice["finish_reason"] for choice in calls.choices()} == {"abort"}


def test_what_the_engine_is_like(server):
    assert server.client.get("/get_world_size").json() == {"world_size": 1}
    assert server.client.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert server.client.get("/liveness").json() == {"status": "ok", "state": "serving"}
    with running(None) as starting:
        assert starting.client.get("/liveness").json() == {"status": "ok", "state": "starting"}
        assert parse_error(starting.client.get("/is_paused"), 503)


def test_an_engine_that_hangs_is_not_live(engine, root):
    """A step is held on the engine thread, as a device that does not answer would."""
    held, go_on = threading.Event(), threading.Event()
    with running(engine, stall_timeout=0.2) as server:
        calls = Started(server, engine, 1, **LONG)
        stuck = threading.Thread(target=lambda: on_engine_thread(engine, lambda core: (held.set(), go_on.wait(60))))
        stuck.start()
        try:
            assert held.wait(10)
            while (response := server.client.get("/liveness")).status_code == 200:
                assert response.json()["state"] == "serving" and not calls.futures[0].done()
            assert response.status_code == 503 and response.json()["status"] == "engine_unresponsive"
        finally:
            go_on.set()
            stuck.join(10)
        calls.choices()


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_here_is_refused_with_what_to_use(server, engine, path):
    error = parse_error(server.post(path, {"names": [], "lora_name": "x"}), 400)
    assert error["code"] == "unsupported_route" and error["message"].startswith(path.rpartition("/")[2])
    assert REFUSED[path] in error["message"]
    assert parse_error(server.client.get(path), 405)
    with running(engine, api_key="key-of-users-1") as guarded:
        assert parse_error(guarded.client.post(path, headers={"authorization": ""}), 401)


def test_pushes_from_disk_under_32_streams_mix_no_rows(server, engine, root):
    """Under each version the rows are those that `score` gives with the weights of it; with the others they are not."""
    first = server.client.get("/get_weight_version").json()["update_count"]
    assert server.post("/update_weights", {"weight_dir": str(root / "seed0")}).status_code == 200
    seeds = {first + 1: 0}
    many = {"sampling_params": {"temperature": 1, "max_tokens": 300, "ignore_eos": True}}
    calls = Started(server, engine, 32, **many)
    for number in range(1, 4):
        server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        body = {"weight_dir": str(root / f"seed{number % 2}"), "flush_cache": True}
        count = server.post("/update_weights", body).json()["update_count"]
        seeds[count] = number % 2
        server.client.post("/resume")
    choices = calls.choices()
    records = [rows(choice) for choice in choices]
    assert all(record.num_rows == len(IDS) + 299 for record in records)
    spans = [[span for span in record.version_spans if span[1] > span[0]] for record in records]
    assert all([span[2] for span in own] == sorted(span[2] for span in own) for own in spans)
    assert sum(len(own) > 1 for own in spans) == 32, "every stream met a push"
    sequences = [[*IDS, *choice["token_ids"]] for choice in choices]
    scored = {}
    for seed in (0, 1):
        assert server.post("/update_weights", {"weight_dir": str(root / f"seed{seed}")}).status_code == 200
        scored[seed] = [output.routed_experts for output in engine.score(sequences)]
    wrong = other = total = 0
    for index, own in enumerate(spans):
        for low, high, version in own:
            got = records[index][low:high].ids
            wrong += int((got != scored[seeds[version]][index][low:high].ids).any(axis=(1, 2)).sum())
            other += int((got != scored[1 - seeds[version]][index][low:high].ids).any(axis=(1, 2)).sum())
            total += high - low
    assert other > 0.99 * total, "the two checkpoints route differently: the comparison can fail"
    assert wrong <= total // 1000, f"{wrong} of {total} rows are not of the weights that their span names"
