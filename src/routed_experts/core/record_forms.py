"""Arrays of routing as other frameworks hold them, both ways. Knows no records: it is handed rows and gives rows back.

Laws: a row that is not known is written only where the form has a mark of its own for it; a row that is read is known
only if it names distinct experts, so a row of zeros never passes for expert 0. Fetched, not computed: nothing here
routes. Dims: R rows, S tokens, L hidden layers, M MoE layers, K experts per token, E experts."""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import numpy as np
from jaxtyping import Bool, Int, UInt

from routed_experts.core.capture_spec import expert_id_dtype
from routed_experts.core.errors import RoutingFormatError

FORMS = ("sglang", "vllm", "vllm021", "tunix", "maxtext", "megatron", "verl")
Missing = Literal["error", "gate"]
MISSING: tuple[Missing, ...] = ("error", "gate")
_WHOLE = ("tunix", "maxtext", "megatron")  # forms of whole sequences: start is 0
_NARROW = ("vllm021", "tunix", "verl")  # int16
_NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormShape:
    """What an array does not say of itself. `num_tokens` is S, `top_k` is needed for flat arrays alone."""

    layer_ids: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    num_tokens: int
    num_prompt_tokens: int
    start: int = 0
    top_k: int | None = None

    def check(self, name: str) -> None:
        """Raise RoutingFormatError for a form that is unknown, or that cannot hold this sequence."""
        if name not in FORMS:
            raise RoutingFormatError(f"form {name!r} is unknown; choose one of {', '.join(FORMS)}")
        if name in _WHOLE and self.start != 0:
            raise RoutingFormatError(
                f"{name} holds whole sequences, and these rows start at token {self.start}; capture from 0 on"
            )
        if name in _NARROW and self.num_experts > 32_768:
            raise RoutingFormatError(
                f"{name} is int16, and ids below {self.num_experts} do not fit; choose sglang or vllm"
            )


def write_form(
    name: str,
    ids: UInt[np.ndarray, "R M K"],
    valid: Bool[np.ndarray, " R"] | None,
    shape: FormShape,
    *,
    missing: str,
    dense_fill: int,
) -> Any:
    """Rows as `name` holds them: an array, or a pair for vllm021 and megatron. A row that is not valid raises
    RoutingFormatError, unless missing is "gate" and the form has a mark that lets its router decide (tunix,
    megatron)."""
    shape.check(name)
    if missing not in MISSING:
        raise RoutingFormatError(f"missing={missing!r} is unknown; choose one of {', '.join(MISSING)}")
    known = np.ones(ids.shape[0], np.bool_) if valid is None else valid
    if not known.all() and not (missing == "gate" and name in ("tunix", "megatron")):
        first = shape.start + int(np.flatnonzero(~known)[0])
        fix = (
            'pass missing="gate"' if name in ("tunix", "megatron") else "capture them, or convert to tunix or megatron"
        )
        raise RoutingFormatError(f"the routing of token {first} is not known, and {name} cannot say so; {fix}")
    if name == "sglang":
        return _spread(ids, shape, dense_fill, np.dtype(np.int32))
    if name == "vllm":
        return _spread(ids, shape, 0, ids.dtype)
    if name == "verl":
        return _spread(ids, shape, 0, np.dtype(np.int16))
    if name == "vllm021":
        split = min(max(shape.num_prompt_tokens - shape.start, 0), ids.shape[0])
        return ids[:split].astype(np.int16), ids[split:].astype(np.int16)
    if name == "megatron":
        return _megatron(ids, known, shape)
    whole = np.full((shape.num_tokens, *ids.shape[1:]), -1, np.int16 if name == "tunix" else np.int32)
    whole[: ids.shape[0]][known] = ids[known]
    return whole


def read_form(
    name: str, payload: Any, shape: FormShape
) -> tuple[UInt[np.ndarray, "R M K"], Bool[np.ndarray, " R"] | None]:
    """Rows of MoE layers from what `name` holds, and which of them are known (None: all). Raises RoutingFormatError
    naming both shapes where the payload does not fit."""
    shape.check(name)
    if name == "megatron":
        array, known = _read_megatron(payload, shape)
    else:
        array = np.concatenate([_array(part) for part in payload]) if name == "vllm021" else _array(payload)
        array = _moe_columns(array, shape, name)
        known = np.ones(array.shape[0], np.bool_)
    array, known = _cut(array, known, shape, name)
    ordered = np.sort(array, axis=2)
    known &= ((array >= 0) & (array < shape.num_experts)).all(axis=(1, 2))
    known &= (ordered[:, :, 1:] != ordered[:, :, :-1]).all(axis=(1, 2))
    array[~known] = 0
    return np.ascontiguousarray(array, dtype=expert_id_dtype(shape.num_experts)), None if known.all() else known


def _spread(
    ids: UInt[np.ndarray, "R M K"], shape: FormShape, fill: int, dtype: np.dtype[Any]
) -> Int[np.ndarray, "R L K"]:
    spread = np.full((ids.shape[0], shape.num_hidden_layers, ids.shape[2]), fill, dtype)
    spread[:, shape.layer_ids] = ids
    return spread


