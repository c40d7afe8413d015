"""Engines whose drafts come from a model: what is drafted is what an independent implementation of the draft model
proposes for the tokens so far, and no answer changes."""

import contextlib
import functools
import itertools
import logging
import re

import numpy as np
import pytest
from flax import nnx

from oracles.draft_offers import Offers, answers
from oracles.driver import request
from oracles.eagle_heads import LAYERS, TorchHead, V, eagle3_case, eagle_case
from oracles.predictors import PredictorOracle
from routed_experts import Engine, SpeculativeConfig
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.build.builder import build_engine
from routed_experts.models.model_folder import ModelFolder
from support.family_folders import VOCAB_SIZE, write_family
from support.fast_compile import fast_compilation
from support.lazy_compile import lazy_compilation
from support.small_qwen3_moe import write_target

SIZES = dict(precompile_bs_paddings=(4,), precompile_token_paddings=(32,), skip_tokenizer_init=True, page_size=8)
EXACT = dict(deterministic=True, enable_return_routed_experts=True)
FAMILIES = ("DeepseekV3", "Glm4Moe", "Glm4MoeLite", "BailingMoeV2", "Ernie4_5_Moe", "Qwen3Next", "Qwen3_5Moe")
# Only scripts/thorough compares what engines of the others draft; models/test_predictor.py has their equations.
IN_EVERY_RUN = ("Glm4Moe",)
COMPILED_AT_ONCE = "Glm4Moe"  # all programs before the first step; of the others those that run
NUM_DRAFTS = 3
STOPS = list(range(0, VOCAB_SIZE, 7))


@pytest.fixture
def offers(monkeypatch):
    return Offers(monkeypatch)


def prompts_of(vocab, lengths=(5, 17, 9, 30)):
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


@functools.cache
def family_folder(name, root):
    folder = root / name
    folder.mkdir()
    return PredictorOracle(name, folder, modules=1), folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return lambda name: family_folder(name, root)


