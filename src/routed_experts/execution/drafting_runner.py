"""DraftingRunner: a ModelRunner whose steps also feed a draft model, which proposes the tokens of the next step.

The draft layers have a pool of their own with the target's pages: a token's keys and values are at its slot in both, so
that they share page tables, prefixes and lifetimes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from routed_experts.core.model_worker_batch import MAX_BIAS, ForwardMode, ModelWorkerBatch, SamplingMode
from routed_experts.execution.aot_programs import (
    Jobs,
    RunnerConfig,
    abstract_inputs,
    flatten_weights,
    lowerings,
    with_sharding,
)
from routed_experts.execution.draft_chain import (
    CHAIN_MODES,
    Bias,
    DraftSpec,
    TargetOutputs,
    chain_mode,
    pack_draft_inputs,
)
from routed_experts.execution.draft_programs import PAIR_LAG, run_draft_model
from routed_experts.execution.forward_batch import BatchShape, pack
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.programs import ForwardOut, ProgramSpec
from routed_experts.execution.sampler import PenaltyInputs
from routed_experts.execution.slot_state import SlotState, advance_program, locate_program
from routed_experts.execution.standalone_programs import OWN_LAG, run_standalone
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.kv_format import to_stored
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.interface import Decoder
from routed_experts.models.base.weight_format import shape_of
from routed_experts.models.drafts.interface import DraftModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftKind:
    """How draft models of a kind run. `program`: as `run_draft_model`; `lag`: how many positions before its own a draft
    is fed; `reads_target`: whether the program takes TargetOutputs, else None."""

    program: Callable[..., Any]
    lag: int
    reads_target: bool

    def lookahead(self, num_drafts: int) -> int:
        """Tokens that a chain of drafts feeds behind those of the target's step; the last draft is never fed."""
        return num_drafts - self.lag


OF_TARGET = DraftKind(program=run_draft_model, lag=PAIR_LAG, reads_target=True)  # a DraftModel
STANDALONE = DraftKind(program=run_standalone, lag=OWN_LAG, reads_target=False)  # a Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft model with its weights, the shape of its pool, and the kernels that it runs with. `tapped_layers`: of the
    target, whose outputs it reads; `static_modes`: as in DraftSpec."""

    model: DraftModel | Decoder
    kind: DraftKind
    pool: KVPoolSpec
    kernels: Kernels
    attention: AttentionBackend
    tapped_layers: tuple[int, ...] = ()
    static_modes: bool = False


class DraftingRunner(ModelRunner):
    """The target and its draft model, on one device."""

    def __init__(
        self,
        state: nnx.State[Any, Any],
        spec: ProgramSpec,
        config: RunnerConfig,
        draft: LoadedDraft,
        *,
        weight_version: int = 0,
    ) -> None:
        assert spec.draft_model and spec.mesh_specs is None, spec
        assert draft.pool.num_pages == config.pool.num_pages, (draft.pool, config.pool)
        graphdef, draft_state = nnx.split(draft.model)
        self._draft_kind, self._draft_pool_spec = draft.kind, draft.pool
        self._draft_weights, self._draft_tree = jax.tree.flatten(draft_state)
        self._draft_spec = DraftSpec(
            graphdef=graphdef,
            target=spec.graphdef,
            target_tree=jax.tree.structure(state),
            kernels=draft.kernels,
            attention=draft.attention,
            num_pages=draft.pool.num_pages,
            page_size=draft.pool.page_size,
            vocab_size=config.vocab_size,
            static_modes=draft.static_modes,
        )
        self._padding_bias = dict[int, Bias]()  # by padded requests
        slots = SlotState.abstract(config.num_request_slots, spec.num_drafts)
        self._slot_state: SlotState = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), slots)
        super().__init__(state, spec, config, weight_version=weight_version)

    @property
    def can_run_ahead(self) -> bool:
        """The drafts are on the device."""
        return True

    def allocate_pool(self) -> None:
        """Allocate both pools, empty."""
        super().allocate_pool()
        self._draft_pool = self._draft_pool_spec.allocate()

    def overwrite_pool(self) -> None:
        """Fill both pools with a finite value that no softmax hides."""
        super().overwrite_pool()
        self._draft_pool = jax.tree.map(
            lambda leaf: jnp.full(leaf.shape, to_stored(jnp.float32(3e4), leaf.dtype), leaf.dtype), self._draft_pool
        )

    def release(self, *, pool: bool, weights: bool) -> None:
        """Free the pools and the target's weights; those of the draft model stay."""
        super().release(pool=pool, weights=weights)
        if pool:
            for leaf in jax.tree.leaves(self._draft_pool):
                leaf.delete()

    def _draft(
        self,
        batch: ModelWorkerBatch,
        shape: BatchShape,
        packed: Any,
        out: ForwardOut,
        full: PenaltyInputs | None,
        accepted: Sequence[Array],
    ) -> Int32[Array, "B 2k"] | None:
        """Feed the step's tokens to the draft model; draft where the next step is to have drafts."""
        num_drafts = self._num_drafts_after(shape, drafts_ahead=batch.drafts_ahead)
        mode = chain_mode(batch.sampling_mode) if self._draft_spec.static_modes and num_drafts else None
        program = self._programs["draft", shape, num_drafts, mode]
        inputs = pack_draft_inputs(batch)
        bias = self._no_bias(shape.num_requests) if full is None else Bias(full.bias_ids, full.bias_values)
        self._draft_pool, proposed = program(
            self._draft_weights,
            self._target_outputs(self._weights, out),
            self._draft_pool,
            out.tokens,
            self._last_tokens,
            packed,
            inputs,
            bias,
            *accepted,
        )
        if shape.mode is ForwardMode.TARGET_VERIFY:
            self._slot_state = self._programs["advance", shape](self._slot_state, packed, *accepted, proposed)
        return proposed

    def _pack(self, batches: Sequence[ModelWorkerBatch], shape: BatchShape) -> Any:
        (batch,) = batches  # a draft model runs on one device
        if not batch.is_ahead:
            return super()._pack(batches, shape)
        return self._programs["locate", shape](pack(batch), self._slot_state)

    def _no_bias(self, num_requests: int) -> Bias:
        """Zeros for token 0, which change no score: a chain in FULL may serve a step in FILTERED. On the device, as all
        steps in other modes than FULL share them."""
        if num_requests not in self._padding_bias:
            shapes = abstract_bias(num_requests)
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
            self._padding_bias[num_requests] = jax.device_put(zeros)
        return self._padding_bias[num_requests]

    def _target_outputs(self, weights: Sequence[Any], out: ForwardOut) -> TargetOutputs | None:
        """What the draft model reads of the target; None: nothing."""
        return target_outputs(self._draft_kind, weights, out)

    def _num_drafts_after(self, shape: BatchShape, *, drafts_ahead: bool) -> int:
        """Drafts of a request that follow a step; verify steps are always followed by some."""
        is_verify = shape.mode is ForwardMode.TARGET_VERIFY
        return self.spec.num_drafts if drafts_ahead or is_verify else 0

    def _jobs(self) -> Jobs:
        def more(shape: BatchShape, out: ForwardOut) -> Jobs:
            weights = jax.tree.unflatten(self._draft_tree, jax.tree.map(shape_of, self._draft_weights))
            programs = DraftPrograms(
                kind=self._draft_kind, spec=self._draft_spec, state=weights, pool=self._draft_pool_spec
            )
            return programs.jobs(self.state, self.spec, self.config, shape, out)

        return lowerings(self.state, self.spec, self.config, more=more, later=self._later_jobs)


