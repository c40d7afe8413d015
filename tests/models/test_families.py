"""Every family against transformers: the real engine on a checkpoint that transformers wrote, float32 on the CPU,
teacher-forced.

One forward of transformers over prompt and answer judges every token: if its argmax agrees at every place, greedy
decoding agrees by induction. Where the oracle itself is near a tie (1e-4) a difference is an exception: counted,
printed (pytest -rP), and bounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts import Engine, extract_routed_experts_from_meta_info
from routed_experts.core.errors import CaptureUnsupportedError
from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.aot_programs import lowerings
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import RoutedBatch, forward

pytestmark = pytest.mark.usefixtures("fast_compilation")

MARGIN = 1e-4
NEW_TOKENS = 8
GREEDY = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
PROMPT_LENGTHS = (1, 5, 70, 17)  # one longer than two buckets of 32
ENGINE = dict(
    skip_tokenizer_init=True,
    precompile_bs_paddings=(4,),
    precompile_token_paddings=(32,),
    page_size=8,
    max_total_tokens=512,
    context_length=160,
)
compiled_forward = nnx.jit(
    forward, static_argnames=("return_routed",)
)  # one program takes less time than its operations one by one
ALL_FORMS = (
    "Phimoe",
    "GraniteMoe",
)  # of sampling: their heads have a bias, and scale; other families differ in layers alone
NO_PREFIX_CACHE = (
    "Qwen3Next",
    "Qwen3_5Moe",
    "Lfm2Moe",
    "BailingHybrid",
)  # they keep states, which cannot be cut where a prefix ends
WEIGHS_OTHERWISE = ("Gemma4", "Llama4", "DeepseekV3", "GptOss")  # not softmax over all experts, times the outputs


@dataclasses.dataclass
class Tally:
    """Counts over one family."""

    tokens: int = 0
    near_tokens: int = 0
    ids: int = 0
    near_ids: int = 0
    exceptions: int = 0
    logprob: float = 0.0
    weight: float = 0.0

    def __str__(self):
        return (
            f"{self.tokens} tokens compared ({self.near_tokens} near a tie), {self.ids} ids compared ({self.near_ids} "
            "near a tie), "
            f"{self.exceptions} exceptions, largest difference of a logprob {self.logprob:.1e}, of a combine weight "
            f"{self.weight:.1e}"
        )


def compare_ids(judged, rows, tally):
    """Rows of the record against the oracle's choices: the same experts, best first."""
    choice, top_k = judged.choice[: len(rows)], rows.shape[-1]
    best = -np.sort(-choice, axis=-1)
    best = np.concatenate([best, np.full((*best.shape[:2], 1), -np.inf)], axis=-1)[..., : top_k + 1]
    margins = best[..., :-1] - best[..., 1:]
    decided = (margins[..., -1] > MARGIN) & (judged.groups[: len(rows)] > MARGIN)
    ordered = decided & (margins.min(axis=-1) > MARGIN)
    expected = np.argsort(-choice, axis=-1, kind="stable")[..., :top_k]
    reference = np.sort(judged.ids[: len(rows)], axis=-1)
    assert np.array_equal(np.sort(expected[decided], axis=-1), reference[decided]), (
        "transformers chose other experts than those of the best scores; correct the `scoring_func` of the case"
    )
    assert np.array_equal(np.sort(rows[decided], axis=-1), reference[decided])
    assert np.array_equal(rows[ordered], expected[ordered])
    tally.ids += rows.size
    tally.near_ids += int(np.sum(~decided)) * top_k
    tally.exceptions += int(np.sum(np.any(np.sort(rows, axis=-1) != reference, axis=-1)))


def compare_weights(judged, record, tally):
    """Combine weights of the record against the routers' own, expert by expert, where both chose the same."""
    rows, width = record.ids.astype(int), judged.choice.shape[-1]
    dense = np.zeros((2, *rows.shape[:2], width))
    np.put_along_axis(dense[0], rows, record.weights, axis=-1)
    np.put_along_axis(dense[1], judged.ids[: len(rows)].astype(int), judged.weights[: len(rows)], axis=-1)
    same = np.all(np.sort(rows, axis=-1) == np.sort(judged.ids[: len(rows)], axis=-1), axis=-1)
    tally.weight = max(tally.weight, float(np.max(np.abs(dense[0] - dense[1])[same], initial=0.0)))


