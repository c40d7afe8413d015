"""What travels between the rooms of an engine: a request on its way in, tokens and text on their way out.
Knows nothing of HTTP; the flag `return_routed_experts` is carried end to end.

GenerateReqInput (as the caller said it) -> TokenizedGenerateReqInput (one sequence, checked) -> BatchTokenIDOut (per
step)
-> BatchStrOut (per request, with text)."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import ResolvedSampling, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExpertsRequest:
    """What a request wants of its routing: its request fields, resolved. `start` is in tokens."""

    asked: bool = False
    start: int = 0
    format: str = "int32"
    layers: str = "all"
    stream: bool = False  # rows as they come
    include_last: bool = False  # feed the last token too, for its row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReqInput:
    """One call as the caller said it: one prompt or many, as text or as token ids."""

    text: str | Sequence[str] | None = None
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    sampling_params: SamplingParams | Mapping[str, object] | None = None
    max_new_tokens: int | None = None
    rid: str | None = None
    extra_key: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    routed_experts_format: str | None = None
    routed_experts_layers: str | None = None
    routed_experts_stream: bool | None = None
    routed_experts_include_last: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedGenerateReqInput:
    """One sequence that has passed every check at the door. `choice` is its index among the n of a prompt."""

    rid: str
    group: str  # requests of one prompt share it, and wait for the first one's prefill
    choice: int
    input_ids: Int[np.ndarray, " S"]
    sampling: ResolvedSampling  # its max_tokens is this request's limit
    stop_token_ids: frozenset[int]  # those of the request and, unless ignore_eos, those of the model
    extra_key: str | None
    stream: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    routed_experts: RoutedExpertsRequest
    stream_interval_s: float = (
        0.0  # news of a stream is told once an interval of the clock; the first token and the end wait for nothing
    )

    @property
    def return_routed_experts(self) -> bool:
        """Does this request want its rows."""
        return self.routed_experts.asked


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a request ended: stop (with what matched), length, abort, timeout or error (with a message)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The form of `meta_info.finish_reason`."""
        said = {"type": self.type, "matched": self.matched, "length": self.length, "message": self.message}
        return {key: value for key, value in said.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Logprobs of a span of tokens: one value and the top alternatives (logprob, id) of each."""

    values: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[float, int], ...] | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReroutingCounts:
    """Expert slots of a request that capacities moved to an expert outside their token's K best, and slots that they
    left empty."""

    rerouted_slots: int
    dropped_slots: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenIDOut:
    """News of one request after a step; `routed_experts` only with the last. `exact` False: experts were added a layer
    late, or capacities changed some, so far; `departed`: how many of these, None where there are no capacities."""

    rid: str
    new_token_ids: tuple[int, ...]
    output_logprobs: Logprobs
    input_logprobs: Logprobs | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: int
    finish_reason: FinishReason | None
    return_routed_experts: bool
    routed_experts: RoutedExperts | None
    error: Exception | None = None
    exact: bool = True
    rerouting: ReroutingCounts | None = None
    queue_s: float | None = None  # from acceptance to the first step; None for one that never ran


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokenIDOut:
    """News of every request that a step advanced."""

    step: int
    outs: tuple[TokenIDOut, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchStrOut:
    """News of one request with its text; `text` is the increment since the last."""

    out: TokenIDOut
    text: str
