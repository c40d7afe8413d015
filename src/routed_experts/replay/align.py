"""Align records, one for each sample, with the tokens of a batch as a RoutedBatch. Host NumPy, strict, no silent
repair.

Column of row t of a sample with S tokens, in rows of L positions:
    pad_right  t                      tokens left, padding right
    pad_left   L - S + t              padding left, tokens right
    pad_both   width - prompt_len + t prompts end, and completions begin, at prompt_width
    packed     offset + t             all samples one after another in one row; offsets in order of samples
Over-long samples are cut as their tokens are: pad_both keeps the prompt's tail and the completion's head, the others
the head. Dims: B rows of the batch, S tokens of a sequence, M MoE layers, K experts per token."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, UInt

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.integers import to_int
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.replay.batch import RoutedBatch
from routed_experts.replay.check import allowed_versions, check_record, check_weights, layers_with_repeats

LAYOUTS = ("pad_right", "pad_left", "pad_both", "packed")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of a batch; a `record` of None has no valid row. `prompt_len` is needed for pad_both alone and
    equals the record's; for merged turns it is that of the first turn."""

    record: RoutedExperts | None
    num_tokens: int
    prompt_len: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """Tokens [first, end) of a sample begin at column `column` in row `row` of the batch."""

    row: int
    column: int
    first: int
    end: int


def align(
    samples: Iterable[Sample],
    *,
    layout: str,
    seq_len: int,
    spec: CaptureSpec,
    prompt_width: int | None = None,
    zigzag: int = 1,
    versions: Iterable[int | str] | None = None,
    repeats_in_layers: Iterable[int] = (),
    weights: bool = False,
) -> RoutedBatch:
    """Lay records out as a batch of `seq_len` positions a row. Arrays are NumPy; put them on devices as the tokens are.

    `spec` is the model's `config.capture_spec`. A column is valid where its record holds the row and marks it valid;
    tokens before a record's start, and the last token of a generated sequence, are neither valid nor pad. `zigzag` =
    c permutes columns by `zigzag_order`, for context parallelism. `versions`: the weights that rows may come from, by
    count of updates or by label; None allows any. `repeats_in_layers`: hash-routed layers. `weights` lays out recorded
    combine weights too. Raises RoutingAlignmentError naming sample, row and layer of a mismatch, and for an argument
    that does not fit; InvalidRequestError for `versions` or `repeats_in_layers` that are none."""
    samples = _check_samples(samples)
    allowed, repeats = allowed_versions(versions), layers_with_repeats(repeats_in_layers)
    if not isinstance(spec, CaptureSpec):
        raise RoutingAlignmentError(
            f"spec is {short_repr(spec)}; give the model's config.capture_spec (None: the model has no experts, and "
            "nothing is replayed on it)"
        )
    if not isinstance(weights, bool):
        raise RoutingAlignmentError(f"weights={short_repr(weights)} must be True or False")
    spans = _spans(samples, layout, seq_len, prompt_width)
    order = zigzag_order(seq_len, zigzag)
    num_rows = 1 if layout == "packed" else len(samples)
    shape = (num_rows, seq_len, spec.num_moe_layers, spec.top_k)
    ids: UInt[np.ndarray, "B S M K"] = np.zeros(shape, spec.dtype)
    batch_weights: Float32[np.ndarray, "B S M K"] | None = np.zeros(shape, np.float32) if weights else None
    valid: Bool[np.ndarray, "B S"] = np.zeros((num_rows, seq_len), np.bool_)
    pad: Bool[np.ndarray, "B S"] = np.ones((num_rows, seq_len), np.bool_)
    for index, (sample, span) in enumerate(zip(samples, spans, strict=True)):
        pad[span.row, span.column : span.column + span.end - span.first] = False
        if sample.record is None:
            continue
        check_record(
            sample.record,
            spec,
            sample=index,
            num_tokens=sample.num_tokens,
            versions=allowed,
            repeats_in_layers=repeats,
        )
        part = sample.record[span.first : span.end]
        column = span.column + part.start - span.first
        to = slice(column, column + part.num_rows)
        ids[span.row, to], valid[span.row, to] = part.ids, True if part.valid is None else part.valid
        if batch_weights is not None:
            batch_weights[span.row, to] = check_weights(part, sample=index)
    arrays: list[Any] = [ids, valid, pad, batch_weights]
    if zigzag > 1:
        arrays = [None if array is None else np.take(array, order, axis=1) for array in arrays]
    return RoutedBatch(*arrays)


