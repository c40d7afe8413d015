"""Scales of keys and values that a checkpoint publishes for a pool of e4m3 codes: a number is its code times the scale,
one for the keys of a layer and one for its values.

Names, below the attention of a layer:

    k_scale, v_scale                            of compressed-tensors and fp8
    k_proj.output_scale, v_proj.output_scale    of older ones

Scales of queries, and the one `kv_scale` that old files have for keys and values together, are not read."""

import logging
import math
from collections.abc import Mapping, Sequence

from routed_experts.core.errors import CheckpointError
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.tensor_file import WEIGHT_DTYPES
from routed_experts.models.loading.virtual_tensors import Header

logger = logging.getLogger(__name__)
_PAIRS = (("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"))
_NAMES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_UNREAD = (".q_scale", ".q_proj.output_scale", ".kv_scale")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a scale of keys, of values or of queries, by its name."""
    return name.endswith((*_NAMES, *_UNREAD))


def is_read(name: str) -> bool:
    """Whether it is one that `read_kv_scales` reads."""
    return name.endswith(_NAMES)


def read_kv_scales(checkpoint: Checkpoint, modules: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The scales of keys and of values of each of the attention modules, as float32 holds them; 1 for modules without
    any. Raises CheckpointError for one that is alone, has another name beside it, is no single number of a float dtype,
    or is not finite and above 0; it names the tensor."""
    headers = checkpoint.names()
    scaled = {module: pair for module in modules if (pair := _pair(checkpoint, headers, module)) is not None}
    old = [name for name in headers if name.endswith(".kv_scale")]
    if old:
        text = "%d scales such as %s are of an old form, one for keys and values together, and are not read"
        logger.warning(text, len(old), old[0])
    if 0 < len(scaled) < len(modules):
        missing = next(module for module in modules if module not in scaled)
        text = "%d of %d layers have scales of keys and values; the others, such as %s, have scale 1"
        logger.warning(text, len(scaled), len(modules), missing)
    scales = dict.fromkeys(modules, (1.0, 1.0))
    for module, (keys, values) in scaled.items():
        scales[module] = _read(checkpoint, headers, keys), _read(checkpoint, headers, values)
    return scales


def _pair(checkpoint: Checkpoint, headers: Mapping[str, Header], module: str) -> tuple[str, str] | None:
    """The names of a module's scales; None where it has none."""
    pairs: list[tuple[str, str]] = []
    for pair in _PAIRS:
        keys, values = (f"{module}.{name}" for name in pair)
        if (keys in headers) != (values in headers):
            present, absent = (keys, values) if keys in headers else (values, keys)
            raise _error(checkpoint, present, "is there alone", f"{absent} beside it")
        if keys in headers:
            pairs.append((keys, values))
    if len(pairs) > 1:
        raise _error(checkpoint, pairs[1][0], f"and {pairs[0][0]} both scale the keys of a layer", "one of them")
    return pairs[0] if pairs else None


def _read(checkpoint: Checkpoint, headers: Mapping[str, Header], name: str) -> float:
    shape, dtype = headers[name]
    if shape not in ((), (1,)):
        raise _error(checkpoint, name, f"is {list(shape)}", "[] or [1]: one number a layer")
    if dtype not in WEIGHT_DTYPES:
        raise _error(checkpoint, name, f"is {dtype}", " or ".join(sorted(WEIGHT_DTYPES)))
    value = float(checkpoint.read(name).reshape(()).astype("float32"))
    if not (math.isfinite(value) and value > 0):
        raise _error(checkpoint, name, f"holds {value}", "a finite number above 0")
    return value


def _error(checkpoint: Checkpoint, name: str, fault: str, expected: str) -> CheckpointError:
    text = f"{checkpoint.path}: {name} {fault}; expected {expected}"
    return CheckpointError(f"{text}; copy the checkpoint again, or leave kv_cache_dtype out")
