"""Loading a checkpoint: seconds, and the most memory that the process held, pages of mapped files included, beside the
checkpoint's bytes.

    python benchmarks/loading.py [--megabytes 2000] [--folder FOLDER]

A random checkpoint of Qwen3-MoE's form in bfloat16 is written to FOLDER (default: a temporary one), a tensor an expert,
several files; a fresh process loads it on CPU. Told are the peak of its resident memory (VmHWM) over the checkpoint's
bytes, and the same less what the process held before it opened the checkpoint (Python, JAX)."""

import argparse
import json
import re
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
from common import HF_CONFIG, print_table, write_result
from safetensors.numpy import save_file

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.registry import FAMILIES

SIZES = {
    "hidden_size": 1024,
    "num_experts": 64,
    "moe_intermediate_size": 512,
    "vocab_size": 32_768,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path, megabytes: int) -> None:
    """Write as many layers as come near the size, one file each."""
    per_layer = 2 * 3 * SIZES["num_experts"] * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
    config = HF_CONFIG | SIZES | {"num_hidden_layers": max(1, round((megabytes * 1e6 - 4 * 32_768 * 1024) / per_layer))}
    family = FAMILIES["Qwen3MoeForCausalLM"]
    files: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for source in family.weight_sources(family.read_config(ConfigReader(config, "config.json"))):
        found = re.search(r"layers\.(\d+)\.", source.name)
        files[f"model-{found[1] if found else 'ends'}.safetensors"].append((source.name, source.shape))
    rng = np.random.default_rng(0)
    for file, tensors in files.items():
        values = {name: (rng.random(shape, np.float32) * 0.1).astype(ml_dtypes.bfloat16) for name, shape in tensors}
        save_file(values, folder / file, metadata={"format": "pt"})
    placed = {name: file for file, tensors in files.items() for name, _ in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config))


def memory(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, key
    return int(found[1]) * 1024


def load(folder: Path) -> dict[str, float]:
    """Load in this process."""
    jax.block_until_ready(jnp.zeros(3) + 1)
    before, begun = memory("VmRSS"), time.perf_counter()
    opened = ModelFolder.open(folder)
    model = opened.load(opened.dtype("auto"))
    jax.block_until_ready(model)
    return {"seconds": time.perf_counter() - begun, "before": before, "peak": memory("VmHWM"), "after": memory("VmRSS")}


def main() -> None:
    """Write, load in a fresh process, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint; it is left there")
    parser.add_argument(
        "--load", type=Path, help="load this folder and print what was measured: what the fresh process does"
    )
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(load(args.load)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, args.megabytes)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        run = subprocess.run(
            [sys.executable, __file__, "--load", str(folder)], capture_output=True, text=True, check=True
        )
    told = json.loads(run.stdout.splitlines()[-1])
    row = {
        "checkpoint_mb": size / 1e6,
        "seconds": told["seconds"],
        "before_mb": told["before"] / 1e6,
        "peak_mb": told["peak"] / 1e6,
    }
    row |= {"peak_ratio": told["peak"] / size, "peak_ratio_less_before": (told["peak"] - told["before"]) / size}
    print_table([row])
    write_result("loading_cpu", [row])


if __name__ == "__main__":
    main()
