"""Sampling from prompt to answer: judged by the whole-sequence oracle in NumPy, which shares no code with the
engine."""

import collections
import concurrent.futures

import numpy as np
import pytest

from oracles.full_sequence import FullSequence
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.requests.input_processor import InputProcessor
from support.tiny_checkpoint import VOCAB_SIZE, tiny_config, tiny_tensors

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [49, 80, 69, 71, 223, 87, 82, 80, 223, 65, 223, 86]
LONG_PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, VOCAB_SIZE, 70)]  # three chunks of 32


@pytest.fixture(scope="module")
def raw_engine(engine_factory):
    with engine_factory(logprobs_mode="raw") as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle():
    return FullSequence(tiny_config(), tiny_tensors(tiny_config()))


def log_softmax(scores):
    best = scores.max(-1, keepdims=True)
    return scores - best - np.log(np.exp(scores - best).sum(-1, keepdims=True))


def output_ids(engine, params, *, prompt=PROMPT, **kwargs):
    result = engine.generate(input_ids=prompt, sampling_params=params, **kwargs)
    return [output["output_ids"] for output in result] if isinstance(result, list) else result["output_ids"]


# --- greedy, penalties, bias


def decode_by_hand(
    oracle, prompt, num_tokens, *, presence=0.0, frequency=0.0, repetition=1.0, bias=(), banned=(), min_tokens=0
):
    """Greedy decoding one token at a time from the oracle's logits; the formulas are OpenAI's and vLLM's, written as a
    loop."""
    tokens, margins = list(prompt), []
    for step in range(num_tokens):
        logits = oracle.run(tokens).logits[-1].copy()
        generated = collections.Counter(tokens[len(prompt) :])
        for token in set(tokens):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token, count in generated.items():
            logits[token] -= frequency * count + presence
        for token, value in dict(bias).items():
            logits[token] += value
        if step < min_tokens:
            logits[list(banned)] = -np.inf
        best, second = np.sort(logits)[::-1][:2]
        margins.append(best - second)
        tokens.append(int(logits.argmax()))
    assert min(margins) > 1e-3, f"a tie within {min(margins)}: choose another prompt"
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["short", "three chunks"])
@pytest.mark.parametrize(
    "penalties",
    [
        {},
        {"presence": 1.5},
        {"presence": -1.0},
        {"frequency": 2.0},
        {"frequency": -0.3},
        {"repetition": 1.8},
        {"repetition": 0.7},
        {"presence": 0.7, "frequency": 0.9, "repetition": 1.2},
    ],
    ids=str,
)
def test_greedy_with_penalties_is_what_a_loop_over_the_oracle_says(engine, oracle, prompt, penalties):
    params = GREEDY | {f"{name}_penalty": value for name, value in penalties.items()}
    expected = decode_by_hand(oracle, prompt, 24, **penalties)
    assert output_ids(engine, params | {"max_tokens": 24}, prompt=prompt) == expected


def test_each_penalty_changes_the_output(engine):
    free = output_ids(engine, GREEDY | {"max_tokens": 24})
    for change in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert output_ids(engine, GREEDY | change | {"max_tokens": 24}) != free


def test_penalised_requests_among_others_are_penalised_for_their_own_tokens(engine, oracle):
    """Slots are reused: tokens of a slot's last request must not affect the next."""
    kinds = [{}, {"presence": 1.5}, {"frequency": 1.2}, {"repetition": 1.5}]
    expected = [decode_by_hand(oracle, [*PROMPT, 60 + i], 12, **kinds[i % 4]) for i in range(8)]

    def ask(i):
        params = GREEDY | {f"{name}_penalty": value for name, value in kinds[i % 4].items()}
        return output_ids(engine, params | {"max_tokens": 12}, prompt=[*PROMPT, 60 + i])

    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8))) == expected


def test_bias_forces_forbids_and_shifts(engine, oracle):
    assert output_ids(engine, GREEDY | {"max_tokens": 6, "logit_bias": {77: 100.0}}) == [77] * 6
    free = output_ids(engine, GREEDY | {"max_tokens": 12})
    forbidden = dict.fromkeys(set(free), -100.0)
    ids = output_ids(engine, GREEDY | {"max_tokens": 12, "logit_bias": forbidden})
    assert not set(ids) & set(free)
    assert ids == decode_by_hand(oracle, PROMPT, 12, bias=forbidden)
    gentle = {str(token): 0.8 for token in range(100, 140)}  # keys as JSON spells them
    assert output_ids(engine, GREEDY | {"max_tokens": 12, "logit_bias": gentle}) == decode_by_hand(
        oracle, PROMPT, 12, bias={int(token): value for token, value in gentle.items()}
    )


