"""Multi-head latent attention on TPU (DeepSeek-V2, section 2.1.2, "absorbed"): rows are written to their slots by one
kernel, and read by that of attention.py, in which all heads share a row that is key and value.

A row of half precision shares 32-bit words with its neighbour, so that no row can be copied alone: the kernel fetches
the tile of 8 slots that holds it, puts in the new rows and copies the tile back. A tile belongs to one request, and
tiles of tokens run in order. Dims: N tokens, H heads, R rank of a row, P rotary dims beside it, C width of the pool's
rows, K key dim without positions, V value dim, F frequencies, T tokens of a tile, J slots of a tile of the pool."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import LatentQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import RotarySpec
from routed_experts.layers.tpu.attention import ragged_attention

TOKEN_TILE = 64
SLOTS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """The kernel's arrays: scalars, new rows, the pool in HBM, and scratch."""

    first_page: Any
    query_starts: Any
    positions: Any
    token_rows: Any
    page_table: Any
    rows: Any  # [T C]
    pool_before: Any  # the same memory as `pool`
    pool: Any  # [LP page C]
    wide: Any  # [J+T+.. C], float32: whole tiles, whose rows can be turned
    slots: Any  # [T J C]
    begins: Any  # [T]: first token of each tile of slots, in this tile of tokens
    semaphore: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Tokens of one request in one tile of slots: [begin, end) in the tile of tokens, from `row` on in the slots."""

    begin: Any
    end: Any
    row: Any
    page: Any
    offset: Any


def attend_latent(
    projected: LatentQKV,
    pool: Float[Array, "LP page 1 C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N H V"], Float[Array, "LP page 1 C"]]:
    """Write the new rows and attend to those of each request; between the projections of a layer."""
    rank, heads = projected.norm.shape[0], projected.queries.shape[1]
    rotary = RotarySpec(inverse=(0.0,) * projected.angles[0].shape[1], interleaved=projected.interleaved)
    key_dim = projected.queries.shape[2] - 2 * len(rotary.inverse)
    row = rms_norm(projected.compressed[:, :rank], projected.norm, eps=projected.eps)
    rotated = rotary.apply(projected.compressed[:, None, rank:], projected.angles)
    rows = jnp.concatenate([row[:, None], rotated], axis=-1)
    up = projected.up.reshape(rank, heads, -1)
    absorbed = jnp.einsum("nhc,rhc->nhr", projected.queries[..., :key_dim], up[..., :key_dim])
    queries = jnp.concatenate([absorbed, rotary.apply(projected.queries[..., key_dim:], projected.angles)], axis=-1)
    first_page = layer * num_pages
    pool = write_rows(pool, rows, first_page, batch, interpret=interpret)
    features = AttentionFeatures(latent=rank, scale=projected.scale)
    mixed = ragged_attention(queries, pool, first_page, batch, features, interpret=interpret)
    return jnp.einsum("nhr,rhv->nhv", mixed, up[..., key_dim:]), pool


def write_rows(
    pool: Float[Array, "LP page 1 C"],
    rows: Float[Array, "N 1 C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    interpret: Any = False,
) -> Float[Array, "LP page 1 C"]:
    """Write each token's row at its position's slot, zeros beside a row that is narrower than the pool. Padding tokens
    write nothing."""
    num_pages, page_size, _, width = pool.shape
    num_tokens, slots = rows.shape[0], SLOTS if page_size % SLOTS == 0 else page_size
    tile = min(num_tokens, TOKEN_TILE)
    flat = pool.reshape(num_pages, page_size, width)
    outside = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=[pl.BlockSpec((tile, width), lambda index, *_: (index, 0)), outside],
            out_specs=outside,
            scratch_shapes=[
                pltpu.VMEM((_window(tile + slots) + _window(slots), width), jnp.float32),
                pltpu.VMEM((tile, slots, width), pool.dtype),
                pltpu.SMEM((tile,), jnp.int32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, pool.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_rows",
    )(
        first_page.reshape(1),
        batch.query_starts,
        batch.positions,
        batch.token_rows,
        batch.page_table,
        jnp.pad(rows[:, 0], ((0, 0), (0, width - rows.shape[2]))).astype(pool.dtype),
        flat,
    )
    return written.reshape(pool.shape)


def _window(rows: int) -> int:
    """Whole tiles of rows that hold `rows` from any row on."""
    return -(-rows // SLOTS) * SLOTS + SLOTS


def _kernel(*refs: Any) -> None:
    """One tile of tokens: all tiles of slots are fetched, filled, and copied back."""
    arrays = _Refs(**dict(zip((field.name for field in dataclasses.fields(_Refs)), refs, strict=True)))
    tile, slots = arrays.rows.shape[0], arrays.slots.shape[1]
    start = pl.program_id(0) * tile
    count = jnp.clip(arrays.query_starts[arrays.query_starts.shape[0] - 1] - start, 0, tile)
    arrays.wide[pl.ds(slots, tile), :] = arrays.rows[...].astype(jnp.float32)

    def copy(index: Int[Array, ""], run: _Run, *, back: bool) -> Any:
        inside, outside = arrays.slots.at[index], arrays.pool.at[run.page, pl.ds(run.offset, slots)]
        return pltpu.make_async_copy(*((inside, outside) if back else (outside, inside)), arrays.semaphore)

    def fetch(state: tuple[Int[Array, ""], Int[Array, ""]]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        index, begin = state
        arrays.begins[index] = begin
        run = _run_at(arrays, begin, start, count)
        copy(index, run, back=False).start()
        return index + 1, run.end

    num_runs, _ = lax.while_loop(lambda state: state[1] < count, fetch, (jnp.int32(0), jnp.int32(0)))

    def each(act: Any) -> None:
        def body(index: Int[Array, ""], _: None) -> None:
            act(index, _run_at(arrays, arrays.begins[index], start, count))

        lax.fori_loop(0, num_runs, body, None)

    def fill(index: Int[Array, ""], run: _Run) -> None:
        first = slots + run.begin - run.row
        window = arrays.wide[pl.ds(pl.multiple_of(first - lax.rem(first, SLOTS), SLOTS), _window(slots)), :]
        rows = pltpu.roll(window, lax.rem(_window(slots) - lax.rem(first, SLOTS), _window(slots)), axis=0)[:slots]
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        is_new = (row >= run.row) & (row < run.row + run.end - run.begin)
        merged = jnp.where(is_new, rows, arrays.slots[index].astype(jnp.float32))
        arrays.slots[index] = merged.astype(arrays.slots.dtype)
        copy(index, run, back=True).start()

    each(lambda index, run: copy(index, run, back=False).wait())
    each(fill)
    each(lambda index, run: copy(index, run, back=True).wait())


def _run_at(refs: _Refs, begin: Int[Array, ""], start: Int[Array, ""], count: Int[Array, ""]) -> _Run:
    """The run that begins with token `begin` of the tile."""
    slots, page_size = refs.slots.shape[1], refs.pool.shape[1]
    request, position = refs.token_rows[start + begin], refs.positions[start + begin]
    in_page = lax.rem(position, page_size)
    row = lax.rem(in_page, slots)
    end = jnp.minimum(jnp.minimum(begin + slots - row, refs.query_starts[request + 1] - start), count)
    page = refs.first_page[0] + refs.page_table[request, lax.div(position, page_size)]
    return _Run(begin=begin, end=end, row=row, page=page, offset=pl.multiple_of(in_page - row, slots))
