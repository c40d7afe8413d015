"""Compiling grammars: what is refused and how, what is kept, and JSON Schema's own test suite."""

import collections
import contextlib
import json
import resource
import threading
import time
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest

from routed_experts.core import grammar_spec
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.grammar_spec import MAX_GRAMMAR_CHARS, MAX_GRAMMAR_DEPTH, GrammarSpec
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.grammar import compiler as grammar_compiler
from routed_experts.grammar import states as grammar_states
from routed_experts.grammar import vocabulary
from support.grammars import allowed_tokens, new_compiler, tiny_tokenizer, walk
from support.tiny_checkpoint import EOS_ID, VOCAB_SIZE

SUITE = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())["groups"]
KIDS = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
TREE = {"type": "object", "properties": {"kids": KIDS}, "additionalProperties": False}
UNSUPPORTED = {  # keywords that no schema of the suite is served with
    "contains", "dependentRequired", "dependentSchemas", "if", "not", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return new_compiler(tokenizer)


def refusal(make):
    with pytest.raises(InvalidRequestError) as info:
        make()
    return info.value


def nested(depth, leaf):
    for _ in range(depth):
        leaf = {"type": "array", "items": leaf}
    return leaf


@pytest.mark.parametrize(
    ("params", "param", "code", "words"),
    [
        ({"json_schema": "{"}, "json_schema", "invalid_grammar", "no JSON"),
        ({"json_schema": 5}, "json_schema", "invalid_grammar", "send a JSON Schema"),
        ({"json_schema": {"a": float("nan")}}, "json_schema", "invalid_grammar", "cannot express"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema", "invalid_grammar", "cannot express"),
        ({"json_schema": nested(MAX_GRAMMAR_DEPTH, {})}, "json_schema", "grammar_too_deep", "48"),
        ({"json_schema": "[" * 100_000}, "json_schema", "invalid_grammar", "too deep"),
        ({"json_schema": {"const": "a" * MAX_GRAMMAR_CHARS}}, "json_schema", "grammar_too_large", "262144"),
        ({"regex": ""}, "regex", "invalid_grammar", "regular expression"),
        ({"regex": "(" * 60 + ")" * 60}, "regex", "grammar_too_deep", "48"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex", "grammar_too_large", "262144"),
        ({"ebnf": 7}, "ebnf", "invalid_grammar", "GBNF or Lark"),
        ({"guided_choice": []}, "guided_choice", "invalid_grammar", "list of 1 to"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "invalid_grammar", "guided_choice has 1 as item 1"),
        ({"guided_choice": ["", "b"]}, "guided_choice", "invalid_grammar", "has '' as item 0"),
        ({"allowed_token_ids": [4, -1]}, "allowed_token_ids", "invalid_request", "has -1 as item 1; send a list of"),
        ({"allowed_token_ids": 4}, "allowed_token_ids", "invalid_request", "allowed_token_ids is 4; send"),
        ({"bad_words": ["ok", ""]}, "bad_words", "invalid_request", "has '' as item 1; send at most 256"),
        ({"guided_choice": ["a\ud800"]}, "guided_choice", "invalid_grammar", "as item 0"),
        ({"bad_words": ["a\ud800"]}, "bad_words", "invalid_request", "as item 0; send at most 256"),
        *[({"structured_outputs": {"json_object": value}}, "structured_outputs.json_object", "invalid_grammar",
           "send true, or leave it out") for value in (0, 1, "true", [1], {})],
        ({"structured_outputs": 3}, "structured_outputs", "invalid_grammar", "an object with one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown_field", "did you mean json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "conflicting_parameters", "one of"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "invalid_grammar", "send a JSON Schema"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
         "unsupported_parameter", "leave it out"),
        ({"json_schema": {}, "regex": "a"}, "regex", "conflicting_parameters", "send one"),
        ({"guided_json": {}, "json_schema": {"type": "object"}}, "json_schema", "invalid_request", "must agree"),
    ],
)  # fmt: skip
def test_a_malformed_grammar_is_refused_by_name(params, param, code, words):
    error = refusal(lambda: SamplingParams.from_dict(params))
    assert (error.param, error.code) == (param, code) and words in str(error), error
    assert len(str(error)) < 1000


def test_every_spelling_means_the_same_grammar():
    schema = {"type": "object", "required": ["a"]}
    spellings = [
        {"json_schema": schema},
        {"json_schema": json.dumps(schema)},
        {"guided_json": schema},
        {"structured_outputs": {"json": schema, "regex": None, "disable_fallback": True}},
        {"structured_outputs": GrammarSpec.json_schema(schema)},
    ]
    specs = {SamplingParams.from_dict(params).resolve().grammar for params in spellings}
    specs.add(GrammarSpec.of_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
    assert specs == {GrammarSpec("json", '{"type":"object","required":["a"]}')}
    for nothing in ({}, {"json_object": False}, {"json_object": ""}, {"regex": "", "json": None}):
        assert SamplingParams(structured_outputs=nothing).resolve().grammar is None
    assert GrammarSpec.of_response_format({"type": "text"}) is None
    pairs = [("guided_regex", "regex"), ("guided_grammar", "ebnf")]
    for alias, name in pairs:
        assert SamplingParams.from_dict({alias: "a"}) == SamplingParams.from_dict({name: "a"})


@pytest.mark.parametrize(
    ("spec", "words", "code"),
    [
        (GrammarSpec.json_schema({"type": "banana"}), "banana", "invalid_grammar"),
        (GrammarSpec.json_schema({"$ref": "#/nowhere"}), "nowhere", "invalid_grammar"),
        (GrammarSpec.json_schema({"$ref": "https://example.com/schema"}), "https://example.com", "invalid_grammar"),
        (GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems", "unsupported_grammar"),
        (GrammarSpec.json_schema({"not": {"type": "string"}}), '"not"', "unsupported_grammar"),
        (GrammarSpec.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead", "unsupported_grammar"),
        (GrammarSpec.json_schema(False), "", "invalid_grammar"),
        (GrammarSpec.json_schema({"type": "string", "minLength": 3, "maxLength": 2}), "", "invalid_grammar"),
        (GrammarSpec.regex("("), "unclosed group", "invalid_grammar"),
        (GrammarSpec.grammar("start: nowhere"), "nowhere", "invalid_grammar"),
        (GrammarSpec.grammar("root ::= nowhere"), "nowhere", "invalid_grammar"),
        (GrammarSpec.grammar('root ::= "a" ' * 10_000), "", None),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(compiler, spec, words, code):
    began = time.monotonic()
    error = refusal(lambda: compiler.compile(spec))
    assert words.lower() in str(error).lower() and error.param == spec.param and len(str(error)) < 600
    assert code in (None, error.code), error.code
    assert time.monotonic() - began < 5, "bounded by counted steps; 5 s is a slow machine"


@pytest.mark.parametrize(
    "spec",
    [
        # Long, and otherwise as the next one.
        pytest.param(GrammarSpec.regex("(((((a{99}){99}){99}){99}){99})"), marks=pytest.mark.thorough),
        GrammarSpec.regex("a{9}{9}{9}{9}{9}{ 9}{9}"),
        GrammarSpec.json_schema({"type": "string", "pattern": "^(a{500}){500}$"}),
        GrammarSpec.grammar("start: /((a{500}){500})/"),
        GrammarSpec.json_schema({"const": "a" * 200_000}),
    ],
)
def test_a_form_that_begins_with_too_long_a_text_is_refused(compiler, spec):
    error = refusal(lambda: compiler.compile(spec))
    assert (error.param, error.code) == (spec.param, "invalid_grammar") and "without a choice" in str(error), error


@pytest.mark.parametrize("text", ["[xy](((a{999}){999}){9})", "[xy]((((a{99}){99}){99}){99})"])
def test_too_long_a_text_behind_a_choice_ends_the_request(tokenizer, compiler, text):
    """At once, or where the run that is computed has been used up."""
    state = compiler.compile(GrammarSpec.regex(text)).start()
    state.accept(tokenizer.encode_plain("x")[0])
    written = 0
    while forced := state.forced_tokens():
        for token in forced:
            state.accept(token)
        written += len(forced)
        assert written < 10 * grammar_states.MAX_FORCED
    assert state.error is not None


@pytest.mark.parametrize(
    ("spec", "is_served"),
    [
        (GrammarSpec.regex(r"(([a-zA-Z0-9]{1,63}\.){1,10}[a-z]{2,24},?){1,1000}"), True),
        (GrammarSpec.json_schema({"const": "{1}{2}{3}{4}{5}{6}{7}{8}{9}"}), True),
        (GrammarSpec.json_schema({"type": "string", "description": "{" + "1" * 5000 + "}"}), True),
        (GrammarSpec.json_schema({"type": "string", "pattern": r"^(([^,]{0,200},){20}[^,]{0,200}\n){1,100}$"}), True),
        (GrammarSpec.regex("a{" + "9" * 5000 + "}"), False),
        (GrammarSpec.regex("a" + "{99}" * 3000), False),
    ],
)
def test_counted_repetitions_are_followed_or_refused_by_name(compiler, spec, is_served):
    if not is_served:
        assert refusal(lambda: compiler.compile(spec)).code == "invalid_grammar"
        return
    state = compiler.compile(spec).start()
    assert state.forced_tokens() or allowed_tokens(state, VOCAB_SIZE).size


def test_what_every_output_begins_with_is_computed_with_the_grammar(tokenizer, compiler):
    """All of it, however many tokens one call returns."""
    text = "once upon a time " * 1_000
    state = compiler.compile(GrammarSpec.regex(f"{text}[xy]")).start()
    state._matcher = counting = CountingMatcher(state._matcher)
    written = []
    while forced := state.forced_tokens():
        written += forced
        for token in forced:
            state.accept(token)
    assert tokenizer.decode(written) == text and len(written) > 4096 and state.error is None
    assert counting.count == 1  # for the choice behind it


class CountingMatcher:
    """Counts how often forced text is computed."""

    def __init__(self, matcher):
        self._matcher, self.count = matcher, 0

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def compute_ff_tokens(self):
        self.count += 1
        return self._matcher.compute_ff_tokens()


def test_forced_text_is_computed_once_and_given_as_it_is_used_up(tokenizer, compiler):
    text = "once upon a time " * 500
    state = compiler.compile(GrammarSpec.regex(f"[xy]{text}[xy]")).start()
    state._matcher = counting = CountingMatcher(state._matcher)
    assert state.forced_tokens() == () and counting.count == 1
    state.accept(tokenizer.encode_plain("x")[0])
    written = []
    while forced := state.forced_tokens():
        written += forced[:7]
        for token in forced[:7]:
            state.accept(token)
    assert tokenizer.decode(written) == text and state.error is None
    assert counting.count == 3  # for the choice before it, the text, and the choice behind it
    state.accept(tokenizer.encode_plain("y")[0])
    assert state.error is None


def test_a_token_that_is_not_the_forced_one_is_an_error(tokenizer, compiler):
    state = compiler.compile(GrammarSpec.regex("once upon")).start()
    assert state.forced_tokens()
    state.accept(tokenizer.encode_plain("z")[0])
    assert state.error is not None and state.forced_tokens() == ()


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.regex("a{1,100000}{1,100000}"),
        GrammarSpec.regex("(a|b)*c(a|b){4000}(c|d){4000}[^x]{9000}"),
        GrammarSpec.regex("(.*a){20}(.*b){20}.{1,3000}c"),
        GrammarSpec.json_schema({"enum": [f"value {index}" for index in range(10_000)]}),
        GrammarSpec.json_schema({"properties": {f"p{n}": {"pattern": f"^(.*{n}){{9}}$"} for n in range(300)}}),
        GrammarSpec.grammar(
            f"start: {' | '.join(f'r{n}' for n in range(900))}\n"
            + "\n".join(f"r{n}: /[a-z]+{n}/ start?" for n in range(900))
        ),
        GrammarSpec.grammar('start: "a" start'),  # forced text without an end
        GrammarSpec.grammar("start: start start | /[a-c]/"),  # ambiguous: every split of a text
    ],
)  # fmt: skip
def test_a_heavy_grammar_is_refused_or_its_masks_are_bounded(compiler, spec):
    began = time.monotonic()
    compiled = None
    with contextlib.suppress(InvalidRequestError):
        compiled = compiler.compile(spec)
    assert time.monotonic() - began < 5, "bounded by counted steps; 5 s is a slow machine"
    state, rng = None if compiled is None else compiled.start(), np.random.default_rng(1)
    for _ in range(0 if state is None else 60):
        began = time.monotonic()
        words = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
        forced = state.forced_tokens()
        if not forced:
            state.fill(words, keep_end=False)
        assert time.monotonic() - began < 1
        if state.error is not None:
            break  # the request ends with what it has
        bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        state.accept(forced[0] if forced else int(rng.choice(bits)))


def test_a_refused_grammar_is_not_kept(tokenizer):
    compiler = new_compiler(tokenizer)
    for _ in range(2):
        refusal(lambda: compiler.compile(GrammarSpec.regex("(")))
    assert compiler.num_cached == 0


def test_two_thousand_schemas_in_a_row_take_bounded_memory(tokenizer):
    compiler = new_compiler(tokenizer)

    def schema(index):
        properties = {f"field {index} {number}": {"type": "string", "maxLength": 9} for number in range(4)}
        return GrammarSpec.json_schema({"type": "object", "properties": properties, "required": list(properties)})

    peaks = []
    for index in range(2000):
        state = compiler.compile(schema(index)).start()
        state.forced_tokens() or allowed_tokens(state, VOCAB_SIZE)
        if index in (500, 1999):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert compiler.num_cached == grammar_compiler.MAX_CACHED
    assert peaks[1] - peaks[0] < 64 * 1024, f"{peaks} KiB: what was dropped is not freed"
    again = compiler.compile(schema(1999))
    assert again is compiler.compile(schema(1999)), "the last one is kept"


def test_the_sources_that_are_kept_are_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_CHARS", 1000)
    compiler = new_compiler(tokenizer)
    for index in range(50):
        compiler.compile(GrammarSpec.choice([f"{index}" * 90]))
        assert compiler.num_cached * 90 <= 1000


def test_threads_compile_at_once(tokenizer):
    compiler, retained = new_compiler(tokenizer), []

    def compile_some():
        retained.extend(compiler.compile(GrammarSpec.regex(f"[a-{'cdef'[n % 4]}]+")) for n in range(20))

    threads = [threading.Thread(target=compile_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(retained) == 80 and compiler.num_cached == 4


def test_without_llguidance_the_error_names_the_command(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"structured output: llguidance is not installed; run .*\[structured\]"):
        new_compiler(tokenizer).compile(GrammarSpec.regex("a"))
    assert vocabulary.PURPOSE == "structured output"


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.regex("a+"),  # may always go on
        GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}}),
        GrammarSpec.json_schema({"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}),
        GrammarSpec.json_object(),
        GrammarSpec.grammar('root ::= "(" root? ")"'),
        GrammarSpec.grammar('start: "[" (start ("," start)*)? "]"'),
        GrammarSpec.grammar("start: /[ab]*/ start | /c/"),
    ],
)  # fmt: skip
def test_endless_and_recursive_grammars_are_followed_as_far_as_anybody_wants(compiler, spec):
    compiled = compiler.compile(spec)
    tokens, _ = walk(compiled, np.random.default_rng(0), VOCAB_SIZE, (EOS_ID,), most=400, end_eagerly=False)
    assert len(tokens) > 0


def test_a_grammar_that_never_ends_never_allows_the_end(compiler):
    """`start` needs another `start` for ever: a limit of the request has to end it."""
    compiled = compiler.compile(GrammarSpec.grammar("start: /[ab]/ start"))
    tokens, is_complete = walk(compiled, np.random.default_rng(0), VOCAB_SIZE, (EOS_ID,), most=300)
    assert not is_complete and len(tokens) == 300


def test_a_grammar_in_gbnf_and_in_lark_mean_the_same(compiler):
    gbnf = 'root ::= "x=" [0-9]+ (";" root)?'
    lark = 'start: "x=" /[0-9]+/ (";" start)?'
    rng = [np.random.default_rng(4) for _ in range(2)]
    one, two = (walk(compiler.compile(GrammarSpec.grammar(text)), r, VOCAB_SIZE, (EOS_ID,), end_eagerly=False)
                for text, r in zip((gbnf, lark), rng, strict=True))  # fmt: skip
    assert one == two


def keywords_of(schema):
    """All keys of a schema, of whatever depth."""
    if isinstance(schema, dict):
        return set(schema).union(*map(keywords_of, schema.values())) if schema else set()
    return set().union(*map(keywords_of, schema)) if isinstance(schema, list) and schema else set()


def test_json_schemas_own_suite(tokenizer, compiler):
    """Every schema of the suite (draft 2020-12, without other documents) is served or refused by name; of those that
    are served every complete answer is valid. The numbers are those of docs/structured.md."""
    served, refused, answers, reasons, codes = 0, 0, 0, collections.Counter(), set()
    for index, (file, _, schema) in enumerate(SUITE):
        try:
            compiled = compiler.compile(GrammarSpec.json_schema(schema))
        except InvalidRequestError as error:
            refused += 1
            reasons[file] += 1
            codes.add(error.code)
            continue
        served += 1
        validator = jsonschema_rs.validator_for(schema) if isinstance(schema, dict) else None
        assert not keywords_of(schema) & UNSUPPORTED or file in ("properties", "ref", "anchor", "defs"), (file, schema)
        for seed in range(3):
            rng = np.random.default_rng([index, seed])
            tokens, is_complete = walk(compiled, rng, VOCAB_SIZE, (EOS_ID,), most=150)
            if is_complete:
                answer = json.loads(tokenizer.decode(tokens, skip_special_tokens=False))
                assert validator is None or validator.is_valid(answer), (file, schema, answer)
                answers += 1
    print(f"served {served}, refused {refused} {dict(reasons)}, complete answers {answers}")
    assert served + refused == len(SUITE) and codes == {"unsupported_grammar", "invalid_grammar"}
    assert (served, refused) == (165, 175), "tell it in docs/structured.md"
    assert answers > 2 * served


def test_limits_are_what_the_page_says():
    assert (grammar_spec.MAX_GRAMMAR_CHARS, grammar_spec.MAX_GRAMMAR_DEPTH) == (262_144, 48)
    assert (grammar_compiler.MAX_CACHED, grammar_compiler.MAX_CACHED_CHARS) == (128, 4_194_304)
    assert grammar_states.MAX_FORCED == 65_536


def use_up(state, letters, rng):
    for _ in range(20_000):
        state.accept(int(rng.choice([token for token in letters if token in allowed_tokens(state, VOCAB_SIZE)])))


def test_states_that_a_grammar_has_used_up_end_no_other_sequence(tokenizer, monkeypatch):
    """The sequences of a grammar share the states of its lexer. Where they are used up, each goes on with its own."""
    monkeypatch.setitem(grammar_compiler.LIMITS, "max_lexer_states", 2_000)
    compiler = new_compiler(tokenizer)
    spec = GrammarSpec.regex("([ab]*a[ab]{14}c?)*")
    first, rng, failed = compiler.compile(spec).start(), np.random.default_rng(0), 0
    letters = [tokenizer.encode_plain(letter)[0] for letter in "ab"]
    for _ in range(60):
        state = compiler.compile(spec).start()
        for _ in range(60):
            allowed = [token for token in letters if token in allowed_tokens(state, VOCAB_SIZE)]
            assert state.error is None
            state.accept(int(rng.choice(allowed)))
        failed += state.error is not None
    assert failed == 0 and set(letters) & set(allowed_tokens(first, VOCAB_SIZE)) and first.error is None
    with pytest.raises(AssertionError, match="too many states"):  # one that uses up its own ends alone
        use_up(compiler.compile(spec).start(), letters, rng)
    assert set(letters) & set(allowed_tokens(first, VOCAB_SIZE))
    assert set(letters) & set(allowed_tokens(compiler.compile(spec).start(), VOCAB_SIZE))


def test_whitespace_has_an_end_where_a_schema_does_not_say(tokenizer, compiler):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    (brace,), (newline,) = tokenizer.encode_plain("{"), tokenizer.encode_plain("\n")
    for own, most in (({}, 32), ({"x-guidance": {"whitespace_flexible": True}}, None)):
        state = compiler.compile(GrammarSpec.json_schema(schema | own)).start()
        state.accept(brace)
        count = 0
        while count < 100 and newline in allowed_tokens(state, VOCAB_SIZE):
            state.accept(newline)
            count += 1
        assert count == (100 if most is None else most)
