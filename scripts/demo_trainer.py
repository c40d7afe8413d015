"""Train the demo model: corpus -> tokenizer -> batches -> Muon and Adam on the module that also serves -> a Hugging
Face folder. The load-balancing loss enters through the expert backend, so the model file stays free of it. Dims: B
sequences, S tokens of a sequence, N tokens of a batch, R MoE layers, E experts, K experts per token, D hidden."""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo_corpus
import demo_report
import demo_tokenizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from routed_experts.layers.moe import ExpertCall, MoeBackend, grouped_experts
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import weight_sources
from routed_experts.models.families.qwen3_moe import read_qwen3_moe
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.replay.forward import forward

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": demo_tokenizer.VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.003,
    "output_router_logits": False,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "pad_token_id": demo_tokenizer.VOCAB_SIZE - 3,
    "eos_token_id": demo_tokenizer.VOCAB_SIZE - 1,
}
README = """# Demo model of routed_experts

A very small mixture-of-experts language model (Qwen3-MoE format) that exists to make routing visible; it knows
nothing worth knowing. Made by `scripts/train_demo`; data, licences, loss and load numbers: docs/demo-model.md.
Weights: Apache-2.0. Trained on public-domain literature and speeches, on the sources of boltons (BSD-3-Clause, (c)
Mahmoud Hashemi and others), more-itertools (MIT, (c) Erik Rose and others), sortedcontainers (Apache-2.0, (c) Grant
Jenks) and toolz (BSD-3-Clause, (c) Matthew Rocklin and others), and on chats made by rule. Text that it writes has
the language of its sources' times.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how fast to train. In the last `skip_share` of the steps, positions jump once inside each sequence,
    so that distances of the whole context are seen at the cost of short sequences (PoSE, Zhu et al. 2023)."""

    steps: int
    batch_tokens: int
    peak: float
    length: int = 256
    skip_share: float = 0.25
    warmup: int = 100
    balance: float = CONFIG["router_aux_loss_coef"]
    seed: int = 0


@jax.custom_vjp
def attach_loss(y: Float[Array, "N D"], loss: Float[Array, ""]) -> Float[Array, "N D"]:
    """Give `y` unchanged; in the backward pass `loss` gets gradient 1, as if it had been added to the objective."""
    return y


def _attach_forward(y: Float[Array, "N D"], loss: Float[Array, ""]) -> tuple[Float[Array, "N D"], None]:
    return y, None


def _attach_backward(_: None, gradient: Float[Array, "N D"]) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    return gradient, jnp.ones(())


attach_loss.defvjp(_attach_forward, _attach_backward)


