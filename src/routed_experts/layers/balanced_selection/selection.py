"""Balanced expert selection, the public function: which experts a token uses and on which instance of each, under
replicas and capacities. Tables are arguments, so a new table, order or capacity compiles nothing.

"replicas" is lossless: ids are those of `lax.top_k`, and only instances are balanced (waterfill.py). "reroute" gives
each instance a capacity and moves what does not fit to the next replica, then to the token's next best expert. It
changes the model: a token's experts depend on the other tokens of the batch, and the ids returned are those used.
reference.py defines it. Dims: N tokens, E experts, K experts per token, J replica positions, I instances, V sources."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.core.errors import ConfigError
from routed_experts.layers.balanced_selection.admission import (
    Assignment,
    SelectionInputs,
    assign,
    choose_by_rounds,
    count_requests,
)
from routed_experts.layers.balanced_selection.tpu_kernel import LANES, MAX_CELLS, choose_by_tpu_kernel, fits
from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas
from routed_experts.layers.native.ffi_targets import register_ffi_targets
from routed_experts.layers.native.toolchain import unavailable_reason

MODES, ON_EXHAUSTED, IMPLS = ("replicas", "reroute"), ("overflow", "drop"), ("auto", "rounds", "native", "pallas")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """Slots of every token in the order of choice, int32; -1 and weight 0 for padding and for a slot without expert.
    `counts`: slots of each instance; all counts are over the whole group, also where tokens are cut over devices.

    `num_rerouted`: slots that found room with an expert outside their token's K best. `num_overflowed`: slots that were
    placed beyond capacity. `num_dropped`: slots of valid tokens that are empty. `rounds`: of the cutoff iteration over
    experts (0: there was none), `replica_rounds`: over instances, where each source has its own order."""

    logical_ids: Int[Array, "N K"]
    instance_ids: Int[Array, "N K"]
    weights: Float[Array, "N K"]
    counts: Int[Array, " I"]
    rounds: Int[Array, ""]
    replica_rounds: Int[Array, ""]
    num_rerouted: Int[Array, ""]
    num_overflowed: Int[Array, ""]
    num_dropped: Int[Array, ""]


def balanced_expert_selection(
    select_scores: Float[Array, "N E"],
    weight_scores: Float[Array, "N E"],
    replica_order: Int[Array, "*V E J"],
    capacity: Int[Array, " I"] | None = None,
    *,
    k: int,
    source: Int[Array, " N"] | None = None,
    valid: Bool[Array, " N"] | None = None,
    mode: str = "replicas",
    on_exhausted: str = "overflow",
    impl: str = "auto",
    renormalize: bool = True,
    num_devices: int | None = None,
    num_instances: int | None = None,
    axis_name: str | None = None,
) -> Selection:
    """Select K experts and their instances for every token.

    `select_scores` decide (bias added, masked groups at -inf); ties go to the lower id. In "reroute" NaN and -inf are
    never selected; in "replicas" ids are `lax.top_k`'s for any scores. `weight_scores` are the unbiased
    scores: the float32 weights are their values at the selected ids, times 1 / (their sum + 1e-20) if `renormalize`;
    other scoring functions pass the ids to `replay_topk`. `replica_order` is int32, as `check_replica_order` passes it;
    [V, E, J] with `source`, int32 in 0 .. V-1, is an order per source. `capacity` is int32, slots per instance, as
    `check_capacity` passes it; below 0 counts as 0. `valid`: False is padding.

    "replicas" needs `num_devices` and `num_instances`, "reroute" needs `capacity`. `on_exhausted`, for a slot whose
    token finds no room anywhere: "overflow" (its best unselected expert, capacity ignored) or "drop". `axis_name`:
    inside `shard_map(check_vma=False)`, the mesh axis along which tokens are cut; the result is that of the uncut batch
    ("reroute" gathers the scores, "replicas" E counts). Raises ConfigError for arguments that do not fit; values in
    arrays are the host's to check."""
    if mode not in MODES or on_exhausted not in ON_EXHAUSTED or impl not in IMPLS:
        raise ConfigError(
            f"mode={mode!r}, on_exhausted={on_exhausted!r}, impl={impl!r}; they are one of {MODES}, one of "
            f"{ON_EXHAUSTED}, one of {IMPLS}"
        )
    _check_scores(select_scores, weight_scores, k, valid)
    if valid is None:
        valid = jnp.ones(select_scores.shape[0], bool)
    if mode == "replicas":
        _check_replicas_mode(replica_order, capacity, source, num_devices, num_instances, select_scores.shape[1])
        assert num_devices is not None and num_instances is not None  # checked
        ids = jnp.where(valid[:, None], lax.top_k(select_scores, k)[1], -1)
        instances = waterfill_replicas(
            ids, replica_order, num_devices=num_devices, num_instances=num_instances, axis_name=axis_name
        )
        assignment = Assignment(ids, instances, *[jnp.int32(0)] * 4)
    else:
        _refuse_sizes(num_devices, num_instances)
        inputs = _selection_inputs(select_scores, replica_order, capacity, source, valid, k, axis_name)
        num_instances = inputs.capacity.shape[0]
        assignment = _own_rows(
            _assign(impl, inputs, k, overflows=on_exhausted == "overflow"), valid.shape[0], axis_name
        )
    weights = weights_at(weight_scores, assignment.ids, renormalize=renormalize)
    counts = count_requests(
        jnp.where(assignment.instances < 0, num_instances, assignment.instances).reshape(-1), num_instances
    )
    dropped = jnp.sum(valid[:, None] & (assignment.ids < 0), dtype=jnp.int32)
    if axis_name is not None:
        counts, dropped = lax.psum((counts, dropped), axis_name)
    return Selection(
        assignment.ids,
        assignment.instances,
        weights,
        counts,
        assignment.rounds,
        assignment.replica_rounds,
        assignment.num_rerouted,
        assignment.num_overflowed,
        dropped,
    )


