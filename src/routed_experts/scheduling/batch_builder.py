"""Build a ModelWorkerBatch from scheduled chunks: padding, KV slots, sampling arrays. NumPy.

A table holds the sampling parameters of running requests by request slot, so that a step's arrays are one gather; the
next step of the same slots reuses them. Batches share these arrays, which are read-only. Slot 0 is the padding row:
greedy and neutral."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int32, Int64, UInt32

from routed_experts.core.buckets import Buckets, continuation_size
from routed_experts.core.model_worker_batch import (
    FROM_DEVICE,
    MAX_BIAS,
    MAX_GIVEN_IDS,
    ForwardMode,
    ModelWorkerBatch,
    SamplingArrays,
    SamplingMode,
)
from routed_experts.memory.req_to_token_pool import ReqToTokenPool
from routed_experts.scheduling.schedule_batch import NO_TOKENS, Req, ScheduledChunk

Texts = Mapping[str, Int32[np.ndarray, " C"]]  # by request id: what may follow the tokens that the host knows
_FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INT_COLUMNS = ("top_k", "choice", "prompt_len")


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchLayout:
    """The arrays that steps of the same requests in the same slots share."""

    slots: list[int]
    request_slots: Int32[np.ndarray, " B"]
    seeds: UInt32[np.ndarray, "B 2"]
    columns: dict[str, np.ndarray]
    return_routed_experts: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """What decides which programs run a step: its tokens and requests; whether every request feeds one token, and no
    scored token of a prompt; whether it verifies drafts; the largest sampler mode that a request needs; whether a token
    is sampled that a grammar has to allow."""

    num_tokens: int
    num_requests: int
    one_token_each: bool
    is_verify: bool
    is_scored: bool
    sampling_mode: SamplingMode
    is_masked: bool = False

    @staticmethod
    def merge(forms: Sequence["StepForm"]) -> "StepForm":
        """The smallest form that holds all of these."""
        return StepForm(
            num_tokens=max(form.num_tokens for form in forms),
            num_requests=max(form.num_requests for form in forms),
            one_token_each=all(form.one_token_each for form in forms),
            is_verify=any(form.is_verify for form in forms),
            is_scored=any(form.is_scored for form in forms),
            sampling_mode=max(form.sampling_mode for form in forms),
            is_masked=any(form.is_masked for form in forms),
        )


class BatchBuilder:
    """Builds batches and owns the table of sampling parameters."""

    def __init__(
        self, buckets: Buckets, table: ReqToTokenPool, *, num_request_slots: int, page_size: int, vocab_size: int
    ) -> None:
        self._buckets, self._table, self._page_size, self._vocab_size = buckets, table, page_size, vocab_size
        self._words = np.zeros(
            (len(_FLOAT_COLUMNS) + len(_INT_COLUMNS), num_request_slots), np.int32
        )  # floats as their bits
        self._seeds = np.zeros((num_request_slots, 2), np.uint32)
        self._columns = _to_columns(self._words)
        self._columns["top_p"][0] = self._columns["repetition"][0] = 1.0
        most = max(buckets.max_requests, *buckets.extend, *(tokens for _, tokens in buckets.verify))
        self._count = np.arange(most + 1, dtype=np.int32)
        self.num_mask_words = -(-vocab_size // 32)  # of the tokens that a row may sample
        self._cached_layout: _BatchLayout | None = None  # of the last step; None after a request was given a slot

    def register(self, req: Req) -> None:
        """Store the sampling parameters of a request that has just been given a slot."""
        sampling, columns, slot = req.source.sampling, self._columns, req.slot
        columns["temperature"][slot], columns["top_p"][slot] = sampling.temperature, sampling.top_p
        columns["min_p"][slot], columns["top_k"][slot] = sampling.min_p, sampling.top_k
        columns["presence"][slot], columns["frequency"][slot] = sampling.presence_penalty, sampling.frequency_penalty
        columns["repetition"][slot], columns["prompt_len"][slot] = sampling.repetition_penalty, req.prompt_len
        columns["choice"][slot], self._seeds[slot] = req.source.choice, sampling.seed_words
        self._cached_layout = None

    def form(
        self, chunks: Sequence[ScheduledChunk], *, all_generated: bool = False, is_ahead: bool = False
    ) -> StepForm:
        """The form of a step of these chunks; see `build`."""
        total = sum([chunk.count for chunk in chunks])
        is_scored = not all_generated and any(map(has_scored_prompt_tokens, chunks))
        # also of chunks that sample nothing: FULL counts every token fed
        modes = [chunk.req.required_mode(chunk.num_forced) for chunk in chunks]
        return StepForm(
            num_tokens=total,
            num_requests=len(chunks),
            one_token_each=total == len(chunks) and not is_scored,
            is_verify=is_ahead or any(chunk.drafts is not None for chunk in chunks),
            is_scored=is_scored,
            sampling_mode=max(modes),
            is_masked=any([chunk.is_masked for chunk in chunks]),
        )

    def build(
        self,
        chunks: Sequence[ScheduledChunk],
        form: StepForm | None = None,
        *,
        step: int,
        all_generated: bool = False,
        drafts_ahead: bool = False,
        is_ahead: bool = False,
        texts: Texts | None = None,
    ) -> ModelWorkerBatch:
        """Pad the chunks, in their order, to the smallest bucket that holds `form`: that of all data ranks, None: their
        own. No chunks are a batch of padding. `all_generated`: no chunk feeds a token of a prompt; `drafts_ahead`: a
        model drafts for the next step; `is_ahead`: chunks begin at 0, where their requests stand on the device, and
        `locate` completes the batch; `texts`: that its drafts are from, None: a model has drafted."""
        form = form or self.form(chunks, all_generated=all_generated, is_ahead=is_ahead)
        counts = [chunk.count for chunk in chunks]
        total = sum(counts)
        mode, padded_tokens, padded_rows = self._shape(form)
        layout = self._layout(chunks, padded_rows)
        seq_lens = np.zeros(padded_rows, np.int32)
        seq_lens[: len(chunks)] = [chunk.start + chunk.count for chunk in chunks]
        starts = np.minimum(self._count[: padded_rows + 1], total)
        token_rows, positions = np.zeros(padded_tokens, np.int32), np.zeros(padded_tokens, np.int32)
        if total == len(chunks):
            token_rows[:total], positions[:total] = self._count[:total], seq_lens[:total] - 1
        else:
            starts[1 : len(chunks) + 1] = np.cumsum(counts)
            starts[len(chunks) + 1 :] = total
            token_rows[:total] = np.repeat(self._count[: len(chunks)], counts)
            positions[:total] = self._count[:total] - (starts[:-1] - seq_lens + np.diff(starts))[token_rows[:total]]
        table = self._table.rows(layout.request_slots)
        return ModelWorkerBatch(
            step=step,
            all_generated=all_generated,
            mode=mode,
            sampling_mode=form.sampling_mode,
            num_tokens=total,
            num_requests=len(chunks),
            token_ids=_unknown(total, padded_tokens) if is_ahead else self._token_ids(chunks, padded_tokens, mode),
            positions=positions,
            token_rows=token_rows,
            kv_slots=self._kv_slots(table, token_rows[:total], positions[:total]),
            query_starts=starts,
            seq_lens=seq_lens,
            request_slots=layout.request_slots,
            page_table=table,
            sampling=self._sampling(chunks, layout, seq_lens, full=form.sampling_mode is SamplingMode.FULL),
            samples=tuple([chunk.samples for chunk in chunks]),
            prompt_targets=_prompt_targets(chunks, padded_tokens) if form.is_scored else None,
            return_routed_experts=layout.return_routed_experts,
            drafts_ahead=drafts_ahead,
            next_tokens=_next_tokens(chunks, padded_rows) if self._buckets.draft_model else None,
            is_ahead=is_ahead,
            continuations=None if texts is None else self._continuations(chunks, texts, padded_rows),
            is_masked=form.is_masked,
            given_ids=_given_ids(chunks, padded_rows),
            given_targets=_given_targets(chunks, padded_tokens) if form.is_scored else None,
        )

    def locate(self, batch: ModelWorkerBatch, starts: Sequence[int]) -> ModelWorkerBatch:
        """Return a batch that is ahead with positions, lengths and KV slots, now that the first position of each
        request is known."""
        first = np.zeros(batch.seq_lens.size, np.int32)
        first[: batch.num_requests] = starts
        positions, seq_lens = batch.positions.copy(), batch.seq_lens + first
        rows = batch.token_rows[: batch.num_tokens]
        positions[: batch.num_tokens] += first[rows]
        return dataclasses.replace(
            batch,
            positions=positions,
            seq_lens=seq_lens,
            kv_slots=self._kv_slots(batch.page_table, rows, positions[: batch.num_tokens]),
            sampling=dataclasses.replace(batch.sampling, position=seq_lens),
        )

    def _kv_slots(
        self, table: Int32[np.ndarray, "B W"], rows: Int32[np.ndarray, " N"], positions: Int32[np.ndarray, " N"]
    ) -> Int64[np.ndarray, " N"]:
        page, offset = np.divmod(positions, self._page_size)
        return table[rows, page].astype(np.int64) * self._page_size + offset

    def _continuations(
        self, chunks: Sequence[ScheduledChunk], texts: Texts, padded_rows: int
    ) -> Int32[np.ndarray, "B C1"]:
        """The text of each row behind the tokens that the host knows, as ModelWorkerBatch has it."""
        table = np.full((padded_rows, 1 + continuation_size(self._buckets.num_drafts)), -1, np.int32)
        for row, chunk in enumerate(chunks):
            text = texts.get(chunk.req.rid, NO_TOKENS)
            table[row, 0], table[row, 1 : 1 + text.size] = chunk.req.num_known, text
        return table

    def _shape(self, form: StepForm) -> tuple[ForwardMode, int, int]:
        """Return (mode, padded tokens, padded requests)."""
        if form.is_verify:
            verify = self._buckets.verify_shape(form.num_tokens, form.num_requests)
            assert verify is not None, (form, self._buckets.verify)
            return ForwardMode.TARGET_VERIFY, *verify
        return self._buckets.shape(form.num_tokens, form.num_requests, all_decode=form.one_token_each)

    def _layout(self, chunks: Sequence[ScheduledChunk], padded: int) -> _BatchLayout:
        """Return the layout of the last step where the same requests are in the same order, else a new one."""
        slots, last = [chunk.req.slot for chunk in chunks], self._cached_layout
        if last is None or last.slots != slots or last.request_slots.size != padded:
            request_slots = np.zeros(padded, np.int32)
            request_slots[: len(chunks)] = slots
            seeds, words = self._seeds[request_slots], self._words[:, request_slots]
            for shared in (request_slots, seeds, words):
                shared.flags.writeable = False
            last = self._cached_layout = _BatchLayout(
                slots=slots,
                request_slots=request_slots,
                seeds=seeds,
                columns=_to_columns(words),
                return_routed_experts=tuple([chunk.req.source.return_routed_experts for chunk in chunks]),
            )
        return last

    def _token_ids(self, chunks: Sequence[ScheduledChunk], padded: int, mode: ForwardMode) -> Int32[np.ndarray, " N"]:
        ids = np.zeros(padded, np.int32)
        if mode is ForwardMode.DECODE:
            ids[: len(chunks)] = [
                chunk.req.tokens[chunk.start] if chunk.start < chunk.req.num_known else FROM_DEVICE for chunk in chunks
            ]
            return ids
        if mode is ForwardMode.TARGET_VERIFY:  # a token that the host knows, and its drafts
            fed = list[int]()
            for chunk in chunks:
                fed.append(int(chunk.req.tokens[chunk.start]))
                if chunk.drafts is not None:
                    fed += chunk.drafts.tolist()
            ids[: len(fed)] = fed
            return ids
        first = 0
        for chunk in chunks:
            following = chunk.forced  # of what the request has
            known = chunk.start + chunk.count - (0 if following is None else following.size)
            ids[first : first + chunk.count] = (
                chunk.req.tokens[chunk.start : chunk.start + chunk.count]
                if known <= chunk.req.num_known
                else FROM_DEVICE
            )
            if following is not None:
                ids[first + known - chunk.start : first + chunk.count] = following
            first += chunk.count
        return ids

    def _sampling(
        self, chunks: Sequence[ScheduledChunk], layout: _BatchLayout, seq_lens: Int32[np.ndarray, " B"], *, full: bool
    ) -> SamplingArrays:
        bias_ids: Int32[np.ndarray, "B X"] | None = None
        bias_values: Float[np.ndarray, "B X"] | None = None
        if full:
            bias_ids = np.full((seq_lens.size, MAX_BIAS), self._vocab_size, np.int32)
            bias_values = np.zeros((seq_lens.size, MAX_BIAS), np.float32)
            for index, chunk in enumerate(chunks):
                for entry, (token, value) in enumerate(chunk.req.bias_now(chunk.num_forced)):
                    bias_ids[index, entry], bias_values[index, entry] = token, value
        return SamplingArrays(
            seed=layout.seeds, position=seq_lens, bias_ids=bias_ids, bias_values=bias_values, **layout.columns
        )


def _to_columns(words: Int32[np.ndarray, "C B"]) -> dict[str, np.ndarray]:
    """Return views of the table's rows by name, each in its own dtype."""
    columns: dict[str, np.ndarray] = {name: words[index].view(np.float32) for index, name in enumerate(_FLOAT_COLUMNS)}
    return columns | {name: words[len(_FLOAT_COLUMNS) + index] for index, name in enumerate(_INT_COLUMNS)}


