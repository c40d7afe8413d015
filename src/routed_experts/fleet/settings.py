"""FleetSettings: how many replicas there are, how requests are routed to them, and what is waited for how long."""

import dataclasses
import math

from routed_experts.core.errors import ConfigError
from routed_experts.core.integers import to_int, with_python_integers

ROUTING_POLICIES = ("least_loaded", "session")
MAX_REPLICAS = 10_000


@with_python_integers
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """`num_replicas` engines behind one endpoint, each of them whole. A fleet is what has several replicas, or a
    `ray_address`: "auto" or host:port of a Ray cluster that runs; None starts a Ray of this machine.

    `replica_startup_timeout`: seconds until all replicas are ready. `weight_update_timeout`: seconds in which every
    replica loads new weights. Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    num_replicas: int = 1
    routing_policy: str = "least_loaded"
    ray_address: str | None = None
    replica_startup_timeout: float = 1800.0
    weight_update_timeout: float = 600.0

    def __post_init__(self) -> None:
        """Check every field once."""
        to_int("num_replicas", self.num_replicas, 1, MAX_REPLICAS, fix="count the engines behind the endpoint")
        if self.routing_policy not in ROUTING_POLICIES:
            text = f"routing_policy={self.routing_policy!r} is unknown"
            raise ConfigError(f"{text}; choose one of {', '.join(ROUTING_POLICIES)}")
        if self.ray_address is not None and (not isinstance(self.ray_address, str) or not self.ray_address.strip()):
            text = f"ray_address={self.ray_address!r} names no Ray cluster"
            raise ConfigError(f"{text}; give auto, or host:port of its head")
        for name in ("replica_startup_timeout", "weight_update_timeout"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not 1 <= value <= 86_400:
                raise ConfigError(f"{name}={value!r} must be 1 to 86400 seconds; choose another")
        if not self.is_fleet and self.routing_policy != "least_loaded":
            text = f"routing_policy={self.routing_policy!r} with num_replicas=1 routes to the one engine there is"
            raise ConfigError(f"{text}; set num_replicas, or leave routing_policy out")

    @property
    def is_fleet(self) -> bool:
        """Whether Ray is used at all."""
        return self.num_replicas > 1 or self.ray_address is not None
