"""Routes of a fleet: merged metrics, summed counts, ids, and how several refusals become one error."""

import asyncio
import importlib

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import MutableHeaders

from routed_experts.fleet import serve_environment
from routed_experts.fleet.fleet_client import sum_stats, values_of
from routed_experts.fleet.fleet_routes import fleet_table
from routed_experts.fleet.link import Link
from routed_experts.fleet.messages import Answer, Refusal
from routed_experts.fleet.metrics_text import fleet_metrics, merge
from routed_experts.fleet.proxy_middleware import ID_ORIGIN, ResponseIds
from routed_experts.fleet.request_ids import RequestIds, request_id_maker, tag_of
from routed_experts.server.app import TABLE
from routed_experts.server.errors import ApiError

TEXT = """# HELP x_total Things, with "quotes" and {braces}
# TYPE x_total counter
x_total 3.0
# HELP y A gauge
# TYPE y gauge
y{state="a",text="b\\"c}d"} 1.5e-07
y{state="b"} NaN
# HELP h A histogram
# TYPE h histogram
h_bucket{le="0.1"} 1.0
h_bucket{le="+Inf"} 2.0
h_count 2.0
h_sum 0.5
"""


def test_metrics_of_two_replicas_are_each_series_once_with_its_replica():
    merged = merge({"r0": TEXT, "r1": TEXT.replace("3.0", "4.0") + "# HELP z New\n# TYPE z gauge\nz 1.0\n"})
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert list(families) == ["x", "y", "h", "z"]
    assert [(s.labels, s.value) for s in families["x"].samples] == [({"replica": "r0"}, 3.0), ({"replica": "r1"}, 4.0)]
    assert families["y"].samples[0].labels == {"replica": "r0", "state": "a", "text": 'b"c}d'}
    assert families["y"].samples[0].value == 1.5e-07 and len(families["h"].samples) == 8
    assert merged.count("# TYPE y gauge") == merged.count("# HELP y A gauge") == 1


def test_metrics_of_the_fleet_parse_and_count():
    families = {
        family.name: family
        for family in text_string_to_metric_families(fleet_metrics(["serving", "paused", "serving"], 7, 2))
    }
    states = {s.labels["state"]: s.value for s in families["routed_experts_fleet_replicas"].samples}
    assert states == {"serving": 2.0, "paused": 1.0}
    assert families["routed_experts_fleet_weight_version"].samples[0].value == 7.0
    assert families["routed_experts_replica_deaths"].samples[0].value == 2.0
    assert 'state="serving"} 0' in fleet_metrics([], 0, 0)


