"""DistConfig: the process group of an engine whose devices belong to several processes, one a host.

Checked once, when it is made; what depends on the machine is checked when the group starts."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from routed_experts.core.errors import ConfigError
from routed_experts.core.integers import to_int, with_python_integers

MAX_NODES = 1024
MAX_PORT = 65534  # JAX's coordinator listens on the next one
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,6})")
_ANY_ADDRESS = ("0.0.0.0", "::")


@with_python_integers
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistConfig:
    """One model over `nnodes` processes. Process 0 listens at `dist_init_addr` ("host:port", an address of its own
    machine that the others reach), schedules, and serves; the others follow. JAX's coordinator listens at port + 1.

    `dist_timeout`: seconds for the start of the group and for each phase that loads or compiles. `watchdog_timeout`:
    seconds of silence, or of one order, after which a process is lost and the group ends. With nnodes=1 there is no
    group. Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout: float = 300.0
    watchdog_timeout: float = 30.0

    def __post_init__(self) -> None:
        """Check every field once."""
        to_int("nnodes", self.nnodes, 1, MAX_NODES, fix="count the processes")
        to_int("node_rank", self.node_rank, 0, self.nnodes - 1, fix=f"nnodes={self.nnodes} ranks begin at 0")
        for name, value in (("dist_timeout", self.dist_timeout), ("watchdog_timeout", self.watchdog_timeout)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not 1 <= value <= 86_400:
                raise ConfigError(f"{name}={value!r} must be 1 to 86400 seconds; choose another")
        if self.nnodes == 1:
            if self.dist_init_addr is not None:
                text = f"dist_init_addr={self.dist_init_addr!r} with nnodes=1, which is one process without a group"
                raise ConfigError(f"{text}; set nnodes, or leave dist_init_addr out")
            return
        if self.dist_init_addr is None:
            text = f"nnodes={self.nnodes} needs dist_init_addr, where process 0 listens"
            raise ConfigError(f"{text}; give host:port, such as 10.0.0.1:5000")
        _parse_address(self.dist_init_addr)

    @staticmethod
    def create(fields: Mapping[str, Any]) -> "DistConfig":
        """Build from fields by name, None: not given. Scripts name an address for one process, too: there it is left
        out, because nothing listens. Raises ConfigError."""
        present = {name: value for name, value in fields.items() if value is not None}
        if present.get("nnodes", 1) == 1:
            present.pop("dist_init_addr", None)
        return DistConfig(**present)

    @property
    def is_group(self) -> bool:
        """Whether there are several processes."""
        return self.nnodes > 1

    @property
    def is_leader(self) -> bool:
        """Whether this process schedules and serves."""
        return self.node_rank == 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0; of a group."""
        assert self.dist_init_addr is not None, "of a group"
        return _parse_address(self.dist_init_addr)

    @property
    def coordinator_address(self) -> str:
        """Where JAX's coordinator listens: the same host, the next port."""
        host, port = self.address
        return format_address(host, port + 1)


def format_address(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_address(address: object) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise ConfigError(f"dist_init_addr={address!r} is not host:port; write it as 10.0.0.1:5000 or [fd00::1]:5000")
    host, port = match["v6"] or match["host"], int(match["port"])
    if not 1 <= port <= MAX_PORT:
        text = f"dist_init_addr={address!r}: the port must be 1 to {MAX_PORT}, because the next one is used too"
        raise ConfigError(f"{text}; choose another port")
    if host in _ANY_ADDRESS:
        text = f"dist_init_addr={address!r} is no address that other processes can connect to"
        raise ConfigError(f"{text}; give the address of process 0's machine in their network")
    return host, port