def assert_drafts_are(offers, prompts, outputs, expected_of, *, at_least):
    """Every draft that was made, of requests call-0, call-1, ..: `expected_of(tokens)` are the true ones."""
    checked = 0
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        sequence = [*prompt, *output]
        for length, drafts, probabilities in offers.by_request[f"call-{index}"]:
            assert drafts == expected_of(sequence[:length]), (index, length)
            assert all(0 < probability <= 1 for probability in probabilities)
            checked += 1
    assert checked >= at_least


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_a_prediction_layer_drafts_what_its_equations_say_and_changes_no_answer(name, written, offers, is_thorough):
    oracle, folder = written(name)
    prompts = prompts_of(VOCAB_SIZE)
    with lazy_compilation(), Engine(str(folder), **SIZES, **EXACT) as engine:
        plain = {t: answers(engine, prompts, t)[0] for t in (0.0, 1.0)}
    config = SpeculativeConfig(algorithm="NEXTN", adaptive=False)
    is_lazy = name != COMPILED_AT_ONCE and not is_thorough
    chunked = dict(chunked_prefill_size=8, speculative=config)
    with (
        lazy_compilation() if is_lazy else contextlib.nullcontext(),
        Engine(str(folder), **SIZES, **EXACT, **chunked) as engine,
    ):
        greedy, metas = answers(engine, prompts)

        def expected(tokens):
            pairs = oracle.pairs(oracle.hidden(tokens[:-1]), tokens[1:])
            return oracle.chain(pairs, NUM_DRAFTS - 1)[1]

        assert_drafts_are(offers, prompts, [output for output, *_ in greedy], expected, at_least=40)
        sampled, _ = answers(engine, prompts, 1.0)
        assert is_lazy or engine.compiles.serving == 0
        totals = engine.stats().speculative
    assert (greedy, sampled) == (plain[0.0], plain[1.0])
    assert all(len(meta["spec_correct_drafts_histogram"]) == NUM_DRAFTS + 1 for meta in metas)
    assert totals.requests.accepted > 0, "some drafts of a random model are right, at temperature 1 by common noise"
    assert set(totals.proposed_by) == {"model"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A target of the heads' sizes: its folder, and its transformers model."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    return folder, model


HEADS = {
    "EAGLE3": lambda: eagle3_case(),
    "EAGLE3 of few tokens": lambda: eagle3_case(draft_vocab_size=24, fc_norm=True),
    "EAGLE3 with its own embedding": lambda: eagle3_case(own_embedding=True, norm_before_residual=True, own_head=False),
    "EAGLE": lambda: eagle_case(num_hidden_layers=2),
}


def head_drafts(case, model, tokens):
    """The drafts of a head after these tokens, by the equations."""
    import torch

    with torch.no_grad():
        out = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    hidden, states = out.last_hidden_state[0].numpy(), out.hidden_states
    weights = [model.model.embed_tokens.weight, model.lm_head.weight]
    head = TorchHead(case, *(weight.detach().numpy() for weight in weights))
    features = head.features(hidden, [states[layer + 1][0].numpy() for layer in (1, 3, 6)])
    successors, first, drafts = np.asarray(tokens[1:]), 0, []
    for _ in range(NUM_DRAFTS):
        scores, recycled = head.call(features, successors, first)
        drafts.append(head.target_id(int(scores[-1].argmax())))
        first = len(tokens) - 1 + len(drafts) - 1
        features, successors = recycled[-1:], np.asarray(drafts[-1:])
    return drafts


@pytest.mark.parametrize(
    "name",
    [
        "EAGLE3 of few tokens",  # equations of all: models/test_eagle_heads.py
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("EAGLE", "EAGLE3", "EAGLE3 with its own embedding")
        ),
    ],
)
@pytest.mark.usefixtures("fast_in_every_run")  # the prediction layers run programs as they are shipped
def test_a_head_drafts_what_its_equations_say_and_changes_no_answer(name, qwen, offers, tmp_path):
    folder, model = qwen
    case, prompts = HEADS[name](), prompts_of(V, (5, 17, 9))
    with lazy_compilation(), Engine(str(folder), **SIZES, **EXACT) as engine:
        plain = {t: answers(engine, prompts, t, new=10)[0] for t in (0.0, 1.0)}
    config = SpeculativeConfig(algorithm=name.split()[0], draft_model_path=str(case.write(tmp_path)), adaptive=False)
    with lazy_compilation(), Engine(str(folder), **SIZES, **EXACT, speculative=config) as engine:
        greedy, _ = answers(engine, prompts, new=10)
        expected = functools.partial(head_drafts, case, model)
        assert_drafts_are(offers, prompts, [output for output, *_ in greedy], expected, at_least=20)
        sampled, _ = answers(engine, prompts, 1.0, new=10)
        assert engine.stats().speculative.requests.accepted > 0
    for actual, wanted in ((greedy, plain[0.0]), (sampled, plain[1.0])):
        assert actual == wanted


@pytest.fixture(scope="module")
def pushes(qwen, tmp_path_factory):
    """Weights of two other models of the target's shapes, as they are served, and those of the target."""
    folders = [tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("other"), qwen[0]]
    for seed, other in enumerate(folders[:2], start=1):
        write_target(other, seed=seed, vocab_size=V, num_hidden_layers=LAYERS, max_position_embeddings=64)
    return [nnx.state(opened.load(opened.dtype("auto"))) for opened in map(ModelFolder.open, map(str, folders))]


