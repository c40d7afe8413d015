"""Products of few rows with experts' weights that stay e4m3 codes, over the product with bfloat16 weights, on a GPU.

    python benchmarks/quantized_product.py [--experts 8 82 126] [--rounds 9]
    python benchmarks/quantized_product.py --small      # a CPU, a small matrix, Pallas' interpreter: are sums right

The first product of Qwen3-30B-A3B's experts (hidden 2048, gate and up together 1536 wide): 16 rows times each of some
of 128 experts. Each call takes the experts of another of 5 layers, so no weight is in a cache. A code of e4m3 is exact
in bfloat16 and float16. Its scale, one a block of 128 x 128, multiplies a sum over 128 inputs in float32, so no weight
is rounded.

bfloat16: plain weights [I, O], as they are served today. Others hold codes: [I, O], or [O, I], which is the order of
checkpoints. There the weights are the left operand: Triton decodes them in registers and need not write them back to
shared memory. to float16: one instruction decodes two codes. Rows are float16 as well, each scaled by a power of two
so that its largest number is in [2^14, 2^15). A number of a row loses bits only below 2^-28 of the largest. The time
of this scaling is not counted.

Tiles are chosen by a short run each; then all variants take turns. us: median of the rounds. of bfloat16: median and
extremes of the rounds' ratios. error: largest difference from float64 on the same codes, over the largest result."""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, progress, write_result
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS, GROUP = 16, 128
REPEATS = 160  # calls of one timed program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Dims of the product: L layers, E experts of a layer, I inputs, O outputs. Five layers: Pallas' Triton lowering
    addresses arrays of up to 4 GiB with 32-bit offsets of elements, and codes of 3.2 GB ended in illegal reads."""

    layers: int = 5
    experts: int = 128
    inputs: int = 2048
    outputs: int = 1536


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Outputs of a block, groups of 128 inputs of a step, warps and stages of the Triton compiler."""

    out: int
    groups: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How weights are held and multiplied: `outputs_first` is the order [O, I]; `dtype` is that of the operands."""

    codes: bool
    outputs_first: bool
    dtype: Any


VARIANTS = {
    "bfloat16": Variant(codes=False, outputs_first=False, dtype=jnp.bfloat16),
    "[I, O]": Variant(codes=True, outputs_first=False, dtype=jnp.bfloat16),
    "[O, I]": Variant(codes=True, outputs_first=True, dtype=jnp.bfloat16),
    "[O, I] to float16": Variant(codes=True, outputs_first=True, dtype=jnp.float16),
}
TILES = (
    Tile(128, 1, 4, 3),
    Tile(128, 1, 8, 4),
    Tile(64, 1, 4, 3),
    Tile(64, 1, 4, 5),
    Tile(64, 1, 2, 4),
    Tile(32, 1, 2, 4),
    Tile(32, 1, 2, 6),
    Tile(32, 2, 2, 3),
    Tile(32, 2, 4, 3),
)


def multiply(expert_ids: Any, x: Any, weights: Any, scales: Any, out: Any, *, variant: Variant, tile: Tile) -> None:
    """Block (c, i): tile c of the outputs of the i-th expert, [16, out] in float32."""
    chunk, expert = pl.program_id(0), expert_ids[pl.program_id(1)]
    columns, rows = chunk * tile.out + jnp.arange(tile.out), jnp.arange(ROWS)

    def group_sum(group: Array) -> Array:
        depth = group * GROUP + jnp.arange(GROUP)
        left = plgpu.load(x.at[rows[:, None], depth[None, :]])
        if variant.outputs_first:
            right = plgpu.load(weights.at[expert, columns[:, None], depth[None, :]]).astype(variant.dtype)
            total = jnp.dot(right, left.T, preferred_element_type=jnp.float32)
        else:
            right = plgpu.load(weights.at[expert, depth[:, None], columns[None, :]]).astype(variant.dtype)
            total = jnp.dot(left, right, preferred_element_type=jnp.float32)
        return total * scales[expert, group, chunk * tile.out // GROUP] if variant.codes else total

    def step(index: Array, total: Array) -> Array:
        for part in range(tile.groups):
            total = total + group_sum(index * tile.groups + part)
        return total

    shape = (tile.out, ROWS) if variant.outputs_first else (ROWS, tile.out)
    total = lax.fori_loop(0, x.shape[1] // (GROUP * tile.groups), step, jnp.zeros(shape, jnp.float32))
    total = total.T if variant.outputs_first else total
    plgpu.store(out.at[pl.program_id(1), rows[:, None], columns[None, :]], total)


def product(
    expert_ids: Array, x: Array, weights: Array, scales: Array, *, variant: Variant, tile: Tile, outputs: int
) -> Array:
    """[experts met, 16, O], float32."""
    met = expert_ids.shape[0]
    return pl.pallas_call(
        functools.partial(multiply, variant=variant, tile=tile),
        jax.ShapeDtypeStruct((met, ROWS, outputs), jnp.float32),
        grid=(outputs // tile.out, met),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=jax.default_backend() == "cpu",
        name="quantized_product",
    )(expert_ids, x, weights, scales)


def scale_rows(x: Array) -> tuple[Array, Array]:
    """Rows as float16, each times the power of two that takes its largest number to [2^14, 2^15); and its inverse."""
    _, exponents = jnp.frexp(jnp.max(jnp.abs(x.astype(jnp.float32)), -1, keepdims=True))
    factors = jnp.ldexp(jnp.float32(1), 15 - exponents)
    return (x.astype(jnp.float32) * factors).astype(jnp.float16), 1 / factors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Arrays of all variants: weights [LE, I, O] and [LE, O, I], scales [LE, I/128, O/128], rows [16, I]."""

    weights: dict[str, Array]
    scales: Array
    rows: Array


