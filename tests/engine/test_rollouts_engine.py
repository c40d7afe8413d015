"""An engine that remembers answers: they are drafts of the next epoch, and change no answer; who may see whose text."""

import contextlib

import numpy as np
import pytest

from oracles.drafters import NeverDraft
from oracles.testbeds import other_weights
from routed_experts import Engine, SpeculativeConfig, extract_routed_experts_from_meta_info
from routed_experts.core.errors import InvalidRequestError
from support.engines import on_engine_thread, open_engine
from support.fast_compile import fast_compilation
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

REMEMBERING = SpeculativeConfig(adaptive=False, scope="namespace", remember=True)
PROMPTS = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, 12).tolist() for seed in range(4)]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 24, "n": 2, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def compilation(is_thorough):
    """Programs as they are shipped in scripts/thorough; in every run those of test_speculation.py have the bits."""
    with contextlib.nullcontext() if is_thorough else fast_compilation():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def epoch(engine, *, seed=5, **options):
    """Tokens, logprobs and rows of each answer; and the meta_info."""
    outs = engine.generate(
        input_ids=PROMPTS,
        sampling_params=SAMPLING | {"seed": seed},
        return_logprob=True,
        return_routed_experts=True,
        **options,
    )
    metas = [out["meta_info"] for out in outs]
    rows = [extract_routed_experts_from_meta_info(meta).tolist() for meta in metas]
    logprobs = [meta["output_token_logprobs"] for meta in metas]
    return [(out["output_ids"], *rest) for out, *rest in zip(outs, logprobs, rows, strict=True)], metas


@contextlib.contextmanager
def open_remembering(folder, speculative=REMEMBERING):
    options = dict(enable_return_routed_experts=True, deterministic=True)
    with lazy_compilation(), open_engine(folder, **options, speculative=speculative) as engine:
        yield engine


def by_source(engine, what="proposed_by"):
    return dict(getattr(engine.stats().speculative, what))


@pytest.fixture(scope="module")
def plain(folder):
    """Answers without drafts: of the weights of the folder, and of others."""
    with lazy_compilation(), open_engine(folder, enable_return_routed_experts=True, deterministic=True) as engine:
        first, _ = epoch(engine)
        engine.update_weights(other_weights(3), version=1)
        second, _ = epoch(engine)
    return first, second


@pytest.mark.parametrize("algorithm", ["NGRAM", "SUFFIX"])
def test_the_second_epoch_with_the_same_seeds_accepts_all_and_answers_the_same(folder, plain, algorithm):
    config = SpeculativeConfig(algorithm=algorithm, adaptive=False, scope="namespace", remember=True)
    with open_remembering(folder, config) as engine:
        first, _ = epoch(engine)
        before = engine.stats().speculative.requests
        second, metas = epoch(engine)
        after = engine.stats().speculative
    assert first == second == plain[0]
    assert after.requests.proposed - before.proposed == after.requests.accepted - before.accepted > 8 * 15
    assert all(meta["spec_accept_rate"] == 1.0 and meta["spec_verify_ct"] == 3 for meta in metas)


def test_answers_of_old_weights_are_drafts_under_new_ones(folder, plain):
    with open_remembering(folder) as engine:
        epoch(engine)
        engine.update_weights(other_weights(3), version=1)
        before = by_source(engine), by_source(engine, "accepted_by")
        second, metas = epoch(engine)
        proposed = by_source(engine)["rollout"] - before[0].get("rollout", 0)
        accepted = by_source(engine, "accepted_by").get("rollout", 0) - before[1].get("rollout", 0)
    assert second == plain[1] != plain[0]
    assert {meta["weight_version"] for meta in metas} == {"1"}
    assert proposed > accepted, "the old answers are followed, and are wrong now and then"


@pytest.mark.parametrize("other", [dict(extra_key="b"), dict(extra_key=None)])
def test_another_extra_key_never_gets_an_answer(folder, plain, other):
    with open_remembering(folder) as engine:
        epoch(engine, extra_key="a")
        before = by_source(engine)
        answers, _ = epoch(engine, **other)
        assert answers == plain[0]
        again = by_source(engine)
        assert again == {source: 2 * count for source, count in before.items()}, "choices of a prompt see each other"
        epoch(engine, extra_key="a")
        assert by_source(engine)["rollout"] - again["rollout"] > before["rollout"]


def test_flush_cache_forgets_on_request_alone(folder):
    with open_remembering(folder) as engine:
        epoch(engine)
        assert engine.stats().speculative.store_bytes > 4 * 24 * 8
        counts = [by_source(engine)["rollout"]]
        for drafts in (False, True):
            engine.flush_cache(drafts=drafts)
            epoch(engine)
            counts.append(by_source(engine)["rollout"])
        first, second, third = counts
        assert second - first > first == third - second, "the third epoch knows nothing of the first"


@pytest.mark.parametrize("rests", [False, True])
def test_the_bytes_of_the_store_are_those_of_now(folder, rests):
    def counted(engine):
        held = on_engine_thread(engine, lambda core: core.speculation._drafter.inner.nbytes)
        assert engine.stats().speculative.store_bytes == held
        return held

    with open_remembering(folder, SpeculativeConfig(scope="namespace", remember=True, adaptive=rests)) as engine:
        if rests:
            on_engine_thread(engine, lambda core: setattr(core.speculation, "policy", NeverDraft()))
        sizes = [counted(engine)]
        engine.remember_rollouts([1, 2], [3] * 50)
        sizes.append(counted(engine))
        epoch(engine)
        sizes.append(counted(engine))
        engine.flush_cache()
        assert counted(engine) == sizes[2]
        engine.flush_cache(drafts=True)
        assert 0 == sizes[0] == counted(engine) < sizes[1] < sizes[2]
        assert not rests or engine.stats().speculative.requests.proposed == 0