def generate_under(core, req, pushes, *, push_at=None):
    """Run a request, and push weights in turn: every seven steps, or where it has so many tokens. Returns its last
    output, its tokens and logprobs, and the numbers of tokens at which weights were pushed."""
    tokens, logprobs, ends, pushed = [], [], [], []

    def take(batch):
        for out in batch.outs:
            tokens.extend(out.new_token_ids)
            logprobs.extend(out.output_logprobs.values)
            ends.extend([out] if out.finish_reason is not None else [])

    def push(state):
        version = core.runner.weight_version + 1
        core.update_weights(state, version=WeightVersion(label=f"w{version}", update_count=version), cache="keep")

    core.add([req])
    for steps in itertools.count(1):
        take(core.step())
        if push_at is not None or steps % 7 == 0:
            take(core.drain())
        is_due = steps % 7 == 0 if push_at is None else req.num_output in push_at[len(pushed) : len(pushed) + 1]
        if is_due and not ends:
            push(pushes[len(pushed) % 2])
            pushed.append(req.num_output)
        if ends:
            break
    take(core.drain())
    push(pushes[-1])
    core.flush_cache()
    assert not core.check_integrity()
    return ends[0], tokens, logprobs, pushed


def test_weights_that_change_every_seven_steps_meet_an_old_head_and_change_no_answer(qwen, pushes, tmp_path):
    """An engine without drafts gets the same pushes at the same tokens."""
    args = ServerArgs(model_path=str(qwen[0]), **SIZES | EXACT)
    path = str(eagle3_case().write(tmp_path))
    head = SpeculativeConfig(algorithm="EAGLE3", draft_model_path=path, adaptive=False)
    with lazy_compilation(), fast_compilation():
        drafting, plain = build_engine(args, speculative=head).core, build_engine(args).core
        for index, prompt in enumerate(prompts_of(V, (5, 17, 9))):
            make = functools.partial(
                request, f"r{index}", prompt, 45, temperature=float(index > 0), seed=index, top_k=(0, 0, 4)[index]
            )
            end, *answer, pushed = generate_under(drafting, make(), pushes)
            expected_end, *expected, at = generate_under(plain, make(), pushes, push_at=pushed)
            assert len(pushed) >= 2 and at == pushed
            assert answer == expected
            assert generate_under(plain, make(), pushes, push_at=[])[1] != answer[0], "new weights say something else"
            record, expected_record = end.routed_experts, expected_end.routed_experts
            np.testing.assert_array_equal(record.ids, expected_record.ids)
            assert [span[:2] for span in record.version_spans] == [span[:2] for span in expected_record.version_spans]
            assert len(record.version_spans) == 1 + len(pushed)
    assert drafting.speculation.totals.requests.accepted > 5


FEW_PAGES = dict(max_total_tokens=128)
SCHEDULES = (dict(), dict(chunked_prefill_size=4), dict(max_running_requests=1), dict(disable_radix_cache=True))


@pytest.mark.parametrize(
    ("schedules", "mode"),
    [
        pytest.param((FEW_PAGES,), dict(), id="few-default", marks=pytest.mark.thorough),
        pytest.param((dict(), FEW_PAGES), dict(deterministic=True), id="few-deterministic"),
        pytest.param(SCHEDULES, dict(), id="others-default", marks=pytest.mark.thorough),
        pytest.param(SCHEDULES, dict(deterministic=True), id="others-deterministic", marks=pytest.mark.thorough),
    ],
)
def test_answers_are_the_same_under_every_schedule(schedules, mode, written):
    """Chunks, choices, prefixes, requests that are sent back for want of pages, seeds, filters and early ends."""
    with contextlib.nullcontext() if mode else fast_compilation():  # of other modes tokens alone are compared
        assert_same_under(schedules, mode, written)


