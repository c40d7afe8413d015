"""Rotary frequencies from config.json: inverse, linear, dynamic up to the trained length, yarn (Peng et al. 2023),
llama3, longrope up to the length where its short factors hold, and proportional (Gemma 4). Any other `rope_type` is
refused by name. Dims: F frequencies."""

import dataclasses
import math
from collections.abc import Collection

import numpy as np
from jaxtyping import Float32

from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.base.config_reader import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The frequencies, their base and kind; what `mscale_all_dim` multiplies the scale of latent attention by, with any
    kind but default (DeepSeek); and the length of a sequence up to which they hold, None where they hold for any."""

    spec: RotarySpec
    theta: float
    kind: str = "default"
    score_scale: float = 1.0
    context_length: int | None = None


def read_rotated_share(reader: ConfigReader, head_dim: int) -> float:
    """The share of a head's dims that `rotary_dim` says are rotated; 1 without the key."""
    return reader.int("rotary_dim", minimum=2, maximum=head_dim, default=head_dim) / head_dim


def read_rotary(
    reader: ConfigReader,
    head_dim: int,
    *,
    theta: float | None = 10_000.0,
    interleaved: bool = False,
    part: float | None = None,
    stretched: bool = False,
    kinds: Collection[str] = ROPE_TYPES,
    uses_short_mscale: bool = False,
) -> Rotary:
    """Read either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`. `theta` and `part`, the share of
    a head's dims that are rotated, are defaults; null of the share is 1, as transformers has it. Without `part` all
    dims are rotated, and a config with another share is refused. `stretched`: dynamic positions with an `alpha` are
    those of a larger base (HunYuan). `kinds`: those of the family. `uses_short_mscale`: it is the magnitude of
    longrope (PhiMoE)."""
    section = _section(reader)
    spellings = {section.str(key, choices=kinds) for key in ("rope_type", "type") if section.has(key)}
    section.require(len(spellings) <= 1, "type", "the same as rope_type")
    kind = next(iter(spellings), "default")
    base = _either(reader, section, "rope_theta", theta)
    _holder(reader, section, "rope_theta").require(base > 0, "rope_theta", "a positive number")
    is_null = part is not None and reader.values.get("partial_rotary_factor", part) is None  # of the whole head then
    share = _either(reader, section, "partial_rotary_factor", 1.0 if part is None or is_null else part)
    size, holder = int(head_dim * share), _holder(reader, section, "partial_rotary_factor")
    even = size % 2 == 0 or kind == "proportional"
    holds, expected = 2 <= size <= head_dim and even, f"an even part of head_dim={head_dim}"
    holder.require(holds, "partial_rotary_factor", expected)
    holder.require(
        part is not None or share == 1.0, "partial_rotary_factor", "1.0: this architecture rotates all dims of a head"
    )
    if kind == "proportional":
        section.require(not section.has("mscale_all_dim"), "mscale_all_dim", "none beside proportional positions")
        spec = RotarySpec(inverse=_proportional(section, head_dim, base, share), interleaved=interleaved)
        return Rotary(spec=spec, theta=base, kind=kind)
    alpha = section.float("alpha", default=0.0) if stretched and kind == "dynamic" else 0.0
    if alpha:
        expected = "a positive number that float32 holds, and heads of more than 2 dims"
        section.require(0 < alpha <= _LARGEST and size > 2, "alpha", expected)
        base, kind = base * alpha ** (size / (size - 2)), "default"
        section.require(0 < base < math.inf, "alpha", "a number whose product with rope_theta is finite and not 0")
    powers = (np.arange(0, size, 2, dtype=np.float32) / np.float32(size)).astype(np.float64)
    with np.errstate(over="ignore"):
        inverse = (1.0 / base**powers).astype(np.float32)  # rounded once
    _require_finite(_holder(reader, section, "rope_theta"), inverse)
    unscaled = Rotary(spec=RotarySpec(inverse=_numbers(inverse), interleaved=interleaved), theta=base, kind=kind)
    if kind == "default":
        return unscaled
    return _scaled(reader, section, unscaled, inverse, uses_short_mscale=uses_short_mscale)


