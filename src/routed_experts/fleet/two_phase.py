"""The two phases of a weight update over replicas, and how a split is healed.

    prepare (all load and check) -> hold (no request starts anywhere) -> commit (all swap) -> open
Before the first commit any refusal means drop and open everywhere: the old version serves. From the first commit on the
new version is the fleet's: a replica that does not follow is evicted. Between hold and open no request starts on any
replica, so that no request that starts later starts with older weights."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet.messages import Answer, MemberGone, Report

HOLD_S = 10.0  # in which every replica holds its requests, else none of them swaps
ABORT_S = 4.0  # for the end of what runs, between the holds and the swaps
COMMIT_S = 30.0  # for a swap between two steps, and for every other short operation
# A replica that hears nothing of the coordinator opens by itself: with the old weights this long after its hold, with
# the new ones this long after its swap. The second is longer than the first and than COMMIT_S, so that a replica that
# has opened with old weights is evicted before another opens with new ones.
OPEN_OLD_S, OPEN_NEW_S = HOLD_S + 5.0, COMMIT_S + 10.0


class Member(Protocol):
    """A replica, as the coordinator calls it."""

    @property
    def tag(self) -> str:
        """Its name in the fleet."""
        ...

    async def call(self, operation: str, *, timeout_s: float, **arguments: Any) -> Answer:
        """Run an operation. Raises MemberGone, TimeoutError."""
        ...


Evict = Callable[[Member, str], Awaitable[None]]  # ends a replica that is not of the fleet's version, with the reason


class UpdateRefused(Exception):
    """The update did not happen; every replica has the old weights. `is_late`: none has refused it, and some have not
    answered in time."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


class NoReplicaLeft(UpdateRefused):
    """No replica has swapped, and all have ended; no request has started with the new weights."""


async def update(
    members: Sequence[Member],
    *,
    model_path: str | None,
    version: WeightVersion,
    cache: str,
    prepare_s: float,
    evict: Evict,
    on_decided: Callable[[], None],
    before_commit: Callable[[], Awaitable[object]] | None = None,
    spawn: Callable[[Coroutine[Any, Any, None]], object] = asyncio.ensure_future,
) -> None:
    """Bring all members to the weights in `model_path`, or (None) the served ones to another version. `on_decided` is
    called before the first commit, and `before_commit`, which takes up to ABORT_S, before that, when no member has
    refused. Then all members hold again: one whose time was over meanwhile has opened. Members that die are out. Raises
    UpdateRefused naming who refused and why; then nothing has changed. A member that was late is released by a task of
    `spawn`, and not waited for again."""
    answers = await _ask(members, "prepare", timeout_s=prepare_s, model_path=model_path, version=version)
    refused = _refusals(answers, f"has not loaded the weights within weight_update_timeout={prepare_s:g} s")
    late_hold = f"has not held its requests within {HOLD_S:g} s"
    if not refused:
        members = _alive(members, answers)
        answers = await _ask(members, "hold", timeout_s=HOLD_S)
        refused = _refusals(answers, late_hold)
    if not refused and before_commit is not None:
        await before_commit()
        members = _alive(members, answers)
        answers = await _ask(members, "hold", timeout_s=HOLD_S)
        refused = _refusals(answers, late_hold)
    if not refused and not _alive(members, answers):
        raise NoReplicaLeft(f"no replica is left to swap to update {version.update_count}")
    if refused:
        late = [member for member in members if isinstance(answers.get(member.tag), TimeoutError)]
        if late:
            spawn(_release(late))
        await _release([member for member in _alive(members, answers) if member not in late])
        raise UpdateRefused("; ".join(refused), is_late=len(refused) == len(late))
    members = _alive(members, answers)
    on_decided()
    answers = await _ask(members, "commit", timeout_s=COMMIT_S, update_count=version.update_count, cache=cache)
    await _evict_refusing(members, answers, evict)
    members = _alive(members, answers)
    if not members:
        raise NoReplicaLeft(f"no replica has swapped to update {version.update_count}, and all have ended")
    await _release(members)


async def heal(
    reports: Mapping[str, Report], members: Sequence[Member], *, prepare_s: float, evict: Evict
) -> tuple[WeightVersion, str | None]:
    """Bring members that a coordinator left in any state to one version: of the highest count that one of them serves.
    The load, which may be long, comes before the hold. Returns the version with its path."""
    if not reports:
        return WeightVersion(), None
    newest = max(reports.values(), key=lambda report: report.version.update_count)
    version, path, count = newest.version, newest.model_path, newest.version.update_count
    for member in members:
        served = reports[member.tag]
        if served.version.update_count == count and (served.version, served.model_path) != (version, path):
            await evict(member, f"it serves other weights than the fleet under the same count, update {count}")
            members = [other for other in members if other is not member]
    behind = [member for member in members if reports[member.tag].version.update_count < count]
    if behind:
        answers = await _ask(behind, "prepare", timeout_s=prepare_s, model_path=path, version=version)
        await _evict_refusing(behind, answers, evict)
        behind = _alive(behind, answers)
        members = [member for member in members if member.tag not in answers or member in behind]
        held = await _ask(members, "hold", timeout_s=HOLD_S)
        await _evict_refusing(behind, held, evict)
        members, behind = _alive(members, held), _alive(behind, held)
        answers = await _ask(behind, "commit", timeout_s=COMMIT_S, update_count=count, cache="flush")
        await _evict_refusing(behind, answers, evict)
        members = [member for member in members if member not in behind or member in _alive(behind, answers)]
    await _release(members)
    return version, path


Answers = dict[str, Answer | BaseException]


async def _ask(members: Sequence[Member], operation: str, *, timeout_s: float, **arguments: Any) -> Answers:
    """The answer of each member, or why there is none."""
    results = await asyncio.gather(
        *(member.call(operation, timeout_s=timeout_s, **arguments) for member in members), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, MemberGone | TimeoutError):
            raise result
    return {member.tag: result for member, result in zip(members, results, strict=True)}


async def _release(members: Sequence[Member]) -> None:
    """Drop what is prepared, and open."""
    await _ask(members, "release", timeout_s=COMMIT_S)


def _refusals(answers: Answers, late: str) -> list[str]:
    """Who refused and why, a line each; the dead refuse nothing."""
    lines: list[str] = []
    for tag, answer in answers.items():
        if isinstance(answer, TimeoutError):
            lines.append(f"{tag} {late}")
        elif isinstance(answer, Answer) and answer.refusal is not None:
            lines.append(f"{tag}: {answer.refusal.message}")
    return lines


def _alive(members: Sequence[Member], answers: Answers) -> list[Member]:
    return [member for member in members if not isinstance(answers.get(member.tag), MemberGone)]


def _ready(members: Sequence[Member], answers: Answers) -> list[Member]:
    """The members that did what they were asked."""
    answered = ((member, answers.get(member.tag)) for member in members)
    return [member for member, answer in answered if isinstance(answer, Answer) and answer.refusal is None]


async def _evict_refusing(members: Sequence[Member], answers: Answers, evict: Evict) -> None:
    """Evict those that are alive and did not do what they were asked."""
    done = _ready(members, answers)
    for member in _alive(members, answers):
        if member not in done:
            answer = answers[member.tag]
            reason = answer.refusal.message if isinstance(answer, Answer) and answer.refusal else "it did not answer"
            await evict(member, reason)
            answers[member.tag] = MemberGone(f"{member.tag} is evicted: {reason}")
