"""Qwen3-MoE (Qwen Team 2025): grouped-query attention with q/k norm, rotary positions, top-k experts; dense layers
may be interleaved (`decoder_sparse_step`, `mlp_only_layers`). Attention and its cache are arguments.

Layers are grouped into homogeneous blocks, each scanned: a dense-first model has two. A block's expert weights are
one array [R*E, ...] (layers/moe.py). Dims: N tokens, L layers, R layers of a stack, D hidden, H query heads, G kv
heads, C head dim, E experts, K experts per token, F expert width, I dense width, V vocabulary."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.layer_stack import StackOffsets, StackWeights, StepInputs
from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend
from routed_experts.layers.moe import gated
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.rotary import rotary_cos_sin
from routed_experts.layers.routing import LayerRouting
from routed_experts.models.base.interface import AttentionFn, TokenRouting, checkpointed, slice_layers
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.attention_block import HeadNorms, qk_norm_attention
from routed_experts.models.decoder.fused_path import find_fused_path, run_fused
from routed_experts.models.decoder.sparse_block import (
    ExpertWeights,
    route,
    router_is_stacked,
    router_logits,
    run_experts,
)
from routed_experts.models.families.qwen3_moe_config import Qwen3MoeConfig

ARCHITECTURE = "Qwen3MoeForCausalLM"


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[Array]:
    return nnx.Param((jax.random.normal(rngs.params(), shape) * 0.02).astype(dtype))


class DecoderBlock(nnx.Module):
    """R neighbouring layers of one kind, their weights stacked on the first axis."""

    def __init__(self, config: Qwen3MoeConfig, first: int, end: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.first, self.length, self.is_moe = first, end - first, first in config.moe_layers
        num, dim, heads, groups, c = (
            self.length,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.input_norm, self.post_norm = nnx.Param(jnp.ones((num, dim), dtype)), nnx.Param(jnp.ones((num, dim), dtype))
        self.q_norm, self.k_norm = nnx.Param(jnp.ones((num, c), dtype)), nnx.Param(jnp.ones((num, c), dtype))
        self.qkv = _normal(rngs, (num, dim, (heads + 2 * groups) * c), dtype)
        self.out = _normal(rngs, (num, heads * c, dim), dtype)
        experts = config.router.num_experts if self.is_moe else 1
        width = config.expert_width if self.is_moe else config.dense_width
        self.gate_up = _normal(rngs, (num * experts, dim, 2 * width), dtype)
        self.down = _normal(rngs, (num * experts, width, dim), dtype)
        self.router = _normal(rngs, (num, dim, experts), dtype) if self.is_moe else None

    def norms(self) -> tuple[Float[Array, "R ..."], ...]:
        """The four norms of a layer, layer axis first."""
        return tuple(p[...] for p in (self.input_norm, self.q_norm, self.k_norm, self.post_norm))

    def projections(self) -> tuple[Float[Array, "R D O"], Float[Array, "R HC D"]]:
        """The matrices before and after attention, layer axis first."""
        return self.qkv[...], self.out[...]

    def experts(self) -> tuple[Float[Array, "R E D 2F"], Float[Array, "R E F D"]]:
        """The experts (or the one dense layer) of each layer, layer axis first."""
        gate_up, down = self.gate_up[...], self.down[...]
        return gate_up.reshape(self.length, -1, *gate_up.shape[1:]), down.reshape(self.length, -1, *down.shape[1:])

    def arrays(self, next_norm: Float[Array, " D"], *, eps: float) -> StackWeights:
        """All of a MoE run's weights."""
        assert self.router is not None, "a dense run"
        names = ("input_norm", "post_norm", "q_norm", "k_norm", "qkv", "out", "gate_up", "down")
        weights = zip(
            names,
            (self.input_norm, self.post_norm, self.q_norm, self.k_norm, self.qkv, self.out, self.gate_up, self.down),
            strict=True,
        )
        return StackWeights(
            **{name: param[...] for name, param in weights}, router=self.router[...], next_norm=next_norm, eps=eps
        )