def balanced_experts(routers: Float[Array, "R D E"], coefficient: float) -> MoeBackend:
    """The grouped backend with the load-balancing loss of Switch Transformer (Fedus et al. 2021, eq. 4) attached to its
    output: coefficient * E * sum over e of (share of slots on e) * (mean router probability of e); 1 * coefficient when
    balanced."""

    def run(call: ExpertCall) -> Float[Array, "N D"]:
        experts = call.num_experts
        router = lax.dynamic_index_in_dim(routers, call.first_expert // experts, keepdims=False)
        chance = jnp.mean(jax.nn.softmax(call.x @ router, axis=-1), axis=0)
        load = jnp.mean(jax.nn.one_hot(call.ids, experts), axis=(0, 1))
        stacks = jnp.asarray(call.gate_up), jnp.asarray(call.down)
        gate_up, down = (lax.dynamic_slice_in_dim(stack, call.first_expert, experts) for stack in stacks)
        layer = dataclasses.replace(call, gate_up=gate_up, down=down, first_expert=jnp.zeros((), jnp.int32))
        return attach_loss(grouped_experts(layer), coefficient * experts * jnp.dot(load, chance))

    return MoeBackend(name="balanced", run=run, takes_stacked=True)


def windows(
    documents: list[Int[np.ndarray, " S"]], batch: int, length: int, rng: np.random.Generator
) -> Iterator[Int[np.ndarray, "B S1"]]:
    """Yield batches of length + 1 tokens for ever: each epoch joins the documents in a new order and shuffles the
    windows."""
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        starts = np.arange(rng.integers(length), len(stream) - length - 1, length)
        rng.shuffle(starts)
        for first in range(0, len(starts) - batch + 1, batch):
            yield np.stack([stream[start : start + length + 1] for start in starts[first : first + batch]])


def skipping_positions(batch: int, length: int, rng: np.random.Generator) -> Int[np.ndarray, "B S"]:
    """Positions of each row: 0.. up to a random place, then the rest of the row further on, still inside the
    context."""
    jump = rng.integers(CONFIG["max_position_embeddings"] - length + 1, size=(batch, 1))
    return (np.arange(length) + jump * (np.arange(length) >= rng.integers(length, size=(batch, 1)))).astype(np.int32)


def optimizer(plan: Plan) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of attention and experts, Adam for embedding, routers and norms; warmup and
    cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, plan.peak, plan.warmup, plan.steps, plan.peak * 0.02)

    def matrices(state: Any) -> Any:
        def axes(path: Any, _: Array) -> MuonDimensionNumbers | None:
            stacked = any(name in jax.tree_util.keystr(path) for name in ("qkv", "'out'", "gate_up", "down"))
            return MuonDimensionNumbers(reduction_axis=1, output_axis=2) if stacked else None

        return jax.tree_util.tree_map_with_path(axes, state)

    rule = muon(schedule, weight_decay=0.1, adam_b2=0.95, muon_weight_dimension_numbers=matrices, consistent_rms=0.2)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def train(model: FamilyDecoder, documents: list[Int[np.ndarray, " S"]], plan: Plan) -> list[tuple[int, float]]:
    """Update `model` in place; returns the loss curve as (step, mean next-token loss since the last point)."""
    graph, state = nnx.split(model)
    rule = optimizer(plan)
    memory, rng, curve = rule.init(state), np.random.default_rng(plan.seed), []

    def objective(state: nnx.State, tokens: Int[Array, "B S1"], positions: Int[Array, "B S"]) -> Float[Array, ""]:
        merged = nnx.merge(graph, state)
        backend = balanced_experts(merged.blocks[-1][0]["router"][...], plan.balance)
        logits = forward(merged, tokens[:, :-1], positions=positions, backend=backend).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit(donate_argnums=(0, 1))
    def update(state: nnx.State, memory: Any, *batch: Int[Array, "B ..."]) -> tuple[nnx.State, Any, Float[Array, ""]]:
        loss, gradient = jax.value_and_grad(objective)(state, *batch)
        change, memory = rule.update(gradient, memory, state)
        return optax.apply_updates(state, change), memory, loss

    rows, losses, began = plan.batch_tokens // plan.length, [], time.perf_counter()
    plain = np.broadcast_to(np.arange(plan.length, dtype=np.int32), (rows, plan.length))
    batches = windows(documents, rows, plan.length, rng)
    for step in range(1, plan.steps + 1):
        positions = plain if step <= plan.steps * (1 - plan.skip_share) else skipping_positions(rows, plan.length, rng)
        state, memory, loss = update(state, memory, jnp.asarray(next(batches)), jnp.asarray(positions))
        losses.append(loss)
        if step % 50 == 0 or step == plan.steps:
            curve.append((step, float(np.mean(jax.device_get(losses)))))
            rate = len(losses) * plan.batch_tokens / (time.perf_counter() - began)
            print(f"step {step:5d} of {plan.steps}  loss {curve[-1][1]:.4f}  {rate:,.0f} tokens/s", flush=True)
            losses, began = [], time.perf_counter()
    nnx.update(model, state)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, default=Path("demo-output/corpus"), help="folder of archives and corpus.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("src/routed_experts/demo_model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--peak", type=float, default=1e-2, help="highest learning rate")
    options = parser.parse_args()
    plan = Plan(steps=options.steps, batch_tokens=options.batch_tokens, peak=options.peak)
    began = time.perf_counter()
    corpus = demo_report.read(demo_corpus.write(options.corpus))
    tokenizer = demo_tokenizer.train(document.text for document in corpus if not document.held_out)
    demo_tokenizer.write(tokenizer, options.out, context_length=CONFIG["max_position_embeddings"])
    documents = [demo_report.encode(tokenizer, document.text) for document in corpus if not document.held_out]
    print(f"{sum(map(len, documents)):,} tokens to train on", flush=True)
    config = read_qwen3_moe(ConfigReader(CONFIG, "CONFIG"))
    model = FamilyDecoder(config, rngs=nnx.Rngs(plan.seed), dtype=jnp.float32)
    curve = train(model, documents, plan)
    save(options.out, CONFIG, hugging_face_tensors(model, weight_sources(config)))
    (options.out / "README.md").write_text(README, encoding="utf-8")
    (options.out / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a wheel would keep
    minutes = (time.perf_counter() - began) / 60
    (options.corpus / "training.json").write_text(
        json.dumps({"minutes": minutes, "curve": curve}) + "\n", encoding="utf-8"
    )
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"trained in {minutes:.1f} minutes; {size:,} bytes in {options.out}")
    demo_report.report(options.out, [document for document in corpus if document.held_out])


if __name__ == "__main__":
    main()
