"""ModelRunner: owns the device state (weights, KV pool, last tokens of slots) and runs the compiled programs.

It takes a ModelWorkerBatch for each data rank, all of one shape, and returns, one step late, a StepResult for each.
A step whose sampler takes a mask is dispatched in two parts: `begin` starts its layers, and `sample` the rest, once the
host has read the step before and filled the mask.
Host mutation: it rebinds what it donated. Every program is compiled before the first step; only the samplers that take
masks, and the programs of given ids, are compiled by the first request that needs them, on its caller's thread. Dims: N
padded tokens, B padded requests, M MoE layers, K experts per token, W words of a mask's row, k drafts, G given ids; the
columns of `sampled` and `scored` are those of sampler.py, verify.py and `score_prompt`."""

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, UInt, UInt32

from routed_experts.core.errors import WeightsMismatchError
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, SamplingMode, StepResult
from routed_experts.execution.aot_programs import (
    RunnerConfig,
    abstract_token_counts,
    is_of_drafts,
    lowerings,
    sampler_key,
)
from routed_experts.execution.forward_batch import BatchShape, StepInputs, pack, pack_ranks, split_ranks, to_batch_shape
from routed_experts.execution.orders import NO_FOLLOWERS, OrderKind, OrderSender
from routed_experts.execution.programs import ForwardOut, ProgramSpec
from routed_experts.execution.sampler import HOST_MEMORY, PenaltyInputs, TokenCounts
from routed_experts.execution.spmd import REPLICATED, num_ranks, sharded_zeros
from routed_experts.execution.verify import ACCEPTED_COLUMN
from routed_experts.layers.kv_format import to_stored
from routed_experts.layers.logprobs import MAX_TOP_LOGPROBS
from routed_experts.memory.hugepages import advise_hugepages
from routed_experts.models.base.sharding import DonatedBuffers, buffer_pointers, put_global
from routed_experts.models.base.weight_format import format_of, shape_of

