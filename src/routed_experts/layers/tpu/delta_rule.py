"""The gated delta rule on TPU, on the states of all requests in place.

A request of one token is a step of one kernel: some heads of its state are fetched by its slot, corrected, read and
written back, once each. Heads are summed over in float32, without the matrix unit, which would round. Requests of
several tokens run chunk by chunk, in the kernel of delta_chunks.py. Heads that are no whole rows of lanes, or have a
decay for each key channel, run as array code (layers/delta_rule.py). Dims: N tokens, B requests, L layers, S
slots, Q channels of the convolution, W its width, H value heads, K key dim, V value dim, J heads of a grid step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.delta_rule import DeltaInputs, DeltaState, convolve_step, run_chunks
from routed_experts.layers.tpu import delta_chunks

HEADS = 8  # of a grid step: whole tiles, where H is a multiple


def recur(
    inputs: DeltaInputs,
    states: DeltaState,
    layer: Int[Array, ""],
    slots: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    query_starts: Int[Array, " B1"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N H V"], DeltaState]:
    """`delta_ragged` on the states [L, S, ...] of a layer: what each token read, and all states. Requests that start
    `fresh` read no state; those without a token keep theirs. The numbers of a request's last inputs may have other
    dims, which fill tiles."""
    layer, num_tokens, shape = jnp.asarray(layer, jnp.int32), inputs.mixed.shape[0], inputs.shape
    lengths = query_starts[1:] - query_starts[:-1]
    single, at = lengths == 1, jnp.where(lengths == 1, query_starts[:-1], 0)
    conv = states.conv[layer, slots].reshape(-1, shape.width - 1, shape.channels)
    conv = jnp.where(fresh[:, None, None], 0, conv)
    window, queries, keys, values = convolve_step(inputs.mixed[at], conv, inputs.kernel, shape)
    decay, beta = inputs.decay[at], inputs.beta[at]
    read, recurrent = _step(
        (queries, keys, values, jnp.exp(decay).reshape(*beta.shape, -1), beta[..., None]),
        states.recurrent,
        (layer.reshape(1), slots, single.astype(jnp.int32), fresh.astype(jnp.int32)),
        interpret=interpret,
    )
    outputs = jnp.zeros((num_tokens, shape.value_heads, shape.value_dim), jnp.float32)
    outputs = outputs.at[jnp.where(single, at, num_tokens)].set(read, mode="drop")
    if not delta_chunks.takes_chunks(shape):
        target_slots = jnp.where(single, slots, states.conv.shape[1])
        states = DeltaState(_with_conv(states.conv, layer, target_slots, window[:, 1:]), recurrent)
        return _run_chunks_plainly(inputs, states, (layer, slots, fresh, query_starts), outputs)
    target_slots = jnp.where(lengths > 0, slots, states.conv.shape[1])
    last = _last_inputs(inputs.mixed, conv, query_starts)

    def run(outputs: Array, recurrent: Array) -> tuple[Array, Array]:
        requests = (layer, slots, fresh, query_starts)
        return delta_chunks.run_chunks(inputs, conv, outputs, recurrent, requests, interpret=interpret)

    outputs, recurrent = lax.cond(jnp.any(lengths > 1), run, lambda *arrays: arrays, outputs, recurrent)
    return outputs, DeltaState(_with_conv(states.conv, layer, target_slots, last), recurrent)


def _with_conv(
    conv: Float[Array, "L S ..."], layer: Int[Array, ""], slots: Int[Array, " B"], rows: Float[Array, "B W1 Q"]
) -> Float[Array, "L S ..."]:
    """The last inputs of all requests, with these in their slots; a slot past the last is written nowhere."""
    return conv.at[layer, slots].set(rows.reshape(-1, *conv.shape[2:]), mode="drop")


def _last_inputs(
    mixed: Float[Array, "N Q"], conv: Float[Array, "B W1 Q"], query_starts: Int[Array, " B1"]
) -> Float[Array, "B W1 Q"]:
    """The last inputs of the convolution of each request: of its tokens, and before them those that it had."""
    early = conv.shape[1]
    index = (query_starts[1:] - query_starts[:-1])[:, None] + jnp.arange(early)  # among those it had, then its tokens
    old = jnp.take_along_axis(conv, jnp.minimum(index, early - 1)[..., None], axis=1)
    new = mixed[jnp.maximum(query_starts[:-1, None] + index - early, 0)].astype(conv.dtype)
    return jnp.where((index < early)[..., None], old, new)


def _run_chunks_plainly(
    inputs: DeltaInputs,
    states: DeltaState,
    requests: tuple[Int[Array, ""], Int[Array, " B"], Bool[Array, " B"], Int[Array, " B1"]],
    outputs: Float[Array, "N H V"],
) -> tuple[Float[Array, "N H V"], DeltaState]:
    """Requests of several tokens as array code, each on its own state."""
    layer, slots, fresh, query_starts = requests
    num_tokens = outputs.shape[0]
    chunk = min(inputs.shape.chunk, num_tokens)

    def read_slot(states: DeltaState, row: Int[Array, ""], number: Int[Array, ""]) -> DeltaState:
        own, begins = jax.tree.map(lambda leaf: leaf[layer, slots[row]], states), fresh[row] & (number == 0)
        own = dataclasses.replace(own, conv=own.conv.reshape(inputs.shape.width - 1, inputs.shape.channels))
        return jax.tree.map(lambda leaf: jnp.where(begins, 0, leaf), own)

    def write_slot(states: DeltaState, row: Int[Array, ""], own: DeltaState) -> DeltaState:
        return jax.tree.map(
            lambda leaf, part: leaf.at[layer, slots[row]].set(part.reshape(leaf.shape[2:])), states, own
        )

    padded = jnp.pad(outputs, ((0, chunk), (0, 0), (0, 0)))
    outputs, states = run_chunks(inputs, query_starts, padded, states, chunk=chunk, read=read_slot, write=write_slot)
    return outputs[:num_tokens], states


def _step(
    inputs: tuple[Float[Array, "B H X"], ...],
    states: Float[Array, "L S H K V"],
    scalars: tuple[Int[Array, "..."], ...],
    *,
    interpret: Any,
) -> tuple[Float[Array, "B H V"], Float[Array, "L S H K V"]]:
    """One token of each request: what it reads, and all states. `inputs`: queries, keys, values, what is left of the
    state (one number of a head, or one of each key channel), and learning rates. `scalars`: layer, slots, whether a
    request has one token, whether it starts anew."""
    _, _, heads, key_dim, value_dim = states.shape
    count = HEADS if heads % HEADS == 0 else heads
    requests = inputs[0].shape[0]

    def of_request(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, count, width), lambda request, group, *_: (request, group, 0))

    state = pl.BlockSpec(
        (1, 1, count, key_dim, value_dim),
        lambda request, group, layer, slots, *_: (layer[0], slots[request], group, 0, 0),
    )
    return pl.pallas_call(
        functools.partial(_kernel, heads=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(requests, heads // count),
            in_specs=[*[of_request(part.shape[2]) for part in inputs], state],
            out_specs=[of_request(value_dim), state],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((requests, heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={9: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="delta_step",
    )(*scalars, *inputs, states)


def _kernel(
    _: Any,
    __: Any,
    single_ref: Any,
    fresh_ref: Any,
    queries_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    left_ref: Any,
    rates_ref: Any,
    before_ref: Any,
    read_ref: Any,
    after_ref: Any,
    *,
    heads: int,
) -> None:
    """Some heads of one request."""
    request = pl.program_id(0)
    is_single, is_fresh = single_ref[request] != 0, fresh_ref[request] != 0
    by_channel = left_ref.shape[2] > 1
    queries, keys, *left = (ref[0].T for ref in (queries_ref, keys_ref, *((left_ref,) if by_channel else ())))  # [K J]
    reads = []
    for head in range(heads):
        before, row = before_ref[0, 0, head], slice(head, head + 1)
        query, key = queries[:, row], keys[:, row]
        state = jnp.where(is_fresh, 0.0, before) * (left[0][:, row] if by_channel else left_ref[0, row])
        wrong = (values_ref[0, row] - jnp.sum(state * key, axis=0, keepdims=True)) * rates_ref[0, row]
        state = state + key * wrong
        reads.append(jnp.sum(state * query, axis=0, keepdims=True))
        after_ref[0, 0, head] = jnp.where(is_single, state, before)
    read_ref[0] = jnp.concatenate(reads, axis=0)
