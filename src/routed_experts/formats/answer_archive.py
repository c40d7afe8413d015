"""A file of many answers: their token ids, rows and JSON as one safetensors file. Knows nothing of engines or of who
reads it.

    token_ids       I32 [sum of S]         prompt and generated tokens of each answer, one answer after another
    token_offsets   I64 [n + 1]            answer i has token_ids[token_offsets[i] : token_offsets[i + 1]]
    answers         U8  [bytes]            UTF-8 JSON lines: each answer without its token ids and payload; its sidecar stays
    routed_experts  U8 or U16 [sum of R, M, K], row_offsets I64 [n + 1], and routed_experts_weights F32 where there are weights

Dims: S tokens of a sequence, R rows, M MoE layers, K experts a token, n answers. Rows of answers without a record:
none."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Int32, Int64
from safetensors import SafetensorError
from safetensors.numpy import load, save

from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts, record_of, to_metadata
from routed_experts.core.routed_experts_metadata import RoutedExpertsMetadata
from routed_experts.formats.wire import INFO_KEY, PAYLOAD_KEY, WEIGHTS_KEY

_MARK = b'"token_offsets"'
_IDS = ("input_ids", "output_ids")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedAnswer:
    """One result of `Engine.generate`, the prompt's fields beside it; `input_ids` and `output_ids` together are the
    sequence."""

    answer: Mapping[str, object]
    token_ids: Int32[np.ndarray, " S"]
    record: RoutedExperts | None


def encode_answers(answers: Sequence[ArchivedAnswer]) -> bytes:
    """Encode as the file above. Raises RoutingFormatError for records of several models."""
    lines = b"".join(json.dumps(_line(one), ensure_ascii=False).encode() + b"\n" for one in answers)
    tensors: dict[str, np.ndarray] = {
        "token_ids": np.concatenate([np.zeros(0, np.int32), *(one.token_ids for one in answers)]).astype(np.int32),
        "token_offsets": _offsets([one.token_ids.size for one in answers]),
        "answers": np.frombuffer(lines, np.uint8),
    }
    records = [one.record for one in answers if one.record is not None]
    if records:
        _check_one_model(records)
        tensors[PAYLOAD_KEY] = np.concatenate([record.ids for record in records])
        tensors["row_offsets"] = _offsets([0 if one.record is None else one.record.num_rows for one in answers])
        weights = [record.weights for record in records if record.weights is not None]
        if weights:
            tensors[WEIGHTS_KEY] = np.concatenate(weights)
    return save(tensors)


def decode_answers(encoded: bytes) -> list[ArchivedAnswer]:
    """Decode what encode_answers made; raises RoutingFormatError on anything else."""
    try:
        tensors = load(encoded)
        lines = [cast("dict[str, Any]", json.loads(line)) for line in tensors["answers"].tobytes().splitlines()]
        tokens = _parts(tensors["token_ids"], tensors["token_offsets"], len(lines))
        rows = (
            _parts(tensors[PAYLOAD_KEY], tensors["row_offsets"], len(lines))
            if PAYLOAD_KEY in tensors
            else [None] * len(lines)
        )
        weights = (
            _parts(tensors[WEIGHTS_KEY], tensors["row_offsets"], len(lines))
            if WEIGHTS_KEY in tensors
            else [None] * len(lines)
        )
        return [_filed(*one) for one in zip(lines, tokens, rows, weights, strict=True)]
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as cause:
        raise RoutingFormatError(
            f"{len(encoded)} bytes are no file of answers: {cause}; give what generate --output wrote"
        ) from cause


def holds_answers(encoded: bytes) -> bool:
    """Is this safetensors file one of answers, and not one record."""
    return _MARK in encoded[8 : 8 + int.from_bytes(encoded[:8], "little")]


def _line(one: ArchivedAnswer) -> dict[str, object]:
    said = {name: value for name, value in one.answer.items() if name not in _IDS}
    meta = dict(cast("Mapping[str, object]", said.get("meta_info", {})))
    for name in (PAYLOAD_KEY, WEIGHTS_KEY, INFO_KEY):
        meta.pop(name, None)
    if one.record is not None:
        meta[INFO_KEY] = to_metadata(one.record, payload_format="ref").to_json()
    return {**said, "meta_info": meta}


def _filed(
    line: dict[str, Any], tokens: np.ndarray, rows: np.ndarray | None, weights: np.ndarray | None
) -> ArchivedAnswer:
    meta = line["meta_info"]
    info, edge = meta.get(INFO_KEY), int(meta["prompt_tokens"])
    record = None
    if info is not None and rows is not None:
        sidecar = RoutedExpertsMetadata.from_json(info)
        record = record_of(rows, sidecar, weights=weights if sidecar.weights is not None else None)
    ids = {"input_ids": tokens[:edge].tolist(), "output_ids": tokens[edge:].tolist()}
    return ArchivedAnswer(answer={**line, **ids}, token_ids=tokens, record=record)


def _offsets(sizes: Sequence[int]) -> Int64[np.ndarray, " n+1"]:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _parts(whole: np.ndarray, offsets: Int64[np.ndarray, " n+1"], count: int) -> list[np.ndarray]:
    """The pieces of `whole` between offsets; raises RoutingFormatError unless they cut it into `count` pieces."""
    fits = offsets.dtype == np.int64 and offsets.shape == (count + 1,) and offsets[0] == 0 and offsets[-1] == len(whole)
    if not fits or (np.diff(offsets) < 0).any():
        raise RoutingFormatError(
            f"offsets {offsets.dtype}{list(offsets.shape)} do not cut {len(whole)} into {count} pieces"
        )
    return [whole[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]


def _check_one_model(records: Sequence[RoutedExperts]) -> None:
    kinds = {(one.layer_ids, one.num_hidden_layers, one.num_experts, one.top_k, one.weights is None) for one in records}
    if len(kinds) > 1:
        raise RoutingFormatError(f"records of {len(kinds)} models, or with weights and without; write a file for each")
