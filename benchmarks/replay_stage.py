"""What the parts of replay_gpu.py run on: sizes, engines on the accelerator's kernels, and one trained model with its
rollout for all. Dims: B sequences, S tokens of a sequence, G tokens of an answer."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import byte_model
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rollouts import roll_out

from oracles.driver import Bench
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.models.families.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from routed_experts.models.loading.dummy_weights import dummy_model

Tell = Callable[[dict[str, object]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run: models by name, paddings of the engine, sequences of a measurement."""

    models: dict[str, Qwen3MoeConfig]
    requests: int
    tokens: int
    page: int
    dtype: str = "bfloat16"
    sequences: int
    prompt: int
    new: int


def sizes_of(small: bool) -> Sizes:
    """Full sizes, or such as a CPU interprets."""
    if small:
        tiny = byte_model.config_of(hidden=32, layers=2, experts=8, top_k=2, width=16, head=16)
        return Sizes(
            models={"tiny": tiny}, requests=4, tokens=16, page=16, dtype="float32", sequences=4, prompt=8, new=8
        )
    wide = byte_model.config_of(hidden=2048, layers=4, experts=128, width=768, head=128)
    models = {"12 layers of 64 experts, D 512": byte_model.config_of(), "4 layers of 128 experts, D 2048": wide}
    return Sizes(models=models, requests=256, tokens=1024, page=16, sequences=512, prompt=32, new=224)


def bench_of(model: Any, sizes: Sizes, *, tapped: bool, context: int = 256) -> Bench:
    """An engine core on the accelerator's kernels, with a tap before the experts or without."""
    interpret = jax.default_backend() != "gpu"
    return Bench(
        model,
        gpu_kernels(interpret=interpret),
        gpu_attention_backend(interpret=interpret),
        moe_backend="tapped" if tapped else "untapped",
        attention_backend="gpu",
        context_length=context,
        page_size=sizes.page,
        max_total_tokens=sizes.requests * (context + 16),
        precompile_bs_paddings=(sizes.requests,),
        precompile_token_paddings=(sizes.tokens,),
        mem_fraction_static=0.9,
    )


def random_model(config: Qwen3MoeConfig, dtype: str, seed: int = 0) -> Qwen3Moe:
    """Random weights that spread tokens over all experts."""
    return dummy_model(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)), seed=seed)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A trained model in the served dtype, and what its engine said: tokens [B S], logprobs [B G] and a record a
    sequence."""

    model: Qwen3Moe
    tokens: np.ndarray
    said: np.ndarray
    records: list[RoutedExperts]


class Stage:
    """What the parts share; the rollout is made when a part first asks for it."""

    def __init__(self, sizes: Sizes, args: argparse.Namespace) -> None:
        self.sizes, self.args = sizes, args
        self._rollout: Rollout | None = None

    def rollout(self, tell: Tell) -> Rollout:
        """Train for --seconds, roll out in the served dtype; or what there is of that already."""
        if self._rollout is None:
            self._rollout = self._made(tell)
        return self._rollout

    def _made(self, tell: Tell) -> Rollout:
        sizes, args = self.sizes, self.args
        text, held_out = byte_model.read_text(200_000 if args.small else 60_000_000)
        tell({"what": "text", "bytes": text.size, "held out": held_out.size})
        small = {"batch": 2, "length": 32, "block": 2} if args.small else {"batch": args.batch}
        plan = byte_model.Plan(seconds=args.seconds, **small)
        graphdef, params = byte_model.start(next(iter(sizes.models.values())), args.weights)
        if args.seconds > 0:
            params = byte_model.train(graphdef, params, text, plan, lambda row: tell({"what": "training", **row}))
        if args.weights is not None:
            byte_model.keep(params, args.weights)
        model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(sizes.dtype), params))
        del params
        bench = bench_of(model, sizes, tapped=False, context=sizes.prompt + sizes.new)
        starts = np.random.default_rng(2).integers(0, held_out.size - sizes.prompt, (sizes.sequences, 1))
        prompts = held_out[starts + np.arange(sizes.prompt)].astype(np.int32)
        tokens, said, records, spent = roll_out(bench.assembly.core, prompts, sizes.new)
        tell(
            {"what": "rollout", "tokens": said.size, "tokens a second": said.size / spent, "nats a byte": -said.mean()}
        )
        return Rollout(model, tokens, said, records)