def assert_same_under(schedules, mode, written):
    _, folder = written("Glm4Moe")
    common = np.random.default_rng(2).integers(0, VOCAB_SIZE, 20).tolist()
    prompts = [*prompts_of(VOCAB_SIZE, (3, 12, 30)), [*common, 1], [*common, 2, 3]]
    sampling = [
        dict(n=2, temperature=1.0, new=26),
        dict(temperature=0.7, top_k=5, new=9),
        dict(
            temperature=1.0, top_p=0.8, min_p=0.05, new=17, min_tokens=8, stop_token_ids=list(range(0, VOCAB_SIZE, 7))
        ),
    ]
    plain = None
    for schedule in schedules:
        speculative = SpeculativeConfig(algorithm="NEXTN", adaptive=False)
        actual = []
        for drafts in (None, speculative) if plain is None else (speculative,):
            options = SIZES | dict(enable_return_routed_experts=True) | mode | schedule
            with lazy_compilation(), Engine(str(folder), **options, speculative=drafts) as engine:
                actual.append([answers(engine, prompts, **how)[0] for how in map(dict, sampling)])
                assert not engine.check_integrity()
                assert drafts is None or engine.stats().speculative.requests.accepted > 0, schedule
        plain = actual[0] if plain is None else plain
        for expected, got in zip(itertools.chain(*plain), itertools.chain(*actual[-1]), strict=True):
            if mode:
                assert got == expected, schedule
            else:  # of other modes tokens alone are compared
                assert got[0] == expected[0], schedule
        if schedule.get("max_total_tokens"):
            assert engine.components.core.ranks[0].num_retracted > 0


def test_a_pool_too_small_to_time_steps_has_no_drafts_and_the_log_says_so(written, caplog):
    _, folder = written("Glm4Moe")
    options = SIZES | EXACT | dict(max_total_tokens=96, speculative=SpeculativeConfig(algorithm="NEXTN"))
    with caplog.at_level(logging.WARNING), lazy_compilation(), Engine(str(folder), **options) as engine:
        answers(engine, prompts_of(VOCAB_SIZE), new=4)
        assert engine.stats().speculative.requests.proposed == 0
    assert re.search(r"max_total_tokens=96 do not hold \d+ requests of \d+ tokens, which are timed", caplog.text)


def test_the_policy_rests_and_asks_the_draft_model_again(written, offers):
    """A policy that drafts in one step of several: drafts of the steps between are not stale ones."""
    _, folder = written("Glm4Moe")
    with lazy_compilation(), Engine(str(folder), **SIZES, **EXACT) as engine:
        plain, _ = answers(engine, prompts_of(VOCAB_SIZE), new=30)
    config = SpeculativeConfig(algorithm="NEXTN", adaptive=False)
    with lazy_compilation(), Engine(str(folder), **SIZES, **EXACT, speculative=config) as engine:
        policy = engine.components.core.speculation.policy
        policy.should_try = lambda step: step % 7 in (3, 4, 5)
        rested, metas = answers(engine, prompts_of(VOCAB_SIZE), new=30)
    assert rested == plain
    assert all(meta["spec_verify_ct"] > 1 for meta in metas)
    assert all(len(made) < 20 for made in offers.by_request.values()), "nothing is drafted where no step verifies"


def test_memory_that_is_released_and_taken_back_serves_drafts_again(written):
    _, folder = written("Glm4Moe")
    config = SpeculativeConfig(algorithm="NEXTN", adaptive=False)
    options = SIZES | EXACT | dict(speculative=config)
    with fast_compilation(), lazy_compilation(), Engine(str(folder), **options) as engine:
        before, _ = answers(engine, prompts_of(VOCAB_SIZE))
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation()
        again, metas = answers(engine, prompts_of(VOCAB_SIZE))
    assert again == before
    assert all(meta["spec_verify_ct"] > 0 for meta in metas)


