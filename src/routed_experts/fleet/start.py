"""Start a fleet on Ray, wait until it serves, and end it.

    Ray -> resources are checked -> Serve with its proxy -> coordinator -> replicas -> ready ... drain -> Serve ends
`application` is what `ray serve` and KubeRay import; `Fleet` is what `routed-experts serve --num-replicas` runs."""

import dataclasses
import http.client
import importlib.metadata
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, MachineError
from routed_experts.core.server_args import ServerArgs
from routed_experts.fleet.host_processes import own_process_groups
from routed_experts.fleet.messages import CoordinatorLost, FleetStatus
from routed_experts.fleet.ports import free_port
from routed_experts.fleet.ray_runtime import NAMESPACE, CoordinatorClient, import_ray
from routed_experts.fleet.replica import Replica, ReplicaApp
from routed_experts.fleet.replica_watch import ReplicaWatch
from routed_experts.fleet.settings import FleetSettings
from routed_experts.fleet.spec import ReplicaSpec, check_resources, group_template, host_bundle
from routed_experts.server.limits import ServerSettings
from routed_experts.server.run import check_port

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
SHUTDOWN_MARGIN_S = 5.0
_WATCH_S = 1.0
_REASON_TRIES = 10
_CALL_S = 10.0
_SERVE_LOGS = MappingProxyType({"enable_access_log": False, "log_level": "WARNING"})  # a line a request is the server's
_PROXY_S, _PROXY_RETRY_S = 60.0, 0.2
_CONTROLLER, _END_CHECK_S = ("SERVE_CONTROLLER_ACTOR", "serve"), 0.3  # name and namespace of Serve's own actor
_CONSISTENT_HASH = "ray.serve.experimental.consistent_hash_router"
logger = logging.getLogger(__name__)


def bind_replicas(spec: ReplicaSpec, resources: Mapping[str, float]) -> Any:
    """The application: `num_replicas` deployments of Replica. `resources`: of the cluster, which tell its kind of
    device. Raises ConfigError where this Ray has no router for the policy."""
    serve = import_ray("ray.serve")
    bundle = host_bundle(spec.args.tp_size, spec.dist.nnodes, resources)
    options: dict[str, Any] = {
        "name": "replica",
        "num_replicas": spec.fleet.num_replicas,
        "max_ongoing_requests": spec.max_ongoing_requests,
        "graceful_shutdown_timeout_s": spec.server.shutdown_timeout + SHUTDOWN_MARGIN_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "ray_actor_options": actor_options(bundle),
        "logging_config": dict(_SERVE_LOGS),
    }
    if spec.dist.is_group:
        options["placement_group_bundles"] = [dict(bundle) for _ in range(spec.dist.nnodes)]
        options["placement_group_strategy"] = "PACK"
    if spec.fleet.routing_policy == "session":
        options["request_router_config"] = session_router()
    deployment = serve.deployment(serve.ingress(ReplicaApp())(Replica)).options(**options)
    return deployment.bind(spec, _version())


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """A bundle as options of an actor."""
    others = {kind: amount for kind, amount in bundle.items() if kind not in ("CPU", "GPU")}
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "resources": others}


def session_router() -> Any:
    """The configuration of Serve's router by session. Raises ConfigError where this Ray has none."""
    ray = import_ray()
    try:
        import_ray(_CONSISTENT_HASH)
        config = import_ray("ray.serve.config").RequestRouterConfig
    except (ConfigError, AttributeError) as error:
        text = (
            f"routing_policy='session' needs the ConsistentHashRouter of Ray Serve, and Ray {ray.__version__} has none"
        )
        raise ConfigError(f"{text}; install a newer Ray, or choose least_loaded") from error
    return config(request_router_class=f"{_CONSISTENT_HASH}:ConsistentHashRouter")


