"""SamplingParams: the sampling values of one request, and their limits.

An unset field is None: each surface has its own default, so unset and set differ until `resolve`. A value is
checked when the object is made. What depends on the model (ids in the vocabulary, tokens that fit) is checked by the
engine's input processor."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar, cast

from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import PARAM, InvalidRequestError, field_slot, raise_as
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.core.integers import is_integer

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TOP_LOGPROBS = 20  # of SGLang's top_logprobs_num, and of the programs
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_TEMPERATURE = 1e6
MAX_REPETITION_PENALTY = 100.0  # and 1/100 below: both are far inside float32
MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1
ROUTED_EXPERTS_FORMATS = ("int32", "npy", "packed", "list", "ref")
ROUTED_EXPERTS_LAYERS = ("all", "moe")

ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "routed_experts_prompt_start": "routed_experts_start_len",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
}
# Ways to ask for structured output: at most one of them in a request.
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "guided_choice", "structured_outputs")
_TOKEN_FIELDS = ("allowed_token_ids", "bad_words")  # which tokens may follow, whatever the form
_MAX_PARAM_CHARS = 60
_MAX_NAMED_KEYS = 8  # of an error
_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """Sampling values, all set. 0 and neutral values mean off; logprobs None means not requested."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    detokenize: bool
    speculative: bool = True
    visible_special_ids: frozenset[int] = frozenset()  # in the text although skip_special_tokens is set
    grammar: GrammarSpec | None = None  # the form of the output

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p can drop a token."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_penalized(self) -> bool:
        """Whether the tokens so far change the scores."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def seed_words(self) -> tuple[int, int]:
        """The high and the low 32 bits of the seed, as the device takes it."""
        return self.seed >> 32, self.seed & 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling values; None is unset. Raises `InvalidRequestError` naming the field."""

    n: int | None = None
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1 is off
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    speculative: bool | None = None  # False: nothing is drafted for this request
    json_schema: str | Mapping[str, object] | bool | None = None  # the output is JSON of this schema
    regex: str | None = None  # the whole output matches it
    ebnf: str | None = None  # a grammar, in GBNF or Lark
    guided_choice: Sequence[str] | None = None  # the output is one of them
    structured_outputs: Mapping[str, object] | GrammarSpec | None = None  # {json, regex, choice, grammar, json_object}
    allowed_token_ids: Sequence[int] | None = None  # no other token follows
    bad_words: Sequence[str] | None = None  # texts that do not follow
    return_routed_experts: bool | None = None
    return_routed_experts_weights: bool | None = None
    routed_experts_start_len: int | None = None
    routed_experts_format: str | None = None
    routed_experts_layers: str | None = None
    routed_experts_include_last: bool | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_float(
            "temperature",
            self.temperature,
            0.0,
            MAX_TEMPERATURE,
            fix="temperature must be non-negative: 0 is greedy, 1 is the model's own distribution",
        )
        _check_float(
            "top_p",
            self.top_p,
            0.0,
            1.0,
            above_low=True,
            fix="top_p must be in (0, 1]: 1 is off; for greedy sampling set temperature to 0",
        )
        _check_int("top_k", self.top_k, -1, MAX_INT32, fix="0 or -1 is off")
        _check_float("min_p", self.min_p, 0.0, 1.0, fix="0 is off")
        _check_int("seed", self.seed, 0, MAX_SEED, fix="leave it out for a seed of the engine's choosing")
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        _check_int(
            "max_tokens",
            self.max_tokens,
            1,
            MAX_INT32,
            fix="a prompt alone is computed by score (engine.score, POST /v1/score)",
        )
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT32)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, fix="0 gives the chosen token only")
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, fix="0 gives the prompt's own tokens only")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0, fix="0 is off")
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0, fix="0 is off")
        low = 1.0 / MAX_REPETITION_PENALTY
        _check_float("repetition_penalty", self.repetition_penalty, low, MAX_REPETITION_PENALTY, fix="1 is off")
        _check_logit_bias(self.logit_bias)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("skip_special_tokens", self.skip_special_tokens)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_bool("detokenize", self.detokenize)
        _check_bool("speculative", self.speculative)
        _check_bool("return_routed_experts", self.return_routed_experts)
        _check_bool("return_routed_experts_weights", self.return_routed_experts_weights)
        _check_bool("routed_experts_include_last", self.routed_experts_include_last)
        _check_int("routed_experts_start_len", self.routed_experts_start_len, 0, MAX_INT32, fix="0 gives every row")
        _check_word("routed_experts_format", self.routed_experts_format, ROUTED_EXPERTS_FORMATS)
        _check_word("routed_experts_layers", self.routed_experts_layers, ROUTED_EXPERTS_LAYERS)
        self.grammar_spec()
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            largest = field_slot("max_tokens")
            expected, fix = f"at most {largest}, {self.max_tokens}", f"lower {PARAM} or raise {largest}"
            _refuse("min_tokens", self.min_tokens, expected, fix)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "SamplingParams":
        """Build from a dict with our names or SGLang's; None is unset. Two spellings of one field must agree."""
        if not isinstance(values, Mapping):
            _refuse("sampling_params", values, "a dict of sampling parameters", "pass SamplingParams or a dict")
        named: dict[str, object] = {}
        spelled: dict[str, str] = {}  # as `sent_names`
        for key, value in values.items():
            field = field_name(key)
            if value is None:
                continue
            if field in named and (type(named[field]) is not type(value) or named[field] != value):
                fix = "two names of one parameter must agree: leave one of them out"
                _refuse(key, value, f"the value of {spelled[field]}, {short_repr(named[field])}", fix)
            named[field], spelled[field] = value, key
        if "logit_bias" in named:
            named["logit_bias"] = _with_int_ids(named["logit_bias"])
        try:
            return cls(**named)  # pyright: ignore[reportArgumentType]  # __post_init__ checks every type
        except InvalidRequestError as error:
            raise_as(error, error.with_names(spelled))

    def grammar_spec(self) -> GrammarSpec | None:
        """The form of the output that is asked for, or which tokens it may have; None: any. Raises InvalidRequestError
        for one that is malformed, and where several are given."""
        rules = GrammarSpec.tokens(self.allowed_token_ids, self.bad_words)
        forms = [] if rules is None else [rules.param]
        forms += [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(forms) > 1:
            text = f"{PARAM} and {field_slot(forms[0])} both ask for a form of the output; send one of them"
            form = getattr(self, forms[1])  # a server has given it the name that the request has for it
            param = form.param if isinstance(form, GrammarSpec) else forms[1]
            raise InvalidRequestError(text, param=param, code="conflicting_parameters")
        if rules is not None:
            return rules
        if self.json_schema is not None:
            return GrammarSpec.json_schema(self.json_schema)
        if self.regex is not None:
            return GrammarSpec.regex(self.regex)
        if self.ebnf is not None:
            return GrammarSpec.grammar(self.ebnf)
        if self.guided_choice is not None:
            return GrammarSpec.choice(self.guided_choice)
        return GrammarSpec.parse(self.structured_outputs)

    @property
    def has_form(self) -> bool:
        """Whether the output has a form: whether all of it is content."""
        return any(getattr(self, name) is not None for name in GRAMMAR_FIELDS)

    def resolve(self, *, default_max_tokens: int = 128, default_seed: int = 0) -> ResolvedSampling:
        """Replace unset fields by defaults. The surface owns the length, the engine the seed of a request without
        one."""
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return ResolvedSampling(
            n=int(_either(self.n, 1)),
            temperature=float(_either(self.temperature, 1.0)),
            top_p=float(_either(self.top_p, 1.0)),
            top_k=max(0, int(_either(self.top_k, 0))),
            min_p=float(_either(self.min_p, 0.0)),
            seed=int(_either(self.seed, default_seed)),
            stop=stop,
            stop_token_ids=tuple(int(token) for token in self.stop_token_ids or ()),
            max_tokens=int(_either(self.max_tokens, default_max_tokens)),
            min_tokens=int(_either(self.min_tokens, 0)),
            ignore_eos=_either(self.ignore_eos, False),
            logprobs=None if self.logprobs is None else int(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else int(self.prompt_logprobs),
            presence_penalty=float(_either(self.presence_penalty, 0.0)),
            frequency_penalty=float(_either(self.frequency_penalty, 0.0)),
            repetition_penalty=float(_either(self.repetition_penalty, 1.0)),
            logit_bias=tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items()),
            skip_special_tokens=_either(self.skip_special_tokens, True),
            include_stop_str_in_output=_either(self.include_stop_str_in_output, False),
            detokenize=_either(self.detokenize, True),
            speculative=_either(self.speculative, True),
            grammar=self.grammar_spec(),
        )


def may_compile(params: object, token_ids_logprob: object) -> bool:
    """Whether a request may compile before it is queued: a grammar, a sampler with a mask, or the program of given ids.
    Such a call belongs in a thread. Malformed parameters do not: they are refused where they are read."""
    return token_ids_logprob is not None or asks_for_grammar(params)


def asks_for_grammar(params: object) -> bool:
    """Whether sampling parameters (a SamplingParams, a mapping, or a sequence of them) ask for a form of the output."""
    if isinstance(params, SamplingParams):
        return any(getattr(params, name) is not None for name in (*GRAMMAR_FIELDS, *_TOKEN_FIELDS))
    if isinstance(params, Mapping):
        names = (
            *GRAMMAR_FIELDS,
            *_TOKEN_FIELDS,
            *(alias for alias, field in ALIASES.items() if field in GRAMMAR_FIELDS),
        )
        return any(params.get(name) is not None for name in names)
    return isinstance(params, list | tuple) and any(map(asks_for_grammar, params))


FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def _refuse(param: str, value: object, expected: str, fix: str = "") -> NoReturn:
    text = f"{PARAM} is {short_repr(value)}, but must be {expected}" + (f"; {fix}" if fix else "")
    codes = {"start_len": "invalid_start", "format": "unknown_format", "layers": "unknown_layers"}
    raise InvalidRequestError(text, param=param, code=codes.get(param.removeprefix("routed_experts_")))


def _either(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _check_int(param: str, value: object, low: int, high: int, fix: str = "") -> None:
    if value is not None and not _is_int(value, low, high):
        _refuse(param, value, f"an integer in {low}..{high}", fix)


def _is_int(value: object, low: int, high: int) -> bool:
    return is_integer(value) and low <= int(value) <= high


def _check_float(param: str, value: object, low: float, high: float, *, above_low: bool = False, fix: str = "") -> None:
    if value is None:
        return
    fits = (
        isinstance(value, numbers.Real) and not isinstance(value, bool) and not value < low and value <= high
    )  # NaN does not
    if not fits or (above_low and value == low):
        _refuse(param, value, f"a finite number in {'(' if above_low else '['}{low:g}, {high:g}]", fix)


def _check_bool(param: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        _refuse(param, value, "true or false")


def _check_word(param: str, value: object, words: Sequence[str]) -> None:
    if value is not None and not (isinstance(value, str) and value in words):
        _refuse(param, value, f"one of {', '.join(words)}")


def _check_stop(value: object) -> None:
    if value is None:
        return
    texts: object = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        _refuse("stop", value, "a string or a list of strings")
    if len(texts) > MAX_STOP_STRINGS:
        _refuse(
            "stop", value, f"at most {MAX_STOP_STRINGS} strings", "keep the ones that matter, or use stop_token_ids"
        )
    for index, text in enumerate(texts):
        if not (isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS):
            _refuse("stop", text, f"a string of 1..{MAX_STOP_CHARS} characters (item {index})")


def _check_stop_token_ids(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or len(value) > MAX_STOP_TOKEN_IDS:
        _refuse("stop_token_ids", value, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    for token in value:
        if not _is_int(token, 0, MAX_INT32):
            _refuse("stop_token_ids", token, f"an integer in 0..{MAX_INT32}")


def _check_logit_bias(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS_ENTRIES:
        _refuse("logit_bias", value, f"a dict of at most {MAX_LOGIT_BIAS_ENTRIES} token ids and their biases")
    wrong = [token for token in value if not _is_int(token, 0, MAX_INT32)]
    if wrong:
        text = ", ".join(map(short_repr, wrong[:_MAX_NAMED_KEYS])) + (", ..." if len(wrong) > _MAX_NAMED_KEYS else "")
        text = f"{PARAM} is a dict with the keys {text}, but keys must be token ids, integers in 0..{MAX_INT32}"
        raise InvalidRequestError(text, param="logit_bias")
    for bias in value.values():
        _check_float("logit_bias", "null" if bias is None else bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, fix="0 is off")


def _with_int_ids(value: object) -> object:
    """Turn JSON's string keys into token ids; other keys are left for the check to refuse."""
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS_ENTRIES:
        return value

    def token_id(key: object) -> object:
        return int(key) if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdecimal() else key

    biases = {token_id(key): bias for key, bias in value.items()}
    if len(biases) < len(value):
        _refuse("logit_bias", value, "a dict that names each token id once", '"7" and 7 are the same id')
    return biases


def clamp_biases(biases: Mapping[_K, float]) -> dict[_K, float]:
    """Biases within their limits, as vLLM clamps those of a request. What is no number is left for the check."""
    return {
        token: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
        if isinstance(bias, int | float) and bias == bias
        else bias
        for token, bias in biases.items()
    }


def sent_names(params: object) -> dict[str, str]:
    """The fields of a mapping of known sampling parameters that have a value, and the name that each was sent under."""
    values = cast("Mapping[str, object]", params) if isinstance(params, Mapping) else {}
    return {ALIASES.get(key, key): key for key, value in values.items() if value is not None}


def field_name(key: object) -> str:
    """The field that a key names. Raises InvalidRequestError with the nearest name."""
    if isinstance(key, str):
        if key in FIELDS:
            return key
        if key in ALIASES:
            return ALIASES[key]
    name = key[:_MAX_PARAM_CHARS] if isinstance(key, str) else None
    fix = suggestion(key, [*FIELDS, *ALIASES], otherwise=f"known are {', '.join(FIELDS)}")
    raise InvalidRequestError(f"{short_repr(key)} is no sampling parameter; {fix}", param=name, code="unknown_field")
