"""Models and engine cores on the GPU kernels, for the replay laws and the row checks on a GPU.

Dims: B sequences, S tokens of a sequence, M MoE layers, K experts per token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oracles.driver import Bench
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.control.score import Scorer
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.loading.dummy_weights import dummy_model
from support.qwen3_configs import qwen3_config, qwen3_keys

VOCAB_SIZE = 256


def byte_keys(*, hidden=512, layers=12, experts=64, top_k=8, width=256, head=64) -> dict[str, object]:
    """The config.json of a Qwen3-MoE of bytes; two query heads to a key-value head."""
    heads = max(2, hidden // head)
    return qwen3_keys(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head,
        intermediate_size=4 * width,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        max_position_embeddings=1024,
    )


def byte_config(**sizes: int) -> FamilyConfig:
    """The config of `byte_keys`."""
    return qwen3_config(**byte_keys(**sizes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and the paddings of its engine."""

    config: FamilyConfig
    requests: int = 256
    tokens: int = 1024
    page_size: int = 16
    dtype: str = "bfloat16"


LARGE = {
    "12 layers of 64 experts, D 512": Sizes(config=byte_config()),
    "4 layers of 128 experts, D 2048": Sizes(
        config=byte_config(hidden=2048, layers=4, experts=128, width=768, head=128)
    ),
}
# What a CPU interprets.
SMALL = Sizes(
    config=byte_config(hidden=32, layers=2, experts=8, top_k=2, width=16, head=16),
    requests=4,
    tokens=16,
    dtype="float32",
)


def random_model(sizes: Sizes, seed=0) -> FamilyDecoder:
    """Random weights that spread tokens over all experts."""
    return dummy_model(lambda: FamilyDecoder(sizes.config, rngs=nnx.Rngs(0), dtype=jnp.dtype(sizes.dtype)), seed=seed)


def gpu_bench(model, sizes: Sizes, *, probed, context=256, weights=False, num_draft_tokens=0) -> Bench:
    """An engine core on the GPU kernels, with a probe before the experts or without; a CPU interprets them. `weights`:
    it records combine weights, too. `num_draft_tokens`: of SpeculativeConfig; 0: its steps verify no drafts."""
    interpret = jax.default_backend() != "gpu"
    return Bench(
        model,
        gpu_kernels(interpret=interpret),
        gpu_attention_backend(interpret=interpret),
        moe_backend="probed" if probed else "unprobed",
        attention_backend="gpu",
        num_draft_tokens=num_draft_tokens,
        context_length=context,
        page_size=sizes.page_size,
        max_total_tokens=sizes.requests * (context + 16),
        precompile_bs_paddings=(sizes.requests,),
        precompile_token_paddings=(sizes.tokens,),
        mem_fraction_static=0.9,
        enable_return_routed_experts_weights=weights,
    )


def score(bench: Bench, tokens, records=None):
    """Logprobs [B, S] and records of sequences [B, S], scored live or on the routes of `records`."""
    scorer = Scorer(bench.args, bench.assembly.buckets, bench.runner, lambda start: start())
    outputs = scorer.run([*tokens], records, lambda: (bench.runner.state, WeightVersion()))
    return np.stack([output.logprobs for output in outputs]), [output.routed_experts for output in outputs]


def random_routes(rng, shape, num_experts) -> np.ndarray:
    """Distinct ids [..., K] that no router would choose."""
    ids = np.tile(np.arange(num_experts, dtype=np.uint8), (*shape[:-1], 1))
    return np.ascontiguousarray(rng.permuted(ids, axis=-1)[..., : shape[-1]])