def test_bias_comes_after_penalties_and_min_tokens_above_both(engine, oracle):
    bias = {88: 3.0, 99: 2.5}
    params = GREEDY | {
        "logit_bias": bias,
        "presence_penalty": 1.0,
        "stop_token_ids": [88],
        "min_tokens": 5,
        "max_tokens": 12,
    }
    expected = decode_by_hand(oracle, PROMPT, 12, bias=bias, presence=1.0, banned=[88], min_tokens=5)
    if 88 in expected:
        expected = expected[: expected.index(88) + 1]
    assert output_ids(engine, params) == expected and 88 not in expected[:5]


# --- seeds


def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    params = {"seed": 11, "max_tokens": 20, "ignore_eos": True}
    expected = output_ids(engine, params)
    assert output_ids(engine, params | {"seed": 12}) != expected

    def neighbour(i):
        return output_ids(
            engine,
            {"seed": 100 + i, "max_tokens": 5 + 3 * i, "top_k": 5 * i, "presence_penalty": i % 2},
            prompt=LONG_PROMPT[i:],
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(neighbour, i) for i in range(6)]
        assert [output_ids(engine, params) for _ in range(4)] == [expected] * 4
        assert all(other.result() for other in others)


def test_choices_differ_and_each_is_itself_again(engine):
    params = {"seed": 5, "max_tokens": 16, "ignore_eos": True}
    four = output_ids(engine, params | {"n": 4})
    assert len({tuple(ids) for ids in four}) == 4
    assert output_ids(engine, params | {"n": 4}) == four
    assert output_ids(engine, params | {"n": 2}) == four[:2], (
        "a choice depends on its number, not on how many there are"
    )
    assert output_ids(engine, params) == four[0]
    greedy = output_ids(engine, GREEDY | {"n": 3, "max_tokens": 8})
    assert greedy[0] == greedy[1] == greedy[2]


def test_large_and_small_seeds_are_different_seeds(engine):
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1]
    assert len(
        {tuple(output_ids(engine, {"seed": seed, "max_tokens": 12, "ignore_eos": True})) for seed in seeds}
    ) == len(seeds)


def test_requests_without_a_seed_count_from_the_engines_random_seed(engine):
    processors = [InputProcessor(engine.input_processor.limits, engine.tokenizer, random_seed=7) for _ in range(2)]
    seeds = [
        [processor.process(GenerateReqInput(text="a"))[0].sampling.seed for _ in range(3)] for processor in processors
    ]
    assert seeds == [[(7 << 32) + (1 << 31) + i for i in range(3)]] * 2


def test_requests_without_a_seed_count_in_the_stream_of_their_engine(engine):
    def seeds(random_seed, stream, params=None):
        processor = InputProcessor(
            engine.input_processor.limits, engine.tokenizer, random_seed=random_seed, seed_stream=stream
        )
        request = GenerateReqInput(text="a", sampling_params=params)
        return [processor.process(request)[0].sampling.seed for _ in range(3)]

    streams = [seeds(random_seed, stream) for random_seed in (0, 7, 2**31 - 1) for stream in (None, "a", "b")]
    assert len({seed for stream in streams for seed in stream}) == 27
    assert all(stream == list(range(stream[0], stream[0] + 3)) and 2**31 <= stream[0] < 2**63 for stream in streams)
    assert seeds(7, "a") == seeds(7, "a") and seeds(7, "a", {"seed": 5}) == [5] * 3


def test_equal_prompts_of_one_call_without_a_seed_are_rollouts_of_their_own(engine):
    params = {"max_tokens": 12, "ignore_eos": True, "n": 2}
    assert len(set(map(tuple, output_ids(engine, params, prompt=[PROMPT] * 4)))) == 8
    seeded = output_ids(engine, params | {"seed": 3}, prompt=[PROMPT] * 2)
    assert seeded[:2] == seeded[2:] and seeded[0] != seeded[1], "a seed that was given is that of every prompt"


# --- distributions


def test_first_tokens_are_drawn_from_the_models_distribution(engine, oracle):
    """512 seeds, temperature 0.7, top-k 6: chi-square against the oracle, and nothing outside of the six."""
    logits = oracle.run(PROMPT).logits[-1]
    allowed = np.argsort(-logits)[:6]
    probabilities = np.exp(log_softmax(logits[allowed] / 0.7))
    counts = collections.Counter()
    for block in range(4):
        params = {"n": 128, "seed": block, "temperature": 0.7, "top_k": 6, "max_tokens": 1, "ignore_eos": True}
        counts.update(ids[0] for ids in output_ids(engine, params))
    assert set(counts) <= set(allowed.tolist())
    observed = np.array([counts[token] for token in allowed.tolist()])
    assert (
        (observed - 512 * probabilities) ** 2 / (512 * probabilities)
    ).sum() < 25.7  # 5 degrees of freedom, p = 1e-4


