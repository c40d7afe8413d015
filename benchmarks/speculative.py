"""Throughput with speculative decoding over that without it, for texts of known predictability.

    python benchmarks/speculative.py [--batches 1 8] [--rounds 7] [--new 192] [--prompt 256]
    python benchmarks/speculative.py --dummy --batches 1 16 64 --rounds 3 --name speculative_h200       # a GPU
    python benchmarks/speculative.py --small                   # does it run

The benchmark model in float32; with --dummy Qwen3-30B-A3B in bfloat16 with random weights. A model with random weights
copies nothing, so the text of an answer is given: what a step samples is replaced on the host, and the step feeds it,
drafts included. Costs are those of the real steps. Engine cores over the same weights answer the same prompts in turn;
a figure is the median over rounds of the ratio of two runs of one round, with the quartiles. A run is timed from its
last prompt token to its last answer, capture on and asked in all but "capture off".

random: nothing predicts the answer. copy and edit: the answer is the prompt in pieces of 16 tokens, with 4 new ones
between two. oracle: a drafter that is right with probability 0.8, three drafts, and the same ones with capture off.
adversary: one that claims 0.9 of each and is never right. For this load and random text the column "on / off, one
engine" compares runs of one engine with drafts and without: two equal engines on a CPU differ by some percent.
rollouts: the answer is remembered, as of an epoch with the same weights and seeds; old rollouts: one token in ten of
it has changed since. device: three drafts that are on the device and cost nothing, right with probability 0.8
whatever the model samples. With --joined each of these engines, but the adversary's, has a second one, whose steps
all wait until the host has read the one before. `tokens a step` is of a request, and `bound` is that over the cost of
a step with so many tokens, without a wait for the host, by the table that the engine measured at start and has
followed since: an estimate. `draft us a request` is the host's time for drafting and choosing in the engine, and
`joined wait us` how long the device waits for the host before a joined step."""

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Prompts, benchmark_model, print_table, progress, write_result
from safetensors.numpy import save_file

from capture import dummy_model
from routed_experts.core.buckets import continuation_size
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.speculation import DraftLimits, Speculation
from routed_experts.execution.forward_batch import BatchShape, unpack
from routed_experts.layers.acceptance import count_accepted
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.speculation.draft_policy import DraftPolicy
from routed_experts.speculation.drafter import Draft, DraftSample, DraftSequence

COPIED, EDITED = 16, 4  # tokens of a piece of "copy and edit"
JOINED = ", joined"  # of an engine's name: none of its steps is ahead of the host
CAPTURE_OFF = ", capture off"
DRAFTS_OFF = ", drafts off"  # the same engine core, whose steps do not draft
ENGINES = {
    "oracle": ("oracle", "oracle" + JOINED, "oracle" + CAPTURE_OFF, "oracle" + JOINED + CAPTURE_OFF),
    "rollouts": ("rollouts", "rollouts" + JOINED),
    "old rollouts": ("rollouts", "rollouts" + JOINED),
    "device": ("device", "device" + JOINED),
    "adversary": ("adversary", "adversary" + DRAFTS_OFF),
    "random": ("ngram", "ngram" + JOINED, "ngram" + DRAFTS_OFF),
}  # beside "off", by load; of other loads:
COPYING = ("ngram", "ngram" + JOINED, "ngram" + CAPTURE_OFF)
ALPHA, ORACLE_DRAFTS = 0.8, 3
ADVERSARY_CLAIM = 0.9  # of each draft, and none is right
DRAFT_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
CHANGED = 0.1  # of the tokens of "old rollouts"
LOADS = ("random", "copy and edit", "oracle", "rollouts", "old rollouts", "adversary", "device")


