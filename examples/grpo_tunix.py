"""GRPO by Tunix on the demo model: rollouts by an Engine, and a loss that runs the experts that the rollouts ran on.

    pip install -e ".[tunix,plot]"
    python examples/grpo_tunix.py                        # rows on, off and shifted: under 3 minutes on two cores
    python examples/grpo_tunix.py --rows on --seeds 4    # how much the reward rises, over seeds

The reward is verifiable: 1 for a story with snow in it, else 0. Master weights are float32; the engine serves them in
bfloat16, and the trainer runs through the same rounded copy, so that no rounding of weights is left to mistake for
routing. "off" routes live in the trainer; "shifted" replays the rows of the token before, which the canary shows.
Writes a table (JSON) and a plot. Needs no download."""

import argparse
import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from transformers import AutoTokenizer
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig

from routed_experts import Engine
from routed_experts.demo import demo_model_path
from routed_experts.integrations.tunix import (
    Policy,
    ReplayCluster,
    ReplayGRPOLearner,
    RolloutRecord,
    RoutedExpertsRollout,
)
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import CanaryGate

PROMPT_LEN, NEW_TOKENS, GROUP, PROMPTS = 20, 24, 8, 4
KINDS = ("kind", "small", "clever", "brave", "hungry", "gentle", "strong", "lonely")
ANIMALS = ("fox", "cat", "dog", "wolf", "rabbit", "hedgehog")
PANELS = {
    "reward": "reward: stories with snow",
    "k3": "k3, trainer against rollout",
    "flipped": "tokens with a flipped row",
    "f_1_1": "tokens beyond a ratio of 1.1",
}


class NoRows(RoutedExpertsRollout):
    """A rollout whose rows are thrown away: the trainer routes live."""

    def take(self) -> list[RolloutRecord]:
        """The records, without rows."""
        return [dataclasses.replace(record, routed=None) for record in super().take()]


class ShiftedRows(RoutedExpertsRollout):
    """A rollout whose rows are those of the token before: a fault that no check of lengths can see."""

    def take(self) -> list[RolloutRecord]:
        """The records, with their rows moved by one."""
        return [self._shift(record) for record in super().take()]

    def _shift(self, record: RolloutRecord) -> RolloutRecord:
        if record.routed is None:
            return record
        shifted = dataclasses.replace(record.routed, ids=np.roll(record.routed.ids, 1, axis=0))
        return dataclasses.replace(record, routed=shifted)


ROLLOUTS = {"on": RoutedExpertsRollout, "off": NoRows, "shifted": ShiftedRows}


def snow(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for each story in which the word occurs."""
    return [float(re.search(r"\bsnow\b", text.lower()) is not None) for text in completions]


def make_prompts(steps: int, seed: int) -> list[dict[str, Any]]:
    """Batches of Tunix: a step's prompts are beginnings of stories."""
    rng = np.random.default_rng(seed)
    text = "Once upon a time there was a {} {} who lived in a"
    return [
        {"prompts": np.array([text.format(rng.choice(KINDS), rng.choice(ANIMALS)) for _ in range(PROMPTS)])}
        for _ in range(steps)
    ]


def serve(dtype: str) -> Engine:
    """The demo model with a padded size for the rollouts of a step."""
    batch = PROMPTS * GROUP
    sizes = {"precompile_bs_paddings": (batch,), "precompile_token_paddings": (128,), "context_length": 64}
    return Engine(str(demo_model_path()), dtype=dtype, enable_return_routed_experts=True, **sizes)


def train(engine: Engine, args: argparse.Namespace, rows: str, seed: int, on_step: Callable[..., None]) -> list[Any]:
    """One run from the demo model's weights; returns the metrics of each step."""
    master = ModelFolder.open(demo_model_path()).load(jnp.dtype("float32"))
    role, mesh = rl_cluster.Role, Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    cluster = ReplayCluster(
        actor=Policy(master, compute_dtype=args.dtype),
        tokenizer=AutoTokenizer.from_pretrained(demo_model_path()),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine=functools.partial(ROLLOUTS[rows], engine=engine),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.learning_rate)),
                eval_every_n_steps=10**6,
                max_steps=args.steps,
            ),
            rollout_config=RolloutConfig(
                max_prompt_length=PROMPT_LEN,
                max_tokens_to_generate=NEW_TOKENS,
                temperature=1.0,
                top_p=None,
                seed=jnp.asarray(seed),
                return_logprobs=True,
            ),
        ),
    )
    logs: list[dict[str, float]] = []

    def log(buffer: Any) -> None:
        values = {name: float(np.mean(entry[0])) for name, entry in buffer.metrics.items() if name.startswith("rou")}
        if values and "rewards/score/mean" in buffer.metrics:
            reward = float(np.mean(buffer.metrics["rewards/score/mean"][0]))
            logs.append({"reward": reward} | {name.removeprefix("routing/"): value for name, value in values.items()})
            on_step(rows, seed, len(logs), logs[-1])

    cluster.with_external_metrics_logger(log)
    learner = ReplayGRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=GROUP, beta=0.0, policy_loss_fn="grpo_replay"),
        reward_fns=snow,
        measure_every=1,
        compare_live=True,
        gate=CanaryGate(limit=1.0, action="log"),  # the shifted rows are to be seen, not refused
    )
    learner.train(make_prompts(args.steps, seed))
    return logs