def make_operands(sizes: Sizes) -> Operands:
    """Random codes without NaN, scales of 1e-4 to 2e-4, and rows of a normal distribution."""
    codes_key, scales_key, rows_key = jax.random.split(jax.random.key(0), 3)
    count = sizes.layers * sizes.experts
    codes = jax.random.randint(codes_key, (count, sizes.inputs, sizes.outputs), 0, 256, jnp.uint8)
    codes = lax.bitcast_convert_type(jnp.where(codes & 127 == 127, jnp.uint8(0), codes), jnp.float8_e4m3fn)
    grid = (count, sizes.inputs // GROUP, sizes.outputs // GROUP)
    swapped = jnp.swapaxes(codes, 1, 2)
    held = {name: swapped if variant.outputs_first else codes for name, variant in VARIANTS.items()}
    return Operands(
        weights=held | {"bfloat16": codes.astype(jnp.bfloat16)},
        scales=jax.random.uniform(scales_key, grid, jnp.float32, 1e-4, 2e-4),
        rows=jax.random.normal(rows_key, (ROWS, sizes.inputs), jnp.bfloat16),
    )


def errors(operands: Operands, sizes: Sizes, tile: Tile) -> dict[str, float]:
    """Each variant's largest difference from float64, over the largest result, on four experts. The plain one is
    compared without scales."""
    chosen = jnp.asarray([1, 3, 0, 2], jnp.int32)
    codes = np.asarray(operands.weights["[I, O]"][chosen].astype(jnp.float32), np.float64)
    scales = np.asarray(operands.scales[chosen], np.float64).repeat(GROUP, 1).repeat(GROUP, 2)
    found = {}
    for name, variant in VARIANTS.items():
        rows, inverse = scale_rows(operands.rows) if variant.dtype == jnp.float16 else (operands.rows, jnp.ones(()))
        result = product(
            chosen, rows, operands.weights[name], operands.scales, variant=variant, tile=tile, outputs=sizes.outputs
        )
        numbers = codes * scales if variant.codes else codes
        expected = np.einsum("ni,eio->eno", np.asarray(operands.rows.astype(jnp.float32), np.float64), numbers)
        found[name] = float(np.abs(np.asarray(result * inverse, np.float64) - expected).max() / np.abs(expected).max())
    return found


def timed_program(name: str, tile: Tile, operands: Operands, chosen: Array, sizes: Sizes) -> Callable[[], float]:
    """A function that runs REPEATS products one after another and returns the seconds of one. It is compiled."""
    variant = VARIANTS[name]

    @jax.jit
    def repeat(rows: Array, weights: Array, scales: Array) -> Array:
        def step(index: Array, rows: Array) -> Array:
            result = product(chosen[index], rows, weights, scales, variant=variant, tile=tile, outputs=sizes.outputs)
            return rows + (result[0, :, :1] * 1e-30).astype(rows.dtype)  # the next product waits for this one

        return lax.fori_loop(0, REPEATS, step, rows)

    rows = scale_rows(operands.rows)[0] if variant.dtype == jnp.float16 else operands.rows

    def seconds() -> float:
        start = time.perf_counter()
        repeat(rows, operands.weights[name], operands.scales).block_until_ready()
        return (time.perf_counter() - start) / REPEATS

    seconds()
    return seconds


def compare(
    met: int, operands: Operands, sizes: Sizes, rounds: int, found: dict[str, float]
) -> list[dict[str, object]]:
    """Rows of the table for this number of experts met."""
    noise = np.random.default_rng(met)
    layers = [
        noise.choice(sizes.experts, met, replace=False) + sizes.experts * (i % sizes.layers) for i in range(REPEATS)
    ]
    chosen = jnp.asarray(np.stack(layers), jnp.int32)
    best: dict[str, tuple[Tile, Callable[[], float]]] = {}
    for name in VARIANTS:
        programs = {tile: timed_program(name, tile, operands, chosen, sizes) for tile in TILES}
        times = {tile: min(program() for _ in range(3)) for tile, program in programs.items()}
        tile = min(times, key=times.__getitem__)
        best[name] = (tile, programs[tile])
        progress(f"{met} experts, {name}: {tile}")
    runs = [{name: program() for name, (_, program) in best.items()} for _ in range(rounds)]
    table = []
    for name, (tile, _) in best.items():
        middle = statistics.median(run[name] for run in runs)
        ratios = sorted(run["bfloat16"] / run[name] for run in runs)
        size = met * sizes.inputs * sizes.outputs * operands.weights[name].dtype.itemsize
        table.append(
            {
                "experts": met,
                "weights": name,
                "us": middle * 1e6,
                "TB/s": size / middle / 1e12,
                "of bfloat16": f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
                "error": found[name],
                "tile": str(dataclasses.astuple(tile)),
            }
        )
    return table


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 82, 126])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not args.small and jax.default_backend() != "gpu":
        parser.error("this needs a GPU; --small runs on a CPU")
    sizes = Sizes(layers=1, experts=4, inputs=256, outputs=256) if args.small else Sizes()
    operands = make_operands(sizes)
    found = errors(operands, sizes, Tile(32, 2, 2, 3))
    if args.small:
        rows: list[dict[str, object]] = [{"weights": name, "error": error} for name, error in found.items()]
    else:
        rows = [row for met in args.experts for row in compare(met, operands, sizes, args.rounds, found)]
    print_table(rows)
    print(write_result("quantized_product_h200", rows))


if __name__ == "__main__":
    main()
