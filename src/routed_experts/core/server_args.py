"""ServerArgs: the configuration of an engine, fixed before it is built.

Each field is a keyword of `Engine` and a flag of the command line. Checked once, here; never patched."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, get_args

from routed_experts.core.capture_spec import WEIGHTS_DTYPES, WeightsDType
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.integers import to_int, with_python_integers
from routed_experts.core.weight_version import INITIAL_LABEL, to_label

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOGPROBS_MODES = ("processed", "raw")
Quantization = Literal["auto", "none", "fp8_block"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KVCacheDtype = Literal["auto", "fp8_e4m3"]
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
MAX_RANDOM_SEED = 2**31 - 1  # seeds of requests are counted from random_seed * 2^32, within an int64
_BATCH_PADDINGS, _TOKEN_PADDINGS = (1, 8, 32), (64, 256, 1024)  # where neither sizes nor limits are given
_GROWTH = 4  # from one default padding to the next
DEVICES = ("auto", "cpu", "cuda", "rocm", "tpu")


@with_python_integers
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Configuration of an engine. Lengths are in tokens; None means that the engine chooses (see each line).

    `tp_size` devices share one model; with `ep_size` equal to it each holds whole experts, else a share of the width of
    every expert. `dp_size` divides them into data ranks: each has a KV pool and requests of its own, and
    tp_size / dp_size devices for attention and dense layers; all share the experts. Limits of tokens and of running
    requests, and paddings, are those of one rank. `deterministic` promises bitwise equal ids, logprobs and rows for any
    batch composition: one padded shape, and backends that are batch-invariant (`native` on a CPU, else `reference`).
    `quantization`: "none" dequantises a quantised checkpoint as it is loaded; "fp8_block" keeps all matrices of layers
    as e4m3 codes with scales, those of a checkpoint as they are, plain ones quantised in blocks of 128 x 128.
    `kv_cache_dtype`: "fp8_e4m3" rounds keys and values to e4m3 as they are written, divided by the scales that a
    checkpoint has for the keys and for the values of each layer, else by 1.
    Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    model_path: str | None = None
    revision: str | None = None  # of a Hugging Face repository: its main branch
    tokenizer_path: str | None = None  # the model's own
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's
    quantization: Quantization = "auto"  # auto: codes of a checkpoint stay codes where the kernels take them
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: the model's dtype
    device: str = "auto"  # the kind of JAX's default devices, which JAX_PLATFORMS chooses
    random_seed: int = 0  # seeds of requests that bring none
    context_length: int | None = None  # the model's own
    tp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    page_size: int = 16
    mem_fraction_static: float = 0.8  # of the device's memory, for weights and pools
    max_total_tokens: int | None = None  # KV slots: what fits, at most twice the running requests at full context
    max_running_requests: int | None = None  # the largest of batch_paddings
    max_queued_requests: int = 1024
    chunked_prefill_size: int | None = None  # the largest of token_paddings
    max_prefill_tokens: int | None = None  # tokens of a step: the largest of token_paddings
    precompile_bs_paddings: tuple[int, ...] | None = None  # see batch_paddings
    precompile_token_paddings: tuple[int, ...] | None = None  # see token_paddings
    disable_radix_cache: bool = False
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    enable_return_routed_experts: bool = False
    enable_return_routed_experts_weights: bool = False  # record combine weights, too
    routed_experts_weights_dtype: WeightsDType = "float32"  # of recorded combine weights
    logprobs_mode: Literal["processed", "raw"] = "processed"
    deterministic: bool = False
    skip_tokenizer_init: bool = False
    weight_version: str = INITIAL_LABEL  # label of the weights that it starts with

    def __post_init__(self) -> None:
        """Check every field once: its type and range, then how fields fit together."""
        values = dataclasses.asdict(self)
        for name, check in _CHECKS.items():
            check(name, values[name])
        if self.ep_size not in (1, self.tp_size):
            expected = f"1 (a share of every expert's width on each device) or tp_size={self.tp_size} (whole experts)"
            raise ConfigError(f"ep_size={self.ep_size} must be {expected}; choose one of them")
        if self.tp_size % self.dp_size:
            sizes = ", ".join(str(size) for size in range(1, self.tp_size + 1) if self.tp_size % size == 0)
            text = f"dp_size={self.dp_size} does not divide tp_size={self.tp_size}, the devices of all data ranks"
            raise ConfigError(f"{text}; choose one of {sizes}, or start several engines for copies of the model")
        if self.enable_return_routed_experts_weights and not self.enable_return_routed_experts:
            text = "enable_return_routed_experts_weights=True records combine weights beside the ids of experts"
            raise ConfigError(f"{text}; set enable_return_routed_experts=True too")
        if self.routed_experts_weights_dtype != "float32" and not self.enable_return_routed_experts_weights:
            text = f"routed_experts_weights_dtype={self.routed_experts_weights_dtype!r} has no effect without"
            raise ConfigError(f"{text} enable_return_routed_experts_weights=True; set it, or leave the dtype out")
        if self.max_total_tokens is not None:
            _at_least(self.page_size, why="one page (page_size)")("max_total_tokens", self.max_total_tokens)
        if self.token_paddings[-1] < self.running_limit:
            raise ConfigError(
                f"precompile_token_paddings={self.token_paddings} hold fewer tokens than {self.running_limit} running "
                "requests; add a larger padding or lower max_running_requests"
            )

    @property
    def batch_paddings(self) -> tuple[int, ...]:
        """Padded sizes of decode steps, in requests: precompile_bs_paddings, else (1, 8, 32), up to
        max_running_requests, which is the last of them where it is above all."""
        if self.precompile_bs_paddings is None:
            return _sizes_up_to(self.max_running_requests or _BATCH_PADDINGS[-1], _BATCH_PADDINGS)
        if (self.max_running_requests or 0) > self.precompile_bs_paddings[-1]:
            return (*self.precompile_bs_paddings, self.max_running_requests or 0)
        return self.precompile_bs_paddings

    @property
    def token_paddings(self) -> tuple[int, ...]:
        """Padded sizes of extend steps, in tokens: precompile_token_paddings, else (64, 256, 1024) and on up to
        max_prefill_tokens and to one token of every running request."""
        if self.precompile_token_paddings is not None:
            return self.precompile_token_paddings
        prefill = min(self.max_prefill_tokens or 0, self.chunked_prefill_size or self.max_prefill_tokens or 0)
        return _sizes_up_to(max(_TOKEN_PADDINGS[-1], prefill, self.running_limit), _TOKEN_PADDINGS)

    @property
    def running_limit(self) -> int:
        """Requests that may run at once."""
        return self.max_running_requests or self.batch_paddings[-1]

    @property
    def prefill_limit(self) -> int:
        """Prompt tokens that one step may take in."""
        largest = self.token_paddings[-1]
        return min(self.chunked_prefill_size or largest, self.max_prefill_tokens or largest, largest)


def _sizes_up_to(largest: int, usual: tuple[int, ...]) -> tuple[int, ...]:
    """The usual sizes and, beyond them, each `_GROWTH` times the one before, below `largest`; then `largest`."""
    beyond = itertools.takewhile(
        lambda size: size < largest, (usual[-1] * _GROWTH**power for power in itertools.count(1))
    )
    return (*(size for size in usual if size < largest), *beyond, largest)


Check = Callable[[str, object], None]  # name and value of a field; raises ConfigError


def _at_least(least: int, *, most: int | None = None, why: str = "") -> Check:
    def check(name: str, value: object) -> None:
        to_int(name, value, least, most, meaning=f", {why}" if why else "")

    return check


def _check_choice(allowed: Sequence[str]) -> Check:
    def check(name: str, value: object) -> None:
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")

    return check


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be text")


def _label(name: str, value: object) -> None:
    if isinstance(value, str | int):  # an integer of 5,000 digits has no text
        try:
            to_label(value, param=name)
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error
    _text(name, value)


def _switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def _fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{name}={value!r} is outside (0, 1]; 0.8 is the default")


def _increasing(name: str, value: object) -> None:
    values: tuple[object, ...] = value if isinstance(value, tuple) else ()
    sizes = [size for size in values if isinstance(size, int) and not isinstance(size, bool) and size >= 1]
    if not sizes or len(sizes) != len(values) or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ConfigError(
            f"{name}={value!r} must be a non-empty, strictly increasing tuple of integers, such as (1, 8, 32)"
        )


_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "model_path": _optional(_text),
        "revision": _optional(_text),
        "tokenizer_path": _optional(_text),
        "dtype": _check_choice(DTYPES),
        "quantization": _check_choice(QUANTIZATIONS),
        "kv_cache_dtype": _check_choice(KV_CACHE_DTYPES),
        "device": _check_choice(DEVICES),
        "random_seed": _at_least(0, most=MAX_RANDOM_SEED),
        "context_length": _optional(_at_least(2, why="one token of a prompt and one new one")),
        "tp_size": _at_least(1),
        "ep_size": _at_least(1),
        "dp_size": _at_least(1),
        "page_size": _at_least(1),
        "mem_fraction_static": _fraction,
        "max_running_requests": _optional(_at_least(1)),
        "max_queued_requests": _at_least(1),
        "chunked_prefill_size": _optional(_at_least(1)),
        "max_prefill_tokens": _optional(_at_least(1)),
        "precompile_bs_paddings": _optional(_increasing),
        "precompile_token_paddings": _optional(_increasing),
        "disable_radix_cache": _switch,
        "attention_backend": _text,
        "moe_backend": _text,
        "enable_return_routed_experts": _switch,
        "enable_return_routed_experts_weights": _switch,
        "routed_experts_weights_dtype": _check_choice(WEIGHTS_DTYPES),
        "logprobs_mode": _check_choice(LOGPROBS_MODES),
        "deterministic": _switch,
        "skip_tokenizer_init": _switch,
        "weight_version": _label,
    }
)
