"""Weights whose last dimension is no multiple of a TPU's lanes: placed in the order of their dimensions, no program
copies them, and the loader fills them in place. Elsewhere nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, SingleDeviceSharding

from routed_experts.models.base.weight_format import format_of, placed, shape_of, weight_format
from routed_experts.models.loading.weight_loader import pieces_writer
from support.tpu_aot import REPLICATED, tpu_mesh, without_compilation_cache
from support.tpu_programs import reordered_weights

S = jax.ShapeDtypeStruct
EMBED = (201_088, 2880)


def on_tpu(shape, *, devices=1, own_order=False):
    sharding = NamedSharding(tpu_mesh("v5e", (devices,)), REPLICATED)
    return S(shape, jnp.bfloat16, sharding=sharding if own_order else weight_format(sharding, shape))


def compile_for_tpu(jitted, *args):
    with without_compilation_cache():
        return jitted.lower(*args).compile()


@pytest.mark.tpu_aot
def test_rows_of_the_embedding_are_read_without_a_copy():
    take = jax.jit(lambda weights, ids: weights[ids])
    ids = S((16,), jnp.int32)
    assert reordered_weights(compile_for_tpu(take, on_tpu(EMBED), ids)) == []
    own = compile_for_tpu(take, on_tpu(EMBED, own_order=True), ids)
    assert len(reordered_weights(own)) == 1, "the compiler reads rows of its own order now; is the format still needed?"


@pytest.mark.tpu_aot
def test_the_order_is_asked_for_where_the_device_has_another():
    assert isinstance(weight_format(on_tpu(EMBED).sharding, EMBED), Format)
    assert (
        format_of(on_tpu(EMBED)).layout.major_to_minor == (0, 1) == shape_of(on_tpu(EMBED)).format.layout.major_to_minor
    )
    for shape in [(2880, 5120), (4, 2880, 32), (2880,)]:  # whole rows of lanes; less than one; one dimension
        assert weight_format(on_tpu(shape).sharding, shape) == on_tpu(shape).sharding
    assert not isinstance(weight_format(on_tpu(EMBED, devices=2).sharding, EMBED), Format)


@pytest.mark.tpu_aot
def test_the_loader_writes_into_such_a_weight_in_place():
    shape = (128, 2880, 2880)
    target, stack = on_tpu(shape), S((4, 2880, 2880), jnp.bfloat16)
    starts, count = S((4, 3), jnp.int32), S((), jnp.int32)
    program = compile_for_tpu(pieces_writer(target.format), target, stack, starts, count, True, (1, 2880, 2880))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 128 * 2880 * 2880
    assert memory.temp_size_in_bytes <= 2 * stack.size * 2
    assert program.output_formats[0].layout.major_to_minor == (0, 1, 2)


def test_elsewhere_an_array_stays_as_it_is():
    array = jnp.asarray(np.zeros((4, 200), np.float32))
    sharding = SingleDeviceSharding(jax.devices()[0])
    assert weight_format(sharding, array.shape) is sharding and format_of(array) == array.sharding
    assert placed(array) is array
    assert shape_of(array).sharding == array.sharding
