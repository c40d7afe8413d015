"""Check a record strictly against the sample and the model that it is replayed on. Host NumPy.

Nothing is repaired: a mismatch is a RoutingAlignmentError that names the sample, the token and the hidden layer.
Dims: R rows, M MoE layers, K experts per token, E experts."""

from collections.abc import Collection, Iterable

import numpy as np
from jaxtyping import Bool

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, RoutingAlignmentError
from routed_experts.core.integers import is_integer
from routed_experts.core.record_validation import repeated_rows
from routed_experts.core.routed_experts import CombineWeights, RoutedExperts


def check_record(
    record: RoutedExperts,
    spec: CaptureSpec,
    *,
    sample: int,
    num_tokens: int,
    versions: Collection[int | str] | None = None,
    repeats_in_layers: Collection[int] = (),
) -> None:
    """Raise RoutingAlignmentError unless the record holds rows of this model for a sequence of `num_tokens`.

    `versions`: the weights that the batch allows, as `allowed_versions` gives them; None allows any.
    `repeats_in_layers`: hidden-layer indices of hash-routed layers, where a row may name an expert twice."""
    if not isinstance(record, RoutedExperts):
        raise RoutingAlignmentError(
            f": record is a {type(record).__name__}; give a RoutedExperts, or None for no rows",
            sample=sample,
        )
    _check_model(record, spec, sample)
    rows, end = record.num_rows, record.start + record.num_rows
    if record.num_tokens != num_tokens or end not in (num_tokens - 1, num_tokens):
        raise RoutingAlignmentError(
            f": {rows} rows of tokens [{record.start}, {end}) of a sequence of {record.num_tokens}; "
            "the sample has "
            f"{num_tokens} tokens, so expected {num_tokens - 1 - record.start} rows (generate) or "
            f"{num_tokens - record.start} (score); "
            "cut both alike",
            sample=sample,
        )
    _check_versions(record, versions, sample)
    _check_ids(record, spec, record.known, sample, repeats_in_layers)


def check_num_records(num_records: int, num_sequences: int) -> None:
    """Raise RoutingAlignmentError unless there is a record, or None, for each sequence."""
    if num_records != num_sequences:
        text = f"routed holds {num_records} records for {num_sequences} sequences; give one each, or None"
        raise RoutingAlignmentError(text)


def check_weights(record: RoutedExperts, *, sample: int) -> CombineWeights:
    """The combine weights of a record. Raises RoutingAlignmentError where it has none, or one of a known row is no
    finite number."""
    weights = record.weights
    if weights is None:
        raise RoutingAlignmentError(
            ": the record has no combine weights; record them (return_routed_experts_weights=True), or "
            "replay ids alone",
            sample=sample,
        )
    broken = ~np.isfinite(weights) & record.known[:, None, None]
    if broken.any():
        row, column, slot = np.argwhere(broken)[0]
        raise RoutingAlignmentError(
            f", token {record.start + row}, hidden layer {record.layer_ids[column]}, slot {slot}: "
            f"weight {weights[row, column, slot]}; expected a finite number; give weights as they were recorded",
            sample=sample,
        )
    return weights


def allowed_versions(versions: Iterable[int | str] | None) -> frozenset[int | str] | None:
    """The weights that a batch allows, read once; None allows any. Raises InvalidRequestError for what is no collection
    of counts and labels."""
    if versions is None:
        return None
    if isinstance(versions, str):
        text = f"versions={short_repr(versions)} is one label; give a list of counts or labels, also for one"
        raise InvalidRequestError(text, param="versions")
    if not isinstance(versions, Iterable):
        text = f"versions={short_repr(versions)} is no list; give a list of counts or labels, also for one"
        raise InvalidRequestError(text, param="versions")
    allowed = list[int | str](versions)
    wrong = [version for version in allowed if not isinstance(version, str) and not is_integer(version)]
    if wrong:
        text = f"versions holds {short_repr(wrong[0])}; expected counts of updates (integers) or labels (text)"
        raise InvalidRequestError(text, param="versions")
    return frozenset(version if isinstance(version, str) else int(version) for version in allowed)


