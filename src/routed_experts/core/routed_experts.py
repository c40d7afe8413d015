"""The canonical record of routing: which experts every token of one sequence was sent to. Knows nothing of JAX, wires
or requests.

Row law: row i is the forward pass whose *input* was token start + i; the last sampled token was never fed and has no
row. Invariants: ids are C-order, read-only, of the smallest dtype, and hold no sentinel; what is unknown is marked in
`valid`. A record owns its arrays: building one makes them read-only. Dims: R rows, L hidden layers, M MoE layers, K
experts per token, E experts, S tokens of the sequence."""

import base64
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, UInt

from routed_experts.core.capture_spec import expert_id_dtype
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.record_forms import FormShape, read_form, write_form
from routed_experts.core.record_validation import check_id_range, check_version_spans, valid_rows_of
from routed_experts.core.routed_experts_metadata import (
    PayloadFormat,
    PayloadLayers,
    RoutedExpertsMetadata,
    VersionSpans,
    prompt_rows,
)

INFO_KEY = "routed_experts_info"


def _from_form(
    name: str,
    payload: Any,
    *,
    layer_ids: Sequence[int],
    num_hidden_layers: int,
    num_experts: int,
    num_tokens: int,
    num_prompt_tokens: int,
    start: int = 0,
    top_k: int | None = None,
    version_spans: VersionSpans | None = None,
    router: str | None = None,
) -> "RoutedExperts":
    """Read what `to(name)` writes, or what the framework of that name holds; rows that name no distinct experts are not
    valid.

    `top_k` is needed for flat arrays; without `version_spans` all rows are of version 0. Raises RoutingFormatError."""
    shape = FormShape(
        layer_ids=tuple(layer_ids),
        num_hidden_layers=num_hidden_layers,
        num_experts=num_experts,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        start=start,
        top_k=top_k,
    )
    ids, valid = read_form(name, payload, shape)
    spans = version_spans if version_spans is not None else ((start, start + ids.shape[0], 0),) if ids.shape[0] else ()
    return RoutedExperts(
        ids=ids,
        start=start,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        layer_ids=tuple(layer_ids),
        num_hidden_layers=num_hidden_layers,
        num_experts=num_experts,
        version_spans=spans,
        valid=valid,
        router=router,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedExperts:
    """Routing of tokens [start, start + R) of a sequence of num_tokens, of which num_prompt_tokens are the prompt.

    `valid` None means that every row is known; `version_spans` hold (lo, hi, weight version) in absolute token
    indices."""

    ids: UInt[np.ndarray, "R M K"]
    start: int
    num_tokens: int
    num_prompt_tokens: int
    layer_ids: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    version_spans: VersionSpans
    valid: Bool[np.ndarray, " R"] | None = None
    weights: Float32[np.ndarray, "R M K"] | None = None
    router: str | None = None

    def __post_init__(self) -> None:
        _check_arrays(self)
        _check_tokens(self)
        for array in (self.ids, self.valid, self.weights):
            if array is not None:
                array.setflags(write=False)

    @property
    def num_rows(self) -> int:
        """R."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[2]

    @property
    def prompt(self) -> "RoutedExperts":
        """The rows whose token is part of the prompt."""
        return self[: self.num_prompt_tokens]

    @property
    def generated(self) -> "RoutedExperts":
        """The rows whose token was generated."""
        return self[self.num_prompt_tokens :]

    def __getitem__(self, tokens: slice) -> "RoutedExperts":
        """Cut the rows of tokens [a, b), absolute indices; tokens without a row are left out, S and prompt_len stay."""
        if not isinstance(tokens, slice):  # pyright: ignore[reportUnnecessaryIsInstance]  # iter() on a record ends here
            raise TypeError(
                f"a record is indexed by {type(tokens).__name__}; wanted a slice of absolute token indices, record[a:b]"
            )
        low, high = (
            (0 if tokens.start is None else tokens.start),
            (self.num_tokens if tokens.stop is None else tokens.stop),
        )
        if tokens.step not in (None, 1) or low < 0 or high < 0:
            raise IndexError(
                f"record[{low}:{high}:{tokens.step}] is no run of tokens; wanted absolute indices of at least 0 and no step"
            )
        end = self.start + self.num_rows
        low = min(max(low, self.start), end)
        high = min(max(high, low), end)
        rows = slice(low - self.start, high - self.start)
        return RoutedExperts(
            ids=self.ids[rows],
            start=low,
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            layer_ids=self.layer_ids,
            num_hidden_layers=self.num_hidden_layers,
            num_experts=self.num_experts,
            version_spans=tuple(
                (max(a, low), min(b, high), v) for a, b, v in self.version_spans if max(a, low) < min(b, high)
            ),
            valid=None if self.valid is None else self.valid[rows],
            weights=None if self.weights is None else self.weights[rows],
            router=self.router,
        )

    def validate(self, *, repeats_in_layers: Collection[int] = ()) -> None:
        """Raise RoutingFormatError naming the first bad token, layer and slot of the known rows.

        `repeats_in_layers`: hidden-layer indices of hash-routed layers, which may name an expert twice in a row."""
        known = _known_rows(self)
        check_id_range(self.ids, start=self.start, layer_ids=self.layer_ids, num_experts=self.num_experts, known=known)
        ordered = np.sort(self.ids, axis=2)
        repeats = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) & known[:, None]  # [R, M]
        repeats &= ~np.isin(self.layer_ids, tuple(repeats_in_layers))
        if repeats.any():
            row, column = np.argwhere(repeats)[0]
            chosen = self.ids[row, column].tolist()
            slot = next(k for k, expert in enumerate(chosen) if expert in chosen[:k])
            raise RoutingFormatError(
                f"token {self.start + row}, layer {self.layer_ids[column]}, slot {slot}: expert {chosen[slot]} is repeated in {chosen}; "
                f"wanted {self.top_k} distinct experts"
            )

    def __eq__(self, other: object) -> bool:
        """Compare ids, weights and metadata; what stands in rows that are not valid does not count."""
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        known = _known_rows(self)
        if _metadata(self) != _metadata(other) or not np.array_equal(known, _known_rows(other)):
            return False
        weights = (self.weights is None) == (other.weights is None)
        if self.weights is not None and other.weights is not None:
            weights = np.array_equal(self.weights[known], other.weights[known])
        return weights and np.array_equal(self.ids[known], other.ids[known])

    def to_bytes(self, token_ids: Int[np.ndarray, " S"] | None = None) -> bytes:
        """Encode as safetensors with the sidecar in its metadata; `token_ids` are the sequence's, all num_tokens of
        them."""
        from safetensors.numpy import save

        tensors: dict[str, np.ndarray] = {"routed_experts": self.ids}
        if token_ids is not None:
            if token_ids.shape != (self.num_tokens,):
                raise RoutingFormatError(
                    f"token_ids has shape {token_ids.shape}; wanted ({self.num_tokens},), the tokens of the sequence"
                )
            tensors["token_ids"] = np.ascontiguousarray(token_ids, dtype=np.int32)
        if self.weights is not None:
            tensors["routed_experts_weights"] = self.weights
        if self.valid is not None:
            tensors["valid"] = self.valid
        return save(tensors, metadata={INFO_KEY: json.dumps(to_metadata(self, payload_format="ref").to_json())})

    def to(self, name: str, *, missing: str = "error", dense_fill: int = -1) -> Any:
        """Convert to the arrays of another framework: sglang int32 [R, L, K] (dense layers `dense_fill`), vllm uint8 or
        uint16 [R, L, K] (dense 0), vllm021 a pair of int16 [rows, M, K] (prompt, generated), tunix int16 [S, M, K]
        (unknown -1), maxtext int32 [S, M, K], megatron a list of M int64 [S, K] and a mask bool [S], verl int16 [R, L,
        K] (dense 0), writable.

        `missing`: rows that are not valid raise RoutingFormatError, or with "gate" get the form's own mark, if it has
        one."""
        shape = FormShape(
            layer_ids=self.layer_ids,
            num_hidden_layers=self.num_hidden_layers,
            num_experts=self.num_experts,
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            start=self.start,
        )
        return write_form(name, self.ids, self.valid, shape, missing=missing, dense_fill=dense_fill)

    from_sglang = staticmethod(partial(_from_form, "sglang"))
    from_vllm = staticmethod(partial(_from_form, "vllm"))
    from_vllm021 = staticmethod(partial(_from_form, "vllm021"))
    from_tunix = staticmethod(partial(_from_form, "tunix"))
    from_maxtext = staticmethod(partial(_from_form, "maxtext"))
    from_megatron = staticmethod(partial(_from_form, "megatron"))
    from_verl = staticmethod(partial(_from_form, "verl"))

    @staticmethod
    def from_bytes(encoded: bytes) -> "RoutedExperts":
        """Decode what to_bytes made; raises RoutingFormatError on anything else."""
        return read_record_bytes(encoded)[0]


def read_record_bytes(encoded: bytes) -> tuple[RoutedExperts, Int32[np.ndarray, " S"] | None]:
    """Decode the safetensors form into the record and the token ids that travel with it, or None."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(encoded)
        header = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])
        info = json.loads(header["__metadata__"][INFO_KEY])
        ids = tensors["routed_experts"]
    except (SafetensorError, KeyError, TypeError, ValueError) as cause:
        raise RoutingFormatError(
            f"{len(encoded)} bytes are no record in safetensors form: {cause!r}; wanted what to_bytes made"
        ) from cause
    sidecar = RoutedExpertsMetadata.from_json(info)
    record = record_of(ids, sidecar, weights=tensors.get("routed_experts_weights"), valid=tensors.get("valid"))
    token_ids = tensors.get("token_ids")
    if token_ids is not None and (token_ids.shape != (record.num_tokens,) or token_ids.dtype != np.int32):
        raise RoutingFormatError(
            f"token_ids is {token_ids.dtype}{list(token_ids.shape)}; wanted int32[{record.num_tokens}]"
        )
    return record, token_ids


