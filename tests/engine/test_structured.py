"""Structured output in the step loop: masks and forced tokens with retraction, pauses, aborts, stop strings, several
choices, the rows of forced tokens, neighbours without a grammar.

Deterministic mode makes it exact: an uninterrupted run is the oracle of an interrupted one, a request alone that of a
request in company, the MoE probe judges the rows, and a prefill of the same text judges forced tokens."""

import json

import numpy as np
import pytest

from oracles.driver import CollectedOutput, assert_all_faithful, assert_faithful, request
from oracles.testbeds import other_weights, random_prompt, tiny_testbed
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.engine.loop.core import PauseMode
from routed_experts.engine.requests.detokenizer import IncrementalDetokenizer
from support.grammars import RegexOracle, new_compiler, tiny_tokenizer
from support.tiny_checkpoint import EOS_ID, VOCAB_SIZE

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
FORCING = COMPACT | {
    "type": "object",
    "properties": {
        "the name of it": {"type": "string", "maxLength": 5},
        "how many of them": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["the name of it", "how many of them"],
    "additionalProperties": False,
}
FREE = {"type": "array", "items": {"enum": ["one", "other", None, 3]}, "maxItems": 3}
SPECS = (
    GrammarSpec.json_schema(FORCING),
    None,
    GrammarSpec.regex("[a-f]{3,9}"),
    GrammarSpec.json_schema(FREE),
    None,
    GrammarSpec.choice(["perhaps so", "perhaps not", "never"]),
)
SAMPLING = (
    dict(temperature=1.0),
    dict(),
    dict(temperature=1.0, frequency_penalty=0.8, repetition_penalty=1.3),
    dict(temperature=0.8, top_k=12),
    dict(min_tokens=12, temperature=1.0),
    dict(temperature=1.0, include_last=True),
    dict(prompt_logprobs_from=0, temperature=1.0),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return new_compiler(tokenizer)


@pytest.fixture(scope="module")
def testbed():
    return tiny_testbed(moe_backend="probed", deterministic=True)


@pytest.fixture(scope="module")
def default():
    """In default mode: decode programs of their own, and forced tokens are fed as chunks."""
    return tiny_testbed(moe_backend="probed")


@pytest.fixture(scope="module")
def requests(compiler):
    def make(seed, count=12, max_tokens=48, **options):
        """Requests with and without grammars, half of them with a beginning in common."""
        rng = np.random.default_rng(seed)
        shared = random_prompt(rng, 12)
        made = []
        for index in range(count):
            own, spec = random_prompt(rng, rng.integers(1, 16)), SPECS[index % len(SPECS)]
            how = {"max_tokens": max_tokens, "seed": seed + index, **SAMPLING[index % len(SAMPLING)], **options}
            grammar = None if spec is None else compiler.compile(spec)
            if grammar is None:
                how["max_tokens"] = 20
            prompt = np.concatenate([shared, own]) if index % 2 else own
            made.append(request(f"r{index}", prompt, grammar=grammar, stop_token_ids=(EOS_ID,), **how))
        return made

    return make


def outputs_of(drive):
    """Outputs of each request, in comparable form."""
    return {
        rid: (
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            output.end.finish_reason,
            output.end.routed_experts,
        )
        for rid, output in drive.outputs.items()
    }


def uninterrupted(testbed, reqs):
    drive = testbed.drive(disable_radix_cache=True)
    drive.run(*reqs)
    return outputs_of(drive)


def check_forms(tokenizer, drive):
    """Every structured answer that has stopped has its form; returns how many there were."""
    checked = 0
    for rid, output in drive.outputs.items():
        req = drive.reqs[rid]
        if req.grammar is None or output.end.finish_reason.type != "stop":
            continue
        assert output.tokens[-1] == output.end.finish_reason.matched == EOS_ID
        text, spec = tokenizer.decode(output.tokens), SPECS[int(rid[1:]) % len(SPECS)]
        if spec.kind == "json":
            answer = json.loads(text)
            assert isinstance(answer, dict | list)
            if isinstance(answer, dict):
                assert list(answer) == list(FORCING["properties"]) and 0 <= answer["how many of them"] <= 99
            else:
                assert len(answer) <= 3 and set(answer) <= {"one", "other", None, 3}
        elif spec.kind == "choice":
            assert text in json.loads(spec.text)
        else:
            assert 3 <= len(text) <= 9 and set(text) <= set("abcdef")
        checked += 1
    return checked


def assert_same(one, other):
    assert one.keys() == other.keys()
    for rid in one:
        assert one[rid] == other[rid], rid


def test_answers_have_their_form_and_rows_are_those_that_ran(testbed, tokenizer, requests):
    checked = 0
    for seed in range(4):
        drive = testbed.drive()
        drive.run(*requests(100 * seed))
        assert assert_all_faithful(drive) > 200
        checked += check_forms(tokenizer, drive)
    assert checked > 20


@pytest.mark.parametrize(
    ("seed", "chunk"),
    [
        *((0, None), (1, 5)),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((0, 5), (1, None), (2, None), (2, 5))),
    ],
)
def test_a_short_pool_changes_nothing(testbed, requests, seed, chunk):
    drive = testbed.drive(pages=24, chunked_prefill_size=chunk)
    drive.run(*requests(seed))
    assert drive.core.ranks[0].num_retracted > 0
    assert_all_faithful(drive)
    assert_same(outputs_of(drive), uninterrupted(testbed, requests(seed)))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_request_that_is_retracted_again_and_again_gives_the_same_output(testbed, requests, stream, every):
    drive = testbed.drive(chunked_prefill_size=16)
    drive.run(*requests(20, stream=stream), before_step=lambda n: n % every == every - 1 and drive.retract_victim())
    assert drive.core.ranks[0].num_retracted > 5
    assert_all_faithful(drive)
    assert_same(outputs_of(drive), uninterrupted(testbed, requests(20)))


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_pause_in_the_middle_changes_nothing(testbed, requests, mode):
    drive = testbed.drive()

    def interrupt(step):
        if step % 4 == 3:
            drive.drain()
            drive.core.pause(mode)
            assert not drive.core.has_work
            drive.core.resume()

    drive.run(*requests(30), before_step=interrupt)
    assert_all_faithful(drive)
    assert_same(outputs_of(drive), uninterrupted(testbed, requests(30)))


def test_new_weights_in_the_middle_change_no_row_that_was_written(testbed, tokenizer, requests):
    drive = testbed.drive()
    drive.run(
        *requests(40), before_step=lambda n: n % 7 == 6 and drive.update_weights(other_weights(1 + n % 2), cache="keep")
    )
    assert_all_faithful(drive)
    assert check_forms(tokenizer, drive) > 3


def test_each_request_has_the_bits_that_it_has_alone(testbed, requests):
    together = testbed.drive()
    together.run(*requests(50))
    for index in range(12):
        alone = testbed.drive()
        alone.run(requests(50)[index])
        rid = f"r{index}"
        assert outputs_of(alone)[rid] == outputs_of(together)[rid], rid


def test_steps_without_a_grammar_run_the_programs_without_a_mask(testbed, requests):
    drive = testbed.drive()
    drive.run(*[req for req in requests(60) if req.grammar is None])
    assert not any(batch.is_masked for batch, _ in drive.log.forwards)


def test_forced_tokens_are_fed_as_one_chunk(testbed, default, requests):
    drive = default.drive()
    drive.run(requests(0)[0])
    req, counts = drive.reqs["r0"], [batch.num_tokens for batch, _ in drive.log.forwards]
    assert sum(counts) - req.num_known in (-1, 0), "each token once, and one step more, that was ahead"
    assert len(counts) < req.num_output - 10 and max(counts[1:]) > 5
    exact = testbed.drive()
    exact.run(requests(0)[0])
    assert max(batch.num_tokens for batch, _ in exact.log.forwards[1:]) == 1, "one a step in deterministic mode"
    assert exact.outputs["r0"].tokens == drive.outputs["r0"].tokens


@pytest.mark.parametrize("pages", [24, 200])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_forced_chunks_with_retraction_keep_rows_and_forms(default, tokenizer, requests, seed, pages):
    drive = default.drive(pages=pages, chunked_prefill_size=16)
    drive.run(*requests(90 + seed, stream=True), before_step=lambda n: n % 4 == 3 and drive.retract_victim())
    assert drive.core.ranks[0].num_retracted > 3
    assert_all_faithful(drive)
    assert check_forms(tokenizer, drive) > 3
    lengths = [len(output.logprobs) == len(output.tokens) for output in drive.outputs.values()]
    assert all(lengths)


@pytest.mark.parametrize("mode", ["default", "deterministic"])
def test_forced_tokens_have_the_rows_and_logprobs_of_a_prefill_of_the_same_text(testbed, default, requests, mode):
    """Rows by the probe and by a prefill of all tokens; logprobs of the tokens that were not chosen are the model's
    own."""
    bench, compared = default if mode == "default" else testbed, 0
    for seed in range(3):
        drive = bench.drive()
        drive.run(requests(seed)[0])
        assert_faithful(drive, "r0")
        req, output = drive.reqs["r0"], drive.outputs["r0"]
        everything = req.tokens[: req.num_known]
        prefill = bench.drive()
        prefill.run(request("p", everything, 1, prompt_logprobs_from=0))
        record, whole = output.end.routed_experts, prefill.outputs["p"].end.routed_experts
        np.testing.assert_array_equal(record.ids, whole.ids[: len(record.ids)])
        logprobs = np.array(prefill.outputs["p"].prompt_logprobs[req.prompt_len :])
        replayed = req.source.grammar.start()
        for index, token in enumerate(output.tokens):
            words = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
            forced = replayed.forced_tokens()
            if not forced:
                replayed.fill(words, keep_end=True)
            if forced or sum(int(word).bit_count() for word in words) == 1:
                assert not forced or forced[0] == token
                np.testing.assert_allclose(output.logprobs[index], logprobs[index], atol=1e-5)
                compared += 1
            replayed.accept(token)
    assert compared > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_answers_are_those_of_the_oracle(testbed, tokenizer, compiler, temperature):
    """The whole-sequence oracle's logits, masked by matching every token, give the same tokens."""
    pattern = "[a-f]{2}[0-9]{1,4}(-[xyz]{1,3})*"
    token_bytes = {t: tokenizer.token_bytes(t) for t in range(VOCAB_SIZE) if not tokenizer.is_special(t)}
    oracle = RegexOracle(pattern, token_bytes, (EOS_ID,))
    rng = np.random.default_rng(7)
    for index in range(4):
        prompt = random_prompt(rng, 9)
        drive = testbed.drive()
        req = request("r", prompt, 10, grammar=compiler.compile(GrammarSpec.regex(pattern)), stop_token_ids=(EOS_ID,),
                      temperature=temperature, seed=index)  # fmt: skip
        output = drive.run(req)["r"]
        for at, token in enumerate(output.tokens):
            allowed = oracle.allowed(output.tokens[:at])
            assert token in allowed
            logits = testbed.oracle.run([*prompt, *output.tokens[:at]]).logits[-1]
            own = logits[allowed]
            if temperature == 0:
                assert logits[token] >= own.max() - 1e-4
            expected = logits[token] - own.max() - np.log(np.exp(own - own.max()).sum())
            if len(allowed) > 1:
                np.testing.assert_allclose(output.logprobs[at], expected, atol=1e-3)


def test_choices_of_a_prompt_follow_the_grammar_each_by_itself(testbed, tokenizer, compiler):
    grammar = compiler.compile(SPECS[0])
    prompt = random_prompt(np.random.default_rng(3), 17)
    how = dict(grammar=grammar, stop_token_ids=(EOS_ID,), temperature=1.0, seed=3, group="one")
    drive = testbed.drive(pages=60)
    drive.run(*[request(f"c{j}", prompt, 48, choice=j, **how) for j in range(4)])
    texts = {tokenizer.decode(output.tokens) for output in drive.outputs.values()}
    assert len(texts) > 1 and all(json.loads(text) for text in texts)
    assert_all_faithful(drive)


def test_max_tokens_cuts_an_answer_also_within_forced_text(default, requests):
    whole = default.drive()
    whole.run(requests(0)[0])
    tokens = whole.outputs["r0"].tokens
    for most in range(1, len(tokens)):
        drive = default.drive()
        drive.run(requests(0, max_tokens=most, min_tokens=0)[0])
        output = drive.outputs["r0"]
        assert output.tokens == tokens[:most] and output.end.finish_reason.type == "length"
        assert_faithful(drive, "r0")


@pytest.mark.parametrize("include_last", [False, True])
def test_a_stop_string_ends_an_answer_also_within_forced_text(default, tokenizer, requests, include_last):
    whole = default.drive()
    whole.run(requests(0)[0])
    tokens = whole.outputs["r0"].tokens
    for stop in ("name", '":', "many of", "them"):
        drive = default.drive()
        req = requests(0, include_last=include_last)[0]
        detokenizer = IncrementalDetokenizer(tokenizer, stop=(stop,), include_stop_str=True)
        drive.core.add([req], {"r0": detokenizer})
        drive.outputs["r0"], drive.reqs["r0"] = CollectedOutput(), req
        drive.run()
        output = drive.outputs["r0"]
        count = next(n for n in range(len(tokens)) if stop in tokenizer.decode(tokens[:n]))
        assert output.tokens == tokens[:count] and output.end.finish_reason.matched == stop
        assert_faithful(drive, "r0")


def test_an_abort_at_any_step_leaves_what_there_is(default, requests):
    whole = default.drive()
    whole.run(requests(0)[0])
    tokens = whole.outputs["r0"].tokens
    aborted = 0
    for steps in range(1, 12):
        drive = default.drive()
        drive.add(*requests(0)[:3])
        drive.steps(steps)
        drive.core.abort("r0")
        drive.run()
        output = drive.outputs["r0"]
        assert output.tokens == tokens[: len(output.tokens)]
        aborted += output.end.finish_reason.type == "abort"
        assert_all_faithful(drive)
    assert aborted > 5


class FailingState:
    """A grammar that allows everything, and meets a limit after some tokens."""

    is_complete = False

    def __init__(self, after):
        self.error, self._left = None, after

    def accept(self, token):
        self._left -= 1

    def forced_tokens(self):
        return ()

    def fill(self, words, *, keep_end):
        words[:] = 0xFFFFFFFF
        if self._left <= 0:
            self.error = "a limit was met"


class FailingGrammar:
    def __init__(self, after):
        self.start = lambda: FailingState(after)


@pytest.mark.parametrize("stream", [True, False])
def test_a_grammar_that_meets_a_limit_ends_its_request_alone(testbed, requests, stream):
    prompt = random_prompt(np.random.default_rng(1), 5)
    failing = [request(f"f{n}", prompt, 20, grammar=FailingGrammar(n), stream=stream) for n in range(4)]
    drive = testbed.drive()
    drive.run(*requests(70), *failing)
    for number in range(4):
        output = drive.outputs[f"f{number}"]
        assert output.end.finish_reason.type == "abort" and "a limit was met" in output.end.finish_reason.message
        assert len(output.tokens) == number
    assert_all_faithful(drive)
    ended = {rid: output for rid, output in outputs_of(drive).items() if rid.startswith("r")}
    assert_same(ended, uninterrupted(testbed, requests(70)))


def test_min_tokens_and_ignore_eos_do_not_keep_a_complete_answer(testbed, compiler):
    prompt = random_prompt(np.random.default_rng(2), 6)
    for how in (dict(min_tokens=30), dict(ignore_eos=True)):
        drive = testbed.drive()
        grammar = compiler.compile(GrammarSpec.regex("[a-c]{4}"))
        stop_ids = () if "ignore_eos" in how else (EOS_ID,)
        output = drive.run(request("r", prompt, 40, grammar=grammar, stop_token_ids=stop_ids, **how))["r"]
        assert output.end.finish_reason.type == "stop" and output.tokens[-1] == EOS_ID and len(output.tokens) <= 5


def test_ignore_eos_goes_on_where_the_grammar_may(testbed, compiler):
    prompt = random_prompt(np.random.default_rng(2), 6)
    grammar = compiler.compile(GrammarSpec.regex("[a-c]*"))
    output = testbed.drive().run(request("r", prompt, 25, grammar=grammar, ignore_eos=True, temperature=1.0))["r"]
    assert output.end.finish_reason.type == "length" and EOS_ID not in output.tokens


def test_in_default_mode_too(default, tokenizer, requests):
    drive = default.drive(pages=60)
    drive.run(*requests(80, stream=True))
    assert {batch.mode for batch, _ in drive.log.forwards} == {ForwardMode.EXTEND, ForwardMode.DECODE}
    assert_all_faithful(drive)
    assert check_forms(tokenizer, drive) > 3