def layers_with_repeats(layers: Iterable[int]) -> tuple[int, ...]:
    """`repeats_in_layers`, read once. Raises InvalidRequestError for what are no integers."""
    indices = tuple(layers) if isinstance(layers, Iterable) else (None,)
    if not all(map(is_integer, indices)):
        text = f"repeats_in_layers={short_repr(layers)}; expected a list of indices of hidden layers, also for one"
        raise InvalidRequestError(text, param="repeats_in_layers")
    return tuple(int(index) for index in indices if index is not None)


def _check_versions(record: RoutedExperts, versions: Collection[int | str] | None, sample: int) -> None:
    if versions is None:
        return
    labels = record.labels
    for low, high, count in record.version_spans:
        label = labels.get(count)
        if count in versions or (label is not None and label in versions):
            continue
        name = "" if label is None else f" ({short_repr(label)})"
        raise RoutingAlignmentError(
            f", row {low}: rows {low} to {high - 1} were routed by weight version {count}{name}; this "
            f"batch allows {sorted(versions, key=str)}; drop the sample, or allow the version",
            sample=sample,
        )


def _check_model(record: RoutedExperts, spec: CaptureSpec, sample: int) -> None:
    pairs: dict[str, tuple[object, object]] = {
        "layer_ids": (record.layer_ids, spec.layer_ids),
        "num_hidden_layers": (record.num_hidden_layers, spec.num_hidden_layers),
        "num_experts": (record.num_experts, spec.num_experts),
        "top_k": (record.top_k, spec.top_k),
    }
    if record.router is not None and spec.router is not None:
        pairs["router"] = (record.router, spec.router)
    for name, (received, expected) in pairs.items():
        if received != expected:
            layers = ""
            if name == "layer_ids":
                layers = f" (layers {sorted(set(record.layer_ids) ^ set(spec.layer_ids)) or 'in another order'} differ)"
            raise RoutingAlignmentError(
                f": the record has {name}={received}, the model {expected}{layers}; replay rows on the "
                "model that they came from",
                sample=sample,
            )


def _check_ids(
    record: RoutedExperts,
    spec: CaptureSpec,
    known: Bool[np.ndarray, " R"],
    sample: int,
    repeats_in_layers: Collection[int],
) -> None:
    ids = record.ids
    if ids.dtype != spec.dtype:
        raise RoutingAlignmentError(
            f": ids are {ids.dtype}; expected {spec.dtype} for {spec.num_experts} experts",
            sample=sample,
        )
    if ids.size == 0:
        return
    if spec.num_experts <= np.iinfo(ids.dtype).max and int(ids.max()) >= spec.num_experts:
        outside = (ids >= spec.num_experts) & known[:, None, None]
        if outside.any():
            row, column, slot = np.argwhere(outside)[0]
            raise RoutingAlignmentError(
                f", token {record.start + row}, hidden layer {record.layer_ids[column]}, slot {slot}: "
                f"id {ids[row, column, slot]}; "
                f"expected 0 to {spec.num_experts - 1}; give logical ids of this model",
                sample=sample,
            )
    repeats = repeated_rows(ids)
    if not repeats.any():
        return
    repeats &= known[:, None] & ~np.isin(record.layer_ids, tuple(repeats_in_layers))
    if repeats.any():
        row, column = np.argwhere(repeats)[0]
        raise RoutingAlignmentError(
            f", token {record.start + row}, hidden layer {record.layer_ids[column]}: ids "
            f"{ids[row, column].tolist()} repeat an expert; expected {spec.top_k} distinct ones; "
            "mark a row that is not known as not valid, and never fill it",
            sample=sample,
        )
