"""Scorer: logprobs and routed experts of given tokens, by the serving kernels, on live or given routes.

Runs in the caller's thread over pages of its own, beside the requests and without the prefix cache. Scheduling is the
engine's, with a queue that holds this call alone. Programs are compiled at a shape's first use. Where rows are
recorded, live routing is a replay without valid rows: one program for both, so a replay of a score's own rows gives
bitwise its logprobs. With batch-invariant kernels whose logprobs have one normaliser, those of a CPU, these are bitwise
the rollout's. Dims: S tokens of a sequence, N padded tokens of a step, M MoE layers, K experts per token."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32, UInt

from routed_experts.capture.host_cache import unpack_rows
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import ProcessMismatchError
from routed_experts.core.io_struct import TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import ModelWorkerBatch, StepResult
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.weight_version import WeightVersion, to_labels
from routed_experts.execution.forward_batch import BatchShape, concatenate, pack_ranks, split_ranks, to_batch_shape
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.offload.offload_scorer import BetweenSteps, OffloadScorer
from routed_experts.execution.orders import NO_FOLLOWERS, Order, OrderKind, OrderSender
from routed_experts.execution.programs import OUT_SPECS, ForwardOut, ProgramSpec, forward, score_prompt
from routed_experts.execution.spmd import (
    BY_RANK,
    GATHERED,
    POOL,
    REPLICATED,
    WEIGHTS,
    shard_program,
    sharded_zeros,
)
from routed_experts.models.base.interface import TokenRouting
from routed_experts.models.base.sharding import put_global
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.request_pages import pages_for
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.scheduling.scheduler import Scheduler

_T = TypeVar("_T")

# Rows to execute in a step: ids, which are valid, and where they are replayed combine weights.
StepRoutes = (
    tuple[UInt[np.ndarray, "N M K"], Bool[np.ndarray, " N"]]
    | tuple[UInt[np.ndarray, "N M K"], Bool[np.ndarray, " N"], Float32[np.ndarray, "N M K"]]
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput:
    """One scored sequence: `logprobs[t]` is log p(token t + 1 | tokens up to t) at temperature 1, without penalties or
    bias. `routed_experts` has a row for each of the S tokens; None where none are recorded, or where
    `return_routed_experts` is False.
    `weight_version` is the label of the weights, `update_count` the engine's count of their update."""

    token_ids: Int32[np.ndarray, " S"]
    logprobs: Float32[np.ndarray, " S-1"]
    routed_experts: RoutedExperts | None
    weight_version: str
    update_count: int


class Scorer:
    """Scores with given weights; one call at a time. While `lock` is held, the served weights may be donated."""

    def __init__(self, args: ServerArgs, buckets: Buckets, runner: ModelRunner, between_steps: BetweenSteps) -> None:
        self._between_steps = between_steps
        self._args = dataclasses.replace(args, disable_radix_cache=True, max_queued_requests=1 << 30)
        self._buckets, self._runner = buckets, runner
        self.lock = threading.Lock()

    @functools.cached_property
    def _programs(self) -> "ScorePrograms":
        """Made at the first score: where experts are on the host it has threads of its own."""
        if isinstance(self._runner, OffloadRunner):
            return ScorePrograms(self._runner, forward=OffloadScorer(self._runner, self._between_steps))
        return ScorePrograms(self._runner)

    def run(
        self,
        sequences: Sequence[Int32[np.ndarray, " S"]],
        routed: Sequence[RoutedExperts | None] | None,
        get_weights: Callable[[], tuple[nnx.State[Any, Any], WeightVersion]],
        *,
        replay_weights: bool = False,
    ) -> list[ScoreOutput]:
        """Score checked sequences, in order, with the weights and version served when its turn comes. Valid rows of
        `routed` are executed, with `replay_weights` on their combine weights; other tokens are routed live."""
        with self.lock:
            state, version = get_weights()
            records = [None] * len(sequences) if routed is None else routed
            requests = [
                _ScoreRequest(_to_req(index, ids), record)
                for index, (ids, record) in enumerate(zip(sequences, records, strict=True))
            ]
            num_pages = self._num_pages([ids.size for ids in sequences]) + 1
            in_group = self._runner.orders is not NO_FOLLOWERS  # all its programs are dispatched by one thread
            score_run = _ScoreRun(
                requests,
                state,
                self._ranks(num_pages),
                self._programs,
                self._between_steps if in_group else _at_once,
                replay_weights=replay_weights,
            )
            score_run.begin(num_pages)
            try:
                while score_run.step():
                    continue
            finally:
                score_run.end()
            return [_output(request, self._runner.spec, version) for request in requests]

    def _ranks(self, num_pages: int) -> DataRanks:
        """Empty data ranks of so many pages each."""
        vocab_size = self._runner.config.vocab_size
        schedulers = [
            Scheduler(self._args, self._buckets, num_pages=num_pages, vocab_size=vocab_size)
            for _ in range(self._runner.num_ranks)
        ]
        return DataRanks(schedulers, self._args)

    def _num_pages(self, lengths: Sequence[int]) -> int:
        """Pages for the longest sequence or for the tokens of a step, rounded up to a power of two: few programs."""
        tokens = max([*lengths, min(sum(lengths), self._args.prefill_limit)])
        num_running = min(len(lengths), self._args.running_limit)
        pages = pages_for(tokens, self._args.page_size) + 2 * num_running  # partly filled ones, and spare ones
        return 1 << (pages - 1).bit_length()