def compare(oracle, prompt, result, tally, *, prompt_logprobs):
    """One answer of the engine against the oracle."""
    answer, meta = result["output_ids"], result["meta_info"]
    tokens, judged = [*prompt, *answer], oracle.judge([*prompt, *answer])
    for step, token in enumerate(answer):
        logits = judged.logits[len(prompt) - 1 + step]
        second, best = np.sort(logits)[-2:]
        tally.tokens += 1
        tally.near_tokens += int(best - second <= MARGIN)
        assert best - second <= MARGIN or token == int(np.argmax(logits)), (step, token, int(np.argmax(logits)))
    groups = [(len(prompt), meta["output_token_logprobs"])] + (
        [(0, meta["input_token_logprobs"])] if prompt_logprobs else []
    )
    for first, entries in groups:
        for position, (value, token, _) in enumerate(entries, start=first):
            assert token == tokens[position] and (value is None) == (position == 0)
            if value is not None:
                tally.logprob = max(tally.logprob, abs(value - judged.logprobs[position - 1, token]))
    layer_ids = oracle.case.layer_ids
    if not layer_ids:
        return
    rows = extract_routed_experts_from_meta_info(result).reshape(len(tokens) - 1, oracle.config.num_hidden_layers, -1)
    assert np.all(np.delete(rows, layer_ids, axis=1) == -1)
    compare_ids(judged, rows[:, layer_ids], tally)
    record = record_from_meta_info(result)
    assert record is not None and np.array_equal(record.ids, rows[:, layer_ids])
    compare_weights(judged, record, tally)


def run(model, tokens, ids=None):
    """The forward over one sequence; rows of `ids` [S, M, K] are forced but the last, without them the routers
    choose."""
    spec, known = model.config.capture_spec, np.arange(len(tokens)) < (len(tokens) - 1 if ids is not None else 0)
    if spec is None:
        return compiled_forward(model, jnp.asarray(tokens, jnp.int32)[None])
    ids = np.zeros((len(tokens), spec.num_moe_layers, spec.top_k), np.uint8) if ids is None else ids.astype(np.uint8)
    routed = RoutedBatch(*(jnp.asarray(array[None]) for array in (ids, known, np.zeros(len(tokens), bool))))
    return compiled_forward(model, jnp.asarray(tokens, jnp.int32)[None], routed=routed, return_routed=True)


def replayed(oracle, model, tokens):
    """Largest difference of logits when the oracle's ids are forced on every row but the last."""
    judged, has_moe = oracle.judge(tokens), bool(oracle.case.layer_ids)
    out = run(model, tokens, judged.ids if has_moe else None)
    if has_moe:
        assert np.array_equal(np.asarray(out.ids)[0, :-1], judged.ids[:-1])
    return float(np.abs(np.asarray(out.logits)[0] - judged.logits).max())


def check_scores(engine, tokens, *, replays_weights):
    """By the kernels that serve: live, its own rows and rows of which none is valid are the same by the bit; rows in an
    order that no router gives are run as they stand, and so are weights that no router gives."""
    live = engine.score(tokens)
    rows = live.routed_experts
    drifted = dataclasses.replace(
        rows, ids=((rows.ids[..., ::-1].astype(int) + 1) % rows.num_experts).astype(rows.ids.dtype)
    )
    for record in (rows, dataclasses.replace(drifted, valid=np.zeros(len(tokens), bool))):
        again = engine.score(tokens, routed=record)
        assert np.array_equal(again.logprobs, live.logprobs) and again.routed_experts == rows
    forced = engine.score(tokens, routed=drifted)
    assert np.array_equal(forced.routed_experts.ids, drifted.ids)
    assert not np.array_equal(forced.logprobs, live.logprobs)
    if replays_weights:
        own = engine.score(tokens, routed=rows, replay_weights=True)
        np.testing.assert_allclose(own.logprobs, live.logprobs, atol=2e-5)
        halved = dataclasses.replace(rows, weights=rows.weights / 2)
        lighter = engine.score(tokens, routed=halved, replay_weights=True)
        assert lighter.routed_experts == halved and not np.array_equal(lighter.logprobs, live.logprobs)


