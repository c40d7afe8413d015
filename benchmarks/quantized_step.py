"""The decode step with codes beside the same step with plain weights, random ones of Qwen3-30B-A3B's, GPT-OSS-20b's or
OLMoE-1B-7B's shapes: all matrices of layers in e4m3, or experts alone in 4 bits, as Kimi-K2-Thinking (int4) and GPT-OSS
(e2m1) have them, or all matrices in 4 bits.

    python benchmarks/quantized_step.py [--batches 1 16 64 256] [--layers 48] [--new 96] [--rounds 3]
    python benchmarks/quantized_step.py --form int4 [--all-matrices]
    python benchmarks/quantized_step.py --form e2m1 --model gpt-oss-20b
    python benchmarks/quantized_step.py --model benchmark --batches 1 8 --bandwidth 3e10 --prompt 128   # a CPU
    python benchmarks/quantized_step.py --model olmoe --form int4 --all-matrices --batches 1 --without-off       # too
    python benchmarks/quantized_step.py --model benchmark --batches 1 8 --engines 2 ...      # capture on a CPU
    python benchmarks/quantized_step.py --small      # does it run

Both engines are in one process, and their runs take turns; capture is on and asked, and of the codes' engine off too.
With codes of 4 bits the plain weights are the numbers of the codes, so that both route alike; in FP8 each engine has
its own random weights. A step is the median over a run's steps, as in step.py; a ratio is the median over neighbouring
runs. With --engines 2 there are two engines of each kind, and a step is the geometric mean of both: on a CPU two equal
engines differ by about 2 % ("equal engines"). The floor is the bytes that a step must read over --bandwidth: codes have
one or half a one, scales four a block of 128 x 128, or two a group of 32. A run whose logprobs are not finite fails."""

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np
from common import HF_CONFIG, Prompts, print_table, progress, write_result
from family_configs import PUBLISHED, read_family, step_bytes
from flax import nnx
from step import QWEN3_30B_A3B, Run, drive, experts_a_step

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.control.components import EngineComponents
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.quantized import (
    BFLOAT16,
    E2M1,
    E4M3,
    FLOAT32,
    INT4,
    SCALE,
    QuantizedWeight,
    inputs_of_byte,
    packed_run,
)
from routed_experts.models.decoder.code_selection import CodeSupport, fit_stacks, select_codes
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.layer_params import ParamKind
from routed_experts.models.model_folder import ModelFolder

FP8_BLOCK = "fp8_block"
FORMS = (FP8_BLOCK, INT4, E2M1)
OFF = "codes, capture off"
EXPERTS = ("gate_up", "down")
MODELS = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": PUBLISHED["GPT-OSS-20b"].config,
    "olmoe": PUBLISHED["OLMoE-1B-7B"].config,
    "benchmark": HF_CONFIG,
}


def build(folder: Path, args: argparse.Namespace) -> dict[str, list[EngineComponents]]:
    """The engines of each variant."""
    longest = args.prompt + args.new + 16
    server = {
        "model_path": str(folder),
        "dtype": args.dtype,
        "context_length": longest,
        "max_total_tokens": max(args.batches) * (longest + 16),
        "precompile_bs_paddings": tuple(sorted(args.batches)),
        "precompile_token_paddings": tuple(sorted({max(512, *args.batches), args.chunk})),
        "mem_fraction_static": 0.95,
        "skip_tokenizer_init": True,
    }
    asked = {"enable_return_routed_experts": True}
    on, off = ServerArgs(**server, **asked), ServerArgs(**server)
    dtype = jax.numpy.dtype(args.dtype)
    coded = None
    if args.form == FP8_BLOCK:
        plain = ModelFolder.open(folder, load_format="dummy").load(dtype)
    else:
        kernels, coded = load_packed(folder, on, args.form, all_matrices=args.all_matrices)
        plain = with_numbers(folder, coded, kernels, dtype)

    def build_coded(server: ServerArgs) -> EngineComponents:
        if coded is not None:
            return build_engine(server, model=coded)
        return build_engine(dataclasses.replace(server, quantization=FP8_BLOCK), load_format="dummy")

    builders = {"plain": lambda: build_engine(on, model=plain), "codes": lambda: build_coded(on)}
    if not args.without_off:
        builders[OFF] = lambda: build_coded(off)
    copies: list[dict[str, EngineComponents]] = [
        {name: make() for name, make in builders.items()} for _ in range(args.engines)
    ]
    return {name: [engines[name] for engines in copies] for name in builders}