def weights_at(weight_scores: Float[Array, "N E"], ids: Int[Array, "N K"], *, renormalize: bool) -> Float[Array, "N K"]:
    """Give the scores at the ids, 0 at -1, float32; summed from the first slot to the last, so that a sum is the same
    everywhere."""
    wide = weight_scores.astype(jnp.float32)
    weights = jnp.where(ids < 0, 0, jnp.take_along_axis(wide, jnp.maximum(ids, 0), axis=1))
    if renormalize:
        total = functools.reduce(operator.add, (weights[:, slot] for slot in range(ids.shape[1])))
        weights = weights * (1 / (total + 1e-20))[:, None]  # XLA on CPU would make this of a division, too
    return weights


def _assign(impl: str, inputs: SelectionInputs, top_k: int, *, overflows: bool) -> Assignment:
    """Run the implementation that fits the platform, or the requested one."""

    def rounds(inputs: SelectionInputs) -> Assignment:
        return assign(inputs, choose_by_rounds, top_k, overflows=overflows)

    def native(inputs: SelectionInputs) -> Assignment:
        return native_selection(inputs, top_k, overflows=overflows)

    def pallas(inputs: SelectionInputs) -> Assignment:
        return assign(inputs, choose_by_tpu_kernel, top_k, overflows=overflows)

    num_tokens, num_experts = inputs.scores.shape
    in_vmem = fits(num_tokens, num_experts, top_k)
    if impl == "pallas" and not in_vmem:
        raise ConfigError(
            f"impl='pallas' holds {MAX_CELLS} scores and k up to {LANES}, not {list(inputs.scores.shape)} with "
            f"k={top_k}: use impl='auto'"
        )
    if impl == "native" and (reason := unavailable_reason()) is not None:
        raise ConfigError(f"impl='native' cannot run: {reason}; or use impl='auto'")
    if impl != "auto":
        return {"rounds": rounds, "native": native, "pallas": pallas}[impl](inputs)
    has_native = (
        jax.default_backend() == "cpu" and unavailable_reason() is None
    )  # no compiler is asked for where another device is meant
    tpu = pallas if in_vmem else rounds
    return lax.platform_dependent(inputs, cpu=native if has_native else rounds, tpu=tpu, default=rounds)


