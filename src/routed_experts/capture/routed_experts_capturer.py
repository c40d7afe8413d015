"""The capturer files the rows of each step beside their KV pages and assembles the record of a sequence.

One capturer for each engine; a draft model has its own or none. `_RoutedExpertsCapturerNoop` is capture switched
off. The device side of capture is `device_cache.py`, which the programs call. Methods run on the engine thread, never
under jit. Order of a page's life: on_pages_allocated (old rows invalid) -> on_forward_end of
the steps that write it -> collect or save -> page released. Rows of a step in flight are filed before its requests
are collected or saved. Dims: N padded tokens, R rows, M MoE layers, K experts per token, P pages."""

from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt

from routed_experts.capture.host_cache import RoutedExpertsHostCache, SavedRows
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import CaptureDisabledError, CaptureUnsupportedError, RoutingIncompleteError
from routed_experts.core.integrity import Violation
from routed_experts.core.model_worker_batch import TokenOrigins
from routed_experts.core.record_validation import to_version_spans
from routed_experts.core.routed_experts import CombineWeights, RoutedExperts
from routed_experts.core.routing_stats import RoutingStats

GatheredRows = tuple[UInt[np.ndarray, "R M K"], Bool[np.ndarray, " R"], Int32[np.ndarray, " R"]]


class RoutedExpertsCapturer(ABC):
    """The interface between engine and capturer, on or off."""

    @staticmethod
    def create(spec: CaptureSpec | None, *, num_slots: int, page_size: int, enable: bool) -> "RoutedExpertsCapturer":
        """Build the capturer of an engine of `num_slots` KV slots in pages of `page_size`. `spec` None is a model
        without MoE layers: raises CaptureUnsupportedError where `enable` asks to capture it."""
        if not enable:
            return _RoutedExpertsCapturerNoop()
        if spec is None:
            raise CaptureUnsupportedError(
                "capture is on, but this model has no MoE layer; build with enable_return_routed_experts=False"
            )
        return _RoutedExpertsCapturerReal(spec, num_slots=num_slots, page_size=page_size)

    @property
    @abstractmethod
    def enabled(self) -> bool:
        """Whether rows are recorded."""

    @abstractmethod
    def on_pages_allocated(self, pages: Int[np.ndarray, " P"]) -> None:
        """Invalidate the rows of these pages: they are handed out again."""

    @abstractmethod
    def on_forward_end(
        self,
        slots: Int[np.ndarray, " R"],
        rows: Any,
        version: int,
        live: Bool[np.ndarray, " R"] | None = None,
        origins: TokenOrigins | None = None,
    ) -> None:
        """File a step's rows under the slots its tokens were written to; `version` of the weights that ran. `rows`:
        anything that np.asarray reads as [N, M*K] of the spec's dtype, or as an int32 table whose last columns are
        packed rows (CaptureSpec.row_words), the R real tokens first. `live`: rows to file; None files all.
        `origins` separates generated tokens from prompts; None counts all as prompts."""

    @abstractmethod
    def on_step_end(self) -> None:
        """Take the rows of the last forward pass off the device. Called when the engine has dispatched the next step,
        so that nothing waits for their copy."""

    @abstractmethod
    def get_routed_experts(self, slots: Int[np.ndarray, " R"]) -> GatheredRows:
        """Copy out ids, valid bits and weight versions of these slots."""

    @abstractmethod
    def save(self, slots: Int[np.ndarray, " R0"], earlier: SavedRows | None = None) -> SavedRows:
        """Copy the rows of positions [0, R0) before their pages are released; `earlier` rows of the same request
        stay as they are."""

    @abstractmethod
    def collect(
        self,
        slots: Int[np.ndarray, " R"],
        *,
        start: int,
        num_tokens: int,
        num_prompt_tokens: int,
        saved: SavedRows | None = None,
        include_last: bool = False,
        weights: bool = False,
    ) -> RoutedExperts:
        """Assemble a sequence's record by the row law; slots[i] is the slot of token start + i.

        `include_last`: the last token was fed too (score, max_tokens 0, include_last). `weights`: with the combine
        weights, which the spec must record. Slots past the last row are not read, nor are those whose row was saved. A
        row that is in neither raises RoutingIncompleteError naming its token."""

    @abstractmethod
    def routing_stats(self, *, reset: bool = False, wait: bool = True) -> RoutingStats:
        """Return how often each expert was chosen by the rows filed since the last reset; `reset` sets the counts to
        zero afterwards. Without `wait`, counts may lag some steps behind and have no windows."""

    @abstractmethod
    def host_bytes(self) -> int:
        """Return the host memory of the store, in bytes."""

    @abstractmethod
    def device_bytes(self, num_tokens: int) -> int:
        """Return the device memory of a step of `num_tokens` padded tokens, in bytes: the blocks of ids and weights,
        and the narrow rows that leave the step."""

    @abstractmethod
    def check_integrity(self, owned_slots: Int[np.ndarray, " owned"]) -> list[Violation]:
        """Check that no row is valid outside the slots of held pages."""


