"""Operations of a replica: what the coordinator may ask of it, by name. Event loop only."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.engine import Engine
from routed_experts.fleet.messages import RouteAnswer, RouteCall
from routed_experts.fleet.row_reservations import RowReservations
from routed_experts.fleet.weight_member import WeightMember
from routed_experts.server.admin import memory_routes, vllm_routes
from routed_experts.server.admin.control_routes import folder_under_root, pause_engine
from routed_experts.server.app import TABLE, Entry
from routed_experts.server.body import json_response
from routed_experts.server.errors import to_response
from routed_experts.server.limits import ServerSettings
from routed_experts.server.middleware import random_id
from routed_experts.server.state import ServerState


class EngineWeights:
    """An engine as WeightMember changes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prepare_weights, self.commit_weights = engine.prepare_weights, engine.commit_weights
        self.drop_weights, self.update_weight_version = engine.drop_weights, engine.update_weight_version
        self.hold_admission, self.open_admission = engine.hold_admission, engine.open_admission

    @property
    def weight_version(self) -> WeightVersion:
        """The served version."""
        return self._engine.get_weight_version()

    @property
    def paused(self) -> str | None:
        """The mode of the present pause."""
        return self._engine.paused

    @property
    def released(self) -> tuple[str, ...]:
        """The tags of device memory that is released."""
        return self._engine.released


def weight_member(engine: Engine, settings: ServerSettings) -> WeightMember:
    """The weights of an engine, which are read from folders below --weights-root. Event loop only."""

    def find_folder(model_path: str) -> Path:
        return folder_under_root(settings.weights_root, model_path)

    return WeightMember(
        EngineWeights(engine), find_folder=find_folder, call_later=asyncio.get_running_loop().call_later
    )


class Operations:
    """`drain` ends the replica's service: it finishes what runs within a time. `proxy`: what is in front."""

    def __init__(
        self,
        server: ServerState,
        weights: WeightMember,
        rows: RowReservations,
        *,
        drain: Callable[[float], Awaitable[None]],
        proxy: str,
    ) -> None:
        self._server, self._weights, self._rows, self._drain, self._proxy = server, weights, rows, drain, proxy

    def by_name(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """All of them."""
        weights = self._weights
        return MappingProxyType(
            {
                "report": weights.settled_report,
                "prepare": weights.prepare,
                "hold": weights.hold,
                "commit": weights.commit,
                "release": weights.release,
                "abort": self.abort,
                "abort_each": self.abort_each,
                "pause": self.pause,
                "resume": self.resume,
                "is_idle": self.is_idle,
                "flush": self.flush,
                "reset_prefixes": self.reset_prefixes,
                "release_memory": self.release_memory,
                "resume_memory": self.resume_memory,
                "remember": self.remember,
                "routing_stats": self.routing_stats,
                "health": self.health,
                "route": self.route,
                "drop_rows": self._rows.drop,
                "drain": self._drain,
            }
        )

    @property
    def _engine(self) -> AsyncEngine:
        return self._server.engine

    async def abort(self, rid: str | None) -> int:
        """End the calls of this id, or (None) all; returns how many sequences."""
        self._engine.flush_submissions()
        return await asyncio.to_thread(self._engine.engine.abort, rid, abort_all=rid is None)

    async def abort_each(self, ids: list[str] | None) -> int:
        """End the calls of these ids, or (None) all; returns how many sequences."""
        self._engine.flush_submissions()
        return await asyncio.to_thread(vllm_routes.abort_each, self._engine.engine, ids)

    async def pause(self, mode: str) -> None:
        """Hold generation."""
        await pause_engine(self._server, self._engine, mode)

    async def resume(self) -> None:
        """End a pause."""
        await asyncio.to_thread(self._engine.engine.resume)

    async def is_idle(self) -> bool:
        """Whether every accepted request has ended."""
        self._engine.flush_submissions()
        stats = self._engine.engine.stats()
        return stats.accepted == sum(stats.finished.values())

    async def flush(self, drafts: bool) -> int:
        """Drop cached prefixes; returns the pages that are free now."""
        return await asyncio.to_thread(self._engine.engine.flush_cache, drafts=drafts)

    async def reset_prefixes(self, resets_running: bool) -> int:
        """Drop cached prefixes, while requests run too; returns the pages that are free now."""
        return await vllm_routes.reset_prefixes(self._engine, resets_running=resets_running)

    async def release_memory(self, tags: list[str] | None, running: str) -> tuple[str, ...]:
        """Release device memory; `running`: what becomes of running requests. Returns what is released now."""
        return await memory_routes.release(self._server, self._engine, tags, running=running)

    async def resume_memory(self, tags: list[str] | None) -> tuple[str, ...]:
        """Take device memory back; returns what is still released."""
        return await memory_routes.resume(self._engine, tags)

    async def remember(self, **rollout: Any) -> None:
        """Take an answer as a draft of later ones."""
        await asyncio.to_thread(lambda: self._engine.engine.remember_rollouts(**rollout))

    async def routing_stats(self, reset: bool) -> dict[str, Any]:
        """The fields of the expert counts, which are reset afterwards if asked."""
        reader = self._server.routing_resets if reset else self._server.routing_stats
        stats = await reader.get_within(self._server.settings.stall_timeout)
        return {field.name: getattr(stats, field.name) for field in dataclasses.fields(RoutingStats)}

    async def health(self) -> dict[str, Any]:
        """State, version and counts; answers also while a step is stuck."""
        health = self._server.health()
        return {
            "state": health.state,
            "version": self._engine.engine.get_weight_version(),
            "model_path": self._weights.model_path,
            "running": health.running,
            "waiting": health.waiting,
            "last_step_age_s": health.last_step_age_s,
            "proxy": self._proxy,
        }

    async def route(self, call: RouteCall) -> RouteAnswer:
        """Answer a request of HTTP that arrived at another replica."""
        entry = _entry(call)
        try:
            response = await entry.handler(_to_request(call), self._server)
        except Exception as error:
            answer = to_response(error)
            response = json_response(answer.body, status=answer.status, headers=answer.headers)
        return to_answer(response)


def to_answer(response: Response) -> RouteAnswer:
    """A response that is complete, as a value."""
    headers = tuple((name, value) for name, value in response.headers.items() if name != "x-request-id")
    return RouteAnswer(response.status_code, headers, bytes(response.body))


def from_answer(answer: RouteAnswer) -> Response:
    """The response of another replica, as ours."""
    return Response(answer.body, status_code=answer.status, headers=dict(answer.headers))


def _entry(call: RouteCall) -> Entry:
    method = "GET" if call.method == "HEAD" else call.method
    return next(entry for entry in TABLE if entry.path == call.route and method in entry.methods)


def _to_request(call: RouteCall) -> Request:
    """The request, whose key and admin rights were checked where it arrived."""

    async def receive() -> Message:
        return {"type": "http.request", "body": call.body, "more_body": False}

    scope = {
        "type": "http",
        "method": call.method,
        "path": call.route,
        "query_string": call.query,
        "headers": list(call.headers),
        "path_params": dict(call.path_params),
        "state": {"owner": call.owner, "admin_refusal": None, "request_id": random_id()},
    }
    return Request(scope, receive)
