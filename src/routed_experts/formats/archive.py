"""Files in safetensors: one record, with the token ids that it belongs to, or the answers of a run.

A record: routed_experts U8 or U16 [R, M, K]; where present token_ids I32 [S], routed_experts_weights F32 [R, M, K] (of
bfloat16 the bits, U16) and valid BOOL [R]; its metadata as JSON text in the header, under routed_experts_info. Answers:

    token_ids       I32 [sum of S]         prompt and generated tokens of each answer, one answer after another
    token_offsets   I64 [n + 1]            answer i has token_ids[token_offsets[i] : token_offsets[i + 1]]
    answers         U8  [bytes]            UTF-8 JSON lines: answers without token ids and payload, with metadata
    routed_experts  U8 or U16 [sum of R, M, K], row_offsets I64 [n + 1], and where present routed_experts_weights

Dims: S tokens of a sequence, R rows, M MoE layers, K experts a token, n answers. An answer without a record has no
rows."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Int, Int32, Int64
from safetensors import SafetensorError
from safetensors.numpy import load, save

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.metadata import (
    RoutedExpertsMetadata,
    from_stored_weights,
    to_metadata,
    to_record,
    to_stored_weights,
)
from routed_experts.formats.wire import INFO_KEY, PAYLOAD_KEY, WEIGHTS_KEY

BytesLike = bytes | bytearray | memoryview
_MARK = b'"token_offsets"'
_IDS = ("input_ids", "output_ids")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedAnswer:
    """One result of `Engine.generate` beside the fields of its prompt; `input_ids` and `output_ids` together are the
    sequence."""

    answer: Mapping[str, object]
    token_ids: Int32[np.ndarray, " S"]
    record: RoutedExperts | None


def encode_record(record: RoutedExperts, token_ids: Int[np.ndarray, " S"] | None = None) -> bytes:
    """Encode one record; `token_ids` are all tokens of its sequence. Raises RoutingFormatError for others."""
    tensors: dict[str, np.ndarray] = {PAYLOAD_KEY: record.ids}
    if token_ids is not None:
        tensors["token_ids"] = _to_int32("token_ids", token_ids, record.num_tokens)
    if record.weights is not None:
        tensors[WEIGHTS_KEY] = to_stored_weights(record.weights)
    if record.valid is not None:
        tensors["valid"] = record.valid
    return save(tensors, metadata={INFO_KEY: json.dumps(to_metadata(record, payload_format="ref").to_json())})


def decode_record(encoded: BytesLike) -> RoutedExperts:
    """Decode the content of a file of one record: what encode_record made, `convert` wrote or `format=safetensors`
    returned. Raises RoutingFormatError for anything else, also for the answers of `generate --output`."""
    return decode_record_and_tokens(encoded)[0]


def decode_record_and_tokens(encoded: BytesLike) -> tuple[RoutedExperts, Int32[np.ndarray, " S"] | None]:
    """Decode the record and the token ids that travel with it, or None."""
    encoded = _to_bytes(encoded)
    if holds_answers(encoded):
        raise RoutingFormatError(
            f"these {len(encoded)} bytes hold {len(decode_answers(encoded))} answers, not one record; read them with "
            "routed_experts.formats.decode_answers, or make a file of one: routed-experts convert FILE.safetensors "
            "record.safetensors --line 1"
        )
    try:
        tensors = load(encoded)
        header = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])
        info = json.loads(header["__metadata__"][INFO_KEY])
        ids = tensors[PAYLOAD_KEY]
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as cause:
        raise RoutingFormatError(
            f"{len(encoded)} bytes are no record in safetensors form: {cause!r}; give what encode_record made"
        ) from cause
    metadata = RoutedExpertsMetadata.from_json(info)
    weights = tensors.get(WEIGHTS_KEY)
    weights = None if weights is None else from_stored_weights(weights, metadata.weights)
    record = to_record(ids, metadata, weights=weights, valid=tensors.get("valid"))
    token_ids = tensors.get("token_ids")
    if token_ids is not None and (token_ids.shape != (record.num_tokens,) or token_ids.dtype != np.int32):
        raise RoutingFormatError(
            f"token_ids is {token_ids.dtype}{list(token_ids.shape)}; expected int32[{record.num_tokens}]"
        )
    return record, token_ids


def encode_answers(answers: Sequence[ArchivedAnswer]) -> bytes:
    """Encode the answers of a run. Raises RoutingFormatError for records of several models, for token ids that are not
    those of the record, and for fields that are no JSON."""
    lines = b"".join(_json_line(index, answer) for index, answer in enumerate(answers))
    token_ids = [
        _to_int32(
            f"answers[{index}].token_ids", answer.token_ids, None if answer.record is None else answer.record.num_tokens
        )
        for index, answer in enumerate(answers)
    ]
    tensors: dict[str, np.ndarray] = {
        "token_ids": np.concatenate([np.zeros(0, np.int32), *token_ids]),
        "token_offsets": _offsets([ids.size for ids in token_ids]),
        "answers": np.frombuffer(lines, np.uint8),
    }
    records = [answer.record for answer in answers if answer.record is not None]
    if records:
        _check_one_model(records)
        tensors[PAYLOAD_KEY] = np.concatenate([record.ids for record in records])
        tensors["row_offsets"] = _offsets(
            [0 if answer.record is None else answer.record.num_rows for answer in answers]
        )
        weights = [record.weights for record in records if record.weights is not None]
        if weights:
            tensors[WEIGHTS_KEY] = to_stored_weights(np.concatenate(weights))
    return save(tensors)


def decode_answers(encoded: BytesLike) -> list[ArchivedAnswer]:
    """Decode the content of a .safetensors file of `generate --output`, in order of the prompts. Raises
    RoutingFormatError for anything else."""
    encoded = _to_bytes(encoded)
    try:
        tensors = load(encoded)
        lines = [cast("dict[str, Any]", json.loads(line)) for line in tensors["answers"].tobytes().splitlines()]
        token_ids = tensors["token_ids"]
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise RoutingFormatError(
                f"token_ids is {token_ids.dtype}{list(token_ids.shape)}; expected int32 of one dim"
            )
        tokens = _split(token_ids, tensors["token_offsets"], len(lines))
        rows = (
            _split(tensors[PAYLOAD_KEY], tensors["row_offsets"], len(lines))
            if PAYLOAD_KEY in tensors
            else [None] * len(lines)
        )
        weights = (
            _split(tensors[WEIGHTS_KEY], tensors["row_offsets"], len(lines))
            if WEIGHTS_KEY in tensors
            else [None] * len(lines)
        )
        return [_to_answer(*parts) for parts in zip(lines, tokens, rows, weights, strict=True)]
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as cause:
        raise RoutingFormatError(
            f"{len(encoded)} bytes are no file of answers: {cause}; give what generate --output wrote"
        ) from cause


def holds_answers(encoded: BytesLike) -> bool:
    """Whether this safetensors file holds answers, and not one record."""
    encoded = _to_bytes(encoded)
    return _MARK in encoded[8 : 8 + int.from_bytes(encoded[:8], "little")]


def _to_bytes(encoded: object) -> bytes:
    """The bytes that safetensors reads, which takes no other type. Raises RoutingFormatError."""
    if not isinstance(encoded, bytes | bytearray | memoryview):
        raise RoutingFormatError(
            f"received {short_repr(encoded)}, which are no bytes; give the content of a .safetensors file"
        )
    return bytes(encoded)


def _to_int32(name: str, token_ids: object, num_tokens: int | None) -> Int32[np.ndarray, " S"]:
    """The token ids as int32, C-order. Raises RoutingFormatError for what is no int32, and for another number of them;
    None: any number."""
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError) as cause:
        raise RoutingFormatError(f"{name} is no array ({cause}); expected the tokens of the sequence") from cause
    if array.ndim != 1 or (num_tokens is not None and array.size != num_tokens):
        shape = "one dim" if num_tokens is None else f"({num_tokens},)"
        raise RoutingFormatError(f"{name} has shape {array.shape}; expected {shape}, the tokens of the sequence")
    if array.size and array.dtype.kind not in "iu":
        raise RoutingFormatError(f"{name} holds {array.dtype}; expected integers, the tokens of the sequence")
    limits = np.iinfo(np.int32)
    outside = np.flatnonzero((array < limits.min) | (array > limits.max)) if array.size else array
    if outside.size:
        value = array[outside[0]]
        raise RoutingFormatError(f"{name}[{outside[0]}] is {value}; expected an int32, as token ids of all models are")
    return np.ascontiguousarray(array, dtype=np.int32)


def _json_line(index: int, archived: ArchivedAnswer) -> bytes:
    """The fields of an answer as a line of UTF-8. Raises RoutingFormatError for what JSON, or UTF-8, does not hold."""
    try:
        return json.dumps(_line(archived), ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as cause:
        text = f"answers[{index}] is no JSON in UTF-8 ({cause})"
        raise RoutingFormatError(f"{text}; give what Engine.generate returned, without lone surrogates") from cause


def _line(archived: ArchivedAnswer) -> dict[str, object]:
    answer = {name: value for name, value in archived.answer.items() if name not in _IDS}
    meta_info = dict(cast("Mapping[str, object]", answer.get("meta_info", {})))
    for name in (PAYLOAD_KEY, WEIGHTS_KEY, INFO_KEY):
        meta_info.pop(name, None)
    if archived.record is not None:
        meta_info[INFO_KEY] = to_metadata(archived.record, payload_format="ref").to_json()
    return {**answer, "meta_info": meta_info}


def _to_answer(
    line: dict[str, Any], tokens: np.ndarray, rows: np.ndarray | None, weights: np.ndarray | None
) -> ArchivedAnswer:
    meta_info = line["meta_info"]
    info, num_prompt_tokens = meta_info.get(INFO_KEY), meta_info["prompt_tokens"]
    if type(num_prompt_tokens) is not int or not 0 <= num_prompt_tokens <= tokens.size:
        raise RoutingFormatError(
            f"prompt_tokens is {short_repr(num_prompt_tokens)}; expected an integer of 0 to {tokens.size}, the tokens "
            "of the answer"
        )
    record = None
    if info is not None and rows is not None:
        metadata = RoutedExpertsMetadata.from_json(info)
        if metadata.num_tokens != tokens.size:
            raise RoutingFormatError(
                f"an answer of {tokens.size} tokens has a record of {metadata.num_tokens}; expected as many: write the "
                "answers again"
            )
        stored = weights if metadata.weights is not None else None
        record = to_record(
            rows, metadata, weights=None if stored is None else from_stored_weights(stored, metadata.weights)
        )
    ids = {"input_ids": tokens[:num_prompt_tokens].tolist(), "output_ids": tokens[num_prompt_tokens:].tolist()}
    return ArchivedAnswer(answer={**line, **ids}, token_ids=tokens, record=record)


def _offsets(sizes: Sequence[int]) -> Int64[np.ndarray, " n+1"]:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _split(array: np.ndarray, offsets: Int64[np.ndarray, " n+1"], count: int) -> list[np.ndarray]:
    """Split at offsets; raises RoutingFormatError unless there are `count` parts of the whole array."""
    fits = offsets.dtype == np.int64 and offsets.shape == (count + 1,) and offsets[0] == 0 and offsets[-1] == len(array)
    if not fits or (np.diff(offsets) < 0).any():
        raise RoutingFormatError(f"offsets {offsets.dtype}{list(offsets.shape)} do not split {len(array)} into {count}")
    return [array[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]


def _check_one_model(records: Sequence[RoutedExperts]) -> None:
    kinds = {
        (
            *(record.layer_ids, record.num_hidden_layers, record.num_experts, record.top_k),
            None if record.weights is None else record.weights.dtype,
        )
        for record in records
    }
    if len(kinds) > 1:
        text = f"records of {len(kinds)} models, or of weights of several dtypes or none"
        raise RoutingFormatError(f"{text}; write a file for each")
