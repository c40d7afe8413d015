"""Apply the result of a step to a request: its new tokens with their logprobs, and its end."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from routed_experts.core.io_struct import FinishReason
from routed_experts.core.model_worker_batch import ModelWorkerBatch, StepResult
from routed_experts.scheduling.schedule_batch import Req, ReqState, ScheduledChunk

StopMatcher = Callable[[Req], str | None]  # the stop string that a request's newest token completes
_Entry = tuple[float, tuple[tuple[float, int], ...] | None]  # of a token: its logprob and the best alternatives


def no_stop_strings(_: Req) -> str | None:
    """The matcher of requests without stop strings."""
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step sampled, by row, and their logprobs: those of `result`, as lists."""

    tokens: list[int]
    logprobs: list[float]
    result: StepResult


def commit_run(
    req: Req, chunk: ScheduledChunk, rows: range, sampled: SampledTokens, match_stop_string: StopMatcher
) -> int:
    """Append the tokens that a verify step adds to a request, accepted drafts first: `rows` of the sampled tokens.
    Returns how many of the chunk's tokens have rows to file: those of the sequence that were fed. A request that ends
    inside of the run is left as a step without drafts leaves it: its last token counts as fed where its row is
    requested."""
    req.num_pending -= 1
    if req.pending_finish is not None:  # only its last token is of the sequence
        req.num_committed = req.num_dispatched = chunk.start + 1
        req.finish(req.pending_finish)
        return 1
    known = req.num_known
    if not _append_at_once(req, rows, sampled):
        for row in rows:
            append_token(req, sampled.tokens[row], sampled.logprobs[row], row, sampled.result, match_stop_string)
            if req.state is ReqState.FINISHED or req.pending_finish is not None:
                break
    emitted, proposed = req.num_known - known, chunk.count - 1
    num_fed = min(chunk.start + len(rows), req.num_known)  # of the tokens that the request has now
    include_last = req.source.routed_experts.include_last
    req.num_committed = req.num_dispatched = num_fed if include_last else min(num_fed, req.num_known - 1)
    if proposed:
        req.speculative.add(proposed=proposed, accepted=min(emitted, len(rows) - 1), emitted=emitted)
    if req.last_row_ready and req.pending_finish is not None:
        req.finish(req.pending_finish)
    return req.num_committed - chunk.start


def commit_forced(
    req: Req,
    chunk: ScheduledChunk,
    index: int,
    batch: ModelWorkerBatch,
    result: StepResult,
    match_stop_string: StopMatcher,
) -> int:
    """Append the forced tokens of a chunk, with the logprobs that a prompt has, then the sampled one. A request that
    ends before has none of the later ones, as if each had been fed alone. Returns how many of the chunk's tokens have
    rows to file."""
    assert chunk.forced is not None, req.rid
    req.num_pending -= 1 + chunk.forced.size
    if req.pending_finish is not None:  # only its last token is of the sequence
        req.num_committed = req.num_dispatched = chunk.start + 1
        req.finish(req.pending_finish)
        return 1
    first = int(batch.query_starts[index])
    for offset, token in enumerate(chunk.forced.tolist()):
        entry = None if result.prompt_logprobs is None else _prompt_entry(req, first + offset, result)
        _append_known(req, token, entry, match_stop_string)
        if req.state is ReqState.FINISHED or req.pending_finish is not None:
            break
    else:
        append_token(req, int(result.tokens[index]), float(result.logprobs[index]), index, result, match_stop_string)
    num_fed = min(chunk.start + chunk.count, req.num_known)
    include_last = req.source.routed_experts.include_last
    req.num_committed = num_fed if include_last else min(num_fed, req.num_known - 1)
    if req.last_row_ready and req.pending_finish is not None:
        req.num_dispatched = req.num_committed
        req.finish(req.pending_finish)
    return req.num_committed - chunk.start


def live_tokens(chunks: Sequence[ScheduledChunk], rows: list[int]) -> Bool[np.ndarray, " num_tokens"] | None:
    """A mask of the first `rows` tokens of each chunk; None for all."""
    counts = [chunk.count for chunk in chunks]
    if counts == rows:
        return None
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) < np.repeat(ends - counts + rows, counts)


