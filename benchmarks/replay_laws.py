"""The laws of replay on an accelerator's kernels: C1 to C3 in serving, C1 to C6 in training, each with its largest
difference. Dims: B sequences, S tokens of a sequence, M MoE layers, K experts per token."""

import collections
import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from replay_stage import Sizes, bench_of, random_model
from rollouts import roll_out

from oracles.driver import Bench
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.control.score import Scorer
from routed_experts.layers.permuted_moe import PERMUTED
from routed_experts.models.families.qwen3_moe import Qwen3MoeConfig
from routed_experts.replay import RoutedBatch, forward

Rows = list[dict[str, object]]


def law(name: str, holds: bool, one: Any, other: Any) -> dict[str, object]:
    """A row of the table, with the largest distance of what was compared."""
    return {"law": name, "holds": bool(holds), "max |d|": float(np.max(np.abs(np.asarray(one) - np.asarray(other))))}


def drifted(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """Distinct ids [..., K] that no router would take."""
    return np.ascontiguousarray(
        rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (*shape[:-1], 1)), axis=-1)[..., : shape[-1]]
    )


def serving_laws(config: Qwen3MoeConfig, sizes: Sizes) -> Rows:
    """C1 to C3 by the serving kernels, which are one program live and replayed; and how far what requests were told
    lies from a score, which takes other shapes and so other sums: that is told and not judged."""
    rng, model = np.random.default_rng(0), random_model(config, sizes.dtype)
    tokens = rng.integers(0, 256, (4, min(64, sizes.tokens))).astype(np.int32)
    bench = bench_of(model, sizes, tapped=False)

    def score(
        bench: Bench, tokens: np.ndarray, records: list[RoutedExperts] | None
    ) -> tuple[np.ndarray, list[RoutedExperts]]:
        scorer = Scorer(bench.args, bench.assembly.buckets, bench.runner, lambda start: start())
        outputs = scorer.run([*tokens], records, lambda: (bench.runner.state, 0))
        return np.stack([out.logprobs for out in outputs]), [
            out.routed_experts for out in outputs if out.routed_experts is not None
        ]

    live, records = score(bench, tokens, None)
    twice, _ = score(bench, tokens, None)
    forced = [dataclasses.replace(record, ids=drifted(rng, record.ids.shape, record.num_experts)) for record in records]
    nobody = np.zeros(tokens.shape[1], bool)
    none, _ = score(bench, tokens, [dataclasses.replace(record, valid=nobody) for record in forced])
    again, same = score(bench, tokens, records)
    drift, executed = score(bench, tokens, forced)
    tapped = bench_of(model, sizes, tapped=True)
    tapped.tap.clear()
    score(tapped, tokens[:1], forced[:1])
    seen = tapped.tap.step(0)[: tokens.shape[1]]
    new = sizes.new // 4
    spoken, said, rows, _ = roll_out(bench.assembly.core, tokens[:, : sizes.prompt], new)
    scored = [score(bench, spoken, given)[0][:, -new:] for given in (None, rows)]
    return [
        law("one score twice, by the bit", np.array_equal(live, twice), live, twice),
        law("C1 executed == forced", executed == forced, drift, drift),
        law("C1 forced == at the kernel", np.array_equal(seen, forced[0].ids), seen, forced[0].ids),
        law("C2 self-replay == live, by the bit", np.array_equal(again, live) and same == records, again, live),
        law("C3 no valid row == live, by the bit", np.array_equal(none, live), none, live),
        {"law": "told by generate, scored live: no law", "max |d|": float(np.max(np.abs(said - scored[0])))},
        {"law": "told by generate, scored on its rows: no law", "max |d|": float(np.max(np.abs(said - scored[1])))},
    ]


def fused_parts(compiled: Any) -> collections.Counter[str]:
    """The computations of a compiled program, without names: what is fused with what, and how often."""
    text = re.sub(r", metadata=\{[^}]*\}|%[\w.-]+|, backend_config=.*", "", compiled.as_text())
    parts = [part.partition("{\n") for part in text.split("\n\n") if not part.startswith("ENTRY")]
    return collections.Counter(body for _, _, body in parts if " = " in body)


def training_laws(config: Qwen3MoeConfig, sizes: Sizes) -> Rows:
    """C1 to C6 by the training forward and its kernels, and whether live and replayed are fused alike."""
    rng, traces = np.random.default_rng(1), list[int]()
    graphdef, state = nnx.split(random_model(config, sizes.dtype))
    tokens = jnp.asarray(rng.integers(0, 256, (4, 64)), jnp.int32)

    def run(state: Any, routed: RoutedBatch | None, remat: bool = False) -> Any:
        traces.append(1)
        out = forward(
            nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True, backend=PERMUTED, remat=remat
        )
        return jnp.mean(jnp.square(jax.nn.log_softmax(out.logits))), out

    step = jax.jit(run)
    flags = lambda value: jnp.full(tokens.shape, value)  # noqa: E731
    live, twice = step(state, None)[1], step(state, None)[1]
    ids = jnp.asarray(drifted(rng, live.ids.shape, config.router.num_experts))
    batches = [
        RoutedBatch(*batch, flags(False))
        for batch in ((live.ids, flags(True)), (ids, flags(False)), (ids, flags(True)))
    ]
    same, none, forced = (step(state, batch)[1] for batch in batches)
    num_traces = len(traces)
    parts = [fused_parts(step.lower(state, routed).compile()) for routed in (None, batches[0])]
    differ = (parts[0] - parts[1]) + (parts[1] - parts[0])
    for part in differ:
        print("only live" if part in parts[0] else "only replayed", part, sep="\n", file=sys.stderr)
    return [
        law("one forward twice, by the bit", np.array_equal(twice.logits, live.logits), twice.logits, live.logits),
        law("C1 executed == forced", np.array_equal(forced.ids, ids), forced.ids, ids),
        law("C2 self-replay == live, by the bit", np.array_equal(same.logits, live.logits), same.logits, live.logits),
        law("C3 no valid row == live, by the bit", np.array_equal(none.logits, live.logits), none.logits, live.logits),
        law("C2 == C3, one program, by the bit", np.array_equal(none.logits, same.logits), none.logits, same.logits),
        {
            "law": f"parts that differ, live and replayed, of {parts[0].total()}: no law",
            "max |d|": float(differ.total()),
        },
        *gradient_laws(run, state, RoutedBatch(ids, flags(True), flags(False))),
        {"law": "C6 traces: live, replayed", "holds": num_traces == 2, "max |d|": 0.0},
    ]


def gradient_laws(run: Callable[..., Any], state: Any, routed: RoutedBatch) -> Rows:
    """C4 and C5 of the gradients on drifted ids."""
    gradient = jax.jit(jax.grad(lambda state, routed, remat: run(state, routed, remat)[0]), static_argnums=2)
    plain, saved = (gradient(state, routed, remat) for remat in (False, True))
    router = np.asarray(plain["blocks"][0]["router"][...], np.float32)
    apart = jax.jit(
        lambda a, b: (
            jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.maximum(jnp.linalg.norm(a.astype(jnp.float32)), 1e-30)
        )
    )
    far = max(
        float(apart(a.reshape(-1), b.reshape(-1))) for a, b in zip(*map(jax.tree.leaves, (plain, saved)), strict=True)
    )
    finite = bool(np.isfinite(router).all() and np.any(router))
    return [
        {"law": "C4 remat: relative distance of gradients", "holds": far < 1e-2, "max |d|": float(far)},
        {"law": "C5 router gradient, drifted ids: finite, not 0", "holds": finite, "max |d|": 0.0},
    ]