@pytest.mark.parametrize(
    ("params", "keeps"),
    [
        ({"top_p": 0.3}, lambda p: np.cumsum(np.sort(p)[::-1]) - np.sort(p)[::-1] < 0.3),
        ({"min_p": 0.3}, lambda p: np.sort(p)[::-1] >= 0.3 * p.max()),
        ({"top_k": 3}, lambda p: np.arange(p.size) < 3),
    ],
    ids=["top_p", "min_p", "top_k"],
)
def test_a_filter_lets_through_what_it_should(engine, oracle, params, keeps):
    probabilities = np.exp(log_softmax(oracle.run(PROMPT).logits[-1]))
    allowed = set(np.argsort(-probabilities)[keeps(probabilities)].tolist())
    drawn = {ids[0] for ids in output_ids(engine, params | {"n": 64, "seed": 1, "max_tokens": 1, "ignore_eos": True})}
    assert drawn <= allowed and len(drawn) > 1


# --- logprobs


def logprobs_by_hand(logits, *, temperature=1.0, top_k=0, raw):
    """Raw: of the model. Processed: of what was sampled from, dropped tokens at -inf."""
    if raw:
        return log_softmax(logits)
    scores = logits / temperature
    if top_k:
        scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)
    return log_softmax(scores)


@pytest.mark.parametrize("raw", [False, True], ids=["processed", "raw"])
@pytest.mark.parametrize("top_k", [0, 8])
def test_output_logprobs_are_those_of_the_oracle(request, engine, oracle, raw, top_k):
    chosen = request.getfixturevalue("raw_engine") if raw else engine
    params = {"seed": 2, "temperature": 0.7, "top_k": top_k, "max_tokens": 16, "ignore_eos": True}
    result = chosen.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=12)
    meta, ids = result["meta_info"], result["output_ids"]
    assert meta["logprobs_mode"] == ("raw" if raw else "processed")
    logits = oracle.run([*PROMPT, *ids]).logits[len(PROMPT) - 1 : -1]
    for row, (value, token, _), top in zip(
        logits, meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        expected = logprobs_by_hand(row, temperature=0.7, top_k=top_k, raw=raw)
        assert value == pytest.approx(expected[token], abs=2e-4)
        best = np.argsort(-expected, kind="stable")[:12]
        numbers = [number for number, _, _ in top if number is not None]
        assert numbers == pytest.approx(expected[best][: len(numbers)].tolist(), abs=2e-4)
        assert len(numbers) == (12 if raw or not top_k else top_k), (
            "a dropped token has no logprob: null, never a number"
        )
        assert [token_id for _, token_id, _ in top][: len(numbers)] == best[: len(numbers)].tolist()


@pytest.mark.parametrize("raw", [False, True], ids=["processed", "raw"])
def test_greedy_logprobs_are_the_models_own(request, engine, oracle, raw):
    chosen = request.getfixturevalue("raw_engine") if raw else engine
    result = chosen.generate(input_ids=PROMPT, sampling_params=GREEDY, max_new_tokens=8, return_logprob=True)
    logits = oracle.run([*PROMPT, *result["output_ids"]]).logits[len(PROMPT) - 1 : -1]
    expected = [log_softmax(row)[token] for row, token in zip(logits, result["output_ids"], strict=True)]
    assert [value for value, _, _ in result["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("start", [0, 1, 31, 32, 33, 69])
def test_prompt_logprobs_are_those_of_the_oracle_across_chunks(engine, oracle, start):
    kwargs = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 3}
    meta = engine.generate(
        input_ids=LONG_PROMPT, sampling_params={"seed": 1, "temperature": 0.3, "max_tokens": 2}, **kwargs
    )["meta_info"]
    expected = log_softmax(oracle.run(LONG_PROMPT).logits)  # of the model, whatever the temperature
    entries = meta["input_token_logprobs"]
    assert [token for _, token, _ in entries] == LONG_PROMPT[start:]
    for position, (value, token, _) in enumerate(entries, start=start):
        if position == 0:
            assert value is None and meta["input_top_logprobs"][0] is None
            continue
        assert value == pytest.approx(expected[position - 1][token], abs=2e-4)
        top = meta["input_top_logprobs"][position - start]
        best = np.argsort(-expected[position - 1], kind="stable")[:3]
        assert [number for number, _, _ in top] == pytest.approx(expected[position - 1][best].tolist(), abs=2e-4)
        assert [token_id for _, token_id, _ in top] == best.tolist()
