"""What rollouts with codes of 8 bits cost in mismatch, of matrices or of keys and values, and what replayed rows and
training through the grid give back.

    python benchmarks/quantized_rollouts.py [--sequences 768]                                   # CPU, the demo model
    python benchmarks/quantized_rollouts.py --trained [--seconds 300] --name quantized_rollouts_trained_h200   # GPU
    python benchmarks/quantized_rollouts.py [--trained] --small                                 # does it run

With --trained a byte model is trained for so many seconds first (training/byte_model.py).

One engine rolls out in bfloat16 with plain matrices, another with e4m3 codes in blocks of 128 x 128, made of the same
float32 weights, and two more do so with keys and values in e4m3. The trainer's forward is float32, with plain keys and
values: live, on the recorded rows, and both once more with the numbers of
the codes (`replay.quantised`). k3 is the mean of exp(d) - 1 - d, d the difference of logprobs; "flips" the share of
slots in which the trainer's router would have chosen otherwise; "F(1.1)" the share of tokens whose ratio is beyond 1.1.
Intervals are 95 % percentile bootstraps over sequences. Dims: B sequences, G tokens of an answer."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, progress, write_result
from flax import nnx
from training import byte_model
from training.demo_model import NEW, PROMPT, TEXT
from training.rollouts import by_sequence, interval, roll_out, training_logprobs

from routed_experts.core.server_args import ServerArgs
from routed_experts.demo import demo_model_path
from routed_experts.engine.build.builder import build_engine
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.permuted_moe import PERMUTED
from routed_experts.models.decoder.family_config import weight_sources
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import quantised
from support.gpu_replay import byte_config, byte_keys

ROLLOUTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"quantization": "none"},
    "e4m3 codes": {"quantization": "fp8_block"},
    "e4m3 KV": {"quantization": "none", "kv_cache_dtype": "fp8_e4m3"},
    "e4m3 codes and KV": {"quantization": "fp8_block", "kv_cache_dtype": "fp8_e4m3"},
}


def demo_prompts(sequences: int) -> np.ndarray:
    """Windows of a text, [B, PROMPT]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT * 8).ids)
    starts = np.random.default_rng(0).integers(0, len(ids) - PROMPT, sequences)
    return ids[starts[:, None] + np.arange(PROMPT)].astype(np.int32)


def write_trained(folder: Path, sequences: int, *, seconds: float, small: bool) -> np.ndarray:
    """Train a byte model and write its checkpoint in float32; returns prompts of text that it has not seen, [B,
    PROMPT]."""
    tiny = dict(hidden=128, layers=2, experts=8, top_k=2, width=128, head=64)
    sizes = tiny if small else {}
    keys = byte_keys(**sizes)
    config = byte_config(**sizes)
    text, held_out = byte_model.read_text(200_000 if small else 60_000_000)
    plan = byte_model.Plan(seconds=seconds, **(dict(batch=2, length=32, block=2) if small else {}))
    graphdef, params = byte_model.init(config, None)
    params = byte_model.train(graphdef, params, text, plan, lambda row: progress(json.dumps(row)))
    save(folder, keys, hugging_face_tensors(nnx.merge(graphdef, params), weight_sources(config), "float32"))
    starts = np.random.default_rng(2).integers(0, held_out.size - PROMPT, (sequences, 1))
    return held_out[starts + np.arange(PROMPT)].astype(np.int32)


def rows_of(name: str, trainer: str, d: np.ndarray, flips: np.ndarray) -> dict[str, object]:
    """One line of the table, of d [B, G] and the share of flips of each answer, [B]."""
    picks = np.random.default_rng(0).integers(0, len(d), (2000, len(d)))
    line: dict[str, object] = {"rollout": name, "trainer": trainer}
    for metric, values in {"flips": flips, **by_sequence(d)}.items():
        if metric != "F(2)":
            line |= {metric: values.mean(), f"{metric}, 95 %": interval(values[picks].mean(axis=1))}
    return line


def measure(folder: Path, prompts: np.ndarray, new: int) -> list[dict[str, object]]:
    """All rollouts and trainers of a checkpoint, for prompts [B, PROMPT]."""
    backend = PERMUTED if jax.default_backend() == "gpu" else MOE_BACKENDS["grouped"]
    sequences = len(prompts)
    model = ModelFolder.open(folder).load(jnp.dtype("float32"))
    graphdef, state = nnx.split(model)
    on_grid = nnx.merge(graphdef, jax.jit(quantised, static_argnums=1)(state, model.config))
    spec = model.config.capture_spec
    rows: list[dict[str, object]] = []
    for name, form in ROLLOUTS.items():
        args = ServerArgs(
            model_path=str(folder),
            dtype="bfloat16",
            **form,
            enable_return_routed_experts=True,
            context_length=PROMPT + new + 8,
            precompile_bs_paddings=(min(256, sequences),),
            precompile_token_paddings=(max(256, min(1024, sequences * PROMPT)),),
            max_total_tokens=min(256, sequences) * (PROMPT + new + 16),
            skip_tokenizer_init=True,
        )
        tokens, logprobs, records, seconds = roll_out(build_engine(args).core, prompts, new, spec)
        progress(f"{name}: {logprobs.size / seconds:.0f} tokens a second")
        for grid, trainer in (("", model), (", through the grid", on_grid)):
            with jax.default_matmul_precision("highest"):  # a GPU would round to TF32
                of_trainer, flips = training_logprobs(trainer, tokens, records, PROMPT, backend)
            for how, label in (("live", "live"), ("replayed", "rows")):
                rows.append(rows_of(name, f"{label}{grid}", of_trainer[how] - logprobs, flips["replayed"]))
                progress(json.dumps(rows[-1]))
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=768)
    parser.add_argument("--trained", action="store_true", help="a byte model that is trained first, for a GPU")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, compilation not counted")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--name", default="quantized_rollouts_demo_cpu")
    args = parser.parse_args()
    sequences, new = (8, 8) if args.small else (args.sequences, NEW)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.trained else demo_model_path()
        seconds = min(args.seconds, 2.0) if args.small else args.seconds
        trained = write_trained(folder, sequences, seconds=seconds, small=args.small) if args.trained else None
        rows = measure(folder, demo_prompts(sequences) if trained is None else trained, new)
    print_table(rows)
    print(write_result(args.name, rows, sequences=sequences, new=new))


if __name__ == "__main__":
    main()
