"""WeightMember: the weights and the admission of one replica, as the coordinator changes them.

Operations run one after another, each in a thread. All are idempotent: a coordinator that was restarted repeats them.
An update is known by its count, which all replicas share; labels may repeat.
Event loop only."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from routed_experts.core.errors import InvalidRequestError, WeightsMismatchError
from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet.messages import Report
from routed_experts.fleet.two_phase import OPEN_NEW_S, OPEN_OLD_S

logger = logging.getLogger(__name__)


class WeightedEngine(Protocol):
    """What an engine offers for it."""

    @property
    def weight_version(self) -> WeightVersion:
        """The served version."""
        ...

    @property
    def paused(self) -> str | None:
        """The mode of the present pause."""
        ...

    @property
    def released(self) -> tuple[str, ...]:
        """The tags of device memory that is released."""
        ...

    def prepare_weights(self, path: str | Path, *, version: str, update_count: int) -> None:
        """Load and check beside the served weights."""
        ...

    def commit_weights(self, version: str | None = None, *, cache: str) -> object:
        """Swap to the prepared weights."""
        ...

    def drop_weights(self) -> None:
        """Free the prepared weights."""
        ...

    def update_weight_version(self, version: str, *, update_count: int) -> object:
        """Give the served weights another label and count."""
        ...

    def hold_admission(self) -> None:
        """Hold new requests back."""
        ...

    def open_admission(self) -> None:
        """End the hold."""
        ...


class WeightMember:
    """`find_folder` maps a path, as an update names it, to a folder of this machine. `call_later` runs a call after
    some seconds; what it returns can be cancelled."""

    def __init__(
        self,
        engine: WeightedEngine,
        *,
        find_folder: Callable[[str], Path],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self._engine, self._find_folder, self._call_later = engine, find_folder, call_later
        self._lock = asyncio.Lock()
        self._path: str | None = None  # of the served weights
        self._prepared: tuple[WeightVersion, str | None] | None = None  # and the path
        self._held = self._is_new = False  # is_new: swapped since the hold began
        self._opened_alone = False  # with the old weights, and what is prepared is still there
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None

    async def report(self) -> Report:
        """The state now; answers also while an operation runs."""
        served, (version, path) = self._engine.weight_version, self._prepared or (None, None)
        return Report(
            version=served,
            model_path=self.model_path,
            prepared=None if version is None else version.update_count,
            prepared_path=path,
            held=self._held,
            pause=self._engine.paused,
            released=self._engine.released,
            is_busy=self._lock.locked(),
        )

    async def settled_report(self) -> Report:
        """The state, once the operations before have ended."""
        async with self._lock:
            report = await self.report()
        return dataclasses.replace(report, is_busy=False)

    @property
    def model_path(self) -> str | None:
        """The path of the served weights, as the update named it; None: of those of the start."""
        if self._prepared is not None and self._prepared[0].update_count == self._engine.weight_version.update_count:
            return self._prepared[1] or self._path  # the engine has swapped, and the operation has not ended
        return self._path

    async def load(self, model_path: str | None, version: WeightVersion) -> None:
        """Serve these weights now: of a replica that starts later than an update."""
        await self.prepare(model_path, version)
        await self.commit(version.update_count, "flush")

    async def prepare(self, model_path: str | None, version: WeightVersion) -> None:
        """Load and check weights beside the served ones; `model_path` None: none are loaded, and the served ones will
        have another version. Raises what the engine raises."""
        async with self._lock:
            served = self._engine.weight_version
            if self._prepared == (version, model_path) or served.update_count == version.update_count:
                return
            await self._drop()
            if version.update_count < served.update_count:
                text = f"update {version.update_count} is not after the served one, update {served.update_count}"
                raise WeightsMismatchError(f"{text}; restart this replica", param="weight_version")
            if model_path is not None:
                await asyncio.to_thread(self._prepare, model_path, version)
            elif self._engine.released:  # the engine would refuse the label when all replicas have agreed
                text = f"{', '.join(self._engine.released)} is released; call /resume_memory_occupation first"
                raise InvalidRequestError(text, param="new_version", code="memory_released")
            self._prepared = version, model_path

    async def hold(self) -> None:
        """Start no request until `release`; queue them."""
        async with self._lock:
            await self._hold()

    async def commit(self, update_count: int, cache: str) -> None:
        """Swap to the prepared weights of this count. A member that has opened by itself holds again before it swaps:
        others may still serve the old weights. Raises WeightsMismatchError where these are not prepared."""
        async with self._lock:
            if self._engine.weight_version.update_count != update_count:
                if self._prepared is None or self._prepared[0].update_count != update_count:
                    raise WeightsMismatchError(f"update {update_count} is not prepared here", param="weight_version")
                if self._opened_alone:
                    await self._hold()
                version, path = self._prepared
                if path is None:
                    await asyncio.to_thread(self._relabel, version)
                else:
                    await asyncio.to_thread(self._commit, cache)
                    self._path = path
                self._prepared = None
            if self._held:
                self._is_new = True
                self._open_in(OPEN_NEW_S)

    async def release(self) -> None:
        """Free prepared weights and end the hold."""
        async with self._lock:
            await self._drop()
            await self._open()
            self._opened_alone = False

    async def _hold(self) -> None:
        if not self._held:
            await asyncio.to_thread(self._engine.hold_admission)
            self._held, self._is_new, self._opened_alone = True, False, False
        self._open_in(OPEN_NEW_S if self._is_new else OPEN_OLD_S)

    async def _open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            await asyncio.to_thread(self._engine.open_admission)
            self._held = False

    async def _drop(self) -> None:
        if self._prepared is not None:
            await asyncio.to_thread(self._engine.drop_weights)
            self._prepared = None

    def _prepare(self, model_path: str, version: WeightVersion) -> None:
        folder = self._find_folder(model_path)
        self._engine.prepare_weights(folder, version=version.label, update_count=version.update_count)

    def _commit(self, cache: str) -> None:
        self._engine.commit_weights(cache=cache)

    def _relabel(self, version: WeightVersion) -> None:
        self._engine.update_weight_version(version.label, update_count=version.update_count)

    def _open_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._call_later(seconds, self._on_silence)

    def _on_silence(self) -> None:
        self._opening = asyncio.ensure_future(self._open_alone(self._timer))

    async def _open_alone(self, timer: asyncio.TimerHandle | None) -> None:
        async with self._lock:
            if self._timer is timer and self._held:  # nothing has come while the lock was waited for
                which = "new" if self._is_new else "old"
                logger.warning(
                    "the coordinator of the fleet is silent: requests start again, with the %s weights", which
                )
                self._opened_alone = not self._is_new
                await self._open()