class _RoutedExpertsCapturerReal(RoutedExpertsCapturer):
    """Capture switched on."""

    def __init__(self, spec: CaptureSpec, *, num_slots: int, page_size: int) -> None:
        self.spec = spec
        self.host_cache = RoutedExpertsHostCache(num_slots, spec, page_size=page_size)

    @property
    def enabled(self) -> bool:
        return True

    def on_pages_allocated(self, pages: Int[np.ndarray, " P"]) -> None:
        self.host_cache.clear_pages(pages)

    def on_forward_end(
        self,
        slots: Int[np.ndarray, " R"],
        rows: Any,
        version: int,
        live: Bool[np.ndarray, " R"] | None = None,
        origins: TokenOrigins | None = None,
    ) -> None:
        self.host_cache.append(slots, rows, version, live, origins)

    def on_step_end(self) -> None:
        self.host_cache.settle()

    def get_routed_experts(self, slots: Int[np.ndarray, " R"]) -> GatheredRows:
        return self.host_cache.gather(slots)

    def save(self, slots: Int[np.ndarray, " R0"], earlier: SavedRows | None = None) -> SavedRows:
        num_rows = slots.size if earlier is None else max(slots.size, earlier.valid.size)
        ids, valid, versions = self._read_rows(slots, start=0, num_rows=num_rows, saved=earlier)
        weights = None
        if self.spec.weights_dtype is not None:
            weights = self._read_weights(slots, start=0, num_rows=num_rows, saved=earlier)
        return SavedRows(ids=ids, valid=valid, versions=versions, weights=weights)

    def collect(
        self,
        slots: Int[np.ndarray, " R"],
        *,
        start: int,
        num_tokens: int,
        num_prompt_tokens: int,
        saved: SavedRows | None = None,
        include_last: bool = False,
        weights: bool = False,
    ) -> RoutedExperts:
        num_rows = max(num_tokens - start - (0 if include_last else 1), 0)
        ids, valid, versions = self._read_rows(slots, start=start, num_rows=num_rows, saved=saved)
        if not valid.all():
            missing = np.flatnonzero(~valid)
            more = f", nor that of {missing.size - 1} more" if missing.size > 1 else ""
            raise RoutingIncompleteError(
                f"the routing of token {start + int(missing[0])} is not known{more}; expected all {num_rows} rows from "
                f"token {start} on, so the request fails: report this with the request"
            )
        return RoutedExperts.from_spec(
            self.spec,
            ids=ids,
            start=start,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            version_spans=to_version_spans(start, versions),
            weights=self._read_weights(slots, start=start, num_rows=num_rows, saved=saved) if weights else None,
        )

    def routing_stats(self, *, reset: bool = False, wait: bool = True) -> RoutingStats:
        return self.host_cache.routing_stats(reset=reset, wait=wait)

    def host_bytes(self) -> int:
        return self.host_cache.nbytes

    def device_bytes(self, num_tokens: int) -> int:
        blocks = 1 if self.spec.weights_dtype is None else 2
        return num_tokens * (blocks * self.spec.row_ids * np.dtype(np.int32).itemsize + self.spec.stored_bytes)

    def check_integrity(self, owned_slots: Int[np.ndarray, " owned"]) -> list[Violation]:
        return self.host_cache.check_integrity(owned_slots)

    def _read_rows(
        self, slots: Int[np.ndarray, " R"], *, start: int, num_rows: int, saved: SavedRows | None
    ) -> GatheredRows:
        """Read rows [start, start + num_rows): the slots' rows, overwritten by the saved ones, which were first."""
        slots = slots[:num_rows]
        if saved is None and slots.size == num_rows:
            return self.host_cache.gather(slots)
        ids = np.empty((num_rows, self.spec.num_moe_layers, self.spec.top_k), self.spec.dtype)
        valid = np.zeros(num_rows, np.bool_)
        versions = np.zeros(num_rows, np.int32)
        ids[: slots.size], valid[: slots.size], versions[: slots.size] = self.host_cache.gather(slots)
        if saved is not None:
            first = slice(start, start + num_rows)
            index = np.flatnonzero(saved.valid[first])
            ids[index], versions[index], valid[index] = saved.ids[first][index], saved.versions[first][index], True
        return ids, valid, versions

    def _read_weights(
        self, slots: Int[np.ndarray, " R"], *, start: int, num_rows: int, saved: SavedRows | None
    ) -> CombineWeights:
        """Read the combine weights of the same rows."""
        slots = slots[:num_rows]
        own = self.host_cache.gather_weights(slots)
        if saved is None and slots.size == num_rows:
            return own
        weights = np.zeros((num_rows, *own.shape[1:]), own.dtype)
        weights[: slots.size] = own
        if saved is not None and saved.weights is not None:
            first = slice(start, start + num_rows)
            index = np.flatnonzero(saved.valid[first])
            weights[index] = saved.weights[first][index]
        return weights


