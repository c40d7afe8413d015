"""GRPO on the demo model, end to end: rollouts from the engine in bfloat16, training in float32, weights pushed back at
every step, with routing replay on and off. Writes a table (JSON) and a plot of mismatch and reward. Needs optax and the
extras text and plot.

    python examples/grpo_tiny.py                          # both runs, 40 steps each: some minutes on two cores
    python examples/grpo_tiny.py --replay on --steps 10   # one of them, shorter

GRPO: Shao et al. 2024 (DeepSeekMath), without a KL term; the reward is the share of vowels among the letters of an
answer. Dims: B rollouts of a step, S tokens of a rollout (prompt and answer), G tokens of an answer, V vocabulary."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from routed_experts import Engine
from routed_experts.demo import demo_model_path
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import CanaryGate, RoutedBatch, Sample, align, canary, forward, mismatch_report

PROMPT_LEN = 16
CLIP = 0.2  # of the probability ratio, either way
TEXT = (
    "Once upon a time there was a fox who lived by the sea. CHAPTER 7. The whale swam past the ship and the captain "
    "called his men. Mr. President, the state of our union is strong. "
    "Tell me a story about a king. What is the capital of France? "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. A step takes `prompts` x `group` rollouts of `new_tokens` tokens."""

    steps: int
    prompts: int
    group: int
    new_tokens: int
    seed: int
    replay: bool

    @property
    def num_rollouts(self) -> int:
        """B."""
        return self.prompts * self.group

    @property
    def length(self) -> int:
        """S."""
        return PROMPT_LEN + self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The rollouts of one step and their rows to replay. Without replay no row is valid: every token is routed live."""

    tokens: Int[np.ndarray, "B S"]
    logprobs: Float[np.ndarray, "B G"]
    rewards: Float[np.ndarray, " B"]
    routed: RoutedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One step: the mismatch of the trainer against the rollout, before the update."""

    step: int
    reward: float
    loss: float
    k3: float
    max_abs: float
    beyond_1_1: float
    canary: float | None


def vowel_share(text: str) -> float:
    """Share of vowels among the letters; 0 without letters."""
    letters = [letter for letter in text.lower() if letter.isalpha() and letter.isascii()]
    return sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0


def roll_out(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings, *, step: int, version: int
) -> Rollouts:
    """Sample `group` answers to each prompt at temperature 1; rows must be of the weights of `version`."""
    sampling = {"temperature": 1.0, "n": settings.group, "seed": settings.seed * 100_003 + step}
    results: Any = engine.generate(
        input_ids=prompts,
        sampling_params=sampling | {"max_tokens": settings.new_tokens, "ignore_eos": True},
        return_logprob=True,
        return_routed_experts=True,
    )
    answers = np.array([result["output_ids"] for result in results], np.int32)
    tokens = np.concatenate([np.repeat(np.array(prompts, np.int32), settings.group, axis=0), answers], axis=1)
    logprobs = np.array([[value for value, _, _ in result["meta_info"]["output_token_logprobs"]] for result in results])
    spec = ModelFolder.open(demo_model_path()).config.capture_spec
    records = [record_from_meta_info(result) if settings.replay else None for result in results]
    samples = [Sample(record, settings.length, PROMPT_LEN) for record in records]
    routed = align(samples, layout="pad_right", seq_len=settings.length, spec=spec, versions=(version,))
    return Rollouts(
        tokens=tokens,
        logprobs=logprobs,
        rewards=np.array([vowel_share(result["text"]) for result in results]),
        routed=routed,
    )


def group_advantages(rewards: Float[np.ndarray, " B"], group: int) -> Float[np.ndarray, " B"]:
    """Rewards against those of the same prompt, in units of their spread."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    return (centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def make_update(graphdef: nnx.GraphDef[Any], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The jitted training step, for both runs: ids and flags of a replay are inputs like the tokens, so nothing is
    compiled twice."""

    def loss_fn(
        state: Any,
        tokens: Int[Array, "B S"],
        rollout: Float[Array, "B G"],
        advantages: Float[Array, " B"],
        routed: RoutedBatch,
    ) -> tuple[Float[Array, ""], Any]:
        out = forward(nnx.merge(graphdef, state), tokens, routed=routed)
        logprobs = jax.nn.log_softmax(out.logits[:, PROMPT_LEN - 1 : -1])  # [B, G, V]
        train = jnp.take_along_axis(logprobs, tokens[:, PROMPT_LEN:, None], axis=-1)[..., 0]
        ratio = jnp.exp(train - rollout)
        clipped = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages[:, None])
        assert out.slot_miss is not None, "a replay counts its misses"
        return -jnp.mean(clipped), (train, canary(out.slot_miss, routed))

    @jax.jit
    def update(state: Any, moments: Any, *batch: Any) -> tuple[Any, Any, Float[Array, ""], Any]:
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(state, *batch)
        changes, moments = optimizer.update(gradient, moments, state)
        return optax.apply_updates(state, changes), moments, loss, aux

    return update


def serve(settings: Settings) -> Engine:
    """The demo model in bfloat16, with a padded size for as many rollouts as a step takes."""
    shapes = {
        "precompile_bs_paddings": (settings.num_rollouts,),
        "precompile_token_paddings": (max(256, settings.num_rollouts),),
    }
    sizes = {"context_length": 256, "max_total_tokens": 64 * settings.num_rollouts + 4096}
    return Engine(str(demo_model_path()), dtype="bfloat16", enable_return_routed_experts=True, **shapes, **sizes)