def test_the_plan_has_a_line_for_the_draft_model(written):
    _, folder = written("Glm4Moe")
    options = SIZES | EXACT | dict(speculative=SpeculativeConfig(algorithm="mtp", adaptive=False))  # no step is timed
    with lazy_compilation(), Engine(str(folder), **options) as engine:
        plan = engine.components.plan
    assert plan.draft.weights > 0 and plan.draft.bytes_per_token == plan.pool.bytes_per_token // plan.pool.num_layers
    assert [line for line in plan.lines() if line.startswith("draft model")]
    assert "draft model" not in "".join(engine_lines(folder))


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_the_start_says_what_drafts_and_what_they_add(algorithm, qwen, tmp_path):
    """Programs beside those of an engine without drafts, and the lines of the plan that such an engine has not."""
    folder, _ = qwen
    options, starts = SIZES | dict(deterministic=True, max_total_tokens=256), {}
    path = str(eagle3_case().write(tmp_path)) if algorithm == "EAGLE3" else None
    speculative = SpeculativeConfig(
        algorithm=algorithm, draft_model_path=path, num_draft_tokens=NUM_DRAFTS + 1, adaptive=False
    )
    for drafts in (None, speculative):
        with fast_compilation(), Engine(str(folder), **options, speculative=drafts) as engine:
            starts[drafts] = engine.phases, engine.components
    (before, _), (after, components) = starts[None], starts[speculative]
    details = [{phase.name: phase.detail for phase in phases} for phases in (before, after)]
    assert "calibrate" not in details[0]
    counts = [int(re.fullmatch(r"(\d+) programs", of_start["compile"])[1]) for of_start in details]
    plan, pool = components.plan, components.core.runner.config.pool
    weights = sum(array.nbytes for array in getattr(components.core.runner, "_draft_weights", ()))
    scores = 4 * (NUM_DRAFTS + 1) * V * 9  # rows of the verify step: scores and noise in float32, counts in int8
    num_bytes = scores + weights + plan.draft.bytes_per_token * pool.num_slots
    line = details[1]["calibrate"]
    name = "EAGLE3, EAGLE3 head that reads the outputs of layers 1, 3, 6" if path else "NGRAM"
    assert line.startswith(f"{name}, up to {NUM_DRAFTS} drafts a request, {counts[1] - counts[0]} programs and ")
    assert line.endswith(f" {num_bytes / 1024:.1f} KiB more than without") and "\n" not in line
    assert components.core.runner.spec.tapped_layers == ((1, 3, 6) if path else ())


def engine_lines(folder):
    with lazy_compilation(), Engine(str(folder), **SIZES) as engine:
        return engine.components.plan.lines()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(tp_size=2), ["tp_size=2", "one device", "NGRAM"]),
        (dict(algorithm="EAGLE3", draft_model_path="/nowhere"), ["/nowhere"]),
    ],
)
def test_what_does_not_go_with_a_draft_model_is_refused_by_name(options, words, written):
    _, folder = written("Glm4Moe")
    names = ("algorithm", "draft_model_path")
    config = SpeculativeConfig(**{"algorithm": "NEXTN"} | {name: options[name] for name in names if name in options})
    others = {name: value for name, value in options.items() if name not in names}
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        Engine(str(folder), **SIZES, **others, speculative=config)
    for word in words:
        assert word in str(caught.value)


def test_a_model_without_prediction_layers_is_refused_before_it_loads(tmp_path):
    folder = write_family(tmp_path, "olmoe")
    with pytest.raises(ConfigError, match=r"no layers that predict further tokens.*NGRAM"):
        Engine(str(folder), **SIZES, speculative=SpeculativeConfig(algorithm="NEXTN"))


def test_a_head_for_the_other_algorithm_is_refused(qwen, tmp_path):
    path = str(eagle_case().write(tmp_path))
    with pytest.raises(ConfigError, match="choose speculative_algorithm='EAGLE'"):
        Engine(str(qwen[0]), **SIZES, speculative=SpeculativeConfig(algorithm="EAGLE3", draft_model_path=path))


def test_a_module_without_a_folder_has_no_prediction_layers(written):
    opened = ModelFolder.open(str(written("Glm4Moe")[1]))
    model = opened.load(opened.dtype("auto"))
    with pytest.raises(ConfigError, match="model= has none"):
        Engine(model=model, **SIZES, speculative=SpeculativeConfig(algorithm="NEXTN"))
