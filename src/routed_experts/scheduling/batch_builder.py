"""From rows to a ModelWorkerBatch: padding, slots, sampling columns. Knows no policy; the arrays are NumPy.

Sampling parameters of running requests stand in one table by request slot, so that a step's columns are one gather, and
the next step of the same slots uses them again: batches share these arrays, which cannot be written to. Slot 0 is the
padding row: greedy and neutral."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int32, UInt32

from routed_experts.core.buckets import Buckets
from routed_experts.core.model_worker_batch import (
    FROM_DEVICE,
    MAX_BIAS,
    ForwardMode,
    ModelWorkerBatch,
    SamplingArrays,
    SamplingMode,
)
from routed_experts.memory.req_to_token_pool import ReqToTokenPool
from routed_experts.scheduling.schedule_batch import Req, ScheduledChunk

_FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INT_COLUMNS = ("top_k", "choice", "prompt_len")


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchLayout:
    """What steps of the same requests in the same slots have in common."""

    slots: list[int]
    request_slots: Int32[np.ndarray, " B"]
    seeds: UInt32[np.ndarray, "B 2"]
    columns: dict[str, np.ndarray]
    return_routed_experts: tuple[bool, ...]


class BatchBuilder:
    """Builds batches; owns the table of sampling parameters."""

    def __init__(
        self, buckets: Buckets, table: ReqToTokenPool, *, num_request_slots: int, page_size: int, vocab_size: int
    ) -> None:
        self._buckets, self._table, self._page_size, self._vocab_size = buckets, table, page_size, vocab_size
        self._words = np.zeros(
            (len(_FLOAT_COLUMNS) + len(_INT_COLUMNS), num_request_slots), np.int32
        )  # floats as their bits
        self._seeds = np.zeros((num_request_slots, 2), np.uint32)
        self._columns = _named(self._words)
        self._columns["top_p"][0] = self._columns["repetition"][0] = 1.0
        self._count = np.arange(max(buckets.max_requests, *buckets.extend) + 1, dtype=np.int32)
        self._cached_layout: _BatchLayout | None = None  # of the last step, unless a request was given a slot since

    def register(self, req: Req) -> None:
        """Note the parameters of a request that has just been given a slot."""
        sampling, columns, slot = req.source.sampling, self._columns, req.slot
        columns["temperature"][slot], columns["top_p"][slot] = sampling.temperature, sampling.top_p
        columns["min_p"][slot], columns["top_k"][slot] = sampling.min_p, sampling.top_k
        columns["presence"][slot], columns["frequency"][slot] = sampling.presence_penalty, sampling.frequency_penalty
        columns["repetition"][slot], columns["prompt_len"][slot] = sampling.repetition_penalty, req.prompt_len
        columns["choice"][slot], self._seeds[slot] = req.source.choice, sampling.seed_words
        self._cached_layout = None

    def build(self, rows: Sequence[ScheduledChunk], *, step: int, all_generated: bool = False) -> ModelWorkerBatch:
        """Pad the rows to the smallest bucket. Rows stand in the given order. `all_generated`: none of them feeds a
        token of a prompt."""
        counts = [row.count for row in rows]
        total, scored = sum(counts), not all_generated and any(map(has_scored_prompt_tokens, rows))
        mode, padded_tokens, padded_rows = self._buckets.shape(
            total, len(rows), all_decode=total == len(rows) and not scored
        )
        modes = [row.req.required_mode() for row in rows]  # of chunks too: FULL counts every token fed
        seated = self._layout(rows, padded_rows)
        seq_lens = np.zeros(padded_rows, np.int32)
        seq_lens[: len(rows)] = [row.start + row.count for row in rows]
        starts = np.minimum(self._count[: padded_rows + 1], total)
        token_rows, positions = np.zeros(padded_tokens, np.int32), np.zeros(padded_tokens, np.int32)
        if total == len(rows):
            token_rows[:total], positions[:total] = self._count[:total], seq_lens[:total] - 1
        else:
            starts[1 : len(rows) + 1] = np.cumsum(counts)
            starts[len(rows) + 1 :] = total
            token_rows[:total] = np.repeat(self._count[: len(rows)], counts)
            positions[:total] = self._count[:total] - (starts[:-1] - seq_lens + np.diff(starts))[token_rows[:total]]
        table = self._table.rows(seated.request_slots)
        page, offset = np.divmod(positions[:total], self._page_size)
        return ModelWorkerBatch(
            step=step,
            all_generated=all_generated,
            mode=mode,
            sampling_mode=max(modes),
            num_tokens=total,
            num_requests=len(rows),
            token_ids=self._token_ids(rows, padded_tokens, mode),
            positions=positions,
            token_rows=token_rows,
            kv_slots=table[token_rows[:total], page].astype(np.int64) * self._page_size + offset,
            query_starts=starts,
            seq_lens=seq_lens,
            request_slots=seated.request_slots,
            page_table=table,
            sampling=self._sampling(rows, seated, seq_lens, full=SamplingMode.FULL in modes),
            samples=tuple([row.samples for row in rows]),
            prompt_targets=_prompt_targets(rows, padded_tokens) if scored else None,
            return_routed_experts=seated.return_routed_experts,
        )

    def _layout(self, rows: Sequence[ScheduledChunk], padded: int) -> _BatchLayout:
        """The last step's, where the same requests stand in the same order."""
        slots, last = [row.req.slot for row in rows], self._cached_layout
        if last is None or last.slots != slots or last.request_slots.size != padded:
            request_slots = np.zeros(padded, np.int32)
            request_slots[: len(rows)] = slots
            seeds, words = self._seeds[request_slots], self._words[:, request_slots]
            for shared in (request_slots, seeds, words):
                shared.flags.writeable = False
            last = self._cached_layout = _BatchLayout(
                slots=slots,
                request_slots=request_slots,
                seeds=seeds,
                columns=_named(words),
                return_routed_experts=tuple([row.req.source.return_routed_experts for row in rows]),
            )
        return last

    def _token_ids(self, rows: Sequence[ScheduledChunk], padded: int, mode: ForwardMode) -> Int32[np.ndarray, " N"]:
        ids = np.zeros(padded, np.int32)
        if mode is ForwardMode.DECODE:
            ids[: len(rows)] = [
                row.req.tokens[row.start] if row.start < row.req.num_known else FROM_DEVICE for row in rows
            ]
            return ids
        at = 0
        for row in rows:
            known = row.start + row.count <= row.req.num_known
            ids[at : at + row.count] = row.req.tokens[row.start : row.start + row.count] if known else FROM_DEVICE
            at += row.count
        return ids

    def _sampling(
        self, rows: Sequence[ScheduledChunk], seated: _BatchLayout, seq_lens: Int32[np.ndarray, " B"], *, full: bool
    ) -> SamplingArrays:
        bias_ids: Int32[np.ndarray, "B X"] | None = None
        bias_values: Float[np.ndarray, "B X"] | None = None
        if full:
            bias_ids = np.full((seq_lens.size, MAX_BIAS), self._vocab_size, np.int32)
            bias_values = np.zeros((seq_lens.size, MAX_BIAS), np.float32)
            for index, row in enumerate(rows):
                for place, (token, value) in enumerate(row.req.bias_now()):
                    bias_ids[index, place], bias_values[index, place] = token, value
        return SamplingArrays(
            seed=seated.seeds, position=seq_lens, bias_ids=bias_ids, bias_values=bias_values, **seated.columns
        )


def _named(words: Int32[np.ndarray, "C B"]) -> dict[str, np.ndarray]:
    """The table's rows under their names, each in its own dtype; views."""
    columns: dict[str, np.ndarray] = {name: words[place].view(np.float32) for place, name in enumerate(_FLOAT_COLUMNS)}
    return columns | {name: words[len(_FLOAT_COLUMNS) + place] for place, name in enumerate(_INT_COLUMNS)}


def _prompt_targets(rows: Sequence[ScheduledChunk], padded: int) -> Int32[np.ndarray, " N"]:
    """The prompt token that follows each token of the step, where there is one."""
    targets = np.zeros(padded, np.int32)
    at = 0
    for row in rows:
        last = min(row.start + row.count + 1, row.req.prompt_len)
        following = row.req.tokens[row.start + 1 : last]
        targets[at : at + following.size] = following
        at += row.count
    return targets


def has_scored_prompt_tokens(row: ScheduledChunk) -> bool:
    """Does this part of a request hold prompt tokens whose successors' logprobs were asked for."""
    return not row.req.is_prefilled and row.req.wants_prompt_logprobs and row.start < row.req.prompt_len - 1
