"""The kernels of a decode step that read matrices, with weights that are codes and with bfloat16, on a GPU.

    python benchmarks/quantized_layers.py [--batches 1 16 64 256] [--layers 24] [--rounds 7] [--profile 1 16]
    python benchmarks/quantized_layers.py --variants bfloat16 codes "few rows" --batches 1 2 4
    python benchmarks/quantized_layers.py --form e2m1 --group 32          # MXFP4; or --form int4
    python benchmarks/quantized_layers.py --tune --batches 16 [--products gate_up]   # other blocks
    python benchmarks/quantized_layers.py --small [--tune]        # a CPU, small layers, interpreted: does it run

Layers of Qwen3-30B-A3B's shapes as the fused steps run them: the projection of queries, keys and values, that of the
output, the residual stream and the router, the experts, the stream. Attention is left out: some of the first
projection's numbers are taken for its output. Weights are random, made on the device; those of bfloat16 are the codes'
numbers rounded. Both are in memory at once, so a card of 80 GB holds 24 layers; stacks of 2 to 4 GiB of codes, which
fewer layers have, are refused.

Variants: "bfloat16"; "codes", as served; "bfloat16 rows", where rows are not scaled to float16; "scaled rows", where
they are by a launch before each product, not by the kernel of the norm; "few rows", as that, and up to 4 rows are
multiplied without the tensor cores. A program runs some steps, each from other rows. Programs take turns. us a layer:
median of the rounds. of bfloat16: median and extremes of the rounds' ratios. floor: bytes of the matrices that a layer
reads over --bandwidth. distance: of the stream after one layer, from float32 on the same codes, in the 2-norm."""

import argparse
import collections
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, progress, write_result
from jax import Array, lax
from step import read_kernel_times

from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.expert_tiles import MoeTiles, Tile, tiles_for
from routed_experts.layers.gpu.linear import LinearTile, partial_sums, tile_for
from routed_experts.layers.gpu.moe import slot_outputs
from routed_experts.layers.gpu.packed_codes import RUNS
from routed_experts.layers.gpu.scaled_rows import Rows
from routed_experts.layers.gpu.warpgroups import find_warpgroups
from routed_experts.layers.kernels import FusedSteps, NormedRows, RouterBiases, RoutingSize, SlotOutputs, StreamNorm
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.moe import ExpertCall, tiled_experts
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.quantized import (
    CODE_DTYPES,
    E4M3,
    INT4,
    SPANS,
    QuantizedWeight,
    ScaledRows,
    Weight,
    inputs_of_byte,
    packed_run,
)
from routed_experts.layers.routing import RouterSpec, replay_topk