def _megatron(
    ids: UInt[np.ndarray, "R M K"], known: Bool[np.ndarray, " R"], shape: FormShape
) -> tuple[list[Int[np.ndarray, "S K"]], Bool[np.ndarray, " S"]]:
    """A list by MoE layer, and which tokens are replayed; ids of the others are spread, so that no expert is
    flooded."""
    tokens, (_, num_layers, top_k) = shape.num_tokens, ids.shape
    spread = (np.arange(tokens)[:, None] * top_k + np.arange(top_k)) % shape.num_experts
    whole = np.repeat(spread[:, None].astype(np.int64), num_layers, axis=1)
    mask = np.zeros(tokens, np.bool_)
    mask[: known.size] = known
    whole[: known.size][known] = ids[known]
    return [np.ascontiguousarray(whole[:, layer]) for layer in range(num_layers)], mask


def _read_megatron(payload: Any, shape: FormShape) -> tuple[Int[np.ndarray, "T M K"], Bool[np.ndarray, " T"]]:
    pair = isinstance(payload, tuple) and len(cast("tuple[Any, ...]", payload)) == 2
    layers, mask = cast("tuple[Any, Any]", payload) if pair else (payload, None)
    listed = [_array(layer) for layer in cast("Sequence[Any]", layers)]
    if len(listed) != len(shape.layer_ids) or len({layer.shape for layer in listed}) != 1 or listed[0].ndim != 2:
        shapes = [layer.shape for layer in listed][:4]
        _refuse(
            "megatron", f"{len(listed)} layers of shapes {shapes}", f"{len(shape.layer_ids)} arrays [T, K] of one shape"
        )
    array = np.stack(listed, axis=1).astype(np.int64)
    known = np.ones(array.shape[0], np.bool_) if mask is None else np.array(mask, np.bool_)
    if known.shape != array.shape[:1]:
        _refuse("megatron", f"a mask of shape {known.shape}", f"({array.shape[0]},)")
    return array, known


def _array(payload: Any) -> np.ndarray:
    """An array of integers from an array, nested lists, or base64 of raw int32 or of a .npy."""
    if isinstance(payload, str | bytes):
        try:
            raw = base64.b64decode(payload, validate=True)
            is_npy = raw.startswith(_NPY_MAGIC)
            payload = np.load(io.BytesIO(raw), allow_pickle=False) if is_npy else np.frombuffer(raw, np.dtype("<i4"))
        except (binascii.Error, ValueError, EOFError) as cause:
            text = f"payload of {len(payload)} characters is no base64 of int32 or .npy: {cause}"
            raise RoutingFormatError(text) from cause
    array = np.asarray(payload)
    if array.size and array.dtype.kind not in "iu":
        _refuse("payload", f"numbers of type {array.dtype}", "integers")
    return array


def _moe_columns(array: np.ndarray, shape: FormShape, name: str) -> Int[np.ndarray, "R M K"]:
    """The MoE layers of [R, L, K] (dense columns dropped whatever they hold), of [R, M, K], or of a flat [R * L *
    K]."""
    if array.ndim == 1:
        width = shape.num_hidden_layers * (shape.top_k or 0)
        if not width or array.size % width:
            _refuse(
                name, f"{array.size} numbers", f"a multiple of {shape.num_hidden_layers} layers x top_k {shape.top_k}"
            )
        array = array.reshape(-1, shape.num_hidden_layers, shape.top_k or 0)
    columns = array.shape[1] if array.ndim == 3 else -1
    whole = columns == shape.num_hidden_layers
    moe_only = columns == len(shape.layer_ids) and name not in ("sglang", "vllm")
    if not (whole and name not in ("vllm021", "tunix", "maxtext")) and not moe_only:
        _refuse(
            name, f"the shape {array.shape}", f"[rows, {shape.num_hidden_layers} or {len(shape.layer_ids)} layers, K]"
        )
    return array.astype(np.int64) if moe_only else array[:, list(shape.layer_ids)].astype(np.int64)


def _cut(
    array: Int[np.ndarray, "R M K"], known: Bool[np.ndarray, " R"], shape: FormShape, name: str
) -> tuple[Int[np.ndarray, "R M K"], Bool[np.ndarray, " R"]]:
    """Hold the row law: S - 1 - start rows, or one more where the last token has a row; a last row that is only a
    filler is dropped."""
    rows = shape.num_tokens - shape.start
    if array.shape[0] not in (rows, rows - 1):
        _refuse(
            name,
            f"{array.shape[0]} rows",
            f"{rows - 1} or {rows} for {shape.num_tokens} tokens from token {shape.start} on",
        )
    if array.shape[0] == rows and rows > 0:
        last = array[-1]
        distinct = all(len(set(chosen)) == len(chosen) for chosen in last.tolist())
        if not known[-1] or (last < 0).any() or (last >= shape.num_experts).any() or not distinct:
            return array[:-1].copy(), known[:-1].copy()
    return array.copy(), known.copy()


def _refuse(name: str, came: str, wanted: str) -> NoReturn:
    raise RoutingFormatError(f"{name}: {came} came; wanted {wanted}")