def application(arguments: Mapping[str, Any]) -> Any:
    """The application for `serve deploy` and KubeRay: `import_path: routed_experts.fleet.start:application`, with the
    `arguments` of `replica_spec`. Needs a Ray."""
    return bind_replicas(replica_spec(arguments), import_ray().cluster_resources())


def replica_spec(arguments: Mapping[str, Any]) -> ReplicaSpec:
    """Read the arguments of an application: fields of ServerArgs, ServerSettings and FleetSettings, and nnodes,
    dist_timeout, watchdog_timeout, all in one mapping. Host and port are Serve's. Raises ConfigError, also for a field
    that none of them has."""
    rest = dict(arguments)

    def take(config: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(config)]
        return {name: rest.pop(name) for name in names if name in rest}

    rest.setdefault("ray_address", "auto")
    values: dict[str, Any] = {"nnodes": 1, "node_rank": None, "dist_init_addr": None} | take(DistConfig)
    args, server = ServerArgs(**_with_tuples(take(ServerArgs))), ServerSettings(**take(ServerSettings))
    fleet, template = FleetSettings(**take(FleetSettings)), group_template(**values)
    if rest:
        raise ConfigError(f"{', '.join(sorted(rest))} is no argument of a fleet; see routed-experts serve --help")
    return ReplicaSpec(args=args, server=server, fleet=fleet, dist=template)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists of YAML as the tuples of a config."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """Where the fleet serves, and what it is in a few words."""

    url: str
    summary: str


class Fleet:
    """A fleet of this process. `variables`: of the environment of its actors, in a Ray that runs already. `on_phase`
    receives the name, and what there is to say, of each phase of the start."""

    def __init__(
        self, spec: ReplicaSpec, *, variables: Mapping[str, str], on_phase: Callable[[str, str], None]
    ) -> None:
        self._spec, self._variables, self._on_phase = spec, variables, on_phase
        self._coordinator: CoordinatorClient | None = None
        self._watch = ReplicaWatch(spec.fleet.num_replicas)
        self._owns_serve = False
        self._own_ray: str | None = None  # host:port of a Ray that was started here
        self.stop = threading.Event()  # set by a signal
        self.hurry = threading.Event()  # by the second one

    def start(self, *, quiet: bool) -> Ready | None:
        """Start all, and return when every replica is ready; None if `stop` was set before. Not `quiet`: what the
        replicas log is printed. Raises ConfigError and MachineError, also for a reason that a replica has given."""
        settings, ray = self._spec.fleet, import_ray()
        serve = import_ray("ray.serve")
        if settings.routing_policy == "session":
            session_router()
        address = settings.ray_address or "local"
        _check_reachable(address)
        keywords: dict[str, Any] = {"include_dashboard": False}
        if settings.ray_address:
            keywords = {"runtime_env": {"env_vars": dict(self._variables)}}  # of Serve's actors, too: they are ours
        try:
            with own_process_groups():
                ray.init(
                    address=address, namespace=NAMESPACE, log_to_driver=not quiet, logging_level="warning", **keywords
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _unreachable(address, error) from error
        if settings.ray_address is None:
            self._own_ray = ray.get_runtime_context().gcs_address
        self._on_phase("ray", f"{ray.__version__}, {'started here' if settings.ray_address is None else address}")
        check_resources(self._spec, ray.available_resources())
        self._refuse_running_serve(serve)
        check_port(self._spec.server)
        host = self._spec.server.host
        port = self._spec.server.port or free_port()
        self._owns_serve = True
        serve.start(
            proxy_location="HeadOnly" if settings.ray_address is None else "EveryNode",
            http_options={"host": host, "port": port},
            logging_config=dict(_SERVE_LOGS),
        )
        self._on_phase("serve", f"port {port}")
        self._coordinator = CoordinatorClient(
            self._spec.fleet_id,
            num_replicas=settings.num_replicas,
            weight_update_timeout=settings.weight_update_timeout,
        )
        bound = bind_replicas(self._spec, ray.cluster_resources())
        if not self._run_replicas(serve, bound):
            return None
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        _wait_answered(shown, port)
        status = self.status()
        self._watch.changes([member.tag for member in status.members], time.monotonic())  # none is missed yet
        proxy = next((member.details["proxy"] for member in status.members if "proxy" in member.details), "?")
        self._on_phase("replicas", f"{len(status.members)} of {settings.num_replicas}")
        url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        label = short_repr(status.version.label)
        return Ready(url, f"{len(status.members)} replicas · weight version {label} · {proxy}")

    def wait(self) -> bool:
        """Wait for `stop`; False where the fleet has ended without it. Logs each replica that is lost or comes back."""
        serve, lost = import_ray("ray.serve"), 0
        while not self.stop.wait(_WATCH_S):
            try:
                applications = serve.status().applications
                lost = 0 if self._spec.name in applications else lost + 1
            except Exception as error:  # of Ray, of any kind: it is gone
                logger.debug("Ray does not answer: %s", error)
                lost += 1
            if lost >= 3:
                return False
            if not lost:
                self._log_replicas()
        return True

    def _log_replicas(self) -> None:
        assert self._coordinator is not None
        try:
            tags: tuple[str, ...] | None = self._coordinator.call_blocking("serving", timeout_s=_WATCH_S)
        except CoordinatorLost as error:
            logger.debug("the coordinator is not reached: %s", error)
            return
        for line in () if tags is None else self._watch.changes(tags, time.monotonic()):
            logger.warning("%s", line)

    @property
    def has_lost_ray(self) -> bool:
        """Whether a Ray that was started here has ended by itself, and every replica with it."""
        if self._own_ray is None:
            return False
        host, _, port = self._own_ray.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CALL_S).close()
        except ConnectionRefusedError:
            return True
        except OSError as error:
            logger.debug("Ray does not answer: %s", error)
        return False

    def end(self) -> None:
        """Drain the replicas, and end what was started. Idempotent. Where Ray is lost nothing is left to end, and calls
        of Ray would wait for it."""
        ray = import_ray()
        if self._coordinator is not None:
            drained = threading.Thread(target=self._drain, args=(self._coordinator,), daemon=True)
            drained.start()
            while drained.is_alive() and not self.hurry.is_set() and not self.has_lost_ray:
                drained.join(0.1)
        if self._owns_serve and not self.has_lost_ray:
            self._end_serve()
        if self.has_lost_ray:
            return
        if self._coordinator is not None:
            self._coordinator.end()
            self._coordinator = None
        ray.shutdown()
        self._own_ray = None

    def _end_serve(self) -> None:
        """End Serve by its controller, as `serve.shutdown` does, and wait until it has ended; after `hurry` it goes on
        by itself. That function waits 30 s for an answer that a controller may not give any more when it ends; a
        thread with such a call would end this process while Ray is shut down."""
        ray, pause = import_ray(), threading.Event()
        limit_s = self._spec.server.shutdown_timeout + 3 * SHUTDOWN_MARGIN_S
        try:
            answer = ray.get_actor(*_CONTROLLER).graceful_shutdown.remote(wait=False)
            has_answered = False
            for _ in range(int(limit_s / _END_CHECK_S)):
                ray.get_actor(*_CONTROLLER)
                if self.has_lost_ray:
                    return
                if has_answered and self.hurry.is_set():
                    logger.warning("Serve has the order to end the replicas; this command does not wait for it")
                    return
                if has_answered:
                    pause.wait(_END_CHECK_S)
                else:
                    has_answered = bool(ray.wait([answer], timeout=_END_CHECK_S)[0])
        except Exception as error:  # ValueError without a controller; others where Ray is gone
            logger.debug("Serve has ended: %s", error)

    def _drain(self, coordinator: CoordinatorClient) -> None:
        timeout_s = self._spec.server.shutdown_timeout
        try:
            coordinator.call_blocking("drain", timeout_s, timeout_s=timeout_s + 2 * SHUTDOWN_MARGIN_S)
        except CoordinatorLost as error:
            logger.warning("the replicas could not be drained: %s", error)

    def _run_replicas(self, serve: Any, bound: Any) -> bool:
        """Deploy, and wait until all serve. False if `stop` was set. Raises what a replica refuses."""
        assert self._coordinator is not None
        failed: list[BaseException] = []
        done = threading.Event()

        def deploy() -> None:
            try:
                serve.run(bound, name=self._spec.name, route_prefix="/")
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=deploy, name="deploy", daemon=True).start()
        waited, limit = 0.0, self._spec.fleet.replica_startup_timeout
        while not done.wait(_WATCH_S):
            waited += _WATCH_S
            if self.stop.is_set():
                return False
            self._raise_failure(self._coordinator)
            if waited >= limit:
                text = f"the replicas are not ready within replica_startup_timeout={limit:g} s"
                raise MachineError(f"{text}; raise it, or look into Ray's logs")
        self._raise_failure(self._coordinator)
        if failed:
            pause = threading.Event()
            for _ in range(_REASON_TRIES):  # what a replica tells the coordinator may come after Serve's own error
                pause.wait(_WATCH_S)
                self._raise_failure(self._coordinator)
            text = " ".join(str(failed[0]).split())[:300]
            raise MachineError(f"the replicas did not start ({text}); look into Ray's logs") from failed[0]
        return True

    @staticmethod
    def _raise_failure(coordinator: CoordinatorClient) -> None:
        try:
            failure = coordinator.call_blocking("failure", timeout_s=_CALL_S)
        except CoordinatorLost as error:
            logger.warning("the coordinator is not reached: %s", error)
            return
        if failure is not None:
            refusal, is_machine = failure
            raise (MachineError if is_machine else ConfigError)(f"a replica does not start: {refusal.message}")

    def _refuse_running_serve(self, serve: Any) -> None:
        """Raise ConfigError where Serve runs in this Ray: its ports are chosen, and its applications are others'."""
        try:
            running = serve.status().proxies
        except Exception as error:  # of Serve, whose class differs by release: none runs
            logger.debug("no Serve runs yet: %s", error)
            return
        if running:
            text = "Ray Serve runs in this Ray already, with a port of its own"
            raise ConfigError(f"{text}; end it with serve shutdown, or deploy the fleet there with serve deploy")

    def status(self) -> FleetStatus:
        """The replicas and their versions. Raises CoordinatorLost."""
        assert self._coordinator is not None
        status: FleetStatus = self._coordinator.call_blocking("status", timeout_s=_CALL_S)
        return status


def _check_reachable(address: str) -> None:
    """Raise MachineError where nobody listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CALL_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: BaseException) -> MachineError:
    """The error for a Ray that does not answer, or that wants a token."""
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(" ".join(str(cause).split()))
        cause = cause.__cause__ or cause.__context__
    fix = "start it with ray start --head, or leave ray_address out"
    if any("uthenticat" in text for text in causes):
        fix = "it wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    return MachineError(f"ray_address={address!r}: Ray is not reached ({causes[0][:200]}); {fix}")


def _wait_answered(host: str, port: int) -> None:
    """Wait until the proxy hands requests to a replica. Raises MachineError."""
    pause = threading.Event()
    for _ in range(int(_PROXY_S / _PROXY_RETRY_S)):
        connection = http.client.HTTPConnection(host, port, timeout=_CALL_S)
        try:
            connection.request("GET", "/health/live")
            if connection.getresponse().status == 200:
                return
        except OSError as error:
            logger.debug("the proxy does not answer yet: %s", error)
        finally:
            connection.close()
        pause.wait(_PROXY_RETRY_S)
    raise MachineError(f"the proxy at {host}:{port} does not answer; look into Ray's logs")


def _version() -> str:
    try:
        return importlib.metadata.version("routed-experts")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