@dataclasses.dataclass(frozen=True, slots=True)
class _ScoreRequest:
    req: Req
    routes: RoutedExperts | None
    # Of each step, in order of position: ids, or with combine weights packed words.
    rows: list[UInt[np.ndarray, "R MK"] | Int32[np.ndarray, "R W"]] = dataclasses.field(
        default_factory=list[np.ndarray]
    )


class _ScoreRun:
    """The steps of one call, over schedulers and pools of its own."""

    def __init__(
        self,
        requests: Sequence[_ScoreRequest],
        state: nnx.State[Any, Any],
        ranks: DataRanks,
        programs: "ScorePrograms",
        dispatch: BetweenSteps,
        *,
        replay_weights: bool,
    ) -> None:
        self._requests, self._state, self._ranks = requests, state, ranks
        self._programs, self._dispatch, self._replay_weights = programs, dispatch, replay_weights
        self._ranks.add([request.req for request in requests])

    def begin(self, num_pages: int) -> None:
        """Allocate a pool."""
        self._dispatch(lambda: self._programs.begin(num_pages))

    def end(self) -> None:
        """Free the pool."""
        self._dispatch(self._programs.end)

    def step(self) -> bool:
        """Run the next step; False when all is done."""
        batches = self._ranks.build([scheduler.choose() for scheduler in self._ranks], drafts_ahead=False)
        if batches is None:
            assert not self._ranks.num_waiting and not self._ranks.running, "a sequence does not fit its own pages"
            return False
        parts = [self._requests_of(number, batch) for number, batch in enumerate(batches)]
        capture = self._programs.spec.capture
        routed = None
        if capture is not None:
            of_ranks = [
                _routes(batch, requests, capture, weights=self._replay_weights)
                for batch, requests in zip(batches, parts, strict=True)
            ]
            routed = tuple(concatenate(arrays) for arrays in zip(*of_ranks, strict=True))
        targets = [batch.prompt_targets for batch in batches if batch.prompt_targets is not None]
        shape, packed = to_batch_shape(batches[0]), pack_ranks(batches)
        inputs = ScoreInputs(shape, packed, routed, concatenate(targets) if targets else None)
        seq, out, on_device = self._dispatch(lambda: self._programs.run(self._state, inputs))
        scored, rows = self._programs.read(
            seq, lambda: tuple(split_ranks(array, len(batches)) for array in (on_device, out.rows))
        )
        for number, (scheduler, batch) in enumerate(zip(self._ranks, batches, strict=True)):
            if batch.num_requests:
                _commit(scheduler, batch, parts[number], scored[number], rows[number])
        return True

    def _requests_of(self, number: int, batch: ModelWorkerBatch) -> list[_ScoreRequest]:
        """The requests of a data rank's batch, in order."""
        running = (request for request in self._requests if request.req.state is ReqState.RUNNING)
        by_slot = {request.req.slot: request for request in running if request.req.dp_rank == number}
        return [by_slot[int(slot)] for slot in batch.request_slots[: batch.num_requests]]


def _commit(
    scheduler: Scheduler,
    batch: ModelWorkerBatch,
    requests: Sequence[_ScoreRequest],
    scored: Int32[np.ndarray, "N columns"] | None,
    rows: UInt[np.ndarray, "N MK"] | Int32[np.ndarray, "N W"] | None,
) -> None:
    """Take the results of a data rank's part of a step."""
    if rows is not None:
        for index, request in enumerate(requests):
            request.rows.append(rows[slice(*batch.query_starts[index : index + 2])])
    for req in scheduler.commit(batch, _result(batch, scored)).advanced:
        scheduler.release(req)
    scheduler.pages.drain_changed_pages()


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreInputs:
    """What the programs of a score's step take from the host: packed metadata; rows to execute (ids, which are
    valid and, where they are replayed, combine weights; None where nothing is recorded); and the next token of each
    token, where logprobs are requested. With data ranks, those of all ranks along the first axis."""

    shape: BatchShape
    packed: Int32[np.ndarray, " words"]
    routed: StepRoutes | None
    targets: Int32[np.ndarray, " N"] | None

    @staticmethod
    def from_order(order: Order) -> "ScoreInputs":
        """Read the inputs from a SCORE order. Raises ProcessMismatchError for a malformed order."""
        try:
            *sizes, num_routed, has_targets = order.head["step"]
            shape = BatchShape.from_json(sizes)
            packed, *rest = order.arrays
            if num_routed not in (0, 2, 3):
                raise ValueError(f"{num_routed} arrays of rows")
            routed: Any = tuple(rest.pop(0) for _ in range(num_routed)) or None
            targets = rest.pop(0) if has_targets else None
            return ScoreInputs(shape, packed, routed, targets)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProcessMismatchError(f"order {order.seq} is no step of a score: {error!r}") from error

    def send(self, orders: OrderSender) -> int:
        """Send its order; returns the order's `seq`."""
        arrays = [self.packed, *(self.routed or ())]
        targets = [] if self.targets is None else [self.targets]
        head = {"step": [*self.shape.to_json(), len(self.routed or ()), self.targets is not None]}
        return orders.send(OrderKind.SCORE, head, [*arrays, *targets])