def record_of(
    ids: UInt[np.ndarray, "R M K"],
    sidecar: RoutedExpertsMetadata,
    *,
    weights: Float32[np.ndarray, "R M K"] | None = None,
    valid: Bool[np.ndarray, " R"] | None = None,
) -> RoutedExperts:
    """Join canonical ids with the sidecar that came with them; raises RoutingFormatError where the two disagree.

    `valid` None takes the bits of the sidecar."""
    valid = valid_rows_of(sidecar) if valid is None else valid
    num_missing = 0 if valid is None else int(valid.size - np.count_nonzero(valid))
    if num_missing != sidecar.missing_rows or (valid is not None and valid.shape != ids.shape[:1]):
        raise RoutingFormatError(
            f"{num_missing} of {ids.shape[0]} rows are marked missing; wanted {sidecar.missing_rows}, as routed_experts_info says"
        )
    if (weights is None) != (sidecar.weights is None):
        came = "no weights" if weights is None else "weights"
        raise RoutingFormatError(
            f"{came} came with the payload; wanted {sidecar.weights!r}, as routed_experts_info says"
        )
    record = RoutedExperts(
        ids=ids,
        start=sidecar.start,
        num_tokens=sidecar.num_tokens,
        num_prompt_tokens=sidecar.num_prompt_tokens,
        layer_ids=sidecar.moe_layer_ids,
        num_hidden_layers=sidecar.num_hidden_layers,
        num_experts=sidecar.num_experts,
        version_spans=sidecar.version_spans,
        valid=valid,
        weights=weights,
        router=sidecar.router,
    )
    check_id_range(
        ids, start=record.start, layer_ids=record.layer_ids, num_experts=record.num_experts, known=_known_rows(record)
    )
    if sidecar.sha256 is not None and sidecar.sha256 != ids_sha256(record):
        raise RoutingFormatError(
            f"ids have sha256 {ids_sha256(record)}; wanted {sidecar.sha256}: the payload was changed on its way"
        )
    return record


