"""Writes of keys and values, or of latent rows, to their slots of the paged pool, in place. Padding tokens write
nothing. Dims: N tokens, B requests, L layers, P pages, G kv heads, C head dim, X rows of a slot, T tokens of a
block."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.kv_format import KVScales, to_stored


def batch_arrays(batch: PagedBatch) -> list[Array]:
    """What TokenSlots reads of a batch."""
    return [batch.positions, batch.token_rows, batch.valid, batch.page_table]


def scale_arrays(scales: KVScales) -> list[Array]:
    """A kernel's inputs for the scales of a pool of codes: [L, 2] of keys and values, and the layer [1]."""
    return [scales.values, jnp.asarray(scales.layer, jnp.int32).reshape(1)]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSlots:
    """Inside a kernel: the slots of a block of tokens; only those of real tokens are written."""

    page: Int[Array, " T"]
    offset: Int[Array, " T"]  # in the page
    is_valid: Bool[Array, " T"]

    @staticmethod
    def of(tokens: Int[Array, " T"], pool: Any, first: Int[Array, ""], batch: list[Any]) -> "TokenSlots":
        """`first`: the layer's first page, `batch`: references to `batch_arrays`."""
        positions, token_rows, valid, table = batch
        num_tokens, page_size = positions.shape[0], pool.shape[1]
        is_valid = plgpu.load(valid.at[tokens], mask=tokens < num_tokens, other=False)
        position = plgpu.load(positions.at[tokens], mask=is_valid, other=0)
        request = plgpu.load(token_rows.at[tokens], mask=is_valid, other=0)
        page = plgpu.load(table.at[request, position // page_size], mask=is_valid, other=0)
        return TokenSlots(jnp.where(is_valid, first + page, pool.shape[0]), position % page_size, is_valid)

    def store(self, pool: Any, value: Float[Array, "T C"], row: Array | int, lanes: Int[Array, " C"], end: int) -> None:
        """Store `value` [T C] in the numbers `lanes`, as far as they are below `end`, of row `row` of the slots."""
        plgpu.store(
            pool.at[self.page[:, None], self.offset[:, None], row, lanes[None, :]],
            to_stored(value, pool.dtype),
            mask=self.is_valid[:, None] & (lanes < end)[None, :],
        )


def _write(*refs: Any, rows: int) -> None:
    """Block (row of a slot, tokens)."""
    (first_page, *sources), batch, (_, pool) = refs[:-6], list(refs[-6:-2]), refs[-2:]
    row, tokens = pl.program_id(0), pl.program_id(1) * rows + jnp.arange(rows)
    num_tokens, dim = sources[0].shape[0], sources[0].shape[2]
    lanes = jnp.arange(power_of_two(dim))
    mask = (tokens < num_tokens)[:, None] & (lanes < dim)[None, :]

    def copy(source: Any, head: Array) -> None:
        value = plgpu.load(source.at[tokens[:, None], head, lanes[None, :]], mask=mask, other=0.0)
        TokenSlots.of(tokens, pool, first_page[0], batch).store(pool, value, row, lanes, dim)

    if len(sources) == 1:
        copy(sources[0], row)
        return
    for index, source in enumerate(sources):
        pl.when(row % 2 == index)(functools.partial(copy, source, row // 2))


def gpu_write(
    pool: Float[Array, "LP page X C"],
    keys: Float[Array, "N G C"],
    values: Float[Array, "N G C"] | None,
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    interpret: bool = False,
) -> Float[Array, "LP page X C"]:
    """Keys and values to their slots, or latent rows where there are no values. Scales of a pool of codes have divided
    them."""
    sources = [keys] if values is None else [keys, values]
    rows = 1 if keys.shape[0] <= 64 else 16
    inputs = [jnp.asarray(first_page, jnp.int32).reshape(1), *sources, *batch_arrays(batch), pool]
    return pl.pallas_call(
        functools.partial(_write, rows=rows),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid=(pool.shape[2], pl.cdiv(keys.shape[0], rows)),
        input_output_aliases={len(inputs) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1 if rows == 1 else 4, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(*inputs)
