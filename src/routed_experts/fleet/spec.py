"""ReplicaSpec: everything a replica is built from, as it travels through Ray; and what it needs of a host."""

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.integers import is_integer
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.fleet.settings import FleetSettings
from routed_experts.server.limits import ServerSettings

_PLACEHOLDER = "127.0.0.1:1"  # replicas choose their own address
_ROOM_FOR_ROUTES = 64  # requests beside those that generate or wait: a paused replica is still to be continued


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One engine of a fleet. `dist` has the number of its processes and their timeouts; its address is a
    placeholder. `name`: of the application in Ray Serve; `fleet_id`: of this start of it, so that a coordinator that an
    earlier one has left behind is not met."""

    args: ServerArgs
    server: ServerSettings
    fleet: FleetSettings
    dist: DistConfig = dataclasses.field(default_factory=DistConfig)
    load_format: str = "auto"
    experts: ExpertOffloadConfig | None = None
    placement: PlacementConfig | None = None
    speculative: SpeculativeConfig | None = None
    name: str = "routed-experts"
    fleet_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        """Refuse what a fleet cannot start. Raises ConfigError."""
        if not self.dist.is_leader:
            text = f"node_rank={self.dist.node_rank} with a fleet: Ray starts the followers of every replica"
            raise ConfigError(f"{text}; leave node_rank out")
        if self.args.tp_size % self.dist.nnodes:
            text = f"tp_size={self.args.tp_size} counts the devices of the {self.dist.nnodes} processes of a replica"
            raise ConfigError(f"{text}; choose a multiple of {self.dist.nnodes}")

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that Ray Serve hands to a replica at once; beyond, the server's own limits answer."""
        num_running = self.args.running_limit * self.args.dp_size  # the limit is one of each data rank
        return self.args.max_queued_requests + num_running + _ROOM_FOR_ROUTES

    @property
    def parts(self) -> dict[str, Any]:
        """Keywords of Engine and follow beside the fields of ServerArgs."""
        return {"load_format": self.load_format, "placement": self.placement, "speculative": self.speculative}


def group_template(*, nnodes: int, node_rank: int | None, dist_init_addr: str | None, **timeouts: Any) -> DistConfig:
    """The processes of a replica. Raises ConfigError for a rank or an address: Ray and the replicas choose them."""
    if node_rank is not None:
        text = f"node_rank={node_rank} with num_replicas: Ray starts the followers of every replica"
        raise ConfigError(f"{text}; leave node_rank out, and run the command once")
    if dist_init_addr is not None:
        text = f"dist_init_addr={dist_init_addr!r} with num_replicas: each replica chooses its own"
        raise ConfigError(f"{text}; leave dist_init_addr out")
    address = _PLACEHOLDER if is_integer(nnodes) and nnodes > 1 else None
    return DistConfig(nnodes=nnodes, dist_init_addr=address, **timeouts)


def host_bundle(tp_size: int, nnodes: int, resources: Mapping[str, float]) -> dict[str, float]:
    """What one process of a replica needs of a host: a CPU, and the accelerators of its devices. `resources`: of the
    cluster; without accelerators JAX runs on CPUs."""
    num_devices = float(tp_size // nnodes)
    kind = next((name for name in ("GPU", "TPU") if resources.get(name, 0) > 0), None)
    return {"CPU": 1.0} if kind is None else {"CPU": 1.0, kind: num_devices}


def check_resources(spec: ReplicaSpec, free: Mapping[str, float], *, field: str = "num_replicas") -> None:
    """Raise ConfigError, with the table of what is free, where all replicas do not fit. `field`: the name of their
    number in the message."""
    number, nnodes = spec.fleet.num_replicas, spec.dist.nnodes
    bundle = host_bundle(spec.args.tp_size, nnodes, free)
    needed = {kind: amount * nnodes * number for kind, amount in bundle.items()}
    if all(free.get(kind, 0.0) >= amount for kind, amount in needed.items()):
        return
    fits = int(min(free.get(kind, 0.0) // (amount * nnodes) for kind, amount in bundle.items()))
    listed = ", ".join(f"{kind}: {needed[kind]:g} needed, {free.get(kind, 0.0):g} free" for kind in needed)
    each = "" if nnodes == 1 else f" of {nnodes} processes each"
    fix = f"set {field}={fits}, or add hosts" if fits >= 1 else "add hosts, or stop what else runs in this Ray"
    raise ConfigError(f"{field}={number}{each} do not fit ({listed}); {fix}")