def _next_tokens(chunks: Sequence[ScheduledChunk], padded: int) -> Int32[np.ndarray, " B"]:
    """Return the token that follows each chunk that does not sample, -1 for the others."""
    following = np.full(padded, -1, np.int32)
    for index, chunk in enumerate(chunks):
        if not chunk.samples:
            following[index] = chunk.req.tokens[chunk.start + chunk.count]
    return following


def _unknown(count: int, padded: int) -> Int32[np.ndarray, " N"]:
    """Return `count` ids that the host does not know, padded."""
    ids = np.zeros(padded, np.int32)
    ids[:count] = FROM_DEVICE
    return ids


def _prompt_targets(chunks: Sequence[ScheduledChunk], padded: int) -> Int32[np.ndarray, " N"]:
    """Return the prompt token that follows each token of the step, or the one that a grammar forces, where there is
    one."""
    targets = np.zeros(padded, np.int32)
    first = 0
    for chunk in chunks:
        last = min(chunk.start + chunk.count + 1, chunk.req.prompt_len)
        following = chunk.req.tokens[chunk.start + 1 : last] if chunk.forced is None else chunk.forced
        targets[first : first + following.size] = following
        first += chunk.count
    return targets


def _given_ids(chunks: Sequence[ScheduledChunk], padded: int) -> Int32[np.ndarray, "B G"] | None:
    """Return the ids whose logprobs the requests that sample ask for; None where none does."""
    if not any([chunk.samples and chunk.req.source.token_ids_logprob for chunk in chunks]):
        return None
    ids = np.zeros((padded, MAX_GIVEN_IDS), np.int32)
    for row, chunk in enumerate(chunks):
        own = chunk.req.source.token_ids_logprob
        ids[row, : len(own)] = own
    return ids


def _given_targets(chunks: Sequence[ScheduledChunk], padded: int) -> Int32[np.ndarray, "G N"] | None:
    """Return the same ids for every token of a chunk that is scored, an id a row; None where no request names some."""
    ids_of_chunks = [chunk.req.source.token_ids_logprob if has_scored_prompt_tokens(chunk) else () for chunk in chunks]
    if not any(ids_of_chunks):
        return None
    targets = np.zeros((max(map(len, ids_of_chunks)), padded), np.int32)
    first = 0
    for chunk, own in zip(chunks, ids_of_chunks, strict=True):
        targets[: len(own), first : first + chunk.count] = np.array(own, np.int32)[:, None]
        first += chunk.count
    return targets


def has_scored_prompt_tokens(chunk: ScheduledChunk) -> bool:
    """Whether the chunk holds prompt tokens whose successors' logprobs were requested, or forced ones whose own
    were."""
    if chunk.forced is not None:
        return chunk.req.source.return_logprob
    return not chunk.req.is_prefilled and chunk.req.wants_prompt_logprobs and chunk.start < chunk.req.prompt_len - 1
