"""What a start costs: time until ready, loading of a checkpoint, and compile time against the number of layers.

    python benchmarks/startup.py ready [--warm 1] [--programs] [--layers N] [--config CONFIG.json]      # a GPU
    python benchmarks/startup.py loading [--megabytes 2000] [--folder FOLDER] [--forms bfloat16 fp8]     # a CPU
    python benchmarks/startup.py compiling [--layers 4 48] [--rounds 3]                                 # a CPU

ready: Qwen3-30B-A3B with random weights made on the device. Each start is a process of its own with a home folder of
its own for the compilation cache: the first is cold, the others warm. `s` counts from the first line of the process
to ready, the import of JAX included. --programs then lowers and compiles the programs of one engine one by one, with
no cache.

loading: a random Qwen3-MoE checkpoint is written, one tensor an expert, several files, in bfloat16 or with its experts
as e4m3 codes in blocks of 128 x 128; a fresh process loads it, codes as codes, and as numbers ("fp8, dequantised").
Forms take turns; medians of --rounds. `peak_ratio` is the peak of its resident memory (VmHWM) over the checkpoint's
bytes; `less_before` without what the process held before it opened the checkpoint (Python, JAX).

compiling: size of the lowered step and seconds to compile it, of a family whose layers alternate (GPT-OSS), one with
dense layers first (DeepSeek-V3) and one with states (Qwen3-Next), at tiny sizes: the program depends on the kinds of
layers, not on their width. Nothing is read from a cache."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from common import HF_CONFIG, print_table, progress, write_result
from flax import nnx
from safetensors.numpy import save_file

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.quantized import E4M3
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.code_selection import CodeSupport
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import weight_sources
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.registry import FAMILIES

CHILD = "--child"


def start_here(folder: str) -> None:
    """A start as a user has it; prints its phases as one JSON line."""
    start_s = time.perf_counter()
    from routed_experts.core.server_args import ServerArgs
    from routed_experts.engine.build.builder import build_engine
    from routed_experts.engine.build.startup_phases import PhaseClock
    from routed_experts.execution.compilation_cache import enable_compilation_cache

    enable_compilation_cache()  # as Engine does
    phases: list[dict[str, object]] = []
    clock = PhaseClock(lambda phase: phases.append({"phase": phase.name, "s": phase.seconds, "detail": phase.detail}))
    build_engine(arguments(ServerArgs, folder), clock=clock, load_format="dummy")
    total = time.perf_counter() - start_s
    print(json.dumps({"phases": phases, "s": total}))


def arguments(kind: type, folder: str) -> object:
    """What is served: a batch of up to 256 with contexts of 2,048 tokens, capture on."""
    return kind(
        model_path=folder,
        context_length=2048,
        max_total_tokens=int(os.environ.get("STARTUP_TOKENS", "131072")),
        precompile_bs_paddings=(1, 8, 32, 64, 128, 256),
        mem_fraction_static=0.9,
        skip_tokenizer_init=True,
        enable_return_routed_experts=True,
    )


def programs(folder: str) -> list[dict[str, object]]:
    """Seconds of lowering and of compiling, program by program."""
    import jax

    from routed_experts.core.server_args import ServerArgs
    from routed_experts.engine.build.builder import build_engine
    from routed_experts.execution.aot_programs import lowerings

    runner = build_engine(arguments(ServerArgs, folder), load_format="dummy").core.runner
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    rows: list[dict[str, object]] = []
    for key, job in lowerings(runner.state, runner.spec, runner.config).items():
        start_s = time.perf_counter()
        lowered = job()
        middle = time.perf_counter()
        lowered.compile()
        rows.append(
            {
                "program": " ".join(map(name_part, key)),
                "lower s": middle - start_s,
                "compile s": time.perf_counter() - middle,
            }
        )
    return rows


def name_part(part: object) -> str:
    names = ("num_tokens", "num_requests", "table_width")
    return (
        " ".join(f"{name}={getattr(part, name)}" for name in names)
        if hasattr(part, "num_tokens")
        else str(getattr(part, "value", part))
    )


LOADING_SIZES = {
    "hidden_size": 1024,
    "num_experts": 64,
    "moe_intermediate_size": 512,
    "vocab_size": 32_768,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path, megabytes: int, *, fp8: bool = False) -> None:
    """Write as many layers as come near the size, one file each. `fp8`: experts are codes."""
    folder.mkdir(parents=True, exist_ok=True)
    per_expert = 3 * LOADING_SIZES["hidden_size"] * LOADING_SIZES["moe_intermediate_size"]
    per_layer = (1 if fp8 else 2) * LOADING_SIZES["num_experts"] * per_expert
    config = (
        HF_CONFIG
        | LOADING_SIZES
        | {"num_hidden_layers": max(1, round((megabytes * 1e6 - 4 * 32_768 * 1024) / per_layer))}
    )
    if fp8:
        form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        config |= {"quantization_config": form}
    family = FAMILIES["Qwen3MoeForCausalLM"]
    files: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for source in weight_sources(family.read_config(ConfigReader(config, "config.json"))):
        match = re.search(r"layers\.(\d+)\.", source.name)
        files[f"model-{match[1] if match else 'ends'}.safetensors"].append((source.name, source.shape))
    rng = np.random.default_rng(0)
    for file, tensors in files.items():
        values = {name: (rng.random(shape, np.float32) * 0.1).astype(ml_dtypes.bfloat16) for name, shape in tensors}
        for name in [name for name in values if fp8 and ".experts." in name]:
            outputs, inputs = values[name].shape
            values[name] = rng.integers(0, 0x7F, (outputs, inputs), np.uint8).view(ml_dtypes.float8_e4m3fn)
            values[f"{name}_scale_inv"] = np.full((-(-outputs // 128), -(-inputs // 128)), 1e-4, np.float32)
        files[file] = [(name, value.shape) for name, value in values.items()]
        save_file(values, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name, _ in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def memory(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, key
    return int(match[1]) * 1024


def load_here(folder: Path, *, codes: bool) -> dict[str, float]:
    """Load in this process; codes as codes, or as numbers."""
    jax.block_until_ready(jnp.zeros(3) + 1)
    before, start = memory("VmRSS"), time.perf_counter()
    opened = ModelFolder.open(folder)
    opened = opened.with_codes(CodeSupport(formats=frozenset({E4M3}))) if codes else opened
    model = opened.load(opened.dtype("auto"))
    jax.block_until_ready(model)
    return {"seconds": time.perf_counter() - start, "before": before, "peak": memory("VmHWM"), "after": memory("VmRSS")}


COMPILE_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "GptOssForCausalLM": {"num_local_experts": 16, "sliding_window": 32},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 16,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
    },
    "Qwen3NextForCausalLM": {
        "num_experts": 16,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
}
PAGES, PAGE, ROWS = 9, 16, 4


def lower(architecture: str, num_layers: int) -> jax.stages.Lowered:
    """The forward step of 32 tokens, lowered; no weight is made."""
    values = COMPILE_SIZES | CONFIGS[architecture] | {"num_hidden_layers": num_layers}
    family = FAMILIES[architecture]
    config = family.read_config(ConfigReader(values, "config.json"))
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(jnp.float32)))
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)
    layout = config.cache
    pool = KVPoolSpec(
        num_layers=layout.num_layers,
        num_pages=PAGES,
        page_size=PAGE,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=jnp.dtype(jnp.float32),
        latent=layout.latent,
        num_recurrent=layout.num_recurrent,
        recurrent=layout.recurrent,
        num_requests=ROWS + 1,
    )
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), config.needs)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec,
        kernels=kernels,
        attention=attention,
        num_pages=PAGES,
        raw_logprobs=False,
    )
    shape = BatchShape(mode=ForwardMode.EXTEND, num_tokens=32, num_requests=ROWS, table_width=8)
    runner = RunnerConfig(pool=pool, num_request_slots=ROWS + 1, shapes=(shape,), vocab_size=config.vocab_size)
    return lowerings(state, spec, runner)["forward", shape]()


def measure_ready(args: argparse.Namespace) -> None:
    """Starts in processes of their own, cold and warm."""
    from step import QWEN3_30B_A3B

    config = dict(QWEN3_30B_A3B) if args.config is None else json.loads(args.config.read_text())
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers[0]}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for turn in range(1 + args.warm):
            kind = "cold" if turn == 0 else "warm"
            progress(f"{kind} start")
            environment = os.environ | {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
            command = [sys.executable, __file__, "ready", CHILD, folder]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            rows += [{"start": kind, **phase} for phase in measured["phases"]]
            rows.append({"start": kind, "phase": "all", "s": measured["s"], "detail": ""})
        print_table(rows)
        each = programs(folder) if args.programs else []
        if each:
            print_table(each)
    print(write_result(args.name or "startup_h200", rows, programs=each))


def measure_loading(args: argparse.Namespace) -> None:
    """Write a checkpoint of each form, load each in fresh processes."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {form: (args.folder or Path(temporary)) / form for form in args.forms}
        for form, folder in folders.items():
            progress(f"writing {args.megabytes} MB of {form}")
            write_checkpoint(folder, args.megabytes, fp8=form == "fp8")
        cases = {form: (folder, "codes") for form, folder in folders.items()}
        cases |= {"fp8, dequantised": (folders["fp8"], "numbers")} if "fp8" in folders else {}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, (folder, how) in cases.items():
                progress(f"loading {name} in a fresh process")
                command = [sys.executable, __file__, "loading", CHILD, str(folder), "--how", how]
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                runs[name].append(json.loads(run.stdout.splitlines()[-1]))
        rows: list[dict[str, object]] = []
        for name, (folder, _) in cases.items():
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            of_runs = {key: statistics.median(run[key] for run in runs[name]) for key in ("seconds", "before", "peak")}
            rows.append(
                {
                    "form": name,
                    "checkpoint_mb": size / 1e6,
                    "seconds": of_runs["seconds"],
                    "gb_a_second": size / 1e9 / of_runs["seconds"],
                    "before_mb": of_runs["before"] / 1e6,
                    "peak_mb": of_runs["peak"] / 1e6,
                    "peak_ratio": of_runs["peak"] / size,
                    "peak_ratio_less_before": (of_runs["peak"] - of_runs["before"]) / size,
                }
            )
    print_table(rows)
    print(write_result(args.name or "loading_cpu", rows, rounds=args.rounds))


