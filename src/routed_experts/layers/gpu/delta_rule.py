"""The gated delta rule on a GPU, with its short convolution: `delta_ragged` on the states of requests, in place.

The convolution is one kernel over tokens and heads. Where every request has one token, a second one updates and reads
each memory, some columns a block. Prompts take two: chunks of all requests are solved side by side (the inverse of
each chunk's unit triangular system, by doubling its diagonal blocks), then a block walks the chunks of a request with
some columns of its memory in registers. A decay is one number for a head, or one for each of its key channels: then
the ratio of two tokens is a number of each channel, too, and the products of keys are summed a token at a time.
Memories and sums are float32; products take three passes of TF32, whose errors are those of float32. Dims: N tokens, B
requests, C tokens of a chunk, Q channels, W width of the convolution, J key heads, H value heads, K key dim, V value
dim, T columns of a block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.delta_rule import DeltaInputs, DeltaState
from routed_experts.layers.gpu.blocks import product_width
from routed_experts.layers.gpu.delta_chunks import CHUNK, solve_chunks, walk_chunks
from routed_experts.layers.gpu.delta_conv import CONV_TILE, convolve
from routed_experts.layers.gpu.delta_sizes import COLUMNS, DeltaSizes
from routed_experts.layers.gpu.delta_step import delta_step
from routed_experts.layers.gpu.ragged import most_tiles


def gpu_delta(
    inputs: DeltaInputs,
    states: DeltaState,
    layer: Int[Array, ""],
    slots: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    query_starts: Int[Array, " B1"],
    *,
    chunk: int = CHUNK,
    interpret: bool = False,
) -> tuple[Float[Array, "N H V"], DeltaState]:
    """What was read, and the states after it, in place. Rows of padding are not written. As many tokens as requests
    are taken one by one."""
    shape, (num_tokens, num_requests) = inputs.shape, (inputs.mixed.shape[0], slots.shape[0])
    is_step, heads = num_tokens == num_requests, shape.value_heads
    sizes = DeltaSizes(shape=shape, exact=interpret, columns=min(COLUMNS, product_width(shape.value_dim)))
    tile = 1 if is_step else CONV_TILE
    scalars = [jnp.asarray(layer, jnp.int32).reshape(1), query_starts, slots, fresh]
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    queries_keys, values = pl.pallas_call(
        functools.partial(convolve, sizes=dataclasses.replace(sizes, tile=tile)),
        (float32((num_tokens, 2 * shape.key_heads, shape.key_dim)), float32((num_tokens, heads, shape.value_dim))),
        grid=(2 * shape.key_heads + heads, most_tiles(num_tokens, num_requests, tile)),
        compiler_params=plgpu.CompilerParams(num_warps=1 if is_step else 4, num_stages=1),
        interpret=interpret,
        name="delta_convolution",
    )(*scalars, inputs.mixed, inputs.kernel, states.conv)
    rates = [inputs.decay.astype(jnp.float32), inputs.beta.astype(jnp.float32)]
    if shape.by_channel:
        rates[0] = rates[0].reshape(num_tokens, heads, shape.key_dim)
    arrays = [*scalars, inputs.mixed, queries_keys, values, *rates]
    kernel = functools.partial(delta_step, sizes=sizes)
    if not is_step:
        sizes = dataclasses.replace(sizes, tile=chunk)
        kernel = functools.partial(walk_chunks, sizes=sizes)
        arrays.append(
            pl.pallas_call(
                functools.partial(solve_chunks, sizes=sizes),
                float32((num_tokens, 2 * heads if shape.by_channel else heads, chunk)),
                grid=(heads, most_tiles(num_tokens, num_requests, chunk)),
                compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
                interpret=interpret,
                name="delta_solve",
            )(query_starts, queries_keys, *rates)
        )
    leaves = [states.conv, states.recurrent]
    read, conv, recurrent = pl.pallas_call(
        kernel,
        (
            float32((num_tokens, heads, shape.value_dim)),
            *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
        ),
        grid=(sizes.blocks, heads, num_requests),
        input_output_aliases={len(arrays): 1, len(arrays) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="delta_step" if is_step else "delta_chunks",
    )(*arrays, *leaves)
    return read, DeltaState(conv, recurrent)
