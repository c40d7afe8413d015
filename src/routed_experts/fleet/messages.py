"""What replicas and the coordinator of a fleet send each other: plain values of types that both import.

A replica asks the coordinator for tasks and answers each. Errors travel as values: an exception of ours may not survive
its way through Ray."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.weight_version import WeightVersion


class MemberGone(Exception):
    """A replica has died, or left, before it answered."""


class CoordinatorLost(Exception):
    """The coordinator cannot be reached: it has died and is being restarted, or Ray is gone."""


class CoordinatorFailed(CoordinatorLost):
    """A method of the coordinator has raised an error, which it will raise again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error that a caller gets: status, stable code and one sentence."""

    status: int
    code: str
    message: str
    param: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One operation of a replica."""

    task_id: int
    operation: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a task, or the refusal."""

    value: Any = None
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The weights and the admission of a replica. `model_path`: of the served weights, as the update named it; None:
    those of the start. `prepared`, `prepared_path`: of weights that are loaded beside them, by their count. `released`:
    tags of device memory. `is_busy`: an operation runs, which may change all of it."""

    version: WeightVersion
    model_path: str | None
    prepared: int | None
    prepared_path: str | None
    held: bool
    pause: str | None
    released: tuple[str, ...]
    is_busy: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a replica is told when it joins: its tag, which coordinator this is (another after a restart), and the
    version, path, pause and released memory of the fleet, which it takes over before it serves."""

    tag: str
    instance: str
    version: WeightVersion
    model_path: str | None
    pause: str | None
    released: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RowLocation:
    """The replica that keeps the rows of an id, if one does, and whether it has ended."""

    tag: str
    has_ended: bool


@dataclasses.dataclass(frozen=True, slots=True)
class NumberedRows:
    """The reservations of rows that a coordinator has numbered, by id, and the seconds for which they may be kept."""

    numbers: Mapping[str, int]
    retention_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouteCall:
    """A request of HTTP as another replica answers it. `route`: the path as the table of routes has it; `owner`: the
    digest of the key, which was checked where the request arrived."""

    route: str
    method: str
    path_params: Mapping[str, str]
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    owner: str


@dataclasses.dataclass(frozen=True, slots=True)
class RouteAnswer:
    """The response."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MemberStatus:
    """A replica as the coordinator sees it. `state`: of its health, or "unreachable"; `model_path`: of the weights, as
    in Report; `details`: its probe's answer."""

    tag: str
    state: str
    version: WeightVersion | None = None
    model_path: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(tag: str, answer: Answer | None) -> "MemberStatus":
        """The status from a replica's answer to a probe; None: it has gone."""
        if answer is None or answer.refusal is not None:
            return MemberStatus(tag, "unreachable")
        details = dict(answer.value)
        return MemberStatus(tag, details.pop("state"), details.pop("version"), details.pop("model_path"), details)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet at one moment. `problem`: why the versions are not settled, or None."""

    members: tuple[MemberStatus, ...]
    num_replicas: int
    version: WeightVersion
    problem: str | None
    deaths: int


def describe_version(version: WeightVersion) -> str:
    """A version as errors and logs write it."""
    return f"{short_repr(version.label)} (update {version.update_count})"


def describe_weights(version: WeightVersion, model_path: str | None) -> str:
    """A version and the folder of its weights, as errors and logs write them."""
    folder = "the weights of the start" if model_path is None else short_repr(model_path)
    return f"version {describe_version(version)} of {folder}"
