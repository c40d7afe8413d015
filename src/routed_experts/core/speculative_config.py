"""SpeculativeConfig: which drafter an engine has, and how long its drafts are.

The fields are SGLang's flags without `speculative_`; `from_vllm` reads vLLM's `speculative_config`. Checked once, when
it is made; what depends on the model is checked when the engine is built."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import ConfigError
from routed_experts.core.integers import to_int, with_python_integers

ALGORITHMS = ("NGRAM", "SUFFIX", "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
SCOPES = ("request", "namespace")
DEFAULT_DRAFT_TOKENS = 8  # the last known token and 7 drafts
MAX_DRAFT_TOKENS = 32
MAX_WINDOW = 64  # tokens
MIN_STORE_BYTES, DEFAULT_STORE_BYTES = 1 << 20, 256 << 20
DEFAULT_STEPS, MAX_STEPS = 3, 15  # drafts of a model
_OF_TEXT = ("NGRAM", "SUFFIX")
_SHOWN_LAYERS = 8  # of a wrong list, in its error
_STANDALONE = ("STANDALONE", "DRAFT_MODEL")  # SGLang's name and vLLM's
_OF_FOLDER = ("EAGLE3", *_STANDALONE)  # need a folder of their own; EAGLE may have one
_OTHER_HEADS = ("MEDUSA", "P-EAGLE", "P_EAGLE", "DFLASH", "DSPARK", "LSTM", "MLP_SPECULATOR")
_SGLANG_DEFAULTS = {"ngram_max_trie_depth": 18, "ngram_branch_length": 18, "ngram_capacity": 10_000_000}
_VLLM_WINDOWS = ("prompt_lookup_min", "prompt_lookup_max")
_VLLM_SUFFIX = {
    "suffix_decoding_max_tree_depth": "suffix_max_tree_depth",
    "suffix_decoding_max_spec_factor": "suffix_max_spec_factor",
    "suffix_decoding_min_token_prob": "suffix_min_token_prob",
    "suffix_decoding_max_cached_requests": "suffix_max_cached_requests",
}
_KEYS_OF_FIELDS: Mapping[str, tuple[str, ...]] = {  # fields that are read from vLLM's dict
    "algorithm": ("method",),
    "draft_model_path": ("model",),
    "num_draft_tokens": ("num_speculative_tokens",),
    "ngram_min_match_window_size": _VLLM_WINDOWS,
    "ngram_max_match_window_size": _VLLM_WINDOWS[::-1],
    **{ours: (key,) for key, ours in _VLLM_SUFFIX.items()},
}
_VLLM_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    *_VLLM_WINDOWS,
    *_VLLM_SUFFIX,
    "draft_tensor_parallel_size",
    "rejection_sample_method",
)


@with_python_integers
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: k = num_draft_tokens - 1 drafts follow the last known token of a request in a step, as one
    chain. Tokens, logprobs and routed experts do not depend on any of these values.

    Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    # NGRAM: what followed the longest repeated suffix of the request's own tokens; SUFFIX: what followed it most often;
    # any case
    algorithm: str = "NGRAM"
    # tokens of a request in a verify step: the last known one and its drafts, 2 to 32; None: num_steps + 1, or 8
    num_draft_tokens: int | None = None
    # drafts of a request in a step, of a model at most 15; None: num_draft_tokens - 1, and 3 of a model
    num_steps: int | None = None
    # continuations of a token: drafts are chains
    eagle_topk: int = 1
    # the folder of an EAGLE or EAGLE3 head, or of a STANDALONE model; the others have none
    draft_model_path: str | os.PathLike[str] | None = None
    # of EAGLE3: the layers of the model whose outputs the head reads, counted from 0; None: those that its config names
    eagle_layers: tuple[int, ...] | None = None
    # of NGRAM: tokens of the shortest and the longest suffix that is looked up
    ngram_min_match_window_size: int = 1
    ngram_max_match_window_size: int = 12
    # breadth of a tree of drafts: 1
    ngram_min_bfs_breadth: int = 1
    ngram_max_bfs_breadth: int = 1
    # which of equally long suffixes is continued: the latest, BFS; PROB, the most frequent, is refused
    ngram_match_type: str = "BFS"
    # of SGLang's trie: tokens of a path, by either name, at least k; and entries. They change nothing here: the index
    # has whole requests, those that run
    ngram_max_trie_depth: int | None = None
    ngram_branch_length: int | None = None
    ngram_capacity: int | None = None
    # of SUFFIX: tokens of the longest suffix that is looked up, drafts for each of its matching tokens, and the least
    # estimated probability of a draft
    suffix_max_tree_depth: int = 24
    suffix_max_spec_factor: float = 1.0
    suffix_min_token_prob: float = 0.1
    # answers that are remembered, at most, beside store_bytes; None: any number
    suffix_max_cached_requests: int | None = None
    # of NGRAM and SUFFIX: whose text a request's drafts may hold: its own and that of the other choices of its prompt
    # ("request"), or also remembered answers to requests of its extra_key ("namespace")
    scope: str = "request"
    # of NGRAM and SUFFIX: answers of ended requests are remembered, as drafts of later requests with the same prompt;
    # SUFFIX: with any
    remember: bool = False
    # of NGRAM and SUFFIX: host memory for remembered answers
    store_bytes: int = DEFAULT_STORE_BYTES
    # a draft with probability above these was accepted whatever the model chose; 1.0: never
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    # drafts are shorter, or none, where longer ones do not pay; without it they are as long as they can be
    adaptive: bool = True

    def __post_init__(self) -> None:
        """Check every field once."""
        self._check_algorithm()
        most = MAX_STEPS if self.has_draft_model else MAX_DRAFT_TOKENS - 1
        queries = DEFAULT_DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens
        to_int("speculative_num_draft_tokens", queries, 2, most + 1)
        if self.num_steps is not None:
            to_int("speculative_num_steps", self.num_steps, 1, most)
            if self.num_draft_tokens is not None and self.num_draft_tokens != self.num_steps + 1:
                raise ConfigError(
                    f"speculative_num_draft_tokens={self.num_draft_tokens} and speculative_num_steps={self.num_steps}: "
                    f"a chain of {self.num_steps} drafts feeds {self.num_steps + 1} tokens; give one of the two"
                )
        for name in ("eagle_topk", "ngram_min_bfs_breadth", "ngram_max_bfs_breadth"):
            if type(value := _value(self, name)) is not int or value != 1:
                text = f"speculative_{name}={short_repr(value)}; drafts are chains, not trees"
                raise ConfigError(f"{text}: give 1, or leave it out")
        for name in ("accept_threshold_single", "accept_threshold_acc"):
            if not _is_number(value := _value(self, name)) or value != 1.0:
                raise ConfigError(
                    f"speculative_{name}={short_repr(value)}; below 1.0 tokens are accepted that the model did not "
                    "sample: give 1.0, or leave it out"
                )
        self._check_draft_model()
        self._check_ngram()
        self._check_suffix()
        self._check_store()
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_adaptive={short_repr(self.adaptive)} must be True or False")

    @staticmethod
    def create(
        config: "SpeculativeConfig | None",
        fields: Mapping[str, Any],
        vllm: "Mapping[str, object] | str | None" = None,
        *,
        tp_size: int = 1,
    ) -> "SpeculativeConfig | None":
        """Build from one of three: a config, fields by SGLang's names (None: not given), or vLLM's speculative_config;
        None where nothing is given. Raises ConfigError for two of them at once, for fields without an algorithm, and
        for another type."""
        if config is not None and not isinstance(config, SpeculativeConfig):
            text = f"speculative={short_repr(config)} must be a SpeculativeConfig"
            raise ConfigError(f"{text}; give SpeculativeConfig(algorithm='NGRAM'), or speculative_algorithm='NGRAM'")
        values = {name: value for name, value in fields.items() if value is not None}
        names = ", ".join(f"speculative_{name}" for name in values)
        ways = [
            *(["speculative"] if config is not None else []),
            *([names] if values else []),
            *(["speculative_config"] if vllm is not None else []),
        ]
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} say the same in two ways; give one of them")
        if values and "algorithm" not in values:
            raise ConfigError(f"{names} without speculative_algorithm; give speculative_algorithm='NGRAM', too")
        if values:
            return SpeculativeConfig(**values)
        return config if vllm is None else SpeculativeConfig.from_vllm(vllm, tp_size=tp_size)

    @staticmethod
    def from_vllm(config: "Mapping[str, object] | str", *, tp_size: int = 1) -> "SpeculativeConfig":
        """Build from vLLM's `speculative_config`, a dict or its JSON. Method ngram has the windows prompt_lookup_min
        and prompt_lookup_max: one alone is both, as in vLLM; without them they are those of SpeculativeConfig. Method
        suffix with suffix_decoding_max_cached_requests above 0 remembers answers, for requests of the same extra_key.
        Raises ConfigError, for an unknown key with the nearest name."""
        values = _parse_json(config) if isinstance(config, str) else config
        if not isinstance(values, Mapping):
            raise ConfigError(f"speculative_config={short_repr(config)} must be a dict, or the JSON text of one")
        for key in values:
            if key not in _VLLM_KEYS:
                raise ConfigError(
                    f"{short_repr(key)} is no key of speculative_config; {suggestion(str(key), _VLLM_KEYS)}"
                )
        options = {key: value for key, value in values.items() if value is not None}
        if not _is_same(options.get("draft_tensor_parallel_size", tp_size), tp_size):
            text = f"draft_tensor_parallel_size={short_repr(options['draft_tensor_parallel_size'])}"
            text = f"{text} is not tp_size={tp_size}"
            raise ConfigError(f"{text}; leave it out")
        if not _is_same(options.get("rejection_sample_method", "standard"), "standard"):
            text = f"rejection_sample_method={short_repr(options['rejection_sample_method'])} changes what is sampled"
            raise ConfigError(f"{text}; give 'standard', or leave it out")
        model = options.get("model")
        is_ngram = isinstance(model, str) and model in ("ngram", "[ngram]")
        method = options.get("method", "ngram" if is_ngram else None)
        if method is None:
            raise ConfigError("speculative_config has no method; give {'method': 'ngram', 'num_speculative_tokens': 3}")
        fields: dict[str, Any] = {"algorithm": method.upper() if isinstance(method, str) else method}
        if model is not None and not is_ngram:
            fields["draft_model_path"] = model
        if "num_speculative_tokens" in options:
            most = MAX_DRAFT_TOKENS - 1 if str(method).upper() in _OF_TEXT else MAX_STEPS
            fields["num_draft_tokens"] = _int_of(options, "num_speculative_tokens", most) + 1
        fields |= _vllm_windows(options)
        suffix: dict[str, Any] = {ours: options[key] for key, ours in _VLLM_SUFFIX.items() if key in options}
        if not _is_same(suffix.get("suffix_max_cached_requests", 0), 0):
            fields |= {"scope": "namespace", "remember": True}
        try:
            return SpeculativeConfig(**fields, **suffix)
        except ConfigError as error:
            raise _vllm_error(error, options) from error

    @property
    def num_drafts(self) -> int:
        """k: drafts of a request in a step, at most."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens - 1
        default = DEFAULT_STEPS if self.has_draft_model else DEFAULT_DRAFT_TOKENS - 1
        return default if self.num_steps is None else self.num_steps

    @property
    def has_draft_model(self) -> bool:
        """Whether a model drafts: layers of the model itself, a head, or another model."""
        return isinstance(self.algorithm, str) and self.algorithm.upper() not in _OF_TEXT

    @property
    def is_standalone(self) -> bool:
        """Whether another model of the same vocabulary drafts."""
        return self.algorithm.upper() in _STANDALONE

    @property
    def min_window(self) -> int:
        """Tokens of the shortest suffix that is looked up."""
        return 1 if self.counts_continuations else self.ngram_min_match_window_size

    @property
    def max_window(self) -> int:
        """Tokens of the longest suffix that is looked up."""
        return self.suffix_max_tree_depth if self.counts_continuations else self.ngram_max_match_window_size

    @property
    def counts_continuations(self) -> bool:
        """Whether the most frequent continuation is drafted, and not the latest."""
        return self.algorithm.upper() == "SUFFIX"

    @property
    def shares_answers(self) -> bool:
        """Whether drafts may hold remembered answers."""
        return self.scope == "namespace"

    def _check_algorithm(self) -> None:
        name = self.algorithm.upper() if isinstance(self.algorithm, str) else ""
        text = f"speculative_algorithm={short_repr(self.algorithm)}"
        if name in ALGORITHMS or name in _STANDALONE or name == "MTP" or name.endswith("_MTP"):
            return
        if name in _OTHER_HEADS:
            raise ConfigError(f"{text}: heads of this kind are not read; choose NGRAM")
        raise ConfigError(f"{text} is unknown; choose one of {', '.join(ALGORITHMS)}")

    def _check_draft_model(self) -> None:
        name, path = self.algorithm.upper(), self.draft_model_path
        text = f"speculative_draft_model_path={short_repr(str(path) if isinstance(path, os.PathLike) else path)}"
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ConfigError(f"{text} must be the path of a folder")
        if path is not None and name not in ("EAGLE", *_OF_FOLDER):
            kind = "drafts with layers of the model itself" if self.has_draft_model else "has no draft model"
            raise ConfigError(f"{text}, but {self.algorithm} {kind}; leave it out")
        if path is None and name in _OF_FOLDER:
            what = "a smaller model of the same vocabulary" if self.is_standalone else "its head"
            raise ConfigError(f"{text} with speculative_algorithm={self.algorithm!r}; give the folder of {what}")
        layers = self.eagle_layers
        if layers is None:
            return
        if not isinstance(layers, list | tuple):
            text = f"speculative_eagle_layers={short_repr(layers)} must be a list of layers of the model"
            raise ConfigError(f"{text}, counted from 0, such as [1, 23, 45]")
        if name != "EAGLE3":
            text = f"speculative_eagle_layers={short_repr(layers)} is of EAGLE3, and this is {self.algorithm}"
            raise ConfigError(f"{text}; leave it out")
        if not layers or not all(type(layer) is int and layer >= 0 for layer in layers):
            shown = ", ".join(map(short_repr, layers[:_SHOWN_LAYERS]))
            text = f"speculative_eagle_layers=[{shown}] must be layers of the model, counted from 0"
            raise ConfigError(f"{text}, such as 1 23 45")

    def _check_ngram(self) -> None:
        if self.algorithm.upper() != "NGRAM":
            self._refuse_unless_default([name for name in _FIELDS if name.startswith("ngram_")], "NGRAM")
            return
        low, high = "speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"
        least, most = self.ngram_min_match_window_size, self.ngram_max_match_window_size
        to_int(low, least, 1, MAX_WINDOW)
        to_int(high, most, 1, MAX_WINDOW)
        if least > most:
            raise ConfigError(f"{low}={least} is above {high}={most}; lower it")
        if not isinstance(self.ngram_match_type, str) or self.ngram_match_type.upper() != "BFS":
            text = f"speculative_ngram_match_type={short_repr(self.ngram_match_type)}; the latest match is continued"
            raise ConfigError(f"{text}: give BFS, or leave it out")
        for name, least in (
            ("ngram_max_trie_depth", self.num_drafts),
            ("ngram_branch_length", self.num_drafts),
            ("ngram_capacity", 1),
        ):
            value = _value(self, name)
            if value is not None:
                reason = "" if least == 1 else f", because drafts are chains of up to {self.num_drafts} tokens"
                to_int(f"speculative_{name}", value, least, meaning=reason, fix="leave it out if in doubt")

    def _check_suffix(self) -> None:
        to_int("speculative_suffix_max_tree_depth", self.suffix_max_tree_depth, 1, MAX_WINDOW)
        factor, least = self.suffix_max_spec_factor, self.suffix_min_token_prob
        if not _is_number(factor) or not 0 < factor <= MAX_WINDOW:
            text = f"speculative_suffix_max_spec_factor={short_repr(factor)} must be a number above 0"
            raise ConfigError(f"{text}, at most {MAX_WINDOW}: drafts for each matching token")
        if not _is_number(least) or not 0 <= least <= 1:
            text = f"speculative_suffix_min_token_prob={short_repr(least)} must be a number in 0..1"
            raise ConfigError(f"{text}: drafts that seem less probable are left out")
        if self.suffix_max_cached_requests is not None:
            name = "speculative_suffix_max_cached_requests"
            to_int(name, self.suffix_max_cached_requests, 0, fix="leave it out if in doubt")
        if not self.counts_continuations:
            self._refuse_unless_default([name for name in _FIELDS if name.startswith("suffix_")], "SUFFIX")

    def _check_store(self) -> None:
        if self.has_draft_model:
            self._refuse_unless_default(["scope", "remember", "store_bytes"], *_OF_TEXT)
        if not isinstance(self.scope, str) or self.scope not in SCOPES:
            text = f"speculative_scope={short_repr(self.scope)} must be one of {', '.join(SCOPES)}"
            raise ConfigError(f"{text}: whose text the drafts of a request may hold")
        if not isinstance(self.remember, bool):
            raise ConfigError(f"speculative_remember={short_repr(self.remember)} must be True or False")
        if self.remember and not self.shares_answers:
            text = "speculative_remember=True lets a request's drafts hold the answers to others of its extra_key"
            raise ConfigError(f"{text}; allow that with speculative_scope='namespace', or leave it out")
        to_int("speculative_store_bytes", self.store_bytes, MIN_STORE_BYTES, 1 << 50)

    def _refuse_unless_default(self, names: Iterable[str], *algorithms: str) -> None:
        """Raise ConfigError for values that only these algorithms read. A default, ours or SGLang's, is none: command
        lines of SGLang give it with any algorithm."""
        for name in names:
            value, default = _value(self, name), _FIELDS[name]
            own = value.upper() if isinstance(value, str) and name == "ngram_match_type" else value
            if not any(_is_same(own, known) for known in (default, _SGLANG_DEFAULTS.get(name, default))):
                text = f"speculative_{name}={short_repr(value)} is of {' and '.join(algorithms)}, and this is"
                fix = f"leave it out, or choose {' or '.join(algorithms)}"
                raise ConfigError(f"{text} {self.algorithm}; {fix}")


