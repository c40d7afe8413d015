"""SpeculativeConfig: which drafter an engine has, and how long its drafts are.

The fields are SGLang's flags without `speculative_`; `from_vllm` reads vLLM's `speculative_config`. Checked once, when
it is made; what depends on the model is checked when the engine is built."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import ConfigError

ALGORITHMS = ("NGRAM",)
DEFAULT_DRAFT_TOKENS = 8  # of NGRAM: the last known token and 7 drafts
MAX_DRAFT_TOKENS = 32
MAX_WINDOW = 64  # tokens
_WITH_MODEL = ("NEXTN", "MTP", "EAGLE", "EAGLE3", "STANDALONE", "DRAFT_MODEL")
_OTHER_HEADS = ("MEDUSA", "P-EAGLE", "P_EAGLE", "DFLASH", "DSPARK", "LSTM", "MLP_SPECULATOR")
_VLLM_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "draft_tensor_parallel_size",
    "rejection_sample_method",
)
_VLLM_WINDOWS = (3, 5)  # vLLM's defaults where one of the two bounds is left out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: k = num_draft_tokens - 1 drafts follow the last known token of a request in a step, as one
    chain. Tokens, logprobs and routed experts do not depend on any of these values.

    Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    # NGRAM: what followed the longest repeated suffix of the request's own tokens; any case
    algorithm: str = "NGRAM"
    # tokens that a request feeds in a verify step: the last known one and its drafts, 2 to 32; None: 8
    num_draft_tokens: int | None = None
    # drafts of a model; NGRAM has none: num_draft_tokens - 1, if it is given
    num_steps: int | None = None
    # continuations of a token: drafts are chains
    eagle_topk: int = 1
    # the folder of a draft model; NGRAM has none
    draft_model_path: str | None = None
    # tokens of the shortest and the longest suffix that is looked up
    ngram_min_match_window_size: int = 1
    ngram_max_match_window_size: int = 12
    # breadth of a tree of drafts: 1
    ngram_min_bfs_breadth: int = 1
    ngram_max_bfs_breadth: int = 1
    # a draft with probability above these was accepted whatever the model chose; 1.0: never
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    # drafts are shorter, or none, where longer ones do not pay; without it they are as long as they can be
    adaptive: bool = True

    def __post_init__(self) -> None:
        """Check every field once."""
        self._check_algorithm()
        queries = DEFAULT_DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens
        _check_int("speculative_num_draft_tokens", queries, 2, MAX_DRAFT_TOKENS)
        if self.num_steps is not None:
            _check_int("speculative_num_steps", self.num_steps, 1, MAX_DRAFT_TOKENS - 1)
            if self.num_draft_tokens is not None and self.num_draft_tokens != self.num_steps + 1:
                raise ConfigError(
                    f"speculative_num_draft_tokens={self.num_draft_tokens} and speculative_num_steps={self.num_steps}: "
                    f"a chain of {self.num_steps} drafts feeds {self.num_steps + 1} tokens; give one of the two"
                )
        for name in ("eagle_topk", "ngram_min_bfs_breadth", "ngram_max_bfs_breadth"):
            if (value := _value(self, name)) != 1 or isinstance(value, bool):
                raise ConfigError(
                    f"speculative_{name}={value!r}; drafts are chains, not trees: give 1, or leave it out"
                )
        for name in ("accept_threshold_single", "accept_threshold_acc"):
            if isinstance(value := _value(self, name), bool) or value != 1.0:
                raise ConfigError(
                    f"speculative_{name}={value!r}; below 1.0 tokens are accepted that the model did not sample: give "
                    "1.0, or leave it out"
                )
        if self.draft_model_path is not None:
            text = f"speculative_draft_model_path={self.draft_model_path!r}, but {self.algorithm} has no draft model"
            raise ConfigError(f"{text}; leave it out")
        low, high = "speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"
        _check_int(low, self.min_window, 1, MAX_WINDOW)
        _check_int(high, self.max_window, 1, MAX_WINDOW)
        if self.min_window > self.max_window:
            raise ConfigError(f"{low}={self.min_window} is above {high}={self.max_window}; lower it")
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_adaptive={self.adaptive!r} must be True or False")

    @staticmethod
    def create(
        config: "SpeculativeConfig | None", fields: Mapping[str, Any], vllm: "Mapping[str, object] | str | None" = None
    ) -> "SpeculativeConfig | None":
        """Build from one of three: a config, fields by SGLang's names (None: not given), or vLLM's speculative_config;
        None where nothing is given. Raises ConfigError for two of them at once, and for fields without an
        algorithm."""
        given = {name: value for name, value in fields.items() if value is not None}
        names = ", ".join(f"speculative_{name}" for name in given)
        ways = [
            *(["speculative"] if config else []),
            *([names] if given else []),
            *(["speculative_config"] if vllm else []),
        ]
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} say the same in two ways; give one of them")
        if given and "algorithm" not in given:
            raise ConfigError(f"{names} without speculative_algorithm; give speculative_algorithm='NGRAM', too")
        if given:
            return SpeculativeConfig(**given)
        return config if vllm is None else SpeculativeConfig.from_vllm(vllm)

    @staticmethod
    def from_vllm(config: "Mapping[str, object] | str", *, tp_size: int = 1) -> "SpeculativeConfig":
        """Build from vLLM's `speculative_config`, a dict or its JSON; method ngram, whose windows are prompt_lookup_min
        and prompt_lookup_max. Raises ConfigError, for an unknown key with the nearest name."""
        values = _parse_json(config) if isinstance(config, str) else config
        if not isinstance(values, Mapping):
            raise ConfigError(f"speculative_config={short_repr(config)} must be a dict, or the JSON text of one")
        for key in values:
            if key not in _VLLM_KEYS:
                raise ConfigError(f"{key!r} is no key of speculative_config; {suggestion(str(key), _VLLM_KEYS)}")
        given = {key: value for key, value in values.items() if value is not None}
        if given.get("draft_tensor_parallel_size", tp_size) != tp_size:
            text = f"draft_tensor_parallel_size={given['draft_tensor_parallel_size']!r} is not tp_size={tp_size}"
            raise ConfigError(f"{text}; leave it out")
        if given.get("rejection_sample_method", "standard") != "standard":
            text = f"rejection_sample_method={given['rejection_sample_method']!r} changes what is sampled"
            raise ConfigError(f"{text}; give 'standard', or leave it out")
        if "model" in given and given["model"] not in ("ngram", "[ngram]"):
            raise ConfigError(f"model={short_repr(given['model'])}: this version drafts by n-grams alone; leave it out")
        drafts = given.get("num_speculative_tokens")
        if "num_speculative_tokens" in given:
            _check_int("num_speculative_tokens", drafts, 1, MAX_DRAFT_TOKENS - 1)
        method = given.get("method", "ngram" if "model" in given else None)
        if method is None:
            raise ConfigError("speculative_config has no method; give {'method': 'ngram', 'num_speculative_tokens': 3}")
        shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        if shortest is None and longest is None:
            shortest, longest = 1, 12
        shortest = min(_VLLM_WINDOWS[0], _as_int(longest)) if shortest is None else shortest
        longest = max(_VLLM_WINDOWS[1], _as_int(shortest)) if longest is None else longest
        return SpeculativeConfig(
            algorithm=method.upper() if isinstance(method, str) else repr(method),
            num_draft_tokens=None if drafts is None else _as_int(drafts) + 1,
            ngram_min_match_window_size=_as_int(shortest),
            ngram_max_match_window_size=_as_int(longest),
        )

    @property
    def num_drafts(self) -> int:
        """k: drafts of a request in a step, at most."""
        if self.num_draft_tokens is None and self.num_steps is not None:
            return self.num_steps
        return (self.num_draft_tokens or DEFAULT_DRAFT_TOKENS) - 1

    @property
    def min_window(self) -> int:
        """Tokens of the shortest suffix that is looked up."""
        return self.ngram_min_match_window_size

    @property
    def max_window(self) -> int:
        """Tokens of the longest suffix that is looked up."""
        return self.ngram_max_match_window_size

    def _check_algorithm(self) -> None:
        name = self.algorithm
        if isinstance(name, str) and name.upper() in ALGORITHMS:
            return
        if isinstance(name, str) and (name.upper() in _WITH_MODEL or name.lower().endswith("_mtp")):
            text = f"speculative_algorithm={name!r} needs a draft model, which this version does not run"
            raise ConfigError(f"{text}; choose NGRAM, which needs none")
        if isinstance(name, str) and name.upper() == "SUFFIX":
            raise ConfigError(f"speculative_algorithm={name!r} is not in this version; choose NGRAM")
        if isinstance(name, str) and name.upper() in _OTHER_HEADS:
            raise ConfigError(f"speculative_algorithm={name!r}: heads of this kind are not read; choose NGRAM")
        raise ConfigError(f"speculative_algorithm={name!r} is unknown; choose one of {', '.join(ALGORITHMS)}")


def _value(config: SpeculativeConfig, name: str) -> object:
    return dataclasses.asdict(config)[name]


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be an integer in {low}..{high}")


def _as_int(value: object) -> int:
    """The value, if it is an integer; else what no check accepts."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"speculative_config={short_repr(text)} is no JSON ({error.msg} at character {error.pos}); write it as "
            '\'{"method": "ngram", "num_speculative_tokens": 3}\''
        ) from error
