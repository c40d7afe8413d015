"""RequestOutput and CompletionOutput: answers as vLLM's users know them, with the record beside the arrays. Knows no
engine.

Dims: P prompt rows, G generated rows, M MoE layers, K experts per token."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Int16

from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.io_struct import FinishReason
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.sequence_state import SequenceState

MAX_INT16_EXPERTS = 32_768


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The logprob of one token at one place. `rank` counts from 1 among the alternatives; None for one that is not
    among them."""

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Output tokens [start, end) that were sampled under one version of the weights."""

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One choice. `token_ids` hold a stop token that was met; `logprobs` None unless asked for.

    `record` is the whole routing of the sequence, prompt rows included; None where none was asked for, or none was
    generated."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    record: RoutedExperts | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[WeightSpan, ...]

    @functools.cached_property
    def routed_experts(self) -> Int16[np.ndarray, "G M K"] | None:
        """Rows of the generated tokens, gen_len - 1: the last token was never fed. Raises RoutingFormatError above
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
        """Rows of the prompt's tokens from the start that was asked for on; one for all choices. Raises as
        routed_experts does."""
        record = self.outputs[0].record
        return None if record is None else _as_int16(record.prompt)

    def to_sglang(self) -> list[dict[str, Any]]:
        """One dict a choice, as `Engine.generate` gives them, without rows and logprobs."""
        return [
            {
                "text": output.text,
                "output_ids": list(output.token_ids),
                "meta_info": {
                    "id": self.request_id,
                    "prompt_tokens": len(self.prompt_token_ids),
                    "completion_tokens": len(output.token_ids),
                    "cached_tokens": self.num_cached_tokens,
                    "finish_reason": _sglang_reason(output),
                },
            }
            for output in self.outputs
        ]


def request_output(answers: Sequence[SequenceState], prompt: str | None) -> RequestOutput:
    """Join answers of one prompt's choices: ended ones, or what one that runs has told so far."""
    first = answers[0]
    said = [answer.to_dict() for answer in answers]
    meta = cast("list[dict[str, Any]]", [one["meta_info"] for one in said])
    told = meta[0].get("input_token_logprobs")
    return RequestOutput(
        request_id=first.request.group.rpartition("-")[0],
        prompt=prompt,
        prompt_token_ids=tuple(first.request.input_ids.tolist()),
        prompt_logprobs=None if told is None else _logprobs(told, meta[0].get("input_top_logprobs")),
        outputs=tuple(_completion(answer, one) for answer, one in zip(answers, said, strict=True)),
        finished=all(answer.finish_reason is not None for answer in answers),
        num_cached_tokens=first.counts.cached_tokens,
        metrics={"e2e_latency": max(float(one["e2e_latency"]) for one in meta)},
    )


def _completion(answer: SequenceState, said: dict[str, Any]) -> CompletionOutput:
    meta, reason = said["meta_info"], answer.finish_reason
    told: list[list[Any]] | None = meta.get("output_token_logprobs")
    logprobs = None if told is None else [one or {} for one in _logprobs(told, meta.get("output_top_logprobs"))]
    return CompletionOutput(
        index=answer.request.choice,
        text=said["text"],
        token_ids=answer.token_ids,
        cumulative_logprob=None if told is None else sum(_number(entry[0]) for entry in told),
        logprobs=logprobs,
        record=answer.record,
        finish_reason=None if reason is None else reason.type,
        stop_reason=None if reason is None else reason.matched,
        weight_versions=_weight_versions(answer),
    )


def _logprobs(told: list[list[Any]], tops: list[list[list[Any]] | None] | None) -> list[TokenLogprobs | None]:
    """[logprob, id, text] entries and their alternatives, by token id; None for the first token of a prompt."""
    found: list[TokenLogprobs | None] = []
    for entry, top in zip(told, tops or [None] * len(told), strict=True):
        if entry[0] is None and not top:
            found.append(None)
            continue
        ranked = {
            one[1]: Logprob(logprob=_number(one[0]), rank=rank, decoded_token=one[2])
            for rank, one in enumerate(top or [], start=1)
        }
        ranked.setdefault(entry[1], Logprob(logprob=_number(entry[0]), rank=None, decoded_token=entry[2]))
        found.append(ranked)
    return found


def _number(value: float | None) -> float:
    """A logprob; None stands for minus infinity."""
    return -math.inf if value is None else value


def _weight_versions(answer: SequenceState) -> tuple[WeightSpan, ...]:
    """Which weights sampled which output tokens. Output token j was sampled by the pass that fed the token before
    it."""
    count, record = len(answer.token_ids), answer.record
    if record is None:
        return (WeightSpan(version=answer.counts.weight_version, start=0, end=count),) if count else ()
    before = record.num_prompt_tokens - 1
    spans = [(max(low - before, 0), min(high - before, count), version) for low, high, version in record.version_spans]
    return tuple(WeightSpan(version=version, start=low, end=high) for low, high, version in spans if low < high)


def _as_int16(record: RoutedExperts) -> Int16[np.ndarray, "R M K"]:
    if record.num_experts > MAX_INT16_EXPERTS:
        raise RoutingFormatError(
            f"{record.num_experts} experts do not fit int16; read `record`, whose ids are {record.ids.dtype}"
        )
    return record.ids.astype(np.int16)


def _sglang_reason(output: CompletionOutput) -> dict[str, object]:
    matched = output.stop_reason if output.finish_reason == "stop" else None
    length = len(output.token_ids) if output.finish_reason == "length" else None
    return FinishReason(type=str(output.finish_reason), matched=matched, length=length).to_dict()