class Qwen3Moe(nnx.Module):
    """The decoder. `__call__` returns hidden states of tokens; `logits` maps hidden states to scores of the
    vocabulary."""

    def __init__(self, config: Qwen3MoeConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed = _normal(rngs, (config.vocab_size, config.hidden_size), dtype)
        self.blocks = nnx.List(
            [DecoderBlock(config, first, end, rngs=rngs, dtype=dtype) for first, end in config.blocks]
        )
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.head = None if config.tie_embeddings else _normal(rngs, (config.hidden_size, config.vocab_size), dtype)
        self.head_bias = None

    def logits(self, hidden: Float[Array, "N D"], *, linear: LinearBackend = REFERENCE_LINEAR) -> Float[Array, "N V"]:
        """Scores of the vocabulary, float32."""
        return linear.run(hidden, self.lm_head()[None], 0, jnp.float32)

    def lm_head(self) -> Float[Array, "D V"]:
        """The matrix that `logits` multiplies by."""
        return self.embed[...].T if self.head is None else self.head[...]

    def __call__(
        self,
        tokens: Int[Array, " N"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: AttentionFn,
        cache: Any,
        capture: RoutedExpertsDeviceCache | None,
        *,
        kernels: Kernels,
        routed: TokenRouting | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]:
        """Run all layers; returns normalised hidden states, the updated cache, and the capture with this step's ids in
        it."""
        config = self.config
        cos, sin = rotary_cos_sin(
            positions, head_dim=config.head_dim, theta=config.rope_theta, scaled=config.scaled_rotary
        )
        shared = StepInputs(cos=cos, sin=sin, valid=valid)
        x = kernels.group.all_gather(jnp.take(self.embed[...], tokens, axis=0))
        first_moe, normed = 0, None
        fused_path = find_fused_path(kernels, attend, routed, tokens.shape[0], config.router)
        for run in self.blocks:
            if fused_path is not None and isinstance(attend, PagedAttend) and run.router is not None:
                arrays, offsets = (
                    run.arrays(self.norm[...], eps=config.norm_eps),
                    StackOffsets(first_layer=run.first, first_moe_layer=first_moe),
                )
                x, normed, cache, capture = run_fused(
                    fused_path,
                    x,
                    arrays,
                    shared,
                    attend,
                    cache,
                    capture,
                    routed,
                    offsets=offsets,
                    spec=config.router,
                    kernels=kernels,
                )
                first_moe += run.length
                continue
            normed = None
            body = self._layer(run, shared, attend, kernels, routed)
            layers = jnp.arange(run.first, run.first + run.length, dtype=jnp.int32)
            columns = layers - run.first + first_moe
            ids = None
            if run.is_moe:
                ids = slice_layers(routed, first_moe, run.length)
                first_moe += run.length
            router = None if run.router is None or router_is_stacked(kernels) else run.router[...]
            projections = None if kernels.linear.takes_stacked else tuple(p[:, None] for p in run.projections())
            experts = None if (kernels.moe if run.is_moe else kernels.linear).takes_stacked else run.experts()
            scanned = (layers, columns, run.norms(), projections, router, experts, ids)
            (x, cache, capture), _ = lax.scan(checkpointed(body) if remat else body, (x, cache, capture), scanned)
        return rms_norm(x, self.norm[...], eps=config.norm_eps) if normed is None else normed, cache, capture

    def _layer(
        self, run: DecoderBlock, shared: StepInputs, attend: AttentionFn, kernels: Kernels, routed: TokenRouting | None
    ) -> Callable[[Any, Any], tuple[Any, None]]:
        """The body of a run's scan: one decoder layer."""
        config = self.config

        def linear(
            x: Float[Array, "N D"], weights: Float[Array, "R D O"], stack_index: Int[Array, ""], dtype: Any = None
        ) -> Float[Array, "N O"]:
            return kernels.linear.run(x, weights, stack_index if kernels.linear.takes_stacked else 0, dtype or x.dtype)

        def layer(carry: Any, scanned: Any) -> tuple[Any, None]:
            x, cache, capture = carry
            index, moe_layer, (input_norm, q_norm, k_norm, post_norm), projections, router, experts, ids = scanned
            stack_index = index - run.first  # in the run's arrays; a slice has its layer at 0
            qkv, out = run.projections() if projections is None else projections
            normed = rms_norm(x, input_norm, eps=config.norm_eps)
            norms = HeadNorms(
                q_norm=q_norm,
                k_norm=k_norm,
                run_q_norm=run.q_norm[...],
                run_k_norm=run.k_norm[...],
                stack_index=stack_index,
                eps=config.norm_eps,
            )
            sizes = {"heads": config.num_heads, "groups": config.num_kv_heads}
            mixed, cache = qk_norm_attention(
                linear(normed, qkv, stack_index), norms, (shared.cos, shared.sin), attend, cache, index, **sizes
            )
            x = x + kernels.group.all_reduce(linear(mixed, out, stack_index))
            normed = rms_norm(x, post_norm, eps=config.norm_eps)
            if run.router is None:
                gate_up, down = (run.gate_up[...], run.down[...]) if experts is None else experts
                hidden = gated(linear(normed, gate_up, stack_index, jnp.float32)).astype(
                    x.dtype
                )  # rounded once, and the stream once
                y = kernels.group.all_reduce(linear(hidden, down, stack_index, jnp.float32))
                return ((x.astype(jnp.float32) + y).astype(x.dtype), cache, capture), None
            logits = router_logits(normed, run.router[...], router, stack_index, kernels)
            replayed = None if routed is None or ids is None else LayerRouting(ids[0], routed.valid, ids[1])
            routing, capture = route(logits, replayed, moe_layer, capture, spec=config.router, kernels=kernels)
            if experts is None:
                chosen = ExpertWeights(run.gate_up[...], run.down[...], stack_index * config.router.num_experts)
            else:
                chosen = ExpertWeights(experts[0], experts[1], jnp.zeros((), jnp.int32))
            y = run_experts(normed, routing, shared.valid, chosen, spec=config.router, kernels=kernels)
            return (x + kernels.group.all_reduce(y), cache, capture), None

        return layer

    @staticmethod
    def weight_sources(config: Qwen3MoeConfig) -> Iterator[WeightSource]:
        """The table of names: where each tensor of a checkpoint belongs."""
        dim = config.hidden_size
        yield WeightSource(
            name="model.embed_tokens.weight", shape=(config.vocab_size, dim), target="embed", index=(), transpose=False
        )
        yield WeightSource(name="model.norm.weight", shape=(dim,), target="norm", index=(), transpose=False)
        if not config.tie_embeddings:
            yield WeightSource(
                name="lm_head.weight", shape=(config.vocab_size, dim), target="head", index=(), transpose=True
            )
        for run, (first, end) in enumerate(config.blocks):
            for layer in range(first, end):
                yield from _layer_sources(config, f"blocks.{run}.", layer, layer - first)


def _layer_sources(config: Qwen3MoeConfig, run: str, layer: int, index: int) -> Iterator[WeightSource]:
    dim, heads, groups, c = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim

    def source(name: str, shape: tuple[int, ...], target: str, *, row: int = index, offset: int = 0) -> WeightSource:
        full = f"model.layers.{layer}.{name}.weight"
        return WeightSource(
            name=full, shape=shape, target=run + target, index=(row,), transpose=len(shape) == 2, offset=offset
        )

    yield source("input_layernorm", (dim,), "input_norm")
    yield source("post_attention_layernorm", (dim,), "post_norm")
    yield source("self_attn.q_norm", (c,), "q_norm")
    yield source("self_attn.k_norm", (c,), "k_norm")
    yield source("self_attn.q_proj", (heads * c, dim), "qkv")
    yield source("self_attn.k_proj", (groups * c, dim), "qkv", offset=heads * c)
    yield source("self_attn.v_proj", (groups * c, dim), "qkv", offset=(heads + groups) * c)
    yield source("self_attn.o_proj", (dim, heads * c), "out")
    if layer not in config.moe_layers:
        yield source("mlp.gate_proj", (config.dense_width, dim), "gate_up")
        yield source("mlp.up_proj", (config.dense_width, dim), "gate_up", offset=config.dense_width)
        yield source("mlp.down_proj", (dim, config.dense_width), "down")
        return
    experts, width = config.router.num_experts, config.expert_width
    yield source("mlp.gate", (experts, dim), "router")
    for expert in range(experts):
        row, name = index * experts + expert, f"mlp.experts.{expert}"
        yield source(f"{name}.gate_proj", (width, dim), "gate_up", row=row)
        yield source(f"{name}.up_proj", (width, dim), "gate_up", row=row, offset=width)
        yield source(f"{name}.down_proj", (dim, width), "down", row=row)
