"""STANDALONE: another model drafts. The target as its own draft is always right; of any other model the drafts are
those of an independent run, they are accepted as often as the formula says, and no answer changes.

Programs are compiled without optimisations. test_drafts_ahead.py has the bits of the same target, and of a draft model
beside it, in programs as they are shipped."""

import contextlib
import functools
import json

import numpy as np
import pytest

from oracles.draft_offers import Offers, answers
from routed_experts import Engine, SpeculativeConfig
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.execution.drafting_runner import OF_TARGET, STANDALONE
from routed_experts.models.drafts.vocabularies import check_vocabularies
from support.family_folders import write_family
from support.lazy_compile import lazy_compilation
from support.small_qwen3_moe import CONTEXT, V, write_target

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = dict(precompile_bs_paddings=(4,), precompile_token_paddings=(32,), skip_tokenizer_init=True, page_size=8)
EXACT = dict(deterministic=True, enable_return_routed_experts=True)
PADDED, DRAFT_CONTEXT = 64, 24  # of the dense draft model
NUM_DRAFTS, NEW = 3, 26
SAMPLINGS = (
    dict(temperature=0.0),
    dict(temperature=1.0, top_p=0.8),
    dict(temperature=1.0, top_p=0.9, n=2),
    dict(temperature=1.0, top_k=9, logit_bias={str(token): 4.0 - token % 9 for token in range(0, V, 2)}),
)
DENSE = dict(
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    intermediate_size=20,
    tie_word_embeddings=True,
    initializer_range=0.3,
    eos_token_id=None,
    bos_token_id=None,
)


@pytest.fixture
def offers(monkeypatch):
    return Offers(monkeypatch)


def standalone(path, **fields):
    return SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(path), **{"adaptive": False} | fields)


def prompts_of(vocab, lengths=(5, 17, 9, 30)):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab, length).tolist() for length in lengths]
    return [*prompts, [*prompts[-1][:20], 1, 2]]  # the last has a common prefix with the one before


