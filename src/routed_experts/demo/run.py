"""The demo: starts an engine, generates, shows the routing, replays it, and draws it."""

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import jax
import jax.numpy as jnp

from routed_experts.analysis import draw_routing, routing_page
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.installation import install_command
from routed_experts.demo.check import ReplayCheck, check_replay
from routed_experts.demo.drafts import answer_with_drafts
from routed_experts.demo.outputs import DemoOutput, generate
from routed_experts.demo.startup import CompileClock
from routed_experts.demo.terminal import Screen
from routed_experts.engine.build.startup_phases import Phase
from routed_experts.engine.engine import Engine
from routed_experts.layers.native import toolchain
from routed_experts.models.loading.model_source import demo_model_path
from routed_experts.models.model_folder import ModelFolder

DTYPE = "float32"
TITLE = "Which experts wrote this text?"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Inputs of the demo. `start_time` and `imported` are perf_counter times: of the command's start, and after its
    imports."""

    model: Path
    output: Path
    start_time: float
    imported: float
    version: str
    cache: Path | None  # where compiled programs are kept; None: nowhere


def run_demo(options: DemoOptions, stream: IO[str]) -> int:
    """Run the demo; 0 when every check passed, else 1. Raises RoutedExpertsError for a folder that cannot be served."""
    screen = Screen(stream)
    device = jax.devices()[0]
    screen.line(
        f"routed_experts {options.version} · jax {jax.__version__} · {device.platform} · {options.model.name}",
        style="bold",
    )
    with _start(options, screen) as engine:
        answers = _generate(engine, screen)
    column = len(answers[0].record.layer_ids) // 2
    _show(answers, screen)
    faults = _replay(options, answers, screen)
    if answers[1].cached_tokens == 0:
        faults = (*faults, "the second prompt found nothing in the prefix cache")
    if options.model == demo_model_path():
        faults = (*faults, *_speculate(options, screen))
    _plot(options, answers, column, screen)
    verdict = f"FAILED: {'; '.join(faults)}" if faults else "all checks passed"
    screen.heading(f"{verdict} · {time.perf_counter() - options.start_time:.1f} s in all")
    return 1 if faults else 0


def _start(options: DemoOptions, screen: Screen) -> Engine:
    """Build the engine and print each phase as it ends."""
    screen.heading("start-up")
    screen.line(_row("import", options.imported - options.start_time, "Python, jax, flax, routed_experts"))
    with CompileClock() as clock:

        def report(phase: Phase) -> None:
            detail = phase.detail if phase.name != "compile" else f"{phase.detail}; {clock.line()}"
            screen.line(_row(phase.name, phase.seconds, detail))
            if (announcement := long_phase_after(phase.name, options.cache)) is not None:
                screen.line(f"{'':<23}{announcement}")

        engine = Engine(
            str(options.model),
            dtype=DTYPE,
            enable_return_routed_experts=True,
            logprobs_mode="raw",  # before temperature and filters, as a replay computes them
            precompile_bs_paddings=(4,),
            precompile_token_paddings=(64,),
            on_phase=report,
        )
    screen.line(_row("ready", time.perf_counter() - options.start_time, "since the command began"))
    screen.heading("memory plan")
    for line in engine.memory_plan:
        screen.line(f"  {line}")
    return engine


def long_phase_after(phase: str, cache: Path | None) -> str | None:
    """Announce the phase that follows `phase` where it may take minutes; None elsewhere."""
    if phase == "config" and jax.default_backend() == "cpu" and not toolchain.is_compiled():
        return toolchain.COMPILING
    if phase == "allocate":
        return f"compiling; programs are {'not cached' if cache is None else f'cached in {cache} for the next start'}"
    return None


def _generate(engine: Engine, screen: Screen) -> list[DemoOutput]:
    """Generate for the prompts and print the outputs."""
    answers: list[DemoOutput] = []
    for answer in generate(engine):
        record, text = answer.record, answer.routed_text()
        screen.heading(f"{len(answers) + 1} {answer.title}")
        screen.answer(text, len(record.layer_ids) // 2)
        screen.line(
            f"  {record.num_prompt_tokens} tokens of prompt, {answer.cached_tokens} of them from the prefix cache; "
            f"{len(answer.logprobs)} generated in {answer.seconds:.2f} s"
        )
        ids = f"record.ids {record.ids.shape} {record.ids.dtype}"
        screen.line(f"  routed_experts {answer.wire_shape} int32, dense layers -1; {ids}")
        answers.append(answer)
    hit = answers[1].cached_tokens
    screen.line("")
    screen.check(f"the second prompt shares its beginning with the first: cached_tokens = {hit}", passed=hit > 0)
    return answers


def _show(answers: Sequence[DemoOutput], screen: Screen) -> None:
    """Print the experts of a few tokens, and the load of every layer."""
    text = answers[-1].routed_text()
    edge, end = text.record.num_prompt_tokens, text.record.num_tokens
    screen.heading(f"experts of some tokens of {len(answers)}, best first")
    screen.experts(text, sorted({*range(max(edge - 3, 0), min(edge + 4, end)), end - 1}))
    screen.heading(f"load of each layer, {sum(answer.record.num_rows for answer in answers):,} rows")
    screen.loads([answer.record for answer in answers])


def _replay(options: DemoOptions, answers: Sequence[DemoOutput], screen: Screen) -> tuple[str, ...]:
    """Replay the captured ids through the training forward pass and compare it with the engine."""
    screen.heading("replay of the captured ids through the training forward")
    since = time.perf_counter()
    check = check_replay(ModelFolder.open(options.model).load(jnp.dtype(DTYPE)), answers)
    _report(check, screen)
    screen.line(f"  ({time.perf_counter() - since:.1f} s, with the loading of a second copy and one compilation)")
    return check.faults


def _speculate(options: DemoOptions, screen: Screen) -> tuple[str, ...]:
    """Answer with drafts and without; what differs is a fault."""
    screen.heading("speculative decoding: a small head drafts, the model verifies")
    since = time.perf_counter()
    answers = answer_with_drafts(options.model, DTYPE)
    for answer in answers:
        accepted = f"{answer.accepted_tokens} of {answer.drafted_tokens} drafts accepted"
        text = f"{answer.num_tokens} tokens in {answer.verify_steps} verify steps, {answer.accept_length:.2f} a step"
        screen.check(f"{answer.title}: {text}, {accepted}; answer and experts as without", passed=answer.is_equal)
    screen.line(f"  ({time.perf_counter() - since:.1f} s, with a second engine in deterministic mode)")
    return () if all(answer.is_equal for answer in answers) else ("an answer with drafts differs from the one without",)


def _report(check: ReplayCheck, screen: Screen) -> None:
    text = f"replay max |Δ logprob| = {check.replay_logprob:.1e}   over {check.num_logprobs} generated tokens"
    screen.check(f"{text}, against the engine's", passed=check.replay_passed)
    text = f"executed == captured: {_percent(check.executed)}   of {check.num_rows} rows"
    screen.check(text, passed=check.executed == 1.0)
    text = f"live against replay max |Δ logit| = {check.live_logit:.1f}   the live router chose the captured experts in"
    screen.check(f"{text} {_percent(check.live_agreement)} of rows and layers", passed=check.live_passed)
    text = f"rows shifted by one token: max |Δ logprob| = {check.shifted_logprob:.2g}"
    screen.check(f"{text}   this must be large: the check can fail", passed=check.shift_noticed)


def _plot(options: DemoOptions, answers: Sequence[DemoOutput], column: int, screen: Screen) -> None:
    """Write routing.html, and routing.png where matplotlib is installed."""
    screen.heading("pictures")
    options.output.mkdir(parents=True, exist_ok=True)
    texts = [answer.routed_text() for answer in answers]
    page = options.output / "routing.html"
    with atomic_write(page) as part:
        part.write_text(routing_page(texts, title=TITLE, column=column), encoding="utf-8")
    screen.line(f"  {page}   open it in a browser: every layer, every token")
    if importlib.util.find_spec("matplotlib") is None:
        screen.line(f"  no routing.png: it needs matplotlib; run {install_command('plot')}")
        return
    draw_routing(texts, options.output / "routing.png", title=TITLE, column=column)
    screen.line(f"  {options.output / 'routing.png'}")


def _row(name: str, seconds: float, detail: str) -> str:
    return f"  {name:<10}{seconds:7.2f} s   {detail}"


def _percent(share: float) -> str:
    return "100 %" if share == 1.0 else f"{100 * share:.2f} %"