class ScorePrograms:
    """The device side of scores, in every process that holds a part of the model: programs, and the pool of the score
    that runs. One thread at a time."""

    def __init__(self, runner: ModelRunner, *, forward: Callable[..., tuple[Any, ForwardOut]] | None = None) -> None:
        self._runner, self.spec = runner, _own_spec(runner.spec, 1)
        self._forward = forward or jax.jit(_forward_on_all, static_argnames=("spec", "shape"), donate_argnames="pool")
        self._score_prompt = jax.jit(_score_on_all, static_argnames="spec")
        self._pool = self._last_tokens = None

    def begin(self, num_pages: int) -> None:
        """Allocate a pool of so many pages."""
        runner, mesh_specs = self._runner, self.spec.mesh_specs
        with runner.orders.in_order():
            runner.orders.send(OrderKind.BEGIN_SCORE, {"num_pages": num_pages})
            self.spec = _own_spec(runner.spec, num_pages)
            pool = dataclasses.replace(runner.config.pool, num_pages=num_pages)
            self._pool = sharded_zeros(pool.abstract, mesh_specs, REPLICATED if mesh_specs is None else mesh_specs.pool)
            slots = jax.ShapeDtypeStruct((runner.config.num_request_slots,), jnp.int32)
            by_rank = REPLICATED if mesh_specs is None else mesh_specs.by_rank
            self._last_tokens = sharded_zeros(slots, mesh_specs, by_rank)

    def run(
        self, state: nnx.State[Any, Any], inputs: ScoreInputs
    ) -> tuple[int, ForwardOut, Int32[Array, "N 1"] | None]:
        """Start a step; returns the number of its order, its outputs, and logprob bits of the targets."""
        with self._runner.orders.in_order():
            seq = 0 if self._runner.orders is NO_FOLLOWERS else inputs.send(self._runner.orders)
            routed = None if inputs.routed is None else TokenRouting(*map(self._put, inputs.routed))
            packed, last_tokens = self._put(inputs.packed), self._last_tokens
            self._pool, out = self._forward(
                state, self._pool, last_tokens, packed, routed, spec=self.spec, shape=inputs.shape
            )
            if inputs.targets is None:
                return seq, out, None
            targets = self._put(inputs.targets)
            return seq, out, self._score_prompt(state, out.hidden, targets, spec=self.spec)

    def read(self, seq: int, to_host: Callable[[], _T]) -> _T:
        """Return what `to_host` does, which waits for the outputs of a step. Raises PeerLostError as soon as a process
        is lost."""
        return self._runner.orders.read(seq, to_host)

    def end(self) -> None:
        """Free the pool."""
        self._runner.orders.send(OrderKind.END_SCORE)
        self._pool = self._last_tokens = None

    def _put(self, array: np.ndarray) -> Array:
        """A host array on the devices that the programs run on."""
        mesh_specs = self.spec.mesh_specs
        if mesh_specs is None or (mesh_specs.num_ranks == 1 and mesh_specs.everywhere.is_fully_addressable):
            return jnp.asarray(array)
        return put_global(array, mesh_specs.own_part)


def _at_once(function: Callable[[], Any]) -> Any:
    return function()


def _own_spec(spec: ProgramSpec, num_pages: int) -> ProgramSpec:
    """The served programs on pages of a score's own, without counts, sampling, and capacities, which would depend on
    the batch."""
    kernels = dataclasses.replace(spec.kernels, group=dataclasses.replace(spec.kernels.group, rerouter=None))
    return dataclasses.replace(
        spec, num_pages=num_pages, kernels=kernels, count_spec=None, piggyback_row_words=0, with_logits=False
    )


