"""The demo model's rollout in bfloat16: what replay leaves of the mismatch, and where the rest comes from.

`by_site` rounds a plain float32 forward on the rollout's routes to bfloat16 at one site of every layer and nowhere
else (`alone`), or everywhere but there (`without`): k3 against no rounding. Dims: B sequences, S tokens, G tokens of
an answer, D hidden."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from tokenizers import Tokenizer
from training.rollouts import compare, roll_out, training_logprobs

from routed_experts.core.server_args import ServerArgs
from routed_experts.demo import demo_model_path
from routed_experts.engine.build.builder import build_engine
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import RoutedBatch, Sample, align

PROMPT, NEW = 32, 96
TEXT = (
    "Once upon a time there was a sea captain who counted the stars. What is the capital of France? "
    "def add(a, b): return a + b "
)
SITES = {
    "stream": "the residual stream, after each addition",
    "norm": "norms of layers, before and after the scale",
    "heads": "queries and keys: norms and rotation",
    "qkv": "projections to queries, keys, values",
    "mixed": "attention's output, and its projection",
    "inner": "experts: gate, up, and their product",
    "experts": "experts: each output, and their sum",
}
Rounder = Callable[[str, Array], Array]


def attention(h: Float[Array, "B S D"], run: Any, layer: int, config: Any, r: Rounder) -> Float[Array, "B S D"]:
    """Causal attention of one layer, and its projection."""
    (batch, length, _), heads, groups, c = h.shape, config.num_heads, config.num_kv_heads, config.head_dim
    cos, sin = (jnp.tile(part, 2) for part in config.layers[0].mixer.rotary.cos_sin(jnp.arange(length)))
    qkv = r("qkv", h @ run["qkv"][layer]).reshape(batch, length, heads + 2 * groups, c)

    def rotated(x: Array, scale: Array) -> Array:
        x = norm(x, scale, config, lambda _, value: r("heads", value))
        low, high = jnp.split(x, 2, axis=-1)
        return r("heads", x * cos[None, :, None] + jnp.concatenate([-high, low], axis=-1) * sin[None, :, None])

    q, k = (
        rotated(qkv[:, :, :heads], run["q_norm"][layer]),
        rotated(qkv[:, :, heads : heads + groups], run["k_norm"][layer]),
    )
    q = q.reshape(batch, length, groups, heads // groups, c)
    scores = jnp.einsum("bsgrc,btgc->bgrst", q, k) * c**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bgrst,btgc->bsgrc", jax.nn.softmax(scores, axis=-1), qkv[:, :, heads + groups :])
    return r("mixed", r("mixed", mixed.reshape(batch, length, -1)) @ run["out"][layer])


def norm(x: Array, scale: Array, config: Any, r: Rounder) -> Array:
    """Root-mean-square norm, rounded as plain bfloat16 layers round it."""
    return r("norm", r("norm", x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)) * scale)


def gated(h: Array, gate_up: Array, r: Rounder) -> Array:
    """SiLU(gate) * up."""
    gate, up = jnp.split(r("inner", h @ gate_up), 2, axis=-1)
    return r("inner", r("inner", jax.nn.silu(gate)) * up)


def sparse(
    h: Float[Array, "B S D"], run: Any, layer: int, ids: Array, config: Any, r: Rounder
) -> Float[Array, "B S D"]:
    """The experts of one layer on given ids, each run on every token."""
    experts = config.capture_spec.num_experts
    weights = jax.nn.softmax(jnp.take_along_axis(h @ run["router"][layer], ids, axis=-1), axis=-1)
    gate_up, down = (run[name][layer * experts : (layer + 1) * experts] for name in ("gate_up", "down"))
    wide = jnp.broadcast_to(h, (experts, *h.shape))
    outputs = r("experts", jnp.einsum("ebsf,efd->bsed", gated(wide, gate_up[:, None], r), down))
    return r("experts", jnp.einsum("bskd,bsk->bsd", jnp.take_along_axis(outputs, ids[..., None], axis=2), weights))


def forward(weights: Any, tokens: Array, ids: Array, config: Any, sites: frozenset[str]) -> Float[Array, "B G"]:
    """Logprobs of the answers by plain float32 code that rounds at `sites`."""

    def r(site: str, x: Array) -> Array:
        return jax.lax.reduce_precision(x, 8, 7) if site in sites else x

    x, column = weights["embed"][tokens], 0
    for index, block in enumerate(config.blocks):
        run = weights["blocks"][index][0]
        for layer in range(block.repeats):
            x = r("stream", x + attention(norm(x, run["input_norm"][layer], config, r), run, layer, config, r))
            h = norm(x, run["post_norm"][layer], config, r)
            if "router" not in run:
                y = r("experts", gated(h, run["dense_gate_up"][layer], r) @ run["dense_down"][layer])
            else:
                y = sparse(h, run, layer, ids[:, :, column], config, r)
                column += 1
            x = r("stream", x + y)
    logits = norm(x, weights["norm"], config, r) @ weights["embed"].T
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return logprobs[:, PROMPT - 1 :]


def by_site(model: Any, tokens: np.ndarray, routed: RoutedBatch) -> list[dict[str, object]]:
    """k3 of each site against no rounding, routes given everywhere (the last row, of which nothing is known, does not
    matter)."""
    weights = nnx.to_pure_dict(nnx.split(model)[1])
    run = jax.jit(functools.partial(forward, config=model.config), static_argnames="sites")

    def logprobs(sites: set[str]) -> np.ndarray:
        parts = (slice(first, first + 32) for first in range(0, len(tokens), 32))
        made = [
            run(weights, jnp.asarray(tokens[p]), jnp.asarray(routed.ids[p], jnp.int32), sites=frozenset(sites))
            for p in parts
        ]
        return np.concatenate([np.asarray(part, np.float64) for part in made])

    def k3(sites: set[str]) -> float:
        d = exact - logprobs(sites)
        return float(np.mean(np.exp(d) - 1 - d))

    exact, every = logprobs(set()), set(SITES)
    rows: list[dict[str, object]] = [
        {"site": "everywhere", "alone": k3(every), "without": 0.0, "what": "as plain bfloat16 layers round"}
    ]
    return rows + [
        {"site": name, "alone": k3({name}), "without": k3(every - {name}), "what": what} for name, what in SITES.items()
    ]


def measure(
    sequences: int, rounded: int, new: int = NEW
) -> tuple[list[dict[str, object]], list[dict[str, object]], int]:
    """k3 live, replayed, and replayed with combine weights, of so many answers; k3 by site of the first `rounded`; and
    the number of tokens."""
    folder = demo_model_path()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT * (sequences // 4 + 8)).ids
    prompts = np.array([ids[7 * index : 7 * index + PROMPT] for index in range(sequences)], np.int32)
    sizes = {
        "precompile_bs_paddings": (min(256, sequences),),
        "precompile_token_paddings": (1024,),
        "max_total_tokens": 256 * 160,
        "context_length": 256,
    }
    server = ServerArgs(
        model_path=str(folder),
        dtype="bfloat16",
        enable_return_routed_experts=True,
        enable_return_routed_experts_weights=True,
        **sizes,
    )
    built = build_engine(server)
    assert built.capture is not None, "the demo model has experts"
    tokens, sampled, records, _ = roll_out(built.core, prompts, new, built.capture)
    model = ModelFolder.open(folder).load(jnp.dtype("float32"))
    logprobs, _ = training_logprobs(model, tokens, records, PROMPT, MOE_BACKENDS["grouped"])
    gains = compare(logprobs["live"] - sampled, logprobs["replayed"] - sampled)
    sides = logprobs["replayed"] - sampled, logprobs["with weights"] - sampled
    gains += compare(*sides, names=("replayed", "with weights"))
    samples = [Sample(record, tokens.shape[1]) for record in records[:rounded]]
    routed = align(samples, layout="pad_right", seq_len=tokens.shape[1], spec=model.config.capture_spec)
    return gains, by_site(model, tokens[:rounded], routed), sampled.size
