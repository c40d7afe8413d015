"""Train the EAGLE-3 head of the demo model: text that the demo model writes -> its hidden states -> Adam on the head,
with the first drafts of a chain unrolled (training-time test, arXiv 2503.01840) -> a folder in the head's format.

The loss is the cross-entropy of the head's scores against the target's own distribution of the same token. Dims: B
sequences, S tokens of a sequence, H heads, G kv heads, C head dim, D hidden, V vocabulary."""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from routed_experts import Engine, SpeculativeConfig
from routed_experts.layers.attention import causal_attention
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder, embed
from routed_experts.models.drafts.eagle3_head import Eagle3Config, Eagle3Head, read_eagle3
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.models.loading.model_source import demo_head_path, demo_model_path
from routed_experts.models.model_folder import ModelFolder

TAPPED = (1, 3, 5)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 2048,
    "draft_vocab_size": 2048,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPPED), "use_aux_hidden_state": True},
}
PROMPTS = [
    "Once upon a time there was a small fox who lived in a forest.",
    "def first(iterable):",
    "Mr. Speaker, the state of the Union",
    "The river was wide, and the old man",
]
REPORTED: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 40},
    {"temperature": 1.0},
)
KERNELS = Kernels(moe=MOE_BACKENDS["grouped"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how fast to train. `drafts`: of a chain, that are unrolled."""

    steps: int
    rows: int = 16
    length: int = 96
    peak: float = 5e-3
    drafts: int = 3
    seed: int = 0


def write_text(length: int, *, seeds: int = 1) -> Int[np.ndarray, "B S"]:
    """Text of the demo model: `seeds` sequences of `length` tokens for each first token; a third of them sampled as the
    demo samples, a third greedy, a third at temperature 1."""
    kinds = [{"temperature": 0.6, "top_k": 40}, {"temperature": 0.0}, {"temperature": 1.0}]
    sequences = list[list[int]]()
    with Engine("demo", precompile_bs_paddings=(32,), precompile_token_paddings=(256,)) as engine:
        starts = range(engine.input_processor.limits.vocab_size)
        for seed in range(seeds):
            for kind in range(len(kinds)):
                prompts = [[start] for start in starts if start % len(kinds) == (kind + seed) % len(kinds)]
                for first in range(0, len(prompts), 256):
                    outs = engine.generate(
                        input_ids=prompts[first : first + 256],
                        sampling_params={**kinds[kind], "seed": seed, "max_new_tokens": length - 1, "ignore_eos": True},
                    )
                    assert isinstance(outs, list)
                    for prompt, out in zip(prompts[first : first + 256], outs, strict=True):
                        sequences.append([*prompt, *out["output_ids"]])  # type: ignore[misc]
    return np.array(sequences, np.int32)


def target_states(
    target: FamilyDecoder, tokens: Int[np.ndarray, "B S"], rows: int = 32
) -> tuple[Float[np.ndarray, "B S D"], Float[np.ndarray, "B S 3 D"]]:
    """The final hidden states of the target, and the outputs of the tapped layers."""
    graph, state = nnx.split(target)

    @jax.jit
    def run(state: nnx.State, tokens: Int[Array, "B S"]) -> tuple[Array, Array]:
        batch, length = tokens.shape

        def attend(q: Array, k: Array, v: Array, cache: None, layer: Array) -> tuple[Array, None]:
            queries, keys, values = (x.reshape(batch, length, *x.shape[1:]) for x in (q, k, v))
            return causal_attention(queries, keys, values, None).reshape(q.shape), cache

        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape).reshape(-1)
        valid = jnp.ones(tokens.size, bool)
        inputs = tokens.reshape(-1), positions, valid, attend, None, None
        hidden, _, _, streams = nnx.merge(graph, state).run_tapped(*inputs, kernels=KERNELS, tapped=TAPPED)
        return hidden.reshape(batch, length, -1), jnp.stack(streams, axis=1).reshape(batch, length, len(TAPPED), -1)

    parts = [run(state, jnp.asarray(tokens[first : first + rows])) for first in range(0, len(tokens), rows)]
    hidden, streams = (np.concatenate([np.asarray(part[at]) for part in parts]) for at in (0, 1))
    return hidden, streams


def chain_attention(batch: int, length: int) -> Any:
    """Attention of draft j of a chain. Row t reads the keys of draft 0 up to t - j, and of each later draft the one
    that led to it; the cache is a list of the keys and values of the drafts before."""

    def attend(
        q: Float[Array, "N H C"],
        k: Float[Array, "N G C"],
        v: Float[Array, "N G C"],
        cache: list[tuple[Array, Array]],
        layer: Any,
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        repeats, index = q.shape[1] // k.shape[1], len(cache)
        own = tuple(jnp.repeat(x.reshape(batch, length, *x.shape[1:]), repeats, axis=2) for x in (k, v))
        chain = [*cache, own]
        query = q.reshape(batch, length, *q.shape[1:]) / jnp.sqrt(q.shape[-1])
        allowed = jnp.arange(length)[:, None] - index >= jnp.arange(length)
        scores = jnp.where(allowed, jnp.einsum("bthc,bshc->bhts", query, chain[0][0]), -1e30)
        later = [[jnp.roll(x, index - number, axis=1) for x in chain[number]] for number in range(1, index + 1)]
        ahead = [jnp.einsum("bthc,bthc->bht", query, key)[..., None] for key, _ in later]
        weights = jax.nn.softmax(jnp.concatenate([scores, *ahead], axis=-1), axis=-1)
        mixed = jnp.einsum("bhts,bshc->bthc", weights[..., :length], chain[0][1])
        for number, (_, value) in enumerate(later):
            mixed = mixed + weights[..., length + number].transpose(0, 2, 1)[..., None] * value
        return mixed.reshape(q.shape), chain

    return attend


def losses(
    head: Eagle3Head,
    target: FamilyDecoder,
    tokens: Int[Array, "B S"],
    hidden: Float[Array, "B S D"],
    streams: Float[Array, "B S 3 D"],
    drafts: int,
) -> tuple[Float[Array, " drafts"], Float[Array, " drafts"]]:
    """The mean loss of each draft of a chain, and how often its best token is the target's."""
    batch, length = tokens.shape
    flat = streams.reshape(batch * length, len(TAPPED), -1)
    features = head.features(hidden.reshape(batch * length, -1), list(jnp.moveaxis(flat, 1, 0)), kernels=KERNELS)
    successors = jnp.roll(tokens, -1, axis=1).reshape(-1)
    embedded = embed(target.config, target.embed[...], successors)
    scores = target.logits(hidden.reshape(batch * length, -1)).reshape(batch, length, -1)
    targets = jax.nn.softmax(jnp.roll(scores, -1, axis=1))  # row t: of token t + 2
    best = jnp.argmax(targets, axis=-1)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)).reshape(-1)
    valid, attend, cache = jnp.ones(batch * length, bool), chain_attention(batch, length), list[Any]()
    mean_losses, right = list[Array](), list[Array]()
    for index in range(drafts):
        output, recycled, cache = head(
            features,
            embedded,
            positions,
            valid,
            attend,
            cache,
            draft_index=index,
            target_norm=target.norm[...],
            kernels=KERNELS,
        )
        drafted = head.lm_head(target.lm_head()).logits(output).reshape(batch, length, -1)
        rows = slice(index, length - 1)  # those whose chain begins in the sequence, and whose target is known
        loss = -jnp.sum(targets * jax.nn.log_softmax(drafted), axis=-1)[:, rows]
        mean_losses.append(loss.mean())
        right.append((jnp.argmax(drafted, axis=-1) == best)[:, rows].mean())
        features = jnp.roll(recycled.reshape(batch, length, -1), 1, axis=1).reshape(batch * length, -1)
    return jnp.stack(mean_losses), jnp.stack(right)