def _scaled(
    reader: ConfigReader,
    section: ConfigReader,
    unscaled: Rotary,
    inverse: Float32[np.ndarray, " F"],
    *,
    uses_short_mscale: bool,
) -> Rotary:
    """Rotary embedding of any other kind."""
    trained, kind = reader.int("max_position_embeddings", minimum=1), unscaled.kind
    all_dims = _read_magnitude(section, "mscale_all_dim", default=0.0)

    def scaled(inverse: Float32[np.ndarray, " F"], factor: float, *, magnitude: float = 1.0) -> Rotary:
        spec = dataclasses.replace(unscaled.spec, inverse=_numbers(inverse), magnitude=magnitude)
        score_scale = _yarn_magnitude(factor, all_dims) ** 2 if all_dims else 1.0
        expected = f"a number whose scale of scores float32 holds, with the factor {factor}"
        section.require(score_scale <= _LARGEST, "mscale_all_dim", expected)
        return dataclasses.replace(unscaled, spec=spec, score_scale=score_scale)

    if kind in ("linear", "dynamic"):
        factor = _read_factor(section)
        if kind == "linear":
            return scaled(inverse / np.float32(factor), factor)
        # dynamic positions are inverse ones up to the trained length, which is all that is served
        return dataclasses.replace(scaled(inverse, factor), context_length=trained)
    top_level = reader.int("original_max_position_embeddings", minimum=1, default=trained)
    original = section.int("original_max_position_embeddings", minimum=1, default=top_level)
    same = original == top_level or not reader.has("original_max_position_embeddings")
    section.require(same, "original_max_position_embeddings", f"{top_level}, as at the top level")
    if kind == "longrope":
        factor = section.float("factor", default=trained / original)
        holder = _holder(reader, section, "original_max_position_embeddings")
        holder.require(factor <= 1 or original > 1, "original_max_position_embeddings", "at least 2")
        inverse, magnitude = _longrope(section, inverse, factor, original, uses_short_mscale=uses_short_mscale)
        rotary = scaled(inverse, factor, magnitude=magnitude)
        return dataclasses.replace(rotary, context_length=min(original, trained))
    factor = _read_factor(section, default=trained / original)
    if kind == "llama3":
        return scaled(_llama3(section, inverse, factor, original), factor)
    _holder(reader, section, "rope_theta").require(unscaled.theta > 1, "rope_theta", "a number above 1")
    inverse = _yarn(section, inverse, base=unscaled.theta, size=2 * inverse.size, factor=factor, original=original)
    magnitude = _read_magnitude(section, "attention_factor", default=_attention_factor(section, factor))
    return scaled(inverse, factor, magnitude=magnitude)