def _append_at_once(req: Req, rows: range, sampled: SampledTokens) -> bool:
    """Append the tokens of these rows as `append_token` does one by one, where none of them can end the request and
    nothing but logprobs goes with them; else do nothing and return False."""
    source, end = req.source, req.num_known + len(rows)
    if req.has_stop_strings or req.grammar is not None or end >= req.max_len:
        return False
    if source.return_logprob and (source.top_logprobs_num or source.token_ids_logprob):
        return False
    tokens = sampled.tokens[rows.start : rows.stop]
    if not source.stop_token_ids.isdisjoint(tokens):
        return False
    req.tokens[req.num_known : end] = tokens
    req.num_known = end
    if source.return_logprob:
        req.output_logprobs += sampled.logprobs[rows.start : rows.stop]
        req.output_top += [None] * len(tokens)
    return True


def append_token(
    req: Req, token: int, logprob: float, index: int, result: StepResult, match_stop_string: StopMatcher
) -> None:
    """Append a sampled token, and finish the request if it was its last."""
    if req.grammar is not None:
        req.grammar.accept(token)
    top = _top(result.top_logprobs, result.top_ids, index, req.source.top_logprobs_num)
    if req.source.token_ids_logprob:
        assert result.given_logprobs is not None, req.rid
        top = _with_given(req, top, result.given_logprobs[index])
    _append_known(req, token, (logprob, top), match_stop_string)


def _append_known(req: Req, token: int, entry: _Entry | None, match_stop_string: StopMatcher) -> None:
    """Append a token, and finish the request if it was its last. A stop string takes precedence over a length. The end
    token of a complete output ends it also before min_tokens and with ignore_eos."""
    req.tokens[req.num_known] = token
    req.num_known += 1
    if req.source.return_logprob:
        assert entry is not None, req.rid
        req.output_logprobs.append(entry[0])
        req.output_top.append(entry[1])
    is_complete = req.grammar is not None and req.grammar.is_complete
    if is_complete or (token in req.source.stop_token_ids and req.num_known >= req.min_stop_len):
        req.end(FinishReason(type="stop", matched=token))
    elif req.num_known == req.max_len:
        req.end(FinishReason(type="length", length=req.num_output))
    matched = match_stop_string(req)
    if matched is not None:
        req.stop_at(matched)


def add_prompt_logprobs(req: Req, chunk: ScheduledChunk, first: int, result: StepResult) -> None:
    """Store the logprobs of the prompt tokens that follow this chunk's tokens; the first pass that computes one
    wins."""
    assert result.prompt_logprobs is not None, req.rid
    start = max(req.source.logprob_start_len, 1)
    for position in range(max(chunk.start, start - 1), min(chunk.start + chunk.count, req.prompt_len - 1)):
        index = first + position - chunk.start
        req.input_logprobs.setdefault(position + 1, _prompt_entry(req, index, result))


def _prompt_entry(req: Req, index: int, result: StepResult) -> _Entry:
    """Logprob and best alternatives of the token that follows row `index` of a step and was fed, not sampled."""
    assert result.prompt_logprobs is not None, req.rid
    top = _top(result.prompt_top_logprobs, result.prompt_top_ids, index, req.source.top_logprobs_num)
    if req.source.token_ids_logprob:
        assert result.prompt_given_logprobs is not None, req.rid
        top = _with_given(req, top, result.prompt_given_logprobs[:, index])
    return float(result.prompt_logprobs[index]), top


def _with_given(
    req: Req, top: tuple[tuple[float, int], ...] | None, logprobs: Float[np.ndarray, " G"]
) -> tuple[tuple[float, int], ...]:
    """Return the best alternatives, then the ids that the request names."""
    token_ids = req.source.token_ids_logprob
    return (*(top or ()), *((float(logprobs[index]), token) for index, token in enumerate(token_ids)))


def _top(
    values: np.ndarray | None, ids: np.ndarray | None, index: int, count: int
) -> tuple[tuple[float, int], ...] | None:
    """Return the best `count` (logprob, id) of one row."""
    if count == 0 or values is None or ids is None:
        return None
    return tuple(
        (float(value), int(token)) for value, token in zip(values[index, :count], ids[index, :count], strict=True)
    )
