"""RequestOutput: SequenceStates in vLLM's words, at the end of a call or as a stream, with the record beside the
arrays.

Dims: R rows, P prompt rows, G generated rows, M MoE layers, K experts per token."""

import dataclasses
import functools
import math
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from jaxtyping import Int16

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError, RoutingFormatError
from routed_experts.core.io_struct import StrOut
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.weight_version import WeightRun, cut_runs
from routed_experts.engine.requests.generation import AsyncGeneration
from routed_experts.engine.requests.sequence_state import SequenceState, TokenLogprob, TopLogprobs
from routed_experts.engine.requests.weight_fields import output_runs

OUTPUT_KINDS = ("delta", "cumulative", "final")
MAX_INT16_EXPERTS = 32_768


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The logprob of one token at one position. `rank` counts from 1 among the alternatives; None for a token that is
    not one of them."""

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Output tokens [start, end) that were sampled by one version of the weights: its label, and the engine's count of
    its update, which no other update has."""

    version: str
    start: int
    end: int
    update_count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One choice. `token_ids` include the stop token that ended it; `logprobs` is None unless requested.

    `record` is the routing of the whole sequence, prompt rows included; None if it was not requested or the choice has
    not ended, and without rows if it was aborted before its first token. `weight_versions` say which weights sampled
    which output tokens, `prefill_weight_versions` which fed which tokens of the prompt; both begin at 0."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    record: RoutedExperts | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[WeightSpan, ...]
    prefill_weight_versions: tuple[WeightSpan, ...]

    @functools.cached_property
    def prompt_routed_experts(self) -> Int16[np.ndarray, "P M K"] | None:
        """Rows of the prompt's tokens from the requested start on, as this choice was prefilled; None without a record.
        Raises as routed_experts does."""
        return None if self.record is None else _as_int16(self.record.prompt)

    @functools.cached_property
    def routed_experts(self) -> Int16[np.ndarray, "G M K"] | None:
        """Rows of the generated tokens; the last token was never fed and has none. Raises RoutingFormatError above
        32,768 experts."""
        return None if self.record is None else _as_int16(self.record.generated)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The choices of one prompt. `metrics` are seconds."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: dict[str, float]

    @functools.cached_property
    def prompt_routed_experts(self) -> Int16[np.ndarray, "P M K"] | None:
        """Rows of the prompt's tokens from the requested start on, of the first choice that has them: one that was
        aborted before its first token has none. Those of another choice, outputs[i].prompt_routed_experts, may differ:
        by other weights, by capacities, or by rounding in a batch of another shape. Raises as routed_experts does."""
        rows = [output.record.prompt for output in self.outputs if output.record is not None]
        return None if not rows else _as_int16(next((record for record in rows if record.num_rows), rows[0]))


def request_output(sequences: Sequence[SequenceState], prompt: str | None) -> RequestOutput:
    """The choices of one prompt, ended or as far as they are."""
    first = sequences[0]
    with_prompt = next((sequence for sequence in sequences if sequence.input_logprobs is not None), first)
    return RequestOutput(
        request_id=first.request.call_id,
        prompt=prompt,
        prompt_token_ids=tuple(first.request.input_ids.tolist()),
        prompt_logprobs=_prompt_logprobs(with_prompt),
        outputs=tuple(_completion(sequence) for sequence in sequences),
        finished=all(sequence.finish_reason is not None for sequence in sequences),
        num_cached_tokens=first.last.cached_tokens,
        metrics={"e2e_latency": max(sequence.latency_s for sequence in sequences)},
    )


def check_stream(params: SamplingParams | None, kind: str) -> None:
    """Raise InvalidRequestError for what a stream of RequestOutputs does not take."""
    if kind not in OUTPUT_KINDS:
        text = f"{PARAM}={short_repr(kind)} is unknown; choose one of {', '.join(OUTPUT_KINDS)}"
        raise InvalidRequestError(text, param="output_kind")
    check_arrays(params)


def check_arrays(params: SamplingParams | None) -> None:
    """Raise InvalidRequestError for a wire format: the rows of a RequestOutput are arrays."""
    if params is not None and params.routed_experts_format is not None:
        text = f"{PARAM}={short_repr(params.routed_experts_format)} is for the wire; here rows are arrays: leave it out"
        code = "ref_unavailable" if params.routed_experts_format == "ref" else "unsupported_parameter"
        raise InvalidRequestError(text, param="routed_experts_format", code=code)


