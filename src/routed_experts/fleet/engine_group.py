"""EngineGroup: engines as actors, for RL frameworks that own the placement group. No HTTP and no Ray Serve.

Answers are plain dicts and NumPy arrays; Ray's object store carries them. Nothing here starts or joins a Ray: the
framework has done that. Dims: S tokens, R rows, M MoE layers, K experts per token."""

import functools
import itertools
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    PARAM,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ReplicaLostError,
    RoutedExpertsError,
    RoutingAlignmentError,
    WeightsMismatchError,
)
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import FIELDS
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.weight_version import to_label
from routed_experts.engine.requests.prompt_lists import PER_PROMPT, PromptCalls, check_prediction, split_by_prompt
from routed_experts.engine.requests.token_ids import is_nested
from routed_experts.fleet.bundles import await_bundles, check_bundles, check_taken
from routed_experts.fleet.engine_actor import EngineActor
from routed_experts.fleet.prompt_balancer import PromptBalancer, split
from routed_experts.fleet.ray_runtime import import_ray
from routed_experts.fleet.settings import FleetSettings
from routed_experts.fleet.spec import ReplicaSpec, check_resources, group_template, host_bundle
from routed_experts.replay.check import check_num_records
from routed_experts.server.limits import ServerSettings

# Calls of one engine at once. Those that wait for tokens have threads of their own: a pause or a push lets them wait,
# and the call that ends it must get a thread meanwhile.
MAX_CALLS = 256  # that generate or score
_GENERATION, _CONTROL_THREADS = "generation", 8
_OTHER_UPDATE = ("weights_prepared", "update_in_progress")  # codes of an engine that another call has prepared
ABORT_S = 10.0  # in which the calls of other engines end, once one has refused its part
SHUTDOWN_S = 20.0  # in which an engine ends by itself; then it is killed


