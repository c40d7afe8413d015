"""GrammarCompiler: compiles the grammars of requests for one vocabulary, and caches those used last.

Compiling runs on the caller's thread; llguidance drops the interpreter's lock meanwhile, so that steps go on. Its work
is bounded by counted steps and not by a clock: a grammar that is refused once is always refused. So is the work of one
mask. What a grammar takes on the host grows while it is used, with the states of its lexer, which the sequences of a
grammar share; this is bounded, too. Where the shared states are used up, a sequence goes on with a lexer of its own,
and later sequences share a new one: whether a sequence meets the limit depends on its own text alone."""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.grammar_spec import CHOICE, GRAMMAR, JSON, REGEX, SCHEMA_OPTIONS, GrammarSpec
from routed_experts.core.grammar_state import num_mask_words
from routed_experts.grammar.states import LLGrammarState, error_of
from routed_experts.grammar.vocabulary import VocabularySource, build_vocabulary, import_llguidance

MAX_CACHED = 128  # grammars in the cache
MAX_CACHED_CHARS = 1 << 22  # and characters of their sources
MAX_GBNF_CHARS = 1 << 15  # of a GBNF grammar: it is translated by Python code
# Of llguidance. 1,000,000 steps of building take about 20 ms; a mask at most about 14 ms + 2.5 ms.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # of 1 to 2 kB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class LLCompiledGrammar:
    """A CompiledGrammar: a matcher at its start, which each sequence copies. `create` makes one with a new lexer."""

    def __init__(self, create: Callable[[], Any], eos_token_ids: frozenset[int]) -> None:
        self._create, self._eos_token_ids = create, eos_token_ids
        self._matcher = create()
        self._lock = threading.Lock()
        self._forced: tuple[int, ...] = ()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed at all."""
        return error_of(self._matcher)

    def start(self) -> LLGrammarState:
        """The state of a new sequence."""
        with self._lock:
            shared = self._matcher
            copied = shared.deep_copy()
        renew = functools.partial(self._renew, shared)
        return LLGrammarState(copied, self._eos_token_ids, renew=renew, forced=self._forced)

    def compute_first_tokens(self, vocab_size: int) -> str | None:
        """Compute the forced run that every output begins with, on the caller's thread. Returns why none can begin: a
        grammar that allows nothing at all is refused before it is queued."""
        state = self.start()
        if not state.forced_tokens():
            state.fill(np.zeros(num_mask_words(vocab_size), np.uint32), keep_end=True)
        self._forced = state.forced_run
        return state.error

    def _renew(self, shared: Any) -> Any:
        """A matcher at its start with a lexer of its own, for a sequence of one whose lexer is used up."""
        with self._lock:
            if self._matcher is shared:
                self._matcher = self._create()
        return self._create()


class GrammarCompiler:
    """The grammars of one engine. Thread-safe; the vocabulary is read by the first grammar."""

    def __init__(self, source: VocabularySource, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source, self._vocab_size = source, vocab_size
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._vocabulary: Any = None
        self._limits: Any = None
        self._cache: OrderedDict[GrammarSpec, LLCompiledGrammar] = OrderedDict()
        self._num_chars = 0

    @property
    def num_cached(self) -> int:
        """Grammars in the cache."""
        return len(self._cache)

    def compile(self, spec: GrammarSpec) -> LLCompiledGrammar:
        """The grammar of a request. Raises InvalidRequestError naming what cannot be followed, and ConfigError without
        llguidance."""
        with self._lock:
            known = self._cache.get(spec)
            if known is not None:
                self._cache.move_to_end(spec)
                return known
        compiled = self._compile_or_name(spec)
        with self._lock:
            if spec not in self._cache:
                self._cache[spec] = compiled
                self._num_chars += len(spec.text)
            while len(self._cache) > MAX_CACHED or (self._num_chars > MAX_CACHED_CHARS and len(self._cache) > 1):
                dropped, _ = self._cache.popitem(last=False)
                self._num_chars -= len(dropped.text)
        return compiled

    def _compile_or_name(self, spec: GrammarSpec) -> LLCompiledGrammar:
        """The grammar; its error names the part that cannot be followed, where one alone cannot."""
        try:
            return self._compile(spec)
        except InvalidRequestError:
            for name, part in spec.parts:
                self._compile(part, name)
            raise

    def _compile(self, spec: GrammarSpec, name: str = PARAM) -> LLCompiledGrammar:
        """The grammar, which errors call by `name`."""
        llguidance = import_llguidance()
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = build_vocabulary(self._source, self._vocab_size, sorted(self._eos_token_ids))
                self._limits = llguidance.LLParserLimits(**LIMITS)
        source, vocabulary, limits = _source_of(llguidance, spec, name), self._vocabulary, self._limits
        compiled = LLCompiledGrammar(
            lambda: llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits), self._eos_token_ids
        )
        error = compiled.error or compiled.compute_first_tokens(self._vocab_size)
        if error is not None:
            raise _refusal(spec, error, name)
        return compiled


def _source_of(llguidance: Any, spec: GrammarSpec, name: str) -> str:
    """A grammar in llguidance's own form."""
    if spec.kind == GRAMMAR and "::=" in spec.text and len(spec.text) > MAX_GBNF_CHARS:
        text = f"has {len(spec.text)} characters, above the limit of {MAX_GBNF_CHARS} for GBNF; write it in Lark"
        raise InvalidRequestError(f"{name} {text}", param=spec.param, code="grammar_too_large")
    names = {JSON: "json_schema", REGEX: "regex", GRAMMAR: "grammar", CHOICE: "choice"}
    text = _with_options(spec.text) if spec.kind == JSON else spec.text
    try:
        return llguidance.grammar_from(names[spec.kind], text)
    except (ValueError, RecursionError) as error:
        raise _refusal(spec, str(error), name) from error


def _with_options(schema: str) -> str:
    """A JSON Schema with the default options, where it has none of its own."""
    value = json.loads(schema)
    if not isinstance(value, dict) or "x-guidance" in value:
        return schema
    return json.dumps({"x-guidance": SCHEMA_OPTIONS, **value}, ensure_ascii=False)


def _refusal(spec: GrammarSpec, error: str, name: str) -> InvalidRequestError:
    """The error of a grammar that cannot be followed, with llguidance's reason."""
    text = " ".join(str(error).split()) or "unknown"
    brief = text if len(text) <= 400 else text[:397] + "..."
    is_unsupported = "nimplemented" in brief or "not supported" in brief
    code, fix = ("unsupported_grammar", "leave that out") if is_unsupported else ("invalid_grammar", "correct it")
    return InvalidRequestError(f"{name} cannot be followed: {brief}; {fix}", param=spec.param, code=code)
