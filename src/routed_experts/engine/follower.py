"""Follower: a process that runs what process 0 of its group orders. It has no scheduler, no pages and no tokenizer.

    orders arrive -> the same method of the same runner -> the next beat says what is done
It reads nothing back but the tokens of past steps, for the digests that process 0 compares. Its clock and its load
decide nothing."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from routed_experts.core.capture_spec import WeightsDType
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError, PlacementError, ProcessMismatchError
from routed_experts.core.garbage import frozen_gc
from routed_experts.core.keywords import check_keywords
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import KVCacheDtype, Quantization, ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.core.weight_version import INITIAL_LABEL, int_as_text
from routed_experts.engine.build.builder import build_follower
from routed_experts.engine.build.group_start import join_group
from routed_experts.engine.build.startup_phases import Phase, PhaseClock
from routed_experts.engine.control.score import ScoreInputs, ScorePrograms
from routed_experts.engine.control.served_model import ServedModel
from routed_experts.engine.control.weights import load_ready, value_digests
from routed_experts.engine.group.process_group import DIGEST_STEPS, AnyGroup, FollowingGroup, StepDigests
from routed_experts.execution.compilation_cache import enable_compilation_cache
from routed_experts.execution.forward_batch import StepInputs
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.orders import Order, OrderKind
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.models.loading.model_source import with_local_model

logger = logging.getLogger(__name__)


class Follower:
    """Carries out orders on one runner, in their order, on the thread that calls `run`."""

    def __init__(self, group: FollowingGroup, runner: ModelRunner, served: ServedModel) -> None:
        self._group, self._runner, self._served = group, runner, served
        self._digests, self._tokens = StepDigests(), deque[Int32[Array, "B columns"]]()
        self._last_seq = 0
        self._scores: ScorePrograms | None = None
        self._loading = threading.Lock()  # one load at a time
        self._prepared: tuple[int, Future[nnx.State[Any, Any]]] | None = None  # a version and its weights
        self._actions: Mapping[OrderKind, Callable[[Order], object]] = MappingProxyType(
            {
                OrderKind.STEP: self._step,
                OrderKind.TAKE_COUNTS: lambda order: runner.take_counts(),
                OrderKind.MOVE_LAYER: self._move_layer,
                OrderKind.SET_PLACEMENT: self._set_placement,
                OrderKind.SET_CAPACITY: lambda order: self._replicated().set_capacity(_factor(order)),
                OrderKind.BEGIN_SCORE: lambda order: self._score_programs().begin(order.head["num_pages"]),
                OrderKind.SCORE: self._score,
                OrderKind.END_SCORE: lambda order: self._score_programs().end(),
                OrderKind.PREPARE_WEIGHTS: self._prepare_weights,
                OrderKind.COMMIT_WEIGHTS: self._commit_weights,
                OrderKind.DROP_WEIGHTS: self._drop_weights,
                OrderKind.SET_VERSION: lambda order: runner.update_weights(None, version=order.head["version"]),
                OrderKind.RELEASE: lambda order: runner.release(pool=order.head["pool"], weights=order.head["weights"]),
                OrderKind.ALLOCATE_POOL: lambda order: runner.allocate_pool(),
                OrderKind.OVERWRITE_POOL: lambda order: runner.overwrite_pool(),
            }
        )

    def run(self) -> None:
        """Carry out orders until STOP. Raises what ends this process: the others are told first."""
        try:
            while True:
                order = self._group.receive()
                if order.seq != self._last_seq + 1:
                    text = f"order {order.seq} follows order {self._last_seq}: one is missing or repeated"
                    raise ProcessMismatchError(f"{text}; restart the group")
                self._last_seq = order.seq
                if order.kind is OrderKind.STOP:
                    break
                self.carry_out(order)
                self._group.done(order.seq)
        except BaseException as error:
            self._group.fail(error)
            raise
        self._group.stopped(order.seq)

    def carry_out(self, order: Order) -> None:
        """Run one order. Raises ProcessMismatchError for a kind that followers do not have."""
        action = self._actions.get(order.kind)
        if action is None:
            raise ProcessMismatchError(f"order {order.seq} has the kind {int(order.kind)}, which no follower runs")
        self._digests.add_order(order)
        action(order)

    def _step(self, order: Order) -> None:
        self._tokens.append(self._runner.follow_step(StepInputs.from_order(order, num_ranks=self._runner.num_ranks)))
        if len(self._tokens) <= DIGEST_STEPS:
            return
        for _ in range(DIGEST_STEPS):  # all of them but the step in flight
            due = self._digests.add_tokens(np.asarray(self._tokens.popleft()))
            if due is not None:
                self._group.add_digest(*due)

    def _score_programs(self) -> ScorePrograms:
        self._scores = self._scores or ScorePrograms(self._runner)
        return self._scores

    def _score(self, order: Order) -> None:
        self._score_programs().run(self._runner.state, ScoreInputs.from_order(order))

    def _replicated(self) -> ReplicatedExpertRunner:
        if not isinstance(self._runner, ReplicatedExpertRunner):
            raise ProcessMismatchError("an order about placed experts, and this process has none")
        return self._runner

    def _move_layer(self, order: Order) -> None:
        group, row = order.head["layer"]
        self._replicated().move_layer_to(group, row, *order.arrays)

    def _set_placement(self, order: Order) -> None:
        try:
            placement = ExpertPlacement(
                physical_to_logical_map=order.arrays[0],
                logical_to_physical_map=order.arrays[1],
                logical_replica_count=order.arrays[2],
                num_devices=order.head["num_devices"],
                epoch=order.head["epoch"],
            )
        except (PlacementError, IndexError, KeyError) as error:
            raise ProcessMismatchError(f"order {order.seq} is no placement: {error}") from error
        self._replicated().set_placement(placement)

    def _prepare_weights(self, order: Order) -> None:
        """Load beside the steps, and reply when that is done or refused."""
        runner, served, path = self._runner, self._served, str(order.head["path"])
        if isinstance(runner, ReplicatedExpertRunner):
            served = served.with_placement(runner.placement, runner.factor)

        digests: dict[str, str] = {}

        def reply(future: Future[nnx.State[Any, Any]]) -> None:
            error = None if future.cancelled() else future.exception()
            refusal = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
            self._group.reply(order.seq, values=digests, **refusal)

        def load() -> None:
            with self._loading:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    state = load_ready(path, served)
                    digests.update(value_digests(path))
                    future.set_result(state)
                except BaseException as error:
                    future.set_exception(error)

        future: Future[nnx.State[Any, Any]] = Future()
        self._prepared = order.head["version"], future
        future.add_done_callback(reply)
        loader = threading.Thread(target=load, name="load", daemon=True)  # this process does not wait for it at its end
        self._group.leave_at_exit(loader)
        loader.start()

    def _commit_weights(self, order: Order) -> None:
        version = order.head["version"]
        if self._prepared is None or self._prepared[0] != version:
            raise ProcessMismatchError(f"order {order.seq} commits version {version}, which was not prepared")
        state, self._prepared = self._prepared[1].result(), None
        self._runner.update_weights(state, version=version)

    def _drop_weights(self, order: Order) -> None:
        if self._prepared is not None:
            self._prepared[1].cancel()  # unless it has begun
        self._prepared = None


def _factor(order: Order) -> tuple[int, int]:
    numerator, denominator = order.head["factor"]
    return int(numerator), int(denominator)


def _unknown_argument(name: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"{name} is no parameter of follow; known are {', '.join(known)}")


@check_keywords(_unknown_argument)
def follow(
    model_path: str | os.PathLike[str],
    *,
    dist: DistConfig | FollowingGroup,
    on_phase: Callable[[Phase], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    load_format: str = "auto",
    placement: ExpertPlacement | PlacementConfig | str | os.PathLike[str] | None = None,
    speculative: SpeculativeConfig | None = None,
    revision: str | None = None,
    tokenizer_path: str | os.PathLike[str] | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: str = "auto",
    random_seed: int = 0,
    context_length: int | None = None,
    tp_size: int = 1,
    ep_size: int = 1,
    dp_size: int = 1,
    page_size: int = 16,
    mem_fraction_static: float = 0.8,
    max_total_tokens: int | None = None,
    max_running_requests: int | None = None,
    max_queued_requests: int = 1024,
    chunked_prefill_size: int | None = None,
    max_prefill_tokens: int | None = None,
    precompile_bs_paddings: Sequence[int] | None = None,
    precompile_token_paddings: Sequence[int] | None = None,
    disable_radix_cache: bool = False,
    attention_backend: str = "auto",
    moe_backend: str = "auto",
    enable_return_routed_experts: bool = False,
    enable_return_routed_experts_weights: bool = False,
    routed_experts_weights_dtype: WeightsDType = "float32",
    logprobs_mode: Literal["processed", "raw"] = "processed",
    deterministic: bool = False,
    skip_tokenizer_init: bool = False,
    weight_version: str | int = INITIAL_LABEL,
) -> None:
    """Run this process's part of an engine of several processes, until process 0 ends it.

    The keywords are those of `Engine` in process 0, with the same values; the folder may be at another path. `dist`
    has this process's rank, or is the group that it has joined. Raises ConfigError, CheckpointError or MachineError
    while the group starts. Where the group is lost, this process ends with exit code 3."""
    args = ServerArgs(
        model_path=str(model_path),
        revision=revision,
        tokenizer_path=None if tokenizer_path is None else str(tokenizer_path),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        random_seed=random_seed,
        context_length=context_length,
        tp_size=tp_size,
        ep_size=ep_size,
        dp_size=dp_size,
        page_size=page_size,
        mem_fraction_static=mem_fraction_static,
        max_total_tokens=max_total_tokens,
        max_running_requests=max_running_requests,
        max_queued_requests=max_queued_requests,
        chunked_prefill_size=chunked_prefill_size,
        max_prefill_tokens=max_prefill_tokens,
        precompile_bs_paddings=None if precompile_bs_paddings is None else tuple(precompile_bs_paddings),
        precompile_token_paddings=None if precompile_token_paddings is None else tuple(precompile_token_paddings),
        disable_radix_cache=disable_radix_cache,
        attention_backend=attention_backend,
        moe_backend=moe_backend,
        enable_return_routed_experts=enable_return_routed_experts,
        enable_return_routed_experts_weights=enable_return_routed_experts_weights,
        routed_experts_weights_dtype=routed_experts_weights_dtype,
        logprobs_mode=logprobs_mode,
        deterministic=deterministic,
        skip_tokenizer_init=skip_tokenizer_init,
        weight_version=int_as_text(weight_version),
    )
    plan = PlacementConfig.create(placement)
    clock = PhaseClock(on_phase)
    if isinstance(dist, FollowingGroup):
        group: AnyGroup = dist
        args = with_local_model(args, weights=load_format != "dummy")
    else:
        _check_rank(dist)
        args = with_local_model(args, weights=load_format != "dummy")
        group = join_group(args, dist, placement=plan, speculative=speculative, load_format=load_format)
        clock.done("rendezvous", f"process {dist.node_rank} of {dist.nnodes}")
    assert isinstance(group, FollowingGroup), "of another rank than 0"
    enable_compilation_cache()
    # A collection of garbage that takes long hides the end of process 0 from this process' threads. JAX sees it on a
    # thread of its own, and aborts the process soon after. Later, the first orders would wait for this one.
    with frozen_gc():
        try:
            runner, served = build_follower(
                args,
                group,
                clock=clock,
                load_format=load_format,
                on_load=on_load,
                placement=plan,
                speculative=speculative,
            )
        except BaseException as error:
            group.fail(error)
            raise
        clock.done("following", f"process {group.rank} of {group.dist.nnodes}")
        Follower(group, runner, served).run()


def _check_rank(dist: object) -> None:
    """Raise ConfigError unless this process is a follower."""
    if not isinstance(dist, DistConfig) or not dist.is_group or dist.is_leader:
        text = f"dist={dist!r} of follow must be a DistConfig with nnodes > 1 and node_rank > 0"
        raise ConfigError(f"{text}; process 0 builds Engine(..., dist=...)")
