"""Rotary frequencies from config.json: plain, yarn (Peng et al. 2023), llama3, and longrope up to the length where its short factors
hold. Any other `rope_type` is refused by name. Knows no architecture. Dims: F frequencies."""

import dataclasses
import math

import numpy as np
from jaxtyping import Float32

from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.config_reader import ConfigReader, read_floats

ROPE_TYPES = ("default", "yarn", "llama3", "longrope")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The frequencies; what yarn multiplies the scale of attention by where `mscale_all_dim` is set (DeepSeek); and the length up to
    which they hold, None where the config's own length stands."""

    spec: RotarySpec
    score_scale: float = 1.0
    context_length: int | None = None


def read_rotary(
    reader: ConfigReader, head_dim: int, *, theta: float | None = 10_000.0, interleaved: bool = False, part: float = 1.0
) -> Rotary:
    """Read either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`. `theta` and `part`, the share of a head's dims
    that turn, are defaults."""
    section = reader.section("rope_parameters") if reader.has("rope_parameters") else reader.section("rope_scaling")
    holder = reader.section("rope_parameters") if reader.has("rope_parameters") else reader
    kind = section.str("rope_type", default=section.str("type", default="default", choices=ROPE_TYPES), choices=ROPE_TYPES)
    base = holder.float("rope_theta", default=reader.float("rope_theta", default=theta))
    holder.require(base > 0, "rope_theta", "a positive number")
    share = section.float("partial_rotary_factor", default=reader.float("partial_rotary_factor", default=part))
    size = int(head_dim * share)
    reader.require(size >= 2 and size % 2 == 0 and size <= head_dim, "partial_rotary_factor", f"an even part of head_dim={head_dim}")
    plain = 1.0 / np.float32(base) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    if kind == "default":
        return Rotary(spec=RotarySpec(inverse=_numbers(plain), interleaved=interleaved))
    trained = reader.int("max_position_embeddings", minimum=1)
    original = section.int(
        "original_max_position_embeddings", minimum=1, default=reader.int("original_max_position_embeddings", minimum=1, default=trained)
    )
    if kind == "longrope":
        return _longrope(section, plain, trained, original, interleaved)
    factor = section.float("factor", default=trained / original)
    section.require(factor >= 1, "factor", "a number of at least 1")
    if kind == "llama3":
        return Rotary(spec=RotarySpec(inverse=_numbers(_llama3(section, plain, factor, original)), interleaved=interleaved))
    scaled = _yarn(section, plain, base=base, size=size, factor=factor, original=original)
    all_dims = section.float("mscale_all_dim", default=0.0)
    score_scale = _yarn_magnitude(factor, all_dims) ** 2 if all_dims else 1.0
    magnitude = section.float("attention_factor", default=_attention_factor(section, factor))
    return Rotary(spec=RotarySpec(inverse=_numbers(scaled), magnitude=magnitude, interleaved=interleaved), score_scale=score_scale)


def _yarn(
    section: ConfigReader, plain: Float32[np.ndarray, " F"], *, base: float, size: int, factor: float, original: int
) -> Float32[np.ndarray, " F"]:
    """Frequencies that turn often within the original length stay; those that turn little are divided; a ramp between them."""

    def dim_of(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(section.float("beta_fast", default=32.0)), dim_of(section.float("beta_slow", default=1.0))
    if section.bool("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / ((high if high != low else high + 0.001) - low), 0, 1)
    return (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _llama3(section: ConfigReader, plain: Float32[np.ndarray, " F"], factor: float, original: int) -> Float32[np.ndarray, " F"]:
    low, high = section.float("low_freq_factor"), section.float("high_freq_factor")
    section.require(high > low > 0, "high_freq_factor", "a number above low_freq_factor, which is above 0")
    turns = original * plain / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)


def _longrope(section: ConfigReader, plain: Float32[np.ndarray, " F"], trained: int, original: int, interleaved: bool) -> Rotary:
    """The long factors change every position of a sequence once it outgrows the original length, so keys in a cache would go stale:
    served up to the original length."""
    factors = np.asarray(read_floats(section, "short_factor"), np.float32)
    section.require(factors.shape == plain.shape, "short_factor", f"{plain.size} numbers")
    ratio = section.float("factor", default=trained / original)
    default = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    magnitude = section.float("short_mscale", default=section.float("attention_factor", default=default))
    spec = RotarySpec(inverse=_numbers(plain / factors), magnitude=magnitude, interleaved=interleaved)
    return Rotary(spec=spec, context_length=min(original, trained))


def _attention_factor(section: ConfigReader, factor: float) -> float:
    some, every = section.float("mscale", default=0.0), section.float("mscale_all_dim", default=0.0)
    if some and every:
        return _yarn_magnitude(factor, some) / _yarn_magnitude(factor, every)
    return _yarn_magnitude(factor, 1.0)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _numbers(array: Float32[np.ndarray, " F"]) -> tuple[float, ...]:
    return tuple(float(value) for value in array)