def _proportional(section: ConfigReader, head_dim: int, base: float, share: float) -> tuple[float, ...]:
    """The frequencies of complete heads, of which the first `share` rotate: the others are 0."""
    factor, rotating = _read_positive(section, "factor", default=1.0), int(share * head_dim // 2)
    powers = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    with np.errstate(over="ignore"):
        inverse = (1.0 / base ** powers.astype(np.float64)).astype(np.float32) / np.float32(factor)
    inverse[rotating:] = 0.0
    _require_finite(section, inverse)
    return _numbers(inverse)


def _require_finite(reader: ConfigReader, inverse: Float32[np.ndarray, " F"]) -> None:
    """Raise CheckpointError for a base that makes a frequency infinite."""
    reader.require(bool(np.isfinite(inverse).all()), "rope_theta", "a base whose frequencies float32 holds")


def _read_positive(section: ConfigReader, key: str, *, default: float) -> float:
    """A positive number that float32 holds, as it holds the inverse."""
    value = section.float(key, default=default)
    section.require(
        1 / _LARGEST <= value <= _LARGEST, key, f"a positive number of {1 / _LARGEST:.0e} to {_LARGEST:.0e}"
    )
    return value


def _read_magnitude(section: ConfigReader, key: str, *, default: float) -> float:
    """What rotated vectors, or their scores, are multiplied by."""
    value = section.float(key, default=default)
    section.require(0 <= value <= _LARGEST, key, "a number of at least 0 that float32 holds")
    return value


def _read_factor(section: ConfigReader, *, default: float | None = None) -> float:
    """What positions are stretched by."""
    factor = section.float("factor", default=default)
    section.require(1 <= factor <= _LARGEST, "factor", "a number of at least 1 that float32 holds")
    return factor


def _section(reader: ConfigReader) -> ConfigReader:
    """The config object of the rotary embedding, one for all layers. Where both spellings exist, transformers reads
    rope_scaling alone, and numbers at the top level: rope_parameters must say nothing else."""
    old, new = reader.section("rope_scaling"), reader.section("rope_parameters")
    for key in sorted(old.values.keys() & new.values.keys()):
        new.require(old.values[key] == new.values[key], key, f"{old.values[key]!r}, as rope_scaling says")
    kind = old.values.get("type", old.values.get("rope_type"))
    for key in sorted(new.values.keys() - old.values.keys()) if old.values else ():
        value = new.values[key]
        says_nothing = value is None or value == (kind if key in ("type", "rope_type") else reader.values.get(key))
        new.require(says_nothing, key, "none, or the same in rope_scaling, which transformers reads in its place")
    section = dataclasses.replace(new, values={**old.values, **new.values}) if reader.has("rope_parameters") else old
    for key, value in section.values.items():
        section.require(not isinstance(value, dict), key, "no object: positions must be the same for all layers")
    return section


def _either(reader: ConfigReader, section: ConfigReader, key: str, default: float | None) -> float:
    """A number in the section or next to it."""
    value = section.float(key, default=reader.float(key, default=default))
    section.require(reader.float(key, default=value) == value, key, "the same number as at the top level")
    return value


def _holder(reader: ConfigReader, section: ConfigReader, key: str) -> ConfigReader:
    return section if section.has(key) else reader


def _yarn(
    section: ConfigReader, inverse: Float32[np.ndarray, " F"], *, base: float, size: int, factor: float, original: int
) -> Float32[np.ndarray, " F"]:
    """Keep frequencies with many rotations within the original length, divide those with few, and interpolate
    between them."""

    def rotation_dim(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        rotation_dim(_read_positive(section, "beta_fast", default=32.0)),
        rotation_dim(_read_positive(section, "beta_slow", default=1.0)),
    )
    if section.with_null(False, "truncate").bool("truncate", default=True):  # as transformers takes null
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip(
        (np.arange(size // 2, dtype=np.float32) - low) / ((high if high != low else high + 0.001) - low), 0, 1
    )
    return (inverse / factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def _llama3(
    section: ConfigReader, inverse: Float32[np.ndarray, " F"], factor: float, original: int
) -> Float32[np.ndarray, " F"]:
    low, high = section.float("low_freq_factor"), section.float("high_freq_factor")
    expected = "at least low_freq_factor, which is above 0, and a number that float32 holds"
    section.require(_LARGEST >= high >= low > 0, "high_freq_factor", expected)
    turns = original * inverse / (2 * np.pi)
    smooth = (
        np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns >= low).astype(np.float32)
    )  # no ramp: Llama 4 Scout
    return ((1 - smooth) * inverse / factor + smooth * inverse).astype(np.float32)


def _longrope(
    section: ConfigReader, inverse: Float32[np.ndarray, " F"], factor: float, original: int, *, uses_short_mscale: bool
) -> tuple[Float32[np.ndarray, " F"], float]:
    """The long factors change every position of a sequence once it outgrows the original length, so keys in a cache
    would go stale: served up to the original length. Returns frequencies and magnitude."""
    numbers = section.floats("short_factor")
    holds = len(numbers) == inverse.size and all(1 / _LARGEST <= number <= _LARGEST for number in numbers)
    section.require(holds, "short_factor", f"{inverse.size} numbers, positive ones that float32 holds")
    factors = np.asarray(numbers, np.float32)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    magnitude = _read_magnitude(section, "attention_factor", default=default)
    if uses_short_mscale:
        magnitude = _read_magnitude(section, "short_mscale", default=magnitude)
    return inverse / factors, magnitude


def _attention_factor(section: ConfigReader, factor: float) -> float:
    some, every = (_read_magnitude(section, key, default=0.0) for key in ("mscale", "mscale_all_dim"))
    if not (some and every):
        return _yarn_magnitude(factor, 1.0)
    ratio = _yarn_magnitude(factor, some) / _yarn_magnitude(factor, every)
    section.require(ratio <= _LARGEST, "mscale", f"a number whose magnitude float32 holds, with the factor {factor}")
    return ratio


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _numbers(array: Float32[np.ndarray, " F"]) -> tuple[float, ...]:
    return tuple(float(value) for value in array)