def write_dense(folder, **changed):
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = dict(vocab_size=PADDED, max_position_embeddings=DRAFT_CONTEXT)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DENSE | sizes | changed)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[V:] *= 8.0  # ids that the target does not have would often score best
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of the target."""
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return folder


@pytest.fixture(scope="module")
def plain(target, fast_compilation):
    """The answers of an engine without drafts, one list for each of SAMPLINGS."""
    with lazy_compilation(), Engine(str(target), **SIZES, **EXACT) as engine:
        return [answers(engine, prompts_of(V), new=NEW, **sampling)[0] for sampling in SAMPLINGS]


SCHEDULES = {
    "at once": dict(),
    "in chunks": dict(chunked_prefill_size=4),
    "few pages": dict(max_total_tokens=120),  # fewer, and no drafts are timed at start, and so none are made
    "one by one": dict(max_running_requests=1),
    "no prefixes": dict(disable_radix_cache=True),
}
IN_EVERY_RUN = ("at once", "no prefixes")  # test_draft_models.py has chunks and few pages


@pytest.mark.parametrize(
    "schedule",
    [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in SCHEDULES],
)
def test_the_target_accepts_all_drafts_of_itself(schedule, target, plain, is_thorough):
    is_lazy = schedule != "at once" and not is_thorough
    options = SIZES | EXACT | SCHEDULES[schedule]
    with (
        lazy_compilation() if is_lazy else contextlib.nullcontext(),
        Engine(str(target), **options, speculative=standalone(target)) as engine,
    ):
        actual = [answers(engine, prompts_of(V), new=NEW, **sampling) for sampling in SAMPLINGS]
        assert is_lazy or engine.compiles.serving == 0
        assert not engine.check_integrity()
        scheduler = engine.components.core.ranks[0]
        assert (scheduler.num_retracted > 0) == (schedule == "few pages")
        total = engine.stats().speculative.requests
    assert [outputs for outputs, _ in actual] == plain
    metas = [meta for _, metas in actual for meta in metas]
    drafted = [meta for meta in metas if meta["spec_num_proposed_drafts"]]
    assert all(meta["spec_accept_rate"] == 1.0 for meta in drafted)
    assert len(drafted) == len(metas) or (schedule == "few pages" and len(drafted) > len(metas) // 2)
    assert total.accepted == total.proposed > 0
    hits = any(meta["cached_tokens"] > 0 for meta in metas)
    assert hits == (schedule != "no prefixes"), "prefixes are found, and drafts after them are right"


def test_drafts_are_right_after_steps_without_them_and_up_to_the_end_of_the_context(target):
    """A policy that drafts in three of seven steps: in the others the draft model is fed, too."""
    prompts = [prompt[:20] for prompt in prompts_of(V, (20, 22, 25, 30))]
    with lazy_compilation(), Engine(str(target), **SIZES, **EXACT) as engine:
        expected, _ = answers(engine, prompts, temperature=0.0, new=CONTEXT - 20)
    with lazy_compilation(), Engine(str(target), **SIZES, **EXACT, speculative=standalone(target)) as engine:
        policy = engine.components.core.speculation.policy
        policy.should_try = lambda step: step % 7 in (3, 4, 5)
        actual, metas = answers(engine, prompts, temperature=0.0, new=CONTEXT - 20)
    assert actual == expected
    assert all(meta["spec_accept_rate"] == 1.0 and meta["spec_verify_ct"] > 3 for meta in metas)


def test_weights_of_experts_are_recorded_beside_a_draft_model(target):
    actual = []
    for speculative in (None, standalone(target)):
        options = SIZES | EXACT | dict(enable_return_routed_experts_weights=True, speculative=speculative)
        with lazy_compilation(), Engine(str(target), **options) as engine:
            asked = dict(return_routed_experts=True, return_routed_experts_weights=True)
            answer = engine.generate(
                input_ids=prompts_of(V)[0], sampling_params=dict(temperature=0.0, max_new_tokens=NEW), **asked
            )
        meta = answer["meta_info"]
        rows = {name: value for name, value in meta.items() if name.startswith("routed_experts")}
        assert {"routed_experts", "routed_experts_weights"} <= rows.keys()
        actual.append((answer["output_ids"], rows))
    assert actual[0] == actual[1]
    assert meta["spec_num_proposed_drafts"] > 0


@pytest.mark.parametrize("family", [pytest.param("gemma4", marks=pytest.mark.thorough), "deepseek"])
def test_models_with_other_caches_draft_for_themselves(family, tmp_path):
    """Pages of two shapes, and latent rows."""
    folder = write_family(tmp_path, family)
    options = SIZES | dict(deterministic=True, speculative=standalone(folder, num_steps=2))
    with lazy_compilation(), Engine(str(folder), **options) as engine:
        _, metas = answers_without_rows(engine, temperature=1.0, seed=3, top_p=0.9)
    assert all(meta["spec_accept_rate"] == 1.0 for meta in metas)


def transformers_drafts(model, tokens, most=NUM_DRAFTS):
    """The greedy continuation of a model, of ids that the target has, and of tokens inside of its context."""
    import torch

    drafts = []
    with torch.no_grad():
        while len(drafts) < most and len(tokens) + len(drafts) <= model.config.max_position_embeddings:
            logits = model(torch.tensor([[*tokens, *drafts]])).logits[0, -1, :V]
            drafts.append(int(logits.argmax()))
    return drafts


def test_a_dense_model_drafts_what_transformers_says_and_changes_no_answer(target, plain, offers, tmp_path):
    """Its vocabulary has more padding, and its context ends before that of the target."""
    model = write_dense(tmp_path / "draft")
    speculative = standalone(tmp_path / "draft", num_steps=NUM_DRAFTS)
    with (
        lazy_compilation(),
        Engine(str(target), **SIZES, **EXACT, chunked_prefill_size=8, speculative=speculative) as engine,
    ):
        actual = [answers(engine, prompts_of(V), new=NEW, **sampling)[0] for sampling in SAMPLINGS[:1]]
        checked, shortened, past = 0, 0, 0
        for index, prompt in enumerate(prompts_of(V)):
            sequence, length = [*prompt, *actual[0][index][0]], len(prompt) + NEW
            for known, drafts, _ in offers.by_request[f"call-{index}"]:
                expected = transformers_drafts(model, sequence[:known])
                has_pages = known + NUM_DRAFTS <= length
                assert drafts == (expected if has_pages else expected[: len(drafts)]), (index, known)
                checked, past = checked + 1, past + (not expected)
                shortened += 0 < len(expected) < NUM_DRAFTS
        assert checked > 40 and shortened and past, "some drafts end with the context of the draft model"
        actual += [answers(engine, prompts_of(V), new=NEW, **sampling)[0] for sampling in SAMPLINGS[1:]]
        assert engine.stats().speculative.requests.accepted > 0
        assert [line for line in engine.components.plan.lines() if line.startswith("draft model")]
        demand = engine.components.plan.draft
    assert actual == plain
    assert demand.weights == 4 * sum(weight.numel() for weight in model.parameters())
    assert demand.bytes_per_token == 4 * 2 * 3 * 8  # float32 keys and values of three heads of width 8 in a layer


def test_a_model_with_experts_and_other_attention_drafts_and_records_nothing(target, plain, tmp_path):
    """Attention with sinks needs other kernels than the target's; rows are those of the target alone. Prompts may hold
    ids that the draft model has no embedding for."""
    folder = write_family(tmp_path, "gpt-oss", vocab_size=57)
    speculative = standalone(folder, num_steps=2)
    with lazy_compilation(), Engine(str(target), **SIZES, **EXACT, speculative=speculative) as engine:
        actual = [answers(engine, prompts_of(V), new=NEW, **sampling)[0] for sampling in SAMPLINGS]
        totals = engine.stats().speculative.requests
    assert actual == plain
    assert totals.proposed > totals.accepted > 0


def write_other_head(folder):
    """The target with noise on its head: a draft model whose experts have the layers and the sizes of the target's."""
    import torch

    model, noise = write_target(folder), torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.lm_head.weight += 0.15 * torch.randn(model.lm_head.weight.shape, generator=noise)
    model.save_pretrained(folder)
    return folder