class _RoutedExpertsCapturerNoop(RoutedExpertsCapturer):
    """Capture switched off: reports are dropped, and reading raises CaptureDisabledError."""

    @property
    def enabled(self) -> bool:
        return False

    def on_pages_allocated(self, pages: Int[np.ndarray, " P"]) -> None:
        return

    def on_forward_end(
        self,
        slots: Int[np.ndarray, " R"],
        rows: Any,
        version: int,
        live: Bool[np.ndarray, " R"] | None = None,
        origins: TokenOrigins | None = None,
    ) -> None:
        return

    def on_step_end(self) -> None:
        return

    def get_routed_experts(self, slots: Int[np.ndarray, " R"]) -> GatheredRows:
        _refuse()

    def save(self, slots: Int[np.ndarray, " R0"], earlier: SavedRows | None = None) -> SavedRows:
        _refuse()

    def collect(
        self,
        slots: Int[np.ndarray, " R"],
        *,
        start: int,
        num_tokens: int,
        num_prompt_tokens: int,
        saved: SavedRows | None = None,
        include_last: bool = False,
        weights: bool = False,
    ) -> RoutedExperts:
        _refuse()

    def routing_stats(self, *, reset: bool = False, wait: bool = True) -> RoutingStats:
        _refuse()

    def host_bytes(self) -> int:
        return 0

    def device_bytes(self, num_tokens: int) -> int:
        return 0

    def check_integrity(self, owned_slots: Int[np.ndarray, " owned"]) -> list[Violation]:
        return []


def _refuse() -> NoReturn:
    raise CaptureDisabledError(
        "routed experts were requested from an engine that records none; build it with "
        "Engine(..., enable_return_routed_experts=True)"
    )


# For scripts; the engine never reads or sets it. A ContextVar: a test or task that sets it changes it for no other,
# and a thread receives the capturer as an argument.
_global_experts_capturer: ContextVar[RoutedExpertsCapturer | None] = ContextVar("global_experts_capturer", default=None)


def get_global_experts_capturer() -> RoutedExpertsCapturer:
    """Return the capturer that this script (context) has set, or one that records nothing. The engine never sets it:
    for the rows of an engine's requests pass return_routed_experts=True."""
    return _global_experts_capturer.get() or _RoutedExpertsCapturerNoop()


def set_global_experts_capturer(capturer: RoutedExpertsCapturer) -> None:
    """Set the capturer of this script (context), for its own forward passes. The engine never sets or reads it."""
    _global_experts_capturer.set(capturer)