def target_outputs(kind: DraftKind, weights: Sequence[Any], out: ForwardOut) -> TargetOutputs | None:
    """What a draft model of a kind reads of the target; None: nothing."""
    if not kind.reads_target:
        return None
    return TargetOutputs(weights=list(weights), hidden=out.hidden, streams=out.streams)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrograms:
    """What the programs of a draft model are lowered from; `state` has shapes for arrays."""

    kind: DraftKind
    spec: DraftSpec
    state: nnx.State[Any, Any]
    pool: KVPoolSpec

    def jobs(
        self, target: nnx.State[Any, Any], spec: ProgramSpec, config: RunnerConfig, shape: BatchShape, out: ForwardOut
    ) -> Jobs:
        """The programs after a step of this shape: with drafts, of each mode where modes are static, and without drafts
        but for verify steps. `target`, `spec`, `config`: as for `lowerings`; `out` has the shapes of the step's
        outputs."""
        weights, _, last_tokens, packed = abstract_inputs(target, spec, config, shape)
        leaves, tree = jax.tree.flatten(self.state)
        is_verify = shape.mode is ForwardMode.TARGET_VERIFY
        arguments = (
            leaves,
            target_outputs(self.kind, jax.tree.leaves(weights), out),
            self.pool.abstract,
            out.tokens,
            last_tokens,
            packed,
            jax.ShapeDtypeStruct((shape.num_requests + 1,), jnp.int32),
            abstract_bias(shape.num_requests),
            *([jax.ShapeDtypeStruct((shape.num_requests,), jnp.int32)] if is_verify else []),
        )
        jobs: Jobs = {}
        for num_drafts in (spec.num_drafts,) if is_verify else (0, spec.num_drafts):
            modes = CHAIN_MODES if self.spec.static_modes and num_drafts else (None,)
            for mode in modes:
                program = self._program(shape, num_drafts, mode)
                run = jax.jit(flatten_weights(program, tree), donate_argnums=(2,))
                jobs["draft", shape, num_drafts, mode] = functools.partial(run.lower, *arguments)
        return jobs | (_slot_jobs(spec, config, shape, at=leaves[0].sharding) if is_verify else {})

    def _program(self, shape: BatchShape, num_drafts: int, mode: SamplingMode | None) -> Callable[..., Any]:
        return functools.partial(self.kind.program, spec=self.spec, shape=shape, num_drafts=num_drafts, mode=mode)


def abstract_bias(num_requests: int) -> Bias:
    """Shapes and dtypes of the bias of a step."""
    size = (num_requests, MAX_BIAS)
    ids, values = jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, jnp.float32)
    return Bias(ids, values)  # pyright: ignore[reportArgumentType]  # shapes for lowering


def _slot_jobs(spec: ProgramSpec, config: RunnerConfig, shape: BatchShape, *, at: Any) -> Jobs:
    """The programs that keep a SlotState; `at`: the sharding that names the device."""
    state = SlotState.abstract(config.num_request_slots, spec.num_drafts)
    accepted = jax.ShapeDtypeStruct((shape.num_requests,), jnp.int32)
    proposed = jax.ShapeDtypeStruct((shape.num_requests, 2 * spec.num_drafts), jnp.int32)
    calls = {
        "locate": (locate_program(shape), (shape.packed, state)),
        "advance": (advance_program(shape), (state, shape.packed, accepted, proposed)),
    }
    return {
        (name, shape): functools.partial(run.lower, *with_sharding(inputs, at)) for name, (run, inputs) in calls.items()
    }