def to_metadata(
    record: RoutedExperts, *, payload_format: PayloadFormat, layers: PayloadLayers = "moe"
) -> RoutedExpertsMetadata:
    """Describe a payload of this record; the last token counts as included when it has a row."""
    dtype = {"int32": "int32", "list": "int16"}.get(payload_format, record.ids.dtype.name)
    num_columns = record.num_hidden_layers if layers == "all" else len(record.layer_ids)
    num_missing = 0 if record.valid is None else record.num_rows - int(np.count_nonzero(record.valid))
    packed = None if record.valid is None else np.packbits(record.valid, bitorder="little").tobytes()
    return RoutedExpertsMetadata(
        format=payload_format,
        layers=layers,
        dtype=dtype,
        shape=(record.num_rows, num_columns, record.top_k),
        start=record.start,
        num_tokens=record.num_tokens,
        num_prompt_tokens=record.num_prompt_tokens,
        prompt_rows=prompt_rows(record.start, record.num_rows, record.num_prompt_tokens),
        include_last=record.num_rows > 0 and record.start + record.num_rows == record.num_tokens,
        num_hidden_layers=record.num_hidden_layers,
        moe_layer_ids=record.layer_ids,
        num_experts=record.num_experts,
        top_k=record.top_k,
        dense_fill=None if layers == "moe" else 0 if payload_format == "npy" else -1,
        exact=True,
        placement=None,
        version_spans=record.version_spans,
        missing_rows=num_missing,
        weights=None if record.weights is None else "float32",
        router=record.router,
        sha256=ids_sha256(record),
        valid=base64.b64encode(packed).decode() if packed is not None and num_missing else None,
    )