def measure_compiling(args: argparse.Namespace) -> None:
    """Lower and compile the step of each family at each number of layers."""
    jax.config.update("jax_enable_compilation_cache", False)
    depths = args.layers or [4, 48]
    lower("GptOssForCausalLM", depths[0]).compile()  # what a process pays once
    rows: list[dict[str, object]] = []
    for architecture in CONFIGS:
        for num_layers in depths:
            progress(f"{architecture}, {num_layers} layers")
            seconds, size = [], 0
            for _ in range(args.rounds):
                lowered = lower(architecture, num_layers)
                size, start = len(lowered.as_text()), time.perf_counter()
                lowered.compile()
                seconds.append(time.perf_counter() - start)
            row = {"architecture": architecture, "layers": num_layers, "lowered_characters": size}
            rows.append(row | {"compile_s": round(statistics.median(seconds), 3)})
    print_table(rows)
    print(write_result(args.name or "compiling_cpu", rows, rounds=args.rounds))


def main() -> None:
    """Measure one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ready", "loading", "compiling"])
    parser.add_argument("--warm", type=int, default=1, help="ready: warm starts")
    parser.add_argument("--programs", action="store_true", help="ready: time each program")
    parser.add_argument("--config", type=Path, help="ready: another model")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="ready: layers of the model; compiling: numbers of layers"
    )
    parser.add_argument("--megabytes", type=int, default=2000, help="loading: size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="loading: write the checkpoint here and leave it")
    parser.add_argument("--rounds", type=int, default=3, help="loading, compiling: the figure is the median of these")
    parser.add_argument("--forms", nargs="+", choices=["bfloat16", "fp8"], default=["bfloat16"], help="loading")
    parser.add_argument("--how", choices=["codes", "numbers"], default="codes", help=argparse.SUPPRESS)
    parser.add_argument("--name", help="of the result")
    parser.add_argument(CHILD, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.what == "ready":
            return start_here(args.child)
        return print(json.dumps(load_here(Path(args.child), codes=args.how == "codes")))
    {"ready": measure_ready, "loading": measure_loading, "compiling": measure_compiling}[args.what](args)


if __name__ == "__main__":
    main()