class EngineGroup:
    """Several engines, one actor each: `actors`. Its methods call all of them and raise what one raises;
    ReplicaLostError for one that has ended, by itself or with one of its processes.

    `generate` and `score` divide prompts evenly, in order. Those that are left over go to the engines that have the
    fewest open prompts of this group, of equal ones to the first. So calls of several threads spread, and calls one
    after another with as many prompts meet the same engines, with the prefixes and the drafts that these keep."""

    def __init__(self, actors: Sequence[Any], *, owned_placement_group: Any = None) -> None:
        self.actors = list(actors)
        self._ray = import_ray()
        self._owned_group = owned_placement_group
        self._balancer = PromptBalancer(len(self.actors))

    def __reduce__(self) -> tuple[Any, ...]:
        """The same engines for another process, which counts open prompts of its own."""
        return functools.partial(EngineGroup, owned_placement_group=self._owned_group), (self.actors,)

    @staticmethod
    def create(
        args: ServerArgs,
        dist: DistConfig | None = None,
        *,
        placement_group: Any = None,
        bundle_indices: Sequence[int] | None = None,
        replicas: int = 1,
        resources: Mapping[str, float] | None = None,
        **parts: Any,
    ) -> "EngineGroup":
        """Start `replicas` engines and wait until they are ready.

        `dist` has the number of processes of an engine and their timeouts (`processes`). With a `placement_group`
        nothing else is reserved: `bundle_indices` names a bundle for every process, those of one engine after another
        (default: the first ones). `resources` is what the first process of an engine takes of its bundle (default: all
        of it; a part, where a trainer shares it); followers take all of theirs. Without a group one is made, and
        removed by `shutdown`. `parts`: placement, speculative, experts.
        Raises ConfigError, also where no Ray runs (it is the caller's to start), for what does not fit the Ray or a
        bundle, and for a group whose bundles are not reserved within 60 s; and what an engine raises that cannot
        start. Then nothing is left of what was made here."""
        ray = import_ray()
        if not ray.is_initialized():
            raise ConfigError("EngineGroup.create without a Ray; call ray.init(...) first, in the driver of the job")
        settings = FleetSettings(num_replicas=replicas, ray_address="auto")
        spec = ReplicaSpec(args=args, server=ServerSettings(), fleet=settings, dist=dist or DistConfig(), **parts)
        nnodes, number = spec.dist.nnodes, replicas * spec.dist.nnodes
        owned, actors = None, list[Any]()
        if placement_group is None:
            total = ray.cluster_resources()
            check_resources(spec, total, field="replicas")
            bundle = host_bundle(args.tp_size, nnodes, total)
            check_taken(resources, {0: bundle})
            placement_group = owned = ray.util.placement_group([dict(bundle)] * number, strategy="PACK")
        try:
            indices = check_bundles(placement_group, bundle_indices, number)
            check_taken(resources, {index: placement_group.bundle_specs[index] for index in indices[::nnodes]})
            await_bundles(placement_group, spec, ray.available_resources, is_owned=owned is not None)
            for first in range(0, number, nnodes):
                actors.append(_start(spec, placement_group, indices[first : first + nnodes], resources))
            group = EngineGroup(actors, owned_placement_group=owned)
            group._wait_until_ready()
        except BaseException:
            EngineGroup(actors, owned_placement_group=owned).shutdown()
            raise
        return group

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: Mapping[str, object] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Generate for prompts of token ids, which are divided among the engines; n > 1 gives n results a
        prompt, in order. `options`: other keywords of `Engine.generate`, also with one value a prompt. Each result has
        `text`, `output_ids` and `meta_info`; with return_routed_experts also `routed_experts` (uint8 or uint16
        [R, M, K]), `start`, `layer_ids`, `version_spans` and `version_labels` (the label of each count); with
        return_routed_experts_weights `routed_experts_weights` (float32 or bfloat16 [R, M, K]). Raises what
        `Engine.generate` raises, and InvalidRequestError for `stream`, for prompts that are no lists of ids, and for
        one `rid` of several prompts. Where one engine raises, or the caller is interrupted, the requests of all are
        aborted. An engine takes a call for each request that it runs or queues, MAX_CALLS at most; others wait."""
        actors, call_id = self._living(), secrets.token_hex(8)
        options = {"sampling_params": sampling_params, **options}
        prompts = _split_call(input_ids, options)
        with self._balancer.assign(len(input_ids)) as shares:
            divided = _divide_options(options, prompts.lists, shares)
            parts = [
                functools.partial(actor.generate.remote, part, own.pop("sampling_params"), own, call_id)
                for actor, part, own in zip(actors, split(input_ids, shares), divided, strict=True)
            ]
            return self._results(
                parts,
                shares,
                at_own=lambda error, first: _at_own_prompt(error, prompts, first),
                abort=lambda: [
                    actor.abort.remote(call_id) for actor, share in zip(actors, shares, strict=True) if share
                ],
            )

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        routed: Sequence[RoutedExperts | None] | None = None,
        replay_weights: bool = False,
        return_routed_experts: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Score sequences, which are divided among the engines: `token_ids` (int32 [S]), `logprobs`
        (float32 [S-1]), `weight_version` (label), `update_count`, and the rows as in `generate`, with combine weights
        where they are recorded. Raises what `Engine.score` raises, and InvalidRequestError for what is no list of
        sequences."""
        actors = self._living()
        records = _check_sequences(token_ids, routed)
        options = {"replay_weights": replay_weights, "return_routed_experts": return_routed_experts}
        with self._balancer.assign(len(token_ids)) as shares:
            rows = [None] * len(actors) if records is None else split(records, shares)
            parts = [
                functools.partial(actor.score.remote, ids, own, options)
                for actor, ids, own in zip(actors, split(token_ids, shares), rows, strict=True)
            ]
            several = len(token_ids) > 1
            return self._results(
                parts, shares, at_own=lambda error, first: _at_own_sequence(error, first, several=several)
            )

    def remember_rollouts(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        seed: int | None = None,
        choice: int = 0,
        extra_key: str | None = None,
    ) -> None:
        """`Engine.remember_rollouts` on all engines, for any of them may get the prompt next. Answers that an engine
        remembers by itself are drafts in this engine alone."""
        self._all("remember_rollouts", prompt_ids, output_ids, seed, choice, extra_key)

    def flush_cache(self, *, drafts: bool = False, retract: bool = False) -> list[int]:
        """`Engine.flush_cache` on all engines; returns the pages that each has freed."""
        return self._all("flush_cache", drafts, retract)

    def prepare_weights(self, path: str | Path, *, version: str | int | None = None) -> None:
        """Load and check a checkpoint on all engines beside what they serve. `version` is its label; None keeps the
        served one. Raises InvalidRequestError for a label that is none, and WeightsMismatchError naming engines that
        refuse; then nothing is prepared on any. Raises InvalidRequestError (`weights_prepared`) or
        UpdateInProgressError where another call has prepared weights, or does; what that call prepares stays."""
        version = None if version is None else to_label(version, param="version")
        outcomes = self._outcomes("prepare_weights", str(path), version)
        refused = {index: outcome for index, outcome in outcomes.items() if outcome is not None}
        if not refused:
            return
        self._outcomes("drop_weights", indices=[index for index, outcome in outcomes.items() if outcome is None])
        self._raise_failed(outcomes)
        for error in refused.values():
            if isinstance(error, RoutedExpertsError) and error.code in _OTHER_UPDATE:
                raise error
        lines = "; ".join(f"engine {index}: {error}" for index, error in refused.items())
        raise WeightsMismatchError(f"{lines}; the old weights serve on in all engines", param="path")

    def commit_weights(self, version: str | int | None = None, *, cache: str = "flush") -> None:
        """Swap to the prepared weights on all engines; no request starts with old weights after one has started with
        new ones."""
        try:
            self._all("set_held", True)
            self._all("commit_weights", version, cache)
        finally:
            self._outcomes("set_held", False)

    def update_weight_version(self, version: str | int) -> None:
        """Give the served weights of all engines another label, or the same one again; it counts as an update."""
        label = to_label(version, param="version")
        try:
            self._all("set_held", True)
            self._all("update_weight_version", label)
        finally:
            self._outcomes("set_held", False)

    def drop_weights(self) -> None:
        """Free what is prepared."""
        self._all("drop_weights")

    def pause(self, mode: str = "retract") -> None:
        """`Engine.pause` on all engines."""
        self._all("pause", mode)

    def resume(self) -> None:
        """`Engine.resume` on all engines."""
        self._all("resume")

    def release_memory(self, tags: Sequence[str] = ("kv_cache",)) -> None:
        """Free device memory of all engines for a trainer on the same devices, until `resume_memory`."""
        self._all("release_memory", list(tags))

    def resume_memory(self) -> None:
        """Take the memory back; released weights must have come by `prepare_weights` and `commit_weights`."""
        self._all("resume_memory")

    def stats(self) -> list[dict[str, Any]]:
        """Counts of every engine."""
        return self._all("stats")

    def shutdown(self) -> None:
        """End all engines, and the placement group if it was made here. An engine that has not ended within SHUTDOWN_S
        is killed. Idempotent."""
        calls = [actor.shutdown.remote() for actor in self.actors]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_S)
        for actor in self.actors:
            self._ray.kill(actor)
        self.actors = []
        if self._owned_group is not None:
            self._ray.util.remove_placement_group(self._owned_group)
            self._owned_group = None

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a call of every engine, once it has ended on all. Raises ReplicaLostError for an engine that
        has ended, or the error that a call raised."""
        calls = [getattr(actor, method).remote(*arguments) for actor in self._living()]
        outcomes = [self._outcome(call) for call in calls]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def _wait_until_ready(self) -> None:
        """Raise the first error of an engine that cannot start, whatever the others still load."""
        for outcome in self._settle([actor.ready.remote for actor in self._living()]):
            if isinstance(outcome, Exception):
                raise outcome

    def _living(self) -> list[Any]:
        """The engines. Raises EngineDeadError after `shutdown`."""
        if not self.actors:
            raise EngineDeadError("this EngineGroup has no engine, for it was shut down; create another one")
        return self.actors

    def _results(
        self,
        parts: Sequence[Callable[[], Any]],
        shares: Sequence[int],
        *,
        at_own: Callable[[RoutedExpertsError, int], RoutedExpertsError],
        abort: Callable[[], list[Any]] = list[Any],
    ) -> list[dict[str, Any]]:
        """The results of all prompts, in order, of a call whose parts have so many each. `at_own`: the error of a part
        whose prompts begin with this one of the call, with the index in the call."""
        firsts = list(itertools.accumulate(shares, initial=0))
        asked = [index for index, share in enumerate(shares) if share]
        results = list[dict[str, Any]]()
        for index, outcome in zip(asked, self._settle([parts[index] for index in asked], abort), strict=True):
            if isinstance(outcome, Exception):
                named = at_own(outcome, firsts[index]) if isinstance(outcome, RoutedExpertsError) else outcome
                if named is outcome:
                    raise outcome
                raise named from outcome
            results += outcome or []  # None: aborted, for a later part raises
        assert len(results) >= sum(shares), (len(results), shares)
        return results

    def _settle(self, starts: Sequence[Callable[[], Any]], abort: Callable[[], list[Any]] = list[Any]) -> list[Any]:
        """Start calls; what each has returned or raised, in order. At the first error, and where the caller is
        interrupted, `abort` ends the others; one that has not ended by then, or within ABORT_S of an abort, is None.
        Every outcome is read: Ray prints errors that are not."""
        calls, outcomes = list[Any](), dict[Any, Any]()
        try:
            for start in starts:
                calls.append(start())
            pending = calls
            while pending and not any(isinstance(outcome, Exception) for outcome in outcomes.values()):
                ready, pending = self._ray.wait(pending, num_returns=1)
                outcomes |= {call: self._outcome(call) for call in ready}
        except BaseException:
            self._end([call for call in calls if call not in outcomes], abort)
            raise
        if pending:
            outcomes |= self._end(pending, abort)
        return [outcomes.get(call) for call in calls]

    def _end(self, calls: Sequence[Any], abort: Callable[[], list[Any]]) -> dict[Any, Any]:
        """Abort calls; the outcomes of those that end."""
        aborts = abort()
        both = [*calls, *aborts]
        if not both:
            return {}
        ready, left = self._ray.wait(both, num_returns=len(both), timeout=ABORT_S if aborts else 0)
        for call in left:
            call.future()  # reads it once it has ended
        return {call: self._outcome(call) for call in ready}

    def _outcome(self, call: Any) -> Any:
        """What a call that has ended returned or raised."""
        try:
            return _get_or_raise(lambda: self._ray.get([call])[0])
        except Exception as error:  # the caller decides
            return error

    def _outcomes(
        self, method: str, *arguments: Any, indices: Sequence[int] | None = None
    ) -> dict[int, Exception | None]:
        """What a call of each engine, or of these, raised, by its index."""
        actors = self._living()
        chosen = range(len(actors)) if indices is None else indices
        calls = {index: getattr(actors[index], method).remote(*arguments) for index in chosen}
        outcomes = {index: self._outcome(call) for index, call in calls.items()}
        return {index: outcome if isinstance(outcome, Exception) else None for index, outcome in outcomes.items()}

    @staticmethod
    def _raise_failed(outcomes: Mapping[int, Exception | None]) -> None:
        """Raise the error of an engine that has ended, or one that is no refusal."""
        errors = [error for error in outcomes.values() if error is not None]
        lost = [error for error in errors if isinstance(error, ReplicaLostError)]
        for error in (*lost, *(error for error in errors if not isinstance(error, RoutedExpertsError))):
            raise error


def processes(nnodes: int, **timeouts: float) -> DistConfig:
    """The processes of each engine of an EngineGroup: `dist_timeout` and `watchdog_timeout` as in DistConfig. Ranks and
    addresses are chosen when they start."""
    return group_template(nnodes=nnodes, node_rank=None, dist_init_addr=None, **timeouts)


def _start(
    spec: ReplicaSpec, placement_group: Any, indices: Sequence[int], resources: Mapping[str, float] | None
) -> Any:
    """Start an engine in the first of these bundles."""
    ray, strategies = import_ray(), import_ray("ray.util.scheduling_strategies")
    taken = dict(placement_group.bundle_specs[indices[0]] if resources is None else resources)
    num_cpus, num_gpus = taken.pop("CPU", 0.0), taken.pop("GPU", 0.0)
    strategy = strategies.PlacementGroupSchedulingStrategy(
        placement_group=placement_group, placement_group_bundle_index=indices[0]
    )
    actor = _remote_class(ray, _num_calls(spec.args)).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources=taken,
        scheduling_strategy=strategy,
        max_concurrency=_CONTROL_THREADS,
        max_restarts=0,
    )
    return actor.remote(spec, list(indices[1:]))


def _num_calls(args: ServerArgs) -> int:
    """Calls of one engine that generate or score at once, each in a thread: one for each request that it may run or
    queue, within MAX_CALLS."""
    return min(args.dp_size * args.running_limit + args.max_queued_requests, MAX_CALLS)


def _remote_class(ray: Any, num_calls: int) -> Any:
    """EngineActor as Ray makes it: `generate` and `score` run in threads that no other call takes."""
    for method in (EngineActor.generate, EngineActor.score):
        ray.method(concurrency_group=_GENERATION)(method)
    return ray.remote(concurrency_groups={_GENERATION: num_calls})(EngineActor)


def _split_call(prompts: Sequence[object], options: Mapping[str, Any]) -> PromptCalls:
    """How the call is split by prompts. Raises InvalidRequestError for what no engine could see: see
    EngineGroup.generate."""
    if options.get("stream"):
        text = f"{PARAM}=True is not served by an EngineGroup, which returns whole answers; leave it out"
        raise InvalidRequestError(text, param="stream", code="unsupported_parameter")
    if not isinstance(prompts, list | tuple | np.ndarray) or not (len(prompts) == 0 or is_nested(prompts)):
        text = f"{PARAM} must be a list of prompts, each a list of token ids; this is {short_repr(prompts)}"
        raise InvalidRequestError(text, param="input_ids")
    if isinstance(options.get("rid"), str) and len(prompts) > 1:
        text = f"{PARAM}={short_repr(options['rid'])} is one id for {len(prompts)} prompts; give a list with an id each"
        raise InvalidRequestError(text, param="rid")
    check_prediction(options.get("prediction"), len(prompts))
    own = {name: options[name] for name in (*PER_PROMPT, "token_ids_logprob") if name in options}
    return split_by_prompt(GenerateReqInput(**own), len(prompts), is_batch=True)


def _divide_options(options: Mapping[str, Any], lists: Collection[str], shares: Sequence[int]) -> list[dict[str, Any]]:
    """The keywords of `Engine.generate` for each engine: those with a value a prompt go with the prompts."""
    parts = {name: split(options[name], shares) for name in lists}
    return [{**options, **{name: values[index] for name, values in parts.items()}} for index in range(len(shares))]


def _at_own_prompt(error: RoutedExpertsError, prompts: PromptCalls, first: int) -> RoutedExpertsError:
    """The error of an engine whose prompts begin with prompt `first` of the call, with the index in the call."""
    if not isinstance(error, InvalidRequestError):
        return error
    if error.index is not None:
        return error.at_prompt(first + error.index, prompts.prompt_field)
    return prompts.error_at(error, first, FIELDS if "sampling_params" in prompts.lists else ())


def _check_sequences(
    token_ids: Sequence[object], routed: Sequence[RoutedExperts | None] | None
) -> list[RoutedExperts | None] | None:
    """The records of a score. Raises InvalidRequestError for what is no list of sequences, RoutingAlignmentError for
    another number of records."""
    if not isinstance(token_ids, list | tuple | np.ndarray) or not (len(token_ids) == 0 or is_nested(token_ids)):
        text = f"{PARAM} must be a list of sequences, each a list of token ids; this is {short_repr(token_ids)}"
        raise InvalidRequestError(text, param="token_ids")
    if routed is None:
        return None
    records: list[Any] = list(routed) if isinstance(routed, Iterable) else [routed]
    check_num_records(len(records), len(token_ids))
    return records


def _at_own_sequence(error: RoutedExpertsError, first: int, *, several: bool) -> RoutedExpertsError:
    """The error of an engine whose sequences begin with sequence `first` of the call, with the index in the call."""
    if isinstance(error, RoutingAlignmentError):
        return error if error.sample is None else error.at_sample(first + error.sample)
    if not isinstance(error, InvalidRequestError) or not several or error.param != "token_ids":
        return error
    return error.at_prompt(first + (error.index or 0), "token_ids")


def _get_or_raise(get: Callable[[], Any]) -> Any:
    """Return what `get` returns. Raises errors of Ray as this package's own: ReplicaLostError for an actor that has
    ended, and the error that a call raised in its actor."""
    exceptions = import_ray("ray.exceptions")
    try:
        return get()
    except exceptions.RayActorError as error:
        raise _lost(error) from error
    except exceptions.RayTaskError as error:
        cause: Any = error.cause
        if isinstance(cause, EngineDeadError):
            raise _lost(cause) from error
        if isinstance(cause, RoutedExpertsError):
            raise cause from error
        raise


def _lost(error: Exception) -> ReplicaLostError:
    text = f"an engine of the group has ended ({' '.join(str(error).split())[:200]})"
    return ReplicaLostError(f"{text}; create the group again")
