"""Merge the records of a conversation's turns, or of a rollout that was aborted and continued, into one record.

A turn's row is usable where the turn ran on the same tokens; the first turn that has a row wins. Host NumPy. Dims: S
tokens of a sequence, R rows."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.record_validation import to_version_spans
from routed_experts.core.routed_experts import RoutedExperts


def merge_turns(
    turns: Iterable[tuple[Int[np.ndarray, " S_i"], RoutedExperts]], tokens: Int[np.ndarray, " S"]
) -> RoutedExperts:
    """Merge the records of turns, in order of time, each with all the tokens that it ran on, into the record of
    `tokens`.

    Row t of a turn counts iff t is before the first token in which the turn differs from `tokens`. The row of a
    turn's last token, which was never fed, comes from the next turn's prefill. A row that no turn has is not valid (its
    version span is its neighbour's and is meaningless). The rows are those of tokens from the lowest start to S - 1, or
    to S where a turn fed the last token. Raises RoutingAlignmentError naming the turn that does not fit its tokens or
    the first turn's model."""
    sequence = _check_tokens(tokens, "tokens")
    checked = _check_turns(turns)
    first = checked[0][1]
    usable = [
        min(_common_prefix_len(turn_tokens, sequence), record.start + record.num_rows)
        for turn_tokens, record in checked
    ]
    start = min(sequence.size - 1, *(record.start for _, record in checked))
    num_rows = max(sequence.size - 1, *usable) - start
    ids = np.zeros((num_rows, *first.ids.shape[1:]), first.ids.dtype)
    weights = None if first.weights is None else np.zeros(ids.shape, first.weights.dtype)
    valid, versions = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.int64)
    labels: dict[int, str] = {}
    changed = next((record for _, record in reversed(checked) if not record.exact), first)
    for (_, record), end in zip(checked, usable, strict=True):
        part = record[:end]
        to = slice(part.start - start, part.start - start + part.num_rows)
        new = ~valid[to] if part.valid is None else part.valid & ~valid[to]
        ids[to][new], versions[to][new] = part.ids[new], _versions(part)[new]
        if weights is not None and part.weights is not None:
            weights[to][new] = part.weights[new]
        valid[to] |= new
        labels = part.labels | labels
    return RoutedExperts(
        ids=ids,
        start=start,
        num_tokens=sequence.size,
        num_prompt_tokens=min(first.num_prompt_tokens, sequence.size),
        layer_ids=first.layer_ids,
        num_hidden_layers=first.num_hidden_layers,
        num_experts=first.num_experts,
        version_spans=to_version_spans(start, _fill_unknown(versions, valid)),
        valid=None if valid.all() else valid,
        weights=weights,
        router=first.router,
        version_labels=tuple(sorted(labels.items())),
        exact=changed.exact,
        placement=changed.placement,
    )


def _check_turns(
    turns: Iterable[tuple[Int[np.ndarray, " S_i"], RoutedExperts]],
) -> list[tuple[Int[np.ndarray, " S_i"], RoutedExperts]]:
    """The turns, read once."""
    if not isinstance(turns, Iterable):
        raise RoutingAlignmentError(f"turns is {short_repr(turns)}; give a list of (tokens, record), also for one")
    checked: list[tuple[Int[np.ndarray, " S_i"], RoutedExperts]] = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, tuple | list) or len(turn) != 2:
            raise RoutingAlignmentError(f"turn {index} is {short_repr(turn)}; give a pair (tokens, record)")
        turn_tokens, record = _check_tokens(turn[0], f"turn {index}: tokens"), turn[1]
        _check_turn(index, turn_tokens, record, checked[0][1] if checked else record)
        checked.append((turn_tokens, record))
    if not checked:
        raise RoutingAlignmentError("turns is empty; give at least one (tokens, record)")
    return checked


def _check_tokens(tokens: object, name: str) -> Int[np.ndarray, " S"]:
    try:
        array = np.asarray(tokens)
    except ValueError as cause:  # lists of several lengths
        raise RoutingAlignmentError(
            f"{name} are {short_repr(tokens)} that is no array; expected a row of at least one integer token id"
        ) from cause
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise RoutingAlignmentError(
            f"{name} are {array.dtype}{list(array.shape)}; expected a row of at least one integer token id"
        )
    return array


def _check_turn(index: int, turn_tokens: Int[np.ndarray, " S_i"], record: RoutedExperts, first: RoutedExperts) -> None:
    if not isinstance(record, RoutedExperts):
        raise RoutingAlignmentError(
            f"turn {index}: the record is a {type(record).__name__}; give a RoutedExperts, and leave out a turn that "
            "was aborted before its first token"
        )
    if record.num_tokens != turn_tokens.size:
        raise RoutingAlignmentError(
            f"turn {index}: the record is of {record.num_tokens} tokens, and {turn_tokens.size} are given; give all "
            "that the turn ran on"
        )
    for name, received, expected in (
        ("layer_ids", record.layer_ids, first.layer_ids),
        ("num_hidden_layers", record.num_hidden_layers, first.num_hidden_layers),
        ("num_experts", record.num_experts, first.num_experts),
        ("top_k", record.top_k, first.top_k),
        ("router", record.router, first.router),
        ("weights", _weights_dtype(record), _weights_dtype(first)),
    ):
        if received != expected:
            raise RoutingAlignmentError(
                f"turn {index}: {name}={received}, but turn 0 has {expected}; merge records of one model, that have "
                "combine weights of one dtype or have none"
            )


def _weights_dtype(record: RoutedExperts) -> str | None:
    return None if record.weights is None else record.weights.dtype.name


def _common_prefix_len(turn_tokens: Int[np.ndarray, " S_i"], tokens: Int[np.ndarray, " S"]) -> int:
    """Return the length of the longest common prefix."""
    length = min(turn_tokens.size, tokens.size)
    differs = np.flatnonzero(turn_tokens[:length] != tokens[:length])
    return int(differs[0]) if differs.size else length


def _versions(record: RoutedExperts) -> Int[np.ndarray, " R"]:
    lengths = [high - low for low, high, _ in record.version_spans]
    return np.repeat(np.array([version for _, _, version in record.version_spans], np.int64), lengths)


def _fill_unknown(versions: Int[np.ndarray, " R"], valid: np.ndarray) -> Int[np.ndarray, " R"]:
    """Give rows that are not known the version of the known row before them, or of the first one after."""
    known = np.flatnonzero(valid)
    if known.size == 0:
        return versions
    before = np.searchsorted(known, np.arange(versions.size), side="right") - 1
    return versions[known[np.maximum(before, 0)]]