def load_packed(folder: Path, server: ServerArgs, form: str, *, all_matrices: bool) -> tuple[Kernels, FamilyDecoder]:
    """The kernels that are chosen, and a model of random codes of 4 bits as they read them."""
    model = ModelFolder.open(folder, load_format="dummy")
    kernels, _ = DEFAULT_BACKENDS.choose(server, model.config.needs, platform=jax.default_backend())
    support = CodeSupport(
        formats=frozenset({E4M3}),
        quantizes=True,
        outputs_first=kernels.outputs_first,
        stack_fits=kernels.code_stack_fits,
    )
    layers = []
    for layer, selected in zip(model.config.layers, select_codes(model.config, {}, (), support).layers, strict=True):
        inputs = {spec.name: spec.shape[-2] for spec in layer.weights(model.config) if len(spec.shape) > 1}
        packed = [
            dataclasses.replace(
                array,
                format=form,
                group=32,
                run=packed_run(inputs[array.name], 32, kernels.code_runs),
                scale_dtype=BFLOAT16 if kernels.takes_bf16_scales else FLOAT32,
            )
            for array in selected.coded
            if all_matrices or array.name in EXPERTS
        ]
        layers.append(dataclasses.replace(layer, coded=tuple(packed)))
    coded = model.coded_as(fit_stacks(dataclasses.replace(model.config, layers=tuple(layers)), support))
    return kernels, coded.load(jax.numpy.dtype(server.dtype))


def with_numbers(folder: Path, coded: FamilyDecoder, kernels: Kernels, dtype: jax.numpy.dtype) -> FamilyDecoder:
    """The model without codes, whose matrices are the numbers of those of `coded`, in that dtype; it shares all other
    arrays. Its layers are in the same blocks."""
    config = ModelFolder.open(folder, load_format="dummy").config
    config = dataclasses.replace(config, most_repeats=coded.config.most_repeats)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=dtype)))
    held = dict(nnx.to_flat_state(nnx.state(coded)))

    @jax.jit
    def numbers(codes: jax.Array, scales: jax.Array) -> jax.Array:
        def matrix(pair: tuple[jax.Array, jax.Array]) -> jax.Array:  # one at a time: float32 is twice as large
            own = (part[None] for part in pair)
            weight = QuantizedWeight.create(*own, outputs_first=kernels.outputs_first, runs=kernels.code_runs)
            return weight.dequantize()[0].astype(dtype)

        return jax.lax.map(matrix, (codes, scales))

    leaves = []
    for (*parents, name), leaf in nnx.to_flat_state(state):
        array, scales = held[*parents, name][...], held.get((*parents, f"{name}{SCALE}"))
        count = leaf.shape[0]  # a stack of codes may be padded
        leaves.append(
            ((*parents, name), leaf.replace(array if scales is None else numbers(array[:count], scales[:count])))
        )
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def weight_bytes(engine: EngineComponents) -> int:
    """Bytes of an engine's weights."""
    return engine.plan.weights


def floor_bytes(plain: FamilyConfig, served: FamilyConfig | None, batch: int, context: float, experts: float) -> float:
    """Bytes that a step must read, with the codes of `served`; all else is of two bytes a number."""
    total = step_bytes(plain, batch, context, experts)
    for layer, own in zip(plain.layers, () if served is None else served.layers, strict=served is not None):
        coded = {array.name: array for array in own.coded}
        for spec in layer.weights(plain):
            if spec.name in coded:
                array, matrices = coded[spec.name], experts if spec.kind is ParamKind.EXPERTS else 1
                code = 1 / inputs_of_byte(array.format) + array.scale_dtype.itemsize / (array.group * array.span)
                total -= matrices * spec.shape[-2] * spec.shape[-1] * (2 - code)
    return total


