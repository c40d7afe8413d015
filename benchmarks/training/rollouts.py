"""A rollout by an engine core, judged by a training forward, live and replayed: k3 and shares beyond a ratio.

Intervals are 95 % percentile bootstraps over sequences; live and replayed are resampled together, so their ratio has
its own. Dims: B sequences, S tokens of a sequence, G tokens of an answer."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oracles.driver import request
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.loop.core import EngineCore
from routed_experts.layers.moe import MoeBackend
from routed_experts.replay import RoutedBatch, Sample, align, forward

BEYOND = {"F(1.1)": np.log(1.1), "F(2)": np.log(2.0)}


def roll_out(
    core: EngineCore, prompts: np.ndarray, new: int, recorded: CaptureSpec
) -> tuple[np.ndarray, np.ndarray, list[RoutedExperts], float]:
    """Tokens [B S], logprobs [B G], records, and seconds of answers at temperature 1. `recorded` by the core."""
    weights = recorded.weights_dtype is not None
    reqs = [
        request(f"r{i}", prompt, new, temperature=1.0, seed=i, asks_weights=weights) for i, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    core.add(reqs)
    outputs = {}
    while not core.is_idle:
        outputs |= {out.rid: out for out in core.step().outs}
    seconds = time.perf_counter() - start
    ends = [outputs[req.rid] for req in reqs]  # without streaming, the last output has everything
    tokens = np.stack(
        [np.concatenate([prompt, out.new_token_ids]) for prompt, out in zip(prompts, ends, strict=True)]
    ).astype(np.int32)
    logprobs = np.array([out.output_logprobs.values for out in ends])
    return tokens, logprobs, [out.routed_experts for out in ends if out.routed_experts is not None], seconds


def by_sequence(d: np.ndarray) -> dict[str, np.ndarray]:
    """Means of each sequence: k3 terms and shares beyond a ratio, of d [B G]."""
    return {"k3": (np.exp(d) - 1 - d).mean(axis=1)} | {
        name: (np.abs(d) > limit).mean(axis=1) for name, limit in BEYOND.items()
    }


def interval(values: np.ndarray) -> list[float]:
    """The 2.5 % and 97.5 % percentiles of resampled values."""
    return np.percentile(values, [2.5, 97.5]).tolist()


def compare(
    live: np.ndarray, replayed: np.ndarray, names: tuple[str, str] = ("live", "replayed")
) -> list[dict[str, object]]:
    """Two of live, replayed, and with weights, both d [B G]; sequences are resampled together, so the ratio has its own
    interval."""
    picks = np.random.default_rng(0).integers(0, len(live), (2000, len(live)))
    of_live, of_replayed, lines = by_sequence(live), by_sequence(replayed), list[dict[str, object]]()
    for name in of_live:
        drawn = [side[name][picks].mean(axis=1) for side in (of_live, of_replayed)]
        line: dict[str, object] = {"what": name}
        for side, own, values in zip(names, (of_live, of_replayed), drawn, strict=True):
            line |= {side: own[name].mean(), f"{side}, 95 %": interval(values)}
        if np.all(drawn[1] > 0):
            line |= {
                "ratio": of_live[name].mean() / of_replayed[name].mean(),
                "ratio, 95 %": interval(drawn[0] / drawn[1]),
            }
        lines.append(line)
    return lines


def missed_share(slot_miss: Any, routed: RoutedBatch) -> Any:
    """The canary of each sequence, [B]: the share of its replayed slots that the live router would not have chosen."""
    misses = jnp.where(routed.valid[..., None], slot_miss.astype(jnp.float32), 0.0).sum(axis=(1, 2))
    slots = routed.valid.sum(axis=1) * slot_miss.shape[-1] * routed.ids.shape[-1]
    return misses / jnp.maximum(slots, 1)


def training_logprobs(
    model: Any, tokens: np.ndarray, records: list[RoutedExperts], prompt: int, backend: MoeBackend
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Logprobs [B G] of the answers by the training forward: live, replayed and, where records have combine weights,
    replayed with these; and the canary of each answer, [B]."""
    graphdef, state = nnx.split(model)
    length = tokens.shape[1]

    @jax.jit
    def run(state: Any, tokens: Any, routed: RoutedBatch | None) -> Any:
        out = forward(nnx.merge(graphdef, state), tokens, routed=routed, backend=backend)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(out.logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
        share = jnp.zeros(len(tokens)) if routed is None else missed_share(out.slot_miss, routed)
        return logprobs[:, prompt - 1 :], share

    has_weights = all(record.weights is not None for record in records)
    names = ("live", "replayed", *(("with weights",) if has_weights else ()))
    logprobs_by: dict[str, list[np.ndarray]] = {name: [] for name in names}
    shares: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for first in range(0, len(tokens), 128):
        part = slice(first, first + 128)
        samples = [Sample(record, length) for record in records[part]]
        how: dict[str, Any] = {"layout": "pad_right", "seq_len": length, "spec": model.config.capture_spec}
        batches = {"live": None, "replayed": align(samples, **how)}
        if has_weights:
            batches["with weights"] = align(samples, weights=True, **how)
        for name, batch in batches.items():
            logprobs, share = run(state, jnp.asarray(tokens[part]), batch)
            logprobs_by[name].append(np.asarray(logprobs, np.float64))
            shares[name].append(np.asarray(share, np.float64))
    return {name: np.concatenate(parts) for name, parts in logprobs_by.items()}, {
        name: np.concatenate(parts) for name, parts in shares.items()
    }
