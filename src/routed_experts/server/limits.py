"""Limits of the server, and its settings. 0 never means "unlimited"."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, get_args

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError
from routed_experts.core.integers import is_integer
from routed_experts.formats.metadata import PayloadFormat
from routed_experts.parsing import resolve_format

MAX_HEADER_BYTES, MAX_HEADERS = 64 * 1024, 128
MAX_JSON_DEPTH = 64
MAX_OPENAI_STOPS = 4
MAX_LISTED_IDS = 16_777_216  # ids and combine weights of one answer in format "list"
MAX_EVENT_PAYLOAD = 64 * 1024  # bytes of rows in one event, where rows are streamed
MAX_OPEN_REQUESTS, MAX_CONNECTIONS = 1024, 1024  # beyond: 503
MAX_WAITING_PAUSES, MAX_SCORING_CALLS = 8, 8
MAX_SCORED_TOKENS = 131_072  # of one call, unless it is one sequence
MAX_SCORED_SEQUENCES = 256  # of one call
SCORE_CHUNK_TOKENS = 8192  # a call whose client has gone ends after so many tokens
MAX_UNKNOWN_NAMES = 128  # of one body
MAX_BACKLOG = 256  # chunks that a slow client may be behind
MAX_ERROR_CHARS = 1000
MAX_NAMED_FIELDS = 20  # of X-Ignored-Params
MAX_LOGGED_NAMES = 256  # ignored parameters that are logged, once each
HEADER_TIMEOUT_S, BODY_TIMEOUT_S, KEEP_ALIVE_S = 10.0, 30.0, 75
DISCARDED_BYTES, DISCARD_S, DISCARD_IDLE_S = 64 << 20, 5.0, 0.5  # of a body that is too large; the first one ends it
SSE_COMMENT_S = 15.0
STREAM_GRACE_S = 5.0  # to send the end of a stream that has timed out
WRITE_TIMEOUT_S, MIN_READ_BYTES = 30.0, 16 * 1024  # a client that is behind must read as much in this time
MAX_UNSENT_BYTES = 128 * 1024  # of a connection, in the system's send buffer
RETRY_AFTER_S = 1
INLINE_BYTES = 64 * 1024  # smaller bodies are decoded and tokenised on the event loop, larger ones in a thread
RESERVED_IDS = frozenset({"stats", "reset", ".", ".."})  # would hide routes below /v1/routing, or lead out of it
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512  # of API keys: shorter ones are easily guessed

Dialect = Literal["sglang", "vllm021", "vllm"]
MetricNames = Literal["vllm", "sglang"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of `serve` besides the engine's arguments. Times are in seconds. Raises ConfigError."""

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None  # None: the folder's name
    api_key: str | None = dataclasses.field(default=None, repr=False)
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    routed_experts_dialect: Dialect = "sglang"
    routed_experts_format: PayloadFormat | None = None  # None: the dialect's
    routing_store_bytes: int = 1 << 30
    routing_store_ttl: float = 600.0
    metrics_compat: MetricNames | None = None
    expert_metrics: bool = False  # a series for every expert of every layer
    cors_origin: str | None = None
    request_timeout: float = 600.0
    stream_interval: float = 0.025  # at least this between two events of a stream
    max_body_bytes: int = 16 << 20
    shutdown_timeout: float = 30.0
    stall_timeout: float = 30.0
    strict_fields: bool = False
    tool_call_parser: str = "auto"  # auto: by the chat template; none: calls stay in the content
    reasoning_parser: str = "auto"  # auto: by the chat template; none: reasoning stays in the content
    return_tokens_as_token_ids: bool = False  # logprobs of /v1 name tokens by id, where a request does not say
    enable_per_request_metrics: bool = False  # answers of /v1 tell their times
    enable_force_include_usage: bool = False  # every chunk of a stream of /v1 has the usage
    incremental_streaming_output: bool = False  # chunks of /generate hold what is new, not all so far
    root_path: str = ""  # of a proxy: routes answer with this prefix, too
    enable_memory_saver: bool = False  # told by /server_info; memory can be released without it
    weights_root: str | None = None  # new weights are read only from folders below it

    @property
    def weak_keys(self) -> tuple[str, ...]:
        """The names of keys that are short enough to be guessed."""
        keys = {"api_key": self.api_key, "admin_api_key": self.admin_api_key}
        return tuple(name for name, key in keys.items() if key is not None and len(key) < MIN_KEY_CHARS)

    def _check_kinds(self) -> None:
        """Raise ConfigError for a value of another type, or for a name that is unknown."""
        for field in dataclasses.fields(self):
            _check_kind(field.name, getattr(self, field.name), field.default)
        _check_choice("routed_experts_dialect", self.routed_experts_dialect, get_args(Dialect))
        _check_choice("routed_experts_format", self.routed_experts_format, (None, *get_args(PayloadFormat)))
        _check_choice("metrics_compat", self.metrics_compat, (None, *get_args(MetricNames)))

    def __post_init__(self) -> None:
        self._check_kinds()
        resolve_format(None, tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser)
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port={short_repr(self.port)} must be in 0..65535; 0 lets the system choose")
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and not (
                1 <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key
            ):
                raise ConfigError(
                    f"{name} has {len(key)} characters; it must have 1 to {MAX_KEY_CHARS} of printable ASCII without "
                    "spaces"
                )
        for name in ("request_timeout", "routing_store_ttl", "stall_timeout"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0 and at most 86400 seconds")
        if not 0 <= self.stream_interval <= 1:
            raise ConfigError(f"stream_interval={self.stream_interval} must be in 0..1 seconds")
        if not 0 <= self.shutdown_timeout <= 86_400:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must be in 0..86400 seconds")
        if not 1024 <= self.max_body_bytes <= 1 << 30:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes} must be in 1024..{1 << 30}")
        if self.routing_store_bytes < 0:
            raise ConfigError(
                f"routing_store_bytes={self.routing_store_bytes} must be at least 0; 0 refuses format ref"
            )
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise ConfigError(f"root_path={self.root_path!r} must be a path such as /llm, without a slash at its end")
        if self.cors_origin is not None and not re.fullmatch(r"https?://[^/\s*]+", self.cors_origin):
            raise ConfigError(f"cors_origin={self.cors_origin!r} must be one origin such as https://app.example")


def _check_kind(name: str, value: object, default: object) -> None:
    """Raise ConfigError for a value of another kind than the default; those without one are texts."""
    if value is None and default is None:
        return
    if isinstance(default, bool):
        expected, fits = "True or False", isinstance(value, bool)
    elif isinstance(default, int):
        expected, fits = "an integer", is_integer(value)
    elif isinstance(default, float):
        expected, fits = "a number of seconds", isinstance(value, int | float) and not isinstance(value, bool)
    else:
        expected, fits = "text", isinstance(value, str)
    if not fits:
        raise ConfigError(f"{name}={short_repr(value)} is {type(value).__name__}; it must be {expected}")


def _check_choice(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        choices = ", ".join(own for own in allowed if own is not None)
        raise ConfigError(f"{name}={short_repr(value)} is unknown; choose one of {choices}")
