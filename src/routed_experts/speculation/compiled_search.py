"""CompiledSearch: what all texts of a sequence propose, by one call of compiled code, which sorts its contexts, too.

It proposes what Matcher and `frequent_continuation` do, and needs no state of earlier steps. The arrays here have the
layout of the structures in layers/native/text_drafts.cpp. Dims: W tokens of the longest context."""

from array import array
from collections.abc import Callable
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64

from routed_experts.speculation.continuations import LONGEST_MATCH, MOST_OCCURRENCES, PRIOR_SURVIVAL
from routed_experts.speculation.drafter import Draft, DraftSource
from routed_experts.speculation.sorted_contexts import MOST_DRAFTS, ContextHash, SearchedText, SortedContexts

MOST_TEXTS = 8  # of a sequence: itself, the prediction, the answers to its prompt, four blocks of its namespace
_RULE_FIELDS, _TEXT_FIELDS = 9, 8
_RESULT = np.dtype(
    [
        ("match", np.int64, 3),
        ("expected", np.float64),
        ("survival", np.float64, MOST_DRAFTS),
        ("tokens", np.int32, MOST_DRAFTS + 1),  # the last one is padding
    ]
)


class CompiledFunctions(Protocol):
    """Compiled code, which takes addresses of arrays and numbers."""

    @property
    def search(self) -> Callable[[int, int, int, int, int, int, int], None]:
        """Search texts for the end of a sequence: rule, padded, size, texts, their number, most drafts, results."""
        ...

    @property
    def enter_contexts(self) -> Callable[[int, int, int, int, int, int, int], int]:
        """Enter contexts of positions first..last-1: rule, padded, first, last, keys, their number, whether all
        positions have keys. Returns the number of keys then."""
        ...

    @property
    def take_keys(self) -> Callable[[int], None]:
        """Write the keys that the last call of `enter_contexts` has made."""
        ...

    @property
    def layout(self) -> Callable[[int], None]:
        """Write the six int64 that the code is compiled with: most occurrences, most drafts, the longest match, and the
        bytes of a rule, a text and a result."""
        ...


class TextTable:
    """The texts that a sequence is searched in, the sequence itself first; they live as long as the table. `counts`:
    occurrences in the sequence itself are counted, else the latest one is taken; `is_capped`: the length of the match
    bounds the draft."""

    def __init__(self, texts: list[SearchedText], *, counts: bool, is_capped: list[bool]) -> None:
        assert len(texts) <= MOST_TEXTS, len(texts)
        self._texts = texts
        self._rows: Int64[np.ndarray, "T 8"] = np.zeros((len(texts), _TEXT_FIELDS), np.int64)
        for row, text, capped in zip(self._rows, texts, is_capped, strict=True):
            row[:] = (*text.addresses, MOST_OCCURRENCES, capped)
        if not counts:
            self._rows[0, -2] = 1
        self.address, self.num_texts = self._rows.ctypes.data, len(texts)

    def update(self, own: SearchedText) -> None:
        """Read the sequence where it is now."""
        if own is not self._texts[0]:
            self._texts[0] = own
            self._rows[0, :-2] = own.addresses


class CompiledSearch:
    """Calls compiled code for one rule. Results hold until the next call. One thread uses it. Raises RuntimeError where
    the code is compiled with other constants or structures."""

    def __init__(
        self, functions: CompiledFunctions, contexts: ContextHash, *, max_factor: float, min_probability: float
    ) -> None:
        _check_layout(functions)
        self._functions, self._contexts = functions, contexts  # whose arrays are read
        self._rule = np.zeros(_RULE_FIELDS, np.int64)
        self._rule[:4] = contexts.min_window, contexts.max_window, contexts.position_mask, contexts.tag_mask
        self._rule[4:6] = np.array([max_factor, min_probability], np.float64).view(np.int64)
        self._rule[6:] = contexts.factors.ctypes.data, contexts.salts.ctypes.data, PRIOR_SURVIVAL.ctypes.data
        self._search = functions.search
        self._results = np.zeros(MOST_TEXTS, _RESULT)
        self._matches, self._expected = self._results["match"], self._results["expected"]
        self._survival, self._tokens = self._results["survival"], self._results["tokens"]
        self._rule_address, self._results_address = self._rule.ctypes.data, self._results.ctypes.data

    def search(
        self, own: SearchedText, size: int, table: TextTable, most: int
    ) -> tuple[list[tuple[int, int, int]], list[float]]:
        """Search the texts for the end of a sequence of `size` > 0 tokens. Returns for each text the length of the
        match (0: none), the latest position that is copied, and the number of proposed tokens, at most `most`; then how
        many of these are expected to be accepted."""
        table.update(own)
        num_texts = table.num_texts
        self._search(self._rule_address, own.addresses[2], size, table.address, num_texts, most, self._results_address)
        return self._matches[:num_texts].tolist(), self._expected[:num_texts].tolist()

    def grow(
        self, sorted_contexts: SortedContexts, padded: Int32[np.ndarray, " WS"], first: int, last: int
    ) -> SortedContexts:
        """Return the contexts of positions 0..last-1 of `padded`. `sorted_contexts`: those of positions 0..first-1."""
        keys, num_keys = sorted_contexts.keys.buffer_info()
        keeps_all = sorted_contexts.keep_all
        num_keys = self._functions.enter_contexts(
            self._rule_address, padded.ctypes.data, first, last, keys, num_keys, keeps_all
        )
        grown = array("q", [0]) * num_keys
        self._functions.take_keys(grown.buffer_info()[0])
        return SortedContexts(self._contexts, padded, np.arange(last), keep_all=keeps_all, keys=grown)

    def draft(self, number: int, count: int, source: DraftSource) -> Draft:
        """The `count` tokens that text `number` has proposed last."""
        return Draft(self._tokens[number, :count].copy(), self._survival[number, :count].copy(), source)


def _check_layout(functions: CompiledFunctions) -> None:
    """Raise RuntimeError where the compiled code states another value than Python."""
    stated = {
        "occurrences": MOST_OCCURRENCES,
        "drafts": MOST_DRAFTS,
        "tokens of a match": LONGEST_MATCH,
        "bytes of a rule": 8 * _RULE_FIELDS,
        "bytes of a text": 8 * _TEXT_FIELDS,
        "bytes of a result": _RESULT.itemsize,
    }
    compiled = np.zeros(len(stated), np.int64)
    functions.layout(compiled.ctypes.data)
    for (name, value), other in zip(stated.items(), compiled.tolist(), strict=True):
        if value != other:
            raise RuntimeError(f"{name}: {other} in text_drafts.cpp, {value} in Python; the two must be equal")