def counts(seed, windows):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 50, 2)
    array = np.stack([np.full((3, 4), n) for n in tokens])  # top-4 of 4 experts: every token chooses all
    return {
        "counts": array.astype(np.int64),
        "num_tokens": tokens.astype(np.int64),
        "windows": np.array([array // max(windows, 1)] * windows, np.int32).reshape(windows, *array.shape),
        "layer_ids": (1, 2, 3),
        "top_k": 4,
    }


@pytest.mark.parametrize("windows", [(0, 0), (1, 0), (3, 2)])
def test_expert_counts_of_replicas_add_up(windows):
    parts = [counts(seed, number) for seed, number in enumerate(windows)]
    stats = sum_stats(parts)
    assert (stats.counts == parts[0]["counts"] + parts[1]["counts"]).all()
    assert (stats.num_tokens == parts[0]["num_tokens"] + parts[1]["num_tokens"]).all()
    assert len(stats.windows) == max(windows)
    newest = [part["windows"][-1] for part in parts if len(part["windows"])]
    assert not newest or (stats.windows[-1] == sum(newest)).all()


def test_counts_of_nobody_are_unavailable():
    with pytest.raises(ApiError, match="no replica has answered") as caught:
        sum_stats([])
    assert caught.value.status == 503


def test_nothing_is_done_where_no_replica_has_answered():
    with pytest.raises(ApiError, match="no replica has answered") as caught:
        values_of({})
    assert (caught.value.status, caught.value.code) == (503, "fleet_unavailable")


def refused(code, message="no", status=400):
    return Answer(refusal=Refusal(status=status, code=code, message=message))


def test_several_answers_are_one_or_a_list():
    assert values_of({"r0": Answer(1), "r1": Answer(2)}) == [1, 2]
    with pytest.raises(ApiError) as caught:
        values_of({"r0": refused("a"), "r1": refused("a")})
    assert (caught.value.status, caught.value.code) == (400, "a")
    with pytest.raises(ApiError) as caught:
        values_of({"r0": Answer(1), "r1": refused("a", "it is ill"), "r2": refused("b", "it is late")})
    assert (caught.value.status, caught.value.code) == (502, "replicas_disagree")
    assert str(caught.value) == "not done on r1: it is ill; r2: it is late; done on r0; repeat the call"


def test_every_id_that_a_replica_makes_names_it():
    make = request_id_maker("r12")
    for prefix in ("", "chatcmpl-", "cmpl-", "score-", "msg_", "resp_"):
        assert tag_of(prefix + make()) == "r12" and len(prefix + make()) <= 64
    for other in ("r1", "mine-r1-7", "r1-" + "g" * 32, "x" * 64):
        assert tag_of(other) is None


def test_the_table_of_a_fleet_has_the_routes_and_rights_of_the_servers():
    link = Link(None, handle=None, report=None, operations={})
    table = fleet_table(link, update_s=1.0)
    keep = [(entry.path, entry.methods, entry.body, entry.admin, entry.query, entry.etag) for entry in table]
    assert keep == [(entry.path, entry.methods, entry.body, entry.admin, entry.query, entry.etag) for entry in TABLE]
    changed = {entry.path for entry, own in zip(table, TABLE, strict=True) if entry.handler is not own.handler}
    assert changed >= {entry.path for entry in TABLE if entry.admin}, "what an admin changes concerns all replicas"
    assert "/generate" not in changed and "/health/live" not in changed


UUID = b"01234567-89ab-4cde-8f01-23456789abcd"  # as Serve makes them


@pytest.mark.parametrize("is_outside", [True, False])
@pytest.mark.parametrize("sent", [None, UUID, b"mine", b"0123456789abcdef0123456789abcdef"])
def test_an_answer_has_the_id_of_its_request(sent, is_outside):
    """Around the server RequestIds, then Ray Serve's own middleware, and ResponseIds, if its environment names it."""
    seen, messages = [], []

    async def server(scope, receive, send):
        seen.extend(scope["headers"])
        own = next((value for name, value in seen if name == b"x-request-id"), b"r0-made")
        headers = [(b"x-request-id", own), (b"a", b"b")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(message):
        messages.append(message)

    def serve_ids(app):
        async def with_ids(scope, receive, send):
            headers = MutableHeaders(scope=scope)
            if "x-request-id" not in headers:
                headers.append("x-request-id", UUID.decode())

            async def send_on(message):
                MutableHeaders(scope=message).append("X-Request-ID", headers["x-request-id"])
                await send(message)

            await app(scope, receive, send_on)

        return with_ids

    app = serve_ids(RequestIds(server))
    if is_outside:
        app = ResponseIds(app)
    headers = [(b"host", b"x"), *([] if sent is None else [(b"x-request-id", sent)])]
    asyncio.run(app({"type": "http", "headers": headers}, None, send))
    is_known = is_outside or sent != UUID
    assert seen == (headers if is_known else headers[:1])
    (answer,) = [value for name, value in messages[0]["headers"] if name == b"x-request-id"]
    expected = sent or (b"r0-made" if is_outside else UUID)
    assert answer == expected and (b"a", b"b") in messages[0]["headers"]


def test_an_answer_of_serve_itself_keeps_its_id_and_a_client_names_no_origin():
    origins, messages = [], []

    async def proxy(scope, receive, send):
        origins.extend(value for name, value in scope["headers"] if name == ID_ORIGIN)
        await send({"type": "http.response.start", "status": 503, "headers": [(b"x-request-id", UUID)]})

    async def send(message):
        messages.append(message)

    asyncio.run(ResponseIds(proxy)({"type": "http", "headers": [(ID_ORIGIN, b"client")]}, None, send))
    assert origins == [b"serve"] and messages[0]["headers"] == [(b"x-request-id", UUID)]


def test_serve_finds_the_middlewares_where_its_environment_names_them():
    module, _, name = serve_environment.SHARED_VARIABLES["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
    assert [entry.cls for entry in getattr(importlib.import_module(module), name)()] == [ResponseIds]
