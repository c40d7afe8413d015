"""FleetClient: what one replica asks of all replicas of its fleet, through the coordinator.

Refusals are raised as errors of HTTP, which name the replicas that refuse."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.control.admission_control import parse_pause_mode
from routed_experts.engine.control.memory_control import MEMORY_TAGS
from routed_experts.fleet.link import Link
from routed_experts.fleet.member import TIMED_OUT
from routed_experts.fleet.messages import (
    Answer,
    CoordinatorFailed,
    CoordinatorLost,
    FleetStatus,
    Refusal,
    RouteAnswer,
    RouteCall,
    RowLocation,
)
from routed_experts.fleet.two_phase import COMMIT_S, HOLD_S
from routed_experts.server.errors import ApiError, unavailable

ASK_S = 10.0
FLUSH_S = 2 * HOLD_S + 2 * COMMIT_S  # also before an update that finds one under way
logger = logging.getLogger(__name__)
_NO_ANSWER = "no replica has answered; try again soon"
_T = TypeVar("_T")


class FleetClient:
    """`update_s`: seconds in which all replicas load new weights. Every method raises ApiError: the refusal of the
    replicas, or 503 where the coordinator is not reached."""

    def __init__(self, link: Link, update_s: float) -> None:
        self._link, self._update_s = link, update_s

    async def pause(self, mode: str, *, wait_s: float) -> None:
        """Pause all replicas. `wait_s`: seconds until running requests must have ended in the mode "wait". Raises
        InvalidRequestError for another mode than the engine's."""
        parse_pause_mode(mode)
        timeout_s = wait_s if mode == "wait" else ASK_S
        answers: dict[str, Answer] | Refusal = await self._call("pause", mode, timeout_s, timeout_s=timeout_s + ASK_S)
        values_of(_checked(answers))

    async def resume(self) -> None:
        """End the pause of all replicas."""
        refusal: Refusal | None = await self._call("set_pause", None)
        _checked(refusal)
        values_of(await self.ask_all("resume"))

    async def release_memory(self, tags: Sequence[str] | None, running: str, timeout_s: float) -> list[str]:
        """Release memory of all replicas; returns what is released on any of them."""
        chosen = list(MEMORY_TAGS if tags is None else tags)
        return _union(await self._call("release_memory", chosen, running, timeout_s, timeout_s=timeout_s + ASK_S))

    async def resume_memory(self, tags: Sequence[str] | None) -> list[str]:
        """Take memory of all replicas back; returns what is still released on any of them."""
        return _union(await self._call("resume_memory", tags, ASK_S, timeout_s=2 * ASK_S))

    async def routing_stats(self, *, reset: bool) -> RoutingStats:
        """How often each expert was chosen, summed over the replicas; `reset` sets the counts to zero."""
        return sum_stats(values_of(await self.ask_all("routing_stats", reset=reset)))

    async def update(
        self, model_path: str | None, label: str | None, cache: str, *, abort_first: bool = False
    ) -> WeightVersion:
        """Update all replicas, or none: to the weights of this folder (None: the same) and this label (None: the
        same)."""
        timeout_s = FLUSH_S + self._update_s + HOLD_S + 3 * COMMIT_S
        result: WeightVersion | Refusal = await self._call(
            "update", model_path, label, cache, timeout_s=timeout_s, abort_first=abort_first
        )
        return _checked(result)

    async def flush(self, *, drafts: bool) -> int:
        """Drop the cached prefixes of all replicas, or, while a request runs anywhere, of none; returns the pages that
        are free again."""
        answers: dict[str, Answer] | Refusal = await self._call("flush", drafts=drafts, timeout_s=FLUSH_S)
        return sum(values_of(_checked(answers)))

    async def locate_rows(self, request_id: str) -> RowLocation | None:
        """The replica that keeps the rows of an id, if one does; None: of an id that no request had."""
        location: RowLocation | Refusal | None = await self._call("locate_rows", request_id)
        return _checked(location)

    async def route(self, tag: str, call: RouteCall) -> RouteAnswer | None:
        """What one replica answers to a request; None where it has gone. Raises ApiError where it does not answer."""
        answer: Answer | None = await self._call("ask", tag, "route", ASK_S, {"call": call}, timeout_s=2 * ASK_S)
        if answer is None:
            return None
        if answer.refusal is not None and answer.refusal.code == TIMED_OUT:
            text = f"replica {tag} has not answered within {ASK_S:g} s; try again soon"
            raise unavailable(text, code="fleet_unavailable")
        return values_of({tag: answer})[0]

    async def version(self) -> WeightVersion:
        """The weights that the fleet serves."""
        version: WeightVersion | Refusal = await self._call("version")
        return _checked(version)

    async def status(self) -> FleetStatus:
        """The replicas with their health."""
        status: FleetStatus = await self._call("status")
        return status

    async def ask_all(
        self, operation: str, *, timeout_s: float = ASK_S, leave_out_self: bool = False, **arguments: Any
    ) -> dict[str, Answer]:
        """Run an operation of all replicas, or of all others; returns their answers by tag."""
        left_out = self._link.tag if leave_out_self else None
        answers: dict[str, Answer] | Refusal = await self._call(
            "ask_all", operation, timeout_s, arguments, left_out, timeout_s=timeout_s + ASK_S
        )
        return _checked(answers)

    async def _call(self, method: str, *arguments: Any, timeout_s: float = ASK_S, **more: Any) -> Any:
        """Call the coordinator. Raises ApiError: 503 without one, 500 where it fails."""
        try:
            return await self._link.call(method, *arguments, timeout_s=timeout_s, **more)
        except CoordinatorFailed as error:
            logger.error("the coordinator failed: %s", error)
            text = "the coordinator of the fleet failed; the log of the replica has the cause"
            raise ApiError(text, status=500, code="internal_error") from error
        except CoordinatorLost as error:
            text = "the coordinator of the fleet is not reached; it is restarted, so try again soon"
            raise unavailable(text, code="fleet_unavailable") from error