DRAFTS_WITH_EXPERTS = {
    "layers of the target": write_other_head,
    "other layers": lambda folder: write_family(folder, "gpt-oss", vocab_size=57),
}


def answers_and_counts(engine, asked):
    """Of each choice: its tokens and logprobs, and what became of its drafts."""
    made = []
    for sampling in SAMPLINGS[::2]:
        how = {"seed": 3, "ignore_eos": True, "max_new_tokens": NEW} | sampling
        outs = engine.generate(input_ids=prompts_of(V), sampling_params=how, return_logprob=True, **asked)
        for out in outs:
            meta = out["meta_info"]
            counts = {name: value for name, value in meta.items() if name.startswith("spec_")}
            made.append((out["output_ids"], meta["output_token_logprobs"], counts))
    return made


@pytest.mark.parametrize(
    "draft",
    [
        name if name == "layers of the target" else pytest.param(name, marks=pytest.mark.thorough)
        for name in DRAFTS_WITH_EXPERTS
    ],
)
def test_capture_changes_neither_answers_nor_counts_of_drafts_by_experts(draft, target, tmp_path):
    speculative = standalone(DRAFTS_WITH_EXPERTS[draft](tmp_path / "draft"), num_steps=NUM_DRAFTS)
    actual = []
    for capture in (False, True):
        options = SIZES | dict(deterministic=True, enable_return_routed_experts=capture, speculative=speculative)
        with lazy_compilation(), Engine(str(target), **options) as engine:
            actual.append(answers_and_counts(engine, {"return_routed_experts": True} if capture else {}))
            assert engine.components.core.runner.spec.capture is not None or not capture
    assert actual[0] == actual[1]
    proposed, correct = (
        sum(counts[name] for *_, counts in actual[0])
        for name in ("spec_num_proposed_drafts", "spec_num_correct_drafts")
    )
    assert proposed > correct > 0


def coupled_acceptance(p, q):
    """The probability that two samples with common Gumbel noise are equal: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x).
    p, q: [S V]."""
    ratios = np.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])  # [S x y]
    return (1 / ratios.sum(-1)).sum(-1)


def test_drafts_with_common_noise_are_accepted_as_often_as_the_formula_says(offers, tmp_path):
    import torch

    sizes = dict(vocab_size=24, max_position_embeddings=256)
    model, noise = write_target(tmp_path / "target", **sizes), torch.Generator().manual_seed(5)
    draft = write_target(tmp_path / "draft", **sizes)
    with torch.no_grad():
        draft.lm_head.weight += 0.3 * torch.randn(draft.lm_head.weight.shape, generator=noise)
    draft.save_pretrained(tmp_path / "draft")
    prompt = np.random.default_rng(4).integers(0, 24, 6).tolist()
    sampling = {"temperature": 1.0, "seed": 4, "n": 24, "max_new_tokens": 220, "ignore_eos": True}
    speculative = standalone(tmp_path / "draft", num_steps=1)
    options = SIZES | dict(precompile_bs_paddings=(8,))
    with lazy_compilation(), Engine(str(tmp_path / "target"), **options, speculative=speculative) as engine:
        outs = engine.generate(input_ids=[prompt], sampling_params=sampling, rid="call")
    expected, hits = [], []
    for index, out in enumerate(outs):  # choices have noise of their own
        sequence = [*prompt, *out["output_ids"]]
        with torch.no_grad():
            ids = torch.tensor([sequence])
            p, q = (torch.softmax(one(ids).logits[0].double(), -1).numpy() for one in (model, draft))
        made = {known: drafts for known, drafts, _ in offers.by_request[f"call-{index}"] if drafts}
        at = [known for known in sorted(made) if known < len(sequence)]
        rows = np.array(at) - 1
        expected += coupled_acceptance(p[rows], q[rows]).tolist()
        hits += [made[known][0] == sequence[known] for known in at]
    expected, hits = np.array(expected), np.array(hits)
    sigma = np.sqrt((expected * (1 - expected)).sum()) / len(expected)
    assert len(expected) >= 2000
    assert 0.3 < expected.mean() < 0.9, "neither all nor nothing"
    assert abs(hits.mean() - expected.mean()) < 3 * sigma, (hits.mean(), expected.mean(), sigma)


