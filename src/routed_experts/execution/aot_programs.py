"""The table of programs of an engine: for every padded step, calls that lower what it needs, from shapes alone."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array

from routed_experts.core.buckets import continuation_size
from routed_experts.core.grammar_state import num_mask_words
from routed_experts.core.model_worker_batch import MAX_BIAS, MAX_GIVEN_IDS, ForwardMode, SamplingMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import OUT_SPECS, ForwardOut, ProgramSpec, forward, score_prompt
from routed_experts.execution.recurrent_ops import commit_states
from routed_experts.execution.sampler import (
    PenaltyInputs,
    SamplerSpec,
    TokenCounts,
    counting_program,
    given_program,
    host_table_sharding,
    sampler_program,
)
from routed_experts.execution.slot_state import advance_positions_program, locate_text_program
from routed_experts.execution.spmd import (
    BY_RANK,
    GATHERED,
    POOL,
    REPLICATED,
    WEIGHTS,
    all_ranks,
    global_shapes,
    jit_sharded,
)
from routed_experts.execution.verify import VerifySpec, accept_program, accepted_counting_program
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.weight_format import shape_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Static sizes of a runner, of one device where it runs on several. `shapes` are the padded steps it compiles
    for."""

    pool: KVPoolSpec
    num_request_slots: int  # slot 0 is padding
    shapes: tuple[BatchShape, ...]
    vocab_size: int


Jobs = dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]  # a call that lowers a program, by its key


def lowerings(
    state: nnx.State[Any, Any],
    spec: ProgramSpec,
    config: RunnerConfig,
    *,
    more: Callable[[BatchShape, ForwardOut], Jobs] | None = None,
    later: Jobs | None = None,
) -> Jobs:
    """The table of programs: key to a call that lowers it. `state` may be arrays or their shapes; programs take its
    leaves. `more`: further programs of a shape, from the shapes of its layers' outputs. `later`: receives
    the samplers of steps with a mask and the programs of given ids, which are no part of the table: they are compiled
    when they are first needed."""
    jobs: Jobs = {}
    tree, mesh_specs = jax.tree.structure(state), spec.mesh_specs
    for shape in config.shapes:
        args = abstract_inputs(state, spec, config, shape)
        args = (jax.tree.leaves(args[0]), *args[1:], *(() if spec.counts is None else (spec.counts,)))
        program = flatten_weights(functools.partial(forward, spec=spec, shape=shape), tree)
        donated = (1,) if spec.counts is None else (1, 4)
        run = jit_sharded(
            program,
            mesh_specs,
            in_specs=(WEIGHTS, POOL, BY_RANK, BY_RANK, *(REPLICATED,) * (len(args) - 4)),
            out_specs=(POOL, OUT_SPECS),
            donate_argnums=donated,
        )
        out = jax.eval_shape(run, *args)[1]
        jobs["forward", shape] = functools.partial(run.lower, *args)
        jobs |= sampling_jobs(state, spec, config, shape, out, later=later)
        if spec.has_text_ahead and shape.mode is ForwardMode.TARGET_VERIFY:
            jobs |= _position_jobs(spec, config, shape, out, at=args[0][0].sharding)
        if out.recurrent_inputs is not None:
            jobs["commit", shape] = _commit_job(spec, shape, args, out)
        jobs |= {} if more is None else more(shape, out)
    return jobs


