"""FleetRoutes: the routes that concern all replicas of a fleet, answered by whichever replica they arrive at.

`fleet_table` is the server's table of routes with other handlers for these: keys, limits and errors stay the server's.
Rows are fetched from the replica that keeps them; its tag is part of the ids that it makes."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet.fleet_client import ASK_S, FleetClient, values_of
from routed_experts.fleet.link import Link
from routed_experts.fleet.messages import FleetStatus, RouteCall
from routed_experts.fleet.metrics_text import fleet_metrics, merge
from routed_experts.fleet.operations import from_answer
from routed_experts.server.admin import info_routes, memory_routes, vllm_routes
from routed_experts.server.admin.control_routes import (
    check_awake,
    check_load_options,
    folder_under_root,
    parse_drafts,
    parse_label,
)
from routed_experts.server.app import TABLE, Entry, Handler
from routed_experts.server.body import json_response, read_control
from routed_experts.server.errors import ApiError, unavailable
from routed_experts.server.generation_handler import to_seed
from routed_experts.server.limits import RETRY_AFTER_S
from routed_experts.server.middleware import request_owner
from routed_experts.server.protocol import (
    AbortRequest,
    ContinueRequest,
    PauseRequest,
    RememberRolloutsRequest,
    ResetPrefixCacheRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
)
from routed_experts.server.routing import routes as routing_routes
from routed_experts.server.sse import run_until_disconnect
from routed_experts.server.state import ServerState

GONE_S = 0.02  # in which the end of a connection is noticed that is read together with its request
METRICS_S = 2.0  # a scrape has a short time of its own: a replica that does not answer is left out
_ROUTING = "/v1/routing/{name}"
_SENT_ON = (b"range", b"if-range", b"if-none-match")


def fleet_table(link: Link, *, update_s: float) -> tuple[Entry, ...]:
    """The routes of a replica. `update_s`: seconds in which all replicas load new weights."""
    routes = FleetRoutes(link, update_s)
    handlers: Mapping[tuple[str, str], Handler] = MappingProxyType(
        {
            (_ROUTING, "GET"): routes.fetch,
            (_ROUTING, "DELETE"): routes.delete,
            ("/v1/routing/stats", "GET"): routes.stats,
            ("/v1/routing/reset", "POST"): routes.reset,
            ("/v1/models", "GET"): routes.models,
            ("/get_server_info", "GET"): routes.server_info,
            ("/server_info", "GET"): routes.server_info,
            ("/get_load", "GET"): routes.get_load,
            ("/v1/loads", "GET"): routes.loads,
            ("/load", "GET"): routes.load,
            ("/get_weight_version", "GET"): routes.weight_version,
            ("/metrics", "GET"): routes.metrics,
            ("/health", "GET"): routes.health,
            ("/ping", "GET"): routes.health,
            ("/ready", "GET"): routes.ready,
            ("/flush_cache", "POST"): routes.flush_cache,
            ("/remember_rollouts", "POST"): routes.remember_rollouts,
            ("/abort_request", "POST"): routes.abort_request,
            ("/pause_generation", "POST"): routes.pause_generation,
            ("/continue_generation", "POST"): routes.continue_generation,
            ("/pause", "POST"): routes.pause,
            ("/resume", "POST"): routes.resume,
            ("/update_weights", "POST"): routes.update_weights,
            ("/reset_prefix_cache", "POST"): routes.reset_prefix_cache,
            ("/abort_requests", "POST"): routes.abort_requests,
            ("/inference/v1/abort_requests", "POST"): routes.abort_named_requests,
            ("/sleep", "POST"): routes.sleep,
            ("/wake_up", "POST"): routes.wake_up,
            ("/release_memory_occupation", "POST"): routes.release_memory_occupation,
            ("/resume_memory_occupation", "POST"): routes.resume_memory_occupation,
            ("/update_weights_from_disk", "POST"): routes.update_weights_from_disk,
            ("/update_weight_version", "POST"): routes.update_weight_version,
        }
    )
    table = tuple(
        dataclasses.replace(entry, handler=handler) if (handler := _handler(entry, handlers)) is not None else entry
        for entry in TABLE
    )
    assert sum(entry.handler in handlers.values() for entry in table) == len(handlers), "a route has another name"
    return table


def _handler(entry: Entry, handlers: Mapping[tuple[str, str], Handler]) -> Handler | None:
    return next((handlers[entry.path, method] for method in entry.methods if (entry.path, method) in handlers), None)


class FleetRoutes:
    """The handlers of one replica. Each reads as the server's own of its name does."""

    def __init__(self, link: Link, update_s: float) -> None:
        self._link, self._fleet = link, FleetClient(link, update_s)

    async def fetch(self, request: Request, server: ServerState) -> Response:
        """The rows of one choice, from the replica that keeps them: a .npy of the canonical ids, or ?format=safetensors
        with the token ids beside them. Parts by Range."""
        return await self._from_location(request, server, lambda: routing_routes.fetch(request, server))

    async def delete(self, request: Request, server: ServerState) -> Response:
        """Free the rows of a request, on the replica that keeps them."""
        return await self._from_location(request, server, lambda: routing_routes.delete(request, server))

    async def stats(self, request: Request, server: ServerState) -> Response:
        """How often each expert was chosen, summed over the replicas, since the start or the last reset."""
        return routing_routes.stats_response(request, await self._fleet.routing_stats(reset=False))

    async def reset(self, request: Request, server: ServerState) -> Response:
        """Reset the counts of all replicas."""
        await self._fleet.routing_stats(reset=True)
        return json_response({"success": True})

    async def models(self, request: Request, server: ServerState) -> Response:
        """List the one model, and the replicas that serve it."""
        return await self._with_replicas(await info_routes.models(request, server))

    async def server_info(self, request: Request, server: ServerState) -> Response:
        """Describe the configuration of one replica, which is that of all, and every replica's state."""
        return await self._with_replicas(await info_routes.server_info(request, server), version=True)

    async def get_load(self, request: Request, server: ServerState) -> Response:
        """Tell the load of every data rank of every replica, in SGLang's older form."""
        return info_routes.get_load_response(await self._loads(request, server))

    async def loads(self, request: Request, server: ServerState) -> Response:
        """Tell the load of every data rank of every replica, or of ?dp_rank=, and the sums."""
        return info_routes.loads_response(request, server, await self._loads(request, server))

    async def load(self, request: Request, server: ServerState) -> Response:
        """Tell how many requests run or wait on all replicas, in vLLM's form."""
        return info_routes.load_response(await self._loads(request, server))

    async def weight_version(self, request: Request, server: ServerState) -> Response:
        """Say which weights the fleet serves."""
        return json_response((await self._fleet.version()).to_json())

    async def metrics(self, request: Request, server: ServerState) -> Response:
        """Prometheus text of all replicas, each series with the label replica."""
        own = await info_routes.metrics(request, server)
        texts, extra = {self._link.tag: bytes(own.body).decode()}, ""
        try:
            status = await self._fleet.status()
            call = _call(request, "/metrics")
            for tag, answer in (
                await self._fleet.ask_all("route", timeout_s=METRICS_S, leave_out_self=True, call=call)
            ).items():
                if answer.refusal is None:
                    texts[tag] = answer.value.body.decode()
            extra = fleet_metrics(
                [member.state for member in status.members], status.version.update_count, status.deaths
            )
        except ApiError as error:  # without a coordinator there are the metrics of this replica
            extra = f"# {error}\n"
        return Response(merge(texts) + extra, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request, server: ServerState) -> Response:
        """A replica makes progress; the body names all. Without the coordinator: this replica does."""
        own = await info_routes.health(request, server)
        try:
            status = await self._fleet.status()
        except ApiError:
            return own
        serves = own.status_code == 200 or any(member.state in ("serving", "paused") for member in status.members)
        return _probe_response(status, 200 if serves else 503)

    async def ready(self, request: Request, server: ServerState) -> Response:
        """Send traffic here: a replica serves, and all that serve have one version of the weights. `num_ready` counts
        them."""
        status = await self._fleet.status()
        is_ready = status.problem is None and any(member.state == "serving" for member in status.members)
        return _probe_response(status, 200 if is_ready else 503)

    async def flush_cache(self, request: Request, server: ServerState) -> Response:
        """Drop all cached prefixes of all replicas; refused for all while requests run on one."""
        drafts = parse_drafts(request)
        return json_response({"success": True, "freed_pages": await self._fleet.flush(drafts=drafts)})

    async def remember_rollouts(self, request: Request, server: ServerState) -> Response:
        """Take an answer to a prompt as a draft of later ones, on all replicas."""
        rollout = await read_control(request, RememberRolloutsRequest, server.settings, strict=True)
        fields: dict[str, Any] = {
            "prompt_ids": rollout.prompt_ids,
            "output_ids": rollout.output_ids,
            "seed": to_seed(rollout.seed),
            "choice": rollout.choice or 0,
            "extra_key": combine_keys(rollout.extra_key, rollout.cache_salt),
        }
        values_of(await self._fleet.ask_all("remember", **fields))
        return json_response({"success": True})

    async def abort_request(self, request: Request, server: ServerState) -> Response:
        """End one call, or all of all replicas, with what they have."""
        body = await read_control(request, AbortRequest, server.settings, allow_empty=True)
        rid, abort_all = body.rid or None, body.abort_all is True
        if (rid is None) != abort_all:
            raise InvalidRequestError("send either rid, or abort_all true", param="rid")
        counts = values_of(await self._fleet.ask_all("abort", rid=rid))
        return json_response({"success": True, "aborted": sum(counts)})

    async def pause_generation(self, request: Request, server: ServerState) -> Response:
        """Hold generation on all replicas; new requests queue until it continues."""
        body = await read_control(request, PauseRequest, server.settings, allow_empty=True)
        mode = body.mode or "abort"
        await self._fleet.pause(mode, wait_s=server.settings.request_timeout)
        return json_response({"success": True, "status": "ok", "message": "generation is paused", "mode": mode})

    async def continue_generation(self, request: Request, server: ServerState) -> Response:
        """End a pause of all replicas."""
        await read_control(request, ContinueRequest, server.settings, allow_empty=True)
        await self._fleet.resume()
        return json_response({"success": True, "status": "ok", "message": "generation continues"})

    async def pause(self, request: Request, server: ServerState) -> Response:
        """Hold generation on all replicas; new requests queue until it resumes."""
        mode, clears = await vllm_routes.parse_pause(request, server)
        await self._fleet.pause(mode, wait_s=server.settings.request_timeout)
        if clears:
            values_of(await self._fleet.ask_all("flush", drafts=False))
        return json_response(vllm_routes.paused_body(mode))

    async def resume(self, request: Request, server: ServerState) -> Response:
        """End a pause of all replicas."""
        await read_control(request, ContinueRequest, server.settings, allow_empty=True)
        await self._fleet.resume()
        return json_response({"status": "resumed"})

    async def reset_prefix_cache(self, request: Request, server: ServerState) -> Response:
        """Drop all cached prefixes of all replicas; running requests keep their pages unless they are reset too."""
        options = await vllm_routes.read_options(request, ResetPrefixCacheRequest, server)
        resets = options.reset_running_requests is True
        freed = values_of(await self._fleet.ask_all("reset_prefixes", resets_running=resets))
        return json_response({"success": True, "freed_pages": sum(freed)})

    async def abort_requests(self, request: Request, server: ServerState) -> Response:
        """End the calls of these ids, or all of all replicas, with what they have."""
        ids = await vllm_routes.read_abort_ids(request, server)
        return json_response(vllm_routes.aborted_body(sum(values_of(await self._fleet.ask_all("abort_each", ids=ids)))))

    async def abort_named_requests(self, request: Request, server: ServerState) -> Response:
        """End the calls of these ids of all replicas with what they have; without ids none is meant."""
        ids = await vllm_routes.read_named_ids(request, server)
        return json_response(vllm_routes.aborted_body(sum(values_of(await self._fleet.ask_all("abort_each", ids=ids)))))

    async def sleep(self, request: Request, server: ServerState) -> Response:
        """Free device memory of all replicas: level 1 the KV pages, level 2 the weights too; requests wait until the
        fleet wakes up."""
        tags, running = await vllm_routes.parse_sleep(request, server)
        timeout_s = server.settings.request_timeout if running == "wait" else ASK_S
        released = await self._fleet.release_memory(tags, running, timeout_s)
        return json_response({"status": "sleeping", "released": released})

    async def wake_up(self, request: Request, server: ServerState) -> Response:
        """Allocate what was freed on all replicas and continue; released weights come by an update before."""
        tags = await vllm_routes.parse_wake_up(request, server)
        released = await self._fleet.resume_memory(tags)
        return json_response({"status": "sleeping" if released else "awake", "released": released})

    async def release_memory_occupation(self, request: Request, server: ServerState) -> Response:
        """Free the memory of KV pages, weights or both of all replicas; requests wait until it is taken back."""
        tags = await memory_routes.read_tags(request, server)
        return json_response(memory_routes.memory_body(await self._fleet.release_memory(tags, "retract", ASK_S)))

    async def resume_memory_occupation(self, request: Request, server: ServerState) -> Response:
        """Allocate what was released on all replicas and continue; released weights come by an update before."""
        tags = await memory_routes.read_tags(request, server)
        return json_response(memory_routes.memory_body(await self._fleet.resume_memory(tags)))

    async def update_weights(self, request: Request, server: ServerState) -> Response:
        """Serve the weights of another checkpoint of the same model on all replicas, or, where one refuses, on none."""
        fields, path = await vllm_routes.read_weight_dir(request, server)
        with field_names({"model_path": "weight_dir"}):
            await asyncio.to_thread(folder_under_root, server.settings.weights_root, path)
        label = parse_label(fields.weight_version, param="weight_version")
        version = await self._update(request, path, label, "flush" if fields.flush_cache is True else "keep")
        return json_response({"status": "ok", "success": True, **version.to_json()})

    async def update_weights_from_disk(self, request: Request, server: ServerState) -> Response:
        """Serve the weights of another checkpoint of the same model on all replicas, or, where one refuses, on none."""
        fields = await read_control(request, UpdateWeightsRequest, server.settings)
        check_load_options(fields)
        await asyncio.to_thread(folder_under_root, server.settings.weights_root, fields.model_path)
        label = parse_label(fields.weight_version, param="weight_version")
        cache = "keep" if fields.flush_cache is False else "flush"
        aborts = fields.abort_all_requests is True
        version = await self._update(request, fields.model_path, label, cache, abort_first=aborts)
        return json_response({"success": True, "message": "updated", **version.to_json()})

    async def update_weight_version(self, request: Request, server: ServerState) -> Response:
        """Set the label of the weights of all replicas; also the same one again, which counts as an update."""
        fields = await read_control(request, UpdateWeightVersionRequest, server.settings)
        label = parse_label(fields.new_version, param="new_version")
        check_awake(server.accepting_engine)
        aborts = fields.abort_all_requests is not False
        version = await self._update(request, None, label, "keep", abort_first=aborts)
        return json_response({"success": True, "message": "updated", "new_version": version.label, **version.to_json()})

    async def _from_location(
        self, request: Request, server: ServerState, local: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Answer from the replica to which a client gave the id last, and from no other; where none did, from the one
        that has made the id, whose tag is in it. The coordinator knows which: every replica asks it each time.

        While the coordinator is not there, this replica gives rows of its own alone, under an id that it made for them.
        Only then may they be older than those of another replica: where a client has given such an id again, and this
        replica was not told within DROP_S. Beyond this is what the coordinator does not know: ids above MAX_LOCATIONS,
        and, after its restart, what had been met by a replica that has ended or no longer keeps the rows."""
        name = str(request.path_params["name"])
        try:
            location = await self._fleet.locate_rows(name)
        except ApiError as error:
            entry = server.store.find(name)
            if error.code != "fleet_unavailable" or entry is None or not entry.is_made:
                raise
            return await local()
        if location is None or location.tag == self._link.tag:
            return await local()
        answer = None if location.has_ended else await self._fleet.route(location.tag, _call(request, _ROUTING))
        if answer is None:
            text = f"the rows were kept by replica {location.tag}, which has ended; run the request again"
            raise ApiError(text, status=404, code="routing_gone")
        return from_answer(answer)

    async def _loads(self, request: Request, server: ServerState) -> list[info_routes.Load]:
        """The load of every data rank of every replica; a replica that does not answer is an error, for who waits until
        a fleet is idle must not be misled."""
        call = dataclasses.replace(_call(request, "/v1/loads"), query=b"")
        answers = await self._fleet.ask_all("route", call=call)
        loads: list[info_routes.Load] = []
        for tag, answer in zip(answers, values_of(answers), strict=True):
            loads += [{**load, "replica": tag} for load in msgspec.json.decode(answer.body)["loads"]]
        return loads

    async def _update(
        self, request: Request, model_path: str | None, label: str | None, cache: str, *, abort_first: bool = False
    ) -> WeightVersion:
        """Update all replicas, for a client that is still there: a replica that was stopped finds requests whose
        clients have left, perhaps before others have updated. Raises ClientGone, and ApiError also where a proxy may
        hide that the client has left."""
        await run_until_disconnect(request, asyncio.sleep(GONE_S), timeout_s=ASK_S)
        if (stop_s := self._link.recent_stop_s) is not None:
            text = f"this replica did not run for {stop_s:.0f} s, and the request may be older than that"
            raise unavailable(f"{text}; nothing is updated, so send it again", code="fleet_unavailable")
        return await self._fleet.update(model_path, label, cache, abort_first=abort_first)

    async def _with_replicas(self, response: Response, *, version: bool = False) -> Response:
        status, body = await self._fleet.status(), cast("dict[str, Any]", msgspec.json.decode(response.body))
        body["replicas"] = _replicas(status)
        if version:
            body |= (await self._fleet.version()).to_json()
        return json_response(body)


def _call(request: Request, route: str) -> RouteCall:
    """A request as another replica gets it. None of these has a body."""
    return RouteCall(
        route=route,
        method=request.method,
        path_params={name: str(value) for name, value in request.path_params.items()},
        query=request.scope["query_string"],
        headers=tuple((name, value) for name, value in request.scope["headers"] if name in _SENT_ON),
        body=b"",
        owner=request_owner(request),
    )


def _replicas(status: FleetStatus) -> list[dict[str, object]]:
    return [
        {
            "replica": member.tag,
            "state": member.state,
            "weight_version": None if member.version is None else member.version.label,
            "update_count": None if member.version is None else member.version.update_count,
            **member.details,
        }
        for member in status.members
    ]


def _probe_response(status: FleetStatus, code: int) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if code == 503 else None
    body: dict[str, object] = {
        "state": "serving" if code == 200 else "unavailable",
        **status.version.to_json(),
        "num_replicas": status.num_replicas,
        "num_ready": sum(member.state == "serving" for member in status.members),
        "replicas": _replicas(status),
    }
    if status.problem is not None:
        body["problem"] = status.problem
    return json_response(body, status=code, headers=headers)
