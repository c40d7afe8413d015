"""From rows to a ModelWorkerBatch: padding, slots, sampling columns. Knows no policy; the arrays are NumPy.

Sampling parameters of running requests stand in one table by request slot, so that a step's columns are one gather.
Slot 0 is the padding row: greedy and neutral."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int32

from routed_experts.core.buckets import Buckets
from routed_experts.core.model_worker_batch import (
    FROM_DEVICE,
    MAX_BIAS,
    ForwardMode,
    ModelWorkerBatch,
    SamplerForm,
    SamplingColumns,
)
from routed_experts.memory.req_to_token_pool import ReqToTokenPool
from routed_experts.scheduling.schedule_batch import Req, Row

_FORMS = tuple(SamplerForm)  # in order of what they can do
_FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INT_COLUMNS = ("top_k", "choice", "prompt_len")


class BatchBuilder:
    """Builds batches; owns the table of sampling parameters."""

    def __init__(self, buckets: Buckets, table: ReqToTokenPool, *, num_request_slots: int, page_size: int, vocab_size: int) -> None:
        self._buckets, self._table, self._page_size, self._vocab_size = buckets, table, page_size, vocab_size
        self._columns: dict[str, np.ndarray] = {name: np.zeros(num_request_slots, np.float32) for name in _FLOAT_COLUMNS}
        self._columns |= {name: np.zeros(num_request_slots, np.int32) for name in _INT_COLUMNS}
        self._columns["seed"] = np.zeros((num_request_slots, 2), np.uint32)
        self._columns["top_p"][0] = self._columns["repetition"][0] = 1.0

    def enter(self, req: Req) -> None:
        """Note the parameters of a request that has just been given a slot."""
        sampling, columns, slot = req.source.sampling, self._columns, req.slot
        columns["temperature"][slot], columns["top_p"][slot] = sampling.temperature, sampling.top_p
        columns["min_p"][slot], columns["top_k"][slot] = sampling.min_p, sampling.top_k
        columns["presence"][slot], columns["frequency"][slot] = sampling.presence_penalty, sampling.frequency_penalty
        columns["repetition"][slot], columns["prompt_len"][slot] = sampling.repetition_penalty, req.prompt_len
        columns["choice"][slot], columns["seed"][slot] = req.source.choice, sampling.seed_words

    def build(self, rows: Sequence[Row], *, step: int) -> ModelWorkerBatch:
        """Pad the rows to the smallest bucket. Rows stand in the given order."""
        counts = np.array([row.count for row in rows], np.int32)
        total, all_decode = int(counts.sum()), all(row.count == 1 and not wants_scores(row) for row in rows)
        mode, padded_tokens, padded_rows = self._buckets.shape(total, len(rows), all_decode=all_decode)
        slots = np.zeros(padded_rows, np.int32)
        slots[: len(rows)] = [row.req.slot for row in rows]
        starts = np.zeros(padded_rows + 1, np.int32)
        starts[1 : len(rows) + 1] = np.cumsum(counts)
        starts[len(rows) + 1 :] = total
        seq_lens = np.zeros(padded_rows, np.int32)
        seq_lens[: len(rows)] = [row.start + row.count for row in rows]
        token_rows = np.zeros(padded_tokens, np.int32)
        token_rows[:total] = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        positions = np.zeros(padded_tokens, np.int32)
        positions[:total] = np.arange(total, dtype=np.int32) - (starts[:-1] - seq_lens + np.diff(starts))[token_rows[:total]]
        table = self._table.rows(slots)
        pages = table[token_rows[:total], positions[:total] // self._page_size].astype(np.int64)
        return ModelWorkerBatch(
            step=step,
            mode=mode,
            form=_FORMS[max(_FORMS.index(row.req.form_now()) for row in rows)],  # chunks too: FULL counts every token fed
            num_tokens=total,
            num_requests=len(rows),
            token_ids=self._token_ids(rows, padded_tokens, mode),
            positions=positions,
            token_rows=token_rows,
            kv_slots=pages * self._page_size + positions[:total] % self._page_size,
            query_starts=starts,
            seq_lens=seq_lens,
            request_slots=slots,
            page_table=table,
            sampling=self._sampling(rows, slots, seq_lens),
            samples=tuple(row.samples for row in rows),
            prompt_targets=self._prompt_targets(rows, padded_tokens),
            return_routed_experts=tuple(row.req.source.return_routed_experts for row in rows),
        )

    def _token_ids(self, rows: Sequence[Row], padded: int, mode: ForwardMode) -> Int32[np.ndarray, " N"]:
        ids = np.zeros(padded, np.int32)
        if mode is ForwardMode.DECODE:
            ids[: len(rows)] = [row.req.tokens[row.start] if row.start < row.req.num_known else FROM_DEVICE for row in rows]
            return ids
        at = 0
        for row in rows:
            known = row.start + row.count <= row.req.num_known
            ids[at : at + row.count] = row.req.tokens[row.start : row.start + row.count] if known else FROM_DEVICE
            at += row.count
        return ids

    def _sampling(self, rows: Sequence[Row], slots: Int32[np.ndarray, " B"], seq_lens: Int32[np.ndarray, " B"]) -> SamplingColumns:
        bias_ids: Int32[np.ndarray, "B X"] | None = None
        bias_values: Float[np.ndarray, "B X"] | None = None
        if any(row.req.form_now() is SamplerForm.FULL for row in rows):
            bias_ids = np.full((slots.size, MAX_BIAS), self._vocab_size, np.int32)
            bias_values = np.zeros((slots.size, MAX_BIAS), np.float32)
            for index, row in enumerate(rows):
                for place, (token, value) in enumerate(row.req.bias_now()):
                    bias_ids[index, place], bias_values[index, place] = token, value
        columns = {name: column[slots] for name, column in self._columns.items()}
        return SamplingColumns(position=seq_lens, bias_ids=bias_ids, bias_values=bias_values, **columns)

    def _prompt_targets(self, rows: Sequence[Row], padded: int) -> Int32[np.ndarray, " N"] | None:
        if not any(wants_scores(row) for row in rows):
            return None
        targets = np.zeros(padded, np.int32)
        at = 0
        for row in rows:
            last = min(row.start + row.count + 1, row.req.prompt_len)
            following = row.req.tokens[row.start + 1 : last]
            targets[at : at + following.size] = following
            at += row.count
        return targets


def wants_scores(row: Row) -> bool:
    """Does this part of a request hold prompt tokens whose successors' logprobs were asked for."""
    return row.req.wants_prompt_logprobs and not row.req.is_prefilled and row.start < row.req.prompt_len - 1
