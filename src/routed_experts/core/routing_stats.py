"""RoutingStats: how often each expert was chosen, separately for prompts and generated tokens, in total and recently.

Counts are of logical ids, one for each token, layer and slot. A window holds the counts of a run of tokens, so that
changes over time are visible; the last window may be short. Tokens before the oldest window are in `counts` alone.
Dims: F phases (prompt, generated), M MoE layers, E experts, K experts per token, W windows, T tokens."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PlacementError
from routed_experts.core.integers import is_integer
from routed_experts.core.npz_io import read_arrays, write_arrays
from routed_experts.core.record_validation import check_id_range
from routed_experts.core.routed_experts import RoutedExperts

PHASES = ("prompt", "generated")
WINDOW_TOKENS = 1024
_FAST, _SLOW = 4.0, 32.0  # half-lives in windows
_SPECS = MappingProxyType(
    {
        "counts": (np.int64, 3),
        "num_tokens": (np.int64, 1),
        "windows": (np.int32, 4),
        "layer_ids": (np.int64, 1),
        "top_k": (np.int64, 0),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingStats:
    """Counts of one model's routing. Raises PlacementError where the arrays do not fit each other."""

    counts: Int64[np.ndarray, "F M E"]
    num_tokens: Int64[np.ndarray, " F"]
    windows: Int32[np.ndarray, "W F M E"]  # oldest first
    layer_ids: tuple[int, ...]
    top_k: int

    def __post_init__(self) -> None:
        shape = (len(PHASES), len(self.layer_ids))
        fits = self.counts.ndim == 3 and self.counts.shape[:2] == shape and self.windows.shape[1:] == self.counts.shape
        if not fits or self.num_tokens.shape != shape[:1] or self.top_k < 1:
            raise PlacementError(
                f"counts {list(self.counts.shape)}, num_tokens {list(self.num_tokens.shape)}, windows "
                f"{list(self.windows.shape)}, top_k {self.top_k}; expected [2, {shape[1]}, E], [2] and [W, 2, "
                f"{shape[1]}, E] for the {shape[1]} layer_ids"
            )
        slots = self.counts.sum(axis=2)
        if (slots != self.num_tokens[:, None] * self.top_k).any() or self.counts.min(initial=0) < 0:
            tokens = f"of {self.num_tokens.tolist()} prompt and generated tokens"
            raise PlacementError(
                f"counts add up to {slots.tolist()}; expected {self.top_k} a token and layer, {tokens}"
            )
        in_windows = self.windows.sum(axis=0, dtype=np.int64)
        if self.windows.min(initial=0) < 0 or (in_windows > self.counts).any():
            raise PlacementError(
                f"windows hold {int(in_windows.sum())} slots, the least count is {self.windows.min(initial=0)}; "
                f"expected parts of the {int(self.counts.sum())} of counts, none below 0"
            )
        if min(self.layer_ids, default=0) < 0 or any(a >= b for a, b in pairwise(self.layer_ids)):
            raise PlacementError(f"layer_ids are {self.layer_ids}; expected hidden layers from 0 on, in order")
        for array in (self.counts, self.num_tokens, self.windows):
            array.setflags(write=False)

    @staticmethod
    def from_records(records: Iterable[RoutedExperts], *, window_tokens: int = WINDOW_TOKENS) -> "RoutingStats":
        """Count the known rows of records of one model, one record after the other. Raises PlacementError when they
        differ in shape, or when there is none, and RoutingFormatError for an id that is no expert."""
        if not isinstance(records, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # one record is none
            raise PlacementError(f"records is {short_repr(records)}; expected a list of records")
        records = list(records)
        for index, record in enumerate(records):
            if not isinstance(record, RoutedExperts):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PlacementError(f"records[{index}] is {short_repr(record)}; expected RoutedExperts")
        if not is_integer(window_tokens):
            raise PlacementError(
                f"window_tokens={short_repr(window_tokens)}; expected an integer of at least 1, such as {WINDOW_TOKENS}"
            )
        if not records or window_tokens < 1:
            raise PlacementError(
                f"{len(records)} records, window_tokens={window_tokens}; expected at least one of each"
            )
        first = records[0]
        shape = (len(PHASES), len(first.layer_ids), first.num_experts)
        windows: list[np.ndarray] = []
        room = 0  # tokens that fit in the last window
        for record in records:
            keys = _keys(record, first)  # [T, M * K]
            while len(keys):
                if room == 0:
                    windows.append(np.zeros(shape, np.int32))
                    room = int(window_tokens)
                part, keys = keys[:room], keys[room:]
                windows[-1] += _count(part, shape)
                room -= len(part)
        window_counts = np.array(windows, np.int32).reshape(-1, *shape)
        counts = window_counts.sum(axis=0, dtype=np.int64)
        return RoutingStats(
            counts=counts,
            num_tokens=counts[:, 0].sum(axis=1) // first.top_k,
            windows=window_counts,
            layer_ids=first.layer_ids,
            top_k=first.top_k,
        )

    @staticmethod
    def merge(parts: Iterable["RoutingStats"]) -> "RoutingStats":
        """The sum of counts of one model; their newest windows are added to each other, and so on to the oldest. A
        window of the sum holds tokens of all parts, which need not be of the same moment: each part closes its own.
        Raises PlacementError when they differ in shape, or when there is none."""
        parts = tuple(parts)
        if not parts:
            raise PlacementError("0 routing stats; expected at least one")
        for index, part in enumerate(parts):
            if not isinstance(part, RoutingStats):
                raise PlacementError(f"parts[{index}] is {type(part).__name__}; expected RoutingStats")
        first = parts[0]
        if len(parts) == 1:
            return first
        for part in parts:
            part.check_model(first.layer_ids, first.num_experts)
        windows = np.zeros((max(len(part.windows) for part in parts), *first.counts.shape), np.int32)
        for part in parts:
            windows[len(windows) - len(part.windows) :] += part.windows
        return RoutingStats(
            counts=np.sum([part.counts for part in parts], axis=0),
            num_tokens=np.sum([part.num_tokens for part in parts], axis=0),
            windows=windows,
            layer_ids=first.layer_ids,
            top_k=first.top_k,
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts.shape[2]

    @property
    def load(self) -> Int64[np.ndarray, "M E"]:
        """How often each expert was chosen, in total."""
        return self.counts.sum(axis=0)

    @property
    def recent_load(self) -> Float64[np.ndarray, "M E"]:
        """Slots a token of each expert, recently: the larger of two moving averages, with half-lives of 4 and 32
        windows."""
        return recent_load(self.windows, self.top_k)

    def average(self, half_life: float) -> Float64[np.ndarray, "F M E"]:
        """Exponential moving average of slots a token (of any phase): a window counts half as much as one `half_life`
        windows later. Raises PlacementError for another one than a finite number above 0."""
        if not (math.isfinite(half_life) and half_life > 0):
            raise PlacementError(f"half_life={half_life} windows; expected a finite number above 0, such as 8")
        return moving_average(self.windows, self.top_k, half_life)

    def check_model(self, layer_ids: tuple[int, ...], num_experts: int) -> None:
        """Raise PlacementError unless these are counts of a model with these MoE layers and so many experts."""
        if (self.layer_ids, self.num_experts) != (layer_ids, num_experts):
            raise PlacementError(
                f"routing of MoE layers {self.layer_ids} with {self.num_experts} experts does not fit a model with "
                f"{layer_ids} "
                f"and {num_experts}; use routing that this model recorded"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz that `read` reads. Raises WriteError."""
        arrays = {"counts": self.counts, "num_tokens": self.num_tokens, "windows": self.windows}
        write_arrays(
            path, {**arrays, "layer_ids": np.array(self.layer_ids, np.int64), "top_k": np.array(self.top_k, np.int64)}
        )

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "RoutingStats":
        """Read what `save` wrote. Raises RoutingFormatError for another file, PlacementError for arrays that do not
        fit."""
        arrays = read_arrays(path, _SPECS, what="routing statistics")
        return RoutingStats(
            counts=arrays["counts"],
            num_tokens=arrays["num_tokens"],
            windows=arrays["windows"],
            layer_ids=tuple(arrays["layer_ids"].tolist()),
            top_k=int(arrays["top_k"]),
        )


def recent_load(windows: Int[np.ndarray, "W F M E"], top_k: int) -> Float64[np.ndarray, "M E"]:
    """Return `RoutingStats.recent_load` of windows, oldest first."""
    return np.maximum(moving_average(windows, top_k, _FAST), moving_average(windows, top_k, _SLOW)).sum(axis=0)


def moving_average(windows: Int[np.ndarray, "W F M E"], top_k: int, half_life: float) -> Float64[np.ndarray, "F M E"]:
    """Return slots a token of the windows, oldest first; one counts half as much as one `half_life` windows later."""
    weights = 0.5 ** (np.arange(len(windows))[::-1] / half_life)
    tokens = windows[:, :, 0].sum(axis=(1, 2)) / top_k
    return np.tensordot(weights, windows, axes=1) / max(float(weights @ tokens), 1.0)


def _keys(record: RoutedExperts, first: RoutedExperts) -> Int[np.ndarray, "T M*K"]:
    """Number every slot of a record's known rows by phase, layer and expert. Raises RoutingFormatError for an id that
    is no expert: it would count for another layer."""
    ours, theirs = ((each.layer_ids, each.num_experts, each.top_k) for each in (record, first))
    if ours != theirs:
        shapes = [f"MoE layers {layers}, {experts} experts, top-{top_k}" for layers, experts, top_k in (ours, theirs)]
        raise PlacementError(f"a record of {shapes[0]} differs from one of {shapes[1]}; expected records of one model")
    generated = np.arange(record.start, record.start + record.num_rows) >= record.num_prompt_tokens
    num_layers, num_experts = len(record.layer_ids), record.num_experts
    check_id_range(
        record.ids, start=record.start, layer_ids=record.layer_ids, num_experts=num_experts, known=record.known
    )
    rows = (generated * num_layers)[:, None] + np.arange(num_layers)  # [R, M]
    return (rows[:, :, None] * num_experts + record.ids)[record.known].reshape(-1, num_layers * record.top_k)


def _count(keys: Int[np.ndarray, "T M*K"], shape: tuple[int, int, int]) -> Int32[np.ndarray, "F M E"]:
    return np.bincount(keys.ravel(), minlength=shape[0] * shape[1] * shape[2]).reshape(shape).astype(np.int32)
