"""Ray, imported when it is first needed, and the coordinator as an actor of it."""

import asyncio
import contextlib
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from routed_experts.core.installation import import_optional
from routed_experts.fleet.coordinator import Coordinator
from routed_experts.fleet.messages import CoordinatorFailed, CoordinatorLost, MemberGone

NAMESPACE = "routed-experts"
_COORDINATOR: Mapping[str, Any] = MappingProxyType(
    {
        "namespace": NAMESPACE,
        "lifetime": "detached",  # as Serve's own actors: it outlives the process that made it
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # a call that is lost with it is an error, not repeated
        "max_concurrency": 10_000,
    }
)


def import_ray(module: str = "ray") -> Any:
    """Import Ray, or a module of it. Raises ConfigError with the command that installs it."""
    return import_optional(module, purpose="a fleet of replicas", extra="ray")


def actor_id() -> str:
    """The id that Ray has given to the actor of this process, and gives to no other actor of the cluster."""
    own_id: str = import_ray().get_runtime_context().get_actor_id()
    return own_id


async def probe(handle: Any) -> None:
    """Raise MemberGone where the actor is dead. One that is only out of reach is not."""
    exceptions = import_ray("ray.exceptions")
    try:
        await handle.__ray_ready__.remote()
    except exceptions.ActorUnavailableError:
        return
    except exceptions.RayActorError as error:
        raise MemberGone(" ".join(str(error).split())[:300]) from error


def kill(handle: Any) -> None:
    """End an actor at once."""
    import_ray().kill(handle)


class CoordinatorActor(Coordinator):
    """The coordinator in a process of its own."""

    def __init__(self, *, num_replicas: int, weight_update_timeout: float) -> None:
        with warnings.catch_warnings():  # Ray's own, about Ray's own
            warnings.simplefilter("ignore", DeprecationWarning)
            context = import_ray().get_runtime_context()
            was_restarted: bool = context.was_current_actor_reconstructed
        super().__init__(
            num_replicas=num_replicas,
            weight_update_timeout=weight_update_timeout,
            probe=probe,
            kill=kill,
            on_abandoned=lambda: kill(context.current_actor),
            was_restarted=was_restarted,
        )


class CoordinatorClient:
    """The coordinator of a fleet, as this process calls it; it is created if there is none. Needs Ray."""

    def __init__(self, fleet_id: str, *, num_replicas: int, weight_update_timeout: float) -> None:
        self._ray = import_ray()
        exceptions = import_ray("ray.exceptions")
        self._lost, self._failed = exceptions.RayError, exceptions.RayTaskError
        actor = self._ray.remote(CoordinatorActor).options(name=f"fleet:{fleet_id}", **_COORDINATOR)
        self.handle = actor.remote(num_replicas=num_replicas, weight_update_timeout=weight_update_timeout)

    async def call(self, method: str, *arguments: Any, timeout_s: float, **more: Any) -> Any:
        """Call a method. Raises CoordinatorLost; CoordinatorFailed where the method has raised."""
        try:
            return await asyncio.wait_for(self._remote(method, *arguments, **more), timeout_s)
        except (TimeoutError, self._lost) as error:
            raise self._loss(method, error) from error

    def call_blocking(self, method: str, *arguments: Any, timeout_s: float, **more: Any) -> Any:
        """Call a method outside an event loop. Raises as `call` does."""
        try:
            return self._ray.get(self._remote(method, *arguments, **more), timeout=timeout_s)
        except (TimeoutError, self._lost) as error:
            raise self._loss(method, error) from error

    def end(self) -> None:
        """End the coordinator."""
        with contextlib.suppress(self._lost, ValueError):  # it is gone
            self._ray.kill(self.handle)

    def _loss(self, method: str, error: Exception) -> CoordinatorLost:
        kind = CoordinatorFailed if isinstance(error, self._failed) else CoordinatorLost
        return kind(f"{method}: {' '.join(str(error).split())[:300]}")

    def _remote(self, method: str, *arguments: Any, **more: Any) -> Any:
        return getattr(self.handle, method).remote(*arguments, **more)