def flipped(folder, model, tokens):
    """Share of routers that choose other experts in bfloat16 than the float32 model does with the same, rounded
    weights. A property of the dtype."""
    half = ModelFolder.open(folder).load(jnp.dtype(jnp.bfloat16))
    rounded = jax.jit(
        lambda leaves: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), leaves)
    )  # one program, not one a shape
    wide = nnx.merge(nnx.graphdef(model), rounded(nnx.state(half)))  # in the program of the replay
    low, high = (run(m, tokens).ids for m in (half, wide))
    return float(np.mean(np.any(np.sort(low, axis=-1) != np.sort(high, axis=-1), axis=-1)))


@pytest.fixture
def programs(name, monkeypatch):
    """What is compiled: where a family has nothing of its own after the last layer, of the four ways to choose a token
    the greedy one."""

    def selected_jobs(runner):
        jobs = lowerings(runner.state, runner.spec, runner.config)
        needed = {
            key: job for key, job in jobs.items() if key[0] in ("forward", "score") or key[-1] is SamplingMode.GREEDY
        }
        return jobs if name in ALL_FORMS else needed

    monkeypatch.setattr(ModelRunner, "_jobs", selected_jobs)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", CASES)
def test_tokens_logprobs_and_routed_experts_are_those_of_transformers(tmp_path, name):
    oracle, counts = Oracle(CASES[name], tmp_path), Tally()
    capture, rng = bool(oracle.case.layer_ids), np.random.default_rng(len(name))
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]
    kwargs = dict(sampling_params=GREEDY, return_logprob=True)
    kwargs |= dict(return_routed_experts=capture, return_routed_experts_weights=capture)
    flags = dict(enable_return_routed_experts=capture, enable_return_routed_experts_weights=capture)
    with Engine(str(tmp_path), **flags, **ENGINE) as engine:
        results = engine.generate(input_ids=prompts, logprob_start_len=0, **kwargs)
        for prompt, result in zip(prompts, results, strict=True):
            compare(oracle, prompt, result, counts, prompt_logprobs=True)
        assert results[1]["output_ids"] == oracle.generate(prompts[1], NEW_TOKENS)
        longer = [*prompts[2], *results[2]["output_ids"], 7, 8, 9]  # the previous output, and a new turn
        hit = engine.generate(input_ids=longer, **kwargs)
        if name in NO_PREFIX_CACHE:
            assert hit["meta_info"]["cached_tokens"] == 0 and not engine.get_server_info()["prefix_cache"]
        else:
            assert hit["meta_info"]["cached_tokens"] >= len(prompts[2])
        compare(oracle, longer, hit, counts, prompt_logprobs=False)
        if capture:
            check_scores(engine, prompts[3], replays_weights=name in WEIGHS_OTHERWISE)
        assert engine.check_integrity() == []
    assert len({tuple(result["output_ids"]) for result in results}) > 1, "a constant answer proves nothing"
    model = ModelFolder.open(tmp_path).load(jnp.dtype(jnp.float32))
    difference = replayed(oracle, model, longer)
    share = flipped(tmp_path, model, longer) if capture else 0.0
    flips = f"; {share:.2%} of routers flip in bfloat16" if capture else ""
    print(f"{name}: {counts}; replay of the oracle's ids: largest logit difference {difference:.1e}{flips}")
    assert counts.logprob < 1e-4 and difference < 2e-4 and counts.weight < 2e-5
    assert share < 0.15, "bfloat16 rounds: routers near a tie flip, but no more; this is another computation"
    assert counts.near_tokens <= 0.05 * counts.tokens and counts.near_ids <= 0.1 * counts.ids
    assert counts.exceptions <= 0.001 * counts.ids


def test_capture_of_a_dense_model_is_refused(tmp_path):
    Oracle(CASES["Qwen3"], tmp_path)
    with pytest.raises(CaptureUnsupportedError, match="no MoE layer"):
        Engine(str(tmp_path), enable_return_routed_experts=True, **ENGINE)