_FIELDS: Mapping[str, object] = {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(value: object, default: object) -> bool:
    """Whether a value of any type is a default. A value of another type, such as an array, is never compared."""
    return (type(value) is type(default) or (_is_number(value) and _is_number(default))) and value == default


def _value(config: SpeculativeConfig, name: str) -> object:
    return getattr(config, name)


def _int_of(values: Mapping[str, object], key: str, high: int) -> int:
    """Return the value of a key, an integer in 1..high. Raises ConfigError."""
    return to_int(key, values[key], 1, high)


def _vllm_windows(options: Mapping[str, object]) -> dict[str, int]:
    """The fields of vLLM's bounds of a suffix; one alone is both. Raises ConfigError."""
    windows = [_int_of(options, key, MAX_WINDOW) for key in _VLLM_WINDOWS if key in options]
    if not windows:
        return {}
    if windows[0] > windows[-1]:
        shortest, longest = _VLLM_WINDOWS
        raise ConfigError(f"{shortest}={windows[0]} is above {longest}={windows[-1]}; lower it")
    return {"ngram_min_match_window_size": windows[0], "ngram_max_match_window_size": windows[-1]}


def _vllm_error(error: ConfigError, options: Mapping[str, object]) -> ConfigError:
    """The error of a field with the key of vLLM's dict that gave its value, or that is missing."""
    field = str(error).removeprefix("speculative_").partition("=")[0]
    keys = _KEYS_OF_FIELDS.get(field, ())
    if not keys:
        return error
    given = next((key for key in keys if key in options), None)
    if given is None:
        return ConfigError(f"speculative_config has no {keys[0]}: {error}")
    return ConfigError(f"{given}={short_repr(options[given])} of speculative_config is refused: {error}")


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"speculative_config={short_repr(text)} is no JSON ({error}); write it as "
            '\'{"method": "ngram", "num_speculative_tokens": 3}\''
        ) from error
