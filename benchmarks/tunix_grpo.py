"""GRPO by Tunix: what replay adds to its train step, its rollouts over Engine.generate, a push of weights over one copy
of them, and what replay gains.

    python benchmarks/tunix_grpo.py step rollout push gain      # needs the extra tunix; any of the four
    python benchmarks/tunix_grpo.py --small step

Pairs are interleaved in one process; `ratio` is the median of the pairs' ratios with a 95 % bootstrap interval.
`step`: Tunix's own jitted train step with the loss "grpo_replay" over "grpo". `rollout`: tokens a second of
RoutedExpertsRollout.generate over Engine.generate of the same requests with logprobs and rows. `push`: update_params
over one jitted copy of the weights, and over Engine.update_weights of copies. All three in float32, with the benchmark
model of benchmarks/common.py (94 M parameters) or with --model demo (2.7 M), where the same host work weighs more.
`gain`: k3 of the demo model, live and replayed, after some steps of GRPO: float32 master weights, the engine and the
trainer's arithmetic in the dtypes named, both through the same rounded weights."""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from common import benchmark_config, benchmark_model, print_table, progress, write_result
from flax import nnx

SECTIONS = ("step", "rollout", "push", "gain")
PAD, EOS = 0, 1


class Words:
    """A tokenizer of the benchmark model: a letter is a token, and no answer ends early."""

    def encode(self, text: str) -> list[int]:
        return [2 + ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def pad_id(self) -> int:
        return PAD

    def eos_id(self) -> int:
        return EOS


def pairs(first: Callable[[], object], second: Callable[[], object], count: int) -> dict[str, object]:
    """Two calls, interleaved: medians of their seconds, and the median ratio of the second over the first, of wall time
    and of CPU time of all threads, which other processes disturb less. A call that returns an integer did so many
    units of work: its times are those of one unit."""
    times: list[list[tuple[float, float]]] = []
    for index in range(count + 1):
        took: list[tuple[float, float]] = [(0.0, 0.0), (0.0, 0.0)]
        for side in (0, 1) if index % 2 else (1, 0):
            start = time.perf_counter(), time.process_time()
            done = jax.block_until_ready((first, second)[side]())
            units = done if isinstance(done, int) else 1
            took[side] = (time.perf_counter() - start[0]) / units, (time.process_time() - start[1]) / units
        if index:  # the first pair compiles
            times.append(took)
        progress(f"pair {index}/{count}")
    table = np.array(times)  # [pairs, sides, clocks]
    medians = np.median(table, axis=0)
    row: dict[str, object] = {"pairs": count, "first_ms": 1e3 * medians[0, 0], "second_ms": 1e3 * medians[1, 0]}
    for clock, name in enumerate(("ratio", "cpu_ratio")):
        ratios = table[:, 1, clock] / table[:, 0, clock]
        draws = np.median(np.random.default_rng(0).choice(ratios, (2000, ratios.size)), axis=1)
        low, high = np.percentile(draws, [2.5, 97.5])
        row |= {name: float(np.median(ratios)), f"{name}_low": float(low), f"{name}_high": float(high)}
    return row


def model(name: str):
    """A decoder in float32."""
    if name == "demo":
        from support.tunix_runs import demo_policy

        return demo_policy().decoder
    if name == "benchmark":
        return benchmark_model(jnp.dtype("float32"))
    from routed_experts.models.decoder.decoder import FamilyDecoder

    sizes = dict(vocab_size=256, hidden_size=32, head_dim=8, moe_intermediate_size=16, num_hidden_layers=2)
    return FamilyDecoder(benchmark_config(**sizes), rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))


def engine_of(decoder, batch: int, length: int):
    from routed_experts import Engine

    sizes = {"precompile_bs_paddings": (batch,), "precompile_token_paddings": (256,), "context_length": length}
    pool = {"max_total_tokens": batch * length + 1024}
    return Engine(model=decoder, enable_return_routed_experts=True, skip_tokenizer_init=True, **sizes, **pool)


def cluster_of(engine, decoder, prompt: int, new: int):
    from routed_experts.integrations.tunix import Policy
    from support.tunix_runs import make_cluster

    sampling = {"max_prompt_length": prompt, "max_tokens_to_generate": new, "eos_tokens": [EOS]}
    return make_cluster(engine, policy=Policy(decoder), tokenizer=Words(), sampling=sampling)