def test_without_the_flags_nothing_is_remembered(folder):
    with open_remembering(folder, SpeculativeConfig(adaptive=False)) as engine:
        for _ in range(2):
            epoch(engine)
        assert set(by_source(engine)) <= {"context", "rollout"}
        *_, last = [metas for _, metas in (epoch(engine),)]
        assert any(meta["spec_accept_rate"] < 1.0 for meta in last)


def test_a_request_without_drafts_is_not_remembered(folder):
    with open_remembering(folder) as engine:
        options = dict(input_ids=PROMPTS[0], sampling_params={"temperature": 0.0, "speculative": False})
        engine.generate(max_new_tokens=8, **options)
        engine.generate(input_ids=PROMPTS[0], sampling_params={"temperature": 0.0}, max_new_tokens=8)
        assert "rollout" not in by_source(engine)


def test_answers_may_be_handed_in(folder, plain):
    config = SpeculativeConfig(adaptive=False, scope="namespace")
    with open_remembering(folder, config) as engine:
        for index, (tokens, *_) in enumerate(plain[0]):
            engine.remember_rollouts(PROMPTS[index // 2], tokens, seed=np.int64(5), choice=index % 2, extra_key="k")
        answers, metas = epoch(engine, extra_key="k")
        assert answers == plain[0]
        assert all(meta["spec_accept_rate"] == 1.0 for meta in metas)
        for name, value, words in (
            ("prompt_ids", [], "give 1 to"),
            ("prompt_ids", "text", "list of token ids"),
            ("output_ids", [VOCAB_SIZE], "out of vocabulary"),
            ("output_ids", [10**30], "an integer of 100 bits, out of vocabulary"),
            ("output_ids", [0] * 100_000, "give 1 to"),
            ("seed", -1, "integer in 0"),
            ("choice", True, "integer in 0"),
            ("extra_key", 3, "must be text: .*; give text, or leave it out"),
            ("extra_key", "x" * 4097, "4097 characters, above the limit of 4096; give a shorter one"),
        ):
            arguments = dict(prompt_ids=[1], output_ids=[2]) | {name: value}
            with pytest.raises(InvalidRequestError, match=words) as caught:
                engine.remember_rollouts(**arguments)
            assert caught.value.param == name


@pytest.mark.parametrize("algorithm", [None, "NGRAM", pytest.param("STANDALONE", marks=pytest.mark.thorough)])
def test_an_engine_whose_requests_see_themselves_alone_takes_no_answers(folder, algorithm):
    path = str(folder) if algorithm == "STANDALONE" else None
    speculative = None if algorithm is None else SpeculativeConfig(algorithm=algorithm, draft_model_path=path)
    words = "speculative_algorithm='NGRAM' or 'SUFFIX' and speculative_scope='namespace'"
    expected = pytest.raises(InvalidRequestError, match=words)
    with lazy_compilation(), open_engine(folder, speculative=speculative) as engine, expected:
        engine.remember_rollouts([1, 2], [3])


def test_a_prediction_is_a_draft_of_its_request_alone(folder):
    greedy = {"temperature": 0.0, "ignore_eos": True}
    options = dict(speculative=SpeculativeConfig(adaptive=False), deterministic=True)
    with lazy_compilation(), open_engine(folder, **options) as engine:
        plain = engine.generate(
            input_ids=PROMPTS[0], max_new_tokens=24, sampling_params=greedy | {"speculative": False}
        )
        answer = plain["output_ids"]
        edited = [*answer[:9], 0, *answer[10:]]
        for prediction in (answer, edited, [], [1]):
            drafted = engine.generate(
                input_ids=PROMPTS[0], max_new_tokens=24, sampling_params=greedy, prediction=prediction
            )
            assert drafted["output_ids"] == answer
        assert by_source(engine, "accepted_by")["prediction"] >= 20 + 16
        for prediction, match in (([VOCAB_SIZE], "vocabulary"), ([0] * 100_000, "context"), (["a"], "token ids")):
            with pytest.raises(InvalidRequestError, match=match) as caught:
                engine.generate(input_ids=PROMPTS[0], prediction=prediction)
            assert caught.value.param == "prediction"
        with pytest.raises(InvalidRequestError, match="one prompt"):
            engine.generate(input_ids=PROMPTS, prediction=[1])
    with lazy_compilation(), open_engine(folder) as engine:
        ask = dict(input_ids=PROMPTS[0], max_new_tokens=4, sampling_params=greedy)
        out = engine.generate(**ask, prediction=[1, 2])
        assert len(out["output_ids"]) == 4


def test_the_flat_names_are_those_of_the_config(folder):
    flat = dict(speculative_algorithm="suffix", speculative_scope="namespace", speculative_remember=True)
    with (
        lazy_compilation(),
        Engine(
            str(folder),
            precompile_bs_paddings=(4,),
            precompile_token_paddings=(32,),
            **flat,
            speculative_store_bytes=1 << 21,
        ) as engine,
    ):
        engine.generate(input_ids=PROMPTS[0], max_new_tokens=4)
        assert engine.stats().speculative.store_bytes > 0