MAX_WEIGHT_VERSION = 2**31 - 1  # versions of rows are int32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A dispatched step; its arrays are on their way to the host. `batches`: of each data rank, which has its part of
    every array, in order. `placement_epoch`: of the placement that it runs with, None where there is none."""

    batches: tuple[ModelWorkerBatch, ...]
    sampled: Int32[Array, "B columns"]
    scored: Int32[Array, "N columns"] | None
    rows: UInt[Array, "N MK"] | None  # None, too, where `sampled` has them
    weight_version: int
    placement_epoch: int | None = None
    rerouting: Int32[Array, "N 2"] | None = None
    drafts: Int32[Array, "B 2k"] | None = None
    given: Float[Array, "B G"] | None = None
    prompt_given: tuple[Int32[Array, "N columns"], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartedStep:
    """A step whose layers run, and whose tokens are not being sampled yet. `packed`: its metadata."""

    batches: tuple[ModelWorkerBatch, ...]
    inputs: StepInputs
    packed: Any
    out: ForwardOut


class _StepOutputs(NamedTuple):
    """Fresh arrays of a step, replicated on all devices; see PendingStep."""

    sampled: Int32[Array, "B columns"]
    scored: Int32[Array, "N columns"] | None
    rows: UInt[Array, "N MK"] | None
    rerouting: Int32[Array, "N 2"] | None
    drafts: Int32[Array, "B 2k"] | None
    given: Float[Array, "B G"] | None
    prompt_given: tuple[Int32[Array, "N columns"], ...]

    def arrays(self) -> list[Array]:
        """The arrays that there are."""
        optional = (self.sampled, self.scored, self.rows, self.rerouting, self.drafts, self.given)
        return [*(array for array in optional if array is not None), *self.prompt_given]


class ModelRunner:
    """Weights, pools and compiled programs of one model, on one device or on those of a mesh
    (ProgramSpec.mesh_specs)."""

    def __init__(
        self, state: nnx.State[Any, Any], spec: ProgramSpec, config: RunnerConfig, *, weight_version: int = 0
    ) -> None:
        self.spec, self.config, self.weight_version = spec, config, weight_version
        self.exact = True  # False: experts of generated tokens are added late
        self._owned = list[Array]()  # of the weights: those that were donated
        # leaves: dispatch time grows with leaves, and more with nodes of a tree
        self._weights, self._tree = jax.tree.flatten(state)
        mesh_specs = spec.mesh_specs
        advise_hugepages(self._weights)
        self.orders: OrderSender = NO_FOLLOWERS  # other processes that run the same programs
        self.allocate_pool()
        by_rank = REPLICATED if mesh_specs is None else mesh_specs.by_rank
        last_tokens = jax.ShapeDtypeStruct((config.num_request_slots,), jnp.int32)
        self._last_tokens: Array = sharded_zeros(last_tokens, mesh_specs, by_rank)
        counts = abstract_token_counts(config.num_request_slots, config.vocab_size)
        self._token_counts = sharded_zeros(counts, mesh_specs, by_rank)  # now: no later allocation or compilation
        # Where the slots stand after their last verify step; None where no step is ahead of one.
        self._positions: Array | None = None
        if spec.has_text_ahead:
            self._positions = jnp.zeros(last_tokens.shape, last_tokens.dtype)
        self._replicated = None if mesh_specs is None else mesh_specs.everywhere
        self._own_part = None if mesh_specs is None else mesh_specs.own_part
        self._counts = _zero_counts(self.spec, self._replicated)
        self._programs: dict[tuple[object, ...], jax.stages.Compiled] = {}
        self._later_jobs: dict[tuple[object, ...], Callable[[], jax.stages.Lowered]] = {}  # not compiled yet
        self._later_lock = threading.Lock()
        self._needs_d2h = (
            next(iter(self._last_tokens.devices())).platform != "cpu"
        )  # on CPU the host reads outputs in place

    @property
    def placement_epoch(self) -> int | None:
        """The number of the placement of experts that the next step runs with; None where experts have one place for
        good."""
        return None

    @property
    def can_run_ahead(self) -> bool:
        """Whether a verify step may be dispatched before the one before it is read (ModelWorkerBatch.is_ahead)."""
        return self._positions is not None

    @property
    def state(self) -> nnx.State[Any, Any]:
        """The weights that the next step runs with."""
        return jax.tree.unflatten(self._tree, self._weights)

    def compile_in_order(self) -> list[str]:
        """Compile every program, one after another: processes that compile together talk while they do. Returns key and
        digest of each program as it is before XLA, to be compared between processes."""
        digests: list[str] = []
        for key, job in self._jobs().items():
            lowered = job()
            digests.append(f"{hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]} {key}")
            self._programs[key] = lowered.compile()
        return digests

    def compile(self, *, progress: Callable[[int, int], None] | None = None, threads: int = 2) -> int:
        """Compile every program of the table; returns their number."""
        jobs = self._jobs()
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            futures = {key: pool.submit(lambda job=job: job().compile()) for key, job in jobs.items()}
            for done, (key, future) in enumerate(futures.items(), start=1):
                self._programs[key] = future.result()
                if progress is not None:
                    progress(done, len(futures))
        return len(jobs)

    @property
    def num_draft_programs(self) -> int:
        """The programs of the table that are there for drafts alone."""
        return sum(map(is_of_drafts, self._programs))

    def compile_masked(self, *, threads: int = 2) -> int:
        """Compile the samplers that take a mask, unless they are compiled; returns how many were. Any thread; steps
        run on meanwhile, none of them with a mask."""
        return self._compile_later("masked", threads)

    def compile_given(self, *, threads: int = 2) -> int:
        """Compile the programs of given ids in the same way."""
        return self._compile_later("given", threads)

    def _compile_later(self, kind: str, threads: int) -> int:
        """Compile the programs of a kind, the first word of their keys."""
        with self._later_lock:
            jobs = {key: job for key, job in self._later_jobs.items() if key[0] == kind}
            if not jobs:
                return 0
            with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
                futures = {key: pool.submit(lambda job=job: job().compile()) for key, job in jobs.items()}
                compiled = {key: future.result() for key, future in futures.items()}
            self._programs |= compiled
            self._later_jobs = {key: job for key, job in self._later_jobs.items() if key[0] != kind}
            return len(compiled)

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> PendingStep:
        """Start the programs of a step without a mask, with the batch of each data rank; returns at once. The first
        call carries the metadata over, a host array among its arguments (in the FULL form it goes before)."""
        with self.orders.in_order():  # of both: followers run a step as one order
            return self.sample(self.begin(batches), None)

    def begin(self, batches: Sequence[ModelWorkerBatch]) -> StartedStep:
        """Start the layers of a step; `sample` follows before anything else is dispatched."""
        shape = to_batch_shape(batches[0])
        inputs = StepInputs.from_batches(batches, shape, self._pack(batches, shape))
        with self.orders.in_order():
            if self.orders is not NO_FOLLOWERS:
                self.orders.send(OrderKind.STEP, inputs.head, inputs.arrays)
            packed = self._to_device(inputs)
            out = self._forward(batches[0], shape, packed)
        return StartedStep(batches=tuple(batches), inputs=inputs, packed=packed, out=out)

    def sample(self, started: StartedStep, mask: UInt32[np.ndarray, "B W"] | None) -> PendingStep:
        """Start the rest of a step: its sampler, with `mask` (of all data ranks, one after another; it must not change
        from now on) where its batches are masked, and what follows."""
        batches = started.batches
        assert (mask is not None) == batches[0].is_masked, "a step with a grammar has a mask"
        with self.orders.in_order():
            out = self._finish(started.inputs, started.packed, started.out, batches[0], mask)
        if self._needs_d2h:
            for array in out.arrays():
                if array.sharding.memory_kind != HOST_MEMORY:
                    array.copy_to_host_async()
        return PendingStep(
            batches=batches,
            sampled=out.sampled,
            scored=out.scored,
            rows=out.rows,
            weight_version=self.weight_version,
            placement_epoch=self.placement_epoch,
            rerouting=out.rerouting,
            drafts=out.drafts,
            given=out.given,
            prompt_given=out.prompt_given,
        )

    @property
    def num_ranks(self) -> int:
        """Data ranks, each with a pool and a batch of its own."""
        return num_ranks(self.spec.mesh_specs)

    def follow_step(self, inputs: StepInputs) -> Int32[Array, "B columns"]:
        """Run a step that another process has dispatched; returns the table of its tokens, which every process has."""
        packed = self._to_device(inputs)
        return self._finish(inputs, packed, self._forward(None, inputs.shape, packed), None, None).sampled

    def _to_device(self, inputs: StepInputs) -> Any:
        """The metadata of a step, copied where two programs look at all of it; else the first call carries it over."""
        return inputs.packed if inputs.bias is None else put_global(inputs.packed, self._own_part)

    def _finish(
        self,
        inputs: StepInputs,
        packed: Any,
        out: ForwardOut,
        batch: ModelWorkerBatch | None,
        mask: UInt32[np.ndarray, "B W"] | None,
    ) -> _StepOutputs:
        """Start the programs that follow a step's layers. `batch`: that of the first data rank, for what one device
        alone does; a follower has none, and reads nothing."""
        shape = inputs.shape
        full, is_verify = None, shape.mode is ForwardMode.TARGET_VERIFY
        if inputs.bias is not None:
            bias = [put_global(array, self._own_part) for array in inputs.bias]
            counts = self._token_counts
            if not is_verify:
                self._token_counts, counts = self._programs["count", shape](counts, out.tokens, packed)
            full = PenaltyInputs(counts, *bias)
        program = self._programs[sampler_key(self.spec, shape, inputs.sampling_mode, is_masked=mask is not None)]
        drafts = (out.tokens,) if is_verify else ()
        masks = () if mask is None else (put_global(mask, self._own_part),)
        arguments = (out.logits, self._last_tokens, out.words, *drafts, full, *masks)
        self._last_tokens, sampled, *accepted = program(*arguments)
        if full is not None and is_verify:  # which of the tokens count is known now
            generated = self._programs["count", shape](full.counts.generated, out.tokens, packed, *accepted)
            self._token_counts = TokenCounts(generated, full.counts.prompt)
        if is_verify and self._positions is not None:
            self._positions = self._programs["advance", shape](self._positions, out.words, *accepted)
        if out.recurrent_inputs is not None:
            commit = self._programs["commit", shape]
            self._pool = commit(self._pool, out.recurrent_inputs, out.words, *accepted)
        proposed = None if batch is None else self._draft(batch, shape, packed, out, full, accepted)
        scored = None
        if inputs.prompt_targets is not None:
            targets = put_global(inputs.prompt_targets, self._own_part)
            scored = self._programs["score", shape.num_tokens](self._weights, out.hidden, targets)
        given, prompt_given = self._given(batch, shape, out)
        return _StepOutputs(sampled, scored, out.rows, out.rerouting, proposed, given, prompt_given)

    def _given(
        self, batch: ModelWorkerBatch | None, shape: BatchShape, out: ForwardOut
    ) -> tuple[Float[Array, "B G"] | None, tuple[Int32[Array, "N columns"], ...]]:
        """Start the programs of the ids that requests name: one for the sampled tokens, and for those of a prompt that
        of their logprobs once more for each id."""
        if batch is None or (batch.given_ids is None and batch.given_targets is None):
            return None, ()
        given = None
        if batch.given_ids is not None:
            given = self._programs["given", shape.num_requests](out.logits, put_global(batch.given_ids, self._own_part))
        if batch.given_targets is None:
            return given, ()
        program, targets = self._programs["score", shape.num_tokens], batch.given_targets
        return given, tuple(program(self._weights, out.hidden, put_global(ids, self._own_part)) for ids in targets)

    def take_counts(self) -> Int32[Array, "F M E"]:
        """Return slots by phase (prompt, generated), MoE layer and expert of the steps dispatched since the last call.
        The copy to the host is asynchronous and ends with these steps. Later steps count from 0. No thread blocks and
        no program runs."""
        assert self._counts is not None, "an engine whose steps are counted"
        with self.orders.in_order():
            self.orders.send(OrderKind.TAKE_COUNTS)
            counts, self._counts = self._counts, _zero_counts(self.spec, self._replicated)
        counts.copy_to_host_async()
        return counts

    def _pack(self, batches: Sequence[ModelWorkerBatch], shape: BatchShape) -> Any:
        """The metadata of a step: on the device where it is ahead of the step in flight, else on the host."""
        if not batches[0].is_ahead:
            return pack_ranks(batches)
        (batch,) = batches  # on one device
        return self._programs["locate", shape](pack(batch), self._positions, batch.continuations)

    def _draft(
        self,
        batch: ModelWorkerBatch,
        shape: BatchShape,
        packed: Any,
        out: ForwardOut,
        full: PenaltyInputs | None,
        accepted: Sequence[Array],
    ) -> Int32[Array, "B 2k"] | None:
        """Draft the tokens of the next step; None: no model drafts. `full`: of a step in the FULL mode; `accepted`: of
        each request, in a verify step."""
        del batch, shape, packed, out, full, accepted

    def _jobs(self) -> dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]:
        """Return the lowerings that `compile` compiles, and note those that the first request that needs them does."""
        return lowerings(self.state, self.spec, self.config, later=self._later_jobs)

    def _forward(self, batch: ModelWorkerBatch | None, shape: BatchShape, packed: Any) -> ForwardOut:
        """Start all layers of a step."""
        counts = () if self._counts is None else (self._counts,)
        self._pool, out = self._programs["forward", shape](
            self._weights, self._pool, self._last_tokens, packed, *counts
        )
        self._counts = out.counts
        return out

    def read(self, pending: PendingStep) -> list[StepResult]:
        """Wait for a step's outputs and return them as host arrays, those of each data rank. Rows of a single one may
        still be on the device: the capturer takes them off it."""
        self.orders.begin_wait()
        sampled = np.asarray(pending.sampled)
        self.orders.end_wait(sampled)
        ranks = len(pending.batches)
        if ranks == 1:
            return [self._result(pending, pending.batches[0], sampled, pending.scored, pending.rows, pending.rerouting)]
        rows = None if pending.rows is None else np.asarray(pending.rows)  # of host arrays parts are views
        arrays = (sampled, pending.scored, rows, pending.rerouting)
        parts = zip(*(split_ranks(array, ranks) for array in arrays), strict=True)
        return [self._result(pending, batch, *part) for batch, part in zip(pending.batches, parts, strict=True)]

    def _result(
        self,
        pending: PendingStep,
        batch: ModelWorkerBatch,
        sampled: Int32[np.ndarray, "B columns"],
        scored: Any,  # Int32[Array, "N columns"] | None
        rows: Any,  # UInt[Array, "N MK"] | None
        rerouting: Any,  # Int32[Array, "N 2"] | None
    ) -> StepResult:
        """The result of one data rank from its part of the arrays."""
        top, full = min(MAX_TOP_LOGPROBS, self.config.vocab_size), batch.sampling_mode is SamplingMode.FULL
        is_verify = batch.mode is ForwardMode.TARGET_VERIFY
        first = ACCEPTED_COLUMN + 1 if is_verify else ACCEPTED_COLUMN  # of the top ids
        scored = None if scored is None else np.asarray(scored)
        if self.spec.piggyback_row_words and rows is None:
            rows = sampled
        elif is_verify and rows is not None:
            # The next step often waits for this result. Rows that stay on the device until it runs take turns at two
            # addresses, and XLA writes the new one into its launch graphs while the device waits (seen on an H200).
            rows = np.asarray(rows)
        return StepResult(
            tokens=sampled[:, 0],
            logprobs=_floats(sampled[:, 1]),
            top_ids=sampled[:, first : first + top] if full else None,
            top_logprobs=_floats(sampled[:, first + top : first + 2 * top]) if full else None,
            accepted=sampled[: batch.num_requests, ACCEPTED_COLUMN] if is_verify else None,
            prompt_logprobs=None if scored is None else _floats(scored[:, 0]),
            prompt_top_ids=None if scored is None else scored[:, 1 : 1 + top],
            prompt_top_logprobs=None if scored is None else _floats(scored[:, 1 + top :]),
            rows=rows,
            weight_version=pending.weight_version,
            placement_epoch=pending.placement_epoch,
            rerouting=None if rerouting is None else np.asarray(rerouting),
            drafts=None if pending.drafts is None else np.asarray(pending.drafts),
            given_logprobs=None if pending.given is None else np.asarray(pending.given),
            prompt_given_logprobs=_stack_given(pending.prompt_given),
        )

    def update_weights(self, state: nnx.State[Any, Any] | None, *, version: int, donate: bool = False) -> None:
        """Run all later steps with other weights of the same tree, shapes and dtypes (None: the same weights under
        another version). Arrays with the sharding of the served ones are used as they are; others are copied now,
        so that no step copies. With `donate` the runner owns them: they are deleted once copied or replaced.
        Raises WeightsMismatchError."""
        self.check_version(version)
        if state is None:
            self.orders.send(OrderKind.SET_VERSION, {"version": version})
            self.weight_version = version
            return
        old, new = (dict(jax.tree_util.tree_flatten_with_path(s)[0]) for s in (self.state, state))
        wrong = [
            f"{jax.tree_util.keystr(k)}: {_describe(new.get(k))} for {_describe(v)}"
            for k, v in old.items()
            if _describe(new.get(k)) != _describe(v)
        ]
        wrong += [
            f"{jax.tree_util.keystr(k)}: {_describe(v)} is not in the model" for k, v in new.items() if k not in old
        ]
        if wrong:
            raise WeightsMismatchError(
                f"{len(wrong)} arrays differ from the served weights: {'; '.join(wrong[:4])}", param="state"
            )
        self.orders.send(OrderKind.COMMIT_WEIGHTS, {"version": version})
        donated = DonatedBuffers(jax.tree.leaves(state) if donate else ())
        copied = [_device_put_like(*pair, donated) for pair in zip(jax.tree.leaves(state), self._weights, strict=True)]
        self._weights, self.weight_version = copied, version
        self._owned = update_owned(self._owned, copied, donate=donate)

    def release(self, *, pool: bool, weights: bool) -> None:
        """Free the pool and the weights; shapes and shardings of the weights stay, to check the next ones.
        No step may be in flight."""
        self.orders.send(OrderKind.RELEASE, {"pool": pool, "weights": weights})
        if pool:
            for leaf in jax.tree.leaves(self._pool):
                leaf.delete()
        if weights:
            self._weights = [shape_of(leaf) for leaf in self._weights]
            self._owned = _free_unserved(self._owned, [])

    def check_version(self, version: int) -> None:
        """Raise WeightsMismatchError unless `version`, a count of updates, is an integer above the served one."""
        if (
            isinstance(version, bool)
            or not isinstance(version, int)
            or not self.weight_version < version <= MAX_WEIGHT_VERSION
        ):
            expected = (
                f"an integer above {self.weight_version}, the one that is served, and at most {MAX_WEIGHT_VERSION}"
            )
            text = f"update_count={version!r} must be {expected}; leave it out for the next one"
            raise WeightsMismatchError(text, param="update_count")

    def allocate_pool(self) -> None:
        """Allocate an empty pool; no step may be in flight."""
        self.orders.send(OrderKind.ALLOCATE_POOL)
        mesh_specs = self.spec.mesh_specs
        self._pool = sharded_zeros(
            self.config.pool.abstract, mesh_specs, REPLICATED if mesh_specs is None else mesh_specs.pool
        )
        advise_hugepages(jax.tree.leaves(self._pool))

    def overwrite_pool(self) -> None:
        """Fill the pool with a finite value that no softmax hides; for tests, before any request runs."""
        self.orders.send(OrderKind.OVERWRITE_POOL)
        self._pool = jax.tree.map(
            lambda leaf: jnp.full(
                leaf.shape, to_stored(jnp.float32(3e4), leaf.dtype), leaf.dtype, device=leaf.sharding
            ),
            self._pool,
        )


def _zero_counts(spec: ProgramSpec, everywhere: Any) -> Int32[Array, "F M E"] | None:
    """Counts of no step, on every device; None where steps are not counted."""
    shape = spec.counts
    return None if shape is None else put_global(np.zeros(shape.shape, shape.dtype), everywhere)


def update_owned(owned: Sequence[Array], served: Sequence[Array], *, donate: bool) -> list[Array]:
    """Return the arrays that the engine owns once `served` are served; delete owned arrays that are no longer
    served."""
    retained = _free_unserved(owned, served)
    return list(served) if donate else retained


def _free_unserved(owned: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Return the arrays of `owned` whose buffers the weights use; delete the others."""
    served = set[int]().union(*map(buffer_pointers, weights)) if owned else set[int]()
    retained: list[Array] = []
    for leaf in owned:
        if leaf.is_deleted():
            continue
        if buffer_pointers(leaf) & served:
            retained.append(leaf)
        else:
            leaf.delete()
    return retained


def _device_put_like(leaf: Array | np.ndarray, served: Array | jax.ShapeDtypeStruct, donated: DonatedBuffers) -> Array:
    owned = (
        leaf if isinstance(leaf, jax.Array) else np.array(leaf)
    )  # the CPU device may keep a host array as it is, and so see its changes
    copied = jax.device_put(owned, format_of(served))
    donated.copied(leaf, copied)
    return copied


def _stack_given(scored: Sequence[Int32[Array, "N columns"]]) -> Float[np.ndarray, "G N"] | None:
    """The logprobs of given ids, from the table of each."""
    return np.stack([_floats(np.asarray(table)[:, 0]) for table in scored]) if scored else None


def _floats(bits: Int32[np.ndarray, "..."]) -> Any:
    return np.ascontiguousarray(bits).view(np.float32)


def _describe(array: Array | None) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