def copy_of(decoder):
    graphdef, state = nnx.split(decoder)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def measure_step(name: str, count: int) -> dict[str, object]:
    """Tunix's train step on one batch, live and replayed."""
    from tunix.rl.grpo.grpo_learner import GRPOLearner

    from routed_experts.integrations.tunix import ReplayGRPOLearner
    from support.tunix_runs import grpo_config, make_example, vowel_share

    prompt, new, batch = (8, 8, 4) if name == "small" else (32, 96, 8)
    decoder = model(name)
    with engine_of(copy_of(decoder), batch, prompt + new) as engine:
        live, replayed = (cluster_of(engine, copy_of(decoder), prompt, new) for _ in range(2))
        GRPOLearner(live, grpo_config(policy_loss_fn="grpo"), vowel_share)
        ReplayGRPOLearner(replayed, grpo_config(), vowel_share)
        config = replayed.get_rollout_config(mode="train")
        example, _ = make_example(replayed, ["x" * (prompt - 2)] * batch, config)

        def step(cluster):
            cluster.update_actor([example], None)
            return jax.tree.leaves(nnx.state(cluster.actor_trainer.model))

        row = pairs(lambda: step(live), lambda: step(replayed), count)
    return {"section": "step", "batch": f"{batch} x ({prompt} + {new})", **row}


def measure_rollout(name: str, count: int) -> dict[str, object]:
    """Seconds a token of a rollout by the engine and through Tunix; `tokens_per_s` is the inverse ratio."""
    prompt, new, groups, size = (8, 8, 2, 2) if name == "small" else (32, 96, 4, 4)
    decoder = model(name)
    batch = groups * size
    with engine_of(copy_of(decoder), batch, prompt + new) as engine:
        rollout = cluster_of(engine, decoder, prompt, new).rollout
        config = cluster_of(engine, decoder, prompt, new).get_rollout_config(mode="train")
        texts = [chr(65 + group) * (prompt - 2) for group in range(groups)]
        ids = [Words().encode(text) for text in texts]
        sampling = {"temperature": 1.0, "max_tokens": new, "stop_token_ids": [PAD, EOS], "ignore_eos": True, "n": size}
        seeds = iter(range(10**6))

        def direct() -> int:
            parameters = [sampling | {"seed": next(seeds)} for _ in ids]
            options = {"return_logprob": True, "return_routed_experts": True, "routed_experts_layers": "moe"}
            results = engine.generate(input_ids=ids, sampling_params=parameters, **options)
            return sum(len(result["output_ids"]) for result in results)

        def through() -> int:
            rollout.take()
            out = rollout.generate([text for text in texts for _ in range(size)], config)
            return sum(answer.size for answer in out.tokens)

        row = pairs(direct, through, count)
    return {
        "section": "rollout",
        "batch": f"{groups} x {size} x ({prompt} + {new})",
        **row,
        "tokens_per_s": 1 / float(row["ratio"]),
    }


def measure_push(name: str, count: int) -> list[dict[str, object]]:
    """A push through Tunix over one copy of the weights, and over the engine's own update."""
    from routed_experts.integrations.tunix import Policy, RoutedExpertsRollout
    from support.tunix_runs import rollout_config

    decoder = model(name)
    with engine_of(copy_of(decoder), 1, 64) as engine:
        policy = Policy(decoder)
        rollout = RoutedExpertsRollout(policy, Words(), None, rollout_config(), engine=engine)
        params, leaves = nnx.state(policy, nnx.Param), jax.tree.leaves(nnx.state(policy, nnx.Param))
        copies = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays])
        num_bytes = sum(leaf.nbytes for leaf in leaves)

        def copy_and_update() -> None:
            state = jax.tree.map(jnp.copy, nnx.state(policy.decoder))
            engine.update_weights(jax.block_until_ready(state), donate=True)

        over_copy = pairs(lambda: copies(leaves), lambda: rollout.update_params(params), count)
        over_update = pairs(copy_and_update, lambda: rollout.update_params(params), count)
    size = {"batch": f"{num_bytes / 1e6:.0f} MB"}
    return [
        {"section": "push over a copy", **size, **over_copy},
        {"section": "push over an update", **size, **over_update},
    ]