class GivenText:
    """A runner of one data rank whose steps sample the answers that are given: the others of a step's results stay. A
    program more a verify step counts the accepted drafts for the device."""

    def __init__(self, core: EngineCore, width: int) -> None:
        self._inner: Any = core.runner
        self._core = core
        slots = core.runner.config.num_request_slots
        self._texts = np.zeros((slots, width), np.int32)
        self._device_texts = jnp.asarray(self._texts)
        self._starts = np.zeros(slots, np.int32)  # where each slot stands after its last verify step
        self._owners: list[Req | None] = [None] * slots
        self.answers: dict[str, np.ndarray] = {}  # by request id: prompt and answer
        programs, num_drafts = self._inner._programs, self._inner.spec.num_drafts
        for key, program in tuple(programs.items()):
            if key[0] == "accept":
                count = jax.jit(functools.partial(count_given, shape=key[1], num_drafts=num_drafts))
                programs[key] = functools.partial(self._accept, program, count)
        core.runner = self  # type: ignore[assignment]

    def _accept(self, program: Any, count: Any, *inputs: Any) -> tuple[Any, ...]:
        _, _, words, tokens, *_ = inputs
        last_tokens, sampled, _ = program(*inputs)
        return last_tokens, sampled, count(words, tokens, self._device_texts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> Any:
        """Note the texts of new requests, then dispatch."""
        new = [req for req in self._core.ranks.running if self._owners[req.slot] is not req]
        for req in new:
            self._owners[req.slot] = req
            text = self.answers[req.rid]
            self._texts[req.slot, : text.size] = text
        if new:
            self._device_texts = jnp.asarray(self._texts.copy())
        return self._inner.dispatch(batches)

    def read(self, pending: Any) -> list[StepResult]:
        """The results, with the tokens of the texts, which are looked up while the step runs."""
        (batch,) = pending.batches
        given = self._given(self._located(batch) if batch.is_ahead else batch)
        (result,) = self._inner.read(pending)
        return [dataclasses.replace(result, **given)]

    def _located(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """A batch that is ahead with the positions and drafts that the device gives it."""
        assert batch.continuations is not None
        rows = batch.token_rows[: batch.num_tokens]
        positions, ids = batch.positions.copy(), batch.token_ids.copy()
        positions[: batch.num_tokens] += self._starts[batch.request_slots[rows]]
        index = positions[: batch.num_tokens] - batch.continuations[rows, 0]
        last = batch.continuations.shape[1] - 2
        drafts = batch.continuations[rows, 1 + np.clip(index, 0, last)]
        ids[: batch.num_tokens] = np.where((index >= 0) & (index <= last), np.maximum(drafts, 0), 0)
        return dataclasses.replace(batch, positions=positions, token_ids=ids)

    def _given(self, batch: ModelWorkerBatch) -> dict[str, np.ndarray]:
        if batch.mode is not ForwardMode.TARGET_VERIFY:
            return {"tokens": self._texts[batch.request_slots, batch.seq_lens]}
        starts = batch.query_starts[: batch.num_requests + 1]
        tokens = self._texts[batch.request_slots[batch.token_rows], batch.positions + 1]
        differs = np.append(tokens[:-1] != batch.token_ids[1:], True)
        differs[starts[1:] - 1] = True  # the last row of a request
        ends = np.flatnonzero(differs)
        accepted = (ends[np.searchsorted(ends, starts[:-1])] - starts[:-1]).astype(np.int32)
        self._starts[batch.request_slots[: batch.num_requests]] = batch.positions[starts[:-1]] + accepted + 1
        return {"tokens": tokens, "accepted": accepted}


def count_given(words: Any, tokens: Any, texts: Any, *, shape: BatchShape, num_drafts: int) -> Any:
    """The accepted drafts of each request of a verify step, [B]: those that the text of its slot has."""
    batch = unpack(words, shape)
    paged = batch.paged
    following = texts[batch.request_slots[paged.token_rows], jnp.minimum(paged.positions + 1, texts.shape[1] - 1)]
    return count_accepted(following, tokens, paged.query_starts, num_drafts=num_drafts)


class Oracle:
    """Knows the answers, and is right with probability `right`; it claims `claimed`. Which of its drafts are wrong is
    drawn when a sequence begins: a draft behind the first wrong one is not seen, so that it may be offered again."""

    nbytes = 0

    def __init__(self, vocabulary: int, *, right: float = ALPHA, claimed: float = ALPHA) -> None:
        self._right = right
        self.answers: dict[str, np.ndarray] = {}
        self._known: dict[str, int] = {}
        self._drafts: dict[str, np.ndarray] = {}
        self._survival = claimed ** np.arange(1, continuation_size(ORACLE_DRAFTS) + 1)
        self._noise, self._vocabulary = np.random.default_rng(5), vocabulary

    def open(self, key: str, tokens: np.ndarray, info: DraftSequence) -> None:
        self._known[key], answer = tokens.size, self.answers[key]
        others = self._noise.integers(0, self._vocabulary, answer.size)
        self._drafts[key] = np.where(self._noise.random(answer.size) < self._right, answer, others).astype(np.int32)

    def extend(self, key: str, tokens: np.ndarray) -> None:
        self._known[key] += tokens.size

    def close(self, key: str) -> None:
        self._known.pop(key, None)
        self._drafts.pop(key, None)

    def remember(self, prompt: np.ndarray, output: np.ndarray, sample: DraftSample) -> None:
        pass

    def forget(self) -> None:
        pass

    def propose(self, key: str, most: int) -> Draft:
        known = self._known[key]
        ahead = self._drafts[key][known : known + most]
        return Draft(ahead, self._survival[: ahead.size])


class DeviceDrafts:
    """A runner whose drafts are on the device and cost nothing; how many of them are accepted is drawn by the host."""

    def __init__(self, core: EngineCore, vocabulary: int) -> None:
        self._inner: Any = core.runner
        self._noise, self._accepted = np.random.default_rng(5), dict[int, np.ndarray]()
        self._vocabulary, self._drawn = vocabulary, np.zeros(0, np.int32)
        programs = self._inner._programs
        for key, program in tuple(programs.items()):
            if key[0] == "accept":
                programs[key] = functools.partial(self._accept, program)
            elif key[0] == "draft":
                programs[key] = functools.partial(self._draft, self._proposals(key[1].num_requests, key[2]))
        core.runner = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _proposals(self, batch: int, num_drafts: int) -> Any:
        ids = self._noise.integers(0, self._vocabulary, (batch, num_drafts)).astype(np.int32)
        claims = np.full((batch, num_drafts), ALPHA, np.float32).view(np.int32)
        return jax.device_put(np.concatenate([ids, claims], axis=1)) if num_drafts else None

    def _draft(self, proposals: Any, weights: Any, target: Any, pool: Any, *_: Any) -> tuple[Any, Any]:
        del weights, target
        return pool, proposals

    def _accept(self, program: Any, *inputs: Any) -> tuple[Any, ...]:
        last_tokens, sampled, _ = program(*inputs)
        return last_tokens, sampled, self._drawn

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> Any:
        """Draw how many drafts of each request are accepted, then dispatch."""
        (batch,) = batches
        if batch.mode is ForwardMode.TARGET_VERIFY:
            most = np.diff(batch.query_starts) - 1
            right = self._noise.random((most.size, ORACLE_DRAFTS)) < ALPHA
            self._drawn = np.minimum(right.cumprod(axis=1).sum(axis=1), np.maximum(most, 0)).astype(np.int32)
            self._accepted[batch.step] = self._drawn[: batch.num_requests]
        return self._inner.dispatch(batches)

    def read(self, pending: Any) -> list[StepResult]:
        """The results, with the drafts accepted that were drawn."""
        results = self._inner.read(pending)
        drawn = self._accepted.pop(pending.batches[0].step, None)
        return results if drawn is None else [dataclasses.replace(results[0], accepted=drawn)]


def remember(
    engine: "Runner", prompts: list[np.ndarray], answers: list[np.ndarray], changed: float, noise: np.random.Generator
) -> None:
    """Hand in the answers of an earlier epoch: these, but for some tokens."""
    speculation, vocabulary = engine.core.speculation, engine.core.runner.config.vocab_size
    assert speculation is not None
    for prompt, answer in zip(prompts, answers, strict=True):
        others = noise.integers(0, vocabulary, answer.size)
        old = np.where(noise.random(answer.size) < changed, others, answer).astype(np.int32)
        speculation.remember(prompt, old, DraftSample())


def text_of(load: str, prompt: np.ndarray, new: int, noise: np.random.Generator, vocabulary: int) -> np.ndarray:
    """The answer to a prompt."""
    drawn = noise.integers(0, vocabulary, new).astype(np.int32)
    if load != "copy and edit":
        return drawn
    pieces, start = list[np.ndarray](), 0
    while sum(piece.size for piece in pieces) < new:
        pieces += [prompt[start : start + COPIED], drawn[len(pieces) * EDITED :][:EDITED]]
        start = (start + COPIED + EDITED) % (prompt.size - COPIED)
    return np.concatenate(pieces)[:new]


class Runner:
    """One engine of a comparison."""

    def __init__(
        self, components: EngineComponents, width: int | None, oracle: Oracle | None = None, *, is_joined: bool = False
    ) -> None:
        """`width`: of the longest text; None: the model's own text. `is_joined`: no step is ahead of the host."""
        self.core, self.oracle = components.core, oracle
        if is_joined:
            self.core.ranks[0].may_be_ahead = lambda: False  # type: ignore[method-assign]
        self.costs = None if self.core.speculation is None else self.core.speculation.costs
        if oracle is not None:
            limits = DraftLimits(num_drafts=ORACLE_DRAFTS, vocab_size=components.vocab_size)
            assert self.costs is not None
            self.core.speculation = Speculation(oracle, DraftPolicy(self.costs), limits, costs=self.costs)  # type: ignore[arg-type]
        self._text = None if width is None else GivenText(self.core, width)

    def give_text(self, req: Req, answer: np.ndarray) -> None:
        """Make `answer` what the request is answered, unless the model's own text is."""
        if self._text is None:
            return
        self._text.answers[req.rid] = np.concatenate([req.tokens[: req.prompt_len], answer])
        if self.oracle is not None:
            self.oracle.answers[req.rid] = self._text.answers[req.rid]

    def run_without_drafts(self, requests: list[Req], answers: list[np.ndarray]) -> tuple[float, float]:
        """As `run`, but no step drafts."""
        speculation, self.core.speculation = self.core.speculation, None
        try:
            return self.run(requests, answers)
        finally:
            self.core.speculation = speculation

    def run(self, requests: list[Req], answers: list[np.ndarray]) -> tuple[float, float]:
        """Seconds from the first to the last step without prompt tokens, and seconds of the steps before."""
        for req, answer in zip(requests, answers, strict=True):
            self.give_text(req, answer)
        self.core.flush_cache()
        began = time.perf_counter()
        self.core.add(requests)
        while not all(req.is_prefilled for req in requests):
            self.core.step()
        start = time.perf_counter()
        while not self.core.is_idle:
            self.core.step()
        end = time.perf_counter()
        for req, answer in zip(requests, answers, strict=True):
            assert req.num_output == answer.size
            assert self._text is None or req.output_ids.tolist() == answer.tolist(), "not the given text"
        return end - start, start - began


def make_engines(args: argparse.Namespace, model: Any, batch: int) -> dict[str, Runner]:
    """The engines over one model that the loads need."""
    width = args.prompt + args.new + 1
    sizes = dict(
        precompile_bs_paddings=tuple(sorted({1, batch})),
        precompile_token_paddings=(max(256, batch * args.prompt),),
        context_length=width + 15,
        max_total_tokens=batch * (width + 32) + 512,
        skip_tokenizer_init=True,
    )

    def make(*, capture: bool, drafts: int, scope: str = "request") -> EngineComponents:
        speculative = SpeculativeConfig(num_draft_tokens=drafts + 1, scope=scope) if drafts else None
        server = ServerArgs(enable_return_routed_experts=capture, **sizes)
        return build_engine(server, model=model, speculative=speculative)

    needed = {name for load in args.loads for name in engines_of(load, args) if not name.endswith(DRAFTS_OFF)}
    engines = {"off": Runner(make(capture=True, drafts=0), width)}
    for name in sorted(needed):
        is_joined, capture = JOINED in name, not name.endswith(CAPTURE_OFF)
        if name.startswith(("oracle", "adversary")):
            made = make(capture=capture, drafts=ORACLE_DRAFTS)
            rates = dict(right=0.0, claimed=ADVERSARY_CLAIM) if name == "adversary" else {}
            engines[name] = Runner(made, width, Oracle(made.vocab_size, **rates), is_joined=is_joined)
        elif not name.startswith("device"):
            scope = "namespace" if name.startswith("rollouts") else "request"
            made = make(capture=capture, drafts=args.drafts, scope=scope)
            engines[name] = Runner(made, width, is_joined=is_joined)
    return engines | (device_engines(model, sizes, needed) if "device" in needed else {})


def engines_of(load: str, args: argparse.Namespace) -> list[str]:
    """The engines beside "off" that a load runs on."""
    return [name for name in ENGINES.get(load, COPYING) if args.joined or JOINED not in name]


def write_draft_model(folder: Path, vocabulary: int) -> None:
    """A checkpoint of one small layer, all zeros."""
    width, layer = DRAFT_MODEL["hidden_size"], "model.layers.0."
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    names += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    tensors = {f"{layer}{name}.weight": np.zeros((width, width), np.float32) for name in names}
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    tensors |= {f"{layer}{name}.weight": np.zeros(width, np.float32) for name in norms}
    tensors |= {"model.norm.weight": np.zeros(width, np.float32)}
    tensors |= {"model.embed_tokens.weight": np.zeros((vocabulary, width), np.float32)}
    save_file(tensors, folder / "model.safetensors")
    keys = DRAFT_MODEL | {"vocab_size": vocabulary, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(keys))


def device_engines(model: Any, sizes: dict[str, Any], needed: set[str]) -> dict[str, Runner]:
    """Engines with a draft model whose programs are replaced: it is small, and never runs."""
    engines = dict[str, Runner]()
    with tempfile.TemporaryDirectory() as folder:
        write_draft_model(Path(folder), model.config.vocab_size)
        speculative = SpeculativeConfig(
            algorithm="STANDALONE", draft_model_path=folder, num_steps=ORACLE_DRAFTS, adaptive=True
        )
        server = ServerArgs(enable_return_routed_experts=True, **sizes)
        for name in sorted(name for name in needed if name.startswith("device")):
            components = build_engine(server, model=model, speculative=speculative)
            DeviceDrafts(components.core, components.vocab_size)
            engines[name] = Runner(components, None, is_joined=name.endswith(JOINED))
    return engines


def compare(engines: dict[str, Runner], args: argparse.Namespace, batch: int, load: str) -> list[dict[str, object]]:
    """One row for each engine beside "off"."""
    vocabulary = engines["off"].core.runner.config.vocab_size
    names = ["off", *engines_of(load, args)]
    noise, seconds = np.random.default_rng(batch), {name: list[tuple[float, float]]() for name in names}
    own = {name: engines[name.removesuffix(DRAFTS_OFF)] for name in names}
    before = {name: counts_of(own[name]) for name in names}
    for turn in range(-1, args.rounds):
        progress(f"batch {batch}, {load}, round {turn + 1} of {args.rounds}")
        prompts = [noise.integers(0, vocabulary, args.prompt).astype(np.int32) for _ in range(batch)]
        answers = [text_of(load, prompt, args.new, noise, vocabulary) for prompt in prompts]
        if turn == 0:
            before = {name: counts_of(own[name]) for name in names}
        for name in names if turn % 2 else names[::-1]:
            ask = not name.endswith(CAPTURE_OFF)
            requests = Prompts(turn + 1).build_requests(prompts, new=args.new, ask=ask)
            if name.startswith("rollouts"):
                remember(own[name], prompts, answers, CHANGED if load == "old rollouts" else 0.0, noise)
            run = own[name].run_without_drafts if name.endswith(DRAFTS_OFF) else own[name].run
            took = run(requests, answers)
            if turn >= 0:
                seconds[name].append(took)
    decode = {name: [took for took, _ in runs] for name, runs in seconds.items()}
    prefill = {name: [took for _, took in runs] for name, runs in seconds.items()}
    rows = list[dict[str, object]]()
    for name in names[1:]:
        if name.endswith(DRAFTS_OFF):
            continue
        ratios = ratios_of(decode["off"], decode[name])
        low, high = np.percentile(ratios, [25, 75])
        verify, proposed, accepted, emitted, draft_s = counts_of(engines[name], before[name])
        tokens, drafts = args.rounds * batch * args.new, proposed / verify if verify else 0.0
        steps = verify + tokens - emitted  # of all requests
        with_capture_off, drafts_off = decode.get(name + CAPTURE_OFF), decode.get(name + DRAFTS_OFF)
        same_engine = "-"
        if drafts_off:
            first, median, third = np.percentile(ratios_of(drafts_off, decode[name]), [25, 50, 75])
            same_engine = f"{median:.3f} [{first:.3f}, {third:.3f}]"
        rows.append(
            {
                "batch": batch,
                "text": load,
                "engine": name,
                "tokens/s off": batch * args.new / statistics.median(decode["off"]),
                "on / off": statistics.median(ratios),
                "quartiles": f"{low:.3f}..{high:.3f}",
                "on / off, one engine": same_engine,
                "rounds": args.rounds,
                "prefill on / off": statistics.median(ratios_of(prefill["off"], prefill[name])),
                "capture on / off": statistics.median(ratios_of(with_capture_off, decode[name]))
                if with_capture_off
                else "-",
                "accept rate": accepted / proposed if proposed else 0.0,
                "tokens a step": tokens / steps,
                "drafts a verify": drafts,
                "bound": bound(engines[name], batch, drafts, tokens / steps),
                "draft us a request": draft_s / steps * 1e6,
                "joined wait us": wait_us(engines[name], batch),
            }
        )
    return rows


def ratios_of(base: list[float], measured: list[float]) -> list[float]:
    """Throughput over that of the runs of the same rounds."""
    return [old / new for old, new in zip(base, measured, strict=True)]


def counts_of(engine: Runner, before: tuple[float, ...] = (0, 0, 0, 0, 0.0)) -> tuple[Any, ...]:
    """Verify steps of requests, drafts, accepted ones, tokens of these steps, seconds of drafting; since `before`."""
    if engine.core.speculation is None:
        return before
    totals = engine.core.speculation.totals
    requests = totals.requests
    now = (requests.verify_steps, requests.proposed, requests.accepted, requests.emitted, totals.draft_s)
    return tuple(new - old for new, old in zip(now, before, strict=True))


def bound(engine: Runner, batch: int, drafts: float, a_step: float) -> float:
    """Gain if a step cost what its forward pass costs: tokens a step over the measured cost of a verify step."""
    assert engine.costs is not None
    _, plain = engine.costs.seconds(batch, batch)
    _, verify = engine.costs.seconds(batch, round(batch * (1 + drafts)))
    return a_step * plain / verify if drafts else 1.0


def wait_us(engine: Runner, batch: int) -> float:
    """How long the device waits for the host before a joined step, by the engine's own account."""
    assert engine.costs is not None
    return engine.costs.wait(batch) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--drafts", type=int, default=7, help="of a request, by n-grams")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS[:-2]))
    parser.add_argument("--dummy", action="store_true", help="Qwen3-30B-A3B with random weights, for a GPU")
    parser.add_argument("--joined", action="store_true", help="run engines without steps ahead of the host, too")
    parser.add_argument("--small", action="store_true", help="one short round")
    parser.add_argument("--name", default="speculative_cpu", help="of the result")
    args = parser.parse_args()
    if args.small:
        args.batches, args.rounds, args.prompt, args.new = [2], 1, 64, 24
    model = dummy_model() if args.dummy else benchmark_model(jnp.dtype("float32"))
    rows, costs = list[dict[str, object]](), dict[str, object]()
    for batch in args.batches:
        engines = make_engines(args, model, batch)
        measured = next(engine.costs for engine in engines.values() if engine.costs is not None)
        points = sorted({batch, *(batch * (1 + drafts) for drafts in (1, 3, args.drafts))})
        costs[str(batch)] = {str(tokens): measured.seconds(batch, tokens)[1] * 1e3 for tokens in points}
        for load in args.loads:
            rows += compare(engines, args, batch, load)
            print_table(rows)
    print(write_result(args.name, rows, costs_ms=costs))


if __name__ == "__main__":
    main()