def median_of_ratios(above: list[float], below: list[float]) -> str:
    """The median of ratios of neighbouring runs, with its interval of about 95 %: from the order of the ratios, or all
    of fewer than 6."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    count = len(ratios)
    first = max(0, int((count - 1.96 * count**0.5) / 2)) if count >= 6 else 0
    return f"{statistics.median(ratios):.3f} [{ratios[first]:.3f}, {ratios[count - 1 - first]:.3f}]"


def mean_steps(runs: list[list[Run]]) -> list[float]:
    """Seconds of a step in each round: the median of a run, and the geometric mean over a variant's engines."""
    return [
        math.exp(statistics.fmean(math.log(statistics.median(run.steps)) for run in turn))
        for turn in zip(*runs, strict=True)
    ]


def measure(
    engines: dict[str, list[EngineComponents]], config: dict[str, object], args: argparse.Namespace, batch: int
) -> list[dict[str, object]]:
    """All engines at one batch."""
    prompt = min(args.prompt, 128) if batch == 1 else args.prompt
    order = [(name, copy) for copy in range(args.engines) for name in engines]
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(args.engines)] for name in engines}
    for turn in range(-1, args.rounds * (3 if batch <= 16 else 1)):
        for name, copy in order[turn % len(order) :] + order[: turn % len(order)]:
            run = drive(
                engines[name][copy].core,
                Prompts(turn + 7, int(str(config["vocab_size"]))),
                batch,
                prompt=prompt,
                new=args.new if turn >= 0 else 8,
                ask=name != OFF,
                logprobs=turn < 0,
            )
            assert all(np.isfinite(out.output_logprobs.values).all() for out in run.outs), f"{name}, batch {batch}"
            if turn >= 0:
                run.check()
                runs[name][copy].append(run)
    context = prompt + args.new / 2
    base, off = mean_steps(runs["plain"]), mean_steps(runs[OFF]) if OFF in runs else []
    rows = []
    for name, variant in engines.items():
        routed = runs["codes" if name == OFF else name][0]
        experts = float(np.mean([experts_a_step(run, prompt) for run in routed]))
        floor = floor_bytes(read_family(config), variant[0].served.coded_config, batch, context, experts)
        steps, each = mean_steps(runs[name]), [mean_steps([own]) for own in runs[name]]
        ratios = sorted(a / b for a, b in zip(base, steps, strict=True))
        rows.append(
            {
                "batch": batch,
                "weights": name,
                "step ms": statistics.median(steps) * 1e3,
                "floor ms": floor / args.bandwidth * 1e3,
                "plain / this": statistics.median(ratios),
                "least": ratios[0],
                "most": ratios[-1],
                "experts": experts,
                "prefill tok/s": batch * prompt / statistics.median(run.prefill for own in runs[name] for run in own),
                "weights GB": weight_bytes(variant[0]) / 1e9,
                "capture off / this": median_of_ratios(off, steps) if off and name == "codes" else "",
                "equal engines": median_of_ratios(each[0], each[1]) if len(each) > 1 else "",
            }
        )
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a step with prompts")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=1, help="of each variant")
    parser.add_argument("--form", choices=FORMS, default=FP8_BLOCK)
    parser.add_argument("--all-matrices", action="store_true", help="attention, too, is of 4 bits")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second")
    parser.add_argument("--without-off", action="store_true", help="no engine without capture: memory for two")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--name", default="quantized_step")
    args = parser.parse_args()
    if args.small:
        args.batches, args.prompt, args.new, args.rounds, args.dtype, args.layers = [2], 8, 16, 1, "float32", 2
        args.chunk = 64
    config: dict[str, object] = dict(HF_CONFIG if args.small else MODELS[args.model])
    args.layers = config["num_hidden_layers"] = args.layers or int(str(config["num_hidden_layers"]))
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[: args.layers]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engines = build(Path(folder), args)
        rows: list[dict[str, object]] = []
        for batch in args.batches:
            progress(f"batch {batch}")
            rows += measure(engines, config, args, batch)
            print_table(rows[-len(engines) :])
    print_table(rows)
    print(write_result(args.name, rows, layers=args.layers, new=args.new, prompt=args.prompt))


if __name__ == "__main__":
    main()