def native_selection(inputs: SelectionInputs, top_k: int, *, overflows: bool) -> Assignment:
    """Select one slot after another in C++, without rounds. The kernel refuses a table or a source out of range."""
    assert register_ffi_targets()
    slots, count = jax.ShapeDtypeStruct((inputs.scores.shape[0], top_k), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    run = jax.ffi.ffi_call("RexSelect", [slots, slots, count, count])
    parts = (inputs.scores, inputs.replica_order, inputs.capacity, inputs.source, inputs.valid)
    ids, instances, rerouted, overflowed = run(*parts, overflows=overflows)
    zero = jnp.int32(0)
    return Assignment(ids, instances, rerouted, overflowed, zero, zero)


def _selection_inputs(
    scores: Float[Array, "N E"],
    replica_order: Int[Array, "*V E J"],
    capacity: Int[Array, " I"] | None,
    source: Int[Array, " N"] | None,
    valid: Bool[Array, " N"],
    top_k: int,
    axis_name: str | None,
) -> SelectionInputs:
    """Check what "reroute" takes, and gather the tokens of the group."""
    if capacity is None:
        raise ConfigError(
            "mode='reroute' needs capacity, int32 [I]: make it with expert_capacity(num_valid, k, num_instances, "
            "factor)"
        )
    num_experts, num_tokens = (
        scores.shape[1],
        scores.shape[0] if axis_name is None else scores.shape[0] * lax.axis_size(axis_name),
    )
    _check_int32("capacity", capacity, (capacity.shape[0],) if capacity.ndim == 1 else ("I",))
    _check_int32("replica_order", replica_order, (*replica_order.shape[:-2], num_experts, *replica_order.shape[-1:]))
    if replica_order.ndim not in (2, 3) or (replica_order.ndim == 3) != (source is not None):
        raise ConfigError(
            f"replica_order has {replica_order.ndim} axes and source is {'None' if source is None else 'given'}; [E, "
            "J] goes without "
            "source, and [V, E, J] with the source of each token"
        )
    if source is not None:
        _check_int32("source", source, valid.shape)
    if (max(num_experts, capacity.shape[0]) + 1) * num_tokens * top_k > jnp.iinfo(jnp.int32).max:
        raise ConfigError(
            f"{num_tokens} tokens of {top_k} slots over {num_experts} experts are counted in int32: select in smaller "
            "batches"
        )
    parts = (scores, jnp.zeros(valid.shape, jnp.int32) if source is None else source, valid)
    if axis_name is not None:
        parts = lax.all_gather(parts, axis_name, tiled=True)
    wide = parts[0].astype(jnp.float32)
    return SelectionInputs(
        scores=jnp.where(jnp.isnan(wide), -jnp.inf, wide),
        replica_order=replica_order.reshape(-1, *replica_order.shape[-2:]),
        capacity=jnp.clip(capacity, 0, num_tokens * top_k),
        source=parts[1],
        valid=parts[2],
    )


def _own_rows(assignment: Assignment, num_tokens: int, axis_name: str | None) -> Assignment:
    """This device's tokens of a group's result."""
    if axis_name is None:
        return assignment
    first = lax.axis_index(axis_name) * num_tokens
    ids, instances = (
        lax.dynamic_slice_in_dim(rows, first, num_tokens) for rows in (assignment.ids, assignment.instances)
    )
    return dataclasses.replace(assignment, ids=ids, instances=instances)


def _check_scores(
    select_scores: Float[Array, "N E"], weight_scores: Float[Array, "N E"], k: int, valid: Bool[Array, " N"] | None
) -> None:
    for name, scores in (("select_scores", select_scores), ("weight_scores", weight_scores)):
        if (
            scores.ndim != 2
            or scores.size == 0
            or scores.shape != select_scores.shape
            or not jnp.issubdtype(scores.dtype, jnp.floating)
        ):
            raise ConfigError(
                f"{name} is {scores.dtype}{list(scores.shape)}; both scores are floats of one shape [N, E], N and E at "
                "least 1"
            )
    if not 1 <= k <= select_scores.shape[1]:
        raise ConfigError(f"k={k}; a token selects 1 to E={select_scores.shape[1]} different experts")
    if valid is not None and (valid.dtype != jnp.bool_ or valid.shape != select_scores.shape[:1]):
        raise ConfigError(
            f"valid is {valid.dtype}{list(valid.shape)}; it is bool [{select_scores.shape[0]}], False for padding"
        )


def _check_replicas_mode(
    replica_order: Int[Array, "E J"],
    capacity: object,
    source: object,
    num_devices: int | None,
    num_instances: int | None,
    num_experts: int,
) -> None:
    if capacity is not None or source is not None:
        raise ConfigError(
            "mode='replicas' fills replicas by load, without capacity and source; leave them out, or use mode='reroute'"
        )
    if num_devices is None or num_instances is None:
        raise ConfigError(
            "mode='replicas' needs num_devices and num_instances: instance i lives on device i // (instances / devices)"
        )
    _check_int32("replica_order", replica_order, (num_experts, *replica_order.shape[-1:]))


def _refuse_sizes(num_devices: int | None, num_instances: int | None) -> None:
    if num_devices is not None or num_instances is not None:
        raise ConfigError(
            "num_devices and num_instances are of mode='replicas'; 'reroute' has an instance for each entry of capacity"
        )


def _check_int32(name: str, array: Int[Array, "..."], shape: tuple[int | str, ...]) -> None:
    if array.dtype != jnp.int32 or array.shape != shape:
        raise ConfigError(
            f"{name} is {array.dtype}{list(array.shape)}; it is int32{list(shape)}: see check_replica_order, "
            "check_capacity"
        )
