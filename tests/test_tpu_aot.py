"""The TPU compiler and our reading of its output: each claim beside a program that breaks it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.compilation_cache import compilation_cache

from support.tpu_aot import assert_in_place, compile_tpu, pool_copies, tpu_mesh

pytestmark = [pytest.mark.tpu_aot, pytest.mark.parametrize("chip", ["v5e", "v6e"])]
MIB = 1 << 20


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def file_rows(pool, slots, rows):
    return pool.at[slots].set(rows)


def compile_filing(chip, pool, donate_argnums=(0,)):
    slots, rows = abstract((256,), jnp.int32), abstract((256, pool.shape[1]), pool.dtype)
    return compile_tpu(file_rows, pool, slots, rows, mesh=tpu_mesh(chip), donate_argnums=donate_argnums)


def test_int32_rows_of_128_are_filed_in_place(chip):
    pool = abstract((1_048_576, 128), jnp.int32)
    assert_in_place(compile_filing(chip, pool), pool, max_temp_bytes=MIB)


def test_packed_rows_are_copied_whole_although_they_are_aliased(chip):
    pool = abstract((1_048_576, 384), jnp.uint8)
    compiled = compile_filing(chip, pool)
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.size
    assert pool_copies(compiled, pool)
    with pytest.raises(AssertionError, match="copied whole"):
        assert_in_place(compiled, pool, max_temp_bytes=1 << 40)


def test_a_pool_that_is_not_donated_is_not_in_place(chip):
    pool = abstract((1_048_576, 128), jnp.int32)
    with pytest.raises(AssertionError, match="donate it"):
        assert_in_place(compile_filing(chip, pool, donate_argnums=()), pool, max_temp_bytes=1 << 40)


@pytest.fixture
def persistent_cache(tmp_path):
    """A persistent cache of this test's own that takes every program."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs

    def use(folder, seconds):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        compilation_cache.reset_cache()

    use(str(tmp_path), 0.0)
    yield tmp_path
    use(*before)


def test_a_program_compiles_twice_beside_a_persistent_cache(chip, persistent_cache):
    pool = abstract((1_048_576, 128), jnp.int32)
    assert_in_place(compile_filing(chip, pool), pool, max_temp_bytes=MIB)
    assert_in_place(compile_filing(chip, pool), pool, max_temp_bytes=MIB)
    assert not list(persistent_cache.iterdir())
    jax.jit(lambda x: x + 1).lower(abstract((8,), jnp.float32)).compile()
    assert list(persistent_cache.iterdir()), "everybody else's programs are cached again"


def test_a_program_too_large_for_hbm_is_refused(chip):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED.*HBM"):
        compile_tpu(lambda x: x * 2, abstract((1 << 20, 1 << 14), jnp.float32), mesh=tpu_mesh(chip))


def test_a_kernel_too_large_for_vmem_is_refused(chip):
    def double(x_ref, y_ref):
        y_ref[:8] = x_ref[:8] * 2  # of blocks that are whole arrays

    def whole_array_at_once(x):
        return pl.pallas_call(double, out_shape=abstract(x.shape, x.dtype), grid=(1,), interpret=False)(x)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)RESOURCE_EXHAUSTED.*vmem"):
        compile_tpu(whole_array_at_once, abstract((8_192, 1_024), jnp.float32), mesh=tpu_mesh(chip))