def batches(count: int, rows: int, rng: np.random.Generator) -> Iterator[Int[np.ndarray, " B"]]:
    """Indices of sequences, shuffled anew in each epoch."""
    while True:
        order = rng.permutation(count)
        for first in range(0, count - rows + 1, rows):
            yield order[first : first + rows]


def train(
    head: Eagle3Head, target: FamilyDecoder, tokens: Int[np.ndarray, "B S"], plan: Plan
) -> list[tuple[int, list[float], list[float]]]:
    """Update the head itself; returns the curve: step, mean loss and share of right tokens by draft since the last
    point."""
    hidden, streams = target_states(target, tokens)
    graph, state = nnx.split(head)
    target_graph, target_state = nnx.split(target)
    schedule = optax.warmup_cosine_decay_schedule(0.0, plan.peak, plan.steps // 20 + 1, plan.steps, plan.peak * 0.02)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
    memory, rng = rule.init(state), np.random.default_rng(plan.seed)

    @jax.jit(donate_argnums=(0, 1))
    def update(state: nnx.State, memory: Any, target_state: nnx.State, *batch: Array) -> tuple[Any, Any, Any]:
        def objective(state: nnx.State) -> tuple[Array, tuple[Array, Array]]:
            merged = nnx.merge(graph, state), nnx.merge(target_graph, target_state)
            by_draft, right = losses(*merged, *batch, drafts=plan.drafts)
            return by_draft.sum(), (by_draft, right)

        (_, parts), gradient = jax.value_and_grad(objective, has_aux=True)(state)
        change, memory = rule.update(gradient, memory, state)
        return optax.apply_updates(state, change), memory, parts

    curve, seen = list[tuple[int, list[float], list[float]]](), list[Any]()
    for step, rows in zip(range(1, plan.steps + 1), batches(len(tokens), plan.rows, rng), strict=False):
        state, memory, parts = update(state, memory, target_state, *(x[rows] for x in (tokens, hidden, streams)))
        seen.append(parts)
        if step % 100 == 0 or step == plan.steps:
            loss, right = (np.mean([np.asarray(part[at]) for part in seen], axis=0).tolist() for at in (0, 1))
            curve.append((step, loss, right))
            print(f"step {step} of {plan.steps}  loss {np.round(loss, 3)}  right {np.round(right, 3)}", flush=True)
            seen = []
    nnx.update(head, state)
    return curve


def head_config() -> Eagle3Config:
    """The head, as its folder describes it; scores are the target's own head's."""
    config = read_eagle3(ConfigReader(CONFIG, "CONFIG"))
    return dataclasses.replace(config, tapped_layers=TAPPED, own_head=False)


def report() -> None:
    """Print what the head in the package accepts, by sampling."""
    speculative = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="demo", num_steps=3, adaptive=False)
    sizes: dict[str, Any] = {"precompile_bs_paddings": (4,), "precompile_token_paddings": (64,)}
    with Engine("demo", **sizes, deterministic=True, speculative=speculative) as engine:
        for sampling in REPORTED:
            outs = engine.generate(PROMPTS, {**sampling, "seed": 5, "max_new_tokens": 64, "ignore_eos": True})
            metas = [cast("dict[str, Any]", out["meta_info"]) for out in cast("list[dict[str, object]]", outs)]
            steps, proposed, accepted = (
                sum(meta[name] for meta in metas)
                for name in ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
            )
            print(
                f"{sampling}: {(accepted + steps) / steps:.2f} tokens a verify step, {accepted / proposed:.2f} accepted"
            )


def main() -> None:
    """Write text, train, save, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo_head_path(), help="folder to write")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--seeds", type=int, default=1, help="texts for each first token")
    parser.add_argument("--report", action="store_true", help="report on the head in the package, and train none")
    options = parser.parse_args()
    if options.report:
        return report()
    began, plan = time.perf_counter(), Plan(steps=options.steps)
    tokens = write_text(plan.length, seeds=options.seeds)
    print(f"{tokens.size:,} tokens written in {time.perf_counter() - began:.0f} s", flush=True)
    target = ModelFolder.open(demo_model_path()).load(jnp.dtype("float32"))
    config = head_config()
    head = Eagle3Head(config, rngs=nnx.Rngs(plan.seed), dtype=jnp.float32)
    train(head, target, tokens, plan)
    save(options.out, CONFIG, hugging_face_tensors(head, config.sources()))
    (options.out / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a wheel would keep
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(json.dumps({"minutes": round((time.perf_counter() - began) / 60, 1), "bytes": size}))


if __name__ == "__main__":
    main()