def rise(logs: Sequence[dict[str, float]]) -> float:
    """The reward of the last quarter of the steps less that of the first."""
    part, rewards = max(len(logs) // 4, 1), [log["reward"] for log in logs]
    return float(np.mean(rewards[-part:]) - np.mean(rewards[:part]))


def plot(runs: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """A panel a metric, a line a run: the mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for rows, seeds in runs.items():
            if rows == "off" and name == "flipped":
                continue  # without rows there is nothing that could flip
            values = np.mean([[log[name] for log in logs] for logs in seeds], axis=0)
            colour = f"C{[*ROLLOUTS].index(rows)}"
            axes.plot(range(1, len(values) + 1), values, label=f"rows {rows}", linewidth=1.5, color=colour)
        axes.set(xlabel="step", title=label)
        if name == "k3":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO by Tunix on the demo model, on the rows of its rollouts")
    parser.add_argument("--rows", choices=(*ROLLOUTS, "all"), default="all")
    parser.add_argument("--steps", type=int, default=16, help="updates of a run (16)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind (1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of Adam (5e-4)")
    parser.add_argument("--out", type=Path, default=Path("grpo_tunix"), help="folder of grpo.json and grpo.png")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.seeds < 1:
        parser.error("--steps and --seeds must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    args, start = parse(argv), time.monotonic()

    def show(rows: str, seed: int, step: int, log: dict[str, float]) -> None:
        numbers = f"reward {log['reward']:.2f}  k3 {log['k3']:.1e}  live {log['k3_live']:.1e}"
        print(
            f"rows {rows:<7} seed {seed}  step {step:2}/{args.steps}  {numbers}  canary {log['canary']:.3f}", flush=True
        )

    runs: dict[str, list[list[dict[str, float]]]] = {}
    with serve(args.dtype) as engine:
        for rows in ROLLOUTS if args.rows == "all" else (args.rows,):
            runs[rows] = [train(engine, args, rows, seed, show) for seed in range(args.seeds)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "grpo.json").write_text(json.dumps(runs, indent=1) + "\n")
    plot(runs, args.out / "grpo.png")
    for rows, seeds in runs.items():
        rises, error = [rise(logs) for logs in seeds], ""
        if len(rises) > 1:
            error = f" +- {np.std(rises, ddof=1) / np.sqrt(len(rises)):.3f}"
        k3, live = (np.mean([log[name] for logs in seeds for log in logs]) for name in ("k3", "k3_live"))
        print(f"rows {rows:<7} reward rises by {np.mean(rises):.3f}{error}, k3 {k3:.1e}, routed live {live:.1e}")
    print(f"wrote {args.out}/grpo.json and grpo.png after {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