def ids_sha256(record: RoutedExperts) -> str:
    """Hash the canonical ids, little-endian: equal for every wire form of one record."""
    return hashlib.sha256(record.ids.astype(record.ids.dtype.newbyteorder("<"), copy=False).data).hexdigest()


def _check_arrays(record: RoutedExperts) -> None:
    ids, layer_ids, dtype = record.ids, record.layer_ids, expert_id_dtype(record.num_experts)
    if ids.ndim != 3 or ids.dtype != dtype or not ids.flags.c_contiguous:
        raise RoutingFormatError(
            f"ids are {ids.dtype}{list(ids.shape)}, C-order {ids.flags.c_contiguous}; "
            f"wanted C-order {dtype}[R, M, K] for {record.num_experts} experts"
        )
    ascending = all(a < b for a, b in pairwise((-1, *layer_ids, record.num_hidden_layers)))
    if len(layer_ids) != ids.shape[1] or not ascending:
        raise RoutingFormatError(
            f"layer_ids {layer_ids} for {ids.shape[1]} columns; wanted one each, ascending in 0..{record.num_hidden_layers - 1}"
        )
    if record.valid is not None and (record.valid.shape != ids.shape[:1] or record.valid.dtype != np.bool_):
        raise RoutingFormatError(
            f"valid is {record.valid.dtype}{list(record.valid.shape)}; wanted bool[{ids.shape[0]}]"
        )
    if record.weights is not None and (record.weights.shape != ids.shape or record.weights.dtype != np.float32):
        raise RoutingFormatError(
            f"weights are {record.weights.dtype}{list(record.weights.shape)}; wanted float32{list(ids.shape)}"
        )


def _check_tokens(record: RoutedExperts) -> None:
    end = record.start + record.num_rows
    if record.start < 0 or end > record.num_tokens or not 0 <= record.num_prompt_tokens <= record.num_tokens:
        raise RoutingFormatError(
            f"rows of tokens [{record.start}, {end}) in a sequence of {record.num_tokens}, prompt {record.num_prompt_tokens}; "
            "wanted all of them inside the sequence"
        )
    check_version_spans(record.version_spans, record.start, end)


def _known_rows(record: RoutedExperts) -> Bool[np.ndarray, " R"]:
    return np.ones(record.num_rows, np.bool_) if record.valid is None else record.valid


def _metadata(record: RoutedExperts) -> tuple[object, ...]:
    return (
        record.ids.shape,
        record.start,
        record.num_tokens,
        record.num_prompt_tokens,
        record.layer_ids,
        record.num_hidden_layers,
        record.num_experts,
        record.version_spans,
        record.router,
    )
