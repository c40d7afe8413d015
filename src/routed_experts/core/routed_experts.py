"""RoutedExperts, the canonical record: which experts every token of one sequence was routed to.

Row law: row i is the forward pass whose *input* was token start + i; the last sampled token was never fed and has no
row. Invariants: ids are C-order, read-only, of the smallest dtype, and hold no sentinel; unknown rows are marked in
`valid`. A record owns its arrays: building one makes them read-only. Dims: R rows, L hidden layers, M MoE layers, K
experts per token, E experts, S tokens of the sequence."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Bool, Float32, UInt

from routed_experts.core.capture_spec import MAX_HIDDEN_LAYERS, CaptureSpec, expert_id_dtype
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.integers import is_integer
from routed_experts.core.record_validation import (
    VersionLabels,
    VersionSpans,
    check_id_range,
    check_version_spans,
    cut_version_spans,
    repeated_rows,
)

CombineWeights = Float32[np.ndarray, "R M K"] | BFloat16[np.ndarray, "R M K"]
_WEIGHTS_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedExperts:
    """Routing of tokens [start, start + R) of a sequence of num_tokens, of which num_prompt_tokens are the prompt.

    `valid` None means that every row is known; `version_spans` hold (lo, hi, count of the weights' update) in
    absolute token indices, and `version_labels` (count, label) of counts that may occur there. Labels are names: two
    records that differ in them alone are equal. `weights` are the combine weights that the experts ran with, in the
    order of the ids; None where they were not asked for. `exact` False: the engine may have changed the choice of
    experts, or have added outputs of experts late, in ways that `placement` counts; ids are what ran in any case."""

    ids: UInt[np.ndarray, "R M K"]
    start: int
    num_tokens: int
    num_prompt_tokens: int
    layer_ids: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    version_spans: VersionSpans
    valid: Bool[np.ndarray, " R"] | None = None
    weights: CombineWeights | None = None
    router: str | None = None
    version_labels: VersionLabels = ()
    exact: bool = True
    placement: dict[str, object] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_arrays()
        self._check_tokens()
        for array in (self.ids, self.valid, self.weights):
            if array is not None:
                array.setflags(write=False)

    @staticmethod
    def from_spec(
        spec: CaptureSpec,
        *,
        ids: UInt[np.ndarray, "R M K"],
        start: int,
        num_tokens: int,
        num_prompt_tokens: int,
        version_spans: VersionSpans,
        valid: Bool[np.ndarray, " R"] | None = None,
        weights: CombineWeights | None = None,
        version_labels: VersionLabels = (),
    ) -> "RoutedExperts":
        """Build the record of a sequence whose model has this routing."""
        return RoutedExperts(
            ids=ids,
            start=start,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            layer_ids=tuple(spec.layer_ids),
            num_hidden_layers=spec.num_hidden_layers,
            num_experts=spec.num_experts,
            version_spans=version_spans,
            valid=valid,
            weights=weights,
            router=spec.router,
            version_labels=version_labels,
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of ids and combine weights."""
        return self.ids.nbytes + (0 if self.weights is None else self.weights.nbytes)

    @property
    def labels(self) -> dict[int, str]:
        """The labels of the weights in `version_spans`, by count; of counts without a known label none."""
        counts = {count for _, _, count in self.version_spans}
        return {count: label for count, label in self.version_labels if count in counts}

    @property
    def known(self) -> Bool[np.ndarray, " R"]:
        """`valid` as a mask of all rows."""
        return np.ones(self.num_rows, np.bool_) if self.valid is None else self.valid

    @property
    def prompt(self) -> "RoutedExperts":
        """The rows whose token is part of the prompt."""
        return self[: self.num_prompt_tokens]

    @property
    def generated(self) -> "RoutedExperts":
        """The rows whose token was generated."""
        return self[self.num_prompt_tokens :]

    def __getitem__(self, tokens: slice) -> "RoutedExperts":
        """Cut the rows of tokens [a, b), absolute indices; tokens without a row are left out, S and prompt_len stay. As
        for any sequence, raises TypeError for an index that is no slice, and IndexError for a step or a negative
        index."""
        if not isinstance(tokens, slice):  # pyright: ignore[reportUnnecessaryIsInstance]  # iter() on a record ends here
            raise TypeError(
                f"a record is indexed by {type(tokens).__name__}; expected a slice of absolute token indices, "
                "record[a:b]"
            )
        low, high = (
            (0 if tokens.start is None else tokens.start),
            (self.num_tokens if tokens.stop is None else tokens.stop),
        )
        if tokens.step not in (None, 1) or low < 0 or high < 0:
            raise IndexError(
                f"record[{low}:{high}:{tokens.step}] is no run of tokens; expected absolute indices of at least 0 and "
                "no step"
            )
        end = self.start + self.num_rows
        low = min(max(low, self.start), end)
        high = min(max(high, low), end)
        rows = slice(low - self.start, high - self.start)
        return replace(
            self,
            ids=self.ids[rows],
            start=low,
            version_spans=cut_version_spans(self.version_spans, low, high),
            valid=None if self.valid is None else self.valid[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    def validate(self, *, repeats_in_layers: Collection[int] = ()) -> None:
        """Raise RoutingFormatError naming the first bad token, hidden layer and slot of the known rows.

        `repeats_in_layers`: hidden-layer indices of hash-routed layers, which may name an expert twice in a row."""
        known = self.known
        check_id_range(self.ids, start=self.start, layer_ids=self.layer_ids, num_experts=self.num_experts, known=known)
        repeats = repeated_rows(self.ids) & known[:, None]
        repeats &= ~np.isin(self.layer_ids, tuple(repeats_in_layers))
        if repeats.any():
            row, column = np.argwhere(repeats)[0]
            chosen = self.ids[row, column].tolist()
            slot = next(k for k, expert in enumerate(chosen) if expert in chosen[:k])
            raise RoutingFormatError(
                f"token {self.start + row}, hidden layer {self.layer_ids[column]}, slot {slot}: expert {chosen[slot]} "
                f"is repeated in {chosen}; expected {self.top_k} distinct experts; give the row as it was recorded"
            )

    def __eq__(self, other: object) -> bool:
        """Compare ids, weights and metadata; rows that are not valid are ignored."""
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        known = self.known
        if self._metadata() != other._metadata() or not np.array_equal(known, other.known):
            return False
        weights = (self.weights is None) == (other.weights is None)
        if self.weights is not None and other.weights is not None:
            same_dtype = self.weights.dtype == other.weights.dtype
            weights = same_dtype and np.array_equal(self.weights[known], other.weights[known])
        return weights and np.array_equal(self.ids[known], other.ids[known])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy the fields: the new record is built as any other, so that its arrays are read-only too."""
        return _from_fields, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def _check_types(self) -> None:
        for name, array in (("ids", self.ids), ("valid", self.valid), ("weights", self.weights)):
            if array is not None and not isinstance(array, np.ndarray):
                raise RoutingFormatError(
                    f"{name} is {short_repr(array)}; expected a NumPy array; convert it with np.asarray"
                )
        for name, count in (
            ("start", self.start),
            ("num_tokens", self.num_tokens),
            ("num_prompt_tokens", self.num_prompt_tokens),
        ):
            if not is_integer(count):
                raise RoutingFormatError(f"{name}={short_repr(count)}; expected an integer of at least 0")
        for name, count in (("num_hidden_layers", self.num_hidden_layers), ("num_experts", self.num_experts)):
            if not is_integer(count):
                raise RoutingFormatError(f"{name}={short_repr(count)}; expected an integer of at least 1")
        # A list could be changed, and would differ from the tuple of a record that was written and read.
        if not isinstance(self.layer_ids, tuple) or not all(map(is_integer, self.layer_ids)):
            raise RoutingFormatError(
                f"layer_ids is {short_repr(self.layer_ids)}; expected a tuple of integers; convert it with tuple"
            )
        spans = self.version_spans
        if isinstance(spans, list) or (isinstance(spans, tuple) and any(isinstance(span, list) for span in spans)):
            raise RoutingFormatError(
                "version_spans is or holds a list; expected a tuple of tuples (lo, hi, count); convert it with tuple"
            )

    def _check_arrays(self) -> None:
        ids, layer_ids, dtype = self.ids, self.layer_ids, expert_id_dtype(self.num_experts)
        if ids.ndim != 3 or ids.dtype != dtype or not ids.flags.c_contiguous:
            raise RoutingFormatError(
                f"ids are {ids.dtype}{list(ids.shape)}, C-order {ids.flags.c_contiguous}; "
                f"expected C-order {dtype}[R, M, K] for {self.num_experts} experts"
            )
        if 0 in ids.shape[1:]:
            raise RoutingFormatError(
                f"ids have the shape {list(ids.shape)}; expected [R, M, K] with at least one MoE layer and one "
                "expert a token"
            )
        if self.num_hidden_layers > MAX_HIDDEN_LAYERS:
            raise RoutingFormatError(
                f"num_hidden_layers is {short_repr(self.num_hidden_layers)}; expected at most {MAX_HIDDEN_LAYERS}"
            )
        ascending = all(a < b for a, b in pairwise((-1, *layer_ids, self.num_hidden_layers)))
        if len(layer_ids) != ids.shape[1] or not ascending:
            raise RoutingFormatError(
                f"layer_ids {layer_ids} for {ids.shape[1]} columns; expected one each, ascending in "
                f"0..{self.num_hidden_layers - 1}"
            )
        if self.valid is not None and (self.valid.shape != ids.shape[:1] or self.valid.dtype != np.bool_):
            raise RoutingFormatError(
                f"valid is {self.valid.dtype}{list(self.valid.shape)}; expected bool[{ids.shape[0]}]"
            )
        weights = self.weights
        if weights is None:
            return
        if weights.shape != ids.shape or weights.dtype not in _WEIGHTS_DTYPES or not weights.flags.c_contiguous:
            raise RoutingFormatError(
                f"weights are {weights.dtype}{list(weights.shape)}, C-order {weights.flags.c_contiguous}; expected "
                f"C-order float32 or bfloat16 {list(ids.shape)}"
            )

    def _check_tokens(self) -> None:
        end = self.start + self.num_rows
        if self.start < 0 or end > self.num_tokens or not 0 <= self.num_prompt_tokens <= self.num_tokens:
            raise RoutingFormatError(
                f"rows of tokens [{self.start}, {end}) in a sequence of {self.num_tokens}, prompt "
                f"{self.num_prompt_tokens}; "
                "expected all of them inside the sequence"
            )
        check_version_spans(self.version_spans, self.start, end)

    def _metadata(self) -> tuple[object, ...]:
        return (
            self.ids.shape,
            self.start,
            self.num_tokens,
            self.num_prompt_tokens,
            self.layer_ids,
            self.num_hidden_layers,
            self.num_experts,
            self.version_spans,
            self.router,
        )


def _from_fields(values: dict[str, Any]) -> RoutedExperts:
    """The record of these fields; for pickle."""
    return RoutedExperts(**values)