def zigzag_order(seq_len: int, parts: int) -> Int[np.ndarray, " S"]:
    """Return the order of columns for which a contiguous split in `parts` gives rank r the chunks r and 2 * parts -
    1 - r: all ranks have equal parts of the causal triangle. Permute tokens, positions and segment ids alike. Raises
    RoutingAlignmentError where S is no multiple of 2 * parts, and for numbers below 1."""
    _check_int("seq_len", seq_len, 1)
    _check_int("zigzag", parts, 1)
    if parts == 1:
        return np.arange(seq_len)
    if seq_len % (2 * parts):
        raise RoutingAlignmentError(
            f"seq_len={seq_len} is no multiple of {2 * parts}, two chunks for each of zigzag={parts}; pad the rows"
        )
    chunks = np.arange(seq_len).reshape(2 * parts, -1)
    return np.concatenate([chunks[[rank, 2 * parts - 1 - rank]].reshape(-1) for rank in range(parts)])


def _check_samples(samples: Iterable[Sample]) -> list[Sample]:
    """The samples, read once."""
    if not isinstance(samples, Iterable):
        raise RoutingAlignmentError(
            f"samples is {short_repr(samples)}; give a list of Sample(record, num_tokens), also for one"
        )
    read = list(samples)
    for index, sample in enumerate(read):
        if not isinstance(sample, Sample):
            raise RoutingAlignmentError(f"sample {index} is {short_repr(sample)}; give Sample(record, num_tokens)")
    return read


def _spans(samples: Sequence[Sample], layout: str, seq_len: int, prompt_width: int | None) -> list[_Span]:
    if layout not in LAYOUTS:
        raise RoutingAlignmentError(f"layout={layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    _check_int("seq_len", seq_len, 1)
    if not samples:
        raise RoutingAlignmentError("samples is empty; give at least one")
    if (prompt_width is not None) != (layout == "pad_both"):
        raise RoutingAlignmentError(
            f"prompt_width={prompt_width!r} with layout={layout!r}; it belongs to pad_both, and only there"
        )
    if prompt_width is not None:
        _check_int("prompt_width", prompt_width, 0, seq_len)
    spans: list[_Span] = []
    offset = 0
    for index, sample in enumerate(samples):
        _check_int(f"sample {index}: num_tokens", sample.num_tokens, 1)
        prompt_len = _prompt_len(sample, index, layout)
        length = min(sample.num_tokens, seq_len)
        if layout == "pad_right":
            spans.append(_Span(index, 0, 0, length))
        elif layout == "pad_left":
            spans.append(_Span(index, seq_len - length, 0, length))
        elif layout == "packed":
            if offset >= seq_len:
                raise RoutingAlignmentError(
                    f"sample {index} begins at position {offset} of a row of {seq_len}; pack it into another row"
                )
            length = min(sample.num_tokens, seq_len - offset)
            spans.append(_Span(0, offset, 0, length))
            offset += length
        else:
            assert prompt_width is not None
            first = max(prompt_len - prompt_width, 0)
            end = min(sample.num_tokens, prompt_len + seq_len - prompt_width)
            spans.append(_Span(index, prompt_width - (prompt_len - first), first, end))
    return spans


def _prompt_len(sample: Sample, index: int, layout: str) -> int:
    """Return the prompt's length, which places every row of a pad_both sample."""
    if sample.prompt_len is None and layout != "pad_both":
        return 0
    if sample.prompt_len is None:
        raise RoutingAlignmentError(
            f"sample {index}: prompt_len is missing; pad_both ends prompts at prompt_width, so give it"
        )
    _check_int(f"sample {index}: prompt_len", sample.prompt_len, 0, sample.num_tokens)
    if layout == "pad_both" and sample.record is not None and sample.record.num_prompt_tokens != sample.prompt_len:
        raise RoutingAlignmentError(
            f"sample {index}: prompt_len={sample.prompt_len}, and its record has a prompt of "
            f"{sample.record.num_prompt_tokens}; give that one"
        )
    return sample.prompt_len


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    to_int(name, value, low, high, error=RoutingAlignmentError)