async def stream_outputs(
    open_call: Callable[[], AsyncGeneration], prompt: str | None, *, kind: str
) -> AsyncIterator[RequestOutput]:
    """Run the call of one prompt. Leaving early aborts it, and so does an error of one choice."""
    call = open_call()
    first: dict[int, RequestOutput] = {}  # the first output of each choice
    try:
        await call.submit()
        async for index, output in call.outputs():
            sequence = call.sequences[index]
            if kind == "delta" and index in first:
                yield _delta(first[index], sequence, output)
            elif kind != "final":
                current = request_output([sequence], prompt)
                first.setdefault(index, current)
                yield current
        if kind == "final":
            yield request_output(call.sequences, prompt)
    finally:
        call.abort()


def _delta(first: RequestOutput, sequence: SequenceState, output: StrOut) -> RequestOutput:
    """What one output adds to a choice whose first output was `first`. Work is linear in what it adds."""
    has_prompt_logprobs = first.prompt_logprobs is None and output.out.input_logprobs is not None
    return dataclasses.replace(
        first,
        prompt_logprobs=_prompt_logprobs(sequence) if has_prompt_logprobs else None,
        outputs=(_completion(sequence, output),),
        finished=sequence.finish_reason is not None,
        num_cached_tokens=sequence.last.cached_tokens,
        metrics={"e2e_latency": sequence.latency_s},
    )


def _completion(sequence: SequenceState, delta: StrOut | None = None) -> CompletionOutput:
    """A choice with all that it has, or with the text, tokens and logprobs of its last output, `delta`, alone."""
    text, token_ids = (sequence.text, sequence.token_ids) if delta is None else (delta.text, delta.out.new_token_ids)
    reason, logprobs = sequence.finish_reason, None
    returns_logprobs = sequence.request.return_logprob
    if returns_logprobs:
        new = slice(sequence.num_tokens - len(token_ids), None)
        entries = _logprobs(sequence.output_logprobs[new], sequence.output_top_logprobs[new])
        logprobs = [entry or {} for entry in entries]
    return CompletionOutput(
        index=sequence.request.choice,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=sequence.cumulative_logprob if returns_logprobs else None,
        logprobs=logprobs,
        record=sequence.record,
        finish_reason=None if reason is None else reason.type,
        stop_reason=None if reason is None else reason.matched,
        weight_versions=_weight_versions(sequence),
        prefill_weight_versions=_prefill_weight_versions(sequence),
    )


def _prompt_logprobs(sequence: SequenceState) -> list[TokenLogprobs | None] | None:
    entries = sequence.input_logprobs
    return None if entries is None else _logprobs(entries, sequence.input_top_logprobs)


def _logprobs(entries: Sequence[TokenLogprob], tops: Sequence[TopLogprobs]) -> list[TokenLogprobs | None]:
    """Each token and its alternatives, by token id; None for the first token of a prompt."""
    return [_by_token_id(entry, top) for entry, top in zip(entries, tops, strict=True)]


def _by_token_id(entry: TokenLogprob, top: TopLogprobs) -> TokenLogprobs | None:
    if entry.logprob is None and not top:
        return None
    ranked = {
        other.token_id: Logprob(logprob=_number(other.logprob), rank=rank, decoded_token=other.text)
        for rank, other in enumerate(top or [], start=1)
    }
    own = Logprob(logprob=_number(entry.logprob), rank=None, decoded_token=entry.text)
    ranked.setdefault(entry.token_id, own)
    return ranked


def _number(value: float | None) -> float:
    """A logprob; None is minus infinity."""
    return -math.inf if value is None else value


def _weight_versions(sequence: SequenceState) -> tuple[WeightSpan, ...]:
    """Which weights sampled which output tokens."""
    return _spans(output_runs(sequence, sequence.num_tokens))


def _prefill_weight_versions(sequence: SequenceState) -> tuple[WeightSpan, ...]:
    """Which weights fed which tokens of the prompt."""
    return _spans(cut_runs(sequence.weight_runs(), 0, sequence.last.prompt_tokens))


def _spans(runs: Sequence[WeightRun]) -> tuple[WeightSpan, ...]:
    return tuple(
        WeightSpan(version=run.version.label, start=run.start, end=run.end, update_count=run.version.update_count)
        for run in runs
    )


def _as_int16(record: RoutedExperts) -> Int16[np.ndarray, "R M K"]:
    if record.num_experts > MAX_INT16_EXPERTS:
        raise RoutingFormatError(
            f"{record.num_experts} experts do not fit int16; read `record`, whose ids are {record.ids.dtype}"
        )
    return record.ids.astype(np.int16)