def sum_stats(parts: Sequence[Mapping[str, Any]]) -> RoutingStats:
    """Sum expert counts of several engines, given as the fields of RoutingStats."""
    if not parts:
        raise unavailable(_NO_ANSWER, code="fleet_unavailable")
    return RoutingStats.merge([RoutingStats(**part) for part in parts])


def _checked(result: _T | Refusal) -> _T:
    """Return a result of the coordinator, or raise its refusal."""
    if isinstance(result, Refusal):
        raise to_error(result)
    return result


def values_of(answers: Mapping[str, Answer]) -> list[Any]:
    """Return what every replica answered. Raises the refusal, where all refuse alike; else 502 with a list; 503 for
    no answer at all."""
    if not answers:
        raise unavailable(_NO_ANSWER, code="fleet_unavailable")
    refused = {tag: answer.refusal for tag, answer in answers.items() if answer.refusal is not None}
    if not refused:
        return [answer.value for answer in answers.values()]
    first = next(iter(refused.values()))
    if len(refused) == len(answers) and {refusal.code for refusal in refused.values()} == {first.code}:
        raise to_error(first)
    done = [tag for tag in answers if tag not in refused]
    lines = "; ".join(f"{tag}: {refusal.message}" for tag, refusal in refused.items())
    text = f"not done on {lines}; done on {', '.join(done) or 'none'}; repeat the call"
    raise ApiError(text, status=502, code="replicas_disagree")


def _union(answers: dict[str, Answer] | Refusal) -> list[str]:
    """The tags of memory that is released on any replica."""
    return sorted({tag for released in values_of(_checked(answers)) for tag in released})


def to_error(refusal: Refusal) -> ApiError:
    """The error of HTTP for a refusal."""
    return ApiError(refusal.message, status=refusal.status, code=refusal.code, param=refusal.param)
