"""Shared by the benchmarks: the benchmark model, prompts, progress lines, tables and results.

The model is the one of the peers' table: Qwen3-MoE, hidden 512, 6 layers, 8 query and 4 key-value heads of 128, 32
experts of width 256, top-4, vocabulary 8,192; random weights, with a router spread enough that routing is diverse."""

import datetime
import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.core.io_struct import RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.control.components import EngineComponents
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig, weight_sources
from routed_experts.models.families.qwen3_moe import read_qwen3_moe
from routed_experts.models.loading.checkpoint import save
from routed_experts.scheduling.schedule_batch import Req

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 8192
HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "float32",
}


def read_config(values: dict[str, object]) -> FamilyConfig:
    """A config.json, as the module takes it."""
    return read_qwen3_moe(ConfigReader(values, "config.json"))


def benchmark_config(**changed: object) -> FamilyConfig:
    """The benchmark model's config, with some keys of HF_CONFIG changed."""
    return read_config(HF_CONFIG | changed)


def benchmark_model(dtype: jnp.dtype) -> FamilyDecoder:
    """Random weights; the router's are ten times as wide, so that tokens spread over the experts."""
    model = FamilyDecoder(benchmark_config(), rngs=nnx.Rngs(0), dtype=dtype)
    for [arrays] in model.blocks:
        arrays["router"][...] = arrays["router"][...] * jnp.asarray(10, dtype)
    return model


def write_checkpoint(model: FamilyDecoder, folder: Path) -> Path:
    """The same weights as a Hugging Face folder, for other engines."""
    flat = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    tensors: dict[str, np.ndarray] = {}
    for source in weight_sources(model.config):
        piece = flat[source.target][source.index]
        width = source.shape[0] if source.transpose else piece.shape[-1]
        piece = piece[..., source.offset : source.offset + width]
        tensors[source.name] = np.ascontiguousarray(piece.T if source.transpose else piece)
    save(folder, HF_CONFIG, tensors)
    return folder


def build(model: FamilyDecoder, *, capture: bool, **changes: object) -> EngineComponents:
    """Components of an engine over the benchmark model, without a thread, so that steps can be timed."""
    args = ServerArgs(enable_return_routed_experts=capture, max_total_tokens=16_384, **changes)
    return build_engine(args, model=model)


class Prompts:
    """Random prompts, all different, so that no prefix is cached."""

    def __init__(self, seed: int = 0, vocabulary: int = VOCABULARY) -> None:
        self._noise, self._count, self._vocabulary = np.random.default_rng(seed), 0, vocabulary

    def requests(
        self,
        batch: int,
        *,
        prompt: int,
        new: int,
        ask: bool | RoutingOptions,
        temperature: float = 0.0,
        logprobs: bool = False,
    ) -> list[Req]:
        """`batch` requests of `prompt` random tokens that generate `new` each; `ask`: for their rows, or for what the
        options say."""
        drawn = (self._noise.integers(0, self._vocabulary, size=prompt).astype(np.int32) for _ in range(batch))
        return [self._request(ids, new, ask, temperature, logprobs) for ids in drawn]

    def build_requests(self, prompts: list[np.ndarray], *, new: int, ask: bool) -> list[Req]:
        """Requests of these prompts, as `requests` makes them."""
        return [self._request(ids, new, ask, 0.0, False) for ids in prompts]

    def _request(
        self, input_ids: np.ndarray, new: int, ask: bool | RoutingOptions, temperature: float, logprobs: bool
    ) -> Req:
        self._count += 1
        rid = str(self._count)
        sampling = SamplingParams(temperature=temperature, max_tokens=new, seed=self._count).resolve()
        source = TokenizedGenerateReqInput(
            rid=rid,
            group=rid,
            choice=0,
            input_ids=input_ids,
            sampling=sampling,
            stop_token_ids=frozenset(),
            extra_key=None,
            stream=False,
            return_logprob=logprobs,
            logprob_start_len=-1,
            top_logprobs_num=0,
            routed_experts=ask if isinstance(ask, RoutingOptions) else RoutingOptions(enabled=ask),
        )
        return Req(source)


def machine() -> dict[str, object]:
    """The machine, the versions and the date that a figure was measured with."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "unknown",
    )
    names = ("jax", "jaxlib", "flax", "numpy", "routed-experts")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "load_before": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def progress(text: str) -> None:
    """A line on standard error: what runs now."""
    print(text, file=sys.stderr, flush=True)


def write_result(name: str, rows: list[dict[str, object]], **more: object) -> Path | str:
    """Write the command, the machine and the rows as JSON to results/, unless the run is a small one."""
    if "--small" in sys.argv:
        return "--small: no result is written"
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    arguments = [re.sub(r"[^\s=]*/", "", argument) for argument in sys.argv[1:]]  # without folders of this machine
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])
    file.write_text(json.dumps({"command": command, "machine": machine(), **more, "rows": rows}, indent=1) + "\n")
    return file


def print_table(rows: list[dict[str, object]]) -> None:
    """Rows as a table of aligned columns."""
    names = list(rows[0])
    shown = [[f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in shown)) for i, name in enumerate(names)]
    for line in (names, *shown):
        print("  ".join(part.rjust(width) for part, width in zip(line, widths, strict=True)))


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return "not installed"
