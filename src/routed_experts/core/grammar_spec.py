"""GrammarSpec: the form that the output of a request must have, as text: a JSON Schema, a regular expression, a grammar
or a list of choices.

Requests name it in several ways (SGLang's json_schema, regex and ebnf, vLLM's structured_outputs and guided_*, OpenAI's
response_format); all of them become one GrammarSpec. Here its size and nesting are checked. Whether it can be
followed is checked where it is compiled, before the request is queued."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.integers import is_integer

MAX_GRAMMAR_CHARS = 1 << 18  # of a schema as compact JSON, of a regular expression, of a grammar
MAX_GRAMMAR_DEPTH = 48  # nested objects and lists of a schema, open brackets of a regular expression or grammar
MAX_CHOICES_TEXT = 4096  # of a list of choices
MAX_ALLOWED_IDS, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 32_768, 256, 256
JSON, REGEX, GRAMMAR, CHOICE, TOKENS = "json", "regex", "grammar", "choice", "tokens"
KINDS = (JSON, REGEX, GRAMMAR, CHOICE, "json_object")
ANY_OBJECT = '{"type":"object"}'
# Options of a schema that has none of its own: at most 32 characters of whitespace in a place. Greedy small models fill
# their whole answer with it otherwise.
SCHEMA_OPTIONS = {"whitespace_pattern": "[ \\n\\r\\t]{1,32}"}
# Keys of vLLM's structured_outputs that say how a server makes its masks; they have no effect here.
_IGNORED_KEYS = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties"})
_UNSUPPORTED_KEYS = ("whitespace_pattern", "structural_tag")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`kind`: "json" (a JSON Schema), "regex" (the syntax of Rust's regex library), "grammar" (Lark or GBNF), "choice"
    (a JSON list of texts), "tokens" (a JSON object: ids that alone may follow, words that may not). `text`: its source.
    `param`: the request's name for it, for errors. `parts`: grammars that it was made of, by what the request calls
    them; where it cannot be followed, the error names the first of them that cannot."""

    kind: str
    text: str
    param: str = dataclasses.field(default="structured_outputs", compare=False)
    parts: tuple[tuple[str, "GrammarSpec"], ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in (JSON, REGEX, GRAMMAR, CHOICE, TOKENS):
            raise InvalidRequestError(
                f"{PARAM} has the kind {short_repr(self.kind)}; known are {JSON}, {REGEX}, {GRAMMAR}, {CHOICE}",
                param=self.param,
            )
        if not self.text:
            _refuse(self.param, "is empty; give a schema, or leave it out")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            text = f"has {len(self.text)} characters, above the limit of {MAX_GRAMMAR_CHARS}; send a smaller one"
            _refuse(self.param, text, code="grammar_too_large")
        if self.kind in (REGEX, GRAMMAR) and _nesting(self.text, self.kind) > MAX_GRAMMAR_DEPTH:
            _refuse(self.param, f"nests deeper than {MAX_GRAMMAR_DEPTH} brackets; flatten it", code="grammar_too_deep")

    @staticmethod
    def json_schema(schema: object, *, param: str = "json_schema") -> "GrammarSpec":
        """The form of a JSON Schema: an object, True, or the JSON text of one. Raises InvalidRequestError."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                brief = "it nests too deep" if isinstance(error, RecursionError) else str(error)
                _refuse(param, f"is no JSON ({brief}); send a JSON Schema, as an object or as its text")
        if not isinstance(schema, Mapping | bool):
            _refuse(param, f"is {short_repr(schema)}; send a JSON Schema: an object, or its text")
        if _depth(schema) > MAX_GRAMMAR_DEPTH:
            _refuse(param, f"nests deeper than {MAX_GRAMMAR_DEPTH} levels; flatten it", code="grammar_too_deep")
        try:
            text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError) as error:
            _refuse(param, f"holds what JSON cannot express ({error}); send a JSON Schema")
        return GrammarSpec(JSON, text, param)

    @staticmethod
    def json_object(*, param: str = "response_format") -> "GrammarSpec":
        """The form of any JSON object."""
        return GrammarSpec(JSON, ANY_OBJECT, param)

    @staticmethod
    def regex(pattern: object, *, param: str = "regex") -> "GrammarSpec":
        """The form of a regular expression, which the whole output matches. Raises InvalidRequestError."""
        return GrammarSpec(REGEX, _text(pattern, param, "a regular expression"), param)

    @staticmethod
    def grammar(source: object, *, param: str = "ebnf") -> "GrammarSpec":
        """The form of a grammar in Lark's syntax or in GBNF (EBNF with `::=`). Raises InvalidRequestError."""
        return GrammarSpec(GRAMMAR, _text(source, param, "a grammar in GBNF or Lark"), param)

    @staticmethod
    def choice(texts: object, *, param: str = "guided_choice") -> "GrammarSpec":
        """The form whose output is one of these texts. Raises InvalidRequestError."""
        items: Sequence[object] = texts if isinstance(texts, list | tuple) else ()
        wrong = _wrong_item(items, lambda text: not (_is_text(text) and text))
        if not 1 <= len(items) <= MAX_CHOICES_TEXT or wrong:
            text = (
                f"{wrong or f'is {short_repr(texts)}'}; send a list of 1 to {MAX_CHOICES_TEXT} texts that are not empty"
            )
            _refuse(param, text)
        return GrammarSpec(CHOICE, json.dumps(list(items), ensure_ascii=False), param)

    @staticmethod
    def tokens(allowed_token_ids: object, bad_words: object) -> "GrammarSpec | None":
        """The rules of ids that alone may follow and of texts that may not; None without either. Raises
        InvalidRequestError."""
        ids: Sequence[Any] = allowed_token_ids if isinstance(allowed_token_ids, list | tuple) else ()
        words: Sequence[Any] = bad_words if isinstance(bad_words, list | tuple) else ()
        wrong = _wrong_item(ids, lambda token: not is_integer(token) or token < 0)
        if (allowed_token_ids and not ids) or len(ids) > MAX_ALLOWED_IDS or wrong:
            text = f"{wrong or f'is {short_repr(allowed_token_ids)}'}; send a list of 1 to {MAX_ALLOWED_IDS} token ids"
            _refuse("allowed_token_ids", text, code="invalid_request")
        wrong = _wrong_item(words, lambda word: not (_is_text(word) and 1 <= len(word) <= MAX_BAD_WORD_CHARS))
        if (bad_words and not words) or len(words) > MAX_BAD_WORDS or wrong:
            size = f"{MAX_BAD_WORDS} texts of 1..{MAX_BAD_WORD_CHARS} characters of valid Unicode"
            text = f"{wrong or f'is {short_repr(bad_words)}'}; send at most {size}"
            _refuse("bad_words", text, code="invalid_request")
        if not ids and not words:
            return None
        fields = {"allowed_token_ids": [int(token) for token in ids], "bad_words": list(words)}
        text = json.dumps(fields, ensure_ascii=False)
        return GrammarSpec(TOKENS, text, "allowed_token_ids" if ids else "bad_words")

    @staticmethod
    def parse(value: object, *, param: str = "structured_outputs") -> "GrammarSpec | None":
        """Read vLLM's `structured_outputs`: a mapping with exactly one of json, regex, choice, grammar, json_object; or
        a GrammarSpec. None where nothing is asked for. Raises InvalidRequestError."""
        if value is None or isinstance(value, GrammarSpec):
            return value
        if not isinstance(value, Mapping):
            _refuse(param, f"is {short_repr(value)}; send an object with one of {', '.join(KINDS)}")
        forms: dict[str, object] = {}
        for key, own in cast("Mapping[object, object]", value).items():
            if own is None or own is False or key in _IGNORED_KEYS or (isinstance(own, str) and not own):
                continue
            if key in _UNSUPPORTED_KEYS:
                _refuse(f"{param}.{key}", "is not supported; leave it out", code="unsupported_parameter")
            if key not in KINDS:
                _refuse(param, f"holds {short_repr(key)}; {suggestion(key, KINDS)}", code="unknown_field")
            forms[str(key)] = own
        if not forms:
            return None
        if len(forms) > 1:
            _refuse(param, f"holds {' and '.join(forms)}; send one of them", code="conflicting_parameters")
        ((kind, own),) = forms.items()
        at = f"{param}.{kind}"
        if kind == "json_object":
            if own is not True:
                _refuse(at, f"is {short_repr(own)}; send true, or leave it out")
            return GrammarSpec.json_object(param=at)
        make: Any = {
            JSON: GrammarSpec.json_schema,
            REGEX: GrammarSpec.regex,
            GRAMMAR: GrammarSpec.grammar,
            CHOICE: GrammarSpec.choice,
        }[kind]
        return make(own, param=at)

    @staticmethod
    def of_response_format(value: object, *, param: str = "response_format") -> "GrammarSpec | None":
        """Read OpenAI's `response_format`; None for {"type": "text"}. Raises InvalidRequestError."""
        if value is None:
            return None
        fields = cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}
        kind = fields.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return GrammarSpec.json_object(param=param)
        if kind != "json_schema":
            _refuse(param, f"has the type {short_repr(kind)}; send text, json_object or json_schema")
        named = fields.get("json_schema")
        schema = cast("Mapping[str, object]", named).get("schema") if isinstance(named, Mapping) else None
        if schema is None:
            text = 'lacks json_schema.schema; send {"type": "json_schema", "json_schema": {"name": .., "schema": ..}}'
            _refuse(param, text)
        return GrammarSpec.json_schema(schema, param=param)