def measure_gain(small: bool, batches: int) -> list[dict[str, object]]:
    """k3 of mixed text after 8 steps of GRPO, live and replayed, for dtypes of engine and trainer."""
    from routed_experts.integrations.tunix import Policy, ReplayGRPOLearner, routing_pass
    from routed_experts.replay import mismatch_report
    from support import tunix_runs

    texts = (
        "Once upon a time there was a fox",
        "My fellow Americans, the state",
        "The whale swam past the",
        "def sort(",
    )
    rows: list[dict[str, object]] = []
    new, size = 64, 4 if small else 16
    for served, computed in (("bfloat16", "bfloat16"), ("bfloat16", None), ("float16", "float16")):
        sizes = {"precompile_bs_paddings": (4 * size,), "precompile_token_paddings": (256,)}
        with tunix_runs.demo_engine(served, **sizes) as engine:
            policy = tunix_runs.demo_policy(compute_dtype=computed or served)
            cluster = tunix_runs.make_cluster(engine, policy=policy, sampling={"max_tokens_to_generate": new})
            learner = ReplayGRPOLearner(cluster, tunix_runs.grpo_config(), tunix_runs.vowel_share)
            learner.train(tunix_runs.batches(1 if small else 8))
            policy = cluster.actor_trainer.model
            if computed is None:  # the rounded weights in float32 arithmetic
                graphdef, state = nnx.split(policy.decoder)
                rounded = jax.tree.map(functools.partial(round_trip, served), state)
                policy = Policy(nnx.merge(graphdef, rounded))
            rollout_logprobs, live, replayed, masks = [], [], [], []
            for batch in range(1 if small else batches):
                example, records = tunix_runs.make_example(
                    cluster, [text for text in texts for _ in range(size)], config_of(cluster, batch)
                )
                rollout_logprobs.append(tunix_runs.padded_logprobs(records, new))
                masks.append(np.asarray(example.completion_mask))
                for sink, is_replayed in ((live, False), (replayed, True)):
                    logprobs = routing_pass(policy, example, pad_id=cluster.rollout.pad_id(), replayed=is_replayed)
                    sink.append(np.asarray(logprobs)[:, -new:])
                progress(f"{served}, {computed}: batch {batch + 1}/{batches}")
        mask, rollout = np.concatenate(masks), np.concatenate(rollout_logprobs)
        reports = [mismatch_report(rollout, np.concatenate(side), mask) for side in (live, replayed)]
        rows.append(
            {
                "section": "gain",
                "engine": served,
                "trainer": computed or "float32",
                "tokens": reports[0].num_tokens,
                "k3_live": reports[0].k3,
                "live_low": reports[0].k3_low,
                "live_high": reports[0].k3_high,
                "k3_replayed": reports[1].k3,
                "replayed_low": reports[1].k3_low,
                "replayed_high": reports[1].k3_high,
                "ratio": reports[0].k3 / reports[1].k3,
                **ratio_interval(rollout, *(np.concatenate(side) for side in (live, replayed)), mask),
            }
        )
    return rows


def round_trip(dtype: str, leaf):
    return leaf.astype(dtype).astype(jnp.float32)


def ratio_interval(rollout, live, replayed, mask) -> dict[str, object]:
    """95 % interval of the ratio of k3, from draws of whole answers."""
    terms = [np.where(mask, np.expm1(d) - d, 0).sum(axis=1) for d in (live - rollout, replayed - rollout)]
    draws = np.random.default_rng(0).integers(0, len(terms[0]), (2000, len(terms[0])))
    low, high = np.percentile(terms[0][draws].sum(axis=1) / terms[1][draws].sum(axis=1), [2.5, 97.5])
    return {"ratio_low": float(low), "ratio_high": float(high)}


def config_of(cluster, seed: int):
    import dataclasses

    return dataclasses.replace(cluster.get_rollout_config(mode="train"), seed=seed)


def main() -> None:
    """Run sections, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="step, rollout, push or gain; all by default")
    parser.add_argument("--small", action="store_true", help="a short version, which writes nothing")
    parser.add_argument("--model", choices=("benchmark", "demo"), default="benchmark", help="of step, rollout and push")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of a section (15)")
    parser.add_argument("--batches", type=int, default=8, help="batches of 64 answers of the gain (8)")
    args = parser.parse_args()
    wrong = [name for name in args.sections if name not in SECTIONS]
    if wrong:
        parser.error(f"{wrong[0]} is no section; choose of {', '.join(SECTIONS)}")
    count = 2 if args.small else args.pairs
    model_name = "small" if args.small else args.model
    for name in args.sections or SECTIONS:
        measured = {
            "step": functools.partial(measure_step, model_name, count),
            "rollout": functools.partial(measure_rollout, model_name, count),
            "push": functools.partial(measure_push, model_name, count),
            "gain": functools.partial(measure_gain, args.small, args.batches),
        }[name]()
        rows = measured if isinstance(measured, list) else [measured]
        print_table(rows)
        of_demo = "_demo" if name != "gain" and model_name == "demo" else ""
        print(write_result(f"tunix_{name}{of_demo}_cpu", rows))


if __name__ == "__main__":
    main()
