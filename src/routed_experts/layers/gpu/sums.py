"""Sums over the inputs of one matrix inside a GPU kernel: rows times a block of columns, in float32.

A sum is made in steps. Of e4m3 codes a step is a part of a group of inputs, or some whole groups, each a product; of
codes of 4 bits (packed_codes.py) it is whole pairs of runs, and each run, or both of one group, is a product that is
scaled by itself. The sum of a group is float32, and so is the scale that it is multiplied by; codes of e2m1 may be
multiplied by their scales instead.

Dims: N rows, T rows of a block, I inputs, J groups of inputs, C columns of a block, R matrices of the stack."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero, power_of_two
from routed_experts.layers.gpu.operands import (
    Inputs,
    block_product,
    codes_product,
    decode,
    end_sums,
    is_in_parts,
    is_packed,
    load_block,
    load_codes,
    load_inverse,
    load_rows,
)
from routed_experts.layers.gpu.packed_codes import SCALED_UNIT, UNITS, times_scales, unpack_halves
from routed_experts.layers.gpu.scaled_rows import ScaledRows, power_of_rows
from routed_experts.layers.quantized import E2M1, QuantizedWeight, Weight, inputs_of_byte

FEWEST_ROWS = 8  # of a product on the tensor cores
UNROLLED_STEPS = 4  # of few rows; the loads of such steps are all on their way before the first one is multiplied


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Rows of x times one matrix of codes, for each of some sets of columns, as `sum_products` takes them."""

    x: Any
    weights: QuantizedWeight
    matrix: Array
    rows: Array
    row_mask: Array | None
    columns: tuple[Array, ...]
    real: Array | None
    interpret: bool


def part_unit(weights: Weight) -> int:
    """Inputs of which a part of a sum has a multiple."""
    if not isinstance(weights, QuantizedWeight):
        return 1
    return max(weights.group, 2 * weights.run) if is_packed(weights) else weights.group