def _refuse(param: str, text: str, *, code: str = "invalid_grammar") -> NoReturn:
    raise InvalidRequestError(f"{PARAM} {text}", param=param, code=code)


def _is_text(value: object) -> bool:
    """Whether this is text that UTF-8 can hold: no half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong_item(items: Sequence[Any], is_wrong: Callable[[Any], bool]) -> str:
    """The first item that is wrong, in words; empty where none is."""
    wrong = next(((index, item) for index, item in enumerate(items) if is_wrong(item)), None)
    return "" if wrong is None else f"has {short_repr(wrong[1])} as item {wrong[0]}"


def _text(value: object, param: str, what: str) -> str:
    if not isinstance(value, str) or not value:
        _refuse(param, f"is {short_repr(value)}; send {what} as text")
    return value


def _depth(value: object) -> int:
    """Nested mappings and lists, one more than MAX_GRAMMAR_DEPTH where there are more."""
    depth, level = 0, [value]
    while depth <= MAX_GRAMMAR_DEPTH:
        inner = [item for item in level if isinstance(item, Mapping | list | tuple)]
        if not inner:
            return depth
        depth += 1
        level = [child for item in inner for child in _children(item)]
    return depth


def _children(item: object) -> list[object]:
    return list(cast("Any", item).values()) if isinstance(item, Mapping) else list(cast("Sequence[object]", item))


def _nesting(text: str, kind: str) -> int:
    """The most brackets that are open at once. Escaped ones and those in the quotes of a grammar do not count."""
    text = re.sub(r"\\.", "", text if kind == REGEX else _QUOTED.sub("", text), flags=re.DOTALL)
    open_now = most = 0
    for character in text:
        if character in "([{":
            open_now += 1
            most = max(most, open_now)
        elif character in ")]}":
            open_now = max(0, open_now - 1)
    return most