def test_each_kind_of_draft_model_says_how_far_its_chain_feeds():
    assert (OF_TARGET.lookahead(3), STANDALONE.lookahead(3)) == (2, 3)


def tokenizer(path, tokens):
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return path


def refused_draft(name, path):
    """A folder that is no draft model of the target, and words of the error."""
    if name == "recurrent":
        return write_family(path, "qwen3-next"), ["Qwen3NextForCausalLM", "keep a state", "1 layers"]
    if name == "another vocabulary":
        return write_family(path, "dense"), ["vocab_size=211", "60 of the model"]
    if name == "pickled":
        folder = write_family(path, "dense", vocab_size=V)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        return folder, ["pickled", "pytorch_model.bin", "model.safetensors"]
    if name == "an EAGLE head":
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
        return path, ["LlamaForCausalLMEagle3", "not known"]
    return path / "nowhere", [f"{path / 'nowhere'}", "check the path"]


@pytest.mark.parametrize("name", ["recurrent", "another vocabulary", "pickled", "an EAGLE head", "missing"])
def test_what_is_no_draft_model_of_the_target_is_refused_before_it_loads(name, target, tmp_path):
    folder, words = refused_draft(name, tmp_path / "draft")
    loaded = []
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        Engine(str(target), **SIZES, speculative=standalone(folder), on_load=lambda *count: loaded.append(count))
    assert not loaded
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_vocabularies_are_compared_token_by_token_where_both_have_a_tokenizer(tmp_path):
    letters = [f"t{index}" for index in range(50)]
    target = tokenizer(tmp_path / "target", letters)
    check = functools.partial(check_vocabularies, target=target)
    same = tokenizer(tmp_path / "same", [*letters, "one more"])
    check(same, draft_size=1000, target_size=77)  # padding of any size: ids are the same tokens
    swapped = tokenizer(tmp_path / "other", [*letters[1::-1], *letters[2:]])
    with pytest.raises(CheckpointError, match=r"2 of 50 ids .* differ: 0 is 't1' and 't0' .*vocab_size=64.*50 of the"):
        check(swapped, draft_size=64, target_size=50)
    without = tmp_path / "without"
    for sizes in ((151_936, 152_064), (50, 50), (64, 50), (50, 64)):
        check(without, draft_size=sizes[0], target_size=sizes[1])
        check_vocabularies(same, None, draft_size=sizes[0], target_size=sizes[1])
    for sizes in ((32_000, 32_001 + 128), (50, 61), (151_936, 32_000)):
        with pytest.raises(CheckpointError, match=f"vocab_size={sizes[0]} of .*{sizes[1]} of the model"):
            check(without, draft_size=sizes[0], target_size=sizes[1])


def test_a_damaged_tokenizer_is_named(tmp_path):
    target, draft = tokenizer(tmp_path / "target", ["a", "b"]), tmp_path / "draft"
    draft.mkdir()
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json has no model.vocab"):
        check_vocabularies(draft, target, draft_size=2, target_size=2)
    (draft / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}))
    check_vocabularies(draft, target, draft_size=2, target_size=2)


@pytest.mark.thorough  # models/test_dummy_weights.py has the values
def test_random_weights_of_the_target_mean_random_weights_of_the_draft(target, tmp_path):
    (tmp_path / "config.json").write_bytes((target / "config.json").read_bytes())
    options = SIZES | dict(load_format="dummy", speculative=standalone(tmp_path, num_steps=2))
    with lazy_compilation(), Engine(str(tmp_path), **options) as engine:
        _, metas = answers_without_rows(engine)
    assert all(meta["spec_accept_rate"] > 0.9 for meta in metas), "the same random weights"


def answers_without_rows(engine, **sampling):
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NEW} | sampling
    outs = engine.generate(input_ids=prompts_of(V), sampling_params=sampling)
    return [out["output_ids"] for out in outs], [out["meta_info"] for out in outs]