def sum_products(
    x: Any,
    weights: Any,
    matrix: Array,
    rows: Array,
    row_mask: Array | None,
    columns: tuple[Array, ...],
    real: Array | None,
    *,
    inputs: Inputs,
    interpret: bool,
) -> list[Float[Array, "T C"]]:
    """Rows of x times one matrix, for each of some sets of columns; float32. `row_mask` [T, 1], `real` [1, C]. Fewer
    rows than a side of the tensor cores' product, which is 8, are multiplied without them."""
    block = _Block(x, weights, matrix, rows, row_mask, columns, real, interpret)
    if rows.shape[0] < FEWEST_ROWS:
        return _sum_few_rows(block, inputs)
    is_coded = isinstance(weights, QuantizedWeight)
    if is_packed(weights):
        return _sum_packed(block, inputs)
    size = min(inputs.size, weights.group) if is_coded else inputs.size
    size = math.gcd(size, x.part) if is_in_parts(x) else size
    assert size >= 16, (inputs, size)  # of a product on the tensor cores
    num_groups = math.gcd(inputs.size // size, pl.cdiv(inputs.length, size))  # of a step; 1 if not all have as many
    steps = pl.cdiv(inputs.length, num_groups * size)

    def load_scales(index: Any) -> tuple[list[Array], list[Array]]:
        """Those of a step: group by group, and for each set of columns; and of the rows' parts. None of numbers."""
        if not is_coded:
            return [], []
        first = jnp.minimum(index, steps - 1) * num_groups
        groups = [inputs.first(first + number, size, weights.group) for number in range(num_groups)]
        at = [_scales_at(weights, matrix, group, part[:, None]) for group in groups for part in columns]
        starts = [inputs.first(first + number, size) for number in range(num_groups)]
        inverses = [own for start in starts for own in load_inverse(x, rows, row_mask, start)]
        return [_load_scales(own, None if real is None else real.T) for own in at], inverses

    def step(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        # The compiler pipelines loads of a product's operands alone, so those of scales are a step ahead here.
        (sums, (scales, inverses)), following = carry, load_scales(index + 1)
        for group in range(num_groups):
            depth, deep = inputs.step(index * num_groups + group, size)
            own = load_rows(x, rows, depth, row_mask, deep, is_coded=is_coded)
            blocks = [load_block(weights, matrix, depth, part, deep, real, own.dtype) for part in columns]
            own_scales = scales[group * len(columns) :][: len(columns)]
            products = [block_product(own, *pair) for pair in itertools.zip_longest(blocks, own_scales)]
            if inverses:
                products = [product * inverses[group] for product in products]
            sums = tuple(total + part for total, part in zip(sums, products, strict=True))
        return sums, following

    shape = (rows.shape[0], columns[0].shape[0])
    zeros = jnp.zeros(shape[::-1] if is_coded else shape, jnp.float32)
    sums, _ = lax.fori_loop(0, steps, step, ((zeros,) * len(columns), load_scales(0)))
    return [end_sums(total, x, weights, rows, row_mask) for total in sums]


def _sum_packed(block: _Block, inputs: Inputs) -> list[Float[Array, "T C"]]:
    """The same with codes of 4 bits. A step is as many pairs of runs, up to the size that is asked for, as make steps
    of one length, so that no load needs a mask (1, 3 or 5 of the 45 pairs of 2880 inputs), and that are whole groups or
    a part of one. Rows of bfloat16 are multiplied by codes of e2m1 times their scales, which bfloat16 holds."""
    weights, columns, run = block.weights, block.columns, block.weights.run
    pair, is_rescaled = 2 * run, isinstance(block.x, ScaledRows)
    has_scaled_codes = weights.format == E2M1 and not is_rescaled and block.x.dtype == jnp.bfloat16
    unit = SCALED_UNIT if has_scaled_codes else UNITS[weights.format]
    sizes = [size for size in range(pair, max(inputs.size, pair) + 1, pair) if inputs.length % size == 0]
    size = max(size for size in sizes if 0 in (size % weights.group, weights.group % size))
    steps = inputs.length // size
    assert not is_in_parts(block.x) or block.x.part % run == 0, (block.x.part, run)
    is_whole = not is_in_parts(block.x) or block.x.part % pair == 0
    starts = (0,) if weights.group >= pair and is_whole else (0, run)  # in a pair, of sums with factors of their own
    column = None if block.real is None else block.real.T

    def load_scales(index: Any) -> tuple[list[Array], list[Array]]:
        """Those of a step: pair by pair, for each set of columns, and sum by sum; and of the rows' parts."""
        own = jnp.minimum(index, steps - 1)
        first, first_group = inputs.first(own, size), inputs.first(own, size, weights.group)
        scales = [
            _load_scales(
                _scales_at(weights, block.matrix, first_group + (offset + start) // weights.group, part[:, None]),
                column,
            )
            for offset in range(0, size, pair)
            for part in columns
            for start in starts
        ]
        offsets = [offset + start for offset in range(0, size, pair) for start in starts]
        inverses = [load_inverse(block.x, block.rows, block.row_mask, first + offset) for offset in offsets]
        return scales, [inverse for own_inverse in inverses for inverse in own_inverse]

    def products(runs: list[Array], codes: Array, scales: list[Array]) -> Iterator[Array]:
        """What a pair adds to the sums of a set of columns."""
        if has_scaled_codes:
            halves = times_scales(codes, scales, interpret=block.interpret)
            yield from (codes_product(own, half) for own, half in zip(runs, halves, strict=True))
            return
        halves = unpack_halves(codes, weights.format, interpret=block.interpret)
        both = [codes_product(own, half.astype(own.dtype)) for own, half in zip(runs, halves, strict=True)]
        sums = both if len(scales) == 2 else [both[0] + both[1]]
        yield from (own * scale for own, scale in zip(sums, scales, strict=True))

    def step(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        sums, following, (all_scales, inverses) = list(carry[0]), load_scales(index + 1), carry[1]
        scales = iter(all_scales)
        first, first_byte = inputs.first(index, size), inputs.first(index, size, 2)
        for offset in range(0, size, pair):
            runs = [
                load_rows(block.x, block.rows, depth, block.row_mask, None, is_coded=True)
                for depth in (first + offset + jnp.arange(run), first + offset + run + jnp.arange(run))
            ]
            depth = first_byte + offset // 2 + jnp.arange(run)
            stored = [load_codes(weights, block.matrix, depth, part, column) for part in columns]
            own = inverses[offset // pair * len(starts) :][: len(starts)]
            for part, codes in enumerate(stored):
                made = products(runs, codes, [next(scales) for _ in starts])
                for product, inverse in itertools.zip_longest(made, own):
                    sums[part] += product if inverse is None else product * inverse
        return tuple(sums), following

    zeros = jnp.zeros((columns[0].shape[0], block.rows.shape[0]), jnp.float32)
    sums, _ = lax.fori_loop(0, steps, step, ((zeros,) * len(columns), load_scales(0)))
    return [end_sums(_times(total, unit), block.x, weights, block.rows, block.row_mask) for total in sums]


def _sum_few_rows(block: _Block, inputs: Inputs) -> list[Float[Array, "T C"]]:
    """The same of few rows, number by number in float32, whose products are exact. Every code is decoded once. Rows of
    bfloat16 are scaled so that a step neither overflows nor underflows, in float32 too. A step may be all inputs:
    Triton overlaps no loads of steps without a product on the tensor cores, so all that a block has in flight is one
    step, or the steps of an unrolled loop."""
    weights, columns, x, row_mask = block.weights, block.columns, block.x, block.row_mask
    assert isinstance(weights, QuantizedWeight) and not isinstance(x, ScaledRows), "few rows are multiplied by codes"
    size = min(inputs.size, power_of_two(inputs.length))
    size = max(size, 2 * weights.run) if is_packed(weights) else size
    unit = UNITS.get(weights.format, 1.0)
    is_row = [jnp.arange(block.rows.shape[0]) == index for index in range(block.rows.shape[0])]
    row_ids = [jnp.sum(jnp.where(own, block.rows, 0)) for own in is_row]
    exists = [None if row_mask is None else jnp.sum((own & row_mask[:, 0]).astype(jnp.int32)) > 0 for own in is_row]
    real_column = None if block.real is None else block.real.T
    num_sums = len(_sums_of_step(weights, size)[0][1])

    def load_row(row: Array, is_real: Array | None, depth: Array, deep: Array | None) -> tuple[Array, Array | None]:
        """Inputs of a row [1, I], and what its sums are multiplied by."""
        own = load_or_zero(x.at[row, depth], combine_masks(is_real, deep)).astype(jnp.float32)
        power, inverse = power_of_rows(own) if x.dtype == jnp.bfloat16 else (None, None)
        return (own if power is None else own * power)[None, :], inverse

    def step(index: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        first, group = inputs.first(index, size), inputs.first(index, size, weights.group)
        code_depth, deep = inputs.step(index, size, inputs_of_byte(weights.format))
        mask = combine_masks(None if deep is None else deep[None, :], real_column)
        stored = [load_codes(weights, block.matrix, code_depth, part, mask) for part in columns]  # C bytes
        # All loads before the first conversion.
        parts = []
        for offsets, group_offsets in _sums_of_step(weights, size):
            groups = group + lax.div(group_offsets, weights.group)
            is_group = None if deep is None else (index * size + group_offsets < inputs.length)[None, :]
            at = [_scales_at(weights, block.matrix, groups[None, :], part[:, None]) for part in columns]
            scales = [_load_scales(own, combine_masks(is_group, real_column)) for own in at]  # C J
            parts.append((first + offsets, None if deep is None else index * size + offsets < inputs.length, scales))
        if is_packed(weights):
            codes = [unpack_halves(own, weights.format, interpret=block.interpret) for own in stored]
            codes = [[half.astype(jnp.float32) for half in own] for own in codes]
        else:
            codes = [[decode(own, mask, jnp.float32)] for own in stored]
        sums = []
        for row, is_real in zip(row_ids, exists, strict=True):
            own_rows = [load_row(row, is_real, depth, deep) for depth, deep, _ in parts]
            for part in range(len(columns)):
                terms = []
                for half, ((own, inverse), (_, _, scales)) in enumerate(zip(own_rows, parts, strict=True)):
                    term = _group_sums(codes[part][half] * own, num_sums) * scales[part]
                    terms.append(term if inverse is None else term * inverse)
                sums.append(functools.reduce(jnp.add, terms))
        return tuple(total + part for total, part in zip(totals, sums, strict=True))

    zeros, steps = jnp.zeros((columns[0].shape[0], num_sums), jnp.float32), pl.cdiv(inputs.length, size)
    totals = (zeros,) * (block.rows.shape[0] * len(columns))
    if steps <= UNROLLED_STEPS:
        totals = functools.reduce(lambda sums, index: step(index, sums), range(steps), totals)
    else:
        totals = lax.fori_loop(0, steps, step, totals)
    sums = [jnp.sum(_times(total, unit), axis=1)[None, :] for total in totals]  # 1 C, row by row
    return [_stack_rows(sums[part :: len(columns)], is_row) for part in range(len(columns))]


def _scales_at(weights: QuantizedWeight, matrix: Array, groups: Array, columns: Array) -> Any:
    """The scales of groups and columns, by reference."""
    scales: Any = weights.scales
    return scales.at[matrix, groups, columns if weights.span == 1 else lax.div(columns, weights.span)]


def _load_scales(at: Any, mask: Array | None) -> Float[Array, "..."]:
    """Scales, in float32."""
    return load_or_zero(at, mask).astype(jnp.float32)


def _sums_of_step(weights: QuantizedWeight, size: int) -> list[tuple[Int[Array, " I"], Int[Array, " J"]]]:
    """The inputs of a step, from its first one on, that are decoded together, and the first one of each of their sums:
    all, by group; or the first and the second runs of pairs, by run."""
    if not is_packed(weights):
        count = max(size // weights.group, 1)
        return [(jnp.arange(size), jnp.arange(count) * weights.group)]
    run, byte, pair = weights.run, jnp.arange(size // 2), jnp.arange(size // (2 * weights.run)) * 2 * weights.run
    inputs = byte // run * 2 * run + byte % run
    return [(inputs + half, pair + half) for half in (0, run)]


def _group_sums(products: Float[Array, "C I"], num_groups: int) -> Float[Array, "C J"]:
    """The sum of each group of a step."""
    columns, size = products.shape
    return jnp.sum(products.reshape(columns, num_groups, size // num_groups), axis=2)


def _times(sums: Array, unit: float) -> Array:
    """Sums of codes in that unit."""
    return sums if unit == 1 else sums * unit


def _stack_rows(parts: list[Float[Array, "1 C"]], is_row: list[Array]) -> Float[Array, "T C"]:
    """One array of the rows; a kernel has no concatenation."""
    if len(parts) == 1:
        return parts[0]
    return functools.reduce(
        jnp.add, [jnp.where(own[:, None], part, 0.0) for own, part in zip(is_row, parts, strict=True)]
    )