def sampling_jobs(
    state: nnx.State[Any, Any],
    spec: ProgramSpec,
    config: RunnerConfig,
    shape: BatchShape,
    out: ForwardOut,
    *,
    later: Jobs | None = None,
) -> Jobs:
    """The programs that follow the layers of a step; `out` has the shapes of the layers' outputs. Steps of other
    sizes may share some of them, under the same keys. `later`: as for `lowerings`."""
    jobs: Jobs = {}
    weights, mesh_specs = abstract_inputs(state, spec, config, shape)[0], spec.mesh_specs
    mesh = None if mesh_specs is None else mesh_specs.mesh
    leaves, last_tokens = (
        jax.tree.leaves(weights),
        all_ranks(_shape((config.num_request_slots,), jnp.int32), mesh_specs),
    )
    at = leaves[0].sharding if mesh_specs is None else None  # of what runs there too, but has no weights
    is_verify = shape.mode is ForwardMode.TARGET_VERIFY
    slot_counts = all_ranks(abstract_token_counts(config.num_request_slots, config.vocab_size), mesh_specs)
    of_rows = abstract_token_counts(shape.num_requests, config.vocab_size)
    row_counts = slot_counts if is_verify else all_ranks(of_rows, mesh_specs)
    for mode in SamplingMode:
        full = None
        if mode is SamplingMode.FULL:
            bias = (shape.num_requests, MAX_BIAS)
            biases = all_ranks((_shape(bias, jnp.int32), _shape(bias, jnp.float32)), mesh_specs)
            full = PenaltyInputs(row_counts, *biases)
        inputs = (out.logits, last_tokens, out.words, *((out.tokens, full) if is_verify else (full,)))
        run = _sampler(spec, shape, mode, at, is_masked=False)
        arguments = with_sharding(inputs, at)
        jobs[sampler_key(spec, shape, mode)] = functools.partial(run.lower, *arguments)
        if later is not None:
            mask = all_ranks(_shape((shape.num_requests, num_mask_words(config.vocab_size)), jnp.uint32), mesh_specs)
            run = _sampler(spec, shape, mode, at, is_masked=True)
            lower = functools.partial(run.lower, *arguments, with_sharding(mask, at))
            later[sampler_key(spec, shape, mode, is_masked=True)] = lower
    if later is not None and not is_verify:
        ids = all_ranks(_shape((shape.num_requests, MAX_GIVEN_IDS), jnp.int32), mesh_specs)
        arguments = with_sharding((out.logits, ids), at)
        later["given", shape.num_requests] = functools.partial(given_program(mesh).lower, *arguments)
    packed = all_ranks(shape.packed, mesh_specs)
    counting, inputs = counting_program, (slot_counts, out.tokens, packed)
    if is_verify:
        accepted = all_ranks(_shape((shape.num_requests,), jnp.int32), mesh_specs)
        counting, inputs = accepted_counting_program, (slot_counts.generated, out.tokens, packed, accepted)
    jobs["count", shape] = functools.partial(counting(shape, mesh).lower, *with_sharding(inputs, at))
    if shape.mode is ForwardMode.EXTEND:
        tree = jax.tree.structure(weights)
        run = jit_sharded(
            flatten_weights(functools.partial(score_prompt, spec=spec), tree),
            mesh_specs,
            in_specs=(WEIGHTS, BY_RANK, BY_RANK),
            out_specs=GATHERED,
        )
        jobs["score", shape.num_tokens] = functools.partial(run.lower, leaves, out.hidden, out.tokens)
    return jobs


def _position_jobs(spec: ProgramSpec, config: RunnerConfig, shape: BatchShape, out: ForwardOut, *, at: Any) -> Jobs:
    """The programs that let a verify step be ahead of the host; `at`: the sharding that names the device."""
    positions, rows = _shape((config.num_request_slots,), jnp.int32), (shape.num_requests,)
    continuations = _shape((*rows, 1 + continuation_size(spec.num_drafts)), jnp.int32)
    calls = {
        "locate": (locate_text_program(shape), (shape.packed, positions, continuations)),
        "advance": (advance_positions_program(shape), (positions, out.words, _shape(rows, jnp.int32))),
    }
    return {
        (name, shape): functools.partial(run.lower, *with_sharding(inputs, at)) for name, (run, inputs) in calls.items()
    }


def _commit_job(
    spec: ProgramSpec, shape: BatchShape, args: tuple[Any, ...], out: ForwardOut
) -> Callable[[], jax.stages.Lowered]:
    """The program that gives recurrent states the accepted tokens of a verify step; `args` and `out` are the shapes of
    the arguments and outputs of its layers."""
    run = jit_sharded(
        functools.partial(commit_states, backend=spec.attention, shape=shape),
        spec.mesh_specs,
        in_specs=(POOL, *(BY_RANK,) * 3),
        out_specs=POOL,
        donate_argnums=(0,),
    )
    inputs = out.recurrent_inputs, out.words, _shape((shape.num_requests,), jnp.int32)
    at = args[0][0].sharding if spec.mesh_specs is None else None
    return functools.partial(run.lower, args[1], *with_sharding(inputs, at))


