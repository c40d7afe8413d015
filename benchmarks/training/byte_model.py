"""A byte-level Qwen3-MoE that is trained where it is measured: 12 layers, 64 experts, top-8, hidden 512; minutes on
a GPU.

The text is the source of Python's standard library, which every machine has; every 20th file is held out. Master
weights and Adam are float32, forward and backward bfloat16. Text, sampling of windows and steps stay on the device:
the host reads one number in `block` steps. Dims: B sequences, S tokens of a sequence, N tokens of a step, K experts
per token, E experts."""

import dataclasses
import functools
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from routed_experts.layers.moe import ExpertCall, MoeBackend
from routed_experts.layers.permuted_moe import PERMUTED
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.replay import forward

HELD_OUT = 20


def read_text(most_bytes: int) -> tuple[UInt8[np.ndarray, " T"], UInt8[np.ndarray, " H"]]:
    """Bytes to train on and bytes held out, at most `most_bytes` in all, in an order that is the same each time."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts and "dist-packages" not in file.parts]
    parts: tuple[list[bytes], list[bytes]] = [], []
    total = 0
    for index in np.random.default_rng(0).permutation(len(files)).tolist():
        text = files[index].read_bytes()
        parts[index % HELD_OUT == 0].append(text)
        total += len(text)
        if total >= most_bytes and parts[1]:
            break
    train, held_out = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return train, held_out


@jax.custom_vjp
def attach_loss(y: Float[Array, "N D"], loss: Float[Array, ""]) -> Float[Array, "N D"]:
    """Give `y` unchanged; in the backward pass `loss` has gradient 1, as if it had been added to the objective."""
    return y


attach_loss.defvjp(lambda y, loss: (y, None), lambda _, gradient: (gradient, jnp.ones(())))


def balanced(coefficient: float) -> MoeBackend:
    """The training kernels with a load-balancing loss on their output: coefficient * E * sum over experts of (share of
    slots) * (mean weight), which is `coefficient` where both are even (after Fedus et al. 2021, eq. 4; on the weights
    of the chosen alone)."""

    def run(call: ExpertCall) -> Float[Array, "N D"]:
        chosen = jax.nn.one_hot(call.ids, call.num_experts, dtype=jnp.float32)  # [N, K, E]
        load, weight = jnp.mean(chosen, axis=(0, 1)), jnp.einsum("nk,nke->e", call.weights, chosen) / call.ids.shape[0]
        return attach_loss(PERMUTED.run(call), coefficient * call.num_experts * jnp.dot(load, weight))

    return dataclasses.replace(PERMUTED, name="balanced", run=run)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step takes `batch` windows of `length` tokens. The rate rises over `warmup` steps and falls over the last fifth
    of the time."""

    seconds: float
    batch: int = 128
    length: int = 256
    peak: float = 1e-3
    warmup: int = 200
    block: int = 20  # steps between two reads of the loss
    balance: float = 0.01


def make_steps(graphdef: nnx.GraphDef[Any], optimizer: optax.GradientTransformation, plan: Plan) -> Callable[..., Any]:
    """`block` steps as one program: (params, moments, key, text, rate) -> (params, moments, mean loss)."""
    backend = balanced(plan.balance)

    def compute_loss(params: Any, tokens: Int[Array, "B S1"]) -> Float[Array, ""]:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        logits = forward(nnx.merge(graphdef, half), tokens[:, :-1], backend=backend).logits
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def step(carry: Any, key: Array, text: UInt8[Array, " T"], rate: Float[Array, ""]) -> tuple[Any, Float[Array, ""]]:
        params, moments = carry
        starts = jax.random.randint(key, (plan.batch, 1), 0, text.shape[0] - plan.length)
        loss, gradient = jax.value_and_grad(compute_loss)(
            params, text[starts + jnp.arange(plan.length + 1)].astype(jnp.int32)
        )
        change, moments = optimizer.update(gradient, moments, params)
        return (jax.tree.map(lambda leaf, part: leaf - rate * part, params, change), moments), loss

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(params: Any, moments: Any, key: Array, text: UInt8[Array, " T"], rate: Float[Array, ""]) -> Any:
        body = functools.partial(step, text=text, rate=rate)
        (params, moments), losses = jax.lax.scan(body, (params, moments), jax.random.split(key, plan.block))
        return params, moments, jnp.mean(losses)

    return steps


def init(config: FamilyConfig, file: Path | None) -> tuple[nnx.GraphDef[Any], Any]:
    """The module and its float32 weights: random ones, or those of `file` where it is there."""
    graphdef, params = nnx.split(FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    if file is None or not file.exists():
        return graphdef, params
    with np.load(file) as stored:
        return graphdef, jax.tree.unflatten(
            jax.tree.structure(params), [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(stored.files))]
        )


def save_weights(params: Any, file: Path) -> None:
    """Write the weights for a later run."""
    np.savez(file, **{f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(params))})


def train(
    graphdef: nnx.GraphDef[Any],
    params: Any,
    text: UInt8[np.ndarray, " T"],
    plan: Plan,
    report: Callable[[dict[str, float]], None],
) -> Any:
    """Train for so many seconds, compilation not counted. `report` receives step, seconds, loss (nats a byte) and
    tokens a second."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95))
    moments, steps = jax.jit(optimizer.init)(params), make_steps(graphdef, optimizer, plan)
    on_device, key = jax.device_put(text), jax.random.key(time.time_ns() % 2**31)  # a later run sees other windows
    params, moments, loss = steps(
        params, moments, key, on_device, jnp.zeros(())
    )  # compiles; a rate of 0 changes no weight
    jax.block_until_ready(loss)
    start, block, reported = time.perf_counter(), 0, 0.0
    while (spent := time.perf_counter() - start) < plan.seconds:
        fall = min(1.0, max(0.02, (1 - spent / plan.seconds) / 0.2))
        rate = plan.peak * min(1.0, (block + 1) * plan.block / plan.warmup) * fall
        params, moments, loss = steps(params, moments, jax.random.fold_in(key, block), on_device, jnp.float32(rate))
        value, block = float(loss), block + 1  # waits for the block
        assert np.isfinite(value), f"the loss is {value} after {block * plan.block} steps"
        seconds, tokens = time.perf_counter() - start, block * plan.block * plan.batch * plan.length
        if seconds - reported > 10 or seconds >= plan.seconds:
            reported = seconds
            report(
                {
                    "step": block * plan.block,
                    "seconds": seconds,
                    "loss": value,
                    "tokens": tokens,
                    "tokens a second": tokens / seconds,
                }
            )
    return params
