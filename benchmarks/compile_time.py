"""How the step's program grows with the number of layers: size of its lowered text, and seconds to compile it.

    python benchmarks/compile_time.py [--layers 4 48] [--rounds 3]

One family whose layers alternate (GPT-OSS: a window in every other layer), one with dense layers first (DeepSeek-V3)
and one with states (Qwen3-Next), at tiny sizes: what is compiled depends on the kinds of layers, not on their width.
Nothing is read from a cache."""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from common import print_table, write_result
from flax import nnx

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.registry import FAMILIES

SIZES = {
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
    values = SIZES | CONFIGS[architecture] | {"num_hidden_layers": num_layers}
    family = FAMILIES[architecture]
    config = family.read_config(ConfigReader(values, "config.json"))
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: family.build(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(jnp.float32)))
    )
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
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


def main() -> None:
    """Lower, compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 48])
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each program; the median is told")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    lower("GptOssForCausalLM", args.layers[0]).compile()  # what a process pays once
    rows: list[dict[str, object]] = []
    for architecture in CONFIGS:
        for num_layers in args.layers:
            seconds, size = [], 0
            for _ in range(args.rounds):
                lowered = lower(architecture, num_layers)
                size, begun = len(lowered.as_text()), time.perf_counter()
                lowered.compile()
                seconds.append(time.perf_counter() - begun)
            row = {"architecture": architecture, "layers": num_layers, "lowered_characters": size}
            rows.append(row | {"compile_s": round(statistics.median(seconds), 3)})
    print_table(rows)
    write_result("compile_time_cpu", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