PLAIN, CODES, PLAIN_ROWS, SCALED, FEW = VARIANTS = "bfloat16", "codes", "bfloat16 rows", "scaled rows", "few rows"
SCALINGS = {PLAIN_ROWS: False, SCALED: True, FEW: True}
INTERPRET = jax.default_backend() == "cpu"
MOST_FEW_ROWS = 4
FEW_SLOTS = 32
PRODUCTS = ("gate_up", "down", "first", "out")
# Rows of a block (None: those of the table), outputs and inputs, warps, stages.
BLOCKS = (
    *((None, 32, 128, 2, stages) for stages in (4, 6)),
    *((None, 64, 128, 2, stages) for stages in (3, 4, 5)),
    *((None, 64, 128, 4, stages) for stages in (3, 4, 5)),
    (None, 64, 64, 2, 6),
    (None, 128, 64, 4, 4),
    (None, 128, 128, 4, 3),
    (None, 128, 128, 8, 3),
)
# Where an expert has few rows on average.
NARROW_BLOCKS = ((16, 16, 128, 1, 6), (8, 32, 128, 2, 5), (8, 64, 128, 2, 4), (8, 64, 128, 4, 4), (8, 128, 128, 4, 3))
# Without the tensor cores; rows None: those of the batch for projections, one for experts.
FEW_BLOCKS = (
    *((None, out, 2048, warps, 1) for out, warps in ((4, 4), (8, 8), (8, 4), (16, 8))),
    *((None, out, 1024, warps, 1) for out, warps in ((4, 2), (8, 4), (16, 8), (16, 4))),
    *((None, out, 256, warps, 1) for out, warps in ((16, 2), (32, 4), (16, 1))),
    (None, 16, 512, 4, 1),
)
FEW_TILES = {
    "gate_up": Tile(rows=1, out=8, inner=2048, warps=8, stages=1),
    "down": Tile(rows=1, out=16, inner=256, warps=2, stages=1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Dims of the layers: D hidden, P of the heads together, O outputs of the first projection, F expert width."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 4096
    projected: int = 5120
    experts: int = 128
    top_k: int = 8
    width: int = 768
    form: str = E4M3
    group: int = 128
    span: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices:
    """Those of all layers."""

    first: Weight  # [L, D, O]
    out: Weight  # [L, P, D]
    router: Array  # [L, D, E], bfloat16
    gate_up: Weight  # [LE, D, 2F]
    down: Weight  # [LE, F, D]


def make_stack(key: Array, count: int, inputs: int, outputs: int, sizes: Sizes) -> tuple[QuantizedWeight, Array]:
    """Random codes and scales, and their numbers, of about 1 / sqrt(I), in bfloat16; matrix by matrix."""
    form, group, span = sizes.form, sizes.group, sizes.span
    run = packed_run(inputs, group, RUNS) if form != E4M3 else 1
    assert run is not None, (inputs, group)

    def weight(codes: Array, scales: Array) -> QuantizedWeight:
        return QuantizedWeight(
            codes=codes, scales=scales, group=group, span=span, format=form, outputs_first=True, run=run
        )

    def make(key: Array) -> tuple[Array, Array, Array]:
        codes_key, scales_key = jax.random.split(key)
        bits = jax.random.bits(codes_key, (outputs, inputs // inputs_of_byte(form)), jnp.uint8)
        if form == E4M3:  # without NaN
            bits = jnp.where(bits & 127 == 127, jnp.uint8(0), bits)
        if form == INT4:  # without -8, which would give the numbers a mean
            bits = jnp.where(bits & 15 == 0, bits | 8, bits)
            bits = jnp.where(bits >> 4 == 0, bits | 128, bits)
        codes = lax.bitcast_convert_type(bits, CODE_DTYPES[form])
        scales = jax.random.uniform(scales_key, (-(-inputs // group), outputs // span), jnp.float32, 0.5, 1.5)
        scales = scales / ((100 if form == E4M3 else 4) * inputs**0.5)
        scales = scales.astype(jnp.float32 if form == E4M3 else jnp.bfloat16)
        return codes, scales, weight(codes[None], scales[None]).dequantize()[0].astype(jnp.bfloat16)

    codes, scales, plain = jax.jit(lambda keys: lax.map(make, keys))(jax.random.split(key, count))
    return weight(codes, scales), plain


def make_matrices(sizes: Sizes) -> dict[str, Matrices]:
    """The same layers with codes and with bfloat16."""
    keys, slots = jax.random.split(jax.random.key(0), 5), sizes.layers * sizes.experts
    shapes = {
        "first": (sizes.layers, sizes.hidden, sizes.projected),
        "out": (sizes.layers, sizes.heads, sizes.hidden),
        "gate_up": (slots, sizes.hidden, 2 * sizes.width),
        "down": (slots, sizes.width, sizes.hidden),
    }
    router = jax.random.normal(keys[4], (sizes.layers, sizes.hidden, sizes.experts), jnp.bfloat16)
    made = {}
    for key, (name, shape) in zip(keys[:4], shapes.items(), strict=True):
        progress(f"weights: {name} {shape}")
        made[name] = jax.block_until_ready(make_stack(key, *shape, sizes))
    coded, plain = (Matrices(router=router, **{name: pair[i] for name, pair in made.items()}) for i in range(2))
    return {name: plain if name == PLAIN else coded for name in VARIANTS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """One variant's layers."""

    sizes: Sizes
    fused: FusedSteps
    variant: str = CODES

    def run(self, x: Array, matrices: Matrices) -> tuple[Array, Array]:
        """The stream behind all layers, and the ids [L, N, K]."""
        layers = jnp.arange(matrices.router.shape[0], dtype=jnp.int32)
        unroll = min(self.fused.unrolled, layers.shape[0])
        carry, ids = lax.scan(
            lambda carry, layer: self.layer(carry, matrices, layer), self.first(x, matrices), layers, unroll=unroll
        )
        return carry[0], ids

    def first(self, x: Array, matrices: Matrices) -> tuple[Array, NormedRows]:
        """The stream and its norm before the first layer, for which the same rows are taken."""
        return x, self.fused.normed_rows(x, self.next_matrices(matrices.first))

    def next_matrices(self, weights: Weight) -> Weight | None:
        """Those for which a norm's kernel scales its rows: as served where the variant says nothing of rows."""
        return weights if self.variant in (PLAIN, CODES) else None

    def layer(
        self, carry: tuple[Array, NormedRows], matrices: Matrices, layer: Array
    ) -> tuple[tuple[Array, NormedRows], Array]:
        """Stream and its norm behind one layer."""
        x, normed = carry
        mixed = self.product(normed.fastest, matrices.first, layer)[..., : self.sizes.heads]
        mixed = jnp.sum(mixed, axis=0).astype(x.dtype)
        parts, norm = self.product(mixed, matrices.out, layer), self.norm(x, layer, matrices.gate_up)
        norm = dataclasses.replace(norm, experts=RoutingSize(self.sizes.experts, self.sizes.top_k))
        x, normed, logits = self.fused.add_parts(x, parts, None, norm, matrices.router)
        routing, _ = self.fused.route(logits, None, None, layer, self.spec, RouterBiases(layer=layer))
        call = expert_call(normed.plain, routing.ids, routing.weights, matrices, layer, self.sizes.experts)
        slots, slot_rows = self.slots(call, normed.scaled)
        outputs = SlotOutputs(
            slots=slots, weights=routing.weights, valid=call.valid, inputs=normed.plain, slot_rows=slot_rows
        )
        return self.fused.add_slots(x, outputs, self.norm(x, layer, matrices.first)), routing.ids

    @property
    def spec(self) -> RouterSpec:
        """The router's law."""
        return RouterSpec(num_experts=self.sizes.experts, top_k=self.sizes.top_k, renormalize=True)

    def norm(self, x: Array, layer: Array, weights: Weight) -> StreamNorm:
        """With scales of 1, before a product with these matrices."""
        scales = jnp.ones((self.sizes.layers, x.shape[1]), x.dtype)
        return StreamNorm(scales=scales, layer=layer, eps=1e-6, next_matrices=self.next_matrices(weights))

    def product(self, x: Rows, weights: Weight, layer: Array) -> Array:
        """A projection in parts."""
        if self.variant in (PLAIN, CODES):
            return self.fused.product(x, weights, layer)
        tile, num_rows = tile_for(x.shape[0], weights), x.shape[0]
        if self.variant in SCALINGS:
            tile = dataclasses.replace(tile, scaled=SCALINGS[self.variant])
        if self.variant == FEW and num_rows <= MOST_FEW_ROWS:
            splits = max(1, weights.shape[1] // 2048)
            tile = LinearTile(rows=block_rows(num_rows), out=8, inner=2048, warps=8, stages=1, splits=splits)
        return partial_sums(x, weights, layer, tile=tile, interpret=INTERPRET)

    def slots(self, call: ExpertCall, scaled: ScaledRows | None) -> tuple[Array, Array | None]:
        """Each slot's expert, and the rows of the slots; as served where the variant says nothing of experts."""
        if self.variant in (PLAIN, CODES):
            return self.fused.slots(call, None, scaled)
        tiles = tiles_for(call)
        if self.variant in SCALINGS:
            tiles = dataclasses.replace(tiles, scaled=SCALINGS[self.variant])
        if self.variant == FEW and call.ids.size <= FEW_SLOTS:
            tiles = MoeTiles(rows=1, sorted_slots=False, **FEW_TILES)
        return slot_outputs(call, tiles, stride=call.num_experts, interpret=INTERPRET), None


def block_rows(num_rows: int) -> int:
    """Rows of a block of few rows: a power of two."""
    return min(1 << (num_rows - 1).bit_length(), MOST_FEW_ROWS)


def expert_call(x: Array, ids: Array, weights: Array, matrices: Matrices, layer: Array, experts: int) -> ExpertCall:
    """The experts of one layer, which is counted in layers."""
    valid = jnp.ones(x.shape[:1], bool)
    return ExpertCall(x, ids, weights, valid, matrices.gate_up, matrices.down, layer, experts)


def plain_layer(x: Array, matrices: Matrices, layers: Layers) -> Array:
    """The stream behind the first layer in float32 on the codes, by array code."""
    sizes = layers.sizes
    x = x.astype(jnp.float32)
    mixed = reference_linear(x, matrices.first, 0, jnp.float32)[:, : sizes.heads]
    x = x + reference_linear(mixed, matrices.out, 0, jnp.float32)
    normed = rms_norm(x, jnp.ones(x.shape[1]), eps=1e-6)
    logits = reference_linear(normed, matrices.router.astype(jnp.float32), 0, jnp.float32)
    routing = replay_topk(logits, None, spec=layers.spec)
    return x + tiled_experts(expert_call(normed, routing.ids, routing.weights, matrices, jnp.int32(0), sizes.experts))


def timed(function: Callable[..., Any], *args: Any, count: int) -> Callable[[], float]:
    """A function that runs the compiled program and returns the seconds of one of `count` parts."""

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        return (time.perf_counter() - start) / count

    seconds()
    return seconds


def layer_bytes(sizes: Sizes, weights: str, experts: float) -> float:
    """What a layer reads of its matrices."""
    numbers = sizes.hidden * sizes.projected + sizes.heads * sizes.hidden + experts * 3 * sizes.hidden * sizes.width
    scale = 4 if sizes.form == E4M3 else 2
    size = 2 if weights == PLAIN else 1 / inputs_of_byte(sizes.form) + scale / (sizes.group * sizes.span)
    return numbers * size + 2 * sizes.hidden * sizes.experts


def compare(
    batch: int, variants: dict[str, Layers], matrices: dict[str, Matrices], args: argparse.Namespace
) -> list[dict[str, object]]:
    """Rows of the table for this batch."""
    sizes = variants[PLAIN].sizes
    x = jax.random.normal(jax.random.key(batch), (args.steps, batch, sizes.hidden), jnp.bfloat16)
    programs, outs = {}, {}
    with jax.default_matmul_precision("highest"):
        oracle = np.asarray(jax.jit(lambda x, m: plain_layer(x, m, variants[PLAIN]))(x[0], matrices[CODES]), np.float64)
    for name, layers in variants.items():
        program = jax.jit(lambda x, m, layers=layers: lax.scan(lambda _, rows: ((), layers.run(rows, m)), (), x)[1])
        stream, ids = program(x, matrices[name])
        assert np.isfinite(np.asarray(stream.astype(jnp.float32))).all(), f"{name}, batch {batch}: not finite"
        one = jax.jit(lambda x, m, layers=layers: layers.layer(layers.first(x, m), m, jnp.int32(0))[0][0])
        one = one(x[0], matrices[name])
        far = np.linalg.norm(np.asarray(one.astype(jnp.float32), np.float64) - oracle) / np.linalg.norm(oracle)
        met = np.asarray(ids).reshape(-1, ids.shape[-1] * batch)
        outs[name] = (statistics.mean(len(np.unique(row)) for row in met), float(far))
        programs[name] = timed(program, x, matrices[name], count=args.steps * sizes.layers)
        progress(f"batch {batch}, {name}: compiled")
        if batch in args.profile:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    programs[name]()
                print_table(read_kernel_times(Path(folder), args.steps * sizes.layers))
    runs = [{name: program() for name, program in programs.items()} for _ in range(args.rounds)]
    rows: list[dict[str, object]] = []
    for name, (experts, far) in outs.items():
        ratios = sorted(run[PLAIN] / run[name] for run in runs)
        middle, floor = (
            statistics.median(run[name] for run in runs),
            layer_bytes(sizes, name, experts) / args.bandwidth,
        )
        rows.append(
            {
                "batch": batch,
                "weights": name,
                "us a layer": middle * 1e6,
                "floor us": floor * 1e6,
                "of bfloat16": f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
                "experts": experts,
                "distance": far,
            }
        )
    return rows


def candidates(
    batch: int, matrices: Matrices, sizes: Sizes, args: argparse.Namespace
) -> Iterator[tuple[str, str, Tile | LinearTile, Callable[..., Array]]]:
    """(product, variant, block, program of (rows, other rows, ids)) for blocks of other sizes: one half of the experts'
    tiles changes at a time, and so do the projections."""
    routing_weights = jnp.ones((batch, sizes.top_k), jnp.float32)

    def experts(tiles: MoeTiles) -> Callable[..., Array]:
        def run(x: Array, _: Array, ids: Array, layer: Array, matrices: Matrices) -> Array:
            call = expert_call(x, ids, routing_weights, matrices, layer, sizes.experts)
            return slot_outputs(call, tiles, stride=sizes.experts, interpret=INTERPRET)

        return run

    def projection(name: str, tile: LinearTile) -> Callable[..., Array]:
        def run(x: Array, mixed: Array, _: Array, layer: Array, matrices: Matrices) -> Array:
            rows = mixed if name == "out" else x
            return partial_sums(rows, getattr(matrices, name), layer, tile=tile, interpret=INTERPRET)

        return run

    some = jnp.zeros((batch, sizes.top_k), jnp.int32)
    x = jnp.zeros((batch, sizes.hidden), jnp.bfloat16)
    tiles = tiles_for(expert_call(x, some, routing_weights, matrices, jnp.int32(0), sizes.experts))
    blocks = [*BLOCKS, *(NARROW_BLOCKS if batch * sizes.top_k <= 4 * sizes.experts else ())]
    for name, scaled, block in itertools.product(args.products, args.scaled, blocks[:1] if INTERPRET else blocks):
        rows, shape = block[0], dict(zip(("out", "inner", "warps", "stages"), block[1:], strict=True))
        if name in FEW_TILES:
            own = dataclasses.replace(tiles, scaled=SCALINGS[scaled])
            tile = Tile(rows=rows or getattr(tiles, name).rows, **shape)
            yield name, scaled, tile, experts(dataclasses.replace(own, **{name: tile}))
        elif rows is None or batch <= 16:
            table = tile_for(batch, getattr(matrices, name))
            linear = dataclasses.replace(table, rows=rows or table.rows, scaled=SCALINGS[scaled], **shape)
            yield name, scaled, linear, projection(name, linear)
    few = FEW_BLOCKS[:1] if INTERPRET else FEW_BLOCKS
    for name, block in itertools.product(args.products if batch <= MOST_FEW_ROWS else (), few):
        shape = dict(zip(("out", "inner", "warps", "stages"), block[1:], strict=True))
        if name in FEW_TILES:
            tile = Tile(rows=1, **shape)
            own = MoeTiles(rows=1, sorted_slots=False, **{**FEW_TILES, name: tile})
            yield name, FEW, tile, experts(own)
            continue
        inputs = getattr(matrices, name).shape[1]
        for splits in (1, 2, 4):
            if inputs // splits >= shape["inner"] or splits == 1:
                linear = LinearTile(rows=block_rows(batch), splits=splits, **shape)
                yield name, FEW, linear, projection(name, linear)


def tune(batch: int, matrices: Matrices, sizes: Sizes, args: argparse.Namespace) -> list[dict[str, object]]:
    """The time of each candidate, best first. Of experts: both products and what is around them."""
    keys = jax.random.split(jax.random.key(batch), 3)
    x = jax.random.normal(keys[0], (batch, sizes.hidden), jnp.bfloat16)
    mixed = jax.random.normal(keys[1], (batch, sizes.heads), jnp.bfloat16)
    scores = jax.random.normal(keys[2], (sizes.layers, batch, sizes.experts))
    ids, rows = lax.top_k(scores, sizes.top_k)[1], []
    for name, scaled, tile, run in candidates(batch, matrices, sizes, args):

        def step(x: Array, layer: Array, matrices: Matrices, run: Callable[..., Array] = run) -> tuple[Array, None]:
            result = run(x, mixed, ids[layer], layer, matrices)
            return x + (result.reshape(-1)[0] * 1e-30).astype(x.dtype), None  # the next one waits for this one

        layers = jnp.tile(jnp.arange(sizes.layers, dtype=jnp.int32), args.steps)
        program = jax.jit(lambda x, layers, m, step=step: lax.scan(lambda x, layer: step(x, layer, m), x, layers)[0])
        try:
            seconds = timed(program, x, layers, matrices, count=layers.shape[0])
        except jax.errors.JaxRuntimeError as error:  # more shared memory than a multiprocessor has
            progress(f"{name}: {tile}: {str(error)[:80]}")
            continue
        best = min(seconds() for _ in range(args.rounds))
        block = f"{tile.rows}, {tile.out}, {tile.inner}, {tile.warps}, {tile.stages}"
        block += f", {tile.splits} parts" if isinstance(tile, LinearTile) else ""
        rows.append({"batch": batch, "product": name, "variant": scaled, "block": block, "us": best * 1e6})
    return sorted(rows, key=lambda row: (str(row["product"]), float(str(row["us"]))))


def best_of_each(rows: list[dict[str, object]], count: int) -> list[dict[str, object]]:
    """The first `count` rows of each batch, product and variant of a sorted table."""
    met: collections.Counter[tuple[object, ...]] = collections.Counter()
    best = []
    for row in rows:
        key = row["batch"], row["product"], row["variant"]
        met[key] += 1
        if met[key] <= count:
            best.append(row)
    return best


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--form", choices=CODE_DTYPES, default=E4M3, help="of the codes")
    parser.add_argument("--group", type=int, choices=(128, 64, 32), default=128, help="inputs that share a scale")
    parser.add_argument("--span", type=int, choices=SPANS, help="outputs that do; by default 128 of e4m3")
    parser.add_argument("--steps", type=int, default=8, help="of a program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second that a copy on the card moves")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches whose kernels are timed one by one")
    parser.add_argument("--tune", action="store_true", help="time blocks of other sizes instead")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=PRODUCTS, help="that are tuned")
    parser.add_argument("--scaled", nargs="+", choices=SCALINGS, default=[SCALED], help="of the blocks that are tuned")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[PLAIN, CODES, PLAIN_ROWS])
    parser.add_argument("--small", action="store_true", help="small layers on any machine")
    parser.add_argument("--name", default="quantized_layers", help="of the result")
    args = parser.parse_args()
    span = args.span or (SPANS[0] if args.form == E4M3 else 1)
    sizes = Sizes(layers=args.layers, form=args.form, group=args.group, span=span)
    if args.small:
        vars(args).update(batches=[3], steps=1, rounds=1)
        small = dict(layers=1, hidden=64, heads=32, projected=48, experts=4, top_k=2, width=32, group=32, span=1)
        sizes = dataclasses.replace(sizes, **small)
    elif INTERPRET:
        parser.error("this needs a GPU; --small runs on a CPU")
    matrices, rows, path = make_matrices(sizes), [], Path()
    fused = gpu_kernels(interpret=INTERPRET, warpgroups=find_warpgroups()).fused_layer
    assert fused is not None
    for batch in args.batches:
        if args.tune:
            rows += tune(batch, matrices[CODES], sizes, args)
        else:
            variants = {name: Layers(sizes=sizes, fused=fused, variant=name) for name in (PLAIN, *args.variants)}
            rows += compare(batch, variants, matrices, args)
        print_table(best_of_each(rows, 4) if args.tune else rows)
        name = f"{args.name}_tiles" if args.tune else args.name
        path = write_result(name, rows, layers=sizes.layers, span=sizes.span)
    print(path)


if __name__ == "__main__":
    main()