def _forward_on_all(
    state: nnx.State[Any, Any],
    pool: Any,
    last_tokens: Any,
    packed: Any,
    routed: TokenRouting | None,
    *,
    spec: ProgramSpec,
    shape: BatchShape,
) -> tuple[Any, ForwardOut]:
    """`forward` on one device, or on all of the spec's mesh."""
    leaves, tree = jax.tree.flatten(state)

    def run(
        leaves: Any, pool: Any, last_tokens: Any, packed: Any, routed: TokenRouting | None
    ) -> tuple[Any, ForwardOut]:
        return forward(
            jax.tree.unflatten(tree, leaves), pool, last_tokens, packed, spec=spec, shape=shape, routed=routed
        )

    in_specs = (WEIGHTS, POOL, BY_RANK, BY_RANK, BY_RANK)
    return shard_program(run, spec.mesh_specs, in_specs=in_specs, out_specs=(POOL, OUT_SPECS))(
        leaves, pool, last_tokens, packed, routed
    )


def _score_on_all(state: nnx.State[Any, Any], hidden: Any, targets: Any, *, spec: ProgramSpec) -> Any:
    """`score_prompt` in the same way, without the best tokens."""
    leaves, tree = jax.tree.flatten(state)

    def run(leaves: Any, hidden: Any, targets: Any) -> Any:
        return score_prompt(jax.tree.unflatten(tree, leaves), hidden, targets, spec=spec, top=0)

    return shard_program(run, spec.mesh_specs, in_specs=(WEIGHTS, BY_RANK, BY_RANK), out_specs=GATHERED)(
        leaves, hidden, targets
    )


def _to_req(index: int, ids: Int32[np.ndarray, " S"]) -> Req:
    """A request that feeds its prompt; its one sampled token is not read."""
    return Req(
        TokenizedGenerateReqInput(
            rid=str(index),
            group=str(index),
            choice=0,
            input_ids=ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=1).resolve(),
            stop_token_ids=frozenset(),
            return_logprob=True,
            logprob_start_len=0,
        )
    )


def _routes(
    batch: ModelWorkerBatch, parts: Sequence[_ScoreRequest], capture: CaptureSpec, *, weights: bool
) -> StepRoutes:
    """The rows to execute in a step, which are valid (rows that are not given are not), and with `weights` their
    combine weights."""
    num_tokens = batch.token_ids.size
    ids: UInt[np.ndarray, "N M K"] = np.zeros((num_tokens, capture.num_moe_layers, capture.top_k), capture.dtype)
    valid: Bool[np.ndarray, " N"] = np.zeros(num_tokens, np.bool_)
    combined: Float32[np.ndarray, "N M K"] | None = np.zeros(ids.shape, np.float32) if weights else None
    for index, request in enumerate(parts):
        if request.routes is None:
            continue
        first, end = (int(start) for start in batch.query_starts[index : index + 2])
        shift = first - int(batch.positions[first])  # token t of the sequence is at index t + shift
        part = request.routes[first - shift : end - shift]
        to = slice(part.start + shift, part.start + shift + part.num_rows)
        ids[to], valid[to] = part.ids, True if part.valid is None else part.valid
        if combined is not None and part.weights is not None:
            combined[to] = part.weights
    return (ids, valid) if combined is None else (ids, valid, combined)


def _result(batch: ModelWorkerBatch, scored: Int32[np.ndarray, "N columns"] | None) -> StepResult:
    """A result for the scheduler: logprobs of prompt tokens, and tokens that are not read."""
    logprobs = None if scored is None else np.ascontiguousarray(scored[:, 0]).view(np.float32)
    unused = np.zeros(batch.page_table.shape[0], np.int32)
    return StepResult(
        tokens=unused,
        logprobs=unused.astype(np.float32),
        top_logprobs=None,
        top_ids=None,
        prompt_logprobs=logprobs,
        prompt_top_logprobs=None,
        prompt_top_ids=None,
        rows=None,
        weight_version=0,
    )


def _output(request: _ScoreRequest, spec: ProgramSpec, version: WeightVersion) -> ScoreOutput:
    req, record = request.req, None
    if spec.capture is not None:
        capture = spec.capture
        ids, weights = unpack_rows(np.concatenate(request.rows), capture)
        record = RoutedExperts.from_spec(
            capture,
            ids=ids,
            start=0,
            num_tokens=req.prompt_len,
            num_prompt_tokens=req.prompt_len,
            version_spans=((0, req.prompt_len, version.update_count),),
            version_labels=to_labels([version]),
            weights=weights,
        )
    logprobs = np.array([req.input_logprobs[position][0] for position in range(1, req.prompt_len)], np.float32)
    return ScoreOutput(
        token_ids=req.source.input_ids,
        logprobs=logprobs,
        routed_experts=record,
        weight_version=version.label,
        update_count=version.update_count,
    )