def sampler_key(
    spec: ProgramSpec, shape: BatchShape, mode: SamplingMode, *, is_masked: bool = False
) -> tuple[object, ...]:
    """The key of a step's sampler in the table, or among the samplers that take a mask."""
    if is_masked:
        return "masked", *sampler_key(spec, shape, mode)
    if shape.mode is ForwardMode.TARGET_VERIFY:
        return "accept", shape, mode
    return "sample", shape.num_requests, spec.row_words_in(shape), mode


def is_of_drafts(key: tuple[object, ...]) -> bool:
    """Whether a program is one that drafts add to the table: of a verify step, or of a draft model."""
    shapes = (part for part in key if isinstance(part, BatchShape))
    return key[0] == "draft" or any(shape.mode is ForwardMode.TARGET_VERIFY for shape in shapes)


def _sampler(
    spec: ProgramSpec, shape: BatchShape, mode: SamplingMode, on_device: Sharding | None, *, is_masked: bool
) -> Any:
    """The jitted sampler of a step; `on_device`: the sharding of its arrays, None on a mesh."""
    mesh, table = None if spec.mesh_specs is None else spec.mesh_specs.mesh, host_table_sharding(on_device)
    sampler = dataclasses.replace(_sampler_spec(spec, shape, mode), masked=is_masked, table_sharding=table)
    if shape.mode is not ForwardMode.TARGET_VERIFY:
        return sampler_program(sampler, mesh)
    return accept_program(dataclasses.replace(_verify_spec(spec, shape, mode), sampler=sampler), mesh)


def _sampler_spec(spec: ProgramSpec, shape: BatchShape, mode: SamplingMode) -> SamplerSpec:
    greedy_kernel = spec.kernels.argmax if mode is SamplingMode.GREEDY else None
    row_words = spec.row_words_in(shape)
    return SamplerSpec(
        mode=mode,
        num_requests=shape.num_requests,
        row_words=row_words,
        raw_logprobs=spec.raw_logprobs,
        greedy_kernel=greedy_kernel,
        logprobs=spec.kernels.logprobs,
    )


def _verify_spec(spec: ProgramSpec, shape: BatchShape, mode: SamplingMode) -> VerifySpec:
    return VerifySpec(
        sampler=_sampler_spec(spec, shape, mode),
        shape=shape,
        num_drafts=spec.num_drafts,
        block=shape.num_requests if spec.batch_invariant else spec.sampled_rows(shape),
    )


def with_sharding(shapes: Any, sharding: Any) -> Any:
    """The same shapes with a sharding, which names the device that is compiled for."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def flatten_weights(program: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    """The same program, with the weights as a list of leaves."""

    def on_leaves(weights: Sequence[Array], *rest: Any) -> Any:
        return program(jax.tree.unflatten(tree, weights), *rest)

    return on_leaves


def abstract_inputs(
    state: nnx.State[Any, Any], spec: ProgramSpec, config: RunnerConfig, shape: BatchShape
) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments of `forward`. Weights keep their sharding, which names the devices that are
    compiled for, and their order in memory."""
    shapes = jax.tree.map(shape_of, state)
    pool = global_shapes(
        config.pool.abstract, spec.mesh_specs, REPLICATED if spec.mesh_specs is None else spec.mesh_specs.pool
    )
    last_tokens = jax.ShapeDtypeStruct((config.num_request_slots,), jnp.int32)
    return shapes, pool, *all_ranks((last_tokens, shape.packed), spec.mesh_specs)


def abstract_token_counts(num_rows: int, vocab_size: int) -> TokenCounts:
    """Shapes of the counts that penalties need."""
    size = (num_rows, vocab_size)
    return TokenCounts(_shape(size, jnp.int32), _shape(size, jnp.bool_))


def _shape(size: tuple[int, ...], dtype: Any) -> Any:
    """A ShapeDtypeStruct in place of an array, for lowering."""
    return jax.ShapeDtypeStruct(size, dtype)