def push(engine: Engine, state: Any) -> int:
    """Serve these weights from the next step on; returns the engine's count of the update, which their rows have. The
    cast makes new arrays: the engine is given them."""
    served = engine.update_weights(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state), donate=True)
    return served.update_count


class Trainer:
    """The demo model in float32, its optimiser, and the compiled step."""

    def __init__(self, learning_rate: float) -> None:
        graphdef, self.state = nnx.split(ModelFolder.open(demo_model_path()).load(jnp.dtype("float32")))
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
        self.moments, self.update = jax.jit(optimizer.init)(self.state), make_update(graphdef, optimizer)


def train(engine: Engine, trainer: Trainer, settings: Settings, on_step: Callable[[StepLog], None]) -> list[StepLog]:
    """One run from the demo model's weights; `on_step` is called after each step."""
    gate, logs = CanaryGate(), list[StepLog]()
    state, moments, update = trainer.state, trainer.moments, trainer.update
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "the demo model has a tokenizer"
    text, version = tokenizer.encode(TEXT * 8), push(engine, state)
    starts = np.random.default_rng(settings.seed).integers(
        0, len(text) - PROMPT_LEN, (settings.steps, settings.prompts)
    )
    for step in range(settings.steps):
        prompts = [list(text[start : start + PROMPT_LEN]) for start in starts[step].tolist()]
        rolled = roll_out(engine, prompts, settings, step=step, version=version)
        advantages = jnp.asarray(group_advantages(rolled.rewards, settings.group), jnp.float32)
        batch = jnp.asarray(rolled.tokens), jnp.asarray(rolled.logprobs, jnp.float32), advantages, rolled.routed
        state, moments, loss, (logprobs, miss_share) = update(state, moments, *batch)
        share = gate(miss_share) if settings.replay else None
        report = mismatch_report(rolled.logprobs, logprobs, np.ones(rolled.logprobs.shape, bool))
        version = push(engine, state)
        logs.append(
            StepLog(
                step=step,
                reward=float(rolled.rewards.mean()),
                loss=float(loss),
                k3=report.k3,
                max_abs=report.max_abs,
                beyond_1_1=report.f_1_1,
                canary=share,
            )
        )
        on_step(logs[-1])
    return logs


def plot(runs: dict[str, list[StepLog]], path: Path) -> None:
    """Mismatch (k3, log scale), largest difference and reward by step, one line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    labels = {"k3": "k3, train against rollout", "max_abs": "max |Δ logprob|", "reward": "reward"}
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for run, logs in runs.items():
            axes.plot(
                [log.step for log in logs], [asdict(log)[name] for log in logs], label=f"replay {run}", linewidth=1.5
            )
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        if name != "reward":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=150)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO on the demo model, with routing replay on and off")
    parser.add_argument("--replay", choices=("on", "off", "both"), default="both")
    for name, value, text in (
        ("steps", 40, "updates of a run"),
        ("prompts", 8, "prompts of a step"),
        ("group", 8, "answers to a prompt"),
        ("new-tokens", 48, "tokens of an answer"),
        ("seed", 0, "of prompts and sampling"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value})")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of Adam (3e-4)")
    parser.add_argument(
        "--out", type=Path, default=Path("grpo_tiny"), help="folder of grpo.json and grpo.png (grpo_tiny)"
    )
    args = parser.parse_args(argv)
    for name, least in (("steps", 1), ("prompts", 1), ("group", 2), ("new_tokens", 2), ("seed", 0)):
        if vars(args)[name] < least:
            parser.error(f"--{name.replace('_', '-')} {vars(args)[name]} must be at least {least}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    args = parse(argv)
    console, runs = Console(), dict[str, list[StepLog]]()
    columns = (
        TextColumn("replay {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    settings = Settings(
        steps=args.steps,
        prompts=args.prompts,
        group=args.group,
        new_tokens=args.new_tokens,
        seed=args.seed,
        replay=False,
    )
    trainer = Trainer(args.learning_rate)
    with serve(settings) as engine, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for run in ("off", "on") if args.replay == "both" else (args.replay,):
            task = progress.add_task(run, total=args.steps, now="")

            def show(log: StepLog, task: Any = task) -> None:
                progress.update(
                    task, advance=1, now=f"reward {log.reward:.3f}  k3 {log.k3:.1e}  max |d| {log.max_abs:.2f}"
                )

            runs[run] = train(engine, trainer, replace(settings, replay=run == "on"), show)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "grpo.json").write_text(
        json.dumps({run: [asdict(log) for log in logs] for run, logs in runs.items()}, indent=1) + "\n"
    )
    plot(runs, args.out / "grpo.png")
    for run, logs in runs.items():
        tail = logs[-max(len(logs) // 4, 1) :]
        k3, reward = np.mean([log.k3 for log in logs]), np.mean([log.reward for log in tail])
        console.print(f"replay {run}: mean k3 {k3:.2e}, reward {logs[0].reward:.3f} -> {reward:.3f}")
    console.print(f"wrote {args.out / 'grpo.json'} and {args.out / 'grpo.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
